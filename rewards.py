r"""Rewards: rules, user functions, remote scorers and reward models turn each response into one finite number.

The problem. A reward function is foreign code, run on text of a policy that finds its weak spots: 9^{9^{9^9}} hangs;
one None among 8 siblings makes 8 advantages NaN; a grader that searches pays for "maybe 41, 42 or 43". And 256 samples
of 50 ms, one after another, are 12.8 s of idle GPU in each step.

How it works. Scorer keeps num_workers processes that run this file alone, without torch, each fed by one thread:
    submit(3, {"response": ...}) -> thread -> pipe -> worker -> [[0.5, ""]] -> collect
    silent for time_limit_s: the worker's process group is killed and replaced -> [[None, "no result within 5 s"]]
A reward is one finite number: Python's, NumPy's, or a tensor of one element. Anything else (None, NaN, an exception, a
hang) is an error: it counts as error_reward and in error_frac, the first of each function is printed, and collect
raises when more than max_error_frac of a function's samples fail.

Functions, by spec (reward models are no spec: they run on the trainer's ranks, by logprobs.model_scores):
    exact             the stripped response is the answer; runs in this process, for it cannot hang
    math              the same text, number or (math-verify) expression
    path.py:function  yours, sync or async, its parameters named after columns: prompt, response, answer, truncated, any
                      of the data. With a parameter responses or completions it gets lists, of the whole batch at once
    reasoning_gym     the verifier of the data set that made the sample's entry
    http://host/path  the sample is posted as JSON, the reply is {"reward": number}; 3 attempts
The answer of a response: its last \boxed or \fbox, else what follows the last ####, else the end of a last line "answer
is X" or "answer: X", else the whole response if it is one line; behind </think>, where there is one. Compared whole.

Given up: no sandbox against malice; a process that leaves its worker's group lives on; memory is limited per process.
Sources: GSM8K (Cobbe et al. 2021), MATH (Hendrycks et al. 2021), math-verify.
"""

import contextlib
import faulthandler
import importlib
import inspect
import json
import logging
import math
import os
import pickle
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from weakref import WeakSet

TIMEOUT = "no result within"
BATCH = {"responses", "completions"}
ALIASES = {"prompts": "prompt", "responses": "response", "answers": "answer"}
ALIASES |= {"completions": "response", "solution_str": "response", "ground_truth": "answer"}  # as TRL and verl say


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = ("math",)
    """exact, math, reasoning_gym, path.py:function or http://host/path; several are a weighted sum."""
    weights: tuple[float, ...] = ()
    """Weight of each function, in the same order; empty: 1 for each."""
    num_workers: int = 4
    """Worker processes per rank: as many samples, or requests to a remote scorer, are in work at once."""
    time_limit_s: float = 5.0
    """Seconds for a sample, after which its worker is killed and replaced; batches: as if one by one on all workers."""
    memory_limit_mb: int = 4096
    """MB of address space that a worker may take on top of its imports; 0: no limit."""
    error_reward: float = 0.0
    """What a failed call counts as in the sum."""
    max_error_frac: float = 0.25
    """The run stops when a larger share of one function's samples fails in a step of one rank; 1: never."""

    def __post_init__(self):
        names = {os.path.basename(name.rstrip("/")) for name in self.functions}
        if not 0 < len(names) == len(self.functions) or len(self.weights) not in (0, len(self.functions)):
            got = f"--reward.functions {' '.join(self.functions)} --reward.weights {' '.join(map(str, self.weights))}"
            raise ValueError(f"{got}: give at least one function, of different names, and one weight each or none")
        for name, low in (("num_workers", 1), ("time_limit_s", 0.01), ("memory_limit_mb", 0), ("max_error_frac", 0)):
            if not getattr(self, name) >= low:
                raise ValueError(f"--reward.{name.replace('_', '-')} {getattr(self, name)}: must be at least {low}")
        if not all(map(math.isfinite, (self.error_reward, *self.weights))):
            raise ValueError(f"--reward.error-reward {self.error_reward}, weights {self.weights}: must be finite")


