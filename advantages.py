# SPDX-FileCopyrightText: 2026 handful contributors (advantages.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Group advantages, GAE, and a cache that cannot return another batch's advantages.

The problem. A reward says how good a response is; the gradient needs how much better it is than
expected. GRPO compares each response with its group, the G samples of one prompt; no critic is
needed. PPO asks a critic, token by token. Both are a few lines, and both go wrong in silence:
statistics over the batch instead of the group (answers to an easy prompt all look good), a NaN from
the deviation of identical rewards, a reward that lands on a pad.

How it works. Groups are rows of a matrix [P, G], P prompts and G samples per prompt, so that a
group cannot be torn:
    rewards             1 1 1 1            0 0 0 1
    baseline group      0 0 0 0            -.25 -.25 -.25 .75        (GRPO without std = Dr. GRPO)
    / std (ddof 1)      0 0 0 0            -.5 -.5 -.5 1.5           (GRPO)
    leave_one_out       0 0 0 0            -.33 -.33 -.33 1          (RLOO: mean of the others)
    batch               .375 (x4)          -.625 (x3) .375           (REINFORCE with the batch mean)
A group without spread gives exactly 0: its deviations are 0 before anything is divided.

GAE runs backwards over the response tokens of each sequence in a packed row; masked tokens between
two response tokens (a tool's output) are no transitions and are skipped. The value after the last
response token is 0.
    delta_t = r_t + gamma V_{t+1} - V_t   A_t = delta_t + gamma lam A_{t+1}   return_t = A_t + V_t

Shapes: N tokens in a row, S sequences in a row. What we give up: GAE is a host loop over the
longest response (512 of 1,024 tokens: some 50 ms on one CPU core); a scan kernel would be faster.
Sources (arXiv): Shao 2024 (GRPO, 2402.03300), Liu 2025 (Dr. GRPO, 2503.20783), Ahmadian 2024
(RLOO, 2402.14740), Schulman 2016 (GAE, 1506.02438, eq. 16), Yu 2025 (DAPO, 2503.14476).

Copied: a group is a line of [P, G]; a padded batch [B, T] is a row when it is flattened.
    import torch
    from advantages import gae, group_advantages
    print(group_advantages(torch.tensor([[0, 0, 0, 1]]), scale_by_std=False).tolist())
    row = torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3), torch.ones(3).bool(), torch.tensor([0, 3])
    print(gae(*row, gamma=1.0, lam=0.5)[0].tolist())  # [0.25, 0.5, 1.0]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Baseline = Literal["group", "leave_one_out", "batch"]
MAX_REWARD = 1e18  # sums and squares are far from where fp32 ends


@dataclass(frozen=True)
class AdvantageConfig:
    baseline: Baseline = "group"
    """What a reward is compared with: the mean of its group (GRPO), of the others in the group
    (RLOO) or of the batch (REINFORCE)."""
    scale_by_std: bool = True
    """Divide by the standard deviation of the group (of the batch with baseline batch); off: Dr.
    GRPO."""
    overlong_buffer: int = 0
    """Number of tokens before the length limit that each cost a response reward (DAPO's soft
    penalty); 0: off."""
    overlong_weight: float = 1.0
    """Reward lost by a response that reaches the limit."""
    mask_truncated: bool = False
    """Learn nothing from truncated responses; they still count in what their group is compared
    with."""

    def __post_init__(self):
        _check_baseline("--advantage.baseline", self.baseline)
        for name in ("overlong_buffer", "overlong_weight"):
            if not 0 <= getattr(self, name) < MAX_REWARD:
                flag = f"--advantage.{name.replace('_', '-')} {getattr(self, name)}"
                raise ValueError(f"{flag}: must be at least 0 (no penalty), and below 1e18")


def _check_baseline(name: str, value: str) -> None:
    if value not in get_args(Baseline):
        raise ValueError(f"{name} {value}: must be group, leave_one_out or batch")


