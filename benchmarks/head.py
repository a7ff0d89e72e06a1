"""Log-probabilities and entropy from the head: time and memory, as written out and compiled.

    python benchmarks/head.py                                   # Qwen2 1.5 B's head, 16,384 tokens
    python benchmarks/head.py --tokens 64 --vocabulary 500 --hidden 32          # also on a CPU

A JSON line per way and chunk size:
    forward_ms      without gradients, as old and reference log-probabilities are made
    ms              forward and backward
    of_products     the same, over the time of its four products alone ([R, D] x [D, V] once forward
                    and once again in the backward, then the gradients of states and weights)
    extra_gb        peak memory beyond hidden states, head and both of their gradients (the head's
                    is summed in fp32)
    logprob_error   largest difference from float64, and the states' and head's gradients' relative
                    errors (norms), of the first 256 tokens
One more line: adding a chunk's share to the head's gradient, as a product and a sum, and as one
product that adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logprobs import head_logprobs


def milliseconds(work, repeats: int = 5) -> float:
    """Median time of work(), after one run that is not counted."""
    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(work) -> int:
    """Memory that work() takes on top of what is there before; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    wait()
    return torch.cuda.max_memory_allocated() - before


def make(args, dtype: torch.dtype, device: str) -> tuple:
    """(hidden, weight, targets, gradients of the two results) with logits as wide as a model's."""
    torch.manual_seed(0)
    with torch.device(device):
        hidden = torch.randn(args.tokens, args.hidden)
        weight = 3 * torch.randn(args.vocabulary, args.hidden) / args.hidden**0.5
        targets = torch.randint(args.vocabulary, (args.tokens,))
        grads = torch.randn(2, args.tokens) / args.tokens
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, grads


def errors(inputs: tuple, num_tokens: int, **options) -> dict:
    """Differences from float64 on the first tokens."""
    results = []
    for dtype in (torch.float64, None):
        hidden, weight, targets, grads = (x.detach() for x in inputs)
        hidden = hidden[:num_tokens].to(dtype or hidden.dtype).requires_grad_()
        weight = weight.to(dtype or weight.dtype).requires_grad_()
        targets = targets[:num_tokens]
        if dtype is None:
            logprobs, entropy = head_logprobs(hidden, weight, None, targets, **options)
        else:
            log_p = torch.log_softmax(hidden @ weight.t(), -1)
            logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
        upstream = grads[:, :num_tokens].to(logprobs.dtype)
        torch.autograd.backward((logprobs, entropy), tuple(upstream))
        results.append([x.double() for x in (logprobs.detach(), hidden.grad, weight.grad)])
    right, ours = results
    return {
        "logprob_error": (ours[0] - right[0]).abs().max().item(),
        "hidden_grad_error": ((ours[1] - right[1]).norm() / right[1].norm()).item(),
        "head_grad_error": ((ours[2] - right[2]).norm() / right[2].norm()).item(),
    }


def products_ms(hidden, weight) -> float:
    """The four products of forward and backward over all tokens, nothing else."""
    part = slice(0, min(1024, len(hidden)))
    states = hidden.detach()[part]
    head = weight.detach()
    dz = torch.randn(len(states), len(head), device=head.device, dtype=head.dtype)

    def work():
        logits(states, head)
        logits(states, head)
        dz @ head
        dz.t() @ states

    return milliseconds(work) * len(hidden) / len(states)


def logits(states, head):
    if states.is_cuda and states.dtype != torch.float32:
        return torch.mm(states, head.t(), out_dtype=torch.float32)
    return states @ head.t()


def additions(hidden, weight, chunk: int) -> dict:
    """Two ways to add a chunk's share to the head's gradient in fp32."""
    states = hidden.detach()[:chunk]
    total = torch.zeros(weight.shape, device=weight.device)
    dz = torch.randn(len(states), len(weight), device=weight.device, dtype=weight.dtype)

    def separate():
        total.add_(dz.t() @ states)

    def together():
        torch.addmm(total, dz.t(), states, out_dtype=torch.float32, out=total)

    result = {"chunk": len(states), "product_and_sum_ms": milliseconds(separate)}
    if weight.is_cuda and weight.dtype != torch.float32:
        result["adding_product_ms"] = milliseconds(together)
        exact = dz.double().t() @ states.double()
        total.zero_()
        together()
        together()
        error = (total.double() - 2 * exact).norm() / (2 * exact).norm()
        result["adding_product_error"] = error.item()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 2048])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden, weight, targets, grads = make(args, dtype, device)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    sizes = {"tokens": args.tokens, "hidden": args.hidden, "vocabulary": args.vocabulary}
    about = sizes | {"device": where, "torch": torch.__version__}
    alone_ms = products_ms(hidden, weight)
    for chunk in args.chunks:
        print(json.dumps(about | additions(hidden, weight, chunk)), flush=True)
    # Plain code at one chunk size: it is there to compare with.
    ways = [(False, args.chunks[0]), *((True, chunk) for chunk in args.chunks)]
    for fused, chunk in ways:
        options = {"chunk": chunk, "fused": fused}

        def forward(options=options):
            with torch.no_grad():
                head_logprobs(hidden, weight, None, targets, **options)

        def both(options=options):
            hidden.grad = weight.grad = None
            results = head_logprobs(hidden, weight, None, targets, **options)
            torch.autograd.backward(results, tuple(grads))

        start = time.perf_counter()
        both()
        wait()
        first_s = time.perf_counter() - start
        forward_ms = milliseconds(forward)
        ms = milliseconds(both)
        hidden.grad = weight.grad = None
        gradients = hidden.numel() * hidden.element_size() + 4 * weight.numel()
        extra = peak_bytes(both) - gradients
        hidden.grad = weight.grad = None
        times = {"first_s": first_s, "forward_ms": forward_ms, "ms": ms}
        times |= {"products_ms": alone_ms, "of_products": ms / alone_ms, "extra_gb": extra / 1e9}
        accuracy = errors((hidden, weight, targets, grads), min(256, args.tokens), **options)
        print(json.dumps(about | options | times | accuracy), flush=True)


if __name__ == "__main__":
    main()
