"""GRPO: reinforcement learning of a language model from groups of its own samples; one loop, six
phases a step.

    bash launch.sh grpo.py            # no arguments: a small built-in model learns to add, on a CPU, in minutes
    bash launch.sh grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main
    --rollout.max-response-tokens 512

For each prompt the policy samples a group of responses; each is scored; a response's advantage is
its reward less its group's mean, over the group's deviation. The policy then takes optimizer steps
on the clipped surrogate. All sizes are over all ranks. P prompts, G samples per prompt, N tokens in
a row. Source: Shao 2024 (arXiv:2402.03300). As flags:
    Dr. GRPO   --advantage.no-scale-by-std --loss.normalize constant
    RLOO       --advantage.baseline leave_one_out --advantage.no-scale-by-std
    REINFORCE  --advantage.baseline batch
    DAPO       --loss.normalize token --resample-tries 8 --advantage.overlong-buffer 512
    GSPO       --loss.ratio sequence --loss.normalize sequence --loss.clip-low 3e-4 --loss.clip-high 4e-4
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import tyro

from advantages import AdvantageCache, AdvantageConfig, group_advantages, overlong_penalty
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
from hub import export, find_model, memory_plan, stop_token_ids
from logprobs import token_logprobs, warm_up, with_logprobs
from losses import LossConfig, actor_loss
from metrics import LogConfig, Metrics, total
from model import (
    ModelConfig,
    OptimConfig,
    copy_weights,
    learning_rate_at,
    load_policy,
    make_optimizer,
    optimizer_step,
)
from offload import Offload
from packing import BatchConfig, empty_sequence, lay_out, sequence
from reshard import iter_full_params, sync_weights, verify_sync
from rewards import RewardConfig, Scorer
from rollout import HfEngine, Rollout, RolloutConfig, VllmEngine
from run import RunConfig, command_line, init_distributed, leave

EMPTY = empty_sequence(
    "advantages", "rollout_logprobs"
)  # what a rank without samples puts in its rows


@dataclass(frozen=True)
class Args:
    model_path: Annotated[str, tyro.conf.arg(name="model")] = "built-in"
    """Hugging Face directory or Hub name; built-in: a 1 M parameter model that half knows two-digit
    addition.
    """
    data_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="data")] = ("built-in",)
    """Training prompts: .jsonl or .parquet files, reasoning_gym:NAME:SIZE, or Hub names as NAME or
    NAME:SUBSET.
    """
    eval_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="eval-data")] = ()
    """Prompts to evaluate on, of the same kinds; empty: none (built-in data bring their own)."""
    num_steps: int = 200
    """Batches of rollouts to train on."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    seed: int = 0
    """Of the data order, of sampling, and of the built-in model."""
    resample_tries: int = 1
    """Rounds of sampling to fill a step with groups that have spread (dynamic sampling); 1: take
    all groups.
    """
    refresh_every: int = 0
    """Copy the policy into the reference every this many steps; 0: never."""
    eval_every: int = 0
    """Evaluate every this many steps, and at the last, by greedy decoding; 0: never."""
    eval_samples: int = 0
    """Samples per evaluation prompt for mean@k and pass@k, besides the greedy one; 0: none."""
    verify_sync: bool = False
    """Compare the engine's weights with the trainer's after each sync, and stop on a difference."""
    quantize_gradients: bool = False
    """Reduce gradients over ranks in 8-bit blocks: a quarter of fp32's bytes, for slow links
    between hosts.
    """
    offload: bool = False
    """Adam's state and the reference wait in pinned host memory while they are not needed."""
    timeout_s: float = 3600.0
    """Longest that a rank waits for the others; above the longest rollout or reward."""
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
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        why = ", --data.max-prompt-tokens + --rollout.max-response-tokens"
        batch, buffer, groups = (
            self.batch,
            self.advantage.overlong_buffer,
            self.advantage.baseline != "batch",
        )
        own_model, own_data = self.model_path != "built-in", self.data_paths != ("built-in",)
        tries, data, eval_data = (
            self.resample_tries,
            " ".join(self.data_paths),
            " ".join(self.eval_paths),
        )
        how, corrected = self.loss, self.loss.importance != "off" or not self.rollout.eight_bit
        for flag, value, holds, rule in (
            ("--num-steps", self.num_steps, self.num_steps >= 1, "at least 1; try 200"),
            ("--eval-every", self.eval_every, self.eval_every >= 0, "at least 0 (never)"),
            (
                "--eval-samples",
                k := self.eval_samples,
                0 <= k <= k * self.eval_every,
                "at least 0; with --eval-every",
            ),
            (
                "--eval-data",
                eval_data,
                self.eval_every or not self.eval_paths,
                "with --eval-every 20",
            ),
            (
                "--data",
                data,
                own_model or not own_data,
                "with a --model of your own: the built-in one only adds",
            ),
            ("--eval-data", eval_data, own_data or not self.eval_paths, "with --data of your own"),
            (
                "--learning-rate",
                self.learning_rate,
                0 < self.learning_rate < 1,
                "above 0 and below 1; try 1e-6",
            ),
            ("--resample-tries", tries, tries >= 1, "at least 1"),
            (
                "--resample-tries",
                tries,
                tries == 1 or batch.group_size > 1,
                "1 with groups of 1, which have no spread",
            ),
            (
                "--refresh-every",
                self.refresh_every,
                not self.refresh_every or how.kl_coef,
                "0 without --loss.kl-coef",
            ),
            (
                "--group-size",
                batch.group_size,
                batch.group_size >= 2 or not groups,
                "at least 2; try 8",
            ),
            (
                "--tokens-per-row",
                batch.tokens_per_row,
                batch.tokens_per_row >= longest,
                f"at least {longest}{why}",
            ),
            (
                "--advantage.overlong-buffer",
                buffer,
                buffer <= self.rollout.max_response_tokens,
                "at most the limit",
            ),
            (
                "--loss.importance",
                self.loss.importance,
                corrected,
                "token: an 8-bit sampler is another policy",
            ),
        ):
            if not holds:
                raise ValueError(f"{flag} {value}: must be {rule}")