@dataclass(frozen=True)
class GaeConfig:
    gamma: float = 1.0
    """Discount per token: the smaller, the less a reward counts for the tokens long before it; 1:
    none."""
    gae_lambda: float = 0.95
    """At 1 advantages are returns less values, unbiased and noisy; the smaller, the more they trust
    the critic, down to its one-step errors at 0."""
    whiten: bool = True
    """Shift and scale the advantages of a batch to mean 0 and deviation 1, over all ranks."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference as a penalty in each token's reward; 0: off (--loss.kl-coef
    puts the KL into the loss)."""
    kl_target: float = 0.0
    """Steer kl_coef so that this KL, in nats per token, comes out; 0: kl_coef is fixed."""
    kl_horizon: int = 10_000
    """Responses over which a steered kl_coef changes by at most 20 %: the larger, the slower."""

    def __post_init__(self):
        for name, holds, rule in (
            ("gamma", 0 <= self.gamma <= 1, "in [0, 1]; try 1"),
            ("gae_lambda", 0 <= self.gae_lambda <= 1, "in [0, 1]; try 0.95"),
            ("kl_coef", 0 <= self.kl_coef < MAX_REWARD, "at least 0 (off), and below 1e18"),
            ("kl_coef", self.kl_coef or not self.kl_target, "above 0 with --gae.kl-target"),
            ("kl_target", 0 <= self.kl_target < MAX_REWARD, "at least 0 (off), and below 1e18"),
            ("kl_horizon", self.kl_horizon >= 1, "at least 1; try 10000"),
        ):
            if not holds:
                flag = f"--gae.{name.replace('_', '-')} {getattr(self, name)}"
                raise ValueError(f"{flag}: must be {rule}")


