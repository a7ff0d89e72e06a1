"""Shared prefixes against plain rows: the update, old and reference passes of grpo.py, in one run.

    python benchmarks/prefix.py models/qwen2-1.5b --workloads long even w2
    python benchmarks/prefix.py models/smollm2 --workloads w1
    python benchmarks/prefix.py MODEL_DIR --workloads tiny --repeats 1    # a CPU: whether it runs

Sequences hold random tokens. Both layouts take turns; a time is the median of --repeats after a
warm-up, and memory is the most that tensors took in the update. `graphs` are what torch.compile
made in the warm-up and later: the second should be 0.
First of all, log-probabilities of one group and the gradient of their weighted sum, in both
layouts, are compared with those of Transformers' own model in fp32, a sequence at a time. They
differ by rounding: shared rows may be no further away than plain ones.
Each record is a line of JSON; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attention
import exchange
import grpo
import logprobs
import metrics
import model
import optim
import packing
import prefix
import run
from batch import BatchConfig


@dataclass(frozen=True)
class Workload:
    prompts: int
    group_size: int
    prompt: int  # tokens
    response: int
    tokens_per_row: int = 16384


WORKLOADS = {
    "long": Workload(4, 8, 2048, 256),
    "even": Workload(2, 16, 1024, 1024),
    "w1": Workload(64, 8, 100, 256, 65536),
    "w2": Workload(16, 8, 100, 512),
    "tiny": Workload(2, 4, 16, 4, 64),
}
PHASES = ("update", "old_logprobs", "ref_logprobs")


def make_sequences(work: Workload, vocabulary: int) -> list[dict]:
    """The groups of a step with the fields that the loss needs."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(work.prompts):
        prompt = torch.randint(vocabulary, (work.prompt,), generator=generator)
        for i in range(work.group_size):
            response = torch.randint(vocabulary, (work.response,), generator=generator)
            fields = {"advantages": 1.0 - 2.0 * (i % 2), "rollout_logprobs": -10.0}
            sequences.append(packing.sequence(prompt, response, **fields))
    return sequences


def lay_out(work: Workload, sequences: list[dict], shares: bool, device: str):
    """(rows, totals) as grpo.py makes them."""
    config = BatchConfig(work.prompts, work.group_size, tokens_per_row=work.tokens_per_row)
    [rows], [totals] = packing.lay_out(
        sequences,
        [0] * len(sequences),
        config,
        exchange=exchange.exchange,
        like=sequences[0],
        share=prefix.share if shares else None,
    )
    return [row.to(device) for row in rows], totals


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def timed(function) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(work: Workload, repeats: int, settings, policy, reference, optimizer) -> dict:
    """The record of a workload: for each layout what it computes, seconds and GiB."""
    device = policy.device.type
    sequences = make_sequences(work, policy.config.vocab_size)
    layouts = {name: lay_out(work, sequences, name == "shared", device) for name in LAYOUTS}
    meter = metrics.Metrics()
    seconds = {(name, phase): [] for name in LAYOUTS for phase in PHASES}
    gib = dict.fromkeys(LAYOUTS, 0.0)

    def update(rows, totals):
        grpo.actor_gradients(settings, policy, rows, totals, meter)
        optim.optimizer_step(policy, optimizer, 1e-9, 1.0)

    graphs = []
    for i in range(repeats + 1):  # the first one is not counted
        graphs.append(num_graphs())
        for name, (rows, totals) in layouts.items():
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            passes = {
                "update": lambda rows=rows, totals=totals: update(rows, totals),
                "old_logprobs": lambda rows=rows: logprobs.with_logprobs(policy, [rows], "x", 1.0),
                "ref_logprobs": lambda rows=rows: logprobs.with_logprobs(
                    reference, [rows], "x", 1.0
                ),
            }
            for phase, function in passes.items():
                taken = timed(function)
                if i:
                    seconds[name, phase].append(taken)
                if phase == "update" and torch.cuda.is_available():
                    gib[name] = torch.cuda.max_memory_allocated() / 2**30
    record = {"graphs": [graphs[1] - graphs[0], num_graphs() - graphs[1]]}
    for name, (rows, _) in layouts.items():
        record[name] = {
            "rows": len(rows),
            "tokens": sum(len(row.tokens) for row in rows),
            **{phase: statistics.median(seconds[name, phase]) for phase in PHASES},
            "gib": gib[name],
        }
    return record


LAYOUTS = ("plain", "shared")


