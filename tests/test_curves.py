"""The picture of a run: whatever the numbers and lines of its metrics."""

import json
import math
import subprocess
import sys

import pytest

import curves
from curves import plot

pytest.importorskip("matplotlib")


def test_curves_are_drawn_whatever_the_numbers(tmp_path):
    values = [0.0, 1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, None, "text", 10**400]
    lines = [json.dumps({"step": i, "reward/mean": value}) for i, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    plot(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [curves._can_be_drawn(x) for x in values] == [True, True] + [False] * 8


def test_lines_that_are_no_records_are_left_out(tmp_path):
    lines = [
        b'{"epoch": 1}',
        b'{"step": 1, "x": 2}',
        b'{"step": "last"}',
        b'{"step": 2, "x',
        b"[7]",
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b"\xff\x00", b"[" * 100_000]))
    assert curves._records(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 2}]
    plot(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_it_is_a_command_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}')
    files = [str(tmp_path / name) for name in ("metrics.jsonl", "again.png")]
    subprocess.run([sys.executable, curves.__file__, *files], check=True)
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.jsonl", "x.png"], "error: missing.jsonl: No such file or directory"),
        (["metrics.jsonl", "x.pdf"], "error: x.pdf: must end in .png"),
        (["metrics.jsonl", "none/x.png"], "error: none/x.part.png: No such file or directory"),
    ],
    ids=["no file", "no picture", "no folder"],
)
def test_a_wrong_command_is_a_line(tmp_path, arguments, told):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}')
    command = [sys.executable, curves.__file__, *arguments]
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (job.returncode, job.stderr.strip()) == (1, told)
