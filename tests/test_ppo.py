"""PPO: critic and policy learn from the same rows; what a batch of rollouts fixes is computed once;
refusals.
"""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from jobs import SCRIPTED, distance, largest_difference, records, samples, settings, train, weights
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import save_tiny

import grpo
import ppo
from advantages import estimate
from attention import use_packed_attention
from examples import addition
from logprobs import token_values
from losses import actor_loss, critic_loss
from optim import optimizer_step
from packing import pack, sequence
from reshard import verify_sync
from run import command_line

SMALL = dict(batch=dict(prompts_per_step=8, group_size=1, num_minibatches=2, tokens_per_row=512))


def job(tiny, files, out, **changes):
    for name, value in SMALL.items():
        changes[name] = value | changes.get(name, {})
    return settings(tiny, files, out, entry=ppo, **changes)


def random_reward_model(directory, seed=0):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    path = save_tiny(directory, seed=seed)
    config = AutoConfig.from_pretrained(path, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


# The critic


def test_a_value_belongs_to_the_state_before_its_token_and_neighbours_do_not_matter(tmp_path):
    from transformers import AutoModelForSequenceClassification

    path = random_reward_model(tmp_path)
    ids = [torch.tensor([3, 4, 5, 6, 7, 8]), torch.tensor([9, 2, 3, 9, 1])]
    plain = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    expected = [
        plain.score(plain.model(x[None], use_cache=False).last_hidden_state)[0, :, 0] for x in ids
    ]
    packed = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    use_packed_attention(packed)
    [row] = pack([sequence(ids[0][:2], ids[0][2:]), sequence(ids[1][:1], ids[1][1:])], 64)
    values = token_values(packed, row)
    assert torch.allclose(
        values[2:6], expected[0][1:5], atol=1e-5
    )  # of the tokens at 2..5, from the states 1..4
    assert torch.allclose(values[7:11], expected[1][0:4], atol=1e-5)
    assert values[[0, 1, 6]].abs().max() == 0


def test_a_policys_checkpoint_gets_a_critic_of_zeros_and_a_reward_model_must_have_its_head(
    tiny, tmp_path
):
    from torch.distributed.device_mesh import init_device_mesh

    from model import load_critic

    reward_path = random_reward_model(tmp_path)

    def loaded():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        [row] = pack([sequence(torch.tensor([3, 4]), torch.tensor([5, 6, 1]))], 8)
        found = []
        for path, trainable in ((tiny, True), (reward_path, True), (reward_path, False)):
            critic = load_critic(path, mesh, trainable=trainable)
            use_packed_attention(critic)
            found.append(token_values(critic, row))
            assert found[-1].requires_grad == trainable
        with pytest.raises(
            ValueError,
            match="1 tensors of Qwen2ForSequenceClassification are missing: score.weight",
        ):
            load_critic(tiny, mesh, trainable=False)
        return [x.detach() for x in found]

    for zero, kept, frozen in run_ranks(2, loaded):
        assert zero.abs().max() == 0 and kept.abs().max() > 1e-3 and torch.equal(kept, frozen)


# The KL penalty


def test_the_run_steers_the_weight_of_the_penalty(tiny, files, tmp_path):
    """A KL far below its target: a fifth less in each step."""
    gae = dict(kl_coef=0.1, kl_target=100.0, kl_horizon=8)
    found = records(train(job(tiny, files, tmp_path, num_steps=3, gae=gae)))
    assert [r["actor/reward_kl_penalty_coeff"] for r in found] == pytest.approx([0.1, 0.08, 0.064])


def test_a_kl_penalty_in_the_reward_holds_the_policy_back(tiny, files, tmp_path):
    # The KL term of 1e-9 is there so that the KL is measured in the run without the penalty as
    # well.
    changes = dict(
        num_steps=10, learning_rate=3e-3, loss=dict(kl_coef=1e-9), batch=dict(group_size=8)
    )
    free = records(train(job(tiny, files, tmp_path / "free", **changes)))
    held = records(train(job(tiny, files, tmp_path / "held", gae=dict(kl_coef=5.0), **changes)))
    assert held[-1]["actor/kl_loss"] < 0.5 * free[-1]["actor/kl_loss"]
    assert (
        held[-1]["actor/reward_kl_penalty_coeff"] == 5.0
        and "actor/reward_kl_penalty" not in free[-1]
    )


# The loop


def test_weights_are_the_same_on_1_and_3_ranks(tiny, files, tmp_path):
    """2 minibatches x 2 epochs x 2 steps of both, on one rank in a row each, on three in many rows.
    Sums in another order differ by rounding, and where a gradient is nearly 0 Adam makes of that a
    step of the rate's size, in whichever direction: how far single weights are apart depends on the
    processor. There are few of those, so the distance of all weights is 1e-5 of the way that they
    went; a rank with a tenth more weight than the others makes it above 1e-2.
    """
    runs = []
    for world_size, tokens_per_row in ((1, 512), (3, 22)):
        changes = dict(batch=dict(num_epochs=2, group_size=4, tokens_per_row=tokens_per_row))
        changes |= dict(learning_rate=1e-3, critic=dict(learning_rate=1e-3))
        args = job(tiny, files, tmp_path / str(world_size), **changes)
        runs.append(train(args, world_size, **SCRIPTED))
    expected, found = map(weights, runs)
    before = load_file(f"{tiny}/model.safetensors")
    assert distance(found, expected) < 1e-3 * distance(before, expected)
    names = "critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm", "actor/pg_loss"
    for theirs, ours in zip(*map(records, runs), strict=True):
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def test_the_critic_alone_learns_during_its_warm_up(tiny, files, tmp_path):
    changes = dict(critic=dict(warmup_steps=2, learning_rate=1e-2), optim=dict(warmup_steps=1))
    run = train(job(tiny, files, tmp_path, num_steps=3, **changes))
    assert largest_difference(weights(run), load_file(f"{tiny}/model.safetensors")) > 0
    found = records(run)
    assert all(record["critic/grad_norm"] > 0 for record in found)
    assert ["actor/grad_norm" in record for record in found] == [False, False, True]
    # The policy's own warm-up begins with its first step: half of the peak, not the peak.
    assert [record.get("actor/lr") for record in found] == [None, None, 0.5e-2]


def test_a_critic_that_never_lets_the_policy_learn_is_refused(tiny, files, tmp_path):
    """OpenRLHF#1356, NeMo-RL#3821: the policy was not trained at all, and nobody said so."""
    for steps in (2, 5):
        with pytest.raises(ValueError, match=f"--critic.warmup-steps {steps}: must be below"):
            job(tiny, files, tmp_path, num_steps=2, critic=dict(warmup_steps=steps))


def test_critic_and_policy_have_their_own_rates_and_starts_and_evaluation_and_checks_run(
    tiny, files, tmp_path
):
    def checked(*arguments, **options):
        verify_sync(*arguments, **options)
        with open(tmp_path / "checks", "a") as file:
            print("verified", file=file)

    start = random_reward_model(tmp_path / "start")
    changes = dict(
        eval_paths=(str(files / "7.jsonl"),), eval_every=1, verify_sync=True, learning_rate=1e-3
    )
    changes |= dict(critic=dict(learning_rate=3e-3, path=start))
    found = records(
        train(job(tiny, files, tmp_path, **changes), **{"reshard.verify_sync": checked})
    )
    assert [(r["actor/lr"], r["critic/lr"]) for r in found] == [(1e-3, 3e-3)] * 2
    # Before each of the two batches, and before the evaluation of the exported model.
    assert (tmp_path / "checks").read_text().split() == ["verified"] * 3
    # A head of zeros would give a variance of exactly 0.
    assert (
        all(0 <= r["eval/reward"] <= 1 for r in found)
        and abs(found[0]["critic/vf_explained_var"]) > 1e-3
    )
    assert all(r["timing_s/reward"] > 0 and r["timing_s/eval"] > 0 for r in found)


def test_a_batch_of_rollouts_serves_for_several_steps(tiny, files, tmp_path):
    """Sampled in steps 0 and 3; its advantages are computed once, and a new batch gets its own."""
    calls = tmp_path / "calls"

    def counted(rows, config, kl_coef):
        with open(calls, "a") as file:
            print("estimate", file=file)
        return estimate(rows, config, kl_coef)

    run = train(
        job(tiny, files, tmp_path, num_steps=6, rollout_every=3), **{"advantages.estimate": counted}
    )
    assert [("timing_s/rollout" in r, "critic/vf_explained_var" in r) for r in records(run)] == [
        (True, True),
        (False, False),
        (False, False),
    ] * 2
    assert all(record["actor/grad_norm"] > 0 for record in records(run))
    assert len(calls.read_text().splitlines()) == 2
    assert {sample["step"] for sample in samples(run)} == {0, 3}
    # The ratio is to the policy that sampled, so it has moved before the second step's first
    # minibatch.
    assert records(run)[1]["actor/ppo_kl"] > records(run)[0]["actor/ppo_kl"] > 0


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_four_steps_and_four_more_are_eight(tiny, files, tmp_path, world_size):
    """With a critic that begins alone: its policy's optimizer is saved before its first step."""
    changes = dict(num_steps=8, rollout_every=2, learning_rate=1e-3, offload=True)
    changes |= dict(gae=dict(kl_coef=0.1, kl_target=0.01), critic=dict(warmup_steps=5))
    whole = train(job(tiny, files, tmp_path / "whole", **changes), world_size)
    run = dict(save_every=4)
    first = train(
        job(tiny, files, tmp_path / "parts", **changes | dict(num_steps=6, run=run)), world_size
    )
    shutil.rmtree(first / "checkpoints" / "step-000006")  # as if it had died before
    parts = train(
        job(tiny, files, tmp_path / "parts", **changes | dict(run=run | dict(resume=True))),
        world_size,
    )
    assert all(torch.equal(weights(parts)[name], x) for name, x in weights(whole).items())
    for name in ("step", "critic/vf_loss", "actor/reward_kl_penalty_coeff", "actor/grad_norm"):
        assert [record.get(name) for record in records(parts)] == [
            record.get(name) for record in records(whole)
        ]


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_after_the_first_of_two_minibatches_the_ratio_has_moved(tiny, files, tmp_path, entry):
    """torchforge#571: `logprobs - logprobs.detach()` is 0 by construction, and clipping never did
    anything. With one minibatch there is one policy; with two, the second one's ratio is not 1.
    """

    def watched(*arguments):
        loss, stats = actor_loss(*arguments)
        with open(tmp_path / "ppo_kl", "a") as file:
            print(stats["actor/ppo_kl"].item(), file=file)
        return loss, stats

    changes = dict(num_steps=1, batch=dict(num_minibatches=2))
    args = settings(tiny, files, tmp_path, entry, **changes)
    train(args, **{"losses.actor_loss": watched})
    first, second = map(float, (tmp_path / "ppo_kl").read_text().split())
    assert first == 0 and second > 1e-5


def test_beyond_the_target_kl_the_policy_stops_and_the_critic_goes_on(tiny, files, tmp_path):
    """Two steps of 2 minibatches x 2 epochs: 4 of the critic each, and of the policy the first, at
    a KL of 0.
    """
    taken = tmp_path / "steps"

    def counted(model, *rest):
        with open(taken, "a") as file:
            print("critic" if hasattr(model, "score") else "policy", file=file)
        return optimizer_step(model, *rest)

    run = train(
        job(tiny, files, tmp_path, loss=dict(target_kl=1e-9), batch=dict(num_epochs=2)),
        **{"optim.optimizer_step": counted},
    )
    steps = taken.read_text().split()
    assert (steps.count("critic"), steps.count("policy")) == (8, 2)
    for record in records(run):
        assert (record["critic/num_updates"], record["actor/num_updates"]) == (4, 1)


def test_fewer_prompts_than_ranks_and_8_bit_gradients(tiny, files, tmp_path):
    """One of two ranks has no sample, and the critic's head [1, D] has no row on it."""
    reward_model = random_reward_model(tmp_path / "reward")
    changes = dict(
        batch=dict(prompts_per_step=1, num_minibatches=1), reward_model_path=reward_model
    )
    run = train(job(tiny, files, tmp_path, quantize_gradients=True, **changes), 2)
    assert all(record["critic/grad_norm"] > 0 for record in records(run))


@pytest.mark.parametrize("entry", [grpo, ppo])
def test_rewards_that_are_no_numbers_are_counted_and_leave_the_weights_finite(
    tiny, files, tmp_path, entry
):
    """modelscope/ms-swift#8123: one None made all advantages NaN, and the run completed. Evaluation
    counts its own.
    """
    changes = dict(eval_paths=(str(files / "7.jsonl"),), eval_every=1, learning_rate=1e-3)
    changes |= dict(reward=dict(functions=("broken",), max_error_frac=1.0))
    run = train(settings(tiny, files, tmp_path, entry=entry, **changes))
    assert all(x.isfinite().all() for x in weights(run).values())
    assert all(
        record["actor/grad_norm"] > 0 and 0 < record["reward/error_frac"] < 1
        for record in records(run)
    )
    assert all(
        0 < record["eval/error_frac"] < 1 and record["eval/timeout_frac"] == 0
        for record in records(run)
    )


@pytest.mark.parametrize("entry", [grpo, ppo])
def test_8_bit_gradients_make_another_run_but_not_a_very_different_one(
    tiny, files, tmp_path, entry
):
    """A switch that does nothing would give the same weights, one that breaks the sum very
    different ones. The critic's gradients are 8-bit too.
    """
    runs, norms = [], []
    for switch in (False, True):
        changes = dict(
            quantize_gradients=switch, learning_rate=1e-3, critic=dict(learning_rate=1e-3)
        )
        changes = changes if entry is ppo else {k: x for k, x in changes.items() if k != "critic"}
        args = settings(tiny, files, tmp_path / str(switch), entry=entry, **changes)
        run = train(args, 2, **SCRIPTED)
        runs.append(weights(run))
        norms.append(records(run)[0]["actor/grad_norm" if entry is grpo else "critic/grad_norm"])
    assert 0 < largest_difference(*runs) < 1e-2
    assert norms[0] != norms[1] == pytest.approx(norms[0], rel=0.05)


def test_offload_changes_nothing(tiny, files, tmp_path):
    reward_model = random_reward_model(tmp_path / "reward")
    changes = dict(num_steps=3, gae=dict(kl_coef=0.1), reward_model_path=reward_model)
    plain, moved = (
        train(job(tiny, files, tmp_path / str(x), offload=x, **changes)) for x in (False, True)
    )
    assert all(torch.equal(weights(moved)[name], x) for name, x in weights(plain).items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_reward_model_scores_prompt_and_response_at_the_last_token(
    tiny, files, tmp_path, world_size
):
    from transformers import AutoModelForSequenceClassification

    reward_model = random_reward_model(tmp_path / "reward", seed=3)
    run = train(job(tiny, files, tmp_path, num_steps=1, reward_model_path=reward_model), world_size)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    tokenizer = addition.make_tokenizer()
    checked = 0
    for sample in samples(run):
        ids = tokenizer(sample["prompt"] + sample["response"])["input_ids"]
        states = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state
        assert model.score(states[0, -1]).item() == pytest.approx(sample["reward"], abs=1e-4)
        checked += 1
    assert checked >= 4
    assert records(run)[0]["reward/mean"] != 0


@pytest.mark.slow
def test_the_critic_learns_to_expect_the_return_of_a_fixed_policy(tiny, files, tmp_path):
    """Explained variance of at least 0.5 against Monte-Carlo returns; the policy never moves. The
    first token decides the reward, so that four of five values can know it, and the first cannot.
    """
    changes = dict(
        num_steps=80,
        optim=dict(decay="linear"),
        reward=dict(functions=("low",)),
        gae=dict(gae_lambda=1.0),
        critic=dict(warmup_steps=79, learning_rate=3e-3, value_clip=math.inf),
        batch=dict(prompts_per_step=16, group_size=8, num_epochs=4),
    )
    found = [
        r["critic/vf_explained_var"] for r in records(train(job(tiny, files, tmp_path, **changes)))
    ]
    assert found[0] == pytest.approx(0.0, abs=1e-6) and sum(found[-10:]) / 10 >= 0.5


# Bad input


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--rollout-every 0", ["--rollout-every 0", "at least 1"]),
        (
            "--rollout-every 3 --eval-every 4",
            ["--eval-every 4", "multiple of --rollout-every 3", "try 3"],
        ),
        ("--rollout-every 3 --eval-every -3", ["--eval-every -3", "at least 0"]),
        (
            "--rollout-every 3 --eval-every 0 --save-every 4",
            ["--save-every 4", "multiple of --rollout-every 3", "try 3"],
        ),
        (
            "--rollout-every 7 --num-steps 15 --eval-every 0",
            ["--num-steps 15", "multiple of --rollout-every 7", "try 14"],
        ),
        ("--critic.learning-rate 0", ["--critic.learning-rate 0.0", "above 0", "1e-5"]),
        ("--gae.gamma 1.5", ["--gae.gamma 1.5", "[0, 1]"]),
        ("--gae.kl-target 0.1", ["--gae.kl-target", "--gae.kl-coef 0.0", "above 0"]),
        ("--group-size 0", ["--group-size 0", "at least 1"]),
        ("--tokens-per-row 15", ["--tokens-per-row 15", "at least 16"]),
    ],
)
def test_a_bad_setting_is_refused_in_a_line(monkeypatch, capfd, flags, parts):
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        command_line(ppo.Args(), addition.PPO_SETTINGS, ppo.__doc__)
    assert stop.value.code not in (0, None)
    printed = capfd.readouterr().err
    assert any(all(part in line for part in parts) for line in printed.splitlines()), printed


