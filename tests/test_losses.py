"""Loss terms against hand-computed numbers and exact sums over small vocabularies."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from losses import (
    CriticConfig,
    LossConfig,
    actor_loss,
    critic_loss,
    importance_weights,
    kl_estimate,
    masked_sum,
    policy_loss,
    sampler_correction,
    token_weights,
    value_loss,
)

NAN = float("nan")


def tensor(*numbers, grad=False):
    return torch.tensor(numbers, dtype=torch.float32, requires_grad=grad)


def mask(*numbers):
    return torch.tensor(numbers, dtype=torch.bool)


def boundaries(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def one_token(ratio, advantage, **options):
    """(loss, gradient with respect to the log-probability, share of clipped tokens) of a single
    token.
    """
    logprobs = tensor(math.log(ratio) - 1, grad=True)
    loss, stats = policy_loss(
        logprobs, tensor(-1.0), tensor(advantage), mask(1), normalizer=1.0, **options
    )
    loss.backward()
    return loss.item(), logprobs.grad.item(), stats["pg_clipfrac"].item()


def test_a_clipped_token_has_its_clipped_loss_and_no_gradient():
    """rllm-org/rllm#81: the maximum was computed, and the unclipped term aggregated."""
    assert one_token(2.0, 1.0, clip_high=0.28) == pytest.approx((-1.28, 0.0, 1.0))
    assert one_token(0.5, -1.0, clip_low=0.2) == pytest.approx((0.8, 0.0, 1.0))


def test_a_bad_token_made_likelier_and_a_good_one_made_less_likely_are_never_clipped():
    assert one_token(2.0, -1.0) == pytest.approx((2.0, 2.0, 0.0))
    assert one_token(0.5, 1.0) == pytest.approx((-0.5, -0.5, 0.0))


def test_within_the_band_the_gradient_is_minus_advantage_times_ratio():
    """ms-swift#10117: the absolute value, not only proportions."""
    assert one_token(1.0, 3.0) == pytest.approx((-3.0, -3.0, 0.0))
    assert one_token(1.1, -2.0) == pytest.approx((2.2, 2.2, 0.0))


def test_log_probabilities_of_an_older_policy_give_the_ratio():
    """torchforge#571: old_logprobs = logprobs.detach() where the behaviour policy was another."""
    assert one_token(math.exp(-0.3), -1.0)[:2] == pytest.approx((0.8, 0.0))
    assert one_token(math.exp(-0.3), 1.0)[:2] == pytest.approx((-0.7408, -0.7408), abs=1e-4)


@pytest.mark.parametrize(
    ("normalize", "expected"), [("token", 0.8), ("sequence", 0.0), ("constant", 0.4)]
)
def test_each_normalisation_of_a_good_short_and_a_bad_long_response(normalize, expected):
    """tinker-cookbook#579: lengths 1 and 9, advantages +1 and -1, ratio 1, at most 10 tokens."""
    logprobs = torch.zeros(10, requires_grad=True)
    live, cu_seqlens = torch.ones(10, dtype=torch.bool), boundaries(0, 1, 10)
    each, normalizer = token_weights(
        normalize, live, cu_seqlens, {"tokens": 10, "sequences": 2}, 10
    )
    advantages = tensor(1.0, *[-1.0] * 9)
    loss, _ = policy_loss(
        logprobs, torch.zeros(10), advantages, live, normalizer=normalizer, token_weights=each
    )
    assert loss.item() == pytest.approx(expected, abs=1e-7)


