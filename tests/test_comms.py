"""What comms.py promises: error of the codec, bytes on the wire, and gradients of FSDP2 on real
gloo groups.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import comms
from comms import (
    dequantize_blockwise,
    quantize_blockwise,
    quantize_gradients,
    quantized_all_reduce,
    quantized_reduce_scatter,
)

SIZES = [1, 7, 8, 9, 255, 256, 257, 1_000_003]  # no multiple of a block, a rank count or 8


def round_trip(x: Tensor, block_size: int = 256, rounding: str = "nearest") -> Tensor:
    codes, scales = quantize_blockwise(x, block_size, rounding=rounding)
    assert codes.dtype == torch.int8 and codes.shape == (x.numel(),)
    assert scales.dtype == torch.float32 and scales.shape == (-(-x.numel() // block_size),)
    return dequantize_blockwise(codes, scales, block_size)


def block_absmax(x: Tensor, block_size: int) -> Tensor:
    """absmax of the block of each value, by a loop."""
    return torch.cat([block.abs().max().expand_as(block) for block in x.split(block_size)])


def relative_l2(x: Tensor, expected: Tensor) -> float:
    return ((x.double() - expected.double()).norm() / expected.double().norm()).item()


# One quantization.


@pytest.mark.parametrize("block_size", [16, 256, 2048])
@pytest.mark.parametrize("exponent", [-35, -30, -20, -3, 0, 3, 20, 30, 38])
def test_error_is_at_most_absmax_over_254_for_absmax_from_1e_35_to_1e38(exponent, block_size):
    """x 1.001: the scale and its product with the code are rounded to fp32, 2^-23 each, times up to
    127 in the code.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(5000, generator=generator) * 2 - 1
    x /= block_absmax(x, block_size)  # absmax 1 in each block
    x = (x.double() * 10.0**exponent).float()
    error = (round_trip(x, block_size).double() - x.double()).abs()
    assert (error <= block_absmax(x, block_size).double() / 254 * 1.001).all()


@pytest.mark.parametrize("exponent", [-36, -37, -38, -40, -44])
def test_blocks_below_the_smallest_scale_come_back_as_zero(exponent):
    x = torch.full((256,), 10.0**exponent)
    assert (round_trip(x) == 0).all()


