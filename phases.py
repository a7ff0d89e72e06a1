# SPDX-FileCopyrightText: 2026 handful contributors (phases.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""What the scripts' loops share: engine, warm-up, sync, evaluation, layout, gradients, export.

Like the scripts it puts files of the root together, by the script's `Args`; grpo.py shows where
each function stands in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import adapter
import data
import exchange
import hf_backend
import hub
import logprobs
import lora
import losses
import memory
import packing
import prefix
import reshard
import rollout
import sampling
import scheduler
import vllm_backend
from packing import PackedRow


def make_engine(args: Any, path: str, tokenizer) -> rollout.Engine:
    """The sampler, asleep: vLLM, or Transformers' generate."""
    backend = hf_backend.HfBackend
    if args.rollout.backend == "vllm":
        make = scheduler.closed_batch_scheduler
        backend = functools.partial(vllm_backend.VllmBackend, make_scheduler=make)
    return rollout.Engine(
        backend,
        path,
        args.rollout,
        max_prompt_tokens=args.data.max_prompt_tokens,
        num_samples=args.batch.num_samples,
        stop_ids=hub.stop_token_ids(path, tokenizer.eos_token_id),
        seed=args.seed,
    )


def warm_up(
    args: Any,
    models: list,
    num_tokens: int,
    offloader,
    *,
    has_reference: bool,
    has_old: bool = True,
    shares: Sequence = (prefix.share,),
) -> None:
    """Compile what the passes over rows need; the policy is the first of the models.

    num_tokens: of the longest sequence. has_reference: the policy without its adapters, if it has
    any, is passed over, too. has_old: passes without gradients go before the update. shares: what
    makes each kind of row from a plain one, or None.
    """
    rows = [
        row for share in shares for row in packing.rows_of_all_sizes(args.batch, num_tokens, share)
    ]
    with memory.advice(args, rows):
        logprobs.warm_up(models, rows, offloader.present, [False, True] if has_old else [True])
        if args.lora.rank and has_reference:
            with lora.disabled(models[0]):
                logprobs.warm_up(models[:1], rows, offloader.present, kinds=[False])


def sync(args: Any, policy: nn.Module, engine: rollout.Engine, meter) -> None:
    """Give the policy's weights to the engine, which is awake: after that it can sample."""
    with meter.timer("reshard"):
        merges = lora.merges(policy)
        num_bytes = reshard.sync_weights(policy, engine, merges=merges)
        if args.verify_sync:
            reshard.verify_sync(policy, engine, merges=merges)
    meter.add("communication/sync_gb", num_bytes / 1e9)


def lay_out(
    args: Any,
    sequences: list,
    minibatch_of: list[int],
    like: dict,
    share: Callable | None = prefix.share,
) -> tuple[list[list[PackedRow]], list[dict]]:
    """(rows, totals) of each minibatch, balanced over ranks. Collective; as packing.lay_out."""
    return packing.lay_out(
        sequences,
        minibatch_of,
        args.batch,
        exchange=exchange.exchange,
        like=like,
        share=share,
    )


def export(args: Any, policy: nn.Module, dtype: torch.dtype, path: str) -> None:
    """Write the trained model, and adapters once more by themselves. Collective."""
    weights = reshard.iter_full_params(policy, dtype=dtype, merges=lora.merges(policy))
    hub.export(weights, path, args.run.directory / "hf", dtype)
    if args.lora.rank:
        out_dir = args.run.directory / "adapter"
        adapter.write(args.lora, lora.adapters(policy), out_dir, base=args.model_path)


def evaluate(args: Any, step: int, engine, scorer, tokenizer, prompts, meter, guard) -> None:
    """Greedy reward and, of --eval-samples k, mean@k and pass@k, on the held-out prompts."""
    seed = data.sampling_seed(args.seed, "eval")
    made = sampling.evaluate(engine, scorer, tokenizer, prompts, args.eval_samples, seed, meter)
    guard.keep_best(step, made[0], meter)


def actor_gradients(args: Any, policy, rows: list[PackedRow], totals: dict, meter) -> Tensor:
    """Add the gradients of a minibatch to the policy; returns this rank's share of ppo_kl."""
    temperature = args.rollout.temperature
    kl = torch.zeros((), device=rows[0].tokens.device)
    for i, row in enumerate(rows):
        # Gradients are reduced over ranks once, after the last row. Until then they add up here.
        is_last = i == len(rows) - 1
        policy.set_requires_gradient_sync(is_last or args.model.reduce_every_row)
        current, entropy = logprobs.token_logprobs(policy, row, temperature=temperature)
        limit = args.rollout.max_response_tokens
        loss, stats = losses.actor_loss(current, entropy, row, totals, args.loss, limit)
        loss.backward()
        meter.add_pass(policy, row)
        meter.update(stats, row.num_response_tokens)
        kl += stats["actor/ppo_kl"] * row.num_response_tokens / totals["tokens"]
    return kl