def test_masked_tokens_are_in_no_denominator():
    """trl#6369: 25 live tokens of loss 1 and 5 masked ones are a mean of 1, not of 25 / 30."""
    live = torch.arange(30) < 25
    cu_seqlens = boundaries(0, 25, 30)
    for normalize, expected in (("token", 1.0), ("sequence", 1.0), ("constant", 25 / 40)):
        totals = {"tokens": 25, "sequences": 1}
        each, normalizer = token_weights(normalize, live, cu_seqlens, totals, 40)
        loss, _ = policy_loss(
            torch.zeros(30),
            torch.zeros(30),
            -torch.ones(30),
            live,
            normalizer=normalizer,
            token_weights=each,
        )
        assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_row_without_response_tokens_gives_zero_loss_zero_gradient_and_finite_statistics(
    normalize, ratio
):
    """trl#3248: every response truncated and masked, 0 / 0."""
    logprobs = torch.zeros(4, requires_grad=True)
    nothing, cu_seqlens = torch.zeros(4, dtype=torch.bool), boundaries(0, 2, 4)
    each, normalizer = token_weights(
        normalize, nothing, cu_seqlens, {"tokens": 0, "sequences": 0}, 8
    )
    weights, mismatch = sampler_correction(
        torch.zeros(4), torch.zeros(4), nothing, cu_seqlens, kind="token", cap=2.0
    )
    loss, stats = policy_loss(
        logprobs,
        torch.zeros(4),
        torch.ones(4),
        nothing,
        normalizer=normalizer,
        cu_seqlens=cu_seqlens,
        ratio=ratio,
        token_weights=each,
        importance_weights=weights,
    )
    loss = loss + masked_sum(kl_estimate(logprobs, torch.zeros(4)) * each, nothing) / normalizer
    loss.backward()
    assert loss == 0 and (logprobs.grad == 0).all()
    assert all(x == 0 for x in (*stats.values(), *mismatch.values()))


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_what_masked_entries_hold_changes_neither_loss_nor_gradient_nor_any_statistic(ratio):
    """SkyRL#354, trl#6121: with nine pads per token all logged numbers are the same."""
    clean = [
        tensor(-1.0, -2.0, -0.5),
        tensor(-1.2, -1.6, -0.9),
        tensor(1.0, -1.0, 2.0),
        tensor(-1.1, -1.9, -0.6),
    ]
    live = torch.zeros(30, dtype=torch.bool)
    live[[4, 5, 20]] = True

    def numbers(tensors, response_mask, cu_seqlens):
        logprobs, old, advantages, rollout = tensors
        logprobs.requires_grad_()
        weights, mismatch = sampler_correction(
            old, rollout, response_mask, cu_seqlens, kind="token", cap=1.05
        )
        each, normalizer = token_weights(
            "sequence", response_mask, cu_seqlens, {"tokens": 3, "sequences": 2}, 8
        )
        loss, stats = policy_loss(
            logprobs,
            old,
            advantages,
            response_mask,
            clip_low=0.1,
            clip_high=0.1,
            normalizer=normalizer,
            cu_seqlens=cu_seqlens,
            ratio=ratio,
            token_weights=each,
            importance_weights=weights,
        )
        loss.backward()
        return [
            loss.item(),
            *(x.item() for x in (*stats.values(), *mismatch.values())),
        ], logprobs.grad

    expected, expected_gradient = numbers(
        [x.clone() for x in clean], mask(1, 1, 1), boundaries(0, 2, 3)
    )
    for junk in (0.0, 7.0, NAN, math.inf, -math.inf):
        padded = [torch.full((30,), junk).masked_scatter(live, x) for x in clean]
        found, gradient = numbers(padded, live, boundaries(0, 6, 30))
        assert found == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(gradient[live], expected_gradient)
        assert (gradient[~live] == 0).all()


def test_statistics_are_means_over_response_tokens_as_they_were_before_the_clip():
    log_ratio = tensor(0.5, -0.5, 0.1, 9.0)
    old = tensor(-1.0, -1.0, -1.0, -1.0)
    _, stats = policy_loss(
        old + log_ratio, old, tensor(1.0, 1.0, 1.0, 1.0), mask(1, 1, 1, 0), normalizer=3.0
    )
    assert stats["pg_clipfrac"].item() == pytest.approx(1 / 3)
    k3 = [math.exp(x) - 1 - x for x in (0.5, -0.5, 0.1)]
    assert stats["ppo_kl"].item() == pytest.approx(sum(k3) / 3, rel=1e-5)


def test_the_sequence_ratio_is_the_geometric_mean_over_the_response_tokens():
    torch.manual_seed(0)
    lengths, prompts = [5, 8, 3], [2, 3, 3]  # the last sequence has no response token
    old, advantage = torch.randn(16), tensor(1.0, -1.0, 1.0)
    logprobs = (old + 0.3 * torch.randn(16)).requires_grad_()
    live = torch.cat([torch.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)])
    cu_seqlens = boundaries(0, 5, 13, 16)
    advantages = advantage.repeat_interleave(torch.tensor(lengths))
    each, normalizer = token_weights("sequence", live, cu_seqlens, {"tokens": 8, "sequences": 2}, 8)
    options = dict(
        clip_low=0.05,
        clip_high=0.05,
        normalizer=normalizer,
        cu_seqlens=cu_seqlens,
        ratio="sequence",
    )
    loss, stats = policy_loss(logprobs, old, advantages, live, **options, token_weights=each)
    (gradient,) = torch.autograd.grad(loss, logprobs)

    direct, clipped = 0.0, 0
    for i, start in enumerate(cu_seqlens.tolist()[:2]):
        response = slice(start + prompts[i], start + lengths[i])
        s = (logprobs[response] - old[response]).mean().exp()
        terms = -advantage[i] * s, -advantage[i] * s.clamp(0.95, 1.05)
        clipped += (lengths[i] - prompts[i]) * (terms[1] > terms[0]).item()
        direct = direct + torch.maximum(*terms) / 2
    torch.testing.assert_close(loss, direct)
    torch.testing.assert_close(gradient, torch.autograd.grad(direct, logprobs)[0])
    assert stats["pg_clipfrac"].item() == pytest.approx(clipped / 8)
    assert 0 < clipped < 8


