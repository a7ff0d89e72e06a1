"""FSDP2 shards -> full tensors, bucket by bucket -> the sampler's engine.

The problem. Trainer and sampler keep the same weights in different layouts: 1/W of every tensor in
fp32 here, whole (or tensor-parallel) tensors in bf16 there. Before each rollout the weights must
cross. Gathering the whole model first costs a full copy on every rank (15 GB for 7 B); gathering
tensor by tensor costs a collective per tensor; gathering fp32 moves twice the bytes.

How it works.
1. Cast the local shard to the sampler's dtype, then gather: half the bytes.
2. Tensors are grouped into buckets; one all-gather per bucket.
       rank 0 sends [a0 b0 c0], rank 1 sends [a1 b1 c1]   ->   a = a0 a1, b = b0 b1, c = c0 c1
3. While the engine loads one bucket, the next one is already being gathered.
4. The engine's own loader slices for tensor parallelism and fuses q, k, v; it takes the
   checkpoint's names.
A tied head is one parameter and is sent once, under the embedding's name. On one rank nothing is
gathered, only cast.

Peak extra memory: bucket_bytes plus the largest tensor, if the consumer drops what it was given.
Bytes received per rank: (W - 1) / W of the model in the sampler's dtype, which is the minimum for a
sampler that holds whole tensors. What we give up: with W equal to the tensor-parallel size each
rank needs only its own slices; HybridFlow's zero-redundancy layout (section 5.3) then moves almost
nothing. Here every rank gathers whole tensors. Sources: Sheng 2024 (HybridFlow, arXiv:2409.19256,
section 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# torch 2.13 has a new name for it and warns about the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sync_weights(
    model: nn.Module, engine, *, dtype: torch.dtype = torch.bfloat16, bucket_bytes: int = 1 << 29
) -> int:
    """Bytes of full tensors that `engine.load_weights` took from the sharded `model`. Collective
    over its mesh.
    """
    return engine.load_weights(iter_full_params(model, dtype=dtype, bucket_bytes=bucket_bytes))


@torch.no_grad()
def verify_sync(
    model: nn.Module, engine, *, dtype: torch.dtype = torch.bfloat16, bucket_bytes: int = 1 << 29
) -> None:
    """Raise RuntimeError naming the engine's parameters that do not hold what the trainer holds.
    Collective.

    The weights are loaded once more, after overwriting the engine's with NaN (so that a parameter
    which the loader does not reach shows as well), and fingerprints from before and after are
    compared: the engine's own loader says what is right.
    """
    before = _fingerprints(engine.model)
    for p in engine.model.parameters():
        if p.dtype.itemsize > 1:  # an 8-bit engine quantizes anew, from the tensors it is given
            p.fill_(float("nan"))
    sync_weights(model, engine, dtype=dtype, bucket_bytes=bucket_bytes)
    after = _fingerprints(engine.model)
    wrong = [name for name in after if before[name] != after[name]]
    if wrong:
        what = f"{len(wrong)} of {len(after)} engine parameters"
        raise RuntimeError(f"{what} are not the trainer's weights: {wrong[:4]}")


def _fingerprints(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Two sums over each parameter's bytes, one weighted by position: equal bytes, equal sums."""
    found = {}
    for name, p in model.named_parameters():
        total = weighted = 0
        for piece in p.detach().contiguous().view(torch.uint8).flatten().split(1 << 24):
            wide = piece.to(torch.int64)  # eight times the piece, hence the pieces
            total = total + wide.sum()
            place = torch.arange(len(wide), device=wide.device) % 65521 + 1
            weighted = weighted * 31 + (wide * place).sum()
        found[name] = int(total), int(weighted)
    return found


@torch.no_grad()
def iter_full_params(
    model: nn.Module, *, dtype: torch.dtype = torch.bfloat16, bucket_bytes: int = 1 << 29
) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of (checkpoint name, full tensor in `dtype`), each list a bucket; every parameter once.
    Collective.

    A yielded tensor stays valid as long as it is referenced: no buffer is reused. Stopping early
    leaves other ranks waiting.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # a forward without backward leaves whole parameters in the place of the shards
            module.reshard()
    # Tied parameters are listed once.
    parameters = [(_clean_name(name), p) for name, p in model.named_parameters()]
    # Four are alive at a time: what arrives, what has arrived, its tensors, and those that the
    # consumer still holds.
    gathers = (
        _start_gather(bucket, dtype)
        for bucket in _buckets(parameters, bucket_bytes // 4, dtype.itemsize)
    )
    arriving = next(gathers, None)
    while arriving is not None:
        arrived = arriving
        arriving = next(gathers, None)
        full = _finish_gather(arrived)
        del arrived
        yield full


def _clean_name(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _shard_axis(p: DTensor) -> tuple[dist.ProcessGroup, int]:
    """The process group over which p is split on dim 0, and its size."""
    axis = p.device_mesh.mesh_dim_names.index("shard")
    return p.device_mesh.get_group(axis), p.device_mesh.size(axis)


def _shard_size(p: Tensor, world: int) -> int:
    """Elements in rank 0's shard; the last ranks may have fewer rows, or none."""
    return math.ceil(p.shape[0] / world) * p.shape[1:].numel()


def _buckets(
    parameters: list[tuple[str, Tensor]], limit: int, itemsize: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive parameters whose full size together is at most `limit` bytes; a larger one is a
    bucket of its own.
    """
    bucket = []
    size = 0
    for name, p in parameters:
        if bucket and size + p.numel() * itemsize > limit:
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, p))
        size += p.numel() * itemsize
    if bucket:
        yield bucket


class _Gather(NamedTuple):
    """A bucket on its way."""

    bucket: list[tuple[str, Tensor]]  # the parameters; on one rank their full tensors already
    gathered: Tensor | None  # [W, elements per rank], filled when `work` is done
    work: dist.Work | None  # None on one rank


def _start_gather(bucket: list[tuple[str, Tensor]], dtype: torch.dtype) -> _Gather:
    """Cast this rank's shards into their place in a flat buffer, and start its all-gather."""
    first = bucket[0][1]
    if not isinstance(first, DTensor) or _shard_axis(first)[1] == 1:
        full = []
        for name, p in bucket:
            local = p.to_local() if isinstance(p, DTensor) else p.detach()
            full.append((name, local.to(dtype)))
        return _Gather(full, None, None)
    group, world = _shard_axis(first)
    sizes = [_shard_size(p, world) for _, p in bucket]
    gathered = torch.empty(world, sum(sizes), dtype=dtype, device=first.to_local().device)
    mine = gathered[dist.get_rank(group)]
    for piece, (_, p) in zip(mine.split(sizes), bucket, strict=True):
        shard = p.to_local()
        piece[: shard.numel()].copy_(shard.flatten())
    work = all_gather(gathered.view(-1), mine, group=group, async_op=True)
    return _Gather(bucket, gathered, work)


def _finish_gather(gather: _Gather) -> list[tuple[str, Tensor]]:
    """Wait for a bucket and cut it into full tensors."""
    gathered = gather.gathered
    if gather.work is None:
        return gather.bucket
    gather.work.wait()
    full = []
    start = 0
    for name, p in gather.bucket:
        size = _shard_size(p, len(gathered))
        piece = gathered[:, start : start + size]
        # A bucket of one tensor is already contiguous, and reshape is a view then: the largest
        # tensor is not copied.
        full.append((name, piece.reshape(-1)[: p.numel()].view(p.shape)))
        start += size
    return full
