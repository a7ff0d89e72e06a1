"""Measurements of a step: weighted means over all ranks, exclusive timers, throughput.

The problem. A metric is wrong in more ways than a loss: a mean of per-rank means, masked tokens
counted, a device sync per value, a timer inside a timer counted twice, a "utilisation" that is a
constant. Then two runs cannot be compared.

How it works. `add(name, value, weight)` keeps sum(value x weight) and sum(weight), on the device if
the value is there. `reduce` adds up both over all ranks and divides once:
    rank 0: 3 tokens, mean 1.0
    rank 1: 1 token, mean 2.0    ->  (3 x 1.0 + 1 x 2.0) / 4 = 1.25, not 1.5
Timers are exclusive: a timer inside another stops the outer one, and what no timer covers is
timing_s/other, so the phases add up to the step.

Five signals of throughput, all measured:
    throughput/tokens_per_sec      prompt + response tokens of a step, each once, over its wall time
    throughput/rollout_latency_ms  wall time of sampling alone
    memory/actor_gpu_util_pct      NVML utilisation during the update (null under half a second)
    memory/ref_gpu_util_pct        the same during the reference pass
    communication/nccl_bw_gb       bus GB/s of a timed probe, `measure_bandwidth`; null on one rank
MFU is model FLOPs (6 x parameters x tokens + attention, no recomputation) over the dense bf16 peak
of the device.

What we give up: per-rank curves; a rank that is slow shows in timing_s/* only through the mean.
Source: Chowdhery 2022 (PaLM, arXiv:2204.02311, appendix B) for MFU; verl's names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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

# torch 2.13 renamed it.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Entry(NamedTuple):
    """What is known so far of one metric."""

    value: float | Tensor  # sum, largest or smallest; of a mean the sum of value x weight
    weight: float


class Metrics:
    """Collects the numbers of a step; `reduce` is a collective, all else is local.

    `add` does not wait for the device; a timer does, at both ends.
    """

    def __init__(self):
        self._entries: dict[tuple[str, str], Entry] = {}  # by (name, reduction)
        self._timers: list[str] = []
        self._since = time.perf_counter()
        self._step_start = self._since
        self._device = _DeviceSampler()

    def add(
        self, name: str, value: float | Tensor, weight: float = 1.0, reduction: str = "mean"
    ) -> None:
        """One observation of `name`, to be reduced over ranks as a "mean" by `weight`, "sum", "max"
        or "min".
        """
        if reduction == "mean" and weight == 0:
            return  # a row without response tokens
        value = value.detach() if isinstance(value, Tensor) else value
        if reduction == "mean":
            value = value * weight
        old = self._entries.get((name, reduction))
        if old is None:
            self._entries[name, reduction] = Entry(value, weight)
        else:
            merged = _merge(old.value, value, reduction)
            self._entries[name, reduction] = Entry(merged, old.weight + weight)

    def update(
        self, stats: Mapping[str, float | Tensor], weight: float = 1.0, prefix: str = ""
    ) -> None:
        """add() for each entry; a name that ends in _max or _min is reduced that way."""
        for name, value in stats.items():
            ending = name.rpartition("_")[2]
            reduction = ending if ending in ("max", "min") else "mean"
            self.add(prefix + name, value, weight, reduction)

    def add_group(self, source: str, rewards: list[float], rollouts: Sequence) -> None:
        """The samples of one prompt as they came, before any filter, penalty or mask; `source`
        names its data set.
        """
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        num_truncated = len([rollout for rollout in rollouts if rollout.truncated])
        num_prompt = len(rollouts[0].prompt_ids)
        mean = sum(rewards) / len(rewards)
        self.add("reward/mean", mean)
        self.add(f"reward/{source}/mean", mean)
        if len(rewards) > 1:
            self.add("reward/std", torch.tensor(rewards).std(correction=0).item())
            is_flat = max(rewards) == min(rewards)
            self.add("reward/frac_zero_std", 1.0 if is_flat else 0.0)
        self.add("prompt_length/mean", num_prompt)
        self.add("prompt_length/max", num_prompt, reduction="max")
        self.add("response_length/mean", sum(lengths) / len(lengths))
        self.add("response_length/max", max(lengths), reduction="max")
        self.add("response_length/min", min(lengths), reduction="min")
        self.add("response_length/clip_ratio", num_truncated / len(rollouts))
        self.add("throughput/num_tokens", num_prompt + sum(lengths), reduction="sum")

    def add_layout(
        self,
        models: Sequence[torch.nn.Module],
        sequences: Sequence[Mapping[str, Tensor]],
        rows: Sequence[Sequence],
        capacity: int,
        num_epochs: int,
    ) -> None:
        """How full the rows of all minibatches are, and the FLOPs of the models that they update,
        on this rank.
        """
        lengths = [len(sequence["tokens"]) for sequence in sequences]
        for model in models:
            config = model.config.get_text_config()
            num_parameters = sum(p.numel() for p in model.parameters())
            flops = model_flops(
                num_parameters, config.num_hidden_layers, config.hidden_size, lengths
            )
            self.add("perf/model_flops", num_epochs * flops, reduction="sum")
        for minibatch in rows:
            for row in minibatch:
                used = len(row.tokens) if row.source else 0
                room = max(capacity, used)
                self.add("packing/efficiency", used / room, room)

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

    def reduce(self) -> dict[str, float | None]:
        """The record of the step since the last call, the same on all ranks. Collective."""
        self._switch()
        step_s = self._since - self._step_start
        self._step_start = self._since
        self.add("timing_s/step", step_s, reduction="sum")
        self._add_memory()
        record = _merge_ranks(_gather(_to_host(self._entries)))
        for phase, name in (("update", "actor"), ("ref_logprobs", "ref")):
            record[f"memory/{name}_gpu_util_pct"] = self._device.mean_utilization(phase)
        self._device.clear()
        _derive(record, step_s)
        self._entries.clear()
        return record

    def _add_memory(self) -> None:
        for phase, gb in self._device.max_memory_gb().items():
            name = f"perf/max_memory_gb/{phase}" if phase else "perf/max_memory_gb"
            self.add(name, gb, reduction="max")
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident_bytes = num_pages * os.sysconf("SC_PAGE_SIZE")
        self.add("perf/host_memory_gb", resident_bytes / 2**30, reduction="max")
        if torch.cuda.is_available():
            cached_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            self.add("perf/cached_memory_gb", cached_bytes / 2**30, reduction="max")


def _merge(old: float | Tensor, new: float | Tensor, reduction: str) -> float | Tensor:
    if reduction in ("mean", "sum"):
        return old + new
    if isinstance(new, Tensor):
        return torch.maximum(old, new) if reduction == "max" else torch.minimum(old, new)
    return max(old, new) if reduction == "max" else min(old, new)


def _to_host(entries: Mapping[tuple[str, str], Entry]) -> dict[tuple[str, str], Entry]:
    """The entries with plain floats, after one copy from the device for all of them."""
    on_device = {}
    for key, entry in entries.items():
        if isinstance(entry.value, Tensor) and entry.value.is_cuda:
            on_device[key] = entry.value.double()
    moved = {}
    if on_device:
        values = torch.stack(list(on_device.values())).tolist()
        moved = dict(zip(on_device, values, strict=True))
    found = {}
    for key, entry in entries.items():
        value = moved[key] if key in moved else float(entry.value)
        found[key] = Entry(value, entry.weight)
    return found


def _gather(mine: dict) -> list[dict]:
    """`mine` of each rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    per_rank = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(per_rank, mine)
    return per_rank


