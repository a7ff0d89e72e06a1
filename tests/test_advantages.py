"""Advantages against hand-computed groups and a slow scalar recursion; what a row carries; the KL
penalty; the cache; the same statistics on any ranks.
"""

import math
import random

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from advantages import (
    AdvantageCache,
    AdvantageConfig,
    GaeConfig,
    KlController,
    estimate,
    explained_variance,
    gae,
    group_advantages,
    has_spread,
    overlong_penalty,
    token_rewards,
    whiten,
)
from losses import LossConfig, actor_loss
from packing import pack, sequence

EASY_AND_HARD = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])


def close(found, expected, **tolerance):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), **tolerance)


@pytest.mark.parametrize(
    ("baseline", "scale_by_std", "expected"),
    [
        ("group", False, [-0.25, -0.25, -0.25, 0.75]),
        ("group", True, [-0.5, -0.5, -0.5, 1.5]),
        ("leave_one_out", False, [-1 / 3, -1 / 3, -1 / 3, 1.0]),
        ("leave_one_out", True, [-2 / 3, -2 / 3, -2 / 3, 2.0]),
    ],
)
def test_a_reward_is_compared_with_its_own_group(baseline, scale_by_std, expected):
    """grpo-flat#2: with statistics over the batch all answers to the easy prompt look good."""
    found = group_advantages(EASY_AND_HARD, baseline=baseline, scale_by_std=scale_by_std)
    assert found[0].tolist() == [0.0] * 4
    close(found[1], expected, rtol=1e-5, atol=1e-5)  # up to epsilon


def test_the_batch_baseline_takes_mean_and_deviation_over_all_prompts():
    plain = group_advantages(EASY_AND_HARD, baseline="batch", scale_by_std=False)
    close(plain, [[0.375] * 4, [-0.625] * 3 + [0.375]])
    scaled = group_advantages(EASY_AND_HARD, baseline="batch")
    close(scaled, plain / EASY_AND_HARD.std(), rtol=1e-5, atol=1e-5)
    assert group_advantages(
        torch.tensor([[1.0], [0.0]]), baseline="batch", scale_by_std=False
    ).tolist() == [
        [0.5],
        [-0.5],
    ]


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3, 1e8])
def test_equal_rewards_give_exactly_zero(baseline, reward):
    """ms-swift#3980. The mean of eight times 0.1 need not be 0.1."""
    for group_size in (2, 7, 8):
        assert (group_advantages(torch.full((3, group_size), reward), baseline=baseline) == 0).all()


def test_a_group_of_one_is_refused_unless_the_baseline_is_the_batch():
    for baseline in ("group", "leave_one_out"):
        with pytest.raises(
            ValueError, match="group size 1: a group baseline needs at least 2 samples"
        ):
            group_advantages(torch.ones(3, 1), baseline=baseline)
    assert (group_advantages(torch.ones(3, 1), baseline="batch") == 0).all()
    assert (group_advantages(torch.ones(1, 1), baseline="batch") == 0).all()


def test_the_only_success_of_a_group_counts_whatever_the_baseline():
    """NeMo-RL#3469: its siblings have no spread among themselves, yet it has an advantage."""
    for baseline in ("group", "leave_one_out", "batch"):
        for scale_by_std in (True, False):
            options = dict(baseline=baseline, scale_by_std=scale_by_std)
            (found,) = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), **options)
            assert found[0] > 0.5 and (found[1:] < -0.2).all()
            (found,) = group_advantages(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), **options)
            assert found[3] < -0.5 and (found[:3] > 0.2).all()


def test_dropping_samples_later_does_not_change_what_the_others_were_compared_with():
    """open-instruct#1794: four of eight samples were dropped before the rewards were cut into
    groups of four.
    """
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    kept = torch.tensor([[True, True, False, False], [False, False, True, True]])
    survivors = group_advantages(rewards, scale_by_std=False)[kept]
    close(survivors, [0.75, -0.25, 0.25, -0.75])


def test_advantages_do_not_depend_on_the_scale_of_rewards_and_arguments_stay_as_they_were():
    rewards = torch.tensor([[3.0, 5.0, 10.0]])
    before = rewards.clone()
    close(group_advantages(rewards), group_advantages(100 * rewards + 7), rtol=1e-4, atol=1e-4)
    assert rewards.equal(before)


