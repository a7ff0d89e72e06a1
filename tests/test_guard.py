"""A guard: it saves by the clock, stops at the end of a step, and skips what is not finite."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from jobs import records, settings, train, weights
from ranks import run_ranks

import grpo
import guard
import optim
import ppo
from checkpoint import load
from guard import Guard
from metrics import Metrics
from run import RunConfig

ROOT = Path(guard.__file__).parent


def make(directory=None, num_steps=100, save_at=1, **changes):
    return Guard(RunConfig(**changes), directory, num_steps, str, save_at=save_at)


@pytest.fixture
def clock(monkeypatch):
    """time.monotonic() of the guard, in seconds, as a namespace whose `now` is set."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(guard.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(Guard, "_listen", lambda self: None)
    return clock


def save(watch, clock, took_s):
    with watch.saving():
        clock.now += took_s


def test_the_state_is_saved_every_ten_minutes_and_at_the_end(clock):
    watch = make(num_steps=8)
    found = []
    for step in range(8):
        clock.now += 200
        found.append(watch.is_save_due(step))
        if found[-1]:
            save(watch, clock, 1)
    assert found == [False, False, True, False, False, True, False, True]


def test_the_minutes_until_the_next_save_begin_when_the_last_one_has_ended(clock):
    watch = make()
    clock.now += 600
    assert watch.is_save_due(0)
    save(watch, clock, 10)
    clock.now += 599
    assert not watch.is_save_due(1)
    clock.now += 1
    assert watch.is_save_due(2)


@pytest.mark.parametrize("step_s", [20, 40])
def test_a_step_that_outlasts_a_schedulers_patience_is_said_once(clock, capsys, step_s):
    watch = make()
    for step in range(3):
        clock.now += step_s
        watch.is_save_due(step)
    advice = "ask the scheduler for more time: see --signal in examples/slurm.sh"
    said = f"a save on SIGTERM waits up to 40 s; {advice}\n"
    assert capsys.readouterr().out == (said if step_s == 40 else "")


def test_saving_takes_at_most_2_percent_of_the_time(clock):
    """A save of 60 s: not every 10 minutes but every 50."""
    watch = make(num_steps=1000)
    begin = clock.now
    saving_s = 0
    for step in range(500):
        clock.now += 30
        if watch.is_save_due(step):
            save(watch, clock, 60)
            saving_s += 60
    assert 0.015 < saving_s / (clock.now - begin) < 0.0201


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        (dict(save_minutes=0.0), []),
        (dict(save_minutes=0.0, save_every=3), [2, 5, 6]),
        (dict(save_minutes=1e6, save_every=3), [2, 5, 6]),
        (dict(save_minutes=1e6, save_at=2, num_steps=8), [7]),
        (dict(save_minutes=1e-9, save_at=3), [2, 5]),
    ],
)
def test_saves_by_steps_none_at_all_and_at_steps_from_which_a_run_can_go_on_alone(
    clock, changes, due
):
    changes = dict(num_steps=7) | changes
    watch = make(**changes)
    found = []
    for step in range(changes["num_steps"]):
        clock.now += 1
        if watch.is_save_due(step):
            found.append(step)
    assert found == due


def test_all_ranks_save_at_once_whatever_their_clocks_say(monkeypatch):
    def job():
        watch = make(save_minutes=1.0)
        watch._saved_at -= 100 * (1 + dist.get_rank()) if dist.get_rank() else 0
        first = watch.is_save_due(0)
        watch._saved_at -= 0 if dist.get_rank() else 100
        return first, watch.is_save_due(1)

    assert run_ranks(2, job) == [(False, True)] * 2  # by rank 0's clock


