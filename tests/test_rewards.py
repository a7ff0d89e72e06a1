"""Rewards: how functions are called, what they may do to us, and what counts as a reward."""

import contextlib
import gc
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import rewards
from rewards import RewardConfig, Scorer, score

ROOT = pathlib.Path(__file__).resolve().parent.parent
FUNCTIONS = """
import asyncio, ctypes, math, os, signal, subprocess, sys, time

def length(response):
    return len(response)

def scribble(response):
    for number in range(3, 256):
        try:
            os.write(number, bytes([255] * 64))
        except OSError:
            pass
    return 1.0

def exact_length(response, length, answer="unused", missing="default"):
    return [0, 1][len(response) == length and missing == "default"]

async def later(prompt, truncated):
    await asyncio.sleep(0.01)
    return float(truncated)

def rank_in_batch(responses, lengths=None):
    return [sorted(responses).index(response) for response in responses]

async def batch_later(responses):
    return await asyncio.gather(*(later(response, True) for response in responses))

def trl(prompts, completions, level, **kwargs):
    assert kwargs["answer"] == ["a"] * len(prompts)
    return [len(completion) + number for completion, number in zip(completions, level)]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(data_source == "set" and solution_str.strip() == ground_truth)

def imports_torch(response):
    return "torch" in sys.modules or "rewards" in sys.modules or "test_rewards" in sys.modules

def process(response):
    return os.getpid()

def nap(response):
    time.sleep(0.05)
    return 1.0

def nap_in_child(response):
    pid = os.fork()
    if pid == 0:
        time.sleep(100)
    return float(os.WIFSIGNALED(os.waitpid(pid, 0)[1]))

def hang_on_x(response):
    while "x" in response:
        time.sleep(0.01)
    return 1.0

def hang_in_batch(responses):
    time.sleep(1000)

def hang_in_c(response):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while "x" in response:
        sum(range(10 ** 9))
    return 1.0

def hang_with_children(response):
    child = subprocess.Popen(["sleep", "1000"])
    with open(os.environ["CHILDREN"], "a") as file:
        file.write(f"{child.pid}\\n")
    time.sleep(1000)

def eat_on_x(response):
    return len(bytearray(1 << 28 if "x" in response else 1)) / 2**28

def print_much(response):
    print("a print", "y" * 100_000, flush=True)
    os.write(1, b"\\x00\\x00\\x00\\x04null")
    sys.stdin.read()
    return 1.0

def fork(response):
    pid = os.fork()
    if pid == 0 and "x" in response:
        sys.exit(0)
    if pid == 0 and "y" in response:
        raise RuntimeError("in the child")
    return 1.0

def die_on_x(response):
    if "x" in response:
        ctypes.string_at(0)
    return 1.0

def leave_on_x(response):
    return sys.exit(0) if "x" in response else 1.0

def fail_on_x(response):
    if "x" in response:
        raise KeyError("the reason")
    return 1.0
"""


