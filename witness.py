# SPDX-FileCopyrightText: 2026 handful contributors (witness.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""The policy as a witness: against the sampler, and against the layout of its own rows.

The problem. Sampler and trainer hold the same weights and compute with different kernels, fused
tensors, positions and types. A sync that scales one tensor, a template of rotary positions that
depends on the row, an attention that leaks: rewards rise a little more slowly, and nobody knows
why. Comparing weights does not show it: both sides can hold equal numbers and use them differently.

How it works. A token's log-probability says it all, and the policy computes it anew:
    after a sync         mean |log p(sampler) - log p(policy)| of 2,000 tokens    <= bound
    after a step         the policy has moved, the sampler's figures have not      > bound
    after the next sync  sampled and scored anew                                  <= bound
A sync that sends wrong numbers, to a wrong place, or nothing, fails the first or the last line.
Packing is tried likewise: 8 real samples alone and in a full row, and a gradient in two layouts of
rows and ranks.

The bound. In fp32 1e-4 nats. In bf16 two right implementations differ by what rounding does to this
model: SmolLM2 0.016. So rounding is measured: the same tokens once more with what enters each
linear layer multiplied by 1 + u, u uniform within the type's rounding error. The bound is twice the
difference that this makes: SmolLM2 0.049, where MLPs times 1.2 make 0.32, and that of one layer of
30 0.058. `compare` is the part for every run: one row of its first step.

What we give up: a fault in what both sides share, such as the tokens themselves or a tensor that
was loaded wrongly; faults that grow over time. Source: Parker 1997 (Monte Carlo arithmetic).

Copied:
    import torch
    from types import SimpleNamespace
    from witness import rounding
    model = torch.nn.Linear(4, 1, dtype=torch.bfloat16)
    fields = {"response_mask": torch.ones(9, dtype=torch.bool)}
    row = SimpleNamespace(x=torch.rand(9, 4).bfloat16(), fields=fields)
    print(rounding(model, lambda row: model(row.x)[:, 0].float(), row) < 0.05)  # True
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

FP32_BOUND = 1e-4  # nats
EIGHT_BIT_BOUND = 0.3  # an 8-bit sampler is another policy
ROUNDINGS = 2  # times what rounding does, in other types
NUM_TOKENS = 2000
NUM_ALONE = 8
GRADIENT_BOUND = {False: 1e-3, True: 0.1}  # by whether numbers of 8 or 16 bits are in it
RATES = (1e-5, 4e-5, 2e-4, 1e-3, 4e-3, 2e-2)  # until the policy has moved far enough


class Row(NamedTuple):
    """A line of the table."""

    what: str
    figure: str
    bound: str
    right: bool | None  # None: a figure, and no check
    advice: str  # what to do if it is wrong


class Parts(NamedTuple):
    """What a script hands over; all are collective."""

    logprobs: Callable[[Any], Tensor]  # of the policy on a packed row, without gradients
    gradients: Callable[[list, dict], Any]  # adds those of a minibatch's rows, with its totals
    step: Callable[[float], float]  # the optimizer's, of that learning rate
    sample: Callable[[int, int], list]  # a sync, then this rank's sequences of so many prompts
    pack: Callable[..., list]  # packing.pack; the rows are on the device
    tokens_per_row: int


class Difference(NamedTuple):
    """How far apart sampler and policy are, in nats per token, over all ranks."""

    mean: float
    largest: float
    bound: float
    num_tokens: int

    @property
    def is_small(self) -> bool:
        return self.mean <= self.bound  # NaN is not


def compare(
    args: Any, num_done: int, policy: nn.Module, rows: list, token_logprobs: Callable
) -> None:
    """Warns if the sampler of the first step is not the policy; stops, if --verify-sync asks for
    that, or --verify-every in this step. Collective.

    num_done: steps before this one, since the start. rows: of each minibatch, with the field
    rollout_logprobs; one row is used. token_logprobs: logprobs.token_logprobs.
    """
    every = args.verify_every or int(args.verify_sync)
    must_hold = every > 0 and num_done % every == 0
    if num_done and not must_hold:
        return
    logprobs = plainly(token_logprobs, policy, args.rollout.temperature)
    found = difference(policy, logprobs, rows[-1][:1], args.rollout.eight_bit)
    if found.is_small:
        return
    apart = f"{found.mean:.3g} nats apart, mean of {found.num_tokens} tokens"
    what = f"sampler and policy are {apart}, where rounding makes at most {found.bound:.3g}"
    advice = "--check with this run's flags finds out where; report it with the model's name"
    if must_hold:
        flag = f"--verify-every {every}" if args.verify_every else "--verify-sync"
        raise RuntimeError(f"{flag}: {what}; {advice}")
    _print(f"warning: {what}; {advice}")