def test_the_batch_baseline_is_the_same_on_two_ranks_with_unequal_shares():
    rewards = (
        torch.tensor([[1.0, 0.0], [0.5, 0.25], [4.0, 1.0]]) + 1e4
    )  # a large mean: E[x^2] - E[x]^2 has no digits left

    def share(sizes):
        start = sum(sizes[: dist.get_rank()])
        return group_advantages(rewards[start : start + sizes[dist.get_rank()]], baseline="batch")

    expected = group_advantages(rewards, baseline="batch")
    assert expected.std() > 0.9
    for sizes in ([2, 1], [3, 0]):
        # The mean is rounded to fp32 at 1e4 on both sides alike.
        close(torch.cat(run_ranks(2, share, sizes)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_close_rewards_keep_their_scale(baseline):
    """verl#6348: a fast variance loses it. The deviation is 7.07e-6, epsilon 1e-6."""
    found = group_advantages(torch.tensor([[1, 1.00001], [2, 2.00001]]), baseline=baseline)
    size = 0.6196 if baseline == "group" else 2 * 0.6196
    # In fp32 2.00001 - 2 is off by up to 1.2 %, 1.00001 - 1 by 0.6 %.
    close(found, [[-size, size]] * 2, rtol=0.02, atol=0)


@pytest.mark.parametrize("base", [0.0, 1e8, -1e12])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
def test_rewards_that_differ_far_from_0_keep_their_differences(base, baseline):
    """In fp32 1e8 and 1e8 + 1 are one number."""
    rewards = base + torch.arange(4, dtype=torch.float64)[None]
    found = group_advantages(rewards, baseline=baseline, scale_by_std=False)
    size = 4 / 3 if baseline == "leave_one_out" else 1.0
    close(found, [[-1.5 * size, -0.5 * size, 0.5 * size, 1.5 * size]])
    assert found.dtype == torch.float32


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("bad", [1e39, -1e300, 3e38, 1.1e18, math.inf, math.nan])
def test_a_reward_that_fp32_does_not_hold_or_not_its_square_is_refused(baseline, bad):
    """Tencent-Hunyuan/UniRL#330, trl#5775: all siblings get NaN. So they did from 3e38 beside
    -3e38, whose difference fp32 does not hold.
    """
    rewards = torch.tensor([[1.0, 0.0], [bad, 0.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="^rewards .*: must be finite, at most 1e18 in size"):
        group_advantages(rewards, baseline=baseline)
    for scale_by_std in (True, False):
        largest = torch.tensor([[1e18, -1e18], [1e18, 1e18], [-1e18, 0.0]])
        found = group_advantages(largest, baseline=baseline, scale_by_std=scale_by_std)
        assert found.isfinite().all() and found[0, 0] > 0.5


def spread_cases():
    weights = (0.1, 0.2, 0.3)
    both = (1, 1, 0), (0, 0, 1)
    weighted = [sum(w * x for w, x in zip(weights, scores, strict=True)) for scores in both]
    return [
        (weighted, False),
        ([0.1 + 0.2, 0.3], False),
        ([0.1 + 0.2 - 0.3, 0.0], False),
        ([1e9 * (0.1 + 0.2), 1e9 * 0.3, 3e8], False),
        ([0.7] * 8, False),
        ([0.0, 0.0], False),
        ([5.0], False),
        ([1.0, 1.0 + 1e-9], True),
        ([1e8, 1e8 + 1], True),
        ([0.0, 1e-9], True),
        ([-1.0, 1.0, 0.0], True),
    ]


@pytest.mark.parametrize(("rewards", "expected"), spread_cases())
def test_a_group_has_spread_exactly_when_it_has_advantages(rewards, expected):
    """radixark/miles#701, verl#4598: groups whose rewards differ by rounding alone were kept, and
    gave no gradient.
    """
    assert has_spread(rewards) is expected
    for baseline in ("group", "leave_one_out") if len(rewards) > 1 else ():
        for scale_by_std in (True, False):
            found = group_advantages(
                torch.tensor([rewards], dtype=torch.float64),
                baseline=baseline,
                scale_by_std=scale_by_std,
            )
            assert (found != 0).any().item() is expected


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
def test_integer_and_boolean_rewards_are_numbers(baseline):
    """Cast back to integers, the batch's mean and deviation were 0 and the advantages 1000000."""
    expected = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), baseline=baseline)
    for rewards in (torch.tensor([[1, 0, 0, 1]]), torch.tensor([[True, False, False, True]])):
        assert group_advantages(rewards, baseline=baseline).equal(expected)


def test_integers_are_numbers_for_gae_whitening_and_explained_variance_too():
    mask = torch.ones(3, dtype=torch.bool)
    rewards = torch.tensor([0, 0, 1])
    values = torch.tensor([0.25, 0.5, 0.75])
    options = dict(gamma=1.0, lam=0.5)
    cu_seqlens = torch.tensor([0, 3])
    found = gae(rewards, values, mask, cu_seqlens, **options)
    expected = gae(rewards.float(), values, mask, cu_seqlens, **options)
    assert all(x.equal(y) for x, y in zip(found, expected, strict=True))
    assert whiten(rewards, mask).equal(whiten(rewards.float(), mask))
    assert explained_variance(torch.zeros(3, dtype=torch.int64), rewards, mask) == 0.0


def test_a_misspelt_baseline_and_rewards_without_groups_are_refused():
    """scaleapi/vero#22, #18: a word that is none fell into the last branch."""
    rule = "must be group, leave_one_out or batch"
    for word in ("rloo", "loo", "Group", None):
        with pytest.raises(ValueError, match=f"^baseline {word}: {rule}"):
            group_advantages(EASY_AND_HARD, baseline=word)
        with pytest.raises(ValueError, match=f"^--advantage.baseline {word}: {rule}"):
            AdvantageConfig(baseline=word)
    with pytest.raises(ValueError, match=r"^rewards \[4\]: must be \[P, G\]"):
        group_advantages(EASY_AND_HARD[0])


def test_whitening_over_two_ranks_equals_one_rank_and_ignores_masked_entries():
    x = torch.tensor([1.0, 2.0, 900.0, 4.0, 7.0, float("nan")])
    mask = torch.tensor([True, True, False, True, True, False])

    def share(cut):
        part = slice(0, cut) if dist.get_rank() == 0 else slice(cut, None)
        return whiten(x[part], mask[part])

    live = torch.tensor([1.0, 2.0, 4.0, 7.0])
    expected = torch.zeros(6).masked_scatter(mask, (live - live.mean()) / live.std())
    close(whiten(x, mask), expected)
    for cut in (1, 3, 6):
        close(torch.cat(run_ranks(2, share, cut)), expected)


def test_whitening_equal_or_single_or_no_values_is_finite():
    every, none = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    assert (whiten(torch.full((3,), 0.1), every) == 0).all()
    assert whiten(torch.tensor([5.0]), torch.tensor([True])).tolist() == [0.0]
    assert whiten(torch.ones(3), none).tolist() == [0.0] * 3


@pytest.mark.parametrize("value", [0.7, -3.0, 1000.0, 1e-20])
def test_whitening_values_that_differ_by_rounding_alone_gives_no_noise(value):
    """Divided by their own deviation, differences in the last digit would be as large as any."""
    x = torch.full((4,), value)
    x[0] = torch.nextafter(x[0], torch.tensor(math.inf))
    assert (whiten(x, torch.ones(4, dtype=torch.bool)) == 0).all()
    close(whiten(torch.tensor([1e-3, -1e-3]), torch.tensor([True, True])), [0.5**0.5, -(0.5**0.5)])


def test_the_score_lands_on_the_last_response_token_and_never_on_what_follows():
    """trl#5338: the score was written one token behind the response, where the mask hid it."""
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0], dtype=torch.bool)
    cu_seqlens = torch.tensor(
        [0, 5, 10, 12], dtype=torch.int32
    )  # the third sequence has no response token
    found = token_rewards(
        torch.tensor([1.0, 2.0, 9.0]),
        torch.zeros(12),
        torch.zeros(12),
        mask,
        cu_seqlens,
        kl_coef=0.0,
    )
    assert found.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0]