@pytest.fixture
def functions(tmp_path):
    """ "path.py:" of a file with the functions above."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return f"{tmp_path}/functions.py:"


def samples_of(*responses, **columns):
    common = {"prompt": "p", "answer": "a", "truncated": False}
    return [common | columns | {"response": response} for response in responses]


def score_all(config, samples):
    with contextlib.closing(Scorer(config)) as scorer:
        for index, sample in enumerate(samples):
            scorer.submit(index, sample)
        return scorer.collect(len(samples))


def children(pid="self"):
    """The children of a process, zombies too, whichever of its threads started them."""
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


def is_running(pid):
    return (
        pathlib.Path(f"/proc/{pid}").exists()
        and pathlib.Path(f"/proc/{pid}/stat").read_text().split()[-50] != "Z"
    )


@pytest.mark.parametrize(
    ("name", "columns", "rewards"),
    [
        ("length", {}, [1, 3]),
        ("exact_length", {"length": 3}, [0, 1]),
        ("later", {"truncated": True}, [1, 1]),
        ("rank_in_batch", {}, [1, 0]),
        ("batch_later", {}, [1, 1]),
        ("trl", {"level": 10}, [11, 13]),
        ("verl", {"data_source": "set", "answer": "b"}, [1, 0]),
    ],
)
def test_a_function_gets_the_columns_that_its_parameters_name(functions, name, columns, rewards):
    got, stats = score(
        functions + name, samples_of("b", "aaa", **columns), time_limit_s=5, num_workers=2
    )
    assert got == rewards
    assert stats == {
        "error_frac": 0,
        "timeout_frac": 0,
        f"functions.py:{name}_mean": sum(rewards) / 2,
    }


def test_rewards_of_several_functions_are_a_weighted_sum(functions):
    names = (functions + "length", "exact", functions + "rank_in_batch")
    rewards, stats = score_all(
        RewardConfig(names, weights=(1.0, 100.0, -10.0)), samples_of("b", "a", "cc")
    )
    assert rewards == [1 + 0 - 10, 1 + 100 - 0, 2 + 0 - 20]
    assert stats["functions.py:length_mean"] == 4 / 3 and stats["exact_mean"] == 1 / 3


def test_callables_are_functions_too_even_closures_and_what_they_print_goes_to_stderr(capfd):
    offset = 5

    def longer(response):
        os.write(1, b"a print")  # pytest has its own sys.stdout
        return len(response) + offset

    rewards, stats = score([longer, "exact"], samples_of("a", "bb"), time_limit_s=5, num_workers=2)
    assert rewards == [7, 7] and stats["error_frac"] == 0
    out, err = capfd.readouterr()
    assert "a print" in err and out == ""


def test_a_scorer_that_is_dropped_leaves_no_process(functions):
    before = children()
    for callables in ({}, {functions + "length": len}):
        scorer = Scorer(RewardConfig((functions + "length",), num_workers=2), callables)
        assert len(children() - before) == 2
        del scorer
        gc.collect()
        deadline = time.monotonic() + 5
        while any(map(is_running, children() - before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, children() - before))
        before = children()  # zombies that nobody asks about


def test_rewards_come_in_the_order_of_the_indices_batch_after_batch(functions):
    with contextlib.closing(
        Scorer(RewardConfig((functions + "length", functions + "rank_in_batch")))
    ) as scorer:
        for size in (4, 0, 9):
            for index in reversed(range(size)):
                scorer.submit(index, samples_of("x" * index)[0])
            rewards, stats = scorer.collect(size)
            assert rewards == [2 * index for index in range(size)]
            means = {"functions.py:length_mean", "functions.py:rank_in_batch_mean"}
            assert set(stats) == means | {"error_frac", "timeout_frac"}


def test_the_exact_rule_compares_the_stripped_response():
    pairs = [(" 068\n", "068"), ("68", "068"), ("7", 7), ("0 68", "068")]
    samples = [samples_of(response, answer=answer)[0] for response, answer in pairs]
    assert score("exact", samples, num_workers=1)[0] == [1, 0, 1, 0]


def test_workers_import_neither_torch_nor_the_training_script(functions):
    assert score(functions + "imports_torch", samples_of("a"), time_limit_s=5, num_workers=1)[
        0
    ] == [0]


def test_functions_may_import_the_files_beside_theirs(tmp_path):
    (tmp_path / "words.py").write_text("GOOD = {'yes'}")
    (tmp_path / "mine.py").write_text(
        "from words import GOOD\ndef good(response): return response in GOOD"
    )
    assert score(
        f"{tmp_path}/mine.py:good", samples_of("yes", "no"), time_limit_s=5, num_workers=1
    )[0] == [1, 0]


def test_a_file_may_be_called_like_another_one_of_the_users_of_ours_or_of_pythons(
    tmp_path, monkeypatch
):
    """launch.sh puts our folder first on the path: a user's rewards.py was refused."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "data.py").write_text("SHIFT = 1")  # what they import beside them
    specs = []
    for i, file in enumerate(("one/mine.py", "two/mine.py", "rewards.py", "json.py", "my-own.py")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        text = "import sys, json\njson.dumps(1)\n"
        if "/" not in file:
            text += "import data\nassert data.SHIFT == 1\n"
        (tmp_path / file).write_text(f"{text}def f(response): return {i} + len(response)")
        specs.append(f"{tmp_path}/{file}:f")
    for i, spec in enumerate(specs):
        assert score([spec], samples_of("abc"), num_workers=1)[0] == [3 + i]
    scorer = Scorer(RewardConfig(tuple(specs[2:]), weights=(1.0, 10.0, 100.0), num_workers=1))
    scorer.submit(0, samples_of("abc")[0])
    assert scorer.collect(1)[0] == [5 + 60 + 700]
    scorer.close()


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        ("maths", None, "no file and function .maths.: math, exact"),
        ("{}/none.py:f", None, "no file"),
        ("{}/mine.py:g", "def f(response): return 1", "/mine.py has no function 'g'$"),
        ("{}/mine.py:f", "def f(response) return 1", "SyntaxError"),
        ("{}/mine.py:f", "import a_package_we_lack", "pip install a_package_we_lack"),
        ("{}/mine.py:f", "import os; os._exit(3)", "ended, exit code 3"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start_in_one_line(
    tmp_path, spec, text, message
):
    if text:
        (tmp_path / "mine.py").write_text(text)
    before = children()
    with pytest.raises(ValueError, match=message) as error:
        Scorer(RewardConfig((spec.format(tmp_path),), num_workers=2))
    assert "\n" not in str(error.value)
    assert children() == before


def test_a_function_names_the_columns_that_it_cannot_do_without(tmp_path, remote):
    (tmp_path / "mine.py").write_text(
        "def one(solution_str, level, *rest, hint='', ground_truth, **more): return 1\n"
        "def many(completions, level=1): return [1] * len(completions)\n"
    )
    specs = [f"{tmp_path}/mine.py:one", f"{tmp_path}/mine.py:many", "exact", f"{remote}/x"]
    with contextlib.closing(Scorer(RewardConfig(tuple(specs), num_workers=1))) as scorer:
        needed = {
            specs[0]: ["response", "level", "answer"],
            specs[1]: ["response"],
            "exact": ["response", "answer"],
            specs[3]: [],
        }
        assert scorer.wanted == needed


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    lacking = "raise ModuleNotFoundError('No module named gone', name='gone')"
    (tmp_path / "reasoning_gym.py").write_text(lacking)
    (tmp_path / "mine.py").write_text("def f(response): return 1\nf.packages = ['gone']")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for spec in ("reasoning_gym", f"{tmp_path}/mine.py:f"):
        with pytest.raises(ValueError, match="pip install gone$"):
            Scorer(RewardConfig((spec,), num_workers=1))


def test_files_that_are_copied_out_alone_say_which_other_they_lack(tmp_path):
    program = "from rewards import score; score('math', [])"
    for name, lacking in (("rewards.py", "worker.py"), ("worker.py", "answers.py")):
        shutil.copy(ROOT / name, tmp_path)
        command = [sys.executable, "-c", program]
        job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert re.fullmatch(rf"ValueError: .*{lacking}.*", job.stderr.splitlines()[-1])
    (tmp_path / "mine.py").write_text("def f(response): return 1")
    mine = "from rewards import score; print(score('mine.py:f', [{'response': 'a'}])[0])"
    command = [sys.executable, "-c", mine]
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert job.stdout == "[1.0]\n"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"functions": ()}, "--reward.functions"),
        ({"functions": ("math", "math")}, "--reward.functions math math"),
        ({"functions": ("math",), "weights": (1.0, 2.0)}, "--reward.weights 1.0 2.0"),
        (
            {"functions": ("http://a/score", "http://b/score/")},
            "http://a/score http://b/score/",
        ),  # one metric
        ({"error_reward": float("nan")}, "--reward.error-reward nan"),
        ({"weights": (float("inf"),)}, "--reward.weights inf"),
        ({"weights": (0.0,)}, "--reward.weights 0.0: must be not all 0: no"),
        (
            {"functions": ("math", "exact"), "weights": (0.0, -0.0)},
            "--reward.weights 0.0 -0.0: must be not all 0",
        ),
        ({"num_workers": 0}, "--reward.num-workers 0"),
        ({"time_limit_s": 0.0}, "--reward.time-limit-s 0.0"),
        ({"memory_limit_mb": -1}, "--reward.memory-limit-mb -1"),
        ({"max_error_frac": -0.1}, "--reward.max-error-frac -0.1"),
    ],
)
def test_a_bad_configuration_is_refused_with_the_flag_and_its_value(options, flag):
    with pytest.raises(ValueError, match=flag):
        RewardConfig(**options)


