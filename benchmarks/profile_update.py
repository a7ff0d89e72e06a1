"""An update of grpo.py by kernels, on rows like a step's: where its time goes, and what waits.

    python benchmarks/profile_update.py models/qwen2-1.5b
    python benchmarks/profile_update.py MODEL_DIR --rows 1 --tokens-per-row 64 --response 8

The rows hold random tokens, each sequence 100 of a prompt and --response of a response. Three
records: tokens per second and MFU; kernels by their share of the device's time; operations that
make the host wait for the device (one is meant to be there, the gradient norm of a step).
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attention
import grpo
import metrics
import model
import optim
import packing
import run


def make_rows(args, vocabulary: int) -> list[packing.PackedRow]:
    """Full rows with the fields that the loss needs."""
    generator = torch.Generator().manual_seed(0)
    num_sequences = args.rows * (args.tokens_per_row // (args.prompt + args.response))
    sequences = []
    for i in range(num_sequences):
        ids = torch.randint(vocabulary, (args.prompt + args.response,), generator=generator)
        prompt, response = ids.split([args.prompt, args.response])
        fields = {"advantages": 1.0 - 2.0 * (i % 2), "rollout_logprobs": -10.0}
        sequences.append(packing.sequence(prompt, response, **fields))
    return packing.pack(sequences, args.tokens_per_row)


def kernels(profile, num_shown: int) -> dict[str, float]:
    """Share of the device's time by kernel; empty without a device."""
    times = collections.Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:90]] += event.device_time
    total = sum(times.values())
    return {name: round(us / total, 4) for name, us in times.most_common(num_shown)}


def waits(update) -> dict[str, int]:
    """Operations of one update that wait for the device, by the line that called them."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        update()
    torch.cuda.set_sync_debug_mode("default")
    places = (f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchron" in str(w.message))
    return dict(collections.Counter(places))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens-per-row", type=int, default=16384)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--shown", type=int, default=20, help="kernels")
    args = parser.parse_args()
    mesh = run.init_distributed(0, 600)
    settings = grpo.Args()
    policy = model.load_policy(args.model, mesh, settings.model)
    attention.use_packed_attention(policy)
    optimizer = optim.make_optimizer(policy, settings.optim, settings.learning_rate)
    rows = [row.to(mesh.device_type) for row in make_rows(args, policy.config.vocab_size)]
    num_tokens = sum(len(row.tokens) for row in rows)
    totals = {
        "tokens": sum(row.num_response_tokens for row in rows),
        "sequences": sum(len(row.source) for row in rows),
    }
    meter = metrics.Metrics()

    def update():
        grpo.actor_gradients(settings, policy, rows, totals, meter)
        optim.optimizer_step(policy, optimizer, 1e-6, 1.0)

    def timed() -> float:
        start = time.perf_counter()
        update()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first_s = timed()
    seconds = []
    mfus = []
    for _ in range(3):
        meter.reduce()
        seconds.append(timed())
        mfus.append(meter.reduce().get("perf/mfu"))
    record = {
        "model": Path(args.model).name,
        "rows": len(rows),
        "tokens": num_tokens,
        "first_s": first_s,
        "s": statistics.median(seconds),
        "tokens_per_s": num_tokens / statistics.median(seconds),
        "torch": torch.__version__,
    }
    if None not in mfus:
        record["mfu"] = statistics.median(mfus)
        record["max_gib"] = torch.cuda.max_memory_allocated() / 2**30
        record["device"] = torch.cuda.get_device_name()
    print(json.dumps(record), flush=True)
    with torch.profiler.profile() as profile:
        timed()
    print(json.dumps({"kernels": kernels(profile, args.shown)}, indent=1), flush=True)
    print(json.dumps({"waits": waits(update)}), flush=True)
    run.leave()


if __name__ == "__main__":
    main()
