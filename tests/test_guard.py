"""A guard: it saves by the clock, stops at the end of a step, and skips what is not finite."""

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import kills
import pytest
import torch
import torch.distributed as dist
from jobs import Scripted, records, settings, train, weights
from ranks import run_ranks
from tiny import save_tiny

import checkpoint
import grpo
import guard
import losses
import optim
import ppo
from checkpoint import TrainState, load
from guard import Guard
from metrics import Metrics
from packing import PackedRow, pack, sequence
from prefix import share
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


# Errors


def broken(name, at, when=lambda: True):
    """{name: a stand-in whose call number `at` raises, on the ranks where `when()` is true}."""
    module, attribute = name.split(".", 1)
    real = functools.reduce(getattr, attribute.split("."), sys.modules[module])
    count = iter(range(10_000))

    def call(*arguments, **options):
        if next(count) == at and when():
            raise ZeroDivisionError("on purpose")
        return real(*arguments, **options)

    return {name: call}


def is_rank1():
    return dist.get_rank() == 1


@pytest.mark.parametrize("entry", [grpo, pytest.param(ppo, marks=pytest.mark.slow)])
def test_an_error_before_the_update_leaves_the_state_of_the_step_before(
    tiny, files, tmp_path, capfd, entry
):
    """A reward function raised in the fifth step, and the last save was ten minutes ago."""
    more = dict(rollout_every=2) if entry is ppo else {}
    args = settings(tiny, files, tmp_path, entry, num_steps=6, run=dict(save_minutes=10.0), **more)
    at = 2 if entry is ppo else 4
    with pytest.raises(ZeroDivisionError):
        train(args, **broken("sampling.to_groups", at))
    after = "stopped by an error after step 4 of 6: --resume goes on from the state after step 4\n"
    assert after in capfd.readouterr().out
    resumed = train(replace(args, run=replace(args.run, resume=True)))
    whole = train(settings(tiny, files, tmp_path / "whole", entry, num_steps=6, **more))
    assert [record["step"] for record in records(resumed)] == list(range(6))
    for name, x in weights(whole).items():
        assert weights(resumed)[name].equal(x), name