def test_nothing_comes_back_as_nothing():
    assert round_trip(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_zeros_are_exact(rounding):
    assert (round_trip(torch.zeros(1000), rounding=rounding) == 0).all()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x[::3] = 0
    assert (round_trip(x, rounding=rounding)[::3] == 0).all()


def test_the_largest_value_of_a_block_is_kept_to_the_last_bits():
    x = torch.randn(2560, generator=torch.Generator().manual_seed(0))
    largest = x.abs() == block_absmax(x, 256)
    torch.testing.assert_close(
        round_trip(x)[largest], x[largest], rtol=3e-7, atol=0
    )  # 127 * (x / 127), rounded twice


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_blocks_are_independent(rounding):
    """An outlier of 1e4 among values of 1e-4 touches its own block only."""
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 1e-4
    x[300] = 1e4
    back = round_trip(x, rounding=rounding)
    error, limit = (
        (back - x).abs(),
        block_absmax(x, 256) / (254 if rounding == "nearest" else 127) * 1.001,
    )
    assert (error <= limit).all()
    assert back[300] == pytest.approx(1e4, rel=1e-6)
    assert (back[:256] != 0).float().mean() > 0.9


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nan_and_inf_stay_visible_in_their_block_and_nowhere_else(value, rounding):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x[[300, 990]] = value
    finite = round_trip(x, rounding=rounding).isfinite()
    assert not finite[256:512].any() and not finite[768:].any()
    assert finite[:256].all() and finite[512:768].all()


def test_relative_l2_is_below_1_percent_on_gaussian_values_at_block_256():
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert (
        0.006 < relative_l2(round_trip(x), x) < 0.008
    )  # 0.70 %; a codec far better than 8 bits would be no codec
    assert relative_l2(round_trip(x.bfloat16()), x.bfloat16()) < 0.008


def test_stochastic_rounding_has_mean_zero_and_nearest_has_a_bias():
    """1/3 between the codes 42 and 43 of absmax 1: nearest is off by 0.8 % each time."""
    x = torch.full((256,), 1 / 3)
    x[0] = 1.0
    torch.manual_seed(0)
    stochastic = torch.stack([round_trip(x, rounding="stochastic")[1:] for _ in range(200)])
    # 51,000 draws with a standard deviation of at most scale / 2: 5 sigma are scale * 2.5 / 226
    assert abs(stochastic.mean().item() - 1 / 3) < 2.5 / 226 / 127
    assert abs(round_trip(x)[1].item() - 1 / 3) > 0.3 / 127
    assert (stochastic - 1 / 3).abs().max() < 1 / 127


def test_the_largest_draw_of_stochastic_rounding_does_not_turn_127_into_minus_128():
    with patch.object(torch, "rand", lambda shape, generator: torch.full(shape, 1 - 2**-24)):
        back = round_trip(torch.ones(256), rounding="stochastic")
    torch.testing.assert_close(back, torch.ones(256), rtol=1e-6, atol=0)


def test_ranks_with_equal_seeds_round_differently():
    """Equal errors would add up in the sum."""

    def codes():
        torch.manual_seed(0)
        return quantize_blockwise(torch.linspace(-1, 1, 1000), rounding="stochastic")[0]

    first, second = run_ranks(2, codes)
    assert (first != second).float().mean() > 0.1


@pytest.mark.parametrize("block_size", [0, 8, 100, 255])
def test_block_sizes_must_be_powers_of_two_from_16_on(block_size):
    with pytest.raises(ValueError, match="power of two"):
        quantize_blockwise(torch.zeros(10), block_size)


def test_a_misspelt_rounding_is_refused():
    """Not taken for the default, which is another algorithm."""

    def reduce():
        x = torch.zeros(4)
        for call in (
            lambda: quantize_blockwise(x, rounding="floor"),
            lambda: quantized_reduce_scatter(x[:2], x, rounding="Nearest"),
            lambda: quantized_all_reduce(x, rounding=True),
            lambda: quantize_gradients(sharded_model((2,), "mean"), rounding="stochastically"),
        ):
            with pytest.raises(ValueError, match="rounding .*: nearest or stochastic"):
                call()

    run_ranks(2, reduce)


@pytest.mark.parametrize("num_scales", [0, 1, 3])
def test_scales_that_do_not_fit_the_codes_are_refused(num_scales):
    """A kernel would read beyond them."""
    with pytest.raises(ValueError, match=f"scales \\({num_scales},\\): one for each block of 256"):
        dequantize_blockwise(torch.zeros(300, dtype=torch.int8), torch.ones(num_scales))


def test_tensors_with_gaps_give_what_their_copies_give():
    x = torch.randn(600, 2)
    for strided in (x[:, 0], x[::2], x.T):
        codes, scales = quantize_blockwise(strided)
        assert all(map(torch.equal, (codes, scales), quantize_blockwise(strided.clone())))
        gaps = torch.stack([codes, codes], 1)[:, 0], torch.stack([scales, scales], 1)[:, 0]
        assert torch.equal(dequantize_blockwise(*gaps), dequantize_blockwise(codes, scales))


def test_the_gpu_kernels_give_the_codes_of_the_plain_functions():
    """Run by Triton's interpreter, which is switched on when Triton is imported: in a process of
    its own.
    """
    pytest.importorskip("triton")
    run_this_file(TRITON_INTERPRET="1")


def run_this_file(**environment: str) -> None:
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def compare_kernels() -> None:
    torch.manual_seed(0)
    for num_values, n, block_size in (
        (1000, 1000, 256),
        (2999, 1000, 64),
        (7, 3, 16),
        (5000, 2500, 4096),
    ):
        x = torch.randn(num_values) * torch.logspace(-34, 37, num_values)
        x[::5] = 0
        for dtype in (torch.float32, torch.bfloat16):
            messages = {}
            for kernels in (True, False):
                counting = patch.object(comms, "_kernels", wraps=comms._kernels)
                with patch.dict(os.environ), counting as used:
                    if not kernels:
                        del os.environ["TRITON_INTERPRET"]
                    m = messages[kernels] = comms._Messages(
                        -(-num_values // n), n, block_size, x.device
                    )
                    comms._quantize_rows(x.to(dtype), m.codes, m.scales, block_size, "nearest")
                    m.total = torch.empty(n, dtype=dtype)
                    comms._dequantize_sum(m.codes, m.scales, m.total, block_size)
                assert used.call_count == (2 if kernels else 0)
            # 127 / absmax may differ in the last bit: a value half way between two codes may go
            # either way
            assert (messages[True].codes.int() - messages[False].codes).abs().max() <= 1
            assert (messages[True].codes != messages[False].codes).float().mean() < 1e-3
            torch.testing.assert_close(
                messages[True].scales, messages[False].scales, rtol=3e-7, atol=0
            )
            torch.testing.assert_close(
                messages[True].total, messages[False].total, rtol=1e-2, atol=0
            )
    test_tensors_with_gaps_give_what_their_copies_give()
    x = torch.randn(1024)
    x[10], x[300] = float("nan"), float("inf")
    codes, scales = quantize_blockwise(x)
    assert dequantize_blockwise(codes, scales).isfinite().view(4, 256).sum(1).tolist() == [
        0,
        0,
        256,
        256,
    ]
    x = torch.full((51_200,), 1 / 3)
    x[::256] = 1
    back = dequantize_blockwise(*quantize_blockwise(x, rounding="stochastic"))
    assert abs(back[x < 1].mean().item() - 1 / 3) < 2.5 / 226 / 127  # 5 sigma, as above
    assert (back - x).abs().max() < 1 / 127


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_gives_the_codes_of_the_cpu():
    """In a process of its own: the ranks of other tests are forked from this one, which must not
    touch the GPU.
    """
    run_this_file()


def compare_gpu() -> None:
    x = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    for rounding in ("nearest", "stochastic"):
        codes, scales = quantize_blockwise(x.cuda(), rounding=rounding)
        plain_codes, plain_scales = quantize_blockwise(x)
        assert (codes.cpu().int() - plain_codes).abs().max() <= 1
        assert (codes.cpu() != plain_codes).float().mean() < (
            1e-3 if rounding == "nearest" else 0.6
        )
        torch.testing.assert_close(scales.cpu(), plain_scales, rtol=3e-7, atol=0)
        back = dequantize_blockwise(codes, scales)
        torch.testing.assert_close(
            back.cpu(), dequantize_blockwise(codes.cpu(), scales.cpu()), rtol=3e-7, atol=0
        )
    x[[300, 990]] = torch.tensor([float("nan"), float("inf")])
    finite = (
        dequantize_blockwise(*quantize_blockwise(x.cuda()))[:1024].isfinite().view(4, 256).sum(1)
    )
    assert finite.tolist() == [256, 0, 256, 0]
    assert quantize_blockwise(x[:0].cuda())[0].shape == (0,)


# Collectives.


def reduce_random(dtype: torch.dtype, rounding: str, block_size: int) -> None:
    """Both collectives against the fp64 sum of what all ranks hold, for each size."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for n in SIZES if dtype == torch.float32 and world_size < 4 else SIZES[:-1]:
        inputs = [
            torch.randn(world_size * n, generator=torch.Generator().manual_seed(source)).to(dtype)
            for source in range(world_size)
        ]
        expected = torch.stack([x.double() for x in inputs]).sum(0)
        output = torch.full((n,), float("nan"), dtype=dtype)
        kept = inputs[rank].clone()
        quantized_reduce_scatter(output, inputs[rank], block_size=block_size, rounding=rounding)
        assert torch.equal(inputs[rank], kept)
        # of absmax: up to 4 sigma of the sum in absmax / 254 per rank; bf16 outputs round by 2^-9
        # more
        step = 127 if rounding == "stochastic" else 254
        rtol = 2**-8 if rounding == "stochastic" or dtype == torch.bfloat16 else 0
        tolerance = dict(rtol=rtol, atol=5 * world_size / step)
        torch.testing.assert_close(output.double(), expected.view(world_size, n)[rank], **tolerance)
        x = inputs[rank][:n].clone()
        quantized_all_reduce(x, block_size=block_size, rounding=rounding)
        if n > 200 and rounding == "nearest":
            assert relative_l2(output, expected.view(world_size, n)[rank]) < 0.01
            assert relative_l2(x, expected[:n]) < (
                0.01 if n > 10_000 else 0.012
            )  # quantized twice: 0.7 % * sqrt 2
        everybody = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(everybody, x)
        assert all(torch.equal(x, other) for other in everybody)  # bit-identical


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "dtype, rounding, block_size",
    [
        (torch.float32, "nearest", 256),
        (torch.bfloat16, "nearest", 256),
        (torch.float32, "stochastic", 64),
    ],
)
def test_collectives_match_fp32_for_any_size_and_all_ranks_end_with_the_same_bits(
    world_size, dtype, rounding, block_size
):
    run_ranks(world_size, reduce_random, dtype, rounding, block_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sum_of_largest_values_does_not_wrap(world_size):
    """Every rank's code is 127; summed in int8 they would be -2 or -4."""

    def reduce():
        x = torch.full((world_size * 1000,), 3.0)
        output = torch.empty(1000)
        quantized_reduce_scatter(output, x)
        quantized_all_reduce(x)
        torch.testing.assert_close(
            output, torch.full_like(output, 3.0 * world_size), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(x, torch.full_like(x, 3.0 * world_size), rtol=1e-6, atol=0)

    run_ranks(world_size, reduce)


def test_one_ranks_nan_is_seen_by_all():
    def reduce():
        x = torch.ones(1000)
        x[700] = float("nan") if dist.get_rank() == 1 else 1.0
        quantized_all_reduce(x)
        return x.isnan().any().item(), x[0].item()

    assert run_ranks(2, reduce) == [(True, 2.0)] * 2


def count_sent_bytes(run: Callable[[], object]) -> int:
    """Bytes that leave this rank: of an all-to-all all but its own message, of an all-gather its
    input to each.
    """
    world_size, sent = dist.get_world_size(), 0
    all_to_all, all_gather = dist.all_to_all_single, comms.all_gather

    def counting_all_to_all(output, input, group=None):
        nonlocal sent
        sent += input.nbytes * (world_size - 1) // world_size
        all_to_all(output, input, group=group)

    def counting_all_gather(output, input, group=None):
        nonlocal sent
        sent += input.nbytes * (world_size - 1)
        all_gather(output, input, group=group)

    def refuse(*args, **kwargs):
        raise AssertionError("another collective")

    others = dict.fromkeys(
        ("all_reduce", "reduce_scatter_tensor", "all_gather", "broadcast", "send"), refuse
    )
    with (
        patch.object(comms, "all_gather", counting_all_gather),
        patch.object(comms, "reduce_scatter", refuse),
        patch.multiple(dist, all_to_all_single=counting_all_to_all, **others),
    ):
        run()
    return sent


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("n", [64 * 256, 64 * 256 + 1, 65 * 256 - 1, 100_003])
def test_bytes_on_the_wire_equal_the_formula_and_are_at_most_51_percent_of_bf16_and_26_of_fp32(
    world_size, n
):
    """A message: 4 bytes a block and 1 a value, each padded to 16; n values a rank, at least 64
    blocks.
    """

    def reduce():
        x, output = torch.randn(world_size * n), torch.empty(n)
        return (
            count_sent_bytes(lambda: quantized_reduce_scatter(output, x)),
            count_sent_bytes(lambda: quantized_all_reduce(x)),
        )

    message = -(-4 * -(-n // 256) // 16) * 16 + -(-n // 16) * 16
    for scattered, reduced in run_ranks(world_size, reduce):
        assert scattered == (world_size - 1) * message
        assert reduced == 2 * (world_size - 1) * message
        assert (
            scattered <= 0.51 * (world_size - 1) * 2 * n
            and scattered <= 0.26 * (world_size - 1) * 4 * n
        )


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_error_feedback_the_sum_of_many_equal_reductions_is_exact(world_size):
    """Equal values are always rounded the same way: without feedback 200 errors add up, with it one
    remains.
    """

    def reduce():
        g = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
        expected = torch.stack(
            [
                torch.randn(1001, generator=torch.Generator().manual_seed(source))
                for source in range(world_size)
            ]
        ).sum(0)
        residual = torch.zeros(1001)
        plain_total, total = torch.zeros(1001), torch.zeros(1001)
        for _ in range(200):
            plain, x = g.clone(), g.clone()
            quantized_all_reduce(plain)
            quantized_all_reduce(x, residual=residual)
            plain_total += plain
            total += x
        return relative_l2(plain_total / 200, expected), relative_l2(total / 200, expected)

    for without, with_feedback in run_ranks(world_size, reduce):
        assert without > 0.004
        assert with_feedback < 0.0002


def test_error_feedback_is_added_before_16_bits_round_it_away():
    """1 + 2^-10 is 1 in bf16."""

    def reduce():
        sent = []
        scatter = comms._scatter
        with patch.object(comms, "_scatter", lambda x, *a: sent.append(x) or scatter(x, *a)):
            residual = torch.full((256,), 2**-10)
            quantized_all_reduce(torch.ones(256, dtype=torch.bfloat16), residual=residual)
        return sent[0].unique().tolist()

    assert run_ranks(2, reduce) == [[1 + 2**-10]] * 2


def test_sizes_and_layouts_that_do_not_fit_are_refused_on_any_number_of_ranks():
    """Else missing values are taken for zeros, and surplus ones are dropped."""

    def reduce():
        num_ranks = dist.get_world_size()
        x = torch.zeros(4 * num_ranks)
        rule = f"^output of . values: contiguous, and one in {num_ranks} of input's {len(x)}"
        for output in (torch.zeros(3), torch.zeros(5), torch.zeros(8)[::2]):
            with pytest.raises(ValueError, match=rule):
                quantized_reduce_scatter(output, x)
        with pytest.raises(ValueError, match="^x: must be contiguous"):
            quantized_all_reduce(torch.zeros(8)[::2])
        output = torch.zeros(6)
        quantized_reduce_scatter(output, torch.ones(6, num_ranks).T)
        assert (output - num_ranks).abs().max() < 1e-6

    run_ranks(1, reduce)
    run_ranks(2, reduce)


@pytest.mark.parametrize("residual", [torch.zeros(7), torch.zeros(8, dtype=torch.bfloat16)])
def test_a_residual_that_does_not_fit_is_refused(residual):
    def reduce():
        with pytest.raises(ValueError, match=r"residual: must be fp32 of shape \(8,\)"):
            quantized_all_reduce(torch.zeros(2, 4), residual=residual)

    run_ranks(2, reduce)


def test_error_feedback_forgets_a_nan():
    def reduce():
        residual = torch.zeros(1000)
        x = torch.ones(1000)
        x[5] = float("inf") if dist.get_rank() == 0 else float("nan")
        quantized_all_reduce(x, residual=residual)
        assert not x.isfinite().all()
        x = torch.ones(1000)
        quantized_all_reduce(x, residual=residual)
        torch.testing.assert_close(x, torch.full_like(x, 2.0), rtol=1e-6, atol=0)

    run_ranks(2, reduce)


# FSDP2.


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Odd widths, so that FSDP2 pads and no chunk is a multiple of a block."""

    def __init__(self, width: int = 37):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()  # FSDP2 warns of views


def sharded_model(
    mesh_shape: tuple[int, ...], reduction: str, policy: MixedPrecisionPolicy | None = None
) -> Model:
    torch.manual_seed(0)
    model = Model()
    names = ("shard",) if len(mesh_shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        if reduction in ("sum", "mean, forced sums"):
            module.set_force_sum_reduction_for_comms(True)
        if reduction == "sum":
            module.set_gradient_divide_factor(1.0)
    return model


def gradients(model: Model, accumulate: bool, seed: int = 0) -> dict[str, Tensor]:
    """Full gradients after two micro-batches, different on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    model.zero_grad()
    for micro_batch in range(2):
        tokens = torch.randint(0, 50, (8, 6), generator=generator)
        model.set_requires_gradient_sync(not accumulate or micro_batch == 1)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in grads.values()]).double()


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (2, 1), (1, 2)], ids=str)
def test_gradients_of_fsdp2_keep_norm_and_direction(mesh_shape):
    """As a mean by AVG, as a mean by forced sums, as a sum; reduced each micro-batch, or
    accumulated first.
    """

    def compare():
        figures = []
        for reduction in ("mean", "mean, forced sums", "sum"):
            plain_model, model = (
                sharded_model(mesh_shape, reduction),
                sharded_model(mesh_shape, reduction),
            )
            quantize_gradients(model)
            for accumulate in (False, True):
                plain, quantized = (
                    flat(gradients(plain_model, accumulate)),
                    flat(gradients(model, accumulate)),
                )
                assert not torch.equal(quantized, plain)
                ratio = (quantized.norm() / plain.norm()).item()
                figures.append(
                    (
                        reduction,
                        accumulate,
                        ratio,
                        F.cosine_similarity(quantized, plain, dim=0).item(),
                    )
                )
        return figures

    for figures in run_ranks(math.prod(mesh_shape), compare):
        for reduction, accumulate, ratio, cosine in figures:
            assert 0.98 < ratio < 1.02, (reduction, accumulate)
            assert cosine > 0.999, (reduction, accumulate)


def test_gradients_reduced_in_bf16_keep_norm_and_direction():
    def compare():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        plain = flat(gradients(sharded_model((2,), "sum", policy), accumulate=False))
        model = sharded_model((2,), "sum", policy)
        quantize_gradients(model)
        quantized = flat(gradients(model, accumulate=False))
        return (quantized.norm() / plain.norm()).item(), F.cosine_similarity(
            quantized, plain, dim=0
        ).item()

    for ratio, cosine in run_ranks(2, compare):
        assert 0.98 < ratio < 1.02
        assert cosine > 0.999


def test_between_forward_and_backward_fsdp2_keeps_its_shards_as_before():
    def compare():
        model = sharded_model((2, 2), "sum")
        quantize_gradients(model)
        states = [
            module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
        ]
        return [state._fsdp_param_group._use_post_forward_mesh for state in states]

    assert run_ranks(4, compare) == [[False] * 3] * 4


def test_replicas_end_with_the_same_bits():
    def compare():
        model = sharded_model((2, 2), "sum")
        quantize_gradients(model, rounding="stochastic")
        torch.manual_seed(dist.get_rank())
        gradients(model, accumulate=False)
        replicas = next(model.parameters()).device_mesh.get_group("replicate")
        for p in model.parameters():
            mine = p.grad.to_local()
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine, group=replicas)
            assert torch.equal(*both)

    run_ranks(4, compare)


