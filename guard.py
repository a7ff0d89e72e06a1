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
   main thread, which may hang in a collective. Ranks vote after each step, and so act alike.
3. Gradients that are not finite. optimizer_step leaves the weights as they are, on all ranks, since
   all have the same norm. `count` writes the minibatch's samples to a file. After `max_skipped` in
   a row the run is saved and stops: the weights are those before the first of them.
4. Errors. Until an optimizer takes its first step, the weights are those of the step before: a
   reward function or a sampler that raises costs that one step. What belongs to the state and is no
   weight (the data's position, generators) is copied after each step. On an uncaught exception the
   rank tells the others by torchrun's store, where a thread of each rank looks once a second. If on
   all ranks the weights are of that step, these threads save it, in a process group of their own.
   Otherwise a line says which older state a resume starts from.
5. The best. After an evaluation with more reward than before, the weights alone go to best/step-N.

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
import functools
import json
import math
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

GRACE_S = 30  # between SIGTERM and SIGKILL, of most schedulers
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FAILED = "guard/failed"  # in the store: the step after which a rank that failed would save
MEET_S = 10  # for that, a rank may finish its step so long


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
        """config: save_minutes, save_every, max_skipped. save_at: states are of its multiples."""
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
        self._state: Mapping[str, Any] = {}
        self._kept: dict[str, Any] = {}  # the state after _num_done steps, if _is_sound
        self._num_done = 0
        self._num_saved = 0  # steps, in the newest saved state
        self._is_sound = True  # no weight has changed since
        self._best_reward = -math.inf
        self._is_told = threading.Event()  # what became of the state after an error
        self._has_failed = False  # on this rank
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
                for sample in self._samples(row.plain()):
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

    def protect(
        self,
        first_step: int,
        state: Mapping[str, Any],
        save: Callable[..., None],
        present: Callable[..., contextlib.AbstractContextManager],
    ) -> None:
        """From now on `state` is saved: when it is due, if an error ends the run, and the best
        weights. Collective.

        state: its entry "policy" has weights(). save: checkpoint.save. present(*owners): inside, an
        entry's model and optimizer are where they can be saved (offload.Offload.present).
        """
        self._state = state
        self._save = save
        self._present = present
        self._owners = []
        self._num_done = self._num_saved = first_step
        self._best_reward = self._best_before(first_step)
        for entry in state.values():
            self._owners += [getattr(entry, "model", None), getattr(entry, "optimizer", None)]
            if getattr(entry, "optimizer", None):
                entry.optimizer.register_step_pre_hook(self._begin_update)
        self._keep()
        if not self._saves():
            return
        sys.excepthook = functools.partial(self._end_by_error, sys.excepthook)
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=10))
            self._store = distributed_c10d._get_default_store()
            self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
            threading.Thread(target=self._wait_for_errors, daemon=True).start()

    def _saves(self) -> bool:
        return bool(self.config.save_minutes or self.config.save_every)

    def _keep(self) -> None:
        """Takes the entries that are no weights as they are now."""
        for name, entry in self._state.items():
            is_sharded = hasattr(entry, "optimizer")
            self._kept[name] = entry if is_sharded else _Kept(entry.state_dict())
        self._is_sound = True

    def _begin_update(self, *_: Any) -> None:
        self._is_sound = False

    def save_if_due(self, step: int, meter: Any) -> None:
        """To be called when 0-based `step` is over. Collective. meter: takes the time of "save"."""
        if (step + 1) % self.save_at == 0:
            self._num_done = step + 1
            self._keep()
        if not self.is_save_due(step):
            return
        self._is_sound = False  # an error here is no reason to try once more
        with self.saving(), meter.timer("save"), self._present(*self._owners):
            self._save_to("checkpoints", self._state, self.config.keep)
            self._num_saved = self._num_done
        self._is_sound = True

    def _save_to(self, name: str, state: Mapping, keep: int, group: Any = None) -> None:
        self._save(self.directory / name, self._num_done, state, keep=keep, group=group)

    def keep_best(self, num_done: int, groups: list, meter: Any) -> None:
        """Saves the policy's weights after num_done steps, if these greedy responses have more
        reward than those of any evaluation before. groups: this rank's. Collective.
        """
        if not self._saves():
            return
        rewards = [reward for group in groups for reward in group.rewards]
        total = torch.tensor([sum(rewards), len(rewards)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(total)
        reward = (total[0] / total[1]).item()
        if not reward > self._best_reward:
            return
        self._best_reward = reward
        best = {"policy": self._state["policy"].weights(), "best": _Kept({"reward": reward})}
        with self._going_on("the best state"), meter.timer("save"):
            self._save(self.directory / "best", num_done, best, keep=1)

    def _best_before(self, first_step: int) -> float:
        """The reward of the best state. One of a later step is removed: its step is taken again."""
        found = -math.inf
        for path in (self.directory / "best").glob("step-*[0-9]"):
            if int(path.name[5:]) > first_step:
                if _is_rank0():
                    shutil.rmtree(path)
                continue
            with contextlib.suppress(OSError, RuntimeError, EOFError, pickle.UnpicklingError):
                found = torch.load(path / "rank0.pt")["state"]["best"]["reward"]
        return found

    def _end_by_error(self, before: Callable, kind: type, value: BaseException, trace: Any) -> None:
        """sys.excepthook: saves the state, if that can be done, and goes on to the one `before`."""
        self._has_failed = True
        if self._is_told.is_set():
            pass  # by the rank that failed
        elif self._num_saved == self._num_done or not self._is_sound:
            self._tell(None if self._is_sound else "its update had begun")
        elif self._group is None:
            self._rescue(self._num_done)
        else:
            self._store.set(FAILED, str(self._num_done))
            self._is_told.wait(timeout=660)
        before(kind, value, trace)

    def _wait_for_errors(self) -> None:
        while not self._store.check([FAILED]):
            time.sleep(1)
        stream = None
        if self._device is not None:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream()  # the default one may wait for the rank that failed
        with torch.cuda.stream(stream):
            self._rescue(int(self._store.get(FAILED)))
        time.sleep(1)  # a rank that leaves closes its connections
        self._is_told.set()
        if not self._has_failed:
            time.sleep(5)  # the error is on the screen first
            os._exit(1)

    def _rescue(self, num_done: int) -> None:
        """Saves the state after num_done steps, if all ranks have it. Collective over _group."""
        try:
            problem = None if self._group is None else self._lacks(num_done)
            if not problem:
                with self._present(*self._owners):
                    self._save_to("checkpoints", self._kept, self.config.keep, self._group)
                self._num_saved = num_done
        except (AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        if _is_rank0():
            self._tell(problem)

    def _lacks(self, num_done: int) -> str | None:
        """What keeps the ranks from saving the state after num_done steps, if anything does."""
        until = time.monotonic() + MEET_S
        while self._num_done != num_done and time.monotonic() < until:
            time.sleep(0.1)  # this rank is a little behind
        has_it = self._num_done == num_done and self._is_sound
        self._store.set(f"{FAILED}/{dist.get_rank()}", str(int(has_it)))
        keys = [f"{FAILED}/{rank}" for rank in range(dist.get_world_size())]
        until = time.monotonic() + 2 * MEET_S
        while not self._store.check(keys):
            if time.monotonic() > until:
                return "another rank does not answer"
            time.sleep(0.1)
        votes = [self._store.get(key) for key in keys]
        return "another rank's update had begun" if b"0" in votes else None

    def _tell(self, problem: str | None) -> None:
        """What an error has left to go on from."""
        older = f"--resume goes on from the state after step {self._num_saved}"
        if not self._num_saved:
            older = "there is no saved state"
        what = f"NOT saved ({problem}); {older}" if problem else older
        done = f"after step {self._num_done} of {self.num_steps}"
        print(f"stopped by an error {done}: {what}", flush=True)

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


class _Kept:
    """A small entry as it was."""

    def __init__(self, state: Any):
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def _is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
