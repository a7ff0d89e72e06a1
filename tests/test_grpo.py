"""The trainer: the update does not depend on the layout, each option does what it says, bad input
is refused early.
"""

import contextlib
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import (
    REWARDS,
    SCRIPTED,
    TEMPERATURE,
    distance,
    joined,
    largest_difference,
    records,
    samples,
    settings,
    train,
    weights,
)
from lab import lab
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import save_tiny

import grpo
import ppo
from attention import use_packed_attention
from batch import BatchConfig
from checkpoint import TrainState, load
from data import Prompt
from examples import addition
from exchange import exchange
from hf_backend import HfBackend
from logprobs import token_logprobs
from losses import actor_loss
from metrics import Metrics
from model import load_policy
from optim import optimizer_step
from packing import lay_out, sequence
from reshard import sync_weights, verify_sync
from rollout import Engine, Rollout, RolloutConfig
from run import command_line, from_json
from sampling import draw, evaluate
from vllm_backend import VllmBackend

ROOT = Path(grpo.__file__).parent
# The update does not depend on the layout (open-instruct#1137, torchtune#2172)

LENGTHS = [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.fixture(scope="session")
def batch():
    """8 samples: prompts of 1 to 3 tokens, responses of 1 to 128, advantages, and the sampler's
    log-probabilities.
    """
    draw = torch.Generator().manual_seed(0)
    made = []
    for i, length in enumerate(LENGTHS):
        prompt, response = (torch.randint(2, 14, (n,), generator=draw) for n in (1 + i % 3, length))
        advantage = torch.randn((), generator=draw).item()
        rollout_logprobs = -2.6 + 0.5 * torch.randn(length, generator=draw)
        made.append(
            sequence(prompt, response, advantages=advantage, rollout_logprobs=rollout_logprobs)
        )
    return made


def loss_settings(normalize):
    loss, rollout = (
        dict(normalize=normalize),
        dict(temperature=TEMPERATURE, max_response_tokens=128),
    )
    return from_json(grpo.Args(), dict(loss=loss, rollout=rollout, batch=dict(tokens_per_row=640)))


def reference_gradient(path, batch, normalize):
    """Of the loss as it is written in papers: a plain model, a sequence at a time, no mask, no
    rows.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total = sum(LENGTHS[: len(batch)])
    loss = 0.0
    for s in batch:
        num = int(s["response_mask"].sum())
        logits = model(s["tokens"][None, :-1], use_cache=False).logits[0, -num:] / TEMPERATURE
        logprobs = logits.log_softmax(-1)[torch.arange(num), s["tokens"][-num:]]
        old = logprobs.detach()
        weight = (old - s["rollout_logprobs"][-num:]).exp().clamp(max=2.0)
        surrogate = weight * (logprobs - old).exp() * s["advantages"][-num:]
        divisor = {"token": total, "sequence": num * len(batch), "constant": 128 * len(batch)}[
            normalize
        ]
        loss = loss - surrogate.sum() / divisor
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def gradient(policy, args, batch, capacity, order):
    """The full gradient of the trainer's loss over `batch`, dealt to the ranks in `order`, and rows
    per rank.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mine = [batch[i] for i in order[rank::world_size]]
    config = BatchConfig(tokens_per_row=capacity, num_minibatches=1)
    [rows], [totals] = lay_out(mine, [0] * len(mine), config, exchange=exchange, like=grpo.EMPTY)
    for i, row in enumerate(rows):
        policy.set_requires_gradient_sync(i == len(rows) - 1)
        logprobs, entropy = token_logprobs(policy, row, temperature=TEMPERATURE)
        actor_loss(logprobs, entropy, row, totals, args.loss, 128)[0].backward()
    found = {name: p.grad.full_tensor() for name, p in policy.named_parameters()}
    policy.zero_grad()
    return found, len(rows), sum(not row.source for row in rows)


def sharded(path):
    policy = load_policy(path, joined(0, 0.0))
    use_packed_attention(policy)
    return policy


@pytest.mark.parametrize("kind, world_sizes", [("llama", (1, 4)), ("gemma3", (2,))])
def test_the_gradient_is_the_papers_on_any_ranks_in_any_rows_in_any_order(
    tmp_path, batch, kind, world_sizes
):
    """1e-5 of the largest entry: fp32 sums in another order."""
    path = save_tiny(tmp_path, kind, max_position_embeddings=256)
    modes = "token", "sequence", "constant"
    expected = {normalize: reference_gradient(path, batch, normalize) for normalize in modes}

    def job():
        policy, seen = sharded(path), []
        for normalize, reference in expected.items():
            for capacity, order in (
                (131, range(8)),
                (160, [3, 1, 7, 0, 2, 6, 5, 4]),
                (640, range(7, -1, -1)),
            ):
                found, num_rows, num_empty = gradient(
                    policy, loss_settings(normalize), batch, capacity, order
                )
                seen.append((largest_difference(found, reference), num_rows, num_empty))
        return seen

    for world_size in world_sizes:
        ranks = run_ranks(world_size, job)
        assert max(difference for seen in ranks for difference, _, _ in seen) < 1e-5
        assert (
            len({tuple(num_rows for _, num_rows, _ in seen) for seen in ranks}) == 1
        )  # the same on all ranks
        assert max(num_rows for _, num_rows, _ in ranks[0]) > 1 or world_size > 1


def test_ranks_without_a_sequence_run_as_many_rows_and_add_nothing(tmp_path, batch):
    """verl#6176: row counts that differ between ranks hang FSDP. 3 sequences on 4 ranks, and 1."""
    path = save_tiny(tmp_path, "llama", max_position_embeddings=256)
    few = batch[:3]
    expected, of_one = (reference_gradient(path, part, "token") for part in (few, batch[:1]))

    def job():
        policy, args = sharded(path), loss_settings("token")
        found, num_rows, num_empty = gradient(policy, args, few, 131, range(3))
        alone, one_row, _ = gradient(policy, args, batch[:1], 131, range(1))
        return (
            largest_difference(found, expected),
            num_rows,
            num_empty,
            one_row,
            largest_difference(alone, of_one),
        )

    ranks = run_ranks(4, job)
    assert max(max(rank[0], rank[4]) for rank in ranks) < 1e-5
    assert [rank[1] for rank in ranks] == [1] * 4 and sum(rank[2] for rank in ranks) == 1
    assert [rank[3] for rank in ranks] == [1] * 4


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_gradient_of_one_token_has_the_size_that_a_hand_computes(tmp_path, world_size):
    """modelscope/ms-swift#10117: ratios between layouts hide a factor in all of them. With a head
    of zeros all of the V words are equally likely and no gradient goes below the head: there it is
    (onehot - 1/V) h / T for one token of advantage 1, whose norm is |h| sqrt(1 - 1/V) / T, and |h|
    is sqrt(D) behind a norm of weight 1. The other three sequences have no token to learn from, and
    the four are in four rows, or on four ranks.
    """
    path = save_tiny(tmp_path, "llama")
    tensors = load_file(f"{path}/model.safetensors")
    tensors["lm_head.weight"].zero_()
    tensors["model.norm.weight"].fill_(1.0)
    save_file(tensors, f"{path}/model.safetensors", metadata={"format": "pt"})
    fields = dict(advantages=1.0, rollout_logprobs=-math.log(14))
    four = [
        sequence(torch.tensor([3, 4]), torch.tensor([5 + i]), learn=i == 2, **fields)
        for i in range(4)
    ]

    def job():
        found, num_rows, _ = gradient(sharded(path), loss_settings("token"), four, 3, range(4))
        return math.sqrt(sum(x.square().sum().item() for x in found.values())), num_rows

    for norm, num_rows in run_ranks(world_size, job):
        assert num_rows == 4 / world_size
        assert norm == pytest.approx(math.sqrt(64) * math.sqrt(1 - 1 / 14) / TEMPERATURE, rel=1e-4)


def test_weights_after_8_optimizer_steps_are_the_same_on_1_and_4_ranks(tiny, files, tmp_path):
    """The whole trainer, 2 steps of 2 minibatches and 2 epochs, with responses that do not depend
    on the ranks, in rows that hold one sequence or many. Adam makes a step of the size of the
    learning rate of any gradient, rounding errors around 0 included, hence the small rate; and as
    it hides a factor, the norms are compared as well.
    """
    runs = {}
    for world_size, tokens_per_row in ((1, 512), (1, 22), (4, 22)):
        changes = dict(batch=dict(num_epochs=2, tokens_per_row=tokens_per_row), learning_rate=3e-4)
        args = settings(tiny, files, tmp_path / f"{world_size}-{tokens_per_row}", **changes)
        directory = train(args, world_size, **SCRIPTED)
        norms = [r["actor/grad_norm"] for r in records(directory)]
        runs[world_size, tokens_per_row] = weights(directory), norms
    (expected, expected_norms), *others = runs.values()
    before = load_file(f"{tiny}/model.safetensors")
    assert largest_difference(before, expected) > 1e-3
    for found, norms in others:
        # Single weights differ by up to a step where a gradient is nearly 0: on some processors.
        assert distance(found, expected) < 1e-3 * distance(before, expected)
        assert norms == pytest.approx(expected_norms, rel=1e-4)


# What the policies are to each other


def test_before_any_update_all_policies_are_one(tiny, files, tmp_path):
    """minimind#814: the ratio was off by 1.5e-2 before the first update. The learning rate is too
    small to move a weight, so old, current and reference policy stay the same over 2 minibatches
    and 2 epochs.
    """
    changes = dict(learning_rate=1e-30, loss=dict(kl_coef=0.1), batch=dict(num_epochs=2))
    for record in records(train(settings(tiny, files, tmp_path, **changes))):
        assert record["actor/ppo_kl"] == record["actor/pg_clipfrac"] == record["actor/kl_loss"] == 0
        assert record["rollout_corr/abs_diff_max"] < 1e-4 and record["actor/grad_norm"] > 0


@pytest.mark.parametrize("num_minibatches, num_epochs", [(1, 1), (2, 1), (2, 3)])
def test_a_step_takes_epochs_times_minibatches_optimizer_steps(
    tiny, files, tmp_path, num_minibatches, num_epochs
):
    """trl#3493: a guard let leftover slices be used after an update without a correction."""
    count, counted = counting(tmp_path / "count")
    batch = dict(num_minibatches=num_minibatches, num_epochs=num_epochs)
    train(settings(tiny, files, tmp_path, batch=batch), **{"optim.optimizer_step": counted})
    assert count() == 2 * num_minibatches * num_epochs


def counting(file):
    """How many optimizer steps all ranks took, and the function that counts them in `file`."""

    def counted(*arguments):
        with open(file, "a") as lines:
            lines.write("x")
        return optimizer_step(*arguments)

    return lambda: len(file.read_text()), counted


def test_the_same_seed_repeats_a_run_and_another_seed_or_step_does_not(tiny, files, tmp_path):
    """verl#912: the user's seed never reached the engine. One prompt alone, so that only sampling
    can differ.
    """
    one = dict(
        data_paths=(str(files / "1.jsonl"),), rollout=dict(ignore_eos=True), learning_rate=1e-30
    )
    runs = [
        samples(train(settings(tiny, files, tmp_path / name, seed=seed, **one), 2))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    responses = [[sample["response"] for sample in run] for run in runs]
    assert responses[0] == responses[1] != responses[2]
    assert len(set(responses[0])) == len(
        responses[0]
    )  # nor do steps, prompts or ranks share samples


# Any number of prompts


@pytest.mark.parametrize("num_prompts", [3, 1])
def test_ranks_need_not_divide_the_prompts(tiny, files, tmp_path, num_prompts):
    """saforem2/ezpz#190: a partial batch was dropped and the run ended well with no step at all.
    Also a data set smaller than a step's prompts.
    """
    batch = dict(prompts_per_step=num_prompts, num_minibatches=1)
    args = settings(tiny, files, tmp_path, batch=batch, data_paths=(str(files / "1.jsonl"),))
    assert len(records(train(args, 2))) == 2


@pytest.mark.parametrize("num_prompts", [7, 1])
def test_an_evaluation_is_a_mean_over_its_prompts_on_any_number_of_ranks(
    tiny, files, tmp_path, num_prompts
):
    """torchtitan#1618, prime-rl#2515: ranks with different numbers of batches hung, or their means
    were averaged.
    """
    for world_size in (1, 2):
        changes = dict(eval_paths=(str(files / f"{num_prompts}.jsonl"),), eval_every=1, num_steps=1)
        args = settings(tiny, files, tmp_path / str(world_size), **changes)
        [record] = records(train(args, world_size, **SCRIPTED))
        if world_size == 1:
            expected = record["eval/reward"]
    assert record["eval/reward"] == pytest.approx(expected) and 0 < expected < 1


def test_evaluation_reports_the_mean_and_the_best_of_k_samples(tiny, files, tmp_path):
    changes = dict(eval_paths=(str(files / "7.jsonl"),), eval_every=2, eval_samples=4, num_steps=4)
    found = records(train(settings(tiny, files, tmp_path, **changes)))
    evaluated = ["eval/pass@4" in record for record in found]
    assert evaluated == [True, False, True, True]  # and after the last
    for record in (found[0], found[2], found[3]):
        assert 0 < record["eval/mean@4"] < record["eval/pass@4"] <= 1
        assert record["eval/reward"] == record["eval/7.jsonl/reward"]


# Options, each on a short run


VARIANTS = {
    "dr_grpo": dict(advantage=dict(scale_by_std=False), loss=dict(normalize="constant")),
    "rloo": dict(advantage=dict(baseline="leave_one_out", scale_by_std=False)),
    "reinforce": dict(advantage=dict(baseline="batch"), batch=dict(group_size=1)),
    "gspo": dict(loss=dict(ratio="sequence", normalize="sequence", clip_low=3e-4, clip_high=4e-4)),
    "entropy": dict(loss=dict(entropy_coef=0.1)),
    "k2": dict(loss=dict(kl_coef=0.1, kl="k2")),
    "sequence_is": dict(loss=dict(importance="sequence")),
    "masked_is": dict(loss=dict(importance="mask")),
    "overlong": dict(advantage=dict(overlong_buffer=3)),
    "checkpointing": dict(model=dict(activation_checkpointing=True)),
    "keep_gathered": dict(model=dict(reshard_after_forward=False, reduce_every_row=True)),
    "linear": dict(optim=dict(warmup_steps=1, decay="linear", weight_decay=0.1)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_trains(tiny, files, tmp_path, variant):
    directory = train(
        settings(tiny, files, tmp_path, **VARIANTS[variant]), 2 if variant == "keep_gathered" else 1
    )
    found = records(directory)
    assert len(found) == 2 and all(record["actor/grad_norm"] > 0 for record in found)
    assert largest_difference(weights(directory), load_file(f"{tiny}/model.safetensors")) > 1e-3


def test_advantages_are_those_of_the_variant(tiny, files, tmp_path):
    """From samples.jsonl: each group's first advantage and reward; group means are not in it, so
    the sums are checked by the variants' own algebra on the same scripted responses.
    """

    def advantages(name, **changes):
        args = settings(tiny, files, tmp_path / name, num_steps=1, learning_rate=1e-30, **changes)
        return [s["advantage"] for s in samples(train(args, **SCRIPTED))]

    plain = advantages("plain", advantage=dict(scale_by_std=False))
    rloo = advantages("rloo", **VARIANTS["rloo"])
    assert rloo == pytest.approx([4 / 3 * a for a in plain]) and any(plain)  # G / (G - 1)


def test_a_reference_holds_the_policy_back_and_a_refresh_moves_it(tiny, files, tmp_path):
    def kl_losses(name, **changes):
        args = settings(tiny, files, tmp_path / name, num_steps=3, **changes)
        return [record["actor/kl_loss"] for record in records(train(args))]

    one = dict(batch=dict(num_minibatches=1))
    kept = kl_losses("kept", loss=dict(kl_coef=0.01), **one)
    assert kept[0] == 0 and min(kept[1:]) > 0.1
    refreshed = kl_losses("refreshed", loss=dict(kl_coef=0.01), refresh_every=1, **one)
    assert refreshed == [0, 0, 0]
    pulled = kl_losses("pulled", loss=dict(kl_coef=100.0), **one)
    assert pulled[2] < kept[2]


def test_an_entropy_bonus_raises_entropy(tiny, files, tmp_path):
    def entropy(coef):
        changes = dict(num_steps=3, loss=dict(entropy_coef=coef), learning_rate=3e-3)
        return records(train(settings(tiny, files, tmp_path / str(coef), **changes)))[-1][
            "actor/entropy"
        ]

    assert entropy(10.0) > entropy(0.0) + 0.05


def test_a_target_kl_ends_the_step_early(tiny, files, tmp_path):
    """The first minibatch's ppo_kl is 0; the second's exceeds the target: its step is not taken, as
    in ppo.py.
    """

    def num_optimizer_steps(target_kl):
        changes = dict(num_steps=1, batch=dict(num_epochs=3), loss=dict(target_kl=target_kl))
        count, train_with = counting(tmp_path / f"count{target_kl}")
        args = settings(tiny, files, tmp_path / str(target_kl), **changes)
        directory = train(args, **{"optim.optimizer_step": train_with})
        assert count() == records(directory)[0]["actor/num_updates"]
        return count()

    assert num_optimizer_steps(0.0) == 6 and num_optimizer_steps(1e-9) == 1


def groups_of(rewards, truncated):
    """Groups as sampled, with one-token responses of id 3 + sample."""
    found = []
    for p, (scores, cuts) in enumerate(zip(rewards, truncated, strict=True)):
        rollouts = [
            Rollout(torch.tensor([3]), torch.tensor([3 + g]), torch.tensor([-1.0]), bool(cut))
            for g, cut in enumerate(cuts)
        ]
        found.append(grpo.Group(p, None, rollouts, scores))
    return found


def test_masking_truncated_responses_keeps_their_groups_statistics():
    """open-instruct#1794: truncated samples were dropped before the rewards became groups, and
    advantages went to other prompts; trl#6369: the loss was divided by the masked tokens too.
    """
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    groups = groups_of(rewards, [[0, 1, 1, 0], [1, 0, 0, 1]])

    def job():
        args = from_json(
            grpo.Args(), dict(advantage=dict(mask_truncated=True), batch=dict(group_size=4))
        )
        advantages = grpo.advantages_of(args, groups)
        sequences, minibatches = grpo.to_sequences(args, groups, advantages)
        _, [totals] = lay_out(
            sequences, minibatches, BatchConfig(), exchange=exchange, like=grpo.EMPTY
        )
        return (
            advantages,
            [(s["response_mask"].tolist(), s["advantages"][-1].item()) for s in sequences],
            totals,
        )

    [(advantages, found, totals)] = run_ranks(1, job)
    assert advantages.flatten().tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5], abs=1e-4
    )
    assert [advantage for _, advantage in found] == pytest.approx(advantages.flatten().tolist())
    assert [mask[1] for mask, _ in found] == [True, False, False, True, False, True, True, False]
    assert totals == {"tokens": 4, "sequences": 4}


def test_a_step_with_nothing_to_learn_from_changes_no_weight(tiny, files, tmp_path):
    """trl#3248: 0 / 0 when every response is truncated and masked. Here each is (the stop ids are
    ignored).
    """
    changes = dict(
        advantage=dict(mask_truncated=True),
        rollout=dict(ignore_eos=True),
        optim=dict(weight_decay=0.1),
    )
    train(settings(tiny, files, tmp_path, num_steps=1, run=dict(save_every=1), **changes))
    directory = train(
        settings(tiny, files, tmp_path, run=dict(save_every=1, resume=True), **changes)
    )
    assert largest_difference(weights(directory), load_file(f"{tiny}/model.safetensors")) == 0
    assert len(records(directory)) == 2
    for record in records(directory):
        assert record["response_length/clip_ratio"] == 1 and "actor/grad_norm" not in record
        assert all(value is None or math.isfinite(value) for value in record.values())


def test_a_run_whose_responses_are_all_masked_says_so(tiny, files, tmp_path, capfd):
    """A new user's finding: it ran to its end, and said where the trained model is."""
    changes = dict(rollout=dict(ignore_eos=True), log=dict(zero_std_alarm=2))
    for is_masked in (True, False):
        own = dict(advantage=dict(mask_truncated=is_masked), **changes)
        train(settings(tiny, files, tmp_path / str(is_masked), **own))
        told = "warning: the policy has had no gradient for 2 steps: are all responses masked"
        assert (told in capfd.readouterr().out) == is_masked


def test_one_rank_with_only_masked_responses_does_not_hang_the_other(tiny, files, tmp_path):
    """trl#5826. Scripted responses are cut for some prompts; with 2 prompts on 2 ranks and rows of
    one sequence.
    """
    changes = dict(
        batch=dict(prompts_per_step=2, num_minibatches=1, tokens_per_row=22), learning_rate=1e-4
    )
    found = []
    for world_size in (1, 2):
        args = settings(
            tiny, files, tmp_path / str(world_size), advantage=dict(mask_truncated=True), **changes
        )
        directory = train(args, world_size, **SCRIPTED)
        assert all(math.isfinite(record["actor/entropy"]) for record in records(directory))
        found.append(weights(directory))
    assert largest_difference(*found) < 1e-5


def test_dynamic_sampling_keeps_whole_groups_with_spread_and_refills_the_step(
    tiny, files, tmp_path
):
    """NVIDIA-NeMo/RL#3469: groups were torn, or the batch not refilled. Prompts with an even number
    always get 0, the others 0 or 1: only groups of the latter may be learnt from, and there are as
    many as a step wants.
    """
    reward = dict(functions=("odd",))
    batch = dict(prompts_per_step=3, group_size=8, num_minibatches=1)
    changes = dict(resample_tries=8, reward=reward, batch=batch, num_steps=5)
    for world_size in (1, 2):
        directory = train(
            settings(tiny, files, tmp_path / str(world_size), **changes),
            world_size,
            **SCRIPTED,
        )
        kept = samples(directory)  # one line for each group that is kept, of rank 0's
        assert all(int(sample["prompt"].split("=")[0].split("+")[0]) % 2 for sample in kept)
        assert world_size > 1 or [sample["step"] for sample in kept] == [
            step for step in range(5) for _ in range(3)
        ]
        assert all(
            0 < record["reward/frac_zero_std"] < 1 for record in records(directory)
        )  # of all that was sampled


def test_a_reward_that_is_constant_for_ever_ends_the_rounds_with_a_message_and_no_update(
    tiny, files, tmp_path, capfd
):
    """AReaL#450: the loop for a full batch never ended."""
    changes = dict(resample_tries=3, reward=dict(functions=("quarter",)), num_steps=1)
    directory = train(settings(tiny, files, tmp_path, **changes), 2)
    assert (
        "warning: step 1 lacks 4 groups with spread after --resample-tries 3"
        in capfd.readouterr().out
    )
    assert largest_difference(weights(directory), load_file(f"{tiny}/model.safetensors")) == 0
    [record] = records(directory)
    assert (
        record["reward/mean"] == 0.25
        and record["reward/frac_zero_std"] == 1
        and "actor/grad_norm" not in record
    )


def test_the_logged_reward_is_the_tasks_whatever_is_filtered_or_penalised(tiny, files, tmp_path):
    """trl#6369: the curve moved although the task's reward did not."""
    changes = dict(advantage=dict(overlong_buffer=6), reward=dict(functions=("quarter",)))
    for record in records(train(settings(tiny, files, tmp_path, **changes))):
        assert record["reward/mean"] == 0.25 and record["reward/std"] == 0
        assert record["actor/grad_norm"] > 0  # lengths differ, so penalties do


def test_several_data_sets_are_mixed_by_their_weights(tiny, files, tmp_path):
    changes = dict(
        data_paths=(str(files / "16.jsonl"), str(files / "3.jsonl")), data=dict(weights=(3.0, 1.0))
    )
    directory = train(settings(tiny, files, tmp_path, num_steps=4, **changes))
    assert all(f"reward/{name}/mean" in records(directory)[0] for name in ("16.jsonl", "3.jsonl"))
    from_second = sum(
        sample["prompt"] in ("00=", "0+0=") or sample["prompt"].startswith(("1+1", "2++2"))
        for sample in samples(directory)
    )
    assert 4 <= from_second <= 8  # 4 of 16, and the first set has three such prompts as well


# Stop and go on


@pytest.mark.slow
def test_on_another_number_of_ranks_a_run_goes_on_with_the_same_prompts_and_losses(
    tiny, files, tmp_path
):
    """Two steps on 2 ranks, two on 1, two on 4, as six on 2; an epoch ends with the fourth.
    Responses follow from the prompt alone. Sums over ranks are rounded in another order.
    """

    def trained(directory, num_steps, world_size, **run):
        asked = directory / "prompts"

        def watched(engine, scorer, tokenizer, prompts, *more):
            if dist.get_rank() == 0:
                with open(asked, "a") as file:
                    file.writelines(f"{prompt.text}\n" for prompt in prompts)
            return draw(engine, scorer, tokenizer, prompts, *more)

        directory.mkdir(exist_ok=True)
        args = settings(
            tiny, files, directory, num_steps=num_steps, run=dict(save_every=2) | run, **changes
        )
        found = train(args, world_size, **SCRIPTED | {"sampling.draw": watched})
        return records(found), asked.read_text().splitlines()

    changes = dict(loss=dict(kl_coef=0.1), refresh_every=3, learning_rate=1e-3)

    whole, expected = trained(tmp_path / "whole", 6, 2)
    for num_steps, world_size in ((2, 2), (4, 1), (6, 4)):
        resume = num_steps > 2
        parts, order = trained(tmp_path / "parts", num_steps, world_size, resume=resume)
    assert order == expected and len(order) == 6 * 4 and len(set(order)) == 16
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "reward/mean"):
        found = [record[name] for record in parts]
        assert found == pytest.approx([record[name] for record in whole], rel=1e-4, abs=1e-6), name
    assert any(record["actor/pg_loss"] for record in parts)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_five_steps_and_five_more_are_ten(tiny, files, tmp_path, world_size):
    """prime-rl#3164, vllm-project/speculators#1049: data, moments, seeds or the reference began
    again. With a refreshed reference, several minibatches and a learning rate that changes;
    bit-equal on a CPU.
    """
    changes = dict(
        num_steps=10,
        loss=dict(kl_coef=0.1),
        refresh_every=3,
        learning_rate=1e-3,
        batch=dict(num_epochs=2),
        optim=dict(warmup_steps=2, decay="constant"),
    )
    whole = train(settings(tiny, files, tmp_path / "whole", **changes), world_size)
    run = dict(save_every=5)
    train(
        settings(tiny, files, tmp_path / "parts", **changes | dict(num_steps=5, run=run)),
        world_size,
    )
    parts = train(
        settings(tiny, files, tmp_path / "parts", **changes | dict(run=run | dict(resume=True))),
        world_size,
    )
    assert all(torch.equal(weights(parts)[name], x) for name, x in weights(whole).items())
    assert samples(parts) == samples(whole)
    for name in ("step", "actor/lr", "actor/kl_loss", "actor/grad_norm", "reward/mean"):
        assert [record[name] for record in records(parts)] == [
            record[name] for record in records(whole)
        ]


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_a_run_that_has_all_its_steps_is_exported_and_ends(tiny, files, tmp_path, entry):
    """prime-rl#3352: a resume with nothing left to do waited for ever. Here the model was lost, or
    not yet written when the job was stopped.
    """
    run = dict(save_every=2)
    whole = train(settings(tiny, files, tmp_path, entry, run=run))
    expected = weights(whole)
    written = (whole / "metrics.jsonl").read_text()
    for file in (whole / "hf").iterdir():
        file.unlink()
    again = train(settings(tiny, files, tmp_path, entry, run=run | dict(resume=True)))
    assert largest_difference(weights(again), expected) == 0
    assert (again / "metrics.jsonl").read_text() == written


def test_a_run_starts_from_an_earlier_ones_settings(tiny, files, tmp_path, monkeypatch):
    args = settings(
        tiny, files, tmp_path, num_steps=1, loss=dict(clip_high=0.3), data=dict(weights=(2.0,))
    )
    file = train(args) / "config.json"
    assert parse(monkeypatch, "--config", str(file)) == args
    assert (
        json.loads(file.read_text())["run"]["resume"] is False
    )  # also that of a resumed run: it starts a new one
    changed = parse(
        monkeypatch, "--config", str(file), "--loss.clip-high", "0.4", "--num-steps", "7"
    )
    assert (changed.loss.clip_high, changed.num_steps, changed.data.weights) == (0.4, 7, (2.0,))


@pytest.mark.parametrize("changes", [dict(num_steps=1), dict(num_steps=3, eval_every=2)])
@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_the_last_evaluation_is_of_the_model_that_is_exported(
    tiny, files, tmp_path, entry, changes
):
    """tinker-cookbook#736, prime-rl#835, #3385: the last one measured the weights before the last
    update, and what was saved was never measured.
    """

    def watched(engine, *arguments):
        torch.save(engine.model.state_dict(), tmp_path / "evaluated.pt")
        return evaluate(engine, *arguments)

    base = dict(eval_paths=(str(files / "7.jsonl"),), eval_every=1, learning_rate=3e-2)
    args = settings(tiny, files, tmp_path, entry, **base | changes)
    directory = train(args, **{"sampling.evaluate": watched})
    assert "eval/reward" in records(directory)[-1]
    evaluated = torch.load(tmp_path / "evaluated.pt")
    exported = weights(directory)
    assert largest_difference({n: evaluated[n] for n in exported}, exported) == 0
    prompts = [json.loads(line)["prompt"] for line in (files / "7.jsonl").open()]
    expected = [REWARDS["spread"](text) for text in greedy_texts(directory / "hf", prompts, 6)]
    assert records(directory)[-1]["eval/reward"] == pytest.approx(sum(expected) / 7, abs=1e-12)


def greedy_texts(directory, prompts, max_new_tokens):
    """What Transformers answers by the model in a directory, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
        yield tokenizer.decode(output[0, ids.input_ids.shape[1] :], skip_special_tokens=True)


# The export


def greedy_prompts():
    return [[2 + (i * j + i) % 12 for j in range(1 + i % 7)] for i in range(64)]


@pytest.fixture(scope="module")
def trained(tiny, files, tmp_path_factory):
    """A run of two ranks that has saved its state; its model has several stop ids, which the export
    must keep.
    """
    return train(
        settings(tiny, files, tmp_path_factory.mktemp("trained"), run=dict(save_every=2)), 2
    )


@pytest.fixture(scope="module")
def trainers_answers(tiny, trained):
    """Greedy answers to 64 prompts of the trainer's own weights, from its saved state."""

    def job():
        policy = sharded(tiny)
        state = TrainState(policy, torch.optim.AdamW(policy.parameters()))
        assert load(trained / "checkpoints", {"policy": state}) == 2
        engine = Engine(
            HfBackend,
            tiny,
            RolloutConfig("hf", 12),
            max_prompt_tokens=16,
            num_samples=64,
            stop_ids=[1],
        )
        with engine.awake():
            sync_weights(policy, engine, dtype=torch.float32)
            return [
                r.response_ids.tolist()
                for r in engine.generate(greedy_prompts(), 1, temperature=0.0)
            ]

    return run_ranks(1, job)[0]


def test_the_export_is_the_trainers_model_for_transformers(tiny, trained, trainers_answers):
    """instructlab/training#477: fp32 was written while the config said bf16; verl#1288: no
    tokenizer, no generation_config. A tied head is one tensor.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    directory = trained / "hf"
    tensors = load_file(directory / "model.safetensors")
    assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"
    assert {x.dtype for x in tensors.values()} == {torch.float32}
    assert (
        tensors.keys() == load_file(f"{tiny}/model.safetensors").keys()
        and "lm_head.weight" not in tensors
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (
        tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="
        and tokenizer.eos_token_id == 1
    )
    eos_ids = {GenerationConfig.from_pretrained(place).eos_token_id for place in (directory, tiny)}
    assert eos_ids == {1}
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    for prompt, answer in zip(greedy_prompts(), trainers_answers, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=1
        )
        assert output[0, len(prompt) :].tolist() == answer
    assert len({tuple(answer) for answer in trainers_answers}) > 8


@pytest.mark.slow
def test_the_export_is_the_trainers_model_for_vllm(trained, trainers_answers):
    def setup():
        sizes = dict(max_prompt_tokens=16, num_samples=64, stop_ids=[1])
        config = RolloutConfig(max_response_tokens=12)
        return Engine(VllmBackend, str(trained / "hf"), config, **sizes)

    def job(engine):
        engine.state = "ready"  # no sync: what it has is what it has read
        return [
            r.response_ids.tolist() for r in engine.generate(greedy_prompts(), 1, temperature=0.0)
        ]

    with lab(1, setup) as on_ranks:
        assert on_ranks(job) == [trainers_answers]


# Bad input


def parse(monkeypatch, *flags):
    """The settings that this command line means."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", *flags])
    return command_line(grpo.Args(), addition.SETTINGS, grpo.__doc__)


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--group-size 1", ["--group-size 1", "at least 2", "try 8"]),
        ("--prompts-per-step 0", ["--prompts-per-step 0", "at least 1"]),
        (
            "--prompts-per-step 7",
            ["--prompts-per-step 7", "--num-minibatches 2", "try --prompts-per-step 8"],
        ),
        ("--tokens-per-row 15", ["--tokens-per-row 15", "at least 16", "--data.max-prompt-tokens"]),
        ("--rollout.temperature 0", ["--rollout.temperature 0.0", "from 0.01", "try 1.0"]),
        ("--rollout.top-p 0.9", ["--rollout.top-p 0.9", "must be 1"]),
        ("--num-steps 0", ["--num-steps 0", "at least 1"]),
        ("--learning-rate 0", ["--learning-rate 0.0", "above 0"]),
        ("--loss.kl k1", ["--loss.kl", "k1", "k2", "k3"]),
        ("--loss.clip-low 0", ["--loss.clip-low 0.0", "try 0.2"]),
        (
            "--rollout.quantization fp8_per_channel --loss.importance off",
            ["--loss.importance off", "token"],
        ),
        ("--optim.max-grad-norm 0", ["--optim.max-grad-norm 0.0", "above 0"]),
        ("--data.max-prompt-tokens 0", ["--data.max-prompt-tokens 0", "at least 1"]),
        ("--reward.functions", ["--reward.functions", "at least one"]),
        ("--temperature 0.7", ["--temperature", "--rollout.temperature"]),
        ("--eval-data x.jsonl --eval-every 0", ["--eval-data x.jsonl", "with --eval-every 20"]),
        ("--eval-every -1", ["--eval-every -1", "at least 0"]),
        ("--eval-samples -1", ["--eval-samples -1", "at least 0"]),
        ("--eval-samples 4 --eval-every 0", ["--eval-samples 4", "with --eval-every"]),
        (
            "--advantage.overlong-buffer 9 --rollout.max-response-tokens 8",
            ["--advantage.overlong-buffer 9", "at most"],
        ),
        (
            "--group-size 1 --advantage.baseline batch --resample-tries 2",
            ["--resample-tries 2", "must be 1 with groups"],
        ),
        ("--optim.betas 0.9 1.5", ["--optim.betas 0.9 1.5", "[0, 1)", "0.98"]),
        ("--nonsense 3", ["--nonsense"]),
        ("--config nowhere.json", ["--config nowhere.json", "no such file"]),
        ("--config", ["--config", "expected one argument"]),
    ],
)
def test_a_bad_setting_is_refused_in_a_line_with_its_value_the_rule_and_a_choice(
    monkeypatch, capfd, flags, parts
):
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, *flags.split())
    assert stop.value.code not in (0, None)
    printed = capfd.readouterr()
    lines = [
        line
        for line in (printed.err + printed.out).splitlines()
        if all(part in line for part in parts)
    ]
    assert lines, printed.err


