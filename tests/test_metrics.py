"""Metrics: means that are right over ranks, times that add up, and throughput."""

import math
import resource
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import metrics as metrics_module
from metrics import Metrics, measure_bandwidth, model_flops, total


def test_means_over_ranks_are_weighted_and_divided_once():
    """verl#2995, trl#6369: a mean of per-rank means. 3 tokens of mean 1 and one of 2 are 1.25, not
    1.5.
    """

    def on_a_rank():
        metrics = Metrics()
        if dist.get_rank() == 0:
            metrics.add("x", 0.0, weight=1)
            metrics.add("x", torch.tensor(1.5), weight=2)
            metrics.add("only on rank 0", 7.0)
        else:
            metrics.add("x", 2.0, weight=1)
            metrics.add("x", float("nan"), weight=0)  # a row without response tokens
            metrics.add("only nothing", 1.0, weight=0)
        return metrics.reduce()

    first, second = run_ranks(2, on_a_rank)
    assert first["x"] == 1.25 and first["only on rank 0"] == 7.0 and "only nothing" not in first
    assert first == second


def test_an_evaluation_of_seven_prompts_on_two_ranks_is_a_mean_over_seven():
    """prime-rl#2515: 4 prompts on one rank, 3 on the other; a single prompt, and none on the other
    rank.
    """

    def mean(shares):
        metrics = Metrics()
        for reward in shares[dist.get_rank()]:
            metrics.update({"reward": reward}, prefix="eval/")
        return metrics.reduce()["eval/reward"]

    assert run_ranks(2, mean, [[1, 1, 1, 1], [0, 0, 0]]) == [4 / 7] * 2
    assert run_ranks(2, mean, [[1], []]) == [1.0] * 2


def test_sums_maxima_and_minima_are_over_all_ranks():
    def on_a_rank():
        metrics = Metrics()
        for value in ([1.0, 5.0], [-2.0, 3.0])[dist.get_rank()]:
            metrics.add("sum", value, reduction="sum")
            metrics.update(
                {"diff_max": value, "diff_min": torch.tensor(value)}, weight=dist.get_rank()
            )
        return metrics.reduce()

    for record in run_ranks(2, on_a_rank):
        assert (record["sum"], record["diff_max"], record["diff_min"]) == (7.0, 5.0, -2.0)


def test_values_lose_their_graph_and_each_step_begins_empty():
    metrics = Metrics()
    loss = torch.tensor(2.0, requires_grad=True)
    metrics.add("loss", loss * 2, weight=3)
    assert not any(
        isinstance(x, torch.Tensor) and x.requires_grad for x, _ in metrics._entries.values()
    )
    assert metrics.reduce()["loss"] == 4.0
    assert "loss" not in metrics.reduce()


def test_host_memory_is_what_a_rank_holds_at_most():
    def on_a_rank(num_bytes):
        held = torch.ones(num_bytes * dist.get_rank(), dtype=torch.uint8)  # written, hence resident
        found = Metrics().reduce()["perf/host_memory_gb"]
        return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 + 0 * len(held)

    (without, _), (same, _) = run_ranks(2, on_a_rank, 0)
    (found, _), (_, peak) = run_ranks(2, on_a_rank, 1 << 28)
    assert without == same and found - without == pytest.approx(0.25, abs=0.1)
    assert found <= 1.1 * peak  # resident, not mapped


def test_cached_memory_is_what_torch_holds_less_what_tensors_use(monkeypatch):
    metrics = Metrics()
    gpu = dict(is_available=True, synchronize=None, get_device_name="H200")
    for name, value in (gpu | dict(memory_reserved=5 << 30, memory_allocated=2 << 30)).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert metrics.reduce()["perf/cached_memory_gb"] == 3.0


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_timers_are_exclusive_and_add_up_to_the_step():
    metrics = Metrics()
    for _ in range(2):
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
        record = metrics.reduce()
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
    """A clock for metrics.py that the test moves; who uses it must be a process of its own."""

    def __init__(self):
        self.now = 100.0
        metrics_module.time = SimpleNamespace(perf_counter=lambda: self.now)


def test_times_are_means_over_ranks_and_still_add_up():
    def on_a_rank():
        clock = Clock()
        metrics = Metrics()
        if dist.get_rank() == 0:
            with metrics.timer("save"):
                clock.now += 6.0
        else:
            clock.now += 7.0
        return metrics.reduce()

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


