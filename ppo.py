# SPDX-FileCopyrightText: 2026 handful contributors (ppo.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""PPO: reinforcement learning of a language model with a critic; grpo.py's six phases.

    bash launch.sh ppo.py                           # a small model learns to add, on a CPU
    bash launch.sh ppo.py --reward-model built-in   # the same, rewarded by a reward model

A critic says what score V to expect before each token, V' before the next. R is A + V_old.
    reward       r = score at the end - kl_coef (log pi_old - log ref)  advantages.token_rewards
    advantage    A_i = sum_k (gamma lambda)^k (r + gamma V' - V)_(i+k)  advantages.gae
    surrogate    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))     losses.policy_loss
    value loss   1/2 max((V - R)^2, (clip(V, V_old -+ c) - R)^2)        losses.value_loss
    each summed over response tokens / their number in the minibatch    losses.{actor,critic}_loss
Sources: Schulman 2017 (arXiv:1707.06347), Ouyang 2022 (InstructGPT, arXiv:2203.02155).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any

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
import losses
import memory
import metrics
import model
import offload
import optim
import packing
import plan
import prefix
import report
import run
import sampling
import witness
from advantages import GaeConfig, KlController
from batch import BatchConfig
from data import DataConfig
from examples import addition
from guard import Guard
from lora import LoraConfig
from losses import CriticConfig, LossConfig
from model import ModelConfig
from optim import OptimConfig
from packing import PackedRow
from phases import actor_gradients, evaluate, export, lay_out, make_engine, sync, warm_up
from report import LogConfig
from rewards import RewardConfig, Scorer
from rollout import RolloutConfig
from run import RunConfig
from sampling import Group
from tools import checkup

# What a rank without samples puts in its rows.
EMPTY = packing.empty_sequence("scores", "rollout_logprobs")


