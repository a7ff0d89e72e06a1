"""What is asked of vLLM: eight bits, an fp32 residual stream, models taken from Transformers."""

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import EOS, FP32, LIMIT, PROMPTS, Kept, differences, facts
from lab import lab
from test_grpo import flags, run_command
from tiny import save_tiny
from torch.distributed.device_mesh import init_device_mesh

import vllm_backend
from attention import use_packed_attention
from model import load_policy
from reshard import iter_full_params, sync_weights, verify_sync
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


def small(directory, kind, **options):
    """A random dense model of 2 layers of that kind; every norm and bias away from 1 and 0."""
    import transformers

    sizes = dict(vocab_size=14, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    sizes |= dict(pad_token_id=0, bos_token_id=None, eos_token_id=EOS, initializer_range=0.1)
    if kind in ("Phi", "Olmo"):
        del sizes["head_dim"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p) if p.ndim == 1 else 0)
    model.save_pretrained(directory)
    return str(directory)


def gap_after_an_update(path):
    """Largest difference of log-probabilities of a new engine and the trainer's moved weights."""
    policy = load_policy(path, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    use_packed_attention(policy)
    for p in policy.parameters():
        p.to_local().data.mul_(1.05)
    sizes = dict(max_prompt_tokens=32, num_samples=4, stop_ids=[EOS])
    engine = Engine(VllmBackend, path, RolloutConfig(max_response_tokens=12), **sizes)
    with engine.awake():
        sync_weights(policy, engine, **FP32)
        verify_sync(policy, engine, **FP32)
        prompts = [*PROMPTS, list(range(3, 14)) * 2]
        rollouts = engine.generate(prompts, 2, seed=0)
    return differences(policy, rollouts).abs().max().item()


WINDOW = dict(sliding_window=4)
DENSE = {
    "Phi": {},
    "Phi3": {},
    "Olmo": {},
    "Olmo2": {},
    "Qwen3": {},
    "Mistral": WINDOW,
    "Gemma": {},
    "Gemma3Text": WINDOW | dict(layer_types=["sliding_attention", "full_attention"]),
    "Granite": {},
    "SmolLM3": {},
    "Starcoder2": WINDOW,
    "Glm4": {},
    "Ernie4_5": {},
    "SeedOss": {},
    "Exaone4": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DENSE)
def test_dense_models_of_any_kind_are_sampled_from_as_they_are_trained(tmp_path, kind):
    """trl#5269: names of the trainer's tensors that the engine did not know. Megatron-Bridge#2656,
    vllm#3385: a window that is off by one between two libraries. And vLLM decorates the class of a
    model that it takes from Transformers: the trainer's then lacked do_not_compile.
    """
    path = small(tmp_path, kind, **DENSE[kind])
    with lab(1, lambda: None) as on_ranks:
        assert on_ranks(lambda _: gap_after_an_update(path))[0] < 1e-4


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


# What vLLM does not take


@pytest.mark.parametrize("step", ["_build", "_warm_up"])
@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, NotImplementedError])
def test_what_vllm_raises_is_a_line_with_the_other_engines_name(monkeypatch, step, kind):
    """A new user's finding: 80 lines of traceback, and not that the plain engine would do."""

    def fail(*arguments):
        raise kind("no kernel\n  for heads of 16")

    for each in ("_build", "_warm_up"):
        monkeypatch.setattr(VllmBackend, each, fail if each == step else lambda *arguments: None)
    sizes = dict(dtype=torch.bfloat16, max_model_len=8, num_samples=4, stop_ids=[EOS], seed=0)
    why = rf"{kind.__name__}: no kernel for heads of 16, test_vllm_backend.py:\d+"
    told = rf"^--rollout.engine vllm: does not take the model \({why}\); .*--rollout.engine hf$"
    with pytest.raises(ValueError, match=told):
        VllmBackend("", RolloutConfig(), **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "num_ranks", "why"),
    [
        (dict(num_attention_heads=4, head_dim=16), 0, "head_dim=16"),
        (dict(hidden_size=96, num_attention_heads=3), 2, "heads (3) must be divisible by tensor"),
    ],
    ids=["heads of 16", "3 heads on 2 ranks"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="limits of vLLM on a CPU")
def test_a_model_that_vllm_does_not_take_is_refused_in_a_line(
    files, tmp_path, sizes, num_ranks, why
):
    path = save_tiny(tmp_path / "model", "llama", **sizes)
    more = ["--rollout.tensor-parallel-size", str(num_ranks)] if num_ranks else []
    _, code, output = run_command(*flags(path, files, tmp_path, *more), num_ranks=num_ranks)
    told = [line for line in output.splitlines() if "error: --rollout.engine vllm" in line]
    assert code != 0 and len(set(told)) == 1 and why in told[0] and "engine hf" in told[0], output
    assert num_ranks or "Traceback" not in output  # of torchrun, where there are several


def test_shared_memory_of_another_job_or_engine_stays(monkeypatch):
    """By vLLM it has one name on a host: a job that was just starting lost it, or was joined."""
    others = ["handful99998.1-tp:0-[2-3]", "handful99999.0-tp:0-[0-1]", "-tp:0-[0-1]"]
    names = [f"{name}-cpushm_0" for name in ["handful99998.0-tp:0-[0-1]", *others]]
    files = [Path("/dev/shm") / name for name in names]
    for file in files:
        file.touch()
    engine = SimpleNamespace(engine_core=SimpleNamespace())
    llm = SimpleNamespace(llm_engine=engine)
    backend = SimpleNamespace(memory_name="handful99998.0", llm=llm)
    try:
        VllmBackend._clean_up(backend)
        assert [file.exists() for file in files] == [False, True, True, True]
        monkeypatch.setattr(Path, "glob", lambda directory, pattern: files[:1])
        VllmBackend._clean_up(backend)  # another rank was faster
    finally:
        for file in files:
            file.unlink(missing_ok=True)


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


