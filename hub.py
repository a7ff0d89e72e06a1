# SPDX-FileCopyrightText: 2026 handful contributors (hub.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""A Hugging Face directory: found, checked, written.

The problem. A model is a directory that others have written: on the disk or on the Hub, with a
config that may promise fewer positions than a run needs, and with files whose names follow from
their number. What is wrong with it must show before memory is taken. What is written must load in
Transformers and vLLM, and no rank has room for all of it.

How it works.
1. `find_model` takes a directory or a Hub name. The first rank of each host downloads; the others
   then find the files in the cache. If one rank fails, all stop with its message.
2. `memory_plan` reads the shapes in the files' headers, not the tensors.
3. `export` takes full tensors in buckets (reshard.iter_full_params). Rank 0 writes them to files of
   at most max_shard_bytes as they come:
       part-00000, part-00001  ->  model-00001-of-00002, model-00002-of-00002, and their index
   Config, tokenizer and generation config are copied; config.json states the new dtype.

What we give up: other formats than safetensors; uploads.
Source: the safetensors index format of Transformers.

Copied, with safetensors:
    import torch
    from hub import save_safetensors
    save_safetensors([[("layer.weight", torch.ones(2, 2))]], "out")
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What readers of JSON, and Transformers, raise for a file that is broken.
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RecursionError)


def find_model(name: str, longest: int, flag: str = "--model") -> str:
    """The local directory of a model: `name` if it is one, else its snapshot from the Hub.

    Collective. Raises ValueError, which begins with `flag`: no config.json, a Hub name that cannot
    be fetched, a model that is no decoder or whose attention packed rows do not have, files that
    are missing or damaged, or fewer positions than `longest`, the tokens of a prompt with its
    response.
    """
    path = name if Path(name).exists() else _fetch(name, flag)
    label = f"{flag} {name}"
    if not (Path(path) / "config.json").exists():
        advice = "give a Hugging Face model directory or a Hub name"
        raise ValueError(f"{label}: has no config.json; {advice}")
    config = _config(path, label)
    _require_plain_attention(config, label)
    positions = num_positions(config, label)
    if positions is not None and longest > positions:
        lengths = "--data.max-prompt-tokens + --rollout.max-response-tokens"
        half = positions // 2
        advice = f"lower one of them; try {half} and {positions - half}"
        has = f"has {positions} positions, {lengths} want {longest}"
        raise ValueError(f"{label}: {has}; {advice}")
    _shapes(path, label)
    return path


def _require_plain_attention(config, label: str) -> None:
    """ValueError for what attention.py would refuse at the first row, when memory is taken."""
    has = {
        "soft-caps its attention scores": getattr(config, "attn_logit_softcapping", None),
        "has latent attention": getattr(config, "kv_lora_rank", None),
    }
    for what, value in has.items():
        if value is not None:
            rule = "which packed rows do not; give Llama, Qwen2, Qwen3, Mistral, Gemma 1 or 3 ..."
            raise ValueError(f"{label}: {what}, {rule}")


def load_tokenizer(path: str, label: str) -> Any:
    """The tokenizer in the directory `path`; ValueError, which begins with `label`, without one."""
    from transformers import AutoTokenizer, logging

    logging.disable_progress_bar()
    advice = "save the model's tokenizer there with save_pretrained"
    with _explained(f"{label}: its tokenizer does not load", f"; {advice}"):
        tokenizer = AutoTokenizer.from_pretrained(path)
        words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    if not words:  # what Transformers makes of a directory without one
        raise ValueError(f"{label}: has no tokenizer; {advice}")
    tokenizer.clean_up_tokenization_spaces = False  # made for WordPiece; elsewhere it eats spaces
    return tokenizer


def _config(path: str, label: str):
    """The configuration of a decoder's text part, in the spelling of this Transformers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    with _explained(f"{label}: config.json is of no model for Transformers"):
        config = AutoConfig.from_pretrained(path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = f"is of the type {config.model_type}, which is no decoder of text alone"
        raise ValueError(f"{label}: {kind}; give a causal language model")
    return config.get_text_config()


@contextlib.contextmanager
def _explained(what: str, advice: str = "") -> Iterator[None]:
    """Inside, whatever other libraries raise for a broken file is a ValueError in one line."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (*BROKEN, StrictDataclassError, SafetensorError) as error:
        problem = error
    except Exception as error:
        if type(error) is not Exception:  # tokenizers has no class of its own
            raise
        problem = error
    else:
        return
    why = " ".join(str(problem).split())[:200] or type(problem).__name__
    raise ValueError(f"{what} ({why}){advice}") from None


