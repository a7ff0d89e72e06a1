"""Shards of a Transformers model: what is loaded, what gradients mean, what a step does."""

import contextlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import KINDS, save_tiny
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import attention as attention_file
import logprobs as logprobs_file
import model as model_file
from attention import use_packed_attention
from batch import BatchConfig
from logprobs import token_logprobs, token_values, warm_up
from model import (
    ModelConfig,
    copy_weights,
    load_critic,
    load_policy,
    load_shards,
    parameters_on_meta,
    shard,
)
from packing import pack, rows_of_all_sizes, sequence


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{kind: directory}; "uneven" has tensors of 5 rows: the last of 4 ranks has none."""
    made = {kind: save_tiny(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}
    return made | {
        "uneven": save_tiny(tmp_path_factory.mktemp("uneven"), "llama", intermediate_size=5)
    }


def load(path, trainable=True, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    policy = load_policy(path, mesh, ModelConfig(**settings), trainable=trainable)
    use_packed_attention(policy)
    return policy


def rows(*responses, capacity=16):
    """Rows with a prompt of three tokens before each response."""
    return pack(
        [sequence(torch.tensor([3, 4, 5]), torch.tensor(ids)) for ids in responses], capacity
    )


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(policy, all_rows, sync_at=None):
    """{name: full gradient} of the sum of log-probabilities of this rank's rows."""
    for i, row in enumerate(all_rows):
        policy.set_requires_gradient_sync(sync_at is None or i == sync_at)
        token_logprobs(policy, row)[0].sum().backward()
    return {name: full(p.grad) for name, p in policy.named_parameters()}


def assert_close(found, expected, tolerance):
    """Largest difference at most `tolerance` of the largest value, over all tensors together."""
    largest = max(x.abs().max().item() for x in expected.values())
    assert found.keys() == expected.keys() and largest > 0
    for name, x in expected.items():
        assert (found[name] - x).abs().max().item() <= tolerance * largest, name


# Loading


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_holds_its_rows_of_the_checkpoint(paths, world_size):
    def job():
        for path in paths.values():
            expected = load_file(f"{path}/model.safetensors")
            policy = load(path)
            for name, p in policy.named_parameters():
                assert torch.equal(p.full_tensor(), expected[name]), name
                rows_of_first = math.ceil(len(p) / world_size)
                assert len(p.to_local()) == max(
                    0, min(rows_of_first, len(p) - rows_of_first * dist.get_rank())
                )

    run_ranks(world_size, job)


