# SPDX-FileCopyrightText: 2026 handful contributors (memory.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""An update that runs out of GPU memory: taken once more in smaller rows, or told what to turn.

The problem. Activations grow with the longest row, and responses grow while a policy learns. A run
that has fitted for hours meets a row longer than any before and ends with "CUDA out of memory",
which names no flag.

How it works. Until the optimizer's step a minibatch has changed nothing but gradients. On one rank
these are dropped, each row is cut in two at the end of the sequence nearest to its middle, and the
minibatch is taken again:
    a row of 5 sequences   |900|700|1200|800|400|    4000 tokens: out of memory
    two rows               |900|700| 1600, |1200|800|400| 2400 tokens
Loss terms are sums over rows, divided by totals of the minibatch: the gradient is the same up to
rounding. Later epochs keep the shorter rows. A second failure, and rows of one sequence, end the
run in a line with the flags.

FSDP2 has notes of an unfinished pass: which layers are gathered, that its last callback is queued.
That callback is called here; it is what a backward ends with, and it clears them.

What we give up: several ranks. A rank that fails has left a collective that the others wait in, and
nobody can tell which: they would add parts of one layer to another's. The run ends there, with the
line; the state before the step is saved, as weights are as they were. Statistics of rows that were
done before the failure count twice.

Copied, with packing.py:
    import torch
    from memory import retried
    from packing import pack
    def gradients(args, model, rows, totals, meter):
        for row in rows:
            model(row.tokens[:, None].float()).sum().backward()
    sequence = {"tokens": torch.arange(9), "response_mask": torch.arange(9) > 4}
    rows = pack([sequence] * 4, 64)
    retried(gradients, None, torch.nn.Linear(1, 1), rows, totals={}, meter=None)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


def retried(
    gradients: Callable, args: Any, model: nn.Module, rows: list, totals: dict, meter: Any
) -> Any:
    """gradients(args, model, rows, totals, meter), which adds a minibatch's gradients to the model;
    if memory runs out, once more with the rows cut in two, which replace those in `rows`.

    args.batch.tokens_per_row is for the message. Raises RuntimeError, with the flags to turn.
    """
    try:
        return gradients(args, model, rows, totals, meter)
    except torch.OutOfMemoryError as error:
        shorter = [part for row in rows for part in halves(row)]
        if _num_ranks() > 1 or len(shorter) == len(rows):
            raise RuntimeError(_advice(args, rows)) from error
    longest = max(len(row.tokens) for row in rows)
    rows[:] = shorter
    now = max(len(row.tokens) for row in rows)
    what = f"out of memory in the update with a row of {longest} tokens: once more with {now}"
    print(f"warning: {what}; see --tokens-per-row {args.batch.tokens_per_row}", flush=True)
    with advice(args, rows):  # only here has the failed pass let go of its activations
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # blocks of the long row's sizes fit nothing else
        _drop_gradients(model)
        return gradients(args, model, rows, totals, meter)


@contextlib.contextmanager
def advice(args: Any, rows: Sequence) -> Iterator[None]:
    """Inside, running out of memory is a RuntimeError with the flags to turn; rows: what runs."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(_advice(args, rows)) from error


def _advice(args: Any, rows: Sequence) -> str:
    longest = max(len(row.tokens) for row in rows)
    what = f"out of memory in the update, with a row of {longest} tokens"
    turns = "halve it, or give --model.activation-checkpointing or --model.reduce-every-row"
    return f"--tokens-per-row {args.batch.tokens_per_row}: {what}; {turns}"


def halves(row: Any) -> list:
    """The packed row as two, cut at the end of the sequence nearest to its middle; a row of fewer
    than two sequences as it is. row: packing.PackedRow.
    """
    num_sequences = len(row.source)
    if num_sequences < 2:
        return [row]
    ends = [i for i in range(1, num_sequences) if row.source[i] != row.source[i - 1]]
    if not ends:
        return [row]  # a pair stays whole
    whole = row.plain()
    bounds = whole.cu_seqlens.tolist()
    cut = min(ends, key=lambda i: abs(bounds[i] - bounds[-1] / 2))
    first = _part(whole, bounds, 0, cut)
    second = _part(whole, bounds, cut, num_sequences)
    if row.prefix:
        first = row.prefix.share_part(first, 0, cut)
        second = row.prefix.share_part(second, cut, num_sequences)
    return [first, second]


def _part(row: Any, bounds: list[int], first: int, end: int) -> Any:
    """Its sequences first .. end - 1."""
    tokens = slice(bounds[first], bounds[end])
    return replace(
        row,
        tokens=row.tokens[tokens],
        position_ids=row.position_ids[tokens],
        cu_seqlens=row.cu_seqlens[first : end + 1] - bounds[first],
        max_seqlen=max(bounds[i + 1] - bounds[i] for i in range(first, end)),
        num_response_tokens=int(row.fields["response_mask"][tokens].sum()),
        source=row.source[first:end],
        fields={name: x[tokens] for name, x in row.fields.items()},
    )


def _drop_gradients(model: nn.Module) -> None:
    """As after zero_grad(), with FSDP2's notes of an unfinished pass cleared."""
    if isinstance(model, FSDPModule):
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:  # as if its backward were to come: what it has added up goes too
                group._training_state = type(group._training_state).IDLE
        root = model._get_fsdp_state()
        root._state_ctx.iter_forward_root = None
        model.set_requires_gradient_sync(True)  # gradients go where zero_grad() finds them
        root._root_post_backward_final_callback()
    model.zero_grad(set_to_none=True)


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
