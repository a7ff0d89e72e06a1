"""What INT8 gradients cost and lose: speed of the codec and of the collectives, error by block
size, and the loss curve against fp32.

    python benchmarks/comms.py codec                  # GPU: 1 GiB; CPU: 16 MiB
    torchrun --standalone --nproc-per-node 2 benchmarks/comms.py collectives   # NCCL, or gloo
    torchrun --standalone --nproc-per-node 2 benchmarks/comms.py error         # CPU, any ranks
    torchrun --standalone --nproc-per-node 2 benchmarks/comms.py training

codec        quantize_blockwise and dequantize_blockwise against a copy on the same device. GB/s
             count what must move: values read, codes and scales written, and back in fp32. A copy
             reads and writes the same number of bytes.
collectives  time and bandwidth by size, in fp32 and in INT8. The bus bandwidth of an INT8 form
             counts the fp32 bytes that it stands for, so that lines of a size compare.
error        of one quantization, of a reduce-scatter and of an all-reduce: relative L2 against the
             fp64 sum, and the largest error of a value over its bound, absmax / 254 of its block.
             Gaussian values and heavy tails (Student's t with 3 degrees of freedom).
training     200 AdamW steps of a small model in FSDP2 on fixed batches, reduced in fp32 and in
             INT8: cosine of the first gradient with fp32's, losses, how far the last one is off.

Each prints a table, then JSON lines.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the root's comms, not this file
from comms import (
    all_gather,
    dequantize_blockwise,
    quantize_blockwise,
    quantize_gradients,
    quantized_all_reduce,
    quantized_reduce_scatter,
    reduce_scatter,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("codec", "collectives", "error", "training"))
    parser.add_argument(
        "--mb",
        type=int,
        help="codec: MiB of gradients, default 1024 on a GPU, 16 on a CPU; "
        "collectives: largest size in MiB of fp32 per rank, default 1024",
    )
    args = parser.parse_args()
    if args.what == "codec":
        show(codec(args.mb))
        return
    if args.what == "collectives":
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        records = collectives((args.mb or 1024) << 20)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        records = error() if args.what == "error" else training()
    if dist.get_rank() == 0:
        show(records)
    dist.destroy_process_group()


def show(records: list[dict]) -> None:
    rows = [
        [f"{value:.4g}" if isinstance(value, float) else str(value) for value in r.values()]
        for r in records
    ]
    widths = [max(map(len, column)) for column in zip(records[0], *rows, strict=True)]
    for row in (records[0], *rows):
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    print(*map(json.dumps, records), sep="\n")


def codec(mb: int | None) -> list[dict]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_bytes = (mb or (1024 if device == "cuda" else 16)) << 20
    records = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(num_bytes // dtype.itemsize, device=device, dtype=dtype)
        copy_gb_s = 2 * x.nbytes / seconds(torch.empty_like(x).copy_, x) / 1e9
        for block_size in (64, 256, 1024):
            for rounding in ("nearest", "stochastic"):
                records.append(
                    {
                        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
                        "torch": torch.__version__,
                        "dtype": str(dtype).removeprefix("torch."),
                        "MiB": num_bytes >> 20,
                        "block": block_size,
                        "rounding": rounding,
                        **codec_speed(x, block_size, rounding, copy_gb_s),
                    }
                )
    return records


def codec_speed(x: Tensor, block_size: int, rounding: str, copy_gb_s: float) -> dict[str, float]:
    codes, scales = quantize_blockwise(x, block_size, rounding=rounding)
    coded_bytes = codes.nbytes + scales.nbytes
    back_bytes = 4 * x.numel()
    quantize_s = seconds(lambda: quantize_blockwise(x, block_size, rounding=rounding))
    dequantize_s = seconds(lambda: dequantize_blockwise(codes, scales, block_size))
    total_bytes = x.nbytes + 2 * coded_bytes + back_bytes
    both_gb_s = total_bytes / (quantize_s + dequantize_s) / 1e9
    return {
        "quantize_ms": quantize_s * 1e3,
        "dequantize_ms": dequantize_s * 1e3,
        "quantize_gb_s": (x.nbytes + coded_bytes) / quantize_s / 1e9,
        "dequantize_gb_s": (coded_bytes + back_bytes) / dequantize_s / 1e9,
        "both_gb_s": both_gb_s,
        "copy_gb_s": copy_gb_s,
        "both_over_copy": both_gb_s / copy_gb_s,
    }


def seconds(run: Callable, *args, repeats: int = 20) -> float:
    """Median of single runs, each timed between two synchronisations, after three to warm up."""
    times = []
    for _ in range(repeats + 3):
        if torch.cuda.is_available():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(*args)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run(*args)
            times.append(time.perf_counter() - start)
    return sorted(times[3:])[repeats // 2]


def collectives(max_bytes: int) -> list[dict]:
    num_ranks = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    records = []
    for exponent in range(12, 40, 3):
        if 1 << exponent > max_bytes:
            break
        chunk = torch.zeros(max(1, (1 << exponent) // 4 // num_ranks), device=device)
        full = torch.zeros(num_ranks * len(chunk), device=device)
        # A message is scales, then codes, each padded to 16 bytes.
        scales_bytes = 4 * -(-len(chunk) // 256)
        int8_bytes = -(-scales_bytes // 16) * 16 + -(-len(chunk) // 16) * 16
        for name, num_passes, chunk_bytes, run, args in (
            ("all_reduce", 2, chunk.nbytes, dist.all_reduce, (full,)),
            ("all_reduce int8", 2, int8_bytes, quantized_all_reduce, (full,)),
            ("reduce_scatter", 1, chunk.nbytes, reduce_scatter, (chunk, full)),
            ("reduce_scatter int8", 1, int8_bytes, quantized_reduce_scatter, (chunk, full)),
            ("all_gather", 1, chunk.nbytes, all_gather, (full, chunk)),
        ):
            elapsed_s = seconds_of_all(run, *args)
            num_sends = num_passes * (num_ranks - 1)
            records.append(
                {
                    "ranks": num_ranks,
                    "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
                    "collective": name,
                    "bytes": full.nbytes,
                    "ms": elapsed_s * 1e3,
                    "sent_bytes": num_sends * chunk_bytes,
                    "bus_gb_s": num_sends * chunk.nbytes / elapsed_s / 1e9,
                }
            )
    return records


def seconds_of_all(run: Callable, *args, repeats: int = 20) -> float:
    """Median time on the slowest rank after two runs to warm up; the same figure on all ranks."""
    times = []
    for _ in range(repeats + 2):
        elapsed = torch.zeros(1, device=args[0].device)
        dist.all_reduce(elapsed)  # so that all start together
        start = time.perf_counter() + elapsed.item()
        run(*args)
        if elapsed.is_cuda:
            torch.cuda.synchronize()
        elapsed += time.perf_counter() - start
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        times.append(elapsed.item())
    return sorted(times[2:])[repeats // 2]


def error() -> list[dict]:
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    n = 1 << 17
    records = []
    for distribution in ("gaussian", "student t3"):
        inputs = [draw(distribution, world_size * n, seed) for seed in range(world_size)]
        total = torch.stack(inputs).double().sum(0)
        for block_size in (32, 128, 256, 2048):
            x = inputs[rank]
            back = dequantize_blockwise(*quantize_blockwise(x, block_size), block_size)
            absmax = x.view(-1, block_size).abs().amax(1, keepdim=True)
            scattered = torch.empty(n)
            reduced = x.clone()
            quantized_reduce_scatter(scattered, x, block_size=block_size)
            quantized_all_reduce(reduced, block_size=block_size)
            over_bound = ((back - x).view(-1, block_size) / absmax).abs().max() * 254
            mine = total.view(world_size, n)[rank]
            records.append(
                {
                    "ranks": world_size,
                    "values": distribution,
                    "block": block_size,
                    "max_over_bound": over_bound.item(),
                    "l2_quantize_pct": relative_l2_pct(back, x),
                    "l2_reduce_scatter_pct": relative_l2_pct(scattered, mine),
                    "l2_all_reduce_pct": relative_l2_pct(reduced, total),
                }
            )
    return records


def draw(distribution: str, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    if distribution == "student t3":
        x /= (torch.randn(3, n, generator=generator).square().sum(0) / 3).sqrt()
    return x


def relative_l2_pct(x: Tensor, expected: Tensor) -> float:
    return 100 * ((x.double() - expected.double()).norm() / expected.double().norm()).item()


def training() -> list[dict]:
    world_size = dist.get_world_size()
    runs = {"fp32": None, "int8 nearest": {}, "int8 stochastic": {"rounding": "stochastic"}}
    shapes = {"shard": (world_size,)}
    if world_size % 2 == 0:
        runs["int8 nearest, error feedback"] = {"error_feedback": True}
        shapes["replicate 2 x shard"] = (2, world_size // 2)
    records = []
    for shape_name, shape in shapes.items():
        reference = None
        for name, options in runs.items():
            if "feedback" in name and len(shape) == 1:
                continue  # it is for the replica axis
            first_gradient, losses = train(shape, options)
            reference = reference or (first_gradient, losses[-1])
            cosine = F.cosine_similarity(first_gradient, reference[0], dim=0).item()
            record = {
                "ranks": world_size,
                "mesh": shape_name,
                "reduction": name,
                "cosine_step_1": cosine,
            }
            record |= {f"loss_{step}": losses[step - 1] for step in (1, 50, 100, 150, 200)}
            records.append(record | {"end_off_by_pct": 100 * (losses[-1] / reference[1] - 1)})
    return records


def train(
    mesh_shape: tuple[int, ...], options: dict | None, num_steps: int = 200
) -> tuple[Tensor, list[float]]:
    """The full gradient of the first step, and the loss over all ranks' fixed batches after each
    step.
    """
    torch.manual_seed(0)
    width = 96
    vocabulary = 128
    layers = [
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        for _ in range(2)
    ]
    model = nn.Sequential(nn.Embedding(vocabulary, width), *layers, nn.Linear(width, vocabulary))
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :]
    )
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    if options is not None:
        quantize_gradients(model, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, vocabulary, (8, 17), generator=generator) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first_gradient = None
    losses = []
    for step in range(num_steps):
        tokens = batches[step % 4]
        loss = F.cross_entropy(model(tokens[:, :-1]).clone().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if first_gradient is None:
            first_gradient = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        optimizer.step()
        mean_loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item())
    return first_gradient, losses


if __name__ == "__main__":
    main()
