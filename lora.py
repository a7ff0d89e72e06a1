# SPDX-FileCopyrightText: 2026 handful contributors (lora.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Low-rank adapters: little is trained, and the reference is the policy without them.

The problem. Weights, gradients and Adam's moments in fp32 are 16 bytes a parameter: 113 GiB for a
model of 7.6 B, before an activation is kept. A KL term wants the model of before the run as well,
2 bytes a parameter more.

How it works. A linear layer W [out, in] is frozen, in bf16 on a GPU. Beside it A [r, in] and
B [out, r] are trained, in fp32:
    y = x (W + scale B A)^T        scale = alpha / r, or alpha / sqrt(r) (rank_stabilized)
B starts at 0, so the first step's policy is the model. Beside W [18944, 3584] an adapter of r = 32
has 0.7 M numbers to train, not 68 M.
1. The sum is made once a pass, in fp32, and rounded once to W's type (`merged`). The sampler gets
   the same sum, so both compute with the same bits, as in full fine-tuning. If x A^T B^T were added
   to x W^T instead, B A would be rounded in the sampler alone. That would be no faster: for 16,384
   tokens adding it to y moves as many bytes as the sum does.
2. The backward pass makes no gradient of W. With g [N, out] the gradient of y:
       gradient of A = scale (g B)^T x        gradient of B = scale g^T (x A^T)
   It needs x and the parameters alone; the sum is made once more.
3. `disabled(model)` computes with W alone: that is the reference, without a second model.
4. W, A and B of a layer are in one FSDP2 group, each gathered in its own type.
What is saved is small as well: A and B with their moments.

What we give up: dropout (a ratio between two passes must be 1), adapters on the head and the
embedding, several adapters at a time. The learning rate should be 3 to 10 times that of full
fine-tuning. Sources: Hu 2021 (arXiv:2106.09685), Kalajdzievski 2023 (rank-stabilized,
arXiv:2312.03732).

