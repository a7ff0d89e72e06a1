"""The witness: right on what is right; each planted fault is seen by the check that is for it."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from jobs import joined, settings
from ranks import run_ranks
from tiny import save_tiny
from torch import nn

import attention
import checkpoint
import grpo
import packing
import reshard
import witness
from check import restart_row
from data import Prompt, PromptStream
from examples import addition
from hf_backend import HfBackend
from model import load_policy
from offload import Offload
from optim import OptimConfig, make_optimizer
from packing import pack, sequence
from rollout import Engine
from tools import checkup

LENGTHS = [2, 3, 5, 8, 13, 21, 34, 40]


def sent(change):
    """A stand-in for iter_full_params that changes what is sent: change(name, tensor)."""
    plain = reshard.iter_full_params

    def stream(*args, **options):
        for bucket in plain(*args, **options):
            yield [change(name, tensor) for name, tensor in bucket]

    return mock.patch.object(reshard, "iter_full_params", stream)


def scaled(name, tensor):
    return name, tensor * 1.2 if ".mlp." in name else tensor


def reversed_norms(name, tensor):
    return name, tensor.flip(0) if "norm" in name else tensor


def other_name(name, tensor):
    """Of two layers, the other one's."""
    if "mlp.up_proj" not in name:
        return name, tensor
    return name.translate(str.maketrans("01", "10")), tensor


def old_weights():
    """Each sync sends what the first one sent."""
    first = {}
    return sent(lambda name, tensor: (name, first.setdefault(name, tensor.clone())))


def leak():
    """Attention over the whole row."""
    plain = attention._segment_attention

    def whole(q, k, v, scaling, window, spans):
        edges = torch.tensor([0, len(q)], dtype=torch.int32)
        return plain(q, k, v, scaling, window, attention.Spans(edges, edges, len(q), len(q)))

    return mock.patch.object(attention, "_segment_attention", whole)


def no_shared_gradient():
    """The gradient of gathered keys and values is lost."""
    plain = attention._attend

    def attend(q, k, v, scaling, window, spans, index):
        if index is not None:
            k, v = k.detach(), v.detach()
        return plain(q, k, v, scaling, window, spans, index)

    return mock.patch.object(attention, "_attend", attend)


def own_totals():
    """A loss that is a mean over its row."""
    plain = grpo.actor_gradients

    def by_row(args, policy, rows, totals, meter):
        for row in rows:
            counts = {"tokens": row.num_response_tokens, "sequences": len(row.source)}
            plain(args, policy, [row], counts, meter)

    return mock.patch.object(grpo, "actor_gradients", by_row)


def other_temperature():
    plain = checkup.logprobs.token_logprobs

    def at_one(policy, row, temperature):
        return plain(policy, row, temperature=1.0)

    return mock.patch.object(checkup.logprobs, "token_logprobs", at_one)


def no_step():
    return mock.patch.object(checkup.optim, "optimizer_step", lambda policy, *_: policy.zero_grad())


FAULTS = {
    "none": contextlib.nullcontext,
    "MLP weights scaled by 1.2": lambda: sent(scaled),
    "norms reversed": lambda: sent(reversed_norms),
    "a tensor under another's name": lambda: sent(other_name),
    "the first weights again": old_weights,
    "another temperature": other_temperature,
    "an optimizer that moves nothing": no_step,
    "attention leaks": leak,
    "a mean over the row": own_totals,
    "a prompt that stands once learns nothing": no_shared_gradient,
}
AFTER_SYNC = "sampler, after a sync"
BEFORE_SYNC = "sampler, before the sync"
AFTER_NEXT = "sampler, after the next sync"
ALONE = "alone or in a full row"
LAYOUTS = "gradient in two layouts"
ONCE = "gradient, prompt once"
SEEN_BY = {
    "none": set(),
    "MLP weights scaled by 1.2": {AFTER_SYNC, AFTER_NEXT},
    "norms reversed": {AFTER_SYNC, AFTER_NEXT},
    "a tensor under another's name": {AFTER_SYNC, AFTER_NEXT},
    "the first weights again": {AFTER_NEXT},
    "another temperature": {AFTER_SYNC, AFTER_NEXT},
    "an optimizer that moves nothing": {BEFORE_SYNC},
    "attention leaks": {ALONE, LAYOUTS},
    "a mean over the row": {LAYOUTS},
    "a prompt that stands once learns nothing": {ONCE},
    "rotary positions by the longest of a row": {ALONE},
    "a load that brings no moments": {"restart"},
    "a load that does nothing": {"restart"},
}