def test_loading_takes_the_memory_of_a_rank_s_own_rows(tmp_path):
    """huggingface/trl#7131, verl#7834: every rank loaded the whole checkpoint, 1437 GB of host
    memory in all. 103 MB of weights on 4 ranks: 26 MB of shards, and as much of the file's pages
    that were read.
    """
    path = save_tiny(tmp_path, "llama", vocab_size=200_000)

    def resident_mb(field):
        return (
            int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000
        )

    def job():
        load(path)  # once before, for what the libraries themselves load
        before = resident_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak, VmHWM, to the present
        again = load(path)
        return resident_mb("VmHWM") - before, sum(
            p.to_local().nbytes for p in again.parameters()
        ) / 1e6

    for peak, held in run_ranks(4, job):
        assert 25 < held < 27 and peak < 2.3 * held, peak


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("master_dtype", ["float32", "bfloat16"])
def test_buffers_hold_their_values_whatever_was_in_memory(paths, kind, master_dtype, monkeypatch):
    """huggingface/transformers#45902: rotary frequencies are in no checkpoint, and to_empty leaves
    what memory held. verl#6365: with two rotary tables (gemma3), broadcasts in another order on
    each rank hung.
    """
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(paths[kind], dtype=getattr(torch, master_dtype))
    expected = dict(plain.named_buffers())
    assert all(
        buffer.dtype == torch.float32 for name, buffer in expected.items() if "inv_freq" in name
    )

    def job():
        empty_like = torch.empty_like

        def nan_like(*args, **options):
            made = empty_like(*args, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(torch, "empty_like", nan_like)
        policy = load(paths[kind], master_dtype=master_dtype)
        for name, buffer in policy.named_buffers():
            assert buffer.dtype == expected[name].dtype and torch.equal(buffer, expected[name]), (
                name
            )
        assert all(p.to_local().isfinite().all() for p in policy.parameters())

    run_ranks(2, job)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sharded_model_gives_the_log_probabilities_of_the_plain_one(paths, kind):
    """1e-5: the same sums in fp32, in another order."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(paths[kind], dtype=torch.float32)
    responses = [6, 7, 8, 9, 1], [10, 1]
    expected = []
    for ids in responses:
        tokens = torch.tensor([[3, 4, 5, *ids]])
        log_p = plain(tokens[:, :-1], use_cache=False).logits.detach().log_softmax(-1)
        expected += log_p.gather(-1, tokens[:, 1:, None])[0, 2:, 0].tolist()

    def job():
        for trainable in (True, False):
            [row] = rows(*responses)
            logprobs, _ = token_logprobs(load(paths[kind], trainable), row)
            assert logprobs[row.fields["response_mask"]].tolist() == pytest.approx(
                expected, abs=1e-5
            )

    run_ranks(2, job)


def bf16_policy(path):
    """The model with fp32 master weights and bf16 compute, as on a GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with parameters_on_meta():
        plain = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=torch.float32
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    policy = shard(plain, mesh, ModelConfig(), torch.bfloat16)
    load_shards(policy, path)
    use_packed_attention(policy)
    return policy


def deep_model(path, kind):
    """A directory with 8 random layers: of the tiny kinds, or post-norm (olmo2), or with a
    LayerNorm (phi).
    """
    from transformers import AutoModelForCausalLM, Olmo2Config, PhiConfig

    if kind in KINDS:
        extra = (
            dict(layer_types=["sliding_attention", "full_attention"] * 4)
            if kind == "gemma3"
            else {}
        )
        return save_tiny(path, kind, num_hidden_layers=8, **extra)
    config = {"olmo2": Olmo2Config, "phi": PhiConfig}[kind]
    sizes = dict(
        vocab_size=14,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**sizes, pad_token_id=0, initializer_range=0.1))
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    "kind, share", [("qwen2", 0.9), ("llama", 0.9), ("gemma3", 0.95), ("olmo2", 0.95), ("phi", 1)]
)
def test_in_bf16_the_residual_stream_stays_in_fp32(tmp_path, monkeypatch, kind, share):
    """Mean distance of the log-probabilities to those in fp32, as a share of what it is with a
    stream in bf16. phi's LayerNorm takes no fp32 stream beside bf16 weights: there nothing changes.
    """
    path = deep_model(tmp_path, kind)

    def outcome(policy):
        streams = []
        for layer in policy.model.layers:
            layer.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0].dtype))
        responses = torch.randint(3, 14, (64, 32), generator=torch.Generator().manual_seed(0))
        [row] = rows(*responses.tolist(), capacity=1 << 20)
        logprobs, _ = token_logprobs(policy, row)
        logprobs.sum().backward()
        assert all(full(p.grad).isfinite().all() for p in policy.parameters())
        return streams, logprobs.detach()

    def job():
        _, exact = outcome(load(path))
        streams, kept = outcome(bf16_policy(path))
        assert streams == [torch.bfloat16 if kind == "phi" else torch.float32] * 8
        monkeypatch.setattr(model_file, "_keep_residual_in_fp32", lambda decoder, dtype: None)
        streams, rounded = outcome(bf16_policy(path))
        assert streams == [torch.bfloat16] * 8
        return [(x - exact).abs().mean().item() for x in (kept, rounded)]

    [(kept, rounded)] = run_ranks(1, job)
    assert 0 < kept <= share * rounded


