# SPDX-FileCopyrightText: 2026 handful contributors (supervised.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Losses on texts that are given, not sampled: cross-entropy of demonstrations, DPO of pairs.

The problem. Where demonstrations, pairs and rewards train one policy, each has its own unit: a
token, a pair, a sampled token. Averaged over a row or a rank, a kind's weight depends on what else
lies in that row; then --weights say nothing.

How it works. Each loss is a sum over this row divided by one number that its caller counts over all
rows and ranks of the minibatch: trained tokens of demonstrations, pairs. The gradient of a mixed
batch is then the weighted sum of the gradients of each kind alone.

    cross-entropy  -log pi(token), summed over trained tokens / their number
    DPO            -log sigmoid(m), summed over pairs / their number
                   m = kl_coef ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))
A pair is two sequences, one after the other: chosen, rejected. log pi of one is the sum over its
trained tokens, with `length_normalize` their mean.
    log pi, chosen    -2.0    reference -3.0        it has gained 1.0
    log pi, rejected  -2.5    reference -2.0        it has lost 0.5
    kl_coef 0.1: m = 0.15, the loss is 0.621, and its gradient moves both by 0.1 sigmoid(-m) = 0.046
Before any update m = 0 for every pair: the loss is log 2, the accuracy (the share of m > 0) is 0.

Choices: `ipo` asks for a margin, (m / kl_coef - 1 / (2 kl_coef))^2, where sigmoid asks for ever
more; `label_smoothing` e takes a share e of the pairs as turned round; `reference_free` takes
log ref as 0. DPO may lower the chosen text as long as it lowers the rejected one more: watch
dpo/chosen_logprob. Cross-entropy on the chosen texts in the same step holds it up.

Shapes: N tokens in a row, S sequences in it. A row without a trained token gives 0 and a gradient
of 0. What we give up: losses of more than two ranked texts; a fused kernel.
Sources (arXiv): Rafailov 2023 (DPO, 2305.18290), Azar 2023 (IPO, 2310.12036), Mitchell 2023
(label smoothing: "A note on DPO with noisy preferences"), Meng 2024 (SimPO, 2405.14734).

