# SPDX-FileCopyrightText: 2026 handful contributors (guard.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""A guard over a run: when it is saved, how it is stopped, and which minibatches it skips.

The problem. Runs end early: a scheduler takes the machine back, a terminal closes, somebody presses
Ctrl-C, a gradient is NaN. The time since the last save is lost. Whoever had to switch saving on has
not; and every 20 steps is every minute or every day, by the model.

How it works.
1. By the clock. `is_save_due` is asked after each step. It says yes when `save_minutes` have passed
   since the last save, and at the end. A save that took s seconds is followed by 50 s without one,
   so saving takes at most 2 % of the time:
       10 minutes, a save of 3 s: every 10 minutes, 0.5 %;  of 60 s: every 50 minutes, 2 %
   A save that fails is said and tried again later. It is no reason to end the run.
2. Signals. The first SIGTERM, SIGINT (Ctrl-C) or SIGHUP is a wish: the step is finished, the state
   is saved, and all ranks leave with a line that says how to go on. A second one, a second or more
   later, ends the process at once. A thread hears them, since Python's own handlers wait for the
   main thread, which may hang in a collective. Ranks vote after each step, in one all-reduce of two
   numbers: they act alike whichever of them was asked.
3. Gradients that are not finite. optimizer_step leaves the weights as they are, on all ranks, since
   all have the same norm. `count` writes the minibatch's samples to a file. After `max_skipped` in
   a row the run is saved and stops: the weights are those before the first of them.

What we give up: a save in the middle of a step. If a step outlasts the grace period of a scheduler
(30 s is usual), the time since the last save is lost; examples/slurm.sh asks for a longer one.

