# SPDX-FileCopyrightText: 2026 handful contributors (grpo.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""GRPO: reinforcement learning of a language model from groups of its own samples.

    bash launch.sh grpo.py      # no arguments: a small model learns to add, on a CPU, in minutes
    bash launch.sh grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main

For each of P prompts the policy samples a group of G responses; each gets a reward R.
    advantage    A_g = (R_g - mean(R)) / std(R) over the group         advantages.group_advantages
    ratio        r_i = pi(token_i) / pi_old(token_i)                   losses.policy_loss
    surrogate    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))    losses.policy_loss
    loss         sum over response tokens of (w surrogate + kl_coef KL(pi|pi_ref) - entropy_coef H)
                 / number of response tokens in the minibatch          losses.actor_loss
    w            min(pi_old / pi_sampler, cap)                         losses.sampler_correction

pi is the policy as it is trained, pi_old before this step's update, pi_ref before the run:
logprobs.token_logprobs gives their logarithms and the entropy H. pi_sampler is pi_old as the engine
computes it, in other kernels; its logarithms come with the samples (rollout.Rollout).

`main` has the six phases of a step. A minibatch is what one optimizer step sees, a row several
sequences end to end. All sizes are over all ranks. Source: Shao 2024 (arXiv:2402.03300).

Variants are flags; the defaults are GRPO with DAPO's divisor and clip, and no KL term:
    Paper      --loss.normalize sequence --loss.clip-high 0.2 --loss.kl-coef 0.04
    Dr. GRPO   --advantage.no-scale-by-std --loss.normalize constant
    RLOO       --advantage.baseline leave_one_out --advantage.no-scale-by-std
    REINFORCE  --advantage.baseline batch --advantage.no-scale-by-std
    DAPO       --loss.normalize token --resample-tries 8 --advantage.overlong-buffer 512
    GSPO       --loss.ratio sequence --loss.normalize sequence
               --loss.clip-low 3e-4 --loss.clip-high 4e-4
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

import adapter
import advantages
import attention
import check
import checkpoint
import comms
import curves
import data
import hardware
import hub
import inputs
import logprobs
import lora
import memory
import metrics
import model
import offload
import optim
import packing
import plan
import report
import run
import sampling
import witness
from advantages import AdvantageConfig
from batch import BatchConfig
from data import DataConfig
from examples import addition
from guard import Guard
from lora import LoraConfig
from losses import LossConfig
from model import ModelConfig
from optim import OptimConfig
from phases import actor_gradients, evaluate, export, lay_out, make_engine, sync, warm_up
from report import LogConfig
from rewards import RewardConfig, Scorer
from rollout import RolloutConfig
from run import RunConfig
from sampling import Group
from tools import checkup

# What a rank without samples puts in its rows.
EMPTY = packing.empty_sequence("advantages", "rollout_logprobs")


