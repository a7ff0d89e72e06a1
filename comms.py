# SPDX-FileCopyrightText: 2026 handful contributors (comms.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""INT8 gradients on the wire: quantized by block, summed over ranks, plugged into FSDP2.

The problem. Each step sums every gradient over all ranks: of 7 B parameters in fp32 28 GB leave and
enter a host, 2.2 s at 100 Gbit/s. What travels can be coarse, sums not: in int8 100 + 100 = -56.

How it works. Values are cut into blocks of 256, each with its own scale, the largest magnitude over
127. The error is at most scale / 2 = absmax / 254. With blocks of 4:
    x       0.50  -1.00   0.10   0.00 |  2e-6    1e-6   0   -3e-6     fp32, 4 bytes a value
    scale   1/127                     |  3e-6/127                     fp32, 4 bytes a block
    code      64   -127     13      0 |    85      42   0    -127     int8, 1 byte a value
    back   0.504  -1.00  0.102   0.00 |  2e-6 0.99e-6   0   -3e-6

A reduce-scatter quantizes its input [W, n], sends each rank its chunk of scales and codes in one
all-to-all, and sums the W dequantized chunks in fp32 [n]. An all-reduce quantizes these sums once
more and all-gathers them: all ranks end with the same bits. A message is the scales, then the codes
of one chunk, each padded to 16 bytes: 1 + 4/256 bytes a value, 0.508 of bf16, 0.254 of fp32. NaN or
Inf leave no finite value in their block, so the gradient norm shows them.
`quantize_gradients(model)` replaces FSDP2's reduce-scatter and, on a 2-D mesh (HSDP), its
all-reduce over the replicas. Nearest rounding has the smaller error in one step, stochastic none on
average. Error feedback adds what the reduction before lost. All this pays over links between hosts
that the step waits for; inside a host with NVLink the plain reduction hides behind the backward.
Shapes: n values in a chunk, W ranks, R rows (chunks) of a buffer, B = ceil(n / block_size) blocks
in a chunk, M bytes in a message. What we give up: ZeRO++ sums inside a host first and sends INT4
between hosts. Sources: ZeRO++ (arXiv 2306.10209, 3.3); 1-bit Adam (2102.02888).

Copied:
    import torch.distributed as dist
    from comms import quantize_gradients
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(8, 8))
    quantize_gradients(model)
