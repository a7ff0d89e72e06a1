# SPDX-FileCopyrightText: 2026 handful contributors (metrics.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Measurements of a step: weighted means over all ranks, exclusive timers, throughput.

The problem. A metric is wrong in more ways than a loss: a mean of per-rank means, masked tokens
counted, a device sync per value, a timer inside a timer counted twice, a "utilisation" that is a
constant. Then two runs cannot be compared.

How it works. `add(name, value, weight)` keeps sum(value x weight) and sum(weight), on the device if
the value is there. `reduce` adds up both over all ranks and divides once:
    rank 0: 3 tokens, mean 1.0
    rank 1: 1 token, mean 2.0    ->  (3 x 1.0 + 1 x 2.0) / 4 = 1.25, not 1.5
Timers are exclusive: a timer inside another stops the outer one, and what no timer covers is
timing_s/other, so the phases add up to the step. NaN stays NaN, also in a maximum.

Throughput counts what ran. `add_pass` books the FLOPs of a forward and backward where it is called:
6 a weight and token (4 for a frozen weight), the head's at the positions it is applied to, none for
the embedding, which is looked up; causal attention; nothing for activations computed again. MFU
divides them by the step's time and the device's dense bf16 peak. Tokens per second divides the
tokens of the latest rollout by the time since it began, so steps that reuse rollouts share them.

