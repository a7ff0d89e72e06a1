"""Saving and resuming a run, and exporting its model for everybody else.

The problem. A checkpoint is written while the machine may die: a half-written directory under the
final name is worse than none. It must hold everything that decides the next step (weights,
optimizer moments, position in the data, generators), in shards, because no rank has room for the
whole model, and it must load on another number of ranks.

How it works. Each rank writes its own shards with torch.distributed.checkpoint (DCP) into a
directory with a temporary name; when all are done, rank 0 renames it: a checkpoint exists
completely or not at all. What belongs to one rank (generator state) or is the same on all
(counters) is a small file per rank. The newest complete directory wins:
    runs/x/checkpoints/step-000040/  {.metadata, __0_0.distcp, ..., rank0.pt}
    runs/x/checkpoints/.step-000060/  the run died here; ignored, and removed by the next save
All hosts must see the same directory.

The export is a Hugging Face directory: full tensors come in buckets (from reshard.iter_full_params)
and go to files of at most `max_shard_bytes`, so that no rank holds a 7 B model's 15 GB.

What we give up: asynchronous saves (one in five runs of DCP's aborted a rank).
Source: torch.distributed.checkpoint; the safetensors index format of Transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


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
        if self.resume and not _complete(self.directory / "checkpoints"):
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
            saved = int(_complete(self.directory / "checkpoints")[-1].name.removeprefix("step-"))
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


class Stateful(Protocol):
    """What save() and load() take: anything with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainState:
    """A sharded model and its optimizer as one Stateful; saved shard by shard, loads at any world
    size.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        is_fresh = isinstance(self.optimizer, torch.optim.Optimizer) and not self.optimizer.state
        model, optimizer = get_state_dict(self.model, self.optimizer)
        if is_fresh:  # torch has made the state by a step of learning rate 0, which must not count
            for state in self.optimizer.state.values():
                state["step"].zero_()
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class GeneratorState:
    """The global generators of python, numpy and torch (and the GPU's) of this rank as a Stateful."""

    def state_dict(self) -> dict[str, Any]:
        import numpy

        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return dict(
            python=random.getstate(),
            numpy=numpy.random.get_state(),
            torch=torch.get_rng_state(),
            cuda=cuda,
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import numpy

        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def save(out_dir: str | Path, step: int, state: Mapping[str, Stateful], *, keep: int = 2) -> None:
    """Write `state` as out_dir/step-N, complete or not at all, then remove all but the newest
    `keep`. Collective.

    TrainState entries go into DCP shards, all others into one small file per rank. OSError (disk
    full) leaves earlier checkpoints as they were.
    """
    out_dir = Path(out_dir)
    final = out_dir / f"step-{step:06d}"
    temporary = out_dir / f".step-{step:06d}"
    if _is_rank0():
        out_dir.mkdir(parents=True, exist_ok=True)
        for stale in out_dir.glob(".step-*"):
            shutil.rmtree(stale)
    _barrier()
    try:
        dcp.save(_sharded(state), checkpoint_id=temporary)
    except dcp.CheckpointException as error:  # on all ranks, whichever failed
        if _is_rank0():
            shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            f"{final}: not saved ({_cause(error)}); earlier checkpoints are as they were"
        ) from error
    small = {
        name: value.state_dict()
        for name, value in state.items()
        if not isinstance(value, TrainState)
    }
    rank_file = temporary / f"rank{_rank()}.pt"
    torch.save({"step": step, "world_size": _world_size(), "state": small}, rank_file)
    with open(rank_file, "rb") as file:
        os.fsync(file.fileno())
    _barrier()
    if _is_rank0():
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        for old in _complete(out_dir)[:-keep]:
            shutil.rmtree(old)
    _barrier()


def load(out_dir: str | Path, state: Mapping[str, Stateful]) -> int:
    """The step of the newest complete checkpoint in out_dir, after loading it into `state`; 0 if
    there is none.

    Collective. On another number of ranks entries that belong to one rank (generators) come from
    some rank's file, with a message. Raises ValueError for a checkpoint of another model.
    """
    found = _complete(Path(out_dir))
    if not found:
        return 0
    if _is_rank0():
        print(f"resume: from {found[-1]}", flush=True)
    dcp_state = _sharded(state)
    try:
        dcp.load(dcp_state, checkpoint_id=found[-1])
    except dcp.CheckpointException as error:
        why = _cause(error)
        raise ValueError(
            f"{found[-1]}: is not of this model ({why}); resume with the same --model"
        ) from error
    rank_file = found[-1] / f"rank{_rank()}.pt"
    if not rank_file.exists():
        rank_file = found[-1] / "rank0.pt"
    saved = torch.load(rank_file, weights_only=False)
    if saved["world_size"] != _world_size() and _is_rank0():
        ranks = f"saved by {saved['world_size']} ranks, loaded by {_world_size()}"
        print(f"checkpoint: {ranks}: samples will differ", flush=True)
    for name, value in state.items():
        value.load_state_dict(
            dcp_state[name] if isinstance(value, TrainState) else saved["state"][name]
        )
    return saved["step"]


def _cause(error: dcp.CheckpointException) -> str:
    """What happened first on a rank that failed, in a line."""
    first = next(iter(error.failures.values()))[0]
    while first.__context__ is not None:  # a writer that fails again while it is closed
        first = first.__context__
    return " ".join(str(first).split())


def _sharded(state: Mapping[str, Stateful]) -> dict[str, Any]:
    return {
        name: value.state_dict() for name, value in state.items() if isinstance(value, TrainState)
    }


def _complete(out_dir: Path) -> list[Path]:
    found = [p for p in out_dir.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _is_rank0() -> bool:
    return _rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def save_safetensors(
    buckets: Iterable[list[tuple[str, Tensor]]],
    out_dir: str | Path,
    *,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write the full tensors of `buckets` as model-*.safetensors with an index, in files of about
    max_shard_bytes.

    Collective as far as producing the buckets is; rank 0 writes. One file is named
    model.safetensors and has no index.
    """
    from safetensors.torch import save_file

    if not _is_rank0():
        for _ in buckets:
            pass
        _barrier()
        return
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    for old in out_dir.glob("*.safetensors*"):
        old.unlink()
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(held, out_dir / f"part-{len(files):05d}.safetensors", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    total = held_bytes = 0
    for name, tensor in itertools.chain.from_iterable(buckets):
        if held and held_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            held_bytes = 0
        held[name] = tensor.contiguous().cpu()
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    flush()
    _name_files(out_dir, files, total)
    _barrier()


def _name_files(out_dir: Path, files: list[list[str]], total: int) -> None:
    """Give the parts their final names, now that their number is known, and write the index."""
    weight_map = {}
    for i, names in enumerate(files):
        final = (
            "model.safetensors"
            if len(files) == 1
            else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        )
        (out_dir / f"part-{i:05d}.safetensors").rename(out_dir / final)
        weight_map.update(dict.fromkeys(names, final))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def export(
    buckets: Iterable[list[tuple[str, Tensor]]],
    path: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype,
) -> None:
    """Write a Hugging Face directory: the tensors of `buckets` (of `dtype`), other files from the
    model at `path`.
    """
    save_safetensors(buckets, out_dir)
    if _is_rank0():
        copy_model_files(path, out_dir, dtype)
        print(
            f"the trained model is in {out_dir}; curves, samples and metrics are beside it",
            flush=True,
        )
    _barrier()


def copy_model_files(path: str | Path, out_dir: str | Path, dtype: torch.dtype) -> None:
    """Copy config, tokenizer and generation config of the model at `path`; config.json states
    `dtype`. Rank 0 only.
    """
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    for pattern in ("*.json", "*.jinja", "*.model", "*.txt"):
        for file in Path(path).glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, Path(out_dir) / file.name)
    config_file = Path(out_dir) / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)  # the older name of the same field
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2))