@dataclass(frozen=True)
class Args:
    model_path: Annotated[str, tyro.conf.arg(name="model")] = "built-in"
    """Hugging Face directory or Hub name; built-in: a 1 M parameter model that half knows two-digit
    addition."""
    reward_model_path: Annotated[str, tyro.conf.arg(name="reward-model")] = ""
    """Sequence classifier of one label that scores; empty: --reward.functions; or built-in."""
    data_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="data")] = ("built-in",)
    """Training prompts: .jsonl or .parquet files, reasoning_gym:NAME:SIZE:SEED, or Hub names as
    NAME or NAME:SUBSET."""
    eval_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="eval-data")] = ()
    """Prompts to evaluate on, of the same kinds; empty: none (built-in data bring their own)."""
    num_steps: int = 200
    """Steps of training; each has num_epochs passes over a batch of rollouts."""
    learning_rate: float = 1e-6
    """Peak learning rate of the policy."""
    seed: int = 0
    """Seed of the data order, of sampling, and of the built-in model."""
    rollout_every: int = 1
    """Sample every this many steps; those between reuse the last batch, values and advantages."""
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
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=lambda: RunConfig(name="ppo"))
    batch: tyro.conf.OmitArgPrefixes[BatchConfig] = field(
        default_factory=lambda: BatchConfig(prompts_per_step=256, group_size=1, num_minibatches=2)
    )
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gae: GaeConfig = field(default_factory=GaeConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        plan.check(self)  # the rules that all scripts share
        every = self.rollout_every
        run.require(every >= 1, "--rollout-every", every, "at least 1")
        counts = {"--eval-every": self.eval_every, "--save-every": self.run.save_every}
        for flag, steps in {"--num-steps": self.num_steps, **counts}.items():
            nearest = max(steps // every * every, every if flag == "--num-steps" else 0)
            rule = f"a multiple of --rollout-every {every}; try {nearest}"
            run.require(steps % every == 0, flag, steps, rule)
        warmup = self.critic.warmup_steps
        rule = f"below --num-steps {self.num_steps}, or the policy never learns"
        run.require(warmup < self.num_steps, "--critic.warmup-steps", warmup, rule)


def main(flags: Args) -> int | None:
    flags = check.beside(flags)  # of --check: another directory
    mesh = run.init_distributed(flags.seed, flags.timeout_s)
    meter = metrics.Metrics(hardware.Device(), hardware.process_age())
    meter.add_time("import")  # seconds since the process began, then from one to the next
    with run.one_line_errors():
        args = addition.with_paths(flags)  # the same settings, with paths in place of "built-in"
        paths, tokenizer, stream, eval_prompts, scorer = prepare(args)
        flags.run.check(flags, *paths)
        meter.add_time("data")
        models = load_models(args, paths, mesh)
        policy, critic, reference, reward_model = models
        optimizer = optim.make_optimizer(policy, args.optim, args.learning_rate)
        critic_optimizer = optim.make_optimizer(critic, args.optim, args.critic.learning_rate)
        optimizers = [optimizer, critic_optimizer]
        kl_penalty = KlController(args.gae)
        state = {
            "policy": checkpoint.TrainState(policy, optimizer, args.lora.rank > 0),
            "critic": checkpoint.TrainState(critic, critic_optimizer, args.lora.rank > 0),
            "stream": stream,
            "kl_penalty": kl_penalty,
            "generators": checkpoint.GeneratorState(),
        }
        out_dir = args.run.directory
        first_step = checkpoint.load(out_dir / "checkpoints", state) if args.run.resume else 0
        offloader = offload.Offload(args.offload, *models[1:], *optimizers)
        meter.add_time("models")
        engine = make_engine(args, paths[0], tokenizer)
        wandb = report.start_wandb(args.log, out_dir.name, flags)
        flags.run.open(flags)
        journal = report.Report(out_dir, args.log, args.num_steps, first_step, wandb, curves.plot)
        meter.add_time("engine")
    temperature = args.rollout.temperature
    has_reference = args.loss.kl_coef > 0 or args.gae.kl_coef > 0
    warm_up(args, models, engine.max_model_len, offloader, has_reference=has_reference)
    meter.add_time("warm_up")
    journal.write_start(meter.reduce())
    guard = Guard(args.run, out_dir, args.num_steps, tokenizer.decode, save_at=args.rollout_every)
    guard.protect(first_step, state, checkpoint.save, offloader.present)

    for start in range(first_step, args.num_steps, args.rollout_every):  # a batch each
        # 1. Sample. Weights go over first, so step 0 and a resumed run need no special case. A
        # response is scored by the rule as soon as it ends, while others are still being sampled.
        with engine.awake():
            sync(args, policy, engine, meter)
            if args.eval_every and start % args.eval_every == 0 and start + 1 < args.num_steps:
                evaluate(args, start, engine, scorer, tokenizer, eval_prompts, meter, guard)
            prompts = stream.take(args.batch.prompts_per_step)
            with meter.timer("rollout"):
                seed = data.sampling_seed(args.seed, start, 0)
                rule = None if reward_model else scorer
                drawn = sampling.draw(engine, rule, tokenizer, prompts, args.batch.group_size, seed)

        # 2. Score, by the rule or by the reward model.
        with meter.timer("reward"), offloader.present(reward_model):
            groups = score(args, prompts, drawn, scorer, reward_model, meter)

        # 3. Lay out. Minibatch m is a fixed slice of the prompt order; rows[m] serve all passes.
        with meter.timer("layout"):
            sequences, minibatch_of = to_sequences(args, groups)
            rows, totals = lay_out(args, sequences, minibatch_of, like=EMPTY)
            meter.add_layout(rows, args.batch.tokens_per_row)
            journal.write_samples(start, groups, tokenizer.decode)
            rows = [[row.to(mesh.device_type) for row in minibatch] for minibatch in rows]

        # 4. Log-probabilities, values and advantages stay fixed while the batch is used.
        passes = args.batch.num_epochs * args.rollout_every
        with meter.timer("old_logprobs"):
            # In a single pass the first minibatch meets the policy unchanged: its ratio is 1.
            skip = 1 if passes == 1 and not args.gae.kl_coef else 0
            rows = logprobs.with_logprobs(policy, rows, "old_logprobs", temperature, skip)
            witness.compare(args, start - first_step, policy, rows, logprobs.token_logprobs)
        if has_reference:
            base = policy if reference is None else reference
            with meter.timer("ref_logprobs"), offloader.present(reference), lora.disabled(base):
                rows = logprobs.with_logprobs(base, rows, "ref_logprobs", temperature)
        with meter.timer("values"), offloader.present(critic):
            rows = logprobs.with_values(critic, rows)
        with meter.timer("advantages"):
            rows, stats = advantages.estimate(rows, args.gae, kl_penalty.coef)
        meter.update(stats)

        for step in range(start, start + args.rollout_every):
            # 5. Update.
            with meter.timer("update"), offloader.present(critic, *optimizers):
                update(args, step, policy, critic, optimizers, rows, totals, meter, guard)

            # 6. Report, adapt, save. The last evaluation is of the model that is exported.
            if args.eval_every and step + 1 == args.num_steps:
                with engine.awake():
                    sync(args, policy, engine, meter)
                    evaluate(args, step + 1, engine, scorer, tokenizer, eval_prompts, meter, guard)
            if mesh.size() > 1:  # a timed probe: the gradients' own collectives overlap the update
                meter.add("communication/nccl_bw_gb", hardware.measure_bandwidth(1 << 22))
            if args.gae.kl_coef and step + 1 == start + args.rollout_every:
                kl_penalty.update(stats["actor/reward_kl_penalty"], args.batch.num_samples)
            record = meter.reduce()
            journal.write(step, record)
            if args.check:
                now = checkup.Run(args, engine, rule, tokenizer, eval_prompts, state, offloader)
                return checkup.table(now, actor_gradients, record, groups)
            guard.save_if_due(step, meter)
            guard.leave_if_over(step)

    export(args, policy, engine.dtype, paths[0])
    scorer.close()


def prepare(args: Args) -> tuple[list[str], Any, data.PromptStream, list[data.Prompt], Scorer]:
    """([policy's, critic's, reward model's directory], tokenizer, stream, eval prompts, scorer)."""
    scorer = Scorer(args.reward)
    longest = plan.longest(args)
    path = hub.find_model(args.model_path, longest)
    tokenizer = hub.load_tokenizer(path, f"--model {args.model_path}")
    reward_path = hub.find_reward_model(args.reward_model_path, longest, path)
    critic_path = hub.find_critic(args.critic.path, longest, path) or reward_path or path
    datasets, eval_sets = data.load_all(args.data_paths, args.eval_paths, tokenizer, args.data)
    wanted = {} if reward_path else scorer.wanted
    inputs.warn(datasets, eval_sets, tokenizer, args.data.template_options, wanted)
    plan.require_columns(eval_sets if reward_path else [*datasets, *eval_sets], scorer.wanted)
    has_evals = eval_sets or not args.eval_every
    run.require(has_evals, "--eval-every", args.eval_every, "0, or with --eval-data FILE")
    stream = data.PromptStream(datasets, weights=args.data.weights, seed=args.seed)
    rank = args.lora.rank
    frozen = 1 if args.loss.kl_coef or args.gae.kl_coef or rank else 0
    size = f"{path}: {hub.memory_plan(path, args.model.master_dtype, frozen, rank)}"
    frozen = (1 if reward_path else 0) + (1 if rank else 0)
    critic_size = hub.memory_plan(critic_path, args.model.master_dtype, frozen, rank)
    plan.print_plan(args, datasets, eval_sets, policy=size, critic=critic_size)
    eval_prompts = [prompt for prompts in eval_sets for prompt in prompts]
    return [path, critic_path, reward_path], tokenizer, stream, eval_prompts, scorer


def load_models(args: Args, paths: list[str], mesh) -> list[nn.Module | None]:
    """[policy, critic, reference or None, reward model or None]."""
    path, critic_path, reward_path = paths
    stored = adapter.read(args.lora)
    adapt = functools.partial(lora.attach, config=args.lora)
    policy = model.load_policy(
        path, mesh, args.model, adapt=functools.partial(adapt, stored=stored)
    )
    critic = model.load_critic(critic_path, mesh, args.model, adapt=adapt)
    lora.fill(policy, args.seed, stored)
    lora.fill(critic, args.seed)
    reference = reward_model = None
    if (args.loss.kl_coef or args.gae.kl_coef) and not args.lora.rank:
        reference = model.load_policy(path, mesh, args.model, trainable=False)
    if reward_path:
        reward_model = model.load_critic(reward_path, mesh, args.model, trainable=False)
    models = [policy, critic, reference, reward_model]
    for each in filter(None, models):
        attention.use_packed_attention(each)
    if args.quantize_gradients:
        comms.quantize_gradients(policy)
        comms.quantize_gradients(critic)
    return models


def score(args: Args, prompts, drawn, scorer: Scorer, reward_model, meter) -> list[Group]:
    """This rank's groups with the rewards of the rule, or of the reward model `reward_model`."""
    if reward_model is None:
        rewards, stats = scorer.collect(len(drawn) * args.batch.group_size)
        meter.update(stats, len(rewards), prefix="reward/")
    else:
        sampled = [each for rollouts in drawn.values() for each in rollouts]
        texts = [packing.sequence(each.prompt_ids, each.response_ids) for each in sampled]
        rows = packing.pack_alike(
            texts,
            args.batch.tokens_per_row,
            num_sharing=args.batch.num_sharing,
            share=prefix.share,
        )
        rewards = logprobs.model_scores(reward_model, rows)
    groups = sampling.to_groups(prompts, drawn, rewards)
    for group in groups:
        meter.add_group(group.prompt.source, group.rewards, group.rollouts)
    return groups


def to_sequences(args: Args, groups: list[Group]) -> tuple[list[dict[str, Tensor]], list[int]]:
    """This rank's samples with their scores, and the minibatch of each. Collective."""
    sequences = []
    for group in groups:
        for sample, reward in zip(group.rollouts, group.rewards, strict=True):
            made = packing.sequence(
                sample.prompt_ids,
                sample.response_ids,
                scores=reward,
                rollout_logprobs=sample.logprobs,
            )
            sequences.append(made)
    minibatch_of = args.batch.minibatches([group.position for group in groups])
    return sequences, [m for m in minibatch_of for _ in range(args.batch.group_size)]


def update(args: Args, step: int, policy, critic, optimizers, rows, totals, meter, guard) -> None:
    """One step's passes over the batch. Loss terms are divided by totals over all ranks, so that
    gradients just add up. Beyond --loss.target-kl the policy rests for the remainder of the step.
    """
    optimizer, critic_optimizer = optimizers
    warmup = args.critic.warmup_steps  # steps in which the critic alone learns
    shared = args.num_steps - warmup
    rate = optim.learning_rate_at(step - warmup, shared, args.learning_rate, args.optim)
    peak = args.critic.learning_rate
    critic_rate = optim.learning_rate_at(step, args.num_steps, peak, args.optim)
    actor_learns = step >= warmup
    for m in args.batch.minibatch_order(totals, seed=(args.seed, step)):
        memory.retried(critic_gradients, args, critic, rows[m], totals[m], meter)
        norm = optim.optimizer_step(critic, critic_optimizer, critic_rate, args.optim.max_grad_norm)
        guard.count("critic", norm, step, rows[m], meter)  # notes norms that are not finite
        meter.add_update("critic", norm, critic_rate)
        if not actor_learns:
            continue
        kl = memory.retried(actor_gradients, args, policy, rows[m], totals[m], meter)
        if args.loss.target_kl and metrics.total(kl) > args.loss.target_kl:
            policy.zero_grad()  # this minibatch takes no step, nor do those after it
            actor_learns = False
            continue
        norm = optim.optimizer_step(policy, optimizer, rate, args.optim.max_grad_norm)
        guard.count("actor", norm, step, rows[m], meter)
        meter.add_update("actor", norm, rate)


def critic_gradients(args: Args, critic, rows: list[PackedRow], totals: dict, meter) -> None:
    """Add the gradients of a minibatch to the critic."""
    for i, row in enumerate(rows):
        is_last = i == len(rows) - 1
        critic.set_requires_gradient_sync(is_last or args.model.reduce_every_row)
        values = logprobs.token_values(critic, row)
        loss, stats = losses.critic_loss(values, row, totals, args.critic)
        loss.backward()
        meter.add_pass(critic, row)
        meter.update(stats, row.num_response_tokens)


if __name__ == "__main__":
    run.leave(main(run.command_line(Args(), addition.PPO_SETTINGS, __doc__)))
