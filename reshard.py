# SPDX-FileCopyrightText: 2026 handful contributors (reshard.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
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
5. What is kept in parts, as a weight and its adapter are (lora.py), is put together on the way.
A tied head is one parameter and is sent once, under the embedding's name. On one rank nothing is
gathered, only cast. The mesh of fully_shard may have any names and a replicated axis; parts that
are not sharded, and models under DDP, are sent as they are.

Peak extra memory: bucket_bytes plus the largest tensor, if the consumer drops what it was given.
Bytes received per rank: (W - 1) / W of the model in the sampler's dtype, which is the minimum for a
sampler that holds whole tensors. What we give up: with W equal to the tensor-parallel size each
rank needs only its own slices; HybridFlow's zero-redundancy layout (section 5.3) then moves almost
nothing. Here every rank gathers whole tensors. Sources: Sheng 2024 (HybridFlow, arXiv:2409.19256,
section 5).

Copied: `engine` of sync_weights is any object with load_weights(buckets) and dtype. Under torchrun
init_process_group() needs no arguments.
    import torch.distributed as dist
    from reshard import iter_full_params
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(8, 8))
    for bucket in iter_full_params(model):
        print([(name, list(tensor.shape)) for name, tensor in bucket])
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Merges = Mapping[str, tuple[list[str], Callable[..., Tensor]]]  # see iter_full_params

# torch 2.13 has a new name for it and warns about the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sync_weights(
    model: nn.Module,
    engine,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 1 << 29,
    merges: Merges | None = None,
) -> int:
    """Bytes of full tensors that `engine.load_weights` took from the sharded `model`.

    Collective over the model's ranks. dtype: what is sent; None: the engine's own (`engine.dtype`).
    merges: as in iter_full_params; other weights never change then, and an engine that still holds
    them (`engine.holds_weights`) gets the merged ones alone.
    """
    dtype = dtype or engine.dtype
    options = dict(dtype=dtype, bucket_bytes=bucket_bytes, merges=merges)
    if merges and engine.holds_weights:
        buckets = iter_full_params(model, **options, merged_only=True)
        return engine.load_weights(buckets, partial=True)
    return engine.load_weights(iter_full_params(model, **options))


@torch.no_grad()
def verify_sync(
    model: nn.Module,
    engine,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 1 << 29,
    merges: Merges | None = None,
) -> None:
    """Raise RuntimeError naming what the engine does not hold as the trainer does. Collective.

    The engine's parameters are overwritten with NaN and the weights loaded once more. Then
    1. each tensor on the way was the trainer's, bit by bit, as torch's own `full_tensor` gathers
       it: no shard is misplaced, no name stands for another tensor;
    2. each parameter of the engine has the bytes that it had before: the first load had reached it;
    3. a parameter that goes by a checkpoint's name, or is fused from such (the engine's
       `packed_modules_mapping`), holds the same numbers, in whatever order the engine wants them.
    Not proven: that order, parameters of other types (8 bits) or cut by tensor parallelism in 3,
    and what the engine computes with them. rollout_corr/kl shows what is wrong there.
    """
    dtype = dtype or engine.dtype
    before = _fingerprints(engine.model)
    for p in engine.model.parameters():
        if p.dtype.itemsize > 1:  # an 8-bit engine quantizes anew, from the tensors it is given
            p.fill_(float("nan"))
    source = _parameters(model, merges)
    sums: dict[str, tuple[int, int]] = {}
    buckets = iter_full_params(model, dtype=dtype, bucket_bytes=bucket_bytes, merges=merges)
    engine.load_weights(_compared(buckets, source, dtype, sums, merges or {}))
    if lost := sorted(source.keys() - sums.keys() - _part_names(merges)):
        raise RuntimeError(f"{len(lost)} tensors of the trainer were not sent: {lost[:4]}")
    after = _fingerprints(engine.model)
    wrong = [name for name in after if before[name] != after[name]]
    if not wrong:
        size = getattr(getattr(engine, "config", None), "tensor_parallel_size", 1)
        wrong = _with_other_numbers(engine.model, dtype, sums, is_sliced=size > 1)
    if wrong:
        what = f"{len(wrong)} of {len(after)} engine parameters"
        raise RuntimeError(f"{what} are not the trainer's weights: {wrong[:4]}")


