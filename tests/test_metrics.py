"""Metrics: means that are right over ranks, times that add up, one record per step, and what a
resumed run keeps.
"""

import json
import math
import resource
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import metrics as metrics_module
from metrics import LogConfig, Metrics, model_flops, plot, total

QUIET = LogConfig(plot_every=0)


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_means_over_ranks_are_weighted_and_divided_once(tmp_path):
    """verl#2995, trl#6369: a mean of per-rank means. 3 tokens of mean 1 and one of 2 are 1.25, not
    1.5.
    """

    def on_a_rank():
        metrics = Metrics(tmp_path, QUIET, 1)
        if dist.get_rank() == 0:
            metrics.add("x", 0.0, weight=1)
            metrics.add("x", torch.tensor(1.5), weight=2)
            metrics.add("only on rank 0", 7.0)
        else:
            metrics.add("x", 2.0, weight=1)
            metrics.add("x", float("nan"), weight=0)  # a row without response tokens
            metrics.add("only nothing", 1.0, weight=0)
        return metrics.log(0)

    first, second = run_ranks(2, on_a_rank)
    assert first["x"] == 1.25 and first["only on rank 0"] == 7.0 and "only nothing" not in first
    assert first == second
    (written,) = records(tmp_path)  # by rank 0 alone
    assert written == {"step": 0, **first}


def test_an_evaluation_of_seven_prompts_on_two_ranks_is_a_mean_over_seven():
    """prime-rl#2515: 4 prompts on one rank, 3 on the other; a single prompt, and none on the other
    rank.
    """

    def mean(shares):
        with tempfile.TemporaryDirectory() as directory:
            metrics = Metrics(directory, QUIET, 1)
            for reward in shares[dist.get_rank()]:
                metrics.update({"reward": reward}, prefix="eval/")
            return metrics.log(0)["eval/reward"]

    assert run_ranks(2, mean, [[1, 1, 1, 1], [0, 0, 0]]) == [4 / 7] * 2
    assert run_ranks(2, mean, [[1], []]) == [1.0] * 2


def test_sums_maxima_and_minima_are_over_all_ranks(tmp_path):
    def on_a_rank():
        metrics = Metrics(tmp_path, QUIET, 1)
        for value in ([1.0, 5.0], [-2.0, 3.0])[dist.get_rank()]:
            metrics.add("sum", value, reduction="sum")
            metrics.update(
                {"diff_max": value, "diff_min": torch.tensor(value)}, weight=dist.get_rank()
            )
        return metrics.log(0)

    for record in run_ranks(2, on_a_rank):
        assert (record["sum"], record["diff_max"], record["diff_min"]) == (7.0, 5.0, -2.0)


def test_values_lose_their_graph_and_each_step_begins_empty(tmp_path):
    metrics = Metrics(tmp_path, QUIET, 2)
    loss = torch.tensor(2.0, requires_grad=True)
    metrics.add("loss", loss * 2, weight=3)
    assert not any(
        isinstance(x, torch.Tensor) and x.requires_grad for x, _ in metrics._entries.values()
    )
    assert metrics.log(0)["loss"] == 4.0
    assert "loss" not in metrics.log(1)
    assert [r["step"] for r in records(tmp_path)] == [0, 1]


def test_host_memory_is_what_a_rank_holds_at_most(tmp_path):
    def on_a_rank(num_bytes):
        held = torch.ones(num_bytes * dist.get_rank(), dtype=torch.uint8)  # written, hence resident
        found = Metrics(tmp_path, QUIET, 1).log(0)["perf/host_memory_gb"]
        return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 + 0 * len(held)

    (without, _), (same, _) = run_ranks(2, on_a_rank, 0)
    (found, _), (_, peak) = run_ranks(2, on_a_rank, 1 << 28)
    assert without == same and found - without == pytest.approx(0.25, abs=0.1)
    assert found <= 1.1 * peak  # resident, not mapped


def test_cached_memory_is_what_torch_holds_less_what_tensors_use(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path, QUIET, 1)
    gpu = dict(is_available=True, synchronize=None, get_device_name="H200")
    for name, value in (gpu | dict(memory_reserved=5 << 30, memory_allocated=2 << 30)).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert metrics.log(0)["perf/cached_memory_gb"] == 3.0


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_timers_are_exclusive_and_add_up_to_the_step(tmp_path):
    metrics = Metrics(tmp_path, QUIET, 2)
    for step in range(2):
        start = time.perf_counter()
        busy(0.02)
        with metrics.timer("rollout"):
            busy(0.03)
            with metrics.timer("reward"):
                busy(0.05)
            busy(0.01)
            with metrics.timer("reward"):
                busy(0.01)
        with metrics.timer("update"):
            busy(0.03)
        record = metrics.log(step)
        wall = time.perf_counter() - start
        phases = {
            name: s
            for name, s in record.items()
            if name.startswith("timing_s/") and name != "timing_s/step"
        }
        assert phases.keys() == {
            f"timing_s/{name}" for name in ("rollout", "reward", "update", "other")
        }
        # Another process may take the core at any time: only a lower bound holds for each.
        lowest = {"rollout": 0.04, "reward": 0.06, "update": 0.03, "other": 0.02}
        assert all(record[f"timing_s/{name}"] >= s for name, s in lowest.items())
        assert sum(phases.values()) == pytest.approx(record["timing_s/step"], rel=0.02)
        assert record["timing_s/step"] <= wall + 0.02
        assert record["throughput/rollout_latency_ms"] == 1000 * record["timing_s/rollout"]


