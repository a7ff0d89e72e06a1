"""The table of benchmarks/end_to_end.py's results, which that program also prints.

python benchmarks/table.py benchmarks/results/end_to_end.jsonl       # and writes the same .json

start s      from the program's start to its first step
sample s     weights to the engine and sampling; score s: rewards, layout, log-probabilities
             that stay fixed; update s: the rest. Medians of steps 3 and later
new/s        sampled tokens, trained/s: prompt and sampled tokens of all sequences, over the
             step
mfu          model FLOPs (as metrics.py counts them) of the step, and of the update alone, over
             the device's bf16 peak; a peer's tokens are priced as handful's of the same round
gib          the device's memory in use (NVML), less what was in use before the start
handful is   handful's trained/s over the program's, in the same round
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

ABOUT = ("device", "date", "versions", "command")


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


def summary(steps: list[dict], price: float | None) -> dict:
    """Medians of steps 3 and later (all, if there are fewer).

    price: seconds of a device at its peak for one token, if known.
    """
    late = [step for step in steps if step["step"] >= 2] or steps

    def median(value) -> float:
        return statistics.median(value(step) for step in late)

    first = steps[0]
    result = {"start_s": first["start_s"], "first_step_s": first["step_s"], "num_steps": len(late)}
    for name in ("step_s", "sample_s", "score_s", "update_s"):
        result[name] = statistics.median(step[name] for step in late)
    result |= {
        "new_tokens_per_s": median(lambda s: s["new_tokens"] / s["step_s"]),
        "trained_tokens_per_s": median(lambda s: s["trained_tokens"] / s["step_s"]),
        "gib": max(step["gib"] for step in steps),
    }
    if price:
        result["mfu"] = price * result["trained_tokens_per_s"]
        result["mfu_update"] = price * median(lambda s: s["trained_tokens"] / s["update_s"])
    return result


def tabulate(results: str) -> list[dict]:
    """A record per workload, program and round; handful_times: how many times the program's speed
    handful's is in the same round.
    """
    runs = load(results)
    table = []
    for (workload, program, round_), steps in sorted(runs.items()):
        own = runs.get((workload, "handful", round_), [])
        priced = [s["mfu"] * s["step_s"] / s["trained_tokens"] for s in own if s["mfu"]]
        record = {"workload": workload, "program": program, "round": round_}
        record |= summary(steps, statistics.median(priced) if priced else None)
        if own:
            speed = summary(own, None)["trained_tokens_per_s"]
            record["handful_times"] = speed / record["trained_tokens_per_s"]
        table.append(record | {name: steps[0][name] for name in ABOUT})
    return table


def show(table: list[dict]) -> None:
    """Print it for a terminal or a README."""
    columns = {
        "workload": "workload",
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
    print("\n| " + " | ".join(columns.values()) + " |")
    print("|---" * len(columns) + "|")
    for record in table:
        values = [record.get(name) for name in columns]
        print("| " + " | ".join(map(written, values)) + " |")


def written(value) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def make(results: str) -> None:
    """Print the table of a results file and write it beside that file."""
    table = tabulate(results)
    lines = ",\n".join(map(json.dumps, table))
    Path(results).with_suffix(".json").write_text(f"[\n{lines}\n]\n")
    show(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results")
    make(parser.parse_args().results)
