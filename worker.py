# SPDX-FileCopyrightText: 2026 handful contributors (worker.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Worker: a process that runs reward functions for rewards.py, and little else.

It imports neither torch nor the training script, so it starts in 50 ms. What it is asked and what
it replies, over one pipe:
    (functions, time_limit_s, memory_limit_mb)   [{"batched": false, "required": ["response"]}]
                                                 or "SyntaxError: ...", why one cannot be loaded
    (index of a function, samples, limit_s)      [[1.0, ""], [null, "returned None: ..."]], of a
                                                 function that takes one sample: a reply for each
Replies are JSON, so that nothing a function returns is unpickled by the trainer. The worker ends
when the trainer's end of the pipe closes; if a call is then still running, limit_s + 5 s after it
began.

What a function prints goes to stderr, the first MAX_PRINTED characters of each worker.

A function may name packages that it imports when it is called (f.packages = ("sympy",)): they are
imported at the start, before the clock of a call runs, and a missing one is refused there.

Copied:
    from worker import evaluate
    def length(response):
        return -len(response)
    print(evaluate(length, [{"response": "four"}]))  # [(-4.0, '')]
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import io
import json
import math
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Set
from multiprocessing.connection import Connection
from typing import Any

FILE = os.path.abspath(__file__)
BUILT_IN = {"math": ("answers.py", "math_reward"), "exact": ("answers.py", "exact_rewards")}
BUILT_IN["reasoning_gym"] = ("worker.py", "gym_reward")
MAX_PRINTED = 4000
MAX_REWARD = 1e18  # its square, in a critic's loss, must be finite in fp32
BATCH = {"responses", "completions"}
ALIASES = {"prompts": "prompt", "responses": "response", "completions": "response"}  # TRL's names
ALIASES |= {"solution_str": "response", "answers": "answer", "ground_truth": "answer"}  # verl's
Outcome = tuple[float | None, str]  # (reward, "") or (None, what went wrong)