class Clock:
    """A clock for metrics.py that the test moves; a rank that uses it must be a process of its own."""

    def __init__(self):
        self.now = 100.0
        metrics_module.time = SimpleNamespace(perf_counter=lambda: self.now)


def test_times_are_means_over_ranks_and_still_add_up(tmp_path):
    def on_a_rank():
        clock = Clock()
        metrics = Metrics(tmp_path, QUIET, 1)
        if dist.get_rank() == 0:
            with metrics.timer("save"):
                clock.now += 6.0
        else:
            clock.now += 7.0
        return metrics.log(0)

    for record in run_ranks(2, on_a_rank):
        assert (record["timing_s/save"], record["timing_s/other"], record["timing_s/step"]) == (
            3.0,
            3.5,
            6.5,
        )


def rollout(num_prompt, num_response, truncated=False):
    return SimpleNamespace(
        prompt_ids=torch.zeros(num_prompt),
        response_ids=torch.zeros(num_response),
        truncated=truncated,
    )


def test_a_group_is_reported_as_it_was_sampled(tmp_path):
    """trl#6369: rewards before any filter or penalty; each prompt token counted once."""
    metrics = Metrics(tmp_path, QUIET, 1)
    metrics.add_group("easy", [1.0, 1.0], [rollout(4, 2), rollout(4, 6)])
    metrics.add_group("hard", [0.0, 1.0], [rollout(8, 3), rollout(8, 9, truncated=True)])
    record = metrics.log(0)
    expected = {
        "reward/mean": 0.75,
        "reward/easy/mean": 1.0,
        "reward/hard/mean": 0.5,
        "reward/std": 0.25,
        "reward/frac_zero_std": 0.5,
        "prompt_length/mean": 6.0,
        "prompt_length/max": 8,
        "response_length/mean": 5.0,
        "response_length/max": 9,
        "response_length/min": 2,
        "response_length/clip_ratio": 0.25,
    }
    assert {name: record[name] for name in expected} == expected
    assert record["throughput/tokens_per_sec"] == pytest.approx(
        (4 + 8 + 8 + 12) / record["timing_s/step"], rel=1e-3
    )
    assert record["perf/tokens_per_sec_per_gpu"] == record["throughput/tokens_per_sec"]


def test_constant_rewards_are_reported_as_they_are_whatever_else_is_logged(tmp_path):
    metrics = Metrics(tmp_path, QUIET, 1)
    for _ in range(7):
        metrics.add_group("x", [0.25] * 3, [rollout(1, 5, truncated=True)] * 3)
    record = metrics.log(0)
    assert (record["reward/mean"], record["reward/std"], record["reward/frac_zero_std"]) == (
        0.25,
        0.0,
        1.0,
    )


def test_all_throughput_signals_are_in_every_record_null_where_there_is_nothing_to_measure(
    tmp_path,
):
    metrics = Metrics(tmp_path, QUIET, 1)
    metrics.add_group("x", [0.0, 1.0], [rollout(1, 2)] * 2)
    with metrics.timer("rollout"):
        pass
    record = metrics.log(0)
    for name in ("throughput/tokens_per_sec", "throughput/rollout_latency_ms"):
        assert record[name] >= 0
    for name in (
        "memory/actor_gpu_util_pct",
        "memory/ref_gpu_util_pct",
        "communication/nccl_bw_gb",
    ):
        assert name in record
    if not torch.cuda.is_available():
        assert (
            record["memory/actor_gpu_util_pct"] is None
            and record["communication/nccl_bw_gb"] is None
        )


def test_model_flops_are_6_per_parameter_and_token_and_6_per_layer_width_and_token_pair():
    """PaLM, appendix B, halved since attention is causal: 12 L D T per token becomes 6 L D T."""
    assert model_flops(1000, 2, 16, []) == 0
    assert model_flops(1000, 2, 16, [10]) == 6 * 1000 * 10 + 6 * 2 * 16 * 100
    assert model_flops(1000, 2, 16, [10, 3]) == 6 * 1000 * 13 + 6 * 2 * 16 * (100 + 9)