def test_math_scores_a_hostile_expression_at_once():
    power = "9^{" * 12 + "9" + "}" * 12
    samples = samples_of(
        r"\boxed{\frac12}", rf"\boxed{{\sqrt{{{power}}}}}", r"\boxed{3}", answer=r"\frac{2}{4}"
    )
    start = time.monotonic()
    rewards, stats = score("math", samples, time_limit_s=1, num_workers=2)
    assert rewards == [1, 0, 0] and stats["error_frac"] == 0
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_reasoning_gym_verifies_entries_with_the_scorer_of_their_data_set():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    right = entry["answer"]
    tagged = [
        f"Let me see. <answer>\n{right} </answer>",
        f"<answer>0</answer> no: <answer>{right}</answer>",
    ]
    responses = (right, *tagged, "7")
    samples = samples_of(*responses, entry=entry, answer=right)
    rewards, stats = score("reasoning_gym", samples, time_limit_s=5, num_workers=1)
    assert rewards[:3] == [1, 1, 1] and rewards[3] < 0.1 and stats["error_frac"] == 0


class RemoteScorer(http.server.BaseHTTPRequestHandler):
    """Fails twice, then rewards the length of the response.

    /away always fails, /text replies without JSON, /cut fails by replies that end too early.
    """

    requests: ClassVar = []

    def do_POST(self):
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(sample)
        tries = sum(request["response"] == sample["response"] for request in self.requests)
        self.send_response(
            503 if (tries < 3 and self.path != "/cut/") or self.path == "/away" else 200
        )
        if tries < 3 and self.path == "/cut/":
            self.send_header("Content-Length", "1000")
        self.end_headers()
        reply = (
            "no JSON"
            if self.path == "/text"
            else json.dumps({"reward": len(sample["response"]) + sample["bonus"]})
        )
        self.wfile.write(reply.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def remote(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    RemoteScorer.requests = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RemoteScorer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("path", ["reward", "cut"])
def test_a_remote_scorer_is_asked_again_when_it_fails(remote, path):
    rewards, stats = score(
        f"{remote}/{path}/", samples_of("a", "bb", bonus=10), time_limit_s=2, num_workers=2
    )
    assert rewards == [11, 12] and stats == {
        "error_frac": 0,
        "timeout_frac": 0,
        f"{path}_mean": 11.5,
    }
    assert len(RemoteScorer.requests) == 6
    assert RemoteScorer.requests[0].keys() == {"prompt", "response", "answer", "truncated", "bonus"}


def test_a_remote_scorer_that_stays_away_or_answers_nonsense_is_an_error(remote, capfd):
    for url, reason in (
        (f"{remote}/away", "503"),
        (f"{remote}/text", "JSON"),
    ):
        rewards, stats = score(
            url, samples_of("a" * len(reason), bonus=1), time_limit_s=2, num_workers=1
        )
        assert rewards == [0] and stats["error_frac"] == 1 and stats["timeout_frac"] == 0
        assert reason in capfd.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/score", "http://no.such.host.invalid/x"])
def test_a_reward_url_where_nobody_answers_is_refused_at_the_start(url):
    """It was accepted, and the first step ended in a long traceback."""
    with pytest.raises(ValueError, match=f"--reward.functions {url}: does not answer") as error:
        Scorer(RewardConfig((url,), num_workers=1))
    assert "\n" not in str(error.value)


def test_whole_numbers_booleans_and_fractions_are_rewards(capfd):
    values = [False, 0, -3, 7, torch.tensor(2), torch.tensor(True).numpy(), Fraction(1, 2)]
    expected = [0.0, 0.0, -3.0, 7.0, 2.0, 1.0, 0.5]
    samples = [{"response": str(i)} for i in range(len(values))]
    rewards, stats = score(lambda response: values[int(response)], samples, num_workers=1)
    assert rewards == expected and all(type(reward) is float for reward in rewards)
    assert stats["error_frac"] == 0


@pytest.mark.parametrize(
    ("values", "weights"),
    [((1e308, 1e308), ()), ((1e18, 1e18), ()), ((1e18,), (1e18,)), ((1e18, -1e18), (2.0, -2.0))],
)
def test_a_weighted_sum_that_is_not_finite_in_fp32_is_an_error(values, weights, capfd):
    """Tencent-Hunyuan/UniRL#330, huggingface/trl#5775: group statistics run in fp32."""
    names = tuple("fghi"[: len(values)])
    callables = {n: lambda response, v=v: v for n, v in zip(names, values, strict=True)}
    config = RewardConfig(names, weights, 1, error_reward=-1.0, max_error_frac=1.0)
    with contextlib.closing(Scorer(config, callables)) as scorer:
        scorer.submit(0, {"response": "a"})
        rewards, stats = scorer.collect(1)
    assert torch.tensor(rewards).isfinite().all() and stats["error_frac"] > 0
    assert "finite" in capfd.readouterr().err


def test_text_with_half_a_surrogate_is_scored_like_any_other(functions, remote):
    samples = samples_of("\ud83d", "a\udfff", answer="\ud83d", bonus=0)
    for function in ("math", "exact"):
        assert score(function, samples, num_workers=1)[0] == [1, 0]
    assert score(functions + "length", samples, num_workers=1)[0] == [1, 2]
    assert score(lambda response: len(response), samples, num_workers=1)[0] == [1, 2]
    assert score(f"{remote}/reward", samples, num_workers=1, time_limit_s=2)[0] == [1, 2]


def test_an_error_whose_text_has_half_a_surrogate_is_counted_and_shown(capfd):
    def fail(response):
        raise ValueError(response)

    rewards, stats = score(fail, samples_of("\ud83d"), num_workers=1)
    assert rewards == [0] and stats["error_frac"] == 1
    assert "ValueError" in capfd.readouterr().err


def test_errors_are_counted_shown_once_and_stand_as_the_error_reward(functions, capfd):
    config = RewardConfig((functions + "fail_on_x", "exact"), error_reward=-3.0, num_workers=2)
    with contextlib.closing(Scorer(config)) as scorer:
        for _ in range(2):
            for index, sample in enumerate(samples_of("x", "a", "c", "d")):
                scorer.submit(index, sample)
            rewards, stats = scorer.collect(4)
            assert rewards == [-3, 2, 1, 1]
            assert stats["error_frac"] == 1 / 8 and stats["functions.py:fail_on_x_mean"] == 0
    shown = capfd.readouterr().err
    assert (
        shown.count("fail_on_x failed on 1 of 4 samples; sample 0: KeyError: 'the reason' (") == 1
    )
    assert shown.count("\n") == 1 and "Traceback" not in shown


def test_the_run_stops_when_more_than_the_given_share_fails(functions):
    config = RewardConfig(("exact", functions + "fail_on_x"), max_error_frac=0.25, num_workers=2)
    assert score_all(config, samples_of("x", "b", "c", "d"))[1]["error_frac"] == 1 / 8
    with pytest.raises(
        RuntimeError,
        match=r"failed on 2 of 3 samples; sample 1: KeyError: 'the reason' \(functions.py:\d+\)$",
    ):
        score_all(config, samples_of("a", "x", "x", "d"))


def test_a_run_that_must_stop_does_not_wait_for_every_sample_to_time_out(functions):
    """Nor does the interpreter at its end, which runs what is left in the queues of its threads."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from rewards import RewardConfig, Scorer
config = RewardConfig(({functions + "hang_on_x"!r},), (), 2, 0.5, max_error_frac=0.1)
scorer = Scorer(config)
for index in range(80):
    scorer.submit(index, {samples_of("x")[0]!r})
scorer.collect(80)
"""
    start = time.monotonic()
    job = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    report = "hang_on_x failed on 9 of 9 samples; sample 0: no result within 0.5 s"
    assert job.stderr.count(report) == 1
    assert "Timeout" not in job.stderr  # no dumps of the workers, which end after it
    assert job.returncode == 1
    assert time.monotonic() - start < 12  # 20 s of time limits on two workers


@pytest.mark.parametrize("name", ["hang_on_x", "hang_in_c"])
def test_hanging_samples_cost_their_time_limit_and_the_others_are_scored(functions, name):
    before = children()
    samples = samples_of(*["x"] * 6, *["good"] * 20)
    start = time.monotonic()
    rewards, stats = score(functions + name, samples, time_limit_s=1, num_workers=2)
    assert time.monotonic() - start < 6 * 1 / 2 + 5
    assert rewards == [0] * 6 + [1] * 20
    assert stats["timeout_frac"] == stats["error_frac"] == 6 / 26
    assert children() == before


def test_a_batch_may_take_as_long_as_its_samples_would_one_by_one_on_all_workers(functions, capfd):
    _, stats = score(
        functions + "hang_in_batch", samples_of(*"abcde"), time_limit_s=0.5, num_workers=2
    )
    assert stats["timeout_frac"] == 1
    assert "no result within 1.5 s" in capfd.readouterr().err


def test_a_worker_that_is_killed_takes_the_processes_it_started_along(
    functions, tmp_path, monkeypatch
):
    monkeypatch.setenv("CHILDREN", str(tmp_path / "pids"))
    _, stats = score(
        functions + "hang_with_children", samples_of("a", "b"), time_limit_s=0.5, num_workers=2
    )
    pids = (tmp_path / "pids").read_text().split()
    assert stats["timeout_frac"] == 1 and len(pids) == 2
    time.sleep(0.1)
    assert not any(is_running(pid) for pid in pids)


def test_a_sample_that_eats_memory_is_an_error_and_the_machine_survives(functions, capfd):
    config = RewardConfig((functions + "eat_on_x",), max_error_frac=0.5, memory_limit_mb=200)
    rewards, stats = score_all(config, samples_of("x", "b"))
    assert rewards == [0, 2**-28] and stats["error_frac"] == 0.5
    assert "MemoryError" in capfd.readouterr().err
    assert score_all(replace(config, memory_limit_mb=0), samples_of("x", "b"))[0] == [1, 2**-28]


@pytest.mark.parametrize(
    ("name", "message"),
    [("die_on_x", "ended, exit code -11"), ("leave_on_x", "called sys.exit(0)")],
)
def test_a_worker_that_dies_is_replaced_and_its_sample_is_an_error(functions, name, message, capfd):
    before = children()
    rewards, stats = score(functions + name, samples_of("x", "b", "c"), num_workers=1)
    assert rewards == [0, 1, 1] and stats["error_frac"] == 1 / 3 and stats["timeout_frac"] == 0
    assert message in capfd.readouterr().err
    assert children() == before


def test_what_functions_print_goes_to_stderr_and_breaks_nothing(functions, capfd):
    rewards, stats = score(
        functions + "print_much", samples_of("a", "b"), time_limit_s=5, num_workers=1
    )
    assert rewards == [1, 1] and stats["error_frac"] == 0
    out, err = capfd.readouterr()
    assert "a print" in err and out == ""


def test_of_what_a_function_prints_the_first_thousands_of_characters_are_shown(tmp_path, capfd):
    """200 kB a call made the console unusable."""
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def f(response):\n    print('y' * 200_000)\n    return 1\n"
        "def g(response):\n    print('y' * 100, file=sys.stderr)\n    return 1\n"
    )
    for name in "fg":
        score(f"{tmp_path}/mine.py:{name}", samples_of(*"a" * 100), num_workers=2)
        err = capfd.readouterr().err
        assert 4000 < len(err) < 9000 and "is dropped" in err


def test_a_function_that_writes_into_our_pipe_is_an_error(functions):
    _, stats = score(functions + "scribble", samples_of("a", "b"), time_limit_s=5, num_workers=1)
    assert stats["error_frac"] == 1


def test_a_sample_that_cannot_be_pickled_is_an_error(functions, capfd):
    _, stats = score(
        functions + "length",
        samples_of("a", "b", lock=threading.Lock()),
        time_limit_s=5,
        num_workers=1,
    )
    assert stats["error_frac"] == 1
    assert "cannot pickle '_thread.lock' object" in capfd.readouterr().err


class Unreadable:
    """Pickled by the trainer; its worker has no such file."""

    def __reduce__(self):
        return open, ("/nowhere/at/all",)


@pytest.mark.parametrize("column", [threading.Lock(), Unreadable()])
def test_a_sample_that_cannot_be_sent_takes_no_other_with_it(functions, column):
    """Those that went in one message with it were errors, and not always it itself."""
    samples = samples_of(*["a"] * 40)
    samples[30]["column"] = column
    rewards_found, stats = score(functions + "length", samples, num_workers=1)
    assert rewards_found == [0.0 if i == 30 else 1.0 for i in range(40)]
    assert stats["error_frac"] == 1 / 40


def test_slow_samples_are_spread_over_the_workers():
    """In one message 30 slow ones of 400 waited for one another: 2.6 s instead of 0.9."""

    def slow_at_first(response):
        time.sleep(0.02 if response == "slow" else 0)
        return float(os.getpid())

    samples = samples_of(*["slow"] * 32, *["a"] * 400)
    workers = score(slow_at_first, samples, num_workers=4)[0][:32]
    assert max(map(workers.count, workers)) <= 16


def test_no_call_waits_for_ever_when_no_process_can_be_started(functions, monkeypatch):
    """The worker was lost, and close() waited for calls that waited for a worker."""
    config = RewardConfig((functions + "die_on_x",), (), 1, 5.0, max_error_frac=1.0)
    scorer = Scorer(config)

    def refuse(*_):
        raise OSError("no more processes")

    monkeypatch.setattr(rewards, "_Worker", refuse)
    for index, sample in enumerate(samples_of("x", "b", "c")):
        scorer.submit(index, sample)
    with pytest.raises(OSError, match="no more processes"):
        scorer.collect(3)
    closing = threading.Thread(target=scorer.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_the_longest_time_limit_holds_for_a_batch_too(functions):
    samples = samples_of("a", "b", "c", "d")
    assert score(functions + "rank_in_batch", samples, time_limit_s=1e6, num_workers=1)[0][3] == 3


def test_a_function_that_cannot_be_loaded_again_stops_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("import os\ndef f(response): os._exit(1)")
    with contextlib.closing(
        Scorer(RewardConfig((f"{tmp_path}/mine.py:f",), num_workers=1))
    ) as scorer:
        (tmp_path / "mine.py").write_text("no python")
        for index, sample in enumerate(samples_of(*"abc")):
            scorer.submit(index, sample)
        with pytest.raises(ValueError, match="SyntaxError"):
            scorer.collect(3)


def test_functions_may_fork_and_the_forks_neither_answer_nor_stay(functions):
    before = children()
    samples = samples_of("x", "y", "z", "x", "y", "z")
    with contextlib.closing(Scorer(RewardConfig((functions + "fork",), num_workers=1))) as scorer:
        for index, sample in enumerate(samples):
            scorer.submit(index, sample)
        rewards, stats = scorer.collect(6)
        assert rewards == [1] * 6 and stats["error_frac"] == 0
        (worker,) = children() - before
        for _ in range(30):  # on busy cores a fork needs a while to end
            time.sleep(0.1)
            scorer.submit(0, samples[0])
            assert scorer.collect(1)[0] == [1]
            time.sleep(0.1)
            num_left = len(children(worker))
            if num_left <= 1:  # the fork of the last sample, whose end the next call will note
                break
        assert num_left <= 1
    assert children() == before


def test_close_ends_every_worker(functions):
    before = children()
    scorer = Scorer(RewardConfig((functions + "length",), num_workers=3))
    assert len(children() - before) == 3
    scorer.close()
    assert children() == before


@pytest.mark.parametrize(
    "callables",
    [
        pytest.param("", marks=pytest.mark.slow),
        ", {'f': lambda response: time.sleep(9 * ('x' in response))}",
    ],
)
def test_no_worker_outlives_a_trainer_that_is_killed_but_idle_ones_live_on(functions, callables):
    """A new user's finding: 7 s after the end they wrote "Timeout! Thread 0x..." into the shell."""
    idle = Scorer(RewardConfig((functions + "length",), num_workers=1, time_limit_s=0.1))
    idle.submit(0, samples_of("a")[0])
    idle.collect(1)
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from rewards import RewardConfig, Scorer
name = {"f" if callables else functions + "hang_on_x"!r}
scorer = Scorer(RewardConfig((name,), (), 2, 0.5){callables})
scorer.submit(0, {samples_of("x")[0]!r})
time.sleep(0.2)
print("both work", flush=True)
time.sleep(100)
"""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    trainer = subprocess.Popen([sys.executable, "-c", program], **options)
    trainer.stdout.readline()
    workers = children(trainer.pid)
    assert len(workers) == 2 and all(map(is_running, workers))
    trainer.kill()
    assert trainer.communicate(timeout=20)[1] == b""  # they have ended then, and their pipe
    deadline = time.monotonic() + 8
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    idle.submit(0, samples_of("a")[0])
    assert idle.collect(1)[1]["error_frac"] == 0
    idle.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_all_processes_ends_no_call_but_the_children_of_functions(functions, name):
    """A scheduler's signal killed the workers, and the step was finished with failed rewards."""
    with contextlib.closing(Scorer(RewardConfig((functions + "nap_in_child",)))) as scorer:
        for index, sample in enumerate(samples_of(*"abcd")):
            scorer.submit(index, sample)
        time.sleep(0.3)
        for worker in children():
            os.kill(int(worker), getattr(signal, name))
            for child in children(worker):
                os.kill(int(child), getattr(signal, name))
        rewards, stats = scorer.collect(4)
    assert (rewards, stats["error_frac"]) == ([1.0] * 4, 0)


def test_256_samples_of_50_ms_take_less_than_3_s_on_8_warm_workers(functions):
    with contextlib.closing(Scorer(RewardConfig((functions + "nap",), num_workers=8))) as scorer:
        start = time.monotonic()
        for index, sample in enumerate(samples_of(*["a"] * 256)):
            scorer.submit(index, sample)
        submitted = time.monotonic()
        rewards, _ = scorer.collect(256)
        assert rewards == [1] * 256
        assert submitted - start < 0.5, "submit waits for workers"
        assert time.monotonic() - start < 3


def test_scoring_overlaps_with_sampling(functions):
    with contextlib.closing(Scorer(RewardConfig((functions + "nap",), num_workers=2))) as scorer:
        for index, sample in enumerate(samples_of(*["a"] * 40)):
            scorer.submit(index, sample)
            time.sleep(0.03)
        start = time.monotonic()
        scorer.collect(40)
        assert (
            time.monotonic() - start < 0.6
        )  # of 40 x 50 ms / 2 = 1 s; the rest hides behind 1.2 s of sampling


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(1)", r"SystemExit: 1 \(mine.py:1\)"),
        ("\nraise RuntimeError('only\\nhere')", r"RuntimeError: only here \(mine.py:2\)"),
        ("import time; time.sleep(60)", "no result within 1 s .*--reward.start-limit-s"),
        ("import json; json.loads('{')", r"JSONDecodeError: .* \(mine.py:1, decoder.py:\d+\)"),
    ],
)
def test_a_file_that_fails_or_hangs_when_imported_is_refused_with_its_cause(
    tmp_path, text, message
):
    (tmp_path / "mine.py").write_text(text + "\ndef f(response): return 1")
    start = time.monotonic()
    with pytest.raises(ValueError, match=message) as error:
        Scorer(RewardConfig((f"{tmp_path}/mine.py:f",), num_workers=2, start_limit_s=1))
    assert "\n" not in str(error.value) and f"{tmp_path}/mine.py:f" in str(error.value)
    assert time.monotonic() - start < 10


