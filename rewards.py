r"""Rewards: rules, user functions, remote scorers and reward models turn each response into one finite number.

The problem. A reward function is foreign code that runs on text written by the policy, and the policy looks for its
weak spots. `simplify(9**9**9)` hangs; one None among 8 siblings makes all 8 advantages NaN; a grader that falls back to
searching the whole text pays for "maybe 41, 42 or 43". And scoring 256 samples of 50 ms one after another costs 12.8 s
of idle GPU in each step.

How it works. Scorer starts `num_workers` long-lived processes, which run this file alone (no torch: 0.1 s), and one
thread per process hands it samples while the engine still samples:

    submit(3, {...}) -> queue -> thread -> pipe -> worker: {"prompt", "response", "answer", ...} -> [[0.5, null]] -> collect
    silent for time_limit_s   -> the worker's process group is killed, a new one started: (error_reward, "no result within 5 s")

256 samples x 50 ms on 8 workers take 1.6 s, hidden behind sampling but for the last ones. What a function returns must
be one finite number: Python's, NumPy's or a tensor of one element. Everything else (None, NaN, a string, a list of the
wrong length, an exception, a hang, a dead worker) is an error: it stands as `error_reward`, is counted in `error_frac`,
the first one of each function is printed, and collect raises when more than `max_error_frac` of a function's calls fail.

Functions, by their spec:
    exact, gsm8k        rules without a worker: they are short string and fraction arithmetic, and can't hang
    math                gsm8k's rule and then symbolic equality (math-verify), in a worker
    path.py:function    yours: parameters are named after columns (prompt, response, answer, truncated, any column of the
                        data); with `responses` (or `completions`) among them it gets lists of the whole batch, once
    reasoning_gym       score_answer of the data set named in metadata["source_dataset"] (or in source_dataset)
    http://host/path    POST of the sample as JSON, the reply is {"reward": number}; three attempts
    reward_model        the RewardModel that the entry script passes in

What counts as the answer of a response (extract_answer): the last \boxed or \fbox, else what follows the last ####,
else the end of a last line that says "answer is ..." or "answer: ...", else the whole response if it is one line. It is
compared as a whole; nothing is searched in it, so an answer mentioned in passing earns nothing.

Given up: a function that starts processes of its own leaves them alive until its worker ends (they share its group);
memory_limit_mb counts per process; no sandbox against code that wants to do harm. Rules: GSM8K's format (Cobbe et al.
2021), MATH's \boxed (Hendrycks et al. 2021), math-verify; signatures as in TRL (completions) and verl (solution_str).
"""

import faulthandler
import importlib.util
import inspect
import json
import math
import os
import pickle
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = ("math",)
    """Reward functions: exact, gsm8k, math, reasoning_gym, reward_model, path.py:function or http://...; several are a weighted sum."""
    weights: tuple[float, ...] = ()
    """Weight of each function, in the same order; empty: 1 for each."""
    num_workers: int = 4
    """Worker processes per rank; a remote scorer answers as many requests at once."""
    time_limit_s: float = 5.0
    """Seconds for one call on one sample, after which the worker is killed and replaced."""
    memory_limit_mb: int = 4096
    """Address space of one worker in MB (torch needs several thousand); 0: no limit."""
    error_reward: float = 0.0
    """What a failed call counts as in the sum."""
    max_error_frac: float = 0.25
    """The run stops when a larger share of one function's calls in a step fails; 1: never."""

    def __post_init__(self):
        if not self.functions:
            raise ValueError("--reward.functions is empty: name at least one, for example math")
        if len(set(self.functions)) < len(self.functions):
            raise ValueError(f"--reward.functions {self.functions} names one twice: give it a larger --reward.weights entry instead")
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(f"--reward.weights has {len(self.weights)} entries for {len(self.functions)} functions: give one each, or none")
        for flag, low in (("num_workers", 1), ("time_limit_s", 1e-3), ("memory_limit_mb", 0)):
            if getattr(self, flag) < low:
                raise ValueError(f"--reward.{flag.replace('_', '-')} {getattr(self, flag)} must be at least {low}")
        if not 0 <= self.max_error_frac <= 1:
            raise ValueError(f"--reward.max-error-frac {self.max_error_frac} must lie in [0, 1]; 1 never stops the run")
        if not all(map(math.isfinite, (self.error_reward, *self.weights))):
            raise ValueError(f"--reward.error-reward {self.error_reward} and --reward.weights {self.weights} must be finite")


