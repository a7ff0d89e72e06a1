"""A rollout as grpo.py makes it: sampling, decoding and scoring, beside the time the GPU works.

    python benchmarks/rollout.py models/smollm2 gsm8k.jsonl              # as in W1
    python benchmarks/rollout.py models/qwen2-1.5b gsm8k.jsonl --max-new 512
    python benchmarks/rollout.py MODEL DATA --profile                    # functions by their time

Records: how long the engine took to build; each run's seconds, of which adding the requests, engine
steps, the end (text and rewards of what ended last), and collecting garbage; at last medians, the
time that kernels ran by the profiler, and the quotient. All responses have --max-new tokens.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import os
import pstats
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from measure import kernel_seconds, say, synchronize

import data
import hub
import rewards
import rollout
import run
import sampling
import scheduler
import vllm_backend

REWARD = str(Path(__file__).resolve().parents[1] / "examples/arithmetic.py") + ":last_number"


class Clock:
    """Seconds by name, of functions that it wraps and of the garbage collector."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        gc.callbacks.append(self._collect)

    def _collect(self, phase: str, info: dict) -> None:
        now = time.perf_counter()
        if phase == "stop":
            self.add("garbage", now - self._since)
        self._since = now

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def wrap(self, owner: object, attribute: str, name: str) -> None:
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            began = time.perf_counter()
            found = function(*args, **kwargs)
            self.add(name, time.perf_counter() - began)
            return found

        setattr(owner, attribute, timed)


def make_engine(args, tokenizer, max_prompt_tokens: int) -> rollout.Engine:
    config = rollout.RolloutConfig(
        engine="vllm",
        max_response_tokens=args.max_new,
        ignore_eos=True,
        sleep_level=0,
        scheduler=args.scheduler,
        kv_cache_gb=args.kv_cache_gb,
    )
    engine = rollout.Engine(
        functools.partial(
            vllm_backend.VllmBackend, make_scheduler=scheduler.closed_batch_scheduler
        ),
        args.model,
        config,
        max_prompt_tokens=max_prompt_tokens,
        num_samples=args.prompts * args.samples,
        stop_ids=hub.stop_token_ids(args.model, tokenizer.eos_token_id),
    )
    engine.state = "ready"  # with the file's weights, which nothing discards here
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--scheduler", default="closed")
    parser.add_argument("--kv-cache-gb", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    scorer = rewards.Scorer(rewards.RewardConfig((REWARD,), ()))
    run.init_distributed(0, 600)
    tokenizer = hub.load_tokenizer(args.model, args.model)
    config = data.DataConfig(max_prompt_tokens=512)
    prompts = data.load_prompts([args.data], tokenizer, config)[0][: args.prompts]
    began = time.perf_counter()
    engine = make_engine(args, tokenizer, 512)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = {"torch": torch.__version__, "vllm": sys.modules["vllm"].__version__}
    say("start", seconds=time.perf_counter() - began, device=device, **versions, **vars(args))
    clock = Clock()
    clock.wrap(engine.backend, "_add", "add")
    clock.wrap(engine.backend.llm.llm_engine, "step", "steps")
    clock.wrap(engine, "generate_share", "sample")

    def once(seed: int) -> None:
        engine.backend.forget_prefixes()
        drawn = sampling.draw(engine, scorer, tokenizer, prompts, args.samples, seed)
        scorer.collect(len(drawn) * args.samples)

    runs = []
    for i in range(args.runs):
        clock.seconds.clear()
        synchronize()
        began = time.perf_counter()
        once(1000 * i)
        synchronize()
        took = time.perf_counter() - began
        runs.append(took)
        end = took - clock.seconds["sample"]
        say("run", run=i, seconds=took, end=end, **clock.seconds)
    busy_s = kernel_seconds(lambda: once(0))
    median = statistics.median(runs[1:])
    say("summary", seconds=median, busy_s=busy_s, quotient=busy_s and median / busy_s)
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(once, 1)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(60)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own exit may hang


if __name__ == "__main__":
    main()
