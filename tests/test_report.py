"""Where records go: one line a step in each place, what a resumed run keeps, and alarms."""

import contextlib
import errno
import io
import json
import math
import resource
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from jobs import settings, train
from ranks import run_ranks

import curves
import grpo
import hardware
import ppo
import report as report_module
from metrics import Metrics
from report import LogConfig, Report, start_wandb

QUIET = LogConfig(plot_every=0)


def record(**values):
    """A record of a step that took half a second; two underscores stand for a slash."""
    values = {name.replace("__", "/"): value for name, value in values.items()}
    return {"timing_s/step": 0.5, **values}


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


STUB = """
calls = []
class Error(Exception):
    pass
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
    metrics = Metrics(hardware.Device())
    rollout = SimpleNamespace(prompt_ids=[1], response_ids=[2], truncated=False)
    metrics.add_group("SOURCE", [0.0, 1.0], [rollout] * 2)
    metrics.add_layout([[SimpleNamespace(tokens=[1], source=(0,))]], 8)
    metrics.update({"is_weight_mean": 1.0, "is_square_mean": 1.0}, prefix="rollout_corr/")
    metrics.add_update("actor", norm=1.0, rate=0.1)
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


def test_wandb_gets_one_call_per_step_with_the_trainers_step_also_after_a_resume(tmp_path, wandb):
    """prime-rl#1516, wandb#10628, verl#2783, allenai/tango#152: several calls per step, implicit
    counters, steps that are dropped in silence.
    """
    config = LogConfig(wandb_project="mine", plot_every=0)
    logged = []
    for first, last in ((0, 7), (5, 9)):
        tracker = start_wandb(config, "run", {"seed": 3})
        report = Report(tmp_path / "run", config, 9, first, tracker)
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
        ValueError, match="--log.wandb-project mine: needs wandb; install it with: .*python"
    ):
        LogConfig(wandb_project="mine")
    LogConfig()


def test_only_the_first_rank_writes_prints_and_calls_wandb(tmp_path, wandb):
    def on_a_rank():
        directory = tmp_path / str(dist.get_rank())
        tracker = start_wandb(LogConfig(wandb_project="mine"), "run")
        report = Report(directory, QUIET, 1)
        report.write_samples(0, [group("a", torch.tensor([1]), 1.0)], str, torch.tensor([[0.5]]))
        report.write(0, record())
        return directory.exists(), tracker is not None

    assert run_ranks(2, on_a_rank) == [(True, True), (False, False)]


def test_alarms_are_raised_once_each(tmp_path, capsys):
    report = Report(tmp_path, LogConfig(plot_every=0, zero_std_alarm=3), 20)

    def warnings(step, **values):
        report.write(step, record(**values))
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]

    calm = dict(rollout_corr__kl=0.009, actor__entropy=0.02)
    assert warnings(0, **calm) == []
    (mismatch,) = warnings(1, rollout_corr__kl=0.011)
    assert "differ by 0.011 nats per token; run once with --verify-sync" in mismatch
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
    report = Report(tmp_path, LogConfig(plot_every=2), 3, plot=curves.plot)
    picture = tmp_path / "curves.png"
    drawn = []
    for step in range(3):
        report.write(step, record(reward__mean=step / 3))
        drawn.append(picture.exists())
        if picture.exists():
            assert picture.read_bytes().startswith(b"\x89PNG")
            picture.unlink()
    assert drawn == [False, True, True]
    curves.plot(tmp_path / "metrics.jsonl", tmp_path / "again.png")
    assert (tmp_path / "again.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "setting",
    [
        dict(samples_per_step=-1),
        dict(plot_every=-1),
        dict(zero_std_alarm=0),
        dict(mismatch_alarm=-0.1),
        dict(mismatch_alarm=math.nan),
        dict(entropy_alarm=math.nan),
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused_by_their_own_name_alone(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"^--log.{name.replace('_', '-')} [^;]*: must be at le"):
        LogConfig(**setting)


def test_each_alarm_and_log_can_be_switched_off():
    LogConfig(samples_per_step=0, plot_every=0, mismatch_alarm=0, entropy_alarm=0, zero_std_alarm=1)
    LogConfig(mismatch_alarm=math.inf)


# A log can't end a run, nor block its resume.


def test_half_a_surrogate_in_a_text_is_written_and_read_back(tmp_path):
    """strands-rl/strands-env#211: one unpaired surrogate in the data killed the run."""
    report = Report(tmp_path, QUIET, 9)
    broken = group("\ud83d in the prompt", torch.tensor([1]), 1.0)
    broken.prompt.answer = "\udfff"
    report.write_samples(0, [broken], lambda ids: "\U0001f600 \ud83d\n\u00e9")
    (line,) = (tmp_path / "samples.jsonl").read_bytes().splitlines()
    sample = json.loads(line)
    assert sample["prompt"] == "\ud83d in the prompt" and sample["answer"] == "\udfff"
    assert sample["response"] == "\U0001f600 \ud83d\n\u00e9"
    assert "\u00e9".encode() in line  # what UTF-8 has is left as it is


