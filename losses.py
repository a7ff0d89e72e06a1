# SPDX-FileCopyrightText: 2026 handful contributors (losses.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Surrogate, value loss, KL estimators, importance weights: pure functions of per-token tensors.

The problem. A policy gradient over many tokens is a mean, and the mean is where implementations go
wrong: dividing inside a micro-batch and averaging the quotients, dividing once more for
accumulation, FSDP dividing by the number of ranks, or counting tokens in the denominator that the
numerator masks. Each makes the step depend on the layout. In micro-batches of one response, a mean
of means weighs a token of a response of 1 token 128 times as much as a token of one of 128.

How it works. Every function returns a sum divided by one number, `normalizer`, that the caller
knows before the first forward: it is counted over all rows and all ranks of the minibatch.
Gradients of rows and ranks then simply add up. What the number is decides what is optimised, so it
is a flag (`normalize`):
    token     all response tokens                   DAPO: every token counts the same
    sequence  responses, each token 1 / its length  GRPO: every response counts the same
    constant  responses x max_response_tokens       Dr. GRPO: length plays no part
Worked example, responses of 1 and 9 tokens, advantages +1 and -1, ratio 1, limit 10: the loss is
-(1 - 9) / 10 = 0.8, -(1 - 1) / 2 = 0 and -(1 - 9) / 20 = 0.4. With sequence, long bad responses are
hardly pushed back.

The surrogate (PPO, eq. 7), with r = pi / pi_old: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
    A = +1, r = 2    -1.28, no gradient at clip_high 0.28: likely enough already
    A = -1, r = 0.5  +0.8, no gradient at clip_low 0.2: unlikely enough already
    A = -1, r = 2    +2, with gradient: a token that was bad and is likelier is always pushed back
`ratio="sequence"` takes r as the geometric mean over the response (GSPO); needs `cu_seqlens`.

Three sources of difference between the policies, three corrections, never mixed:
    old -> current        the ratio r: minibatches and epochs move the policy during the update
    sampler -> old        `importance_weights`: the same weights give other numbers in other kernels
    reference -> current  the KL term: `kl_estimate`

KL estimators, on tokens sampled from p. By value k1 and k3 are unbiased for KL(p|ref). By gradient,
which is what counts in a loss, k1 is noise around zero, k2 has the gradient of KL(p|ref) and k3
that of KL(ref|p). So k1 is refused as a loss; in a reward k1 is the right one.

Shapes: N tokens in a packed row, S sequences; tensors are [N] unless said otherwise. "Masked" is
an entry where a mask is False: it may hold anything, NaN too. No exp is taken of more than 40 nats:
beyond, a ratio is e^40, with a gradient of that size, where fp32 would give inf and 0 x inf.
What we give up: a fused kernel; a ratio clipped from above for bad tokens (dual-clip PPO).
Sources (arXiv): Schulman 2017 (1707.06347), Shao 2024 (GRPO, 2402.03300), Liu 2025 (Dr. GRPO,
2503.20783), Yu 2025 (DAPO, 2503.14476), Zheng 2025 (GSPO, 2507.18071); Schulman 2020
"Approximating KL divergence".

Copied. A padded batch [B, T] is a row when flattened: cu_seqlens are the multiples of T.
    import torch
    from losses import policy_loss
    logprobs = torch.zeros(2, 3, requires_grad=True)  # [B, T]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()  # pads are False
    advantages = torch.tensor([[1.0], [-0.5]]).expand(2, 3)
    flat = [x.flatten() for x in (logprobs, logprobs.detach(), advantages, mask)]
    print(policy_loss(*flat, normalizer=3.0)[0].item())  # -0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

MAX_NATS = 40.0  # the square of e^40 is still a number in fp32

Normalize = Literal["token", "sequence", "constant"]
Ratio = Literal["token", "sequence"]
Importance = Literal["token", "sequence", "mask", "off"]


