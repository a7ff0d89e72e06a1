"""A run begins and ends: settings, refusals, the run's directory, the process group."""

import ctypes
import dataclasses
import errno
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import typing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import grpo
import ppo
import run as run_file
from run import FLAGS, RunConfig, command_line, from_json

ROOT = Path(grpo.__file__).parent


@dataclass(frozen=True)
class Inner:
    betas: tuple[float, float] = (0.9, 0.95)
    """Two numbers."""
    names: tuple[str, ...] = ()
    """Words."""


@dataclass(frozen=True)
class Settings:
    model: str = "built-in"
    """A word."""
    num_steps: int = 5
    """A number."""
    limit: float = float("inf")
    """Another."""
    inner: Inner = field(default_factory=Inner)
    """More."""
    kind: typing.Literal["a", "b"] = "a"
    """One of two."""

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"--num-steps {self.num_steps}: at least 1")


def test_settings_come_back_from_json_as_they_were():
    settings = Settings(num_steps=7, inner=Inner((0.5, 0.6), ("a", "b")))
    assert from_json(Settings(), json.loads(json.dumps(asdict(settings)))) == settings
    assert from_json(settings, {"inner": {"names": ["c"]}}) == Settings(
        "built-in", 7, inner=Inner((0.5, 0.6), ("c",))
    )


def test_settings_of_another_version_and_refused_values_are_errors():
    with pytest.raises(ValueError, match="--inner.gone: is no setting"):
        from_json(Settings(), {"inner": {"gone": 1}})
    with pytest.raises(ValueError, match="----doc--: is no setting"):
        from_json(Settings(), {"__doc__": 1})
    with pytest.raises(ValueError, match="--num-steps 0: at least 1"):
        from_json(Settings(), {"num_steps": 0})


