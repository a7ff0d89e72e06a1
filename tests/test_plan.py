"""What a run will do: the rules between settings, and the arithmetic that is printed."""

import pytest
from ranks import run_ranks

import grpo
import ppo
from plan import longest, print_plan
from run import from_json

both = pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])


@both
@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (dict(num_steps=0), "--num-steps 0: must be at least 1; try 200"),
        (dict(learning_rate=1.0), "--learning-rate 1.0: must be above 0 and below 1; try 1e-6"),
        (dict(learning_rate=0.0), "--learning-rate 0.0: must be above 0 and below 1; try 1e-6"),
        (dict(seed=-5), "--seed -5: must be at least 0"),
        (dict(seed=2**32), f"--seed {2**32}: must be at least 0, and below 2.32"),
        (dict(timeout_s=0.0), "--timeout-s 0.0: must be at least 1; try 3600"),
        (dict(eval_every=-1), "--eval-every -1: must be at least 0"),
        (dict(eval_samples=4), "--eval-samples 4: must be 0, or with --eval-every 20"),
        (dict(eval_paths=["a", "b"]), "--eval-data a b: must be with --eval-every 20"),
        (dict(batch=dict(tokens_per_row=1535)), "--tokens-per-row 1535: must be at least 1536, "),
        (
            dict(
                loss=dict(target_kl=0.1),
                batch=dict(prompts_per_step=8, num_minibatches=1, num_epochs=1),
            ),
            "--loss.target-kl 0.1: must be 0 with one minibatch and one epoch",
        ),
        (
            dict(rollout=dict(engine="vllm", kv_cache_dtype="fp8"), loss=dict(importance="off")),
            "--loss.importance off: must be token: an 8-bit sampler",
        ),
    ],
    ids=lambda value: str(value).split(":")[0],
)
def test_a_rule_between_settings_is_refused_by_its_flag(entry, changes, refusal):
    with pytest.raises(ValueError, match=f"^{refusal}"):
        from_json(entry.Args(), changes)


@both
def test_a_sequence_is_a_prompt_and_its_response(entry):
    changes = dict(data=dict(max_prompt_tokens=30), rollout=dict(max_response_tokens=7))
    assert longest(from_json(entry.Args(), changes)) == 37


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--reward-model", dict(reward_model_path="built-in")),
        ("--critic.path", dict(critic=dict(path="built-in"))),
    ],
)
def test_a_built_in_judge_is_for_the_built_in_model(flag, changes):
    """A new user's finding: it was made for minutes, and then had other tokens."""
    ppo_args = from_json(ppo.Args(), changes)
    assert ppo_args.model_path == "built-in"
    with pytest.raises(ValueError, match=f"^{flag} built-in: must be a model with the tokens of"):
        from_json(ppo.Args(), changes | dict(model_path="own"))


def test_what_is_seldom_meant_is_said_in_the_plan(capfd):
    changes = dict(num_steps=30, eval_every=1, data_paths=["a", "b"], eval_paths=["b"])
    args = from_json(grpo.Args(), changes)
    run_ranks(1, print_plan, args, [[0] * 32], [[0]])
    out = capfd.readouterr().out
    assert "warning  a step takes each of the 32 prompts 2.0 times\n" in out
    assert "warning  b is in --data and in --eval-data: it is evaluated on what it learned\n" in out
    run_ranks(1, print_plan, from_json(grpo.Args(), {"num_steps": 30}), [[0] * 64], [])
    assert "warning" not in capfd.readouterr().out


def test_the_plan_is_said_by_the_first_rank_alone(capfd):
    changes = dict(num_steps=30, rollout=dict(engine="hf"), batch=dict(prompts_per_step=6))
    args = from_json(grpo.Args(), changes)
    run_ranks(2, lambda: print_plan(args, [[0] * 5, [0]], [[0] * 3], model="m: 1.0 M parameters"))
    lines = capfd.readouterr().out.splitlines()
    assert lines[:3] == [
        "   model  m: 1.0 M parameters",
        "    data  6 prompts for 30 steps, 3 to evaluate",
        "   ranks  2; 2 hf engines",
    ]
    assert lines[3].startswith("   batch  6 prompts x 8 = 48 samples of up to 512 + 1024 tokens")
    assert len(lines) == 4


def test_a_warm_up_that_the_run_does_not_survive_is_said_in_the_plan(capfd):
    """OpenRLHF#1356, NeMo-RL#3821: a phase longer than the run. A short trial must still start."""
    for num_steps, is_told in ((5, True), (10, True), (11, False)):
        args = from_json(grpo.Args(), {"num_steps": num_steps, "optim": {"warmup_steps": 10}})
        run_ranks(1, print_plan, args, [[0]], [])
        warning = f"warning  --optim.warmup-steps 10 outlasts the run of {num_steps} steps\n"
        assert (warning in capfd.readouterr().out) == is_told


@both
def test_each_further_pass_over_a_batch_may_be_left_out_by_the_target(entry):
    one = dict(prompts_per_step=8, num_minibatches=1, num_epochs=1)
    for more in (dict(num_epochs=2), dict(num_minibatches=2)):
        from_json(entry.Args(), dict(loss=dict(target_kl=0.1), batch=one | more))
    if entry is ppo:
        from_json(ppo.Args(), dict(loss=dict(target_kl=0.1), batch=one, rollout_every=2))


def test_ranks_that_share_an_engine_are_one_engine_in_the_plan(capfd):
    def job():
        changes = dict(rollout=dict(engine="vllm", tensor_parallel_size=2))
        print_plan(from_json(grpo.Args(), changes), [[0] * 64], [])

    run_ranks(2, job)
    assert "   ranks  2; 1 vllm engines\n" in capfd.readouterr().out