def made_sequences():
    draw = torch.Generator().manual_seed(0)
    found = []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(2, 14, (length + 2,), generator=draw)
        if i % 2:
            ids[:2] = found[-1]["tokens"][:2]  # two have a prompt in common
        known = dict(advantages=1.0 - 2.0 * (i % 2), rollout_logprobs=-2.0, ref_logprobs=0.0)
        found.append(sequence(ids[:2], ids[2:], **known))
    return found


@pytest.fixture(scope="module")
def wrong(tiny, files, tmp_path_factory):
    """{fault: names of the rows that are wrong}."""
    out = tmp_path_factory.mktemp("witness")
    args = settings(tiny, files, out, rollout=dict(max_response_tokens=8, temperature=0.7))
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=10_000.0)
    dynamic = save_tiny(out / "rope", "llama", rope_parameters=rope, max_position_embeddings=16)

    def job():
        witness.NUM_TOKENS = 300  # in this fork; the rest is for models with more noise
        mesh = joined(0, 60)
        policy = load_policy(tiny, mesh)
        attention.use_packed_attention(policy)
        sizes = dict(max_prompt_tokens=16, num_samples=512, stop_ids=[1])
        engine = Engine(HfBackend, tiny, args.rollout, **sizes)
        prompts = [Prompt([2 + i, 12, 3, 13], "", "", "") for i in range(10)]
        tokenizer = addition.make_tokenizer()
        start = {name: p.detach().clone() for name, p in policy.named_parameters()}
        rows = {}
        for fault, plant in FAULTS.items():
            with torch.no_grad():
                for name, p in policy.named_parameters():
                    p.copy_(start[name])
            optimizer = make_optimizer(policy, OptimConfig(), 1e-3)
            state = {"policy": checkpoint.TrainState(policy, optimizer)}
            state["stream"] = PromptStream([prompts])
            run = checkup.Run(args, engine, None, tokenizer, [], state, Offload(False))
            with plant():
                parts = checkup._parts(run, grpo.actor_gradients)
                mine = made_sequences()
                rows[fault] = []
                if SEEN_BY[fault] <= {ALONE, LAYOUTS, ONCE}:
                    rows[fault] += witness.packing_rows(parts, policy, mine, False, 2)
                if not SEEN_BY[fault] & {ALONE, LAYOUTS, ONCE}:
                    rows[fault] += witness.sampler_rows(parts, policy, mine, 4, False, 0.0)
        found = {fault: {row.what for row in each if not row.right} for fault, each in rows.items()}
        save, load = checkpoint.save, checkpoint.load
        assert restart_row(out, state, save, load).right

        def without_moments(target, state):
            load(target, {"policy": state["policy"].weights()} | {"stream": state["stream"]})

        for fault, loads in (
            ("a load that brings no moments", without_moments),
            ("a load that does nothing", lambda *_: None),
        ):
            row = restart_row(out, state, save, loads)
            found[fault] = set() if row.right else {row.what}
        with mock.patch.object(attention, "rotary_limit", lambda config: None):
            policy = load_policy(dynamic, mesh)
            attention.use_packed_attention(policy)
        parts = checkup._parts(
            run._replace(state={"policy": checkpoint.TrainState(policy, ())}), grpo.actor_gradients
        )
        by_rope = witness.packing_rows(parts, policy, made_sequences(), False)
        found["rotary positions by the longest of a row"] = {x.what for x in by_rope if not x.right}
        return found

    [found] = run_ranks(1, job, timeout_s=200)
    return found


@pytest.mark.parametrize("fault", SEEN_BY)
def test_a_planted_fault_is_seen_by_the_check_that_is_for_it(wrong, fault):
    assert wrong[fault] >= SEEN_BY[fault]
    if fault == "none":
        assert not wrong[fault]