def test_a_reward_model_with_other_tokens_or_none_is_refused(tiny, files, tmp_path):
    path = random_reward_model(tmp_path / "other")
    file = Path(path) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = {key: 13 - i for key, i in tokenizer["model"]["vocab"].items()}
    file.write_text(json.dumps(tokenizer))
    cases = (path, "has other tokens than the policy"), (str(tmp_path), "has no config.json")
    cases += ((tiny, "is no sequence classifier with one label"),)
    for reward_model, message in cases:
        with pytest.raises(SystemExit, match=f"error: --reward-model {reward_model}: {message}"):
            train(job(tiny, files, tmp_path, reward_model_path=reward_model))


# What a run would not show by itself


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_the_target_kl_is_that_of_all_ranks_together(tiny, files, tmp_path, entry):
    """One minibatch, two passes, and 0.9 of the second one's KL for a target: it is not taken. Each
    of the two ranks has a part of that KL alone, which is below the target.
    """

    def counted(model, *rest):
        with open(tmp_path / "steps", "a") as file:
            print("critic" if hasattr(model, "score") else "policy", file=file)
        return optimizer_step(model, *rest)

    changes = dict(num_steps=1, batch=dict(num_minibatches=1, num_epochs=2))
    free = train(settings(tiny, files, tmp_path / "free", entry, **changes), 2, **SCRIPTED)
    # The mean over both passes, of which the first one's is 0.
    second = 2 * records(free)[0]["actor/ppo_kl"]
    changes["loss"] = dict(target_kl=0.9 * second)
    args = settings(tiny, files, tmp_path / "held", entry, **changes)
    train(args, 2, **SCRIPTED, **{"optim.optimizer_step": counted})
    assert (tmp_path / "steps").read_text().split().count("policy") == 2 * 1


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_a_refused_gradient_is_in_no_later_step(tiny, files, tmp_path, entry):
    """Of two minibatches the second is beyond the target, in both steps. Before each of the four
    the policy has no gradient.
    """
    actor_gradients = entry.actor_gradients

    def watched(args, policy, *rest):
        with open(tmp_path / "left", "a") as file:
            print(any(p.grad is not None for p in policy.parameters()), file=file)
        return actor_gradients(args, policy, *rest)

    args = settings(tiny, files, tmp_path, entry, loss=dict(target_kl=1e-9))
    train(args, **{f"{entry.__name__}.actor_gradients": watched})
    assert (tmp_path / "left").read_text().split() == ["False"] * 4


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_each_batch_is_sampled_from_the_weights_of_the_last_update(tiny, files, tmp_path, entry):
    """Sampler and trainer give the same log-probabilities, also when the weights have moved."""
    args = settings(tiny, files, tmp_path, entry, batch=dict(num_minibatches=1), num_steps=3)
    found = records(train(args))
    assert all(record["rollout_corr/abs_diff_max"] < 1e-4 for record in found)
    assert all(record["actor/grad_norm"] > 0 for record in found)


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_each_minibatch_is_divided_by_its_own_tokens(tiny, files, tmp_path, entry):
    """A minibatch is one row here, so the tokens of the row are those of the minibatch."""

    def watched_as(loss):
        def watched(*arguments):
            row, totals = arguments[-4:-2] if loss is actor_loss else arguments[1:3]
            with open(tmp_path / "tokens", "a") as file:
                print(row.num_response_tokens, totals["tokens"], file=file)
            return loss(*arguments)

        return watched

    losses = {"losses.actor_loss": watched_as(actor_loss)}
    losses |= {"losses.critic_loss": watched_as(critic_loss)}
    train(settings(tiny, files, tmp_path, entry), **SCRIPTED, **losses)
    pairs = [line.split() for line in (tmp_path / "tokens").read_text().splitlines()]
    assert len(pairs) == (4 if entry is grpo else 8)
    assert all(tokens == total for tokens, total in pairs)
    assert len({total for _, total in pairs}) > 1