# An exact check of what each estimator is: all tokens of a small vocabulary, weighted by their
# probability.
POLICY = torch.tensor([0.9, -0.3, 0.2, -1.1, 0.5], dtype=torch.float64)
REFERENCE = torch.tensor([-0.4, 0.8, 0.1, 0.3, -0.9], dtype=torch.float64)


def exact_kl(a, b):
    return (a.exp() * (a - b)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_value_of_k1_and_k3_is_the_kl_divergence_from_policy_to_reference(kind):
    p, r = POLICY.log_softmax(-1), REFERENCE.log_softmax(-1)
    torch.testing.assert_close((p.exp() * kl_estimate(p, r, kind)).sum(), exact_kl(p, r))


def gradient_of_the_expected_loss(kind):
    """E over tokens sampled from the policy of the gradient of the estimate, sampling probabilities
    held fixed.
    """
    theta = POLICY.clone().requires_grad_()
    p = theta.log_softmax(-1)
    return torch.autograd.grad(
        (p.detach().exp() * kl_estimate(p, REFERENCE.log_softmax(-1), kind)).sum(), theta
    )[0]


def test_as_a_loss_k2_has_the_gradient_of_kl_policy_reference_and_k3_that_of_kl_reference_policy():
    theta = POLICY.clone().requires_grad_()
    p, r = theta.log_softmax(-1), REFERENCE.log_softmax(-1)
    forward = torch.autograd.grad(exact_kl(p, r), theta, retain_graph=True)[0]
    backward = torch.autograd.grad(exact_kl(r, p), theta)[0]
    torch.testing.assert_close(gradient_of_the_expected_loss("k2"), forward)
    torch.testing.assert_close(gradient_of_the_expected_loss("k3"), backward)
    assert not torch.allclose(forward, backward, atol=0.01)


def test_k1_as_a_loss_is_refused_since_its_gradient_is_zero_on_average():
    """allenai/open-instruct#534."""
    theta = POLICY.clone().requires_grad_()
    p = theta.log_softmax(-1)
    (gradient,) = torch.autograd.grad(
        (p.detach().exp() * (p - REFERENCE.log_softmax(-1))).sum(), theta
    )
    torch.testing.assert_close(gradient, torch.zeros(5, dtype=torch.float64))
    with pytest.raises(ValueError, match="k1: has no gradient on average; use k2 or k3"):
        kl_estimate(p, REFERENCE, "k1")
    with pytest.raises(ValueError, match="--loss.kl k1: must be k2 or k3"):
        LossConfig(kl="k1")


def test_k3_of_one_token():
    d = math.log(0.5) - math.log(0.9)
    estimate = kl_estimate(tensor(math.log(0.9)), tensor(math.log(0.5)))
    assert estimate.item() == pytest.approx(
        math.exp(d) - d - 1, rel=1e-5
    ) and estimate.item() == pytest.approx(0.1433, abs=1e-4)
    assert kl_estimate(tensor(-1.0), tensor(-3.0), "k2").item() == pytest.approx(2.0)
    assert kl_estimate(tensor(-1.0), tensor(-3.0), "k1").item() == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kl_term_moves_a_policy_to_the_reference(kind):
    """ToolRL#52: with the sign slipped it moves away. Two tokens, policy 0.9, reference 0.5, no
    advantages.
    """
    generator = torch.Generator().manual_seed(0)
    theta = torch.tensor([math.log(0.9), math.log(0.1)], requires_grad=True)
    reference = torch.tensor([0.5, 0.5]).log()
    for _ in range(200):
        tokens = torch.multinomial(
            theta.detach().softmax(-1), 256, replacement=True, generator=generator
        )
        logprobs = theta.log_softmax(-1)[tokens]
        live = torch.ones(256, dtype=torch.bool)
        loss, _ = policy_loss(logprobs, logprobs.detach(), torch.zeros(256), live, normalizer=256.0)
        loss = loss + masked_sum(kl_estimate(logprobs, reference[tokens], kind), live) / 256
        (gradient,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            theta -= 0.5 * gradient
    assert theta.softmax(-1)[0].item() == pytest.approx(0.5, abs=0.03)


def test_the_value_is_clipped_around_the_old_one_and_the_share_of_clipped_values_counts_the_new():
    """RLinf#1529: the metric was taken from the clipped value, and always 0."""
    for target, loss, gradient in ((0.0, 0.5, 1.0), (1.0, 0.32, 0.0)):
        values = tensor(1.0, grad=True)
        found, stats = value_loss(
            values, tensor(0.0), tensor(target), mask(1), clip=0.2, normalizer=1.0
        )
        found.backward()
        assert (found.item(), values.grad.item()) == pytest.approx((loss, gradient))
        assert stats["vf_clipfrac"] == 1.0
    values = tensor(1.0, 0.1, grad=True)
    found, stats = value_loss(
        values, tensor(0.0, 0.0), tensor(0.0, 0.0), mask(1, 1), clip=0.2, normalizer=4.0
    )
    assert found.item() == pytest.approx((1 + 0.01) / 8) and stats["vf_clipfrac"] == 0.5
    found, stats = value_loss(
        values, tensor(0.0, 0.0), tensor(3.0, 0.0), mask(1, 0), clip=math.inf, normalizer=2.0
    )
    assert found.item() == pytest.approx(1.0) and stats["vf_clipfrac"] == 0.0


def test_masked_values_change_nothing_whatever_they_are():
    values = tensor(1.0, NAN, math.inf, grad=True)
    junk = tensor(0.5, NAN, -math.inf)
    loss, stats = value_loss(values, junk, junk, mask(1, 0, 0), clip=0.2, normalizer=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.125)
    assert values.grad.tolist() == [0.5, 0.0, 0.0] and stats["vf_clipfrac"] == 1.0
    loss, stats = value_loss(values, junk, junk, mask(0, 0, 0), clip=0.2, normalizer=1.0)
    assert loss == 0 and stats["vf_clipfrac"] == 0


def test_importance_weights_are_the_ratio_to_the_sampler_truncated_and_without_gradient():
    old = tensor(-1.0, -2.0, grad=True)
    weights = importance_weights(old, tensor(-1.5, -5.0), cap=2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0]) and not weights.requires_grad


# Of two responses of 3 and 2 tokens, and of one masked token between them.
LOG_WEIGHTS = [0.1, 0.2, -0.9, 5.0, 0.8, 0.9]
LIVE = mask(1, 1, 1, 0, 1, 1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", [math.exp(0.1), math.exp(0.2), math.exp(-0.9), 0.0, 2.0, 2.0]),
        ("sequence", [math.exp(-0.6)] * 3 + [0.0, 2.0, 2.0]),
        ("mask", [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        ("off", None),
    ],
)
def test_each_kind_of_correction_for_the_sampler(kind, expected):
    old = torch.full((6,), -3.0, requires_grad=True)
    rollout = -3.0 - tensor(*LOG_WEIGHTS)
    weights, stats = sampler_correction(old, rollout, LIVE, boundaries(0, 4, 6), kind=kind, cap=2.0)
    assert not any(x.requires_grad for x in stats.values())
    live = tensor(*LOG_WEIGHTS)[LIVE]
    assert stats["abs_diff_mean"].item() == pytest.approx(live.abs().mean().item(), rel=1e-5)
    assert stats["abs_diff_max"].item() == pytest.approx(0.9, rel=1e-5)
    assert stats["kl"].item() == pytest.approx((live.exp() - 1 - live).mean().item(), rel=1e-5)
    if expected is None:
        assert weights is None
        return
    assert weights.tolist() == pytest.approx(expected) and not weights.requires_grad
    used = weights[LIVE]
    assert stats["is_weight_mean"].item() == pytest.approx(used.mean().item())
    assert stats["is_square_mean"].item() == pytest.approx((used * used).mean().item())


def test_masked_advantages_and_weights_may_hold_anything():
    logprobs = tensor(-1.0, -1.0, grad=True)
    for junk in (NAN, math.inf, 7.0):
        for weights in (None, tensor(1.0, junk)):
            loss, stats = policy_loss(
                logprobs,
                tensor(-1.0, -2.0),
                tensor(2.0, junk),
                mask(1, 0),
                normalizer=1.0,
                token_weights=weights,
            )
            assert loss.item() == -2.0 and stats["pg_clipfrac"] == 0
            assert torch.autograd.grad(loss, logprobs)[0].tolist() == [-2.0, 0.0]


def test_importance_weights_multiply_the_loss_of_each_token_after_the_clip():
    weights = tensor(0.5, 2.0)
    options = dict(normalizer=2.0, clip_high=0.28, importance_weights=weights)
    loss, _ = policy_loss(
        tensor(math.log(2.0), 0.0), tensor(0.0, 0.0), tensor(1.0, -1.0), mask(1, 1), **options
    )
    assert loss.item() == pytest.approx((-1.28 * 0.5 + 1.0 * 2.0) / 2)


# The whole loss of a row, by its settings


def two_responses(**fields):
    """A row of two sequences: a prompt token and two response tokens, a prompt token and one."""
    fields |= dict(response_mask=mask(0, 1, 1, 0, 1))
    return SimpleNamespace(fields=fields, cu_seqlens=boundaries(0, 3, 5), num_response_tokens=3)


@pytest.mark.parametrize(
    ("ratio", "normalize", "kl"),
    list(itertools.product(["token", "sequence"], ["token", "sequence", "constant"], ["k2", "k3"])),
)
def test_the_policys_loss_is_the_sum_of_its_terms_by_hand(ratio, normalize, kl):
    """Ratios 1.5 and 0.5 of one response and 1.1 of the other: both clips work, and each to its own
    side.
    """
    ratios, advantages, entropies, differences = (
        [1.5, 0.5, 1.1],
        [1.0, -1.0, 2.0],
        [0.5, 0.25, 1.0],
        [0.3, -0.2, 0.4],
    )
    weights = {"token": [1 / 3] * 3, "sequence": [1 / 4, 1 / 4, 1 / 2], "constant": [1 / 16] * 3}[
        normalize
    ]
    used = ratios if ratio == "token" else [math.sqrt(0.75), math.sqrt(0.75), 1.1]
    expected = 0.0
    for w, r, a, h, d in zip(weights, used, advantages, entropies, differences, strict=True):
        surrogate = max(-a * r, -a * min(max(r, 0.9), 1.3))
        divergence = d * d / 2 if kl == "k2" else math.exp(d) - d - 1
        expected += w * (surrogate + 0.1 * divergence - 0.01 * h)
    logprobs = tensor(NAN, *(math.log(r) - 1 for r in ratios[:2]), NAN, math.log(1.1) - 1)
    row = two_responses(
        advantages=tensor(NAN, 1.0, -1.0, NAN, 2.0),
        old_logprobs=tensor(NAN, -1.0, -1.0, NAN, -1.0),
        rollout_logprobs=tensor(NAN, -1.0, -1.0, NAN, -1.0),
    )
    row.fields["ref_logprobs"] = logprobs + tensor(0.0, 0.3, -0.2, 0.0, 0.4)
    settings = dict(ratio=ratio, normalize=normalize, kl=kl)
    settings |= dict(clip_low=0.1, clip_high=0.3, kl_coef=0.1, entropy_coef=0.01)
    entropy, totals = tensor(NAN, 0.5, 0.25, NAN, 1.0), dict(tokens=3, sequences=2)
    loss, stats = actor_loss(logprobs, entropy, row, totals, LossConfig(**settings), 8)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert stats["actor/entropy"].item() == pytest.approx(1.75 / 3)


@pytest.mark.parametrize(
    ("clip", "expected"), [(0.2, (0.32 + 0.02 + 0.0) / 3), (math.inf, (0.125 + 0.02 + 0.0) / 3)]
)
def test_the_critics_loss_uses_its_clip_and_is_a_mean_over_tokens(clip, expected):
    """A value of 0.5 that may be 0.2, one that is 0.2 off within the band, one that is right."""
    row = two_responses(
        values=tensor(NAN, 0.0, 0.8, NAN, 1.0), returns=tensor(NAN, 1.0, 1.0, NAN, 1.0)
    )
    values = tensor(NAN, 0.5, 0.8, NAN, 1.0)
    loss, stats = critic_loss(
        values, row, dict(tokens=3, sequences=2), CriticConfig(value_clip=clip)
    )
    assert loss.item() == stats["critic/vf_loss"].item() == pytest.approx(expected)


def test_a_ratio_beyond_fp32_has_a_loss():
    """exp(100) is inf, and 0 x inf NaN: a group without spread has advantages of 0. What e^25 is
    worth stays so.
    """
    logprobs = tensor(0.0, 0.0, 0.0, grad=True)
    old, advantages = tensor(-100.0, 0.0, -25.0), tensor(0.0, 1.0, -1.0)
    loss, _ = policy_loss(logprobs, old, advantages, mask(1, 1, 1), normalizer=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(25))
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.0, math.exp(25)])


