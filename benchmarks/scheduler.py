"""Sampling with vLLM's scheduler and with scheduler.py's, in turn, on one GPU.

    python benchmarks/scheduler.py MODEL_DIR [--data PROMPTS.jsonl --stops] [--max-new 256]

Each scheduler has an engine in a process of its own; the two take turns, with the same seeds, and
the GPU is one's alone while it samples. One JSON line for each measurement:
    start     engine, versions, and how long it took to build
    run       seconds, tokens and tokens/s of rollout.Engine.generate, the same seed for both
    steps     engine steps inside and outside of windows, of one run
    busy      time that the GPU works in one run, by the profiler, beside that run's seconds
    equal     share of responses whose tokens are the same, and of those whose log-probabilities are
              equal in every bit: the two schedulers, and each with itself
    summary   medians of the runs behind the first, their ratio, and seconds by time that the GPU is
              busy
Prompts are of random tokens, 32 to 128 of them, or from a file. Without --stops all responses have
--max-new tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from measure import kernel_seconds, say, synchronize


def serve(pipe, args: argparse.Namespace, scheduler: str) -> None:
    """An engine that answers (action, seed) with a dictionary until it is told to stop."""
    try:
        engine, prompts, about = build(args, scheduler)
        pipe.send(about)
        while request := pipe.recv():
            action, seed = request
            pipe.send({"run": run, "busy": busy}[action](engine, prompts, args.samples, seed))
    except Exception as error:  # a process boundary: the parent says what it was
        pipe.send({"error": f"{type(error).__name__}: {error}"[-2000:]})
        raise
    finally:
        sys.stderr.flush()
        os._exit(0)  # vLLM's own exit may hang


def build(args: argparse.Namespace, scheduler: str):
    import functools

    import vllm
    from transformers import AutoConfig, AutoTokenizer

    from rollout import Engine, RolloutConfig
    from run import init_distributed
    from scheduler import closed_batch_scheduler
    from vllm_backend import VllmBackend

    init_distributed(0, 600)
    began = time.perf_counter()
    prompts = make_prompts(args, AutoConfig.from_pretrained(args.model).vocab_size)
    config = RolloutConfig(
        engine="vllm",
        max_response_tokens=args.max_new,
        ignore_eos=not args.stops,
        sleep_level=0,
        kv_cache_gb=args.kv_cache_gb,
        max_num_seqs=args.max_num_seqs,
        scheduler=scheduler,
    )
    engine = Engine(
        functools.partial(VllmBackend, make_scheduler=closed_batch_scheduler),
        args.model,
        config,
        max_prompt_tokens=max(map(len, prompts)),
        num_samples=len(prompts) * args.samples,
        stop_ids=[AutoTokenizer.from_pretrained(args.model).eos_token_id],
    )
    engine.state = "ready"  # with the file's weights, which nothing discards here
    core = engine.backend.llm.llm_engine.engine_core.engine_core
    about = {
        "what": "start",
        "scheduler": scheduler,
        "class": type(engine.backend.scheduler).__name__,
        "seconds": round(time.perf_counter() - began, 1),
        "model": Path(args.model).name,
        "requests": len(prompts) * args.samples,
        "max_new": args.max_new,
        "stops": args.stops,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "v2_runner": bool(getattr(engine.backend.scheduler, "use_v2_model_runner", False)),
        "steps_in_flight": core.batch_queue_size,
        "blocks": engine.backend.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "plain": getattr(engine.backend.scheduler, "_is_plain", None),
    }
    return engine, prompts, about


def make_prompts(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    if args.data:
        from transformers import AutoTokenizer

        from data import DataConfig, load_prompts

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        found = load_prompts([args.data], tokenizer, DataConfig(max_prompt_tokens=256))[0]
        return [found[i % len(found)].prompt_ids for i in range(args.prompts)]
    draw = random.Random(0)
    sizes = [draw.randrange(32, 129) for _ in range(args.prompts)]
    return [[draw.randrange(vocab_size) for _ in range(size)] for size in sizes]


def run(engine, prompts: list[list[int]], num_samples: int, seed: int) -> dict:
    engine.backend.forget_prefixes()
    scheduler = engine.backend.scheduler
    before = getattr(scheduler, "window_steps", 0), getattr(scheduler, "other_steps", 0)
    synchronize()
    began = time.perf_counter()
    rollouts = engine.generate(prompts, num_samples, seed=seed)
    synchronize()
    return {
        "seconds": time.perf_counter() - began,
        "window_steps": getattr(scheduler, "window_steps", 0) - before[0],
        "other_steps": getattr(scheduler, "other_steps", 0) - before[1],
        "ids": [r.response_ids.numpy() for r in rollouts],
        "logprobs": [r.logprobs.numpy() for r in rollouts],
    }


def busy(engine, prompts: list[list[int]], num_samples: int, seed: int) -> dict:
    """Seconds that kernels ran, and how long the run took beside the profiler."""
    seconds = []
    busy_s = kernel_seconds(
        lambda: seconds.append(run(engine, prompts, num_samples, seed)["seconds"])
    )
    return {"busy_s": busy_s, "seconds": seconds[0] if seconds else None}


def equal(ours: dict, theirs: dict) -> dict:
    pairs = list(zip(ours["ids"], theirs["ids"], strict=True))
    tokens = [a.tobytes() == b.tobytes() for a, b in pairs]
    values = zip(ours["logprobs"], theirs["logprobs"], strict=True)
    bits = [a.tobytes() == b.tobytes() for a, b in values]
    return {
        "tokens_equal": sum(tokens) / len(tokens),
        "logprobs_equal": sum(bits) / len(bits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", default="", help="a file of prompts; else random tokens")
    parser.add_argument("--stops", action="store_true", help="the end token ends a response")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kv-cache-gb", type=float, default=0.0, help="0: 16 on a GPU")
    parser.add_argument("--max-num-seqs", type=int, default=0)
    args = parser.parse_args()
    if not args.kv_cache_gb and torch.cuda.is_available():
        args.kv_cache_gb = 16.0
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for scheduler in ("vllm", "closed"):
        pipes[scheduler], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, args, scheduler), daemon=True).start()
        theirs.close()
        print(json.dumps(answer(pipes[scheduler])), flush=True)
    measure(pipes, args.runs)


def ask(pipe, action: str, seed: int) -> dict:
    pipe.send((action, seed))
    return answer(pipe)


def answer(pipe) -> dict:
    try:
        found = pipe.recv()
    except EOFError:
        sys.exit("error: an engine's process ended; its message is above")
    if "error" in found:
        sys.exit(f"error: {found['error']}")
    return found


def measure(pipes: dict, num_runs: int) -> None:
    seconds = {name: [] for name in pipes}
    results = {name: [] for name in pipes}
    for i in range(num_runs):
        for name, pipe in pipes.items():
            found = ask(pipe, "run", 10_000 * i)
            tokens = sum(map(len, found["ids"]))
            took = found["seconds"]
            say(
                "run",
                scheduler=name,
                run=i,
                seconds=took,
                tokens=tokens,
                tokens_per_s=tokens / took,
            )
            if i:
                seconds[name].append(took)
            if i == 1:
                results[name] = found
                steps = {key: found[key] for key in ("window_steps", "other_steps")}
                if any(steps.values()):  # vLLM's own does not count them
                    ms = 1e3 * took / sum(steps.values())
                    say("steps", scheduler=name, **steps, ms_per_step=ms)
    say("equal", between="vllm and closed", **equal(results["vllm"], results["closed"]))
    median = {name: statistics.median(each) for name, each in seconds.items()}
    shares = {}
    for name, pipe in pipes.items():
        again = ask(pipe, "run", 10_000)
        say("equal", between=f"{name} and itself", **equal(results[name], again))
        found = ask(pipe, "busy", 10_000)
        say("busy", scheduler=name, **found)
        shares[name] = found["busy_s"] and median[name] / found["busy_s"]
    summary = {f"{name}_s": each for name, each in median.items()}
    summary |= {f"{name}_s_by_busy_s": each for name, each in shares.items()}
    say("summary", **summary, ratio=median["vllm"] / median["closed"])


if __name__ == "__main__":
    main()
