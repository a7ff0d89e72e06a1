"""The colocated engine under test: is it the trainer's policy, does it give its memory back, what
do 8 bits cost?

    python benchmarks/engine.py MODEL_DIR PROMPTS.jsonl mismatch
        [--eager] [--kv-cache-dtype fp8] [--quantization fp8]
    python benchmarks/engine.py MODEL_DIR PROMPTS.jsonl sleep --cycles 50 --level 2

mismatch  mean |log p_trainer - log p_sampler| over the sampled tokens, after a sync, and after
          moving the trainer's weights by Gaussian noise (NOISE) without one; k3 estimate of
          KL(sampler|trainer); new tokens per second; whether verify_sync accepts a sync and refuses
          a weight that was moved after it.
sleep     memory in use on the GPU after each sleep, its slope from the sixth cycle on, and how many
          different greedy texts there were (1: always the same), with a checksum to compare runs.
One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from attention import use_packed_attention
from data import DataConfig, load_prompts
from hub import stop_token_ids
from logprobs import token_logprobs
from model import ModelConfig, load_policy
from packing import pack, sequence
from reshard import sync_weights, verify_sync
from rollout import Engine, RolloutConfig
from run import init_distributed, leave
from vllm_backend import VllmBackend

NOISE = {  # standard deviation of what is added to a weight
    "1 % of the weight": lambda w: 0.01 * w,
    "1 % of its tensor's rms": lambda w: 0.01 * w.square().mean().sqrt(),
    "0.01": lambda w: 0.01,
}


@torch.no_grad()
def difference(policy, rollouts, device) -> tuple[float, float, int]:
    """Mean absolute difference and k3 of the log-probabilities, trainer less sampler, and the
    number of tokens.
    """
    rows = pack(
        [sequence(r.prompt_ids, r.response_ids, reported=r.logprobs) for r in rollouts], 16384
    )
    absolute = k3 = 0.0
    count = 0
    for row in (row.to(device) for row in rows):
        logprobs, _ = token_logprobs(policy, row)
        d = (logprobs - row.fields["reported"])[row.fields["response_mask"]]
        absolute += d.abs().sum().item()
        k3 += (torch.expm1(d) - d).sum().item()
        count += len(d)
    return absolute / count, k3 / count, count


def mismatch(args, policy, engine, prompts, device) -> dict:
    to_engine = dict(dtype=engine.dtype)
    with engine.awake():
        sync_weights(policy, engine, **to_engine)
        engine.generate(prompts, args.samples, seed=1)  # warm
        start = time.perf_counter()
        rollouts = engine.generate(prompts, args.samples, seed=0)
        seconds = time.perf_counter() - start
    after_sync, kl, count = difference(policy, rollouts, device)
    weights = [p.to_local() for p in policy.parameters()]
    originals, moved = [w.detach().clone() for w in weights], {}
    for name, deviation in NOISE.items():
        with torch.no_grad():
            for w, original in zip(weights, originals, strict=True):
                w.copy_(original + deviation(original) * torch.randn_like(original))
        moved[name], _, _ = difference(policy, rollouts, device)
    verdict = "not asked for an 8-bit engine"
    if not engine.config.eight_bit:
        with engine.awake():
            sync_weights(policy, engine, **to_engine)
            verify_sync(policy, engine, **to_engine)
            with torch.no_grad():
                next(policy.parameters()).to_local().mul_(1.01)
            try:
                verify_sync(policy, engine, **to_engine)
                verdict = "MISSED"
            except RuntimeError as error:
                verdict = f"says so: {error}"
    speed = sum(len(r.response_ids) for r in rollouts) / seconds
    ratio = {name: x / after_sync for name, x in moved.items()}
    result = dict(num_tokens=count, abs_diff=after_sync, kl=kl, abs_diff_moved=moved, ratio=ratio)
    return result | dict(tokens_per_s=speed, verify_sync=verdict)


def sleep(args, policy, engine, prompts, device) -> dict:
    used, texts = [], set()
    for _ in range(args.cycles):
        with engine.awake():
            sync_weights(policy, engine, dtype=engine.dtype)
            rollouts = engine.generate(prompts[:8], 1, temperature=0.0)
            texts.add(repr([r.response_ids.tolist() for r in rollouts]))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what remains is the engine's, and the trainer's live tensors
        free, total = torch.cuda.mem_get_info()
        used.append((total - free) / 2**20)
    result = dict(level=args.level, cycles=args.cycles, mb_first=used[0], mb_last=used[-1])
    if len(used) > 6:
        steps = torch.arange(5, len(used), dtype=torch.float64)
        y = torch.tensor(used[5:], dtype=torch.float64)
        result["slope_mb"] = float(
            ((steps - steps.mean()) * y).sum() / ((steps - steps.mean()) ** 2).sum()
        )
    return result | dict(texts=len(texts), checksum=zlib.crc32(min(texts).encode()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("what", choices=["mismatch", "sleep"])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--bfloat16-master", action="store_true")
    parser.add_argument(
        "--eager", action="store_true", help="the trainer's layers are not compiled"
    )
    args = parser.parse_args()
    from transformers import AutoTokenizer

    mesh = init_distributed(0, 600)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_prompts([args.data], tokenizer, DataConfig(max_prompt_tokens=256))[0]
    dtype = "bfloat16" if args.bfloat16_master else "float32"
    compiled = torch.cuda.is_available() and not args.eager
    policy = load_policy(args.model, mesh, ModelConfig(master_dtype=dtype, compile=compiled))
    use_packed_attention(policy)
    config = RolloutConfig(
        max_response_tokens=args.max_new,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
        sleep_level=args.level,
        memory_fraction=0.5,
    )
    stop_ids = stop_token_ids(args.model, tokenizer.eos_token_id)
    sizes = dict(max_prompt_tokens=256, num_samples=args.prompts * args.samples)
    engine = Engine(VllmBackend, args.model, config, **sizes, stop_ids=stop_ids)
    prompts = [p.prompt_ids for p in data[: args.prompts]]
    run = mismatch if args.what == "mismatch" else sleep
    import vllm

    about = dict(
        model=Path(args.model).name, kv_cache=args.kv_cache_dtype, quantization=args.quantization
    )
    about |= dict(compiled=compiled)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about |= dict(device=where, torch=torch.__version__, vllm=vllm.__version__)
    print(json.dumps(about | run(args, policy, engine, prompts, mesh.device_type)), flush=True)
    leave()


if __name__ == "__main__":
    main()
