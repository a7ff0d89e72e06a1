"""LoRA: whole steps by phase and the sync of a large model; how far sampler and trainer are apart.

    python benchmarks/lora.py steps models/qwen2-7b gsm8k.jsonl
    python benchmarks/lora.py engine models/smollm2 gsm8k.jsonl
    python benchmarks/lora.py engine models/smollm2 gsm8k.jsonl --own

steps   grpo.py with adapters and a KL term: 64 prompts x 8 samples x 512 forced tokens. Medians of
        the steps from the second on, peaks of memory by phase, and beside them, between the first
        sync and the first rollout, syncs of everything and of merged weights alone (median of 5,
        the engine awake).
engine  adapters that move each weight by 1 % of its matrix's rms. The same policy is then held in
        two ways: by adapters, and with all weights trained. Of each, the mean absolute difference
        of the log-probabilities of sampler and trainer, k3, seconds of a sync, tokens a second.
--own   instead, vLLM's own LoRA: the base stays in the engine, adapters go there by a file in
        memory. vLLM 0.26 to 0.32 take them from nowhere else.
One JSON line each.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from engine import difference
from measure import say, synchronize
from steps import summarize

import adapter
import grpo
import lora
import reshard
import run
from attention import use_packed_attention
from data import DataConfig, load_prompts
from hub import stop_token_ids
from lora import LoraConfig
from model import ModelConfig, load_policy
from rollout import Engine, RolloutConfig
from scheduler import closed_batch_scheduler
from vllm_backend import VllmBackend


def seconds_of(function) -> float:
    """Wall time of function(), the device idle before and after."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def steps(args) -> None:
    """A run of grpo.py in this process, with syncs measured beside its first one."""
    syncs: dict[str, float] = {}
    usual = grpo.sync

    def sync(settings, policy, engine, meter) -> None:
        usual(settings, policy, engine, meter)
        if syncs:
            return
        merges = lora.merges(policy)
        options = dict(dtype=engine.dtype, merges=merges)

        def send(only: bool) -> None:
            buckets = reshard.iter_full_params(policy, **options, merged_only=only)
            engine.load_weights(buckets, partial=True)

        for name, only in {"whole_s": False, "merged_only_s": True}.items():
            times = [seconds_of(functools.partial(send, only)) for _ in range(5)]
            syncs[name] = statistics.median(times)
        num_bytes = sum(p.numel() for p in policy.parameters()) * engine.dtype.itemsize
        syncs["whole_gb"] = num_bytes / 1e9
        meter.add_time("measuring")

    grpo.sync = sync
    grpo.export = lambda *_: None  # 15 GB to the disk
    flags = ["--model", args.model, "--data", args.data, "--name", "lora_steps"]
    flags += ["--num-steps", str(args.num_steps), "--rollout.ignore-eos"]
    flags += ["--rollout.max-response-tokens", str(args.max_new), "--data.max-prompt-tokens", "256"]
    flags += ["--prompts-per-step", str(args.prompts), "--group-size", str(args.samples)]
    flags += ["--lora.rank", str(args.rank), "--learning-rate", "1e-5", "--loss.kl-coef", "0.001"]
    flags += ["--tokens-per-row", str(args.tokens_per_row), "--save-minutes", "0"]
    flags += ["--reward.functions", "examples/arithmetic.py:last_number", *args.flags]
    sys.argv = ["grpo.py", *flags]
    settings = run.command_line(grpo.Args(), {}, "")
    grpo.main(settings)
    lines = (settings.run.directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    numbers = summarize(records, min(1, args.num_steps - 1), args.samples)
    numbers["timing_s/step"] = statistics.median(r["timing_s/step"] for r in records[1:] or records)
    say("steps", flags=" ".join(flags), **about(), **syncs, **numbers)


def about() -> dict[str, str]:
    import transformers
    import vllm

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = dict(torch=torch.__version__, vllm=vllm.__version__)
    return dict(device=where, **versions, transformers=transformers.__version__)


class OwnLora(VllmBackend):
    """The engine with vLLM's LoRA kernels, for adapters of at most `rank`."""

    rank = 32
    request = None

    def _arguments(self) -> dict:
        return super()._arguments() | dict(enable_lora=True, max_loras=1, max_lora_rank=self.rank)

    def take(self, config: LoraConfig, tensors: dict, directory: str) -> None:
        from vllm.lora.request import LoRARequest

        adapter.write(config, tensors, directory, base="")
        number = 1 if self.request is None else self.request.lora_int_id + 1
        if self.request is not None:
            self.llm.llm_engine.remove_lora(self.request.lora_int_id)
        self.request = LoRARequest(f"adapter{number}", number, directory)
        self.llm.llm_engine.add_lora(self.request)

    def _add(self, index: int, prompt: list[int], params, seed: int | None) -> None:
        own = copy.copy(params)
        own.seed = seed
        engine = self.llm.llm_engine
        given = {"prompt_token_ids": prompt}
        more = dict(lora_request=self.request)
        self.inner_ids[index] = engine.add_request(str(index), given, own, **more)


def moved(policy: torch.nn.Module, seed: int = 0) -> None:
    """B so large that scale B A is 1 % of the rms of its weight."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, layer in lora._adapted(policy).items():
        a = torch.empty(layer.lora_A.shape).uniform_(-1, 1, generator=generator)
        b = torch.randn(layer.lora_B.shape, generator=generator)
        rms = layer.weight.to_local().float().square().mean().sqrt().item()
        size = layer.scale * (layer.lora_A.shape[0] / 3) ** 0.5  # rms of scale B A
        values |= {f"{name}.lora_A": a, f"{name}.lora_B": 0.01 * rms / size * b}
    lora.fill(policy, 0, values)


def engine(args) -> None:
    """Both policies against one engine; or vLLM's own LoRA."""
    from transformers import AutoTokenizer

    mesh = run.init_distributed(0, 600)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_prompts([args.data], tokenizer, DataConfig(max_prompt_tokens=256))[0]
    prompts = [p.prompt_ids for p in data[: args.prompts]]
    config = LoraConfig(rank=args.rank)
    adapt = functools.partial(lora.attach, config=config)
    policy = load_policy(args.model, mesh, ModelConfig(), adapt=adapt)
    moved(policy)
    OwnLora.rank = args.rank
    backend = functools.partial(
        OwnLora if args.own else VllmBackend, make_scheduler=closed_batch_scheduler
    )
    settings = RolloutConfig(
        max_response_tokens=args.max_new, ignore_eos=True, sleep_level=0, memory_fraction=0.4
    )
    sizes = dict(max_prompt_tokens=256, num_samples=args.prompts * args.samples)
    stop_ids = stop_token_ids(args.model, tokenizer.eos_token_id)
    sampler = Engine(backend, args.model, settings, **sizes, stop_ids=stop_ids)
    policies = {"adapters": policy}
    if not args.own:
        full = load_policy(args.model, mesh, ModelConfig())
        parameters = dict(full.named_parameters())
        options = dict(dtype=torch.float32, merges=lora.merges(policy), merged_only=True)
        for bucket in reshard.iter_full_params(policy, **options):
            for name, x in bucket:
                parameters[name].to_local().data.copy_(x)
        policies["all weights"] = full
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for name, each in policies.items():
            use_packed_attention(each)

            def sync(each=each) -> None:
                if args.own:
                    sampler.backend.take(config, lora.adapters(each), directory)
                    sampler.backend.forget_prefixes()
                    sampler.state = "ready"
                else:
                    reshard.sync_weights(each, sampler, merges=lora.merges(each))

            with sampler.awake():
                times = [seconds_of(sync) for _ in range(6)]
                sampler.generate(prompts, args.samples, seed=1)  # warm
                start = time.perf_counter()
                rollouts = sampler.generate(prompts, args.samples, seed=0)
                speed = sum(len(r.response_ids) for r in rollouts) / (time.perf_counter() - start)
            apart, k3, count = difference(each, rollouts, mesh.device_type)
            how = "vLLM's own LoRA" if args.own else name
            known = dict(sync_s=statistics.median(times[1:]), tokens_per_s=speed)
            known |= dict(thousand_abs_diff=1e3 * apart, million_k3=1e6 * k3, num_tokens=count)
            say(how, model=Path(args.model).name, rank=args.rank, **known, **about())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["steps", "engine"])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--own", action="store_true", help="vLLM's own LoRA")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=None, help="512, or 128 for engine")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--tokens-per-row", type=int, default=8192)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more of grpo.py's")
    args = parser.parse_args()
    if args.max_new is None:
        args.max_new = 512 if args.what == "steps" else 128
    {"steps": steps, "engine": engine}[args.what](args)
    run.leave()


if __name__ == "__main__":
    main()
