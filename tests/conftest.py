"""Markers, one thread per process, and gpu tests skipped where there is no GPU."""

import os

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when OpenMP loads: waiting threads must not spin

import torch

torch.set_num_threads(1)    # ranks of multi-rank tests share the cores; more threads only fight over them


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes over ten seconds")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