def _compared(
    buckets: Iterator[list[tuple[str, Tensor]]],
    source: dict[str, Tensor],
    dtype: torch.dtype,
    sums: dict[str, tuple[int, int]],
    merges: Merges,
) -> Iterator[list[tuple[str, Tensor]]]:
    """The same buckets, compared on their way; `sums` gets each tensor's size and sum of bits."""

    def whole(name: str) -> Tensor:
        p = source[name]
        return p.full_tensor() if isinstance(p, DTensor) else p.detach()

    for bucket in buckets:
        for name, tensor in bucket:
            expected = whole(name)
            if name in merges:
                parts, merge = merges[name]
                expected = merge(expected, *map(whole, parts))
            if not torch.equal(tensor, expected.to(dtype)):
                raise RuntimeError(f"{name} is sent with other numbers than the trainer's")
            sums[name] = tensor.numel(), _sum_of_bits(tensor)
        yield bucket


def _with_other_numbers(
    engine_model: nn.Module,
    dtype: torch.dtype,
    sums: dict[str, tuple[int, int]],
    *,
    is_sliced: bool,
) -> list[str]:
    """Names of engine parameters whose numbers are not those of their tensors, in any order."""
    fused = getattr(engine_model, "packed_modules_mapping", None) or {}
    wrong = []
    for name, p in engine_model.named_parameters():
        names = [name]
        for whole, parts in fused.items():
            if f".{whole}." in name and name not in sums:
                names = [name.replace(f".{whole}.", f".{part}.") for part in parts]
        known = [sums[part] for part in names if part in sums]
        num_elements = sum(numel for numel, _ in known)
        # Fewer elements: a slice. More: rows of zeros that fill up the vocabulary, or its slice.
        is_slice = p.numel() < num_elements or (is_sliced and p.numel() != num_elements)
        if p.dtype != dtype or len(known) < len(names) or is_slice:
            continue
        if _sum_of_bits(p) != sum(bits for _, bits in known):
            wrong.append(name)
    return wrong


def _sum_of_bits(x: Tensor) -> int:
    """The sum of a tensor's elements, read as integers: exact, and the same in any order."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return int(x.detach().contiguous().view(integers).sum(dtype=torch.int64))


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
    model: nn.Module,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bucket_bytes: int = 1 << 29,
    merges: Merges | None = None,
    merged_only: bool = False,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of (checkpoint name, full tensor in `dtype`), each list a bucket; every parameter once.
    Collective.

    merges: {name: (names of parts, function of the weight and its parts)}: under such a name goes
    what the function makes of full tensors in their own types, rounded to `dtype` once; the parts,
    which are gathered before and kept, go under none (lora.merges). merged_only: these names alone.
    A yielded tensor stays valid as long as it is referenced: no buffer is reused. Stopping early
    leaves other ranks waiting. Raises ValueError for what is not split by rows (FSDP2's default),
    for adapters without a merge, and for weights that wait in host memory.
    """
    parameters = _parameters(model, merges)
    if not merges:
        yield from _gathered(parameters, dtype, bucket_bytes)
        return
    sharded = {name: parameters.pop(name) for name in sorted(_part_names(merges))}
    parts: dict[str, Tensor] = {}
    for bucket in _gathered(sharded, torch.float32, bucket_bytes):
        parts.update(bucket)
    if merged_only:
        parameters = {name: parameters[name] for name in merges}
    own_dtype = next(iter(parameters.values())).dtype
    for bucket in _gathered(parameters, own_dtype, bucket_bytes):
        yield [(name, _merged(name, weight, parts, merges).to(dtype)) for name, weight in bucket]


def _merged(name: str, weight: Tensor, parts: dict[str, Tensor], merges: Merges) -> Tensor:
    """What is sent under the name."""
    if name not in merges:
        return weight
    names, merge = merges[name]
    return merge(weight, *(parts[part] for part in names))


