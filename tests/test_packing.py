"""Rows: full, balanced, the same number on all ranks, and every sequence in them as if it were
alone.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from rows import (
    ARCHITECTURES,
    VOCAB_SIZE,
    best_time_s,
    make_model,
    plain_logprobs,
    random_sequences,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

from batch import BatchConfig, assign
from exchange import exchange
from logprobs import token_logprobs
from losses import masked_sum, policy_loss
from packing import (
    empty_sequence,
    first_fit_decreasing,
    lay_out,
    pack,
    pack_alike,
    packing_efficiency,
    rows_of_all_sizes,
    sequence,
    unpack,
)


def realistic_lengths(num_sequences, *, median=600.0, spread=0.8, limit=2048, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(num_sequences).log_normal_(
        torch.tensor(median).log().item(), spread, generator=generator
    )
    return drawn.clamp(16, limit).int().tolist()


def ids(*numbers):
    return torch.tensor(numbers)


def alone(s):
    """The only row of one sequence."""
    return pack([s], len(s["tokens"]))[0]


def test_first_fit_decreasing_puts_the_longest_first_into_the_first_row_with_room():
    assert first_fit_decreasing([7, 5, 4, 3, 1], 10) == [[0, 3], [1, 2, 4]]


def test_rows_fit_exactly_and_a_sequence_over_the_capacity_is_alone():
    assert first_fit_decreasing([4, 6, 10], 10) == [[2], [0, 1]]
    assert first_fit_decreasing([1, 25, 9], 10) == [[1], [0, 2]]
    assert first_fit_decreasing([10], 10) == [[0]]
    assert first_fit_decreasing([], 10) == []


def test_each_of_1000_random_plans_holds_every_sequence_once_within_the_capacity():
    draw = random.Random(0)
    for _ in range(1000):
        capacity = draw.randint(1, 60)
        lengths = [draw.randint(1, draw.choice([5, 60, 90])) for _ in range(draw.randint(0, 40))]
        bins = first_fit_decreasing(lengths, capacity)
        assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
        for members in bins:
            assert members == sorted(members)
            assert sum(lengths[i] for i in members) <= capacity or len(members) == 1
        # Two rows that are half empty would have been one.
        loads = [sum(lengths[i] for i in members) for members in bins]
        assert sum(load <= capacity / 2 for load in loads) <= 1


def test_an_empty_sequence_and_rows_without_room_are_refused():
    with pytest.raises(ValueError, match="a sequence of 0 tokens"):
        first_fit_decreasing([3, 0, 2], 10)
    with pytest.raises(ValueError, match="rows of 0"):
        first_fit_decreasing([3], 0)


@pytest.mark.parametrize("num_sequences", [512, 4096])
def test_rows_are_98_percent_full_on_one_rank(num_sequences):
    lengths = realistic_lengths(num_sequences)
    assert sum(lengths) / (4096 * len(first_fit_decreasing(lengths, 4096))) >= 0.98


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_90_percent_full_on_8_ranks_with_equal_counts(seed):
    lengths = realistic_lengths(512, seed=seed)
    destination = assign(lengths, [0] * 512, 8, 4096)
    shares = [
        [n for n, rank in zip(lengths, destination, strict=True) if rank == r] for r in range(8)
    ]
    num_rows = max(len(first_fit_decreasing(share, 4096)) for share in shares)
    assert sum(lengths) / (8 * num_rows * 4096) >= 0.90


def test_a_plan_for_4096_sequences_takes_at_most_50_ms():
    lengths = realistic_lengths(4096)
    assert best_time_s(lambda: first_fit_decreasing(lengths, 4096)) < 0.05
    assert best_time_s(lambda: assign(lengths, [0] * 4096, 8, 4096)) < 0.05


def test_a_row_is_its_sequences_joined_with_positions_that_restart():
    first = {
        "tokens": ids(7, 8, 9),
        "response_mask": torch.tensor([False, True, True]),
        "advantages": torch.ones(3),
    }
    second = {
        "tokens": ids(4, 5),
        "response_mask": torch.tensor([False, True]),
        "advantages": torch.zeros(2),
    }
    (row,) = pack([first, second], 5)
    assert row.tokens.tolist() == [7, 8, 9, 4, 5]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert row.cu_seqlens.tolist() == [0, 3, 5]
    assert (row.tokens.dtype, row.position_ids.dtype, row.cu_seqlens.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )
    assert (row.max_seqlen, row.num_response_tokens, row.source) == (3, 3, (0, 1))
    assert row.fields["advantages"].tolist() == [1, 1, 1, 0, 0]
    assert row.fields["response_mask"].dtype == torch.bool


def test_unpack_gives_back_what_was_packed_and_inputs_stay_as_they_were():
    sequences = random_sequences([(1 + i % 5, 1 + i * i % 17) for i in range(40)])
    before = [{name: x.clone() for name, x in s.items()} for s in sequences]
    rows = pack(sequences, 30)
    found = {}
    for row in rows:
        for name, values in {"tokens": row.tokens, **row.fields}.items():
            for source, x in zip(row.source, unpack(row, values), strict=True):
                found[source, name] = x
    assert len(found) == 40 * 3
    for (source, name), x in found.items():
        assert x.dtype == before[source][name].dtype and x.equal(before[source][name])
        assert sequences[source][name].equal(before[source][name])


def test_a_rank_with_fewer_sequences_gets_empty_rows_of_masked_tokens():
    sequences = random_sequences([(2, 3)])
    for rows in (pack(sequences, 10, num_rows=3), pack([], 10, num_rows=2, like=sequences[0])):
        row = rows[-1]
        # torch.compile would make code of its own for one token.
        assert len(row.tokens) == 4 and row.num_response_tokens == 0 and row.source == ()
        assert (
            row.fields.keys() == {"response_mask", "advantages"}
            and not row.fields["response_mask"].any()
        )
        assert {name: x.dtype for name, x in row.fields.items()} == {
            name: x.dtype for name, x in sequences[0].items() if name != "tokens"
        }
        assert unpack(row, row.tokens) == []
    assert [len(row.source) for row in pack(sequences, 10, num_rows=3)] == [1, 0, 0]
    assert pack([], 10) == []
    with pytest.raises(ValueError, match="num_rows 1: too few, 2 sequences fill 2 rows of 5"):
        pack(sequences * 2, 5, num_rows=1)


def test_packing_efficiency_is_tokens_over_room():
    rows = pack(random_sequences([(2, 4), (1, 1)]), 6, num_rows=4)
    assert packing_efficiency(rows, 6) == 8 / 24
    assert (
        packing_efficiency(pack(random_sequences([(2, 10)]), 6), 6) == 1.0
    )  # over-long: its own, larger room
    assert packing_efficiency([], 6) == 0.0


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": ids(2), "a": ids(2), "b": ids(2)},
        {"tokens": ids(2)},
        {"tokens": ids(2, 3), "a": ids(2)},
        {"tokens": torch.tensor([[2, 3]]), "a": ids(2)},  # a batch of one
    ],
)
def test_a_sequence_with_other_fields_or_lengths_than_its_neighbours_is_refused(other):
    with pytest.raises(
        ValueError, match=r"^sequence 1: has .*; \['tokens', 'a'\] must be \[L\] alike"
    ):
        pack([{"tokens": ids(1), "a": ids(1)}, other], 4)


@pytest.mark.parametrize("first", [0, 1])
def test_a_mask_with_the_first_token_of_a_sequence_is_refused_wherever_it_lies(first):
    """As in training on everything, labels = input_ids: the first token would be scored from
    another sequence's last state (a loss of 5.24 where it is 5.19, and a gradient off by 44 %).
    """
    made = [sequence(ids(4), ids(5, 6)), sequence(ids(7), ids(8))]
    made[first]["response_mask"] = torch.ones_like(made[first]["response_mask"])
    with pytest.raises(ValueError, match=f"^sequence {first}: response_mask has its first token"):
        pack(made, 16)
    made[first]["response_mask"] = made[first]["response_mask"].long()  # as a host's numbers
    with pytest.raises(ValueError, match=f"^sequence {first}: response_mask has its first token"):
        pack(made, 2)


def test_the_longest_sequence_of_a_row_is_known_wherever_it_lies():
    """The GPU's kernel takes max_seqlen as the longest length; a CPU never reads it."""
    (row,) = pack([sequence(ids(1), ids(2)), sequence(ids(3, 4), ids(5, 6, 7))], 8)
    assert row.cu_seqlens.tolist() == [0, 2, 7] and row.max_seqlen == 5
    (row,) = pack([sequence(ids(1), ids(2)) for _ in range(3)] + [sequence(ids(1), ids(2, 3))], 9)
    assert row.max_seqlen == 3