def test_the_kl_penalty_is_k1_on_response_tokens_alone():
    mask = torch.tensor([0, 1, 1], dtype=torch.bool)
    logprobs, ref_logprobs = (
        torch.tensor([float("nan"), -1.0, -2.0]),
        torch.tensor([5.0, -1.5, -1.0]),
    )
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    found = token_rewards(
        torch.tensor([1.0]), logprobs, ref_logprobs, mask, cu_seqlens, kl_coef=0.1
    )
    close(found, [0.0, -0.05, 1.1])


def test_gae_of_the_docstring():
    mask, cu_seqlens = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3], dtype=torch.int32)
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3)
    advantages, returns = gae(rewards, values, mask, cu_seqlens, gamma=1.0, lam=0.5)
    close(advantages, [0.25, 0.5, 1.0])
    close(returns, [0.25, 0.5, 1.0])


def test_the_final_reward_reaches_every_response_token_and_no_other():
    """trl#5338: gamma and lambda 1, values 0, a response of 3 tokens, alone and before another
    sequence.
    """
    mask = torch.tensor([0, 1, 1, 1, 0, 1], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)
    rewards = token_rewards(
        torch.tensor([1.0, 5.0]), torch.zeros(6), torch.zeros(6), mask, cu_seqlens, kl_coef=0.0
    )
    advantages, _ = gae(rewards, torch.zeros(6), mask, cu_seqlens, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [0, 1, 1, 1, 0, 5]


def test_masked_tokens_between_response_tokens_are_no_transitions():
    """miles#1827: the reward was discounted once per masked token."""
    mask = torch.tensor([1, 0, 0, 1, 0], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    rewards = token_rewards(
        torch.tensor([1.0]), torch.zeros(5), torch.zeros(5), mask, cu_seqlens, kl_coef=0.0
    )
    advantages, _ = gae(rewards, torch.zeros(5), mask, cu_seqlens, gamma=1.0, lam=0.5)
    close(advantages, [0.5, 0.0, 0.0, 1.0, 0.0])


def slow_gae(rewards, values, mask, cu_seqlens, gamma, lam):
    """The recursion of eq. 16, one scalar at a time."""
    advantages = [0.0] * len(rewards)
    for s in range(len(cu_seqlens) - 1):
        next_value = next_advantage = 0.0
        for i in reversed(range(int(cu_seqlens[s]), int(cu_seqlens[s + 1]))):
            if mask[i]:
                delta = float(rewards[i]) + gamma * next_value - float(values[i])
                next_advantage = advantages[i] = delta + gamma * lam * next_advantage
                next_value = float(values[i])
    returns = [a + float(v) if m else 0.0 for a, v, m in zip(advantages, values, mask, strict=True)]
    return advantages, returns


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.0, 0.5)]
)
def test_gae_equals_a_scalar_recursion_on_random_packed_rows(gamma, lam):
    draw = random.Random(0)
    for case in range(20):
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 8))]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        torch.manual_seed(case)
        rewards, values = torch.randn(sum(lengths)), torch.randn(sum(lengths))
        mask = torch.rand(sum(lengths)) < draw.choice([0.0, 0.3, 0.9, 1.1])
        advantages, returns = gae(rewards, values, mask, cu_seqlens, gamma=gamma, lam=lam)
        expected, expected_returns = slow_gae(rewards, values, mask, cu_seqlens, gamma, lam)
        close(advantages, expected, rtol=1e-4, atol=1e-5)  # fp32 against float64 over 30 steps
        close(returns, expected_returns, rtol=1e-4, atol=1e-5)


