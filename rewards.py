r"""Rewards: rules, your own functions and remote scorers turn each response into one finite number.

The problem. A reward function is foreign code, run on text of a policy that finds its weak spots:
a search that never ends, an import that eats the memory, one None among 8 siblings that makes 8
advantages NaN. And 256 samples of 50 ms, one after another, are 12.8 s of idle GPU in each step.

How it works. Scorer keeps num_workers processes that run this file alone, without torch. Each is
fed by one thread:
    submit(3, {"response": ...}) -> thread -> pipe -> worker -> [[0.5, ""]] -> collect
    silent for time_limit_s: its process group is killed and replaced -> "no result within 5 s"
A reward is one number that is finite in fp32: Python's, NumPy's, or a tensor of one element.
Anything else (None, NaN, 1e39, an exception, a hang) is an error. An error counts as error_reward
and in error_frac, and the first of each function is printed. collect raises when more than
max_error_frac of a function's samples fail.

Functions, by spec. (Reward models are no spec: they run on the trainer's ranks.)
    math              math_reward of the file answers.py beside this one
    exact             exact_reward of that file: the stripped response is the answer
    reasoning_gym     gym_reward of that file: the verifier of the data set that made the sample
    path.py:function  yours, sync or async. Its parameters are named after columns: prompt,
                      response, answer, truncated, any of the data. A function with a parameter
                      responses or completions gets lists, of the whole batch, and returns a list.
    http://host/path  the sample is posted as JSON, the reply is {"reward": number}; 3 attempts

What we give up. There is no sandbox against malice. A process that leaves its worker's group
lives on. Memory is limited for each process, not for all of them together.
"""

import contextlib
import faulthandler
import importlib
import inspect
import json
import math
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, ClassVar
from weakref import WeakSet

FILE = os.path.abspath(__file__)
BUILT_IN = {"math": "math_reward", "exact": "exact_reward", "reasoning_gym": "gym_reward"}
START_LIMIT_S = 120
TIMEOUT = "no result within"
MAX_REWARD = 3.4028234663852886e38  # of fp32; above it advantages are NaN
BATCH = {"responses", "completions"}
ALIASES = {"prompts": "prompt", "responses": "response", "completions": "response"}  # TRL's names
ALIASES |= {"solution_str": "response", "answers": "answer", "ground_truth": "answer"}  # verl's
Outcome = tuple[float | None, str]  # (reward, "") or (None, what went wrong)
Scores = tuple[list[float], dict[str, float]]  # rewards and stats


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = ("math",)
    """math, exact, reasoning_gym, path.py:function or http://host/path; several are added up."""
    weights: tuple[float, ...] = ()
    """Weight of each function in the sum, in the same order; empty: 1 for each."""
    num_workers: int = 4
    """Worker processes per rank: so many samples or remote requests are in work at once."""
    time_limit_s: float = 5.0
    """Seconds for a sample, after which its worker is killed and replaced. A batch of n samples
    may take n / num_workers times as long."""
    memory_limit_mb: int = 4096
    """MB of address space that a worker may take on top of its imports; 0: no limit."""
    error_reward: float = 0.0
    """What a failed call counts as in the sum."""
    max_error_frac: float = 0.25
    """The run stops when a larger share of a function's samples fails in one step; 1: never."""

    def __post_init__(self):
        distinct = {_short(name) for name in self.functions}
        num = len(self.functions)
        self._require("functions", 0 < len(distinct) == num, "at least one, of different names")
        self._require("weights", len(self.weights) in (0, num), "none, or one for each function")
        self._require("weights", all(map(_fits, self.weights)), "finite in fp32")
        self._require("error_reward", _fits(self.error_reward), "finite in fp32")
        self._require("num_workers", self.num_workers >= 1, "at least 1")
        self._require("time_limit_s", self.time_limit_s >= 0.01, "at least 0.01")
        self._require("memory_limit_mb", self.memory_limit_mb >= 0, "at least 0 (no limit)")
        self._require("max_error_frac", self.max_error_frac >= 0, "at least 0")

    def _require(self, name: str, condition: bool, rule: str) -> None:
        if not condition:
            value = getattr(self, name)
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"--reward.{name.replace('_', '-')} {shown}: must be {rule}")