@dataclass(frozen=True)
class LossConfig:
    clip_low: float = 0.2
    """A token with negative advantage gives no gradient once its probability ratio is below 1 -
    clip_low: the larger, the further it may fall in a step."""
    clip_high: float = 0.28
    """A token with positive advantage gives no gradient once its probability ratio is above 1 +
    clip_high: the larger, the further it may rise in a step (equal to clip_low: plain PPO)."""
    normalize: Normalize = "token"
    """Divisor of every loss term: all response tokens, responses (each token 1 / length), or
    responses x limit."""
    ratio: Ratio = "token"
    """Ratio of the surrogate per token, or the geometric mean over the response (GSPO; use clips
    around 3e-4)."""
    kl_coef: float = 0.0
    """Weight of the KL term in the loss: the larger, the closer the policy stays to the reference;
    0: no reference model at all."""
    kl: Literal["k2", "k3"] = "k3"
    """Estimator in the loss: k2 has the gradient of KL(policy|reference), k3 that of
    KL(reference|policy)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the larger, the more random the policy stays; 0: off."""
    importance: Importance = "token"
    """Weights against the sampler's own probabilities: per token or per response, at most
    importance_cap; mask: tokens outside [1 / cap, cap] are left out; off: none."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    target_kl: float = 0.0
    """Largest ppo_kl of a minibatch: one that exceeds it, and the rest of the step, is skipped; 0:
    never."""

    def __post_init__(self):
        _check_choice("--loss.kl", self.kl, Literal["k2", "k3"])  # k1: no gradient on average
        _check_choice("--loss.normalize", self.normalize, Normalize)
        _check_choice("--loss.ratio", self.ratio, Ratio)
        _check_choice("--loss.importance", self.importance, Importance)
        # Written so that NaN is refused as well.
        for name, holds, rule in (
            ("clip_low", 0 < self.clip_low <= 1, "above 0 and at most 1; try 0.2"),
            ("clip_high", self.clip_high > 0, "above 0; try 0.28"),
            ("kl_coef", 0 <= self.kl_coef < 1e18, "at least 0 (off), and below 1e18"),
            ("entropy_coef", 0 <= self.entropy_coef < 1e18, "at least 0 (off), and below 1e18"),
            ("importance_cap", self.importance_cap >= 1, "at least 1; try 2"),
            ("target_kl", self.target_kl >= 0, "at least 0 (never)"),
        ):
            if not holds:
                flag = f"--loss.{name.replace('_', '-')} {getattr(self, name)}"
                raise ValueError(f"{flag}: must be {rule}")


def _check_choice(name: str, value: Any, choices: Any) -> None:
    """ValueError unless value is one of the words of the Literal `choices`."""
    *others, last = get_args(choices)
    if value not in (*others, last):
        raise ValueError(f"{name} {value}: must be {', '.join(others)} or {last}")


@dataclass(frozen=True)
class CriticConfig:
    path: str = ""
    """Model that the critic starts from; a score head that it lacks begins as zeros. Empty: the
    reward model, or without one the policy."""
    learning_rate: float = 1e-5
    """Peak learning rate of the critic."""
    warmup_steps: int = 0
    """Steps at the start in which the critic alone learns."""
    value_clip: float = 0.2
    """A value gives no gradient once it has moved this far from its value before the update towards
    the return; inf: no clipping."""

    def __post_init__(self):
        for name, holds, rule in (
            ("learning_rate", 0 < self.learning_rate < 1, "above 0 and below 1; try 1e-5"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("value_clip", self.value_clip > 0, "above 0; try 0.2"),
        ):
            if not holds:
                flag = f"--critic.{name.replace('_', '-')} {getattr(self, name)}"
                raise ValueError(f"{flag}: must be {rule}")


def actor_loss(
    logprobs: Tensor,
    entropy: Tensor,
    row,
    totals: Mapping[str, int],
    config: LossConfig,
    max_response_tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This row's part of the policy's loss (surrogate, KL, entropy bonus), and its statistics.

    logprobs, entropy [N] with grad. row: any object with cu_seqlens [S+1], num_response_tokens and
    the fields [N] response_mask, advantages, rollout_logprobs, old_logprobs unless they are the
    current ones, and ref_logprobs if there is a KL term (packing.PackedRow). totals: response
    "tokens" and "sequences" of the minibatch over all ranks. Statistics are means over the tokens.
    """
    mask = row.fields["response_mask"]
    old_logprobs = row.fields.get("old_logprobs", logprobs.detach())
    sampled = row.fields["rollout_logprobs"]
    edges = row.cu_seqlens
    corrections, mismatch = sampler_correction(
        old_logprobs, sampled, mask, edges, kind=config.importance, cap=config.importance_cap
    )
    weights, normalizer = token_weights(config.normalize, mask, edges, totals, max_response_tokens)
    loss, stats = policy_loss(
        logprobs,
        old_logprobs,
        row.fields["advantages"],
        mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        normalizer=normalizer,
        cu_seqlens=edges,
        ratio=config.ratio,
        token_weights=weights,
        importance_weights=corrections,
    )
    num_tokens = max(1, row.num_response_tokens)
    stats["pg_loss"] = loss * totals["tokens"] / num_tokens
    stats["entropy"] = masked_sum(entropy, mask) / num_tokens
    if config.kl_coef:
        live = torch.where(mask, logprobs, 0.0)  # of a masked token the KL may be inf, times 0
        kl = kl_estimate(live, row.fields["ref_logprobs"], config.kl)
        stats["kl_loss"] = masked_sum(kl, mask) / num_tokens
        loss = loss + config.kl_coef * masked_sum(kl * weights, mask) / normalizer
    if config.entropy_coef:
        loss = loss - config.entropy_coef * masked_sum(entropy * weights, mask) / normalizer
    loss = loss * torch.where((sampled.isfinite() | ~mask).all(), 1.0, torch.nan)  # or skipped
    named = {f"actor/{name}": x.detach() for name, x in stats.items()}
    return loss, named | {f"rollout_corr/{name}": x for name, x in mismatch.items()}