# Rules


def exact_reward(response: str, answer: object) -> float:
    """1.0 if the stripped response is the answer's text, else 0.0."""
    return float(response.strip() == str(answer).strip())


def gsm8k_reward(response: str, answer: object) -> float:
    """1.0 if the response's answer is the same number (or the same text) as the answer, else 0.0."""
    return _grade(response, answer, symbolic=False)


def math_reward(response: str, answer: str) -> float:
    """1.0 if the response's answer equals the answer as a number, tuple, interval, set, text or expression, else 0.0.

    Expressions go to math-verify (SymPy), which may take for ever on hostile input: score untrusted text through
    Scorer or score(), which limit its time.
    """
    return _grade(response, answer, symbolic=True)


def _grade(response: str, answer: object, *, symbolic: bool) -> float:
    gold = str(answer)
    # GSM8K's answer column is a worked solution that ends in "#### 72", MATH's ends in a box; a plain answer stays whole.
    if "####" in gold or "\\boxed" in gold or "\\fbox" in gold:
        gold = extract_answer(gold)
    given = extract_answer(response)
    if not given or not gold:
        return 0.0
    return float(_equal(_clean(given), _clean(gold), symbolic))


def extract_answer(response: str) -> str | None:
    """The text that the response gives as its answer (see the module docstring), or None."""
    text = response.rsplit("</think>", 1)[-1].strip()
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if box >= 0:
        return _braced(text[box:])
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0]
    line = text.rsplit("\n", 1)[-1].replace("**", "")
    statement = re.search(r".*\banswer\b[^.:=]{0,80}?(?:\bis\b|:|=)[\s:]*(.+)", line, re.IGNORECASE)
    if statement:
        return statement[1]
    return text if "\n" not in text else None


def _braced(text: str) -> str | None:
    """What stands in the first balanced braces: "\\boxed{\\frac{1}{2}} ..." -> "\\frac{1}{2}"; None if they don't close."""
    opening = re.match(r"\\[a-z]+\s*\{", text)
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[opening.end() - 1:] if opening else ""):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)     # "\{" is a set's brace, not a group's
        if depth == 0:
            return text[opening.end():opening.end() - 1 + brace.start()]
    return None


_UNICODE = str.maketrans({"\u2212": "-", "\u2013": "-", "\u221e": "\\infty ", "\u03c0": "\\pi ", "\u00d7": "\\times ",
                          "\u00b7": "\\cdot ", "\u00b0": "\\degree ", "\u221a": "\\sqrt ", "\u222a": "\\cup ", "\u2044": "/"})
_UNIT_SIGNS = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound", "%": "percent", "\\degree": "degree"}
_SHORT_UNITS = set("m g s h l n j w v k c f mm cm km kg mg ml cl dl ft in yd mi lb oz hr am pm".split())
# Words that change the number, join two of them, or are mathematics: none is a unit.
_NO_UNITS = set("""or and to not is are was maybe times plus minus hundred thousand million billion trillion dozen half
    infinity sqrt alpha beta gamma delta theta lambda sigma omega phi sin cos tan log exp mod""".split())


def _clean(text: str) -> str:
    """The answer in one spelling: ASCII digits and signs, \\frac{a}{b}, \\sqrt{a}, no LaTeX spacing, no final stop."""
    text = re.sub("([\u00bc-\u00be\u2150-\u215e])", r" \1", text.translate(_UNICODE))               # 1 1/2, not 11/2
    text = re.sub("[\u00b2\u00b3\u00b9\u2070-\u2079]+", lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = unicodedata.normalize("NFKC", text).translate(_UNICODE)
    text = text.replace("\\$", "\\dollar ").replace("\\%", "%").replace("{,}", ",")
    text = re.sub(r"\\left\b|\\right\b|\\displaystyle\b|\\[!,;:> ()\[\]]|~", " ", text)
    if text.count("$") > 1 or "\\dollar" in text:
        text = text.replace("$", " ")                                                               # math mode, not money
    text = text.replace("\\dollar", "$")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\degree ", text)
    text = re.sub(r"\\(?:mbox|textbf|textrm|mathrm|mathbf|operatorname)\b", r"\\text", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))",
                  lambda m: "\\frac{" + (m[1] or m[2] or "") + "}{" + (m[3] or m[4] or "") + "}", text)
    text = re.sub(r"\\?\bsqrt\s*(?:\(([^()]*)\)|(\w))", lambda m: "\\sqrt{" + (m[1] or m[2] or "") + "}", text)
    text = re.sub(r"\s+", " ", text).strip(" *`\"'")
    text = re.sub(r"[\s.,;:!]+$", "", text)
    whole = re.fullmatch(r"\\text ?\{([^{}]*)\}", text)
    text = whole[1].strip() if whole else text
    return re.sub(r"^[a-zA-Z] ?(?:=|\\in\b) ?", "", text)                                           # x = 5 -> 5