class Layout(torch.nn.Module):
    """A model of 10 parameters, 2 layers of width 16."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(10))
        text = SimpleNamespace(num_hidden_layers=2, hidden_size=16)
        self.config = SimpleNamespace(get_text_config=lambda: text)


def test_the_layout_gives_efficiency_and_utilisation_of_the_flops_over_all_ranks(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(metrics_module, "peak_flops", lambda: 1e6)
    row = SimpleNamespace(tokens=torch.zeros(6), source=(0,))
    long = SimpleNamespace(tokens=torch.zeros(14), source=(1,))
    empty = SimpleNamespace(tokens=torch.zeros(1), source=())

    def on_a_rank():
        clock = Clock()
        metrics = Metrics(tmp_path, QUIET, 1)
        if dist.get_rank() == 0:
            sequences, rows = [{"tokens": torch.zeros(6)}], [[row], [long]]
        else:
            sequences, rows = [{"tokens": torch.zeros(14)}], [[empty], [empty]]
        metrics.add_layout([Layout()], sequences, rows, 8, 3)
        clock.now += 4.0
        return metrics.log(0)

    flops = 3 * (model_flops(10, 2, 16, [6]) + model_flops(10, 2, 16, [14]))
    for record in run_ranks(2, on_a_rank):
        assert record["packing/efficiency"] == pytest.approx((6 + 14) / (8 + 14 + 8 + 8))
        assert record["perf/mfu"] == pytest.approx(flops / 4.0 / 1e6 / 2)


def test_without_a_known_device_there_is_no_utilisation(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_module, "peak_flops", lambda: None)
    metrics = Metrics(tmp_path, QUIET, 1)
    metrics.add_layout([Layout()], [{"tokens": torch.zeros(6)}], [], 8, 1)
    assert metrics.log(0)["perf/mfu"] is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GeForce", None),
    ],
)
def test_the_peak_is_that_of_the_devices_datasheet(monkeypatch, device, peak):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert metrics_module.peak_flops() == peak


def test_the_effective_sample_size_is_a_quotient_of_global_means(tmp_path):
    weights = torch.tensor([0.5, 1.0, 2.0, 0.1])
    metrics = Metrics(tmp_path, QUIET, 1)
    for part in (weights[:1], weights[1:]):
        stats = {"is_weight_mean": part.mean(), "is_square_mean": (part * part).mean()}
        metrics.update(stats, len(part), prefix="rollout_corr/")
    record = metrics.log(0)
    assert record["rollout_corr/ess"] == pytest.approx(
        (weights.mean() ** 2 / (weights**2).mean()).item(), rel=1e-6
    )
    assert "rollout_corr/is_square_mean" not in record


def test_a_resumed_run_drops_the_records_after_its_checkpoint_and_a_line_that_a_crash_cut(tmp_path):
    metrics = Metrics(tmp_path, QUIET, 9)
    for step in range(7):
        metrics.add("x", step)
        metrics.log(step)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "x": {"cut": 1}')
    resumed = Metrics(tmp_path, QUIET, 9, first_step=5)
    for step in (5, 6):
        resumed.add("x", 10 * step)
        resumed.log(step)
    assert [(r["step"], r["x"]) for r in records(tmp_path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 50),
        (6, 60),
    ]


def group(text, response_ids, reward):
    prompt = SimpleNamespace(text=text, answer="42")
    return SimpleNamespace(
        prompt=prompt, rollouts=[SimpleNamespace(response_ids=response_ids)], rewards=[reward]
    )


def test_the_first_samples_of_each_step_are_written_and_survive_a_resume_whatever_their_text(
    tmp_path,
):
    odd = "line\nseparator\u2028next\x85line } \u00e9"
    metrics = Metrics(tmp_path, LogConfig(samples_per_step=2), 3)
    for step in range(2):
        groups = [group(f"{odd}{i}", torch.tensor([i]), float(i)) for i in range(3)]
        metrics.write_samples(
            step, groups, lambda ids: f"{odd}{ids.item()}", torch.tensor([[0.5], [1.5], [2.5]])
        )
    before = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    first = json.loads(before[0])
    assert first == dict(
        step=0, prompt=odd + "0", response=odd + "0", answer="42", reward=0.0, advantage=0.5
    )
    assert [json.loads(line)["step"] for line in before] == [0, 0, 1, 1]
    Metrics(tmp_path, QUIET, 3, first_step=1)
    assert (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1] == before[:2]


STUB = """
calls = []
class Run:
    def log(self, record, step):
        calls.append((step, record))
    def finish(self):
        calls.append("finish")
def init(**settings):
    calls.append(settings)
    return Run()