def one_response(log_ratio, advantage, **options):
    """(loss, gradients, statistics) of a response of two tokens, the second of them as it was."""
    logprobs = tensor(log_ratio, 0.0, grad=True)
    arguments = tensor(0.0, 0.0), tensor(advantage, 0.0), mask(1, 1)
    loss, stats = policy_loss(logprobs, *arguments, normalizer=1.0, **options)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), stats


@pytest.mark.parametrize("nats", [89.0, 100.0, 1e4, 3e38])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_clipped_token_has_no_gradient_however_far_its_probability_went(nats, ratio):
    """THUDM/slime#2198, OpenRLHF#1335, #1293, radixark/miles#1363: exp before the clip is inf, and
    its gradient 0 x inf.
    """
    options = dict(ratio=ratio, cu_seqlens=boundaries(0, 2), clip_high=0.28)
    loss, gradient, stats = one_response(nats, 1.0, **options)
    assert loss == pytest.approx(-1.28) and gradient == [0.0, 0.0]
    assert stats["ppo_kl"].isfinite() and stats["pg_clipfrac"] == 0.5
    loss, gradient, stats = one_response(-nats, -1.0, **options)
    assert loss == pytest.approx(0.8) and gradient == [0.0, 0.0] and stats["ppo_kl"].isfinite()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_bad_token_that_became_far_likelier_is_pushed_back_by_a_finite_gradient(ratio):
    loss, gradient, _ = one_response(100.0, -1.0, ratio=ratio, cu_seqlens=boundaries(0, 2))
    expected = math.exp(40)
    assert loss == pytest.approx(expected)
    share = [1.0, 0.0] if ratio == "token" else [0.5, 0.5]
    assert gradient == pytest.approx([expected * x for x in share])