def test_a_group_is_reported_as_it_was_sampled():
    """trl#6369: rewards before any filter or penalty; each prompt token counted once."""
    metrics = Metrics()
    metrics.add_group("easy", [1.0, 1.0], [rollout(4, 2), rollout(4, 6)])
    metrics.add_group("hard", [0.0, 1.0], [rollout(8, 3), rollout(8, 9, truncated=True)])
    record = metrics.reduce()
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


def test_constant_rewards_are_reported_as_they_are_whatever_else_is_logged():
    metrics = Metrics()
    for _ in range(7):
        metrics.add_group("x", [0.25] * 3, [rollout(1, 5, truncated=True)] * 3)
    record = metrics.reduce()
    assert (record["reward/mean"], record["reward/std"], record["reward/frac_zero_std"]) == (
        0.25,
        0.0,
        1.0,
    )


def test_all_throughput_signals_are_in_every_record_null_where_there_is_nothing_to_measure():
    metrics = Metrics()
    metrics.add_group("x", [0.0, 1.0], [rollout(1, 2)] * 2)
    with metrics.timer("rollout"):
        pass
    record = metrics.reduce()
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


def test_the_layout_gives_efficiency_and_utilisation_of_the_flops_over_all_ranks(monkeypatch):
    monkeypatch.setattr(metrics_module, "peak_flops", lambda: 1e6)
    row = SimpleNamespace(tokens=torch.zeros(6), source=(0,))
    long = SimpleNamespace(tokens=torch.zeros(14), source=(1,))
    empty = SimpleNamespace(tokens=torch.zeros(1), source=())

    def on_a_rank():
        clock = Clock()
        metrics = Metrics()
        if dist.get_rank() == 0:
            sequences, rows = [{"tokens": torch.zeros(6)}], [[row], [long]]
        else:
            sequences, rows = [{"tokens": torch.zeros(14)}], [[empty], [empty]]
        metrics.add_layout([Layout()], sequences, rows, 8, 3)
        clock.now += 4.0
        return metrics.reduce()

    flops = 3 * (model_flops(10, 2, 16, [6]) + model_flops(10, 2, 16, [14]))
    for record in run_ranks(2, on_a_rank):
        assert record["packing/efficiency"] == pytest.approx((6 + 14) / (8 + 14 + 8 + 8))
        assert record["perf/mfu"] == pytest.approx(flops / 4.0 / 1e6 / 2)


def test_without_a_known_device_there_is_no_utilisation(monkeypatch):
    monkeypatch.setattr(metrics_module, "peak_flops", lambda: None)
    metrics = Metrics()
    metrics.add_layout([Layout()], [{"tokens": torch.zeros(6)}], [], 8, 1)
    assert metrics.reduce()["perf/mfu"] is None


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


def test_the_effective_sample_size_is_a_quotient_of_global_means():
    weights = torch.tensor([0.5, 1.0, 2.0, 0.1])
    metrics = Metrics()
    for part in (weights[:1], weights[1:]):
        stats = {"is_weight_mean": part.mean(), "is_square_mean": (part * part).mean()}
        metrics.update(stats, len(part), prefix="rollout_corr/")
    record = metrics.reduce()
    assert record["rollout_corr/ess"] == pytest.approx(
        (weights.mean() ** 2 / (weights**2).mean()).item(), rel=1e-6
    )
    assert "rollout_corr/is_square_mean" not in record


def test_total_is_the_sum_over_ranks():
    assert total(torch.tensor(2.0)) == 2.0
    assert run_ranks(2, lambda: total(torch.tensor(dist.get_rank() + 1.0))) == [3.0, 3.0]


def test_numbers_that_are_not_finite_stay_visible():
    metrics = Metrics()
    metrics.update({"bad": float("nan"), "worse": math.inf})
    record = metrics.reduce()
    assert math.isnan(record["bad"]) and record["worse"] == math.inf


@pytest.mark.parametrize("world_size", [1, 2])
def test_measured_bandwidth_is_positive_and_equal_on_all_ranks_and_nan_on_one(world_size):
    figures = run_ranks(world_size, partial(measure_bandwidth, 1 << 16))
    if world_size == 1:
        assert figures[0] != figures[0]
    else:
        assert figures[0] > 0 and figures[0] == figures[1]
