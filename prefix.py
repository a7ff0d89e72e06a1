# SPDX-FileCopyrightText: 2026 handful contributors (prefix.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Shared prefixes: a row in which a group's prompt stands once, and not before each response.

The problem. G responses to one prompt are G sequences, each with a copy of the prompt. With a
prompt of 2,048 tokens and 8 responses of 256, 78 % of what the update computes are copies, and so
it is in the passes for old and reference log-probabilities. The copies' states are all the same.

How it works. `share` takes the copies out of a packed row. The first sequence of a group stays
whole; of the others only what is their own is left, and its queries see two spans of keys:
    plain row     P P P a a | P P P b b b | P P P c        three sequences of one group
    shared row    P P P a a | b b b | c
    position_ids  0 1 2 3 4 | 3 4 5 | 3                    they go on behind the prompt
    previous      . 0 1 2 3 | 2 5 6 | 2                    whose state predicts a token
    keys          0 1 2 3 4 | 0 1 2 5 6 7 | 0 1 2 8        K indices into the row: prompt, then own
    cu_seqlens    0 5 8 9         cu_seqlens_k  0 5 11 15
Attention gathers keys and values by `keys` and aligns its causal mask at the end: the last query
of a sequence sees all of its keys (attention.py). Everything else in a model works token by token.
A plain row is the case of groups of one. `restore` puts the copies back.

Tokens of a shared row in those of the plain one, (P + G R) / (G P + G R), by prompt P, response R
and group G; the time of the head, for response tokens alone, stays:
       P      R   G = 2      4      8     16
     100    512    0.92   0.88   0.86   0.85
     512    512    0.75   0.62   0.56   0.53
    1024   1024    0.75   0.62   0.56   0.53
    2048    256    0.56   0.33   0.22   0.17
Gradients of a prompt's keys are sums over the responses: they are added up in fp32.

What we give up: rows get less full, as a group stays together unless it is longer than a row or the
ranks would be out of balance. On a GPU keys and values are gathered in the forward and once more in
the backward, K/N times the row's own, in one layer at a time. Responses that begin alike are not
shared: a token has one advantage. Source: Prefix Grouper (Liu 2025, arXiv:2506.05433).

Copied, with packing.py:
    import torch
    from packing import pack, sequence
    from prefix import share
    two = [sequence(torch.tensor([7, 8]), torch.tensor(response)) for response in ([9], [5, 6])]
    [row] = pack(two, capacity=8, groups=[0, 0], share=share)
    print(row.tokens.tolist(), row.prefix.keys.tolist())  # [7, 8, 9, 5, 6] [0, 1, 2, 0, 1, 3, 4]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prefix:
    """Where the tokens of a shared row find what stands before them. N tokens, S sequences."""

    lengths: tuple[int, ...]  # of each sequence: tokens that the group's first one has for it, or 0
    previous: Tensor  # [N] int64: the position whose state predicts the token; -1 of none
    keys: Tensor  # [K] int64: positions that a sequence's queries see, sequence by sequence
    cu_seqlens_k: Tensor  # [S+1] int32: where each sequence's keys begin
    max_seqlen_k: int  # the longest sequence, prompt included

    def to(self, device: torch.device | str) -> Prefix:
        """The same on `device`."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("previous", "keys", "cu_seqlens_k")
        }
        return replace(self, **moved)

    def restore(self, row: Any) -> Any:
        """The plain row that `share` made `row` of, with fields of before or new ones."""
        device = row.tokens.device
        ends = self.cu_seqlens_k.tolist()
        positions = [torch.arange(end - start) for start, end in itertools.pairwise(ends)]
        return replace(
            row,
            tokens=row.tokens[self.keys],
            position_ids=torch.cat(positions).to(device),
            cu_seqlens=self.cu_seqlens_k,
            max_seqlen=self.max_seqlen_k,
            fields={name: x[self.keys] for name, x in row.fields.items()},
            prefix=None,
        )

    def share_part(self, part: Any, first: int, end: int) -> Any:
        """A plain row of the sequences first .. end - 1 without its copies."""
        return share(part, self.lengths[first:end])


def share(row: Any, lengths: Sequence[int]) -> Any:
    """The packed row without copies: of each sequence its first `lengths[i]` tokens are left out.

    row: packing.PackedRow, plain. lengths: 0 for a sequence that stays whole; another one begins
    with as many tokens of the last whole one before it, and learns from none of them. A row whose
    first sequence is not whole has lost that one: its first sequence is taken as whole.
    """
    bounds = row.cu_seqlens.tolist()
    kept = []  # tokens of the plain row
    keys = []
    previous = []
    starts = [0]
    source_start = 0  # of the last whole sequence, in the shared row
    lengths = [0 if i == 0 else length for i, length in enumerate(lengths or [0])]
    for i, length in enumerate(lengths):
        start = starts[-1]
        own = torch.arange(start, start + bounds[i + 1] - bounds[i] - length)
        if length == 0:
            source_start = start
        kept.append(torch.arange(bounds[i] + length, bounds[i + 1]))
        keys += [torch.arange(source_start, source_start + length), own]
        before = source_start + length - 1 if length else -1
        previous += [torch.tensor([before]), own[:-1]]
        starts.append(start + len(own))
    index = torch.cat(kept).to(row.tokens.device)
    prefix = Prefix(
        tuple(lengths), torch.cat(previous), torch.cat(keys), row.cu_seqlens, row.max_seqlen
    )
    return replace(
        row,
        tokens=row.tokens[index],
        position_ids=row.position_ids[index],
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=index.device),
        max_seqlen=max(end - start for start, end in itertools.pairwise(starts)),
        fields={name: x[index] for name, x in row.fields.items()},
        prefix=prefix.to(index.device),
    )
