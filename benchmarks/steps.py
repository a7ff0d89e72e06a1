"""Steps of a grpo.py run by phase, as one JSON line: `python benchmarks/steps.py
runs/w1/metrics.jsonl [--from 3]`.

Medians over the steps from the given one on (0-based 2 is the third); the first step beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("metrics")
parser.add_argument("--from", dest="first", type=int, default=2)
arguments = parser.parse_args()
lines = Path(arguments.metrics).read_text().splitlines()
records = [json.loads(line) for line in lines]
steady = [r for r in records if r["step"] >= arguments.first]
shown = {"steps": len(steady), "first_step_s": round(records[0]["timing_s/step"], 2)}
for name in dict.fromkeys(key for r in steady for key in r):
    values = [r[name] for r in steady if r.get(name) is not None]
    if (
        name.startswith(
            ("timing_s/", "throughput/", "perf/", "memory/", "rollout_corr/", "packing/")
        )
        and values
    ):
        shown[name] = round(statistics.median(values), 4)
group_size = json.loads((Path(arguments.metrics).parent / "config.json").read_text())["batch"][
    "group_size"
]
new = [group_size * r["response_length/mean"] for r in steady]
share = [n / (n + r["prompt_length/mean"]) for n, r in zip(new, steady, strict=True)]
speeds = [s * r["throughput/tokens_per_sec"] for s, r in zip(share, steady, strict=True)]
shown["new_tokens_per_s"] = round(statistics.median(speeds))
ends = records[:5], records[-10:]
shown["reward_first_last"] = [
    round(statistics.mean(r["reward/mean"] for r in part), 3) for part in ends
]
print(json.dumps(shown), flush=True)
