"""A model directory with random bf16 weights of a well-known shape: for what needs the size and not
the words.

python benchmarks/shapes.py qwen2-1.5b models/qwen2-1.5b --tokenizer models/smollm2
"""

from __future__ import annotations

import argparse

import torch

SHAPES = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "qwen2-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


def make(shape: str, out_dir: str, tokenizer: str) -> None:
    """Write config, weights (drawn on the GPU if there is one) and the tokenizer of another model
    to out_dir.
    """
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    config = Qwen2Config(
        **SHAPES[shape],
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out_dir)
    words.save_pretrained(out_dir)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out_dir")
    parser.add_argument("--tokenizer", required=True)
    arguments = parser.parse_args()
    make(arguments.shape, arguments.out_dir, arguments.tokenizer)
