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

import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


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
    """This rank's global generators of python, numpy, torch and the GPU, as an entry for save()."""

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
