"""handful and its peers on one GPU, one after the other: steps by phase, tokens per second, memory.

    python benchmarks/end_to_end.py w1 --model models/smollm2 --data gsm8k.jsonl \\
        --programs handful trl --rounds 2
    python benchmarks/end_to_end.py w2 --model models/qwen2-1.5b --data gsm8k.jsonl \\
        --programs handful trl

Hosts differ by a quarter, so programs are compared on one machine only, with --rounds 2 in turn.

Workloads (64 prompts x 8 samples, GSM8K's questions, a learning rate of 1e-6, no reference model):
    w1       256 new tokens, forced; the engine keeps its memory      SmolLM2-135M
    w2       512 new tokens, forced; the engine sleeps in each update  Qwen2 1.5 B, random weights
    natural  128 prompts, up to 1,024 new tokens, as the model ends    SmolLM2-135M
    long     16 prompts of some 2,000 tokens, worked examples before each question; 256 new
             tokens, forced; the engine sleeps                         Qwen2 1.5 B, random weights
    smoke    4 prompts x 4 samples of 8 tokens: whether a program runs, on a CPU too
Programs: handful (grpo.py), trl (vLLM colocated), trl-generate (Transformers' generate), verl.
A program with packages of its own gets them by --site NAME DIR, other settings by
--extra NAME "FLAGS".

Each step is a line of the results file as soon as it ends, and a program that has its steps there
is not run again: repeat a call that was cut off. The table of them all comes last (table.py says
what is in it).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import table
import torch
from peers.verl_grpo import in_common_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "vllm", "trl", "verl")
PROGRAMS = ("handful", "trl", "trl-generate", "verl")


@dataclass(frozen=True)
class Workload:
    prompts: int
    samples: int
    max_new: int
    forced: bool
    sleep: bool
    handful: str  # flags
    trl: str
    verl: str
    prompt_tokens: int = 0  # worked examples fill a prompt up to here; 0: the question alone


WORKLOADS = {
    "w1": Workload(
        *(64, 8, 256),
        forced=True,
        sleep=False,
        handful="--tokens-per-row 65536",
        trl="--micro-batch 128 --memory-fraction 0.25",
        verl="--micro-tokens 32768",
    ),
    "w2": Workload(
        *(64, 8, 512),
        forced=True,
        sleep=True,
        handful="",
        trl="--micro-batch 16 --memory-fraction 0.4",
        verl="--micro-tokens 16384",
    ),
    "natural": Workload(
        *(128, 8, 1024),
        forced=False,
        sleep=False,
        handful="--tokens-per-row 65536",
        trl="--micro-batch 64 --memory-fraction 0.25",
        verl="--micro-tokens 32768",
    ),
    "long": Workload(
        *(16, 8, 256),
        forced=True,
        sleep=True,
        handful="--data.max-prompt-tokens 2200",
        trl="--micro-batch 8 --memory-fraction 0.4 --max-prompt 2200",
        verl="",
        prompt_tokens=2048,
    ),
    "smoke": Workload(
        *(4, 4, 8),
        forced=True,
        sleep=False,
        handful="--tokens-per-row 256 --rollout.engine hf --data.max-prompt-tokens 32",
        trl="--micro-batch 8 --max-prompt 32",
        verl="",
    ),
}


def command_of(program: str, args, metrics: Path) -> list[str]:
    """The command line; the program adds a line a step to the file `metrics`."""
    work = WORKLOADS[args.workload]
    model = shlex.quote(args.model)
    data = shlex.quote(args.data)
    if program == "handful":
        parts = [
            f"grpo.py --model {model} --data {data} --num-steps {args.steps}",
            f"--output-dir {metrics.parent.parent} --name {metrics.parent.name}",
            f"--prompts-per-step {work.prompts} --group-size {work.samples}",
            f"--rollout.max-response-tokens {work.max_new}",
            f"--reward.functions {ROOT / 'examples/arithmetic.py'}:last_number",
            "--rollout.ignore-eos" if work.forced else "",
            f"--rollout.sleep-level {2 if work.sleep else 0}",
            work.handful,
        ]
    else:
        script = "verl_grpo.py" if program == "verl" else "trl_grpo.py"
        parts = [
            f"{ROOT / 'benchmarks/peers' / script} {model} {data} --metrics {metrics}",
            f"--steps {args.peer_steps} --prompts {work.prompts} --samples {work.samples}",
            f"--max-new {work.max_new}",
            "--forced" if work.forced else "",
            "--generate" if program == "trl-generate" else "",
            "--sleep" if work.sleep and program != "trl-generate" else "",
            work.verl if program == "verl" else work.trl,
        ]
    parts += [flags for name, flags in args.extra if name == program]
    return [sys.executable, *shlex.split(" ".join(parts))]


def with_examples(data: str, model: str, num_tokens: int, file: Path) -> str:
    """The file, with worked examples from `data` before each of its questions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    texts = [f"{row['question']}\n{row['answer']}\n\n" for row in rows]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    with file.open("w") as out:
        for i, row in enumerate(rows):
            room = num_tokens - 50 - lengths[i]  # 50: the chat template
            examples = ""
            for k in range(i + 1, i + 60):
                if lengths[k % len(rows)] <= room:
                    examples += texts[k % len(rows)]
                    room -= lengths[k % len(rows)]
            out.write(json.dumps(row | {"question": examples + row["question"]}) + "\n")
    return str(file)


def num_steps(program: str, args) -> int:
    return args.steps if program == "handful" else args.peer_steps


def in_common(program: str, line: dict, work: Workload) -> dict:
    """A line of a program's file in the common names; TRL's has them already."""
    num_samples = work.prompts * work.samples
    if program == "handful":
        return from_handful(line, num_samples)
    return in_common_names(line, num_samples) if program == "verl" else line


