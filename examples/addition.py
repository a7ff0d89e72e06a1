"""The built-in job: two-digit addition for a 1 M parameter model that can half do it.

A model that RL can visibly improve within minutes on a CPU must be small, must sometimes be right, and must be made
here, since nothing may be downloaded. So: a 4-layer Qwen2 with a character tokenizer, taught by a short supervised warm
start until half of its sampled answers are right. It is written as a Hugging Face directory and is loaded like any
other model.

    prompt "23+45="   answer "068"

Operands and answers are zero-padded: without that the model must learn where the answer ends before it can learn to
add.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

ALPHABET = "0123456789+="
PAD, EOS = "<pad>", "<eos>"
VERSION = 1  # of what make_model writes; part of the cache's name
TARGET_ACCURACY = (0.45, 0.55)
MAX_WARM_START_STEPS = 1500

# What the run is set to where the user says nothing: grpo.py without --model.
SETTINGS = dict(
    num_steps=360,
    learning_rate=4e-4,  # 1e-3 diverges; constant 3e-4 stays below 0.85
    eval_every=80,
    batch=dict(prompts_per_step=64, group_size=8, num_minibatches=2, tokens_per_row=8192),
    data=dict(max_prompt_tokens=8),
    rollout=dict(max_response_tokens=8),
    reward=dict(functions=("exact",)),
    optim=dict(decay="linear"),
)


def problems(held_out: bool, num_held_out: int = 256) -> list[dict]:
    """Rows {"prompt", "answer"} of the 10,000 problems: the 256 held-out ones (always the same), or the rest."""
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0)).tolist()
    chosen = order[:num_held_out] if held_out else order[num_held_out:]
    return [{"prompt": f"{i // 100:02d}+{i % 100:02d}=", "answer": f"{i // 100 + i % 100:03d}"} for i in chosen]


def cached_model(seed: int) -> str:
    """The directory of the built-in model for `seed`, made on the first call (about 20 s) and kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "handful"
    directory = cache / f"addition-v{VERSION}-seed{seed}"
    if not (directory / "config.json").exists():
        temporary = directory.with_suffix(f".{os.getpid()}")
        make_model(temporary, seed)
        try:
            temporary.rename(directory)
        except OSError:  # another run was faster; its bytes are the same
            shutil.rmtree(temporary)
    return str(directory)


def make_tokenizer():
    """One token per character, no merges, no BOS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(out_dir: str | Path, seed: int) -> None:
    """Write model and tokenizer to out_dir; the same seed gives the same bytes.

    Raises RuntimeError if the warm start does not bring sampled accuracy into TARGET_ACCURACY.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.08,  # at the usual 0.02 so small a model needs ten times as many steps
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    # One thread: sums in another order would give other bytes on another machine.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        warm_start(model, tokenizer)
    torch.set_num_threads(num_threads)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def warm_start(model, tokenizer) -> None:
    """Supervised steps until half of the sampled answers to 256 fixed problems are right."""
    rows = problems(held_out=False)
    data = torch.tensor(tokenizer([r["prompt"] + r["answer"] for r in rows])["input_ids"])  # [9744, 9]
    data = torch.cat([data, torch.full((len(data), 1), tokenizer.eos_token_id)], dim=1)
    checks = data[:256]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    low, high = TARGET_ACCURACY
    accuracy = 0.0
    for step in range(MAX_WARM_START_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30)
        batch = data[torch.randint(len(data), (128,))]
        logits = model(batch[:, :-1]).logits[:, 5:]  # the last prompt token predicts the first digit
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 6:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            accuracy = sampled_accuracy(model, checks)
            if step % 50 == 49:
                print(f"built-in model: step {step + 1}, sampled accuracy {accuracy:.2f} of {low:.2f}", flush=True)
            if low <= accuracy <= high:
                print(f"built-in model: done after {step + 1} steps, sampled accuracy {accuracy:.2f}", flush=True)
                return
    rule = f"not within {TARGET_ACCURACY}; try another --seed"
    raise RuntimeError(f"the warm start ended at sampled accuracy {accuracy:.2f}, {rule}")


@torch.no_grad()
def sampled_accuracy(model, checks: torch.Tensor) -> float:
    """Share of right answers to expect at temperature 1: the mean probability of the answers in `checks` [B, 10]."""
    log_p = model(checks[:, :-1]).logits[:, 5:].log_softmax(-1)
    return float(log_p.gather(-1, checks[:, 6:, None]).sum((1, 2)).exp().mean())