def test_an_error_within_the_update_saves_nothing_and_names_the_older_state(
    tiny, files, tmp_path, capfd
):
    args = settings(tiny, files, tmp_path, num_steps=6, run=dict(save_minutes=10.0, save_every=2))
    for at, older in ((1, "there is no saved state"), (5, "--resume goes on from the state after")):
        with pytest.raises(ZeroDivisionError):
            train(args, **broken("losses.actor_loss", at))  # in the second minibatch of two
        what = f"NOT saved (its update had begun); {older}"
        done = f"stopped by an error after step {at // 2} of 6"
        assert f"{done}: {what}" in capfd.readouterr().out
    assert [path.name for path in (args.run.directory / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.slow
def test_an_error_of_one_rank_has_all_ranks_save_and_leave(tiny, files, tmp_path, capfd):
    """The other one waits for it in a collective, and would for --timeout-s."""
    args = settings(tiny, files, tmp_path, num_steps=4, run=dict(save_minutes=10.0))
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        train(args, 2, **broken("sampling.to_groups", 2, is_rank1))
    assert "step 2 of 4: --resume goes on from the state after step 2\n" in capfd.readouterr().out
    (found,) = (args.run.directory / "checkpoints").iterdir()
    assert found.name == "step-000002" and (found / "rank1.pt").exists()
    resumed = train(replace(args, run=replace(args.run, resume=True)), 2)
    whole = train(settings(tiny, files, tmp_path / "whole", num_steps=4), 2)
    for name, x in weights(whole).items():
        assert weights(resumed)[name].equal(x), name


def test_ranks_that_are_not_at_the_same_step_save_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(guard, "MEET_S", 0.5)

    def job():
        watch = make(tmp_path)
        saved = []
        watch.protect(0, {}, lambda *_, **__: saved.append(1), contextlib.nullcontext)
        watch._num_done = 4
        watch._is_sound = dist.get_rank() == 0
        dist.barrier()
        if dist.get_rank() == 0:
            watch._end_by_error(lambda *_: None, ValueError, ValueError(), None)
        watch._has_failed = True  # stays, to answer
        watch._is_told.wait()
        return saved

    assert run_ranks(2, job) == [[], []]
    what = "NOT saved (another rank's update had begun); there is no saved state\n"
    assert f"stopped by an error after step 4 of 100: {what}" in capfd.readouterr().out


def test_the_best_state_of_a_later_step_than_a_resume_begins_with_is_made_again(tmp_path):
    """Its number would be in the way of the save."""
    weight = torch.nn.Linear(1, 1)
    state = {"policy": TrainState(weight, torch.optim.AdamW(weight.parameters()))}

    def best_after(first_step, *rewards):
        watch = make(tmp_path)
        watch.protect(first_step, state, checkpoint.save, contextlib.nullcontext)
        for i, reward in enumerate(rewards):
            watch.keep_best(first_step + i, [SimpleNamespace(rewards=[reward, 0.0])], Metrics())
        return [path.name for path in (tmp_path / "best").iterdir()]

    hook = sys.excepthook
    assert best_after(3, 0.5, 0.9, 0.7) == ["step-000004"]
    assert best_after(5, 0.8) == ["step-000004"]
    assert best_after(3, 0.2, 0.6) == ["step-000004"]
    assert best_after(2, 0.2) == ["step-000002"]
    sys.excepthook = hook


# Gradients that are not finite


def row(*lengths, **fields):
    num = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(num)
    source = tuple(range(len(lengths)))
    return PackedRow(tokens, tokens, bounds, 0, 0, source, fields)


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


def test_a_skipped_sample_is_written_with_the_prompt_that_it_shares(tmp_path, clock):
    group = [sequence(torch.tensor([7, 8]), torch.tensor(response)) for response in ([1], [2, 3])]
    rows = pack(group, 9, groups=[0, 0], share=share)
    watch = Guard(RunConfig(max_skipped=2), tmp_path, 9, lambda ids: str(ids.tolist()))
    watch.count("actor", math.nan, 4, rows, Metrics())
    lines = (tmp_path / "skipped-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["[7, 8, 1]", "[7, 8, 2, 3]"]


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
    real = getattr(losses, name)
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


def not_finite(loss, names):
    """A stand-in for losses.NAME: its odd calls get rows with a NaN in each of the fields in turn,
    and then sound ones."""
    real = getattr(losses, loss)
    poisons = iter([x for name in names for x in (None, name)])

    def poisoned_loss(*arguments):
        position = next(i for i, x in enumerate(arguments) if hasattr(x, "fields"))
        name = next(poisons, None)
        arguments = list(arguments)
        if name is not None:
            row = arguments[position]
            bad = row.fields[name].where(~row.fields["response_mask"], math.nan)
            arguments[position] = replace(row, fields=row.fields | {name: bad})
        return real(*arguments)

    return {f"losses.{loss}": poisoned_loss}


@pytest.mark.parametrize(
    "entry, loss, names",
    [
        (grpo, "actor_loss", ["advantages", "old_logprobs", "ref_logprobs"]),
        pytest.param(ppo, "critic_loss", ["values", "returns"], marks=pytest.mark.slow),
    ],
)
def test_a_nan_in_any_quantity_is_a_skipped_minibatch(tiny, files, tmp_path, entry, loss, names):
    batch = dict(num_epochs=2)  # four updates a step, all with old log-probabilities
    args = settings(tiny, files, tmp_path, entry, batch=batch, loss=dict(kl_coef=0.1))
    run = train(args, **not_finite(loss, names))
    name = loss.partition("_")[0]
    assert sum(record.get(f"{name}/skipped", 0) for record in records(run)) == len(names)
    assert sum(record[f"{name}/num_updates"] for record in records(run)) == 8 - len(names)
    assert all(x.isfinite().all() for x in weights(run).values())


# Faults of one rank of two, in each of the six phases
PHASES = {
    1: "sampling.draw",
    2: "rewards.Scorer.collect",
    3: "packing.lay_out",
    4: "logprobs.with_logprobs",
    5: "losses.actor_loss",
    6: "report.Report.write",
}


def end_of_a_job_with_a_fault(directory, phase, fault):
    """Exit code, seconds and output of two ranks, of which the second meets the fault in the second
    step's phase."""
    owner, _, name = PHASES[phase].rpartition(".")
    module, _, kind = owner.partition(".")
    owner = getattr(sys.modules[module], kind) if kind else sys.modules[module]
    real = getattr(owner, name)
    calls = iter(range(1000))
    per_step = 2 if phase == 5 else 1  # minibatches

    def faulty(*arguments, **options):
        if os.environ["RANK"] == "1" and next(calls) == per_step:
            fault()
        return real(*arguments, **options)

    setattr(owner, name, faulty)
    kills.GRACE_S = 1
    out = directory / f"{phase}-{fault.__name__}"
    more = "--timeout-s 6 --num-epochs 1 --save-every 0 --resample-tries 1 --refresh-every 0"
    words = [*kills.flags(directory, "grpo", out), *more.split(), "--loss.kl-coef", "0"]
    begin = time.monotonic()
    job = kills.Job("grpo", 2, words, directory / f"{out.name}.log", torchrun=False)
    setattr(owner, name, real)
    code = job.wait(60)
    return code, time.monotonic() - begin


def raises():
    raise ZeroDivisionError("on purpose")


def hangs():
    time.sleep(1000)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [raises, hangs])
def test_a_rank_that_fails_or_hangs_in_any_phase_ends_the_job_within_60_s(tmp_path, capfd, fault):
    """OpenRLHF#624: the other ranks waited for the watchdog, and the cause was not to be seen."""
    save_tiny(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(kills.REWARDS)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(i)} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for phase in PHASES:
        code, seconds = end_of_a_job_with_a_fault(tmp_path, phase, fault)
        out, error = capfd.readouterr()  # what Python prints; what C++ does is in the job's log
        assert code and seconds < 60, (phase, code, seconds)
        assert ("step    1/16" in out, "step    3/16" in out) == (True, False)
        if fault is hangs:
            assert "[rank 0] error: --timeout-s 6: another rank did not answer" in error, phase
            continue
        assert "[rank 1] Traceback" in error and "ZeroDivisionError: on purpose" in error
        state = "--resume goes on from the state after step 1"
        if phase == 6:
            state = "NOT saved (its update had begun); there is no saved state"
        assert f"stopped by an error after step 1 of 16: {state}\n" in out, phase


class Garbled(Scripted):
    """The first response to 1+1= ends with a log-probability that is none."""

    bad = math.nan

    def run(self, prompts, order, num_samples, temperature, seed):
        for ended in super().run(prompts, order, num_samples, temperature, seed):
            for index, ids, logprobs, truncated in ended:
                if index % num_samples == 0 and prompts[index // num_samples] == [3, 12, 3, 13]:
                    logprobs[-1] = self.bad
                yield [(index, ids, logprobs, truncated)]


@pytest.mark.parametrize(
    "bad, kind, world_size",
    [
        (math.inf, "off", 1),
        pytest.param(math.nan, "token", 2, marks=pytest.mark.slow),
        pytest.param(-math.inf, "mask", 1, marks=pytest.mark.slow),
        pytest.param(math.inf, "sequence", 1, marks=pytest.mark.slow),
    ],
)
def test_a_minibatch_with_a_sampled_logprob_that_is_not_finite_is_skipped_on_all_ranks(
    tiny, files, tmp_path, bad, kind, world_size
):
    """+inf made a weight of 0, and without a correction any was trained on."""
    backend = {"hf_backend.HfBackend": type("Garbled", (Garbled,), {"bad": bad})}
    args = settings(tiny, files, tmp_path, num_steps=4, loss=dict(importance=kind))
    run = train(args, world_size, **backend)
    found = records(run)  # an epoch: the prompt is in one of 8 minibatches
    assert sorted(record.get("actor/skipped", 0.0) for record in found) == [0.0, 0.0, 0.0, 1.0]
    assert sorted(record["actor/num_updates"] for record in found) == [1, 2, 2, 2]
    assert all(x.isfinite().all() for x in weights(run).values())
    text = "".join(file.read_text() for file in run.glob("skipped-rank*.jsonl"))
    odd = [json.loads(line)["not_finite"] for line in text.splitlines()]
    assert sorted(odd) == [[]] * 7 + [["rollout_logprobs"]]


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