def test_lambda_1_gives_return_minus_value_and_lambda_0_the_one_step_error():
    torch.manual_seed(0)
    rewards, values = torch.randn(6), torch.randn(6)
    mask, cu_seqlens = torch.ones(6, dtype=torch.bool), torch.tensor([0, 6], dtype=torch.int32)
    to_come = rewards.flip(0).cumsum(0).flip(0)
    close(gae(rewards, values, mask, cu_seqlens, gamma=1.0, lam=1.0)[0], to_come - values)
    next_values = torch.cat([values[1:], torch.zeros(1)])
    close(
        gae(rewards, values, mask, cu_seqlens, gamma=0.9, lam=0.0)[0],
        rewards + 0.9 * next_values - values,
    )


def test_neighbours_in_the_row_never_matter():
    """miles#1827: the second sequence stays as it is when the first one's values are multiplied by
    1000.
    """
    torch.manual_seed(0)
    rewards, values, mask = torch.randn(9), torch.randn(9), torch.rand(9) < 0.7
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    before = gae(rewards, values, mask, cu_seqlens, gamma=0.99, lam=0.95)
    loud = torch.where(torch.arange(9) < 4, 1000.0, 1.0)
    after = gae(rewards * loud, values * loud, mask, cu_seqlens, gamma=0.99, lam=0.95)
    alone = gae(rewards[4:], values[4:], mask[4:], torch.tensor([0, 5]), gamma=0.99, lam=0.95)
    for x, y, z in zip(before, after, alone, strict=True):
        assert x[4:].equal(y[4:]) and x[4:].equal(z)


