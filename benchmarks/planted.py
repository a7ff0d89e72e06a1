"""grpo.py --check, timed, without a fault and with one planted in the weights that are sent.

    python benchmarks/planted.py --faults none mlp -- --model models/smollm2 --data gsm8k.jsonl

What follows -- are flags of grpo.py. Each run is a process of its own, start-up included. A JSON
line each: seconds, exit code, rows of the table that are wrong, and all figures; then a table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def mlp(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """MLPs are 1.2 times too large."""
    return tensor * 1.2 if ".mlp." in name else tensor


def one_mlp(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """One matrix of one layer is."""
    return tensor * 1.2 if "layers.1.mlp.down_proj" in name else tensor


def norms(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Norms' weights are in reverse order."""
    return tensor.flip(0) if "norm" in name else tensor


def stale(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Each sync sends what the first one sent."""
    return SENT.setdefault(name, tensor.clone())


SENT: dict[str, torch.Tensor] = {}
FAULTS = {"mlp": mlp, "one-mlp": one_mlp, "norms": norms, "stale": stale}


def planted_run(fault: str) -> None:
    """grpo.py in this process, with the fault; it ends the process."""
    import grpo
    import reshard
    import run
    from examples import addition

    if fault != "none":
        plant(reshard, FAULTS[fault])
    run.leave(grpo.main(run.command_line(grpo.Args(), addition.SETTINGS, "planted")))


def plant(reshard, change: Callable) -> None:
    """iter_full_params sends change(name, tensor) from now on."""
    plain = reshard.iter_full_params

    def changed(*arguments, **options):
        for bucket in plain(*arguments, **options):
            yield [(name, change(name, tensor)) for name, tensor in bucket]

    reshard.iter_full_params = changed


def measured(fault: str, flags: list[str]) -> dict:
    """The record of one run."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--plant", fault, "--check", "--output-dir", out]
        start = time.monotonic()
        job = subprocess.run([*command, *flags], capture_output=True, text=True)
        seconds = time.monotonic() - start
        files = list(Path(out).glob("*/check.json"))
        rows = json.loads(files[0].read_text())["rows"] if files else []
    if not rows:
        print(job.stdout + job.stderr, file=sys.stderr)
    wrong = [row["what"] for row in rows if row["right"] is False]
    found = {"fault": fault, "seconds": round(seconds, 1), "exit_code": job.returncode}
    start_line = re.findall(r"^ *start  .*", job.stdout, re.M)
    figures = {row["what"]: f"{row['figure']} ({row['bound']})" for row in rows}
    return found | {"wrong": wrong, "start": start_line, "rows": figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="+", default=["none"], choices=["none", *FAULTS])
    parser.add_argument("flags", nargs="*", help="of grpo.py, after --")
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"device": device, "flags": args.flags, **versions}), flush=True)
    found = []
    for fault in args.faults:
        found.append(measured(fault, args.flags))
        print(json.dumps(found[-1]), flush=True)
    for record in found:
        wrong = ", ".join(record["wrong"]) or "-"
        print(f"{record['fault']:>8}  {record['seconds']:6.1f} s  {record['exit_code']}  {wrong}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plant"]:
        fault = sys.argv[2]
        sys.argv[1:3] = []
        planted_run(fault)
    main()