def test_stochastic_rounding_reaches_the_reduce_scatter():
    """Two reductions of equal gradients differ."""

    def compare():
        model = sharded_model((2,), "mean")
        quantize_gradients(model, rounding="stochastic")
        first, second = (flat(gradients(model, accumulate=True)) for _ in range(2))
        return torch.equal(first, second)

    assert run_ranks(2, compare) == [False, False]


@pytest.mark.parametrize("name", ["dp", "x"])
def test_the_mesh_may_have_any_names(name):
    def compare():
        found = []
        for is_quantized in (False, True):
            torch.manual_seed(0)
            model = Model()
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(name, name + "_shard"))
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh)
            if is_quantized:
                quantize_gradients(model)
            found.append(flat(gradients(model, accumulate=False)))
        return F.cosine_similarity(*found, dim=0).item()

    assert min(run_ranks(4, compare)) > 0.999


def test_a_second_call_takes_the_place_of_the_first_on_all_axes():
    """A cell that is run twice, with other options the second time."""

    def compare():
        def reduced(*calls):
            model = sharded_model((2, 2), "mean")
            for options in calls:
                quantize_gradients(model, **options)
            return flat(gradients(model, accumulate=False))

        once, other = reduced({}), reduced({"block_size": 16})
        assert torch.equal(reduced({}, {}), once)
        assert torch.equal(reduced({}, {"block_size": 16}), other)
        assert not torch.equal(once, other)

    run_ranks(4, compare)


