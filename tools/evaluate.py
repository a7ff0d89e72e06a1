"""Scores a model as the evaluation of a run does, with each response in a file.

    bash launch.sh tools/evaluate.py --model OUT --eval-data test.jsonl --eval-every 1 \
        --eval-samples 8

The flags are those of grpo.py; --data may be left out. It prints the greedy reward and, with
--eval-samples k, mean@k and pass@k, and writes runs/NAME/eval.jsonl with a line for each response.
A saved state is made a model by tools/export.py first.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch.distributed as dist

import data
import grpo
import hardware
import metrics
import model
import run
import sampling
from examples import addition


def main(flags: grpo.Args) -> None:
    mesh = run.init_distributed(flags.seed, flags.timeout_s)
    meter = metrics.Metrics(hardware.Device())
    with run.one_line_errors():
        if flags.eval_paths:  # nothing is trained on
            flags = replace(flags, data_paths=flags.eval_paths)
        args = addition.with_paths(flags)
        path, tokenizer, _, prompts, scorer = grpo.prepare(args)
        run.require(prompts, "--eval-every", args.eval_every, "1, with --eval-data FILE")
        policy = model.load_policy(path, mesh, args.model, trainable=False)
        engine = grpo.make_engine(args, path, tokenizer)
    seed = data.sampling_seed(args.seed, "eval")
    k = args.eval_samples
    with engine.awake():
        grpo.sync(args, policy, engine, meter)
        made = sampling.evaluate(engine, scorer, tokenizer, prompts, k, seed, meter)
    lines = []
    for kind, groups in zip(("greedy", "sample"), made, strict=False):
        for group in groups:
            lines += to_lines(kind, group, tokenizer)
    per_rank = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, lines)
    record = meter.reduce()
    if dist.get_rank() == 0:
        args.run.directory.mkdir(parents=True, exist_ok=True)
        file = args.run.directory / "eval.jsonl"
        found = [line for each in per_rank for line in each]
        found.sort(key=lambda line: (line["kind"], line["position"]))
        file.write_text("".join(json.dumps(line) + "\n" for line in found))
        for name, value in record.items():
            if name.startswith("eval/"):
                print(f"{name:>24}  {value:.4f}", flush=True)
        print(f"each response with its reward is in {file}", flush=True)
    scorer.close()


def to_lines(kind: str, group: sampling.Group, tokenizer) -> list[dict]:
    """What is written of the responses to a prompt."""
    lines = []
    for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
        line = {
            "kind": kind,
            "position": group.position,
            "source": group.prompt.source,
            "prompt": group.prompt.text,
            "answer": group.prompt.answer,
            "response": tokenizer.decode(rollout.response_ids),
            "reward": reward,
            "truncated": rollout.truncated,
        }
        lines.append(line)
    return lines


if __name__ == "__main__":
    main(run.command_line(grpo.Args(), addition.SETTINGS, __doc__))
    run.leave()
