"""Metrics: means that are right over ranks, times that add up, and throughput."""

import math
import resource
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import hardware
import metrics as metrics_module
from metrics import Metrics, total


def test_means_over_ranks_are_weighted_and_divided_once():
    """verl#2995, trl#6369, #6380, #7012, #7047: a mean of per-rank means. 3 tokens
    of mean 1 and one of 2 are 1.25, not 1.5.
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_updates_are_counted_once_on_any_number_of_ranks(world_size):
    """A new user's finding: what --loss.target-kl left out stood in no metric."""

    def on_a_rank():
        metrics = Metrics()
        found = []
        for num_updates in (3, 1, 0):
            for i in range(num_updates):
                metrics.add_update("actor", norm=2.0 * i, rate=0.5)
            metrics.add_update("critic", norm=1.0, rate=0.25)
            found.append(metrics.reduce())
        return found

    for first, second, third in run_ranks(world_size, on_a_rank):
        names = ("actor/num_updates", "actor/grad_norm", "actor/lr", "critic/num_updates")
        assert [first[name] for name in names] == [3, 2.0, 0.5, 1]
        assert [second[name] for name in names] == [1, 0.0, 0.5, 1]
        assert third["critic/lr"] == 0.25 and not names[:3] & third.keys()


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
        found = Metrics(hardware.Device()).reduce()["perf/host_memory_gb"]
        return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 + 0 * len(held)

    (without, _), (same, _) = run_ranks(2, on_a_rank, 0)
    (found, _), (_, peak) = run_ranks(2, on_a_rank, 1 << 28)
    assert without == same and found - without == pytest.approx(0.25, abs=0.1)
    assert found <= 1.1 * peak  # resident, not mapped


def test_cached_memory_is_what_torch_holds_less_what_tensors_use(monkeypatch):
    metrics = Metrics(hardware.Device())
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


def test_one_sample_has_no_spread_to_report():
    metrics = Metrics()
    metrics.add_group("x", [1.0], [rollout(4, 2)])
    record = metrics.reduce()
    assert record["reward/mean"] == 1.0
    assert "reward/std" not in record and "reward/frac_zero_std" not in record


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


def llama(**changes):
    """2 layers of width 16, 4 heads of 8, 50 words: 16 x 50 = 800 weights in embedding and head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, vocab_size=50)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes))


# q, k, v, o of 4 heads, 2 for keys and values; gate, up, down; two norms; and the norm at the end.
LLAMA_BODY = 2 * (16 * 8 * (4 + 2 + 2 + 4) + 3 * 16 * 24 + 2 * 16) + 16


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_costs_6_per_weight_and_token_the_head_where_it_is_applied_the_embedding_nothing(
    tied,
):
    """PaLM, appendix B, halved since attention is causal: 12 L D T per token becomes 6 L D T. D is
    the width of all heads, 32 here, not that of the model.
    """
    cost = metrics_module.pass_cost(llama(tie_word_embeddings=tied))
    assert cost == (6 * LLAMA_BODY, 6 * 800, 6 * 2 * 32)


def test_frozen_weights_have_no_gradient_to_compute():
    model = llama(tie_word_embeddings=False)
    model.model.requires_grad_(False)
    assert metrics_module.pass_cost(model) == (4 * LLAMA_BODY, 6 * 800, 6 * 2 * 32)


def test_a_critic_has_no_head_beside_its_own_weights():
    from transformers import LlamaConfig, LlamaForTokenClassification

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, vocab_size=50)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    critic = LlamaForTokenClassification(LlamaConfig(**sizes, **heads, num_labels=1))
    assert metrics_module.pass_cost(critic) == (6 * (LLAMA_BODY + 17), 0, 6 * 2 * 32)


def packed_row(*lengths, num_response_tokens=0):
    """What metrics reads of a row; without lengths it is filler, one token of nobody."""
    ends = torch.tensor([0, *(lengths or (1,))], dtype=torch.int32).cumsum(0)
    return SimpleNamespace(
        prefix=None,
        tokens=torch.zeros(int(ends[-1])),
        cu_seqlens=ends,
        source=tuple(range(len(lengths))),
        num_response_tokens=num_response_tokens,
    )


def test_the_layout_gives_efficiency_over_all_ranks():
    def on_a_rank():
        metrics = Metrics()
        full, empty = [[packed_row(6)], [packed_row(14)]], [[packed_row()], [packed_row()]]
        metrics.add_layout(full if dist.get_rank() == 0 else empty, 8)
        return metrics.reduce()

    for record in run_ranks(2, on_a_rank):
        assert record["packing/efficiency"] == pytest.approx((6 + 14) / (8 + 14 + 8 + 8))


def test_utilisation_counts_the_passes_that_ran_on_all_ranks(monkeypatch):
    """Not the passes that were planned: an early stop of the update leaves most of them out. Not
    filler rows either, which only keep ranks in step.
    """
    monkeypatch.setattr(hardware, "peak_flops", lambda: 1e6)
    model = llama()

    def on_a_rank(passes):
        clock = Clock()
        metrics = Metrics(hardware.Device())
        for row in passes[dist.get_rank()]:
            metrics.add_pass(model, row)
        clock.now += 4.0
        return metrics.reduce()["perf/mfu"]

    two = packed_row(6, 3, num_response_tokens=5)
    one = packed_row(14, num_response_tokens=2)
    body, head, pair = 6 * LLAMA_BODY, 6 * 800, 6 * 2 * 32
    flops = 2 * (9 * body + 5 * head + (36 + 9) * pair) + 14 * body + 2 * head + 14 * 14 * pair
    expected = flops / 4.0 / 1e6 / 2
    assert (
        run_ranks(2, on_a_rank, [[two, two], [one, packed_row()]])
        == [pytest.approx(expected, rel=1e-12)] * 2
    )


def test_steps_that_reuse_rollouts_share_their_tokens():
    """Tokens over the time since the step that sampled them began; other figures are the step's."""

    def on_a_rank():
        clock = Clock()
        metrics = Metrics()
        found = []
        for step, seconds in enumerate((2.0, 3.0, 4.0, 1.0)):
            if step % 2 == 0:
                metrics.add_group("x", [0.0], [rollout(4, 6 + step)])
            clock.now += seconds
            record = metrics.reduce()
            found.append((record["throughput/tokens_per_sec"], record["timing_s/step"]))
        return found

    expected = [(20 / 2, 2.0), (20 / 5, 3.0), (24 / 4, 4.0), (24 / 5, 1.0)]
    assert run_ranks(2, on_a_rank) == [expected] * 2