def serve(connection: Connection, callables: Mapping[str, Callable] = {}) -> None:
    """A worker's life: load the functions, then answer calls until the pipe closes.

    Does not return.
    """
    worker = os.getpid()

    def stay(number: int, frame: Any) -> None:
        """Ignore a signal to all processes of a run: it finishes its step, which needs rewards."""
        if os.getpid() != worker:  # a function's own child
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, stay)
    silence = os.open(os.devnull, os.O_WRONLY)
    sys.stdout = sys.stderr = _Printed()
    try:
        names, time_limit_s, memory_limit_mb = connection.recv()
        functions, reply = _load_all(names, callables, time_limit_s)
        if memory_limit_mb:
            with open("/proc/self/statm") as statm:
                num_pages = int(statm.read().split()[0])
            limit = num_pages * resource.getpagesize() + (memory_limit_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        connection.send_bytes(json.dumps(reply).encode())
        batched = [known["batched"] for known in reply if functions]
        while True:
            index, samples, limit_s = connection.recv()
            armed_at = -math.inf
            # Samples that are scored one by one are unpickled one by one: each fails for itself.
            for part in [samples] if batched[index] else ([pickle.loads(x)] for x in samples):
                if time.monotonic() - armed_at > 1:  # it starts a thread: not for each sample
                    armed_at = time.monotonic()
                    # Ends the process if no trainer is left to kill it.
                    faulthandler.dump_traceback_later(limit_s + 6, exit=True, file=silence)
                outcomes = evaluate(functions[index], part)
                if os.getpid() != worker:  # a fork that comes back from a function
                    return
                connection.send_bytes(json.dumps(outcomes).encode())
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(ChildProcessError):
                # Forks that have ended are zombies until someone asks for them.
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    finally:
        if os.getpid() == worker:
            os.killpg(worker, signal.SIGKILL)  # and all that the functions have started
        os._exit(0)


class _Printed(io.TextIOWrapper):
    """Writes to stderr, until MAX_PRINTED characters are written."""

    def __init__(self):
        stderr = io.FileIO(2, "w", closefd=False)
        super().__init__(stderr, errors="backslashreplace", write_through=True)
        self.left = MAX_PRINTED

    def write(self, text: str) -> int:
        if self.left > 0:
            super().write(text[: self.left])
            self.left -= len(text)
            if self.left <= 0:
                super().write("\n(what reward functions print from here on is dropped)\n")
        return len(text)


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
            return [], _one_line(error)
        required = [
            ALIASES.get(key, key)
            for key, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        functions.append(function)
        described.append({"batched": not BATCH.isdisjoint(parameters), "required": required})
    return functions, described


def _one_line(error: BaseException) -> str:
    """KeyError: 'x' (mine.py:3, helper.py:7), with the line of the user's file and the last one."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())[:2000]
    frames = traceback.extract_tb(error.__traceback__)
    runner = os.path.join(os.path.dirname(os.__file__), "asyncio", "")  # of async functions
    foreign = (FILE, importlib.__file__, "<frozen", runner)
    own = [frame for frame in frames if not frame.filename.startswith(foreign)]
    places = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in own]
    if places:
        text += f" ({', '.join(dict.fromkeys([places[0], places[-1]]))})"
    if isinstance(error, ModuleNotFoundError):
        text += f": pip install {error.name}"
    return text


def load_function(spec: str, time_limit_s: float) -> Callable:
    """The function that a spec stands for; ValueError or ImportError if there is none."""
    if spec.startswith(("http://", "https://")):
        return lambda **sample: post(spec, sample, time_limit_s)
    path, _, name = spec.rpartition(":")
    if spec in BUILT_IN:
        file, name = BUILT_IN[spec]
        path = os.path.join(os.path.dirname(FILE), file)
    if not os.path.isfile(path):
        missing = f"{path}, which holds {spec}, is not there"
        kinds = f"{', '.join(BUILT_IN)}, file.py:function or a URL"
        raise ValueError(missing if spec in BUILT_IN else f"no file and function {spec!r}: {kinds}")
    module = _load_file(path)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name!r}")
    function = getattr(module, name)
    for package in getattr(function, "packages", ()):  # imported before the clock runs
        importlib.import_module(package)
    return function


def _load_file(path: str) -> Any:
    """The module in a file; what lies beside it can be imported there.

    A file may be called like one of ours, or of the standard library's: then it is loaded by its
    path, and its name stays the other's.
    """
    # Behind the standard library, since a logging.py may lie beside it too.
    packages = (i for i, entry in enumerate(sys.path) if entry.endswith("-packages"))
    sys.path.insert(next(packages, len(sys.path)), os.path.dirname(os.path.abspath(path)))
    name = os.path.basename(path).removesuffix(".py")
    known = importlib.util.find_spec(name) if name.isidentifier() else None
    if os.path.realpath(getattr(known, "origin", None) or "") == os.path.realpath(path):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gym_reward(response: str, entry: dict) -> float:
    """The reward by the verifier of the reasoning_gym data set that made the sample's entry."""
    import reasoning_gym

    verifier = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    text = response.rsplit("<answer>", 1)[-1].split("</answer>")[0].strip()
    return verifier(text, entry)


gym_reward.packages = ("reasoning_gym",)  # imported when the worker starts


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
    except Exception as error:  # the user's code; counted and shown
        return [(None, _one_line(error))] * len(samples)


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
    # None, a string, a tensor of several elements: whatever their __float__ raises.
    with contextlib.suppress(Exception):
        if math.isfinite(value) and abs(float(value)) <= MAX_REWARD:
            return float(value), ""
    return None, f"returned {value!r:.200}: must be one finite number, at most 1e18 in size"


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


def probe(url: str, time_limit_s: float) -> None:
    """ValueError if nothing answers at the address; any HTTP status is an answer."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        urlopen(url, timeout=time_limit_s).close()
    except HTTPError as status:
        status.close()
    except (OSError, HTTPException, ValueError) as error:
        raise ValueError(f"--reward.functions {url}: does not answer ({error})") from None


if __name__ == "__main__":
    ours = os.path.dirname(FILE)
    if ours in sys.path:  # first, by launch.sh: a user's own data.py comes before ours
        sys.path.remove(ours)
        sys.path.append(ours)
    serve(Connection(int(sys.argv[1])))
