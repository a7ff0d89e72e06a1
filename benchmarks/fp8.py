"""8-bit products for the linear layers of the update: what they save and what they cost.

    python benchmarks/fp8.py speed                                  # on a GPU that has them
    python benchmarks/fp8.py gradients models/smollm2 gsm8k.jsonl   # emulated, so on any device

A linear layer has three products: y = x W^T, dx = dy W, dW = dy^T x. In 8 bits (e4m3) both sides of
a product are scaled by the largest value of each row (x, dy) and column (the other side) and
rounded; torch._scaled_mm multiplies and scales back.

speed       milliseconds of one layer's linear products at --tokens, forward and backward, in bf16,
            with y and dx in 8 bits, and with all three; rounding counts (weights once per row of
            tokens, an upper bound). Then the share of an update that the whole model could save.
gradients   cosine between the gradients of a policy loss without and with 8-bit products: of the
            whole, the lowest of all weight matrices, their median; the other products are in bf16
            on a GPU, and bf16 is compared with fp32 beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LARGEST = 448.0  # of e4m3
LAYERS = {  # of the Qwen2 1.5 B shape: (outputs, inputs)
    "q": (1536, 1536),
    "k": (256, 1536),
    "v": (256, 1536),
    "o": (1536, 1536),
    "gate": (8960, 1536),
    "up": (8960, 1536),
    "down": (1536, 8960),
}
NUM_LAYERS = 28


def to_eight_bits(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(x over its scale in e4m3, scale): one scale for each index that `dim` leaves."""
    scale = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as the left side: a scale per row."""
    return to_eight_bits(x, 1)


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """x^T [K, M], written out, as a side whose rows are x's columns."""
    codes, scale = to_eight_bits(x, 0)
    return codes.t().contiguous(), scale.t().contiguous()


def multiply(a, b, out_dtype=torch.bfloat16) -> Tensor:
    """a b^T [M, N] of codes a [M, K], b [N, K] with their scales."""
    (a_codes, a_scale), (b_codes, b_scale) = a, b
    return torch._scaled_mm(
        a_codes, b_codes.t(), a_scale, b_scale.t(), out_dtype=out_dtype, use_fast_accum=True
    )


def milliseconds(work) -> float:
    from triton.testing import do_bench

    return do_bench(work, warmup=20, rep=60, return_mode="median")


def speed(args) -> None:
    compiled_rows = torch.compile(rows)
    compiled_turned = torch.compile(turned)
    total = {"bf16": 0.0, "two": 0.0, "three": 0.0, "rounding": 0.0}
    for name, (num_out, num_in) in LAYERS.items():
        x = torch.randn(args.tokens, num_in, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) / num_in**0.5
        dy = torch.randn(args.tokens, num_out, device="cuda", dtype=torch.bfloat16)

        def bf16(x=x, w=w, dy=dy):
            x @ w.t()
            dy @ w
            dy.t() @ x

        def rounding(x=x, w=w, dy=dy):
            return compiled_rows(x), compiled_rows(w), compiled_rows(dy), compiled_turned(w)

        def two(x=x, dy=dy, rounding=rounding):
            x_rows, w_rows, dy_rows, w_turned = rounding()
            multiply(x_rows, w_rows)
            multiply(dy_rows, w_turned)
            dy.t() @ x

        def three(x=x, dy=dy, rounding=rounding):
            x_rows, w_rows, dy_rows, w_turned = rounding()
            multiply(x_rows, w_rows)
            multiply(dy_rows, w_turned)
            multiply(compiled_turned(dy), compiled_turned(x))

        x_rows, w_rows, _, _ = rounding()
        error = (multiply(x_rows, w_rows) - x @ w.t()).norm() / (x @ w.t()).norm()
        ways = {"bf16": bf16, "two": two, "three": three, "rounding": rounding}
        times = {way: milliseconds(work) for way, work in ways.items()}
        total = {way: total[way] + times[way] for way in total}
        flops = 6 * args.tokens * num_out * num_in
        record = {"layer": name, "tokens": args.tokens, "shape": [num_out, num_in]}
        record |= {f"{way}_ms": ms for way, ms in times.items()}
        record |= {"bf16_tflops": flops / times["bf16"] / 1e9, "error": error.item()}
        print(json.dumps(record), flush=True)
    model = {f"{way}_ms": NUM_LAYERS * ms for way, ms in total.items()}
    model["device"] = torch.cuda.get_device_name()
    model["torch"] = torch.__version__
    saved = NUM_LAYERS * (total["bf16"] - min(total["two"], total["three"])) / 1000
    # The update's own time at its measured speed, and what would be left of it.
    update_s = args.tokens / args.update_tokens_per_s
    model["update_s"] = update_s
    model["update_at_most_times_faster"] = update_s / (update_s - saved)
    print(json.dumps(model), flush=True)


