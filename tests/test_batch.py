"""A batch: sizes over all ranks, minibatches wherever samples lie, and ranks that
take equally long.
"""

import random

import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_packing import realistic_lengths

from batch import BatchConfig, assign, balance, sequence_cost
from packing import first_fit_decreasing


def test_the_load_of_8_ranks_differs_by_less_than_2_percent():
    lengths = realistic_lengths(512, spread=1.0, limit=8000)
    assert max(lengths) == 8000
    destination = assign(lengths, [0] * 512, 8, 4096)
    shares = [
        [n for n, rank in zip(lengths, destination, strict=True) if rank == r] for r in range(8)
    ]
    costs = [sum(sequence_cost(n, 4096) for n in share) for share in shares]
    assert max(costs) / min(costs) < 1.02
    for share in shares:
        for members in first_fit_decreasing(share, 4096):
            assert sum(share[i] for i in members) <= 4096 or len(members) == 1


def test_load_counts_attention_and_not_tokens_alone():
    """THUDM/slime#2017: one long sequence against many short ones with as many tokens."""
    lengths = [8000] + [100] * 80
    destination = assign(lengths, [0] * 81, 2, 16384)
    costs = [
        sum(sequence_cost(n, 16384) for n, r in zip(lengths, destination, strict=True) if r == rank)
        for rank in (0, 1)
    ]
    assert max(costs) / min(costs) < 1.3
    assert sequence_cost(8000, 4000) == 8000 + 8000


def test_balance_deals_the_largest_to_the_cheapest_part_and_breaks_ties_by_index():
    assert balance([3.0, 1.0, 2.0, 2.0], 2) == [[0, 1], [2, 3]]
    assert balance([1.0, 1.0, 1.0], 2) == [[0, 2], [1]]
    assert balance([1.0], 3) == [[0], [], []]
    assert balance([], 2) == [[], []]


def test_ranks_are_balanced_within_every_minibatch():
    lengths = realistic_lengths(512)
    minibatches = [i // 128 for i in range(512)]
    destination = assign(lengths, minibatches, 4, 4096)
    for m in range(4):
        costs = [0.0] * 4
        for n, where, minibatch in zip(lengths, destination, minibatches, strict=True):
            costs[where] += sequence_cost(n, 4096) * (minibatch == m)
        assert max(costs) / min(costs) < 1.02


def test_sizes_are_global_and_bad_ones_are_refused_with_the_nearest_good_one():
    assert BatchConfig(prompts_per_step=6, group_size=4, num_minibatches=3).num_samples == 24
    for field in (
        "prompts_per_step",
        "group_size",
        "num_minibatches",
        "num_epochs",
        "tokens_per_row",
    ):
        with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} 0"):
            BatchConfig(**{field: 0})
    for prompts, minibatches, nearest in ((65, 64, 64), (7, 2, 8), (3, 8, 8), (10, 4, 8)):
        with pytest.raises(
            ValueError,
            match=f"divisible by --num-minibatches {minibatches}; try --prompts-per-step {nearest}",
        ):
            BatchConfig(prompts_per_step=prompts, num_minibatches=minibatches)
        BatchConfig(prompts_per_step=nearest, num_minibatches=minibatches)


def test_the_batch_arithmetic_is_said_in_a_line():
    config = BatchConfig(
        prompts_per_step=6, group_size=4, num_minibatches=3, num_epochs=2, tokens_per_row=100
    )
    assert config.describe(7, 9) == (
        "6 prompts x 4 = 24 samples of up to 7 + 9 tokens; "
        "2 epochs x 3 minibatches of 8, in rows of 100 tokens"
    )


def test_minibatches_are_equal_slices_of_the_global_order_of_prompts_wherever_they_were_sampled():
    config = BatchConfig(prompts_per_step=6, num_minibatches=3)
    assert config.minibatches([0, 1, 2, 3, 4, 5]) == [0, 0, 1, 1, 2, 2]
    shares = [[5, 0, 2], [1, 4, 3]]
    assert run_ranks(2, lambda: config.minibatches(shares[dist.get_rank()])) == [
        [2, 0, 1],
        [0, 2, 1],
    ]
    # Dynamic sampling came back with fewer prompts, and from later rounds: their order counts.
    shares = [[9, 0], []]
    assert run_ranks(2, lambda: config.minibatches(shares[dist.get_rank()])) == [[1, 0], []]


def test_each_epoch_takes_every_minibatch_with_tokens_once_in_an_order_that_follows_from_the_seed():
    config = BatchConfig(prompts_per_step=64, num_minibatches=8, num_epochs=3)
    totals = [{"tokens": 0 if m == 5 else 10} for m in range(8)]
    order = config.minibatch_order(totals, seed=(0, 7))
    epochs = [order[:7], order[7:14], order[14:]]
    assert epochs[0] == [0, 1, 2, 3, 4, 6, 7] and all(
        sorted(epoch) == epochs[0] for epoch in epochs
    )
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert (
        order
        == config.minibatch_order(totals, seed=(0, 7))
        != config.minibatch_order(totals, seed=(0, 8))
    )


def test_minibatches_are_slices_of_the_prompts_of_all_ranks():
    def places():
        config = BatchConfig(prompts_per_step=4, num_minibatches=2)
        return config.minibatches([[3, 2], [0, 1]][dist.get_rank()])

    assert run_ranks(2, places) == [[1, 1], [0, 0]]


def test_a_group_is_dealt_whole_and_in_parts_only_if_ranks_would_wait():
    draw = random.Random(0)
    lengths = [100 + draw.randint(10, 14) for _ in range(32)]
    shared = [100] * 32
    whole = assign(lengths, [0] * 32, 4, 4096, shared=shared, num_sharing=4)
    assert all(len(set(whole[i : i + 4])) == 1 for i in range(0, 32, 4))
    assert sorted(whole.count(rank) for rank in range(4)) == [8, 8, 8, 8]
    # One group on 4 ranks: a prompt of 2 tokens is copied, one of 200 tokens is not worth it in 4.
    lengths = [202, 202, 202, 202]
    one = assign(lengths, [0] * 4, 4, 4096, shared=[2] * 4, num_sharing=4)
    assert sorted(one) == [0, 1, 2, 3]
    assert assign(lengths, [0] * 4, 1, 4096, shared=[2] * 4, num_sharing=4) == [0] * 4
    # The prompt of 1,000 tokens counts once: 1,040 and 500 tokens on one rank, 1,500 on the other.
    lengths = [1010] * 4 + [375] * 4 + [125] * 4
    long = assign(lengths, [0] * 12, 2, 10**6, shared=[1000] * 4 + [1] * 8, num_sharing=4)
    assert long == [1] * 4 + [0] * 4 + [1] * 4
    # Two groups in different minibatches do not wait for each other.
    two = assign([110] * 8, [0] * 4 + [1] * 4, 2, 4096, shared=[100] * 8, num_sharing=4)
    assert [two[:4].count(0), two[4:].count(0)] == [2, 2]