def test_the_kl_to_a_reference_that_is_far_off_is_finite_and_its_gradient_points_to_it():
    for nats in (89.0, 100.0, 1e30):
        logprobs = tensor(-nats, grad=True)
        kl = kl_estimate(logprobs, tensor(0.0))
        (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
        assert kl.isfinite().all() and gradient.item() == pytest.approx(-math.exp(40))
        kl = kl_estimate(tensor(0.0), tensor(-nats))  # the other way nothing overflows
        assert kl.item() == pytest.approx(nats - 1, rel=1e-6)


@pytest.mark.parametrize("kind", ["token", "sequence", "mask"])
def test_a_sampler_that_is_far_off_has_finite_weights_and_statistics_without_a_cap_too(kind):
    for log_weight in (100.0, -100.0):
        old = tensor(-1.0, -1.0)
        weights, stats = sampler_correction(
            old, old - log_weight, mask(1, 1), boundaries(0, 2), kind=kind, cap=math.inf
        )
        assert weights.isfinite().all() and all(x.isfinite() for x in stats.values())


@pytest.mark.parametrize("bad", [NAN, -math.inf])
@pytest.mark.parametrize("kind", ["token", "sequence", "mask"])
def test_a_sampler_that_reports_nan_or_minus_inf_is_seen_in_the_loss(kind, bad):
    """An importance weight at the cap, or a token left out, would hide it; NaN stops the run."""
    rollout = tensor(-1.0, bad, -1.0)
    options = dict(kind=kind, cap=2.0)
    weights, stats = sampler_correction(
        tensor(-1.0, -1.0, -1.0), rollout, mask(1, 1, 1), boundaries(0, 2, 3), **options
    )
    assert weights[1].isnan() and not weights[2].isnan() and stats["kl"].isnan()
    logprobs = tensor(-1.0, -1.0, -1.0, grad=True)
    loss, _ = policy_loss(
        logprobs,
        logprobs.detach(),
        tensor(1.0, 1.0, 1.0),
        mask(1, 1, 1),
        normalizer=3.0,
        importance_weights=weights,
    )
    assert loss.isnan()
    # A masked one may be anything.
    weights, stats = sampler_correction(
        tensor(-1.0, -1.0, -1.0), rollout, mask(1, 0, 1), boundaries(0, 2, 3), **options
    )
    assert weights.tolist() == [1.0, 0.0, 1.0] and stats["kl"] == 0


@pytest.mark.parametrize("name", ["token_weights", "importance_weights"])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 1e35, -1e35])
def test_a_weight_of_0_leaves_a_token_out_of_loss_and_gradient_whatever_its_ratio(name, advantage):
    for nats in (100.0, 0.0, -100.0):
        loss, gradient, _ = one_response(nats, advantage, **{name: tensor(0.0, 1.0)})
        assert loss == 0 and gradient == [0.0, 0.0]


