"""Steps of a grpo.py run by phase, as one JSON line.

    python benchmarks/steps.py runs/w1/metrics.jsonl [--from 3]

Medians over the steps from the given one on (0-based 2 is the third); the first step beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

SHOWN = ("timing_s/", "throughput/", "perf/", "memory/", "rollout_corr/", "packing/")


def summarize(records: list[dict], first: int, group_size: int) -> dict:
    """Medians of each shown number over the steps from `first` on."""
    steady = [record for record in records if record["step"] >= first]
    shown = {"steps": len(steady), "first_step_s": round(records[0]["timing_s/step"], 2)}
    for name in dict.fromkeys(key for record in steady for key in record):
        values = [record[name] for record in steady if record.get(name) is not None]
        if name.startswith(SHOWN) and values:
            shown[name] = round(statistics.median(values), 4)
    speeds = []
    for record in steady:
        new = group_size * record["response_length/mean"]
        share = new / (new + record["prompt_length/mean"])
        speeds.append(share * record["throughput/tokens_per_sec"])
    shown["new_tokens_per_s"] = round(statistics.median(speeds))
    ends = records[:5], records[-10:]
    rewards = [statistics.mean(record["reward/mean"] for record in part) for part in ends]
    shown["reward_first_last"] = [round(reward, 3) for reward in rewards]
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics")
    parser.add_argument("--from", dest="first", type=int, default=2)
    args = parser.parse_args()
    path = Path(args.metrics)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    settings = json.loads((path.parent / "config.json").read_text())
    group_size = settings["batch"]["group_size"]
    print(json.dumps(summarize(records, args.first, group_size)), flush=True)


if __name__ == "__main__":
    main()