class Scorer:
    """Scores samples while others are still sampled: submit each, then collect the rewards.

    callables   functions by name; the workers are then forks of this process
    wanted      {function: columns that it cannot do without}
    ValueError if a function cannot be loaded.
    """

    def __init__(self, config: RewardConfig, callables: Mapping[str, Callable] = {}):
        self.config = config
        self.callables = callables
        self._samples: dict[int, dict] = {}
        self._futures: dict[tuple[str, int], Any] = {}
        self._shown: set[str] = set()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._threads = ThreadPoolExecutor(config.num_workers)
        try:
            described = list(self._threads.map(self._start, range(config.num_workers)))
        except ValueError:
            self.close()
            raise
        by_name = dict(zip(config.functions, described[0], strict=True))
        self._batched = {name: known["batched"] for name, known in by_name.items()}
        self.wanted = {name: known["required"] for name, known in by_name.items()}

    def _start(self, _: int = 0) -> list[dict]:
        """A new idle worker; returns what it says of each function."""
        config = self.config
        with self._starting:  # a fork in between would hold the new pipe open
            worker = _Worker(self.callables)
        question = (config.functions, config.time_limit_s, config.memory_limit_mb)
        reply = worker.ask(question, START_LIMIT_S)
        self._idle.put(worker)
        if isinstance(reply, str):
            raise ValueError(f"--reward.functions {' '.join(config.functions)}: {reply}")
        return reply

    def submit(self, index: int, sample: dict) -> None:
        """Queues sample `index`: prompt, response, answer, truncated and further columns by name.

        Returns at once.
        """
        assert index not in self._samples, f"sample {index} was submitted twice"
        self._samples[index] = sample
        for name in self.config.functions:
            if not self._batched[name]:
                self._futures[name, index] = self._threads.submit(self._call, name, [sample])

    def _call(self, name: str, samples: list[dict]) -> list[Outcome]:
        rounds = math.ceil(len(samples) / self.config.num_workers)
        limit_s = self.config.time_limit_s * rounds
        worker = self._idle.get()
        reply = worker.ask((self.config.functions.index(name), samples, limit_s), limit_s)
        if isinstance(reply, str):
            worker.kill()
            self._start()
            return [(None, reply)] * len(samples)
        self._idle.put(worker)
        return reply

    def collect(self, num_samples: int) -> Scores:
        """Waits for samples 0..num_samples-1; returns (rewards, stats).

        stats: error_frac, timeout_frac, and <function>_mean of each function.
        RuntimeError if more than max_error_frac of a function's samples fail; the scorer is then
        at its end.
        """
        config = self.config
        complete = sorted(self._samples) == list(range(num_samples))
        assert complete, f"{len(self._samples)} submitted, not {num_samples}"
        samples = [self._samples.pop(index) for index in range(num_samples)]
        rewards = [0.0] * num_samples
        num_errors = 0
        num_timeouts = 0
        stats: dict[str, float] = {}
        weights = config.weights or [1.0] * len(config.functions)
        for name, weight in zip(config.functions, weights, strict=True):
            outcomes = self._outcomes(name, samples)
            num_errors += self._report(name, outcomes, num_samples)
            num_timeouts += sum(error.startswith(TIMEOUT) for _, error in outcomes)
            scores = [config.error_reward if score is None else score for score, _ in outcomes]
            rewards = [total + weight * score for total, score in zip(rewards, scores, strict=True)]
            stats[f"{_short(name)}_mean"] = sum(scores) / max(num_samples, 1)
        sums = [_outcome(reward) for reward in rewards]
        num_errors += self._report("(weighted sum)", sums, num_samples)
        rewards = [config.error_reward if total is None else total for total, _ in sums]
        num_calls = max(num_samples, 1) * len(config.functions)
        stats["error_frac"] = num_errors / num_calls
        stats["timeout_frac"] = num_timeouts / num_calls
        return rewards, stats

    def _outcomes(self, name: str, samples: list[dict]) -> list[Outcome]:
        """Of all samples, or of those up to the error that is one too many."""
        if self._batched[name]:
            return self._call(name, samples) if samples else []
        outcomes: list[Outcome] = []
        num_errors = 0
        limit = self.config.max_error_frac * len(samples)
        for index in range(len(samples)):
            outcomes += self._futures.pop((name, index)).result()
            num_errors += outcomes[-1][0] is None
            if num_errors > limit:  # why wait for the rest to time out?
                break
        return outcomes

    def _report(self, name: str, outcomes: list[Outcome], num_samples: int) -> int:
        """Number of errors; prints the first of each function, raises if there are too many."""
        failed = [index for index, outcome in enumerate(outcomes) if outcome[0] is None]
        if not failed:
            return 0
        count = f"{len(failed)} of {len(outcomes)} samples"
        first = f"sample {failed[0]}: {outcomes[failed[0]][1]}"
        report = f"reward function {name} failed on {count}; {first}"
        if len(failed) > self.config.max_error_frac * num_samples:
            # Else the interpreter waits at its end for all that is queued.
            self._threads.shutdown(wait=False, cancel_futures=True)
            raise RuntimeError(f"--reward.max-error-frac {self.config.max_error_frac}: {report}")
        if name not in self._shown:
            self._shown.add(name)
            print(report, file=sys.stderr, flush=True)
        return len(failed)

    def close(self) -> None:
        """Ends the workers and all that they have started, when the calls in flight are through."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().kill()


def score(functions, samples: list[dict], *, time_limit_s=5.0, num_workers=4) -> Scores:
    """(rewards, stats) of `samples` by one function or a list of them, specs or callables.

    Errors are counted, not raised.
    """
    functions = functions if isinstance(functions, (list, tuple)) else [functions]
    names = tuple(f if isinstance(f, str) else f.__name__ for f in functions)
    callables = {f.__name__: f for f in functions if not isinstance(f, str)}
    config = RewardConfig(names, (), num_workers, time_limit_s, max_error_frac=1.0)
    with contextlib.closing(Scorer(config, callables)) as scorer:
        for index, sample in enumerate(samples):
            scorer.submit(index, sample)
        return scorer.collect(len(samples))


def _short(name: str) -> str:
    """mine.py:f of path/mine.py:f, for the names of metrics."""
    return os.path.basename(name.rstrip("/"))


def _fits(number: float) -> bool:
    return abs(number) <= MAX_REWARD


class _Worker:
    """A process in its own session: a new interpreter on this file, or a fork if asked to call
    functions of this process."""

    ends: ClassVar = WeakSet()  # the trainer's, of the pipes to all workers

    def __init__(self, callables: Mapping[str, Callable]):
        self.connection, theirs = Pipe()
        self.ends.add(self.connection)
        self.code: int | None = None
        if callables:
            self.pid = os.fork()
            if self.pid == 0:
                os.setsid()
                os.dup2(2, 1)
                # Open here, too, they would hide that the trainer is gone.
                for end in list(self.ends):
                    end.close()
                serve(theirs, callables)
            self.wait = lambda: os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        else:
            # Not by multiprocessing, which would import the training script.
            # No GPU: a context for each worker would take 0.5 GB.
            pipe = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, FILE, str(pipe)],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[pipe],
                start_new_session=True,
            )
            self.pid = process.pid
            self.wait = process.wait
        theirs.close()

    def ask(self, question: tuple, limit_s: float) -> list | str:
        """The worker's reply; a string says why there is none."""
        try:
            self.connection.send(question)
            if self.connection.poll(limit_s):
                return json.loads(self.connection.recv_bytes(1 << 26))
            return f"{TIMEOUT} {limit_s:g} s"
        except (EOFError, ConnectionError):
            return f"the process of the function ended, exit code {self.kill()}"
        except (OSError, ValueError):
            return "something else than a reply was written to the worker's pipe"
        except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
            return f"the sample can't be pickled ({error})"

    def kill(self) -> int:
        """Kills the whole group, waits, so that no zombie stays, and returns the exit code."""
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.code = self.wait()
        return self.code


