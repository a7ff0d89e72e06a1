"""Rows of one kind each, as hybrid.py has them, or demonstrations and pairs mixed: what is faster?

    python benchmarks/mixed_rows.py --model models/smollm2 --data gsm8k.jsonl --row 65536
    python benchmarks/mixed_rows.py --model DIR --data gsm8k.jsonl --per-step 4 --row 1024

Both make the same passes over the same sequences: forward and backward of the policy, and forward
of the reference, which only pairs need. In mixed rows the reference meets the demonstrations too.
A JSON line: seconds of a step (median of --repeats), rows and tokens of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from given import write_rows
from measure import synchronize

import run
from attention import use_packed_attention
from data import DataConfig, read_rows
from demonstrations import load_demonstrations, load_pairs, split_pairs
from hub import load_tokenizer
from logprobs import token_logprobs
from model import ModelConfig, load_policy
from packing import pack


def sequences(args, tokenizer) -> tuple[list[dict], list[dict]]:
    """(demonstrations, pairs) of one step, both with the field "segment": 0 and 1 in a pair; each
    demonstration has a number of its own, so that no two join."""
    directory = Path(tempfile.mkdtemp(prefix="mixed_rows-"))
    write_rows(args.data, directory, args.per_step)
    known = tokenizer, DataConfig(), 1024
    [sft] = load_demonstrations([f"{directory}/sft.jsonl"], *known, read_rows=read_rows)
    [dpo] = load_pairs([f"{directory}/dpo.jsonl"], *known, read_rows=read_rows)
    marked = []
    for i, each in enumerate(sft, 2):
        marked.append(each | {"segment": torch.full_like(each["tokens"], i)})
    return marked, dpo


def step_s(policy, reference, rows: list, with_reference: list) -> float:
    synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        for row in with_reference:
            token_logprobs(reference, row)
    for i, row in enumerate(rows):
        policy.set_requires_gradient_sync(i == len(rows) - 1)
        token_logprobs(policy, row)[0].sum().backward()
    policy.zero_grad()
    synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--data", required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--per-step", type=int, default=128, help="demonstrations, and pairs")
    parser.add_argument("--row", type=int, default=65536, help="tokens per row")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    mesh = run.init_distributed(0, 600.0)
    config = ModelConfig(compile=False)
    models = [load_policy(args.model, mesh, config, trainable=t) for t in (True, False)]
    for model in models:
        use_packed_attention(model)
    sft, dpo = sequences(args, load_tokenizer(args.model, "--model"))
    device = mesh.device_type
    own = [[split_pairs(row).to(device) for row in pack(part, args.row)] for part in (sft, dpo)]
    mixed = [split_pairs(row).to(device) for row in pack(sft + dpo, args.row)]
    layouts = {"own": ([*own[0], *own[1]], own[1]), "mixed": (mixed, mixed)}
    times: dict[str, list[float]] = {name: [] for name in layouts}
    for repeat in range(args.repeats + 2):
        for name, layout in layouts.items():
            seconds = step_s(*models, *layout)
            if repeat >= 2:
                times[name].append(seconds)
    found = {
        name: {
            "step_s": round(statistics.median(times[name]), 4),
            "rows": [len(row.tokens) for row in rows],
        }
        for name, (rows, _) in layouts.items()
    }
    print(json.dumps({"what": "mixed_rows", "torch": torch.__version__} | found), flush=True)


if __name__ == "__main__":
    main()