@pytest.mark.parametrize(
    "answer, written",
    [
        (["a", 2], ["a", 2]),
        (None, None),
        (math.nan, None),
        ({"x": (1.5, math.inf)}, {"x": [1.5, None]}),
        ({3}, "{3}"),
        (torch.tensor([1.5, math.nan]), [1.5, None]),
        (torch.tensor(2), 2),
    ],
    ids=str,
)
def test_answers_of_any_kind_are_written_as_json(tmp_path, answer, written):
    report = Report(tmp_path, QUIET, 9)
    sample = group("a", torch.tensor([1]), math.nan)
    sample.prompt.answer = answer
    report.write_samples(0, [sample], str, torch.tensor([[math.inf]]))

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    line = json.loads((tmp_path / "samples.jsonl").read_text(), parse_constant=refuse)
    assert line["answer"] == written and line["reward"] is None and line["advantage"] is None


def test_a_number_that_is_not_finite_is_null_in_the_file_and_said_once(tmp_path, capsys):
    """JSON has neither NaN nor Infinity: jq and pandas stop at them."""
    report = Report(tmp_path, QUIET, 9)
    for step in range(2):
        report.write(step, record(actor__grad_norm=math.nan, b=math.inf, c=-math.inf, d=1.0))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert records(tmp_path)[0] == {"step": 0, **record(actor__grad_norm=None, b=None, c=None, d=1)}
    out = capsys.readouterr().out
    assert "grad nan" in out  # on the console it stays visible
    for line in ("warning: actor/grad_norm is nan", "warning: b is inf", "warning: c is -inf"):
        assert out.count(line) == 1


TORN = [
    b'{"step": 3, "response": "\xc3',  # cut inside a two-byte character
    b'{"step": 3, "x": {"cut": 1}',
    b'{"step": 3, "x": 1}\n\x00\x00\x00\x00',  # a tail of NULs, as after a power failure
    b"\x00\x00{}",
    b'{"step": 4}',  # whole, but without its end of line
    b"[1, 2]\n",
    b"7\n",
    b"[" * 100_000,
    b"\n\n",
]


@pytest.mark.parametrize("tail", TORN, ids=lambda tail: repr(tail[:20]))
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_torn_tail_does_not_block_a_resume(tmp_path, name, tail):
    """verifiers#1644, Tracer-Cloud/opensre#5871, swiss-ai/model-launch#45."""
    whole = b'{"step": 0, "x": "U+2028 \xe2\x80\xa8 and U+0085 \xc2\x85"}\n{"step": 1}\n'
    (tmp_path / name).write_bytes(whole + tail)
    Report(tmp_path, QUIET, 9, first_step=3)
    assert (tmp_path / name).read_bytes() == whole
    Report(tmp_path, QUIET, 9, first_step=1)
    assert (tmp_path / name).read_bytes() == whole[: whole.rindex(b"{")]


