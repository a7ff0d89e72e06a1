"""The evaluation of a model alone is that of the run that made it, response by response."""

import json
import re

import pytest
from jobs import REWARDS, joined, records, settings, train
from ranks import run_ranks

import grpo
import run
from rewards import Scorer
from tools import evaluate


@pytest.mark.parametrize("world_size", [1, 2])
def test_scores_are_those_of_the_runs_last_evaluation_and_follow_from_the_lines(
    tiny, files, tmp_path, monkeypatch, capfd, world_size
):
    changes = dict(eval_paths=(str(files / "7.jsonl"),), eval_samples=3, eval_every=1)
    args = settings(tiny, files, tmp_path / "a", num_steps=1, **changes)
    record = records(train(args))[0]
    monkeypatch.setattr(run, "init_distributed", joined)
    monkeypatch.setattr(grpo, "Scorer", lambda config: Scorer(config, callables=REWARDS))
    changes |= dict(data_paths=("built-in",))  # README's command gives none to train on
    alone = settings(str(args.run.directory / "hf"), files, tmp_path / "b", **changes)
    run_ranks(world_size, evaluate.main, alone)
    shown = dict(line.split() for line in capfd.readouterr().out.splitlines() if "eval/" in line)
    lines = (alone.run.directory / "eval.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    greedy = [line["reward"] for line in lines if line["kind"] == "greedy"]
    drawn = [line["reward"] for line in lines if line["kind"] == "sample"]
    assert (len(greedy), len(drawn)) == (7, 21)
    for name, value in {
        "eval/reward": sum(greedy) / 7,
        "eval/mean@3": sum(drawn) / 21,
        "eval/pass@3": sum(max(drawn[i : i + 3]) for i in range(0, 21, 3)) / 7,
    }.items():
        assert float(shown[name]) == pytest.approx(value, abs=1e-4)
        assert record[name] == pytest.approx(value, abs=1e-9) or name != "eval/reward"
    for line in lines:
        text = re.sub("<eos>|<pad>", "", line["response"])
        assert line["reward"] == REWARDS["spread"](text)
    assert lines[0].keys() >= {"prompt", "answer", "response", "truncated", "source"}
