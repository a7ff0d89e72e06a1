# SPDX-FileCopyrightText: 2026 handful contributors (hardware.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""The machine under a run: how busy its GPU is, memory, links between ranks, peak FLOP/s.

The problem. torch knows what it has allocated, not what the device holds: an engine that sleeps
has given back memory that torch still counts. Nor does torch know whether the GPU works or waits
for Python. And a share of the peak needs the peak.

How it works. `Device` asks NVML for utilisation and memory every 50 ms, in a thread, and files each
sample under the phases that run then. `measure_bandwidth` times a collective of a known size by
itself: a step's own collectives overlap its computation, so their times would say little.

What we give up: what happens between two samples; devices of other vendors. A model's FLOPs are
counted in metrics.py. Source: NVML; datasheets for the dense bf16 peaks; nccl-tests for bus
bandwidth.

Copied (utilisation needs nvidia-ml-py):
    from hardware import Device, process_age
    device = Device()
    device.watch(["update"])
    print(device.max_memory_gb(), device.memory_gb(), process_age())
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
import warnings
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

PEAK_FLOPS = {  # the first name that a device's name contains
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}

# torch 2.13 renamed it.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Device:
    """What this process's GPU did since clear(), by NVML; without one the answers are empty."""

    def __init__(self):
        self.peak_flops = peak_flops()
        self._phases: list[str] = []
        self._samples: list[tuple[tuple[str, ...], float, float]] = []  # phases, per cent, GiB

    def watch(self, phases: list[str]) -> None:
        """Sample from now on; phases: names of what runs, kept up to date by its owner."""
        self._phases = phases
        if not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None:
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's.
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._read(pynvml, handle)
        except pynvml.NVMLError as error:  # parts of a GPU (MIG), drivers that hide UUIDs
            warnings.warn(f"no utilisation or memory of the GPU: {error}", stacklevel=3)
            return
        arguments = (weakref.ref(self), pynvml, handle)
        threading.Thread(target=_keep_reading, args=arguments, daemon=True).start()

    def _read(self, pynvml, handle) -> None:
        # Of the device: torch still counts what a sleeping engine has given back as allocated.
        used_gb = pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30
        busy_pct = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        self._samples.append((tuple(self._phases), busy_pct, used_gb))

    def max_memory_gb(self) -> dict[str, float]:
        """The most in use in each phase that was sampled, and under "" in all of the step."""
        found: dict[str, float] = {}
        for phases, _, used_gb in list(self._samples):
            for name in ("", *phases):
                found[name] = max(used_gb, found.get(name, 0.0))
        return found

    def mean_utilization(self, name: str) -> float | None:
        """Mean per cent inside the phases called `name`; None under half a second together."""
        values = [busy_pct for phases, busy_pct, _ in list(self._samples) if name in phases]
        return sum(values) / len(values) if len(values) >= 10 else None

    def memory_gb(self) -> dict[str, float]:
        """Now, in GiB: "host", what the process holds; "cached", on the GPU and not in a tensor."""
        found = {}
        with contextlib.suppress(OSError):  # no /proc
            num_pages = int(Path("/proc/self/statm").read_text().split()[1])
            found["host"] = num_pages * os.sysconf("SC_PAGE_SIZE") / 2**30
        if torch.cuda.is_available():
            cached_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            found["cached"] = cached_bytes / 2**30
        return found

    def clear(self) -> None:
        self._samples.clear()


def _keep_reading(owner: weakref.ref, pynvml, handle) -> None:
    while (sampler := owner()) is not None:
        try:
            sampler._read(pynvml, handle)
        except pynvml.NVMLError:
            return
        del sampler  # else the owner would live as long as this thread
        time.sleep(0.05)


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of this device by its datasheet; None if it is not in the table (CPU)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def process_age() -> float:
    """Seconds since this process began; 0 where /proc does not say it."""
    with contextlib.suppress(OSError):
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return 0.0


def measure_bandwidth(num_bytes: int, group: dist.ProcessGroup | None = None) -> float:
    """Bus GB/s of a reduce-scatter of num_bytes in fp32, as of gradients; NaN on one rank.

    What a rank must send whatever the algorithm, bytes * (W - 1) / W, over the time on the slowest
    rank, median of five after two to warm up.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return float("nan")
    device = "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"
    chunk = torch.zeros(max(1, num_bytes // 4 // num_ranks), device=device)
    full = torch.zeros(num_ranks * len(chunk), device=device)
    times = []
    for _ in range(7):
        elapsed = torch.zeros(1, device=device)
        dist.all_reduce(elapsed, group=group)  # so that all start together
        start = time.perf_counter() + elapsed.item()
        reduce_scatter(chunk, full, group=group)
        if elapsed.is_cuda:
            torch.cuda.synchronize()
        elapsed += time.perf_counter() - start
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
        times.append(elapsed.item())
    median = sorted(times[2:])[2]
    return (num_ranks - 1) * chunk.nbytes / median / 1e9
