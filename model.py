# SPDX-FileCopyrightText: 2026 handful contributors (model.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""A Transformers model as FSDP2 shards: loading and precision.

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
   fp32, and the optimizer (optim.py) updates the fp32 shard.
5. The residual stream, to which every layer adds, stays in fp32. In bf16 each of its 2 L sums
   would round what all layers before have found: 256 + 0.5 = 256. vLLM is patched to keep it
   too (vllm_backend.py).

FSDP averages gradients over ranks by default. Here every loss is already divided by a count over
all ranks, so the division is switched off once, in `shard`, and gradients are plain sums. Dropout
is set to 0: a ratio between two passes of one policy must be 1.

What we give up: tensor, context and expert parallelism; checkpoints that name tensors differently.
Source: Zhao 2023 (FSDP, arXiv:2304.11277).

Copied, with transformers, safetensors and run.py (or a 1-D mesh of yours):
    from model import load_policy
    from run import init_distributed
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2))
    model.save_pretrained("tiny")
    policy = load_policy("tiny", init_distributed(seed=0, timeout_s=600))
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
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
    """Type of the weights that are updated; bfloat16 halves memory, loses updates below 0.4 %."""
    activation_checkpointing: bool = False
    """Keep one activation a layer, compute the others again: less memory, two forwards a row."""
    compile: bool = field(default_factory=lambda: torch.cuda.is_available())
    """torch.compile each decoder layer: faster, and closer to the sampler's rounding."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward (ZeRO-3); off: after its backward."""
    reduce_every_row: bool = False
    """Reduce gradients after every row: more communication, no unsharded fp32 gradients."""


