"""INT8 gradients on the wire: block-wise quantization, a reduce-scatter and an all-reduce of it,
plugged into FSDP2.

The problem. Each step reduces every gradient over all ranks: for 7 B parameters in fp32 28 GB leave
and enter a host, 2.2 s at 100 Gbit/s. What travels can be coarse; sums must not be: in int8 100 +
100 = -56.

How it works. Values are cut into blocks of 256, each with its own scale, the largest magnitude over
127, so that small values do not drown. The error is at most scale / 2 = absmax / 254. With blocks
of 4:

    x       0.50  -1.00   0.10   0.00 |  2e-6    1e-6   0   -3e-6     fp32, 4 bytes a value
    scale   1/127                     |  3e-6/127                     fp32, 4 bytes a block
    code      64   -127     13      0 |    85      42   0    -127     int8, 1 byte a value
    back   0.504  -1.00  0.102   0.00 |  2e-6 0.99e-6   0   -3e-6

A reduce-scatter quantizes its input [W, n], sends each rank its chunk of scales and codes in one
all-to-all, and sums the W dequantized chunks in fp32 [n]. An all-reduce quantizes these sums once
more and all-gathers them: every rank decodes the same bytes and ends with the same bits. A message
is the scales, then the codes of one chunk, each padded to 16 bytes: 1 + 4/256 bytes a value, 0.508
of bf16, 0.254 of fp32. NaN or Inf leave no finite value in their block, so the gradient norm shows
them; blocks below 1.5e-36, whose scale would not be a normal float, become 0.

`quantize_gradients(model)` replaces FSDP2's reduce-scatter and, on a 2-D mesh (HSDP), its
all-reduce over the replicas. Rounding to the nearest has the smaller error in one step, stochastic
rounding none on average over many. Error feedback adds to a reduction what the one before lost; it
is there for the replica axis, where it costs a shard. When it pays: between hosts, over links that
the step waits for. Inside a host with NVLink it does not: the plain reduction hides behind the
backward pass, and quantizing reads and writes all gradients once more. Shapes: n values in a chunk,
W ranks, B = ceil(n / block_size) blocks in a chunk, M bytes in a message. What we give up: ZeRO++
sums inside a host first and sends INT4 between hosts; here one all-to-all spans all ranks. Sources:
ZeRO++ (arXiv 2306.10209), section 3.3; error feedback: 1-bit Adam (arXiv 2102.02888).
"""

