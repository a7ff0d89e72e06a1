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
        (dict(seed=-5), "--seed -5: must be at least 0"),
        (dict(timeout_s=0.0), "--timeout-s 0.0: must be at least 1; try 3600"),
        (dict(eval_every=-1), "--eval-every -1: must be at least 0"),
        (dict(eval_samples=4), "--eval-samples 4: must be 0, or with --eval-every 20"),
        (dict(eval_paths=["a", "b"]), "--eval-data a b: must be with --eval-every 20"),
        (dict(batch=dict(tokens_per_row=1535)), "--tokens-per-row 1535: must be at least 1536, "),
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


def test_the_plan_is_said_by_the_first_rank_alone(capfd):
    changes = dict(num_steps=30, rollout=dict(engine="hf"))
    args = from_json(grpo.Args(), changes)
    run_ranks(2, lambda: print_plan(args, [[0] * 5, [0]], [[0] * 3], model="m: 1.0 M parameters"))
    lines = capfd.readouterr().out.splitlines()
    assert lines[:3] == [
        "   model  m: 1.0 M parameters",
        "    data  6 prompts for 30 steps, 3 to evaluate",
        "   ranks  2; 2 hf engines",
    ]
    assert lines[3].startswith("   batch  64 prompts x 8 = 512 samples of up to 512 + 1024 tokens")
    assert len(lines) == 4


def test_a_warm_up_that_the_run_does_not_survive_is_said_in_the_plan(capfd):
    """OpenRLHF#1356, NeMo-RL#3821: a phase longer than the run. A short trial must still start."""
    for num_steps, is_told in ((5, True), (10, True), (11, False)):
        args = from_json(grpo.Args(), {"num_steps": num_steps, "optim": {"warmup_steps": 10}})
        run_ranks(1, print_plan, args, [[0]], [])
        warning = f"warning  --optim.warmup-steps outlast the run of {num_steps} steps\n"
        assert (warning in capfd.readouterr().out) == is_told
