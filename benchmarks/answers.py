"""Answers: precision and recall of math_reward on tests/answers.jsonl, beside other graders.

    bash launch.sh python -m pip install math-verify mathruler pylatexenc
    bash launch.sh python benchmarks/answers.py --out benchmarks/results/answers.json

The table has for each gold answer other spellings of it and near neighbours: another number, sign,
unit, order, bracket, name. It was written for this grader and along its rules, so its own figures
say no more than that the rules are kept; those of the others say where they decide otherwise.

    precision   of the pairs that are called the same, the share that is
    recall      of the pairs that are the same, the share that is called so
    errors      exceptions and pairs that took more than 5 s; they count as called different
    slowest ms  CPU time of the slowest pair

Graders: ours; math-verify with its defaults, both answers in $...$; mathruler's grade_answer. A
package that is not installed is left out.
"""

import argparse
import importlib
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 5


def ours() -> Callable[[str, str], bool]:
    sys.path.insert(0, str(ROOT))  # the root's answers.py, not this file
    sys.modules.pop("answers", None)
    math_reward = importlib.import_module("answers").math_reward
    return lambda given, gold: math_reward("\\boxed{" + given + "}", gold) == 1.0


def math_verify() -> Callable[[str, str], bool]:
    package = importlib.import_module("math_verify")

    def same(given: str, gold: str) -> bool:
        parsed = [package.parse(f"${text}$", parsing_timeout=None) for text in (gold, given)]
        return bool(package.verify(*parsed, timeout_seconds=None))

    return same


def mathruler() -> Callable[[str, str], bool]:
    grade = importlib.import_module("mathruler.grader").grade_answer
    return lambda given, gold: bool(grade(given, gold))


def stop(*_) -> None:
    raise TimeoutError


def measure(same: Callable[[str, str], bool], rows: list[dict]) -> dict:
    """Precision, recall, errors and times of one grader on all pairs."""
    found = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
    num_errors = 0
    slowest_s = 0.0
    start = time.process_time()
    for row in rows:
        for is_same in (True, False):
            for given in row["same" if is_same else "other"]:
                before = time.process_time()
                signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
                try:
                    called_same = same(given, row["gold"])
                except Exception:  # another's code
                    called_same = False
                    num_errors += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                slowest_s = max(slowest_s, time.process_time() - before)
                found[is_same, called_same] += 1
    right = found[True, True]
    return {
        "precision": right / (right + found[False, True]),
        "recall": right / (right + found[True, False]),
        "wrongly_same": found[False, True],
        "wrongly_different": found[True, False],
        "errors": num_errors,
        "seconds": time.process_time() - start,
        "slowest_ms": 1000 * slowest_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file; default none")
    args = parser.parse_args()
    lines = (ROOT / "tests" / "answers.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    signal.signal(signal.SIGALRM, stop)
    records = []
    for name, grader in (("ours", ours), ("math-verify", math_verify), ("mathruler", mathruler)):
        try:
            same = grader()
        except ModuleNotFoundError as error:
            print(f"{name} is left out: no {error.name}")
            continue
        which = "" if name == "ours" else version(name)
        records.append({"grader": name, "version": which, **measure(same, rows)})
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    setting = {
        "golds": len(rows),
        "pairs_same": sum(len(row["same"]) for row in rows),
        "pairs_different": sum(len(row["other"]) for row in rows),
        "python": platform.python_version(),
        "commit": git.stdout.strip(),
    }
    print(json.dumps(setting))
    print(
        f"{'grader':<20} {'precision':>9} {'recall':>7} {'errors':>6} {'s':>6} {'slowest ms':>10}"
    )
    for r in records:
        name = f"{r['grader']} {r['version']}"
        shares = f"{r['precision']:>9.3f} {r['recall']:>7.3f}"
        print(f"{name:<20} {shares} {r['errors']:>6} {r['seconds']:>6.1f} {r['slowest_ms']:>10.1f}")
    if args.out:
        args.out.write_text(json.dumps({"setting": setting, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