def test_a_save_that_fails_is_said_and_tried_again_later(clock, capsys):
    watch = make(num_steps=4)
    clock.now += 600
    assert watch.is_save_due(0)
    with watch.saving():
        raise OSError("step-000001: not saved (No space left on device)")
    said = "the state can't be written: step-000001: not saved (No space left on device)\n"
    assert capsys.readouterr().out.endswith(f"warning: {said}")
    clock.now += 1
    assert not watch.is_save_due(1)
    clock.now += 600
    assert watch.is_save_due(2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stop_says_whether_its_state_was_saved(clock, capsys, monkeypatch, fails):
    codes = []
    monkeypatch.setattr(guard.os, "_exit", codes.append)
    watch = make(num_steps=4)
    watch._asked = signal.SIGTERM
    assert watch.is_save_due(0)
    with watch.saving():
        if fails:
            raise OSError("full")
    watch.leave_if_over(0)
    state = "NOT saved" if fails else "saved; the same command with --resume goes on"
    assert capsys.readouterr().out.endswith(f"stopped after step 1 of 4 (SIGTERM): {state}\n")
    assert codes == [128 + signal.SIGTERM]


# Signals

PROGRAM = """
import sys, time
from types import SimpleNamespace
from guard import Guard
config = SimpleNamespace(save_minutes=10.0, save_every=0, max_skipped=8)
guard = Guard(config, None, 100, str)
print("up", flush=True)
for step in range(100):
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        time.sleep(0.01)
    if guard.is_save_due(step):
        with guard.saving():
            print("saves", flush=True)
    guard.leave_if_over(step)
"""


def hear_signals():
    """Those that nohup, or a shell's &, would have ignored in this process and all below it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(step_s, **env):
    command = [sys.executable, "-c", PROGRAM, str(step_s)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    options = dict(cwd=ROOT, env=os.environ | env, preexec_fn=hear_signals)
    job = subprocess.Popen(command, **options, **pipes)
    assert job.stdout.readline() == "up\n"
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_step_saved_and_says_how_to_go_on(number):
    job = start(0.3)
    job.send_signal(number)
    job.send_signal(number)  # as a scheduler does: to all processes, and through the launcher
    out, err = job.communicate(timeout=30)
    assert job.returncode == 128 + number
    assert out == (
        f"saves\nstopped after step 1 of 100 ({number.name}): "
        "saved; the same command with --resume goes on\n"
    )
    what = "this step is finished and saved; once more ends it at once"
    assert err == f"{number.name}: {what}\n"


def test_a_second_signal_ends_the_run_at_once():
    job = start(60)
    job.send_signal(signal.SIGINT)
    assert "once more" in job.stderr.readline()
    time.sleep(1.2)
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=5) == 128 + signal.SIGINT


def test_a_signal_that_is_ignored_stays_so():
    """nohup: the terminal may close."""
    script = 'trap "" HUP; exec "$0" -c "$@"'
    command = ["bash", "-c", script, sys.executable, PROGRAM, "0.2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert job.poll() is None
        job.kill()


def test_one_rank_that_is_asked_stops_all(tmp_path):
    def job():
        watch = make(tmp_path)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not watch._asked:
                time.sleep(0.01)
        return watch.is_save_due(0), watch._stop

    assert run_ranks(2, job) == [(True, signal.SIGTERM)] * 2


# Gradients that are not finite


def row(*lengths, **fields):
    num = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(num)
    source = tuple(range(len(lengths)))
    return SimpleNamespace(tokens=tokens, cu_seqlens=bounds, source=source, fields=fields)


def test_a_skipped_minibatch_is_counted_and_its_samples_are_written(tmp_path, clock, capsys):
    meter = Metrics()
    watch = Guard(RunConfig(max_skipped=2), tmp_path, 9, lambda ids: str(ids.tolist()))
    values = torch.tensor([0.0, 1.0, math.inf, 3.0, 4.0])
    rows = [row(2, 3, advantages=values, response_mask=values > 0), row()]
    watch.count("actor", 1.5, 4, rows, meter)
    assert not list(tmp_path.iterdir()) and "actor/skipped" not in meter.reduce()
    watch.count("actor", math.nan, 4, rows, meter)
    watch.count("actor", 1.0, 4, rows, meter)
    watch.count("actor", math.inf, 5, [row(1)], meter)
    assert meter.reduce()["actor/skipped"] == 2.0
    lines = (tmp_path / "skipped-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 4, "model": "actor", "not_finite": [], "text": "[0, 1]"},
        {"step": 4, "model": "actor", "not_finite": ["advantages"], "text": "[2, 3, 4]"},
        {"step": 5, "model": "actor", "not_finite": [], "text": "[0]"},
    ]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("warning: step 5: the gradient norm of the actor is nan: minibatch")
    assert len(said) == 2
    assert not watch.is_save_due(5)
    watch.count("critic", math.nan, 6, [], meter)  # another model's
    assert not watch.is_save_due(6)
    watch.count("actor", math.nan, 6, [], meter)
    assert watch.is_save_due(6)


def test_a_minibatch_that_all_ranks_skip_is_one(tmp_path):
    def job():
        meter = Metrics()
        make(tmp_path).count("actor", math.nan, 0, [], meter)
        return meter.reduce()["actor/skipped"]

    assert run_ranks(2, job) == [1.0, 1.0]


def test_a_full_disk_does_not_end_the_run_that_skips(clock, capsys):
    watch = make(Path("/proc"), max_skipped=2)
    watch.count("actor", math.nan, 0, [row(1)], Metrics())
    assert "can't be written" in capsys.readouterr().out


def poisoned(calls, entry):
    """actor_loss, or critic_loss for the critic, whose nth calls give NaN on rank 1, or alone."""
    name = "actor_loss" if entry is grpo else "critic_loss"
    real = getattr(grpo.losses, name)
    count = iter(range(10_000))

    def loss(*arguments):
        value, stats = real(*arguments)
        bad = dist.get_rank() == dist.get_world_size() - 1 and next(count) in calls
        return value * (math.nan if bad else 1.0), stats

    return {f"losses.{name}": loss}


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_minibatch_with_a_nan_on_one_rank_is_skipped_on_all_and_the_run_goes_on(
    tiny, files, tmp_path, entry, world_size
):
    name = "actor" if entry is grpo else "critic"
    args = settings(tiny, files, tmp_path, entry, num_steps=3)
    run = train(args, world_size, **poisoned({2}, entry))
    skipped = [record.get(f"{name}/skipped") for record in records(run)]
    assert skipped == [None, 1.0, None]
    assert [record[f"{name}/num_updates"] for record in records(run)] == [2, 1, 2]
    assert all(x.isfinite().all() for x in weights(run).values())
    assert records(run)[2]["actor/grad_norm"] > 0
    assert (run / f"skipped-rank{world_size - 1}.jsonl").exists()


def test_a_run_of_nan_stops_saved_with_the_weights_before_the_first(tiny, files, tmp_path):
    args = settings(tiny, files, tmp_path, num_steps=9, run=dict(max_skipped=3, save_minutes=10.0))
    with pytest.raises(RuntimeError, match="rank 0 ended with exit code 1 and no exception"):
        train(args, **poisoned(range(2, 100), grpo))
    assert len(records(args.run.directory)) == 3  # 2 minibatches a step: 4 were skipped
    steps = sorted(p.name for p in (args.run.directory / "checkpoints").iterdir())
    assert steps == ["step-000003"]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_with_a_gradient_that_is_not_finite_changes_no_weight_and_no_moment(norm):
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    assert math.isfinite(optim.optimizer_step(layer, optimizer, 0.1, 1.0))
    before = [p.clone() for p in layer.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    layer.weight.grad = torch.full((1, 2), norm)
    layer.bias.grad = torch.ones(1)
    assert not math.isfinite(optim.optimizer_step(layer, optimizer, 0.1, 1.0))
    assert all(
        p.grad is None and p.equal(x) for p, x in zip(layer.parameters(), before, strict=True)
    )
    found = [s["exp_avg"] for s in optimizer.state.values()]
    assert all(a.equal(b) for a, b in zip(found, moments, strict=True))


def test_a_record_is_never_missing_for_a_state_that_is_saved(tiny, files, tmp_path):
    """The state was saved before the step's record was written: killed between, it was lost."""
    killed = {"checkpoint.save": lambda *_, **__: os._exit(9)}
    args = settings(tiny, files, tmp_path, run=dict(save_every=1))
    with pytest.raises(RuntimeError, match="exit code 9"):
        train(args, **killed)
    assert [record["step"] for record in records(args.run.directory)] == [0]
    assert load(args.run.directory / "checkpoints", {}) == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--ranks", "2"], ["--script", "ppo", "--torchrun"]])
def test_a_run_that_is_killed_five_times_ends_as_if_it_had_not_been(words):
    command = [sys.executable, ROOT / "tests" / "kills.py", "--kills", "5", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    job = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert job.returncode == 0, job.stdout + job.stderr[-3000:]
    assert "5 kills" in job.stdout and "bit-equal" in job.stdout
