# SPDX-FileCopyrightText: 2026 handful contributors (hybrid.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Demonstrations, preferences and rewards on one policy, in one step; grpo.py's six phases.

    bash launch.sh hybrid.py                     # a small model learns three things, on a CPU
    bash launch.sh hybrid.py --model DIR --weights 1 0 0 --sft.data chats.jsonl   # an SFT trainer
    bash launch.sh hybrid.py --model DIR --weights 0 1 0 --dpo.data pairs.jsonl   # a DPO trainer
    bash launch.sh hybrid.py --model DIR --weights 0 1 0 0 100 0 0 1 --sft.data chats.jsonl \\
        --data prompts.jsonl                     # SFT that fades into RL over 100 steps

    loss = w_sft (sum over trained tokens of -log pi) / their number        supervised.cross_entropy
         + w_dpo (sum over pairs of -log sigmoid(margin)) / their number  supervised.preference_loss
         + w_rl  (grpo.py's, a sum over sampled tokens) / their number             losses.actor_loss

Each kind has its own data, its own rows and its own number to divide by, over all rows and ranks of
the minibatch; so the gradient is the weighted sum of what each kind alone would give. A kind whose
weight is always 0 costs nothing: no data, no engine for rl, no reference for dpo. With --weights
0 0 1 the run is grpo.py's, bit for bit on a CPU. Pairs and rl's KL term have one reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

import checkpoint
import curves
import data
import demonstrations
import grpo
import hardware
import hub
import logprobs
import lora
import losses
import memory
import metrics
import model
import offload
import optim
import packing
import phases
import plan
import prefix
import report
import run
import supervised
import witness
from demonstrations import PAIR
from examples import mixture
from guard import Guard
from packing import PackedRow
from phases import evaluate, export, make_engine, sync, warm_up
from rewards import Scorer
from run import RunConfig
from supervised import DpoConfig, SftConfig

KINDS = ("sft", "dpo", "rl")
MARKS = {"segment": "dpo", "advantages": "rl"}  # fields that only rows of a kind have
EMPTY = {"sft": packing.empty_sequence(), "dpo": PAIR, "rl": grpo.EMPTY}


@dataclass(frozen=True)
class Args(grpo.Args):
    weights: tuple[float, ...] = (0.4, 0.4, 0.2)
    """Weights of the losses: sft dpo rl; or knots: step sft dpo rl, and linear between them."""
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(
        default_factory=lambda: RunConfig(name="hybrid")
    )

    def __post_init__(self):
        super().__post_init__()
        supervised.check_weights(self.weights)
        has_samples = self.uses("rl") or not self.check
        run.require(has_samples, "--check", self.check, "with a weight for rl")
        row = self.batch.tokens_per_row
        for flag, config, least in (
            ("--sft", self.sft, self.sft.max_tokens),
            ("--dpo", self.dpo, 2 * self.dpo.max_tokens),
        ):
            is_asked = self.eval_every or not config.eval_data
            run.require(is_asked, f"{flag}.eval-data", config.eval_data, "with --eval-every 20")
            if not self.uses(flag[2:]):
                continue
            rule = f"at least {least}, for {flag}.max-tokens {config.max_tokens}"
            run.require(row >= least, "--tokens-per-row", row, rule)
            has_data = config.data or self.model_path == "built-in"
            rule = f"0 for {flag[2:]}, or with {flag}.data FILE"
            run.require(has_data, "--weights", self.weights, rule)

    def uses(self, kind: str) -> bool:
        """Whether this kind of loss has a weight in some step."""
        size = 3 if len(self.weights) == 3 else 4
        return any(self.weights[size - 3 + KINDS.index(kind) :: size])

    @property
    def needs_reference(self) -> bool:
        """Whether a loss compares the policy with what it was before the run."""
        by_pairs = self.uses("dpo") and not self.dpo.reference_free
        return bool(by_pairs or (self.loss.kl_coef and self.uses("rl")))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        used = {"sft": self.sft.max_tokens, "dpo": self.dpo.max_tokens, "rl": plan.longest(self)}
        return max(num_tokens for kind, num_tokens in used.items() if self.uses(kind))


class Sources(NamedTuple):
    """What a run reads: data.PromptStreams by kind, what is held out, and who scores samples."""

    streams: dict[str, data.PromptStream]
    held_out: dict[str, list]
    scorer: Scorer | None


def main(flags: Args) -> int | None:
    if flags.check:  # of what the run samples, and of its machine; what is given is read
        return grpo.main(flags, checked_paths)
    mesh = run.init_distributed(flags.seed, flags.timeout_s)
    meter = metrics.Metrics(hardware.Device(), hardware.process_age())
    meter.add_time("import")
    with run.one_line_errors():
        args = mixture.with_paths(flags)  # the same settings, with paths in place of "built-in"
        path, tokenizer, sources = prepare(args)
        flags.run.check(flags, path)
        meter.add_time("data")
        policy, reference, optimizer = grpo.load_models(args, path, mesh)
        state = {
            "policy": checkpoint.TrainState(policy, optimizer, args.lora.rank > 0),
            "generators": checkpoint.GeneratorState(),
        }
        state |= {f"{kind} stream": stream for kind, stream in sources.streams.items()}
        if args.refresh_every:
            state["reference"] = checkpoint.TrainState(reference, ())
        out_dir = args.run.directory
        first_step = checkpoint.load(out_dir / "checkpoints", state) if args.run.resume else 0
        offloader = offload.Offload(args.offload, reference, optimizer)
        meter.add_time("models")
        engine = make_engine(args, path, tokenizer) if args.uses("rl") else None
        wandb = report.start_wandb(args.log, out_dir.name, flags)
        flags.run.open(flags)
        journal = report.Report(out_dir, args.log, args.num_steps, first_step, wandb, curves.plot)
        meter.add_time("engine")
    known = args, [policy, reference], args.longest, offloader
    shares = [prefix.share] * args.uses("rl") + [None] * (args.uses("sft") or args.uses("dpo"))
    warm_up(*known, has_reference=args.needs_reference, shares=shares)
    meter.add_time("warm_up")
    journal.write_start(meter.reduce())
    guard = Guard(args.run, out_dir, args.num_steps, tokenizer.decode)
    guard.protect(first_step, state, checkpoint.save, offloader.present)

    sampler = engine, sources.scorer, tokenizer
    for step in range(first_step, args.num_steps):
        weights = dict(zip(KINDS, supervised.weights_at(args.weights, step), strict=True))
        batches = {}

        # 1. Sample, if this step has rewards. Weights go over first, as in grpo.py.
        is_due = args.eval_every and step % args.eval_every == 0 and step + 1 < args.num_steps
        if is_due:
            evaluate_given(args, policy, reference, sources.held_out, offloader, meter)
        if engine is not None and (weights["rl"] or is_due):
            with engine.awake():
                sync(args, policy, engine, meter)
                if is_due:
                    evaluate(args, step, *sampler, sources.held_out["rl"], meter, guard)
                if weights["rl"]:
                    groups = grpo.sample_groups(args, step, *sampler, sources.streams["rl"], meter)

        # 2. Score what was sampled. What is given needs none.
        with meter.timer("advantages"):
            if weights["rl"]:
                group_advantages = grpo.advantages_of(args, groups)  # [P of this rank, G]

        # 3. Lay out. Each kind in rows of its own; minibatch m has its slice of each.
        with meter.timer("layout"):
            if weights["rl"]:
                batches["rl"] = grpo.to_sequences(args, groups, group_advantages)
                journal.write_samples(step, groups, tokenizer.decode, group_advantages)
            for kind in ("sft", "dpo"):
                if weights[kind]:
                    batches[kind] = take(args, kind, sources.streams[kind], meter)
            rows, totals = lay_out(args, batches, weights, meter, mesh.device_type)

        # 4. Log-probabilities stay fixed while the batch is used.
        rows = with_fixed(args, range(first_step, step), policy, reference, rows, offloader, meter)

        # 5. Update. The gradients of rows, ranks and kinds just add up.
        rate = optim.learning_rate_at(step, args.num_steps, args.learning_rate, args.optim)
        with meter.timer("update"), offloader.present(optimizer):
            for m in args.batch.minibatch_order(totals, seed=(args.seed, step)):
                kl = memory.retried(gradients, args, policy, rows[m], totals[m], meter)
                if args.loss.target_kl and metrics.total(kl) > args.loss.target_kl:
                    policy.zero_grad()  # this minibatch takes no step, nor do those after it
                    break
                norm = optim.optimizer_step(policy, optimizer, rate, args.optim.max_grad_norm)
                guard.count("actor", norm, step, rows[m], meter)
                meter.add_update("actor", norm, rate)

        # 6. Report, save. The last evaluation is of the model that is exported.
        if args.eval_every and step + 1 == args.num_steps:
            evaluate_given(args, policy, reference, sources.held_out, offloader, meter)
            if engine is not None:
                with engine.awake():
                    sync(args, policy, engine, meter)
                    evaluate(args, step + 1, *sampler, sources.held_out["rl"], meter, guard)
        if mesh.size() > 1:  # a timed probe: the gradients' own collectives overlap the update
            meter.add("communication/nccl_bw_gb", hardware.measure_bandwidth(1 << 22))
        if args.refresh_every and (step + 1) % args.refresh_every == 0:
            with offloader.present(reference):
                model.copy_weights(policy, reference)
        journal.write(step, meter.reduce())
        guard.save_if_due(step, meter)
        guard.leave_if_over(step)

    export(args, policy, torch.bfloat16 if mesh.device_type == "cuda" else torch.float32, path)
    if sources.scorer is not None:
        sources.scorer.close()


def prepare(args: Args) -> tuple[str, Any, Sources]:
    """(model directory, tokenizer, what the run reads), before a model is loaded."""
    sources = Sources({}, {}, None)
    path = hub.find_model(args.model_path, args.longest)
    tokenizer = hub.load_tokenizer(path, f"--model {args.model_path}")
    if args.uses("rl"):
        _, _, stream, prompts, scorer = grpo.prepare(args)
        sources = Sources({"rl": stream}, {"rl": prompts}, scorer)
    elif dist.get_rank() == 0:
        frozen = int(args.needs_reference or args.lora.rank > 0)
        size = hub.memory_plan(path, args.model.master_dtype, frozen, args.lora.rank)
        print(f"   model  {path}: {size}")
    load_given(args, tokenizer, sources)
    has_evals = any(sources.held_out.values()) or not args.eval_every
    rule = "0, or with --sft.eval-data FILE or --dpo.eval-data FILE"
    run.require(has_evals, "--eval-every", args.eval_every, rule)
    return path, tokenizer, sources


def checked_paths(flags: Args) -> Args:
    """mixture.with_paths, once demonstrations and pairs have been read."""
    args = mixture.with_paths(flags)
    path = hub.find_model(args.model_path, args.longest)
    tokenizer = hub.load_tokenizer(path, f"--model {args.model_path}")
    load_given(args, tokenizer, Sources({}, {}, None))
    return args


def load_given(args: Args, tokenizer, sources: Sources) -> None:
    """Adds demonstrations and pairs to the sources."""
    loaders = {"sft": demonstrations.load_demonstrations, "dpo": demonstrations.load_pairs}
    for kind, load in loaders.items():
        config = getattr(args, kind)
        known = tokenizer, args.data, config.max_tokens
        given = config.data if args.uses(kind) else ()
        sets = load(given, *known, read_rows=data.read_rows, flag=f"--{kind}.data")
        if sets:
            sources.streams[kind] = data.PromptStream(sets, seed=args.seed)
        flag = f"--{kind}.eval-data"
        evals = load(config.eval_data, *known, read_rows=data.read_rows, flag=flag)
        sources.held_out[kind] = [each for made in evals for each in made]
        if dist.get_rank() == 0:
            num_evals = len(sources.held_out[kind])
            print(f"{kind:>8}  {sum(map(len, sets))} to learn from, {num_evals} to evaluate")


def take(args: Args, kind: str, stream, meter) -> tuple[list[dict[str, Tensor]], list[int]]:
    """This rank's share of the step's demonstrations or pairs, and the minibatch of each."""
    count = args.sft.samples_per_step if kind == "sft" else args.dpo.pairs_per_step
    taken = list(enumerate(stream.take(count)))
    mine = taken[dist.get_rank() :: dist.get_world_size()]
    for _, sequence in mine:
        meter.add("throughput/num_tokens", len(sequence["tokens"]), reduction="sum")
    minibatch_of = args.batch.minibatches([position for position, _ in mine])
    return [sequence for _, sequence in mine], minibatch_of


def lay_out(
    args: Args, batches: dict, weights: dict[str, float], meter, device: str
) -> tuple[dict[str, list[list[PackedRow]]], list[dict]]:
    """({kind: rows of each minibatch}, what each minibatch holds of each kind, with its weight)."""
    rows = {}
    totals: list[dict] = [{"tokens": 0} for _ in range(args.batch.num_minibatches)]
    for kind in KINDS:
        if kind not in batches:
            continue
        share = prefix.share if kind == "rl" else None
        made, counts = phases.lay_out(args, *batches[kind], EMPTY[kind], share)
        if kind == "dpo":
            made = [list(map(demonstrations.split_pairs, minibatch)) for minibatch in made]
        meter.add_layout(made, args.batch.tokens_per_row)
        rows[kind] = [[row.to(device) for row in minibatch] for minibatch in made]
        for total, count in zip(totals, counts, strict=True):
            total["tokens"] += count["tokens"]
            total[kind] = count | {"weight": weights[kind]}
    return rows, totals


def with_fixed(
    args: Args, earlier: range, policy, reference, rows: dict, offloader, meter
) -> list[list[PackedRow]]:
    """The rows of each minibatch, kind after kind, with old and reference log-probabilities."""
    rows = dict(rows)
    temperature = {"rl": args.rollout.temperature, "dpo": 1.0}
    if "rl" in rows:
        with meter.timer("old_logprobs"):
            # In a single pass the first minibatch meets the policy unchanged: its ratio is 1.
            skip = 1 if args.batch.num_epochs == 1 else 0
            known = "old_logprobs", temperature["rl"], skip
            rows["rl"] = logprobs.with_logprobs(policy, rows["rl"], *known)
            num_done = len([s for s in earlier if supervised.weights_at(args.weights, s)[2] > 0])
            witness.compare(args, num_done, policy, rows["rl"], logprobs.token_logprobs)
    base = policy if reference is None else reference
    for kind in ("dpo", "rl"):
        compares = args.loss.kl_coef if kind == "rl" else not args.dpo.reference_free
        if kind in rows and compares:
            with meter.timer("ref_logprobs"), offloader.present(reference), lora.disabled(base):
                known = "ref_logprobs", temperature[kind]
                rows[kind] = logprobs.with_logprobs(base, rows[kind], *known)
    minibatches = range(args.batch.num_minibatches)
    return [[row for kind in rows for row in rows[kind][m]] for m in minibatches]


def gradients(args: Args, policy, rows: list[PackedRow], totals: dict, meter) -> Tensor:
    """Add the gradients of a minibatch to the policy; returns this rank's share of ppo_kl."""
    kl = torch.zeros((), device=rows[0].tokens.device)
    for i, row in enumerate(rows):
        # Gradients are reduced over ranks once, after the last row. Until then they add up here.
        is_last = i == len(rows) - 1
        policy.set_requires_gradient_sync(is_last or args.model.reduce_every_row)
        kind = next((kind for name, kind in MARKS.items() if name in row.fields), "sft")
        temperature = args.rollout.temperature if kind == "rl" else 1.0
        options = {"temperature": temperature, "likeliest": kind == "sft"}
        current, second = logprobs.token_logprobs(policy, row, **options)
        loss, stats, weight = row_loss(args, kind, current, second, row, totals[kind])
        (totals[kind]["weight"] * loss).backward()
        meter.add_pass(policy, row)
        meter.update(stats, weight)
        if kind == "rl":
            kl += stats["actor/ppo_kl"] * weight / max(1, totals[kind]["tokens"])
    return kl


def row_loss(
    args: Args, kind: str, current: Tensor, second: Tensor, row: PackedRow, totals: dict
) -> tuple[Tensor, dict[str, Tensor], int]:
    """(this row's part of the loss, statistics, their weight); second: entropies, or likeliest."""
    mask = row.fields["response_mask"]
    if kind == "sft":
        known = current, second, mask, float(max(1, totals["tokens"]))
        loss, stats = supervised.cross_entropy(*known)
        return loss, stats, row.num_response_tokens
    if kind == "dpo":
        ref = row.fields.get("ref_logprobs")
        known = mask, row.cu_seqlens, args.dpo, float(max(1, totals["sequences"]))
        loss, stats = supervised.preference_loss(current, ref, *known)
        return loss, stats, len(row.source) // 2
    limit = args.rollout.max_response_tokens
    loss, stats = losses.actor_loss(current, second, row, totals, args.loss, limit)
    return loss, stats, row.num_response_tokens


@torch.no_grad()
def evaluate_given(args: Args, policy, reference, held_out: dict, offloader, meter) -> None:
    """Loss and token accuracy on held-out demonstrations, and which of held-out pairs are right."""
    base = policy if reference is None else reference
    with meter.timer("eval"), offloader.present(reference):
        for row in rows_of(args, held_out["sft"], policy.device):
            current, likeliest = logprobs.token_logprobs(policy, row, likeliest=True)
            found = supervised.text_statistics(current, likeliest, row.fields["response_mask"])
            meter.update(found, row.num_response_tokens, prefix="eval/")
        for row in rows_of(args, held_out["dpo"], policy.device):
            own, _ = logprobs.token_logprobs(policy, row)
            ref = None
            if args.needs_reference:
                with lora.disabled(base):
                    ref, _ = logprobs.token_logprobs(base, row)
            known = row.fields["response_mask"], row.cu_seqlens, args.dpo
            found = supervised.pair_statistics(own, ref, *known)
            meter.update(found, len(row.source) // 2, prefix="eval/")


def rows_of(args: Args, sequences: list, device: torch.device) -> list[PackedRow]:
    """This rank's share of the sequences, which all ranks have, in rows; as many on all ranks."""
    if not sequences:
        return []
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    rows = packing.pack_alike(mine, args.batch.tokens_per_row)
    return [demonstrations.split_pairs(row).to(device) for row in rows]


if __name__ == "__main__":
    run.leave(main(run.command_line(Args(), mixture.SETTINGS, __doc__)))