def test_what_masked_entries_hold_changes_no_gradient_of_the_policys_loss():
    """The KL of a masked token would be inf x 0."""
    fields = dict(advantages=tensor(NAN, 1.0, -1.0, NAN, 2.0))
    for name in ("old_logprobs", "rollout_logprobs"):
        fields[name] = tensor(NAN, -1.0, -1.0, NAN, -1.0)
    gradients = []
    for junk in (0.0, NAN, 100.0, -math.inf):
        for kl in ("k2", "k3"):
            ref_logprobs = tensor(junk, -1.1, -0.9, junk, -1.0)
            row = two_responses(ref_logprobs=ref_logprobs, **fields)
            logprobs = tensor(junk, -1.0, -1.2, -junk, -1.0, grad=True)
            entropy = tensor(junk, 1.0, 1.0, junk, 1.0, grad=True)
            config = LossConfig(kl=kl, kl_coef=0.1, entropy_coef=0.01)
            loss, _ = actor_loss(logprobs, entropy, row, dict(tokens=3, sequences=2), config, 8)
            loss.backward()
            gradients.append((kl, torch.cat([logprobs.grad, entropy.grad]).tolist()))
    for kl, gradient in gradients:
        assert gradient == pytest.approx(dict(gradients[:2])[kl])


@pytest.mark.parametrize(
    ("importance", "cap", "weights"),
    [
        ("token", 1.2, [1.2, math.exp(-0.1), math.exp(0.1)]),
        ("token", 1.05, [1.05, math.exp(-0.1), 1.05]),
        ("sequence", 1.2, [1.2, 1.2, math.exp(0.1)]),
        ("sequence", 2.0, [math.exp(0.4), math.exp(0.4), math.exp(0.1)]),
        ("mask", 1.2, [0.0, 1.0, 1.0]),
        ("mask", 1.05, [0.0, 0.0, 0.0]),
        ("off", 1.2, [1.0, 1.0, 1.0]),
    ],
)
def test_the_policys_loss_is_corrected_for_the_sampler_as_the_settings_say(
    importance, cap, weights
):
    """The trainer's tokens are likelier than the sampler's by 0.5, -0.1 and 0.1 nats."""
    old = tensor(0.0, -1.0, -1.0, 0.0, -1.0)
    rollout = old - tensor(0.0, 0.5, -0.1, 0.0, 0.1)
    row = two_responses(
        advantages=tensor(0.0, 1.0, 2.0, 0.0, 4.0), old_logprobs=old, rollout_logprobs=rollout
    )
    config = LossConfig(importance=importance, importance_cap=cap)
    totals = dict(tokens=3, sequences=2)
    loss, stats = actor_loss(old, torch.zeros(5), row, totals, config, 8)
    expected = sum(w * a for w, a in zip(weights, (1.0, 2.0, 4.0), strict=True))
    assert loss.item() == pytest.approx(-expected / 3)
    assert stats["rollout_corr/abs_diff_max"].item() == pytest.approx(0.5)