def _equal(given: str, gold: str, symbolic: bool) -> bool:
    """Whether two cleaned answers are the same: tuples and intervals in order, sets and bare lists in any order."""
    if _number(given) is None or _number(gold) is None:      # 1,234 is a number, (1,234) a pair
        given_open, given_parts = _elements(given)
        gold_open, gold_parts = _elements(gold)
        if max(len(given_parts), len(gold_parts)) > 1:
            if given_open != gold_open or len(given_parts) != len(gold_parts):
                return False
            if gold_open:
                return all(_equal(_clean(a), _clean(b), symbolic) for a, b in zip(given_parts, gold_parts))
            for part in given_parts:
                match = next((i for i, b in enumerate(gold_parts) if _equal(_clean(part), _clean(b), symbolic)), None)
                if match is None:
                    return False
                gold_parts.pop(match)
            return True
        given, gold = given_parts[0], gold_parts[0]
    return _equal_scalars(given, gold, symbolic)


def _elements(text: str) -> tuple[str, list[str]]:
    """Brackets and the parts between the outer commas: "(1,[2,3])" -> ("()", ["1", "[2,3]"]), "{2}" -> ("", ["2"])."""
    brackets, inner = "", text
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        brackets, inner = text[0] + text[-1], text[1:-1]
    parts = _split(inner)
    if parts is None:                                        # the first bracket closes early: (1,2) \cup (3,4)
        brackets, parts = "", _split(text) or [text]
    return (brackets if len(parts) > 1 else ""), parts


