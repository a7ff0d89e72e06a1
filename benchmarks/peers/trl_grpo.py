"""TRL's GRPOTrainer on the workloads of benchmarks/end_to_end.py, a JSON line per step.

    python benchmarks/peers/trl_grpo.py MODEL_DIR gsm8k.jsonl --metrics trl.jsonl [--generate]

Samples come from vLLM in the trainer's process, or with --generate from Transformers' own
generation. A step's time runs from the end of the step before it, so data loading and logging
count. Its parts: sample_s (weights to the engine, sampling), score_s (rewards, and the trainer's
log-probabilities that its importance correction needs), update_s (the rest).

Settings: TRL's defaults (float32 weights under bf16 autocast, importance correction on, no
reference model), gradient checkpointing off where memory allows it, the largest micro-batch that
fits, an engine that keeps all samples of a step in flight. What TRL counts as a batch is padded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "disabled")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """The parts of the current step; writes them when it ends."""

    def __init__(self, metrics: str):
        self.file = Path(metrics)
        self.step = {}
        self.since = 0.0

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, *_, **__):
        self.since = self.now()

    def on_step_end(self, args, state, control, **_):
        now = self.now()
        step_s = now - self.since
        self.since = now
        inside = self.step.pop("inside_s")  # sampling and scoring
        self.step["score_s"] = inside - self.step["sample_s"]
        self.step["update_s"] = step_s - inside
        line = json.dumps({"step": state.global_step - 1, "step_s": step_s} | self.step)
        with self.file.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
        self.step = {}


class TimedTrainer(GRPOTrainer):
    """The trainer with a clock around its two phases before the update."""

    clock: Clock

    def _generate(self, prompts, *rest):
        start = self.clock.now()
        result = super()._generate(prompts, *rest)
        self.clock.step["sample_s"] = self.clock.now() - start
        prompt_ids, completion_ids = result[:2]
        new_tokens = sum(map(len, completion_ids))
        self.clock.step["new_tokens"] = new_tokens
        self.clock.step["trained_tokens"] = new_tokens + sum(map(len, prompt_ids))
        return result

    def _generate_and_score_completions(self, inputs):
        start = self.clock.now()
        result = super()._generate_and_score_completions(inputs)
        self.clock.step["inside_s"] = self.clock.now() - start
        return result


def last_number(completions, answer, **_) -> list[float]:
    """1 for each completion whose last number is the answer."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion[0]["content"].replace(",", ""))
        rewards.append(float(bool(numbers) and numbers[-1] == wanted))
    return rewards


def load(path: str, num_rows: int) -> Dataset:
    """The first rows of GSM8K as conversations, with the number after #### as the answer."""
    rows = []
    for line in Path(path).read_text().splitlines()[:num_rows]:
        row = json.loads(line)
        answer = row["answer"].split("####")[-1].strip().replace(",", "")
        rows.append({"prompt": [{"role": "user", "content": row["question"]}], "answer": answer})
    return Dataset.from_list(rows)


def configure(args) -> GRPOConfig:
    on_gpu = torch.cuda.is_available()
    forced = None
    if args.forced:
        forced = {"min_new_tokens": args.max_new} if args.generate else {"ignore_eos": True}
    return GRPOConfig(
        output_dir=str(Path(args.metrics).parent / "trl"),
        max_steps=args.steps,
        num_generations=args.samples,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.samples // args.micro_batch,
        max_completion_length=args.max_new,
        generation_kwargs=forced,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        gradient_checkpointing=args.checkpointing,
        use_vllm=not args.generate,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.memory_fraction,
        vllm_enable_sleep_mode=args.sleep,
        vllm_max_model_length=args.max_prompt + args.max_new,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument(
        "--metrics", required=True, help="file to which a JSON line is added a step"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-prompt", type=int, default=512)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--forced", action="store_true", help="always --max-new tokens")
    parser.add_argument("--generate", action="store_true", help="without vLLM")
    parser.add_argument("--sleep", action="store_true", help="the engine frees its memory")
    parser.add_argument("--micro-batch", type=int, default=64, help="sequences in one forward")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--memory-fraction", type=float, default=0.3, help="the engine's")
    args = parser.parse_args()
    clock = Clock(args.metrics)
    TimedTrainer.clock = clock
    trainer = TimedTrainer(
        model=args.model,
        reward_funcs=last_number,
        args=configure(args),
        train_dataset=load(args.data, args.prompts * (args.steps + 1)),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[clock],
    )
    trainer.train()


if __name__ == "__main__":
    main()