def test_the_response_mask_follows_from_lengths_and_never_from_token_values():
    """verl#3805, trl#4970: no end of sequence in a truncated response; a pad that is the end of
    sequence.
    """
    pad = eos = 2
    truncated = sequence(ids(5, eos, 6), ids(9, 9, 9))
    assert truncated["response_mask"].tolist() == [False] * 3 + [True] * 3
    ended = sequence(ids(5, 6), ids(7, 8, eos))
    assert ended["response_mask"].tolist() == [False] * 2 + [True] * 3
    odd = sequence(ids(5, 6), ids(7, eos, 8, pad))
    assert odd["response_mask"].tolist() == [False] * 2 + [True] * 4
    (row,) = pack([truncated, ended], 16)
    assert row.num_response_tokens == 6  # and no pad behind them


def test_fields_are_0_on_the_prompt_and_one_number_goes_to_all_response_tokens():
    made = sequence(
        ids(5, 6), ids(7, 8, 9), advantages=0.5, rollout_logprobs=torch.tensor([-1.0, -2.0, -3.0])
    )
    assert made["tokens"].tolist() == [5, 6, 7, 8, 9]
    assert made["advantages"].tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert made["rollout_logprobs"].tolist() == [0, 0, -1, -2, -3]
    assert made["advantages"].dtype == made["rollout_logprobs"].dtype == torch.float32