def _split(text: str) -> list[str] | None:
    """The parts between the commas outside of all brackets; None if a bracket closes that was not opened."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character in ",;" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _equal_scalars(given: str, gold: str, symbolic: bool) -> bool:
    (given, given_unit), (gold, gold_unit) = _split_unit(given), _split_unit(gold)
    if given_unit and gold_unit and given_unit != gold_unit:
        return False                                         # a unit that only one side names is ignored
    x, y = _number(given), _number(gold)
    if x is not None and y is not None:
        percent = (given_unit == "percent") - (gold_unit == "percent")
        return x == y or (percent == 1 and x == 100 * y) or (percent == -1 and 100 * x == y)
    if given == gold or (given.isalpha() and given.casefold() == gold.casefold()):
        return bool(given)
    return symbolic and _equal_expressions(given, gold)


def _split_unit(text: str) -> tuple[str, str]:
    """("5", "square meter") for "5 square meters", ("1,200", "dollar") for "$1,200", (text, "") without a unit."""
    for sign, unit in _UNIT_SIGNS.items():
        if sign in text:
            return _split_unit(text.replace(sign, " ").strip().replace("- ", "-"))[0], unit
    found = re.fullmatch(r"(.*[\d)}])(?: ?\\text ?\{([^{}]*)\}| ([a-zA-Z/. ]+)|([a-zA-Z]+))(?: ?\^ ?\{?([23])\}?)?", text)
    if not found:
        return text, ""
    words = re.findall(r"[a-z]+", (found[2] or found[3] or found[4]).lower())
    # Glued or short letters may be variables (5x, 2 ab), so only well-known short units count.
    known = [word in _SHORT_UNITS or (len(word) > 2 and not found[4]) for word in words]
    if found[2] is None and not all(known) or len(words) > 3 or _NO_UNITS.intersection(words):
        return text, ""
    unit = " ".join(word.rstrip("s") if len(word) > 2 else word for word in words)
    return found[1].strip(), unit + (found[5] or "")


_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)"
_DECIMAL = re.compile(rf"([+-]?) ?({_DIGITS})(?:e([+-]?\d{{1,3}})| ?(?:\\times|\\cdot|\*) ?10 ?\^ ?\{{?([+-]?\d{{1,3}})\}}?)?", re.I)
_FRACTION = re.compile(rf"([+-]?) ?(?:(\d+) )?([+-]?{_DIGITS}) ?/ ?({_DIGITS})")


def _number(text: str) -> Fraction | None:
    """The exact value of a decimal, a fraction, a mixed number or a power-of-ten product; None for anything else."""
    text = re.sub(r"\\frac\{([^{}]+)\}\{([^{}]+)\}", r" \1/\2", text).strip().strip("()")
    if len(text) > 200:
        return None
    if found := _DECIMAL.fullmatch(text):
        value = Fraction(re.sub("[, ]", "", found[2])) * Fraction(10) ** int(found[3] or found[4] or 0)
        return -value if found[1] == "-" else value
    if found := _FRACTION.fullmatch(text):
        whole, over, under = (Fraction(re.sub("[, ]", "", part or "0")) for part in found.group(2, 3, 4))
        if under:
            return (whole + over / under) * (-1 if found[1] == "-" else 1)
    return None


def _equal_expressions(given: str, gold: str) -> bool:
    """Whether math-verify finds the two equal; words are not expressions (Friday would be the product F*r*i*d*a*y)."""
    if any(re.search(r"[a-zA-Z]{3,}", re.sub(r"\\[a-zA-Z]+", "", text)) for text in (given, gold)):
        return False
    math_verify = _import("math_verify", "math-verify")
    config = [math_verify.LatexExtractionConfig()]           # the whole text or nothing: its other extractor searches
    parsed = [math_verify.parse(f"${text}$", config, "no_fallback", parsing_timeout=None, raise_on_error=True)
              for text in (gold, given)]
    return math_verify.verify(*parsed, timeout_seconds=None, raise_on_error=True)   # our own limit can't be swallowed


def _import(module: str, package: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} can't be imported ({error}): pip install {package}") from error


def reasoning_gym_reward(sample: dict) -> float:
    """reasoning_gym's own score of the text in the last <answer> tag, else of the whole response."""
    name = (sample.get("metadata") or {}).get("source_dataset") or sample["source_dataset"]
    tagged = re.findall(r"<answer>(.*?)</answer>", sample["response"], re.DOTALL)
    answer = (tagged[-1] if tagged else sample["response"]).strip()
    return _import("reasoning_gym", "reasoning-gym").get_score_answer_fn(name)(answer, sample)


def http_reward(url: str, sample: dict, time_limit_s: float) -> float:
    """The "reward" of the JSON reply to a POST of the sample; 3 attempts within the time limit if the server is away."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen
    body = json.dumps(sample, default=str).encode()
    for attempt in (1, 2, 3):
        try:
            with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=0.25 * time_limit_s) as reply:
                return json.load(reply)["reward"]
        except OSError as error:
            refused = isinstance(error, HTTPError) and error.code < 500 and error.code != 429   # asking again is no use
            if refused or attempt == 3:
                raise
            time.sleep(0.05 * attempt * time_limit_s)


# One loaded function: its name in the metrics, what to call with a list of samples, whether it wants the whole batch.
@dataclass(frozen=True)
class _Function:
    name: str
    call: Callable[[list[dict]], Sequence]
    batched: bool = False


RULES = {"exact": exact_reward, "gsm8k": gsm8k_reward, "math": math_reward}
IN_PROCESS = ("exact", "gsm8k")     # can't hang, no foreign code
ALIASES = {"prompts": "prompt", "responses": "response", "answers": "answer", "completions": "response",
           "completion": "response", "solution_str": "response", "ground_truth": "answer"}      # TRL's and verl's names


def load_function(spec: str | Callable, time_limit_s: float) -> _Function:
    """The function that a spec names (module docstring); ValueError if it does not exist or can't be imported."""
    if callable(spec):
        return _user_function(spec, getattr(spec, "__name__", "function"))
    if spec in RULES:
        if spec == "math":
            _import("math_verify", "math-verify")
            import logging
            logging.getLogger("math_verify").setLevel(logging.ERROR)    # it warns that its own time limit is off
        return _Function(spec, lambda samples: [RULES[spec](s["response"], s["answer"]) for s in samples])
    if spec == "reasoning_gym":
        _import("reasoning_gym", "reasoning-gym")
        return _Function(spec, lambda samples: [reasoning_gym_reward(s) for s in samples])
    if spec.startswith(("http://", "https://")):
        return _Function(spec, lambda samples: [http_reward(spec, s, time_limit_s) for s in samples])
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"unknown: use one of {', '.join(RULES)}, reasoning_gym, reward_model, path.py:function, http://...")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {os.path.abspath(path)}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))          # as if the file was run: its siblings import
    module_spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name}")
    return _user_function(getattr(module, name), name)