def plainly(token_logprobs: Callable, policy: nn.Module, temperature: float) -> Callable:
    """The function of a row that is its log-probabilities [N], without gradients or compiled code:
    a pass that the run does not make would be compiled for half a minute.
    """

    @torch.no_grad()
    def logprobs(row) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return token_logprobs(policy, row, temperature=temperature)[0]

    return logprobs


def difference(
    policy: nn.Module, logprobs: Callable, rows: Sequence, eight_bit: bool = False
) -> Difference:
    """Mean and largest |log p(sampler) - log p(policy)| over the rows' response tokens. Collective.

    logprobs(row): the policy's, [N]. rows: of this rank, as many on all ranks, with the field
    rollout_logprobs.
    """
    sums = torch.zeros(2, dtype=torch.float64)  # of the differences, and their number
    largest = torch.zeros(1, dtype=torch.float64)
    for row in rows:
        known = row.fields.get("old_logprobs")
        now = logprobs(row) if known is None else known
        apart = (now - row.fields["rollout_logprobs"])[row.fields["response_mask"]].abs().double()
        sums += torch.tensor([apart.sum().item(), len(apart)], dtype=torch.float64)
        if len(apart):
            largest = torch.maximum(largest, apart.max().cpu())
    _add_up(sums)
    _add_up(largest, dist.ReduceOp.MAX)
    mean = sums[0].item() / max(1.0, sums[1].item())
    bound = FP32_BOUND
    if not mean <= bound:  # on all ranks alike
        bound = max(bound, ROUNDINGS * rounding(policy, logprobs, rows[0]))
        bound = max(bound, EIGHT_BIT_BOUND if eight_bit else 0.0)
    return Difference(mean, largest.item(), bound, int(sums[1]))


def rounding(policy: nn.Module, logprobs: Callable, row: Any) -> float:
    """Mean change of the row's log-probabilities by errors of the size of rounding. Collective.

    logprobs: as of plainly(); compiled layers do not see new hooks.
    """
    mask = row.fields["response_mask"]
    exact = logprobs(row)
    with _errors(policy):
        moved = logprobs(row)
    change = (moved - exact)[mask].abs().double()
    sums = torch.tensor([change.sum().item(), len(change)], dtype=torch.float64)
    _add_up(sums)
    return sums[0].item() / max(1.0, sums[1].item())


@contextlib.contextmanager
def _errors(policy: nn.Module) -> Iterator[None]:
    """Inside, what enters a matrix is off by up to half a unit in its last place."""
    generator = torch.Generator(next(policy.parameters()).device).manual_seed(0)

    def disturb(_, inputs: tuple) -> tuple:
        x = inputs[0]
        # A factor for each number, in fp32: in bf16 all of them would be 1.
        u = torch.empty(x.shape, device=x.device).uniform_(-0.5, 0.5, generator=generator)
        return ((x.float() * (1 + u * torch.finfo(x.dtype).eps)).to(x.dtype), *inputs[1:])

    hooks = []
    for module in policy.modules():
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(weight, Tensor) and weight.ndim == 2
        if is_matrix and not isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_pre_hook(disturb))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def sequences(make: Callable, rollouts: Sequence) -> list:
    """Sequences of this rank's samples; half of them are to become likelier, half less likely.

    make: packing.sequence. rollouts: rollout.Rollout.
    """
    found = []
    for i, each in enumerate(rollouts):
        known = {"rollout_logprobs": each.logprobs, "ref_logprobs": each.logprobs}
        advantage = 1.0 - 2.0 * (i % 2)
        found.append(make(each.prompt_ids, each.response_ids, advantages=advantage, **known))
    return found