def test_a_rows_loss_is_its_part_of_the_minibatch_and_its_metric_a_mean_over_its_own_tokens():
    """Three tokens of advantage 1 where the minibatch has six."""
    same = tensor(0.0, -1.0, -1.0, 0.0, -1.0)
    row = two_responses(advantages=torch.ones(5), old_logprobs=same, rollout_logprobs=same)
    loss, stats = actor_loss(
        same, torch.zeros(5), row, dict(tokens=6, sequences=4), LossConfig(), 8
    )
    assert loss.item() == pytest.approx(-0.5)
    assert stats["actor/pg_loss"].item() == pytest.approx(-1.0)


def misspelt():
    edges = boundaries(0, 2)
    x = tensor(-1.0, -1.0)
    totals = {"tokens": 2, "sequences": 1}
    live = mask(1, 1)
    options = dict(normalizer=1.0, cu_seqlens=edges)
    return {
        "ratio gspo: must be token or sequence": lambda: policy_loss(
            x, x, x, live, ratio="gspo", **options
        ),
        "ratio Sequence: must be": lambda: policy_loss(x, x, x, live, ratio="Sequence", **options),
        "normalize tokens: must be token, sequence or constant": lambda: token_weights(
            "tokens", live, edges, totals, 8
        ),
        "normalize None: must be": lambda: token_weights(None, live, edges, totals, 8),
        "kind tis: must be token, sequence, mask or off": lambda: sampler_correction(
            x, x, live, edges, kind="tis", cap=2.0
        ),
        "kind none: must be": lambda: sampler_correction(x, x, live, edges, kind="none", cap=2.0),
        "kl_estimate kind k4: must be k1, k2 or k3": lambda: kl_estimate(x, x, "k4"),
        "--loss.normalize seq: must be": lambda: LossConfig(normalize="seq"),
        "--loss.ratio gspo: must be": lambda: LossConfig(ratio="gspo"),
        "--loss.importance False: must be": lambda: LossConfig(importance=False),
        "--loss.kl k4: must be k2 or k3": lambda: LossConfig(kl="k4"),
    }