def test_a_function_that_exits_is_an_error_that_says_so(tmp_path, capfd):
    """It was "the worker died, its pipe was written to, or the sample can't be pickled"."""
    (tmp_path / "mine.py").write_text(
        "import os, sys\ndef f(response):\n    sys.exit(3)\ndef g(response):\n    os._exit(3)"
    )
    for name, message in (("f", "it called sys.exit(3)"), ("g", "ended, exit code 3")):
        score(f"{tmp_path}/mine.py:{name}", samples_of("a"), num_workers=1)
        assert message in capfd.readouterr().err


def start_on_each_rank(path):
    os.environ["RANK"] = str(dist.get_rank())
    Scorer(RewardConfig((path,), num_workers=1)).close()
    dist.barrier()


@pytest.mark.parametrize("line", ["raise OSError('only here')", "import only_here"])
def test_a_reward_file_that_fails_on_one_rank_ends_all_with_its_cause(tmp_path, line):
    """om-ai-lab/VLM-R1#294: the job ended by a communication error, without its cause."""
    text = f"import os\nif os.environ['RANK'] == '1':\n    {line}\ndef f(response): return 1"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match="mine.py:f: .*only.here.*mine.py:3"):
        run_ranks(2, start_on_each_rank, f"{tmp_path}/mine.py:f")


