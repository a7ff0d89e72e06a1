# SPDX-FileCopyrightText: 2026 handful contributors (packing.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Variable-length sequences in full rows, equally many rows on every rank.

The problem. Responses of a reasoning model are log-normal: most are short, a few reach the limit.
Padded to the longest one, a batch is 24 to 66 % full; packed into rows of a fixed number of tokens,
98 %, and a row's memory is known before the first forward.

How it works. Three steps, each cheap (4,096 sequences: some 20 ms):
1. The batch deals sequences to ranks so that predicted time is equal (batch.assign), and they
   travel.
2. `first_fit_decreasing` fills one rank's rows: longest first, each into the first row with room
   (at most 11/9 of the optimum + 1 row).
       lengths 7 5 4 3 1, capacity 10  ->  rows [7 3] [5 4 1]
3. All ranks agree on the number of rows (the largest), and `pack(..., num_rows)` adds empty rows
   where a rank has fewer: FSDP gathers parameters in every forward, so a rank that runs fewer
   forwards than the others hangs them. An empty row is masked.

A row is flat. Letters: N tokens in a row, S sequences in a row.
    tokens        7 8 9 | 4 5          [N]    x[i] of every field belongs to tokens[i]
    position_ids  0 1 2 | 0 1          [N]    rotary positions restart with each sequence
    cu_seqlens    0 3 5                [S+1]  where attention must stop
A group's prompt may stand once in a row (prefix.py). The rows are filled with groups then, each in
as few rows as hold it, and a sequence behind the first of its group is its own tokens alone.

Its fields, [N] each: the phase of the scripts that sets it, and by what, and what reads it.
    response_mask     3  sequence                 all of them: where it is False nothing is learned
    rollout_logprobs  3  sequence                 actor_loss, estimate
    scores            3  sequence (ppo.py)        estimate
    old_logprobs      4  logprobs.with_logprobs   actor_loss, estimate
    ref_logprobs      4  logprobs.with_logprobs   actor_loss, estimate
    values            4  logprobs.with_values     critic_loss, estimate
    returns           4  advantages.estimate      critic_loss
    advantages        3  sequence (ppo.py: 4)     actor_loss; in ppo.py estimate sets them

What we give up. One token budget for all rows; no sequence is split over rows or ranks (one longer
than the capacity gets its own row, which is then longer than asked for).
Source: Johnson 1973 (first-fit decreasing), Krell 2021 (arXiv:2107.02027).

Copied:
    import torch
    from packing import pack, sequence
    two = [sequence(torch.tensor([7]), torch.tensor(response)) for response in ([8, 9], [5])]
    [row] = pack(two, capacity=8)
    print(row.tokens.tolist(), row.cu_seqlens.tolist())  # [7, 8, 9, 7, 5] [0, 3, 5]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class PackedRow:
    """One forward's worth of sequences, joined."""

    tokens: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, restarting at 0
    cu_seqlens: Tensor  # [S+1] int32, starts at 0 and ends at N
    max_seqlen: int  # on the host: a kernel needs it without a device sync
    num_response_tokens: int  # with response_mask set: the row's weight in a mean over tokens
    source: tuple[int, ...]  # index of each sequence in the list that was packed; () if none
    fields: dict[str, Tensor] = field(default_factory=dict)  # all others, [N] each
    prefix: Any = None  # prefix.Prefix if a group's prompt stands once; then a sequence is its own

    def plain(self) -> PackedRow:
        """The row in which each sequence has its prompt: itself, but for shared prefixes."""
        return self.prefix.restore(self) if self.prefix else self

    def to(self, device: torch.device | str) -> PackedRow:
        """The same row with its tensors on `device`; from pinned memory copies do not block."""

        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        return replace(
            self,
            tokens=moved(self.tokens),
            position_ids=moved(self.position_ids),
            cu_seqlens=moved(self.cu_seqlens),
            fields={name: moved(x) for name, x in self.fields.items()},
            prefix=self.prefix.to(device) if self.prefix else None,
        )