def from_handful(line: dict, num_samples: int) -> dict:
    """A line of grpo.py's metrics.jsonl in the common names."""
    times = {name[9:]: s for name, s in line.items() if name.startswith("timing_s/")}
    new_tokens = num_samples * line["response_length/mean"]
    sample_s = times["rollout"] + times["reshard"] + times.get("sleep", 0.0)
    return {
        "step": line["step"],
        "step_s": times["step"],
        "sample_s": sample_s,
        "score_s": times["step"] - sample_s - times["update"],
        "update_s": times["update"],
        "new_tokens": round(new_tokens),
        "trained_tokens": round(new_tokens + num_samples * line["prompt_length/mean"]),
        "mfu": line.get("perf/mfu"),
        "phases": {name: s for name, s in times.items() if name != "step"},
        "raw": {name: x for name, x in line.items() if not name.startswith("timing_s/")},
    }


class DeviceMemory:
    """Bytes in use on the first visible GPU, by NVML; 0 without one."""

    def __init__(self):
        self.handle = None
        if not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None:
            return
        import pynvml

        pynvml.nvmlInit()
        self.nvml = pynvml
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        by_name = pynvml.nvmlDeviceGetHandleByUUID
        by_number = pynvml.nvmlDeviceGetHandleByIndex
        self.handle = by_number(int(first)) if first.isdigit() else by_name(first)

    def used(self) -> int:
        return self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used if self.handle else 0

    def name(self) -> str:
        return self.nvml.nvmlDeviceGetName(self.handle) if self.handle else "CPU"


def versions(environment: dict) -> dict[str, str]:
    program = f"""
import importlib.metadata, json
found = {{}}
for name in {PACKAGES}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))"""
    job = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(job.stdout)


def descendants() -> set:
    import psutil

    return set(psutil.Process().children(recursive=True))


def end_all_but(others: set) -> None:
    """End what a program left behind: this process adopts the orphans among its descendants."""
    import psutil

    for sign in (signal.SIGTERM, signal.SIGKILL):
        left = descendants() - others
        for process in left:
            try:
                process.send_signal(sign)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=10)


def run(program: str, args, round_: int, memory: DeviceMemory) -> None:
    """One program from start to end; a line of the results file per step, as it comes."""
    directory = Path(tempfile.mkdtemp(prefix=f"{args.workload}-{program}-", dir=args.directory))
    metrics = directory.resolve() / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    command = command_of(program, args, metrics)
    sites = [site for name, site in args.site if name == program]
    path = os.pathsep.join(filter(None, [*sites, os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path}
    about = {
        "workload": args.workload,
        "program": program,
        "round": round_,
        "device": memory.name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(environment),
        "command": shlex.join(["python", *command[1:]]),
    }
    print(f"\n{program}, round {round_}: {about['command']}", flush=True)
    others = descendants()
    before = highest = memory.used()
    num_seen = 0
    start = time.monotonic()
    until = start + args.limit_s
    with (directory / "log").open("w") as log:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    is_over = False
    while not is_over:
        time.sleep(0.1)
        is_over = job.poll() is not None or time.monotonic() > until
        highest = max(highest, memory.used())
        # A line without its end is still being written.
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        for line in lines[num_seen:]:
            step = in_common(program, json.loads(line), WORKLOADS[args.workload])
            if num_seen == 0:
                about["start_s"] = time.monotonic() - start - step["step_s"]
            step["gib"] = (highest - before) / 2**30
            with open(args.results, "a") as file:
                file.write(json.dumps(about | step) + "\n")
            print(json.dumps(step | {"phases": "", "raw": ""}), flush=True)
            num_seen += 1
            if num_seen == num_steps(program, args):
                until = time.monotonic() + 15  # what it saves at its end is not waited for
    if num_seen == 0 or job.poll():
        print(f"{program} ended with {job.poll()} (None: out of time); {directory / 'log'}:")
        print("\n".join((directory / "log").read_text().splitlines()[-25:]), flush=True)
    end_all_but(others)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--data", required=True, help="GSM8K's train.jsonl: question and answer")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=["handful"])
    parser.add_argument("--rounds", type=int, default=1, help="times that each program runs")
    parser.add_argument("--steps", type=int, default=6, help="of handful")
    parser.add_argument("--peer-steps", type=int, default=4, help="of each other program")
    parser.add_argument("--limit-s", type=float, default=540, help="longest that one may run")
    parser.add_argument("--results", default=str(ROOT / "benchmarks/results/end_to_end.jsonl"))
    parser.add_argument("--directory", help="of the programs' own files; default: a temporary one")
    parser.add_argument("--site", nargs=2, action="append", default=[], metavar=("NAME", "DIR"))
    parser.add_argument("--extra", nargs=2, action="append", default=[], metavar=("NAME", "FLAGS"))
    args = parser.parse_args()
    memory = DeviceMemory()
    args.model = str(Path(args.model).resolve())
    args.data = str(Path(args.data).resolve())
    num_tokens = WORKLOADS[args.workload].prompt_tokens
    if num_tokens:
        args.directory = args.directory or tempfile.mkdtemp()
        file = Path(args.directory).resolve() / "with_examples.jsonl"
        args.data = with_examples(args.data, args.model, num_tokens, file)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to us
    for round_ in range(1, args.rounds + 1):
        for program in args.programs:
            done = table.load(args.results).get((args.workload, program, round_), [])
            if len(done) < num_steps(program, args):
                run(program, args, round_, memory)
    table.make(args.results)


if __name__ == "__main__":
    main()