class Group(NamedTuple):
    """The responses to one prompt."""

    position: int  # of the prompt in this step's global order
    prompt: Prompt
    rollouts: list[Rollout]  # [G]
    rewards: list[float]  # [G]


def main(args: Args) -> None:
    mesh = init_distributed(args.seed, args.timeout_s)
    path, tokenizer, stream, eval_prompts, scorer = prepare(args)
    policy = load_policy(path, mesh, args.model)
    reference = load_policy(path, mesh, args.model, trainable=False) if args.loss.kl_coef else None
    for model in filter(None, (policy, reference)):
        use_packed_attention(model)
    if args.quantize_gradients:
        quantize_gradients(policy)
    optimizer = make_optimizer(policy, args.optim, args.learning_rate)
    limit = args.rollout.max_response_tokens
    sizes = dict(max_prompt_tokens=args.data.max_prompt_tokens, num_samples=args.batch.num_samples)
    kind = VllmEngine if args.rollout.engine == "vllm" else HfEngine
    cache = AdvantageCache()
    state = {
        "policy": TrainState(policy, optimizer),
        "stream": stream,
        "generators": GeneratorState(),
    }
    state |= {"reference": TrainState(reference, ())} if args.refresh_every else {}
    first_step = load(args.run.directory / "checkpoints", state) if args.run.resume else 0
    offload = Offload(args.offload, reference, optimizer)
    engine = kind(
        path,
        args.rollout,
        **sizes,
        stop_ids=stop_token_ids(path, tokenizer.eos_token_id),
        seed=args.seed,
    )
    for model in filter(None, (policy, reference)) if mesh.device_type == "cuda" else ():
        with offload.present(
            model
        ):  # kernels are compiled at their first use: before step 0, not in it
            warm_up(model, args.batch.rows_of_all_sizes(engine.max_model_len))
    metrics = Metrics(
        args.run.directory, args.log, args.num_steps, first_step=first_step, settings=asdict(args)
    )

    for step in range(first_step, args.num_steps):
        is_last = step == args.num_steps - 1
        # 1. Sample. Weights go over first, so step 0 and a resumed run need no special case;
        # evaluation uses the same.
        with engine.awake():
            with metrics.timer("reshard"):
                sync_weights(policy, engine, dtype=engine.dtype)
                if args.verify_sync:
                    verify_sync(policy, engine, dtype=engine.dtype)
            if args.eval_every and (is_last or step % args.eval_every == 0):
                evaluate(args, engine, scorer, tokenizer, eval_prompts, metrics)
            # 2. Score while others are still being sampled, and compare each response with its
            # siblings.
            groups = sample_groups(args, step, engine, scorer, tokenizer, stream, metrics)
        with metrics.timer("layout"):
            # noqa: B023  [P of this rank, G]
            advantages = cache.get(step, lambda: compare(args, groups))
            # 3. Lay out. A minibatch is a fixed slice of the global prompt order; its rows stay for
            # all epochs.
            sequences, minibatches = to_sequences(args, groups, advantages)
            rows, totals = lay_out(
                sequences, minibatches, args.batch, exchange=exchange, like=EMPTY
            )
            metrics.add_layout(
                (policy,), sequences, rows, args.batch.tokens_per_row, args.batch.num_epochs
            )
            metrics.write_samples(step, groups, tokenizer.decode, advantages)
            rows = [[row.to(mesh.device_type) for row in minibatch] for minibatch in rows]

        # 4. Log-probabilities that stay fixed during the update; skipped where they are not needed.
        with metrics.timer("old_logprobs"):
            given = (
                1 if args.batch.num_epochs == 1 else 0
            )  # the first minibatch meets the policy as it is now
            rows[given:] = with_logprobs(
                policy, rows[given:], "old_logprobs", temperature=args.rollout.temperature
            )
        if reference is not None:
            with metrics.timer("ref_logprobs"), offload.present(reference):
                rows = with_logprobs(
                    reference, rows, "ref_logprobs", temperature=args.rollout.temperature
                )

        # 5. Update. Every loss term is divided by its minibatch's total over all ranks: ranks and
        # rows just add up.
        learning_rate = learning_rate_at(step, args.num_steps, args.learning_rate, args.optim)
        with metrics.timer("update"), offload.present(optimizer):
            for m in args.batch.minibatch_order(totals, seed=(args.seed, step)):
                kl = torch.zeros((), device=mesh.device_type)
                for i, row in enumerate(rows[m]):
                    policy.set_requires_gradient_sync(
                        args.model.reduce_every_row or i == len(rows[m]) - 1
                    )
                    logprobs, entropy = token_logprobs(
                        policy, row, temperature=args.rollout.temperature
                    )
                    loss, stats = actor_loss(logprobs, entropy, row, totals[m], args.loss, limit)
                    loss.backward()
                    metrics.update(stats, row.num_response_tokens)
                    kl += stats["actor/ppo_kl"] * row.num_response_tokens / totals[m]["tokens"]
                grad_norm = optimizer_step(
                    policy, optimizer, learning_rate, args.optim.max_grad_norm
                )
                metrics.update({"actor/grad_norm": grad_norm, "actor/lr": learning_rate})
                if args.loss.target_kl and total(kl) > args.loss.target_kl:
                    break

        # 6. Report, save.
        if mesh.size() > 1:
            metrics.add("communication/nccl_bw_gb", measure_bandwidth(1 << 22))
        if args.refresh_every and (step + 1) % args.refresh_every == 0:
            with offload.present(reference):
                copy_weights(policy, reference)
        if args.run.save_every and (is_last or (step + 1) % args.run.save_every == 0):
            with metrics.timer("save"), offload.present(reference, optimizer):
                save(args.run.directory / "checkpoints", step + 1, state, keep=args.run.keep)
        metrics.log(step)

    export(
        iter_full_params(policy, dtype=engine.dtype), path, args.run.directory / "hf", engine.dtype
    )
    scorer.close()