def sampler_rows(
    parts: Parts, policy: nn.Module, mine: list, size: int, eight_bit: bool, seen: float | None
) -> list:
    """Rows on sampler against policy after a sync, after a step, and after the next sync.

    mine: sequences of this rank, whose length says how many prompts of `size` samples make 2,000
    tokens. seen: rollout_corr/abs_diff_mean of the real step, if its loss has noted it.
    """
    counts = torch.tensor([sum(map(_num_learnt, mine)), len(mine)], dtype=torch.float64)
    _add_up(counts)
    wanted = math.ceil(1.2 * NUM_TOKENS * counts[1].item() / (size * max(1.0, counts[0].item())))
    rows = []
    first = _sampled(parts, wanted, seed=1)
    found = difference(policy, parts.logprobs, first, eight_bit)
    advice = "the engine computes another policy: try --rollout.engine hf, and report the model"
    rows.append(_sampler_row("sampler, after a sync", found, advice))
    if seen is not None:
        figure = f"{seen:.2g} nats, of all its tokens"
        advice = "the update's own pass differs from a plain one: try --model.no-compile"
        right = seen <= found.bound
        rows.append(Row("sampler, in the first step", figure, f"{found.bound:.2g}", right, advice))
    totals = _totals(first)
    for rate in RATES:
        parts.gradients(first, totals)
        parts.step(rate)
        moved = difference(policy, parts.logprobs, first, eight_bit)
        if not moved.mean <= 4 * moved.bound:
            break
    what = "sampler, before the sync"
    figure = f"{moved.mean:.2g} nats, after a step of rate {rate:g}"
    advice = "the optimizer moves nothing: see --model.master-dtype, and whether gradients are 0"
    rows.append(Row(what, figure, f"> {moved.bound:.2g}", moved.mean > moved.bound, advice))
    again = difference(policy, parts.logprobs, _sampled(parts, wanted, seed=2), eight_bit)
    advice = "the sync does not bring the policy's weights: run once with --verify-sync"
    return [*rows, _sampler_row("sampler, after the next sync", again, advice)]


def _sampler_row(what: str, found: Difference, advice: str) -> Row:
    mean = f"{found.mean:.2g} nats, mean of {found.num_tokens} tokens"
    figure = f"{mean}; {found.largest:.2g} at most"
    return Row(what, figure, f"{found.bound:.2g}", found.is_small, advice)


def _sampled(parts: Parts, num_prompts: int, seed: int) -> list:
    """Rows of fresh samples, at least 2,000 tokens over all ranks if 8 rounds give as many."""
    mine: list = []
    for attempt in range(8):
        mine += parts.sample(num_prompts, 1000 * seed + attempt)
        num_tokens = torch.tensor([sum(map(_num_learnt, mine))])
        _add_up(num_tokens)
        if num_tokens.item() >= NUM_TOKENS:
            break
    return _rows(parts, mine, parts.tokens_per_row)


def _num_learnt(sequence: Mapping[str, Tensor]) -> int:
    return int(sequence["response_mask"].sum())


def _rows(parts: Parts, mine: list, capacity: int, num_sharing: int = 1) -> list:
    """This rank's sequences in rows, as many on all ranks."""
    made = parts.pack(mine, capacity, num_sharing=num_sharing) if mine else [None]
    needed = torch.tensor([len(made)])
    _add_up(needed, dist.ReduceOp.MAX)
    return parts.pack(mine, capacity, num_rows=int(needed), num_sharing=num_sharing)


def _totals(rows: Sequence) -> dict[str, int]:
    """What the minibatch of these rows holds over all ranks."""
    num_tokens = sum(row.num_response_tokens for row in rows)
    counts = torch.tensor([num_tokens, sum(len(row.source) for row in rows)])
    _add_up(counts)
    return {"tokens": int(counts[0]), "sequences": int(counts[1])}