def critic_loss(
    values: Tensor, row, totals: Mapping[str, int], config: CriticConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """This row's part of the critic's loss, a mean over the minibatch's tokens, and its statistics.

    values [N] with grad; row as in actor_loss, with the fields values (before the update), returns.
    """
    normalizer = float(max(1, totals["tokens"]))
    loss, stats = value_loss(
        values,
        row.fields["values"],
        row.fields["returns"],
        row.fields["response_mask"],
        clip=config.value_clip,
        normalizer=normalizer,
    )
    stats["vf_loss"] = loss * normalizer / max(1, row.num_response_tokens)
    return loss, {f"critic/{name}": x.detach() for name, x in stats.items()}


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    normalizer: float,
    cu_seqlens: Tensor | None = None,
    ratio: Ratio = "token",
    token_weights: Tensor | None = None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum over response tokens of w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) /
    normalizer, and statistics.

    logprobs [N] with grad, old_logprobs [N], advantages [N], response_mask [N] bool; w is
    token_weights [N] (1 / length for a mean over sequences) times importance_weights [N], each 1 if
    None. ratio "sequence" needs cu_seqlens [S+1], else ValueError. Statistics are means over this
    row's response tokens: pg_clipfrac (share of tokens whose gradient the clip removes) and ppo_kl
    (k3 estimate of KL(old|current)). A row without response tokens gives 0 and zero gradient.
    """
    _check_choice("ratio", ratio, Ratio)
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    kl = _k3(log_ratio)  # of KL(old|current), on tokens sampled from old
    if ratio == "sequence":
        if cu_seqlens is None:
            raise ValueError("ratio sequence: needs cu_seqlens, where each sequence begins")
        lengths = _sequence_sum(response_mask.to(log_ratio.dtype), cu_seqlens)
        mean = _sequence_sum(log_ratio, cu_seqlens) / lengths.clamp(min=1)
        log_ratio = torch.where(response_mask, mean, 0.0)
    r = torch.exp(_bounded(log_ratio))
    unclipped = -advantages * r
    clipped = -advantages * r.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.maximum(unclipped, clipped)
    live = response_mask
    for weights in (token_weights, importance_weights):
        if weights is not None:
            per_token = per_token * weights
            live = live & (weights != 0)
    num_tokens = response_mask.sum().clamp(min=1)
    stats = {
        "pg_clipfrac": (clipped > unclipped).sum() / num_tokens,
        "ppo_kl": kl.detach().sum() / num_tokens,
    }
    return masked_sum(per_token, live) / normalizer, stats


def _bounded(x: Tensor) -> Tensor:
    """x, at most 40, with the gradient of x everywhere: what is far off is still pushed."""
    return x.detach().clamp(max=MAX_NATS) + (x - x.detach())


def _k3(d: Tensor) -> Tensor:
    return torch.expm1(_bounded(d)) - d


def _sequence_sum(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] -> [N]: every token gets the sum of x over its sequence."""
    num_sequences = len(cu_seqlens) - 1
    # output_size spares the device sync that repeat_interleave would need to learn its own length.
    indices = torch.arange(num_sequences, device=x.device)
    segment = torch.repeat_interleave(indices, cu_seqlens.diff().long(), output_size=len(x))
    return x.new_zeros(num_sequences).index_add(0, segment, x)[segment]


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip: float,
    normalizer: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum over response tokens of 1/2 max((v - R)^2, (v_clipped - R)^2) / normalizer, statistics.

    v_clipped is v kept within `clip` of old_values (inf: no clipping). values [N] with grad; the
    rest [N]. Statistics: vf_clipfrac, the share of response tokens whose value left the band.
    """
    v = torch.where(response_mask, values, 0.0)
    old = torch.where(response_mask, old_values, 0.0)
    target = torch.where(response_mask, returns, 0.0)
    v_clipped = torch.minimum(torch.maximum(v, old - clip), old + clip)
    per_token = 0.5 * torch.maximum((v - target) ** 2, (v_clipped - target) ** 2)
    num_tokens = response_mask.sum().clamp(min=1)
    stats = {"vf_clipfrac": ((v - old).abs() > clip).sum() / num_tokens}
    return masked_sum(per_token, response_mask) / normalizer, stats


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k2", "k3"] = "k3"
) -> Tensor:
    """Estimates of KL(policy|reference) on tokens sampled from the policy: [N], [N] -> [N].

    d = ref_logprobs - logprobs:  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - d - 1. ValueError for k1 of
    logprobs that carry grad.
    """
    _check_choice("kl_estimate kind", kind, Literal["k1", "k2", "k3"])
    d = ref_logprobs - logprobs
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return _k3(d)
    if logprobs.requires_grad:
        raise ValueError("kl_estimate kind k1: has no gradient on average; use k2 or k3, or detach")
    return -d


def token_weights(
    normalize: Normalize,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    totals: Mapping[str, int],
    max_response_tokens: int,
) -> tuple[Tensor, float]:
    """Weight of each token [N] fp32 and the number that the weighted sum over all rows and ranks is
    divided by.

    totals: response "tokens" and "sequences" of the minibatch over all ranks (of 0 the divisor is
    1: all terms are 0).
    """
    _check_choice("normalize", normalize, Normalize)
    weights = response_mask.float()
    if normalize == "token":
        return weights, float(max(1, totals["tokens"]))
    if normalize == "sequence":
        weights = weights / _sequence_sum(weights, cu_seqlens).clamp(min=1)
        return weights, float(max(1, totals["sequences"]))
    return weights, float(max(1, totals["sequences"]) * max_response_tokens)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """sum of x over mask: [N], [N] bool -> scalar; NaN or inf outside the mask gives neither value
    nor gradient."""
    return torch.where(mask, x, 0.0).sum()


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(pi_old / pi_sampler, cap) per token, without grad: [N], [N] -> [N]."""
    return torch.exp(_bounded((old_logprobs - rollout_logprobs).detach())).clamp(max=cap)


