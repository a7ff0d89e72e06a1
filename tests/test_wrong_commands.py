"""What must hold of any wrong command: one line that names the flag or the file, soon, and no file
of an earlier run is changed.
"""

import json
import sys
import time
from dataclasses import asdict

import pytest
import torch.distributed as dist
from test_grpo import SMALL, run_command
from wrong_commands import wrong_commands, wrong_files

import grpo
import ppo
from examples import addition
from run import command_line

ENTRIES = {"grpo": (grpo, addition.SETTINGS), "ppo": (ppo, addition.PPO_SETTINGS)}


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refusal(words, entry, monkeypatch, capfd):
    """What is printed for these words, once checked against the rules; None if they are taken."""
    module, built_in = ENTRIES[entry]
    monkeypatch.setattr(sys, "argv", [f"{entry}.py", *words])
    began = time.monotonic()
    try:
        args = command_line(module.Args(), built_in, "")
        module.prepare(addition.prepare(args))
    except SystemExit as stop:
        assert stop.code == 2
        told = capfd.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1, told
    except ValueError as error:  # run.refusals makes one line of it
        told = f"error: {error}"
        assert "\n" not in told
    else:
        return None
    assert time.monotonic() - began < 20
    return told


@pytest.mark.parametrize("entry", ENTRIES)
def test_60_wrong_command_lines_are_refused_by_the_flag(
    entry, group, tiny, files, monkeypatch, capfd
):
    """Each flag that can be wrong, of both scripts: two draws of 60."""
    own = ["--data", str(files / "16.jsonl"), *SMALL, tiny]
    failed = []
    for words, flag in wrong_commands(ENTRIES[entry][0].Args(), 60, seed=0):
        told = refusal([*own, *words], entry, monkeypatch, capfd)
        if told is None or flag not in told:
            failed.append((words, told))
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.parametrize("entry", ENTRIES)
def test_wrong_settings_files_are_refused_by_the_flag_or_the_file(
    entry, tmp_path, monkeypatch, capfd
):
    failed = []
    for file, name in wrong_files(ENTRIES[entry][0].Args(), 25, 1, tmp_path):
        told = refusal(["--config", str(file)], entry, monkeypatch, capfd)
        if told is None or name not in told:
            failed.append((file.read_bytes()[:80], told))
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_refused_command_changes_no_file_of_an_earlier_run(entry, tiny, files, tmp_path):
    """A run that failed while its model loaded had renamed the good run of its name."""
    earlier = tmp_path / "x"
    (earlier / "hf").mkdir(parents=True)
    (earlier / "config.json").write_text(json.dumps(asdict(ENTRIES[entry][0].Args())))
    (earlier / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "empty").mkdir()
    before = {path: path.stat().st_mtime_ns for path in earlier.rglob("*")}
    prompts = "--data", str(files / "16.jsonl")
    for words, name in (
        ([*prompts, *SMALL, str(tmp_path / "empty")], "--model"),
        ([*prompts, *SMALL, tiny, "--resume"], "--resume"),
        (["--learning-rate", "2"], "--learning-rate"),
    ):
        own = "--output-dir", str(tmp_path), "--name", "x"
        seconds, code, output = run_command(*own, *words, program=f"{entry}.py")
        assert code in (1, 2) and seconds < 60 and "Traceback" not in output, output
        told = [line for line in output.splitlines() if "error: " in line]
        assert len(told) == 1 and name in told[0], output
        assert {p: p.stat().st_mtime_ns for p in earlier.rglob("*") if p.name != "lock"} == before
        assert not (tmp_path / "x.1").exists()
