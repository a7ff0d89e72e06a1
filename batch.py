# SPDX-FileCopyrightText: 2026 handful contributors (batch.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""The batch of a step: how large it is, which minibatch has what, and which rank.

The problem. Sizes that are said for each rank mean another run on another number of ranks, and so
do minibatches that are slices of what a rank holds. And ranks wait for each other: with responses
dealt in the order of their prompts, the rank with the longest ones sets the pace.

How it works. All sizes are over all ranks. A minibatch is a slice of the prompts in their order in
the data, wherever they were sampled; a group is whole in it.
    6 prompts, --num-minibatches 3, 2 ranks
    rank 0 has the prompts  0 1 2 5    of the minibatches  0 0 1 2
    rank 1                  3 4                            1 2
From the second epoch on the minibatches are shuffled, on all ranks alike. `assign` deals what is in
a minibatch to ranks so that predicted time is equal, by `balance`: longest first, each to the
cheapest rank so far (at most 4/3 of the optimum, from 512 on within 0.1 %). Attention is quadratic
within a sequence, so the cost of length l is l + l^2 / (2 C), not l; C is the row size.
A group that shares its prompt (prefix.py) is dealt as a whole, and costs its prompt once. If that
leaves ranks too unequal, because there are few groups, it is dealt in 2, 4, ... parts.

What we give up: minibatches of equally many tokens; one has as many as its prompts bring.
Source: Graham 1969 (longest processing time first).

Copied:
    from batch import BatchConfig
    config = BatchConfig(prompts_per_step=6, group_size=2, num_minibatches=3)
    print(config.minibatches([0, 1, 2, 3, 4, 5]))  # [0, 0, 1, 1, 2, 2]
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import torch.distributed as dist


@dataclass(frozen=True)
class BatchConfig:
    """All sizes are over all ranks; what a rank gets follows from them."""

    prompts_per_step: int = 64
    """Prompts in a step, over all ranks (P); any number on any number of ranks."""
    group_size: int = 8
    """Responses per prompt (G); 8 to 16 is usual."""
    num_minibatches: int = 1
    """Optimizer steps per pass over a batch; must divide prompts_per_step."""
    num_epochs: int = 1
    """Passes over each batch."""
    tokens_per_row: int = 16384
    """Tokens in one packed row, what one forward works on: as many as memory allows."""
    share_prefixes: bool = True
    """Compute a group's prompt once a row, and not for each response (prefix.py)."""

    def __post_init__(self):
        for size in fields(self):
            value = getattr(self, size.name)
            if value < 1 and size.type == "int":
                flag = f"--{size.name.replace('_', '-')}"
                raise ValueError(f"{flag} {value}: must be at least 1; try {size.default}")
        if self.prompts_per_step % self.num_minibatches:
            nearest = max(1, round(self.prompts_per_step / self.num_minibatches))
            raise ValueError(
                f"--prompts-per-step {self.prompts_per_step}: must be divisible by "
                f"--num-minibatches {self.num_minibatches}; "
                f"try --prompts-per-step {nearest * self.num_minibatches}"
            )

    @property
    def num_samples(self) -> int:
        """Responses in a step, over all ranks (B = P x G)."""
        return self.prompts_per_step * self.group_size

    @property
    def num_sharing(self) -> int:
        """Sequences, one after the other, that share their prompt; 1: none do."""
        return self.group_size if self.share_prefixes else 1

    def describe(self, max_prompt_tokens: int, max_response_tokens: int) -> str:
        """The batch arithmetic in a line."""
        return (
            f"{self.prompts_per_step} prompts x {self.group_size} = {self.num_samples} samples "
            f"of up to {max_prompt_tokens} + {max_response_tokens} tokens; "
            f"{self.num_epochs} epochs x {self.num_minibatches} minibatches of "
            f"{self.num_samples // self.num_minibatches}, in rows of {self.tokens_per_row} tokens"
        )

    def assign(
        self,
        lengths: Sequence[int],
        minibatches: Sequence[int],
        num_ranks: int,
        shared: Sequence[int] | None,
    ) -> list[int]:
        """The rank of each sequence, by `assign` below; shared None: no group stays whole."""
        return assign(
            lengths,
            minibatches,
            num_ranks,
            self.tokens_per_row,
            shared=shared,
            num_sharing=self.num_sharing if shared else 1,
        )

    def minibatches(self, positions: Sequence[int]) -> list[int]:
        """The minibatch of each prompt: equal slices of the positions of all ranks. Collective."""
        everyone = sorted(chain.from_iterable(_gather(list(positions))))
        place = {position: i for i, position in enumerate(everyone)}
        return [place[position] * self.num_minibatches // len(place) for position in positions]

    def minibatch_order(self, totals: Sequence[Mapping[str, int]], seed: object) -> list[int]:
        """The minibatches that have response tokens, once per epoch; shuffled from epoch 1 on."""
        order = []
        for epoch in range(self.num_epochs):
            minibatches = list(range(self.num_minibatches))
            if epoch:
                random.Random(repr((seed, epoch))).shuffle(minibatches)
            order += [m for m in minibatches if totals[m]["tokens"]]
        return order


def _gather(mine: list) -> list[list]:
    """The list of each rank, in the order of ranks. Collective."""
    if not dist.is_initialized():
        return [mine]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def assign(
    lengths: Sequence[int],
    minibatches: Sequence[int],
    num_ranks: int,
    capacity: int,
    *,
    shared: Sequence[int] | None = None,
    num_sharing: int = 1,
) -> list[int]:
    """The rank of each sequence: in every minibatch the ranks' predicted times are nearly equal.

    The lists are of all ranks' sequences, in an order that all ranks agree on. Each num_sharing on
    end are a group, and have their first `shared` tokens in common. A group is dealt in as few
    parts as do for the slowest rank to be fastest: each part has a copy of the prompt.
    """
    shared = shared or [0] * len(lengths)
    destination = [0] * len(lengths)
    for minibatch in sorted(set(minibatches)):
        groups: dict[int, list[int]] = {}
        for i, m in enumerate(minibatches):
            if m == minibatch:
                groups.setdefault(i // num_sharing, []).append(i)
        best = math.inf
        num_parts = 1
        while num_parts <= num_sharing:
            parts = []
            for members in groups.values():
                own = [lengths[i] - shared[i] for i in members]
                dealt = balance(own, num_parts) if num_parts > 1 else [range(len(own))]
                parts += [[members[k] for k in part] for part in dealt if part]
            costs = [_part_cost(part, lengths, shared, capacity) for part in parts]
            by_rank = balance(costs, num_ranks)
            slowest = max(sum(costs[k] for k in mine) for mine in by_rank)
            if slowest < best:
                best = slowest
                for rank, mine in enumerate(by_rank):
                    for i in chain.from_iterable(parts[k] for k in mine):
                        destination[i] = rank
            num_parts *= 2
    return destination


def _part_cost(
    part: Sequence[int], lengths: Sequence[int], shared: Sequence[int], capacity: int
) -> float:
    """Predicted time of sequences that compute what they share once."""
    alone = sum(sequence_cost(lengths[i], capacity) for i in part)
    return alone - (len(part) - 1) * sequence_cost(shared[part[0]], capacity)


def sequence_cost(length: int, capacity: int) -> float:
    """length + length^2 / (2 capacity): predicted time, in units of one token's linear layers."""
    return length + length * length / (2 * capacity)


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices of `costs` dealt to `num_parts` lists with nearly equal sums, each ascending.

    Ties are broken by index, so every rank finds the same lists. A list may be empty.
    """
    heap = [(0.0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (load + costs[index], part))
    return [sorted(part) for part in parts]