import argparse
import fnmatch
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
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
    _check_block_size(block_size)
    codes = torch.empty(1, x.numel(), dtype=torch.int8, device=x.device)
    scales = torch.empty(1, -(-x.numel() // block_size), device=x.device)
    _quantize_rows(x.reshape(-1), codes, scales, block_size, rounding)
    return codes[0], scales[0]


def dequantize_blockwise(q: Tensor, scales: Tensor, block_size: int = 256) -> Tensor:
    """code * scale of its block, fp32 [n]. q: int8 [n], scales: fp32 [B]."""
    _check_block_size(block_size)
    x = torch.empty(q.numel(), device=q.device)
    _dequantize_sum(q[None], scales[None], x, block_size)
    return x


def _check_block_size(block_size: int) -> None:
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size {block_size} must be a power of two from 16 on: use 256")


@torch.no_grad()
def _quantize_rows(
    x: Tensor, codes: Tensor, scales: Tensor, block_size: int, rounding: Rounding
) -> None:
    """Quantizes x, at most R * n values read as R rows of n (missing ones are 0), to codes [R, n],
    scales [R, B].
    """
    (num_rows, n), num_blocks, seed = codes.shape, scales.size(1), None
    if rounding == "stochastic":
        # From torch's CPU generator, which checkpoints keep; each rank its own, since equal errors
        # would add up.
        seed = int(torch.randint(1 << 30, ())) + (dist.get_rank() if dist.is_initialized() else 0)
    if (
        x.is_cuda or "TRITON_INTERPRET" in os.environ
    ):  # Triton's own switch to run kernels on the CPU
        tile = max(1, 4096 // block_size)
        _kernels()[0][(n // (tile * block_size) + 1, num_rows)](  # + 1: a grid may not be empty
            x, codes, scales, x.numel(), n, codes.stride(0), scales.stride(0), seed or 0, SMALLEST_ABSMAX,
            STOCHASTIC=seed is not None, BLOCK=block_size, TILE=tile, num_warps=8)  # fmt: skip
        return
    rows = nn.functional.pad(x.float(), (0, num_rows * n - x.numel())).view(num_rows, n)
    blocks = nn.functional.pad(rows, (0, num_blocks * block_size - n)).view(
        num_rows, num_blocks, block_size
    )
    absmax = blocks.abs().amax(-1)  # [R, B]; NaN if the block holds one
    absmax = absmax.masked_fill(absmax < SMALLEST_ABSMAX, 0.0)
    inverse = torch.where(absmax > 0, 127 / absmax, 0.0)
    # floor(y + 1/2) is the nearest integer, floor(y + u) with u uniform in [0, 1) is y on average.
    u = (
        0.5
        if seed is None
        else torch.rand(blocks.shape, generator=torch.Generator().manual_seed(seed))
    )
    # The clamp is for 127 + 0.9999999, which is 128 in fp32 and would be -128 in int8.
    rounded = (blocks * inverse[..., None] + u).floor().clamp(-127, 127)
    codes.copy_(rounded.view(num_rows, -1)[:, :n])
    scales.copy_(absmax / 127)


@torch.no_grad()
def _dequantize_sum(codes: Tensor, scales: Tensor, out: Tensor, block_size: int) -> None:
    """out[i] = sum over the rows r of codes[r, i] * scales[r, i // block_size], in fp32. codes [R,
    n], out [n].
    """
    if out.is_cuda or "TRITON_INTERPRET" in os.environ:
        (num_rows, n), tile = codes.shape, max(1, 4096 // block_size)
        _kernels()[1][(n // (tile * block_size) + 1,)](
            codes, scales, out, num_rows, n, codes.stride(0), scales.stride(0),
            BLOCK=block_size, TILE=tile, num_warps=8)  # fmt: skip
        return
    total = torch.zeros(out.numel())
    for row_codes, row_scales in zip(codes, scales):
        total += row_codes * row_scales.repeat_interleave(block_size)[: out.numel()]
    out.copy_(total)


@functools.cache
def _kernels() -> tuple:
    """The two functions above for the GPU, each one pass over memory. A program takes a tile of
    4096 values.
    """
    global tl  # a kernel finds names in its module only
    import triton
    import triton.language as tl

    @triton.jit
    def quantize(x, codes, scales, numel, n, codes_stride, scales_stride, seed, smallest,
                 STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (column < n) & (row * n + column < numel)
        values = tl.load(x + row * n + column, mask=inside, other=0.0).to(tl.float32)
        absmax = tl.max(
            tl.where(values == values, tl.abs(values), float("inf")), axis=1
        )  # else tl.max drops NaN
        absmax = tl.where(absmax < smallest, 0.0, absmax)
        inverse = tl.where(absmax > 0, 127 / absmax, 0.0)
        u = 0.5
        if STOCHASTIC:
            u = tl.rand(
                seed, (row * n + column).to(tl.int32)
            )  # of 64 bits it would cost four times as much
        rounded = tl.minimum(tl.maximum(tl.floor(values * inverse[:, None] + u), -127.0), 127.0)
        tl.store(codes + row * codes_stride + column, rounded.to(tl.int8), mask=column < n)
        tl.store(scales + row * scales_stride + block, absmax / 127, mask=block * BLOCK < n)

    @triton.jit
    def dequantize(codes, scales, out, num_rows, n, codes_stride, scales_stride,
                   BLOCK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
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
    """R messages of n codes and their scales: the buffer for the wire, and the two views that are
    written and read.
    """

    def __init__(self, num_rows: int, n: int, block_size: int, device: torch.device):
        scales_bytes = 4 * -(-n // block_size)
        codes_start = -(-scales_bytes // 16) * 16  # a kernel loads 16 bytes at once
        self.wire = torch.empty(
            num_rows, codes_start + -(-n // 16) * 16, dtype=torch.uint8, device=device
        )  # [R, M]
        self.scales = self.wire[:, :scales_bytes].view(torch.float32)  # [R, B]
        self.codes = self.wire[:, codes_start : codes_start + n].view(torch.int8)  # [R, n]


@torch.no_grad()
def quantized_reduce_scatter(
    output: Tensor,
    input: Tensor,
    group=None,
    *,
    block_size: int = 256,
    rounding: Rounding = "nearest",
) -> None:
    """output = sum over the ranks of their chunk for this rank, quantized on its way, added in
    fp32.

    input: contiguous [W * n], W chunks; output: [n]; any floating dtypes, any n. A rank sends (W -
    1) * M bytes.
    """
    _check_block_size(block_size)
    if dist.get_world_size(group) == 1:
        output.copy_(input)
        return
    _, received = _scatter(input.view(-1), output.numel(), group, block_size, rounding)
    _dequantize_sum(received.codes, received.scales, output, block_size)


def _scatter(
    x: Tensor, n: int, group, block_size: int, rounding: Rounding
) -> tuple[_Messages, _Messages]:
    """x in chunks of n, one for each rank: the quantized messages that this rank sent, and those
    that it received.
    """
    sent, received = (
        _Messages(dist.get_world_size(group), n, block_size, x.device) for _ in range(2)
    )
    _quantize_rows(x, sent.codes, sent.scales, block_size, rounding)
    dist.all_to_all_single(received.wire, sent.wire, group=group)
    return sent, received


@torch.no_grad()
def quantized_all_reduce(
    x: Tensor,
    group=None,
    *,
    block_size: int = 256,
    rounding: Rounding = "nearest",
    residual: Tensor | None = None,
) -> None:
    """x = sum of x over the ranks, in place, the same bits on all of them; quantized twice, added
    in fp32.

    x: contiguous, any floating dtype and size. residual: error feedback, fp32 [numel], zeros before
    the first call; it is added to x and then holds what this call lost. A rank sends 2 * (W - 1) *
    M bytes with n = ceil(numel / W).
    """
    _check_block_size(block_size)
    if dist.get_world_size(group) == 1:
        return
    flat, n = x.view(-1), -(-x.numel() // dist.get_world_size(group))
    if residual is not None:
        flat = (
            flat.float() + residual
        )  # in fp32: what bf16 would round away here could never come back
    sent, received = _scatter(flat, n, group, block_size, rounding)
    total, own = torch.empty(n, device=x.device), _Messages(1, n, block_size, x.device)
    _dequantize_sum(received.codes, received.scales, total, block_size)
    _quantize_rows(total, own.codes, own.scales, block_size, rounding)
    all_gather(received.wire.view(-1), own.wire.view(-1), group=group)
    if residual is not None:
        _dequantize_rows(sent, residual, block_size)
        torch.sub(flat, residual, out=residual)
        # What the second rounding lost goes to the residual of the rank that rounded: the next sum
        # has it once.
        mine = residual[dist.get_rank(group) * n :][:n]
        mine += (total - dequantize_blockwise(own.codes[0], own.scales[0], block_size))[
            : mine.numel()
        ]
        residual.nan_to_num_(
            0.0, 0.0, 0.0
        )  # else one NaN or Inf would come back in every later sum
    _dequantize_rows(received, x.view(-1), block_size)


def _dequantize_rows(messages: _Messages, out: Tensor, block_size: int) -> None:
    """out = the rows one after the other; the last ones may be cut short."""
    for row, part in enumerate(out.split(messages.codes.size(1))):
        codes = messages.codes[row : row + 1, : part.numel()]
        _dequantize_sum(codes, messages.scales[row : row + 1], part, block_size)


def quantize_gradients(
    model: nn.Module, *, block_size=256, rounding: Rounding = "nearest", exclude: Sequence[str] = (),
    error_feedback=False,
) -> None:  # fmt: skip
    """From now on FSDP2 reduces the model's gradients in INT8, over the shard axis and over a
    replicate axis.

    model: after fully_shard on a 1-D or 2-D mesh. exclude: patterns of parameter names ("*norm*",
    "*embed*") that FSDP2 goes on reducing in its own dtype. error_feedback: on the replicate axis;
    keeps an fp32 shard on each rank. A mean stays a mean and a sum a sum; a divide factor needs
    set_force_sum_reduction_for_comms(True).
    """
    _check_block_size(block_size)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for pattern in exclude:
        if not fnmatch.filter(names.values(), pattern):
            raise ValueError(
                f"exclude {pattern!r} matches no parameter: match names like {min(names.values())!r}"
            )
    excluded = {
        key
        for key, name in names.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in exclude)
    }
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            "quantize_gradients needs a sharded model, this has no FSDP module: call fully_shard first"
        )
    reduce_scatter_int8 = functools.partial(
        quantized_reduce_scatter, block_size=block_size, rounding=rounding
    )
    all_reduce_int8 = functools.partial(
        quantized_all_reduce, block_size=block_size, rounding=rounding
    )
    for module in modules:
        state = module._get_fsdp_state()
        param_groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
        for param_group in filter(
            None, [state._fsdp_param_group] if param_groups is None else param_groups
        ):
            params = [
                p for p in param_group.fsdp_params if p.sharded_param.requires_grad
            ]  # in the order of a chunk
            columns = [
                (p.padded_sharded_param_size.numel(), id(p.sharded_param) not in excluded)
                for p in params
            ]
            if any(quantized for _, quantized in columns):
                module.set_custom_reduce_scatter(
                    _QuantizedReduceScatter(columns, reduce_scatter_int8)
                )
                if isinstance(param_group.mesh_info, DDPMeshInfo):
                    _replace_all_reduce(
                        module, param_group, columns, all_reduce_int8, error_feedback
                    )


class _QuantizedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter of one parameter group. columns: (values in a chunk, quantized?) for
    each parameter.
    """

    def __init__(self, columns: list[tuple[int, bool]], reduce_scatter_int8: Callable):
        self.columns, self.reduce_scatter_int8 = columns, reduce_scatter_int8

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False
    ) -> None:
        """output_tensor [n] = sum or mean over the ranks of their chunk for this one; input_tensor
        [W * n].
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                "INT8 gradients with a divide factor need set_force_sum_reduction_for_comms(True): set it"
            )

        def reduce(output: Tensor, part: Tensor, quantized: bool):
            if not quantized:
                return reduce_scatter(output, part, group=group, op=op)
            self.reduce_scatter_int8(output, part, group)
            if op == dist.ReduceOp.AVG:
                output.div_(group.size())

        _by_columns(output_tensor, input_tensor, self.columns, reduce)


def _replace_all_reduce(
    module, param_group, columns, all_reduce_int8: Callable, error_feedback: bool
) -> None:
    """Lets FSDP2's hook reduce over the replicas instead of FSDP2 itself."""
    mesh_info, replicas, residual = (
        param_group.mesh_info,
        param_group.mesh_info.replicate_process_group,
        None,
    )
    # FSDP2 would call the hook after its own all-reduce, so the group is told that it has no
    # replicate axis.
    param_group.mesh_info = FSDPMeshInfo(
        mesh=mesh_info.mesh, shard_mesh_dim=mesh_info.shard_mesh_dim
    )
    if (
        param_group.post_forward_mesh_info == mesh_info
    ):  # else FSDP2 keeps a second shard after the forward
        param_group.post_forward_mesh_info = param_group.mesh_info

    def reduce(output: Tensor, part: Tensor, quantized: bool):
        nonlocal residual
        output.copy_(part)
        if not quantized:
            return dist.all_reduce(output, group=replicas)
        if error_feedback and residual is None:
            residual = torch.zeros_like(output, dtype=torch.float32)
        all_reduce_int8(output, replicas, residual=residual)

    def hook(reduce_output: Tensor) -> None:
        if (
            reduce_output.is_cuda
        ):  # else FSDP2 could hand its memory to the next layer while it is still read here
            reduce_output.record_stream(torch.cuda.current_stream())
        _by_columns(reduce_output, reduce_output, columns, reduce)
        if (
            param_group.gradient_divide_factor is None
        ):  # a mean over all ranks: FSDP2 now divides by the shards alone
            reduce_output.div_(replicas.size())

    module.set_all_reduce_hook(hook)


def _by_columns(
    output: Tensor, input: Tensor, columns: list[tuple[int, bool]], reduce: Callable
) -> None:
    """output [n] = input [rows * n] after reduce(output, input, quantized), called for the columns
    of each kind.
    """
    if all(quantized for _, quantized in columns):
        return reduce(output, input, True)
    sizes = [size for size, _ in columns]
    if sum(sizes) != output.numel():
        raise ValueError(
            "exclude needs a gradient for every parameter of a module: freeze the others, or exclude none"
        )
    parts = list(
        zip(columns, input.view(-1, output.numel()).split(sizes, dim=1), output.split(sizes))
    )
    for kind in (True, False):
        inputs, outputs = zip(*[(x, out) for (_, quantized), x, out in parts if quantized is kind])
        reduced = torch.cat(outputs)
        reduce(reduced, torch.cat(inputs, dim=1).flatten(), kind)
        for out, values in zip(outputs, reduced.split([out.numel() for out in outputs])):
            out.copy_(values)


def measure_bandwidth(num_bytes: int, group: dist.ProcessGroup | None = None) -> float:
    """Bus GB/s of a reduce-scatter of num_bytes in fp32 per rank, the collective of the gradients;
    NaN on one rank.

    Bus bandwidth: what a rank must send whatever the algorithm, bytes * (W - 1) / W, over the time.
    Median of 5.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return float("nan")
    full, chunk = _buffers(num_bytes, group)
    return (
        (world_size - 1)
        * chunk.nbytes
        / _seconds(lambda: reduce_scatter(chunk, full, group=group), group)
        / 1e9
    )


def _buffers(num_bytes: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Zeros of the group's device: fp32 [W * n] of about num_bytes, and [n]."""
    n = max(1, num_bytes // 4 // dist.get_world_size(group))
    device = "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"
    return torch.zeros(dist.get_world_size(group) * n, device=device), torch.zeros(n, device=device)


def _seconds(run: Callable[[], object], group: dist.ProcessGroup | None, repeats: int = 5) -> float:
    """Time of a run on the slowest rank, the same figure on all; median after two runs to warm up."""
    times = []
    for _ in range(repeats + 2):
        _, elapsed = _buffers(4, group)
        dist.all_reduce(elapsed, group=group)  # so that all start together
        start = time.perf_counter() + elapsed.item()
        run()
        if elapsed.is_cuda:
            torch.cuda.synchronize()
        elapsed += time.perf_counter() - start
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
        times.append(elapsed.item())
    return sorted(times[2:])[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description="torchrun --nproc-per-node N comms.py --bench")
    parser.add_argument(
        "--bench", action="store_true", required=True, help="time the collectives by size"
    )
    parser.add_argument(
        "--max-mb", type=int, default=1024, help="largest size, MiB of fp32 per rank"
    )
    max_bytes = parser.parse_args().max_mb << 20
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    records = []
    for full, chunk in (_buffers(1 << k, None) for k in range(12, 40, 3) if 1 << k <= max_bytes):
        plain, int8 = (
            chunk.nbytes,
            _Messages(1, chunk.numel(), 256, torch.device("meta")).wire.numel(),
        )
        for name, passes, chunk_bytes, run in (
            ("all_reduce", 2, plain, lambda: dist.all_reduce(full)),
            ("all_reduce int8", 2, int8, lambda: quantized_all_reduce(full)),
            ("reduce_scatter", 1, plain, lambda: reduce_scatter(chunk, full)),
            ("reduce_scatter int8", 1, int8, lambda: quantized_reduce_scatter(chunk, full)),
            ("all_gather", 1, plain, lambda: all_gather(full, chunk)),
        ):
            ms, sends = _seconds(run, None, repeats=20) * 1e3, passes * (dist.get_world_size() - 1)
            # The bus bandwidth of an INT8 form counts the fp32 bytes that it stands for: lines of a
            # size compare.
            figures = {
                "ms": ms,
                "sent_bytes": sends * chunk_bytes,
                "bus_gb_s": sends * plain / ms / 1e6,
            }
            records.append({"collective": name, "bytes": full.nbytes, **figures})
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {torch.cuda.get_device_name() if full.is_cuda else 'CPU'}"
        )
        print(f"{'collective':<20} {'bytes':>11} {'ms':>10} {'bytes sent':>11} {'bus GB/s':>10}")
        for r in records:
            print(
                "{collective:<20} {bytes:>11} {ms:>10.3f} {sent_bytes:>11} {bus_gb_s:>10.2f}".format(
                    **r
                )
            )
        print(*map(json.dumps, records), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