def test_a_call_that_is_refused_changes_nothing():
    def compare():
        model = sharded_model((2, 1), "mean")
        before = flat(gradients(model, accumulate=False))
        with pytest.raises(ValueError):
            quantize_gradients(model, exclude=["*nrom*"])
        return torch.equal(flat(gradients(model, accumulate=False)), before)

    assert run_ranks(2, compare) == [True, True]


def train(mesh_shape: tuple[int, ...], num_steps: int, **options) -> list[float]:
    """Loss over the fixed batches of all ranks at the start and at the end. Without options:
    FSDP2's own path.
    """
    model = sharded_model(mesh_shape, "mean")
    if options:
        quantize_gradients(model, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, 50, (8, 6), generator=generator) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(num_steps):
        tokens = batches[step % 4]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = torch.tensor([sum(losses[:4]), sum(losses[-4:])])
    dist.all_reduce(total)
    return total.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh_shape, options",
    [
        ((2,), dict(rounding="nearest")),
        ((4,), dict(rounding="stochastic")),
        ((2, 2), dict(error_feedback=True)),
        ((2,), dict(exclude=["*norm*", "*embed*"])),
    ],
    ids=str,
)
def test_200_steps_end_with_a_loss_within_1_percent_of_fp32(mesh_shape, options):
    """On means something is learned, and the same."""

    def compare():
        return train(mesh_shape, 200), train(mesh_shape, 200, **options)

    (before, plain), (_, quantized) = run_ranks(math.prod(mesh_shape), compare, timeout_s=240)[0]
    assert plain < 0.8 * before
    assert abs(quantized / plain - 1) < 0.01