def _user_function(function: Callable, name: str) -> _Function:
    """Columns are passed by parameter name; a parameter called responses or completions asks for lists of the whole batch."""
    parameters = inspect.signature(function).parameters
    batched = "responses" in parameters or "completions" in parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(samples: list[dict]) -> Sequence:
        columns = dict.fromkeys(samples[0]) if takes_all else {}
        columns |= {p: None for p in parameters if ALIASES.get(p, p) in samples[0]}
        values = {name: [s[ALIASES.get(name, name)] for s in samples] for name in columns}
        if not batched:
            values = {name: column[0] for name, column in values.items()}
        result = function(**values)
        if inspect.isawaitable(result):
            import asyncio
            result = asyncio.run(_await(result))
        return result if batched else [result]

    return _Function(name, call, batched)


async def _await(result):
    return await result


def _evaluate(function: _Function, samples: list[dict]) -> list[tuple[float | None, str]]:
    """(reward, "") or (None, traceback) of each sample; an exception or a wrong count is the error of all of them."""
    try:
        values = function.call(samples)
        if isinstance(values, str) or len(values) != len(samples):
            raise ValueError(f"returned {values!r:.100} for {len(samples)} samples: one number for each, in their order")
    except Exception:                                        # the user's code: counted and shown, never silent
        return [(None, traceback.format_exc()[-4000:])] * len(samples)
    return [_checked(value) for value in values]


def _checked(value) -> tuple[float | None, str]:
    try:
        reward = float(value) if not isinstance(value, str) else math.nan    # "1.0" is a bug, not a reward
    except Exception as error:                               # None, a list, a tensor of several elements, 10**400
        return None, f"returned {value!r:.100}, which is no number ({error})"
    return (reward, "") if math.isfinite(reward) else (None, f"returned {value!r:.100}: a reward must be a finite number")


def serve(connection: socket.socket, functions: Sequence[str | Callable], time_limit_s: float, memory_limit_mb: int) -> None:
    """A worker's whole life: load the functions, answer calls until the trainer's end of the pipe closes."""
    if memory_limit_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20, memory_limit_mb << 20))
    try:
        loaded = [load_function(function, time_limit_s) for function in functions]
    except Exception as error:                               # importing runs the user's code
        _send(connection, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    _send(connection, json.dumps({"batched": [function.batched for function in loaded]}).encode())
    worker = os.getpid()
    while request := _receive(connection, None):
        index, samples, limit_s = pickle.loads(request)
        faulthandler.dump_traceback_later(limit_s + 5, exit=True)   # ends an orphan that hangs after its trainer was killed
        results = _evaluate(loaded[index], samples)
        faulthandler.cancel_dump_traceback_later()
        if os.getpid() != worker:
            os._exit(0)                                      # a forked child came back: it must not answer as well
        _reap_children()
        _send(connection, json.dumps(results).encode())
    os.killpg(0, signal.SIGKILL)                             # and whatever the functions have started


def _reap_children() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(8, "big") + message)


def _receive(connection: socket.socket, deadline: float | None) -> bytes:
    """One message; b"" at the end of the stream; TimeoutError at the deadline (time.monotonic)."""
    message, missing = b"", 8
    while missing:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        chunk = connection.recv(min(missing, 1 << 20))
        if not chunk:
            return b""
        message, missing = message + chunk, missing - len(chunk)
        if len(message) == 8 and missing == 0:
            missing, size = int.from_bytes(message, "big"), message
            if missing > 1 << 28:
                return b""                                   # a function wrote into our pipe: treat the worker as dead
    return message[8:]


