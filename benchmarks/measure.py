"""What benchmarks of the engine share: JSON lines, and the time that kernels run."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch


def say(what: str, **known) -> None:
    """One JSON line, floats to four places."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in known.items()}
    print(json.dumps({"what": what} | rounded), flush=True)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernel_seconds(function: Callable[[], object]) -> float | None:
    """Seconds that kernels run while function() does; None, and no call, without a GPU."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        synchronize()
    return sum(event.self_device_time_total for event in profiled.key_averages()) / 1e6