# What it is asked, on a stub


@pytest.fixture
def backend(monkeypatch):
    """backend(on_gpu, **settings): a VllmBackend around a stub that records its calls."""

    def make(on_gpu, **settings):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(vllm_backend, "_globals_restored", contextlib.nullcontext)
        for step in ("_build", "_warm_up", "_clean_up"):
            monkeypatch.setattr(VllmBackend, step, lambda *arguments: None)
        llm = SimpleNamespace(calls=[])
        llm.sleep = lambda level: llm.calls.append(("sleep", level))
        llm.wake_up = lambda tags: llm.calls.append(("wake_up", *tags))
        llm.reset_prefix_cache = lambda: False
        monkeypatch.setattr(VllmBackend, "llm", llm, raising=False)
        sizes = dict(max_model_len=20_000, num_samples=3000, stop_ids=[EOS], seed=0)
        config = RolloutConfig("vllm", **settings)
        return VllmBackend("", config, dtype=torch.bfloat16, **sizes)

    return make


def test_vllm_is_asked_for_what_the_flags_say(backend):
    asked = backend(True)._arguments()
    assert asked["hf_overrides"] == {"head_dtype": "float32"}
    assert asked["generation_config"] == "vllm"  # none of the model's own top-p
    assert asked["logprobs_mode"] == "processed_logprobs"
    assert asked["max_num_seqs"] == 1024 and asked["max_num_batched_tokens"] == 20_000
    assert asked["kv_cache_dtype"] == "auto" and asked["quantization"] is None
    assert "kv_cache_memory_bytes" not in asked and asked["enable_sleep_mode"] is True
    graphs = asked["compilation_config"]["cudagraph_capture_sizes"]
    assert graphs[:4] == [1, 2, 4, 8] and graphs[-1] == 1024
    eight = dict(kv_cache_dtype="fp8", quantization="fp8", kv_cache_gb=2.0, sleep_level=0)
    asked = backend(True, max_num_seqs=10, **eight)._arguments()
    assert asked["kv_cache_dtype"] == asked["quantization"] == "fp8"
    assert asked["kv_cache_memory_bytes"] == 2 << 30 and asked["enable_sleep_mode"] is False
    assert asked["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 10]
    asked = backend(False)._arguments()
    assert asked["kv_cache_memory_bytes"] == 1 << 28 and asked["enforce_eager"] is True
    assert "compilation_config" not in asked and asked["enable_chunked_prefill"] is False


@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_engine_sleeps_at_the_level_of_its_flag(backend, level):
    engine = backend(True, sleep_level=level)
    engine.wake_weights()
    engine.wake_cache()
    wakes = [("sleep", level), ("wake_up", "weights"), ("wake_up", "kv_cache")]
    assert engine.llm.calls == (wakes if level else [])
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        engine.forget_prefixes()


@pytest.mark.parametrize("part", ["weights", "kv_cache"])
def test_a_wake_up_without_room_ends_in_a_line_with_what_to_turn(backend, part):
    """vllm#34600, vllm#16663: memory of a wake-up that failed was not given back. Here the job
    ends: nothing is made of an engine that is half awake.
    """

    def wake_up(tags):
        if tags == [part]:
            raise torch.OutOfMemoryError("CUDA Error: out of memory\n at cumem_allocator.cpp:62")

    made = backend(True, sleep_level=2, memory_fraction=0.6)
    made.llm.wake_up = wake_up
    told = rf"^--rollout.memory-fraction 0.6: the engine's {part} did not wake \(CUDA Error: out of"
    with pytest.raises(RuntimeError, match=rf"{told} memory at .*; lower it, or give --offload$"):
        made.wake_weights()
        made.wake_cache()


def test_each_request_has_a_seed_of_its_own_where_vllm_takes_them_together(backend, monkeypatch):
    added = []
    monkeypatch.setattr(VllmBackend, "_sampling_params", lambda self, temperature: temperature)
    monkeypatch.setattr(VllmBackend, "_add", lambda self, *request: added.append(request))
    monkeypatch.setattr(VllmBackend, "_finish_all", lambda self: iter(()))
    for on_gpu in (True, False):
        list(backend(on_gpu).run([[3], [4]], [1, 0], 2, 0.7, seed=50))
    places = [(2, [4]), (3, [4]), (0, [3]), (1, [3])]
    of_a_gpu = [(i, prompt, 0.7, 50 + i) for i, prompt in places]
    assert added == of_a_gpu + [(i, prompt, 0.7, None) for i, prompt in places]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_response_ends_at_the_stop_ids_or_at_the_limit_alone(backend, monkeypatch, ignore_eos):
    stub = SimpleNamespace(SamplingParams=dict, RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", stub)
    engine = backend(False, ignore_eos=ignore_eos, max_response_tokens=9)
    asked = engine._sampling_params(0.5)
    assert (asked["temperature"], asked["max_tokens"], asked["logprobs"]) == (0.5, 9, 0)
    assert asked["ignore_eos"] is ignore_eos
    assert asked["stop_token_ids"] == ([] if ignore_eos else [EOS])


def test_parameters_that_got_no_tensor_are_named(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    config = SimpleNamespace(set_current_vllm_config=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    module = torch.nn.Linear(2, 1)
    module.load_weights = lambda weights: {name for name, _ in weights}
    monkeypatch.setattr(VllmBackend, "model", module)
    engine = backend(False)
    engine.llm.llm_engine = SimpleNamespace(vllm_config=None)
    assert engine.load(iter([("weight", torch.ones(1, 2))])) == {"bias"}