Copied:
    import torch
    from lora import LoraConfig, attach, disabled, fill
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    attach(model, LoraConfig(rank=2))
    fill(model, seed=0)
    model(torch.ones(8)).sum().backward()
    with disabled(model):
        print(model(torch.ones(8)))
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 0
    """Train adapters of this rank beside frozen linear layers; 0: off, all weights are trained."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank), for high ranks."""
    targets: tuple[str, ...] = ()
    """Last parts of the names of linear layers, such as q_proj v_proj; empty: all in the layers."""
    path: str = ""
    """Directory of an adapter in PEFT's format to start from (the reference stays the base); empty:
    one that changes nothing."""

    def __post_init__(self):
        self._require("rank", self.rank >= 0, "at least 0 (off); try 32")
        self._require("alpha", 0 < self.alpha < 1e9, "above 0, and below 1e9; try 32")
        is_on = self.rank > 0
        self._require("path", is_on or not self.path, "with the --lora.rank of its adapter")
        self._require("targets", is_on or not self.targets, "with --lora.rank 32")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            value = getattr(self, name)
            shown = " ".join(value) if name == "targets" else value
            raise ValueError(f"--lora.{name} {shown}: must be {rule}")

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class LoraLinear(nn.Linear):
    """A frozen nn.Linear with lora_A [r, in] and lora_B [out, r] beside it (see `attach`)."""

    scale: float
    enabled: bool

    def forward(self, x: Tensor) -> Tensor:
        """x (W + scale B A)^T + bias, or without the adapter inside `disabled`."""
        if not self.enabled:
            return super().forward(x)
        return _MergedLinear.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale b a [out, in], summed in fp32 and rounded once to the type of weight."""
    # A compiler may fuse a product with a sum and round less: here it finds only the sum.
    product = (scale * b) @ a
    if torch.compiler.is_compiling():
        return product.add_(weight).to(weight.dtype)  # one pass there, two elsewhere
    return torch.add(product, weight, out=torch.empty_like(weight))


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale):
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return nn.functional.linear(x, merged(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight, a, b = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ merged(weight, a, b, ctx.scale)
        rows = x.reshape(-1, x.shape[-1])  # [N, in]
        grads = grad.reshape(-1, grad.shape[-1])  # [N, out]
        grad_a = ctx.scale * _product(grads @ b.to(grad.dtype), rows)
        grad_b = ctx.scale * _product(grads, rows @ a.to(x.dtype).t())
        return grad_x, None, None, grad_a, grad_b, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in fp32: sums over tokens are not rounded to bf16."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return left.t().float() @ right.float()


def attach(model: nn.Module, config: LoraConfig, stored: Mapping[str, Tensor] = {}) -> None:
    """Freezes the model and gives the linear layers that config.targets name adapters without
    values; `fill` gives them. A critic's head (`score`) stays trainable, in fp32.

    To be called before fully_shard, on "meta" or not; a rank of 0 changes nothing. stored: the
    adapter of config.path, by names of parameters. Raises ValueError for targets that match
    nothing, a rank above a matrix's size, and a stored adapter of other layers or shapes.
    """
    if config.rank == 0:
        return
    layers = _linear_layers(model)
    known = " ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    for target in config.targets:
        if not any(_matches(name, target) for name in layers):
            rule = f"must be the end of a name; there are: {known or 'no linear layers'}"
            raise ValueError(f"--lora.targets {target}: {rule}")
    targets = config.targets or tuple(layers)
    chosen = {
        name: layer
        for name, layer in layers.items()
        if any(_matches(name, target) for target in targets)
    }
    if not chosen:
        kind = type(model).__name__
        raise ValueError(f"--lora.rank {config.rank}: must be 0: {kind} has no linear layers")
    model.requires_grad_(False)
    score = getattr(model, "score", None)
    if isinstance(score, nn.Linear):
        score.weight = nn.Parameter(score.weight.float())
    for name, layer in chosen.items():
        shape = list(layer.weight.shape)
        if config.rank > min(shape):
            rule = f"must be at most {min(shape)} for {name} {shape}; or set --lora.targets"
            raise ValueError(f"--lora.rank {config.rank}: {rule}")
        empty = functools.partial(torch.empty, dtype=torch.float32, device=layer.weight.device)
        layer.__class__ = LoraLinear
        layer.lora_A = nn.Parameter(empty(config.rank, shape[1]))
        layer.lora_B = nn.Parameter(empty(shape[0], config.rank))
        layer.scale = config.scale
        layer.enabled = True
    if stored:
        _require_same(stored, adapters(model), f"--lora.path {config.path}")


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """{name: linear layer}, without heads."""
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    heads = [get_head(), getattr(model, "score", None)]
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and not any(layer is head for head in heads)
    }


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _require_same(stored: Mapping[str, Tensor], ours: Mapping[str, Tensor], label: str) -> None:
    """ValueError unless both have the same names and shapes."""
    rule = "give the adapter's own --lora.targets and --model"
    for name in stored.keys() ^ ours.keys():
        what = "has" if name in stored else "lacks"
        raise ValueError(f"{label}: {what} {name}, unlike the model; {rule}")
    for name, tensor in stored.items():
        if tensor.shape != ours[name].shape:
            shapes = f"{list(tensor.shape)}, the model wants {list(ours[name].shape)}"
            raise ValueError(f"{label}: is of another base: {name} is {shapes}")


def _adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """{name in the checkpoint: linear layer with an adapter}."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            found[name] = layer
    return found


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """{"layers.0.q_proj.lora_A": parameter, ...}, this rank's shards if it is sharded."""
    found = {}
    for name, layer in _adapted(model).items():
        found[f"{name}.lora_A"] = layer.lora_A
        found[f"{name}.lora_B"] = layer.lora_B
    return found


@torch.no_grad()
def fill(model: nn.Module, seed: int, stored: Mapping[str, Tensor] = {}) -> None:
    """Gives the adapters their first values, the same on any number of ranks: those of `stored`, or
    A uniform within 1 / sqrt(in) and B 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapters(model).items():
        whole = torch.zeros(parameter.shape)
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(parameter.shape[1])
            whole.uniform_(-bound, bound, generator=generator)
        _set(parameter, stored.get(name, whole))


def _set(parameter: Tensor, whole: Tensor) -> None:
    """This rank's rows of `whole`."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    mesh = parameter.device_mesh
    axis = next(i for i, placement in enumerate(parameter.placements) if placement.is_shard(0))
    rows = whole.chunk(mesh.size(axis))[mesh.get_local_rank(axis) :][:1]
    for mine in rows:  # a rank may have none
        parameter.to_local().copy_(mine)


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as if it had no adapters; a backward pass, too, belongs inside."""
    layers = list(_adapted(model).values())
    before = [layer.enabled for layer in layers]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.enabled = was


def merges(model: nn.Module) -> dict[str, tuple[list[str], Callable[..., Tensor]]]:
    """{name of a weight: (names of its A and B, function of weight, A, B that gives their sum)},
    for reshard.iter_full_params; empty without adapters.
    """
    return {
        f"{name}.weight": (
            [f"{name}.lora_A", f"{name}.lora_B"],
            functools.partial(merged, scale=layer.scale),
        )
        for name, layer in _adapted(model).items()
    }