def group_advantages(
    rewards: Tensor,
    *,
    baseline: Baseline = "group",
    scale_by_std: bool = True,
    epsilon: float = 1e-6,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """(reward - baseline) / (std + epsilon), [P, G] -> [P, G] fp32; exactly 0 for a group whose
    rewards are all equal.

    std is the sample deviation (ddof 1). baseline "batch" takes mean and deviation over all prompts
    of all ranks of `group` (collective; P may differ between ranks and be 0). Raises ValueError for
    G < 2 unless baseline is "batch", and for rewards above MAX_REWARD.
    """
    _check_baseline("baseline", baseline)
    if rewards.ndim != 2:
        raise ValueError(f"rewards {list(rewards.shape)}: must be [P, G], a line for each group")
    group_size = rewards.shape[1]
    if group_size < 2 and baseline != "batch":
        raise ValueError(f"group size {group_size}: a group baseline needs at least 2 samples")
    too_large = rewards[~(rewards.double().abs() <= MAX_REWARD)]
    if len(too_large):
        raise ValueError(f"rewards {too_large.tolist()}: must be finite, at most 1e18 in size")
    if baseline == "batch":
        rewards = rewards.double()
        mean, std = _global_mean_std(rewards, torch.ones_like(rewards, dtype=torch.bool), group)
        deviations = (rewards - mean).float()
        std = std.float()
    else:
        shifted = _shifted(rewards)
        deviations = shifted - shifted.mean(1, keepdim=True)
        std = shifted.std(1, keepdim=True)
    if baseline == "leave_one_out":
        deviations = deviations * group_size / (group_size - 1)  # r - mean of the others
    return deviations / (std + epsilon) if scale_by_std else deviations


def _shifted(rewards: Tensor) -> Tensor:
    """Rewards [P, G] less the first of their group, fp32; exactly 0 where they are equal.

    Not less the mean: a mean of equal floats need not be that float. In double, as 1e8 and 1e8 + 1
    are one number in fp32. Rewards that differ by rounding alone (0.1 + 0.2 and 0.3) are equal.
    """
    exact = rewards.double()
    shifted = exact - exact[:, :1]
    rounding = 1e-14 * exact.abs().amax(1, keepdim=True).clamp(min=1)
    return torch.where(shifted.abs() <= rounding, 0.0, shifted).float()


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards [G] differ: False exactly where all its advantages are 0."""
    return bool(_shifted(torch.tensor([rewards], dtype=torch.float64)).any())


def _global_mean_std(
    x: Tensor, mask: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (ddof 1) of x over mask and over the ranks of `group`; (0, 0) for
    nothing. Collective."""
    # Two passes: E[x^2] - E[x]^2 loses all digits when the mean is large against the spread.
    x = x if x.is_floating_point() else x.float()  # an integer type holds no mean
    sum_and_count = torch.stack([torch.where(mask, x, 0.0).double().sum(), mask.sum().double()])
    if dist.is_initialized():
        dist.all_reduce(sum_and_count, group=group)
    total, count = sum_and_count
    mean = total / count.clamp(min=1)
    squares = torch.where(mask, (x.double() - mean) ** 2, 0.0).sum()
    if dist.is_initialized():
        dist.all_reduce(squares, group=group)
    variance = squares / (count - 1).clamp(min=1)
    return mean.to(x.dtype), variance.sqrt().to(x.dtype)


def whiten(x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """(x - mean) / (std + 1e-8) where mask is True, over all ranks, 0 elsewhere: [N], [N] bool ->
    [N]. Collective."""
    mean, std = _global_mean_std(x, mask, group)
    differ = mask & (std > 1e-6 * mean.abs())  # else rounding alone would be scaled up to 1
    return torch.where(differ, (x - mean) / (std + 1e-8), 0.0)


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    kl_coef: float,
) -> Tensor:
    """Per-token rewards [N]: -kl_coef (logprobs - ref_logprobs) on response tokens, plus the score
    on each last one.

    scores [S], logprobs and ref_logprobs [N], response_mask [N] bool, cu_seqlens [S+1]. The k1
    estimator is right here: in a reward only its value counts, and that is unbiased. A sequence
    without response tokens gets nothing.
    """
    rewards = torch.zeros_like(logprobs)
    if kl_coef:
        rewards = torch.where(response_mask, -kl_coef * (logprobs - ref_logprobs), 0.0)
    lengths = cu_seqlens.diff().long()
    num_tokens = len(logprobs)
    # The last response token of a sequence: none follows it before the next sequence begins.
    num_seen = response_mask.cumsum(0)
    num_at_end = num_seen[cu_seqlens[1:].long() - 1]  # [S]
    is_last = num_seen == num_at_end.repeat_interleave(lengths, output_size=num_tokens)  # [N]
    score = scores.to(rewards.dtype).repeat_interleave(lengths, output_size=num_tokens)
    return torch.where(response_mask & is_last, rewards + score, rewards)


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages [N] and returns [N] of generalised advantage estimation over packed sequences; 0
    outside responses.

    rewards [N], values [N] (value of the state before the token), response_mask [N] bool,
    cu_seqlens [S+1].
    """
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    num_live = [int(mask.sum()) for mask in response_mask.split(cu_seqlens.diff().tolist())]
    # A padded line for each sequence holds the response tokens alone: packed neighbours and masked
    # gaps are gone.
    column = torch.arange(max(num_live), device=rewards.device)
    live = column < torch.tensor(num_live, device=rewards.device)[:, None]  # [S, longest response]
    r = rewards.new_zeros(live.shape).masked_scatter(live, rewards[response_mask])
    v = rewards.new_zeros(live.shape).masked_scatter(live, values[response_mask].to(rewards))
    deltas = r - v + gamma * F.pad(v, (0, 1))[:, 1:]
    found = _scan(deltas.t().contiguous(), gamma * lam).t()
    advantages = torch.zeros_like(rewards).masked_scatter(response_mask, found[live])  # [N]
    return advantages, torch.where(response_mask, advantages + values, 0.0)


def _scan(deltas: Tensor, decay: float) -> Tensor:
    """A_t = delta_t + decay A_{t+1}: [T, S] -> [T, S]. Time first: a step reads contiguous memory.

    Behind a response all deltas are 0, and so is what flows into it.
    """
    advantages = deltas.clone()
    for now, then in reversed(list(itertools.pairwise(advantages.unbind()))):
        now.add_(then, alpha=decay)
    return advantages


@torch.no_grad()
def estimate(
    rows: Sequence[Sequence],
    config: GaeConfig,
    kl_coef: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[list], dict[str, float]]:
    """The same rows (of each minibatch) with advantages and returns, and statistics. Collective.

    Rows are dataclasses with cu_seqlens [S+1] and the fields [N] response_mask, scores (of its
    sequence, on each response token), values, and with a kl_coef old_logprobs and ref_logprobs
    (packing.PackedRow). Advantages are whitened over all rows of all ranks. Statistics, over the
    same: critic/vf_explained_var, of values against Monte-Carlo returns (lambda 1), unless all
    returns are equal; actor/reward_kl_penalty, k1 of KL(old|reference) in nats per token, and its
    weight, with a kl_coef.
    """
    flat = list(itertools.chain.from_iterable(rows))
    mask = _joined(flat, "response_mask")
    values = _joined(flat, "values")
    logprobs = _joined(flat, "old_logprobs") if kl_coef else torch.zeros_like(values)
    ref_logprobs = _joined(flat, "ref_logprobs") if kl_coef else logprobs
    cu_seqlens = _joined_boundaries(flat)
    scores = _joined(flat, "scores")[cu_seqlens[1:].long() - 1]  # [S]
    rewards = token_rewards(scores, logprobs, ref_logprobs, mask, cu_seqlens, kl_coef=kl_coef)
    advantages, returns = gae(
        rewards, values, mask, cu_seqlens, gamma=config.gamma, lam=config.gae_lambda
    )
    # With values of 0 a return is a plain sum: A + V would round, and equal returns would differ.
    no_values = torch.zeros_like(values)
    monte_carlo, _ = gae(rewards, no_values, mask, cu_seqlens, gamma=config.gamma, lam=1.0)
    stats = {}
    explained = explained_variance(values, monte_carlo, mask, group)
    if not math.isnan(explained):
        stats["critic/vf_explained_var"] = explained
    if kl_coef:
        kl, _ = _global_mean_std(logprobs - ref_logprobs, mask, group)
        stats["actor/reward_kl_penalty"] = float(kl)
        stats["actor/reward_kl_penalty_coeff"] = kl_coef
    if config.whiten:
        advantages = whiten(advantages, mask, group)
    return _with_fields(rows, {"advantages": advantages, "returns": returns}), stats


def _joined(rows: Sequence, name: str) -> Tensor:
    """The field of all rows in one tensor, on the host: gae is a loop over tokens, and a GPU would
    launch a kernel for each."""
    return torch.cat([row.fields[name] for row in rows]).cpu()


def _joined_boundaries(rows: Sequence) -> Tensor:
    """cu_seqlens of the rows as if they were one row."""
    lengths = torch.cat([row.cu_seqlens.diff() for row in rows]).cpu()
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _with_fields(rows: Sequence[Sequence], fields: dict[str, Tensor]) -> list[list]:
    """The same rows (of each minibatch), each with its part of the joined fields."""
    flat = list(itertools.chain.from_iterable(rows))
    sizes = [len(row.tokens) for row in flat]
    device = flat[0].tokens.device
    for name, joined in fields.items():
        parts = joined.to(device).split(sizes)
        flat = [
            dataclasses.replace(row, fields=row.fields | {name: part})
            for row, part in zip(flat, parts, strict=True)
        ]
    made = iter(flat)
    return [list(itertools.islice(made, len(minibatch))) for minibatch in rows]


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None
) -> float:
    """1 - Var(returns - values) / Var(returns) where mask is True, over all ranks: [N], [N], [N]
    bool. Collective. 1: the values are the returns up to a constant; 0: no better than a constant;
    nan: all returns are equal."""
    _, left = _global_mean_std(returns - values, mask, group)
    _, spread = _global_mean_std(returns, mask, group)
    return 1.0 - float(left / spread) ** 2 if spread > 0 else float("nan")


class KlController:
    """The weight of the KL penalty: fixed, or steered to a target. It can be saved and resumed.

    coef <- coef x (1 + clip(kl / target - 1, -0.2, 0.2) x responses / horizon): Ziegler 2019
    (arXiv:1909.08593), section 2.2.
    """

    def __init__(self, config: GaeConfig):
        self.config = config
        self.coef = config.kl_coef

    def update(self, kl: float, num_responses: int) -> None:
        """kl: nats per token, measured on num_responses responses; the same on all ranks."""
        if self.config.kl_target:
            error = min(0.2, max(-0.2, kl / self.config.kl_target - 1))
            # Beyond one horizon per step the rule would overshoot, and reach 0 at five.
            self.coef *= 1 + error * min(1.0, num_responses / self.config.kl_horizon)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.config.kl_target:  # else the flag decides, also when it was changed
            self.coef = state["coef"] or self.coef


def overlong_penalty(lengths: Tensor, limit: int, *, buffer: int, weight: float) -> Tensor:
    """0 up to limit - buffer tokens, then falling to -weight at the limit (DAPO, eq. 13); fp32 in
    the shape of `lengths`. buffer 0: no penalty at all."""
    if buffer == 0:
        return torch.zeros(lengths.shape, device=lengths.device)
    return -weight * (lengths - (limit - buffer)).clamp(min=0) / buffer


class AdvantageCache:
    """The advantages of one batch of rollouts, computed once for all epochs and minibatches.

    It holds one entry, for loops of your own: no batch is trained with the advantages of another.
    """

    def __init__(self):
        self._key: Hashable = None
        self._value: Any = None

    def get(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """compute() for a key not seen last time, else what it returned then. None is no key."""
        assert key is not None, "the cache needs the id of the rollout as its key"
        if key != self._key:
            self._value = compute()
            self._key = key
        return self._value
