"""--check: a real step, a table, an exit status, and nothing of the user's is touched."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from jobs import REWARDS, settings, train

import check
import grpo
import ppo
import reshard
from check import Row, Table

ROOT = Path(grpo.__file__).parent
MACHINE = {"host memory", "the first step", "the run"}
WITNESSED = {
    "alone or in a full row",
    "gradient in two layouts",
    "sampler, after a sync",
    "sampler, after the next sync",
    "restart",
}
# A random model ends no answer.
LIMIT = dict(max_response_tokens=4, ignore_eos=True)


def table(out):
    found = json.loads((out / "run.check" / "check.json").read_text())
    return found["right"], {row["what"]: row for row in found["rows"]}


def test_a_table_says_what_to_do_and_its_status_is_1_if_a_row_is_wrong(tmp_path, capsys):
    made = Table(tmp_path / "new")
    made.add([Row("a", "3", "4", True, "no"), Row("b", "1 s", "", None, "no")])
    assert made.finish({"more": 5}) == 0
    assert json.loads((tmp_path / "new" / "check.json").read_text())["more"] == 5
    made.add([Row("c", "9", "4", False, "turn it")])
    assert made.finish({}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["right", "a", "3", "(4)"]
    assert lines[1].split() == ["b", "1", "s"]
    assert lines[2].startswith("check: 1 checks, all right; ")
    assert lines[3].split() == ["WRONG", "c", "9", "(4)"]
    assert lines[4].split() == ["turn", "it"]
    assert lines[5].startswith("check: 2 checks, 1 wrong: c; ")


@dataclass
class Steps:
    num_steps: int = 100
    eval_every: int = 10


def machine(record, monkeypatch, gib=140):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, gib << 30))
    times = {"step": 4.0, "rollout": 1.0, "update": 1.5, "eval": 1.0, "other": 0.5}
    known = {f"timing_s/{name}": x for name, x in times.items()} | {"perf/host_memory_gb": 1.0}
    return {row.what: row for row in check.machine_rows(Steps(), known | record)}


def test_the_run_is_predicted_and_what_bounds_it_is_named(monkeypatch):
    rows = machine({"communication/nccl_bw_gb": 12.34}, monkeypatch)
    assert rows["the first step"].figure == "3.00 s: update 1.50, rollout 1.00, other 0.50"
    assert (
        rows["the run"].figure == "100 steps in 5.2 min; the update bounds them"
    )  # 11 s of evaluation
    assert rows["between ranks"].figure.startswith("12.3 GB/s")
    assert machine({"timing_s/rollout": 9.0}, monkeypatch)["the run"].figure.endswith(
        "sampling bounds them"
    )


@pytest.mark.parametrize(
    ("phase", "flag"),
    [("rollout", "--rollout.memory-fraction"), ("largest_row", "--tokens-per-row")],
)
def test_memory_without_room_is_wrong_and_names_the_flag(monkeypatch, phase, flag):
    peaks = {f"perf/max_memory_gb/{name}": 70.0 for name in ("rollout", "update", "largest_row")}
    assert machine(peaks, monkeypatch)["GPU memory"].right
    row = machine(peaks | {f"perf/max_memory_gb/{phase}": 138.0}, monkeypatch)["GPU memory"]
    assert not row.right
    assert row.figure.startswith(f"{phase} 138.0, ")
    assert flag in row.advice


def test_a_check_on_two_ranks_beside_a_run_of_that_name(tiny, files, tmp_path):
    earlier = tmp_path / "run"
    earlier.mkdir()
    (earlier / "config.json").write_text("{}")
    args = settings(tiny, files, tmp_path, check=True, rollout=LIMIT)
    train(args, 2)
    is_right, rows = table(tmp_path)
    assert is_right
    assert rows.keys() >= WITNESSED | MACHINE | {"between ranks"}
    assert all(rows[what]["right"] for what in WITNESSED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.check"]
    assert [path.name for path in earlier.iterdir()] == ["config.json"]
    # No config.json, so the next check has nothing to rename.
    assert {path.name for path in (tmp_path / "run.check").iterdir()} == {"check.json", "lock"}


def status_of(entry, args):
    """What main() returned."""
    plain = entry.main
    kept = args.run.directory / "status"
    kept.parent.mkdir(parents=True)

    def main(given):
        kept.write_text(str(plain(given)))

    train(args, 1, **{f"{entry.__name__}.main": main})
    return kept.read_text()


@pytest.mark.slow
def test_ppo_is_checked_likewise_and_a_constant_reward_is_status_1(tiny, files, tmp_path):
    batch = dict(prompts_per_step=8, group_size=1, num_minibatches=2)
    reward = dict(functions=("quarter",))
    args = settings(
        tiny, files, tmp_path, ppo, check=True, batch=batch, reward=reward, rollout=LIMIT
    )
    assert REWARDS["quarter"]("") == 0.25
    assert status_of(ppo, args) == "1"
    is_right, rows = table(tmp_path)
    assert not is_right
    assert [what for what, row in rows.items() if row["right"] is False] == [
        "rewards of real samples"
    ]
    assert rows.keys() >= WITNESSED


# In a run that has not asked


@pytest.mark.parametrize("entry", [grpo, pytest.param(ppo, marks=pytest.mark.slow)])
def test_a_run_looks_at_its_data_and_at_its_first_samples(tiny, files, tmp_path, capfd, entry):
    plain = reshard.iter_full_params

    def scaled(*args, **options):
        for bucket in plain(*args, **options):
            yield [(name, x * 1.2 if ".mlp." in name else x) for name, x in bucket]

    evals = dict(eval_every=2, eval_paths=(str(files / "16.jsonl"),))
    args = settings(tiny, files, tmp_path, entry, num_steps=1, **evals)
    train(args, 1, **{"reshard.iter_full_params": scaled})
    warnings = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning")]
    # The last is report.py's, of the whole step.
    begin = ["evaluation: 16 of", "sampler and policy", "sampler and trainer"]
    assert [" ".join(line.split()[1:4]) for line in warnings] == begin
    args = settings(tiny, files, tmp_path, entry, num_steps=1, verify_every=1)
    with pytest.raises(RuntimeError, match="^--verify-every 1: sampler and policy are .* apart"):
        train(args, 1, **{"reshard.iter_full_params": scaled})


# In processes of their own


def checked(out, *flags, script="grpo.py"):
    """(exit code, output, seconds) of the script's --check in a new interpreter."""
    start = time.monotonic()
    command = [sys.executable, ROOT / script, "--check", "--output-dir", out, *flags]
    known = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.run(command, capture_output=True, text=True, env=known, timeout=190)
    return job.returncode, job.stdout + job.stderr, time.monotonic() - start


@pytest.mark.slow
def test_the_built_in_job_is_right(tmp_path):
    code, printed, seconds = checked(tmp_path)
    assert code == 0, printed
    assert "WRONG" not in printed
    assert "checks, all right; " in printed
    assert seconds < 60 or os.getloadavg()[0] > 3  # others are at work


@pytest.mark.slow
def test_the_built_in_job_of_three_losses_is_right(tmp_path):
    code, printed, _ = checked(tmp_path, "--rollout.engine", "hf", script="hybrid.py")
    assert code == 0, printed
    assert "checks, all right; " in printed
    assert (tmp_path / "hybrid.check" / "check.json").exists()


@pytest.mark.slow
def test_a_reward_that_pays_for_the_copied_question_is_wrong(tmp_path):
    reward = tmp_path / "paid.py"
    reward.write_text("def score(response, answer):\n    return float(len(response) > 2)\n")
    code, printed, _ = checked(
        tmp_path, "--reward.functions", f"{reward}:score", "--rollout.engine", "hf"
    )
    assert code == 1, printed
    assert "WRONG  reward of the question" in printed
    found = json.loads((tmp_path / "grpo.check" / "check.json").read_text())
    assert not found["right"]