def test_a_torn_line_in_the_middle_is_left_out_and_the_rest_stays(tmp_path):
    lines = [b'{"step": 0}', b'{"step": 1, "x', b"\xff\x00", b'{"step": 2}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    Report(tmp_path, QUIET, 9, first_step=5)
    assert [r["step"] for r in records(tmp_path)] == [0, 2]


def test_lines_of_somebody_else_stay(tmp_path):
    lines = '{"epoch": 1, "loss": 2.0}\n{"step": 1}\n{"step": "last"}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    Report(tmp_path, QUIET, 9, first_step=3)
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_files_that_are_there_before_the_first_step_are_moved_aside_not_emptied(tmp_path, capsys):
    for i in range(3):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0, "run": {i}}}\n')
        Report(tmp_path, QUIET, 9)
        assert not (tmp_path / "metrics.jsonl").exists()
        assert f"metrics.jsonl.{i + 1} now" in capsys.readouterr().out
    for i in range(3):
        assert json.loads((tmp_path / f"metrics.jsonl.{i + 1}").read_text())["run"] == i
    (tmp_path / "metrics.jsonl").touch()  # empty: nobody misses it
    Report(tmp_path, QUIET, 9)
    assert not (tmp_path / "metrics.jsonl.4").exists()


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """As on a full disk, a write takes what fits, and the next one fails; for a forked process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def test_a_full_disk_is_said_once_tears_no_line_and_ends_no_run(tmp_path):
    def on_a_rank():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            report = Report(tmp_path, LogConfig(plot_every=3), 9, plot=curves.plot)
            report.write(2, record(x="a" * 1000))
            report._plot_s = 0.0  # else the next picture would have to wait
            with files_of_at_most(1500):
                for step in range(3, 6):
                    report.write(step, record(x="a" * 1000))
                    report.write_samples(step, [group("a" * 4000, torch.tensor([1]), 1.0)], str)
            report.write(6, record(x="there is room again"))
        return out.getvalue()

    (out,) = run_ranks(1, on_a_rank)
    assert [r["step"] for r in records(tmp_path)] == [2, 6]
    assert (tmp_path / "samples.jsonl").read_bytes() == b""
    assert (tmp_path / "curves.png").read_bytes().endswith(b"IEND\xaeB`\x82")  # of step 3, whole
    for name in ("metrics.jsonl", "samples.jsonl", "curves.png"):
        assert out.count(f"{name} can't be written (File too large)") == 1
    assert out.count("step ") == 5


def test_dropping_records_needs_no_room(tmp_path):
    def on_a_rank():
        with files_of_at_most(10):
            Report(tmp_path, QUIET, 9, first_step=2)

    text = "".join(f'{{"step": {step}}}\n' for step in range(5))
    (tmp_path / "metrics.jsonl").write_text(text)
    run_ranks(1, on_a_rank)
    assert [r["step"] for r in records(tmp_path)] == [0, 1]


def test_a_log_that_cannot_be_opened_ends_no_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    report = Report(tmp_path, LogConfig(plot_every=1), 2, first_step=1)
    report.write(0, record())
    report.write(1, record())
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl can't be written (Is a directory)") == 1


def test_a_console_that_takes_nothing_ends_no_run(tmp_path, monkeypatch):
    """Sent to a file on a full disk, or to a program that has ended."""

    def write(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, flush=lambda: None))
    report = Report(tmp_path, LogConfig(plot_every=0, zero_std_alarm=1), 2)
    for step in range(2):
        report.write(step, record(reward__frac_zero_std=1.0))
    monkeypatch.undo()
    assert len(records(tmp_path)) == 2


def test_a_directory_that_cannot_be_made_ends_no_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    report = Report(tmp_path / "file" / "run", LogConfig(plot_every=1), 2)
    report.write(0, record())
    assert "metrics.jsonl can't be written (Not a directory)" in capsys.readouterr().out


# wandb.


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb
    del sys.modules["wandb"]


def test_wandb_without_a_login_is_one_line(tmp_path, monkeypatch, wandb):
    def init(**settings):
        raise wandb.Error("api_key not configured (no-tty).\n  call wandb.login(key=...)")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(ValueError, match=r"^--log.wandb-project mine: api_key not .* or set WANDB"):
        start_wandb(LogConfig(wandb_project="mine"), "run")


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_wandb_without_a_login_changes_no_file_of_an_earlier_run(
    tiny, files, tmp_path, monkeypatch, wandb, entry
):
    """The refusal came when the earlier run of that name had been renamed."""

    def init(**settings):
        raise wandb.Error("api_key not configured (no-tty)")

    monkeypatch.setattr(wandb, "init", init)
    earlier = tmp_path / "run" / "config.json"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    args = settings(tiny, files, tmp_path, entry, log=dict(wandb_project="mine"))
    with pytest.raises(SystemExit, match="^error: --log.wandb-project mine: api_key not"):
        train(args)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "site"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    assert earlier.read_text() == "{}"


@pytest.mark.parametrize("error", ["Error", "BrokenPipeError"])
@pytest.mark.parametrize("where", ["log", "finish"])
def test_a_wandb_that_fails_later_is_said_once_and_ends_no_run(
    tmp_path, monkeypatch, capsys, wandb, where, error
):
    def fail(*args, **kwargs):
        raise getattr(wandb, error, BrokenPipeError)("gone")

    monkeypatch.setattr(wandb.Run, where, fail)
    config = LogConfig(wandb_project="mine", plot_every=0)
    report = Report(tmp_path, config, 3, tracker=start_wandb(config, "run"))
    for step in range(3):
        report.write(step, record())
    assert len(records(tmp_path)) == 3
    assert capsys.readouterr().out.count("wandb does not take records (gone)") == 1


def test_a_folder_called_wandb_is_no_wandb(tmp_path, monkeypatch):
    """wandb itself leaves ./wandb behind, which Python can import as an empty package."""
    (tmp_path / "handful_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert report_module.importlib.util.find_spec("handful_folder") is not None
    assert not report_module._is_installed("handful_folder")
    assert report_module._is_installed("torch")


# Alarms, console, curves.


def test_an_alarm_is_raised_for_nan_too(tmp_path, capsys):
    """nan > limit is False."""
    Report(tmp_path, QUIET, 9).write(0, record(rollout_corr__kl=math.nan, actor__entropy=math.nan))
    out = capsys.readouterr().out
    assert "warning: sampler and trainer differ by nan nats" in out
    assert "warning: entropy is down to nan" in out


@pytest.fixture
def warnings(tmp_path, capsys):
    """What a run that warns after three steps in a row says at these steps."""
    report = Report(tmp_path, LogConfig(plot_every=0, zero_std_alarm=3), 20)

    def warned(steps, **values):
        for step in steps:
            report.write(step, record(**values))
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]

    return warned


def test_a_run_that_trains_nothing_says_so(warnings):
    """All responses truncated, and masked for that: gradient 0 with spread in every group."""
    still = dict(actor__grad_norm=0.0, reward__frac_zero_std=0.5)
    assert warnings(range(2), **still) == []
    assert warnings([2], actor__grad_norm=0.1, reward__frac_zero_std=0.5) == []
    assert warnings(range(3, 5), **still) == []
    assert warnings([5], reward__frac_zero_std=0.5) == []  # the critic's warm-up: not counted
    (warning,) = warnings([6], **still)
    assert "no gradient for 3 steps: are all responses masked or truncated, or" in warning


def test_a_run_without_any_update_says_so(warnings):
    """A new user's finding: with --advantage.mask-truncated and all responses truncated there is
    not even a gradient norm, and no word of it.
    """
    sampled = dict(reward__mean=0.4, reward__frac_zero_std=0.5)
    assert warnings(range(2), **sampled) == []
    assert warnings([2], actor__grad_norm=0.1, **sampled) == []
    assert warnings(range(3, 5), **sampled) == []
    assert warnings([5], critic__grad_norm=0.1, **sampled) == []  # the critic's warm-up
    (warning,) = warnings([6], **sampled)
    assert "no gradient for 3 steps" in warning and "--loss.target-kl" in warning
    assert warnings([7], **sampled) == []  # once


def test_groups_without_spread_are_not_called_masked(tmp_path, capsys):
    report = Report(tmp_path, LogConfig(plot_every=0, zero_std_alarm=2), 20)
    for step in range(4):
        report.write(step, record(actor__grad_norm=0.0, reward__frac_zero_std=1.0))
    out = capsys.readouterr().out
    assert "no group had any spread for 2 steps" in out and "no gradient" not in out


def test_the_console_shows_the_callers_own_names_where_there_are_none_of_ours(tmp_path, capsys):
    Report(tmp_path, QUIET, 3).write(0, record(train__loss=2.5, accuracy=None, perf__mfu=0.4))
    assert capsys.readouterr().out.startswith("step    1/3  train/loss 2.5  accuracy None  0.50 s")
    Report(tmp_path, QUIET, 3).write(0, {"loss": 2.5})  # without a time
    assert capsys.readouterr().out.splitlines()[-1] == "step    1/3  loss 2.5  0.00 s  left 0.0 min"


def test_the_time_that_is_left_is_that_of_the_median_step(tmp_path, capsys):
    report = Report(tmp_path, QUIET, 33)
    for step in range(30):  # the first ten are slow, and no longer looked at
        report.write(step, {"timing_s/step": 900.0 if step < 10 else 60.0 + step % 2})
    assert capsys.readouterr().out.splitlines()[-1].endswith("61.00 s  left 3.0 min")


def test_drawing_takes_at_most_2_percent_of_the_time(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    drawn = []

    def draw(metrics_file, out_file):
        drawn.append(clock.now)
        clock.now += 1.0

    monkeypatch.setattr(report_module.time, "perf_counter", lambda: clock.now)
    report = Report(tmp_path, LogConfig(plot_every=1), 9, plot=draw)
    for step in range(9):
        report.write(step, record())
        clock.now += 24.0
    assert drawn == [0.0, 73.0, 146.0, 195.0]  # after 51 s or more, and at the end


def test_a_sample_has_the_advantage_of_its_own_group(tmp_path):
    """The first one of each group of two."""
    groups = [group(str(i), torch.tensor([i]), float(i)) for i in range(2)]
    advantages = torch.tensor([[0.5, -0.5], [1.5, -1.5]])
    Report(tmp_path, QUIET, 1).write_samples(0, groups, str, advantages)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["advantage"] for line in lines] == [0.5, 1.5]


def test_the_time_before_the_first_step_is_one_line_by_its_parts(tmp_path, capsys):
    times = {"timing_s/import": 4.04, "timing_s/engine": 31.0, "timing_s/step": 35.04}
    Report(tmp_path, QUIET, 1).write_start(times | {"perf/host_memory_gb": 1.0})
    assert capsys.readouterr().out == "   start  35.0 s: import 4.0, engine 31.0\n"