class Scorer:
    """Scores samples while others are still sampled: submit each, then collect the rewards of all.
    callables: functions by name; workers are then forks. ValueError if one can't be loaded. wanted: {name: columns}."""

    def __init__(self, config: RewardConfig, callables: Mapping[str, Callable] = {}):
        self.config, self.callables = config, callables
        self._samples, self._futures, self._shown = {}, {}, set()
        self._names = [name for name in config.functions if name != "exact"]
        self._idle, self._starting = queue.SimpleQueue(), threading.Lock()
        self._threads = ThreadPoolExecutor(config.num_workers)
        try:
            replies = list(self._threads.map(self._start, range(config.num_workers if self._names else 0)))
        except ValueError:
            self.close()
            raise
        self._batched = {name: not BATCH.isdisjoint(known) for name, known in zip(self._names, *replies[:1])}
        self.wanted = {n: [ALIASES.get(p, p) for p in known if known[p]] for n, known in zip(self._names, *replies[:1])}
        self.wanted |= {"exact": ["answer"]} if "exact" in config.functions else {}

    def _start(self, _=None) -> list[dict[str, bool]]:  # of each function: its parameters, and whether it needs them
        with self._starting:  # a fork in between would hold the new pipe open
            worker = _Worker(self.callables)
        reply = worker.ask((self._names, self.config.time_limit_s, self.config.memory_limit_mb), 120)
        self._idle.put(worker)
        if isinstance(reply, str):
            raise ValueError(f"--reward.functions {' '.join(self._names)}: {reply}")
        return reply

    def submit(self, index: int, sample: dict) -> None:
        """Queues sample `index`: prompt, response, answer, truncated and further columns by name. Returns at once."""
        assert index not in self._samples, f"sample {index} was submitted twice"
        self._samples[index] = sample
        for name in self._names:
            if not self._batched[name]:
                self._futures[name, index] = self._threads.submit(self._call, name, [sample])

    def _call(self, name: str, samples: list[dict]) -> list[tuple[float | None, str]]:
        limit_s = self.config.time_limit_s * math.ceil(len(samples) / self.config.num_workers)
        worker = self._idle.get()
        reply = worker.ask((self._names.index(name), samples, limit_s), limit_s)
        if isinstance(reply, str):
            reply = [(None, f"{reply}; the worker's exit code was {worker.kill()}")] * len(samples)
            self._start()
        else:
            self._idle.put(worker)
        return reply

    def collect(self, num_samples: int) -> tuple[list[float], dict[str, float]]:
        """Waits for samples 0..num_samples-1: their rewards, and error_frac, timeout_frac and <function>_mean.
        RuntimeError if more than max_error_frac of a function's samples fail; the scorer is then at its end."""
        assert sorted(self._samples) == list(range(num_samples)), f"{len(self._samples)} submitted, not {num_samples}"
        samples = [self._samples.pop(index) for index in range(num_samples)]
        rewards, stats = [0.0] * num_samples, {"error_frac": 0.0, "timeout_frac": 0.0}
        share, limit = 1 / max(num_samples, 1) / len(self.config.functions), self.config.max_error_frac * num_samples
        for name, weight in zip(self.config.functions, self.config.weights or [1.0] * len(self.config.functions)):
            if name == "exact":
                outcomes = [(float(s["response"].strip() == str(s["answer"]).strip()), "") for s in samples]
            elif self._batched[name]:
                outcomes = self._call(name, samples) if samples else []
            else:
                outcomes = self._outcomes(name, num_samples, limit)
            errors = [f"sample {index}: {error}" for index, (reward, error) in enumerate(outcomes) if reward is None]
            report = f"reward function {name} failed on {len(errors)} of {len(outcomes)} samples; {''.join(errors[:1])}"
            if errors and name not in self._shown:
                self._shown.add(name)
                print(report, file=sys.stderr, flush=True)
            if len(errors) > limit:
                self._threads.shutdown(wait=False, cancel_futures=True)  # else the interpreter waits for them
                raise RuntimeError(f"--reward.max-error-frac {self.config.max_error_frac}: {report}")
            scores = [self.config.error_reward if reward is None else reward for reward, _ in outcomes]
            rewards = [total + weight * score for total, score in zip(rewards, scores)]
            stats["error_frac"] += len(errors) * share
            stats["timeout_frac"] += sum(TIMEOUT in error for error in errors) * share
            stats[f"{os.path.basename(name.rstrip('/'))}_mean"] = sum(scores) / max(num_samples, 1)
        return rewards, stats

    def _outcomes(self, name: str, num_samples: int, limit: float) -> list[tuple[float | None, str]]:
        outcomes, num_errors = [], 0
        while len(outcomes) < num_samples and num_errors <= limit:  # one too many: why wait for the rest to time out?
            outcomes += self._futures.pop((name, len(outcomes))).result()
            num_errors += outcomes[-1][0] is None
        return outcomes

    def close(self) -> None:
        """Ends the workers and all that they have started, when the calls in flight are through."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().kill()


def score(functions, samples: list[dict], *, time_limit_s: float = 5.0, num_workers: int = 4):
    """(rewards, stats) of `samples` by one function or several, specs or callables; errors are counted, not raised."""
    functions = functions if isinstance(functions, (list, tuple)) else [functions]
    names = tuple(spec.__name__ if callable(spec) else spec for spec in functions)
    config = RewardConfig(names, num_workers=num_workers, time_limit_s=time_limit_s, max_error_frac=1.0)
    with contextlib.closing(Scorer(config, {n: f for n, f in zip(names, functions) if callable(f)})) as scorer:
        for index, sample in enumerate(samples):
            scorer.submit(index, sample)
        return scorer.collect(len(samples))


class _Worker:
    """A process in its own session: a fresh interpreter on this file, or a fork of this one if there are callables."""
    ends = WeakSet()  # the trainer's, of the pipes to all workers

    def __init__(self, callables: Mapping[str, Callable]):
        self.connection, theirs = Pipe()
        self.ends.add(self.connection)
        if callables:
            self.pid = os.fork()
            if self.pid == 0:
                os.setsid()
                os.dup2(2, 1)
                for end in list(self.ends):  # open here, too, they would hide that the trainer is gone
                    end.close()
                serve(theirs, callables)
            self.wait = lambda: os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        else:
            # Not by multiprocessing: it imports the training script. No GPU: a context per worker would take 0.5 GB.
            command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno())]
            streams = {"stdin": subprocess.DEVNULL, "stdout": 2, "pass_fds": [theirs.fileno()]}
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
            self.pid, self.wait = process.pid, process.wait
        theirs.close()

    def ask(self, question: tuple, limit_s: float) -> list | str:  # a string says why there is no reply
        try:
            self.connection.send(question)
            replied = self.connection.poll(limit_s)
            return json.loads(self.connection.recv_bytes(1 << 26)) if replied else f"{TIMEOUT} {limit_s:g} s"
        except (EOFError, OSError, ValueError, TypeError, AttributeError, pickle.PicklingError) as error:
            return f"no reply: the worker died, its pipe was written to, or the sample can't be pickled ({error!r})"

    def kill(self) -> int:  # the whole group; waits, so that no zombie stays, and returns the exit code
        os.killpg(self.pid, signal.SIGKILL)
        return self.wait()


def serve(connection: Connection, callables: Mapping[str, Callable] = {}) -> None:
    """A worker's life: load the functions, then answer calls until the trainer's end of the pipe closes. No return."""
    worker = os.getpid()
    try:
        names, time_limit_s, memory_limit_mb = connection.recv()
        try:
            functions = [callables.get(name) or load_function(name, time_limit_s) for name in names]
            known = [inspect.signature(function).parameters for function in functions]
            reply = [{n: p.default is p.empty and "VAR" not in p.kind.name for n, p in k.items()} for k in known]
        except Exception as error:  # importing runs the user's code
            hint = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
            reply = f"{type(error).__name__}: {error}{hint}"
        if memory_limit_mb:
            with open("/proc/self/statm") as statm:
                limit = int(statm.read().split()[0]) * resource.getpagesize() + (memory_limit_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        while os.getpid() == worker:  # a fork that comes back from a function must not answer, too
            connection.send_bytes(json.dumps(reply).encode())
            index, samples, limit_s = connection.recv()
            faulthandler.dump_traceback_later(limit_s + 5, exit=True, file=2)  # if no trainer is left to kill us
            reply = evaluate(functions[index], samples)
            if os.getpid() == worker:  # in a fork there is no watching thread, and cancelling waits for it for ever
                faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # forks that have ended are zombies until someone asks
                    pass
    finally:
        if os.getpid() == worker:
            os.killpg(worker, signal.SIGKILL)  # and all that the functions have started
        os._exit(0)


def load_function(spec: str, time_limit_s: float) -> Callable:
    """The function that a spec stands for; ValueError or ImportError if there is none."""
    if spec == "math":
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it does not limit the time: we do
        math_reward("\\sqrt{4}", "2")  # imports SymPy before the clock runs
        return math_reward
    if spec == "reasoning_gym":
        verifier = importlib.import_module(spec).get_score_answer_fn
        untag = lambda text: text.rsplit("<answer>", 1)[-1].split("</answer>")[0].strip()
        return lambda response, entry: verifier(entry["metadata"]["source_dataset"])(untag(response), entry)
    if spec.startswith(("http://", "https://")):
        return lambda **sample: post(spec, sample, time_limit_s)
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"no file and function by {spec!r}: exact, math, reasoning_gym, file.py:function or a URL")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # for this module and those beside it
    module = importlib.import_module(os.path.basename(path).removesuffix(".py"))
    if not os.path.samefile(module.__file__, path) or not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name!r}, or its name is taken by {module.__file__}")
    return getattr(module, name)


def evaluate(function: Callable, samples: list[dict]) -> list[tuple[float | None, str]]:
    """(reward, "") or (None, what went wrong) for each sample, by one call of the function."""
    try:
        parameters = inspect.signature(function).parameters
        batched = not BATCH.isdisjoint(parameters)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        known = dict.fromkeys(key for sample in samples for key in sample)  # data sets differ in their columns
        sources = {name: ALIASES.get(name, name) for name in [*parameters, *(known if takes_all else ())]}
        columns = {name: [s.get(key) for s in samples] for name, key in sources.items() if key in known}
        values = function(**(columns if batched else {name: column[0] for name, column in columns.items()}))
        if inspect.iscoroutine(values):
            values = importlib.import_module("asyncio").run(values)
        values = values if batched else [values]
        if isinstance(values, (str, bytes, Mapping, Set)) or len(values) != len(samples):
            raise ValueError(f"returned {values!r:.200}: must be {len(samples)} numbers, one for each sample in order")
        outcomes = [(None, f"returned {value!r:.200}: must be one finite number") for value in values]
        for i, value in enumerate(values):
            with contextlib.suppress(Exception):  # None, a string, a tensor of several elements: what __float__ raises
                if math.isfinite(value):
                    outcomes[i] = (float(value), "")
    except Exception:  # the user's code; counted and shown
        return [(None, traceback.format_exc()[-4000:])] * len(samples)
    return outcomes


def math_reward(response: str, answer: str) -> float:
    """1.0 if the response's answer equals `answer`, or the answer of a whole solution (with #### or a box), else 0.0.
    SymPy may take for ever on hostile text: score a policy's text by Scorer or score(), which limit the time."""
    given, unit, name = _spell(extract_answer(response))
    gold, *others = _spell(extract_answer(answer) if re.search(r"####|\\f?box", str(answer)) else str(answer))
    if not given or not gold or any(a != b for mine, theirs in zip((unit, name), others) for a, b in zip(mine, theirs)):
        return 0.0
    if given == gold or (given.isalpha() and given.casefold() == gold.casefold()):
        return 1.0
    # Words are no expressions (math-verify reads Paris as P*a*r*i*s); 41 = 42, 42 \approx 43 and 42_5 are not 42.
    signs = [set(re.findall(r"=|\\approx|\\sim\b|\d_", x)) for x in (given, gold)]
    if signs[0] - signs[1] or re.search(r"[a-zA-Z]{3,}", re.sub(r"\\[a-zA-Z]+", "", given + gold)):
        return 0.0
    from math_verify import LatexExtractionConfig, parse, verify
    normalization = replace(LatexExtractionConfig().normalization_config, units=False)  # with its units 2t is 2
    config = [LatexExtractionConfig(normalization_config=normalization)]  # its other extractors search in the text
    parsed = [parse(f"${x}$", config, "no_fallback", parsing_timeout=None, raise_on_error=True) for x in (gold, given)]
    return float(verify(*parsed, timeout_seconds=None, raise_on_error=True))  # its own time limit scores 0 in silence


