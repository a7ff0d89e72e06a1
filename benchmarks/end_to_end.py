"""handful and its peers on one GPU, one after the other: steps by phase, tokens per second, memory.

    python benchmarks/end_to_end.py w1 --model models/smollm2 --data gsm8k.jsonl \\
        --programs handful trl --rounds 2
    python benchmarks/end_to_end.py w2 --model models/qwen2-1.5b --data gsm8k.jsonl \\
        --programs handful trl
    python benchmarks/end_to_end.py                  # only the table of what has been measured

Two programs can only be compared on one machine in one hour: hosts differ by a quarter. So all run
here, and with --rounds 2 each runs twice, in turn (a b a b).

Workloads (64 prompts x 8 samples, GSM8K's questions, a learning rate of 1e-6, no reference model):
    w1       256 new tokens, forced; the engine keeps its memory      SmolLM2-135M
    w2       512 new tokens, forced; the engine sleeps in each update  Qwen2 1.5 B, random weights
    natural  128 prompts, up to 1,024 new tokens, as the model ends    SmolLM2-135M
    smoke    4 prompts x 4 samples of 8 tokens: whether a program runs, on a CPU too
Programs: handful (grpo.py), trl (vLLM colocated), trl-generate (Transformers' generate), verl.
A program with packages of its own gets them by --site NAME DIR, other settings by
--extra NAME "FLAGS".

Each step is a line of the results file as soon as it ends, and a program that has its steps there
is not run again: a call that was cut off goes on when it is repeated. end_to_end.json beside it
gets the table: medians of steps 3 and later.

    start_s     from the program's start to its first step
    sample_s    weights to the engine and sampling; score_s: rewards, layout, log-probabilities
                that stay fixed; update_s: the rest
    new/s       sampled tokens, trained/s: prompt and sampled tokens of all sequences, over the step
    mfu         model FLOPs (as metrics.py counts them) of the step, and of the update alone, over
                the device's bf16 peak; a peer's tokens are priced as handful's
    gib         the device's memory in use (NVML), less what was in use before the start
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

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
    handful: str
    """Flags of grpo.py."""
    trl: str
    verl: str


WORKLOADS = {
    "w1": Workload(
        *(64, 8, 256, True, False),
        handful="--tokens-per-row 65536",
        trl="--micro-batch 128 --memory-fraction 0.25",
        verl="--micro-tokens 32768",
    ),
    "w2": Workload(
        *(64, 8, 512, True, True),
        handful="",
        trl="--micro-batch 16 --memory-fraction 0.4",
        verl="--micro-tokens 16384",
    ),
    "natural": Workload(
        *(128, 8, 1024, False, False),
        handful="--tokens-per-row 65536",
        trl="--micro-batch 64 --memory-fraction 0.25",
        verl="--micro-tokens 32768",
    ),
    "smoke": Workload(
        *(4, 4, 8, True, False),
        handful="--tokens-per-row 256 --rollout.backend hf --data.max-prompt-tokens 32",
        trl="--micro-batch 8 --max-prompt 32",
        verl="",
    ),
}


def command_of(program: str, args, metrics: Path) -> list[str]:
    """The command line; the program adds a line a step to the file `metrics`."""
    work = WORKLOADS[args.workload]
    extra = [flag for name, flags in args.extra if name == program for flag in shlex.split(flags)]
    steps = str(args.steps or (6 if program == "handful" else 4))
    if program == "handful":
        flags = {
            "--model": args.model,
            "--data": args.data,
            "--output-dir": str(metrics.parent.parent),
            "--name": metrics.parent.name,
            "--num-steps": steps,
            "--prompts-per-step": str(work.prompts),
            "--group-size": str(work.samples),
            "--rollout.max-response-tokens": str(work.max_new),
            "--rollout.sleep-level": "2" if work.sleep else "0",
            "--reward.functions": f"{ROOT / 'examples/arithmetic.py'}:last_number",
            "--log.plot-every": "0",
        }
        switches = ["--rollout.ignore-eos"] if work.forced else []
        given = [part for pair in flags.items() for part in pair]
        return [sys.executable, "grpo.py", *given, *switches, *shlex.split(work.handful), *extra]
    script = "verl_grpo.py" if program == "verl" else "trl_grpo.py"
    flags = {
        "--metrics": str(metrics),
        "--steps": steps,
        "--prompts": str(work.prompts),
        "--samples": str(work.samples),
        "--max-new": str(work.max_new),
    }
    wanted = {
        "--forced": work.forced,
        "--sleep": work.sleep and program != "trl-generate",
        "--generate": program == "trl-generate",
    }
    given = [part for pair in flags.items() for part in pair]
    switches = [flag for flag, is_on in wanted.items() if is_on]
    own = shlex.split(work.verl if program == "verl" else work.trl)
    path = str(ROOT / "benchmarks/peers" / script)
    return [sys.executable, path, args.model, args.data, *given, *switches, *own, *extra]


def from_handful(line: dict, work: Workload, peak: float | None) -> dict:
    """A line of grpo.py's metrics.jsonl in the common names."""
    times = {name[9:]: s for name, s in line.items() if name.startswith("timing_s/")}
    num_samples = work.prompts * work.samples
    new_tokens = num_samples * line["response_length/mean"]
    sample_s = times["rollout"] + times["reshard"] + times.get("sleep", 0.0)
    step = {
        "step": line["step"],
        "step_s": times["step"],
        "sample_s": sample_s,
        "score_s": times["step"] - sample_s - times["update"],
        "update_s": times["update"],
        "new_tokens": round(new_tokens),
        "trained_tokens": round(new_tokens + num_samples * line["prompt_length/mean"]),
        "phases": {name: s for name, s in times.items() if name != "step"},
        "raw": {name: x for name, x in line.items() if not name.startswith("timing_s/")},
    }
    if line.get("perf/mfu") is not None:
        step["model_flops"] = line["perf/mfu"] * times["step"] * peak
    return step


