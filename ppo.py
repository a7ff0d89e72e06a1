"""PPO: reinforcement learning of a language model with a critic; one loop, the same six phases as
grpo.py.

    bash launch.sh ppo.py                               # a small built-in model learns to add, on a CPU, in minutes
    bash launch.sh ppo.py --reward-model built-in       # the same, rewarded by a small learned reward model

The policy samples a response per prompt; a rule or a reward model scores it. A critic, a second
model of the same kind, says what score to expect after each token; generalised advantage estimation
turns the two into an advantage per token. Policy and critic then take optimizer steps on the
clipped surrogate and the clipped squared error. A batch of rollouts, with its values and
advantages, can serve for several steps (--rollout-every). All sizes are over all ranks. G samples
per prompt. Sources: Schulman 2017 (arXiv:1707.06347), Ouyang 2022 (InstructGPT, arXiv:2203.02155).
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import tyro

from advantages import AdvantageCache, GaeConfig, KlController, estimate
from attention import use_packed_attention
from checkpoint import GeneratorState, TrainState, load, save
from comms import measure_bandwidth, quantize_gradients
from data import (
    DataConfig,
    Prompt,
    PromptStream,
    load_prompts,
    require_columns,
    sampling_seed,
    to_prompts,
)
from examples import addition
from exchange import exchange
from hub import export, find_critic, find_model, memory_plan, stop_token_ids
from logprobs import model_scores, token_logprobs, token_values, warm_up, with_logprobs, with_values
from losses import CriticConfig, LossConfig, actor_loss, critic_loss
from metrics import LogConfig, Metrics, total
from model import (
    ModelConfig,
    OptimConfig,
    learning_rate_at,
    load_critic,
    load_policy,
    make_optimizer,
    optimizer_step,
)
from offload import Offload
from packing import BatchConfig, PackedRow, empty_sequence, lay_out, sequence
from reshard import iter_full_params, sync_weights, verify_sync
from rewards import RewardConfig, Scorer
from rollout import HfEngine, Rollout, RolloutConfig, VllmEngine
from run import RunConfig, command_line, init_distributed, leave

EMPTY = empty_sequence("scores", "rollout_logprobs")  # what a rank without samples puts in its rows


@dataclass(frozen=True)
class Args:
    model_path: Annotated[str, tyro.conf.arg(name="model")] = "built-in"
    """Hugging Face directory or Hub name; built-in: a 1 M parameter model that half knows two-digit
    addition.
    """
    reward_model_path: Annotated[str, tyro.conf.arg(name="reward-model")] = ""
    """Sequence classifier of one label, with --model's tokens, that scores; empty:
    --reward.functions; or built-in.
    """
    data_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="data")] = ("built-in",)
    """Training prompts: .jsonl or .parquet files, reasoning_gym:NAME:SIZE, or Hub names as NAME or
    NAME:SUBSET.
    """
    eval_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="eval-data")] = ()
    """Prompts to evaluate on, of the same kinds; empty: none (built-in data bring their own)."""
    num_steps: int = 200
    """Steps of training; each has num_epochs passes over a batch of rollouts."""
    learning_rate: float = 1e-6
    """Peak learning rate of the policy."""
    seed: int = 0
    """Of the data order, of sampling, and of the built-in model."""
    rollout_every: int = 1
    """Sample every this many steps; the steps between use the last batch, its values and its
    advantages once more.
    """
    eval_every: int = 0
    """Evaluate every this many steps, and on the last batch, by --reward.functions and greedily; 0:
    never.
    """
    verify_sync: bool = False
    """Compare the engine's weights with the trainer's after each sync, and stop on a difference."""
    quantize_gradients: bool = False
    """Reduce gradients over ranks in 8-bit blocks: a quarter of fp32's bytes, for slow links
    between hosts.
    """
    offload: bool = False
    """Models and optimizers that a phase does not use wait in pinned host memory."""
    timeout_s: float = 3600.0
    """Longest that a rank waits for the others; above the longest rollout or reward."""
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
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        row, longest = (
            self.batch.tokens_per_row,
            self.data.max_prompt_tokens + self.rollout.max_response_tokens,
        )
        own_data, own_model = self.data_paths != ("built-in",), self.model_path != "built-in"
        corrected = self.loss.importance != "off" or not self.rollout.eight_bit
        steps, often, every = (
            self.num_steps,
            (self.eval_every, self.run.save_every),
            max(1, self.rollout_every),
        )
        multiple = f"a multiple of --rollout-every {every}; try"
        for flag, value, holds, rule in (
            ("--rollout-every", self.rollout_every, self.rollout_every >= 1, "at least 1"),
            (
                "--num-steps",
                steps,
                steps >= 1 and steps % every == 0,
                f"{multiple} {max(1, steps // every) * every}",
            ),
            (
                "--data",
                self.data_paths,
                own_model or not own_data,
                "with a --model of your own: built-in only adds",
            ),
            (
                "--eval-data",
                self.eval_paths,
                own_data or not self.eval_paths,
                "with --data of your own",
            ),
            (
                "--eval-every",
                often[0],
                often[0] >= 0 == often[0] % every,
                f"{multiple} {often[0] // every * every}",
            ),
            (
                "--save-every",
                often[1],
                often[1] % every == 0,
                f"{multiple} {often[1] // every * every}",
            ),
            (
                "--learning-rate",
                self.learning_rate,
                0 < self.learning_rate < 1,
                "above 0 and below 1; try 1e-6",
            ),
            (
                "--tokens-per-row",
                row,
                row >= longest,
                f"at least {longest}, a prompt and a response",
            ),
            (
                "--loss.importance",
                self.loss.importance,
                corrected,
                "token: an 8-bit sampler is another policy",
            ),
        ):
            if not holds:
                raise ValueError(
                    f"{flag} {' '.join(value) if isinstance(value, tuple) else value}: must be {rule}"
                )


class Group(NamedTuple):
    """The responses to one prompt."""

    position: int  # of the prompt in this step's global order
    prompt: Prompt
    rollouts: list[Rollout]  # [G]
    rewards: list[float]  # [G]


def main(args: Args) -> None:
    mesh = init_distributed(args.seed, args.timeout_s)
    path, critic_path, reward_path, tokenizer, stream, eval_prompts, scorer = prepare(args)
    policy = load_policy(path, mesh, args.model)
    critic = load_critic(critic_path or path, mesh, args.model)
    reference = (
        load_policy(path, mesh, args.model, trainable=False)
        if args.loss.kl_coef or args.gae.kl_coef
        else None
    )
    reward_model = (
        load_critic(reward_path, mesh, args.model, trainable=False) if reward_path else None
    )
    for model in filter(None, (policy, critic, reference, reward_model)):
        use_packed_attention(model)
    for model in (policy, critic) if args.quantize_gradients else ():
        quantize_gradients(model)
    optimizer, critic_optimizer = (
        make_optimizer(x, args.optim, args.learning_rate) for x in (policy, critic)
    )
    sizes = dict(max_prompt_tokens=args.data.max_prompt_tokens, num_samples=args.batch.num_samples)
    kind = VllmEngine if args.rollout.engine == "vllm" else HfEngine
    kl_penalty, cache = KlController(args.gae), AdvantageCache()
    state = {
        "policy": TrainState(policy, optimizer),
        "critic": TrainState(critic, critic_optimizer),
    }
    state |= {"stream": stream, "kl_penalty": kl_penalty, "generators": GeneratorState()}
    first_step = load(args.run.directory / "checkpoints", state) if args.run.resume else 0
    offload = Offload(args.offload, critic, reference, reward_model, optimizer, critic_optimizer)
    engine = kind(
        path,
        args.rollout,
        **sizes,
        stop_ids=stop_token_ids(path, tokenizer.eos_token_id),
        seed=args.seed,
    )
    for model in (
        filter(None, (policy, critic, reference, reward_model))
        if mesh.device_type == "cuda"
        else ()
    ):
        with offload.present(
            model
        ):  # kernels are compiled at their first use: before step 0, not in it
            warm_up(model, args.batch.rows_of_all_sizes(engine.max_model_len))
    metrics = Metrics(
        args.run.directory, args.log, args.num_steps, first_step=first_step, settings=asdict(args)
    )

    for step in range(first_step, args.num_steps):
        if step % args.rollout_every == 0:
            # 1. Sample. Weights go over first, so step 0 and a resumed run need no special case.
            with engine.awake():
                with metrics.timer("reshard"):
                    sync_weights(policy, engine, dtype=engine.dtype)
                    if args.verify_sync:
                        verify_sync(policy, engine, dtype=engine.dtype)
                if args.eval_every and (
                    step % args.eval_every == 0 or step + args.rollout_every == args.num_steps
                ):
                    evaluate(args, engine, scorer, tokenizer, eval_prompts, metrics)
                prompts = stream.take(args.batch.prompts_per_step)
                with metrics.timer("rollout"):
                    seed, rule = (
                        sampling_seed(args.seed, step, 0),
                        scorer if reward_model is None else None,
                    )
                    drawn = draw(engine, rule, tokenizer, prompts, args.batch.group_size, seed)
            # 2. Score, by a rule (begun while others were still being sampled) or by the reward
            # model.
            with metrics.timer("reward"), offload.present(reward_model):
                groups = score(args, prompts, drawn, scorer, reward_model, metrics)
            # 3. Lay out. A minibatch is a fixed slice of the global prompt order; its rows stay for
            # all epochs.
            with metrics.timer("layout"):
                sequences, minibatches = to_sequences(args, groups)
                rows, totals = lay_out(
                    sequences, minibatches, args.batch, exchange=exchange, like=EMPTY
                )
                metrics.add_layout(
                    (policy, critic),
                    sequences,
                    rows,
                    args.batch.tokens_per_row,
                    args.batch.num_epochs,
                )
                metrics.write_samples(step, groups, tokenizer.decode)
                rows = [[row.to(mesh.device_type) for row in minibatch] for minibatch in rows]
            # 4. Log-probabilities and values that stay fixed during the update; skipped where they
            # are not needed.
            with metrics.timer("old_logprobs"):
                given = (
                    0 if args.batch.num_epochs * args.rollout_every > 1 or args.gae.kl_coef else 1
                )
                rows[given:] = with_logprobs(
                    policy, rows[given:], "old_logprobs", temperature=args.rollout.temperature
                )
            if reference is not None:
                with metrics.timer("ref_logprobs"), offload.present(reference):
                    rows = with_logprobs(
                        reference, rows, "ref_logprobs", temperature=args.rollout.temperature
                    )
            with metrics.timer("values"), offload.present(critic):
                rows = with_values(critic, rows)
        with metrics.timer("advantages"):
            # Computed once per batch of rollouts, whatever the number of steps, passes and
            # minibatches that it serves.
            rollout_id = step // args.rollout_every
            # noqa: B023
            ready, stats = cache.get(rollout_id, lambda: estimate(rows, args.gae, kl_penalty.coef))

        # 5. Update. Every loss term is divided by its minibatch's total over all ranks: ranks and
        # rows just add up.
        actor_step, actor_steps = (n - args.critic.warmup_steps for n in (step, args.num_steps))
        actor_learns = actor_step >= 0
        with metrics.timer("update"), offload.present(critic, optimizer, critic_optimizer):
            for m in args.batch.minibatch_order(totals, seed=(args.seed, step)):
                accumulate(args, critic, ready[m], totals[m], metrics)
                learning_rate = learning_rate_at(
                    step, args.num_steps, args.critic.learning_rate, args.optim
                )
                norm = optimizer_step(
                    critic, critic_optimizer, learning_rate, args.optim.max_grad_norm
                )
                metrics.update({"critic/grad_norm": norm, "critic/lr": learning_rate})
                if actor_learns:
                    kl = accumulate(args, policy, ready[m], totals[m], metrics)
                    if args.loss.target_kl and total(kl) > args.loss.target_kl:
                        policy.zero_grad()
                        actor_learns = False  # for the rest of this step; the critic goes on
                        continue
                    learning_rate = learning_rate_at(
                        actor_step, actor_steps, args.learning_rate, args.optim
                    )
                    norm = optimizer_step(
                        policy, optimizer, learning_rate, args.optim.max_grad_norm
                    )
                    metrics.update({"actor/grad_norm": norm, "actor/lr": learning_rate})

        # 6. Report, adapt, save.
        if step % args.rollout_every == 0:
            metrics.update(stats)
        if args.gae.kl_coef and (step + 1) % args.rollout_every == 0:
            kl_penalty.update(stats["actor/reward_kl_penalty"], args.batch.num_samples)
        if mesh.size() > 1:
            metrics.add("communication/nccl_bw_gb", measure_bandwidth(1 << 22))
        if args.run.save_every and (
            (step + 1) % args.run.save_every == 0 or step + 1 == args.num_steps
        ):
            with metrics.timer("save"), offload.present(critic, optimizer, critic_optimizer):
                save(args.run.directory / "checkpoints", step + 1, state, keep=args.run.keep)
        metrics.log(step)

    export(
        iter_full_params(policy, dtype=engine.dtype), path, args.run.directory / "hf", engine.dtype
    )
    scorer.close()


def prepare(args: Args) -> tuple[str, str, str, object, PromptStream, list[Prompt], Scorer]:
    """(directories of policy, critic and reward model, tokenizer, stream, evaluation prompts,
    scorer), or a refusal.
    """
    from transformers import AutoTokenizer, logging

    logging.disable_progress_bar()
    try:
        scorer = Scorer(args.reward)  # before a model is made, which takes minutes
        longest = args.data.max_prompt_tokens + args.rollout.max_response_tokens
        path = find_model(
            args.model_path, longest, built_in=lambda: addition.cached_model(args.seed)
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
        other = longest, lambda: addition.cached_model(args.seed, reward_model=True)
        reward_path = find_critic(
            args.reward_model_path, *other, "--reward-model", path, has_head=True
        )
        critic_path = (
            find_critic(args.critic.path, *other, "--critic.path", path, has_head=False)
            or reward_path
        )
        if args.data_paths == ("built-in",):
            sets = addition.training_sets(
                hard=not reward_path
            )  # that reward model has not been taught the hard ones
            datasets = [to_prompts(rows, tokenizer, args.data, name) for name, rows in sets.items()]
            evals = [to_prompts(addition.problems(held_out=True), tokenizer, args.data, "addition")]
        else:
            datasets = load_prompts(args.data_paths, tokenizer, args.data)
            evals = load_prompts(
                args.eval_paths, tokenizer, replace(args.data, weights=()), "--eval-data"
            )
        require_columns(evals if reward_path else [*datasets, *evals], scorer.wanted)
        if args.eval_every and not evals:
            raise ValueError(f"--eval-every {args.eval_every}: needs --eval-data FILE, or 0")
        stream = PromptStream(
            datasets, args.batch.prompts_per_step, weights=args.data.weights, seed=args.seed
        )
        if dist.get_rank() == 0:
            args.run.open(args, path, critic_path or path, reward_path or path)
    except (ValueError, OSError) as error:
        sys.exit(
            f"error: {' '.join(str(error).split())}" if dist.get_node_local_rank() == 0 else 1
        )  # once a host
    if dist.get_rank() == 0:
        num_ranks, kl = dist.get_world_size(), args.loss.kl_coef or args.gae.kl_coef
        plan = {
            "policy": f"{path}: {memory_plan(path, num_ranks, args.model.master_dtype, frozen_copies=bool(kl))}",
            "critic": memory_plan(
                critic_path or path, num_ranks, args.model, frozen_copies=bool(reward_path)
            ),
            "data": f"{sum(map(len, datasets))} prompts for {args.num_steps} steps, {sum(map(len, evals))} to evaluate",
            "ranks": f"{num_ranks}; {num_ranks // args.rollout.tensor_parallel_size} {args.rollout.engine} engines",
            "batch": args.batch.describe(
                args.data.max_prompt_tokens, args.rollout.max_response_tokens
            ),
        }
        print("\n".join(f"{name:>8}  {text}" for name, text in plan.items()), flush=True)
    return path, critic_path, reward_path, tokenizer, stream, sum(evals, []), scorer


def draw(
    engine,
    scorer: Scorer | None,
    tokenizer,
    prompts: list[Prompt],
    num_samples: int,
    seed,
    temperature=None,
):
    """{position: rollouts} for the prompts that this rank owns; each response goes to the scorer as
    soon as it ends.
    """

    def submit(index: int, position: int, rollout: Rollout) -> None:
        prompt = prompts[position]
        if scorer is not None:
            response = tokenizer.decode(rollout.response_ids, skip_special_tokens=True)
            known = dict(
                prompt=prompt.text,
                response=response,
                answer=prompt.answer,
                truncated=rollout.truncated,
            )
            scorer.submit(index, prompt.columns | known)

    how = dict(temperature=temperature, seed=seed, on_finished=submit)
    return engine.generate_share([prompt.prompt_ids for prompt in prompts], num_samples, **how)


def score(
    args: Args, prompts: list[Prompt], drawn, scorer: Scorer, reward_model, metrics: Metrics
) -> list[Group]:
    """This rank's groups: its rollouts with the rewards of the rule, or of the reward model where
    there is one.
    """
    size = args.batch.group_size
    if reward_model is None:
        rewards, stats = scorer.collect(len(drawn) * size)
        metrics.update(stats, len(rewards), prefix="reward/")
    else:
        texts = [
            torch.cat([r.prompt_ids, r.response_ids])
            for rollouts in drawn.values()
            for r in rollouts
        ]
        rewards = model_scores(reward_model, texts, tokens_per_row=args.batch.tokens_per_row)
    parts = [rewards[i * size : (i + 1) * size] for i in range(len(drawn))]
    groups = [
        Group(p, prompts[p], rollouts, part)
        for (p, rollouts), part in zip(drawn.items(), parts, strict=True)
    ]
    for group in groups:
        metrics.add_group(group.prompt.source, group.rewards, group.rollouts)
    return groups


def evaluate(
    args: Args, engine, scorer: Scorer, tokenizer, prompts: list[Prompt], metrics: Metrics
) -> None:
    """Greedy reward by the rule per data set, each a mean over all prompts of all ranks."""
    with metrics.timer("eval"):
        drawn = draw(engine, scorer, tokenizer, prompts, 1, sampling_seed(args.seed, "eval"), 0.0)
        rewards, stats = scorer.collect(len(drawn))
    metrics.update(
        {n: stats[n] for n in ("error_frac", "timeout_frac")}, len(rewards), prefix="eval/"
    )
    for position, reward in zip(drawn, rewards, strict=True):
        metrics.update(
            {"reward": reward, f"{prompts[position].source}/reward": reward}, prefix="eval/"
        )


def accumulate(
    args: Args, model, rows: list[PackedRow], totals: dict[str, int], metrics: Metrics
) -> torch.Tensor:
    """Add the gradients of a minibatch's loss to the model, policy or critic; returns this rank's
    share of ppo_kl.
    """
    kl = torch.zeros((), device=rows[0].tokens.device)
    for i, row in enumerate(rows):
        model.set_requires_gradient_sync(args.model.reduce_every_row or i == len(rows) - 1)
        if hasattr(model, "score"):
            loss, stats = critic_loss(token_values(model, row), row, totals, args.critic)
        else:
            logprobs, entropy = token_logprobs(model, row, temperature=args.rollout.temperature)
            loss, stats = actor_loss(
                logprobs, entropy, row, totals, args.loss, args.rollout.max_response_tokens
            )
            kl += stats["actor/ppo_kl"] * row.num_response_tokens / totals["tokens"]
        loss.backward()
        metrics.update(stats, row.num_response_tokens)
    return kl


def to_sequences(args: Args, groups: list[Group]) -> tuple[list[dict], list[int]]:
    """This rank's samples, each with its score on all response tokens, and the minibatch of each.
    Collective.
    """
    scored = [pair for g in groups for pair in zip(g.rollouts, g.rewards, strict=True)]
    sequences = [
        sequence(r.prompt_ids, r.response_ids, scores=x, rollout_logprobs=r.logprobs)
        for r, x in scored
    ]
    places = args.batch.minibatches([g.position for g in groups])
    return sequences, [m for m, g in zip(places, groups, strict=True) for _ in g.rollouts]


if __name__ == "__main__":
    main(command_line(Args(), addition.PPO_SETTINGS, __doc__))
    leave()
