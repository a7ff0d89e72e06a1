"""Does INT8 gradient reduction change a run? The built-in job on 2 ranks with both, all curves in
one picture.

    python benchmarks/int8_job.py --steps 60 --seeds 0 1 2      # about 2 minutes a run on 2 cores

Writes benchmarks/results/int8_job.json (mean reward of the last 10 steps per run) and int8_job.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def run(seed: int, int8: bool, num_steps: int, out_dir: str) -> list[float]:
    """Mean reward of each step of one run."""
    name = f"seed{seed}-{'int8' if int8 else 'fp32'}"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    flags = ["--name", name, "--output-dir", out_dir, "--seed", str(seed)]
    flags += ["--num-steps", str(num_steps), "--rollout.engine", "hf", "--eval-every", "0"]
    if int8:
        flags.append("--quantize-gradients")
    command = [sys.executable, *launch, str(ROOT / "grpo.py"), *flags]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = (Path(out_dir) / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward/mean"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5))
    results = []
    with tempfile.TemporaryDirectory() as out_dir:
        for seed in arguments.seeds:
            for int8 in (False, True):
                rewards = run(seed, int8, arguments.steps, out_dir)
                reduction = "int8" if int8 else "fp32"
                last = statistics.mean(rewards[-10:])
                results.append({"seed": seed, "reduction": reduction, "last_10": last})
                print(json.dumps(results[-1]), flush=True)
                color = "tab:orange" if int8 else "tab:blue"
                axis.plot(rewards, color=color, label=f"{reduction}, seed {seed}")
    axis.set(xlabel="step", ylabel="mean reward", title="built-in job, 2 ranks")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(RESULTS / "int8_job.png", dpi=90)
    command = " ".join(["python benchmarks/int8_job.py", *sys.argv[1:]])
    about = {"command": command, "device": "2 CPU cores", "torch": torch.__version__}
    (RESULTS / "int8_job.json").write_text(json.dumps({**about, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