def from_verl(line: dict, work: Workload) -> dict:
    """A line of verl's file logger in the common names."""
    data = line["data"]
    times = {name[9:]: s for name, s in data.items() if name.startswith("timing_s/")}
    num_samples = work.prompts * work.samples
    new_tokens = num_samples * data["response_length/mean"]
    sample_s = times["gen"] + times.get("update_weights", 0.0)
    return {
        "step": line["step"] - 1,
        "step_s": times["step"],
        "sample_s": sample_s,
        "score_s": times["step"] - sample_s - times["update_actor"],
        "update_s": times["update_actor"],
        "new_tokens": round(new_tokens),
        "trained_tokens": round(new_tokens + num_samples * data["prompt_length/mean"]),
        "phases": {name: s for name, s in times.items() if name != "step"},
    }


def common(program: str, line: dict, work: Workload, peak: float | None) -> dict:
    if program == "handful":
        return from_handful(line, work, peak)
    return from_verl(line, work) if program == "verl" else line


class DeviceMemory:
    """Bytes in use on the first visible GPU, by NVML; 0 without one."""

    def __init__(self):
        self.handle = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except (ImportError, OSError) as error:
            print(f"memory is not measured: {error}", file=sys.stderr)
            return
        except pynvml.NVMLError as error:
            print(f"memory is not measured: {error}", file=sys.stderr)
            return
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
    """The packages that a program of this environment finds."""
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


def end_children() -> None:
    """End what the last program left behind (servers, workers). This process adopts the orphans
    among its descendants, so all that is left are its children.
    """
    import psutil

    for sign in (signal.SIGTERM, signal.SIGKILL):
        left = psutil.Process().children(recursive=True)
        for process in left:
            try:
                process.send_signal(sign)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=10)