def test_values_of_masked_tokens_may_be_anything_and_those_of_response_tokens_may_be_bf16():
    mask, cu_seqlens = torch.tensor([False, True]), torch.tensor([0, 2], dtype=torch.int32)
    values = torch.tensor([float("nan"), 0.5], dtype=torch.bfloat16)
    advantages, returns = gae(
        torch.tensor([float("nan"), 1.0]), values, mask, cu_seqlens, gamma=1.0, lam=1.0
    )
    assert advantages.tolist() == [0.0, 0.5] and returns.tolist() == [0.0, 1.0]
    assert advantages.dtype == returns.dtype == torch.float32


def test_the_value_of_a_response_token_is_that_of_the_state_before_it():
    """verl#1758. x[i] belongs to tokens[i]: with values that count tokens, each one-step error
    without rewards is 1.
    """
    mask = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.bool)
    values = torch.arange(6.0)  # before tokens[3] three tokens had been read
    advantages, _ = gae(torch.zeros(6), values, mask, torch.tensor([0, 6]), gamma=1.0, lam=0.0)
    assert advantages.tolist() == [0, 0, 0, 1, 1, -5]


def test_the_overlong_penalty_falls_linearly_over_the_buffer():
    lengths = torch.tensor([[1, 80], [90, 100]])
    close(overlong_penalty(lengths, 100, buffer=20, weight=0.5), [[0.0, 0.0], [-0.25, -0.5]])
    assert overlong_penalty(lengths, 100, buffer=0, weight=0.5).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_the_cache_computes_once_per_rollout_and_never_returns_an_earlier_rollouts_value():
    cache = AdvantageCache()
    calls = []

    def compute(rollout):
        calls.append(rollout)
        return f"advantages of {rollout}"

    for rollout in (0, 0, 0, 1, 1, 0):
        assert (
            cache.get(rollout, lambda rollout=rollout: compute(rollout))
            == f"advantages of {rollout}"
        )
    assert calls == [0, 1, 0]  # one entry: a new key evicts the old one


def test_the_cache_has_nothing_for_a_rollout_whose_computation_failed():
    cache = AdvantageCache()
    cache.get(1, lambda: "one")
    with pytest.raises(ZeroDivisionError):
        cache.get(2, lambda: 1 / 0)
    assert cache.get(2, lambda: "two") == "two"
    with pytest.raises(AssertionError, match="id of the rollout"):
        cache.get(None, lambda: "none")


# What a row carries: estimates, and how good the critic is


def test_explained_variance_is_1_for_the_returns_0_for_a_constant_and_less_for_worse():
    returns, mask = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([True, True, True, False])
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)  # 1 - 2^2
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))


def test_with_values_equal_to_the_returns_advantages_and_the_policy_gradient_are_0():
    """Whatever lambda: the critic knew all of it. Another value gives a gradient."""
    for values, is_zero in (([0.0, 1.0, 1.0, 1.0], True), ([0.0, 1.0, 0.5, 1.0], False)):
        fields = dict(values=torch.tensor(values[1:]), scores=1.0, rollout_logprobs=-1.0)
        [row] = pack([sequence(torch.tensor([3]), torch.tensor([4, 5, 1]), **fields)], 8)
        [[row]], _ = estimate([[row]], GaeConfig(gae_lambda=0.7, whiten=False), 0.0)
        logprobs = torch.full((4,), -1.0, requires_grad=True)
        loss, _ = actor_loss(
            logprobs, torch.zeros(4), row, dict(tokens=3, sequences=1), LossConfig(), 8
        )
        loss.backward()
        assert (
            (logprobs.grad.abs().max() == 0)
            == is_zero
            == (row.fields["advantages"].abs().max() == 0)
        )


