"""Worker: how functions are called, and which of their values are rewards."""

import json
import multiprocessing
import pickle
import re
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest
import torch

import worker
from worker import evaluate, load_function


def samples_of(*responses, **columns):
    common = {"prompt": "p", "answer": "a", "truncated": False}
    return [common | columns | {"response": response} for response in responses]


def one_of_eight(bad):
    """A function of single samples that returns `bad` for the response "x"."""
    return lambda response: bad if response == "x" else 1.0


INF = float("inf")


BAD_VALUES = [
    None,
    "1.0",
    [1.0],
    {},
    float("nan"),
    INF,
    -INF,
    1j,
    10**400,
    torch.ones(2),
    torch.tensor(INF),
    # Tencent-Hunyuan/UniRL#330, huggingface/trl#5775: finite in double, not in fp32
    1e39,
    -1e39,
    torch.tensor(1e39, dtype=torch.float64),
    Decimal("1e40"),
    2**130,
    3e38,  # its square is not
    -1.01e18,
]


@pytest.mark.parametrize("bad", BAD_VALUES, ids=lambda bad: repr(bad)[:20])
def test_a_value_that_is_no_finite_number_is_an_error_of_its_sample_alone(bad, capfd):
    outcomes = evaluate(one_of_eight(bad), samples_of("x"))
    assert outcomes[0][0] is None and "must be one finite number" in outcomes[0][1]
    assert evaluate(one_of_eight(bad), samples_of("y")) == [(1.0, "")]
    in_batch = evaluate(
        lambda responses: [one_of_eight(bad)(response) for response in responses],
        samples_of("y", "x"),
    )
    assert in_batch == [(1.0, ""), outcomes[0]]


@pytest.mark.parametrize(
    "good", [1, True, 1.0, torch.tensor(1.0), torch.ones(1, 1), torch.ones(3).numpy()[0]]
)
def test_numbers_of_python_numpy_and_torch_are_rewards(good):
    assert evaluate(lambda response: good, samples_of("y")) == [(1.0, "")]
    assert evaluate(lambda responses: [good] * 2, samples_of("y", "z")) == [(1.0, "")] * 2
    assert evaluate(lambda responses: torch.ones(2), samples_of("y", "z")) == [(1.0, "")] * 2


def test_a_batch_result_of_the_wrong_length_or_type_is_an_error_of_all_its_samples():
    for bad in ([1.0], "12", b"12", {0: 1.0, 1: 2.0}, {1.0, 2.0}, 1.0, None):
        outcomes = evaluate(lambda responses, bad=bad: bad, samples_of("y", "z"))
        assert [reward for reward, _ in outcomes] == [None, None]


def test_a_value_with_a_float_that_fails_is_an_error_of_its_sample_alone():
    class Broken:
        def __float__(self):
            raise AttributeError("nothing")

    outcomes = evaluate(lambda responses: [1.0, Broken(), 2.0], samples_of("x", "y", "z"))
    assert [reward for reward, _ in outcomes] == [1.0, None, 2.0]


def test_a_value_that_cannot_even_be_shown_is_an_error():
    class Hidden:
        def __repr__(self):
            raise RuntimeError("no name")

    assert "no name" in evaluate(lambda response: Hidden(), samples_of("y"))[0][1]


def test_a_column_that_only_some_samples_of_a_batch_have_is_none_for_the_others():
    samples = samples_of("a", level=1) + samples_of("b") + samples_of("c", level=3)
    for batch in (samples, samples[1:], samples[:2]):
        expected = [float(sample.get("level") or -1) for sample in batch]
        named = evaluate(lambda responses, level=None: [x or -1 for x in level], batch)
        everything = evaluate(
            lambda responses, **columns: [x or -1 for x in columns["level"]], batch
        )
        assert named == everything == [(x, "") for x in expected]


def test_an_error_is_a_line_with_the_place_in_the_users_file(tmp_path):
    """A new user's finding: up to 30 lines of traceback, through files that are not the user's."""
    text = "import json\ndef f(response):\n    return json.loads(response)['a']"
    (tmp_path / "mine_alone.py").write_text(text)
    function = load_function(f"{tmp_path}/mine_alone.py:f", 1.0)
    [(reward, missing)] = evaluate(function, samples_of("{}"))
    assert reward is None and missing == "KeyError: 'a' (mine_alone.py:3)"
    [(_, torn)] = evaluate(function, samples_of("\n{"))
    assert re.search(r"JSONDecodeError: [^\n]* \(mine_alone.py:3, decoder.py:\d+\)$", torn)
    [(_, count), _] = evaluate(lambda responses: [1.0], samples_of("a", "b"))
    assert count == "ValueError: returned [1.0]: must be 2 numbers, one for each sample in order"


def test_an_error_of_an_async_function_has_its_place_in_the_users_file_too(tmp_path):
    """The first place was asyncio's, so the user's line was not among the two."""
    text = "import json\nasync def f(response):\n    return json.loads(response)"
    (tmp_path / "mine_later.py").write_text(text)
    function = load_function(f"{tmp_path}/mine_later.py:f", 1.0)
    [(_, torn)] = evaluate(function, samples_of("{"))
    assert re.search(r" \(mine_later.py:3, decoder.py:\d+\)$", torn)


def test_an_error_that_cannot_be_shown_is_one_too():
    class Unsaid(Exception):
        def __str__(self):
            raise RuntimeError("twice")

    def fail(response):
        raise Unsaid

    [(reward, text)] = evaluate(fail, samples_of("a"))
    assert reward is None and "Unsaid" in text and "\n" not in text


def test_a_function_that_exits_is_an_error_of_its_samples():
    def leave(response):
        raise SystemExit(response)

    assert evaluate(leave, samples_of("x")) == [(None, "it called sys.exit('x')")]


def test_built_in_rules_are_functions_of_the_file_beside():
    assert load_function("math", 1.0)("\\boxed{0.5}", "1/2") == 1.0
    assert load_function("exact", 1.0)(["0.5"], ["1/2"]) == [0.0]


def test_what_a_function_has_started_ends_with_its_worker(tmp_path):
    """The trainer is gone: nobody else kills it."""
    file = tmp_path / "starts.py"
    text = "import subprocess\ndef f(response):\n    return subprocess.Popen(['sleep', '60']).pid\n"
    file.write_text(text)
    ours, theirs = multiprocessing.Pipe()
    with subprocess.Popen(
        [sys.executable, worker.__file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    ):
        theirs.close()
        ours.send(((f"{file}:f",), 5.0, 0))
        assert json.loads(ours.recv_bytes())[0]["required"] == ["response"]
        ours.send((0, [pickle.dumps({"response": ""})], 5.0))
        [[pid, _]] = json.loads(ours.recv_bytes())
        assert Path(f"/proc/{pid:.0f}").exists()
        ours.close()
    status = Path(f"/proc/{pid:.0f}/stat")
    limit = time.monotonic() + 5
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < limit, "it goes on"
        time.sleep(0.02)
