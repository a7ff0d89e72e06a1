"""TRL's SFTTrainer and DPOTrainer on the rows of benchmarks/given.py, a JSON line per step.

    python benchmarks/peers/trl_given.py sft MODEL_DIR rows.jsonl --metrics trl.jsonl --packed

They train on the very token ids of demonstrations.py, in the order in which hybrid.py takes them,
so a step of padded batches has the loss of hybrid.py's. A step's time runs from the end of the step
before it, so data loading and logging count.

Settings: TRL's defaults (float32 weights under bf16 autocast, a fused head), no gradient
checkpointing, handful's optimizer settings. --packed: SFT's best-fit packing, which fills rows of
--packed tokens in another order, so a step is a number of rows; --padding-free: DPO without pads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "disabled")
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from data import DataConfig, PromptStream, read_rows
from demonstrations import load_demonstrations, load_pairs


class Clock(TrainerCallback):
    """A line for each step, with its loss."""

    def __init__(self, metrics: str):
        self.file = Path(metrics)
        self.step_s = 0.0
        self.since = 0.0

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, *_, **__):
        self.since = self.now()

    def on_step_end(self, *_, **__):
        now = self.now()
        self.step_s = now - self.since
        self.since = now

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            line = {"step": state.global_step - 1, "step_s": self.step_s, "loss": logs["loss"]}
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


class ReadyPairs(DPOTrainer):
    """Takes pairs that are tokenized already."""

    def _prepare_dataset(self, dataset, *_):
        return dataset


def in_order(kind: str, args, tokenizer) -> list[dict]:
    """The demonstrations or pairs of all steps, as hybrid.py takes them with seed 0."""
    load = load_demonstrations if kind == "sft" else load_pairs
    sets = load([args.rows], tokenizer, DataConfig(), args.max_tokens, read_rows=read_rows)
    return PromptStream(sets, seed=0).take(args.steps * args.per_step)


def sft_rows(items: list[dict]) -> Dataset:
    rows = []
    for item in items:
        labels = torch.where(item["response_mask"], item["tokens"], -100)
        rows.append({"input_ids": item["tokens"].tolist(), "labels": labels.tolist()})
    return Dataset.from_list(rows)


def dpo_rows(items: list[dict]) -> Dataset:
    rows = []
    for item in items:
        row = {}
        for segment, name in enumerate(("chosen_ids", "rejected_ids")):
            own = item["segment"] == segment
            ids = item["tokens"][own].tolist()
            num_prompt = int((~item["response_mask"][own]).sum())
            row["prompt_ids"] = ids[:num_prompt]
            row[name] = ids[num_prompt:]
        rows.append(row)
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("sft", "dpo"))
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--metrics", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--per-step", type=int, default=256, help="demonstrations or pairs")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=64, help="of a forward; packed: rows")
    parser.add_argument("--packed", type=int, default=0, help="tokens in a packed row; 0: padded")
    parser.add_argument("--padding-free", action="store_true")
    parser.add_argument("--attention", default="sdpa")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    items = in_order(args.kind, args, tokenizer)
    rows_per_step = args.per_step
    if args.packed:
        num_tokens = sum(len(item["tokens"]) for item in items)
        rows_per_step = max(args.micro_batch, num_tokens // args.steps // args.packed)
    on_gpu = torch.cuda.is_available()
    shared = dict(
        output_dir=str(Path(args.metrics).parent / "trl"),
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=max(1, rows_per_step // args.micro_batch),
        train_sampling_strategy="sequential",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta2=0.98,
        weight_decay=0.0,
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"attn_implementation": args.attention, "dtype": "float32"},
    )
    clock = Clock(args.metrics)
    known = dict(model=args.model, processing_class=tokenizer, callbacks=[clock])
    if args.kind == "sft":
        config = SFTConfig(
            packing=bool(args.packed), max_length=args.packed or args.max_tokens, **shared
        )
        trainer = SFTTrainer(args=config, train_dataset=sft_rows(items), **known)
    else:
        config = DPOConfig(beta=0.1, max_length=None, padding_free=args.padding_free, **shared)
        trainer = ReadyPairs(args=config, train_dataset=dpo_rows(items), **known)
    trainer.train()


if __name__ == "__main__":
    main()