def test_equal_returns_have_no_explained_variance_whatever_the_values():
    """A return of A + V would be 1 up to rounding, and the quotient of two roundings."""
    draw = torch.Generator().manual_seed(0)
    fields = [
        dict(values=torch.randn(3, generator=draw), scores=1.0, rollout_logprobs=-1.0)
        for _ in range(9)
    ]
    rows = pack([sequence(torch.tensor([3]), torch.tensor([4, 5, 1]), **f) for f in fields], 16)
    assert estimate([rows], GaeConfig(), 0.0)[1] == {}


def test_rows_estimate_like_one_row_and_the_batch_is_whitened_as_one():
    draw = torch.Generator().manual_seed(0)
    made = []
    for length in (1, 3, 7, 2, 5):
        fields = {
            name: torch.randn(length, generator=draw)
            for name in ("values", "old_logprobs", "ref_logprobs")
        }
        fields |= dict(scores=float(length % 3), rollout_logprobs=0.0)
        made.append(sequence(torch.tensor([3, 4]), torch.full((length,), 5), **fields))
    config = GaeConfig(gamma=0.9, gae_lambda=0.8)
    results = []
    for capacity in (64, 9):
        rows = pack(made, capacity)
        [rows], stats = estimate([rows], config, 0.3)
        pieces = {}
        for row in rows:
            for k, source in enumerate(row.source):
                part = slice(row.cu_seqlens[k], row.cu_seqlens[k + 1])
                pieces[source] = torch.stack(
                    [row.fields[name][part] for name in ("advantages", "returns")]
                )
        results.append((torch.cat([pieces[i] for i in range(5)], dim=1), stats))
    (one, one_stats), (several, several_stats) = results
    assert torch.allclose(one, several, atol=1e-6) and one_stats == pytest.approx(several_stats)
    live = torch.cat([s["response_mask"] for s in made])
    assert one[0, live].mean().abs() < 1e-6 and one[0, live].std() == pytest.approx(1.0)