def serve(connection: Connection, callables: Mapping[str, Callable] = {}) -> None:
    """A worker's life: load the functions, then answer calls until the pipe closes.

    Does not return.
    """
    worker = os.getpid()
    silence = os.open(os.devnull, os.O_WRONLY)
    try:
        names, time_limit_s, memory_limit_mb = connection.recv()
        functions, reply = _load_all(names, callables, time_limit_s)
        if memory_limit_mb:
            with open("/proc/self/statm") as statm:
                num_pages = int(statm.read().split()[0])
            limit = num_pages * resource.getpagesize() + (memory_limit_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        while os.getpid() == worker:  # a fork that comes back from a function must not answer, too
            connection.send_bytes(json.dumps(reply).encode())
            index, samples, limit_s = connection.recv()
            # Ends the process if no trainer is left to kill it.
            faulthandler.dump_traceback_later(limit_s + 5, exit=True, file=silence)
            reply = evaluate(functions[index], samples)
            # In a fork there is no watching thread, and cancelling waits for it for ever.
            if os.getpid() == worker:
                faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(ChildProcessError):
                # Forks that have ended are zombies until someone asks for them.
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    finally:
        if os.getpid() == worker:
            os.killpg(worker, signal.SIGKILL)  # and all that the functions have started
        os._exit(0)


def _load_all(
    names: tuple[str, ...], callables: Mapping[str, Callable], time_limit_s: float
) -> tuple[list[Callable], list[dict] | str]:
    """The functions, and what the trainer should know of each; or a line on what went wrong."""
    functions = []
    described = []
    for name in names:
        try:
            function = callables.get(name) or load_function(name, time_limit_s)
            parameters = inspect.signature(function).parameters
        except (Exception, SystemExit) as error:  # importing runs the user's code
            hint = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return [], f"{text}{hint}"
        required = [
            ALIASES.get(key, key)
            for key, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        functions.append(function)
        described.append({"batched": not BATCH.isdisjoint(parameters), "required": required})
    return functions, described


def load_function(spec: str, time_limit_s: float) -> Callable:
    """The function that a spec stands for; ValueError or ImportError if there is none."""
    if spec.startswith(("http://", "https://")):
        return lambda **sample: post(spec, sample, time_limit_s)
    path, _, name = spec.rpartition(":")
    if spec in BUILT_IN:
        path = os.path.join(os.path.dirname(FILE), "answers.py")
        name = BUILT_IN[spec]
    if not os.path.isfile(path):
        missing = f"{path}, which holds {spec}, is not there"
        kinds = f"{', '.join(BUILT_IN)}, file.py:function or a URL"
        raise ValueError(missing if spec in BUILT_IN else f"no file and function {spec!r}: {kinds}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # for its imports beside it
    module = importlib.import_module(os.path.basename(path).removesuffix(".py"))
    if not os.path.samefile(module.__file__, path):
        raise ValueError(f"the name of {path} is taken by {module.__file__}; rename the file")
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name!r}")
    function = getattr(module, name)
    for package in getattr(function, "packages", ()):  # imported before the clock runs
        importlib.import_module(package)
    return function


def evaluate(function: Callable, samples: list[dict]) -> list[Outcome]:
    """The outcome of each sample, by one call of the function."""
    try:
        parameters = inspect.signature(function).parameters
        batched = not BATCH.isdisjoint(parameters)
        columns = _columns(parameters, samples)
        if not batched:
            columns = {name: column[0] for name, column in columns.items()}
        values = function(**columns)
        if inspect.iscoroutine(values):
            values = importlib.import_module("asyncio").run(values)
        if not batched:
            values = [values]
        no_list = isinstance(values, (str, bytes, Mapping, Set))
        if no_list or len(values) != len(samples):
            count = f"{len(samples)} numbers, one for each sample in order"
            raise ValueError(f"returned {values!r:.200}: must be {count}")
        return [_outcome(value) for value in values]
    except SystemExit as error:
        return [(None, f"it called sys.exit({error.code!r})")] * len(samples)
    except Exception:  # the user's code; counted and shown
        return [(None, traceback.format_exc()[-4000:])] * len(samples)


def _columns(parameters: Mapping[str, inspect.Parameter], samples: list[dict]) -> dict[str, list]:
    """{parameter: values of all samples}; None where a sample lacks a column that others have."""
    known = dict.fromkeys(key for sample in samples for key in sample)  # data sets differ
    names = list(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        names += known
    columns = {}
    for name in names:
        column = ALIASES.get(name, name)
        if column in known:
            columns[name] = [sample.get(column) for sample in samples]
    return columns


def _outcome(value: Any) -> Outcome:
    # What __float__ raises: None, a string, a tensor of several elements.
    with contextlib.suppress(Exception):
        if math.isfinite(value) and _fits(float(value)):
            return float(value), ""
    return None, f"returned {value!r:.200}: must be one finite number of fp32"


def post(url: str, sample: dict, time_limit_s: float) -> float:
    """The "reward" in the JSON reply to a POST of the sample; 3 attempts within the time limit."""
    from http.client import HTTPException
    from urllib.request import Request, urlopen

    body = json.dumps(sample, default=str).encode()
    request = Request(url, body, {"Content-Type": "application/json"})
    for attempt in range(3):
        try:
            with urlopen(request, timeout=0.25 * time_limit_s) as reply:
                return json.load(reply)["reward"]
        except (OSError, HTTPException):  # refused, reset, cut, too slow, or an HTTP status
            if attempt == 2:
                raise
            time.sleep(0.05 * 2**attempt * time_limit_s)
    raise AssertionError("the third attempt returns or raises")


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
