"""A Transformers model as FSDP2 shards: loading, precision, optimizer.

The problem. A 7 B model with fp32 master weights, gradients and two Adam moments is 112 GB; on W
ranks each should hold 1/W of it, from the first byte on. Loading the whole checkpoint on each rank
first would need W x 28 GB of host memory.

How it works.
1. The model is built without memory for its parameters (on "meta"), but with real buffers:
   rotary frequencies are not in a checkpoint, and `to_empty` would leave garbage in them.
2. `fully_shard` splits each decoder layer, then the rest (embedding, final norm, head: one
   group, they may be tied).
3. Each rank reads only its own rows from the safetensors files, straight into its shard.
       weight [10, D] on 4 ranks: ceil(10 / 4) = 3 rows each -> rows 0-2, 3-5, 6-8, 9
4. Forward and backward gather one layer at a time in bf16 (on GPU); gradients are summed in
   fp32; the optimizer updates the fp32 shard. bf16 master weights lose small updates: 0.02 - 1e-6
   rounds back to 0.02.
5. The residual stream, to which every layer adds, stays in fp32. In bf16 each of its 2 L sums
   would round what all layers before have found: 256 + 0.5 = 256. vLLM is patched to keep it
   too (vllm_backend.py). On SmolLM2 the log-probabilities of sampler and trainer then differ by a
   third less.

FSDP averages gradients over ranks by default. Here every loss is already divided by a count over
all ranks, so the division is switched off once, in `shard`, and gradients are plain sums.

Dropout is set to 0: a ratio between two passes of one policy must be 1.

What we give up: tensor, context and expert parallelism in the trainer; checkpoints that name
tensors differently. Sources: Zhao 2023 (FSDP, arXiv:2304.11277); Loshchilov 2019 (AdamW,
arXiv:1711.05101).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ModelConfig:
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights the optimizer updates; bfloat16 halves memory and loses updates below 0.4
    % of a weight.
    """
    activation_checkpointing: bool = False
    """Keep one activation per layer and compute the others again in the backward: less memory,
    about 25 % more time.
    """
    compile: bool = field(default_factory=lambda: torch.cuda.is_available())
    """torch.compile each decoder layer (on by default on a GPU): faster, and closer to the
    sampler's rounding.
    """
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward (ZeRO-3); off: keep them until its backward
    (ZeRO-2).
    """
    reduce_every_row: bool = False
    """Reduce gradients after every row, not once per minibatch: more communication, no unsharded
    fp32 gradients.
    """


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
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"--optim.betas {self.betas[0]} {self.betas[1]}: must be in [0, 1); try 0.9 0.98"
            )
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.max_grad_norm <= 0:
            raise ValueError(
                f"--optim.warmup-steps {self.warmup_steps}, --optim.weight-decay "
                f"{self.weight_decay}: at least 0; "
                f"--optim.max-grad-norm {self.max_grad_norm}: above 0 (inf switches clipping off)"
            )


def load_policy(
    path: str, mesh: DeviceMesh, config: ModelConfig | None = None, *, trainable: bool = True
) -> nn.Module:
    """The causal language model at `path` as FSDP2 shards over `mesh`, in training mode without
    dropout.

    Collective. trainable False: a frozen reference, in the compute dtype (bf16 on GPU, fp32 on
    CPU). Raises ValueError for a directory without safetensors, and for tensors that are missing or
    have another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    return _load(
        AutoModelForCausalLM, AutoConfig.from_pretrained(path), path, mesh, config, trainable
    )


