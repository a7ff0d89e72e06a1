"""Several ranks in one test: `run_ranks(4, fn)` runs fn in 4 processes joined by gloo and returns
the 4 results.

The processes are forked, so that fn may be a closure and torch need not be imported again; they run
torch on one thread, because OpenMP does not survive a fork. The parent must not have touched a GPU.
A test calls it like this:

    def total() -> float:
        x = torch.full((), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        return x.item()

    assert run_ranks(2, total) == [3.0, 3.0]
"""

import gc
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

# fully_shard imports it: seconds, once here instead of on each rank of each test
import torch._dynamo
import torch.distributed as dist


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """[fn(*args) on rank 0, on rank 1, ...]. The exception of the rank that failed first is raised
    again here, with that rank's traceback as a note; after timeout_s it is a TimeoutError. No
    process is left behind either way.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        port = _free_port()
        ranks = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, port, timeout_s, Path(directory), fn, args),
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, Path(directory), timeout_s)
            return [
                torch.load(Path(directory) / f"result{r}", weights_only=False)
                for r in range(world_size)
            ]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _free_port() -> int:
    """A port for code under test that reads MASTER_PORT; the ranks meet through a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    directory: Path,
    fn: Callable,
    args: tuple,
):
    gc.freeze()  # a collection need not go through all that the parent has made
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1"
    )
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        torch.save(fn(*args), directory / f"result{rank}")
        # A rank that leaves early would close its connections while another still waits in its last
        # collective.
        dist.barrier()
    except BaseException as error:  # a process boundary: whatever it is, the parent raises it again
        failed_at = time.time()
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        try:
            torch.save((failed_at, error), directory / f"partial{rank}")
        except Exception:  # not everything that can be raised can be pickled
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            plain.add_note(error.__notes__[-1])
            torch.save((failed_at, plain), directory / f"partial{rank}")
        os.rename(directory / f"partial{rank}", directory / f"error{rank}")
        sys.exit(1)
    dist.destroy_process_group()


def _wait(ranks: list[BaseProcess], directory: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.exitcode is None for process in ranks) and all(
        not process.exitcode for process in ranks
    ):
        if time.monotonic() > deadline:
            stuck = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
            raise TimeoutError(f"ranks {stuck} of {len(ranks)} still run after {timeout_s} s")
        time.sleep(0.005)
    # The failure of one rank makes gloo fail on the others: a killed rank, else the earliest error,
    # is the cause.
    for rank, process in enumerate(ranks):
        if (process.exitcode or 0) < 0:
            raise RuntimeError(f"rank {rank} was killed by signal {-process.exitcode}")
    errors = [torch.load(path, weights_only=False) for path in directory.glob("error*")]
    if errors:
        raise min(errors, key=lambda item: item[0])[1]
    for rank, process in enumerate(ranks):
        if process.exitcode:
            raise RuntimeError(
                f"rank {rank} ended with exit code {process.exitcode} and no exception"
            )
