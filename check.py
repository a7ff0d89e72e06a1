# SPDX-FileCopyrightText: 2026 handful contributors (check.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""The table of --check: what was checked, figure, bound, right or wrong, what to do.

The problem. The faults of RL trainers are silent, and tests show only that it is right for the
tests' models. What a user needs to know is whether it is right for this model, these data and this
machine, before a night is spent on them.

How it works. `--check` makes one real step of the run, with its engine, and then fills a table in
the same processes. inputs.py looks at prompts and rewards, witness.py at sampler, packing and sync.
Here are the rows on the machine, and on a restart: the state is saved, overwritten in memory and
loaded; each bit must be as it was. Each row is printed when it is known, and all are in check.json:
     right  sampler, after a sync      3e-07 nats, mean of 2306 tokens; 2e-06 at most   (1e-04)
     WRONG  reward of the question     empty 0.000, the prompt copied 1.000   (0.050)
            a policy finds that out: have the function ask for more than the question holds
`beside` gives a check a directory of its own, runs/NAME.check: an earlier run of that name stays.

What we give up: time and memory of responses that are longer than those of the first step. The
weights are not the user's any more at the end, so the process ends there.

Copied:
    from check import Row, Table
    table = Table("out")
    table.add([Row("1 + 1", "2.0", "2", True, "count again")])
    print(table.finish({}))  # 0
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# By the phase that needs most: the flag to turn.
FLAGS = {"rollout": "--rollout.memory-fraction", "eval": "--rollout.memory-fraction"}


class Row(NamedTuple):
    """A line of the table."""

    what: str
    figure: str
    bound: str
    right: bool | None  # None: a figure, and no check
    advice: str  # what to do if it is wrong


def beside(flags: Any) -> Any:
    """The settings of a check: in a directory of its own, and nothing is saved or logged online;
    those of a run as they are."""
    if not flags.check:
        return flags
    name = f"{flags.run.name}.check"
    own = replace(flags.run, name=name, save_minutes=0.0, save_every=0, resume=False)
    return replace(flags, run=own, log=replace(flags.log, wandb_project="", plot_every=0))


