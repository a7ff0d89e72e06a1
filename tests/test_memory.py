"""An update that runs out of memory is the same one in smaller rows, or a line with the flags."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from jobs import settings, train, weights
from ranks import run_ranks
from rows import make_model, random_sequences
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import grpo
import logprobs
import memory
import ppo
from logprobs import token_logprobs
from packing import pack, unpack

ARGS = SimpleNamespace(batch=SimpleNamespace(tokens_per_row=60))
LENGTHS = [(3, 9), (2, 5), (4, 20), (1, 3), (6, 8), (2, 9)]


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_a_row_is_cut_at_the_end_of_the_sequence_nearest_to_its_middle():
    sequences = random_sequences(LENGTHS)
    (row,) = pack(sequences, 100)
    first, second = memory.halves(row)
    assert [len(first.tokens), len(second.tokens)] == [43, 29]
    assert first.source + second.source == row.source
    assert (first.max_seqlen, second.max_seqlen) == (24, 14)
    assert [part.num_response_tokens for part in (first, second)] == [34, 20]
    for part, members in ((first, range(3)), (second, range(3, 6))):
        assert part.cu_seqlens.dtype == torch.int32
        for name in ("tokens", *part.fields):
            values = part.tokens if name == "tokens" else part.fields[name]
            for i, found in zip(members, unpack(part, values), strict=True):
                assert found.equal(sequences[i][name])
        assert part.position_ids.equal(torch.cat([torch.arange(sum(LENGTHS[i])) for i in members]))
    (alone,) = pack(sequences[:1], 100)
    assert memory.halves(alone) == [alone]


def test_a_pair_stays_in_one_row():
    """Two sequences of one source: the cut is behind them, though their border is the middle."""
    (row,) = pack(random_sequences([(2, 8), (2, 7), (1, 2)]), 100)
    row = replace(row, source=(0, 0, 1))
    assert [part.source for part in memory.halves(row)] == [(0, 0), (1,)]
    assert [len(part.tokens) for part in memory.halves(row)] == [19, 3]
    alone = replace(row, source=(0, 0, 0))
    assert memory.halves(alone) == [alone]


PLACES = ["forward", "backward", "loss"]


def gradients_of(place, limit, reduce_every_row=False):
    """A loss's gradients from rows of 60 tokens; where one is longer than `limit`, memory runs out
    in a layer's forward or backward, or between the two."""
    model = make_model(seed=0)
    for part in [*model.model.layers, model]:
        fully_shard(part)
    model.set_gradient_divide_factor(1.0)
    state = SimpleNamespace(num_tokens=0)

    def watched(module, arguments, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if state.num_tokens > limit and place == "forward":
            out_of_memory()
        if state.num_tokens > limit and place == "backward":
            hidden.register_hook(lambda _: out_of_memory())

    model.model.layers[0].register_forward_hook(watched)

    def gradients(args, model, rows, totals, meter):
        for i, row in enumerate(rows):
            state.num_tokens = len(row.tokens)
            model.set_requires_gradient_sync(i == len(rows) - 1 or reduce_every_row)
            loss = -token_logprobs(model, row)[0].sum() / totals["tokens"]
            if state.num_tokens > limit and place == "loss":
                out_of_memory()
            loss.backward()
        return len(rows)

    found = []
    for _ in range(2):  # a second minibatch, as after an optimizer step
        # Of 27, 45 and 27 tokens: gradients are there when the second row does not fit.
        rows = pack(random_sequences(LENGTHS), 45)[::-1]
        rows += rows[:1]
        num_rows = memory.retried(gradients, ARGS, model, rows, {"tokens": 54}, None)
        assert num_rows == len(rows)
        grads = [p.grad for p in model.parameters()]
        found.append([g.full_tensor() if isinstance(g, DTensor) else g for g in grads])
        model.zero_grad(set_to_none=True)
    return num_rows, found


def test_the_gradients_are_those_of_the_long_rows(capfd):
    cases = list(itertools.product(PLACES, (False, True)))

    def job():
        short = [gradients_of(place, 40, every) for place, every in cases]
        return gradients_of("loss", 100), short

    (((num_long, long), all_short),) = run_ranks(1, job)
    for case, (num_short, short) in zip(cases, all_short, strict=True):
        assert num_short > num_long > 1
        for expected, found in zip(long, short, strict=True):
            for x, y in zip(expected, found, strict=True):
                torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-6, msg=str(case))
    said = capfd.readouterr().out.splitlines()
    assert len(said) == 2 * len(cases)
    assert all(line.endswith(": once more with 31; see --tokens-per-row 60") for line in said)


def test_rows_that_cannot_be_cut_and_several_ranks_end_in_a_line_with_the_flags():
    turns = "halve it, or give --model.activation-checkpointing or --model.reduce-every-row"

    def job(rows, num_calls):
        calls = []

        def gradients(*_):
            calls.append(1)
            out_of_memory()

        model = torch.nn.Linear(1, 1)
        what = "--tokens-per-row 60: out of memory in the update, with a row of"
        with pytest.raises(RuntimeError, match=f"^{what} .*; {turns}$"):
            memory.retried(gradients, ARGS, model, rows, {}, None)
        assert len(calls) == num_calls

    job(pack(random_sequences([(3, 9)]), 100), 1)
    job(pack(random_sequences(LENGTHS), 100), 2)
    run_ranks(2, job, pack(random_sequences(LENGTHS), 100), 1)


@pytest.mark.parametrize("entry", [grpo, pytest.param(ppo, marks=pytest.mark.slow)])
def test_a_run_with_too_long_rows_goes_on_as_with_shorter_ones(tiny, files, tmp_path, capfd, entry):
    name = "token_logprobs" if entry is grpo else "token_values"
    real = getattr(logprobs, name)

    def limited(model, row, **options):
        if torch.is_grad_enabled() and len(row.tokens) > 35:
            out_of_memory()
        return real(model, row, **options)

    args = settings(tiny, files, tmp_path, entry, batch=dict(num_epochs=2))
    run = train(args, **{f"logprobs.{name}": limited})
    assert "warning: out of memory in the update with a row of" in capfd.readouterr().out
    plain = train(settings(tiny, files, tmp_path / "plain", entry, batch=dict(num_epochs=2)))
    for key, x in weights(plain).items():
        if not key.endswith("k_proj.bias"):  # its gradient is 0 but for rounding, which Adam scales
            torch.testing.assert_close(weights(run)[key], x, rtol=1e-3, atol=1e-4)