"""

import fnmatch
import functools
import os
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

Rounding = Literal["nearest", "stochastic"]
SMALLEST_ABSMAX = 1.5e-36  # its scale, a 127th, is still a normal fp32

# torch 2.13 renamed these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def quantize_blockwise(
    x: Tensor, block_size: int = 256, *, rounding: Rounding = "nearest"
) -> tuple[Tensor, Tensor]:
    """codes = round(x / scale) with scale = max |x| of the block / 127: int8 [n] and fp32 [B].

    x: n values of any shape and floating dtype; the last block may be short. The error of codes *
    scale is at most scale / 2; with stochastic rounding below scale, and 0 on average.
    """
    _check_options(block_size, rounding)
    codes = torch.empty(1, x.numel(), dtype=torch.int8, device=x.device)
    scales = torch.empty(1, -(-x.numel() // block_size), device=x.device)
    _quantize_rows(x.reshape(-1), codes, scales, block_size, rounding)
    return codes[0], scales[0]


def dequantize_blockwise(q: Tensor, scales: Tensor, block_size: int = 256) -> Tensor:
    """code * scale of its block, fp32 [n]. q: int8 [n], scales: fp32 [B]."""
    _check_options(block_size)
    rule = f"scales {tuple(scales.shape)}: one for each block of {block_size} of {len(q)} codes"
    _require(scales.shape == (-(-len(q) // block_size),), rule)
    x = torch.empty(len(q), device=q.device)
    _dequantize_sum(q.contiguous()[None], scales.contiguous()[None], x, block_size)
    return x


def _check_options(block_size: int, rounding: Rounding = "nearest") -> None:
    rule = f"block_size {block_size} must be a power of two from 16 on: use 256"
    _require(block_size >= 16 and not block_size & (block_size - 1), rule)
    _require(rounding in ("nearest", "stochastic"), f"rounding {rounding!r}: nearest or stochastic")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


@torch.no_grad()
def _quantize_rows(
    x: Tensor, codes: Tensor, scales: Tensor, block_size: int, rounding: Rounding
) -> None:
    """codes [R, n] and scales [R, B] of x, up to R * n values in rows of n; missing ones are 0."""
    x = x.contiguous()  # the kernel reads memory in order
    num_rows, n = codes.shape
    num_blocks = scales.size(1)
    seed = None
    if rounding == "stochastic":
        # From the CPU generator, which checkpoints keep; equal errors on all ranks would add up.
        seed = int(torch.randint(1 << 30, ())) + (dist.get_rank() if dist.is_initialized() else 0)
    if x.is_cuda or "TRITON_INTERPRET" in os.environ:  # Triton's own switch to run on the CPU
        tile = max(1, 4096 // block_size)
        grid = (n // (tile * block_size) + 1, num_rows)  # + 1: a grid may not be empty
        quantize, _ = _kernels()
        quantize[grid](
            x, codes, scales, x.numel(), n, codes.stride(0), scales.stride(0), seed or 0,
            SMALLEST_ABSMAX, STOCHASTIC=seed is not None, BLOCK=block_size, TILE=tile, num_warps=8,
        )  # fmt: skip
        return
    rows = nn.functional.pad(x.float(), (0, num_rows * n - x.numel())).view(num_rows, n)
    rows = nn.functional.pad(rows, (0, num_blocks * block_size - n))
    blocks = rows.view(num_rows, num_blocks, block_size)
    absmax = blocks.abs().amax(-1)  # [R, B]; NaN if the block holds one
    absmax = absmax.masked_fill(absmax < SMALLEST_ABSMAX, 0.0)
    inverse = torch.where(absmax > 0, 127 / absmax, 0.0)
    # floor(y + 1/2) is the nearest integer, floor(y + u) with u uniform in [0, 1) is y on average.
    u = 0.5
    if seed is not None:
        u = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(seed))
    # The clamp is for 127 + 0.9999999, which is 128 in fp32 and would be -128 in int8.
    rounded = (blocks * inverse[..., None] + u).floor().clamp(-127, 127)
    codes.copy_(rounded.view(num_rows, -1)[:, :n])
    scales.copy_(absmax / 127)


@torch.no_grad()
def _dequantize_sum(codes: Tensor, scales: Tensor, out: Tensor, block_size: int) -> None:
    """out[i] = sum over the rows r of codes[r, i] * scales[r, i // block_size], in fp32."""
    if out.is_cuda or "TRITON_INTERPRET" in os.environ:
        num_rows, n = codes.shape
        tile = max(1, 4096 // block_size)
        _, dequantize = _kernels()
        dequantize[(n // (tile * block_size) + 1,)](
            codes, scales, out, num_rows, n, codes.stride(0), scales.stride(0),
            BLOCK=block_size, TILE=tile, num_warps=8,
        )  # fmt: skip
        return
    total = torch.zeros(out.numel())
    for row_codes, row_scales in zip(codes, scales, strict=True):
        total += row_codes * row_scales.repeat_interleave(block_size)[: out.numel()]
    out.copy_(total)


@functools.cache
def _kernels() -> tuple[Callable, Callable]:
    """The two functions above for the GPU, one pass over memory each, in tiles of 4096 values."""
    global tl  # a kernel finds names in its module only
    import triton
    import triton.language as tl

    @triton.jit
    def quantize(
        x, codes, scales, numel, n, codes_stride, scales_stride, seed, smallest,
        STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (column < n) & (row * n + column < numel)
        values = tl.load(x + row * n + column, mask=inside, other=0.0).to(tl.float32)
        magnitudes = tl.where(values == values, tl.abs(values), float("inf"))  # tl.max drops NaN
        absmax = tl.max(magnitudes, axis=1)
        absmax = tl.where(absmax < smallest, 0.0, absmax)
        inverse = tl.where(absmax > 0, 127 / absmax, 0.0)
        u = 0.5
        if STOCHASTIC:
            # Offsets of 64 bits would cost four times as much.
            u = tl.rand(seed, (row * n + column).to(tl.int32))
        rounded = tl.minimum(tl.maximum(tl.floor(values * inverse[:, None] + u), -127.0), 127.0)
        tl.store(codes + row * codes_stride + column, rounded.to(tl.int8), mask=column < n)
        tl.store(scales + row * scales_stride + block, absmax / 127, mask=block * BLOCK < n)

    @triton.jit
    def dequantize(
        codes, scales, out, num_rows, n, codes_stride, scales_stride,
        BLOCK: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((TILE, BLOCK), tl.float32)
        for row in range(num_rows):
            code = tl.load(codes + row * codes_stride + column, mask=column < n, other=0)
            scale = tl.load(scales + row * scales_stride + block, mask=block * BLOCK < n, other=0.0)
            total += code.to(tl.float32) * scale[:, None]
        tl.store(out + column, total, mask=column < n)

    return quantize, dequantize


class _Messages:
    """R messages of n codes and their scales: the buffer for the wire, and two views of it."""

    def __init__(self, num_rows: int, n: int, block_size: int, device: torch.device):
        scales_bytes = 4 * -(-n // block_size)
        codes_start = -(-scales_bytes // 16) * 16  # a kernel loads 16 bytes at once
        message_bytes = codes_start + -(-n // 16) * 16
        self.wire = torch.empty(num_rows, message_bytes, dtype=torch.uint8, device=device)  # [R, M]
        self.scales = self.wire[:, :scales_bytes].view(torch.float32)  # [R, B]
        self.codes = self.wire[:, codes_start : codes_start + n].view(torch.int8)  # [R, n]


@torch.no_grad()
def quantized_reduce_scatter(
    output: Tensor, input: Tensor, group=None, *, block_size=256, rounding: Rounding = "nearest"
) -> None:
    """output [n] = sum over the ranks of their chunk for this one, quantized on the way, in fp32.

    input: contiguous [W * n]; any floating dtypes, any n. A rank sends (W - 1) * M bytes.
    """
    _check_options(block_size, rounding)
    n = output.numel()
    num_ranks = dist.get_world_size(group)
    rule = f"output of {n} values: contiguous, and one in {num_ranks} of input's {input.numel()}"
    _require(output.is_contiguous() and input.numel() == num_ranks * n, rule)
    if num_ranks == 1:
        output.copy_(input.reshape(output.shape))
        return
    _, received = _scatter(input.reshape(-1), n, group, block_size, rounding)
    _dequantize_sum(received.codes, received.scales, output.view(-1), block_size)


def _scatter(x: Tensor, n: int, group, block_size: int, rounding: Rounding) -> tuple:
    """x goes in chunks of n to all ranks: the messages that this one sent, and that it received."""
    sent = _Messages(dist.get_world_size(group), n, block_size, x.device)
    received = _Messages(dist.get_world_size(group), n, block_size, x.device)
    _quantize_rows(x, sent.codes, sent.scales, block_size, rounding)
    dist.all_to_all_single(received.wire, sent.wire, group=group)
    return sent, received


@torch.no_grad()
def quantized_all_reduce(
    x: Tensor, group=None, *, block_size=256, rounding: Rounding = "nearest", residual=None
) -> None:
    """x = sum of x over the ranks, in place, the same bits on all; quantized twice, added in fp32.

    x: contiguous, any floating dtype and size. residual: error feedback, fp32 [numel], zeros before
    the first call; it is added to x, and then holds what this call lost.
    """
    _check_options(block_size, rounding)
    _require(x.is_contiguous(), "x: must be contiguous, since it is summed in place")
    if dist.get_world_size(group) == 1:
        return
    n = -(-x.numel() // dist.get_world_size(group))
    flat = x.view(-1)
    if residual is not None:
        is_right = residual.dtype == torch.float32 and residual.shape == flat.shape
        _require(is_right, f"residual: must be fp32 of shape ({x.numel()},)")
        flat = flat.float() + residual  # what bf16 rounds away here could never come back
    sent, received = _scatter(flat, n, group, block_size, rounding)
    total = torch.empty(n, device=x.device)
    own = _Messages(1, n, block_size, x.device)
    _dequantize_sum(received.codes, received.scales, total, block_size)
    _quantize_rows(total, own.codes, own.scales, block_size, rounding)
    all_gather(received.wire.view(-1), own.wire.view(-1), group=group)
    if residual is not None:
        _dequantize_rows(sent, residual, block_size)
        torch.sub(flat, residual, out=residual)
        # What the second rounding lost is carried once, by the rank that rounded.
        lost = total - dequantize_blockwise(own.codes[0], own.scales[0], block_size)
        mine = residual[dist.get_rank(group) * n :][:n]
        mine += lost[: mine.numel()]
        residual.nan_to_num_(0.0, 0.0, 0.0)  # else one NaN would come back in every later sum
    _dequantize_rows(received, x.view(-1), block_size)


def _dequantize_rows(messages: _Messages, out: Tensor, block_size: int) -> None:
    """out = the rows one after the other; the last ones may be cut short."""
    for row, part in enumerate(out.split(messages.codes.size(1))):
        codes = messages.codes[row : row + 1, : part.numel()]
        _dequantize_sum(codes, messages.scales[row : row + 1], part, block_size)


Columns = list[tuple[int, bool]]  # of each parameter in a chunk: its values, and if quantized


def quantize_gradients(
    model: nn.Module,
    *,
    block_size: int = 256,
    rounding: Rounding = "nearest",
    exclude: Sequence[str] = (),
    error_feedback: bool = False,
) -> None:
    """From now on FSDP2 reduces the model's gradients in INT8, over shards and over replicas.

    model: after fully_shard on a 1-D or 2-D mesh. exclude: patterns of parameter names ("*norm*",
    "*embed*") that FSDP2 goes on reducing in its own dtype. error_feedback: on the replicate axis;
    keeps an fp32 shard on each rank. Works whether FSDP2 averages or sums.
    """
    _check_options(block_size, rounding)
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    excluded = set()
    for pattern in exclude:
        found = fnmatch.filter(names, pattern)
        _require(found, f"exclude {pattern!r} matches no parameter: try {min(names)!r}")
        excluded.update(names[name] for name in found)
    options = {"block_size": block_size, "rounding": rounding}
    reduce_scatter_int8 = functools.partial(quantized_reduce_scatter, **options)
    all_reduce_int8 = functools.partial(quantized_all_reduce, **options)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    _require(modules, "quantize_gradients: the model has no FSDP module: call fully_shard first")
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
        for param_group in filter(None, groups or [state._fsdp_param_group]):
            columns: Columns = []
            for p in param_group.fsdp_params:
                if p.sharded_param.requires_grad:
                    is_quantized = id(p.sharded_param) not in excluded
                    columns.append((p.padded_sharded_param_size.numel(), is_quantized))
            if not any(is_quantized for _, is_quantized in columns):
                continue
            module.set_custom_reduce_scatter(_QuantizedReduceScatter(columns, reduce_scatter_int8))
            mesh_info = getattr(param_group, "mesh_info_before_int8", param_group.mesh_info)
            if isinstance(mesh_info, DDPMeshInfo):
                param_group.mesh_info_before_int8 = mesh_info  # for a second call
                _replace_all_reduce(module, param_group, columns, all_reduce_int8, error_feedback)


class _QuantizedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter of one parameter group."""

    def __init__(self, columns: Columns, reduce_scatter_int8: Callable):
        self.columns = columns
        self.reduce_scatter_int8 = reduce_scatter_int8

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False
    ) -> None:
        """output_tensor [n] = sum or mean over the ranks of their chunk of input_tensor [W * n]."""
        rule = "a divide factor needs set_force_sum_reduction_for_comms(True)"
        _require(op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), rule)

        def reduce(output: Tensor, part: Tensor, is_quantized: bool) -> None:
            if not is_quantized:
                reduce_scatter(output, part, group=group, op=op)
                return
            self.reduce_scatter_int8(output, part, group)
            if op == dist.ReduceOp.AVG:
                output.div_(group.size())

        _by_columns(output_tensor, input_tensor, self.columns, reduce)


def _replace_all_reduce(
    module, param_group, columns: Columns, all_reduce_int8: Callable, error_feedback: bool
) -> None:
    """Lets FSDP2's hook reduce over the replicas instead of FSDP2 itself."""
    mesh_info = param_group.mesh_info_before_int8
    replicas = mesh_info.replicate_process_group
    residual = None
    # FSDP2 would call the hook after its own all-reduce, so the group is told that it has no
    # replicate axis.
    shards = FSDPMeshInfo(mesh=mesh_info.mesh, shard_mesh_dim=mesh_info.shard_mesh_dim)
    if param_group.post_forward_mesh_info == mesh_info:
        param_group.post_forward_mesh_info = shards  # else FSDP2 keeps a second shard after forward
    param_group.mesh_info = shards

    def reduce(output: Tensor, part: Tensor, is_quantized: bool) -> None:
        nonlocal residual
        output.copy_(part)
        if not is_quantized:
            dist.all_reduce(output, group=replicas)
            return
        if error_feedback and residual is None:
            residual = torch.zeros_like(output, dtype=torch.float32)
        all_reduce_int8(output, replicas, residual=residual)

    def hook(reduce_output: Tensor) -> None:
        if reduce_output.is_cuda:  # else the next layer could get its memory while it is read here
            reduce_output.record_stream(torch.cuda.current_stream())
        _by_columns(reduce_output, reduce_output, columns, reduce)
        if param_group.gradient_divide_factor is None:  # a mean: FSDP2 divides by the shards alone
            reduce_output.div_(replicas.size())

    module.set_all_reduce_hook(hook)


def _by_columns(output: Tensor, input: Tensor, columns: Columns, reduce: Callable) -> None:
    """output [n] = reduce(input [R * n], is_quantized), called for the columns of each kind."""
    if all(is_quantized for _, is_quantized in columns):
        reduce(output, input, True)
        return
    sizes = [num_values for num_values, _ in columns]
    _require(sum(sizes) == output.numel(), "exclude: a parameter got no gradient: freeze it")
    inputs = input.view(-1, output.numel()).split(sizes, dim=1)
    outputs = output.split(sizes)
    for kind in (True, False):
        chosen = [i for i, (_, is_quantized) in enumerate(columns) if is_quantized is kind]
        reduced = torch.cat([outputs[i] for i in chosen])
        reduce(reduced, torch.cat([inputs[i] for i in chosen], dim=1).flatten(), kind)
        for i, values in zip(chosen, reduced.split([sizes[i] for i in chosen]), strict=True):
            outputs[i].copy_(values)
