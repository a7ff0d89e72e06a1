# SPDX-FileCopyrightText: 2026 handful contributors (adapter.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""An adapter's directory in PEFT's format: read, checked, written.

The problem. Adapters come from other tools and go to them: PEFT loads one beside a model, vLLM
serves several. Their directory says in settings what the tensors do not: how they are scaled, and
what else was trained. Read without these, an adapter is wrong and nothing shows it.

How it works. A directory has two files:
    adapter_config.json          r, lora_alpha, use_rslora, target_modules, ...
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight [r, in], lora_B.weight [out, r]
What the run's own settings say otherwise is refused, and so is what would be left out here: DoRA,
ranks that differ by layer, biases and whole modules that were trained.

What we give up: adapters on embeddings, pickled ones (adapter_model.bin).
Source: PEFT's checkpoint format.

Copied, with lora.py and safetensors:
    import torch
    from adapter import read, write
    from lora import LoraConfig
    tensors = {"q_proj.lora_A": torch.ones(2, 8), "q_proj.lora_B": torch.zeros(8, 2)}
    write(LoraConfig(rank=2), tensors, "out", base="models/x")
    print(sorted(read(LoraConfig(rank=2, path="out"))))  # ['q_proj.lora_A', 'q_proj.lora_B']
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# PEFT's settings that would make more of an adapter than it is here, and what they must be.
PLAIN = {"peft_type": "LORA", "use_dora": False, "bias": "none", "modules_to_save": None}
PLAIN |= {"rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False, "fan_in_fan_out": False}


def read(config) -> dict[str, Tensor]:
    """{"layers.0.q_proj.lora_A": tensor, ...} of the adapter at config.path; {} without one.

    config: lora.LoraConfig. Raises ValueError for files that are missing or damaged, another rank
    or scale than the config's, and more than plain LoRA.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not config.path:
        return {}
    label = f"--lora.path {config.path}"
    try:
        settings = json.loads((Path(config.path) / CONFIG).read_text())
        theirs = settings["r"], settings["lora_alpha"], bool(settings.get("use_rslora"))
        stored = load_file(Path(config.path) / TENSORS)
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{label}: holds no {CONFIG} with its {TENSORS} ({why})") from None
    if theirs != (config.rank, config.alpha, config.rank_stabilized):
        root = "rank-stabilized" if theirs[2] else "no-rank-stabilized"
        flags = f"--lora.rank {theirs[0]} --lora.alpha {theirs[1]} --lora.{root}"
        raise ValueError(f"{label}: was trained with other settings; give {flags}")
    for name, plain in PLAIN.items():
        if (settings.get(name) or plain) != plain:
            rule = f"must be {plain!r}: only plain LoRA is read"
            raise ValueError(f"{label}: its {name} is {settings[name]!r}, {rule}")
    return {name.removeprefix(PREFIX).removesuffix(".weight"): x for name, x in stored.items()}


def write(config, tensors: Mapping[str, Tensor], out_dir: str | Path, *, base: str) -> None:
    """Writes adapters, by names as `read` gives them, or their shards, which are gathered.
    Collective then; rank 0 writes. config: lora.LoraConfig. base: the model's directory or name.
    """
    from safetensors.torch import save_file

    whole = {}
    for name, x in tensors.items():
        x = x.full_tensor() if isinstance(x, DTensor) else x.detach()
        whole[f"{PREFIX}{name}.weight"] = x.contiguous().cpu()
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    ends = dict.fromkeys(name.split(".")[-2] for name in tensors)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rank_stabilized,
        "target_modules": list(config.targets or ends),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(whole, out_dir / TENSORS, metadata={"format": "pt"})
    (out_dir / CONFIG).write_text(json.dumps(settings, indent=2))