class _Worker:
    """One worker process in a session of its own: a fresh interpreter on this file, or a fork if functions are callables."""

    def __init__(self, functions: Sequence[str | Callable], config: RewardConfig):
        self.connection, theirs = socket.socketpair()
        arguments = (list(functions), config.time_limit_s, config.memory_limit_mb)
        self.process = None
        if not any(map(callable, functions)):
            command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), json.dumps(arguments)]
            # Not the start method of multiprocessing: it imports the training script, torch included, once per worker.
            # stdout goes to stderr: what functions print can't break the protocol. Without a GPU: each context costs 0.5 GB.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
                                            start_new_session=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
            self.pid = self.process.pid
        else:
            self.pid = os.fork()
            if self.pid == 0:
                os.setsid()
                self.connection.close()
                serve(theirs, *arguments)
                os._exit(0)
        theirs.close()

    def ready(self) -> list[bool]:
        """Which functions want a whole batch; ValueError if one can't be loaded."""
        try:
            reply = json.loads(_receive(self.connection, time.monotonic() + 120) or '{"error": "the worker died while it was imported"}')
        except TimeoutError:
            reply = {"error": "importing it takes more than 120 s"}
        if "error" in reply:
            self.kill()
            raise ValueError(f"a reward function can't be loaded: {reply['error']}")
        return reply["batched"]

    def call(self, index: int, samples: list[dict], limit_s: float) -> list[tuple[float | None, str]] | None:
        """Results of one call, or None if the worker died; TimeoutError."""
        deadline = time.monotonic() + limit_s
        self.connection.settimeout(limit_s)
        try:
            _send(self.connection, pickle.dumps((index, samples, limit_s)))
            reply = _receive(self.connection, deadline)
        except ConnectionError:
            reply = b""
        return json.loads(reply) if reply else None

    def kill(self) -> int:
        """Ends the process and its group, and returns its exit code; leaves no zombie."""
        os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait() if self.process else os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Scorer:
    """Scores samples in the background: submit each as soon as it is sampled, collect the rewards of all.

    reward_model: what `reward_model` in config.functions means, a function of a list of samples that runs in this process
    in collect (all ranks call it together). callables: functions by name, which run in forks of this process.
    """

    def __init__(self, config: RewardConfig, *, reward_model: Callable[[list[dict]], list[float]] | None = None,
                 callables: Mapping[str, Callable] | None = None):
        self.config = config
        self._local = {}                                     # position in config.functions -> function run in this process
        for position, spec in enumerate(config.functions):
            if spec in IN_PROCESS:
                self._local[position] = load_function(spec, config.time_limit_s)
            elif spec == "reward_model":
                if reward_model is None:
                    raise ValueError("--reward.functions names reward_model, but no reward model is given")
                self._local[position] = _Function(spec, reward_model, batched=True)
        self._remote = [position for position in range(len(config.functions)) if position not in self._local]
        self._specs = [(callables or {}).get(config.functions[position], config.functions[position]) for position in self._remote]
        self._samples: dict[int, dict] = {}
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        self._shown: set[int] = set()
        self._closed = False
        self._workers = [_Worker(self._specs, config) for _ in range(config.num_workers if self._remote else 0)]
        try:
            batched = [worker.ready() for worker in self._workers]
        except ValueError:
            self.close()
            raise
        self._batched = {p for p, function in self._local.items() if function.batched}
        self._batched |= {p for p, is_batched in zip(self._remote, batched[0] if batched else []) if is_batched}
        self._threads = [threading.Thread(target=self._feed, args=(slot,), daemon=True) for slot in range(len(self._workers))]
        for thread in self._threads:
            thread.start()

    def submit(self, index: int, sample: dict) -> None:
        """Queues one sample: "prompt", "response", "answer", "truncated" and further columns. Returns at once."""
        assert index not in self._samples, f"sample {index} was submitted twice"
        self._samples[index] = sample
        for position, function in self._local.items():
            if not function.batched:
                self._done.put((position, [index], _evaluate(function, [sample]), False))
        for position in self._remote:
            if position not in self._batched:
                self._tasks.put((position, [index], [sample]))

    def collect(self, num_samples: int) -> tuple[list[float], dict[str, float]]:
        """Rewards of samples 0..num_samples-1 and error_frac, timeout_frac, <function>_mean; waits for what is missing.

        RuntimeError if more than max_error_frac of one function's calls have failed.
        """
        assert sorted(self._samples) == list(range(num_samples)), f"{len(self._samples)} submitted, {num_samples} wanted"
        samples = [self._samples[index] for index in range(num_samples)]
        self._samples = {}
        for position in self._remote:
            if position in self._batched and samples:
                self._tasks.put((position, list(range(num_samples)), samples))
        for position, function in self._local.items():
            if function.batched:                             # with no samples too: the model's forwards are collective
                self._done.put((position, list(range(num_samples)), [_checked(x) for x in function.call(samples)], False))
        outcomes = {}                                        # (position, index) -> (reward or None, error, timed out)
        while len(outcomes) < num_samples * len(self.config.functions):
            try:
                position, indices, results, timed_out = self._done.get(timeout=1)
            except queue.Empty:
                if not all(thread.is_alive() for thread in self._threads):
                    raise RuntimeError("a scoring thread has ended; its traceback is above") from None
                continue
            outcomes |= {(position, index): (*result, timed_out) for index, result in zip(indices, results)}
        return self._total(outcomes, num_samples)

    def _total(self, outcomes: dict, num_samples: int) -> tuple[list[float], dict[str, float]]:
        rewards, stats, num_errors, num_timeouts = [0.0] * num_samples, {}, 0, 0
        for position, name in enumerate(self.config.functions):
            column = [outcomes[position, index] for index in range(num_samples)]
            errors = [(index, error) for index, (reward, error, _) in enumerate(column) if reward is None]
            num_errors += len(errors)
            num_timeouts += sum(timed_out for *_, timed_out in column)
            if errors and position not in self._shown:
                self._shown.add(position)
                print(f"reward function {name} failed on sample {errors[0][0]}: {errors[0][1]}", file=sys.stderr, flush=True)
            if len(errors) > self.config.max_error_frac * num_samples:
                raise RuntimeError(f"reward function {name} failed on {len(errors)} of {num_samples} samples ({len(errors) / num_samples:.0%}), "
                                   f"more than --reward.max-error-frac {self.config.max_error_frac}; first: {errors[0][1]}")
            scores = [self.config.error_reward if reward is None else reward for reward, *_ in column]
            stats[f"{name}_mean"] = sum(scores) / max(num_samples, 1)
            weight = self.config.weights[position] if self.config.weights else 1.0
            rewards = [total + weight * score for total, score in zip(rewards, scores)]
        num_calls = max(num_samples * len(self.config.functions), 1)
        return rewards, {"error_frac": num_errors / num_calls, "timeout_frac": num_timeouts / num_calls, **stats}

    def _feed(self, slot: int) -> None:
        """One thread per worker: gives it tasks one by one, and replaces it when it hangs or dies."""
        while (task := self._tasks.get()) is not None:
            position, indices, samples = task
            # A batch may take as long as its samples would take one by one on all workers.
            limit_s = self.config.time_limit_s * math.ceil(len(samples) / self.config.num_workers)
            worker, timed_out = self._workers[slot], False
            try:
                results = worker.call(self._remote.index(position), samples, limit_s)
            except TimeoutError:
                results, timed_out = None, True
            if results is None:
                code = worker.kill()
                if self._closed:
                    return
                error = f"no result within {limit_s:g} s" if timed_out else f"its worker died, exit code {code}"
                results = [(None, error)] * len(samples)
                self._workers[slot] = _Worker(self._specs, self.config)
                self._workers[slot].ready()
            self._done.put((position, indices, results, timed_out))

    def close(self) -> None:
        """Ends all workers and whatever they have started."""
        self._closed = True
        for worker in self._workers:
            worker.kill()


def score(functions, samples: list[dict], *, time_limit_s: float = 5.0, num_workers: int = 4) -> tuple[list[float], dict[str, float]]:
    """Rewards and stats of all samples at once, by one function or several (callables or specs); never stops on errors."""
    functions = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
    callables = {getattr(f, "__name__", "function"): f for f in functions if callable(f)}
    names = tuple(getattr(f, "__name__", "function") if callable(f) else f for f in functions)
    config = RewardConfig(functions=names, num_workers=num_workers, time_limit_s=time_limit_s, max_error_frac=1.0)
    scorer = Scorer(config, callables=callables)
    try:
        for index, sample in enumerate(samples):
            scorer.submit(index, sample)
        return scorer.collect(len(samples))
    finally:
        scorer.close()


if __name__ == "__main__":
    _fd, _arguments = sys.argv[1:]
    serve(socket.socket(fileno=int(_fd)), *json.loads(_arguments))