def test_the_command_line_goes_over_an_earlier_runs_settings(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(asdict(Settings("mine", 7, inner=Inner(names=("a",))))))

    def parsed(*argv):
        monkeypatch.setattr(sys, "argv", ["script.py", *argv])
        return command_line(Settings(), {"num_steps": 3}, "what it does")

    assert parsed() == Settings(num_steps=3)  # the built-in job's
    assert parsed("--model", "built-in") == parsed("--model=built-in") == Settings(num_steps=3)
    assert parsed("--model", "m") == parsed("--model=m") == Settings("m")
    expected = Settings("mine", 8, inner=Inner(names=("a",)))
    assert parsed("--config", str(file), "--num-steps", "8") == expected
    assert parsed("--num-steps", "8", f"--config={file}") == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-steps", "0"], "error: --num-steps 0: at least 1"),
        (["--num-steps", "many"], "error: --num-steps: invalid literal .* 'many'"),
        (["--num-stepz", "1"], "error: Unrecognized options: --num-stepz, 1.*--num-steps"),
        (["--limit", "1", "x"], "error: --limit 1 x: a word too many; flags are --name value"),
        (["--limit", "1", "--num-steps", "2", "1"], "error: --num-steps 2 1: a word too many"),
        (["--limit", "1", "1", "--num-steps", "1"], "error: --limit 1 1: a word too many"),
        (["x", "--limit", "1"], "error: x: a word too many; flags are --name value"),
        (["--limit"], "error: Missing value for argument '--limit'"),
        (["--kind", "x"], "error: invalid choice 'x' for argument '--kind'"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_refusal_begins_with_the_flag_in_any_locale(argv, message, encoding, monkeypatch):
    """A new user's finding: each said twice what it is; and where a console has ASCII alone, rules
    of dashes stood around it.
    """
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    printed = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    monkeypatch.setattr(sys, "stderr", printed)
    with pytest.raises(SystemExit):
        command_line(Settings(), {}, "what it does")
    printed.flush()
    told = printed.buffer.getvalue().decode()
    assert re.match(message, told) and told.count("\n") == 1 and "---" not in told, told


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--config", "nowhere.json"],
            "error: --config nowhere.json: no such file; give an earlier run's config.json",
        ),
        (["--num-steps", "0"], "error: .*--num-steps 0: at least 1"),
        (["--num-stepz", "1"], "^error: Unrecognized options: --num-stepz"),
        (["--num-steps", "many"], "error: .*many"),
        (
            ["--config", __file__],
            "error: --config .*test_run.py: is not a JSON object; give an earlier run's",
        ),
        (["--limit", "nan"], "error: --limit nan: must be a number"),
        (["--inner.betas", "1", "nan"], "error: --inner.betas 1.0 nan: must be a number"),
    ],
)
def test_a_refused_command_line_is_one_line_from_the_first_rank_alone(
    argv, message, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            command_line(Settings(), {}, "what it does")
        assert stop.value.code == 2
        shown = capsys.readouterr().err
        if rank == "0":
            assert re.search(message, shown), shown
        assert shown.count("\n") == (rank == "0")


def test_the_directory_of_an_earlier_run_is_kept_under_a_number_unless_it_is_resumed(
    tmp_path, capfd
):
    run = RunConfig(str(tmp_path), "mine")
    for num_steps in (
        1,
        2,
        3,
    ):  # each in a process of its own, which ends: a run in progress holds its directory
        run_ranks(1, run.open, Settings(num_steps=num_steps))
    steps = {
        p.name: json.loads((p / "config.json").read_text())["num_steps"] for p in tmp_path.iterdir()
    }
    assert steps == {"mine": 3, "mine.1": 1, "mine.2": 2}
    assert f"{tmp_path}/mine.2" in capfd.readouterr().out
    (tmp_path / "mine" / "checkpoints" / "step-000001").mkdir(parents=True)
    run_ranks(1, RunConfig(str(tmp_path), "mine", resume=True).open, Settings(num_steps=4))
    assert {p.name for p in tmp_path.iterdir()} == {"mine", "mine.1", "mine.2"}
    assert json.loads((run.directory / "config.json").read_text())["num_steps"] == 4


def test_settings_without_meaning_are_refused():
    for setting, message in (
        (dict(save_every=-1), "--save-every -1: must be at least 0"),
        (dict(save_minutes=-1.0), "--save-minutes -1.0: must be at least 0"),
        (dict(max_skipped=0), "--max-skipped 0: must be at least 1"),
        (dict(keep=0), "--keep 0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            RunConfig(**setting)
    for name in ("", ".", "..", "a/b", "../a"):  # "" would rename the directory of all runs
        with pytest.raises(ValueError, match=f"--name '{name}': must be the name of a directory"):
            RunConfig(name=name)


def test_a_run_in_progress_its_own_model_and_a_resume_from_nothing_are_refused(tmp_path):
    """Two jobs of one name would write into one directory; a model in it would be renamed away
    before it is read.
    """
    run = RunConfig(str(tmp_path), "x")
    with pytest.raises(
        ValueError,
        match="--resume: .*/x has no saved state; leave it out",
    ):
        RunConfig(str(tmp_path), "x", resume=True).check(Settings())
    run.open(Settings())
    (tmp_path / "x" / "hf").mkdir()
    with pytest.raises(ValueError, match="lies in the directory of this run; give another --name"):
        run.check(Settings(), str(tmp_path / "x" / "hf"))
    with pytest.raises(
        ValueError, match=f"--name x: process {os.getpid()} on .* is at work there; end it or give"
    ):
        run.check(Settings())
    assert not (tmp_path / "x.1").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_said_in_a_line_and_the_run_goes_on(
    tmp_path, monkeypatch, capfd, number
):
    """Lustre without -o flock refused every start with "Function not implemented"."""

    def no_lock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("run.fcntl.flock", no_lock)
    run = RunConfig(str(tmp_path), "x")
    for num_steps in (1, 2):
        run.check(Settings(num_steps=num_steps))
        run.open(Settings(num_steps=num_steps))
        told = [line for line in capfd.readouterr().out.splitlines() if "warning" in line]
        advice = f"cannot be locked ({os.strerror(number)}); start no second run of this --name"
        assert told == [f"warning: {tmp_path}/x: {advice}"]
    assert json.loads((tmp_path / "x" / "config.json").read_text())["num_steps"] == 2
    assert json.loads((tmp_path / "x.1" / "config.json").read_text())["num_steps"] == 1


def test_the_lock_of_a_process_that_was_killed_holds_nobody_up(tmp_path):
    """Its file is still there and names it; so it does while the process is stopped."""
    run = RunConfig(str(tmp_path), "x")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        run.open(Settings())
        os.write(writer, b".")
        signal.pause()
    os.read(reader, 1)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(ValueError, match=f"--name x: process {child} on .* is at work there"):
        run.check(Settings())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert f"{child} on " in (tmp_path / "x" / "lock").read_text()
    run.check(Settings())
    run.open(Settings(num_steps=7))
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x.1"}


def test_a_directory_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    tmp_path, monkeypatch
):
    """A new user's finding: "[Errno 30] Read-only file system", without a flag, after the load."""
    (tmp_path / "file").write_text("")
    rule = "must be a directory that you may write to"
    for output_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"--output-dir {output_dir}: {rule}"):
            RunConfig(str(output_dir), "x").check(Settings())
    RunConfig(str(tmp_path / "new" / "below"), "x").check(Settings())
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match=f"--output-dir {tmp_path}: {rule}"):
        RunConfig(str(tmp_path), "x").check(Settings())


