"""SFT and DPO on given texts: hybrid.py and TRL's SFTTrainer and DPOTrainer on one GPU.

    python benchmarks/given.py --model models/smollm2 --data gsm8k.jsonl
    python benchmarks/given.py --model models/smollm2 --data gsm8k.jsonl --size smoke --programs \\
        handful-sft trl-sft-padded handful-dpo trl-dpo-padded     # whether they run, on a CPU too

The rows are GSM8K's questions and answers, as chat; the rejected half of a pair is the answer to
another question. All programs train on the same token ids at a learning rate of 1e-6, with fp32
weights and bf16 compute; padded batches in the same order, so the losses of a step must agree.

A JSON line per program: medians over the steps from the fourth on, and the loss of each step.
    tokens_per_s   all tokens of demonstrations, prompts too, over the step's time
    pairs_per_s    pairs over the step's time
    loss_diff      largest difference of a step's loss to handful's, as a share; packed rows hold
                   others than a step of handful's, so there it is that of the means of all steps
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "trl", "vllm")
SIZES = {
    # demonstrations and pairs a step, steps, tokens per row of handful, micro-batch of TRL
    "full": dict(per_step=128, steps=8, row=32768, micro=64, packed=4096),
    "smoke": dict(per_step=4, steps=2, row=2048, micro=2, packed=1024),
}
PROGRAMS = {
    "handful-sft": "",
    "trl-sft-padded": "",
    "trl-sft-packed": "--packed {packed} --micro-batch 1",
    "trl-sft-flex": "--packed {packed} --micro-batch 4 --attention flex_attention",
    "handful-dpo": "",
    "trl-dpo-padded": "",
    "trl-dpo-free": "--padding-free --micro-batch 8",
}


def write_rows(source: str, directory: Path, num_rows: int) -> None:
    """sft.jsonl and dpo.jsonl of the first rows of GSM8K."""
    lines = Path(source).read_text().splitlines()[:num_rows]
    rows = [json.loads(line) for line in lines]
    demonstrations = []
    pairs = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        prompt = [{"role": "user", "content": row["question"]}]
        demonstrations.append({"prompt": prompt, "response": row["answer"]})
        pair = {"chosen": row["answer"], "rejected": other["answer"]}
        pairs.append({"prompt": prompt} | pair)
    for name, made in (("sft", demonstrations), ("dpo", pairs)):
        text = "".join(json.dumps(row) + "\n" for row in made)
        (directory / f"{name}.jsonl").write_text(text)


def command_of(program: str, args, size: dict, directory: Path) -> list[str]:
    kind = program.split("-")[1]
    rows = directory / f"{kind}.jsonl"
    if program.startswith("handful"):
        count = "samples" if kind == "sft" else "pairs"
        weights = "1 0 0" if kind == "sft" else "0 1 0"
        parts = [
            f"hybrid.py --model {args.model} --weights {weights} --{kind}.data {rows}",
            f"--{kind}.{count}-per-step {size['per_step']} --{kind}.max-tokens 1024",
            f"--num-steps {size['steps']} --tokens-per-row {size['row']}",
            f"--optim.warmup-steps 0 --save-minutes 0 --log.plot-every 0 {args.handful}",
            f"--output-dir {directory} --name {program}",
        ]
    else:
        parts = [
            f"benchmarks/peers/trl_given.py {kind} {args.model} {rows}",
            f"--metrics {directory}/{program}/metrics.jsonl --steps {size['steps']}",
            f"--per-step {size['per_step']} --micro-batch {size['micro']}",
            PROGRAMS[program].format(**size),
        ]
    return [sys.executable, *shlex.split(" ".join(parts))]


def steps_of(program: str, directory: Path) -> list[dict]:
    """{"step_s", "loss"} of each step that the program has written."""
    file = directory / program / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    kind = program.split("-")[1]
    steps = []
    for line in map(json.loads, lines):
        if program.startswith("handful"):
            line = {"step_s": line["timing_s/step"], "loss": line[f"{kind}/loss"]}
        steps.append(line)
    return steps


def tokens_per_step(directory: Path, program: str) -> float:
    """Of handful's records: throughput times the step's time."""
    file = directory / program / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    counts = [r["throughput/tokens_per_sec"] * r["timing_s/step"] for r in records]
    return sum(counts) / len(counts)


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure(program: str, args, size: dict, directory: Path) -> dict:
    """One program from start to end, and its figures."""
    (directory / program).mkdir(exist_ok=True)
    command = command_of(program, args, size, directory)
    start = time.monotonic()
    with (directory / f"{program}.log").open("w") as log:
        try:
            subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=args.limit_s,
            )
        except subprocess.TimeoutExpired:
            print(f"{program}: out of time after {args.limit_s} s", flush=True)
    steps = steps_of(program, directory)
    if not steps:
        print((directory / f"{program}.log").read_text()[-3000:], flush=True)
    late = [step["step_s"] for step in steps[3:] or steps]
    return {
        "program": program,
        "size": args.size,
        "num_steps": len(steps),
        "step_s": statistics.median(late) if late else None,
        "losses": [round(step["loss"], 5) for step in steps],
        "whole_s": round(time.monotonic() - start, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": versions(),
        "command": shlex.join(["python", *command[1:]]),
    }


def compare(record: dict, own: dict, num_tokens: float, per_step: int) -> None:
    """Adds to the record its speed, and what it has beside handful's of the same kind."""
    if record["step_s"] is None:
        return
    if "sft" in record["program"]:
        record["tokens_per_s"] = num_tokens / record["step_s"]
    else:
        record["pairs_per_s"] = per_step / record["step_s"]
    record["handful_is"] = record["step_s"] / own["step_s"]
    ours = own["losses"]
    theirs = record["losses"]
    if "packed" in record["program"] or "flex" in record["program"]:
        ours = [statistics.mean(ours)]
        theirs = [statistics.mean(theirs)]
    pairs = zip(ours, theirs, strict=False)
    record["loss_diff"] = max(abs(a - b) / abs(a) for a, b in pairs)


def earlier(args) -> dict[str, dict]:
    """{kind: handful's newest record of this size}, so that peers may run in a later call on the
    same machine.
    """
    found = {}
    file = Path(args.results)
    for line in file.read_text().splitlines() if file.exists() else []:
        record = json.loads(line)
        if record["size"] == args.size and "tokens" in record:
            found[record["program"].split("-")[1]] = record
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--data", required=True, help="GSM8K's train.jsonl: question and answer")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--limit-s", type=float, default=90, help="longest that one may run")
    parser.add_argument("--handful", default="", help="more flags of hybrid.py")
    parser.add_argument("--results", default=str(ROOT / "benchmarks/results/given.jsonl"))
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    size = SIZES[args.size]
    directory = Path(tempfile.mkdtemp(prefix="given-"))
    write_rows(args.data, directory, size["per_step"] * size["steps"])
    own = earlier(args)
    for program in args.programs:
        kind = program.split("-")[1]
        record = measure(program, args, size, directory)
        if program.startswith("handful") and record["step_s"]:
            own[kind] = record | {"tokens": tokens_per_step(directory, program)}
            record["tokens"] = own[kind]["tokens"]
        if kind in own:
            compare(record, own[kind], own[kind]["tokens"], size["per_step"])
        print(json.dumps(record), flush=True)
        with open(args.results, "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
