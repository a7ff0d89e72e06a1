"""Where the record of a step goes: console line, metrics.jsonl, wandb, alarms and curves; and a few
responses in samples.jsonl.

The problem. What a run did must be readable by a person while it runs, by a program afterwards, and
after a crash: a resumed run may neither repeat steps in its log nor lose those before.

How it works. `write(step, record)` appends one JSON object a step to metrics.jsonl, prints one
line, and warns once each of what people learn too late: sampler and trainer differ, entropy is
gone, groups have no spread. At the start, records from `first_step` on are dropped: a run that died
after its last save left them, and they will be written again. Only rank 0 writes.

The names in a record. Means are weighted by tokens or samples over all ranks. Times are means over
ranks and exclusive: they add up to the step. A name whose phase did not run is absent; null means
that nothing could be measured.

    reward/mean                   task reward of all samples as they came, before filters, penalties
    reward/std                    deviation within a group, mean over groups (groups of 2 or more)
    reward/frac_zero_std          share of groups whose rewards are all equal: they give no gradient
    reward/SOURCE/mean            the mean by data set, under its file's name
    reward/FUNCTION_mean          the mean of each reward function
    reward/error_frac             share of reward calls that failed
    reward/timeout_frac           share of reward calls that ran out of time
    response_length/mean          response tokens, the stop token included; also /min and /max
    response_length/clip_ratio    share of responses that the limit ended
    prompt_length/mean            prompt tokens; also /max
    actor/pg_loss                 policy loss, mean over minibatches
    actor/pg_clipfrac             share of response tokens whose gradient the clip removes
    actor/ppo_kl                  KL(policy before the step, current), k3, nats per token
    actor/kl_loss                 KL term to the reference, nats per token
    actor/reward_kl_penalty       KL to the reference in the reward, nats per token
    actor/reward_kl_penalty_coeff its weight
    actor/entropy                 entropy of the policy, nats per token
    actor/grad_norm, actor/lr     gradient norm before clipping; learning rate
    critic/vf_loss                squared error of the values, halved
    critic/vf_clipfrac            share of values that left the clip band
    critic/vf_explained_var       1 - Var(returns - values) / Var(returns), before the update, with
                                  Monte-Carlo returns; absent if they are all equal
    critic/grad_norm, critic/lr   as the actor's
    rollout_corr/kl               KL(sampler, trainer), k3, nats per token: the same weights in
                                  other kernels
    rollout_corr/abs_diff_mean    difference of the two log-probabilities of a token; also _max
    rollout_corr/is_weight_mean   mean importance weight
    rollout_corr/ess              effective sample size as a share
    packing/efficiency            tokens over room in the rows
    eval/reward                   greedy reward on the evaluation prompts; eval/SOURCE/reward by set
    eval/mean@k, eval/pass@k      mean and best reward of k samples
    eval/error_frac               as reward/error_frac, in the evaluation; also timeout_frac
    timing_s/step                 wall time of the step
    timing_s/reshard              weight sync, and waking the KV cache
    timing_s/rollout              sampling
    timing_s/reward               waiting for scores
    timing_s/eval                 evaluation
    timing_s/layout               advantages of groups, packing, exchange, copies to the GPU
    timing_s/old_logprobs         pass of the policy before the update; ref_logprobs: the reference
    timing_s/values               PPO: the critic's pass; advantages: GAE and whitening
    timing_s/update, save         optimizer steps; checkpoint
    timing_s/other                the rest (sleeping, waking weights)
    throughput/tokens_per_sec     prompt + response tokens of the step, each once, over its wall
                                  time, all ranks
    throughput/rollout_latency_ms wall time of sampling alone
    memory/actor_gpu_util_pct     GPU utilisation by NVML during the update; null under half a
                                  second; memory/ref_gpu_util_pct: during the reference pass
    communication/nccl_bw_gb      bus GB/s of a timed reduce-scatter of 4 MiB; null on one rank
    perf/tokens_per_sec_per_gpu   throughput/tokens_per_sec by rank
    perf/mfu                      model FLOPs of the update over the step's time and the GPU's dense
                                  bf16 peak (989 TFLOP/s for H100 and H200)
    perf/max_memory_gb            most memory in use on a GPU in the step, by NVML every 50 ms, GiB;
                                  perf/max_memory_gb/PHASE: in each phase
    perf/cached_memory_gb         GPU memory that torch holds and no tensor uses at the end, GiB
    perf/host_memory_gb           resident host memory of a rank at the end, largest, GiB
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LogConfig:
    wandb_project: str = ""
    """Log to this wandb project as well; empty: off."""
    samples_per_step: int = 4
    """Responses written to samples.jsonl each step; 0: none."""
    plot_every: int = 10
    """Redraw curves.png every this many steps, and at the end; 0: never."""
    mismatch_alarm: float = 0.1
    """Warn once when rollout_corr/kl, the distance between sampler and trainer in nats per token,
    exceeds this.
    """
    entropy_alarm: float = 0.01
    """Warn once when actor/entropy falls below this many nats."""
    zero_std_alarm: int = 5
    """Warn once after this many steps in a row in which no group had any spread."""

    def __post_init__(self):
        if self.samples_per_step < 0 or self.plot_every < 0 or self.zero_std_alarm < 1:
            raise ValueError(
                f"--log.samples-per-step {self.samples_per_step}, "
                f"--log.plot-every {self.plot_every}: 0 (off) or more; "
                f"--log.zero-std-alarm {self.zero_std_alarm}: at least 1"
            )
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            flag = f"--log.wandb-project {self.wandb_project}"
            raise ValueError(f"{flag}: needs wandb; install it with: pip install wandb")


class Alarm(NamedTuple):
    """What is wrong with a run; raised once for each name."""

    name: str
    message: str


class Report:
    """Writes the records of a run; does nothing on ranks other than 0."""

    def __init__(
        self,
        out_dir: str | Path,
        config: LogConfig,
        num_steps: int,
        *,
        first_step: int = 0,
        settings: dict | None = None,
    ):
        """Records from first_step on, left by a run that died after its last save, are dropped.
        settings: for wandb.
        """
        self.out_dir = Path(out_dir)
        self.config = config
        self.num_steps = num_steps
        self.is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
        self._alarms: set[str] = set()
        self._steps_without_spread = 0
        self._step_times: list[float] = []
        self._wandb = None
        if self.is_rank0:
            self.out_dir.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "samples.jsonl"):
                _keep_before(self.out_dir / name, first_step)
        if self.is_rank0 and config.wandb_project:
            import wandb

            name = self.out_dir.name
            self._wandb = wandb.init(project=config.wandb_project, name=name, config=settings)

    def write(self, step: int, record: dict[str, float | None]) -> None:
        """The record of this step to all places."""
        if not self.is_rank0:
            return
        self._step_times.append(record["timing_s/step"])
        with open(self.out_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")
        if self._wandb is not None:
            self._wandb.log(record, step=step)
        print(self._console_line(step, record), flush=True)
        for alarm in self._find_alarms(record):
            if alarm.name not in self._alarms:
                self._alarms.add(alarm.name)
                print(f"warning: {alarm.message}", flush=True)
        is_last = step == self.num_steps - 1
        if is_last and self._wandb is not None:
            self._wandb.finish()
        every = self.config.plot_every
        if every and (is_last or step % every == every - 1):
            plot(self.out_dir / "metrics.jsonl", self.out_dir / "curves.png")

    def _console_line(self, step: int, record: dict[str, float | None]) -> str:
        shown = [f"step {step + 1:>4}/{self.num_steps}"]
        for label, name, form in (
            ("reward", "reward/mean", ".3f"),
            ("eval", "eval/reward", ".3f"),
            ("length", "response_length/mean", ".1f"),
            ("entropy", "actor/entropy", ".3f"),
            ("kl", "actor/ppo_kl", ".5f"),
            ("grad", "actor/grad_norm", ".3f"),
            ("tok/s", "throughput/tokens_per_sec", ".0f"),
        ):
            if record.get(name) is not None:
                shown.append(f"{label} {record[name]:{form}}")
        recent = sorted(self._step_times[-20:])
        median = recent[len(recent) // 2]
        left_min = median * (self.num_steps - step - 1) / 60
        shown.append(f"{record['timing_s/step']:.2f} s")
        shown.append(f"left {left_min:.1f} min")
        return "  ".join(shown)

    def _find_alarms(self, record: dict[str, float | None]) -> Iterator[Alarm]:
        kl = record.get("rollout_corr/kl", 0.0)
        if kl > self.config.mismatch_alarm:
            what = f"sampler and trainer differ by {kl:.3f} nats per token"
            yield Alarm("mismatch", f"{what}; run once with --verify-sync")
        entropy = record.get("actor/entropy", math.inf)
        if entropy < self.config.entropy_alarm:
            what = f"entropy is down to {entropy:.4f} nats"
            yield Alarm("entropy", f"{what}; try --loss.entropy-coef or more --loss.clip-high")
        share = record.get("reward/frac_zero_std")
        if share is not None:
            self._steps_without_spread = self._steps_without_spread + 1 if share == 1.0 else 0
        if self._steps_without_spread >= self.config.zero_std_alarm:
            what = f"no group had any spread for {self._steps_without_spread} steps"
            yield Alarm("spread", f"{what}: too easy, or too hard")

    def write_samples(
        self,
        step: int,
        groups: Sequence,
        decode: Callable[[Tensor], str],
        advantages: Tensor | None = None,
    ) -> None:
        """Append a response of each of the first groups, with its advantage of [P, G], to
        samples.jsonl.
        """
        if not self.is_rank0:
            return
        with open(self.out_dir / "samples.jsonl", "a", encoding="utf-8") as file:
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
                file.write(json.dumps(sample, ensure_ascii=False) + "\n")


def _keep_before(file: Path, step: int) -> None:
    """Keep the JSON lines whose "step" is below `step`; the last may have been cut by a crash."""
    # Not splitlines(): a sample's text may hold other line breaks, such as U+2028.
    *lines, _ = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
    kept = [line for line in lines if json.loads(line)["step"] < step]
    file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def plot(metrics_file: Path, out_file: Path) -> None:
    """Draw the curves of a metrics.jsonl as one picture; nothing where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in Path(metrics_file).read_text().splitlines()]
    panels = [
        ("reward", ["reward/mean", "eval/reward"]),
        ("response length [tokens]", ["response_length/mean"]),
        ("entropy [nats]", ["actor/entropy"]),
        ("KL [nats]", ["actor/ppo_kl", "actor/kl_loss", "rollout_corr/kl"]),
        ("gradient norm", ["actor/grad_norm"]),
        ("tokens/s", ["throughput/tokens_per_sec"]),
    ]
    figure, axes = plt.subplots(2, 3, figsize=(14, 7))
    for axis, (title, names) in zip(axes.flat, panels, strict=True):
        for name in names:
            present = [record for record in records if record.get(name) is not None]
            steps = [record["step"] for record in present]
            values = [record[name] for record in present]
            if present:
                axis.plot(steps, values, label=name, marker="." if len(steps) < 30 else "")
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out_file, dpi=90)
    plt.close(figure)