def test_off_is_fsdp2s_own_path():
    def compare():
        def refuse(*args, **kwargs):
            raise AssertionError("quantized")

        with patch.multiple(comms, _quantize_rows=refuse, _dequantize_sum=refuse):
            gradients(sharded_model((2,), "mean"), accumulate=False)
            model = sharded_model((2,), "mean")
            quantize_gradients(model)
            with pytest.raises(AssertionError, match="quantized"):
                gradients(model, accumulate=False)

    run_ranks(2, compare)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_excluded_parameters_are_reduced_as_without_quantization(mesh_shape, reduction):
    """Norms share a module with quantized weights; embedding and head are all that the root has."""

    def compare():
        plain = gradients(sharded_model(mesh_shape, reduction), accumulate=False)
        model = sharded_model(mesh_shape, reduction)
        quantize_gradients(model, exclude=["*norm*", "embed*", "head*"])
        quantized = gradients(model, accumulate=False)
        return {
            name: ((quantized[name] - x).abs().max() / x.abs().max()).item()
            for name, x in plain.items()
        }

    for differences in run_ranks(math.prod(mesh_shape), compare):
        for name, difference in differences.items():
            if "norm" in name or "embed" in name or "head" in name:
                # an fp32 sum in another order, after layers above whose gradients are the same
                assert difference < 1e-6, name
            else:
                assert 1e-6 < difference < 0.02, name