Copied. A padded batch [B, T] is a row when flattened: cu_seqlens are the multiples of T.
    import torch
    from supervised import DpoConfig, preference_loss
    logprobs = torch.tensor([0.0, -2.0, 0.0, -2.5], requires_grad=True)
    ref_logprobs = torch.tensor([0.0, -3.0, 0.0, -2.0])
    mask = torch.tensor([False, True, False, True])
    edges = torch.tensor([0, 2, 4])
    loss, stats = preference_loss(logprobs, ref_logprobs, mask, edges, DpoConfig(), 1.0)
    print(round(loss.item(), 3))  # 0.621
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class SftConfig:
    data: tuple[str, ...] = ()
    """Demonstrations: sources as in --data, of rows with prompt and response, or with messages
    (chat, whose assistant turns are trained)."""
    eval_data: tuple[str, ...] = ()
    """Demonstrations to evaluate on, of the same kinds; empty: none."""
    samples_per_step: int = 64
    """Demonstrations in a step, over all ranks."""
    max_tokens: int = 1024
    """Longest demonstration in tokens; longer ones are cut at their end and counted."""

    def __post_init__(self):
        _check_sizes("sft", samples_per_step=self.samples_per_step, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class DpoConfig:
    data: tuple[str, ...] = ()
    """Pairs: sources as in --data, of rows with prompt, chosen and rejected, as text or chat."""
    eval_data: tuple[str, ...] = ()
    """Pairs to evaluate on, of the same kinds; empty: none."""
    pairs_per_step: int = 64
    """Pairs in a step, over all ranks."""
    max_tokens: int = 1024
    """Longest half of a pair in tokens; longer ones are cut at their end and counted."""
    kl_coef: float = 0.1
    """DPO's beta: the smaller, the further a pair may pull the policy from the reference."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO; ipo: a margin of 1 / (2 kl_coef) is enough."""
    label_smoothing: float = 0.0
    """Share of the pairs that may be the wrong way round; 0: off."""
    length_normalize: bool = False
    """A text counts by the mean of its tokens' log-probabilities, not by their sum."""
    reference_free: bool = False
    """The reference is left out: no model for it, and the margin is the policy's own."""

    def __post_init__(self):
        _check_sizes("dpo", pairs_per_step=self.pairs_per_step, max_tokens=self.max_tokens)
        smoothing = self.label_smoothing
        for name, value, holds, rule in (
            ("kl-coef", self.kl_coef, 0 < self.kl_coef < 1e18, "above 0, below 1e18; try 0.1"),
            ("loss", self.loss, self.loss in ("sigmoid", "ipo"), "sigmoid or ipo"),
            ("label-smoothing", smoothing, 0 <= smoothing < 0.5, "from 0 (off) to below 0.5"),
            ("label-smoothing", smoothing, smoothing == 0 or self.loss == "sigmoid", "0 with ipo"),
        ):
            if not holds:
                raise ValueError(f"--dpo.{name} {value}: must be {rule}")


def _check_sizes(group: str, **sizes: int) -> None:
    for name, value in sizes.items():
        least = 2 if name == "max_tokens" else 1  # one to predict from, one to learn
        if value < least:
            flag = f"--{group}.{name.replace('_', '-')} {value}"
            raise ValueError(f"{flag}: must be at least {least}")


def weights_at(weights: Sequence[float], step: int) -> tuple[float, float, float]:
    """(sft, dpo, rl): the weights of the three losses in 0-based `step`.

    weights: three numbers, or knots of four, "step sft dpo rl", in ascending order of steps;
    linear between two knots, constant before the first and after the last.
        0 1 0 0  100 0 0 1   at step 25: (0.75, 0, 0.25)
    """
    if len(weights) == 3:
        return tuple(weights)
    knots = [weights[i : i + 4] for i in range(0, len(weights), 4)]
    later = next((k for k, knot in enumerate(knots) if knot[0] >= step), len(knots) - 1)
    after = knots[later]
    before = knots[max(0, later - 1)]
    if step >= after[0] or later == 0:
        return tuple(after[1:])
    share = (step - before[0]) / (after[0] - before[0])
    mixed = [a + share * (b - a) for a, b in zip(before[1:], after[1:], strict=True)]
    return tuple(mixed)


def check_weights(weights: Sequence[float]) -> None:
    """ValueError for weights that weights_at cannot use, negative ones, or none above 0."""
    flag = f"--weights {' '.join(map(str, weights))}"
    if len(weights) != 3 and (len(weights) % 4 or not weights):
        rule = "three numbers, sft dpo rl, or knots of four, step sft dpo rl"
        raise ValueError(f"{flag}: must be {rule}")
    steps = list(weights[::4]) if len(weights) != 3 else []
    values = [x for i, x in enumerate(weights) if not steps or i % 4]
    if not all(0 <= x < 1e18 for x in weights) or sum(values) == 0:
        raise ValueError(f"{flag}: must be at least 0 each, and one above 0")
    if steps and not all(map(sum, zip(*[iter(values)] * 3, strict=True))):
        raise ValueError(f"{flag}: each knot must have a weight above 0")
    if any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError(f"{flag}: the steps of the knots must ascend")


def cross_entropy(
    logprobs: Tensor, likeliest: Tensor, response_mask: Tensor, normalizer: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-(sum of logprobs over trained tokens) / normalizer, and statistics.

    logprobs [N] with grad; likeliest [N]: 1 for a token than which none is likelier; response_mask
    [N] bool: the trained tokens. normalizer: their number over all rows and ranks of the minibatch.
    Statistics, means over this row's trained tokens: loss; token_accuracy, the share of likeliest.
    """
    loss = -torch.where(response_mask, logprobs, 0.0).sum()
    count = response_mask.sum().clamp(min=1)
    hits = torch.where(response_mask, likeliest, 0.0).sum()
    stats = {"sft/loss": loss.detach() / count, "sft/token_accuracy": hits / count}
    return loss / normalizer, stats


def preference_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: DpoConfig,
    normalizer: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of this row's pair losses / normalizer, and statistics, means over its pairs.

    logprobs [N] with grad, ref_logprobs [N] (None: reference-free), response_mask [N] bool: the
    trained tokens. cu_seqlens [S+1]: sequences 2k and 2k + 1 are pair k, chosen and rejected.
    normalizer: pairs over all rows and ranks of the minibatch. Statistics: loss; accuracy, the
    share of pairs with a margin above 0; margin; log-probability of the chosen and rejected texts.
    """
    own = sequence_sums(logprobs, response_mask, cu_seqlens)  # [S]
    gained = own
    if ref_logprobs is not None and not config.reference_free:
        gained = own - sequence_sums(ref_logprobs, response_mask, cu_seqlens)
    if config.length_normalize:
        ones = torch.ones_like(logprobs)
        gained = gained / sequence_sums(ones, response_mask, cu_seqlens).clamp(min=1)
    num_pairs = len(gained) // 2  # 0 of an empty row, which is one sequence
    chosen, rejected = gained[: 2 * num_pairs].view(num_pairs, 2).unbind(1)
    margin = config.kl_coef * (chosen - rejected)  # [S/2]
    if config.loss == "ipo":
        per_pair = ((margin - 0.5) / config.kl_coef) ** 2
    else:
        smoothing = config.label_smoothing
        per_pair = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    both = own.detach()[: 2 * num_pairs].view(num_pairs, 2)
    stats = {
        "loss": per_pair.detach(),
        "accuracy": (margin > 0).float(),
        "margin": margin.detach(),
        "chosen_logprob": both[:, 0],
        "rejected_logprob": both[:, 1],
    }
    means = {f"dpo/{name}": x.sum() / max(1, num_pairs) for name, x in stats.items()}
    return per_pair.sum() / normalizer, means


def text_statistics(
    logprobs: Tensor, likeliest: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """Of held-out demonstrations: sft_loss, and the share of trained tokens that are the likeliest.
    Arguments as in cross_entropy.
    """
    _, stats = cross_entropy(logprobs, likeliest, response_mask, 1.0)
    return {f"sft_{name.removeprefix('sft/')}": value for name, value in stats.items()}


def pair_statistics(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: DpoConfig,
) -> dict[str, Tensor]:
    """Of held-out pairs: dpo_preferred, the share whose chosen text is the likelier one, and with a
    reference dpo_accuracy. Arguments as in preference_loss.
    """
    known = response_mask, cu_seqlens
    own = DpoConfig(reference_free=True)
    _, stats = preference_loss(logprobs, None, *known, own, 1.0)
    found = {"dpo_preferred": stats["dpo/accuracy"]}
    if ref_logprobs is not None:
        _, stats = preference_loss(logprobs, ref_logprobs, *known, config, 1.0)
        found["dpo_accuracy"] = stats["dpo/accuracy"]
    return found


def sequence_sums(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sum of x over each sequence's masked-in tokens: [N], [N] bool, [S+1] -> [S]."""
    num_sequences = len(cu_seqlens) - 1
    indices = torch.arange(num_sequences, device=x.device)
    # output_size spares the device sync that repeat_interleave would need to learn its own length.
    segment = torch.repeat_interleave(indices, cu_seqlens.diff().long(), output_size=len(x))
    return x.new_zeros(num_sequences).index_add(0, segment, torch.where(mask, x, 0.0))