def test_every_choice_that_a_message_proposes_is_accepted():
    """huggingface/trl#2858: "7 x 1 must be divisible by 8; valid: [7]". 30 random bad settings:
    what the message says to try is tried, until all is well.
    """
    draw = random.Random(0)
    num_bad = 0
    while num_bad < 30:
        values = {
            "--prompts-per-step": draw.choice([0, 1, 7, 12, 64]),
            "--num-minibatches": draw.choice([1, 2, 5]),
            "--group-size": draw.choice([1, 2, 8]),
            "--tokens-per-row": draw.choice([10, 1536, 16384]),
            "--rollout.max-response-tokens": draw.choice([0, 8, 1024]),
            "--data.max-prompt-tokens": draw.choice([0, 512]),
            "--rollout.temperature": draw.choice([0.0, 1.0, 3.0]),
            "--rollout.top-p": draw.choice([0.9, 1.0]),
            "--loss.clip-low": draw.choice([0.0, 0.2]),
            "--rollout.tensor-parallel-size": draw.choice([1, 2]),
        }
        messages = []
        while (message := refusal(values)) and len(messages) < 12:
            messages.append(message)
            named = [
                flag
                for flag in values
                if re.search(rf"{flag} {re.escape(str(values[flag]))}\b", message)
            ]
            assert named and "\n" not in message, message
            proposed = re.findall(r"try (--[\w.-]+) ([\d.]+)", message)
            if not proposed:
                proposed = [(named[0], re.search(r"(?:try|at least|be) ([\d.]+\d|\d)", message)[1])]
            flag, value = proposed[0]
            values[flag] = type(values[flag])(float(value))
        assert not message, (messages, values)
        num_bad += bool(messages)


