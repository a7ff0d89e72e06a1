"""The built-in job: the model, its reward model, its prompts, and the paths that a run gets."""

import functools
import json
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import grpo
import ppo
from examples import addition
from run import from_json


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """with_paths()'s result on one rank, with models that are there already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        addition, "cached_model", lambda seed, reward_model=False: f"made{seed}{reward_model}"
    )

    def prepare(entry, **changes):
        settings = addition.SETTINGS if entry is grpo else addition.PPO_SETTINGS
        args = from_json(entry.Args(), settings | changes)
        return run_ranks(1, lambda: addition.with_paths(args))[0]

    return prepare


def names(paths):
    return [path.rpartition("/")[2] for path in paths]


def test_a_run_without_a_model_gets_paths_like_any_other(prepared):
    args = prepared(grpo, seed=3)
    assert args.model_path == "made3False"
    assert names(args.data_paths) == names(args.eval_paths) == ["addition"]
    texts = [Path(path).read_text() for path in args.data_paths + args.eval_paths]
    rows, held_out = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert rows == addition.problems(held_out=False)
    assert held_out == addition.problems(held_out=True)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}


def test_settings_of_the_users_own_stay_as_they_are(prepared):
    args = prepared(grpo, model_path="own", data_paths=["x.jsonl"], eval_paths=["y.jsonl"])
    assert (args.model_path, args.data_paths, args.eval_paths) == (
        "own",
        ("x.jsonl",),
        ("y.jsonl",),
    )
    assert prepared(grpo, eval_every=0).eval_paths == ()


def test_the_critics_run_has_hard_prompts_unless_a_reward_model_scores(prepared):
    assert names(prepared(ppo).data_paths) == ["addition", "hard_addition"]
    scored = prepared(ppo, reward_model_path="built-in", critic={"path": "built-in"})
    assert names(scored.data_paths) == ["addition"]
    assert scored.reward_model_path == scored.critic.path == "made0True"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data_paths": ["x.jsonl"]}, "--data x.jsonl: must be with a --model of your own"),
        ({"eval_paths": ["x.jsonl"]}, "--eval-data x.jsonl: must be with --data of your own"),
        # a new user's finding: one's own model was trained on sums, without a word
        ({"model_path": "own"}, "--model own: must be with --data FILE: the built-in sums are"),
        ({"model_path": "own", "data_paths": ["built-in"]}, "--model own: must be with --data"),
    ],
)
@pytest.mark.parametrize("entry", [grpo, ppo])
def test_data_that_the_built_in_model_cannot_read_are_refused(prepared, entry, changes, message):
    with pytest.raises(ValueError, match=message):
        prepared(entry, **changes)


@pytest.mark.parametrize(("is_judge", "num_made"), [(False, 1), (True, 2)])
def test_of_two_starts_at_once_one_makes_the_built_in_model(
    tmp_path, monkeypatch, capfd, is_judge, num_made
):
    """A new user's finding: both made it, on the same cores. A judge has a policy to judge."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(out_dir, *arguments):
        print("made", flush=True)
        time.sleep(1.0)  # the other comes meanwhile
        out_dir.mkdir()
        (out_dir / "config.json").write_text("{}")

    monkeypatch.setattr(addition, "make_model", make)
    monkeypatch.setattr(addition, "make_reward_model", make)
    first, second = run_ranks(2, addition.cached_model, 0, is_judge)
    assert first == second and Path(first, "config.json").exists()
    told = capfd.readouterr().out
    assert told.count("made\n") == num_made
    assert told.count(f"waiting for the run that makes {Path(first).name}") == 1


@pytest.mark.parametrize("way", range(5))
def test_the_built_in_reward_model_learns_from_answers_that_are_wrong(tiny, way):
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    right = addition.right_answers(addition.make_tokenizer(), held_out=True)
    torch.manual_seed(0)
    for _ in range(4):
        wrong = addition.wrong_answers(policy, right, way)
        assert torch.equal(wrong[:, :6], right[:, :6])  # the same problem
        shared = min(right.shape[1], wrong.shape[1])
        assert wrong.shape[1] != 10 or (wrong != right).any(1).all()
        assert wrong.shape[1] == 10 or (wrong[:, :shared] != right[:, :shared]).any(1).all()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_built_in_models_are_the_same_bytes_for_the_same_seed_and_the_judge_learns(
    tmp_path, monkeypatch
):
    """Few steps of the judge, from a model that adds half-well: more than a coin's share of the
    pairs.
    """
    shorter = functools.partial(addition.warm_start, target=(0.7, 1.0))
    for number in ("1", "2"):
        addition.make_model(tmp_path / number, seed=3)
        with monkeypatch.context() as patch:
            patch.setattr(
                addition, "warm_start", lambda model, tokenizer, **_: shorter(model, tokenizer)
            )
            patch.setattr(addition, "PREFERENCE_STEPS", 100)
            patch.setattr(addition, "TARGET_PAIRS", 0.6)
            addition.make_reward_model(tmp_path / f"judge{number}", 3, str(tmp_path / number))
    for kind in ("", "judge"):
        first, second = (
            (tmp_path / f"{kind}{number}" / "model.safetensors").read_bytes() for number in "12"
        )
        assert first == second
    monkeypatch.setattr(addition, "PREFERENCE_STEPS", 100)
    monkeypatch.setattr(addition, "TARGET_PAIRS", 1.01)
    monkeypatch.setattr(addition, "warm_start", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="of the pairs apart; try another --seed"):
        addition.make_reward_model(tmp_path / "none", 3, str(tmp_path / "1"))
    assert not (tmp_path / "none").exists()


def test_the_built_in_prompts_ask_for_the_sum_of_their_answer():
    """Those of three digits are left out for the built-in reward model."""
    sets = addition.training_sets(hard=True)
    assert {name: len(rows) for name, rows in sets.items()} == {
        "addition": 9744,
        "hard_addition": 320,
    }
    for row in sum(sets.values(), addition.problems(held_out=True)):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert (
            int(a) + int(b) == int(row["answer"])
            and len(row["answer"]) == len(a) + 1 == len(b) + 1 < 6
        )
    assert list(addition.training_sets(hard=False)) == ["addition"]


def test_the_built_in_settings_are_accepted():
    assert from_json(ppo.Args(), addition.PPO_SETTINGS).batch.num_samples == 512


def test_a_home_that_cannot_be_written_is_told_with_the_variable_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match="handful can be made .Not a directory.; set XDG_CACHE_HOME"
    ):
        addition.cached_model(0)


def test_the_built_in_model_is_written_without_a_bar_of_progress(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(addition, "warm_start", lambda model, tokenizer: None)
    assert (Path(addition.cached_model(0)) / "model.safetensors").exists()
    assert capfd.readouterr() == ("", "")
