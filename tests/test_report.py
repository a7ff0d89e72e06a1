"""Where records go: one line a step in each place, what a resumed run keeps, and alarms."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import report as report_module
from metrics import Metrics
from report import LogConfig, Report, plot

QUIET = LogConfig(plot_every=0)


def record(**values):
    """A record of a step that took half a second; two underscores stand for a slash."""
    values = {name.replace("__", "/"): value for name, value in values.items()}
    return {"timing_s/step": 0.5, **values}


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


STUB = """
calls = []
class Run:
    def log(self, record, step):
        calls.append((step, record))
    def finish(self):
        calls.append("finish")
def init(**settings):
    calls.append(settings)
    return Run()
"""


def test_a_record_is_written_as_it_was_reduced(tmp_path):
    metrics = Metrics()
    metrics.add("x", 2.5)
    reduced = metrics.reduce()
    Report(tmp_path, QUIET, 1).write(0, reduced)
    assert records(tmp_path) == [{"step": 0, **reduced}]


def test_the_glossary_has_every_name_that_metrics_makes_by_itself():
    metrics = Metrics()
    rollout = SimpleNamespace(prompt_ids=[1], response_ids=[2], truncated=False)
    metrics.add_group("SOURCE", [0.0, 1.0], [rollout] * 2)
    metrics.add_layout([], [], [[SimpleNamespace(tokens=[1], source=(0,))]], 8, 1)
    metrics.update({"is_weight_mean": 1.0, "is_square_mean": 1.0}, prefix="rollout_corr/")
    for name in ("reshard", "rollout", "reward", "layout", "update"):
        with metrics.timer(name):
            pass
    glossary = report_module.__doc__.replace("also /min and /max", "response_length/min, max")
    glossary = glossary.replace("also /max", "prompt_length/max")
    missing = {
        name
        for name in metrics.reduce()
        if name not in glossary and name.rpartition("/")[2] not in glossary
    }
    assert not missing


def test_a_resumed_run_drops_the_records_after_its_checkpoint_and_a_line_that_a_crash_cut(tmp_path):
    report = Report(tmp_path, QUIET, 9)
    for step in range(7):
        report.write(step, record(x=step))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "x": {"cut": 1}')
    resumed = Report(tmp_path, QUIET, 9, first_step=5)
    for step in (5, 6):
        resumed.write(step, record(x=10 * step))
    assert [(r["step"], r["x"]) for r in records(tmp_path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 50),
        (6, 60),
    ]


def group(text, response_ids, reward):
    prompt = SimpleNamespace(text=text, answer="42")
    return SimpleNamespace(
        prompt=prompt, rollouts=[SimpleNamespace(response_ids=response_ids)], rewards=[reward]
    )


def test_the_first_samples_of_each_step_are_written_and_survive_a_resume_whatever_their_text(
    tmp_path,
):
    odd = "line\nseparator\u2028next\x85line } \u00e9"
    report = Report(tmp_path, LogConfig(samples_per_step=2), 3)
    for step in range(2):
        groups = [group(f"{odd}{i}", torch.tensor([i]), float(i)) for i in range(3)]
        report.write_samples(
            step, groups, lambda ids: f"{odd}{ids.item()}", torch.tensor([[0.5], [1.5], [2.5]])
        )
    before = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    first = json.loads(before[0])
    assert first == dict(
        step=0, prompt=odd + "0", response=odd + "0", answer="42", reward=0.0, advantage=0.5
    )
    assert [json.loads(line)["step"] for line in before] == [0, 0, 1, 1]
    Report(tmp_path, QUIET, 3, first_step=1)
    assert (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1] == before[:2]


def test_wandb_gets_one_call_per_step_with_the_trainers_step_also_after_a_resume(
    tmp_path, monkeypatch
):
    """prime-rl#1516, wandb#10628: several calls per step, implicit counters, steps that are dropped
    in silence.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    config = LogConfig(wandb_project="mine", plot_every=0)
    logged = []
    for first, last in ((0, 7), (5, 9)):
        report = Report(tmp_path / "run", config, 9, first_step=first, settings={"seed": 3})
        for step in range(first, last):
            logged.append(record(x=step))
            report.write(step, logged[-1])
    settings, *calls = wandb.calls
    assert settings == dict(project="mine", name="run", config={"seed": 3})
    # The second run is a run of its own, so steps 5 and 6 are not below its last.
    assert calls == [
        *enumerate(logged[:7]),
        settings,
        *zip(range(5, 9), logged[7:], strict=True),
        "finish",
    ]


def test_a_missing_wandb_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(report_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match="--log.wandb-project mine: needs wandb; install it with: pip install wandb",
    ):
        LogConfig(wandb_project="mine")
    LogConfig()


def test_only_the_first_rank_writes_prints_and_calls_wandb(tmp_path):
    def on_a_rank():
        directory = tmp_path / str(dist.get_rank())
        report = Report(directory, QUIET, 1)
        report.write_samples(0, [group("a", torch.tensor([1]), 1.0)], str, torch.tensor([[0.5]]))
        report.write(0, record())
        return directory.exists()

    assert run_ranks(2, on_a_rank) == [True, False]


def test_alarms_are_raised_once_each(tmp_path, capsys):
    report = Report(tmp_path, LogConfig(plot_every=0, zero_std_alarm=3), 20)

    def warnings(step, **values):
        report.write(step, record(**values))
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]

    calm = dict(rollout_corr__kl=0.09, actor__entropy=0.02)
    assert warnings(0, **calm) == []
    (mismatch,) = warnings(1, rollout_corr__kl=0.11)
    assert "differ by 0.110 nats per token; run once with --verify-sync" in mismatch
    assert warnings(2, rollout_corr__kl=0.5) == []
    (entropy,) = warnings(3, actor__entropy=0.001)
    assert "entropy is down to 0.0010 nats" in entropy
    assert warnings(4, actor__entropy=0.001) == []
    flat, some = dict(reward__frac_zero_std=1.0), dict(reward__frac_zero_std=0.9)
    assert [warnings(step, **x) for step, x in enumerate((flat, flat, some, flat, flat), 5)] == [
        []
    ] * 5
    (spread,) = warnings(10, **flat)
    assert "no group had any spread for 3 steps" in spread
    assert warnings(11, **flat) == []


def test_the_console_has_a_line_per_step(tmp_path, capsys):
    report = Report(tmp_path, QUIET, 10)
    report.write(2, record(reward__mean=0.5, actor__entropy=1.25, actor__ppo_kl=1e-4))
    line = capsys.readouterr().out
    assert (
        line.startswith("step    3/10  reward 0.500  entropy 1.250  kl 0.00010  ")
        and line.count("\n") == 1
    )
    assert "left" in line


def test_curves_are_drawn_now_and_then_and_at_the_last_step(tmp_path):
    pytest.importorskip("matplotlib")
    report = Report(tmp_path, LogConfig(plot_every=2), 3)
    picture = tmp_path / "curves.png"
    drawn = []
    for step in range(3):
        report.write(step, record(reward__mean=step / 3))
        drawn.append(picture.exists())
        if picture.exists():
            assert picture.read_bytes().startswith(b"\x89PNG")
            picture.unlink()
    assert drawn == [False, True, True]
    plot(tmp_path / "metrics.jsonl", tmp_path / "again.png")
    assert (tmp_path / "again.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "setting", [dict(samples_per_step=-1), dict(plot_every=-1), dict(zero_std_alarm=0)]
)
def test_settings_without_meaning_are_refused(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"--log.{name.replace('_', '-')}"):
        LogConfig(**setting)