class Item(NamedTuple):
    """What all ranks know of a sequence before any of it travels."""

    minibatch: int
    num_tokens: int
    num_shared: int  # tokens at its start that its whole group has in common; 0: none are shared
    num_response_tokens: int


def lay_out(
    sequences: Sequence[Mapping[str, Tensor]],
    minibatches: Sequence[int],
    config: Any,
    *,
    exchange: Callable,
    like: Mapping[str, Tensor],
    share: Callable | None = None,
) -> tuple[list[list[PackedRow]], list[dict[str, int]]]:
    """Rows of each minibatch on this rank, the same number on all ranks, and what each minibatch
    holds over all ranks: {"tokens": response tokens, "sequences": sequences with a response token}.
    Collective over all ranks.

    sequences and the minibatch of each: this rank's own, before they are dealt to the ranks.
    config: batch.BatchConfig. exchange: exchange.exchange, or a stand-in for one rank. like: a
    sequence with the names and dtypes, for ranks that have none. share: prefix.share takes the
    copies of a prompt out of the rows; config.num_sharing sequences, one after the other, have it
    in common.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    capacity = config.tokens_per_row
    size = config.num_sharing if share else 1
    share = share if size > 1 else None
    shared = common_prefixes(sequences, size)
    mine = [
        Item(minibatch, len(s["tokens"]), num_shared, int(s["response_mask"].sum()))
        for minibatch, s, num_shared in zip(minibatches, sequences, shared, strict=True)
    ]
    ranks = _gather(mine)
    items = list(chain.from_iterable(ranks))
    destination = config.assign(
        [item.num_tokens for item in items],
        [item.minibatch for item in items],
        len(ranks),
        [item.num_shared for item in items] if share else None,
    )
    start = sum(len(earlier) for earlier in ranks[:rank])
    received = exchange(list(sequences), destination[start : start + len(mine)])
    # exchange keeps the order of `items`, so what is known of them need not travel.
    arrived = [i for i, to in enumerate(destination) if to == rank]
    rows = []
    for minibatch in range(config.num_minibatches):
        members = [k for k, i in enumerate(arrived) if items[i].minibatch == minibatch]
        part = [received[k] for k in members]
        groups = [arrived[k] // size for k in members]
        rows.append(pack(part, capacity, groups=groups, share=share))
    _fill_up(rows, like, share)
    return rows, [_totals(items, k) for k in range(config.num_minibatches)]


def common_prefixes(sequences: Sequence[Mapping[str, Tensor]], size: int) -> list[int]:
    """Of each sequence, the tokens at its start that may be shared in its group, `size` on end."""
    if len(sequences) % size:
        raise ValueError(f"{len(sequences)} sequences: are no whole groups of {size}")
    found = []
    for start in range(0, len(sequences), size):
        found += [_common_prefix(sequences[start : start + size])] * size
    return found


def _common_prefix(group: Sequence[Mapping[str, Tensor]]) -> int:
    """Tokens that all begin with, none learns from, and that leave a token of each."""
    if len(group) < 2:
        return 0
    limits = []
    for s in group:
        num_before = int((s["response_mask"].cumsum(0) == 0).sum())
        limits.append(min(num_before, len(s["tokens"]) - 1))
    first = group[0]["tokens"][: min(limits)]
    for s in group[1:]:
        equal = first == s["tokens"][: len(first)]
        first = first[: int(equal.cumprod(0).sum())]
    return len(first)


def _gather(mine: list) -> list[list]:
    """The list of each rank, in the order of ranks. Collective."""
    if not dist.is_initialized():
        return [mine]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _totals(items: Sequence[Item], minibatch: int) -> dict[str, int]:
    counts = [item.num_response_tokens for item in items if item.minibatch == minibatch]
    return {"tokens": sum(counts), "sequences": sum(1 for count in counts if count)}


def _fill_up(rows: list[list[PackedRow]], like: Mapping[str, Tensor], share: Callable) -> None:
    """Adds empty rows to each list: as many as the rank with the most has. Collective."""
    counts = zip(*_gather([len(part) for part in rows]), strict=True)
    for part, needed in zip(rows, counts, strict=True):
        part += [_empty_row(like, share) for _ in range(max(needed) - len(part))]


def rows_of_all_sizes(
    config: Any, num_tokens: int, share: Callable | None = None
) -> list[PackedRow]:
    """What a run may meet: the largest row, full of sequences of num_tokens tokens, half of it,
    ..., and none. Compiled code is chosen by ranges of a row's length. config and share: lay_out.
    """
    share = share if config.num_sharing > 1 else None
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    whole = sequence(ids[:1], ids[1:])
    rows = []
    num_sequences = max(1, config.tokens_per_row // num_tokens)
    while num_sequences >= 1:
        groups = [i // config.num_sharing for i in range(num_sequences)]
        options = {"groups": groups, "share": share}
        rows += pack([whole] * num_sequences, num_sequences * num_tokens, **options)
        num_sequences //= 2
    return rows + pack([], config.tokens_per_row, num_rows=1, like=whole, share=share)


def pack_alike(
    sequences: Sequence[Mapping[str, Tensor]],
    capacity: int,
    *,
    num_sharing: int = 1,
    share: Callable | None = None,
) -> list[PackedRow]:
    """This rank's sequences in rows, the same number of rows on all ranks. Collective.

    For a sharded model that is not trained, such as a reward model. Each sequence stays on its
    rank; `row.source` says where in the list a row's sequences are. The others: lay_out."""
    groups = [i // num_sharing for i in range(len(sequences))]
    share = share if num_sharing > 1 else None
    rows = pack(sequences, capacity, groups=groups, share=share)
    _fill_up([rows], sequences[0] if sequences else {}, share)
    return rows


def sequence(
    prompt_ids: Tensor,
    response_ids: Tensor,
    *,
    learn: bool = True,
    **response_fields: Tensor | float,
) -> dict[str, Tensor]:
    """A sequence for pack(): "tokens", "response_mask" (all False unless `learn`) and the fields.

    prompt_ids [p], response_ids [r]; a field is a tensor [r] or one number for all response tokens,
    and becomes [p + r] fp32, 0 on the prompt. The mask follows from the lengths alone: pads and
    stop tokens in a response are tokens like others. ValueError for a response without a prompt.
    """
    num_prompt = len(prompt_ids)
    num_tokens = num_prompt + len(response_ids)
    if num_prompt == 0 and num_tokens > 0:
        raise ValueError("a response without a prompt: its first token is predicted by nothing")
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[num_prompt:] = learn
    made = {"tokens": torch.cat([prompt_ids, response_ids]), "response_mask": mask}
    for name, value in response_fields.items():
        made[name] = torch.zeros(num_tokens)
        made[name][num_prompt:] = value
    return made


def empty_sequence(*response_fields: str) -> dict[str, Tensor]:
    """A sequence without tokens: the names and types of empty rows on a rank without sequences."""
    none = torch.zeros(0, dtype=torch.int64)
    return sequence(none, none, **dict.fromkeys(response_fields, 0.0))


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity` tokens; a longer sequence is alone in one.

    The first bin with room takes the next-longest sequence. A tournament tree over the bins' free
    room finds it in O(log bins). Raises ValueError for a length or a capacity below 1.
    """
    if min([capacity, *lengths]) < 1:
        shortest = min(lengths, default=0)
        raise ValueError(f"a sequence of {shortest} tokens, rows of {capacity}: at least 1 each")
    num_leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * num_leaves)  # room[1] is the root; leaf of bin b is num_leaves + b
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = min(lengths[index], capacity)  # an over-long sequence needs an untouched bin
        node = 1
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= need else 2 * node + 1
        if node - num_leaves == len(bins):
            bins.append([])
        bins[node - num_leaves].append(index)
        room[node] -= need
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(members) for members in bins]


def pack(
    sequences: Sequence[Mapping[str, Tensor]],
    capacity: int,
    *,
    num_rows: int | None = None,
    like: Mapping[str, Tensor] | None = None,
    groups: Sequence[int] | None = None,
    share: Callable | None = None,
) -> list[PackedRow]:
    """Rows of at most `capacity` tokens that hold each sequence once; `num_rows` of them, if given.

    Each sequence maps "tokens" to [L] int64 and any other names to [L] tensors, the same names in
    all; num_response_tokens counts "response_mask", if it is among them. `like` is any sequence
    with these names and dtypes: it shapes the empty rows of a rank that has no sequence at all.
    share: prefix.share, and groups: a number for each sequence, the same for those that may share
    how they begin. They lie side by side in one row, or in as few as hold them.
    Raises ValueError for an empty sequence, names or lengths that differ, a response_mask with the
    first token of its sequence, and a num_rows that does not hold them.
    """
    shared = [0] * len(sequences)
    parts = [[i] for i in range(len(sequences))]
    if share:
        parts = []
        for group in _members(groups or range(len(sequences))):
            num_shared = _common_prefix([sequences[i] for i in group])
            own = [len(sequences[i]["tokens"]) - num_shared for i in group]
            for part in first_fit_decreasing(own, max(1, capacity - num_shared)):
                parts.append([group[k] for k in part])
                for k in part[1:]:
                    shared[group[k]] = num_shared
    own = [len(s["tokens"]) - num_shared for s, num_shared in zip(sequences, shared, strict=True)]
    bins = first_fit_decreasing([sum(own[i] for i in part) for part in parts], capacity)
    if num_rows is not None and num_rows < len(bins):
        fill = f"{len(sequences)} sequences fill {len(bins)} rows of {capacity}"
        raise ValueError(f"num_rows {num_rows}: too few, {fill}")
    rows = []
    for in_row in bins:
        members = list(chain.from_iterable(parts[k] for k in in_row))
        row = _join(sequences, members)
        rows.append(share(row, [shared[i] for i in members]) if share else row)
    like = like or (sequences[0] if sequences else {})
    while num_rows is not None and len(rows) < num_rows:
        rows.append(_empty_row(like, share))
    return rows


def _members(groups: Sequence[int]) -> list[list[int]]:
    """The indices of each number in `groups`."""
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return list(members.values())


def _join(sequences: Sequence[Mapping[str, Tensor]], members: Sequence[int]) -> PackedRow:
    names = sequences[members[0]].keys()
    for i in members:
        shapes = {name: list(x.shape) for name, x in sequences[i].items()}
        if shapes != {name: [len(sequences[i]["tokens"])] for name in names}:
            raise ValueError(f"sequence {i}: has {shapes}; {list(names)} must be [L] alike")
        # It would be scored from the state before it: that of another sequence in the row.
        if "response_mask" in names and sequences[i]["response_mask"][0]:
            rule = "has its first token: nothing predicts it"
            raise ValueError(f"sequence {i}: response_mask {rule}")
    joined = {name: torch.cat([sequences[i][name] for i in members]) for name in names}
    tokens = joined.pop("tokens")
    lengths = [len(sequences[i]["tokens"]) for i in members]
    return PackedRow(
        tokens=tokens,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_seqlen=max(lengths),
        num_response_tokens=int(joined["response_mask"].sum()) if "response_mask" in joined else 0,
        source=tuple(members),
        fields=joined,
    )


def _empty_row(like: Mapping[str, Tensor], share: Callable | None) -> PackedRow:
    zeros = torch.zeros(4, dtype=torch.int64)  # torch.compile makes code of its own for a size of 1
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    masked = {"response_mask": zeros.bool()}
    masked |= {name: zeros.to(x.dtype) for name, x in like.items() if name != "tokens"}
    row = PackedRow(zeros, torch.arange(4), cu_seqlens, 4, 0, (), masked)
    return share(row, ()) if share else row


def unpack(row: PackedRow, values: Tensor) -> list[Tensor]:
    """`values` [N] cut into the row's sequences: [L] views in the order of `row.source`; of a
    shared prefix they have none."""
    return list(values.split(row.cu_seqlens.diff().tolist())) if row.source else []


def packing_efficiency(rows: Sequence[PackedRow], capacity: int) -> float:
    """Tokens of sequences / (rows x capacity), in [0, 1]; for copies (the scripts use metrics)."""
    room = sum(max(capacity, len(row.tokens)) for row in rows)
    return sum(len(row.tokens) for row in rows if row.source) / room if rows else 0.0
