"""The colocated engine on a GPU, in small: what sleep keeps and frees, what a sync costs, how far
the sampler is off.

An engine cannot be taken down within its process, so each test starts a program of benchmarks/ on a
model of 135 M random weights and reads the JSON line that it prints.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from examples import addition

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def start(program, *arguments, **environment):
    """The figures that a program of benchmarks/ prints as its last line of JSON; None if it prints
    no such line.
    """
    command = [sys.executable, ROOT / "benchmarks" / program, *map(str, arguments)]
    job = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=240
    )
    assert job.returncode == 0, job.stderr[-4000:]
    lines = [line for line in job.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with the shape of SmolLM2-135M and random weights; the tokenizer is the built-in
    task's.
    """
    folder = tmp_path_factory.mktemp("model")
    addition.make_tokenizer().save_pretrained(folder / "words")
    start("shapes.py", "smollm2-135m", folder / "random", "--tokenizer", folder / "words")
    return folder / "random"


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    """A function that starts benchmarks/engine.py with these arguments and returns its figures;
    each start once.
    """
    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = addition.problems(held_out=True, num_held_out=16)
    lines = [
        json.dumps(row | {"prompt": row["prompt"] * (1 + i)}) for i, row in enumerate(rows)
    ]  # 6 to 96 tokens
    data.write_text("\n".join(lines))

    @functools.cache
    def run(what, *options, **environment):
        sizes = ("--prompts", 16, "--samples", 4, "--max-new", 64)
        return start("engine.py", model, data, what, *sizes, *options, **environment)

    return run


def check_sleep(slept, never):
    """Same text in all cycles as from an engine that never sleeps; its memory given back, and no
    more of it kept.
    """
    assert (slept["texts"], slept["checksum"]) == (1, never["checksum"])
    assert slept["mb_first"] < never["mb_first"] / 2  # an awake engine holds half of the GPU
    assert slept["mb_last"] <= slept["mb_first"] + 1  # 0 MiB in 50 cycles on one H200


@pytest.mark.parametrize("level", [1, 2])
def test_five_cycles_of_sleep_keep_the_text_and_do_not_grow_memory(engine, level):
    never = engine("sleep", "--cycles", 5, "--level", 0)
    check_sleep(engine("sleep", "--cycles", 5, "--level", level), never)


def test_expandable_segments_of_the_trainers_allocator_go_with_sleep(engine):
    never = engine("sleep", "--cycles", 5, "--level", 0)
    variable = dict(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    check_sleep(engine("sleep", "--cycles", 5, "--level", 2, **variable), never)


def test_the_sampler_is_the_trainers_policy_to_bf16_and_verify_sync_sees_one_moved_weight(engine):
    # The engine begins asleep at level 2, without weights: what it samples with is what the sync
    # has brought.
    figures = engine("mismatch")
    assert figures["num_tokens"] > 1000
    assert figures["abs_diff"] < 0.06  # two bf16 implementations: 0.02 to 0.045 on one H200
    assert figures["ratio"]["0.01"] >= 5  # noise of that deviation, without a sync: 0.54
    assert figures["verify_sync"].startswith("says so: 1 of ")


def test_a_sync_takes_little_time_and_no_more_memory_than_a_bucket_and_the_largest_tensor(model):
    figures = start("reshard.py", model, "--bucket-mb", 64)
    assert (
        2 * 134e6 < figures["num_bytes"] < 2 * 136e6
    )  # 135 M parameters in bf16, the tied head once
    assert figures["sync_s"] < 0.2  # 0.02 s on one H200
    assert figures["peak_extra_gb"] <= (64 << 20) / 1e9 + figures["largest_tensor_gb"]