def refusal(values):
    """The message that these settings get, or None."""
    nested = {}
    groups = {"data": {}, "rollout": {}, "loss": {}}
    for flag, value in values.items():
        group, _, name = flag.removeprefix("--").replace("-", "_").rpartition(".")
        groups.setdefault(group or "batch", {})[name] = value
    try:
        from_json(grpo.Args(), nested | groups)
    except ValueError as error:
        return str(error)
    return None


def refused(args, world_size=1):
    """The one line with which the trainer ends, before a model is loaded."""

    def not_reached(*_, **__):
        raise AssertionError("a model is loaded")

    with pytest.raises(SystemExit) as stop:
        train(args, world_size, **{"model.load_policy": not_reached})
    message = str(stop.value.code)
    assert message.startswith("error: ") and "\n" not in message, message
    return message


def test_bad_data_are_refused_before_a_model_is_loaded(tiny, files, tmp_path):
    def message(text=None, name="x.jsonl", **changes):
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        return refused(
            settings(tiny, files, tmp_path / "out", data_paths=(str(file),), **changes)
        ), str(file)

    found, file = message(name="nowhere.jsonl")
    assert f"--data {file}: no such file" in found
    found, file = message("")
    assert f"--data {file}: is empty" in found
    found, file = message('{"text": "1+1="}\n')
    assert f"--data {file}, row 1: has columns ['text']; needs `prompt` or `question`" in found
    long = (
        '{"prompt": "1+1=", "answer": "2"}\n'
        + json.dumps({"prompt": "1" * 50, "answer": "2"})
        + "\n"
    )
    found, file = message(long, data=dict(long_prompts="refuse"))
    assert (
        f"--data {file}: 1 of 2 prompts exceed --data.max-prompt-tokens 16; "
        "the longest has 50 tokens" in found
    )
    scorer = tmp_path / "scores.py"
    scorer.write_text("def by_level(response, level): return 1.0")
    found, _ = message(long, reward=dict(functions=(f"{scorer}:by_level",)))
    assert (
        f"--reward.functions {scorer}:by_level: wants level, which is no column; "
        "x.jsonl has answer, prompt" in found
    )
    found, _ = message(eval_every=1, name="16.jsonl", text=long.splitlines()[0])
    assert "--eval-every 1: must be 0, or with --eval-data FILE" in found
    found = refused(settings(str(tmp_path / "no-model"), files, tmp_path / "out"))
    assert f"--model {tmp_path / 'no-model'}: no such directory" in found
    found = refused(settings(tiny, files, tmp_path / "out", reward=dict(functions=("nonsense",))))
    assert "nonsense" in found and "exact" in found


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
@pytest.mark.parametrize("rows", [0, 2], ids=["NaN", "another shape"])
def test_a_model_that_does_not_load_leaves_the_earlier_run_where_it_is(
    tiny, files, tmp_path, entry, rows
):
    """A new user's finding: the good run of that name was renamed, and a traceback stood there."""
    tensors = load_file(f"{tiny}/model.safetensors")
    name = "model.norm.weight"
    tensors[name] = torch.zeros(rows) if rows else tensors[name] * math.nan
    shutil.copytree(tiny, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    args = settings(str(tmp_path / "model"), files, tmp_path / "out", entry)
    earlier = tmp_path / "out" / "run" / "config.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    with pytest.raises(SystemExit, match=f"^error: {tmp_path / 'model'}: {name} ") as stop:
        train(args)
    assert "\n" not in str(stop.value.code)
    assert earlier.read_text() == "{}" and len(list((tmp_path / "out").iterdir())) == 1


def test_prompts_over_the_limit_are_dropped_and_counted(tiny, files, tmp_path, capfd):
    """huggingface/trl#3180: a prompt over the limit broke the run hours later, or was cut in
    silence.
    """
    file = tmp_path / "long.jsonl"
    rows = [{"prompt": "1" * (17 if i == 3 else 5), "answer": ""} for i in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    directory = train(settings(tiny, files, tmp_path / "out", data_paths=(str(file),), num_steps=1))
    assert (
        f"{file}: 1 of 10 prompts exceed --data.max-prompt-tokens 16 and are dropped"
        in capfd.readouterr().out
    )
    assert {sample["prompt"] for sample in samples(directory)} == {"11111"}


def test_more_tokens_than_the_model_has_positions_are_refused(tiny, files, tmp_path):
    """verl#5965: a limit that only the engine knew of failed late."""
    changes = dict(data=dict(max_prompt_tokens=100), rollout=dict(max_response_tokens=100))
    found = refused(settings(tiny, files, tmp_path, **changes))
    assert (
        "has 128 positions, --data.max-prompt-tokens + --rollout.max-response-tokens "
        "want 200; lower one" in found
    )


def run_command(*arguments, num_ranks=0, program=None, **environment):
    """Seconds, exit code and output of `python grpo.py ...`, under torchrun if num_ranks."""
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        if num_ranks
        else []
    )
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK")
    }
    began = time.monotonic()
    command = [sys.executable, *torchrun, str(program or ROOT / "grpo.py"), *arguments]
    job = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
    )
    return time.monotonic() - began, job.returncode, job.stdout + job.stderr


