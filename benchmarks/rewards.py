"""Scoring: seconds of a step's samples by rules and functions; samples/s of a reward model.

    python benchmarks/rewards.py --out benchmarks/results/rewards.json
On a GPU:
    python benchmarks/rewards.py --shape 135m --dtype bfloat16 --num-texts 1024 --length 512

    start      Scorer until all workers have loaded the functions
    nap        256 samples that sleep 50 ms each: all at once, and while a sampler takes 2 s over
               them ("left after")
    trivial    a function that returns at once: what a call through the pipe costs
    math       the built-in rule on right and wrong numbers, fractions and roots
    model      a reward model with random weights on texts of random lengths up to --length: packed
               by model_scores, each text alone, and in batches padded to their longest; --tokens
               tokens in a row or a batch
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The root's rewards.py, not this file.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from logprobs import model_scores
from rewards import RewardConfig, Scorer

FUNCTIONS = """
import time

def nap(response):
    time.sleep(0.05)
    return 1.0

def trivial(response):
    return 1.0
"""
SHAPES = {  # hidden size, intermediate size, layers, heads, KV heads, vocabulary
    "tiny": (256, 768, 4, 4, 2, 8192),
    "135m": (576, 1536, 30, 9, 3, 49152),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
}
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def time_function(
    spec: str, samples: list[dict], num_workers: int, sampling_s: float = 0.0
) -> tuple[float, float]:
    """Seconds to start the workers, and from the last submit to the rewards.

    If sampling_s is 0, it is from the first submit.
    """
    start = time.perf_counter()
    with contextlib.closing(Scorer(RewardConfig((spec,), num_workers=num_workers))) as scorer:
        started = time.perf_counter()
        for index, sample in enumerate(samples):
            scorer.submit(index, sample)
            time.sleep(sampling_s / len(samples))
        submitted = time.perf_counter()
        scorer.collect(len(samples))
        return started - start, time.perf_counter() - (submitted if sampling_s else started)


def measure_functions(num_samples: int) -> list[dict]:
    common = {"prompt": "", "answer": r"\frac{1}{2}", "truncated": False}
    responses = ["#### 0.5", r"So \boxed{\frac{3}{6}}.", "The answer is 41", r"\boxed{\sqrt{2}}"]
    samples = [common | {"response": responses[i % 4]} for i in range(num_samples)]
    records = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "functions.py"
        path.write_text(FUNCTIONS)
        for spec, num_workers, sampling_s in (
            (f"{path}:nap", 1, 0.0),
            (f"{path}:nap", 8, 0.0),
            (f"{path}:nap", 8, 2.0),
            (f"{path}:trivial", 8, 0.0),
            ("math", 4, 0.0),
            ("exact", 4, 0.0),
        ):
            start_s, seconds = time_function(spec, samples, num_workers, sampling_s)
            what = spec.rpartition(":")[2] + (" left after 2 s of sampling" if sampling_s else "")
            rate = num_samples / seconds
            records.append(
                dict(what=what, workers=num_workers, start_s=start_s, s=seconds, samples_per_s=rate)
            )
    return records


def measure_model(shape: str, dtype: str, num_texts: int, length: int, tokens: int) -> list[dict]:
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from attention import use_packed_attention

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = dict(zip(FIELDS, SHAPES[shape], strict=True), num_labels=1, pad_token_id=0)
    model = (
        Qwen2ForSequenceClassification(Qwen2Config(**options))
        .eval()
        .to(device, getattr(torch, dtype))
    )
    lengths = torch.randint(length // 8, length + 1, (num_texts,)).tolist()
    texts = [torch.randint(1, options["vocab_size"], (n,)) for n in lengths]

    def padded() -> None:
        batch_size = max(1, tokens // max(lengths))
        for start in range(0, num_texts, batch_size):
            rows = texts[start : start + batch_size]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
            with torch.no_grad():
                model(ids, attention_mask=(ids != 0).long(), use_cache=False).logits.tolist()

    records = []

    def record(what: str, run) -> None:
        run()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        rates = dict(samples_per_s=num_texts / seconds, tokens_per_s=sum(lengths) / seconds)
        records.append(dict(what=what, s=seconds, **rates))

    record("model, each text alone", lambda: model_scores(model, texts, tokens_per_row=1))
    record("model, padded", padded)
    use_packed_attention(model)
    record("model, packed", lambda: model_scores(model, texts, tokens_per_row=tokens))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-samples", type=int, default=256)
    parser.add_argument(
        "--shape", choices=SHAPES, default="tiny", help="shape of the reward model, random weights"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-texts", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest text")
    parser.add_argument(
        "--tokens", type=int, default=16384, help="tokens of a row or a padded batch"
    )
    parser.add_argument("--out", type=Path, help="JSON file; default none")
    args = parser.parse_args()
    records = measure_functions(args.num_samples)
    records += measure_model(args.shape, args.dtype, args.num_texts, args.length, args.tokens)

    import torch

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    setting = {name: value for name, value in vars(args).items() if name != "out"}
    setting |= {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
    }
    setting |= {"torch": torch.__version__, "commit": git.stdout.strip()}
    print(json.dumps(setting))
    print(f"{'what':<34} {'workers':>7} {'start s':>8} {'s':>8} {'samples/s':>10} {'tokens/s':>10}")
    for r in records:
        start = f"{r['start_s']:.2f}" if "start_s" in r else ""
        rate = f"{r['samples_per_s']:>10.0f} " + (
            f"{r['tokens_per_s']:>10.0f}" if "tokens_per_s" in r else ""
        )
        print(f"{r['what']:<34} {r.get('workers', ''):>7} {start:>8} {r['s']:>8.3f} {rate}")
    if args.out:
        args.out.write_text(json.dumps({"setting": setting, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
