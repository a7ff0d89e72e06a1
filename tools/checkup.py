"""What --check of the scripts does after a real step: the parts of a run, put together for a table.

The checks themselves are in inputs.py, witness.py and check.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import check
import checkpoint
import hardware
import inputs
import logprobs
import lora
import memory
import metrics
import offload
import optim
import packing
import prefix
import reshard
import sampling
import witness

FIELDS = ("advantages", "rollout_logprobs", "ref_logprobs")


class Run(NamedTuple):
    """A run as it stands after its first step."""

    args: Any
    engine: Any
    scorer: Any  # None: a reward model scores
    tokenizer: Any
    evals: list  # prompts
    state: dict  # what is saved: the policy with its optimizer, the stream of prompts, and more
    offloader: offload.Offload

    @property
    def policy(self) -> nn.Module:
        return self.state["policy"].model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.state["policy"].optimizer


def table(run: Run, gradients: Callable, record: dict, groups: list) -> int:
    """The exit status of --check. Collective.

    gradients: the script's actor_gradients. record: metrics of the first step. groups: this rank's,
    of that step.
    """
    args = run.args
    made = check.Table(args.run.directory)
    made.add(_input_rows(run, record, groups))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    mine = witness.sequences(packing.sequence, rollouts)
    parts = _parts(run, gradients)
    if metrics.total(float(len(mine))) == 0:  # no group had any spread
        mine = parts.sample(dist.get_world_size(), 0)
    is_rough = args.quantize_gradients
    made.add(witness.packing_rows(parts, run.policy, mine, is_rough, args.batch.num_sharing))
    largest = _memory_of_largest_row(run, gradients)
    with run.offloader.present(run.optimizer):
        made.add(_sampler_rows(run, parts, mine, record))
    made.add(check.machine_rows(args, record | largest))
    owners = [x for entry in run.state.values() for x in _owners(entry)]
    with run.offloader.present(*owners):
        save, load = checkpoint.save, checkpoint.load
        made.add([check.restart_row(args.run.directory, run.state, save, load)])
    if dist.get_rank() == 0:
        for prompt in run.state["stream"].datasets[0][:2]:
            print(f"a prompt, token by token:\n{inputs.borders(prompt, run.tokenizer)}", flush=True)
    return made.finish({"settings": asdict(args), "metrics": record})


def _input_rows(run: Run, record: dict, groups: list) -> list:
    """On rank 0; the others wait for it in the next collective."""
    rewards: list = [None] * dist.get_world_size()
    dist.all_gather_object(rewards, [reward for group in groups for reward in group.rewards])
    if dist.get_rank() != 0:
        return []
    args = run.args
    datasets = run.state["stream"].datasets
    wanted = run.scorer.wanted if run.scorer else {}
    options = args.data.template_options
    rows = inputs.data_rows(datasets, [run.evals], run.tokenizer, options, wanted)
    if run.scorer:
        prompts = [prompt for dataset in datasets for prompt in dataset]
        share = -(-args.batch.num_samples // dist.get_world_size())
        rows += inputs.reward_rows(prompts, run.scorer, share)
    everyone = [reward for of_rank in rewards for reward in of_rank]
    return rows + inputs.sample_rows(record, everyone, args.rollout.ignore_eos)


def _sampler_rows(run: Run, parts: witness.Parts, mine: list, record: dict) -> list:
    size = run.args.batch.group_size
    eight_bit = run.args.rollout.eight_bit
    seen = record.get("rollout_corr/abs_diff_mean")
    return witness.sampler_rows(parts, run.policy, mine, size, eight_bit, seen)


def _memory_of_largest_row(run: Run, gradients: Callable) -> dict:
    """Metrics of memory while a row of full size, of the longest sequences, is learned from."""
    row = packing.rows_of_all_sizes(run.args.batch, run.engine.max_model_len)[0]
    zeros = {name: torch.zeros(len(row.tokens)) for name in FIELDS}
    row = replace(row, fields=row.fields | zeros).to(run.policy.device)
    counts = {"tokens": row.num_response_tokens, "sequences": len(row.source)}
    meter = metrics.Metrics(hardware.Device())
    with memory.advice(run.args, [row]), meter.timer("largest_row"):
        gradients(run.args, run.policy, [row], counts, metrics.Metrics())
    run.policy.zero_grad()
    found = meter.reduce()
    return {name: x for name, x in found.items() if name.startswith("perf/max_memory_gb/")}


def _owners(entry: Any) -> list:
    return [getattr(entry, "model", None), getattr(entry, "optimizer", None)]


def _parts(run: Run, add_gradients: Callable) -> witness.Parts:
    args = run.args
    meter = metrics.Metrics()
    temperature = args.rollout.temperature
    device = run.policy.device
    of_policy = witness.plainly(logprobs.token_logprobs, run.policy, temperature)

    def gradients(rows: list, totals: dict) -> None:
        add_gradients(args, run.policy, rows, totals, meter)

    def step(rate: float) -> float:
        return optim.optimizer_step(run.policy, run.optimizer, rate, args.optim.max_grad_norm)

    def sample(num_prompts: int, seed: int) -> list:
        prompts = run.state["stream"].take(num_prompts)
        with run.engine.awake():
            reshard.sync_weights(run.policy, run.engine, merges=lora.merges(run.policy))
            size = args.batch.group_size
            drawn = sampling.draw(run.engine, None, run.tokenizer, prompts, size, seed)
        rollouts = [rollout for each in drawn.values() for rollout in each]
        return witness.sequences(packing.sequence, rollouts)

    def pack(
        sequences: list, capacity: int, num_rows: int | None = None, num_sharing: int = 1
    ) -> list:
        options = {"num_rows": num_rows, "like": packing.empty_sequence(*FIELDS)}
        if num_sharing > 1:
            groups = [i // num_sharing for i in range(len(sequences))]
            options |= {"groups": groups, "share": prefix.share}
        rows = packing.pack(sequences, capacity, **options)
        return [row.to(device) for row in rows]

    tokens_per_row = args.batch.tokens_per_row
    return witness.Parts(of_policy, gradients, step, sample, pack, tokens_per_row)
