"""Measurements of a run: weighted means over all ranks, exclusive timers, throughput, and where
they go.

The problem. A metric is wrong in more ways than a loss: a mean of per-rank means, masked tokens
counted, a device sync per value, a timer inside a timer counted twice, a "utilisation" that is a
constant. Then two runs cannot be compared.

How it works. `add(name, value, weight)` keeps sum(value x weight) and sum(weight), on the device if
the value is there. `log` adds up both over all ranks, divides once, and writes one record: a
console line, a line of metrics.jsonl, wandb if asked for.
    rank 0: 3 tokens, mean 1.0     rank 1: 1 token, mean 2.0     ->     (3 x 1.0 + 1 x 2.0) / 4 = 1.25, not 1.5
Timers are exclusive: a timer inside another stops the outer one, and what no timer covers is
timing_s/other, so the phases add up to the step.

Five signals of throughput, all measured:
    throughput/tokens_per_sec       prompt + response tokens of a step, each once, over its wall time, all ranks
    throughput/rollout_latency_ms   wall time of sampling alone
    memory/actor_gpu_util_pct       NVML utilisation sampled during the update (null under half a second)
    memory/ref_gpu_util_pct         the same during the reference pass
    communication/nccl_bw_gb        bus GB/s of a timed probe (comms.measure_bandwidth), null on one rank
MFU is model FLOPs (6 x parameters x tokens + attention, no recomputation) over the dense bf16 peak
of the device.

What we give up: per-rank curves; a rank that is slow shows in timing_s/* only through the mean.
Source: Chowdhery 2022 (PaLM, arXiv:2204.02311, appendix B) for MFU; verl's names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


@dataclass(frozen=True)
class LogConfig:
    wandb_project: str = ""
    """Log to this wandb project as well; empty: off."""
    samples_per_step: int = 4
    """Responses written to samples.jsonl each step; 0: none."""
    plot_every: int = 10
    """Redraw curves.png every this many steps, and at the end; 0: never."""
    mismatch_alarm: float = 0.1
    """Warn once when rollout_corr/kl, the distance between sampler and trainer in nats per token,
    exceeds this.
    """
    entropy_alarm: float = 0.01
    """Warn once when actor/entropy falls below this many nats."""
    zero_std_alarm: int = 5
    """Warn once after this many steps in a row in which no group had any spread."""

    def __post_init__(self):
        if self.samples_per_step < 0 or self.plot_every < 0 or self.zero_std_alarm < 1:
            raise ValueError(
                f"--log.samples-per-step {self.samples_per_step}, --log.plot-every {self.plot_every}: 0 (off) or more; "
                f"--log.zero-std-alarm {self.zero_std_alarm}: at least 1"
            )
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            flag = f"--log.wandb-project {self.wandb_project}"
            raise ValueError(f"{flag}: needs wandb; install it with: pip install wandb")


class Metrics:
    """Collects a step's numbers and writes them; `log` is a collective, everything else is local
    and needs no sync.
    """

    def __init__(
        self,
        out_dir: str | Path,
        config: LogConfig,
        num_steps: int,
        *,
        first_step: int = 0,
        settings=None,
    ):
        """Records from first_step on, left by a run that died after its last save, are dropped.
        settings: for wandb.
        """
        self.out_dir = Path(out_dir)
        self.config = config
        self.num_steps = num_steps
        self.is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
        self._entries: dict[
            tuple[str, str], tuple
        ] = {}  # (name, reduction) -> (sum or extreme, weight)
        self._timers: list[str] = []
        self._since = self._step_start = time.perf_counter()
        self._device = _DeviceSampler()
        self._alarms: set[str] = set()
        self._steps_without_spread = 0
        self._step_times: list[float] = []
        self._wandb = None
        if self.is_rank0:
            self.out_dir.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "samples.jsonl"):
                _keep_before(self.out_dir / name, first_step)
        if self.is_rank0 and config.wandb_project:
            import wandb

            self._wandb = wandb.init(
                project=config.wandb_project, name=self.out_dir.name, config=settings
            )

    def add(
        self, name: str, value: float | Tensor, weight: float = 1.0, reduction: str = "mean"
    ) -> None:
        """One observation of `name`. How log() reduces them over ranks: "mean" by `weight`, "sum",
        "max" or "min".
        """
        if reduction == "mean" and weight == 0:
            return  # a row without response tokens
        value = value.detach() if isinstance(value, Tensor) else value
        if reduction == "mean":
            value = value * weight
        old, old_weight = self._entries.get((name, reduction), (None, 0.0))
        if old is None:
            merged = value
        elif reduction in ("mean", "sum"):
            merged = old + value
        elif isinstance(value, Tensor):
            merged = torch.maximum(old, value) if reduction == "max" else torch.minimum(old, value)
        else:
            merged = max(old, value) if reduction == "max" else min(old, value)
        self._entries[name, reduction] = (merged, old_weight + weight)

    def update(
        self, stats: Mapping[str, float | Tensor], weight: float = 1.0, prefix: str = ""
    ) -> None:
        """add() for each entry; a name that ends in _max or _min is reduced that way."""
        for name, value in stats.items():
            reduction = name.rpartition("_")[2]
            self.add(
                prefix + name, value, weight, reduction if reduction in ("max", "min") else "mean"
            )

    def add_group(self, source: str, rewards: list[float], rollouts: Sequence) -> None:
        """The samples of one prompt as they came, before any filter, penalty or mask; `source`
        names its data set.
        """
        lengths = [len(r.response_ids) for r in rollouts]
        num_prompt = len(rollouts[0].prompt_ids)
        mean = sum(rewards) / len(rewards)
        spread = torch.tensor(rewards).std(correction=0).item()
        self.update({"mean": mean, f"{source}/mean": mean}, prefix="reward/")
        if len(rewards) > 1:
            self.update(
                {"std": spread, "frac_zero_std": float(max(rewards) == min(rewards))},
                prefix="reward/",
            )
        self.add("prompt_length/mean", num_prompt)
        self.add("prompt_length/max", num_prompt, reduction="max")
        self.add("response_length/mean", sum(lengths) / len(lengths))
        self.add("response_length/max", max(lengths), reduction="max")
        self.add("response_length/min", min(lengths), reduction="min")
        self.add("response_length/clip_ratio", sum(r.truncated for r in rollouts) / len(rollouts))
        self.add("throughput/num_tokens", num_prompt + sum(lengths), reduction="sum")

    def add_layout(
        self,
        models: Sequence[torch.nn.Module],
        sequences: Sequence,
        rows: Sequence,
        capacity: int,
        num_epochs: int,
    ) -> None:
        """How full the rows of all minibatches are, and the FLOPs of the models that they update,
        on this rank.
        """
        for model in models:
            config, size = (
                model.config.get_text_config(),
                sum(p.numel() for p in model.parameters()),
            )
            shape = size, config.num_hidden_layers, config.hidden_size
            flops = model_flops(*shape, [len(s["tokens"]) for s in sequences])
            self.add("perf/model_flops", num_epochs * flops, reduction="sum")
        for row in (row for minibatch in rows for row in minibatch):
            used = len(row.tokens) if row.source else 0
            self.add("packing/efficiency", used / max(capacity, used), max(capacity, used))

    def write_samples(
        self,
        step: int,
        groups: Sequence,
        decode: Callable[[Tensor], str],
        advantages: Tensor | None = None,
    ) -> None:
        """Append a response of each of the first groups, with its advantage of [P, G], to
        samples.jsonl on rank 0.
        """
        if self.is_rank0:
            with open(self.out_dir / "samples.jsonl", "a", encoding="utf-8") as file:
                for i, group in enumerate(groups[: self.config.samples_per_step]):
                    sample = dict(
                        step=step,
                        prompt=group.prompt.text,
                        response=decode(group.rollouts[0].response_ids),
                    )
                    sample |= dict(answer=group.prompt.answer, reward=group.rewards[0])
                    sample |= {} if advantages is None else dict(advantage=float(advantages[i, 0]))
                    file.write(json.dumps(sample, ensure_ascii=False) + "\n")

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the wall time inside, less that of inner timers, to timing_s/name; waits for the
        device at both ends.
        """
        self._switch()
        self._timers.append(name)
        start = time.perf_counter()
        yield
        self._switch()
        self._timers.pop()
        self._device.record(name, start, time.perf_counter())

    def _switch(self) -> None:
        """Book the time since the last switch on the running timer."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        name = self._timers[-1] if self._timers else "other"
        self.add(f"timing_s/{name}", now - self._since, reduction="sum")
        self._since = now

    def log(self, step: int) -> dict[str, float | None]:
        """The reduced record of this step, written on rank 0; clears everything for the next step.
        Collective.
        """
        self._switch()
        step_s, self._step_start = self._since - self._step_start, self._since
        self.add("timing_s/step", step_s, reduction="sum")
        for phase, gb in self._device.max_memory_gb().items():
            self.add(f"perf/max_memory_gb{phase and '/'}{phase}", gb, reduction="max")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.add("perf/host_memory_gb", pages * os.sysconf("SC_PAGE_SIZE") / 2**30, reduction="max")
        if torch.cuda.is_available():
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            self.add("perf/cached_memory_gb", cached / 2**30, reduction="max")
        record = self._reduce()
        for phase, name in (("update", "actor"), ("ref_logprobs", "ref")):
            record[f"memory/{name}_gpu_util_pct"] = self._device.mean_utilization(phase)
        self._device.clear()
        self._derive(record, step_s)
        self._entries.clear()
        if self.is_rank0:
            self._step_times.append(step_s)
            self._write(step, record)
        return record

    def _reduce(self) -> dict[str, float | None]:
        values = [
            torch.as_tensor(value, dtype=torch.float64) for value, _ in self._entries.values()
        ]
        on_device = [v for v in values if v.is_cuda]
        moved = iter(torch.stack(on_device).tolist()) if on_device else iter(())  # one copy for all
        pairs = zip(self._entries.items(), values, strict=True)
        local = {
            key: (next(moved) if v.is_cuda else v.item(), weight) for (key, (_, weight)), v in pairs
        }
        gathered = [local]
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, local)
        record = {}
        for key in dict.fromkeys(key for ranks in gathered for key in ranks):
            name, reduction = key
            entries = [ranks[key] for ranks in gathered if key in ranks]
            if reduction in ("max", "min"):
                record[name] = (max if reduction == "max" else min)(value for value, _ in entries)
            elif reduction == "mean":
                record[name] = sum(value for value, _ in entries) / sum(
                    weight for _, weight in entries
                )
            else:
                # Times are means over ranks, so that the phases still add up to the step; counts
                # are totals.
                scale = len(gathered) if name.startswith("timing_s/") else 1
                record[name] = sum(value for value, _ in entries) / scale
        return record

    def _derive(self, record: dict, step_s: float) -> None:
        """Quotients that are only right after the reduction."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        tokens = record.pop("throughput/num_tokens", None)
        if tokens is not None:
            record["throughput/tokens_per_sec"] = tokens / step_s
            record["perf/tokens_per_sec_per_gpu"] = tokens / step_s / world
        record.setdefault("communication/nccl_bw_gb", None)  # there is no bandwidth on one rank
        flops = record.pop("perf/model_flops", None)
        peak = peak_flops()
        if flops is not None:
            record["perf/mfu"] = flops / step_s / peak / world if peak else None
        if "timing_s/rollout" in record:
            record["throughput/rollout_latency_ms"] = 1000 * record["timing_s/rollout"]
        square = record.pop("rollout_corr/is_square_mean", None)
        if square:
            record["rollout_corr/ess"] = record["rollout_corr/is_weight_mean"] ** 2 / square

    def _write(self, step: int, record: dict) -> None:
        with open(self.out_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")
        if self._wandb is not None:
            self._wandb.log(record, step=step)
        print(self._console_line(step, record), flush=True)
        for name, message in self._find_alarms(record):
            if name not in self._alarms:
                self._alarms.add(name)
                print(f"warning: {message}", flush=True)
        last = step == self.num_steps - 1
        if last and self._wandb is not None:
            self._wandb.finish()
        if self.config.plot_every and (
            last or step % self.config.plot_every == self.config.plot_every - 1
        ):
            plot(self.out_dir / "metrics.jsonl", self.out_dir / "curves.png")

    def _console_line(self, step: int, record: dict) -> str:
        recent = sorted(self._step_times[-20:])
        left = recent[len(recent) // 2] * (self.num_steps - step - 1)
        shown = [f"step {step + 1:>4}/{self.num_steps}"]
        for label, name, form in (
            ("reward", "reward/mean", "{:.3f}"),
            ("eval", "eval/reward", "{:.3f}"),
            ("length", "response_length/mean", "{:.1f}"),
            ("entropy", "actor/entropy", "{:.3f}"),
            ("kl", "actor/ppo_kl", "{:.5f}"),
            ("grad", "actor/grad_norm", "{:.3f}"),
            ("tok/s", "throughput/tokens_per_sec", "{:.0f}"),
        ):
            if record.get(name) is not None:
                shown.append(f"{label} {form.format(record[name])}")
        return "  ".join([*shown, f"{record['timing_s/step']:.2f} s", f"left {left / 60:.1f} min"])

    def _find_alarms(self, record: dict) -> Iterator[tuple[str, str]]:
        kl = record.get("rollout_corr/kl", 0.0)
        if kl > self.config.mismatch_alarm:
            yield (
                "mismatch",
                f"sampler and trainer differ by {kl:.3f} nats per token; run once with --verify-sync",
            )
        entropy = record.get("actor/entropy", math.inf)
        if entropy < self.config.entropy_alarm:
            yield (
                "entropy",
                f"entropy is down to {entropy:.4f} nats; try --loss.entropy-coef or more --loss.clip-high",
            )
        if (flat := record.get("reward/frac_zero_std")) is not None:
            self._steps_without_spread = self._steps_without_spread + 1 if flat == 1.0 else 0
        if self._steps_without_spread >= self.config.zero_std_alarm:
            yield (
                "spread",
                f"no group had any spread for {self._steps_without_spread} steps: too easy, or too hard",
            )


def _keep_before(file: Path, step: int) -> None:
    """Keep the JSON lines whose "step" is below `step`; the last line may have been cut by a crash."""
    # Not splitlines(): a sample's text may hold other line breaks, such as U+2028.
    *lines, _ = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
    kept = [line for line in lines if json.loads(line)["step"] < step]
    file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def total(x: Tensor) -> float:
    """The sum of the scalar x over all ranks, which is added in place. Collective."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x.item()


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of this device by its datasheet; None if it is not in the table (CPU)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def model_flops(
    num_parameters: int, num_layers: int, hidden_size: int, lengths: list[int]
) -> float:
    """FLOPs of forward and backward over sequences of `lengths`: 6 x parameters x tokens + causal
    attention.
    """
    attention = 6 * num_layers * hidden_size * sum(length * length for length in lengths)
    return 6 * num_parameters * sum(lengths) + attention


class _DeviceSampler:
    """NVML utilisation and memory in use of this rank's GPU, sampled in a thread every 50 ms; no
    GPU or NVML: none.
    """

    def __init__(self):
        self._samples: list[tuple[float, float, float]] = []  # time, per cent, GiB
        self._spans: list[tuple[str, float, float]] = []
        if not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None:
            return
        import pynvml

        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's.
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

        def sample() -> None:
            while True:
                # Of the device: torch still counts what a sleeping engine has given back as
                # allocated.
                used_gb = pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30
                busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                self._samples.append((time.perf_counter(), busy, used_gb))
                time.sleep(0.05)

        threading.Thread(target=sample, daemon=True).start()

    def record(self, name: str, start: float, end: float) -> None:
        self._spans.append((name, start, end))

    def max_memory_gb(self) -> dict[str, float]:
        """The most in use in each phase that was sampled, and under "" in all of the step."""
        found: dict[str, float] = {}
        for t, _, gb in list(self._samples):
            for name in ("", *(n for n, start, end in self._spans if start <= t <= end)):
                found[name] = max(gb, found.get(name, 0.0))
        return found

    def mean_utilization(self, name: str) -> float | None:
        """Mean per cent inside the phases called `name`; None if they lasted under half a second
        together.
        """
        spans = [(start, end) for n, start, end in self._spans if n == name]
        values = [
            value
            for t, value, _ in list(self._samples)
            if any(start <= t <= end for start, end in spans)
        ]
        if sum(end - start for start, end in spans) < 0.5 or not values:
            return None
        return sum(values) / len(values)

    def clear(self) -> None:
        self._samples.clear()
        self._spans.clear()


def plot(metrics_file: Path, out_file: Path) -> None:
    """Draw the curves of a metrics.jsonl as one picture (nothing where matplotlib is not
    installed).
    """
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in Path(metrics_file).read_text().splitlines()]
    panels = [
        ("reward", ["reward/mean", "eval/reward"]),
        ("response length [tokens]", ["response_length/mean"]),
        ("entropy [nats]", ["actor/entropy"]),
        ("KL [nats]", ["actor/ppo_kl", "actor/kl_loss", "rollout_corr/kl"]),
        ("gradient norm", ["actor/grad_norm"]),
        ("tokens/s", ["throughput/tokens_per_sec"]),
    ]
    figure, axes = plt.subplots(2, 3, figsize=(14, 7))
    for axis, (title, names) in zip(axes.flat, panels, strict=True):
        for name in names:
            points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
            if points:
                axis.plot(
                    *zip(*points, strict=True), label=name, marker="." if len(points) < 30 else ""
                )
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out_file, dpi=90)
    plt.close(figure)
