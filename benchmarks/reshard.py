"""Weight sync from FSDP2 shards into a live vLLM engine: bytes, seconds, GB/s, peak extra memory.

    python benchmarks/reshard.py MODEL_DIR...    # a JSON line per model; engine awake, median of 10

Beside it, in the same process: one device copy of the model's bytes (the floor), gathering without
loading, and gathering tensor by tensor in fp32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from model import ModelConfig, load_policy
from reshard import iter_full_params, sync_weights
from rollout import Engine, RolloutConfig
from run import init_distributed, leave
from vllm_backend import VllmBackend


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_s(run, repeats: int = 10) -> float:
    """Median wall time of run(), the device idle before and after."""
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def per_tensor(policy, engine) -> None:
    engine.load_weights([(name, p.full_tensor())] for name, p in policy.named_parameters())


def measure(path: str, bucket_mb: int) -> dict:
    mesh = init_distributed(0, 600)
    master = (
        "bfloat16"
        if sum(f.stat().st_size for f in Path(path).glob("*.safetensors")) > 8 << 30
        else "float32"
    )
    policy = load_policy(path, mesh, ModelConfig(master_dtype=master))
    config = RolloutConfig(max_response_tokens=128, kv_cache_gb=1, sleep_level=0)
    engine = Engine(VllmBackend, path, config, max_prompt_tokens=128, num_samples=16, stop_ids=[2])
    options = dict(dtype=engine.dtype, bucket_bytes=bucket_mb << 20)
    with engine.awake():
        num_bytes = sync_weights(policy, engine, **options)
        result = dict(
            model=Path(path).name, master=master, num_bytes=num_bytes, bucket_mb=bucket_mb
        )
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            sync_weights(policy, engine, **options)
            result["peak_extra_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
            largest = max(p.numel() for p in policy.parameters()) * engine.dtype.itemsize
            result["largest_tensor_gb"] = largest / 1e9
        result["sync_s"] = median_s(lambda: sync_weights(policy, engine, **options))
        result["per_tensor_fp32_s"] = median_s(lambda: per_tensor(policy, engine), 3)
        result["gather_only_s"] = median_s(
            lambda: [None for _ in iter_full_params(policy, **options)]
        )
    source = [
        torch.empty(num_bytes // 4, dtype=torch.uint8, device=mesh.device_type) for _ in range(4)
    ]
    target = [torch.empty_like(x) for x in source]
    result["device_copy_s"] = median_s(
        lambda: [t.copy_(s) for s, t in zip(source, target, strict=True)]
    )
    result["gb_per_s"] = num_bytes / 1e9 / result["sync_s"]
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--bucket-mb", type=int, default=512)
    arguments = parser.parse_args()
    if len(arguments.models) > 1:  # an engine lives as long as its process
        for model in arguments.models:
            command = [sys.executable, __file__, model, "--bucket-mb", str(arguments.bucket_mb)]
            subprocess.run(command, check=True)
    else:
        result = measure(arguments.models[0], arguments.bucket_mb)
        import vllm

        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        about = dict(device=where, torch=torch.__version__, vllm=vllm.__version__)
        print(json.dumps(result | about), flush=True)
        leave()