"""


def test_wandb_gets_one_call_per_step_with_the_trainers_step_also_after_a_resume(
    tmp_path, monkeypatch
):
    """prime-rl#1516, wandb#10628: several calls per step, implicit counters, steps that are dropped
    in silence.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    config = LogConfig(wandb_project="mine", plot_every=0)
    logged = []
    for first, last in ((0, 7), (5, 9)):
        metrics = Metrics(tmp_path / "run", config, 9, first_step=first, settings={"seed": 3})
        for step in range(first, last):
            metrics.add("x", step)
            with metrics.timer("rollout"):
                pass
            logged.append(metrics.log(step))
    settings, *calls = wandb.calls
    assert settings == dict(project="mine", name="run", config={"seed": 3})
    # The second run is a run of its own, so steps 5 and 6 are not below its last.
    assert calls == [
        *enumerate(logged[:7]),
        settings,
        *zip(range(5, 9), logged[7:], strict=True),
        "finish",
    ]


def test_a_missing_wandb_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(metrics_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match="--log.wandb-project mine: needs wandb; install it with: pip install wandb",
    ):
        LogConfig(wandb_project="mine")
    LogConfig()


def test_only_the_first_rank_writes_prints_and_calls_wandb(tmp_path):
    def on_a_rank():
        directory = tmp_path / str(dist.get_rank())
        metrics = Metrics(directory, QUIET, 1)
        metrics.write_samples(0, [group("a", torch.tensor([1]), 1.0)], str, torch.tensor([[0.5]]))
        metrics.log(0)
        return directory.exists()

    assert run_ranks(2, on_a_rank) == [True, False]


def test_alarms_are_raised_once_each(tmp_path, capsys):
    metrics = Metrics(tmp_path, LogConfig(plot_every=0, zero_std_alarm=3), 20)

    def warnings(step, **values):
        for name, value in values.items():
            metrics.add(name.replace("__", "/"), value)
        metrics.log(step)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]

    calm = dict(rollout_corr__kl=0.09, actor__entropy=0.02)
    assert warnings(0, **calm) == []
    (mismatch,) = warnings(1, rollout_corr__kl=0.11)
    assert "differ by 0.110 nats per token; run once with --verify-sync" in mismatch
    assert warnings(2, rollout_corr__kl=0.5) == []
    (entropy,) = warnings(3, actor__entropy=0.001)
    assert "entropy is down to 0.0010 nats" in entropy
    assert warnings(4, actor__entropy=0.001) == []
    flat, some = dict(reward__frac_zero_std=1.0), dict(reward__frac_zero_std=0.9)
    assert [warnings(step, **x) for step, x in enumerate((flat, flat, some, flat, flat), 5)] == [
        []
    ] * 5
    (spread,) = warnings(10, **flat)
    assert "no group had any spread for 3 steps" in spread
    assert warnings(11, **flat) == []


def test_the_console_has_a_line_per_step(tmp_path, capsys):
    metrics = Metrics(tmp_path, QUIET, 10)
    metrics.update({"reward/mean": 0.5, "actor/entropy": 1.25, "actor/ppo_kl": 1e-4})
    metrics.log(2)
    line = capsys.readouterr().out
    assert (
        line.startswith("step    3/10  reward 0.500  entropy 1.250  kl 0.00010  ")
        and line.count("\n") == 1
    )
    assert "left" in line


def test_curves_are_drawn_now_and_then_and_at_the_last_step(tmp_path):
    pytest.importorskip("matplotlib")
    metrics = Metrics(tmp_path, LogConfig(plot_every=2), 3)
    picture = tmp_path / "curves.png"
    drawn = []
    for step in range(3):
        metrics.add("reward/mean", step / 3)
        metrics.log(step)
        drawn.append(picture.exists())
        if picture.exists():
            assert picture.read_bytes().startswith(b"\x89PNG")
            picture.unlink()
    assert drawn == [False, True, True]
    plot(tmp_path / "metrics.jsonl", tmp_path / "again.png")
    assert (tmp_path / "again.png").stat().st_size > 10_000


def test_total_is_the_sum_over_ranks():
    assert total(torch.tensor(2.0)) == 2.0
    assert run_ranks(2, lambda: total(torch.tensor(dist.get_rank() + 1.0))) == [3.0, 3.0]


def test_numbers_that_are_not_finite_stay_visible(tmp_path):
    metrics = Metrics(tmp_path, QUIET, 1)
    metrics.update({"bad": float("nan"), "worse": math.inf})
    record = metrics.log(0)
    assert (
        math.isnan(record["bad"])
        and math.isnan(records(tmp_path)[0]["bad"])
        and record["worse"] == math.inf
    )


@pytest.mark.parametrize(
    "setting", [dict(samples_per_step=-1), dict(plot_every=-1), dict(zero_std_alarm=0)]
)
def test_settings_without_meaning_are_refused(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"--log.{name.replace('_', '-')}"):
        LogConfig(**setting)