def dropping_configs():
    """Three ways to drop out: modules (GPT-2), functions in the layers (OPT), within attention
    (Qwen2).
    """
    from transformers import GPT2Config, OPTConfig, Qwen2Config

    sizes = dict(vocab_size=14, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    small = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    return [
        GPT2Config(
            n_layer=2, n_embd=32, n_head=2, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5, **sizes
        ),
        OPTConfig(ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5, **small, **sizes),
        Qwen2Config(
            num_key_value_heads=2, intermediate_size=48, attention_dropout=0.5, **small, **sizes
        ),
    ]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_two_passes_of_one_policy_agree_whatever_its_dropout(tmp_path, number):
    """jingyaogong/minimind#814: the ratio before the first update was not 1."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(dropping_configs()[number]).save_pretrained(tmp_path)

    def job():
        policy = load(str(tmp_path))
        assert policy.training
        [row] = rows([6, 7, 8, 9, 1], [10, 1])
        first, second = (token_logprobs(policy, row)[0] for _ in range(2))
        with torch.no_grad():
            third, _ = token_logprobs(policy, row)
        assert torch.equal(first, second) and torch.equal(first, third)

    run_ranks(1, job)


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path, paths):
    tensors = load_file(f"{paths['qwen2']}/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    changed = {
        "no files": None,
        "missing": {key: x for key, x in tensors.items() if key != name},
        "shape": tensors | {name: torch.zeros(3, 64)},
        "scaled": tensors,
    }
    for case, content in changed.items():
        (tmp_path / case).mkdir()
        config = (Path(paths["qwen2"]) / "config.json").read_text()
        scaled = '"logits_scaling": 8.0,\n"model_type"'
        (tmp_path / case / "config.json").write_text(
            config if case != "scaled" else config.replace('"model_type"', scaled)
        )
        if content:
            save_file(content, tmp_path / case / "model.safetensors", metadata={"format": "pt"})

    def job():
        for case, message in {
            "no files": "has no model.safetensors and no index of several; save the model with",
            "missing": f"1 tensors of Qwen2ForCausalLM are missing: {name}; save",
            "shape": rf"{name} has shape \[3, 64\], the model wants \[90, 64\]",
            "scaled": r"models that scale their logits \(logits_scaling\) are not supported",
        }.items():
            with pytest.raises(ValueError, match=message):
                load(str(tmp_path / case))

    run_ranks(1, job)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_model_with_numbers_that_are_none_is_refused_before_it_samples(tmp_path, paths, number):
    """A new user's finding: "probability tensor contains either inf, nan" in a traceback, and a
    reward model's NaN in that of a reward.
    """
    stored = load_file(f"{paths['qwen2']}/model.safetensors")[UP]
    stored[-1, 3] = number
    policy = altered(paths["qwen2"], tmp_path / "policy", tensors={UP: stored})
    head = torch.full((1, 64), number)
    judge = altered(paths["qwen2"], tmp_path / "judge", tensors={"score.weight": head})

    def job():
        with pytest.raises(ValueError, match=f"policy: {UP} holds NaN or infinities; give a model"):
            load(str(policy))
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        with pytest.raises(ValueError, match="judge: score.weight holds NaN or infinities"):
            load_critic(str(judge), mesh, trainable=False)

    run_ranks(1, job)


def altered(source, directory, *, config=None, tensors=None, remove=()):
    """A copy of a model's directory with other settings and tensors."""
    shutil.copytree(source, directory)
    settings = json.loads((directory / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(settings))
    stored = load_file(directory / "model.safetensors") | (tensors or {})
    stored = {name: x for name, x in stored.items() if name not in remove}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        # unsloth#6200, #6978: FP8 read without its scales, weights 1,000 times too large
        (dict(config={"quantization_config": {"quant_method": "fp8"}}), "is quantized; dequantize"),
        (
            dict(tensors={UP: torch.ones(90, 64).to(torch.float8_e4m3fn)}),
            "weight is F8_E4M3",
        ),
        (dict(tensors={UP: torch.ones(90, 64, dtype=torch.int8)}), "weight is I8; dequantize"),
        (
            dict(tensors={f"{UP}_scale_inv": torch.ones(1)}),
            "1 tensors of Q.* not this model",
        ),
        # what nothing used
        (dict(tensors={"score.weight": torch.ones(1, 64)}), "not this model's: score.weight"),
        (dict(tensors={"visual.patch.weight": torch.ones(2, 2)}), "not this model's: visual.patch"),
        # LlamaFactory#10560: tied by the config, two tensors in the file
        (dict(tensors={"lm_head.weight": torch.ones(14, 64)}), "are tied by its config and differ"),
        # scaled logits, of others than Granite
        (dict(config={"logit_scale": 0.0625}), r"scale their logits \(logit_scale\)"),
    ],
    ids=["fp8", "f8 alone", "int8", "scales", "score", "vision", "tied head", "scaled"],
)
def test_files_that_hold_another_model_than_their_names_say_are_refused(
    tmp_path, paths, change, message
):
    path = altered(paths["qwen2"], tmp_path / "model", **change)

    def job():
        with pytest.raises(ValueError, match=message):
            load(str(path))

    run_ranks(1, job)