def prepare(args: Args) -> tuple[str, object, PromptStream, list[Prompt], Scorer]:
    """(model directory, tokenizer, stream, evaluation prompts, scorer): all that can be refused,
    refused early.
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
        if args.data_paths == ("built-in",):
            rows = map(addition.problems, (False, True))  # to learn from, and held out
            datasets, evals = ([to_prompts(r, tokenizer, args.data, "addition")] for r in rows)
        else:
            datasets = load_prompts(args.data_paths, tokenizer, args.data)
            evals = load_prompts(
                args.eval_paths, tokenizer, replace(args.data, weights=()), "--eval-data"
            )
        require_columns([*datasets, *evals], scorer.wanted)
        if args.eval_every and not evals:
            raise ValueError(f"--eval-every {args.eval_every}: needs --eval-data FILE, or 0")
        stream = PromptStream(
            datasets, args.batch.prompts_per_step, weights=args.data.weights, seed=args.seed
        )
        if dist.get_rank() == 0:
            args.run.open(args, path)
    except (ValueError, OSError) as error:
        sys.exit(
            f"error: {' '.join(str(error).split())}" if dist.get_node_local_rank() == 0 else 1
        )  # once a host
    if dist.get_rank() == 0:
        num_prompts, num_ranks = sum(map(len, datasets)), dist.get_world_size()
        plan = {
            "model": f"{path}: {memory_plan(path, num_ranks, args.model.master_dtype, frozen_copies=bool(args.loss.kl_coef))}",
            "data": f"{num_prompts} prompts for {args.num_steps} steps, {sum(map(len, evals))} to evaluate",
            "ranks": f"{num_ranks}; {num_ranks // args.rollout.tensor_parallel_size} {args.rollout.engine} engines",
            "batch": args.batch.describe(
                args.data.max_prompt_tokens, args.rollout.max_response_tokens
            ),
        }
        print("\n".join(f"{name:>8}  {text}" for name, text in plan.items()), flush=True)
    return path, tokenizer, stream, sum(evals, []), scorer


def sample_groups(
    args: Args, step: int, engine, scorer: Scorer, tokenizer, stream, metrics: Metrics
) -> list[Group]:
    """This rank's groups; with dynamic sampling, rounds go on until enough groups have spread, or
    tries are up.
    """
    kept, num_seen, num_missing, size = [], 0, args.batch.prompts_per_step, args.batch.group_size
    for attempt in range(args.resample_tries):
        prompts = stream.take(num_missing)
        with metrics.timer("rollout"):
            drawn = draw(
                engine, scorer, tokenizer, prompts, size, sampling_seed(args.seed, step, attempt)
            )
        with metrics.timer("reward"):
            rewards, stats = scorer.collect(len(drawn) * size)
        metrics.update(stats, len(rewards), prefix="reward/")
        for i, (position, rollouts) in enumerate(drawn.items()):
            scores = rewards[i * size : (i + 1) * size]
            metrics.add_group(prompts[position].source, scores, rollouts)
            if args.resample_tries == 1 or max(scores) > min(scores):
                kept.append(Group(num_seen + position, prompts[position], rollouts, scores))
        num_seen += len(prompts)
        num_missing = args.batch.prompts_per_step - int(total(torch.tensor(float(len(kept)))))
        if num_missing == 0:
            return kept
    if metrics.is_rank0:
        print(
            f"warning: step {step + 1} lacks {num_missing} groups with spread after --resample-tries {attempt + 1}"
        )
    return kept


def draw(
    engine,
    scorer: Scorer,
    tokenizer,
    prompts: list[Prompt],
    num_samples: int,
    seed: int,
    temperature=None,
):
    """{position: rollouts} for the prompts that this rank owns; each response goes to the scorer as
    soon as it ends.
    """

    def submit(index: int, position: int, rollout: Rollout) -> None:
        prompt = prompts[position]
        response = tokenizer.decode(rollout.response_ids, skip_special_tokens=True)
        known = dict(
            prompt=prompt.text, response=response, answer=prompt.answer, truncated=rollout.truncated
        )
        scorer.submit(index, prompt.columns | known)

    how = dict(temperature=temperature, seed=seed, on_finished=submit)
    return engine.generate_share([prompt.prompt_ids for prompt in prompts], num_samples, **how)


def evaluate(
    args: Args, engine, scorer: Scorer, tokenizer, prompts: list[Prompt], metrics: Metrics
) -> None:
    """Greedy reward per data set, and mean@k and pass@k of k samples, each a mean over all prompts
    of all ranks.
    """
    for k, temperature in ((1, 0.0), (args.eval_samples, args.rollout.temperature)):
        with metrics.timer("eval"):
            how = sampling_seed(args.seed, "eval"), temperature
            drawn = draw(engine, scorer, tokenizer, prompts, k, *how) if k else {}
            rewards, stats = scorer.collect(len(drawn) * k)
        metrics.update(
            {n: stats[n] for n in ("error_frac", "timeout_frac")}, len(rewards), prefix="eval/"
        )
        for i, position in enumerate(drawn):
            mine = rewards[i * k : (i + 1) * k]
            greedy = {"reward": mine[0], f"{prompts[position].source}/reward": mine[0]}
            sampled = {f"mean@{k}": sum(mine) / k, f"pass@{k}": max(mine)}
            metrics.update(sampled if temperature else greedy, prefix="eval/")


def compare(args: Args, groups: list[Group]) -> torch.Tensor:
    """Advantages [P, G] of this rank's groups, from all samples of each group, truncated ones
    included.
    """
    how, limit = args.advantage, args.rollout.max_response_tokens
    rewards = torch.tensor([g.rewards for g in groups]).reshape(-1, args.batch.group_size)
    lengths = torch.tensor([len(r.response_ids) for g in groups for r in g.rollouts]).reshape(
        rewards.shape
    )
    rewards = rewards + overlong_penalty(
        lengths, limit, buffer=how.overlong_buffer, weight=how.overlong_weight
    )
    return group_advantages(rewards, baseline=how.baseline, scale_by_std=how.scale_by_std)


def to_sequences(
    args: Args, groups: list[Group], advantages: torch.Tensor
) -> tuple[list[dict], list[int]]:
    """This rank's samples, and the minibatch of each. Collective."""
    sequences, minibatches = [], []
    places = args.batch.minibatches([g.position for g in groups])
    for group, row, minibatch in zip(groups, advantages.tolist(), places, strict=True):
        for rollout, advantage in zip(group.rollouts, row, strict=True):
            learn = not (rollout.truncated and args.advantage.mask_truncated)
            fields = dict(learn=learn, advantages=advantage, rollout_logprobs=rollout.logprobs)
            sequences.append(sequence(rollout.prompt_ids, rollout.response_ids, **fields))
            minibatches.append(minibatch)
    return sequences, minibatches


if __name__ == "__main__":
    main(command_line(Args(), addition.SETTINGS, __doc__))
    leave()
