"""Markers, one thread per process, and gpu tests skipped where there is no GPU."""

import json
import os

import pytest

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # read when OpenMP loads: waiting threads must not spin

import torch
from tiny import save_tiny

torch.set_num_threads(
    1
)  # ranks of multi-rank tests share the cores; more threads only fight over them


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes over ten seconds")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords hold the names of folders too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen2")


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Prompts in files of 16, 3, 1 and 7 rows, and reward functions in a file."""
    directory = tmp_path_factory.mktemp("data")
    for num in (16, 3, 1, 7):
        rows = [
            {"prompt": f"{i}{'+' * (i % 3)}{i}=", "answer": str(i), "number": i} for i in range(num)
        ]
        (directory / f"{num}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "rewards.py").write_text(
        "import os\ndef spread(response):\n    return sum(map(ord, response)) % 5 / 4\n"
        "def fails(response):\n    return 1 / (os.environ['RANK'] != '1')\n"
    )
    return directory