def num_positions(config, label: str = "model") -> int | None:
    """How long a sequence may be, of a Transformers configuration; None: no limit is known.

    Yarn and linear scaling stretch the positions by their factor. "longrope" has two sets of angles
    and Transformers chooses one by the longest sequence of a row, so what it was trained with
    before stretching is the limit. Raises ValueError for "dynamic": the sampler's angles differ.
    """
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = rope.get("original_max_position_embeddings")
    if kind == "dynamic":
        rule = "its rotary angles depend on the lengths in a batch, and the sampler's do not"
        raise ValueError(f"{label}: has dynamic rotary scaling: {rule}; use yarn or none")
    if kind == "longrope":
        return original or positions
    if kind in ("yarn", "linear") and positions is not None:
        with _explained(f"{label}: has a rotary scaling without a factor that is a number"):
            return max(positions, int((original or positions) * float(rope.get("factor", 1))))
    return positions


def _tensor_files(path: str, label: str) -> list[Path]:
    """The files that hold the model: those of the index where there is one."""
    index = Path(path) / "model.safetensors.index.json"
    single = Path(path) / "model.safetensors"
    if not index.exists() and not single.exists():
        advice = "save the model with model.save_pretrained(dir) first"
        raise ValueError(f"{label}: has no {single.name} and no index of several; {advice}")
    if not index.exists():
        return [single]
    with _explained(f"{label}: {index.name} lists no files", "; copy it again"):
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [Path(path) / name for name in sorted(names)]
    for file in files:
        if not file.exists():
            raise ValueError(f"{label}: {file.name}, which {index.name} names, is missing")
    return files


def _shapes(path: str, label: str) -> list[tuple[str, list[int]]]:
    """(name, shape) of each tensor in the model's files."""
    from safetensors import safe_open

    shapes = []
    for file in _tensor_files(path, label):
        what = f"{label}: {file.name} cannot be read"
        with _explained(what, "; copy it again"), safe_open(file, "pt") as opened:
            for name in list(opened.keys()):
                shapes.append((name, opened.get_slice(name).get_shape()))
    return shapes


def _fetch(name: str, flag: str) -> str:
    """The snapshot of `name` from the Hub. All ranks stop together if one of them fails."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    # The first rank of each host downloads, the others then find the files in the cache.
    path, problem = _snapshot(name, flag) if is_first else ("", None)
    _raise_any(problem)
    if not is_first:
        path, problem = _snapshot(name, flag)
    _raise_any(problem)
    return path


def _snapshot(name: str, flag: str) -> tuple[str, str | None]:
    """(directory, None), or ("", what is wrong)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    others = ["adapter_model*", "consolidated*", "original/*"]
    try:
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=others), None
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error).split())  # on one line
        return "", f"{flag} {name}: no such directory, and not on the Hub ({why})"


def _raise_any(problem: str | None) -> None:
    """ValueError on all ranks if there is a problem on one."""
    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise ValueError(found)


def find_reward_model(name: str, longest: int, policy_path: str) -> str:
    """find_model for a sequence classifier of one label with the policy's tokens; "" stays ""."""
    return _find_scorer(name, longest, policy_path, "--reward-model", has_head=True)


def find_critic(name: str, longest: int, policy_path: str) -> str:
    """find_model for what a critic starts from, with the policy's tokens; "" stays ""."""
    return _find_scorer(name, longest, policy_path, "--critic.path", has_head=False)


def _find_scorer(name: str, longest: int, policy_path: str, flag: str, has_head: bool) -> str:
    if not name:
        return ""
    path = find_model(name, longest, flag)
    head = dict(_shapes(path, f"{flag} {name}")).get("score.weight", [0])
    if has_head and head[0] != 1:
        kind = "no sequence classifier with one label (score.weight [1, D])"
        raise ValueError(f"{flag} {name}: is {kind}")
    theirs = load_tokenizer(path, f"{flag} {name}").get_vocab()
    if theirs != load_tokenizer(policy_path, "--model").get_vocab():
        rule = "they must share a tokenizer"
        raise ValueError(f"{flag} {name}: has other tokens than the policy; {rule}")
    return path