def sampler_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    kind: Importance,
    cap: float,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Importance weights [N] (None for "off"), and how far apart sampler and trainer are.

    token: truncated at cap, per token. sequence: the product over the response, truncated, the same
    for all its tokens. mask: 1, but 0 where the token's own weight leaves [1 / cap, cap]. What the
    sampler reports as NaN or -inf gives a weight of NaN. All [N] but cu_seqlens [S+1]. Statistics,
    means over the response tokens: kl (k3 of KL(sampler|old)), abs_diff_mean, is_weight_mean,
    is_square_mean; and abs_diff_max.
    """
    _check_choice("kind", kind, Importance)
    log_weights = torch.where(response_mask, (old_logprobs - rollout_logprobs).detach(), 0.0)
    used = _sequence_sum(log_weights, cu_seqlens) if kind == "sequence" else log_weights
    weights = importance_weights(used, torch.zeros_like(used), cap=cap)
    if kind == "mask":
        inside = (log_weights.abs().exp() <= cap).to(weights.dtype)
        weights = torch.where(weights.isnan(), weights, inside)
    weights = torch.where(response_mask, weights, 0.0)
    num_tokens = response_mask.sum().clamp(min=1)
    stats = {
        "kl": _k3(log_weights).sum() / num_tokens,
        "abs_diff_mean": log_weights.abs().sum() / num_tokens,
        "abs_diff_max": log_weights.abs().max(),
        "is_weight_mean": weights.sum() / num_tokens,
        "is_square_mean": (weights * weights).sum() / num_tokens,
    }
    return (None if kind == "off" else weights), stats