def load_critic(
    path: str, mesh: DeviceMesh, config: ModelConfig | None = None, *, trainable: bool = True
) -> nn.Module:
    """The decoder at `path` under a head `score` of one number per token (sequence classification
    with one label).

    As load_policy. A checkpoint without the head, such as the policy's, gets a head of zeros: first
    values are 0. trainable False: a frozen reward model, which must bring its head.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    hf_config = AutoConfig.from_pretrained(path, num_labels=1)
    new = ("score.weight",) if trainable else ()
    return _load(
        AutoModelForSequenceClassification, hf_config, path, mesh, config, trainable, new=new
    )


def _load(
    auto_class, hf_config, path: str, mesh, config: ModelConfig | None, trainable: bool, new=()
) -> nn.Module:
    config = config or ModelConfig()
    for unsupported in ("logit_scale", "logits_scaling"):
        if getattr(hf_config, unsupported, 1.0) != 1.0:
            raise ValueError(
                f"{path}: models that scale their logits ({unsupported}) are not supported"
            )
    for name, value in list(vars(hf_config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(hf_config, name, 0.0)
    compute_dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    dtype = getattr(torch, config.master_dtype) if trainable else compute_dtype
    with parameters_on_meta():
        model = auto_class.from_config(hf_config, dtype=dtype)
    model = shard(model, mesh, config, compute_dtype)
    load_shards(model, path, new=new)
    if not trainable:
        model.requires_grad_(False)
        model.set_reshard_after_forward(
            True
        )  # no backward will come to free what a forward has gathered
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have parameters without memory, and real buffers (which no checkpoint
    holds).
    """
    register = nn.Module.register_parameter

    def register_on_meta(self, name, param):
        register(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(
                param.data.to("meta"), requires_grad=param.requires_grad
            )

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def shard(
    model: nn.Module, mesh: DeviceMesh, config: ModelConfig, compute_dtype: torch.dtype
) -> nn.Module:
    """`model`, built under parameters_on_meta, split over `mesh` by decoder layer, with
    uninitialised shards.
    """
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = next(
        part for part in model.get_decoder().children() if isinstance(part, nn.ModuleList)
    )
    if config.compile:
        torch._dynamo.config.recompile_limit = (
            64  # all models share their layers' code; past the limit it runs eager
        )
        for layer in layers:
            layer.compile(dynamic=True)
    if compute_dtype != torch.float32:
        _keep_residual_in_fp32(model.get_decoder(), compute_dtype)
    # Casting inputs would round the residual stream before each layer.
    policy = MixedPrecisionPolicy(
        compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for part in [*layers, model]:
        # The root is gathered once per forward and needed again at once by the backward of the
        # head.
        reshard = config.reshard_after_forward and part is not model
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=mesh.device_type)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model.train()


def _keep_residual_in_fp32(decoder: nn.Module, dtype: torch.dtype) -> None:
    """What the layers of `decoder` add to is fp32 from the embedding on; what enters a product is
    rounded to dtype.
    """
    if any(isinstance(module, nn.LayerNorm) for module in decoder.modules()):
        # takes no fp32 input beside bf16 weights; vLLM keeps the stream of such models in bf16 as
        # well
        return
    decoder.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.float()
    )
    for module in decoder.modules():
        if type(module).__name__.endswith("Norm"):
            module.register_forward_hook(lambda module, inputs, output: output.to(dtype))
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(
                lambda module, inputs, output: tuple(x.to(dtype) for x in output)
            )
        elif isinstance(module, nn.Linear):  # in some models attention reads the stream itself
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(dtype),))


def load_shards(model: nn.Module, path: str, *, new: tuple[str, ...] = ()) -> None:
    """Fill this rank's shards from the safetensors files in `path`, reading only its rows.

    new: names of parameters that the checkpoint need not have: they become 0. Raises as load_policy
    does.
    """
    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{path}: has no *.safetensors files; save it with model.save_pretrained(dir) first"
        )
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        where = {name: handle for handle in handles for name in list(handle.keys())}
        parameters = {
            clean_name(name): p for name, p in model.named_parameters()
        }  # a tied head is listed once
        missing = [name for name in parameters if name not in where and name not in new]
        if missing:
            kind = type(model).__name__.removeprefix("FSDP")
            which = f"{len(missing)} tensors of {kind} are missing: {', '.join(missing[:4])}"
            raise ValueError(f"{path}: {which}; save the model with save_pretrained(dir)")
        for name, parameter in parameters.items():
            if name in where:
                _load_rows(parameter, where[name].get_slice(name), f"{path}: {name}")
            else:
                parameter.detach().zero_()


@torch.no_grad()
def _load_rows(parameter: Tensor, rows, label: str) -> None:
    if list(parameter.shape) != rows.get_shape():
        raise ValueError(
            f"{label} has shape {rows.get_shape()}, the model wants {list(parameter.shape)}"
        )
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    start = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axis = mesh.mesh_dim_names.index("shard")
        num_rows = math.ceil(parameter.shape[0] / mesh.size(axis))
        start = min(num_rows * mesh.get_local_rank(axis), parameter.shape[0])
    if local.numel():
        local.copy_(rows[start : start + local.shape[0]])


def clean_name(name: str) -> str:
    """A parameter's name in the checkpoint, without the prefixes of torch.compile and activation
    checkpointing.
    """
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Set target's shards to source's, which must be split alike (a reference refreshed from the
    policy).
    """
    for module in [*source.modules(), *target.modules()]:
        if isinstance(module, FSDPModule):
            # a forward without backward leaves whole parameters in the place of the shards
            module.reshard()
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        q.to_local().copy_(p.to_local())


def make_optimizer(
    model: nn.Module, config: OptimConfig, learning_rate: float
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices alone. State has the dtype of
    the parameters.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=learning_rate, betas=config.betas, fused=True
    )


def learning_rate_at(step: int, num_steps: int, peak: float, config: OptimConfig) -> float:
    """Learning rate of 0-based `step`: linear warm-up to `peak`, then the decay down to peak / 10
    at the last step.
    """
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
    an update).

    Raises FloatingPointError on a norm that is not finite, before any weight changes.
    """
    norm = nn.utils.clip_grad_norm_(
        [p for p in model.parameters() if p.requires_grad], max_grad_norm
    )
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(norm):
        kind = type(model).__name__.removeprefix("FSDP")
        advice = "lower its learning rate; see the last lines of samples.jsonl"
        raise FloatingPointError(f"gradient norm of {kind} is {norm}: {advice}")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