@pytest.mark.parametrize("setting", [{"hidden_act": "x"}, {"rope_parameters": {"rope_type": "x"}}])
def test_a_config_of_which_transformers_makes_no_model_is_refused(tmp_path, paths, setting):
    path = altered(paths["qwen2"], tmp_path / "model", config=setting)

    def job():
        with pytest.raises(ValueError, match="config.json makes no model .Key"):
            load(str(path))

    run_ranks(1, job)


def test_tensors_that_transformers_renames_are_refused_as_such(tmp_path):
    """GPT-NeoX: "missing; save the model with save_pretrained", as it had been."""
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    sizes = dict(vocab_size=14, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes)).save_pretrained(tmp_path)

    def job():
        with pytest.raises(ValueError, match="missing: lm_head.weight; embed_out.weight is there;"):
            load(str(tmp_path))

    run_ranks(1, job)


def test_names_and_copies_that_mean_the_same_model_load(tmp_path, paths):
    """A tied head that is an equal copy, or stands alone; frequencies that old files bring."""
    tensors = load_file(f"{paths['qwen2']}/model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = {"lm_head.weight": embedding.clone()}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    both = altered(paths["qwen2"], tmp_path / "both", tensors=head | old)
    gone = ("model.embed_tokens.weight",)
    alone = altered(paths["qwen2"], tmp_path / "alone", tensors=head, remove=gone)

    def job():
        for path in (both, alone):
            policy = load(str(path))
            for name, p in policy.named_parameters():
                assert torch.equal(p.full_tensor(), tensors[name]), name

    run_ranks(2, job)


def sharded_files(source, directory, parts=2):
    """The model in several files with their index."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    file_of = {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        mine = names[i::parts]
        save_file({name: tensors[name] for name in mine}, directory / file, {"format": "pt"})
        file_of |= dict.fromkeys(mine, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return tensors


def test_the_index_decides_which_file_holds_what(tmp_path, paths):
    """mlx-vlm#1464, vllm#54230, sglang#32279: a third file, left from an earlier save, won. And an
    adapter beside them.
    """
    tensors = sharded_files(paths["llama"], tmp_path / "model")
    stale = {name: torch.zeros_like(x) for name, x in tensors.items()}
    for name in ("model-00003-of-00003", "adapter_model", "consolidated"):
        save_file(stale, tmp_path / "model" / f"{name}.safetensors", {"format": "pt"})
    shutil.copytree(tmp_path / "model", tmp_path / "gone")
    (tmp_path / "gone" / "model-00002-of-00002.safetensors").unlink()
    shutil.copytree(tmp_path / "model", tmp_path / "both")
    save_file(stale, tmp_path / "both" / "model.safetensors", {"format": "pt"})
    shutil.copytree(tmp_path / "model", tmp_path / "cut")
    file = tmp_path / "cut" / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:1000])

    def job():
        policy = load(str(tmp_path / "model"))
        for name, p in policy.named_parameters():
            assert torch.equal(p.full_tensor(), tensors[name]), name
        for case, message in {
            "gone": "00002-of-00002.safetensors: cannot be read .*copy it again",
            "both": "has model.safetensors and an index of other files; remove what",
            "cut": "00001-of-00002.safetensors: cannot be read .*copy it again",
        }.items():
            with pytest.raises(ValueError, match=message):
                load(str(tmp_path / case))

    run_ranks(1, job)


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "GraniteMoe"])
def test_a_mixture_of_experts_is_refused_as_such(tmp_path, name):
    """verl#6896, vllm#42577: "tensors are missing; save the model with save_pretrained", as it
    had been.
    """
    import transformers

    sizes = dict(
        vocab_size=14,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    config = getattr(transformers, f"{name}Config")(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def job():
        with pytest.raises(ValueError, match="is no part of a dense decoder; mixtures of experts"):
            load(str(tmp_path))

    run_ranks(1, job)


def test_a_critic_of_a_policy_with_a_head_of_its_own_loads(paths):
    """The head is what it does not use, and nothing else."""

    def job():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("any",))
        critic = load_critic(paths["llama"], mesh)
        assert critic.score.weight.full_tensor().eq(0).all()

    run_ranks(1, job)


def test_gradients_are_summed_over_ranks_in_fp32_when_products_are_in_bf16(paths):
    """In bf16 1 + 2^-9 is 1. The gradient of a sum of weights times a constant."""

    def job():
        policy = bf16_policy(paths["llama"])
        share = 1.0 if dist.get_rank() == 0 else 2.0**-9
        layer = policy.model.layers[0]
        layer.forward = lambda x: x * layer.mlp.up_proj.weight.float().sum()
        layer(torch.full((1,), share)).sum().backward()
        return layer.mlp.up_proj.weight.grad.full_tensor()

    for grad in run_ranks(2, job):
        assert grad.eq(1 + 2.0**-9).all()


# Gradients


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_are_sums_over_rows_and_ranks_not_means(paths, world_size):
    """meta-pytorch/torchtune#2172: FSDP's mean over ranks divided the learning rate by their
    number. 1e-5: fp32 sums in another order.
    """
    responses = [[6, 7, 1], [8, 1], [9, 10, 11, 12, 13, 1], [13, 1]]

    def job():
        rank = dist.get_rank()
        mine = rows(*responses[rank * 4 // world_size : (rank + 1) * 4 // world_size], capacity=7)
        while len(mine) < 4 // world_size:
            mine.append(mine[0])
        return gradients(load(paths["llama"]), mine[: 4 // world_size])

    def alone():
        return gradients(load(paths["llama"]), rows(*responses, capacity=64))

    [expected] = run_ranks(1, alone)
    for found in run_ranks(world_size, job):
        assert_close(found, expected, 1e-5)


def test_a_mechanism_that_saves_memory_or_communication_leaves_gradients_alone(paths, monkeypatch):
    """huggingface/transformers#34645. Reduced after the last row alone means once for each unit (2
    layers, root).
    """
    responses = [6, 7, 1], [8, 1], [9, 10, 11, 12, 13, 1], [13, 1]

    def job():
        all_rows = rows(*responses, capacity=9)
        assert len(all_rows) == 4
        found = {"every row": gradients(load(paths["qwen2"]), all_rows)}
        num_reductions = 0

        def counted(*args, **options):
            nonlocal num_reductions
            num_reductions += 1
            return reduce_scatter(*args, **options)

        for name in (
            "reduce_scatter_tensor",
            "reduce_scatter_single",
        ):  # torch 2.13 has another name for it
            if reduce_scatter := getattr(dist, name, None):
                monkeypatch.setattr(dist, name, counted)
        found["last row"] = gradients(load(paths["qwen2"]), all_rows, sync_at=3)
        monkeypatch.undo()
        found["checkpointing"] = gradients(
            load(paths["qwen2"], activation_checkpointing=True), all_rows, sync_at=3
        )
        found["keeping"] = gradients(
            load(paths["qwen2"], reshard_after_forward=False), all_rows, sync_at=3
        )
        return found, num_reductions

    for found, num_reductions in run_ranks(2, job):
        assert num_reductions == 3
        for gradient in found.values():
            assert_close(gradient, found["every row"], 1e-5)


def test_checkpointing_computes_the_layers_again(paths):
    def job():
        calls = []
        policy = load(paths["qwen2"], activation_checkpointing=True)
        policy.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        gradients(policy, rows([6, 7, 1]))
        return len(calls)

    assert run_ranks(1, job) == [2]


def test_a_pass_without_gradients_leaves_no_whole_parameters_in_a_frozen_model(paths):
    """pytorch/pytorch#114299: parameters that a forward has gathered stay gathered until a backward
    frees them.
    """

    def job():
        frozen = load(paths["qwen2"], trainable=False, reshard_after_forward=False)
        with torch.no_grad():
            token_logprobs(frozen, rows([6, 7, 1])[0])
        assert all(isinstance(p, DTensor) and not p.requires_grad for p in frozen.parameters())

    run_ranks(2, job)


def test_a_refreshed_reference_is_the_policy(paths):
    """Also if both have just been used without a backward: then FSDP holds whole parameters in the
    shards' place.
    """

    def job():
        policy, reference = load(paths["qwen2"]), load(paths["qwen2"], trainable=False)
        [row] = rows([6, 7, 1])
        with torch.no_grad():
            for p in policy.parameters():
                p.to_local().mul_(1.1)
            before, _ = token_logprobs(reference, row)
            expected, _ = token_logprobs(policy, row)
            copy_weights(policy, reference)
            after, _ = token_logprobs(reference, row)
        assert torch.equal(after, expected) and not torch.allclose(before, expected, atol=1e-2)
        assert all(isinstance(p, DTensor) for p in policy.parameters())

    run_ranks(2, job)


# Compilation


def kernel_attention(name):
    """Attention that a compiler sees as one operation, as the kernel on a GPU is; it returns the
    queries.
    """

    @torch.library.custom_op(f"handful_test::{name}", mutates_args=())
    def attend(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, keys: Tensor, most: int, most_keys: int
    ) -> Tensor:
        return q.contiguous().clone()

    attend.register_fake(lambda q, *_: q.contiguous().clone())
    attend.register_autograd(lambda context, grad: (grad.clone(), *[None] * 6))

    def backend(q, k, v, scaling, window, spans):
        return attend(q, k, v, *spans)

    return backend


@pytest.mark.slow
@pytest.mark.timeout(600)  # g++ takes minutes where nothing is cached and other work goes on
def test_after_a_warm_up_with_rows_of_all_sizes_no_other_row_compiles_anything(paths, monkeypatch):
    """Nor a rank's empty row. Models of one shape share their layers' code."""
    monkeypatch.setattr(attention_file, "_segment_attention", kernel_attention("warm_up"))

    def job():
        from torch._dynamo.utils import counters

        # What earlier tests compiled in the parent: their sizes are not this run's.
        torch._dynamo.reset()
        logprobs_file._compiled.cache_clear()
        counters.clear()
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        config = ModelConfig(compile=True)
        policy = load_policy(paths["llama"], mesh, config)
        critic = load_critic(paths["llama"], mesh, config)
        reference = load_policy(paths["llama"], mesh, config, trainable=False)
        before = {name: p.full_tensor() for name, p in policy.named_parameters()}
        for model in (policy, critic, reference):
            use_packed_attention(model)
        sizes = rows_of_all_sizes(BatchConfig(tokens_per_row=16384), 60)
        warm_up([policy, None, critic, reference], sizes, contextlib.nullcontext)
        for model in (policy, critic, reference):
            assert all(p.grad is None for p in model.parameters())
        assert all(
            torch.equal(before[name], p.full_tensor()) for name, p in policy.named_parameters()
        )
        compiled = counters["stats"]["unique_graphs"]
        empty = pack([], 16384, num_rows=1, like=sequence(torch.tensor([3]), torch.tensor([4])))
        several = [1], [7] * 90, list(range(1, 40)), [300], [3, 4], [59] * 16, [8] * 7, [300] * 54
        for row in empty + [
            rows(*([3] * n for n in lengths), capacity=16384)[0] for lengths in several
        ]:
            token_logprobs(policy, row)[0].sum().backward()
            token_values(critic, row).sum().backward()
            with torch.no_grad():
                for model in (policy, reference):
                    token_logprobs(model, row)
                token_values(critic, row)
        return compiled, counters["stats"]["unique_graphs"]

    [(compiled, after)] = run_ranks(1, job, timeout_s=580)
    assert 3 <= compiled == after
    assert not ModelConfig().compile  # on a CPU it takes longer than what it saves
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ModelConfig().compile
