"""benchmarks/end_to_end.py: what it reads of programs, what it keeps of a run that is cut, its
table.
"""

import argparse
import json
import pathlib
import sys
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))

import end_to_end
import given
import table
from peers.verl_grpo import in_common_names

NO_DEVICE = types.SimpleNamespace(used=lambda: 0, name=lambda: "CPU")


def step(number, step_s=2.0, program="trl", round_=1, **more):
    times = {"step_s": step_s, "sample_s": 0.5 * step_s, "score_s": 0.0, "update_s": 0.5 * step_s}
    tokens = {"new_tokens": 100, "trained_tokens": 200}
    about = {"workload": "w1", "program": program, "round": round_, "device": "H200", "gib": 3.0}
    about |= {"date": "", "versions": {}, "command": "", "start_s": 60.0}
    return about | {"step": number} | times | tokens | more


def write(path, steps):
    path.write_text("".join(json.dumps(each) + "\n" for each in steps))
    return str(path)


def test_medians_are_of_steps_3_and_later():
    result = table.summary([step(i, s) for i, s in enumerate([9, 8, 1, 2, 4])], None)
    assert result["first_step_s"] == 9 and result["step_s"] == 2 and result["num_steps"] == 3
    assert result["new_tokens_per_s"] == 50 and result["trained_tokens_per_s"] == 100


def test_a_program_that_was_started_again_replaces_its_first_try(tmp_path):
    path = write(tmp_path / "r.jsonl", [step(0, 5), step(1, 5), step(0, 3), step(0, 7, "verl")])
    runs = table.load(path)
    assert [s["step_s"] for s in runs["w1", "trl", 1]] == [3]
    assert [s["step_s"] for s in runs["w1", "verl", 1]] == [7]


def test_programs_are_compared_within_a_round_and_tokens_cost_what_handfuls_do(tmp_path):
    steps = [step(2, 6), step(2, 2, "handful", mfu=0.2)]
    steps += [step(2, 12, round_=2), step(2, 3, "handful", round_=2, mfu=None)]
    records = table.tabulate(write(tmp_path / "r.jsonl", steps))
    found = {(r["program"], r["round"]): r for r in records}
    assert found["trl", 1]["handful_times"] == 3 and found["trl", 2]["handful_times"] == 4
    # handful's 200 tokens take 0.2 x 2 s at the peak, and so do those of the other.
    assert found["handful", 1]["mfu_update"] == pytest.approx(0.4)
    assert found["trl", 1]["mfu"] == pytest.approx(0.4 / 6)
    assert found["trl", 1]["mfu_update"] == pytest.approx(0.4 / 3)
    assert "mfu" not in found["trl", 2]


def test_the_parts_of_a_step_add_up_to_it_in_every_programs_names():
    times = {"step": 10.0, "rollout": 4.0, "reshard": 1.0, "update": 2.0, "layout": 2.5}
    lengths = {"response_length/mean": 8.0, "prompt_length/mean": 3.0}
    line = lengths | {f"timing_s/{name}": s for name, s in times.items()} | {"step": 1}
    found = end_to_end.from_handful(line | {"perf/mfu": 0.25}, 16)
    assert (found["sample_s"], found["score_s"], found["update_s"]) == (5, 3, 2)
    assert (found["new_tokens"], found["trained_tokens"]) == (128, 176)
    assert found["mfu"] == 0.25
    times = {"step": 10.0, "gen": 4.0, "update_weights": 1.0, "update_actor": 2.0}
    data = lengths | {f"timing_s/{name}": s for name, s in times.items()}
    found = in_common_names({"step": 1, "data": data}, 16)
    assert (found["step"], found["sample_s"], found["score_s"], found["update_s"]) == (0, 5, 3, 2)
    assert (found["new_tokens"], found["trained_tokens"]) == (128, 176)


PROGRAM = """
import json, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
with open(sys.argv[1], "w", buffering=1) as file:
    file.write('{"step": 0, "step_s": 1, ')
    time.sleep(0.5)
    file.write('"new_tokens": 5}\\n{"step": 1, "step_s": 2}\\n')
    time.sleep(100)
"""


def test_steps_are_kept_as_they_come_and_nothing_outlives_the_run(tmp_path, monkeypatch):
    pytest.importorskip("psutil")
    monkeypatch.setattr(end_to_end, "versions", lambda environment: {})
    monkeypatch.setattr(
        end_to_end, "command_of", lambda *_: [sys.executable, "-c", PROGRAM, str(_[2])]
    )
    before = end_to_end.descendants()
    results = tmp_path / "r.jsonl"
    args = argparse.Namespace(
        workload="smoke", directory=tmp_path, results=results, site=[], limit_s=3, peer_steps=9
    )
    end_to_end.run("trl", args, 1, NO_DEVICE)
    first, second = map(json.loads, results.read_text().splitlines())
    assert (first["new_tokens"], second["step_s"]) == (5, 2)
    assert first["round"] == 1 and first["start_s"] == pytest.approx(-0.5, abs=1.5)
    assert end_to_end.descendants() <= before


def test_programs_on_given_texts_are_compared_by_step_or_where_rows_differ_by_means():
    own = {"losses": [1.0, 2.0], "step_s": 2.0}
    padded = {"program": "trl-sft-padded", "losses": [1.0, 2.02], "step_s": 4.0}
    given.compare(padded, own, num_tokens=100.0, per_step=8)
    assert (padded["tokens_per_s"], padded["handful_is"]) == (25.0, 2.0)
    assert padded["loss_diff"] == pytest.approx(0.01)
    packed = {"program": "trl-sft-packed", "losses": [2.0, 1.0], "step_s": 1.0}
    given.compare(packed, own, num_tokens=100.0, per_step=8)
    assert (packed["handful_is"], packed["loss_diff"]) == (0.5, 0.0)
    pairs = {"program": "trl-dpo-padded", "losses": [1.0], "step_s": 4.0}
    given.compare(pairs, own, num_tokens=100.0, per_step=8)
    assert pairs["pairs_per_s"] == 2.0 and "tokens_per_s" not in pairs


def test_rows_of_given_texts_are_questions_with_answers_and_those_of_others(tmp_path):
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(3)]
    source = write(tmp_path / "gsm8k.jsonl", rows)
    given.write_rows(source, tmp_path, 2)
    made = [json.loads(line) for line in (tmp_path / "dpo.jsonl").read_text().splitlines()]
    assert [(row["chosen"], row["rejected"]) for row in made] == [("a0", "a1"), ("a1", "a0")]
    first = json.loads((tmp_path / "sft.jsonl").read_text().splitlines()[0])
    assert first == {"prompt": [{"role": "user", "content": "q0"}], "response": "a0"}