def test_a_sequence_that_is_not_learned_from_keeps_its_tokens_and_has_no_response_token():
    made = sequence(ids(5, 6), ids(7, 8), learn=False, advantages=1.0)
    assert made["tokens"].tolist() == [5, 6, 7, 8] and not made["response_mask"].any()


def test_a_response_without_a_prompt_is_refused():
    """Its first token would be scored from the last state of the sequence before it in the row."""
    with pytest.raises(ValueError, match="without a prompt"):
        sequence(ids(), ids(7, 8))


def test_sampled_ids_reach_the_row_as_they_are_also_where_text_would_be_split_otherwise():
    """ms-swift#10012: ids are the interface between sampler and trainer, never text."""
    made = sequence(
        ids(5), ids(10, 11), rollout_logprobs=torch.tensor([-1.0, -2.0])
    )  # "a" "b", though "ab" is a token
    assert alone(made).tokens.tolist() == [5, 10, 11]
    with pytest.raises(RuntimeError):  # one log-probability per id, never padded
        sequence(ids(5), ids(10, 11), rollout_logprobs=torch.tensor([-1.0, -2.0, -3.0]))


def logprobs_and_gradients(model, row, index):
    """Log-probabilities [L] of the row's sequence `index` of the packed list, and gradients of
    their weighted sum.
    """
    model.zero_grad()
    logprobs, entropy = token_logprobs(model, row)
    at = row.source.index(index)
    mine, spread = unpack(row, logprobs)[at], unpack(row, entropy)[at]
    (mine * unpack(row, row.fields["advantages"])[at] + 0.1 * spread).sum().backward()
    return mine.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


