"""Adapters against a dense model W + scale B A under autograd; the reference is the base."""

import argparse
import contextlib
import functools
import math
import re

import pytest
import torch
import torch.distributed as dist
from engines import EOS, LIMIT, PROMPTS, differences
from jobs import joined, records, settings, train, weights
from lab import lab
from ranks import run_ranks
from safetensors.torch import load_file
from test_reshard import Recorder
from tiny import save_tiny
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import grpo
import logprobs
import lora
import ppo
import run
from attention import use_packed_attention
from checkpoint import TrainState
from logprobs import token_logprobs, token_values
from lora import LoraConfig, adapters, attach, disabled, fill, merged, merges
from model import ModelConfig, load_critic, load_policy, parameters_on_meta, shard
from optim import OptimConfig, make_optimizer, optimizer_step
from packing import pack, sequence
from reshard import iter_full_params, sync_weights, verify_sync
from rollout import Engine, RolloutConfig
from tools import export
from vllm_backend import VllmBackend

CONFIG = LoraConfig(rank=3, alpha=6.0)
RESPONSES = [6, 7, 8, 9, 1], [10, 1], [11, 12, 1]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{kind: directory}; gemma3's intermediate size leaves the last of 4 ranks without a row."""
    made = {"qwen2": save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2")}
    directory = tmp_path_factory.mktemp("gemma3")
    made["gemma3"] = save_tiny(directory, "gemma3", intermediate_size=5)
    return made


def load(path, config=CONFIG, stored=None, load=load_policy, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    adapt = functools.partial(attach, config=config, stored=stored or {})
    policy = load(path, mesh, ModelConfig(**settings), adapt=adapt)
    fill(policy, 0, stored or {})
    use_packed_attention(policy)
    return policy


def frozen(path, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    base = load_policy(path, mesh, ModelConfig(**settings), trainable=False)
    use_packed_attention(base)
    return base


def row_of(*responses):
    sequences = [sequence(torch.tensor([3, 4, 5]), torch.tensor(ids)) for ids in responses]
    [row] = pack(sequences, 64)
    return row


def full(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def sent_by(policy, **options):
    """{name: tensor} of what a policy with adapters sends."""
    buckets = iter_full_params(policy, merges=merges(policy), **options)
    return {name: x for bucket in buckets for name, x in bucket}


def random_adapters(model, seed=1):
    """Values of both matrices, the same on all ranks; B is not 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(p.shape, generator=generator) for name, p in adapters(model).items()
    }


def dense(path, values, scale, responses):
    """(log-probabilities, {name: gradient of their sum}) of W + scale B A, in fp32 by autograd."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    weights = {}
    for name, p in model.named_parameters():
        a, b = (leaves.get(name.replace("weight", part)) for part in ("lora_A", "lora_B"))
        weights[name] = p.detach() if a is None else p.detach() + scale * b @ a
    found = []
    for ids in responses:
        tokens = torch.tensor([[3, 4, 5, *ids]])
        options = {"use_cache": False}
        logits = torch.func.functional_call(model, weights, (tokens[:, :-1],), options).logits
        found.append(logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, 2:, 0])
    sum(x.sum() for x in found).backward()
    return [x.detach() for x in found], {name: x.grad for name, x in leaves.items()}


def check_against_dense(path, **settings):
    """Of a policy on this number of ranks; rank r has every W-th response."""
    base = frozen(path, compile=settings.get("compile", False))
    policy = load(path, **settings)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [*RESPONSES, [13, 1]][rank::world]
    row = row_of(*mine)
    expected, _ = token_logprobs(base, row)
    assert torch.equal(token_logprobs(policy, row)[0], expected)  # B is 0
    values = random_adapters(policy)
    fill(policy, 0, values)
    answers, gradients = dense(path, values, 2.0, [*RESPONSES, [13, 1]])
    found, _ = token_logprobs(policy, row)
    torch.testing.assert_close(
        found[row.fields["response_mask"]], torch.cat(answers[rank::world]), rtol=0, atol=1e-5
    )
    found.sum().backward()
    learned = {name: full(p.grad) for name, p in policy.named_parameters() if p.grad is not None}
    assert learned.keys() == gradients.keys()  # nothing of the base
    scale = max(x.abs().max() for x in gradients.values())
    for name, x in gradients.items():
        assert learned[name].dtype == torch.float32
        assert (learned[name] - x).abs().max() <= 1e-5 * scale, name
    return policy, row, expected


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_and_gradients_are_a_dense_models_and_the_reference_is_the_base(paths, world_size):
    def job():
        for path in [paths["gemma3"]] if world_size == 4 else paths.values():
            policy, row, expected = check_against_dense(path)
            before = {name: p.to_local().clone() for name, p in policy.named_parameters()}
            optimizer = make_optimizer(policy, OptimConfig(), 0.1)  # zeroes gradients
            token_logprobs(policy, row)[0].sum().backward()
            optimizer_step(policy, optimizer, 0.1, 1.0)
            trained = adapters(policy).keys()
            for name, p in policy.named_parameters():
                is_equal = torch.equal(p.to_local(), before[name])
                assert is_equal or name in trained, name
            with contextlib.suppress(KeyError), disabled(policy):
                assert torch.equal(token_logprobs(policy, row)[0], expected)
                with torch.no_grad(), disabled(policy):
                    assert torch.equal(token_logprobs(policy, row)[0], expected)
                assert torch.equal(token_logprobs(policy, row)[0], expected)  # still
                raise KeyError
            assert not torch.equal(token_logprobs(policy, row)[0], expected)  # on again
        if world_size == 2:
            check_against_dense(paths["qwen2"], activation_checkpointing=True)

    run_ranks(world_size, job)


@pytest.mark.slow
def test_compiled_layers_give_the_same_with_adapters_and_without(paths):
    def job():
        policy, row, expected = check_against_dense(paths["qwen2"], compile=True)
        with disabled(policy), torch.no_grad():
            assert torch.equal(token_logprobs(policy, row)[0], expected)

    run_ranks(1, job, timeout_s=200)


def in_bf16(path, config=None):
    """A policy as on a GPU: computed in bf16; with adapters its base is bf16, and they are fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from model import load_shards

    hf_config = AutoConfig.from_pretrained(path)
    with parameters_on_meta():
        plain = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    attach(plain, config or LoraConfig())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    policy = shard(plain, mesh, ModelConfig(), torch.bfloat16)
    load_shards(policy, path, new=tuple(adapters(policy)))
    use_packed_attention(policy)
    return policy


def test_in_bf16_trainer_and_sampler_compute_with_the_same_bits(paths):
    """An adapter that bf16 rounds away in part. What is sent, put into a model without adapters,
    gives the trainer's log-probabilities to a bit, and gradients are fp32.
    """

    def job():
        policy = in_bf16(paths["qwen2"], CONFIG)
        fill(policy, 0, {name: 0.05 * x for name, x in random_adapters(policy).items()})
        sampler = in_bf16(paths["qwen2"])
        row = row_of(*RESPONSES)
        sent = sent_by(policy, dtype=torch.bfloat16)
        parameters = dict(sampler.named_parameters())
        assert sent.keys() == parameters.keys()
        for name, x in sent.items():
            assert x.dtype == torch.bfloat16
            lora._set(parameters[name].detach(), x)
        found, _ = token_logprobs(policy, row)
        assert torch.equal(found, token_logprobs(sampler, row)[0])
        with disabled(policy):
            assert not torch.equal(found, token_logprobs(policy, row)[0])
        found.sum().backward()
        return {name: full(p.grad) for name, p in policy.named_parameters() if p.grad is not None}

    [alone] = run_ranks(1, job)
    for together in run_ranks(2, job):  # each rank has the same row: twice the sum
        for name, x in alone.items():
            assert x.dtype == together[name].dtype == torch.float32
            torch.testing.assert_close(together[name], 2 * x, rtol=0.05, atol=0.05 * x.abs().max())


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_is_sent_is_merged_in_fp32_and_rounded_once_under_the_bases_names(paths, world_size):
    def job():
        for path in paths.values():
            policy = load(path)
            values = random_adapters(policy)
            fill(policy, 0, values)
            expected = load_file(f"{path}/model.safetensors")
            changed = set()
            for name, weight in expected.items():
                a = values.get(name.replace("weight", "lora_A"))
                if a is not None:
                    b = values[name.replace("weight", "lora_B")]
                    expected[name] = (weight.double() + 2 * b.double() @ a.double()).float()
                    changed.add(name)
            for bucket_bytes, only in ((1, False), (1 << 29, True), (1 << 14, False)):
                options = dict(bucket_bytes=bucket_bytes, merged_only=only)
                sent = sent_by(policy, dtype=torch.float32, **options)
                assert sent.keys() == (changed if only else expected.keys())
                for name, x in sent.items():
                    torch.testing.assert_close(x, expected[name], rtol=1e-6, atol=1e-6)
            for name, x in sent_by(policy, dtype=torch.bfloat16).items():
                assert x.dtype == torch.bfloat16
                torch.testing.assert_close(x.float(), expected[name], rtol=2**-8, atol=1e-6)

    run_ranks(world_size, job)


def test_a_sync_sends_the_rest_only_if_it_is_lost_and_verify_sync_sees_what_differs(paths):
    class Partial(Recorder):
        holds_weights = False

        def load_weights(self, buckets, partial=False):
            self.holds_weights = True
            return super().load_weights(buckets)

    def job():
        policy = load(paths["qwen2"])
        base = frozen(paths["qwen2"])
        engine = Partial(base)
        engine.dtype = torch.float32
        whole = sync_weights(policy, engine, merges=merges(policy))
        fill(policy, 0, random_adapters(policy))
        rest = 4 * sum(p.numel() for n, p in base.named_parameters() if n not in merges(policy))
        assert sync_weights(policy, engine, merges=merges(policy)) == whole - rest
        verify_sync(policy, engine, merges=merges(policy))
        with torch.no_grad():
            name = "model.layers.1.mlp.up_proj.lora_B"
            adapters(policy)[name].to_local()[0, 0] += 0.1
        with pytest.raises(RuntimeError, match=r"1 of 26 .*layers/1/mlp/up_proj"):
            verify_sync(policy, engine, merges=merges(policy))
        with pytest.raises(ValueError, match=r"lora_A: is a part of a weight"):
            sync_weights(policy, engine)

    run_ranks(2, job)


def test_a_sum_is_rounded_once():
    """2^-8 + 2^-17 is 2^-8 in bf16, and 1 + 2^-8 then goes down to 1; their sum goes up."""
    weight = torch.tensor([[1.0]], dtype=torch.bfloat16)
    a = torch.tensor([[2**-8 + 2**-17]])
    once = merged(weight, a, torch.tensor([[1.0]]), 1.0)
    assert once.dtype == torch.bfloat16 and once.item() == 1 + 2**-7


def test_verify_sync_sees_an_adapter_that_is_sent_wrongly(paths):
    """By a merge that is not the model's: verify_sync gathers by torch's own means."""

    def job():
        policy = load(paths["qwen2"])
        fill(policy, 0, random_adapters(policy))
        engine = Recorder(frozen(paths["qwen2"]))
        engine.dtype = torch.float32
        engine.holds_weights = False
        calls = []

        def wrong(weight, a, b):
            calls.append(1)
            return merged(weight, a, b, scale=2.0 if len(calls) % 2 else 2.1)

        name = "model.layers.0.mlp.up_proj.weight"
        others = {name: (merges(policy)[name][0], wrong)}
        given = merges(policy) | others
        sync_weights(policy, engine, merges=given)
        with pytest.raises(RuntimeError, match=f"{name} is sent with other numbers"):
            verify_sync(policy, engine, merges=given)

    run_ranks(1, job)


def test_first_values_are_the_same_on_any_number_of_ranks_and_others_with_another_seed(paths):
    def job():
        policy = load(paths["gemma3"])
        first = {name: full(p) for name, p in adapters(policy).items()}
        fill(policy, 1)
        assert not torch.equal(full(adapters(policy)[A]), first[A])
        return first

    A = "model.layers.0.self_attn.q_proj.lora_A"
    [alone] = run_ranks(1, job)
    for found in run_ranks(4, job):
        assert all(torch.equal(x, found[name]) for name, x in alone.items())
    for name, x in alone.items():
        if name.endswith("lora_B"):
            assert not x.any()
        else:
            bound = 1 / math.sqrt(x.shape[1])
            assert 0.8 * bound < x.abs().max() <= bound and x.unique().numel() == x.numel()


def test_a_critic_trains_its_adapters_and_its_head(paths):
    def job():
        critic = load(paths["qwen2"], load=load_critic)
        names = {name for name, p in critic.named_parameters() if p.requires_grad}
        assert names == {*adapters(critic), "score.weight"}
        token_values(critic, row_of(*RESPONSES)).sum().backward()
        assert full(critic.score.weight.grad).abs().max() > 0
        assert TrainState(critic, (), trained_only=True).state_dict()["model"].keys() == names

    run_ranks(2, job)


def test_rank_0_changes_nothing(paths):
    def job():
        policy = load(paths["qwen2"], LoraConfig())
        assert not adapters(policy) and not merges(policy)
        assert all(p.requires_grad for p in policy.parameters())
        assert not any(type(m).__name__ == "LoraLinear" for m in policy.modules())

    run_ranks(1, job)


def test_scale_and_targets_are_those_of_the_config():
    def model():
        return nn.ModuleDict({"q_proj": nn.Linear(8, 4), "mlp": nn.Sequential(nn.Linear(8, 8))})

    for config, scale in (
        (LoraConfig(rank=4), 8.0),
        (LoraConfig(rank=4, alpha=2.0, rank_stabilized=True), 1.0),
    ):
        made = model()
        attach(made, config)
        assert made["q_proj"].scale == scale and len(adapters(made)) == 4
    for target, name in {"q_proj": "q_proj", "mlp.0": "mlp.0", "0": "mlp.0"}.items():
        made = model()
        attach(made, LoraConfig(rank=2, targets=(target,)))
        trained = [name for name, p in made.named_parameters() if p.requires_grad]
        assert trained == list(adapters(made)) == [f"{name}.lora_A", f"{name}.lora_B"]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(rank=-1), "--lora.rank -1: must be at least 0"),
        (dict(rank=2, alpha=0.0), "--lora.alpha 0.0: must be above 0"),
        (dict(path="x"), "--lora.path x: must be with the --lora.rank of its adapter"),
        (dict(targets=("q", "v")), "--lora.targets q v: must be with --lora.rank 32"),
        (dict(rank=2, targets=("q_proj", "c_attn")), "--lora.targets c_attn: must be the end"),
        (dict(rank=2, targets=("proj",)), "--lora.targets proj: must be the end of a name"),
        (dict(rank=2, targets=("lm_head",)), "there are: q_proj k_proj v_proj o_proj gate_proj"),
        (dict(rank=33), r"--lora.rank 33: must be at most 32 for model.layers.0.self_attn.k_proj"),
    ],
)
def test_a_bad_setting_is_refused_in_a_line(tmp_path, settings, message):
    from transformers import AutoConfig, AutoModelForCausalLM

    path = save_tiny(tmp_path, "llama")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    with pytest.raises(ValueError, match=message) as error:
        attach(model, LoraConfig(**settings))
    assert "\n" not in str(error.value)


def test_an_adapter_of_another_base_is_refused_by_name():
    model = nn.Sequential(nn.Linear(8, 8))
    config = LoraConfig(rank=2, path="there")
    good = {"0.lora_A": torch.ones(2, 8), "0.lora_B": torch.ones(8, 2)}
    for stored, message in (
        (good | {"1.lora_A": torch.ones(2, 8)}, "--lora.path there: has 1.lora_A, unlike the mod"),
        ({"0.lora_A": good["0.lora_A"]}, "--lora.path there: lacks 0.lora_B, unlike the model"),
        (good | {"0.lora_B": torch.ones(9, 2)}, r"is of another base: 0.lora_B is \[9, 2\], the"),
    ):
        with pytest.raises(ValueError, match=message):
            attach(nn.Sequential(nn.Linear(8, 8)), config, stored)
    attach(model, config, good)
    fill(model, 0, good)
    torch.testing.assert_close(model(torch.zeros(8)), model[0].bias)


# In a run


@pytest.mark.parametrize(
    "entry, world_size",
    [
        pytest.param(grpo, 1, id="grpo"),
        pytest.param(grpo, 2, id="2 ranks", marks=pytest.mark.slow),
        pytest.param(ppo, 1, id="ppo"),
    ],
)
def test_a_run_goes_on_exactly_from_adapters_alone(
    tiny, files, tmp_path, entry, world_size, monkeypatch
):
    """With a KL term, and what waits in host memory: the policy, which is its own reference, stays.
    The engine keeps its weights: from the second sync on it gets those with adapters alone.
    """
    changes = dict(
        lora=dict(rank=4),
        loss=dict(kl_coef=0.1),
        offload=True,
        verify_sync=True,
        num_steps=4,
        eval_every=2,
        eval_paths=(str(files / "3.jsonl"),),
    )
    saves = dict(save_every=2)
    usual = logprobs.with_logprobs

    def watched(model, rows, name, *rest):
        is_on = any(layer.enabled for layer in lora._adapted(model).values())
        with open(tmp_path / f"passes{dist.get_rank()}", "a") as file:
            print(f"{name} {is_on}", file=file)
        return usual(model, rows, name, *rest)

    args = settings(tiny, files, tmp_path / "whole", entry, **changes)
    whole = train(args, world_size, **{"logprobs.with_logprobs": watched})
    for rank in range(world_size):
        passes = (tmp_path / f"passes{rank}").read_text().splitlines()
        assert passes == ["old_logprobs True", "ref_logprobs False"] * 4
    first = changes | dict(num_steps=2, run=saves)
    parts = train(settings(tiny, files, tmp_path / "parts", entry, **first), world_size)
    for state in (parts / "checkpoints" / "step-000002", *(parts / "best").iterdir()):
        known = FileSystemReader(state).read_metadata().state_dict_metadata
        names = [name for name in known if re.match(r"(policy|critic)\.model\.", name)]
        assert len(names) >= 28 and all(re.search("lora_[AB]$|score.weight", n) for n in names)
    last = changes | dict(run=saves | dict(resume=True))
    for other in (dict(rank=3), dict(rank=4, alpha=1.0), dict(rank=4, targets=("q_proj",))):
        args = settings(tiny, files, tmp_path / "parts", entry, **last | dict(lora=other))
        with pytest.raises(ValueError, match=r"was made with --lora\.\w+ .*; give the same"):
            args.run.check(args, tiny)
    train(settings(tiny, files, tmp_path / "parts", entry, **last), world_size)
    assert all(x.equal(weights(parts)[name]) for name, x in weights(whole).items())
    for name in ("actor/kl_loss", "actor/grad_norm", "reward/mean"):
        found = [record[name] for record in records(parts)]
        assert found == [record[name] for record in records(whole)]
    sizes = [record["communication/sync_gb"] for record in records(whole)]
    expected = load_file(f"{tiny}/model.safetensors")
    assert sizes[0] > sizes[1] == sizes[2] > 0
    changed = [n for n, x in weights(whole).items() if not x.equal(expected[n])]
    assert len(changed) == 14  # seven matrices in each of two layers

    monkeypatch.setattr(run, "init_distributed", joined)
    out = tmp_path / "exported"
    asked = argparse.Namespace(run=parts, out=out, step=4, best=False)
    run_ranks(1, export.main, asked)
    found = load_file(out / "model.safetensors")
    assert all(x.equal(found[name]) for name, x in weights(whole).items())


def test_an_engine_whose_sleep_discards_weights_holds_none_when_it_wakes(monkeypatch):
    class Backend:
        model = None

        def __getattr__(self, name):
            return lambda *_: set()

    def holds(**changes):
        config = RolloutConfig(**changes)
        sizes = dict(max_prompt_tokens=8, num_samples=1, stop_ids=[1])
        engine = Engine(lambda *_, **__: Backend(), "x", config, **sizes)
        found = []
        for _ in range(2):
            with engine.awake():
                found.append(engine.holds_weights)
                engine.load_weights([])
        return found

    with_vllm = dict(engine="vllm")
    assert holds(engine="hf") == [False, True]
    assert holds(**with_vllm) == [False, True]
    assert holds(**with_vllm, quantization="fp8_per_channel") == [False, False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert holds(**with_vllm, sleep_level=1) == holds(**with_vllm, sleep_level=0) == [False, True]
    assert holds(**with_vllm, sleep_level=2) == [False, False]


@pytest.mark.slow
def test_vllm_over_two_ranks_samples_from_the_merged_weights(paths):
    """To 1e-4 in fp32, after a sync of everything and after one of the merged weights alone."""
    path = paths["qwen2"]

    def setup():
        config = RolloutConfig("vllm", LIMIT, tensor_parallel_size=2, max_num_seqs=16)
        sizes = dict(max_prompt_tokens=64, num_samples=32, stop_ids=[EOS])
        policy = load(path)
        return policy, Engine(VllmBackend, path, config, **sizes)

    def job(kept):
        policy, engine = kept
        gaps = []
        for seed in range(2):
            fill(policy, 0, random_adapters(policy, seed))
            with engine.awake():
                assert engine.holds_weights == (seed > 0)
                sync_weights(policy, engine, merges=merges(policy))
                rollouts = engine.generate(PROMPTS, 4, seed=0)
                verify_sync(policy, engine, merges=merges(policy))
            gaps.append(differences(policy, rollouts).abs().max().item())
        with disabled(policy):
            gaps.append(differences(policy, rollouts).abs().max().item())
        return gaps

    with lab(2, setup) as on_ranks:
        for first, second, base in on_ranks(job):
            assert max(first, second) < 1e-4 and base > 0.1
