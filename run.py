"""A run begins and ends."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def init_distributed(seed: int, timeout_s: float) -> DeviceMesh:
    """A 1-D mesh "shard" over all ranks that torchrun started (one rank without it); this rank's
    device is selected.

    Collectives fail after timeout_s: it must exceed the longest rollout or reward. Seeds torch
    alike on all ranks.
    """
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
    }.items():
        os.environ.setdefault(name, value)
    alone = {}
    if "MASTER_PORT" not in os.environ:
        alone = dict(
            store=dist.HashStore(), rank=0, world_size=1
        )  # a single process: no port to collide on
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **alone)
    sys.excepthook = _exit_now
    torch.manual_seed(seed)
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _exit_now(kind, value, trace) -> None:
    """Report an uncaught exception and leave without clean-up: a normal exit waits for collectives
    nobody joins.
    """
    text = "".join(traceback.format_exception(kind, value, trace))
    print(f"[rank {os.environ.get('RANK', '0')}] {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def leave() -> None:
    """End a finished run on all ranks: a normal exit would print what the engine's libraries leave.
    Collective.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True)
class RunConfig:
    output_dir: str = "runs"
    """Directory of all runs."""
    name: str = "run"
    """The run's own directory in it; an earlier run of that name is renamed, unless it is resumed.
    """
    save_every: int = 0
    """Save the training state every this many steps, and at the end; 0: never."""
    keep: int = 2
    """Newest saved states to keep."""
    resume: bool = False
    """Continue this name's run from its newest saved state."""

    def __post_init__(self):
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(
                f"--name {self.name!r}: must be the name of a directory in --output-dir; try run"
            )
        if self.save_every < 0 or self.keep < 1:
            raise ValueError(
                f"--save-every {self.save_every}: at least 0 (off); --keep {self.keep}: at least 1"
            )

    @property
    def directory(self) -> Path:
        return Path(self.output_dir) / self.name

    def open(self, settings: Any, *model_paths: str) -> None:
        """Make the run's directory and write `settings` (a dataclass) to config.json. Rank 0 only.

        Nothing is overwritten: the directory of an earlier run of this name, unless resumed, gets
        the next free number. Raises ValueError if that run is still at work, if one of the models
        lies in its directory, and for a resume without a saved state.
        """
        for path in model_paths:
            if self.directory.resolve() in Path(path).resolve().parents:
                raise ValueError(
                    f"--model {path}: lies in the directory of this run; give another --name"
                )
        if self.resume and not saved_steps(self.directory):
            where = self.directory / "checkpoints"
            raise ValueError(
                f"--resume: there is no saved state in {where}; leave it out, and set --save-every"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock()
        if not self.resume and (self.directory / "config.json").exists():
            number = next(
                n for n in itertools.count(1) if not Path(f"{self.directory}.{n}").exists()
            )
            self.directory.rename(f"{self.directory}.{number}")
            print(
                f"{self.directory}: the earlier run of this name is now {self.directory}.{number}",
                flush=True,
            )
            self.directory.mkdir()
            self._lock()
        known = json.loads(json.dumps(asdict(settings)))
        known.get("run", {}).update(resume=False)  # --config of this file starts a new run
        if self.resume and (self.directory / "config.json").exists():
            earlier = json.loads((self.directory / "config.json").read_text())
            for name, flag in (
                ("seed", "--seed"),
                ("data_paths", "--data"),
                ("model_path", "--model"),
            ):
                if (made := earlier.get(name)) != known.get(name):
                    raise ValueError(
                        f"--resume: {self.directory} was made with {flag} {made}; give the same"
                    )
            saved = saved_steps(self.directory)[-1]
            if saved > known.get("num_steps", saved):
                raise ValueError(
                    f"--num-steps {known['num_steps']}: {self.directory} has {saved} already; give more"
                )
        (self.directory / "config.json").write_text(json.dumps(known, indent=2))

    def _lock(self) -> None:
        """Hold the directory until this process ends, however it ends."""
        held = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = f"process {(self.directory / 'lock').read_text().strip() or '?'}"
            raise ValueError(
                f"--name {self.name}: {who} is at work there; end it or give another one"
            ) from error
        os.pwrite(held, f"{os.getpid()} on {os.uname().nodename}".ljust(99).encode(), 0)


def from_json(default: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass `default` with `values`, as json made them of asdict(...): nested dataclasses
    and tuples restored.

    Values that are left out stay as in `default`. Raises ValueError for a name that is no field,
    and as the dataclasses themselves do.
    """
    known = {}
    for name, value in values.items():
        if name not in {field.name for field in fields(default)}:
            raise ValueError(
                f"{type(default).__name__} has no setting {name!r}: written by another version?"
            )
        old = getattr(default, name)
        if is_dataclass(old):
            value = from_json(old, value)
        known[name] = tuple(value) if isinstance(value, list) else value
    return replace(default, **known)


def command_line(default: Any, built_in: Mapping[str, Any], description: str) -> Any:
    """The settings by sys.argv over `default`'s: with --config FILE over an earlier run's
    config.json, without --model over `built_in`. A refused setting is one line "error: ..." and
    exit code 2.
    """
    import tyro

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, metavar="FILE")
    earlier, argv = parser.parse_known_args()
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--model", nargs="?", default="built-in")
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        if earlier.config is not None:
            if not earlier.config.is_file():
                raise ValueError(
                    f"--config {earlier.config}: no such file; give an earlier run's config.json"
                )
            default = from_json(default, _read_settings(earlier.config))
        elif peek.parse_known_args(argv)[0].model == "built-in":
            default = from_json(default, built_in)
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            options = dict(default=default, description=description, console_outputs=is_first)
            settings = tyro.cli(type(default), args=argv, **options)
        if flags := list(_flags_without_number(asdict(settings))):
            raise ValueError(f"{' '.join(flags)}: is not a number")
        return settings
    except ValueError as error:
        message = str(error)
    except SystemExit as stop:
        if not stop.code:
            raise
        message = " ".join(
            re.sub(r"[^\x21-\x7e]+", " ", printed.getvalue()).split()
        )  # without tyro's frame
        message = re.sub(
            r"^Value error Error parsing \S+: | For full helptext, see .*", "", message
        )
    if is_first:
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def _read_settings(file: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(settings := json.loads(file.read_text()), dict):
            return settings
    raise ValueError(f"--config {file}: is not a JSON object; give an earlier run's config.json")


def _flags_without_number(settings: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flags_without_number(value, f"{prefix}{name}.")
        elif any(
            x != x for x in (value if isinstance(value, tuple) else (value,))
        ):  # NaN, which comparisons let pass
            yield f"{prefix}{name} nan".replace("_", "-")


def saved_steps(directory: Path) -> list[int]:
    """The steps of which a run's directory has a complete state, in ascending order."""
    found = [p.name for p in (directory / "checkpoints").glob("step-*")]
    return sorted(int(n.removeprefix("step-")) for n in found if re.fullmatch(r"step-\d{6,}", n))
