# SPDX-FileCopyrightText: 2026 handful contributors (run.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""A run begins and ends: process group, command line, directory, errors.

The problem. Much of what goes wrong before the first step is the user's to mend, and that starts
with the message. A traceback from eight ranks hides it; a setting of the wrong type is found an
hour later; a second run writes over the first.

How it works.
1. `command_line` turns flags into one frozen dataclass. Its defaults are, in this order:
       --config FILE     the settings of an earlier run, from its config.json
       no --model        the built-in job's settings
       otherwise         the dataclass's own
   Flags go over them. A file's settings are checked as flags are: names, types, choices, ranges.
2. Inside `one_line_errors` a ValueError or OSError ends the job in a line, whoever meets it.
3. `RunConfig.open` makes the run's directory and locks it for as long as the process lives. An
   earlier run of that name is kept under a number, unless it is resumed.
4. An uncaught exception ends its rank at once, without the clean-up that waits for collectives
   which nobody joins any more. torchrun then ends the others.
Source: tyro for the command line; torchrun's environment variables for the process group.

Copied:
    from run import init_distributed
    mesh = init_distributed(seed=0, timeout_s=600)
    print(mesh.mesh_dim_names)  # ('shard',)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class RunConfig:
    output_dir: str = "runs"
    """Directory of all runs, on a file system that all hosts share."""
    name: str = "run"
    """The run's own directory in it; an earlier run of that name is renamed, unless resumed."""
    save_minutes: float = 10.0
    """Save the state every this many minutes, at most 2 % of the time, and at the end; 0: off."""
    save_every: int = 0
    """Save the state every this many steps as well, and at the end; 0: off."""
    keep: int = 2
    """Newest saved states to keep."""
    resume: bool = False
    """Continue this name's run from its newest saved state."""
    max_skipped: int = 8
    """Stop after this many minibatches in a row were skipped, as their gradient was not finite."""

    def __post_init__(self):
        is_name = self.name not in ("", ".", "..") and "/" not in self.name
        rule = "the name of a directory in --output-dir; try run"
        require(is_name, "--name", repr(self.name), rule)
        minutes = self.save_minutes
        require(0 <= minutes < 1e7, "--save-minutes", minutes, "at least 0 (off) and below 1e7")
        require(self.save_every >= 0, "--save-every", self.save_every, "at least 0 (off)")
        require(self.max_skipped >= 1, "--max-skipped", self.max_skipped, "at least 1")
        require(self.keep >= 1, "--keep", self.keep, "at least 1")

    @property
    def directory(self) -> Path:
        return Path(self.output_dir) / self.name

    def check(self, settings: Any, *model_paths: str) -> None:
        """ValueError, before memory is taken, if open() could not do its work: a run of this name
        goes on, a model lies in its directory, the disk is full, a resume has other settings."""
        for path in filter(None, model_paths):
            if self.directory.resolve() in Path(path).resolve().parents:
                where = "lies in the directory of this run"
                raise ValueError(f"--model {path}: {where}; give another --name")
        if self.resume:
            self._check_resume(_to_json(settings))
        if os.environ.get("RANK", "0") == "0":
            self._check_disk(*model_paths[:1])
            if (self.directory / "lock").exists():
                os.close(self._lock())

    def open(self, settings: Any) -> None:
        """Make the run's directory, hold it, and write `settings` to config.json. Rank 0 alone.
        An earlier run of this name, unless resumed, is kept under the next free number."""
        if os.environ.get("RANK", "0") != "0":
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        held = self._lock()
        known = _to_json(settings)
        if self.resume:
            for flag, (old, new) in self._changes(known).items():
                print(f"resume: {flag} {old} -> {new}", flush=True)
        elif (self.directory / "config.json").exists():
            self._keep_earlier_run()
            held = self._lock()
        os.pwrite(held, f"{os.getpid()} on {os.uname().nodename}".ljust(99).encode(), 0)
        part = self.directory / "config.json.part"
        part.write_text(json.dumps(known, indent=2))
        part.replace(self.directory / "config.json")  # a kill leaves a whole one

    def _check_disk(self, *model_paths: str) -> None:
        """The directory can be made, and holds the model that is written at the end."""
        nearest = next(p for p in (self.directory, *self.directory.parents) if p.exists())
        is_open = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
        require(is_open, "--output-dir", self.output_dir, "a directory that you may write to")
        files = [file for path in model_paths for file in Path(path).glob("model*.safetensors")]
        needed = sum(file.stat().st_size for file in files) / 2**30
        free = shutil.disk_usage(nearest).free / 2**30
        rule = f"on a disk with room for the model: {needed:.2f} GiB, and {free:.2f} are free"
        require(needed <= free, "--output-dir", self.output_dir, rule)

    def _check_resume(self, known: dict[str, Any]) -> None:
        steps = saved_steps(self.directory)
        if not steps:
            raise ValueError(f"--resume: {self.directory} has no saved state; leave it out")
        is_steered = known.get("gae", {}).get("kl_target")  # then the saved coefficient holds
        fixed = (*FIXED_ON_RESUME, "--gae.kl-coef") if is_steered else FIXED_ON_RESUME
        for flag, (old, _) in self._changes(known).items():
            if flag in fixed or flag.startswith("--lora."):
                made = f"{self.directory} was made with {flag} {old}"
                raise ValueError(f"--resume: {made}; give the same")
        if steps[-1] > known.get("num_steps", steps[-1]):
            has = f"{self.directory} has {steps[-1]} already; give more"
            raise ValueError(f"--num-steps {known['num_steps']}: {has}")

    def _changes(self, known: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """{flag: (its value in config.json, its value in `known`)} where they differ."""
        earlier = _flat(read_settings(self.directory / "config.json", "--resume"))
        now = _flat(known)
        return {flag: (x, now.get(flag)) for flag, x in earlier.items() if x != now.get(flag)}

    def _keep_earlier_run(self) -> None:
        numbered = (Path(f"{self.directory}.{n}") for n in itertools.count(1))
        kept = next(path for path in numbered if not path.exists())
        self.directory.rename(kept)
        print(f"{self.directory}: the earlier run of this name is now {kept}", flush=True)
        self.directory.mkdir()

    def _lock(self) -> int:
        """Hold the directory until this process ends or closes the file, which is returned."""
        held = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = (self.directory / "lock").read_text().strip() or "?"
            if who == f"{os.getpid()} on {os.uname().nodename}":
                who += ", this one,"
            at_work = f"process {who} is at work there; end it or give another one"
            raise ValueError(f"--name {self.name}: {at_work}") from error
        except OSError as error:  # Lustre without -o flock, NFS without lockd
            if os.fstat(held).st_size == 0:  # a new file: it was not said yet
                why = f"cannot be locked ({error.strerror}); start no second run of this --name"
                print(f"warning: {self.directory}: {why}", flush=True)
        return held


def _to_json(settings: Any) -> dict[str, Any]:
    known = json.loads(json.dumps(asdict(settings)))
    known.get("run", {}).update(resume=False)  # --config of this file starts a new run
    return known


# Settings that a saved state depends on. A resumed run may change all others; it prints changes.
FIXED_ON_RESUME = ("--seed", "--model", "--reward-model", "--critic.path", "--model.master-dtype")
FIXED_ON_RESUME += ("--data", "--sft.data", "--dpo.data", "--data.weights", "--data.split")
FIXED_ON_RESUME += ("--rollout-every", "--refresh-every")


def saved_steps(directory: Path) -> list[int]:
    """The steps of which a run's directory has a complete state, in ascending order."""
    names = [path.name for path in (directory / "checkpoints").glob("step-*")]
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{6,}", name))


def require(holds: object, flag: str, value: object, rule: str) -> None:
    """ValueError "flag value: must be rule" unless `holds`."""
    if not holds:
        if isinstance(value, tuple):
            value = " ".join(map(str, value))
        raise ValueError(f"{flag} {value}: must be {rule}")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Inside, a ValueError or OSError ends the job with one line "error: ..." and exit code 1."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The host's first rank has mostly met the same error: its line is then the only one.
            time.sleep(5)
        sys.exit(f"error: {' '.join(str(error).split())}")


def init_distributed(seed: int, timeout_s: float) -> DeviceMesh:
    """A 1-D mesh "shard" over all ranks of torchrun (one without it); selects this rank's device.

    seed: of torch, the same on all ranks. timeout_s: when a collective fails that a rank does not
    join; it must exceed the longest rollout and reward.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    single = {}
    if "MASTER_PORT" not in os.environ:  # a single process: no port to collide on
        single = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if not single:
        _end_with_parent()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **single)
    sys.excepthook = _exit_now
    torch.manual_seed(seed)
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _end_with_parent() -> None:
    """Have Linux end this rank when torchrun is killed, or it would train on and hold its GPU."""
    with contextlib.suppress(AttributeError):  # another system
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _exit_now(kind, value, trace) -> None:
    """Report an uncaught exception, in a line if that says all, and leave without clean-up."""
    text = f"error: {' '.join(str(value).split()) or kind.__name__}"
    silence = re.search(r"(?:Timed out waiting|timeout after) (\d+)ms", str(value))  # torch's words
    if silence:
        why = "another rank did not answer for so long; it hangs, is stopped, or needs more"
        text = f"error: --timeout-s {int(silence[1]) / 1000:g}: {why}"
    elif not (issubclass(kind, (OSError, KeyboardInterrupt)) or str(value).startswith("--")):
        text = "".join(traceback.format_exception(kind, value, trace))
    print(f"[rank {os.environ.get('RANK', '0')}] {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def leave(status: int | None = None) -> None:
    """End a finished run on all ranks, without what engines print when they exit. Collective."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(status or 0)


def command_line(default: Any, built_in: Mapping[str, Any], description: str) -> Any:
    """The flags in sys.argv over the defaults; a wrong one ends in one line and exit code 2."""
    import tyro

    argv = sys.argv[1:]
    is_first = os.environ.get("RANK", "0") == "0"
    description += "\n--config FILE starts from an earlier run's config.json; flags go over it."
    try:
        if (file := _take(argv, "--config")) is not None:
            default = from_json(default, read_settings(Path(file), "--config"))
        elif _take(list(argv), "--model") in (None, "built-in"):
            default = from_json(default, built_in)
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            options = dict(default=default, description=description, console_outputs=is_first)
            settings = tyro.cli(type(default), args=argv, **options)
        for flag, value in _flat(asdict(settings)).items():
            values = value if isinstance(value, tuple) else (value,)
            require(all(x == x for x in values), flag, value, "a number")  # NaN passes a "<"
        return settings
    except ValueError as error:
        message = str(error)
    except SystemExit as stop:
        if not stop.code:
            raise
        message = _without_frame(printed.getvalue(), argv)
    if is_first:
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def _take(argv: list[str], flag: str) -> str | None:
    """What follows `flag`, which is removed from argv with it."""
    for i, word in enumerate(argv):
        if word == flag:
            if i + 1 == len(argv):
                raise ValueError(f"{flag}: expected one argument")
            argv[i : i + 2] = [f"{flag}={argv[i + 1]}"]
        if argv[i].startswith(f"{flag}="):
            return argv.pop(i).partition("=")[2]
    return None


def _without_frame(text: str, argv: list[str]) -> str:
    """tyro's message as one line, without its frame and its advice."""
    line = " ".join(re.sub(r"[^\x21-\x7e]+|-{3,}", " ", text).split())
    line = re.sub(r" (For full helptext,|Argument helptext:) .*", "", line)
    line = re.sub(r"^(Unrecognized options|Invalid choice|Missing argument) ", "", line)
    line = re.sub(r"^Value error Error parsing (\w+: )?", "", line)
    stray = line.removeprefix("Unrecognized options: ").split(" ")[0]
    if stray in argv and not stray.startswith("-") and line.startswith("Unrecognized"):
        return f"{_up_to(stray, argv)}: a word too many; flags are --name value"
    return line


def _up_to(stray: str, argv: list[str]) -> str:
    """A flag and its words up to `stray`; where that stands twice, not a flag's first."""
    places = [i for i, word in enumerate(argv) if word == stray]
    last = next((i for i in places if not argv[max(0, i - 1)].startswith("--")), places[0])
    flags = [i for i, word in enumerate(argv[:last]) if word.startswith("--")]
    return " ".join(argv[max(flags, default=last) : last + 1])


def read_settings(file: Path, flag: str) -> dict[str, Any]:
    """The settings of a run's config.json; ValueError, which begins with `flag`, without one."""
    rule = "give an earlier run's config.json"
    if not file.is_file():
        raise ValueError(f"{flag} {file}: no such file; {rule}")
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(settings := json.loads(file.read_text()), dict):
            return settings
    raise ValueError(f"{flag} {file}: is not a JSON object; {rule}")


def from_json(default: Any, values: Mapping[str, Any], prefix: str = "--") -> Any:
    """The dataclass `default` with `values`, as json made them of asdict(...).

    Values that are left out stay as in `default`. Raises ValueError, which names the flag, for a
    name that is no setting, another type or choice, and as the dataclasses themselves do.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix.rstrip('.')} {values}: must be a group of settings")
    kinds = typing.get_type_hints(type(default))
    known = {}
    for name, value in values.items():
        flag = _flag(prefix, name)
        if name not in kinds:
            raise ValueError(f"{flag}: is no setting; written by another version?")
        old = getattr(default, name)
        if is_dataclass(old):
            known[name] = from_json(old, value, _group(flag))
        else:
            known[name] = _typed(value, kinds[name], flag)
    return replace(default, **known)


# Fields whose flag has another name.
FLAGS = {"model_path": "model", "data_paths": "data", "eval_paths": "eval-data"}
FLAGS |= {"reward_model_path": "reward-model"}


def _flag(prefix: str, name: str) -> str:
    return prefix + FLAGS.get(name, name.replace("_", "-"))


def _group(flag: str) -> str:
    """What the flags of a group begin with."""
    return "--" if flag in ("--run", "--batch") else f"{flag}."


def _typed(value: Any, kind: Any, flag: str) -> Any:
    """`value` if it is of the type `kind`; a list becomes a tuple, and an int a float."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        is_choice = any(value == x and type(value) is type(x) for x in choices)
        require(is_choice, flag, value, f"one of {', '.join(map(str, choices))}")
        return value
    if typing.get_origin(kind) is tuple:
        require(isinstance(value, (list, tuple)), flag, repr(value), "a list")
        kinds = typing.get_args(kind)
        if kinds[-1] is ...:
            kinds = kinds[:1] * len(value)
        require(len(value) == len(kinds), flag, list(value), f"{len(kinds)} values")
        return tuple(_typed(x, k, flag) for x, k in zip(value, kinds, strict=True))
    if kind is float and type(value) is int:
        return float(value)
    require(type(value) is kind, flag, repr(value), f"of type {kind.__name__}")
    return value


def _flat(settings: Mapping[str, Any], prefix: str = "--") -> dict[str, Any]:
    """{flag: value} of nested settings."""
    flat = {}
    for name, value in settings.items():
        flag = _flag(prefix, name)
        flat |= _flat(value, _group(flag)) if isinstance(value, Mapping) else {flag: value}
    return flat