def test_a_disk_without_room_for_the_model_is_refused(tmp_path, monkeypatch):
    """A new user's finding: the disk was full at the export, and what was learned was gone."""
    sizes = {"model-00001-of-00002.safetensors": 3 << 28, "model-00002-of-00002.safetensors": 1}
    (tmp_path / "model").mkdir()
    for name, size in sizes.items():
        with open(tmp_path / "model" / name, "wb") as file:
            file.truncate(size)
    run = RunConfig(str(tmp_path), "x")
    for free, is_enough in (((3 << 28) + 1, True), (3 << 28, False)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        if is_enough:
            run.check(Settings(), str(tmp_path / "model"))
            continue
        rule = "on a disk with room for the model: 0.75 GiB, and 0.75 are free"
        with pytest.raises(ValueError, match=f"--output-dir {tmp_path}: must be {rule}"):
            run.check(Settings(), str(tmp_path / "model"))


def test_the_lock_is_as_readable_as_the_settings(tmp_path):
    """A new user's finding: it could be executed."""
    RunConfig(str(tmp_path), "x").open(Settings())
    lock, config = (tmp_path / "x" / name for name in ("lock", "config.json"))
    assert lock.stat().st_mode == config.stat().st_mode


def test_a_kill_while_the_settings_are_written_leaves_those_of_before(tmp_path, monkeypatch):
    """A run that was killed there had an empty config.json, and its resume was refused."""
    file = tmp_path / "x" / "config.json"
    file.parent.mkdir()
    file.write_text(before := '{"seed": 0}')

    def killed(path, text):
        with open(path, "w") as part:
            part.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        RunConfig(str(tmp_path), "x", resume=True).open(Settings())
    assert file.read_text() == before


def test_a_resume_with_another_seed_is_refused_and_leaves_the_settings_as_they_were(tmp_path):
    """They were overwritten first, and a later --config began with the refused ones."""
    run = RunConfig(str(tmp_path), "x", resume=True)
    (tmp_path / "x" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "x" / "config.json").write_text('{"seed": 3}')
    with pytest.raises(ValueError, match="--resume: .*/x was made with --seed 3; give the same"):
        run.check(Settings())
    assert (tmp_path / "x" / "config.json").read_text() == '{"seed": 3}'


def test_a_resume_with_another_model_or_fewer_steps_than_were_made_is_refused(tmp_path):
    """It was found out when the weights were loaded; and fewer steps cut the records and put older
    weights in place.
    """
    run = RunConfig(str(tmp_path), "x", resume=True)
    (tmp_path / "x" / "checkpoints" / "step-000007").mkdir(parents=True)
    for earlier, message in (
        ({"model_path": "a/b"}, "--resume: .*/x was made with --model a/b; give the same"),
        ({"model": "built-in"}, "--num-steps 6: .*/x has 7 already; give more"),
    ):
        (tmp_path / "x" / "config.json").write_text(json.dumps(earlier))
        with pytest.raises(ValueError, match=message):
            run.check(Settings(num_steps=6))
        assert json.loads((tmp_path / "x" / "config.json").read_text()) == earlier
    run_ranks(
        1, run.open, Settings(num_steps=7)
    )  # as when the last save was made and the model not yet written


def resumed(tmp_path, earlier, now):
    """The run's check and opening on rank 0 where its config.json has `earlier`."""
    run = RunConfig(str(tmp_path), "x", resume=True)
    (tmp_path / "x" / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
    written = json.loads(json.dumps(asdict(from_json(now, {}))))
    for path, value in earlier.items():
        *groups, name = path.split(".")
        inner = written
        for group in groups:
            inner = inner[group]
        inner[name] = value
    (tmp_path / "x" / "config.json").write_text(json.dumps(written))
    run.check(now)
    run_ranks(1, run.open, now)


@pytest.mark.parametrize(
    ("setting", "earlier", "flag"),
    [
        ("data.weights", [1.0], "--data.weights"),
        ("data.split", "test", "--data.split"),
        ("model.master_dtype", "bfloat16", "--model.master-dtype"),
        ("reward_model_path", "a/b", "--reward-model"),
        ("critic.path", "a/b", "--critic.path"),
        ("rollout_every", 2, "--rollout-every"),
    ],
)
def test_a_resume_with_other_settings_that_its_state_follows_from_is_refused(
    tmp_path, setting, earlier, flag
):
    """Automodel#3883, Megatron-LM#5213: settings of checkpoint and flags mixed."""
    with pytest.raises(ValueError, match=rf"--resume: .*/x was made with {re.escape(flag)} "):
        resumed(tmp_path, {setting: earlier}, ppo.Args())


def test_a_steered_kl_coefficient_goes_on_and_one_that_is_fixed_is_taken_from_the_flag(
    tmp_path, capfd
):
    resumed(tmp_path, {"gae.kl_coef": 0.5}, ppo.Args())
    assert "resume: --gae.kl-coef 0.5 -> 0.0\n" in capfd.readouterr().out
    steered = from_json(ppo.Args(), {"gae": {"kl_coef": 0.1, "kl_target": 0.01}})
    with pytest.raises(ValueError, match="was made with --gae.kl-coef 0.5; give the same"):
        resumed(tmp_path, {"gae.kl_coef": 0.5}, steered)


def test_a_resume_says_in_a_line_each_what_else_is_set_otherwise_now(tmp_path, capfd):
    """A new user's finding: --group-size 3 and another reward went on without a word."""
    earlier = {"batch.group_size": 3, "reward.functions": ["exact"], "optim.betas": [0.5, 0.9]}
    resumed(tmp_path, earlier | {"learning_rate": 0.5}, grpo.Args())
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("resume: ")]
    assert sorted(told) == [
        "resume: --group-size 3 -> 8",
        "resume: --learning-rate 0.5 -> 1e-06",
        "resume: --optim.betas [0.5, 0.9] -> [0.9, 0.98]",
        "resume: --reward.functions ['exact'] -> ['math']",
    ]
    resumed(tmp_path, {}, grpo.Args())
    assert "resume:" not in capfd.readouterr().out


def test_a_resume_with_a_torn_settings_file_is_refused_by_its_name(tmp_path):
    run = RunConfig(str(tmp_path), "x", resume=True)
    (tmp_path / "x" / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="--resume .*/x/config.json: no such file; give an earl"):
        run.check(Settings())  # whatever differs now would go on without a word
    for text in ('{"seed": ', "[" * 100_000, "[]"):
        (tmp_path / "x" / "config.json").write_text(text)
        with pytest.raises(ValueError, match="--resume .*/x/config.json: is not a JSON object"):
            run.check(Settings())


# What comes from a file is checked as the command line is


def settings_of(args, group=()):
    """(path of names, type) of every setting."""
    kinds = typing.get_type_hints(type(args))
    for setting in dataclasses.fields(args):
        value = getattr(args, setting.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, (*group, setting.name))
        else:
            yield (*group, setting.name), kinds[setting.name]


def wrong_values(kind):
    if typing.get_origin(kind) is typing.Literal:
        return ["nonsense", str(typing.get_args(kind)[0]).upper() + "s", 3.5, None, []]
    if typing.get_origin(kind) is tuple:
        return ["x.jsonl", 3, None, {"a": 1}, [[]], [None]]
    return {
        bool: ["false", 1, None, []],
        int: ["10", 10.5, True, None, [1]],
        float: ["1e-6", True, None, [0.1], "nan"],
        str: [3, True, None, ["x"]],
    }[kind]


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
def test_a_file_with_a_value_of_another_type_is_refused_by_the_settings_flag(entry):
    """scaleapi/vero#22: a typo in a choice fell into the last branch; trl#1450,
    LlamaFactory#8505, #4149: "1e-6" is a text, "false" is true. Every setting of every group, with
    each kind of wrong value.
    """
    num_refused = 0
    for path, kind in settings_of(entry.Args()):
        for value in wrong_values(kind):
            nested = value
            for name in reversed(path):
                nested = {name: nested}
            with pytest.raises(ValueError) as refusal:
                from_json(entry.Args(), nested)
            message = str(refusal.value)
            flag = FLAGS.get(path[-1], path[-1]).replace("_", "-")
            assert message.startswith("--") and flag in message.split()[0].rstrip(":"), message
            assert "\n" not in message
            num_refused += 1
    assert num_refused > 200


# Beyond these a number means "no limit", or is only compared with others.
LIMITS = {"clip_high", "importance_cap", "target_kl", "value_clip", "max_grad_norm", "weights"}
LIMITS |= {"mismatch_alarm", "entropy_alarm", "max_error_frac"}


@pytest.mark.parametrize("entry", [grpo, ppo], ids=["grpo", "ppo"])
@pytest.mark.parametrize("value", [1e300, 1e39, -1e39, math.inf, -math.inf])
def test_a_number_that_fp32_does_not_hold_is_refused_unless_it_is_a_limit(entry, value):
    """A coefficient of 1e39 is finite as a setting, and 0 times it NaN in the loss."""
    for path, kind in settings_of(entry.Args()):
        is_several = typing.get_origin(kind) is tuple and float in typing.get_args(kind)
        if not (kind is float or is_several) or (path[-1] in LIMITS and value > 0):
            continue
        nested = [value] * (2 if path[-1] == "betas" else 1) if is_several else value
        for name in reversed(path):
            nested = {name: nested}
        with pytest.raises(ValueError, match="^--.*: must be"):
            from_json(entry.Args(), nested)
    with pytest.raises(ValueError, match="^--seed .*: must be at least 0, and below 2.32"):
        from_json(entry.Args(), {"seed": 10**30})


@pytest.mark.parametrize(
    "values", [{"loss": None}, {"loss": "x"}, {"nonsense": 1}, {"loss": {"x": 1}}]
)
def test_a_file_with_a_group_that_is_none_or_a_name_that_is_no_setting_is_refused(values):
    with pytest.raises(ValueError, match=r"^--(loss|nonsense)"):
        from_json(grpo.Args(), values)


def test_whole_numbers_are_numbers_and_lists_are_tuples():
    args = from_json(grpo.Args(), {"loss": {"kl_coef": 1}, "optim": {"betas": [0.9, 0]}})
    assert args.loss.kl_coef == 1.0 and isinstance(args.loss.kl_coef, float)
    assert args.optim.betas == (0.9, 0.0)


def test_every_settings_file_comes_back_as_it_was():
    for entry in (grpo, ppo):
        written = json.loads(json.dumps(dataclasses.asdict(entry.Args())))
        assert from_json(entry.Args(), written) == entry.Args()


# Refusals


@pytest.mark.parametrize("who", ["rank 1 alone", "all"])
def test_what_one_rank_meets_is_printed_once_whichever_rank_it_is(tmp_path, who):
    """VLM-R1#294: the job ended by a communication error, and the real cause was shown nowhere.
    run_ranks ends the other rank as torchrun does.
    """

    def job():
        sleep = time.sleep
        run_file.time.sleep = lambda seconds: sleep(seconds / 5)
        rank = dist.get_rank()
        try:
            with run_file.one_line_errors():
                if rank == 1 or who == "all":
                    sleep(0.1 * (1 - rank))  # a second line would be the first
                    raise ValueError("--flag 3: must be\n   less")
                dist.barrier()
        except SystemExit as stop:
            (tmp_path / f"rank{rank}").write_text(f"{stop.code}")
            raise

    with pytest.raises(SystemExit):
        run_ranks(2, job)
    [told] = tmp_path.iterdir()
    assert told.read_text() == "error: --flag 3: must be less"
    assert told.name == ("rank0" if who == "all" else "rank1")


def in_a_fork(job):
    """Exit code of a process of its own, without a rank's variables, in which job() runs."""

    def alone():
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
            os.environ.pop(name, None)
        job()

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (OSError(28, "No space left on device", "runs/x"), 1),
        (RuntimeError("--reward.max-error-frac 0.25: f raised\n  x"), 1),
        (RuntimeError("of our own"), 3),
        (RuntimeError("[x.cc:84] Timed out waiting 20000ms for recv operation to complete"), 1),
        (dist.DistStoreError("wait timeout after 60000ms, keys: /x"), 1),
    ],
)
def test_what_the_user_can_mend_during_a_run_is_one_line_and_a_fault_has_its_traceback(
    capfd, error, lines
):
    """A full disk was 50 lines, a reward function that fails its report twice."""

    def job():
        run_file.init_distributed(0, 60.0)
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())

    assert in_a_fork(job) == 1
    told = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    if lines == 1:
        assert len(told) == 1 and told[0].startswith("[rank 0] error: "), told
        is_known = re.search(r"--timeout-s \d0: another rank", told[0])
        assert "000ms" not in str(error) or is_known, told
    else:
        assert told[0] == "[rank 0] Traceback (most recent call last):"