SMALL = "--data.max-prompt-tokens", "16", "--rollout.max-response-tokens", "8", "--model"


def test_a_refused_command_takes_less_than_10_seconds_also_if_it_reads_data(tiny):
    """Seconds of this program's own work, so that the test holds on a machine that does other
    things too.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _, code, output = run_command("--data", "nowhere.jsonl", *SMALL, tiny)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code != 0 and "error: --data nowhere.jsonl: no such file" in output
    assert "Traceback" not in output
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


# With torchrun and vLLM


def flags(tiny, files, out, *more):
    return [
        "--model",
        tiny,
        "--data",
        str(files / "16.jsonl"),
        "--output-dir",
        str(out),
        "--name",
        "run",
        "--num-steps",
        "2",
        "--prompts-per-step",
        "4",
        "--group-size",
        "4",
        "--tokens-per-row",
        "64",
        "--data.max-prompt-tokens",
        "16",
        "--rollout.max-response-tokens",
        "6",
        "--rollout.temperature",
        "0.7",
        "--learning-rate",
        "1e-2",
        "--reward.functions",
        f"{files}/rewards.py:spread",
        "--reward.num-workers",
        "1",
        "--log.plot-every",
        "0",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_vllm_under_torchrun_samples_from_the_trainers_weights(
    tiny, files, tmp_path, tensor_parallel_size
):
    """verify_sync compares all engine weights at each step; the mismatch of the two
    log-probabilities is fp32's.
    """
    more = "--verify-sync", "--rollout.tensor-parallel-size", str(tensor_parallel_size)
    _, code, output = run_command(*flags(tiny, files, tmp_path, *more), num_ranks=2)
    assert code == 0, output[-3000:]
    for record in records(tmp_path / "run"):
        assert record["rollout_corr/abs_diff_max"] < 1e-4 and record["actor/grad_norm"] > 0


PHASES = {
    "loading": "model.load_policy = fail",
    "save": "checkpoint.save = fail",
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_failure_on_one_rank_in_any_phase_ends_the_job_with_its_traceback(
    tiny, files, tmp_path, phase
):
    """OpenRLHF#624: the other ranks waited for the watchdog, and the cause was not to be seen."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nimport checkpoint, grpo, model, rollout, run\n"
        "def fail(*args, **options):\n    raise RuntimeError('on purpose')\n"
        f"if os.environ['RANK'] == '1':\n    {PHASES[phase]}\n"
        "grpo.main(run.command_line(grpo.Args(), {}, ''))\n"
    )
    more = "--rollout.engine", "hf", "--save-every", "1"
    seconds, code, output = run_command(
        *flags(tiny, files, tmp_path, *more), num_ranks=2, program=program
    )
    assert code != 0 and seconds < 60
    assert "[rank 1] Traceback" in output and "RuntimeError: on purpose" in output