def test_ranks_agree_on_the_rows(tiny, files, tmp_path):
    """Two ranks, of which one has no sample."""
    args = settings(tiny, files, tmp_path)

    def job():
        policy = load_policy(tiny, joined(0, 60))
        attention.use_packed_attention(policy)
        state = {"policy": checkpoint.TrainState(policy, ())}
        run = checkup.Run(args, None, None, None, [], state, Offload(False))
        parts = checkup._parts(run, grpo.actor_gradients)
        mine = made_sequences() if torch.distributed.get_rank() else []
        return witness.packing_rows(parts, policy, mine, False)

    ours, theirs = run_ranks(2, job)
    assert ours == theirs
    assert [row.right for row in ours] == [True, True]
    assert "in 2 and 1 rows" in ours[1].figure


# The bound


class Half(nn.Module):
    """Log-probabilities by a matrix, in 16 bits, of the row's tokens as numbers."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(16, 1, bias=False, dtype=dtype)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 16))

    def forward(self, row):
        x = (row.tokens[:, None] * torch.arange(1, 17)).sin()
        return self.layer(x.to(self.layer.weight.dtype))[:, 0].float()


def row_of(num, **fields):
    ids = torch.arange(num + 1) % 14 + 2
    return pack([sequence(ids[:1], ids[1:], **fields)], 1 << 12)[0]


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(torch.bfloat16, 1e-3, 1e-2), (torch.float32, 0, 1e-6)]
)
def test_rounding_is_of_the_size_of_the_type(dtype, low, high):
    """16 products of up to 1, each off by up to 2^-8 of itself, or 2^-24."""
    policy = Half(dtype)
    found = witness.rounding(policy, policy, row_of(500))
    assert low <= found <= high
    assert not policy.layer._forward_pre_hooks


def test_a_difference_is_a_mean_over_response_tokens_and_nan_is_not_small():
    row = row_of(4, rollout_logprobs=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    same = witness.difference(
        Half(torch.float32), lambda row: row.fields["rollout_logprobs"], [row]
    )
    assert same == (0.0, 0.0, witness.FP32_BOUND, 4)
    moved = torch.tensor([9.0, 1.0, 2.5, 3.0, 4.0])  # the prompt's token does not count
    found = witness.difference(Half(torch.float32), lambda row: moved, [row])
    assert found[:2] == (0.125, 0.5)
    assert not found.is_small
    moved[1] = torch.nan
    assert not witness.difference(Half(torch.float32), lambda row: moved, [row]).is_small
    assert witness.difference(Half(torch.float32), lambda row: moved, [row], True).bound == 0.3


# In a run that has not asked


def compared(num_done, error=1.0, **flags):
    """The policies' passes that compare() made in this step."""
    known = dict(verify_every=0, verify_sync=False) | flags
    rollout = SimpleNamespace(temperature=1.0, eight_bit=False)
    args = SimpleNamespace(**known, rollout=rollout)
    passes = []

    def token_logprobs(policy, row, temperature):
        passes.append(row)
        return policy(row), None

    policy = Half(torch.float32)
    row = row_of(4)
    sampled = policy(row).detach() + error
    rows = [[packing.replace(row, fields=row.fields | {"rollout_logprobs": sampled})]]
    witness.compare(args, num_done, policy, rows, token_logprobs)
    return len(passes)


def test_the_first_step_alone_is_compared_and_a_difference_is_a_warning(capsys):
    assert compared(0, error=0.0) == 1
    assert compared(1) == 0
    assert capsys.readouterr().out == ""
    assert compared(0) == 3  # and the bound: once exactly, once with errors
    assert capsys.readouterr().out.startswith("warning: sampler and policy are 1 nats apart, mean")


@pytest.mark.parametrize(
    ("num_done", "flags"), [(0, dict(verify_sync=True)), (6, dict(verify_every=3))]
)
def test_a_run_that_verifies_stops(num_done, flags):
    [flag] = flags
    with pytest.raises(RuntimeError, match=f"^--{flag.replace('_', '-')}.* nats apart"):
        compared(num_done, **flags)
    assert compared(num_done, error=0.0, **flags) == 1
    assert compared(num_done + 1, verify_every=3) == 0