def test_an_estimate_discounts_and_trusts_the_critic_as_the_settings_say():
    """Each minibatch keeps its own rows; a return of the explained variance is discounted too."""
    fields = dict(values=torch.tensor([0.5, 0.2]), scores=1.0)
    row = pack([sequence(torch.tensor([3]), torch.tensor([4, 1]), **fields)], 8)
    rows = [row, row + row, []]
    config = GaeConfig(gamma=0.5, gae_lambda=0.25, whiten=False)
    made, stats = estimate(rows, config, 0.0)
    assert [len(minibatch) for minibatch in made] == [1, 2, 0]
    last = 1 - 0.2
    first = 0.5 * 0.2 - 0.5 + 0.5 * 0.25 * last
    for minibatch in made:
        for each in minibatch:
            close(each.fields["advantages"], [0.0, first, last])
            close(each.fields["returns"], [0.0, 0.5 + first, 1.0])
    # Returns of lambda 1 are 0.5 and 1, the values' errors 0 and 0.8.
    explained = 1 - (0.8 / 0.5) ** 2
    assert stats["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-5)


def test_all_statistics_are_those_of_the_group_of_ranks_that_is_asked_for():
    """Two ranks, each a group of its own, find what each would find alone."""

    def made(rank):
        draw = torch.Generator().manual_seed(rank)
        fields = {
            name: torch.randn(4, generator=draw) + 10 * rank
            for name in ("values", "old_logprobs", "ref_logprobs")
        }
        return pack([sequence(torch.tensor([3]), torch.full((4,), 5), scores=1.0, **fields)], 8)

    def found(rows, group=None):
        [[row]], stats = estimate([rows], GaeConfig(gae_lambda=0.5), 0.1, group)
        return row.fields["advantages"], stats

    def alone():
        groups = [dist.new_group([rank]) for rank in range(2)]
        return found(made(dist.get_rank()), groups[dist.get_rank()])

    for rank, (values, stats) in enumerate(run_ranks(2, alone)):
        expected, expected_stats = found(made(rank))
        assert values.equal(expected) and stats == expected_stats


# The KL penalty


def test_the_adaptive_coefficient_reaches_its_target_from_both_sides():
    """A policy whose KL is 0.02 / coef: the target 0.05 asks for 0.4."""
    for start in (0.01, 5.0):
        penalty = KlController(GaeConfig(kl_coef=start, kl_target=0.05, kl_horizon=1000))
        for _ in range(200):
            penalty.update(0.02 / penalty.coef, 256)
        assert penalty.coef == pytest.approx(0.4, rel=0.05)
    again = KlController(GaeConfig(kl_coef=1.0, kl_target=0.05))
    again.load_state_dict(penalty.state_dict())
    assert again.coef == penalty.coef
    # Of a resumed run with another flag: the flag counts.
    fixed = KlController(GaeConfig(kl_coef=0.7))
    fixed.load_state_dict(penalty.state_dict())
    assert fixed.coef == 0.7


def test_without_a_target_the_coefficient_stays_and_one_step_never_moves_it_by_more_than_a_fifth():
    fixed = KlController(GaeConfig(kl_coef=0.3))
    fixed.update(100.0, 10**9)
    steered = KlController(GaeConfig(kl_coef=0.3, kl_target=0.01))
    steered.update(100.0, 10**9)
    assert fixed.coef == 0.3 and steered.coef == pytest.approx(0.36)


def test_a_step_moves_the_coefficient_by_its_share_of_the_horizon():
    steered = KlController(GaeConfig(kl_coef=1.0, kl_target=0.01, kl_horizon=1000))
    steered.update(100.0, 250)
    assert steered.coef == pytest.approx(1.05)
    steered.update(0.0, 500)
    assert steered.coef == pytest.approx(1.05 * 0.9)


def test_the_penalty_is_the_kl_of_the_old_policy_to_the_reference_not_the_samplers():
    """Rewards -0.5 x 0.5 and 1 + 0.5 x 0.2, returns their sums; the KL is the mean of 0.5, -0.2."""
    made = dict(old_logprobs=torch.tensor([-1.0, -2.0]), ref_logprobs=torch.tensor([-1.5, -1.8]))
    fields = made | dict(rollout_logprobs=-9.0, values=0.0, scores=1.0)
    rows = pack([sequence(torch.tensor([3]), torch.tensor([4, 1]), **fields)], 8)
    [[row]], stats = estimate([rows], GaeConfig(gae_lambda=1.0, whiten=False), 0.5)
    assert row.fields["returns"].tolist() == pytest.approx([0.0, 0.85, 1.1])
    assert stats["actor/reward_kl_penalty"] == pytest.approx(0.15)


def test_settings_without_meaning_are_refused():
    for setting, flag in (
        (dict(overlong_buffer=-1), "--advantage.overlong-buffer -1"),
        (dict(overlong_weight=-0.5), "--advantage.overlong-weight -0.5"),
        (dict(overlong_weight=math.nan), "--advantage.overlong-weight nan"),
        (dict(overlong_weight=math.inf), "--advantage.overlong-weight inf"),
    ):
        with pytest.raises(ValueError, match=f"^{flag}: must be at least 0"):
            AdvantageConfig(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(gamma=1.1), "--gae.gamma 1.1: must be in"),
        (dict(gae_lambda=math.nan), "--gae.gae-lambda nan: must be in"),
        (dict(kl_coef=-0.1), "--gae.kl-coef -0.1: must be at least 0"),
        (dict(kl_target=0.1), "--gae.kl-coef 0.0: must be above 0 with --gae.kl-target"),
        (dict(kl_coef=0.1, kl_target=-1), "--gae.kl-target -1: must be at least 0"),
        (dict(kl_horizon=0), "--gae.kl-horizon 0: must be at least 1"),
    ],
)
def test_a_critics_settings_without_meaning_are_refused(setting, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        GaeConfig(**setting)