@pytest.mark.slow
def test_a_reward_that_fails_on_one_rank_ends_the_job(tiny, files, tmp_path):
    """huggingface/trl#3079: NaN advantages, a loss of 0.0, and a training that "completes"."""
    more = ["--rollout.engine", "hf", "--reward.functions", f"{files}/rewards.py:fails"]
    seconds, code, output = run_command(*flags(tiny, files, tmp_path, *more), num_ranks=2)
    assert code != 0 and seconds < 60 and "reward function" in output and "max-error-frac" in output


@pytest.mark.slow
def test_two_runs_start_at_once_on_one_host(tiny, files, tmp_path):
    """huggingface/trl#3979: the second job died, its port was taken."""
    commands = [
        [
            sys.executable,
            str(ROOT / "grpo.py"),
            *flags(tiny, files, tmp_path / name, "--rollout.engine", "hf"),
        ]
        for name in "ab"
    ]
    with contextlib.ExitStack() as stack:
        quiet = dict(cwd=ROOT, stdout=subprocess.DEVNULL)
        jobs = [stack.enter_context(subprocess.Popen(command, **quiet)) for command in commands]
        assert [job.wait(timeout=200) for job in jobs] == [0, 0]


def test_help_names_every_default(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--help")
    text = capsys.readouterr().out
    for group in asdict(grpo.Args()).values():
        for name in group if isinstance(group, dict) else ():
            assert name.replace("_", "-") in text, name
    assert "--loss.normalize" in text and "(default: token)" in text
    assert "--config FILE" in text  # a new user's finding: it stood in the README alone


# What a run would not show by itself


def test_the_second_epoch_has_a_ratio(tiny, files, tmp_path):
    """One minibatch, two passes: the second one's old log-probabilities are those from before the
    first.
    """

    def watched(*arguments):
        loss, stats = actor_loss(*arguments)
        with open(tmp_path / "ppo_kl", "a") as file:
            print(stats["actor/ppo_kl"].item(), file=file)
        return loss, stats

    changes = dict(num_steps=1, batch=dict(num_minibatches=1, num_epochs=2))
    train(settings(tiny, files, tmp_path, **changes), **{"losses.actor_loss": watched})
    first, second = map(float, (tmp_path / "ppo_kl").read_text().split())
    assert first == 0 and second > 1e-5


@pytest.mark.parametrize(
    "scale_by_std, expected",
    [(True, [1.5, -0.5, -0.5, -0.5]), (False, [0.75, -0.25, -0.25, -0.25])],
)
def test_advantages_are_scaled_only_where_the_settings_say(scale_by_std, expected):
    """Of rewards 1 0 0 0: the mean is 1/4, the deviation 1/2."""
    changes = dict(advantage=dict(scale_by_std=scale_by_std), batch=dict(group_size=4))
    groups = groups_of([[1.0, 0.0, 0.0, 0.0]], [[0, 0, 0, 0]])
    found = grpo.advantages_of(from_json(grpo.Args(), changes), groups)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_an_overlong_response_loses_reward():
    """Responses of 2 and 4 tokens, a limit of 4 and a buffer of 2: the second loses 1."""
    rollouts = [
        Rollout(torch.tensor([3]), torch.ones(n).long(), torch.zeros(n), n == 4) for n in (2, 4)
    ]
    changes = dict(advantage=dict(overlong_buffer=2, scale_by_std=False), batch=dict(group_size=2))
    args = from_json(grpo.Args(), changes | dict(rollout=dict(max_response_tokens=4)))
    found = grpo.advantages_of(args, [grpo.Group(0, None, rollouts, [1.0, 1.0])])
    assert found.tolist() == [[0.5, -0.5]]


def test_samples_of_a_group_are_in_one_minibatch():
    groups = groups_of([[1.0, 0.0], [0.0, 1.0]], [[0, 0], [0, 0]])
    batch = dict(prompts_per_step=2, group_size=2, num_minibatches=2)
    args = from_json(grpo.Args(), dict(batch=batch))
    sequences, minibatches = grpo.to_sequences(
        args, groups, torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    )
    assert minibatches == [0, 0, 1, 1]
    assert [s["advantages"][-1].item() for s in sequences] == [1.0, -1.0, -1.0, 1.0]


class Rounds:
    """Stands for the sampler, the stream of prompts and the rule; `rewards` of each round."""

    def __init__(self, *rewards):
        self.rewards = iter(rewards)
        self.seeds = []

    def take(self, num_prompts):
        return [Prompt([3], "1", "", "") for _ in range(num_prompts)]

    def draw(self, engine, scorer, tokenizer, prompts, size, seed):
        self.seeds.append(seed)
        one = Rollout(torch.tensor([3]), torch.tensor([4]), torch.tensor([-1.0]), False)
        return {position: [one] * size for position in range(len(prompts))}

    def collect(self, num_samples):
        rewards = next(self.rewards)
        assert len(rewards) == num_samples
        return rewards, {}


def sampled(monkeypatch, rounds, tries):
    """The groups of 2 that a step of 4 prompts keeps."""
    monkeypatch.setattr("grpo.sampling.draw", rounds.draw)
    batch = dict(prompts_per_step=4, group_size=2)
    args = from_json(grpo.Args(), dict(batch=batch, resample_tries=tries))
    return grpo.sample_groups(args, 0, None, rounds, None, rounds, Metrics())


def test_groups_of_two_rounds_have_positions_of_their_own(monkeypatch):
    """Two of four have spread, then two of two. Minibatches are cut by positions."""
    rounds = Rounds([0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0])
    kept = sampled(monkeypatch, rounds, tries=2)
    assert [group.position for group in kept] == [0, 1, 4, 5]
    assert [group.rewards for group in kept] == [[0.0, 1.0]] * 2 + [[1.0, 0.0]] * 2


def test_each_round_of_a_step_has_a_seed_of_its_own(monkeypatch):
    """With one seed the rounds would draw what has no spread again."""
    rounds = Rounds([0.0] * 8, [0.0] * 8, [0.0, 1.0] * 4)
    assert len(sampled(monkeypatch, rounds, tries=3)) == 4
    assert len(set(rounds.seeds)) == 3


def test_verify_sync_runs_after_each_sync(tiny, files, tmp_path):
    def checked(*arguments, **options):
        verify_sync(*arguments, **options)
        with open(tmp_path / "checks", "a") as file:
            print("verified", file=file)

    args = settings(tiny, files, tmp_path, verify_sync=True)
    train(args, **{"reshard.verify_sync": checked})
    assert (tmp_path / "checks").read_text().split() == ["verified"] * 2


def test_the_reference_is_refreshed_after_every_so_many_steps(tiny, files, tmp_path):
    """Every 2: the policy is the reference in steps 0 and 2, and has left it in 1 and 3."""
    changes = dict(num_steps=4, refresh_every=2, loss=dict(kl_coef=0.01))
    args = settings(tiny, files, tmp_path, batch=dict(num_minibatches=1), **changes)
    distances = [record["actor/kl_loss"] for record in records(train(args))]
    assert [x > 0.01 for x in distances] == [False, True, False, True]
    assert distances[0] == distances[2] == 0


def test_the_rate_is_that_of_the_schedule(tiny, files, tmp_path):
    """Half of the peak in the one step of warm-up, the peak, and a tenth of it in the last."""
    changes = dict(num_steps=3, optim=dict(warmup_steps=1, decay="linear"))
    found = records(train(settings(tiny, files, tmp_path, **changes)))
    assert [record["actor/lr"] for record in found] == pytest.approx([0.5e-2, 1e-2, 1e-3])


def test_the_seed_orders_the_prompts(tiny, files, tmp_path):
    orders = []
    for seed in (0, 1):
        args = settings(tiny, files, tmp_path / str(seed), seed=seed, num_steps=1)
        orders.append([sample["prompt"] for sample in samples(train(args, **SCRIPTED))])
    assert len(orders[0]) == 4 and orders[0] != orders[1]


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_a_data_set_of_nearly_all_weight_gives_nearly_all_prompts(tiny, files, tmp_path, entry):
    """The larger set by far has the smaller weight: 3 prompts of the other one in 2 steps of 4."""
    paths = tuple(str(files / name) for name in ("16.jsonl", "3.jsonl"))
    changes = dict(data_paths=paths, data=dict(weights=(1.0, 1e6)))
    found = samples(train(settings(tiny, files, tmp_path, entry, **changes), **SCRIPTED))
    assert len(found) == 8 and len({sample["prompt"] for sample in found}) == 3