class Table:
    """Rows as they come: those of rank 0 count, and are printed; `finish` writes check.json."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.rows: list[tuple] = []

    def add(self, rows: Sequence[tuple]) -> None:
        """Prints rows of (what, figure, bound, right, what to do). Local."""
        for what, figure, bound, right, advice in rows:
            self.rows.append((what, figure, bound, right, advice))
            verdict = {True: "right", False: "WRONG", None: ""}[right]
            limit = f"   ({bound})" if bound else ""
            _print(f"{verdict:>8}  {what:<28}  {figure}{limit}")
            if right is False:
                _print(f"{'':>8}  {advice}")

    def finish(self, known: Mapping[str, Any]) -> int:
        """The exit status: 1 if a row is wrong. `known`: more for check.json. Collective."""
        wrong = [row[0] for row in self.rows if row[3] is False]
        if _rank() == 0:
            named = [dict(zip(Row._fields, row, strict=True)) for row in self.rows]
            text = json.dumps({"right": not wrong, "rows": named, **known}, indent=2, default=str)
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "check.json").write_text(text)
            for name in ("config.json", "metrics.jsonl", "samples.jsonl"):
                # With these the next check would keep this one as an earlier run.
                (self.directory / name).unlink(missing_ok=True)
        count = len([row for row in self.rows if row[3] is not None])
        which = f"{len(wrong)} wrong: {', '.join(wrong)}" if wrong else "all right"
        _print(f"check: {count} checks, {which}; {self.directory / 'check.json'}")
        status = [int(bool(wrong))]
        if dist.is_initialized():
            dist.broadcast_object_list(status)
        return status[0]


def machine_rows(args: Any, record: Mapping[str, Any]) -> list:
    """Rows on memory and time. record: the metrics of a real step, which the largest row was before
    or in; `args.num_steps` and `args.eval_every` say how many come.
    """
    times = {name[9:]: x for name, x in record.items() if name.startswith("timing_s/")}
    step_s = times.pop("step")
    eval_s = times.pop("eval", 0.0)
    shown = sorted(times.items(), key=lambda entry: -entry[1])[:5]
    figure = f"{step_s - eval_s:.2f} s: " + ", ".join(f"{name} {x:.2f}" for name, x in shown)
    num_evals = args.num_steps // args.eval_every + 1 if args.eval_every else 0
    run_min = ((step_s - eval_s) * args.num_steps + eval_s * num_evals) / 60
    kinds = {"sampling": ("rollout", "reshard"), "the reward": ("reward",)}
    kinds["the update"] = ("update", "old_logprobs", "ref_logprobs", "values")
    shares = {kind: sum(times.get(name, 0.0) for name in names) for kind, names in kinds.items()}
    kind = max(shares, key=shares.get)
    bound = f"{args.num_steps} steps in {run_min:.1f} min; {kind} bounds them"
    rows = [Row("the first step", figure, "", None, ""), Row("the run", bound, "", None, "")]
    if record.get("communication/nccl_bw_gb") is not None:
        figure = f"{record['communication/nccl_bw_gb']:.1f} GB/s, of a reduce-scatter of 4 MiB"
        rows.append(Row("between ranks", figure, "", None, ""))
    return [*_memory_rows(record), *rows]


def _memory_rows(record: Mapping[str, Any]) -> list:
    """GPU memory by phase, if there is one, and host memory."""
    rows = []
    prefix = "perf/max_memory_gb/"
    phases = {name.removeprefix(prefix): x for name, x in record.items() if name.startswith(prefix)}
    if phases:
        total = torch.cuda.mem_get_info()[1] / 2**30
        worst = max(phases, key=phases.get)
        largest = sorted(phases.items(), key=lambda entry: -entry[1])[:4]
        figure = ", ".join(f"{name} {x:.1f}" for name, x in largest) + f" of {total:.1f} GiB"
        flag = FLAGS.get(worst, "--tokens-per-row")
        advice = f"lower {flag}: longer responses than these will need more"
        is_right = phases[worst] <= 0.98 * total
        rows.append(Row("GPU memory", figure, f"{0.98 * total:.1f}", is_right, advice))
    with contextlib.suppress(OSError):  # no /proc
        lines = Path("/proc/meminfo").read_text().splitlines()
        known = dict(line.split(":") for line in lines)
        total, free = (int(known[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
        figure = f"a rank {record['perf/host_memory_gb']:.1f} GiB; {free:.0f} of {total:.0f} free"
        advice = "fewer ranks or --reward.num-workers, or a host with more memory"
        least = 0.03 * total
        rows.append(Row("host memory", figure, f"> {least:.1f} free", free > least, advice))
    return rows


@torch.no_grad()
def restart_row(directory: Path, state: Mapping[str, Any], save: Callable, load: Callable) -> Row:
    """Whether a state that is saved and loaded is the same. Collective; it is overwritten between.

    state: entries as of checkpoint.py; save, load: checkpoint.save and checkpoint.load.
    """
    target = directory / "checkpoints"
    before = _fingerprint(state)
    start = time.perf_counter()
    try:
        save(target, 1, state)
    except OSError as error:
        why = " ".join(str(error).split())
        return Row("restart", why, "", False, "make room, or give another --output-dir")
    saved_s = time.perf_counter() - start
    torch.rand(1)  # generators go on, too
    for x in _tensors(state):
        x.fill_(0.5)
    spoilt = _fingerprint(state)
    start = time.perf_counter()
    load(target, state)
    loaded_s = time.perf_counter() - start
    _barrier()
    num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    _barrier()
    if _rank() == 0:
        shutil.rmtree(target)
    after = _fingerprint(state)
    verdicts = torch.tensor([int(after == before and spoilt != before)])
    if dist.is_initialized():
        dist.all_reduce(verdicts, op=dist.ReduceOp.MIN)
    sizes = f"{num_bytes / 2**30:.2f} GiB in {saved_s:.1f} s"
    same = "equal" if verdicts.item() else "NOT equal"
    figure = f"saved {sizes}, loaded in {loaded_s:.1f} s: {same}"
    return Row("restart", figure, "equal", bool(verdicts), "no --resume is exact: report it")


def _tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    """This rank's parts of all models and of what their optimizers remember."""
    for entry in state.values():
        model = getattr(entry, "model", None)
        parameters = [] if model is None else list(model.parameters())
        if getattr(entry, "trained_only", False):  # a frozen base is not saved
            parameters = [p for p in parameters if p.requires_grad]
        memory = getattr(getattr(entry, "optimizer", None), "state", {})
        for p in parameters:
            known = dict(sorted(memory.get(p, {}).items()))
            yield from map(_local, [p, *filter(torch.is_tensor, known.values())])


def _fingerprint(state: Mapping[str, Any]) -> list:
    """Two sums over each tensor's bits, one weighted by position, and all else that is saved."""
    found = []
    for x in _tensors(state):
        total = weighted = 0
        for piece in x.contiguous().view(-1).split(1 << 24):
            bits = piece.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize]).long()
            total += int(bits.sum())
            weighted += int((bits * (torch.arange(len(bits), device=x.device) % 8191)).sum())
        found.append((total, weighted))
    others = [entry.state_dict() for entry in state.values() if not hasattr(entry, "optimizer")]
    return [*found, repr(_plain(others))]


def _plain(x: Any) -> Any:
    """x with lists in place of arrays, whose repr would leave most of them out."""
    if hasattr(x, "tolist"):
        return x.tolist()
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    return list(map(_plain, x)) if isinstance(x, (list, tuple)) else x


def _local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _print(line: str) -> None:
    if _rank() == 0:
        print(line, flush=True)
