"""What is asked of vLLM: eight bits, an fp32 residual stream, models taken from Transformers."""

import contextlib
import os

import pytest
import torch
from engines import EOS, FP32, LIMIT, PROMPTS, Kept, differences, facts
from lab import lab
from tiny import save_tiny
from torch.distributed.device_mesh import init_device_mesh

import vllm_backend
from attention import use_packed_attention
from model import load_policy
from reshard import iter_full_params, sync_weights
from rollout import Engine, RolloutConfig
from vllm_backend import VllmBackend


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    longer = dict(max_position_embeddings=512)
    return {"llama": save_tiny(tmp_path_factory.mktemp("llama"), "llama", **longer)}


# Eight bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [dict(quantization="fp8_per_channel"), dict(kv_cache_dtype="fp8")]
)
def test_an_eight_bit_engine_takes_every_update(paths, setting):
    """vllm#28425: the second update crashed or served raw scales. Two updates, each against a new
    engine that loads the same weights from a file; and against the trainer within what 8 bits
    allow.
    """
    import tempfile

    from safetensors.torch import load_file, save_file

    config = RolloutConfig(max_response_tokens=LIMIT, **setting)
    sizes = dict(max_prompt_tokens=16, num_samples=8, stop_ids=[EOS])

    def job(kept):
        policy, engine = (
            kept.policies["llama"],
            Engine(VllmBackend, kept.paths["llama"], config, **sizes),
        )
        found = []
        for update in range(2):
            kept.move("llama", update)
            with engine.awake():
                sync_weights(policy, engine, **FP32)
                rollouts = engine.generate(PROMPTS, 1, temperature=0.0)
            with tempfile.TemporaryDirectory() as directory:
                save_tiny(directory, "llama", max_position_embeddings=512)
                tensors = {
                    name: x for bucket in iter_full_params(policy, **FP32) for name, x in bucket
                }
                assert tensors.keys() == load_file(f"{directory}/model.safetensors").keys()
                save_file(tensors, f"{directory}/model.safetensors", metadata={"format": "pt"})
                new = Engine(VllmBackend, directory, config, **sizes)
            new.state = "ready"
            expected = new.generate(PROMPTS, 1, temperature=0.0)
            found.append((facts(rollouts) == facts(expected), kept.gap(rollouts, "llama", 1.0)))
        return found

    with lab(1, lambda: Kept({"llama": paths["llama"]})) as on_ranks:
        [found] = on_ranks(job)
    assert all(same and 1e-4 < gap < 1.0 for same, gap in found), found


# bf16


class Bf16Backend(VllmBackend):
    """What a GPU runs, on a CPU."""

    with_fp32_residual = True

    def __init__(self, path, config, **options):
        super().__init__(path, config, **options | {"dtype": torch.bfloat16})

    def _build(self, path, seed, make_scheduler):
        self.fp32_residual = self.with_fp32_residual
        super()._build(path, seed, make_scheduler)


class PlainBf16Backend(Bf16Backend):
    with_fp32_residual = False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma3"])
def test_in_bf16_a_residual_stream_in_fp32_brings_the_engine_nearer_to_the_exact_policy(
    tmp_path, kind
):
    """Distance to the same weights computed in fp32, over 4,096 sampled tokens. In a process of its
    own each, since the engine's layers are replaced for the whole process.
    """
    extra = (
        dict(layer_types=["sliding_attention", "full_attention"] * 6) if kind == "gemma3" else {}
    )
    path = save_tiny(tmp_path, kind, num_hidden_layers=12, max_position_embeddings=512, **extra)
    config = RolloutConfig(max_response_tokens=64, ignore_eos=True)

    def distance(fp32_residual):
        def job():
            policy = load_policy(path, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
            use_packed_attention(policy)
            with torch.no_grad():
                for p in policy.parameters():
                    p.to_local().copy_(p.to_local().bfloat16())
            sizes = dict(max_prompt_tokens=16, num_samples=64, stop_ids=[EOS])
            make = Bf16Backend if fp32_residual else PlainBf16Backend
            engine = Engine(make, path, config, **sizes)
            engine.state = (
                "ready"  # with the file's weights: on CPU bf16 layers are packed and take no others
            )
            rollouts = engine.generate(PROMPTS, 16, seed=0)
            return differences(policy, rollouts).abs().mean().item()

        with lab(1, lambda: None) as on_ranks:
            return on_ranks(lambda _: job())[0]

    with_it, without = distance(True), distance(False)
    assert 1e-3 < with_it < 0.85 * without


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Olmo2", "Phi"])
def test_a_model_that_vllm_takes_from_transformers_leaves_the_trainers_alone(tmp_path, kind):
    """vLLM decorates the class itself; the trainer's model then lacked do_not_compile in its first
    forward.
    """
    import transformers

    sizes = dict(
        vocab_size=14,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    config = getattr(transformers, f"{kind}Config")(
        **sizes, pad_token_id=0, bos_token_id=None, eos_token_id=EOS
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def job():
        policy = load_policy(
            str(tmp_path), init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        )
        use_packed_attention(policy)
        sizes = dict(max_prompt_tokens=16, num_samples=4, stop_ids=[EOS])
        config = RolloutConfig(max_response_tokens=8)
        engine = Engine(VllmBackend, str(tmp_path), config, **sizes)
        with engine.awake():
            sync_weights(policy, engine, **FP32)
            rollouts = engine.generate(PROMPTS, 1, seed=0)
        return differences(policy, rollouts).abs().max().item()

    with lab(1, lambda: None) as on_ranks:
        assert on_ranks(lambda _: job())[0] < 1e-4


def test_on_a_gpu_the_engine_is_asked_for_it_unless_its_weights_have_8_bits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for step in ("_build", "_warm_up", "_clean_up", "sleep"):
        monkeypatch.setattr(VllmBackend, step, lambda *arguments: None)
    monkeypatch.setattr(vllm_backend, "_globals_restored", contextlib.nullcontext)
    sizes = dict(dtype=torch.bfloat16, max_model_len=8, num_samples=4, stop_ids=[EOS], seed=0)
    for setting, expected in (
        (dict(), True),
        (dict(kv_cache_dtype="fp8"), True),
        (dict(quantization="fp8"), False),
    ):
        backend = VllmBackend("", RolloutConfig(**setting), **sizes)
        assert backend.fp32_residual is expected
        assert backend._arguments()["additional_config"] == {"fp32_residual": expected}


def test_building_an_engine_takes_nothing_from_the_trainers_generator_and_threads(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    set_num_threads = torch.set_num_threads
    with vllm_backend._globals_restored():
        torch.manual_seed(0)
        torch.set_num_threads = None
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.set_num_threads is set_num_threads
    assert os.environ["LOCAL_WORLD_SIZE"] == "3"
