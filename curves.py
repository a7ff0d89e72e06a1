# SPDX-FileCopyrightText: 2026 handful contributors (curves.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Curves: the picture of a run, from its metrics.jsonl.

    python curves.py runs/grpo/metrics.jsonl curves.png

What to look for. The reward climbs, and evaluation with it. Entropy falls slowly: at 0 all
responses to a prompt are alike. The KL of a step stays below about 0.1. `rollout_corr/kl`, sampler
against trainer, stays flat, near 0.001 in bf16. A length that runs off to the limit is mostly a
reward that pays for it.

What we give up: several runs in one picture. Any other tool can read metrics.jsonl, one JSON object
a step. Source: matplotlib; without it nothing is drawn.

Copied, with matplotlib:
    from pathlib import Path
    from curves import plot
    Path("metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}')
    plot(Path("metrics.jsonl"), Path("curves.png"))
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from pathlib import Path

PANELS = [  # a title, and the metrics below it
    ("reward", ["reward/mean", "eval/reward", "eval/sft_token_accuracy", "eval/dpo_preferred"]),
    ("response length [tokens]", ["response_length/mean"]),
    ("entropy [nats]", ["actor/entropy"]),
    ("KL [nats]", ["actor/ppo_kl", "actor/kl_loss", "rollout_corr/kl"]),
    ("gradient norm", ["actor/grad_norm"]),
    ("tokens/s", ["throughput/tokens_per_sec"]),
]


def plot(metrics_file: Path, out_file: Path) -> None:
    """Draw the curves of a metrics.jsonl as one picture; nothing where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and picks a window

    records = _records(Path(metrics_file))
    figure = Figure(figsize=(14, 7))
    figure.suptitle(Path(metrics_file).resolve().parent.name)
    for axis, (title, names) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for name in names:
            present = [record for record in records if _can_be_drawn(record.get(name))]
            steps = [record["step"] for record in present]
            values = [record[name] for record in present]
            if present:
                axis.plot(steps, values, label=name, marker="." if len(steps) < 30 else "")
        axis.set(title=title, xlabel="step")
        axis.ticklabel_format(useOffset=False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.tight_layout()
    part = out_file.with_suffix(".part.png")
    figure.savefig(part, dpi=90)
    part.rename(out_file)


def _records(file: Path) -> list[dict]:
    """The steps of a metrics.jsonl, without lines that a crash tore."""
    found = []
    for line in file.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):  # ValueError also if it is no UTF-8
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                found.append(record)
    return found


def _can_be_drawn(x) -> bool:
    return isinstance(x, (int, float)) and abs(x) < 1e30  # axes overflow above


def main() -> None:
    parser = argparse.ArgumentParser(description="The picture of a run, from its metrics.jsonl.")
    parser.add_argument("metrics", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("error: needs matplotlib; install it with: pip install matplotlib")
    if args.picture.suffix != ".png":
        sys.exit(f"error: {args.picture}: must end in .png")
    try:
        plot(args.metrics, args.picture)
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