Copied: it hears SIGTERM and Ctrl-C from here on, and leave_if_over ends the process.
    from pathlib import Path
    from types import SimpleNamespace
    from guard import Guard
    config = SimpleNamespace(save_minutes=10, save_every=1, max_skipped=8)
    guard = Guard(config, Path("."), num_steps=3, decode=str)
    for step in range(3):
        if guard.is_save_due(step):
            with guard.saving():
                Path("state").write_text(str(step))
        guard.leave_if_over(step)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 30  # between SIGTERM and SIGKILL, of most schedulers
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Guard:
    """Watches over a run from its first step on; made in the main thread of each rank."""

    def __init__(
        self,
        config: Any,
        directory: Path,
        num_steps: int,
        decode: Callable[[torch.Tensor], str],
        *,
        save_at: int = 1,
    ):
        """config: save_minutes, save_every, max_skipped. save_at: a state can be gone on from after
        multiples of this many steps alone.
        """
        self.config = config
        self.directory = directory
        self.num_steps = num_steps
        self.decode = decode
        self.save_at = save_at
        self._is_first = True  # no step has ended yet
        self._saved_at = time.monotonic()
        self._save_s = 0.0  # that the last save took
        self._is_saved = False  # after this step
        self._asked = 0  # the signal that came first
        self._stop = 0  # the signal that all ranks have agreed to leave by
        self._in_a_row: Counter[str] = Counter()  # skipped minibatches of each model
        self._listen()

    def _listen(self) -> None:
        hears, tells = os.pipe()
        os.set_blocking(tells, False)
        signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
        for each in SIGNALS:
            if signal.getsignal(each) is not signal.SIG_IGN:  # as under nohup
                signal.signal(each, lambda *_: None)
                signal.siginterrupt(each, False)  # no call of a library fails by it
        threading.Thread(target=self._hear, args=(hears,), daemon=True).start()

    def _hear(self, hears: int) -> None:
        first_at = 0.0
        while True:
            number = os.read(hears, 1)[0]
            if number not in SIGNALS:
                continue
            if not self._asked:
                first_at = time.monotonic()
                self._asked = number
                is_alone = "TORCHELASTIC_RUN_ID" not in os.environ  # else launch.sh says it
                if is_alone and _is_rank0():
                    what = "this step is finished and saved; once more ends it at once"
                    print(f"{signal.Signals(number).name}: {what}", file=sys.stderr, flush=True)
            elif time.monotonic() - first_at > 1:  # to all processes and to the launcher: two
                os._exit(128 + number)

    def count(self, name: str, norm: float, step: int, rows: list, meter: Any) -> None:
        """Notes what optimizer_step made of a minibatch of the model `name`: a step, or, as its
        gradient norm is not finite, nothing. rows: this rank's; meter: takes "NAME/skipped".
        """
        if math.isfinite(norm):
            self._in_a_row[name] = 0
            return
        self._in_a_row[name] += 1
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        meter.add(f"{name}/skipped", 1 / num_ranks, reduction="sum")
        file = self.directory / f"skipped-rank{os.environ.get('RANK', '0')}.jsonl"
        with self._going_on(f"the samples of a skipped minibatch ({file})"), open(file, "a") as out:
            for row in rows:
                for sample in self._samples(row):
                    print(json.dumps({"step": step, "model": name, **sample}), file=out)
        if _is_rank0():
            what = f"the gradient norm of the {name} is {norm}: minibatch skipped"
            print(f"warning: step {step + 1}: {what}; its samples: {file}", flush=True)

    def _samples(self, row: Any) -> Iterator[dict]:
        """The sequences of a packed row, and which of their numbers are not finite."""
        bounds = row.cu_seqlens.tolist()
        for i in range(len(row.source)):
            part = slice(bounds[i], bounds[i + 1])
            known = {name: x[part] for name, x in row.fields.items() if x.is_floating_point()}
            odd = [name for name, x in known.items() if not x.isfinite().all()]
            yield {"not_finite": odd, "text": self.decode(row.tokens[part].cpu())}

    def is_save_due(self, step: int) -> bool:
        """Whether the state is saved after 0-based `step`. Collective."""
        self._is_saved = False
        config = self.config
        num_done = step + 1
        if num_done % self.save_at:
            return False
        waited_s = time.monotonic() - self._saved_at
        if self._is_first and waited_s > GRACE_S and _is_rank0():
            advice = "ask the scheduler for more time: see --signal in examples/slurm.sh"
            print(f"a save on SIGTERM waits up to {waited_s:.0f} s; {advice}", flush=True)
        self._is_first = False
        is_time = waited_s >= max(60 * config.save_minutes, 50 * self._save_s)
        votes = torch.tensor([self._asked, is_time and _is_rank0()], dtype=torch.int64)
        if dist.is_initialized():
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        self._stop, is_time = votes.tolist()
        if config.save_every and num_done % config.save_every == 0:
            return True
        if not config.save_minutes:
            return config.save_every > 0 and (num_done == self.num_steps or self._is_over())
        return bool(is_time or num_done == self.num_steps or self._is_over())

    def _is_over(self) -> bool:
        """Whether the run stops after this step, on all ranks alike."""
        return self._stop > 0 or max(self._in_a_row.values(), default=0) >= self.config.max_skipped

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, which may fail, on all ranks alike (OSError)."""
        start = time.monotonic()
        with self._going_on("the state"):
            yield
            self._is_saved = True
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - start

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if _is_rank0():
                print(f"warning: {what} can't be written: {error}", flush=True)

    def leave_if_over(self, step: int) -> None:
        """Ends the process, if it is to, with a line that says how to go on. Collective."""
        if not self._is_over():
            return
        code = 128 + self._stop if self._stop else 1
        why = "too many minibatches in a row had gradients that are not finite"
        if self._stop:
            why = signal.Signals(self._stop).name
        state = "NOT saved"
        if self._is_saved:
            state = "saved; the same command with --resume goes on"
        if _is_rank0():
            print(f"stopped after step {step + 1} of {self.num_steps} ({why}): {state}", flush=True)
        if dist.is_initialized():
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