def test_the_penaltys_weight_moves_by_the_responses_once_a_batch(tiny, files, tmp_path):
    """8 prompts x 2 responses are half of the horizon: a tenth less, for a batch of two steps."""
    changes = dict(num_steps=4, rollout_every=2, batch=dict(group_size=2))
    gae = dict(kl_coef=0.1, kl_target=100.0, kl_horizon=32)
    found = records(train(job(tiny, files, tmp_path, gae=gae, **changes)))
    coefficients = [r["actor/reward_kl_penalty_coeff"] for r in found[::2]]
    assert coefficients == pytest.approx([0.1, 0.09])


def test_each_batch_has_a_seed_of_its_own(tiny, files, tmp_path):
    """One prompt and a policy that stays: 16 responses of two steps, all different."""
    one = dict(data_paths=(str(files / "1.jsonl"),), rollout=dict(ignore_eos=True))
    run = train(job(tiny, files, tmp_path, learning_rate=1e-30, **one))
    responses = [sample["response"] for sample in samples(run)]
    assert len(set(responses)) == len(responses) == 16


def test_the_critic_begins_as_the_reward_model(tiny, files, tmp_path):
    """Unless it has a path of its own. A head of zeros would explain exactly nothing."""
    reward_model = random_reward_model(tmp_path / "reward")
    run = train(job(tiny, files, tmp_path, num_steps=1, reward_model_path=reward_model))
    assert abs(records(run)[0]["critic/vf_explained_var"]) > 1e-3


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_beyond_the_target_kl_no_later_minibatch_of_the_step_is_taken(tiny, files, tmp_path, entry):
    """Of four the second is beyond the target, and the last two would not be."""
    actor_gradients = entry.actor_gradients
    kls = iter([0.0, 1.0, 0.0, 0.0])

    def scripted(*arguments):
        actor_gradients(*arguments)
        return torch.tensor(next(kls))

    def counted(model, *rest):
        with open(tmp_path / "steps", "a") as file:
            print("critic" if hasattr(model, "score") else "policy", file=file)
        return optimizer_step(model, *rest)

    changes = dict(num_steps=1, batch=dict(num_epochs=2), loss=dict(target_kl=0.5))
    replaced = {f"{entry.__name__}.actor_gradients": scripted, "optim.optimizer_step": counted}
    train(settings(tiny, files, tmp_path, entry, **changes), **replaced)
    assert (tmp_path / "steps").read_text().split().count("policy") == 1
