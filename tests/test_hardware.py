"""The machine under a run: use of its GPU by phase, memory, bandwidth, peak."""

import os
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import hardware
from hardware import measure_bandwidth


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GeForce", None),
    ],
)
def test_the_peak_is_that_of_the_devices_datasheet(monkeypatch, device, peak):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert hardware.peak_flops() == peak


class FakeNvml(SimpleNamespace):
    """A GPU that is 70 % busy with 0.5 GiB in use, or one that tells nothing."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails_at=""):
        def call(name, result):
            def answer(*_):
                if name == self.fails_at:
                    raise FakeNvml.NVMLError("Not Supported")
                return result

            return answer

        super().__init__(
            fails_at=fails_at,
            NVMLError=FakeNvml.NVMLError,
            nvmlInit=call("init", None),
            nvmlDeviceGetHandleByUUID=call("uuid", "handle"),
            nvmlDeviceGetMemoryInfo=call("memory", SimpleNamespace(used=1 << 29)),
            nvmlDeviceGetUtilizationRates=call("busy", SimpleNamespace(gpu=70)),
        )


@pytest.fixture
def gpu(monkeypatch):
    """sampler() on a machine with a GPU, as far as hardware.py sees."""
    real = hardware.importlib.util.find_spec
    found = SimpleNamespace(find_spec=lambda name: name == "pynvml" or real(name))
    monkeypatch.setattr(hardware.importlib, "util", found)
    for name, value in dict(
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_name=lambda: "NVIDIA H200",
        get_device_properties=lambda _: SimpleNamespace(uuid="1"),
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)

    def sampler(nvml, phases=()):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        device = hardware.Device()
        device.watch(phases)
        return device

    return sampler


def wait_until(condition):
    end = time.perf_counter() + 20
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.01)


def test_the_device_is_sampled_by_phase_and_null_under_half_a_second(gpu):
    phases = []
    sampler = gpu(FakeNvml(), phases)
    phases += ["step", "update"]
    wait_until(lambda: sampler.mean_utilization("update") == 70.0)
    phases.clear()
    assert sampler.mean_utilization("ref_logprobs") is None
    assert sampler.max_memory_gb() == {"": 0.5, "step": 0.5, "update": 0.5}
    sampler.clear()
    assert sampler.mean_utilization("update") is None  # too few


@pytest.mark.parametrize("fails_at", ["init", "uuid", "memory", "busy"])
def test_a_gpu_that_tells_nothing_ends_no_run(gpu, fails_at):
    """Parts of a GPU (MIG), and drivers that hide UUIDs."""
    with pytest.warns(UserWarning, match="no utilisation or memory of the GPU: Not Supported"):
        sampler = gpu(FakeNvml(fails_at))
    assert sampler.mean_utilization("update") is None and sampler.max_memory_gb() == {}


def test_the_sampling_thread_ends_with_its_owner_and_with_a_gpu_that_goes_silent(gpu):
    def threads():
        return [t for t in threading.enumerate() if "_keep_reading" in t.name]

    nvml = FakeNvml()
    first = gpu(nvml)
    second = gpu(FakeNvml())
    wait_until(lambda: len(threads()) == 2)  # one of another test may still sleep
    nvml.fails_at = "busy"
    wait_until(lambda: len(threads()) == 1)
    assert first.mean_utilization("update") is None
    del second
    wait_until(lambda: not threads())


@pytest.mark.parametrize("world_size", [1, 2])
def test_measured_bandwidth_is_positive_and_equal_on_all_ranks_and_nan_on_one(world_size):
    figures = run_ranks(world_size, partial(measure_bandwidth, 1 << 16))
    if world_size == 1:
        assert figures[0] != figures[0]
    else:
        assert figures[0] > 0 and figures[0] == figures[1]


def test_bandwidth_is_the_bytes_that_a_rank_must_send_over_the_median_of_the_slowest_rank():
    """Four ranks, 1 MiB: three quarters of it leave each."""

    def on_a_rank():
        seconds = [90.0, 80.0, 5.0, 1.0, 4.0, 2.0, 3.0]  # the first two are to warm up
        slower = 1.0 if dist.get_rank() == 2 else 0.5
        ticks = iter([tick for s in seconds for tick in (0.0, s * slower)])
        hardware.time = SimpleNamespace(perf_counter=lambda: next(ticks))
        sizes = []
        hardware.reduce_scatter = lambda out, x, group: sizes.append((x.nbytes, out.nbytes))
        return measure_bandwidth(1 << 20), sizes

    for found, sizes in run_ranks(4, on_a_rank):
        assert found == pytest.approx(0.75 * (1 << 20) / 3.0 / 1e9)
        assert sizes == [(1 << 20, 1 << 18)] * 7


def test_the_memory_of_the_process_is_what_it_holds():
    before = hardware.Device().memory_gb()["host"]
    held = torch.empty(1 << 26)  # 256 MiB of addresses
    assert hardware.Device().memory_gb()["host"] - before < 0.1
    held.fill_(1)
    assert hardware.Device().memory_gb()["host"] - before == pytest.approx(0.25, abs=0.1)
    del held


def test_a_process_is_as_old_as_it_is():
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); time.sleep(0.3); began = time.time();"
    )
    code += "import hardware; print(hardware.process_age() - (time.time() - began))"
    root = os.path.dirname(hardware.__file__)
    job = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True)
    assert 0.3 <= float(job.stdout) < 2.0


def test_a_phase_has_the_most_memory_that_was_seen_and_a_mean_of_ten_samples_or_more():
    device = hardware.Device()
    device._samples = [
        (("update",), busy, gb) for busy, gb in ((40.0, 1.0), (60.0, 3.0), (50.0, 2.0))
    ]
    assert device.max_memory_gb() == {"": 3.0, "update": 3.0}
    assert device.mean_utilization("update") is None
    device._samples *= 4
    assert device.mean_utilization("update") == 50.0


@pytest.mark.parametrize("name", ["python", "a b", "x) S 1 (y"])
def test_a_program_of_any_name_has_its_own_age(monkeypatch, name):
    """/proc gives the name in brackets, spaces and all."""
    hertz = os.sysconf("SC_CLK_TCK")
    text = f"7 ({name}) S {' '.join(map(str, range(4, 22)))} {100 * hertz} 23 24"
    monkeypatch.setattr(hardware, "Path", lambda path: SimpleNamespace(read_text=lambda: text))
    monkeypatch.setattr(hardware.time, "clock_gettime", lambda clock: 160.0)
    assert hardware.process_age() == 60.0