@pytest.mark.parametrize("message", misspelt())
def test_a_misspelt_choice_is_refused_and_not_taken_for_the_last_one(message):
    """scaleapi/vero#22, #18: other results and no error. A copied file has no command line to check
    its words.
    """
    with pytest.raises(ValueError, match=f"^{message}"):
        misspelt()[message]()


def test_the_ratio_of_a_sequence_needs_the_sequences():
    x = tensor(-1.0, -1.0)
    with pytest.raises(ValueError, match="ratio sequence: needs cu_seqlens"):
        policy_loss(x, x, x, mask(1, 1), normalizer=1.0, ratio="sequence")


def test_a_padded_batch_is_a_row_when_flattened():
    """Two rows of three, the last place a pad that holds anything; against a plain loop."""
    response_mask = torch.tensor([[0, 1, 1], [0, 1, 0]]).bool()
    logprobs = torch.tensor([[NAN, -1.0, -2.0], [NAN, -0.5, NAN]], requires_grad=True)
    old = torch.tensor([[NAN, -1.1, -1.9], [NAN, -0.7, NAN]])
    advantages = torch.tensor([[1, 1, 1], [-1, -1, -1]])
    edges = boundaries(0, 3, 6)
    totals = {"tokens": 3, "sequences": 2}
    weights, normalizer = token_weights("sequence", response_mask.flatten(), edges, totals, 2)
    loss, _ = policy_loss(
        logprobs.flatten(),
        old.flatten(),
        advantages.flatten(),
        response_mask.flatten(),
        normalizer=normalizer,
        token_weights=weights,
    )
    expected = -((math.exp(0.1) + math.exp(-0.1)) / 2 - math.exp(0.2)) / 2
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert (logprobs.grad[~response_mask] == 0).all()


def test_arguments_are_not_written_to():
    made = [tensor(-1.0, -2.0), tensor(-1.1, -1.9), tensor(1.0, -1.0)]
    before = [x.clone() for x in made]
    weights, _ = sampler_correction(
        made[0], made[1], mask(1, 0), boundaries(0, 2), kind="sequence", cap=2.0
    )
    policy_loss(*made, mask(1, 0), normalizer=1.0, importance_weights=weights)
    value_loss(*made, mask(1, 0), clip=0.1, normalizer=1.0)
    assert all(x.equal(y) for x, y in zip(made, before, strict=True))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(clip_low=0.0), "--loss.clip-low 0.0"),
        (dict(clip_high=-0.1), "--loss.clip-high -0.1"),
        (dict(kl_coef=-1.0), "--loss.kl-coef -1.0"),
        (dict(kl_coef=math.inf), "--loss.kl-coef inf: must be at least 0"),
        (dict(entropy_coef=math.inf), "--loss.entropy-coef inf: must be at least 0"),
        (dict(entropy_coef=-1.0), "--loss.entropy-coef -1.0"),
        (dict(target_kl=-1.0), "--loss.target-kl -1.0"),
        (dict(importance_cap=0.5), "--loss.importance-cap 0.5"),
        (dict(clip_high=NAN), "--loss.clip-high nan"),
        (dict(entropy_coef=NAN), "--loss.entropy-coef nan"),
        (dict(importance_cap=NAN), "--loss.importance-cap nan"),
    ],
)
def test_settings_without_meaning_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(learning_rate=NAN), "--critic.learning-rate nan: must be above 0"),
        (dict(warmup_steps=-1), "--critic.warmup-steps -1: must be at least 0"),
        (dict(value_clip=NAN), "--critic.value-clip nan: must be above 0"),
    ],
)
def test_a_critics_settings_without_meaning_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        CriticConfig(**setting)