def _part_names(merges: Merges | None) -> set[str]:
    lists = [names for names, _ in (merges or {}).values()]
    return set(itertools.chain.from_iterable(lists))


def _gathered(
    parameters: dict[str, Tensor], dtype: torch.dtype, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The same parameters whole and in `dtype`, in buckets."""
    # Four buckets are in memory at a time: what arrives, what has arrived, its tensors, and those
    # that the consumer still holds.
    gathers = (
        _start_gather(bucket, dtype)
        for bucket in _buckets(list(parameters.items()), bucket_bytes // 4, dtype.itemsize)
    )
    arriving = next(gathers, None)
    while arriving is not None:
        arrived = arriving
        arriving = next(gathers, None)
        full = _finish_gather(arrived)
        del arrived
        yield full


def _parameters(model: nn.Module, merges: Merges | None) -> dict[str, Tensor]:
    """{checkpoint name: parameter or shard}; tied parameters are listed once."""
    parts = _part_names(merges)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # a forward without backward leaves whole parameters in the place of the shards
            module.reshard()
    found = {clean_name(name): p for name, p in model.named_parameters()}
    for name, p in found.items():
        if name not in parts and re.search(
            r"^base_model\.|\.base_layer\.|lora_|parametrizations\.", name
        ):
            advice = "merge the adapters or parametrizations first (PEFT: merge_and_unload())"
            raise ValueError(f"{name}: is a part of a weight, not one of a checkpoint; {advice}")
        _split_of(name, p)
    return found


def clean_name(name: str) -> str:
    """A parameter's name in the checkpoint, without the prefixes of torch.compile and activation
    checkpointing.
    """
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _split_of(name: str, p: Tensor) -> tuple[dist.ProcessGroup | None, int]:
    """The process group over which p is split by rows, and its size; (None, 1): p is whole."""
    local = p.to_local() if isinstance(p, DTensor) else p
    if local.numel() and not local.is_meta and not local.untyped_storage().nbytes():
        raise ValueError(f"{name}: has no memory now; use `with offload.present(model):`")
    if not isinstance(p, DTensor):
        return None, 1
    axes = [axis for axis, x in enumerate(p.placements) if not x.is_replicate()]
    if not axes:
        return None, 1
    if len(axes) > 1 or not p.placements[axes[0]].is_shard(0):
        rule = "must be split by rows (Shard(0)) over one mesh axis, as fully_shard does by default"
        raise ValueError(f"{name}: is laid out as {p.placements}; {rule}")
    return p.device_mesh.get_group(axes[0]), p.device_mesh.size(axes[0])


def _shard_size(p: Tensor, world: int) -> int:
    """Elements in rank 0's shard; the last ranks may have fewer rows, or none."""
    return math.ceil(p.shape[0] / world) * p.shape[1:].numel()


def _buckets(
    parameters: list[tuple[str, Tensor]], limit: int, itemsize: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive parameters that are split alike and together take at most `limit` bytes; a larger
    one is a bucket of its own.
    """
    bucket = []
    size = 0
    split = None
    for name, p in parameters:
        own = _split_of(name, p)
        if bucket and (own != split or size + p.numel() * itemsize > limit):
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, p))
        size += p.numel() * itemsize
        split = own
    if bucket:
        yield bucket


class _Gather(NamedTuple):
    """A bucket on its way."""

    bucket: list[tuple[str, Tensor]]  # the parameters; on one rank their full tensors already
    gathered: Tensor | None  # [W, elements per rank], filled when `work` is done
    work: dist.Work | None  # None on one rank


def _start_gather(bucket: list[tuple[str, Tensor]], dtype: torch.dtype) -> _Gather:
    """Cast this rank's shards into their place in a flat buffer, and start its all-gather."""
    group, world = _split_of(*bucket[0])
    if world == 1:
        full = []
        for name, p in bucket:
            local = p.to_local() if isinstance(p, DTensor) else p.detach()
            full.append((name, local.to(dtype)))
        return _Gather(full, None, None)
    sizes = [_shard_size(p, world) for _, p in bucket]
    gathered = torch.empty(world, sum(sizes), dtype=dtype, device=bucket[0][1].to_local().device)
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