def memory_plan(path: str, master_dtype: str, frozen_copies: int, rank: int = 0) -> str:
    """What stays in a rank's memory while training the model at `path`, in GiB, as a line.

    rank: of adapters, which are trained in place of the weights; 0: off.
    """
    shapes = _shapes(path, path)
    num_parameters = sum(math.prod(shape) for _, shape in shapes)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    gib = num_parameters / num_ranks / 2**30
    trained = gib * (4 if master_dtype == "float32" else 2)
    what = "weights"
    if rank:
        matrices = [shape for name, shape in shapes if len(shape) == 2 and ".layers." in name]
        trained = 4 * rank * sum(map(sum, matrices)) / num_ranks / 2**30
        what = "adapters"
    frozen = frozen_copies * (2 if torch.cuda.is_available() else 4)
    return (
        f"{num_parameters / 1e6:.1f} M parameters on {num_ranks} ranks: "
        f"{what} {trained:.2f}, gradients {trained:.2f}, "
        f"optimizer {2 * trained:.2f}, frozen models {frozen * gib:.2f} GiB a rank"
    )


def stop_token_ids(path: str, *more: int | None) -> list[int]:
    """All ids that end a response: of generation_config.json and config.json at `path`, and `more`
    (a tokenizer's). ValueError for a file that is damaged.
    """
    ids = set(more) - {None}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        with _explained(f"{path}: {name} has no list of token ids", "; copy it again"):
            eos = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
            ids.update(map(operator.index, [eos] if isinstance(eos, int) else eos or []))
    return sorted(ids)


def save_safetensors(
    buckets: Iterable[list[tuple[str, Tensor]]],
    out_dir: str | Path,
    *,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write the full tensors of `buckets` as model-*.safetensors with an index, in files of about
    max_shard_bytes.

    Collective as far as producing the buckets is; rank 0 writes. One file is named
    model.safetensors and has no index.
    """
    from safetensors.torch import save_file

    if not _is_rank0():
        for _ in buckets:
            pass
        _barrier()
        return
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    for old in out_dir.glob("*.safetensors*"):
        old.unlink()
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        file = out_dir / f"part-{len(files):05d}.safetensors"
        save_file(held, file, metadata={"format": "pt"})
        file.chmod(out_dir.stat().st_mode & 0o666)  # not 0600: whoever sees the directory reads it
        files.append(list(held))
        held.clear()

    total = held_bytes = 0
    for name, tensor in itertools.chain.from_iterable(buckets):
        if held and held_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            held_bytes = 0
        held[name] = tensor.contiguous().cpu()
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    flush()
    _name_files(out_dir, files, total)
    _barrier()


def _name_files(out_dir: Path, files: list[list[str]], total: int) -> None:
    """Give the parts their final names, now that their number is known, and write the index."""
    weight_map = {}
    for i, names in enumerate(files):
        final = (
            "model.safetensors"
            if len(files) == 1
            else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        )
        (out_dir / f"part-{i:05d}.safetensors").rename(out_dir / final)
        weight_map.update(dict.fromkeys(names, final))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def export(
    buckets: Iterable[list[tuple[str, Tensor]]],
    path: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype,
    line: str = "",
) -> None:
    """Write a Hugging Face directory: the tensors of `buckets` (of `dtype`), other files from the
    model at `path`. Collective. line: said at the end, in place of a run's own.
    """
    save_safetensors(buckets, out_dir)
    if _is_rank0():
        copy_model_files(path, out_dir, dtype)
        usual = f"the trained model is in {out_dir}; curves, samples and metrics are beside it"
        print(line or usual, flush=True)
    _barrier()


def copy_model_files(path: str | Path, out_dir: str | Path, dtype: torch.dtype) -> None:
    """Copy config, tokenizer and generation config of the model at `path`; config.json states
    `dtype`. Rank 0 only.
    """
    patterns = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
    for file in itertools.chain.from_iterable(map(Path(path).glob, patterns)):
        if not file.name.endswith(".index.json"):
            copied = Path(out_dir) / file.relative_to(path)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copied)
    config_file = Path(out_dir) / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)  # the older name of the same field
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2))


def _is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
