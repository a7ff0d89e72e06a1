"""Time of one exchange between the ranks of a host, against pickled objects and against send/recv,
all over gloo.

    torchrun --standalone --nproc-per-node 2 benchmarks/exchange.py \\
        --out benchmarks/results/exchange.json

Each rank sends `mb` MB of sequences to the next one. A token carries 17 bytes: tokens int64,
response_mask bool, logprobs and advantages fp32. "ragged" is what training exchanges: sequences of
500 to 1,500 tokens. "long" is 8 sequences whatever the size: few tensors to pickle. Time is that of
the slowest rank, median of --repeats.

    exchange              received tensors dropped after each call, so that the segment is reused
    exchange + read       with one sum over each received tensor
    exchange, first       a new segment for each call: fresh pages
    exchange, all-to-all  the road between hosts
    pickled               dist.all_gather_object of (sequences, destination), as most trainers do
    pickled, to one       pickle.dumps of what each receiver gets, by dist.all_to_all_single
    send/recv             one isend/irecv a tensor, lengths known beforehand
"""

import argparse
import json
import os
import pickle
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the root's, not this file
import exchange as exchange_module
from exchange import exchange

TOKEN_BYTES = 8 + 1 + 4 + 4


def make_sequences(mb: float, load: str, rank: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    num_tokens = int(mb * 1e6) // TOKEN_BYTES
    lengths = [num_tokens // 8] * 8
    if load == "ragged":
        lengths = []
        while sum(lengths) < num_tokens:
            length = int(torch.randint(500, 1501, (), generator=generator))
            lengths.append(min(length, num_tokens - sum(lengths)))
    return [
        {
            "tokens": torch.randint(0, 150_000, (n,), generator=generator),
            "response_mask": torch.rand(n, generator=generator) > 0.2,
            "logprobs": torch.rand(n, generator=generator),
            "advantages": torch.rand(n, generator=generator),
        }
        for n in lengths
    ]


def pickled(sequences: list, destination: list[int]) -> list:
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (sequences, destination))
    rank = dist.get_rank()
    mine = []
    for sent, to in everything:
        mine += [s for s, receiver in zip(sent, to, strict=True) if receiver == rank]
    return mine


def pickled_to_one(sequences: list, destination: list[int]) -> list:
    world_size = dist.get_world_size()
    by_receiver = [[] for _ in range(world_size)]
    for sequence, receiver in zip(sequences, destination, strict=True):
        by_receiver[receiver].append(sequence)
    outgoing = [
        torch.frombuffer(bytearray(pickle.dumps(sent)), dtype=torch.uint8) for sent in by_receiver
    ]
    sizes = torch.tensor([len(message) for message in outgoing])
    received_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(received_sizes, sizes)
    received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(outgoing), received_sizes.tolist(), sizes.tolist())
    mine = []
    for message in received.split(received_sizes.tolist()):
        mine += pickle.loads(message.numpy())
    return mine


def send_recv(sequences: list, expected: list) -> list:
    """To the next rank and from the one before, whose sequences have the lengths of expected."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    received = [{name: torch.empty_like(x) for name, x in s.items()} for s in expected]
    works = [dist.isend(x, (rank + 1) % world_size) for s in sequences for x in s.values()]
    works += [dist.irecv(x, (rank - 1) % world_size) for s in received for x in s.values()]
    for work in works:
        work.wait()
    return received


def median_ms(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        dist.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        run()
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        times.append(elapsed.item() * 1e3)
    return sorted(times[2:])[repeats // 2]


def measure(mb: float, load: str, repeats: int) -> dict[str, float]:
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    sequences = make_sequences(mb, load, rank)
    expected = make_sequences(mb, load, (rank - 1) % world_size)
    destination = [(rank + 1) % world_size] * len(sequences)

    def check(received: list[dict[str, Tensor]]) -> None:
        for a, b in zip(received, expected, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)

    def first() -> None:
        exchange_module._segments.clear()
        exchange(sequences, destination)

    def read() -> None:
        for s in exchange(sequences, destination):
            for x in s.values():
                x.sum()

    check(exchange(sequences, destination))
    check(pickled(sequences, destination))
    check(pickled_to_one(sequences, destination))
    check(send_recv(sequences, expected))
    times = {
        "exchange": median_ms(lambda: exchange(sequences, destination), repeats),
        "exchange + read": median_ms(read, repeats),
        "exchange, first": median_ms(first, repeats),
        "pickled": median_ms(lambda: pickled(sequences, destination), repeats),
        "pickled, to one": median_ms(lambda: pickled_to_one(sequences, destination), repeats),
        "send/recv": median_ms(lambda: send_recv(sequences, expected), repeats),
    }
    host_key = exchange_module._host_key
    exchange_module._host_key = dist.get_rank
    times["exchange, all-to-all"] = median_ms(lambda: exchange(sequences, destination), repeats)
    exchange_module._host_key = host_key
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = "MB that each rank sends"
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 64], help=sizes)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file; default none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records = []
    for mb in args.mb:
        for load in ("ragged", "long"):
            times = measure(mb, load, args.repeats)
            for method, ms in times.items():
                ratio = ms / times["exchange"]
                record = {"mb": mb, "load": load, "method": method, "ms": ms}
                records.append(record | {"over_exchange": ratio})
    if dist.get_rank() == 0:
        show(records, args.repeats, args.out)
    dist.destroy_process_group()


def show(records: list[dict], repeats: int, out: Path | None) -> None:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    setting = {
        "world_size": dist.get_world_size(),
        "repeats": repeats,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "commit": git.stdout.strip(),
    }
    print(json.dumps(setting))
    print(f"{'MB':>6} {'load':<7} {'method':<22} {'ms':>9} {'x exchange':>11}")
    for r in records:
        print(
            f"{r['mb']:>6g} {r['load']:<7} {r['method']:<22} {r['ms']:>9.2f} "
            f"{r['over_exchange']:>11.1f}"
        )
    if out:
        out.write_text(json.dumps({"setting": setting, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
