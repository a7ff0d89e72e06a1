"""What commands, settings files and readers of before rely on is still there under its name.

before.json holds, of commit e6130bb: the config.json that each script wrote by its defaults, the
choices of its flags, and the names of the metrics in the README.
"""

import dataclasses
import json
import sys
import typing
from pathlib import Path

import pytest
from jobs import records, settings, train
from wrong_commands import settings_of

import grpo
import ppo
import report
import run

BEFORE = json.loads((Path(__file__).parent / "before.json").read_text())
both_entries = pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])


def values_of(written):
    """{path of names: value} of nested settings."""
    found = {}
    for name, value in written.items():
        inner = values_of(value) if isinstance(value, dict) else {(): value}
        found |= {(name, *path): inner_value for path, inner_value in inner.items()}
    return found


@both_entries
def test_a_settings_file_of_before_means_the_same_and_so_do_its_flags(entry, monkeypatch):
    written = BEFORE[entry.__name__] | {"model_path": "x"}  # with a model: no built-in settings
    read = run.from_json(entry.Args(), written)
    expected = values_of(written)
    now = values_of(json.loads(json.dumps(dataclasses.asdict(read))))
    assert len(expected) > 60
    assert {path: now.get(path, "gone") for path in expected} == expected
    flags = {path: flag for path, flag, _ in settings_of(entry.Args())}
    argv = ["script.py"]
    for path, value in expected.items():
        if isinstance(value, bool):
            group, dot, name = flags[path].removeprefix("--").rpartition(".")
            argv.append(f"--{group}{dot}{'' if value else 'no-'}{name}")
        else:
            words = value if isinstance(value, list) else [value]
            argv += [flags[path], *map(str, words)]
    monkeypatch.setattr(sys, "argv", argv)
    assert run.command_line(entry.Args(), {}, "") == read


@both_entries
def test_each_choice_of_before_is_still_one(entry):
    kinds = {".".join(path): kind for path, _, kind in settings_of(entry.Args())}
    for path, choices in BEFORE["choices"].items():
        if path in kinds:
            assert set(choices) <= set(typing.get_args(kinds[path])), path


def test_each_metric_of_before_is_still_written(tiny, files, tmp_path):
    """A step of PPO with every phase has them all; the glossary has those of a GPU as well."""
    args = settings(
        tiny,
        files,
        tmp_path,
        ppo,
        loss=dict(kl_coef=1e-3),
        gae=dict(kl_coef=1e-3),
        eval_paths=(str(files / "3.jsonl"),),
        eval_every=1,
        eval_samples=2,
        run=dict(save_every=1),
    )
    written = set().union(*records(train(args)))
    of_this_run = {
        "reward/SOURCE/mean": "reward/16.jsonl/mean",
        "reward/FUNCTION_mean": "reward/spread_mean",
        "eval/SOURCE/reward": "eval/3.jsonl/reward",
    }
    names = [of_this_run.get(name, name) for name in BEFORE["metrics"]]
    assert len(names) > 50
    assert sorted(set(names) - written) == []
    for name in ("perf/max_memory_gb", "perf/max_memory_gb/PHASE", "perf/cached_memory_gb"):
        assert name in report.__doc__