def test_a_step_without_any_rollout_before_it_has_no_tokens_per_second():
    assert "throughput/tokens_per_sec" not in Metrics().reduce()


def test_all_ranks_have_the_same_record():
    def on_a_rank():
        clock = Clock()
        metrics = Metrics()
        metrics.add_group("x", [0.0], [rollout(4, 6)])
        clock.now += 1.0 + dist.get_rank()
        return metrics.reduce()

    first, second = run_ranks(2, on_a_rank)
    # 10 tokens on each, in 1 and 2 seconds.
    assert first == second and first["throughput/tokens_per_sec"] == 20 / 1.5
    assert first["perf/tokens_per_sec_per_gpu"] == 20 / 1.5 / 2


def test_without_a_known_device_there_is_no_utilisation():
    metrics = Metrics(hardware.Device())
    metrics.add_pass(llama(), packed_row(6))
    assert metrics.reduce()["perf/mfu"] is None


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


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("make", [float, torch.tensor], ids=["float", "tensor"])
def test_nan_is_not_hidden_by_a_maximum_wherever_it_stands(make, reduction):
    """max(1, nan) is 1 and max(nan, 1) is nan."""

    def on_a_rank(values):
        metrics = Metrics()
        for value in values[dist.get_rank()]:
            metrics.add("x", make(value), reduction=reduction)
        return metrics.reduce()["x"]

    nan = math.nan
    for values in ([[1.0, nan, 2.0], [3.0]], [[nan, 1.0], [3.0]], [[3.0], [nan]], [[nan], [3.0]]):
        assert all(math.isnan(x) for x in run_ranks(2, on_a_rank, values))


def test_a_maximum_takes_floats_and_tensors_in_any_order():
    metrics = Metrics()
    for name, values in (("a", (1.0, torch.tensor(2.0))), ("b", (torch.tensor(1.0), 2.0))):
        for value in values:
            metrics.add(name, value, reduction="max")
            metrics.add(name + " least", value, reduction="min")
    record = metrics.reduce()
    assert [record[name] for name in ("a", "b", "a least", "b least")] == [2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "max"])
def test_what_the_caller_writes_to_its_tensor_afterwards_does_not_count(reduction):
    metrics = Metrics()
    x = torch.tensor(2.0)
    metrics.add("x", x, reduction=reduction)
    x += 100
    assert metrics.reduce()["x"] == 2.0
    assert total(x) == 102.0 and x == 102.0