def test_frozen_parameters_beside_excluded_ones_have_no_place_in_the_reduction():
    def compare():
        results = []
        for exclude in (None, ["*norm*"]):
            model = sharded_model((2,), "mean")
            for layer in model.layers:
                layer.up.weight.requires_grad_(False)
            if exclude:
                quantize_gradients(model, exclude=exclude)
            tokens = torch.arange(30).view(5, 6) + dist.get_rank()
            model(tokens).logsumexp(-1).mean().backward()
            results.append(
                {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
            )
        plain, quantized = results
        assert plain.keys() == quantized.keys() and "layers.0.up.weight" not in plain
        return relative_l2(flat(quantized), flat(plain))

    assert all(0 < error < 0.02 for error in run_ranks(2, compare))


def test_error_feedback_on_the_replicas_brings_the_sum_of_equal_gradients_closer():
    """Shards of one rank, so that the replica axis is all that is quantized."""

    def compare():
        def mean_gradient(error_feedback: bool | None) -> Tensor:
            model = sharded_model((2, 1), "sum")
            if error_feedback is not None:
                quantize_gradients(model, error_feedback=error_feedback)
            return torch.stack([flat(gradients(model, accumulate=True)) for _ in range(30)]).mean(0)

        plain = mean_gradient(None)
        return relative_l2(mean_gradient(False), plain), relative_l2(mean_gradient(True), plain)

    for without, with_feedback in run_ranks(2, compare):
        assert with_feedback < without / 10


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(ValueError, match="call fully_shard first"):
        quantize_gradients(nn.Linear(3, 3))

    def refuse():
        model = sharded_model((2,), "mean")
        with pytest.raises(ValueError, match="'\\*nrom\\*' matches no parameter: .*embed.weight"):
            quantize_gradients(model, exclude=["*nrom*"])
        with pytest.raises(ValueError, match="power of two"):
            quantize_gradients(model, block_size=100)
        quantize_gradients(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(3.0)
        with pytest.raises(ValueError, match="set_force_sum_reduction_for_comms"):
            gradients(model, accumulate=False)

    run_ranks(2, refuse)


if __name__ == "__main__":
    compare_kernels() if "TRITON_INTERPRET" in os.environ else compare_gpu()
