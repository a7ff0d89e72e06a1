"""Writes a saved state of a run as a Hugging Face directory, as the run itself does at its end.

    bash launch.sh tools/export.py runs/grpo OUT              the newest state that is whole
    bash launch.sh tools/export.py runs/grpo OUT --step 40    another one
    bash launch.sh tools/export.py runs/grpo OUT --best       the one with most reward in evaluation

A run that was stopped has no hf/ yet, and the last of its states need not be the best. The weights
are bf16 from a GPU, fp32 from a CPU. One rank per GPU shares them, as in training.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch

import checkpoint
import hub
import lora
import model
import reshard
import run
from examples import addition


def main(args: argparse.Namespace) -> None:
    mesh = run.init_distributed(seed=0, timeout_s=3600)
    with run.one_line_errors():
        if args.out.exists() and any(args.out.iterdir()):
            raise ValueError(f"{args.out}: is not empty; give another directory")
        settings = run.read_settings(args.run / "config.json", "export.py")
        if lacking := {"model", "model_path", "seed"} - settings.keys():
            rule = "give the directory of a run"
            raise ValueError(f"{args.run}/config.json: has no {min(lacking)}; {rule}")
        path = settings["model_path"]
        if path == "built-in":
            path = addition.cached_model(settings["seed"])
        path = hub.find_model(path, 1)
        config = run.from_json(model.ModelConfig(), settings["model"] | {"compile": False})
        low_rank = run.from_json(lora.LoraConfig(), settings.get("lora", {}) | {"path": ""})
        adapt = functools.partial(lora.attach, config=low_rank)
        policy = model.load_policy(path, mesh, config, adapt=adapt)
        state = {"policy": checkpoint.TrainState(policy, (), low_rank.rank > 0)}
        directory = args.run / ("best" if args.best else "checkpoints")
        if args.best and not any(directory.glob("step-*")):
            rule = "a run keeps one with --eval-every and --save-minutes"
            raise ValueError(f"{args.run}: has no best state; {rule}")
        step = checkpoint.load(directory, state, step=args.step)
        if step == 0 and not args.best:
            which = "state" if args.step is None else f"state of step {args.step}"
            saved = ", ".join(map(str, run.saved_steps(args.run))) or "none"
            raise ValueError(f"{args.run}: has no saved {which}; there are: {saved}")
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    weights = reshard.iter_full_params(policy, dtype=dtype, merges=lora.merges(policy))
    hub.export(weights, path, args.out, dtype, f"the model after step {step} is in {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("out", type=Path, help="directory to write, new or empty")
    parser.add_argument("--step", type=int, help="the state after this many steps")
    parser.add_argument("--best", action="store_true", help="the best state by evaluation")
    main(parser.parse_args())
    run.leave()