def test_sums_of_16_bit_values_do_not_stand_still():
    """In bf16 256 + 1 is 256."""
    metrics = Metrics()
    for _ in range(1000):
        metrics.add("sum", torch.tensor(1.0, dtype=torch.bfloat16), reduction="sum")
        metrics.add("mean", torch.tensor(0.75, dtype=torch.bfloat16), weight=3)
    record = metrics.reduce()
    assert (record["sum"], record["mean"]) == (1000.0, 0.75)


@pytest.mark.parametrize(
    "rewards, is_flat",
    [
        ([0.1 + 0.2, 0.3], True),  # sums in another order
        ([0.3, 0.1 + 0.2, 0.3], True),
        ([1e8 + 1, 1e8], False),  # one number in fp32
        ([1e8 * (0.1 + 0.2), 1e8 * 0.3], True),
        ([0.3, 0.3, 0.3000001], False),
        ([0.0, -1e-9], False),
        ([-2.0, -2.0], True),
    ],
)
def test_a_group_is_flat_exactly_where_its_advantages_are_0(rewards, is_flat):
    """radixark/miles#701, verl#4598: groups whose rewards differ by rounding only."""
    metrics = Metrics()
    metrics.add_group("x", rewards, [rollout(1, 2)] * len(rewards))
    assert metrics.reduce()["reward/frac_zero_std"] == (1.0 if is_flat else 0.0)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_time_is_booked_where_it_is_spent(error, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        metrics_module, "time", SimpleNamespace(perf_counter=lambda: clock.now), raising=True
    )
    metrics = Metrics()
    with pytest.raises(error), metrics.timer("rollout"), metrics.timer("reward"):
        clock.now += 1.0
        raise error
    clock.now += 5.0
    with metrics.timer("update"):
        clock.now += 2.0
    record = metrics.reduce()
    times = {name: x for name, x in record.items() if name.startswith("timing_s/")}
    assert times == {
        "timing_s/other": 5.0,
        "timing_s/rollout": 0.0,
        "timing_s/reward": 1.0,
        "timing_s/update": 2.0,
        "timing_s/step": 8.0,
    }


def test_an_exception_in_a_timer_does_not_wait_for_the_device(monkeypatch):
    """What the device waits for, a collective of a rank that has failed, may never come."""
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    metrics = Metrics()
    with pytest.raises(ValueError), metrics.timer("update"):
        assert len(waits) == 1
        raise ValueError
    assert len(waits) == 1
    with metrics.timer("update"):
        pass
    assert len(waits) == 3


def test_figures_of_the_device_are_over_all_ranks():
    def on_a_rank():
        metrics = Metrics()
        rank = dist.get_rank()
        busy = {"update": 40.0 + 20 * rank} | ({"ref_logprobs": 7.0} if rank else {})
        metrics._device = SimpleNamespace(
            max_memory_gb=lambda: {"": 2.0 + rank, "update": 1.5 - rank},
            mean_utilization=busy.get,
            memory_gb=lambda: {"host": 3.0 - rank},
            peak_flops=None,
            clear=lambda: busy.clear(),
        )
        return metrics.reduce(), metrics.reduce()

    for record, later in run_ranks(2, on_a_rank):
        assert (record["perf/max_memory_gb"], record["perf/max_memory_gb/update"]) == (3.0, 1.5)
        assert record["memory/actor_gpu_util_pct"] == 50.0
        assert record["memory/ref_gpu_util_pct"] == 7.0
        assert record["perf/host_memory_gb"] == 3.0
        assert later["memory/actor_gpu_util_pct"] is None


def test_total_takes_a_number():
    assert total(3) == 3.0
    assert run_ranks(2, lambda: total((1 << 24) + dist.get_rank())) == [(2 << 24) + 1.0] * 2


def test_time_is_added_since_the_last_timer_or_the_last_time():
    def on_a_rank():
        clock = Clock()
        metrics = Metrics(before_s=3.0)
        clock.now += 1.0
        metrics.add_time("import")
        with metrics.timer("data"):
            clock.now += 4.0
        clock.now += 0.5
        metrics.add_time("models")
        return metrics.reduce(), metrics.reduce()

    [(record, later)] = run_ranks(1, on_a_rank)
    expected = {"import": 4.0, "data": 4.0, "models": 0.5, "other": 0.0, "step": 8.5}
    assert {k[9:]: v for k, v in record.items() if k.startswith("timing_s/")} == expected
    assert later["timing_s/step"] == 0.0
