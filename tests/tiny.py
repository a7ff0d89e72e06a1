"""Tiny models as Hugging Face directories, random and different in what breaks loaders and engines.

    qwen2    tied head, biases in q, k, v
    llama    untied head, one key/value head
    gemma3   tied head, scaled embeddings, norms of (1 + weight), two rotary tables, layers with a
             sliding window
The vocabulary is the built-in task's (14 characters), so that its tokenizer and its prompts fit.
"""

from pathlib import Path

import torch

from examples import addition

KINDS = ("qwen2", "llama", "gemma3")


def save_tiny(directory: Path | str, kind: str = "qwen2", *, seed: int = 0, **settings) -> str:
    """The directory, with a 2-layer random model of that kind and the built-in task's tokenizer in
    it.
    """
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config

    tokenizer = addition.make_tokenizer()
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.1,  # at the usual 0.02 all distributions would be nearly uniform
    )
    extra = {
        "qwen2": dict(tie_word_embeddings=True, num_key_value_heads=2),
        "llama": dict(tie_word_embeddings=False),
        "gemma3": dict(
            tie_word_embeddings=True,
            sliding_window=4,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"],
        ),
    }[kind]
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig, "gemma3": Gemma3TextConfig}[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(**sizes | extra | settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if (
                    parameter.ndim == 1
                ):  # norms of 1 and biases of 0 would hide that they were never loaded
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