@dataclass(frozen=True)
class Args:
    model_path: Annotated[str, tyro.conf.arg(name="model")] = "built-in"
    """Hugging Face directory or Hub name; built-in: a 1 M parameter model that half knows two-digit
    addition."""
    data_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="data")] = ("built-in",)
    """Training prompts: .jsonl or .parquet files, reasoning_gym:NAME:SIZE:SEED, or Hub names as
    NAME or NAME:SUBSET."""
    eval_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="eval-data")] = ()
    """Prompts to evaluate on, of the same kinds; empty: none (built-in data bring their own)."""
    num_steps: int = 200
    """Batches of rollouts to train on."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    seed: int = 0
    """Seed of the data order, of sampling, and of the built-in model."""
    resample_tries: int = 1
    """Rounds of (dynamic) sampling to fill a step with groups that have spread; 1: take all."""
    refresh_every: int = 0
    """Copy the policy into the reference every this many steps; 0: never."""
    eval_every: int = 0
    """Evaluate greedily every this many steps, from step 0 on, and after the last; 0: never."""
    eval_samples: int = 0
    """Samples per evaluation prompt for mean@k and pass@k, besides the greedy one; 0: none."""
    verify_sync: bool = False
    """Compare the engine's weights with the trainer's after each sync, and their probabilities in a
    row of each step; stop on a difference."""
    verify_every: int = 0
    """Compare the probabilities alone, every this many steps; 0: in the first, with a warning."""
    check: bool = False
    """Make a step, print a table of what is right and wrong for this model, data and machine, end.
    """
    quantize_gradients: bool = False
    """Reduce gradients over ranks in 8-bit blocks: a quarter of fp32's bytes, for slow links."""
    offload: bool = False
    """Models and optimizer states that a phase does not use wait in pinned host memory."""
    timeout_s: float = 3600.0
    """Seconds that a rank waits for the others; must exceed the longest rollout and reward."""
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(
        default_factory=lambda: RunConfig(name="grpo")
    )
    batch: tyro.conf.OmitArgPrefixes[BatchConfig] = field(default_factory=BatchConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        plan.check(self)  # the rules that all scripts share
        plan.check_groups(self)

    @property
    def needs_reference(self) -> bool:
        """Whether a loss compares the policy with what it was before the run."""
        return self.loss.kl_coef > 0


def main(flags: Args, with_paths: Callable = addition.with_paths) -> int | None:
    flags = check.beside(flags)  # of --check: another directory
    mesh = run.init_distributed(flags.seed, flags.timeout_s)
    meter = metrics.Metrics(hardware.Device(), hardware.process_age())
    meter.add_time("import")  # seconds since the process began, then from one to the next
    with run.one_line_errors():
        args = with_paths(flags)  # the same settings, with paths in place of "built-in"
        path, tokenizer, stream, eval_prompts, scorer = prepare(args)
        flags.run.check(flags, path)
        meter.add_time("data")
        policy, reference, optimizer = load_models(args, path, mesh)
        state = {
            "policy": checkpoint.TrainState(policy, optimizer, args.lora.rank > 0),
            "stream": stream,
            "generators": checkpoint.GeneratorState(),
        }
        if args.refresh_every:
            state["reference"] = checkpoint.TrainState(reference, ())
        out_dir = args.run.directory
        first_step = checkpoint.load(out_dir / "checkpoints", state) if args.run.resume else 0
        offloader = offload.Offload(args.offload, reference, optimizer)
        meter.add_time("models")
        engine = make_engine(args, path, tokenizer)
        wandb = report.start_wandb(args.log, out_dir.name, flags)
        flags.run.open(flags)
        journal = report.Report(out_dir, args.log, args.num_steps, first_step, wandb, curves.plot)
        meter.add_time("engine")
    temperature = args.rollout.temperature
    has_old = args.batch.num_epochs * args.batch.num_minibatches > 1  # passes for old_logprobs
    known = args, [policy, reference], engine.max_model_len, offloader
    warm_up(*known, has_reference=args.needs_reference, has_old=has_old)
    meter.add_time("warm_up")
    journal.write_start(meter.reduce())
    guard = Guard(args.run, out_dir, args.num_steps, tokenizer.decode)
    guard.protect(first_step, state, checkpoint.save, offloader.present)

    for step in range(first_step, args.num_steps):
        # 1. Sample. Weights go over first, so step 0 and a resumed run need no special case. A
        # response is scored as soon as it ends, while others are still being sampled.
        with engine.awake():
            sync(args, policy, engine, meter)
            if args.eval_every and step % args.eval_every == 0 and step + 1 < args.num_steps:
                evaluate(args, step, engine, scorer, tokenizer, eval_prompts, meter, guard)
            groups = sample_groups(args, step, engine, scorer, tokenizer, stream, meter)

        # 2. Score. The rewards came with the samples; a response's advantage is its reward
        # against the other responses to its prompt. A group is whole on one rank.
        with meter.timer("advantages"):
            group_advantages = advantages_of(args, groups)  # [P of this rank, G]

        # 3. Lay out. Minibatch m is a fixed slice of the prompt order; rows[m] serve all passes.
        with meter.timer("layout"):
            sequences, minibatch_of = to_sequences(args, groups, group_advantages)
            rows, totals = lay_out(args, sequences, minibatch_of, like=EMPTY)
            meter.add_layout(rows, args.batch.tokens_per_row)
            journal.write_samples(step, groups, tokenizer.decode, group_advantages)
            rows = [[row.to(mesh.device_type) for row in minibatch] for minibatch in rows]

        # 4. Log-probabilities stay fixed while the batch is used.
        with meter.timer("old_logprobs"):
            # In a single pass the first minibatch meets the policy unchanged: its ratio is 1.
            skip = 1 if args.batch.num_epochs == 1 else 0
            rows = logprobs.with_logprobs(policy, rows, "old_logprobs", temperature, skip)
            witness.compare(args, step - first_step, policy, rows, logprobs.token_logprobs)
        if args.loss.kl_coef:
            base = policy if reference is None else reference
            with meter.timer("ref_logprobs"), offloader.present(reference), lora.disabled(base):
                rows = logprobs.with_logprobs(base, rows, "ref_logprobs", temperature)

        # 5. Update. Each loss term is divided by its minibatch's total over all ranks, so the
        # gradients of rows and ranks just add up.
        rate = optim.learning_rate_at(step, args.num_steps, args.learning_rate, args.optim)
        with meter.timer("update"), offloader.present(optimizer):
            for m in args.batch.minibatch_order(totals, seed=(args.seed, step)):
                kl = memory.retried(actor_gradients, args, policy, rows[m], totals[m], meter)
                if args.loss.target_kl and metrics.total(kl) > args.loss.target_kl:
                    policy.zero_grad()  # this minibatch takes no step, nor do those after it
                    break
                norm = optim.optimizer_step(policy, optimizer, rate, args.optim.max_grad_norm)
                guard.count("actor", norm, step, rows[m], meter)  # notes norms that are not finite
                meter.add_update("actor", norm, rate)

        # 6. Report, save. The last evaluation is of the model that is exported.
        if args.eval_every and step + 1 == args.num_steps:
            with engine.awake():
                sync(args, policy, engine, meter)
                evaluate(args, step + 1, engine, scorer, tokenizer, eval_prompts, meter, guard)
        if mesh.size() > 1:  # a timed probe: the gradients' own collectives overlap the update
            meter.add("communication/nccl_bw_gb", hardware.measure_bandwidth(1 << 22))
        if args.refresh_every and (step + 1) % args.refresh_every == 0:
            with offloader.present(reference):
                model.copy_weights(policy, reference)
        record = meter.reduce()
        journal.write(step, record)
        if args.check:
            now = checkup.Run(args, engine, scorer, tokenizer, eval_prompts, state, offloader)
            return checkup.table(now, actor_gradients, record, groups)
        guard.save_if_due(step, meter)
        guard.leave_if_over(step)

    export(args, policy, engine.dtype, path)
    scorer.close()


def prepare(args: Args) -> tuple[str, Any, data.PromptStream, list[data.Prompt], Scorer]:
    """(model directory, tokenizer, stream, eval prompts, scorer), before a model is loaded."""
    scorer = Scorer(args.reward)
    path = hub.find_model(args.model_path, plan.longest(args))
    tokenizer = hub.load_tokenizer(path, f"--model {args.model_path}")
    datasets, eval_sets = data.load_all(args.data_paths, args.eval_paths, tokenizer, args.data)
    inputs.warn(datasets, eval_sets, tokenizer, args.data.template_options, scorer.wanted)
    plan.require_columns([*datasets, *eval_sets], scorer.wanted)
    has_evals = eval_sets or not args.eval_every
    run.require(has_evals, "--eval-every", args.eval_every, "0, or with --eval-data FILE")
    stream = data.PromptStream(datasets, weights=args.data.weights, seed=args.seed)
    frozen = int(args.needs_reference or args.lora.rank > 0)
    size = hub.memory_plan(path, args.model.master_dtype, frozen, args.lora.rank)
    plan.print_plan(args, datasets, eval_sets, model=f"{path}: {size}")
    return path, tokenizer, stream, [p for prompts in eval_sets for p in prompts], scorer


def load_models(args: Args, path: str, mesh) -> tuple[nn.Module, nn.Module | None, Any]:
    """(policy, reference or None, the policy's optimizer); with adapters the policy is both."""
    stored = adapter.read(args.lora)
    adapt = functools.partial(lora.attach, config=args.lora, stored=stored)
    policy = model.load_policy(path, mesh, args.model, adapt=adapt)
    lora.fill(policy, args.seed, stored)
    attention.use_packed_attention(policy)
    reference = None
    if args.needs_reference and not args.lora.rank:
        reference = model.load_policy(path, mesh, args.model, trainable=False)
        attention.use_packed_attention(reference)
    if args.quantize_gradients:
        comms.quantize_gradients(policy)
    return policy, reference, optim.make_optimizer(policy, args.optim, args.learning_rate)


def sample_groups(args: Args, step: int, engine, scorer, tokenizer, stream, meter) -> list[Group]:
    """This rank's groups with rewards; dynamic sampling draws until enough differ or tries end."""
    size = args.batch.group_size
    kept = []
    num_seen = 0
    num_missing = args.batch.prompts_per_step
    for attempt in range(args.resample_tries):
        prompts = stream.take(num_missing)
        seed = data.sampling_seed(args.seed, step, attempt)
        for group in sampling.sample(engine, scorer, tokenizer, prompts, size, seed, meter):
            if args.resample_tries == 1 or advantages.has_spread(group.rewards):
                kept.append(group._replace(position=num_seen + group.position))
        num_seen += len(prompts)
        num_missing = args.batch.prompts_per_step - int(metrics.total(float(len(kept))))
        if num_missing == 0:
            return kept
    if dist.get_rank() == 0:
        lack = f"step {step + 1} lacks {num_missing} groups with spread"
        print(f"warning: {lack} after --resample-tries {args.resample_tries}", flush=True)
    return kept


def advantages_of(args: Args, groups: list[Group]) -> Tensor:
    """Advantages [P, G] of this rank's groups, from all samples of each, truncated ones too."""
    config = args.advantage
    shape = len(groups), args.batch.group_size
    rewards = torch.tensor([g.rewards for g in groups], dtype=torch.float64).reshape(shape)
    lengths = [[len(r.response_ids) for r in group.rollouts] for group in groups]
    penalty = advantages.overlong_penalty(
        torch.tensor(lengths).reshape(shape),
        args.rollout.max_response_tokens,
        buffer=config.overlong_buffer,
        weight=config.overlong_weight,
    )
    return advantages.group_advantages(
        rewards + penalty, baseline=config.baseline, scale_by_std=config.scale_by_std
    )


def to_sequences(
    args: Args, groups: list[Group], group_advantages: Tensor
) -> tuple[list[dict[str, Tensor]], list[int]]:
    """This rank's samples, and the minibatch of each. Collective."""
    sequences = []
    for group, row in zip(groups, group_advantages.tolist(), strict=True):
        for sample, advantage in zip(group.rollouts, row, strict=True):
            made = packing.sequence(
                sample.prompt_ids,
                sample.response_ids,
                learn=not (sample.truncated and args.advantage.mask_truncated),
                advantages=advantage,
                rollout_logprobs=sample.logprobs,
            )
            sequences.append(made)
    minibatch_of = args.batch.minibatches([group.position for group in groups])
    return sequences, [m for m in minibatch_of for _ in range(args.batch.group_size)]


if __name__ == "__main__":
    run.leave(main(run.command_line(Args(), addition.SETTINGS, __doc__)))