def extract_answer(response: str) -> str:
    """What the response gives as its answer, by the rule in the module docstring; "" if it gives none."""
    text = response.rsplit("</think>", 1)[-1].strip()
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if box >= 0:
        opening, depth = re.compile(r"\\[a-z]+\s*\{").match(text, box), 1
        for brace in re.compile(r"\\.|[{}]").finditer(text, opening.end()) if opening else ():
            depth += {"{": 1, "}": -1}.get(brace[0], 0)  # the brace of a set, "\{", opens no group
            if depth == 0:
                return text[opening.end() : brace.start()]
        return ""
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0]
    last_line = text.rsplit("\n", 1)[-1].replace("**", "")
    statement = re.match(r".*\banswer\b[^.:=]{0,80}?(?:\bis\b|:|=)[\s:]*(.+)", last_line, re.IGNORECASE)
    return statement[1] if statement else "" if "\n" in text else text


SYMBOLS = {"\u2212": "-", "\u2013": "-", "\u2044": "/", "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u03c0": "\\pi "}
SYMBOLS |= {"\u221e": "\\infty ", "\u221a": "\\sqrt ", "\u222a": "\\cup ", "\u2248": "\\approx ", "\u200b": ""}
SPELLINGS = (  # applied in this order
    (r"(?<!\\)(?:\\[!,;: ()\[\]]|~)", " "),
    (r"\\?[$\u20ac\u00a3\u00a5]", " "),  # math mode and currencies
    (r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree\b|\u00b0", " degree "),
    (r"\s+", " "),
    (r"^\\(?:text|mbox|textbf|mathrm) ?\{([^{}]*)\}$", r"\1"),
    (r"(?<=[a-z]) (?:squar|(cub))ed(?=\W*$)", lambda found: "^3" if found[1] else "^2"),  # 25 feet squared
    (r"(?<=\d) (?=\d{3}\b)", ""),  # 1 234 -> 1234
    (r"(\d) (\d+) ?/ ?(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(\d)[eE]([+-]?\d{1,3})$", r"\1\\times 10^{\2}"),
)
NO_UNIT = "or|and|not|hundred|thousand|[mb]illion|trillion|dozen|infinity|alpha|beta|gamma|delta|theta|lambda|omega"
NO_UNIT += "|plus|minus|divided|squared|cubed|factorial"  # nor a fraction, but in 12 third graders
NO_UNIT += "|(?:third|half|halve|(?:four|fif|six|seven|eigh|nin|ten|twelf|hundred|thousand|million)th)(?!s? [a-zA-Z])"
SAME_UNIT = "feet ft foot ft inch in meter m centimeter cm millimeter mm kilometer km gram g kilogram kg liter l"
SAME_UNIT += " second s sec s minut min hour h hr h pound lb ounc oz"  # words without their last s and es
SAME_UNIT = dict(zip(SAME_UNIT.split()[::2], SAME_UNIT.split()[1::2]))
SHORT_UNIT = "(?:cm|mm|km|kg|mg|ml|ft|in|lb|oz|hr)"  # other short words may be products: 2 ab
UNIT = rf"(?!(?:{NO_UNIT})s?\b)(?:[a-zA-Z]{{3,}}|{SHORT_UNIT}|[mgslh])\b"
BEFORE_UNIT = rf"(?<=[\d)}}])(?: ?\\(?:text|mbox|mathrm) ?\{{ ?| |(?={SHORT_UNIT}\b))"


def _spell(text: str) -> tuple[str, list[str], list[str]]:
    """("5", ["m2"], ["x"]) of "$x = 5 \\text{ meters}^2$.": answer in one spelling, words of its unit, its name."""
    text = re.sub("([\u00bc-\u00be\u2150-\u215e])", r" \1", text)  # one and a half; NFKC alone makes 11/2 of it
    text = re.sub("([\u00b2\u00b3\u00b9\u2070-\u2079]+)", r"^{\1}", text)  # 5 squared; NFKC alone makes 52 of it
    text = unicodedata.normalize("NFKC", text).translate(str.maketrans(SYMBOLS))
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text).lstrip(" *`'\"").rstrip(" *`'\".,;:")
    found = re.search(rf"{BEFORE_UNIT}({UNIT}(?:[ /]{UNIT})*)[ .}}]*(?:\^\W*(\d)\W*)?$", text)
    text, power = (text[: found.start()], found[2] or "") if found else (text, "")
    words = re.sub(r"(?<=..)[es]*\b", "", found[1].lower()).split(" ") if found else []  # inches -> inch
    named = re.match(r"([a-zA-Z](?:\([a-zA-Z]\))?) ?(?:=|\\approx\b|\\in\b)[ *`]*", text)  # x = 5 -> 5, f(x) = 2x -> 2x
    text = re.sub(r" degrees?\b", "", text[named.end() :] if named else text)
    units = (" ".join(SAME_UNIT.get(word, word) for word in words) + power).split()
    return text, units, [named[1].casefold()] if named else []


def post(url: str, sample: dict, time_limit_s: float) -> float:
    """The "reward" in the JSON reply to a POST of the sample; 3 attempts, all within the time limit."""
    from http.client import HTTPException
    from urllib.request import Request, urlopen
    request = Request(url, json.dumps(sample, default=str).encode(), {"Content-Type": "application/json"})
    for attempt in range(3):
        try:
            with urlopen(request, timeout=0.25 * time_limit_s) as reply:
                return json.load(reply)["reward"]
        except (OSError, HTTPException):  # refused, reset, cut, too slow, or an HTTP status of failure
            if attempt == 2:
                raise
            time.sleep(0.05 * 2**attempt * time_limit_s)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