# The process group

START = """
import sys, time
sys.path.insert(0, {root!r})
from run import init_distributed
import torch, torch.distributed as dist
mesh = init_distributed(7, 300.0)
"""


def test_a_program_without_torchrun_is_one_rank_and_takes_no_port(capfd):
    """huggingface/trl#3979: a second job on a host died, the port was taken."""

    def job():
        mesh = run_file.init_distributed(7, 300.0)
        has_port = "MASTER_PORT" in os.environ
        print(mesh.size(), mesh.mesh_dim_names, has_port, torch.initial_seed())
        end_with_parent = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(end_with_parent))
        print(end_with_parent.value, flush=True)

    assert in_a_fork(job) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "1 ('shard',) False 7"
    assert lines[1] == "0"  # it outlives its shell: nohup


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_job_soon_with_its_traceback(tmp_path):
    """prime-rl#2515: the other ranks waited for the watchdog, whose message hid the cause."""
    file = tmp_path / "program.py"
    text = "if dist.get_rank() == 1:\n    nonsense\ndist.barrier()\n"
    file.write_text(START.format(root=str(ROOT)) + text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = dict(capture_output=True, text=True, timeout=100)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    job = subprocess.run([sys.executable, *torchrun, str(file)], env=environment, **options)
    seconds = time.monotonic() - began
    assert job.returncode != 0 and seconds < 100, seconds  # the barrier's own limit is 300 s
    assert (
        "[rank 1] Traceback" in job.stderr
        and "NameError: name 'nonsense' is not defined" in job.stderr
    )


def is_at_work(pid):
    """Whether the process runs; one that has ended and that nobody asked for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def has_ended(pid, limit_s):
    end = time.monotonic() + limit_s
    while is_at_work(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_at_work(pid)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_rank_ends_with_its_parent(is_asked):
    """A new user's finding: kill -9 of the launcher, and the ranks trained on as orphans."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        rank = os.fork()
        if rank == 0:
            if is_asked:
                run_file._end_with_parent()
            os.write(write, f"{os.getpid()}".encode())
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    rank = int(os.read(read, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    ended = has_ended(rank, 5 if is_asked else 0.3)
    if not ended:
        os.kill(rank, signal.SIGKILL)
    assert ended == is_asked


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        START.format(root=str(ROOT))
        + f"""
import os
open({str(tmp_path)!r} + f"/pid{{dist.get_rank()}}", "w").write(str(os.getpid()))
time.sleep(100)
"""
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, *torchrun, str(program)], env=environment) as launcher:
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        end = time.monotonic() + 100
        while not all(file.exists() and file.read_text() for file in files):
            assert launcher.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        launcher.kill()
    assert all(has_ended(int(file.read_text()), 5) for file in files)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_told_of_by_the_flag(tmp_path):
    """A new user's finding: gloo's words in a traceback, and no flag."""
    text = "import os, signal\nmesh.get_group().size()\n"
    text += "if dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()\n"
    file = tmp_path / "program.py"
    file.write_text(START.format(root=str(ROOT)).replace("300.0", "3.0") + text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = dict(capture_output=True, text=True, timeout=100)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.run([sys.executable, *torchrun, str(file)], env=environment, **options)
    told = "[rank 0] error: --timeout-s 3: another rank did not answer for so long"
    assert job.returncode != 0 and told in job.stderr, job.stderr


@dataclass(frozen=True)
class OfARun:
    run: RunConfig


def test_the_settings_file_of_a_resumed_run_starts_a_new_one(tmp_path):
    file = tmp_path / "x" / "config.json"
    file.parent.mkdir()
    file.write_text("{}")
    resumed = RunConfig(output_dir=str(tmp_path), name="x", resume=True)
    resumed.open(OfARun(resumed))
    assert json.loads(file.read_text())["run"]["resume"] is False