def emulated(x: Tensor, dim: int) -> Tensor:
    """x as its 8-bit codes stand for it."""
    codes, scale = to_eight_bits(x, dim)
    return (codes.float() * scale).to(x.dtype)


class EightBitLinear(torch.autograd.Function):
    """x W^T with both sides rounded as speed() does; `three`: the weights' gradient as well."""

    @staticmethod
    def forward(ctx, x, weight, three):
        ctx.save_for_backward(x, weight)
        ctx.three = three
        return emulated(x, -1) @ emulated(weight, 1).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = emulated(dy, -1) @ emulated(weight, 0)
        dy = dy.flatten(0, -2)
        x = x.flatten(0, -2)
        if ctx.three:
            dy = emulated(dy, 0)
            x = emulated(x, 0)
        return dx, dy.t() @ x, None


def gradients_of(args, batch, dtype: torch.dtype, num_products: int) -> dict[str, Tensor]:
    """Gradients of mean A log pi over the answers' tokens, A = -1 or 1 per sequence."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device)
    linears = [m for name, m in model.model.named_modules() if isinstance(m, nn.Linear)]
    for linear in linears if num_products else ():
        three = num_products == 3

        def forward(x, linear=linear, three=three):
            y = EightBitLinear.apply(x, linear.weight, three)
            return y if linear.bias is None else y + linear.bias

        linear.forward = forward
    num_tokens = sum(len(answer) for _, answer, _ in batch)
    for question, answer, advantage in batch:
        ids = torch.tensor([question + answer], device=device)
        logits = model(ids, use_cache=False).logits[0, len(question) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, len(question) :, None])
        (-advantage * logprobs.sum() / num_tokens).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.ndim == 2}


def gradients(args) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    batch = []
    for i, line in enumerate(Path(args.data).read_text().splitlines()[: args.sequences]):
        row = json.loads(line)
        texts = row["question"] + "\n", row["answer"]
        question, answer = (tokenizer(text)["input_ids"] for text in texts)
        batch.append((question, answer, 1 - 2 * (i % 2)))

    def cosine(a: Tensor, b: Tensor) -> float:
        return (torch.dot(a.flatten(), b.flatten()) / (a.norm() * b.norm())).item()

    # A CPU is slow in bf16: there the other products are in fp32.
    base = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    ways = {"fp32": (torch.float32, 0), "two": (base, 2), "three": (base, 3)}
    pairs = [("two", "fp32"), ("three", "fp32")]
    if base == torch.bfloat16:
        ways["bf16"] = (base, 0)
        pairs = [("bf16", "fp32"), ("two", "bf16"), ("three", "bf16")]
    found = {way: gradients_of(args, batch, *options) for way, options in ways.items()}
    for way, other in pairs:
        each = {name: cosine(grad, found[other][name]) for name, grad in found[way].items()}
        flat = [torch.cat([g.flatten() for g in found[x].values()]) for x in (way, other)]
        low = sorted(each.values())
        record = {"gradient": way, "against": other, "sequences": len(batch)}
        record |= {"whole": cosine(*flat), "lowest": low[0], "median": low[len(low) // 2]}
        record |= {"lowest_is": min(each, key=each.get), "matrices": len(each)}
        record["above_0.999"] = sum(value > 0.999 for value in low) / len(low)
        print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "gradients"])
    parser.add_argument("model", nargs="?")
    parser.add_argument("data", nargs="?")
    parser.add_argument("--tokens", type=int, default=16384, help="in one row")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--update-tokens-per-s", type=float, default=45000, help="1.5 B, one H200")
    args = parser.parse_args()
    if args.what == "gradients" and not (args.model and args.data):
        parser.error("gradients: give MODEL_DIR and DATA.jsonl")
    {"speed": speed, "gradients": gradients}[args.what](args)


if __name__ == "__main__":
    main()