def run(program: str, args, round_: int, memory: DeviceMemory, peak: float | None) -> None:
    """One program, start to end; a line of the results file per step as it comes."""
    work = WORKLOADS[args.workload]
    directory = Path(tempfile.mkdtemp(prefix=f"{args.workload}-{program}-", dir=args.directory))
    metrics = directory.resolve() / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    command = command_of(program, args, metrics)
    environment = dict(os.environ)
    sites = [site for name, site in args.site if name == program]
    path = [*sites, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
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
    before = memory.used()
    highest = before
    num_seen = 0
    start = time.monotonic()
    with (directory / "log").open("w") as log:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        is_over = False
        while not is_over:
            is_over = job.poll() is not None
            highest = max(highest, memory.used())
            if time.monotonic() - start > args.limit_s and not is_over:
                print(f"{program}: over --limit-s {args.limit_s}", flush=True)
                job.terminate()
                is_over = True
            # A line without its end is still being written.
            lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
            for line in lines[num_seen:]:
                step = common(program, json.loads(line), work, peak)
                if num_seen == 0:
                    about["start_s"] = time.monotonic() - start - step["step_s"]
                step["gib"] = (highest - before) / 2**30
                with open(args.results, "a") as file:
                    file.write(json.dumps(about | step) + "\n")
                shown = {name: x for name, x in step.items() if name not in ("phases", "raw")}
                print(json.dumps(shown), flush=True)
                num_seen += 1
            time.sleep(0.1)
    end_children()
    if job.returncode != 0:
        print(f"{program} ended with {job.returncode}; the end of {directory / 'log'}:")
        print("\n".join((directory / "log").read_text().splitlines()[-25:]), flush=True)


def load(results: str) -> dict[tuple[str, str, int], list[dict]]:
    """{(workload, program, round): its steps}; of a program that was started again, the last."""
    runs = {}
    if Path(results).exists():
        for line in Path(results).read_text().splitlines():
            step = json.loads(line)
            key = step["workload"], step["program"], step["round"]
            if step["step"] == 0:
                runs[key] = []
            runs.setdefault(key, []).append(step)
    return runs


def summary(steps: list[dict], flops_per_token: float | None, peak: float | None) -> dict:
    """Medians of steps 3 and later (all, if there are fewer)."""
    late = [step for step in steps if step["step"] >= 2] or steps

    def median(value) -> float:
        return statistics.median(value(step) for step in late)

    result = {
        "first_step_s": steps[0]["step_s"],
        "start_s": steps[0]["start_s"],
        "steps": len(late),
        "step_s": median(lambda s: s["step_s"]),
        "sample_s": median(lambda s: s["sample_s"]),
        "score_s": median(lambda s: s["score_s"]),
        "update_s": median(lambda s: s["update_s"]),
        "new_tokens_per_s": median(lambda s: s["new_tokens"] / s["step_s"]),
        "trained_tokens_per_s": median(lambda s: s["trained_tokens"] / s["step_s"]),
        "gib": max(step["gib"] for step in steps),
    }
    if flops_per_token and peak:
        price = flops_per_token / peak
        result["mfu"] = price * result["trained_tokens_per_s"]
        result["mfu_update"] = price * median(lambda s: s["trained_tokens"] / s["update_s"])
    return result


def tabulate(results: str, peak: float | None) -> list[dict]:
    """A record per workload, program and round, and how many times handful's speed of the same
    round is the program's."""
    runs = load(results)
    table = []
    for (workload, program, round_), steps in sorted(runs.items()):
        own = [s for key, run in runs.items() for s in run if key[:2] == (workload, "handful")]
        priced = [s["model_flops"] / s["trained_tokens"] for s in own if "model_flops" in s]
        price = statistics.median(priced) if priced else None
        record = {"workload": workload, "program": program, "round": round_}
        record |= summary(steps, price, peak)
        for name in ("device", "date", "versions", "command"):
            record[name] = steps[0][name]
        table.append(record)
    for record in table:
        key = "trained_tokens_per_s"
        same = [r for r in table if (r["workload"], r["round"]) == (record["workload"], record["round"])]
        ours = [r[key] for r in same if r["program"] == "handful"]
        record["handful_times"] = ours[0] / record[key] if ours else None
    return table


def show(table: list[dict]) -> None:
    columns = {
        "program": "program",
        "round": "round",
        "start_s": "start s",
        "first_step_s": "first s",
        "step_s": "step s",
        "sample_s": "sample s",
        "score_s": "score s",
        "update_s": "update s",
        "new_tokens_per_s": "new/s",
        "trained_tokens_per_s": "trained/s",
        "gib": "gib",
        "mfu": "mfu",
        "mfu_update": "mfu update",
        "handful_times": "handful is x",
    }
    print("\n| workload | " + " | ".join(columns.values()) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for record in table:
        cells = [record["workload"]]
        for name in columns:
            value = record.get(name)
            if isinstance(value, float):
                value = f"{value:,.0f}" if value > 1000 else f"{value:.3g}"
            cells.append("" if value is None else str(value))
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", nargs="?", choices=WORKLOADS)
    parser.add_argument("--model", help="Hugging Face directory")
    parser.add_argument("--data", help="GSM8K's train.jsonl: question and answer")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=["handful"])
    parser.add_argument("--rounds", type=int, default=1, help="times that each program runs")
    parser.add_argument("--steps", type=int, help="of each; default: 6 for handful, 4 for others")
    parser.add_argument("--limit-s", type=float, default=540, help="longest that one may run")
    parser.add_argument("--results", default=str(ROOT / "benchmarks/results/end_to_end.jsonl"))
    parser.add_argument("--directory", help="of the programs' own files; default: a temporary one")
    parser.add_argument("--site", nargs=2, action="append", default=[], metavar=("NAME", "DIR"))
    parser.add_argument("--extra", nargs=2, action="append", default=[], metavar=("NAME", "FLAGS"))
    args = parser.parse_args()
    memory = DeviceMemory()
    peaks = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
    found = [flops for name, flops in peaks.items() if name in memory.name()]
    peak = found[0] if found else None
    if args.workload:
        if not (args.model and args.data):
            parser.error("--model and --data are needed to run programs")
        args.model = str(Path(args.model).resolve())
        args.data = str(Path(args.data).resolve())
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to us
        for round_ in range(1, args.rounds + 1):
            for program in args.programs:
                wanted = args.steps or (6 if program == "handful" else 4)
                if len(load(args.results).get((args.workload, program, round_), [])) < wanted:
                    run(program, args, round_, memory, peak)
    table = tabulate(args.results, peak)
    Path(args.results).with_suffix(".json").write_text(
        "[\n" + ",\n".join(map(json.dumps, table)) + "\n]\n"
    )
    show(table)


if __name__ == "__main__":
    main()