LENGTHS = [(3, 9), (5, 1), (2, 20), (7, 7)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_and_gradients_of_a_sequence_in_a_row_equal_those_alone(architecture):
    model = make_model(architecture)
    sequences = random_sequences(LENGTHS)
    (row,) = pack(sequences, 100)
    for i, s in enumerate(sequences):
        packed, gradients = logprobs_and_gradients(model, row, i)
        by_itself, own_gradients = logprobs_and_gradients(model, replace(alone(s), source=(i,)), i)
        plain, _ = plain_logprobs(model, s["tokens"])
        # fp32 sums in another order: a few ulps of numbers around 10.
        torch.testing.assert_close(packed, by_itself, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            packed, torch.where(s["response_mask"], plain, 0.0), rtol=1e-5, atol=1e-5
        )
        for name, gradient in gradients.items():
            scale = own_gradients[name].abs().max().item()
            torch.testing.assert_close(
                gradient, own_gradients[name], rtol=1e-5, atol=1e-5 * scale, msg=name
            )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_and_gradients_of_a_sequence_do_not_change_with_its_neighbours(architecture):
    model = make_model(architecture)
    sequences = random_sequences(LENGTHS)
    others = random_sequences([(4, 4), (5, 1), (30, 2)], seed=1)
    before = logprobs_and_gradients(model, pack(sequences, 100)[0], 1)
    after = logprobs_and_gradients(model, pack([others[0], sequences[1], *others[2:]], 100)[0], 1)
    last = logprobs_and_gradients(model, pack([others[2], sequences[1]], 100)[0], 1)
    for other in (after, last):
        torch.testing.assert_close(other[0], before[0], rtol=1e-5, atol=1e-5)
        for name, gradient in before[1].items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(
                other[1][name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=name
            )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_the_boundaries_the_same_comparison_shows_a_large_difference(architecture):
    model = make_model(architecture)
    sequences = random_sequences(LENGTHS)
    (row,) = pack(sequences, 100)
    num_tokens = len(row.tokens)
    leaky = replace(
        row, cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32), max_seqlen=num_tokens
    )
    isolated, leaked = token_logprobs(model, row)[0], token_logprobs(model, leaky)[0]
    assert (isolated - leaked).abs().max() > 0.1


def accuracy_on_second_copies(boundaries: bool) -> float:
    """Accuracy on the second of two copies of random tokens in one row, after 200 steps of training
    on such rows.
    """
    model = make_model(vocab_size=16, initializer_range=0.05, max_position_embeddings=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    correct = []
    for step in range(200):
        rows, targets = [], []
        for _ in range(8):
            tokens = torch.randint(16, (8,), generator=generator)
            rows += [tokens, tokens]
            targets.append(tokens)
        tokens, num_rows = torch.cat(rows), 8
        ends = range(0, 128 + 1, 8 if boundaries else 16)
        cu_seqlens = torch.tensor(list(ends), dtype=torch.int32)
        out = model(
            tokens[None],
            position_ids=torch.arange(8).repeat(16)[None],
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=16,
            max_length_k=16,
        )
        logits = out.logits[0].view(num_rows, 2, 8, 16)[:, 1, :-1]
        expected = torch.stack(targets)[:, 1:]
        F.cross_entropy(logits.flatten(0, 1), expected.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 180:
            correct.append((logits.argmax(-1) == expected).float().mean().item())
    return sum(correct) / len(correct)


def test_a_model_cannot_learn_to_copy_from_its_neighbour_in_the_row():
    """alex-hh/profam#495: with position ids alone accuracy on a repeated random document rises from
    5 % to 95 %.
    """
    assert accuracy_on_second_copies(boundaries=True) < 2 / 16  # chance is 1 / 16
    assert accuracy_on_second_copies(boundaries=False) > 5 / 16


def identified(rank, lengths):
    """Sequences whose advantage and prompt both say which one they are."""
    made = []
    for i, n in enumerate(lengths):
        number = 10 * rank + i
        made.append(
            sequence(
                torch.full((n - n // 2,), number),
                torch.full((n // 2,), number),
                advantages=float(number),
            )
        )
    return made


CASES = {
    "more tokens on rank 0": ([95] * 5, [20] * 5),
    "fewer sequences than rows": ([95] * 5, [20]),
    "nothing on rank 1": ([60] * 3, []),
    "one sequence in all": ([60], []),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_get_equally_many_rows_and_every_sequence_keeps_its_fields(case):
    lengths = CASES[case]

    def layout():
        mine = identified(dist.get_rank(), lengths[dist.get_rank()])
        config = BatchConfig(prompts_per_step=2, num_minibatches=2, tokens_per_row=100)
        minibatches = [i % 2 for i in range(len(mine))]
        like = sequence(ids(), ids(), advantages=0.0)
        return lay_out(mine, minibatches, config, exchange=exchange, like=like)

    results = run_ranks(2, layout)
    (rows0, totals0), (rows1, totals1) = results
    assert totals0 == totals1
    assert [len(rows) for rows in rows0] == [len(rows) for rows in rows1]
    for m in range(2):
        expected = {
            10 * rank + i: n for rank in (0, 1) for i, n in enumerate(lengths[rank]) if i % 2 == m
        }
        found = {}
        for row in rows0[m] + rows1[m]:
            assert len(row.tokens) <= 100
            for tokens, advantages in zip(
                unpack(row, row.tokens), unpack(row, row.fields["advantages"]), strict=True
            ):
                number = tokens[0].item()
                assert number not in found
                found[number] = len(tokens)
                assert (tokens == number).all() and (
                    advantages[-(len(tokens) // 2) :] == number
                ).all()
        assert found == expected
        assert totals0[m] == {
            "tokens": sum(n // 2 for n in expected.values()),
            "sequences": len(expected),
        }


def test_rows_of_what_is_only_read_are_as_many_on_all_ranks_and_nothing_travels():
    def layout():
        mine = [{"tokens": torch.full((n,), n)} for n in ([9, 8, 2], [], [10])[dist.get_rank()]]
        return pack_alike(mine, 10)

    first, second, third = run_ranks(3, layout)
    assert [row.tokens.tolist() for row in first] == [[9] * 9, [8] * 8 + [2] * 2]
    assert [row.source for row in first] == [(0,), (1, 2)]
    assert [row.source for row in second] == [(), ()]
    assert [row.source for row in third] == [(0,), ()]
    assert [row.tokens.tolist() for row in pack_alike([{"tokens": ids(4, 5)}], 10)] == [[4, 5]]


def test_totals_count_only_what_is_learned_from():
    sequences = [sequence(ids(1), ids(2, 3)), sequence(ids(1), ids(2, 3, 4), learn=False)]
    _, totals = lay_out(sequences, [0, 0], BatchConfig(), exchange=exchange, like=sequences[0])
    assert totals == [{"tokens": 2, "sequences": 1}]


def gradients_of_a_step(all_lengths):
    """Full gradients of a token-mean policy loss over two ranks' sequences, with FSDP2, on any
    number of ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    for part in [*model.model.layers, model]:
        fully_shard(part)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    made = [random_sequences(lengths, seed=i) for i, lengths in enumerate(all_lengths)]
    mine = made[rank] if world == 2 else made[0] + made[1]
    config = BatchConfig(tokens_per_row=100)
    rows, totals = lay_out(
        mine, [0] * len(mine), config, exchange=exchange, like=random_sequences([(1, 1)])[0]
    )
    assert world == 1 or len(rows[0]) >= 1
    for row in rows[0]:
        logprobs, entropy = token_logprobs(model, row)
        fields = row.fields
        loss, stats = policy_loss(
            logprobs,
            logprobs.detach() + 0.1,
            fields["advantages"],
            fields["response_mask"],
            normalizer=max(1, totals[0]["tokens"]),
        )
        loss = loss - 0.1 * masked_sum(entropy, fields["response_mask"]) / max(
            1, totals[0]["tokens"]
        )
        loss.backward()
        assert all(torch.isfinite(torch.as_tensor(x)).all() for x in [loss, *stats.values()])
        if not row.num_response_tokens:
            assert loss == 0 and all(x == 0 for x in stats.values())
    return len(rows[0]), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


UNEVEN = {
    "5 rows against 1": ([(45, 50)] * 5, [(10, 10)] * 5),
    "fewer sequences than rows": ([(45, 50)] * 5, [(10, 10)]),
    "nothing on rank 1": ([(5, 10)], []),
    "10 and 90 tokens": ([(5, 10)], [(5, 90)]),
    "no response token at all": ([(5, 0)], [(5, 0)]),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_a_step_ends_and_its_gradient_is_that_of_one_rank(case):
    """verl#6176: ranks with unequal row counts hang; torchtune#2172: the mean over ranks after a
    global normaliser.
    """
    one = run_ranks(1, gradients_of_a_step, UNEVEN[case])[0][1]
    for num_rows, two in run_ranks(2, gradients_of_a_step, UNEVEN[case]):
        assert num_rows >= 1
        for name, gradient in one.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(two[name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=name)
            assert (scale == 0) == (case == "no response token at all")


def test_an_empty_sequence_has_the_names_and_types_of_a_full_one():
    full = sequence(ids(1), ids(2, 3), advantages=0.5, rollout_logprobs=torch.tensor([-1.0, -2.0]))
    empty = empty_sequence("advantages", "rollout_logprobs")
    assert {name: x.dtype for name, x in empty.items()} == {
        name: x.dtype for name, x in full.items()
    }
    assert all(len(x) == 0 for x in empty.values())


def test_a_row_moves_to_a_device_as_a_whole():
    (row,) = pack(random_sequences([(2, 3)]), 8)
    moved = row.to("meta")
    assert {
        x.device.type
        for x in (moved.tokens, moved.position_ids, moved.cu_seqlens, *moved.fields.values())
    } == {"meta"}
    assert (moved.max_seqlen, moved.num_response_tokens, moved.source) == (5, 3, (0,))
    assert row.tokens.max() < VOCAB_SIZE


def test_rows_of_all_sizes_go_from_a_full_one_to_an_empty_one():
    *rows, empty = rows_of_all_sizes(BatchConfig(tokens_per_row=45), 8)
    assert [row.cu_seqlens.tolist() for row in rows] == [[0, 8, 16, 24, 32, 40], [0, 8, 16], [0, 8]]
    assert [row.num_response_tokens for row in rows] == [35, 14, 7]
    assert len(empty.tokens) == 4 and empty.num_response_tokens == 0 and not empty.source
    assert [len(row.tokens) for row in rows_of_all_sizes(BatchConfig(tokens_per_row=30), 31)] == [
        31,
        4,
    ]


@pytest.mark.parametrize("most", [0, 1])
def test_ranks_run_as_many_rows_as_the_one_with_the_most_whichever_it_is(most):
    def layout():
        num_sequences = 3 if dist.get_rank() == most else 1
        return len(pack_alike([{"tokens": ids(4, 5, 6)}] * num_sequences, 3))

    assert run_ranks(2, layout) == [3, 3]


def test_an_empty_row_has_no_response_token_whether_or_not_its_names_are_known():
    for like in (None, sequence(ids(1), ids(2), advantages=0.0)):
        [row] = pack([], 8, num_rows=1, like=like)
        assert row.fields["response_mask"].tolist() == [False] * 4 and row.num_response_tokens == 0