What we give up: per-rank curves; a rank that is slow shows in timing_s/* only through the mean.
Attention counts as if no layer had a window. Source: Chowdhery 2022 (PaLM, arXiv:2204.02311,
appendix B) for MFU; verl's names.

Copied:
    from metrics import Metrics
    meter = Metrics()
    with meter.timer("update"):
        meter.add("loss", 1.0, weight=3)
        meter.add("loss", 2.0, weight=1)
    print(meter.reduce()["loss"])  # 1.25
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Entry(NamedTuple):
    """What is known so far of one metric."""

    value: float | Tensor  # sum, largest or smallest; of a mean the sum of value x weight
    weight: float


class Metrics:
    """Collects the numbers of a step; `reduce` is a collective, all else is local.

    `add` does not wait for the device; a timer does, at both ends.
    """

    def __init__(self, device=None, before_s: float = 0.0):
        """device: hardware.Device, or None for no figures of it. before_s: seconds before this
        call that are part of the first time that is booked."""
        self._entries: dict[tuple[str, str], Entry] = {}  # by (name, reduction)
        self._timers: list[str] = []
        self._since = time.perf_counter() - before_s
        self._rollout_tokens = 0.0  # of the latest step that sampled, over all ranks
        self._rollout_s = 0.0  # of the steps since then, that one included
        self._costs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> Cost
        self._device = device
        if device is not None:
            device.watch(self._timers)

    def add(
        self, name: str, value: float | Tensor, weight: float = 1.0, reduction: str = "mean"
    ) -> None:
        """One observation of `name`, a number or a scalar tensor, on any device.

        reduction: "mean" (by `weight`), "sum", "max" or "min".
        """
        if reduction not in ("mean", "sum", "max", "min"):
            raise ValueError(f"{name}: reduction {reduction}: must be mean, sum, max or min")
        if reduction == "mean" and weight == 0:
            return  # a row without response tokens
        if isinstance(value, Tensor):
            # Sums in 16 bits would stand still.
            value = value.detach().to(torch.promote_types(value.dtype, torch.float32))
        # A new tensor in any case: the caller may go on writing to its own.
        value = value * (weight if reduction == "mean" else 1)
        old = self._entries.get((name, reduction))
        if old is not None:
            value = _merge(old.value, value, reduction)
            weight += old.weight
        self._entries[name, reduction] = Entry(value, weight)

    def update(
        self, stats: Mapping[str, float | Tensor], weight: float = 1.0, prefix: str = ""
    ) -> None:
        """add() for each entry; a name that ends in _max or _min is reduced that way."""
        for name, value in stats.items():
            ending = name.rpartition("_")[2]
            reduction = ending if ending in ("max", "min") else "mean"
            self.add(prefix + name, value, weight, reduction)

    def add_group(self, source: str, rewards: list[float], rollouts: Sequence) -> None:
        """The samples of a prompt of data set `source`, before any filter, penalty or mask."""
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        num_truncated = len([rollout for rollout in rollouts if rollout.truncated])
        num_prompt = len(rollouts[0].prompt_ids)
        mean = sum(rewards) / len(rewards)
        self.add("reward/mean", mean)
        self.add(f"reward/{source}/mean", mean)
        if len(rewards) > 1:
            # Equal up to the rounding of weighted sums, exactly where the advantages are 0.
            rounding = 1e-14 * max(1.0, *map(abs, rewards))
            is_flat = all(abs(reward - rewards[0]) <= rounding for reward in rewards)
            self.add("reward/std", torch.tensor(rewards).std(correction=0).item())
            self.add("reward/frac_zero_std", 1.0 if is_flat else 0.0)
        self.add("prompt_length/mean", num_prompt)
        self.add("prompt_length/max", num_prompt, reduction="max")
        self.add("response_length/mean", sum(lengths) / len(lengths))
        self.add("response_length/max", max(lengths), reduction="max")
        self.add("response_length/min", min(lengths), reduction="min")
        self.add("response_length/clip_ratio", num_truncated / len(rollouts))
        self.add("throughput/num_tokens", num_prompt + sum(lengths), reduction="sum")

    def add_layout(self, rows: Sequence[Sequence], capacity: int) -> None:
        """How full this rank's rows of all minibatches are."""
        for minibatch in rows:
            for row in minibatch:
                used = len(row.tokens) if row.source else 0
                room = max(capacity, used)
                self.add("packing/efficiency", used / room, room)

    def add_pass(self, model: torch.nn.Module, row) -> None:
        """One forward and backward of `model` over a packed row, where it is made."""
        if not row.source:
            return  # an empty row
        if model not in self._costs:
            self._costs[model] = pass_cost(model)
        cost = self._costs[model]
        own = row.cu_seqlens.diff().double()  # on the device: nobody waits
        seen = row.prefix.cu_seqlens_k.diff().double() if row.prefix else own
        pairs = own * (2 * seen - own)  # without a shared prefix the square
        flops = cost.token * own.sum() + cost.pair * pairs.sum()
        self.add("perf/model_flops", flops + cost.scored * row.num_response_tokens, reduction="sum")

    def add_update(self, name: str, norm: float, rate: float) -> None:
        """An optimizer step of the model `name`, which all ranks take together, or none do."""
        self.update({f"{name}/grad_norm": norm, f"{name}/lr": rate})
        self.add(f"{name}/num_updates", 1 if math.isfinite(norm) else 0, reduction="sum")

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Books the wall time inside, less that of inner timers; waits for the device."""
        self._book()
        self._timers.append(name)
        finished = False
        try:
            yield
            finished = True
        finally:
            self._book(wait=finished)  # after an exception, what is waited for may never come
            self._timers.pop()

    def add_time(self, name: str) -> None:
        """Books the time since the last timer or add_time under `name`; waits for the device."""
        self._timers.append(name)
        self._book()
        self._timers.pop()

    def _book(self, wait: bool = True) -> None:
        """The time since the last call goes to the running timer."""
        if wait and torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        name = self._timers[-1] if self._timers else "other"
        self.add(f"timing_s/{name}", now - self._since, reduction="sum")
        self._since = now

    def reduce(self) -> dict[str, float | None]:
        """The record of the step since the last call, the same on all ranks. Collective."""
        self._book()
        self._add_memory()
        record = _merge_ranks(_gather_entries(_to_host(self._entries)))
        times = [value for name, value in record.items() if name.startswith("timing_s/")]
        record["timing_s/step"] = sum(times)
        self._derive(record)
        self._entries.clear()
        if self._device is not None:
            self._device.clear()
        return record

    def _derive(self, record: dict[str, float | None]) -> None:
        """Quotients that are only right after the reduction."""
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        step_s = record["timing_s/step"]
        if "throughput/num_tokens" in record:
            self._rollout_tokens = record.pop("throughput/num_tokens")
            self._rollout_s = 0.0
        self._rollout_s += step_s
        if self._rollout_tokens:
            tokens_per_sec = self._rollout_tokens / self._rollout_s
            record["throughput/tokens_per_sec"] = tokens_per_sec
            record["perf/tokens_per_sec_per_gpu"] = tokens_per_sec / num_ranks
        for signal in ("memory/actor_gpu_util_pct", "memory/ref_gpu_util_pct"):
            record.setdefault(signal, None)
        record.setdefault("communication/nccl_bw_gb", None)  # there is no bandwidth on one rank
        flops = record.pop("perf/model_flops", None)
        peak = self._device.peak_flops if self._device is not None else None
        if flops is not None:
            record["perf/mfu"] = flops / step_s / peak / num_ranks if peak else None
        if "timing_s/rollout" in record:
            record["throughput/rollout_latency_ms"] = 1000 * record["timing_s/rollout"]
        if "sft/loss" in record:
            record["sft/perplexity"] = math.exp(min(record["sft/loss"], 700.0))
        square = record.pop("rollout_corr/is_square_mean", None)
        if square:
            record["rollout_corr/ess"] = record["rollout_corr/is_weight_mean"] ** 2 / square

    def _add_memory(self) -> None:
        if self._device is None:
            return
        for phase, gb in self._device.max_memory_gb().items():
            name = f"perf/max_memory_gb/{phase}" if phase else "perf/max_memory_gb"
            self.add(name, gb, reduction="max")
        for phase, name in (("update", "actor"), ("ref_logprobs", "ref")):
            busy_pct = self._device.mean_utilization(phase)
            if busy_pct is not None:
                self.add(f"memory/{name}_gpu_util_pct", busy_pct)
        for kind, gb in self._device.memory_gb().items():
            self.add(f"perf/{kind}_memory_gb", gb, reduction="max")


def _merge(old: float | Tensor, new: float | Tensor, reduction: str) -> float | Tensor:
    if reduction in ("mean", "sum"):
        return old + new
    if not isinstance(old, Tensor) and not isinstance(new, Tensor):
        return _extreme([old, new], reduction)
    like = new if isinstance(new, Tensor) else old
    pick = torch.maximum if reduction == "max" else torch.minimum
    return pick(torch.as_tensor(old).to(like), torch.as_tensor(new).to(like))


def _extreme(values: list[float], reduction: str) -> float:
    """The largest or smallest; NaN if one is, wherever it stands."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values) if reduction == "max" else min(values)


def _to_host(entries: Mapping[tuple[str, str], Entry]) -> dict[tuple[str, str], Entry]:
    """The entries with plain floats, after one copy from the device for all of them."""
    on_device = [key for key, entry in entries.items() if getattr(entry.value, "is_cuda", False)]
    moved = {}
    if on_device:
        values = torch.stack([entries[key].value.double() for key in on_device]).tolist()
        moved = dict(zip(on_device, values, strict=True))
    found = {}
    for key, entry in entries.items():
        found[key] = Entry(moved[key] if key in moved else float(entry.value), entry.weight)
    return found


def _gather_entries(mine: dict) -> list[dict]:
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
        if reduction in ("max", "min"):
            record[name] = _extreme(values, reduction)
        elif reduction == "mean":
            record[name] = sum(values) / sum(entry.weight for entry in found)
        elif name.startswith("timing_s/") or name.endswith("/num_updates"):
            record[name] = sum(values) / len(per_rank)  # of a rank: phases add up to the step
        else:
            record[name] = sum(values)
    return record


def total(x: Tensor | float) -> float:
    """The sum of the scalar x over all ranks. Collective."""
    x = x.detach().clone() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(x)
    return x.item()


class Cost(NamedTuple):
    """FLOPs of a forward and backward."""

    token: float  # for each token
    scored: float  # for each token that the head is applied to
    pair: float  # for each square of a sequence's length


def pass_cost(model: torch.nn.Module) -> Cost:
    """What a Transformers model costs, by its weights and config."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    token = 0
    scored = 0
    for weight in model.parameters():
        flops = weight.numel() * (6 if weight.requires_grad else 4)
        if head is not None and weight is head.weight:
            scored += flops
        elif weight is not embedding.weight:
            token += flops
    # 2 products of 2 x width x length a token, three times (backward counts twice), half of it.
    return Cost(token, scored, 6 * config.num_hidden_layers * width)
