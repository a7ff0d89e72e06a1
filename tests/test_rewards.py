"""Rewards: how functions are called, what they may do to us, and what counts as a reward."""

import contextlib
import gc
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from rewards import RewardConfig, Scorer, evaluate, score

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
        and "Z" != pathlib.Path(f"/proc/{pid}/stat").read_text().split()[-50]
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


def test_two_files_of_one_name_are_refused(tmp_path):
    specs = []
    for folder, name in (("one", "f"), ("two", "g")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def {name}(response): return 1")
        specs.append(f"{tmp_path}/{folder}/mine.py:{name}")
    with pytest.raises(ValueError, match="the name of .*two/mine.py is taken by .*one/mine.py"):
        Scorer(RewardConfig(tuple(specs), num_workers=1))


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        ("maths", None, "no file and function .maths.: math, exact"),
        ("{}/none.py:f", None, "no file"),
        ("{}/mine.py:g", "def f(response): return 1", "has no function 'g'"),
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


def test_a_function_names_the_columns_that_it_cannot_do_without(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def one(solution_str, level, *rest, hint='', ground_truth, **more): return 1\n"
        "def many(completions, level=1): return [1] * len(completions)\n"
    )
    specs = [f"{tmp_path}/mine.py:one", f"{tmp_path}/mine.py:many", "exact", "http://localhost:1/x"]
    with contextlib.closing(Scorer(RewardConfig(tuple(specs), num_workers=1))) as scorer:
        needed = {
            specs[0]: ["response", "level", "answer"],
            specs[1]: ["response"],
            "exact": ["response", "answer"],
            specs[3]: [],
        }
        assert scorer.wanted == needed


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    for name in ("math_verify", "reasoning_gym"):
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError('No module named {name}', name='{name}')"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match="pip install math_verify$"):
        Scorer(RewardConfig(("math",), num_workers=1))
    with pytest.raises(ValueError, match="pip install reasoning_gym"):
        Scorer(RewardConfig(("reasoning_gym",), num_workers=1))


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
        ({"num_workers": 0}, "--reward.num-workers 0"),
        ({"time_limit_s": 0.0}, "--reward.time-limit-s 0.0"),
        ({"memory_limit_mb": -1}, "--reward.memory-limit-mb -1"),
        ({"max_error_frac": -0.1}, "--reward.max-error-frac -0.1"),
    ],
)
def test_a_bad_configuration_is_refused_with_the_flag_and_its_value(options, flag):
    with pytest.raises(ValueError, match=flag):
        RewardConfig(**options)


def test_math_runs_in_workers_and_a_hostile_expression_costs_its_time_limit_only():
    power = "9^{" * 12 + "9" + "}" * 12
    samples = samples_of(
        r"\boxed{\frac12}", rf"\boxed{{\sqrt{{{power}}}}}", r"\boxed{3}", answer=r"\frac{2}{4}"
    )
    start = time.monotonic()
    rewards, stats = score("math", samples, time_limit_s=1, num_workers=2)
    assert rewards == [1, 0, 0]
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
    """Fails twice, then rewards the length of the response; /away always fails, /text replies without JSON, /cut fails
    by replies that end too early."""

    requests = []

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
        ("http://127.0.0.1:9/", "refused"),
        (f"{remote}/text", "JSON"),
    ):
        rewards, stats = score(
            url, samples_of("a" * len(reason), bonus=1), time_limit_s=2, num_workers=1
        )
        assert rewards == [0] and stats["error_frac"] == 1 and stats["timeout_frac"] == 0
        assert reason in capfd.readouterr().err


def one_of_eight(bad):
    """A function of single samples that returns `bad` for the response "x"."""
    return lambda response: bad if response == "x" else 1.0


def too_few(responses):
    return [1.0] * (len(responses) - 1)


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
        outcomes = evaluate(lambda responses: bad, samples_of("y", "z"))
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
    assert shown.count("fail_on_x failed on 1 of 4 samples; sample 0: Traceback") == 1
    assert shown.count("KeyError: 'the reason'") == 1


def test_the_run_stops_when_more_than_the_given_share_fails(functions):
    config = RewardConfig(("exact", functions + "fail_on_x"), max_error_frac=0.25, num_workers=2)
    assert score_all(config, samples_of("x", "b", "c", "d"))[1]["error_frac"] == 1 / 8
    with pytest.raises(
        RuntimeError,
        match=r"fail_on_x failed on 2 of 3 samples; sample 1: Traceback(.|\n)*the reason",
    ):
        score_all(config, samples_of("a", "x", "x", "d"))


def test_a_run_that_must_stop_does_not_wait_for_every_sample_to_time_out(functions):
    """Nor does the interpreter at its end, which runs what is left in the queues of its threads."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from rewards import RewardConfig, Scorer
scorer = Scorer(RewardConfig(({functions + "hang_on_x"!r},), num_workers=2, time_limit_s=0.5, max_error_frac=0.1))
for index in range(80):
    scorer.submit(index, {samples_of("x")[0]!r})
scorer.collect(80)
"""
    start = time.monotonic()
    job = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "hang_on_x failed on 9 of 9 samples; sample 0: no result within 0.5 s" in job.stderr
    assert (
        job.returncode == 1 and time.monotonic() - start < 12
    )  # 20 s of time limits on two workers


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
        time.sleep(0.2)
        scorer.submit(0, samples[0])
        assert scorer.collect(1)[0] == [1]
        (worker,) = children() - before
        time.sleep(0.2)
        assert (
            len(children(worker)) <= 1
        )  # the fork of the last sample, whose end the next call will note
    assert children() == before


def test_close_ends_every_worker(functions):
    before = children()
    scorer = Scorer(RewardConfig((functions + "length",), num_workers=3))
    assert len(children() - before) == 3
    scorer.close()
    assert children() == before


@pytest.mark.parametrize(
    "callables", ["", ", {'f': lambda response: time.sleep(9 * ('x' in response))}"]
)
def test_no_worker_outlives_a_trainer_that_is_killed_but_idle_ones_live_on(functions, callables):
    idle = Scorer(RewardConfig((functions + "length",), num_workers=1, time_limit_s=0.1))
    idle.submit(0, samples_of("a")[0])
    idle.collect(1)
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from rewards import RewardConfig, Scorer
scorer = Scorer(RewardConfig(({"f" if callables else functions + "hang_on_x"!r},), (), 2, 0.5){callables})
scorer.submit(0, {samples_of("x")[0]!r})
time.sleep(0.2)
print("both work", flush=True)
time.sleep(100)
"""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    trainer = subprocess.Popen([sys.executable, "-c", program], **options)
    trainer.stdout.readline()
    workers = children(trainer.pid)
    assert len(workers) == 2 and all(map(is_running, workers))
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 8
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    idle.submit(0, samples_of("a")[0])
    assert idle.collect(1)[1]["error_frac"] == 0
    idle.close()


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
