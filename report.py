# SPDX-FileCopyrightText: 2026 handful contributors (report.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Where the record of a step goes: console line, metrics.jsonl, wandb, alarms and curves; and a few
responses in samples.jsonl.

The problem. What a run did must be readable by a person while it runs, by a program afterwards, and
after a crash: a resumed run may neither repeat steps in its log nor lose those before.

How it works. `write(step, record)` appends one JSON object a step to metrics.jsonl, prints one
line, and warns once each of what people learn too late: sampler and trainer differ, entropy is
gone, groups have no spread, nothing is trained, a number is not finite. At the start, records from
`first_step` on are dropped: a run that died after its last save left them, and they will be written
again; files that are there at step 0 are another run's, and are moved aside. Only rank 0 writes.

A log cannot end a run: where it can't be written (disk full), that is said once, a half-written
line is taken back, and the run goes on. Nor can it block a resume: lines that a crash tore are left
out. A resumed run is a new run in wandb, which refuses steps below its last.

The names in a record. Means are weighted by tokens or samples over all ranks. Times are means over
ranks and exclusive: they add up to the step. A name whose phase did not run is absent; null means
that nothing could be measured, or NaN.

    reward/mean                   task reward of all samples as they came, before filters, penalties
    reward/std                    deviation within a group, mean over groups (groups of 2 or more)
    reward/frac_zero_std          share of groups whose rewards are all equal: they give no gradient
    reward/SOURCE/mean            by data set, under its file's name; FUNCTION_mean: by function
    reward/error_frac             share of reward calls that failed; timeout_frac: were out of time
    response_length/mean          response tokens, the stop token included; also /min and /max
    response_length/clip_ratio    share of responses that the limit ended
    prompt_length/mean            prompt tokens; also /max
    actor/pg_loss                 policy loss, mean over minibatches
    actor/pg_clipfrac             share of response tokens whose gradient the clip removes
    actor/ppo_kl                  KL(policy before the step, current), k3, nats per token
    actor/kl_loss                 KL term to the reference, nats per token
    actor/reward_kl_penalty       KL to the reference in the reward, nats per token; _coeff: weight
    actor/entropy                 entropy of the policy, nats per token
    actor/grad_norm, actor/lr     gradient norm before clipping; learning rate; critic/*: the same
    actor/num_updates             optimizer steps taken; fewer than epochs x minibatches where
                                  --loss.target-kl or a lack of tokens left some out; critic/*
    actor/skipped                 minibatches not trained on, as their gradient was not finite
    critic/vf_loss                squared error of the values, halved
    critic/vf_clipfrac            share of values that left the clip band
    critic/vf_explained_var       1 - Var(returns - values) / Var(returns), before the update
    sft/loss, sft/perplexity      of demonstrations, nats per trained token; its exp
    sft/token_accuracy            share of trained tokens than which none was likelier
    dpo/loss, dpo/margin          of pairs; reward of the chosen text less that of the rejected one
    dpo/accuracy                  share of pairs whose margin is above 0
    dpo/chosen_logprob            log-probability of the chosen texts; dpo/rejected_logprob
    rollout_corr/kl               KL(sampler, trainer), k3, nats per token: same weights, other code
    rollout_corr/abs_diff_mean    difference of the two log-probabilities of a token; also _max
    rollout_corr/is_weight_mean   mean importance weight; ess: effective sample size as a share
    packing/efficiency            tokens over room in the rows
    eval/reward                   greedy reward on the evaluation prompts; eval/SOURCE/reward by set
    eval/mean@k, eval/pass@k      mean and best reward of k samples
    eval/error_frac               as reward/error_frac, in the evaluation; also timeout_frac
    eval/sft_loss                 on held-out demonstrations; eval/sft_token_accuracy
    eval/dpo_accuracy             on held-out pairs; dpo_preferred: chosen is likelier than rejected
    timing_s/step                 wall time of the step
    timing_s/reshard              weight sync, and waking the KV cache
    timing_s/rollout, eval        sampling; evaluation
    timing_s/reward               waiting for scores
    timing_s/layout               packing, exchange between ranks, copies to the GPU
    timing_s/old_logprobs         pass of the policy before the update; ref_logprobs: the reference
    timing_s/advantages           of groups; in PPO GAE and whitening; values: the critic's pass
    timing_s/update, save, other  optimizer steps; the checkpoint after the step before; the rest
    throughput/tokens_per_sec     prompt + response tokens of the latest rollout, each once, of all
                                  ranks, over the time since the step that sampled them began
    throughput/rollout_latency_ms wall time of sampling alone
    memory/actor_gpu_util_pct     GPU utilisation by NVML during the update, mean over GPUs; null
                                  under half a second; memory/ref_gpu_util_pct: the reference pass
    communication/sync_gb         GB of whole tensors that the engine took, of one rank
    communication/nccl_bw_gb      bus GB/s of a timed reduce-scatter of 4 MiB; null on one rank
    perf/tokens_per_sec_per_gpu   throughput/tokens_per_sec by rank
    perf/mfu                      model FLOPs of the passes that the update made over the step's
                                  time and the GPU's dense bf16 peak (H100 and H200: 989 TFLOP/s)
    perf/max_memory_gb            most memory in use on a GPU in the step, by NVML every 50 ms, GiB;
                                  perf/max_memory_gb/PHASE: in each phase
    perf/cached_memory_gb         GPU memory that torch holds and no tensor uses at the end, GiB
    perf/host_memory_gb           resident host memory of a rank at the end, largest, GiB

Copied:
    from report import LogConfig, Report
    report = Report("out", LogConfig(), num_steps=2)
    for step in range(2):
        report.write(step, {"loss": 1.0 / (step + 1)})
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LogConfig:
    wandb_project: str = ""
    """Log to this wandb project as well, a resumed run as a new one; empty: off."""
    samples_per_step: int = 4
    """Responses written to samples.jsonl each step; 0: none."""
    plot_every: int = 10
    """Redraw curves.png every this many steps, in at most 2 % of the time, and at the end; 0:
    never."""
    mismatch_alarm: float = 0.01
    """Warn once when rollout_corr/kl, the distance between sampler and trainer in nats per token,
    exceeds this; bf16 alone gives 0.001, an 8-bit sampler up to 0.03."""
    entropy_alarm: float = 0.01
    """Warn once when actor/entropy falls below this many nats."""
    zero_std_alarm: int = 5
    """Warn once after this many steps in a row in which no group had any spread, or nothing was
    trained."""

    def __post_init__(self):
        for flag, value, holds, rule in (
            ("samples-per-step", self.samples_per_step, self.samples_per_step >= 0, "0 (none)"),
            ("plot-every", self.plot_every, self.plot_every >= 0, "0 (never)"),
            ("mismatch-alarm", self.mismatch_alarm, self.mismatch_alarm >= 0, "0"),
            ("entropy-alarm", self.entropy_alarm, self.entropy_alarm >= 0, "0"),
            ("zero-std-alarm", self.zero_std_alarm, self.zero_std_alarm >= 1, "1"),
        ):
            if not holds:
                raise ValueError(f"--log.{flag} {value}: must be at least {rule}")
        if self.wandb_project and not _is_installed("wandb"):
            flag = f"--log.wandb-project {self.wandb_project}"
            install = f"{sys.executable} -m pip install wandb"
            raise ValueError(f"{flag}: needs wandb; install it with: {install}")


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # None: just a folder of that name here


def start_wandb(config: LogConfig, name: str, settings: Any = None) -> Any:
    """A new wandb run for Report, on rank 0; None without a project. settings: a dataclass or
    dictionary. ValueError without a login: call it before files of an earlier run are moved.
    """
    if not config.wandb_project or (dist.is_initialized() and dist.get_rank() != 0):
        return None
    import wandb

    known = asdict(settings) if is_dataclass(settings) else settings
    try:
        return wandb.init(project=config.wandb_project, name=name, config=known)
    except wandb.Error as error:
        why = " ".join(str(error).split()) + "; run `wandb login`, or set WANDB_MODE=offline"
        raise ValueError(f"--log.wandb-project {config.wandb_project}: {why}") from error


class Report:
    """Writes the records of a run; does nothing on ranks other than 0."""

    def __init__(
        self,
        out_dir: str | Path,
        config: LogConfig,
        num_steps: int,
        first_step: int = 0,
        tracker: Any = None,
        plot: Callable[[Path, Path], None] | None = None,
    ):
        """Records from first_step on are dropped: the run died after its last save.

        tracker: what start_wandb returned. plot(metrics file, picture): curves.plot; None: no
        picture.
        """
        self.out_dir = Path(out_dir)
        self.config = config
        self.num_steps = num_steps
        self.is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
        self.plot = plot
        self._said: set[str] = set()
        self._in_a_row = {"spread": 0, "gradient": 0}  # steps without it
        self._step_times: list[float] = []
        self._plotted_at = -math.inf
        self._plot_s = 0.0
        self._wandb = tracker
        if not self.is_rank0:
            return
        for name in ("metrics.jsonl", "samples.jsonl"):
            with self._going_on(self.out_dir / name):
                self.out_dir.mkdir(parents=True, exist_ok=True)
                _keep_before(self.out_dir / name, first_step)

    @contextlib.contextmanager
    def _going_on(self, what: Path | str) -> Iterator[None]:
        """A log that can't be written is said once, and is no reason to end the run."""
        try:
            yield
        except OSError as error:
            self._say(f"log {what}", f"{what} can't be written ({error.strerror or error})")

    def _say(self, name: str, message: str) -> None:
        """A warning, once for each name."""
        if name not in self._said:
            self._said.add(name)
            _print(f"warning: {message}")

    def write_start(self, record: dict[str, float | None]) -> None:
        """Where the time before the first step went, from the start of the process on."""
        if self.is_rank0:
            times = {name[9:]: s for name, s in record.items() if name.startswith("timing_s/")}
            total_s = times.pop("step")
            parts = [f"{name} {s:.1f}" for name, s in times.items()]
            _print(f"   start  {total_s:.1f} s: {', '.join(parts)}")

    def write(self, step: int, record: dict[str, float | None]) -> None:
        """The record of this step to all places."""
        if not self.is_rank0:
            return
        self._step_times.append(record.get("timing_s/step") or 0.0)
        with self._going_on(self.out_dir / "metrics.jsonl"):
            _append(self.out_dir / "metrics.jsonl", [{"step": step, **record}])
        is_last = step == self.num_steps - 1
        if self._wandb is not None:
            self._write_to_wandb(step, record, is_last)
        _print(self._console_line(step, record))
        self._warn(record)
        every = self.config.plot_every
        if self.plot and every and (is_last or step % every == every - 1):
            self._draw(is_last)

    def _write_to_wandb(self, step: int, record: dict, is_last: bool) -> None:
        import wandb

        try:
            self._wandb.log(record, step=step)
            if is_last:
                self._wandb.finish()
        except (wandb.Error, OSError) as error:
            self._say("wandb", f"wandb does not take records ({error})")

    def _draw(self, is_last: bool) -> None:
        start = time.perf_counter()
        if is_last or start - self._plotted_at >= 50 * self._plot_s:
            with self._going_on(self.out_dir / "curves.png"):
                self.plot(self.out_dir / "metrics.jsonl", self.out_dir / "curves.png")
            self._plotted_at = time.perf_counter()
            self._plot_s = self._plotted_at - start

    def _console_line(self, step: int, record: dict[str, float | None]) -> str:
        shown = [f"step {step + 1:>4}/{self.num_steps}"]
        for label, name, form in (
            ("reward", "reward/mean", ".3f"),
            ("eval", "eval/reward", ".3f"),
            ("sft", "sft/loss", ".3f"),
            ("dpo", "dpo/loss", ".3f"),
            ("length", "response_length/mean", ".1f"),
            ("entropy", "actor/entropy", ".3f"),
            ("kl", "actor/ppo_kl", ".5f"),
            ("grad", "actor/grad_norm", ".3f"),
            ("tok/s", "throughput/tokens_per_sec", ".0f"),
        ):
            if record.get(name) is not None:
                shown.append(f"{label} {record[name]:{form}}")
        if len(shown) == 1:  # none of our names: the first few of the caller's
            machine = ("timing_s/", "perf/", "memory/", "throughput/", "communication/")
            others = [name for name in record if not name.startswith(machine)]
            shown += [f"{name} {record[name]}" for name in others[:5]]
        recent = sorted(self._step_times[-20:])
        left_min = recent[len(recent) // 2] * (self.num_steps - step - 1) / 60
        return "  ".join([*shown, f"{self._step_times[-1]:.2f} s", f"left {left_min:.1f} min"])

    def _warn(self, record: dict[str, float | None]) -> None:
        config = self.config
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                self._say(f"finite {name}", f"{name} is {value}")
        # Written so that NaN is an alarm too.
        kl = record.get("rollout_corr/kl")
        if kl is not None and not kl <= config.mismatch_alarm:
            what = f"sampler and trainer differ by {kl:.3f} nats per token"
            self._say("mismatch", f"{what}; run once with --verify-sync")
        entropy = record.get("actor/entropy")
        if entropy is not None and not entropy >= config.entropy_alarm:
            what = f"entropy is down to {entropy:.4f} nats"
            self._say("entropy", f"{what}; try --loss.entropy-coef or more --loss.clip-high")
        share = record.get("reward/frac_zero_std")
        num_flat = self._count("spread", share, share == 1.0)
        if num_flat >= config.zero_std_alarm:
            what = f"no group had any spread for {num_flat} steps"
            self._say("spread", f"{what}: too easy, or too hard")
        # A step that sampled and updated nothing has no norm at all.
        learns = "reward/mean" not in record or "critic/grad_norm" in record
        norm = record.get("actor/grad_norm", None if learns else 0.0)
        num_still = self._count("gradient", norm, norm == 0.0 and share != 1.0)
        if num_still >= config.zero_std_alarm:
            what = f"the policy has had no gradient for {num_still} steps"
            why = "are all responses masked or truncated, or is --loss.target-kl too low?"
            self._say("gradient", f"{what}: {why}")

    def _count(self, name: str, value: float | None, is_lacking: bool) -> int:
        """Steps in a row that lack it; steps without a value do not count."""
        if value is not None:
            self._in_a_row[name] = self._in_a_row[name] + 1 if is_lacking else 0
        return self._in_a_row[name]

    def write_samples(
        self,
        step: int,
        groups: Sequence,
        decode: Callable[[Tensor], str],
        advantages: Tensor | None = None,
    ) -> None:
        """A response of each of the first groups, with its advantage of [P, G]."""
        if not self.is_rank0:
            return
        samples = []
        for i, group in enumerate(groups[: self.config.samples_per_step]):
            sample = {
                "step": step,
                "prompt": group.prompt.text,
                "response": decode(group.rollouts[0].response_ids),
                "answer": group.prompt.answer,
                "reward": group.rewards[0],
            }
            if advantages is not None:
                sample["advantage"] = float(advantages[i, 0])
            samples.append(sample)
        with self._going_on(self.out_dir / "samples.jsonl"):
            _append(self.out_dir / "samples.jsonl", samples)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the console may be a file on a full disk, or be gone
        print(line, flush=True)


def _append(file: Path, objects: list[dict]) -> None:
    """A JSON line for each; all or none of them."""
    lines = [json.dumps(_plain(x), ensure_ascii=False, default=str) + "\n" for x in objects]
    # A lone surrogate, which UTF-8 does not have, becomes an escape that JSON has.
    data = "".join(lines).encode("utf-8", errors="backslashreplace")
    with open(file, "ab", buffering=0) as out:
        size = out.tell()
        try:
            while data:
                data = data[out.write(data) :]
        except OSError:
            out.truncate(size)
            raise


def _plain(x):
    """x of what JSON has: lists in place of arrays, null in place of NaN and infinities."""
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(key): _plain(value) for key, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, (list, tuple)) else x


def _keep_before(file: Path, step: int) -> None:
    """Leaves out the records from `step` on, and lines that are no JSON; step 0: a new file."""
    if not file.exists() or not file.stat().st_size:
        return
    if step == 0:
        aside = next(path for i in itertools.count(1) if not (path := Path(f"{file}.{i}")).exists())
        file.rename(aside)
        _print(f"note: {file} is of an earlier run; it is {aside} now")
        return
    data = file.read_bytes()
    lines = data.split(b"\n")  # not splitlines(): a text may hold U+2028 and others
    kept = b"".join(line + b"\n" for line in lines if _step(_parse(line)) < step)
    if data.startswith(kept):
        os.truncate(file, len(kept))  # needs no room
    else:
        part = Path(f"{file}.part")
        part.write_bytes(kept)
        part.rename(file)


def _parse(line: bytes) -> dict | None:
    """The JSON object of a line; None if it was torn."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # ValueError also if it is no UTF-8
        return None
    return record if isinstance(record, dict) else None


def _step(record: dict | None) -> float:
    """inf for what is no record; -inf for somebody else's, which stays."""
    if record is None:
        return math.inf
    return record["step"] if isinstance(record.get("step"), int) else -math.inf
