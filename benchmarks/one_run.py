"""Does one run of three losses reach what three runs in a row reach? On hybrid.py's built-in job.

    python benchmarks/one_run.py --seeds 0 1 2        # on a CPU; some 6 minutes a seed on two cores

All start from the same model and take the same number of updates in all:
    one run        demonstrations, pairs and rewards in each step
    three in a row a third of the steps each: SFT, then DPO, then RL, each from the one before

A JSON line per run, with the three measures on held-out problems: the share of answer tokens right
on three-digit sums (sft), of pairs whose padded form is the likelier one (dpo), and of two-digit
sums answered right (reward).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from examples import addition, mixture

ROOT = Path(__file__).resolve().parents[1]
MEASURES = {"sft": "eval/sft_token_accuracy", "dpo": "eval/dpo_preferred", "reward": "eval/reward"}
ALONE = {"sft": (1.0, 0.0, 0.0), "dpo": (0.0, 1.0, 0.0), "reward": (0.0, 0.0, 1.0)}


def settings(seed: int, num_steps: int, engine: str, directory: Path, name: str) -> dict:
    """The built-in job's, as hybrid.py reads them with --config."""
    known = dict(mixture.SETTINGS)
    known["rollout"] = known["rollout"] | {"engine": engine}
    own = {"output_dir": str(directory), "name": name, "save_minutes": 0.0}
    steps = {"num_steps": num_steps, "eval_every": max(1, num_steps // 6), "seed": seed}
    return known | steps | {"run": own, "log": {"plot_every": 0}}


def with_own_data(known: dict, model: Path | str, weights: tuple, files: dict) -> dict:
    """The same on another model, for which the built-in data must be named."""
    changed = known | {"model_path": str(model), "weights": weights}
    changed["data_paths"] = files["prompts"]
    changed["eval_paths"] = files["held_out"] if weights[2] else ()
    for kind in ("sft", "dpo"):
        learn, held_out = files[kind]
        changed[kind] = known[kind] | {"data": [learn], "eval_data": [held_out]}
    return changed


def run(known: dict, directory: Path) -> list[dict]:
    """The records of a run with these settings."""
    name = known["run"]["name"]
    config = directory / f"{name}.json"
    config.write_text(json.dumps(known))
    with (directory / f"{name}.log").open("w") as log:
        command = [sys.executable, "hybrid.py", "--config", str(config)]
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    lines = (directory / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def measures(record: dict) -> dict:
    return {name: record.get(metric) for name, metric in MEASURES.items()}


def one_run(seed: int, args, directory: Path) -> dict:
    """All three losses in each step."""
    start = time.monotonic()
    known = settings(seed, args.num_steps, args.engine, directory, f"one-{seed}")
    records = run(known, directory)
    found = {"what": "one run", "seconds": time.monotonic() - start}
    curve = [{"step": r["step"]} | measures(r) for r in records if MEASURES["sft"] in r]
    return found | {"after": measures(records[-1]), "curve": curve}


def three_in_a_row(seed: int, args, directory: Path) -> dict:
    """A third of the steps for each loss, on the model of the run before."""
    files = mixture.written()
    files["prompts"] = addition.write_prompts("train", addition.training_sets(False))
    held_out = {"addition": addition.problems(held_out=True)}
    files["held_out"] = addition.write_prompts("held_out", held_out)
    model: Path | str = addition.cached_model(seed)
    start = time.monotonic()
    found: dict = {"what": "three in a row"}
    for kind, weights in ALONE.items():
        name = f"{kind}-{seed}"
        known = settings(seed, args.num_steps // 3, args.engine, directory, name)
        records = run(with_own_data(known, model, weights, files), directory)
        found[f"after {kind}"] = measures(records[-1])
        model = directory / name / "hf"
    return found | {"after": measures(records[-1]), "seconds": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    steps = mixture.SETTINGS["num_steps"]
    parser.add_argument("--num-steps", type=int, default=steps, help="in all; a multiple of 3")
    parser.add_argument("--engine", choices=("auto", "hf", "vllm"), default="auto")
    parser.add_argument("--results", default=str(ROOT / "benchmarks/results/one_run.jsonl"))
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="one_run-"))
    print(directory, flush=True)
    for arm in (one_run, three_in_a_row):
        for seed in args.seeds:
            record = {"seed": seed, "num_steps": args.num_steps} | arm(seed, args, directory)
            print(json.dumps(record), flush=True)
            with open(args.results, "a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
