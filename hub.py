"""A Hugging Face directory: found, checked, written."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def find_model(name: str, longest: int, built_in: Callable[[], str], flag: str = "--model") -> str:
    """The local directory of a model: `name` itself if it is one, else its snapshot from the Hub.
    Collective.

    The name "built-in" is what built_in() returns on rank 0. Raises ValueError, which begins with
    `flag`, for a directory without config.json, for a Hub name that cannot be fetched, and for a
    model with fewer positions than `longest`, a prompt with its response.
    """
    if name == "built-in":
        made = [built_in() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(made)
        name = made[0]
    if not Path(name).exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        # The first rank of each host downloads, the others then find the files in the cache.
        problems: list[str | None] = [None]
        for turn in (True, False):
            if (os.environ.get("LOCAL_RANK", "0") == "0") == turn:
                try:
                    name = snapshot_download(name, allow_patterns=patterns)
                except (
                    HfHubHTTPError,
                    HFValidationError,
                    LocalEntryNotFoundError,
                    OSError,
                ) as error:
                    why = " ".join(str(error).split())  # on one line
                    problems = [f"{flag} {name}: no such directory, and not on the Hub ({why})"]
            if (
                dist.is_initialized()
            ):  # all ranks must stop together: those left behind would print tracebacks
                mine, problems = problems[0], [None] * dist.get_world_size()
                dist.all_gather_object(problems, mine)
            if any(problems):
                raise ValueError(next(filter(None, problems)))
    if not (Path(name) / "config.json").exists():
        raise ValueError(
            f"{flag} {name}: has no config.json; give a Hugging Face model directory or a Hub name"
        )
    config = json.loads((Path(name) / "config.json").read_text())
    positions = config.get("max_position_embeddings", longest)
    if longest > positions and not config.get("rope_scaling"):
        lengths = "--data.max-prompt-tokens + --rollout.max-response-tokens"
        advice = f"lower one of them; try {positions // 2} and {positions - positions // 2}"
        raise ValueError(
            f"{flag} {name}: has {positions} positions, {lengths} want {longest}; {advice}"
        )
    return name


def find_critic(
    name: str,
    longest: int,
    built_in: Callable[[], str],
    flag: str,
    policy_path: str,
    *,
    has_head: bool,
) -> str:
    """find_model for a critic or reward model, which must have the tokens of the policy at
    policy_path; "" stays "".

    has_head: it must be a sequence classifier with one label. Raises ValueError as find_model does.
    """
    from safetensors import safe_open
    from transformers import AutoTokenizer

    if not name:
        return ""
    path = find_model(name, longest, built_in, flag)
    labels = 0
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            if "score.weight" in tensors.keys():
                labels = tensors.get_slice("score.weight").get_shape()[0]
    if has_head and labels != 1:
        raise ValueError(
            f"{flag} {name}: is no sequence classifier with one label (score.weight [1, D])"
        )
    theirs, ours = (AutoTokenizer.from_pretrained(p).get_vocab() for p in (path, policy_path))
    if theirs != ours:
        raise ValueError(
            f"{flag} {name}: has other tokens than the policy; they must share a tokenizer"
        )
    return path


def memory_plan(path: str, num_ranks: int, master_dtype: str, *, frozen_copies: int) -> str:
    """What stays in a rank's memory while training the model at `path`, in GiB, as a line of text."""
    from safetensors import safe_open

    num_parameters = 0
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            num_parameters += sum(
                math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()
            )
    gib = num_parameters / num_ranks / 2**30
    master = 4 if master_dtype == "float32" else 2
    frozen = frozen_copies * (2 if torch.cuda.is_available() else 4)
    return (
        f"{num_parameters / 1e6:.1f} M parameters on {num_ranks} ranks: weights {master * gib:.2f}, "
        f"gradients {master * gib:.2f}, optimizer {2 * master * gib:.2f}, frozen models {frozen * gib:.2f} GiB a rank"
    )


def stop_token_ids(path: str, *more: int | None) -> list[int]:
    """All ids that end a response: of generation_config.json and config.json at `path`, and `more`
    (a tokenizer's).
    """
    ids = set(more) - {None}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        eos = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        ids.update([eos] if isinstance(eos, int) else eos or [])
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

    if not is_rank0():
        for _ in buckets:
            pass
        barrier()
        return
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    for old in out_dir.glob("*.safetensors*"):
        old.unlink()
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(held, out_dir / f"part-{len(files):05d}.safetensors", metadata={"format": "pt"})
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
    barrier()


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
) -> None:
    """Write a Hugging Face directory: the tensors of `buckets` (of `dtype`), other files from the
    model at `path`.
    """
    save_safetensors(buckets, out_dir)
    if is_rank0():
        copy_model_files(path, out_dir, dtype)
        print(
            f"the trained model is in {out_dir}; curves, samples and metrics are beside it",
            flush=True,
        )
    barrier()


def copy_model_files(path: str | Path, out_dir: str | Path, dtype: torch.dtype) -> None:
    """Copy config, tokenizer and generation config of the model at `path`; config.json states
    `dtype`. Rank 0 only.
    """
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    for pattern in ("*.json", "*.jinja", "*.model", "*.txt"):
        for file in Path(path).glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, Path(out_dir) / file.name)
    config_file = Path(out_dir) / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)  # the older name of the same field
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2))


def is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
