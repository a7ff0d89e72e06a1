"""Ranks that stay alive between tests, for engines that are slow to build and cannot be taken down.

`with lab(2, setup) as on_ranks:` starts 2 ranks (see ranks.py); each keeps what `setup()` returned.
Then `on_ranks(fn, *args)` runs fn(kept, *args) on all of them and returns the list of results; an
exception on a rank is raised again here. fn may be a closure. Ranks run at the same time, so
collectives work.
"""

import contextlib
import importlib
import multiprocessing
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from ranks import run_ranks

# Most of what an engine imports: seconds, once here instead of on each rank.
ENGINE = "vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker"


@contextlib.contextmanager
def lab(world_size: int, setup: Callable, *, timeout_s: float = 600.0) -> Iterator[Callable]:
    """A function (fn, *args) -> [result of rank 0, ...]; the ranks end with the block, or after
    timeout_s.
    """
    import cloudpickle  # vLLM brings it

    for name in ENGINE:
        importlib.import_module(name)
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(world_size)), strict=True)
    failures = []

    def run() -> None:
        try:
            run_ranks(world_size, _serve, theirs, setup, timeout_s=timeout_s)
        except Exception as error:  # handed to the thread that waits for an answer
            failures.append(error)

    ranks = threading.Thread(target=run)  # not an executor: its exit handler fails in forked ranks
    ranks.start()

    def answer(pipe) -> bytes:
        while not pipe.poll(0.02):
            if not ranks.is_alive():
                raise failures[0]
        return pipe.recv_bytes()

    def on_ranks(fn: Callable, *args) -> list:
        for pipe in ours:
            pipe.send_bytes(cloudpickle.dumps((fn, args)))
        outcomes = [pickle.loads(answer(pipe)) for pipe in ours]
        for error, _ in outcomes:
            if error is not None:
                raise error
        return [result for _, result in outcomes]

    for pipe in ours:
        # Forked while this thread waits. In the middle of Transformers' from_pretrained a rank
        # would have inherited its patches, and would have tied no weights.
        answer(pipe)
    yield on_ranks
    for pipe in ours:
        pipe.send_bytes(b"")
    ranks.join()
    if failures:
        raise failures[0]


def _serve(pipes: tuple, setup: Callable) -> None:
    pipe = pipes[dist.get_rank()]
    pipe.send_bytes(b"here")
    if not torch.cuda.is_available():
        # There vLLM compiles one function, the rank of a token, in 3 s. Nobody reads the rank.
        torch.compiler.set_stance("force_eager")
    kept = setup()
    while request := pipe.recv_bytes():
        fn, args = pickle.loads(request)
        error = result = None
        try:
            result = fn(kept, *args)
        except Exception as raised:  # a process boundary: the test raises it again
            error = RuntimeError(f"on rank {dist.get_rank()}: {type(raised).__name__}: {raised}")
            error.add_note(traceback.format_exc())
        pipe.send_bytes(pickle.dumps((error, result)))
