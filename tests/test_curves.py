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


def drawn(tmp_path, monkeypatch, lines):
    """The figure of these lines, and the name under which it is written first."""
    from matplotlib.figure import Figure

    kept = []

    def savefig(figure, path, dpi):
        assert not (tmp_path / "run" / "curves.png").exists()
        path.write_text("")
        kept.extend([figure, path.name])

    monkeypatch.setattr(Figure, "savefig", savefig)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plot(tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "curves.png")
    return kept


def test_a_panel_has_a_line_for_each_metric_at_the_steps_that_have_it(tmp_path, monkeypatch):
    """The file has its name when it is whole."""
    lines = [{"step": step, "reward/mean": step / 10, "actor/entropy": 2.0} for step in (3, 4, 5)]
    lines[1]["eval/reward"] = 0.75
    figure, name = drawn(tmp_path, monkeypatch, lines)
    reward, _, entropy, *_ = figure.axes
    found = [
        (x.get_label(), [*x.get_xdata()], [*x.get_ydata()]) for x in (*reward.lines, *entropy.lines)
    ]
    assert found == [
        ("reward/mean", [3, 4, 5], [0.3, 0.4, 0.5]),
        ("eval/reward", [4], [0.75]),
        ("actor/entropy", [3, 4, 5], [2.0, 2.0, 2.0]),
    ]
    assert figure.get_suptitle() == "run" and reward.get_title() == "reward"
    assert name == "curves.part.png" and (tmp_path / "run" / "curves.png").exists()


def test_without_matplotlib_nothing_is_drawn_and_no_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(curves.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}')
    plot(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_text_with_a_line_break_of_its_own_tears_no_record(tmp_path):
    line = '{"step": 0, "note": "a\u2028b\x85c"}\n'
    (tmp_path / "metrics.jsonl").write_text(line, encoding="utf-8")
    assert curves._records(tmp_path / "metrics.jsonl") == [json.loads(line)]