def compare(work: Workload, path: str, policy) -> dict:
    """Relative distances from fp32 of one group's log-probabilities and of their gradient."""
    from transformers import AutoModelForCausalLM

    device = policy.device.type
    group = make_sequences(work, policy.config.vocab_size)[: work.group_size]
    generator = torch.Generator().manual_seed(1)
    for s in group:
        s["weights"] = torch.randn(len(s["tokens"]), generator=generator)
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    exact.set_attn_implementation("sdpa")
    expected = []
    for s in group:
        tokens = s["tokens"].to(device)
        logits = exact(tokens[None], use_cache=False).logits[0, work.prompt - 1 : -1]
        found = logits.log_softmax(-1).gather(-1, tokens[work.prompt :, None])[:, 0]
        (found * s["weights"][work.prompt :].to(device)).sum().backward()
        expected.append(found.detach())
    results = {"fp32": (torch.cat(expected), {n: p.grad for n, p in exact.named_parameters()})}
    for name in LAYOUTS:
        rows, _ = lay_out(work, group, name == "shared", device)
        found = {}
        policy.zero_grad()
        for i, row in enumerate(rows):
            policy.set_requires_gradient_sync(i == len(rows) - 1)
            values, _ = logprobs.token_logprobs(policy, row)
            mask = row.fields["response_mask"]
            (values * row.fields["weights"])[mask].sum().backward()
            parts = packing.unpack(row, values.detach())
            found |= {k: x[-work.response :] for k, x in zip(row.source, parts, strict=True)}
        in_order = torch.cat([found[k] for k in sorted(found)])
        gradients = {n: p.grad.full_tensor() for n, p in policy.named_parameters()}
        results[name] = in_order, gradients
        policy.zero_grad()
    return {
        f"{one} - {other}": distances(results[one], results[other])
        for one, other in (("plain", "fp32"), ("shared", "fp32"), ("shared", "plain"))
    }


def distances(one: tuple, other: tuple) -> dict[str, float]:
    """Of log-probabilities the mean in nats; of gradients all together and the worst tensor's."""
    (values, gradients), (known, known_gradients) = one, other
    squares = [(gradients[n] - g).square().sum().item() for n, g in known_gradients.items()]
    sizes = [g.square().sum().item() for g in known_gradients.values()]
    return {
        "nats": (values - known).abs().mean().item(),
        "gradient": (sum(squares) / sum(sizes)) ** 0.5,
        "worst": max((a / max(b, 1e-30)) ** 0.5 for a, b in zip(squares, sizes, strict=True)),
    }


def table(records: list[dict]) -> None:
    """A line for each workload and phase: seconds of both layouts, and their quotient."""
    for record in records:
        plain, shared = record["plain"], record["shared"]
        print(f"\n{record['workload']}: {record['sizes']}")
        print(f"{'':14}{'plain':>10}{'shared':>10}{'quotient':>10}")
        for name in ("tokens", *PHASES, "gib"):
            quotient = f"{shared[name] / plain[name]:10.3f}" if plain[name] else ""
            print(f"{name:14}{plain[name]:10.5g}{shared[name]:10.5g}{quotient}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    mesh = run.init_distributed(0, 600)
    settings = grpo.Args()
    policy = model.load_policy(args.model, mesh, settings.model)
    reference = model.load_policy(args.model, mesh, settings.model, trainable=False)
    for each in (policy, reference):
        attention.use_packed_attention(each)
    about = {"model": Path(args.model).name, "torch": torch.__version__, "device": "CPU"}
    small = Workload(1, 4, 16, 4, 64)
    if torch.cuda.is_available():
        about["device"] = torch.cuda.get_device_name()
        small = Workload(1, 4, 512, 128)
    start = time.perf_counter()
    found = compare(small, args.model, policy)
    print(json.dumps(about | {"distances": found, "s": time.perf_counter() - start}), flush=True)
    optimizer = optim.make_optimizer(policy, settings.optim, settings.learning_rate)
    records = []
    for name in args.workloads:
        work = WORKLOADS[name]
        start = time.perf_counter()
        record = measure(work, args.repeats, settings, policy, reference, optimizer)
        sizes = (
            f"{work.prompts} prompts of {work.prompt} tokens, {work.group_size} responses of "
            f"{work.response} each, rows of {work.tokens_per_row}"
        )
        records.append(about | {"workload": name, "sizes": sizes} | record)
        print(json.dumps(records[-1] | {"s": time.perf_counter() - start}), flush=True)
    table(records)
    run.leave()


if __name__ == "__main__":
    main()