def _merge_ranks(per_rank: list[dict[tuple[str, str], Entry]]) -> dict[str, float | None]:
    record = {}
    keys = dict.fromkeys(key for entries in per_rank for key in entries)
    for name, reduction in keys:
        found = [entries[name, reduction] for entries in per_rank if (name, reduction) in entries]
        values = [entry.value for entry in found]
        if reduction == "max":
            record[name] = max(values)
        elif reduction == "min":
            record[name] = min(values)
        elif reduction == "mean":
            record[name] = sum(values) / sum(entry.weight for entry in found)
        elif name.startswith("timing_s/"):
            record[name] = sum(values) / len(per_rank)  # so that phases still add up to the step
        else:
            record[name] = sum(values)
    return record


def _derive(record: dict[str, float | None], step_s: float) -> None:
    """Quotients that are only right after the reduction."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    num_tokens = record.pop("throughput/num_tokens", None)
    if num_tokens is not None:
        record["throughput/tokens_per_sec"] = num_tokens / step_s
        record["perf/tokens_per_sec_per_gpu"] = num_tokens / step_s / num_ranks
    record.setdefault("communication/nccl_bw_gb", None)  # there is no bandwidth on one rank
    flops = record.pop("perf/model_flops", None)
    peak = peak_flops()
    if flops is not None:
        record["perf/mfu"] = flops / step_s / peak / num_ranks if peak else None
    if "timing_s/rollout" in record:
        record["throughput/rollout_latency_ms"] = 1000 * record["timing_s/rollout"]
    square = record.pop("rollout_corr/is_square_mean", None)
    if square:
        record["rollout_corr/ess"] = record["rollout_corr/is_weight_mean"] ** 2 / square


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


def measure_bandwidth(num_bytes: int, group: dist.ProcessGroup | None = None) -> float:
    """Bus GB/s of a reduce-scatter of num_bytes in fp32 per rank, the collective of the gradients;
    NaN on one rank.

    Bus bandwidth: what a rank must send whatever the algorithm, bytes * (W - 1) / W, over the time.
    The time is the median of five on the slowest rank, after two to warm up.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return float("nan")
    device = "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"
    chunk = torch.zeros(max(1, num_bytes // 4 // num_ranks), device=device)
    full = torch.zeros(num_ranks * len(chunk), device=device)
    times = []
    for _ in range(7):
        elapsed = torch.zeros(1, device=device)
        dist.all_reduce(elapsed, group=group)  # so that all start together
        start = time.perf_counter() + elapsed.item()
        reduce_scatter(chunk, full, group=group)
        if elapsed.is_cuda:
            torch.cuda.synchronize()
        elapsed += time.perf_counter() - start
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
        times.append(elapsed.item())
    median = sorted(times[2:])[2]
    return (num_ranks - 1) * chunk.nbytes / median / 1e9


class Sample(NamedTuple):
    """The device at one moment."""

    time: float
    busy_pct: float
    used_gb: float


class Span(NamedTuple):
    """One run of a timer."""

    name: str
    start: float
    end: float


class _DeviceSampler:
    """NVML utilisation and memory in use of this rank's GPU, sampled in a thread every 50 ms; no
    GPU or NVML: none.
    """

    def __init__(self):
        self._samples: list[Sample] = []
        self._spans: list[Span] = []
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
                busy_pct = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                self._samples.append(Sample(time.perf_counter(), busy_pct, used_gb))
                time.sleep(0.05)

        threading.Thread(target=sample, daemon=True).start()

    def record(self, name: str, start: float, end: float) -> None:
        self._spans.append(Span(name, start, end))

    def max_memory_gb(self) -> dict[str, float]:
        """The most in use in each phase that was sampled, and under "" in all of the step."""
        found: dict[str, float] = {}
        for sample in list(self._samples):
            phases = [span.name for span in self._spans if span.start <= sample.time <= span.end]
            for name in ("", *phases):
                found[name] = max(sample.used_gb, found.get(name, 0.0))
        return found

    def mean_utilization(self, name: str) -> float | None:
        """Mean per cent inside the phases called `name`; None if they lasted under half a second
        together.
        """
        spans = [span for span in self._spans if span.name == name]
        values = []
        for sample in list(self._samples):
            if any(span.start <= sample.time <= span.end for span in spans):
                values.append(sample.busy_pct)
        if sum(span.end - span.start for span in spans) < 0.5 or not values:
            return None
        return sum(values) / len(values)

    def clear(self) -> None:
        self._samples.clear()
        self._spans.clear()