def packing_rows(
    parts: Parts, policy: nn.Module, mine: list, is_rough: bool, num_sharing: int = 1
) -> list:
    """Rows on samples alone and in a full row, and on gradients in two layouts.

    mine: real sequences of this rank, with advantages; some rank has one. is_rough: gradients are
    rounded on their way. num_sharing: of them, one after the other, share a prompt in the run.
    """
    everyone = [each for of_rank in _gather(mine[:64]) for each in of_rank]
    everyone.sort(key=_length)
    last = len(everyone) - 1
    chosen = [everyone[last * i // (NUM_ALONE - 1)] for i in range(NUM_ALONE)]
    row = parts.pack(_filled(chosen, everyone, parts.tokens_per_row), parts.tokens_per_row)[0]
    together = _by_sequence(row, parts.logprobs(row))
    # The same rows on all ranks: each forward is a collective.
    worst = 0.0
    for i in (i for i in range(NUM_ALONE) if i in together):
        [alone] = parts.pack([chosen[i]], parts.tokens_per_row)
        [apart] = _by_sequence(alone, parts.logprobs(alone)).values()
        mask = chosen[i]["response_mask"]
        mean = (apart - together[i])[mask].abs().mean().item()
        worst = mean if not mean <= worst else worst  # NaN is larger than all
    # The mean of one sample of eight is further off than the mean of all.
    bound = max(FP32_BOUND, 1.5 * ROUNDINGS * rounding(policy, parts.logprobs, row))
    figure = f"{worst:.2g} nats, mean of a sample, the worst of {NUM_ALONE}"
    advice = "sequences of a row see each other: the model's attention or positions leak; report it"
    rows = [Row("alone or in a full row", figure, f"{bound:.2g}", worst <= bound, advice)]
    is_rough = is_rough or bound > FP32_BOUND
    advice = "a loss depends on the layout: see its divisor, and --model.reduce-every-row"
    known = _two_layouts(parts, chosen), is_rough, advice
    rows.append(_gradient_row(parts, policy, "gradient in two layouts", *known))
    if num_sharing > 1:
        group = mine[:num_sharing]
        layouts = [_rows(parts, group, parts.tokens_per_row, size) for size in (1, num_sharing)]
        known = layouts, is_rough, "try --no-share-prefixes, and report it"
        rows.append(_gradient_row(parts, policy, "gradient, prompt once", *known))
    return rows


def _length(sequence: Mapping[str, Tensor]) -> int:
    return len(sequence["tokens"])


def _filled(chosen: list, others: list, capacity: int) -> list:
    """`chosen`, and the others again and again until none fits into the row any more."""
    filled = list(chosen)
    room = capacity - sum(map(_length, chosen))
    while room >= _length(others[0]):
        for sequence in others:
            if _length(sequence) <= room:
                filled.append(sequence)
                room -= _length(sequence)
    return filled


def _by_sequence(row: Any, values: Tensor) -> dict[int, Tensor]:
    """The values [N] of each sequence of the row, by its place in what was packed."""
    bounds = row.cu_seqlens.tolist()
    parts = {index: slice(bounds[k], bounds[k + 1]) for k, index in enumerate(row.source)}
    return {index: values[part].cpu() for index, part in parts.items()}


def _two_layouts(parts: Parts, chosen: list) -> list[list]:
    """Short rows over all ranks, and long ones on the last."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    longest = max(map(_length, chosen))
    on_last = chosen if rank == num_ranks - 1 else []
    short = _rows(parts, chosen[rank::num_ranks], longest)
    return [short, _rows(parts, on_last, parts.tokens_per_row)]


def _gradient_row(
    parts: Parts, policy: nn.Module, what: str, layouts: list[list], is_rough: bool, advice: str
) -> Row:
    """How far the gradients of the same sequences in two layouts are apart."""
    found: list[list[Tensor]] = []
    for rows in layouts:
        parts.gradients(rows, _totals(rows))
        learned = [p for p in policy.parameters() if p.requires_grad]
        found.append([_local(p * 0 if p.grad is None else p.grad).cpu() for p in learned])
        policy.zero_grad()
    squares = torch.zeros(2, dtype=torch.float64)
    for a, b in zip(*found, strict=True):
        squares += torch.stack([x.double().square().sum() for x in (a - b, a)])
    _add_up(squares)
    apart = (squares[0] / squares[1]).sqrt().item()
    bound = GRADIENT_BOUND[is_rough]
    counts = " and ".join(str(len(rows)) for rows in layouts)
    figure = f"{apart:.2g} of its norm, in {counts} rows a rank"
    return Row(what, figure, f"{bound:g}", apart <= bound, advice)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x.detach()


def _gather(value: Any) -> list:
    """Each rank's value."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _add_up(x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """x becomes that of all ranks together; on the host."""
    if dist.is_initialized():
        dist.all_reduce(x, op=op)


def _print(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)
