"""What a step of the optimizer does, over shards, and what it leaves alone."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import save_tiny
from torch.distributed.device_mesh import init_device_mesh

from attention import use_packed_attention
from logprobs import token_logprobs
from model import ModelConfig, load_policy
from optim import OptimConfig, learning_rate_at, make_optimizer, optimizer_step
from packing import pack, sequence


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{kind: directory}; "uneven" has tensors of 5 rows: the last of 4 ranks has none."""
    uneven = save_tiny(tmp_path_factory.mktemp("uneven"), "llama", intermediate_size=5)
    return {"qwen2": save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2"), "uneven": uneven}


def rows(*responses, capacity=16):
    """Rows with a prompt of three tokens before each response."""
    return pack(
        [sequence(torch.tensor([3, 4, 5]), torch.tensor(ids)) for ids in responses], capacity
    )


def load(path, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    policy = load_policy(path, mesh, ModelConfig(**settings))
    use_packed_attention(policy)
    return policy


def with_gradient(policy, value):
    for p in policy.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, value)


def test_small_updates_add_up_in_fp32_and_vanish_in_bf16(paths):
    """workofart/ml-by-hand#85: none of 768 weights moved in 100 steps. Here more than 99 % of all
    weights do.
    """

    def job(master_dtype):
        policy = load(paths["qwen2"], master_dtype=master_dtype)
        optimizer = make_optimizer(policy, OptimConfig(), 1e-6)
        before = [p.to_local().clone() for p in policy.parameters()]
        for _ in range(20):
            with_gradient(policy, 1.0)
            optimizer_step(policy, optimizer, 1e-6, math.inf)
        after = [p.to_local() for p in policy.parameters()]
        moved = sum((a != b).sum().item() for a, b in zip(after, before, strict=True))
        moments = {
            x.dtype
            for state in optimizer.state.values()
            for x in (state["exp_avg"], state["exp_avg_sq"])
        }
        return moved / sum(p.numel() for p in after), moments

    [(moved, moments)] = run_ranks(1, job, "float32")
    assert moved > 0.99 and moments == {torch.float32}
    [(moved, _)] = run_ranks(1, job, "bfloat16")
    assert moved < 0.05


@pytest.mark.parametrize("norm", [1e-6, 3.0])
def test_clipping_is_by_the_global_norm_alike_on_any_number_of_ranks(paths, norm):
    """pytorch/pytorch#149768: an epsilon added on every rank made the factor depend on their
    number. SGD with rate 1 shows the clipped gradient.
    """

    def job():
        policy = load(paths["uneven"])
        num = sum(p.numel() for p in policy.parameters())
        with_gradient(policy, norm / math.sqrt(num))
        for p in policy.parameters():
            p.to_local().data.zero_()  # weights of 0.2 would swallow steps of 1e-9
        found = optimizer_step(policy, torch.optim.SGD(policy.parameters(), lr=0.0), 1.0, norm / 4)
        assert all(p.grad is None for p in policy.parameters())
        return found, num, -policy.lm_head.weight.full_tensor().mean().item()

    results = [run_ranks(world_size, job)[0] for world_size in (1, 2, 4)]
    for found, num, step in results:
        assert found == pytest.approx(norm, rel=1e-5)
        # torch's own epsilon is 1e-6, once: at a norm of 1e-6 it halves the factor.
        assert step == pytest.approx(norm / 4 / (norm + 1e-6) * norm / math.sqrt(num), rel=1e-3)


def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_weight_on_any(paths):
    def job():
        policy = load(paths["qwen2"])
        optimizer = make_optimizer(policy, OptimConfig(), 1e-3)
        before = [p.to_local().clone() for p in policy.parameters()]
        with_gradient(policy, 1.0)
        if dist.get_rank() == 1:  # on one rank's shard alone; all ranks must skip
            policy.model.norm.weight.grad.to_local()[0] = math.nan
        assert not math.isfinite(optimizer_step(policy, optimizer, 1e-3, 1.0))
        assert all(
            torch.equal(p.to_local(), old)
            for p, old in zip(policy.parameters(), before, strict=True)
        )

    run_ranks(2, job)


def test_frozen_parameters_stay_and_cost_no_optimizer_state(paths):
    """pytorch/pytorch#104690: mixed groups raised, or frozen weights moved. The embedding of a tied
    model: a root group in which some parameters have gradients and one has none.
    """

    def job():
        policy = load(paths["qwen2"])
        policy.get_input_embeddings().requires_grad_(False)
        optimizer = make_optimizer(policy, OptimConfig(weight_decay=0.1), 1e-3)
        before = {name: p.to_local().clone() for name, p in policy.named_parameters()}
        token_logprobs(policy, rows([6, 7, 1])[0])[0].sum().backward()
        assert optimizer_step(policy, optimizer, 1e-3, 1.0) > 0
        same = {
            name for name, p in policy.named_parameters() if torch.equal(p.to_local(), before[name])
        }
        assert same == {"model.embed_tokens.weight"}
        assert len(optimizer.state) == len(before) - 1

    run_ranks(2, job)


def test_weight_decay_is_for_matrices(paths):
    def job():
        policy = load(paths["qwen2"])
        optimizer = make_optimizer(policy, OptimConfig(weight_decay=0.5), 1e-2)
        before = {name: p.to_local().clone() for name, p in policy.named_parameters()}
        with_gradient(policy, 0.0)
        optimizer_step(policy, optimizer, 1e-2, 1.0)
        for name, p in policy.named_parameters():
            factor = 1 - 1e-2 * 0.5 if p.ndim == 2 else 1.0
            assert torch.allclose(p.to_local(), before[name] * factor, rtol=1e-6), name

    run_ranks(1, job)


def test_the_learning_rate_rises_to_the_peak_and_falls_to_a_tenth_of_it():
    def schedule(decay, warmup_steps=3):
        config = OptimConfig(warmup_steps=warmup_steps, decay=decay)
        return [round(learning_rate_at(step, 11, 8.0, config), 3) for step in range(11)]

    assert schedule("constant") == [2, 4, 6, 8, 8, 8, 8, 8, 8, 8, 8]
    assert schedule("linear") == [2, 4, 6, 8, 6.971, 5.943, 4.914, 3.886, 2.857, 1.829, 0.8]
    cosine = schedule("cosine", 0)
    assert cosine[0] == 8 and cosine[5] == pytest.approx(4.4) and cosine[10] == 0.8
    assert learning_rate_at(0, 1, 8.0, OptimConfig(warmup_steps=0, decay="linear")) == 8


def test_bad_optimizer_settings_are_refused_with_their_values():
    with pytest.raises(
        ValueError, match="--optim.max-grad-norm 0: must be above 0 .inf switches clipping off."
    ):
        OptimConfig(max_grad_norm=0)
    with pytest.raises(ValueError, match="--optim.warmup-steps -1.*at least 0"):
        OptimConfig(warmup_steps=-1)


def test_a_step_is_of_the_given_rate_and_by_the_betas_of_the_settings():
    """Adam's first step is of the rate's size, whatever the gradient's. In the second one, with no
    gradient, of the first moment b1 is left, of the second b2, each over its own correction.
    """
    linear = torch.nn.Linear(2, 2, bias=False)
    optimizer = make_optimizer(linear, OptimConfig(betas=(0.5, 0.75)), 1.0)
    moves = []
    for gradient in (3.0, 0.0):
        before = linear.weight.detach().clone()
        linear.weight.grad = torch.full((2, 2), gradient)
        optimizer_step(linear, optimizer, 1e-3, math.inf)
        moves.append((before - linear.weight.detach()).mean().item())
    b1, b2 = 0.5, 0.75
    second = b1 * (1 - b1) / (1 - b1**2) / math.sqrt(b2 * (1 - b2) / (1 - b2**2))
    assert moves == pytest.approx([1e-3, 1e-3 * second], rel=1e-3)
    assert linear.weight.grad is None


def test_the_norm_that_is_returned_is_that_of_all_ranks(paths):
    """Of N gradients of 1/2: sqrt(N) / 2, from one rank and from two."""

    def job():
        policy = load(paths["qwen2"])
        optimizer = make_optimizer(policy, OptimConfig(), 1e-3)
        with_gradient(policy, 0.5)
        num_weights = sum(p.numel() for p in policy.parameters())
        return optimizer_step(policy, optimizer, 1e-3, 1.0), math.sqrt(num_weights) / 2

    for world_size in (1, 2):
        for norm, expected in run_ranks(world_size, job):
            assert norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_state_of_the_first_step_is_there_before_it_and_counts_for_nothing(paths, world_size):
    """The same weights, to the bit, as of an AdamW that makes its state in its first step."""

    def job():
        ours, plain = load(paths["uneven"]), load(paths["uneven"])
        before = [p.to_local().clone() for p in ours.parameters()]
        config = OptimConfig(weight_decay=0.1)
        optimizer = make_optimizer(ours, config, 1e-2)
        assert all(p.grad is None for p in ours.parameters())
        assert {id(p) for p in optimizer.state} == {id(p) for p in ours.parameters()}
        for p, old in zip(ours.parameters(), before, strict=True):
            assert torch.equal(p.to_local(), old)
            assert not any(x.any() for x in optimizer.state[p].values())
        groups = [
            {key: group[key] for key in ("weight_decay", "lr")} for group in optimizer.param_groups
        ]
        assert groups == [{"weight_decay": 0.1, "lr": 1e-2}, {"weight_decay": 0.0, "lr": 1e-2}]
        by_size = (
            [p for p in plain.parameters() if p.ndim >= 2],
            [p for p in plain.parameters() if p.ndim < 2],
        )
        parameters = [
            {"params": params, "weight_decay": decay}
            for params, decay in zip(by_size, (0.1, 0.0), strict=True)
        ]
        other = torch.optim.AdamW(parameters, betas=config.betas, fused=True)
        for gradient in (1.0, -3.0):
            for model, each in ((ours, optimizer), (plain, other)):
                with_gradient(model, gradient)
                optimizer_step(model, each, 1e-2, 1.0)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local())

    run_ranks(world_size, job)
