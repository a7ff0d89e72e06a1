# SPDX-FileCopyrightText: 2026 handful contributors (optim.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""AdamW over shards, ready before the first step: its state, the clipping, the learning rate.

The problem. Adam's two moments are made in its first step, and kernels are chosen and compiled at
their first use. The first update of a run then takes twice the time of later ones, and an engine
that was sized before it finds 8 bytes a parameter less than it measured.

How it works. A step of learning rate 0 on gradients of 0, when the optimizer is made, changes no
weight, leaves moments of 0, and is not counted. Each rank updates its own rows of each parameter;
only the norm for clipping is of all ranks:
    norm = (sum over ranks of |g|^2)^(1/2);   g <- g min(1, max_grad_norm / norm)
State has the dtype of the weights. fp32 is the default: in bf16 0.02 - 1e-6 rounds back to 0.02.

What we give up: 8-bit states, other optimizers, rates that differ by layer.
Source: Loshchilov 2019 (AdamW, arXiv:1711.05101).

Copied:
    import torch
    from optim import OptimConfig, make_optimizer, optimizer_step
    layer = torch.nn.Linear(2, 1)
    optimizer = make_optimizer(layer, OptimConfig(), 1e-6)
    layer(torch.ones(2)).backward()
    print(optimizer_step(layer, optimizer, learning_rate=1e-6, max_grad_norm=1.0))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class OptimConfig:
    warmup_steps: int = 10
    """Steps of the run over which the learning rate rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, down to a tenth at the last step."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; inf: no clipping."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices (not of norms and biases); 0: off."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of Adam's two moments."""

    def __post_init__(self):
        for name, holds, rule in (
            ("betas", all(0 <= x < 1 for x in self.betas), "in [0, 1); try 0.9 0.98"),
            ("decay", self.decay in ("constant", "linear", "cosine"), "constant, linear or cosine"),
            ("warmup-steps", self.warmup_steps >= 0, "at least 0"),
            ("weight-decay", 0 <= self.weight_decay <= 1, "from 0 to 1"),
            ("max-grad-norm", self.max_grad_norm > 0, "above 0 (inf switches clipping off)"),
        ):
            if not holds:
                value = getattr(self, name.replace("-", "_"))
                shown = " ".join(map(str, value)) if name == "betas" else value
                raise ValueError(f"--optim.{name} {shown}: must be {rule}")


def make_optimizer(
    model: nn.Module, config: OptimConfig, learning_rate: float
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, its state in their dtype; decays matrices alone.

    The state is made here: memory and kernels that the first step will need are there before it.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=0.0, betas=config.betas, fused=True
    )
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()  # of rate 0: changes no weight
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate  # for other callers: optimizer_step sets it
    return optimizer


def learning_rate_at(step: int, num_steps: int, peak: float, config: OptimConfig) -> float:
    """Learning rate of 0-based `step`: linear warm-up to `peak`, then decay down to peak / 10."""
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    if config.decay == "constant":
        return peak
    progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    shape = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (0.1 + 0.9 * shape)


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, learning_rate: float, max_grad_norm: float
) -> float:
    """Clip by the global norm, step, clear; returns the norm before clipping (the one host sync of
    an update). A norm that is not finite, on all ranks then, changes no weight and no moment.
    """
    norm = nn.utils.clip_grad_norm_(
        [p for p in model.parameters() if p.requires_grad], max_grad_norm
    )
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