def score_on_each_rank(path):
    names = ("length", "fail_on_x")
    samples = samples_of("x" if dist.get_rank() == 1 else "yy")
    rewards, _ = score_all(RewardConfig((path + names[0],), num_workers=2), samples)
    assert rewards == [2 - dist.get_rank()]
    score_all(RewardConfig((path + names[1],), num_workers=2), samples)
    dist.barrier()


def test_a_failure_on_one_rank_ends_all_soon_with_its_reason(functions):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="fail_on_x failed on 1 of 1 samples(.|\n)*the reason"):
        run_ranks(2, score_on_each_rank, functions)
    assert time.monotonic() - start < 10


def test_waiting_samples_go_together_and_one_that_hangs_takes_no_other_with_it(
    functions, monkeypatch
):
    """A message for each of 512 samples that end at once cost the trainer 0.1 s a step."""
    asked = []
    ask = rewards._Worker.ask

    def watched(self, question, *limits):
        if isinstance(question[0], int):
            asked.append(len(question[1]))
        return ask(self, question, *limits)

    monkeypatch.setattr(rewards._Worker, "ask", watched)
    texts = ["x" if i == 70 else "a" * (i % 5) for i in range(200)]
    config = RewardConfig((functions + "hang_on_x",), (), 2, 0.5, error_reward=-7.0)
    with contextlib.closing(Scorer(config)) as scorer:
        for index, sample in enumerate(samples_of(*texts)):
            scorer.submit(index, sample)
        found, stats = scorer.collect(200)
    expected = [-7.0 if text == "x" else found[0] for text in texts]
    assert found == expected and found[0] != -7.0
    assert stats["timeout_frac"] == 1 / 200
    assert max(asked) > 10 and len([n for n in asked if n]) < 100
