# SPDX-FileCopyrightText: 2026 handful contributors (rewards.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Rewards: foreign functions turn each response into one number, in worker processes with limits.

The problem. A reward function is foreign code, run on text of a policy that finds its weak spots: a
search that never ends, one None in a group of 8 that makes 8 advantages NaN. And 256 samples of
50 ms, one after another, are 12.8 s of idle GPU in each step.

How it works. Scorer keeps num_workers processes that run worker.py, which must lie beside this
file, without torch. A thread feeds each, with several samples at a time while many wait:
    submit(3, {"response": ...}) -> thread -> pipe -> worker -> [[0.5, ""]] -> collect
    silent for time_limit_s: its process group is killed and replaced -> "no result within 5 s"
A reward is one number of at most 1e18 in size. Anything else (None, NaN, 1e39, an exception, a
hang) is an error: it counts as error_reward and in error_frac, the first of each function is
printed, and collect raises when more than max_error_frac of a function's samples fail.

Functions, by spec. (Reward models are no spec: they run on the trainer's ranks.)
    math, exact, reasoning_gym    of the files answers.py and worker.py beside this one
    path.py:function  yours, sync or async. Its parameters are named after columns: prompt,
                      response, answer, truncated, any of the data. A function with a parameter
                      responses or completions gets lists, of the whole batch, and returns a list.
    http://host/path  the sample is posted as JSON, the reply is {"reward": number}; 3 attempts
What we give up. There is no sandbox against malice, and a process that leaves its worker's group
lives on. Memory is limited for each process.

Copied, with worker.py; "math" also with answers.py and expressions.py. A Scorer that is kept starts
its workers once.
    from rewards import score
    def near(response, answer):
        return -abs(float(response) - float(answer))
    print(score(near, [{"response": "3.5", "answer": "4"}])[0])  # [-0.5]
"""

import contextlib
import functools
import importlib.util
import json
import math
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import Any, ClassVar
from weakref import WeakSet

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
TIMEOUT = "no result within"
MESSAGE_S = 0.05  # of work, about, in one message to a worker
MAX_REWARD = 1e18  # its square, in a critic's loss, must be finite in fp32
UNPICKLABLE = (TypeError, AttributeError, RecursionError, pickle.PicklingError)
Outcome = tuple[float | None, str]  # (reward, "") or (None, what went wrong)
Scores = tuple[list[float], dict[str, float]]  # rewards and stats


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = ("math",)
    """math, exact, reasoning_gym, path.py:function or http://host/path; several are added up."""
    weights: tuple[float, ...] = ()
    """Weight of each function in the sum, in the same order; empty: 1 for each."""
    num_workers: int = 4
    """Worker processes per rank: the number of samples or remote requests in work at once."""
    time_limit_s: float = 5.0
    """Seconds for a sample, then its worker is killed; a batch of n: n / num_workers times that."""
    memory_limit_mb: int = 4096
    """MB of address space that a worker may take on top of its imports; 0: no limit."""
    error_reward: float = 0.0
    """What a failed call counts as in the sum."""
    max_error_frac: float = 0.25
    """The run stops when a larger share of a function's samples fails in one step; 1: never."""
    start_limit_s: float = 120.0
    """Seconds for a worker to load the functions, with all that they import."""

    def __post_init__(self):
        distinct = {os.path.basename(name.rstrip("/")) for name in self.functions}
        num = len(self.functions)
        rules = (
            ("functions", 0 < len(distinct) == num, "at least one, of different names"),
            ("weights", len(self.weights) in (0, num), "none, or one for each function"),
            ("weights", all(map(_fits, self.weights)), "finite, at most 1e18 in size"),
            ("weights", any(self.weights or [1]), "not all 0: no response would be better"),
            ("error_reward", _fits(self.error_reward), "finite, at most 1e18 in size"),
            ("num_workers", self.num_workers >= 1, "at least 1"),
            ("time_limit_s", 0.01 <= self.time_limit_s <= 1e6, "from 0.01 to 1e6"),
            ("memory_limit_mb", 0 <= self.memory_limit_mb <= 1e9, "from 0 (no limit) to 1e9"),
            ("start_limit_s", 0.01 <= self.start_limit_s <= 1e6, "from 0.01 to 1e6"),
            ("max_error_frac", self.max_error_frac >= 0, "at least 0"),
        )
        for name, holds, rule in rules:
            if not holds:
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
        self._futures: dict[tuple[str, int], Future] = {}
        self._waiting: dict[str, deque] = {name: deque() for name in config.functions}
        self._sample_s = dict.fromkeys(config.functions, math.inf)  # of the latest call
        self._shown: set[str] = set()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._starting = threading.Lock()
        if not os.path.isfile(WORKER):
            raise ValueError(f"rewards.py runs worker.py, which must lie beside it: no {WORKER}")
        self._threads = ThreadPoolExecutor(config.num_workers)
        for name in config.functions:
            if name.startswith(("http://", "https://")):
                _load_worker().probe(name, config.time_limit_s)
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
        [reply] = worker.ask(question, config.start_limit_s)
        self._idle.put(worker)
        if isinstance(reply, str):
            if reply.startswith(TIMEOUT):
                reply += " while they are imported: raise --reward.start-limit-s"
            raise ValueError(f"--reward.functions {' '.join(config.functions)}: {reply}")
        return reply

    def submit(self, index: int, sample: dict) -> None:
        """Queues a sample, at once: prompt, response, answer, truncated, other columns by name."""
        assert index not in self._samples, f"sample {index} was submitted twice"
        self._samples[index] = sample
        pickled, reason = _pickled(sample)  # each by itself: an error is of this sample alone
        for name in [name for name in self.config.functions if not self._batched[name]]:
            future = Future()
            self._futures[name, index] = future
            if reason:
                future.set_result([(None, reason)])
                continue
            self._waiting[name].append((future, pickled))
            self._threads.submit(self._call_waiting, name)

    def _call_waiting(self, name: str) -> None:
        """Hands waiting samples to a worker: many at once if they are quick."""
        worker = self._idle.get()
        waiting = self._waiting[name]
        share = len(waiting) // (2 * self.config.num_workers)
        taken = []
        # Few if they are slow: those behind would wait while other workers are idle.
        with contextlib.suppress(IndexError):  # others have taken them
            for _ in range(1 + min(share, int(MESSAGE_S / self._sample_s[name]))):
                taken.append(waiting.popleft())
        start = time.perf_counter()
        try:
            samples = [sample for _, sample in taken]
            replies = self._ask(worker, name, samples, self.config.time_limit_s)
        except (ValueError, OSError, RuntimeError) as error:  # no new worker starts
            for future, _ in taken:
                future.set_exception(error)
            return
        if replies:
            self._sample_s[name] = (time.perf_counter() - start) / len(replies)
        for (future, _), reply in zip(taken, replies, strict=False):
            future.set_result(reply)
        left = taken[len(replies) :]  # behind one that took its worker with it
        waiting.extendleft(reversed(left))
        for _ in left:
            self._threads.submit(self._call_waiting, name)

    def _call(self, name: str, samples: list[dict]) -> list[Outcome]:
        """The outcomes of all samples, by one call of a function that takes the whole batch."""
        rounds = math.ceil(len(samples) / self.config.num_workers)
        [reply] = self._ask(self._idle.get(), name, samples, self.config.time_limit_s * rounds)
        return reply if len(reply) == len(samples) else reply * len(samples)

    def _ask(self, worker, name: str, samples: list, limit_s: float) -> list[list[Outcome]]:
        """The replies; the last is [(None, reason)] if the worker failed, and was replaced."""
        num_replies = 1 if self._batched[name] else len(samples)
        question = (self.config.functions.index(name), samples, limit_s)
        replies = worker.ask(question, limit_s, num_replies) if samples else []
        if replies and isinstance(replies[-1], str):
            self._replace(worker)
            return [*replies[:-1], [(None, replies[-1])]]
        self._idle.put(worker)
        return replies

    def _replace(self, worker) -> None:
        """A new idle worker in place of one that failed."""
        try:
            worker.kill()
            self._start()
        except OSError:  # no process: the next call, which waits for a worker, tries again
            self._idle.put(worker)
            raise

    def collect(self, num_samples: int) -> Scores:
        """Waits for samples 0..num_samples-1; returns (rewards, stats).

        stats: error_frac, timeout_frac, and <function>_mean of each function.
        RuntimeError if more than max_error_frac of a function's samples fail; the scorer
        can't be used after that.
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
            stats[f"{os.path.basename(name.rstrip('/'))}_mean"] = sum(scores) / max(num_samples, 1)
        why = "is not finite, or above 1e18 in size"
        sums = [(x, "") if _fits(x) else (None, f"{x} {why}") for x in rewards]
        num_errors += self._report("(weighted sum)", sums, num_samples)
        rewards = [config.error_reward if total is None else total for total, _ in sums]
        num_calls = max(num_samples, 1) * len(config.functions)
        stats["error_frac"] = num_errors / num_calls
        stats["timeout_frac"] = num_timeouts / num_calls
        return rewards, stats

    def _outcomes(self, name: str, samples: list[dict]) -> list[Outcome]:
        """Of all samples, or, if too many fail, of those up to the error that exceeds the limit."""
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


def score(functions: Any, samples: list[dict], *, time_limit_s=5.0, num_workers=4) -> Scores:
    """(rewards, stats) of `samples` by one function or a list of them, specs or callables.

    Errors are counted, not raised; ValueError if no sample has a column that a function wants.
    """
    functions = functions if isinstance(functions, (list, tuple)) else [functions]
    names = tuple(map(_name, functions))
    callables = {_name(f): f for f in functions if not isinstance(f, str)}
    config = RewardConfig(names, (), num_workers, time_limit_s, max_error_frac=1.0)
    with contextlib.closing(Scorer(config, callables)) as scorer:
        known = set().union(*samples)
        for name, wanted in scorer.wanted.items():
            if samples and (missing := sorted(set(wanted) - known)):
                raise ValueError(f"{name} wants {missing}, and samples have {sorted(known)}")
        for index, sample in enumerate(samples):
            scorer.submit(index, sample)
        return scorer.collect(len(samples))


def _name(function: Any) -> str:
    """A spec is its own name; a partial or an object goes by its type's."""
    if isinstance(function, str):
        return function
    return getattr(function, "__name__", type(function).__name__)


def _pickled(sample: dict) -> tuple[bytes, str]:
    try:
        return pickle.dumps(sample), ""
    except UNPICKLABLE as error:
        return b"", f"the sample can't be pickled ({error})"


def _fits(number: float) -> bool:
    return abs(number) <= MAX_REWARD


class _Worker:
    """A process in its own session: a new interpreter, or a fork if there are callables."""

    ends: ClassVar = WeakSet()  # the trainer's ends of the pipes to all workers

    def __init__(self, callables: Mapping[str, Callable]):
        self.connection, theirs = Pipe()
        self.readable = select.poll()  # made once: the connection's own poll makes one each time
        self.readable.register(self.connection, select.POLLIN)
        self.ends.add(self.connection)
        self.code: int | None = None
        if callables:
            serve = _load_worker().serve
            self.pid = os.fork()
            if self.pid == 0:
                os.setsid()
                os.dup2(2, 1)
                # Left open in the fork, they would hide from workers that the trainer is gone.
                for end in list(self.ends):
                    end.close()
                serve(theirs, callables)
            self.wait = lambda: os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        else:
            # Not by multiprocessing, which would import the training script.
            # No GPU: a context for each worker would take 0.5 GB.
            pipe = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-P", WORKER, str(pipe)],  # -P: a logging.py may lie beside it
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[pipe],
                start_new_session=True,
            )
            self.pid = process.pid
            self.wait = process.wait
        theirs.close()

    def ask(self, question: tuple, limit_s: float, num_replies: int = 1) -> list[list | str]:
        """The worker's replies, each within limit_s; a string, the last, says why there is none."""
        replies: list[list | str] = []
        try:
            self.connection.send(question)
            patience_ms = int(1000 * min(limit_s, 1e6))  # in 32 bits
            while len(replies) < num_replies and self.readable.poll(patience_ms):
                replies.append(json.loads(self.connection.recv_bytes(1 << 26)))
            reason = f"{TIMEOUT} {limit_s:g} s"
        except (EOFError, ConnectionError):
            reason = f"the process of the function ended, exit code {self.kill()}"
        except (OSError, ValueError):
            reason = "something else than a reply was written to the worker's pipe"
        except UNPICKLABLE as error:
            reason = f"the samples can't be pickled ({error})"
        return replies if len(replies) == num_replies else [*replies, reason]

    def kill(self) -> int:
        """Kills the whole group, waits, so that no zombie stays, and returns the exit code."""
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.code = self.wait()
        return self.code


@functools.cache
def _load_worker():
    """worker.py as a module: not imported, since it is a program of its own."""
    found = importlib.util.spec_from_file_location("worker", WORKER)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