def load_policy(
    path: str,
    mesh: DeviceMesh,
    config: ModelConfig | None = None,
    *,
    trainable: bool = True,
    adapt: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """The causal language model at `path` as FSDP2 shards over `mesh`, to train without dropout.

    Collective. trainable False: a frozen reference, in the compute dtype (bf16 on GPU, fp32 on
    CPU). adapt(model): may freeze weights, which then are in the compute dtype, and add parameters,
    which begin as 0 (lora.attach). Raises ValueError for a model that cannot be trained here
    (experts, scaled logits, quantized weights) and as load_shards does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.from_pretrained(path)
    return _load(AutoModelForCausalLM, hf_config, path, mesh, config, trainable, adapt)


def load_critic(
    path: str,
    mesh: DeviceMesh,
    config: ModelConfig | None = None,
    *,
    trainable: bool = True,
    adapt: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """The decoder at `path` under a head `score`: a number per token, a classifier of one label.

    As load_policy. A checkpoint without the head, such as the policy's, gets a head of zeros: first
    values are 0. trainable False: a frozen reward model, which must bring its head.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    hf_config = AutoConfig.from_pretrained(path, num_labels=1)
    auto_class = AutoModelForSequenceClassification
    new = ("score.weight",) if trainable else ()
    others = ("lm_head.weight", "lm_head.bias")
    return _load(auto_class, hf_config, path, mesh, config, trainable, adapt, new, others)


def _load(auto_class, hf_config, path: str, mesh, config, trainable, adapt, new=(), unused=()):
    config = config or ModelConfig()
    if config.master_dtype not in ("float32", "bfloat16"):
        rule = "must be float32 or bfloat16"
        raise ValueError(f"--model.master-dtype {config.master_dtype}: {rule}")
    if getattr(hf_config, "quantization_config", None):
        raise ValueError(f"{path}: is quantized; dequantize the model and save it first")
    for name, value in list(vars(hf_config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(hf_config, name, 0.0)
    compute_dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    dtype = getattr(torch, config.master_dtype) if trainable else compute_dtype
    try:
        with parameters_on_meta():
            model = auto_class.from_config(hf_config, dtype=dtype)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: config.json makes no model ({error!r})") from None
    _refuse_unsupported(model, path)
    if adapt is not None:
        known = {name for name, _ in model.named_parameters()}
        adapt(model)
        new += tuple(name for name, _ in model.named_parameters() if name not in known)
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(compute_dtype)
    model = shard(model, mesh, config, compute_dtype)
    load_shards(model, path, new=new, unused=unused)
    if not trainable:
        model.requires_grad_(False)
        # no backward will come to free what a forward has gathered
        model.set_reshard_after_forward(True)
    return model


def _refuse_unsupported(model: nn.Module, path: str) -> None:
    """ValueError for what loads and would be trained wrongly, or is stored by other names."""
    config = model.config.get_text_config()
    for name in filter(re.compile("logits?_(scal|mult)|lm_head_mult").search, dir(config)):
        if getattr(config, name) not in (None, 1.0):
            raise ValueError(f"{path}: models that scale their logits ({name}) are not supported")
    for name, p in model.named_parameters():
        if p.ndim > 2 or re.search("expert|moe", name):
            kinds = "mixtures of experts and convolutions are not supported"
            raise ValueError(f"{path}: {name} is no part of a dense decoder; {kinds}")


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have parameters without memory, and real buffers."""
    register = nn.Module.register_parameter

    def register_on_meta(self, name, param):
        register(self, name, param)
        if param is not None and not param.is_meta:
            made = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
            self._parameters[name] = made

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def shard(
    model: nn.Module, mesh: DeviceMesh, config: ModelConfig, compute_dtype: torch.dtype
) -> nn.Module:
    """`model`, built under parameters_on_meta, split over `mesh` by layer, with empty shards."""
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = next(
        part for part in model.get_decoder().children() if isinstance(part, nn.ModuleList)
    )
    if config.compile:
        # All models share their layers' code; past the limit it runs eager.
        torch._dynamo.config.recompile_limit = 64
        for layer in layers:
            layer.compile(dynamic=True, options=_compile_options())
    if compute_dtype != torch.float32:
        _keep_residual_in_fp32(model.get_decoder(), compute_dtype)
    # Beside frozen weights, of the compute dtype already, what is trained stays as it is.
    is_whole = all(p.requires_grad for p in model.parameters())
    # Casting inputs would round the residual stream before each layer.
    policy = MixedPrecisionPolicy(
        compute_dtype if is_whole else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for part in [*layers, model]:
        # The root is gathered once a forward, and the head's backward needs it again at once.
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


def _compile_options() -> dict[str, bool]:
    """Inductor fuses the gradient of a norm's weight only from some row size on, and compiles each
    layer once more below it. Here it always does: one compilation, not two.
    """
    import torch._inductor as inductor

    wanted = {"triton.mix_order_reduction_non_strict_mode": True}
    return {name: value for name, value in wanted.items() if name in inductor.list_options()}


def _keep_residual_in_fp32(decoder: nn.Module, dtype: torch.dtype) -> None:
    """What layers add to is fp32 from the embedding on; what enters a product is of dtype."""
    if any(isinstance(module, nn.LayerNorm) for module in decoder.modules()):
        # It takes no fp32 input beside bf16 weights; vLLM keeps the stream of such models in bf16
        # as well.
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


def load_shards(
    model: nn.Module, path: str, *, new: tuple[str, ...] = (), unused: tuple[str, ...] = ()
) -> None:
    """Fill this rank's shards from the safetensors files in `path`, reading only its rows.

    new: names of parameters that the files need not have: they become 0. unused: names that they
    may have. Raises ValueError for files that are missing or damaged, tensors that are missing,
    left over, quantized or of another shape, and tied tensors that differ.
    """
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        stored = {}
        for file, names in _files(path).items():
            try:
                tensors = stack.enter_context(safe_open(file, framework="pt"))
                names = names or list(tensors.keys())
                stored |= {name: tensors.get_slice(name) for name in names}
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: cannot be read ({error}); copy it again") from None
        parameters: dict[Tensor, list[str]] = {}  # a tied one has several names
        for name, p in model.named_parameters(remove_duplicate=False):
            parameters.setdefault(p, []).append(clean_name(name))
        _refuse_other_tensors(model, path, stored, list(parameters.values()), new, unused)
        for parameter, names in parameters.items():
            first, *copies = [name for name in names if name in stored] or [""]
            if not first:
                parameter.detach().zero_()
                continue
            _load_rows(parameter, stored[first], f"{path}: {first}")
            for copy in copies:
                _require_equal(stored[first], stored[copy], f"{path}: {first} and {copy}")


def _files(path: str) -> dict[Path, list[str] | None]:
    """{file: the tensors to take from it, or None: all}, by the index alone if there is one."""
    index = Path(path) / "model.safetensors.index.json"
    single = Path(path) / "model.safetensors"
    if not index.exists() and not single.exists():
        advice = "save the model with model.save_pretrained(dir) first"
        raise ValueError(f"{path}: has no {single.name} and no index of several; {advice}")
    if not index.exists():
        return {single: None}
    file_of = json.loads(index.read_text())["weight_map"]
    if single.exists() and single.name not in file_of.values():
        which = f"has {single.name} and an index of other files"
        raise ValueError(f"{path}: {which}; remove what is not the model")
    files = {}
    for name, file in file_of.items():
        files.setdefault(Path(path) / file, []).append(name)
    return files


def _refuse_other_tensors(model, path: str, stored, parameters, new, unused) -> None:
    """ValueError if the files are not this model's, to a tensor, or hold no plain numbers."""
    kind = type(model).__name__.removeprefix("FSDP")
    known = {*itertools.chain(*parameters), *unused, *dict(model.named_buffers())}
    skipped = "|".join(["rotary_emb.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or [])])
    missing = [names[0] for names in parameters if not stored.keys() & {*names, *new}]
    missing = [name for name in missing if name not in new]
    more = [name for name in stored if name not in known and not re.search(skipped, name)]
    advice = "save the model with save_pretrained(dir)"
    if missing and more:
        advice = f"{more[0]} is there; a model of other names in the file is not supported"
    for problem, names in {"missing": missing, "not this model's": more}.items():
        if names:
            which = f"{len(names)} tensors of {kind} are {problem}: {', '.join(names[:4])}"
            raise ValueError(f"{path}: {which}; {advice}")
    for name in stored.keys() - set(unused):
        dtype = stored[name].get_dtype()
        if dtype not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"{path}: {name} is {dtype}; dequantize the model and save it first")


def _require_equal(tensor, copy, label: str) -> None:
    """ValueError if two tensors differ that the model ties."""
    for start in range(0, tensor.get_shape()[0], 1 << 14):
        rows = slice(start, start + (1 << 14))
        if not torch.equal(tensor[rows], copy[rows]):
            rule = "set tie_word_embeddings to false in config.json, or remove the second"
            raise ValueError(f"{label} are tied by its config and differ in the file; {rule}")


@torch.no_grad()
def _load_rows(parameter: Tensor, rows, label: str) -> None:
    if list(parameter.shape) != rows.get_shape():
        shapes = f"{rows.get_shape()}, the model wants {list(parameter.shape)}"
        raise ValueError(f"{label} has shape {shapes}")
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    start = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axis = next(axis for axis, x in enumerate(parameter.placements) if x.is_shard(0))
        num_rows = math.ceil(parameter.shape[0] / mesh.size(axis))
        start = min(num_rows * mesh.get_local_rank(axis), parameter.shape[0])
    if local.numel():
        local.copy_(rows[start : start + local.shape[0]])
        if not torch.isfinite(local).all():
            raise ValueError(f"{label} holds NaN or infinities; give a model without")


def clean_name(name: str) -> str:
    """A parameter's name in the checkpoint, without what torch.compile and others put before."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Target's shards become source's, which are split alike: a refreshed reference."""
    for module in [*source.modules(), *target.modules()]:
        if isinstance(module, FSDPModule):
            # a forward without backward leaves whole parameters in the place of the shards
            module.reshard()
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        q.to_local().copy_(p.to_local())
