"""Weights out of the shards: complete, exact, in bounded memory, under the checkpoint's names."""

import gc
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import KINDS, save_tiny
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard
from attention import use_packed_attention
from logprobs import token_logprobs
from model import ModelConfig, load_policy, load_shards, parameters_on_meta, shard
from offload import Offload
from packing import pack, sequence
from reshard import iter_full_params, sync_weights, verify_sync


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{kind: directory}; "uneven" has tensors of 5 rows: the last of 4 ranks has none."""
    made = {kind: save_tiny(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}
    return made | {
        "uneven": save_tiny(tmp_path_factory.mktemp("uneven"), "llama", intermediate_size=5)
    }


def load(path, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    policy = load_policy(path, mesh, ModelConfig(**settings))
    use_packed_attention(policy)
    return policy


def full(policy, dtype=torch.float32, bucket_bytes=1 << 29):
    buckets = iter_full_params(policy, dtype=dtype, bucket_bytes=bucket_bytes)
    return {name: p for bucket in buckets for name, p in bucket}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_tensor_of_the_checkpoint_comes_out_once_and_exact(paths, world_size):
    def job():
        for path in paths.values():
            expected = load_file(f"{path}/model.safetensors")
            policy = load(path)
            for bucket_bytes in (
                1,
                4 * 30_000,
                1 << 29,
            ):  # a tensor a bucket, some tensors a bucket, one bucket
                buckets = list(
                    iter_full_params(policy, dtype=torch.float32, bucket_bytes=bucket_bytes)
                )
                names = [name for bucket in buckets for name, _ in bucket]
                assert sorted(names) == sorted(expected)  # a tied head is no tensor of its own
                assert bucket_bytes > 1 or len(buckets) == len(names)
                assert all(
                    torch.equal(p, expected[name]) for bucket in buckets for name, p in bucket
                )

    run_ranks(world_size, job)


def test_the_cast_to_the_samplers_type_rounds_to_nearest_for_norms_and_matrices(paths):
    """OpenRLHF#1348: the receiver took fp32 bytes for bf16 ones."""

    def job():
        policy = load(paths["qwen2"])
        expected = load_file(f"{paths['qwen2']}/model.safetensors")
        for name, p in full(policy, torch.bfloat16).items():
            assert p.dtype == torch.bfloat16 and torch.equal(p, expected[name].bfloat16()), name

    run_ranks(2, job)


def test_wrappers_leave_no_trace_in_the_names(paths):
    """huggingface/trl#7104: with `_checkpoint_wrapped_module` in its name a tensor was skipped."""

    def job():
        wrapped = load(paths["qwen2"], activation_checkpointing=True)
        wrapped.model.layers[0].mlp = checkpoint_wrapper(wrapped.model.layers[0].mlp)
        assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_parameters())
        assert full(wrapped).keys() == load_file(f"{paths['qwen2']}/model.safetensors").keys()

    run_ranks(1, job)


@pytest.mark.slow
def test_compiled_layers_keep_their_names(paths):
    def job():
        compiled = load(paths["qwen2"], compile=True)
        compiled.model.layers[1].mlp = torch.compile(compiled.model.layers[1].mlp)
        assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
        assert full(compiled).keys() == load_file(f"{paths['qwen2']}/model.safetensors").keys()

    run_ranks(1, job)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_without_backward_before_the_sync_changes_nothing(paths, world_size):
    """FSDP keeps the root gathered for a backward that never comes; then the module holds no
    shards.
    """

    def job():
        policy = load(paths["qwen2"])
        before = full(policy)
        row = pack([sequence(torch.tensor([3, 4]), torch.tensor([5, 1]))], 8)[0]
        with torch.no_grad():
            token_logprobs(policy, row)
        after = full(policy, bucket_bytes=4 * 4 * 20_000)
        assert before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )

    run_ranks(world_size, job)


def test_a_rank_that_is_slow_between_buckets_holds_the_others_up_and_no_more(paths):
    """huggingface/trl#7103: ranks ran ahead into the next gather while rank 0 was busy with another
    communicator.
    """

    def job():
        policy = load(paths["llama"])
        order = []
        for bucket in iter_full_params(policy, dtype=torch.float32, bucket_bytes=1):
            order.append(bucket[0][0])
            if dist.get_rank() == 0:
                time.sleep(0.01)
            dist.all_reduce(
                torch.zeros(1)
            )  # between two gathers, as an engine of several ranks has
        return order

    orders = run_ranks(4, job)
    assert all(order == orders[0] for order in orders) and len(orders[0]) > 20


def live_bytes():
    """Bytes in all tensors that were made after gc.freeze()."""
    new = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in new}.values())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("vocab_size", [14, 3000])
def test_the_peak_of_extra_memory_is_the_bucket_and_the_largest_tensor(
    tmp_path, monkeypatch, world_size, vocab_size
):
    """Looked at when most is alive: after a cut into full tensors, the consumer still holding the
    bucket before.
    """
    path = save_tiny(tmp_path, "llama", vocab_size=vocab_size, num_hidden_layers=8)
    bucket_bytes = 1 << 17

    def job():
        policy = load(path)
        largest = 2 * max(p.numel() for p in policy.parameters())
        peak, finish = 0, reshard._finish_gather
        gc.freeze()

        def watched(*gather):
            nonlocal peak
            result = finish(*gather)
            for _ in range(
                50
            ):  # gloo's thread lets go of a finished gather's buffer a moment later
                if live_bytes() > bucket_bytes + largest:
                    time.sleep(0.01)
            peak = max(peak, live_bytes())
            return result

        monkeypatch.setattr(reshard, "_finish_gather", watched)
        total = 0
        for bucket in iter_full_params(policy, dtype=torch.bfloat16, bucket_bytes=bucket_bytes):
            for _, tensor in bucket:
                total += tensor.nbytes
        return peak, largest, total

    for peak, largest, total in run_ranks(world_size, job):
        assert bucket_bytes / 4 < peak <= bucket_bytes + largest < total, (peak, largest, total)


def test_what_a_rank_sends_is_its_shard_in_the_samplers_type(paths, monkeypatch):
    """(W - 1) / W of a bf16 model arrive: each rank sends 2 bytes per parameter of its shard,
    padding apart.
    """

    def job():
        policy = load(paths["qwen2"])
        sent, gather = [], reshard.all_gather

        def counted(output, mine, **options):
            sent.append(mine.nbytes)
            return gather(output, mine, **options)

        monkeypatch.setattr(reshard, "all_gather", counted)
        full(policy, torch.bfloat16)
        return sum(sent), sum(p.to_local().numel() for p in policy.parameters())

    for sent, held in run_ranks(2, job):
        assert sent == 2 * held


class Recorder:
    """An engine that keeps what it is given, in two parameters fewer if told to miss some."""

    def __init__(self, policy, misses=()):
        self.model = torch.nn.ParameterDict()
        self.misses = misses
        for name, p in full(policy).items():
            self.model[name.replace(".", "/")] = torch.nn.Parameter(
                torch.zeros_like(p), requires_grad=False
            )

    def load_weights(self, buckets):
        num_bytes = 0
        for bucket in buckets:
            for name, tensor in bucket:
                num_bytes += tensor.nbytes
                if name not in self.misses:
                    self.model[name.replace(".", "/")].copy_(tensor)
        return num_bytes


def test_verify_sync_passes_after_a_sync_and_names_what_differs_without_one(paths):
    """huggingface/trl#7104: parts of the engine kept the initial weights, and nothing said so."""

    def job():
        policy = load(paths["qwen2"])
        options = dict(dtype=torch.float32, bucket_bytes=1 << 20)
        engine = Recorder(policy)
        num_parameters = sum(p.numel() for p in policy.parameters())
        assert sync_weights(policy, engine, **options) == 4 * num_parameters
        verify_sync(policy, engine, **options)
        with torch.no_grad():
            policy.model.layers[1].mlp.up_proj.weight.to_local()[0, 0] += (
                1e-6  # one weight of one shard
            )
        with pytest.raises(RuntimeError, match=r"1 of 26 .*layers/1/mlp/up_proj"):
            verify_sync(policy, engine, **options)
        verify_sync(policy, engine, **options)  # it has loaded them
        deaf = Recorder(policy, misses=("model.norm.weight",))
        sync_weights(policy, deaf, **options)
        with pytest.raises(RuntimeError, match=r"1 of 26 .*model/norm/weight"):
            verify_sync(policy, deaf, **options)

    run_ranks(2, job)


def test_verify_sync_sees_weights_that_changed_places(paths):
    """Their sum is the same."""

    def job():
        policy = load(paths["qwen2"])
        engine = Recorder(policy)
        sync_weights(policy, engine, dtype=torch.float32)
        held = dict(engine.model.named_parameters())
        name = next(name for name in held if "up_proj" in name)
        held[name].data.copy_(held[name].data.flip(0))
        with pytest.raises(RuntimeError, match=f"1 of 26 .*{name}"):
            verify_sync(policy, engine, dtype=torch.float32)

    run_ranks(1, job)


def test_the_next_bucket_is_on_its_way_while_the_consumer_loads_this_one(paths, monkeypatch):
    def job():
        events = []
        start = reshard._start_gather
        monkeypatch.setattr(
            reshard, "_start_gather", lambda *x: (events.append("start"), start(*x))[1]
        )
        for _ in iter_full_params(load(paths["qwen2"]), dtype=torch.float32, bucket_bytes=1 << 14):
            events.append("load")
        num_buckets = events.count("load")
        assert num_buckets > 3
        assert events == ["start", *["start", "load"] * (num_buckets - 1), "load"]

    run_ranks(2, job)


def test_syncing_a_hundred_times_leaves_the_trainers_weights_alone(paths):
    """huggingface/trl#6688: merging into the weights and out again moved them by 67 % after 1000
    times.
    """

    def job():
        policy = load(paths["qwen2"])
        before = [p.to_local().clone() for p in policy.parameters()]
        engine = Recorder(policy)
        for _ in range(100):
            sync_weights(policy, engine, dtype=torch.bfloat16)
        assert all(
            torch.equal(p.to_local(), old)
            for p, old in zip(policy.parameters(), before, strict=True)
        )

    run_ranks(2, job)


# Other people's models and meshes


class Blocks(torch.nn.Module):
    """An embedding, two blocks and a norm: 7 rows divide no mesh evenly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wpe = torch.nn.Embedding(7, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 7) for _ in range(2))
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, ids):
        return [block(self.norm(self.wpe(ids))) for block in self.blocks]


def shard_as(layout: str, model: Blocks) -> torch.nn.Module:
    world = dist.get_world_size()
    if layout == "default":
        return fully_shard(model)
    if layout == "dp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    if layout == "no name":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if layout == "replicate x shard":
        names = ("rep", "dp")
        return fully_shard(
            model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        )
    if layout == "blocks alone":
        for block in model.blocks:
            fully_shard(block)
        return model
    if layout == "all but one":
        return fully_shard(model, ignored_params={model.wpe.weight})
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    assert layout == "plain"
    return model


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_any_mesh_of_fully_shard_and_parts_that_are_whole_come_out_right(bucket_bytes):
    """With another name than "shard" an AttributeError; with blocks alone, or
    some parameters, left whole, this rank's shards under the names of full tensors.
    """
    layouts = "default", "dp", "no name", "replicate x shard", "blocks alone", "all but one"

    def job():
        expected = dict(Blocks().named_parameters())
        for layout in (*layouts, "ddp", "plain"):
            found = full(shard_as(layout, Blocks()), bucket_bytes=bucket_bytes)
            assert found.keys() == expected.keys(), layout
            for name, p in expected.items():
                assert torch.equal(found[name], p), (layout, name)

    run_ranks(4, job)


def test_what_is_not_split_by_rows_is_refused_by_name():
    """With Shard(1) right shapes, shuffled rows. And two axes that both split."""

    def job():
        columns = fully_shard(Blocks(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        with pytest.raises(ValueError, match=r"wpe.weight: is laid out as .*must be split by rows"):
            full(columns)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        twice = Blocks()
        whole = twice.norm.weight.detach()
        twice.norm.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))
        with pytest.raises(ValueError, match=r"norm.weight: is laid out as"):
            full(twice)

    run_ranks(2, job)


def test_adapters_and_parametrizations_are_refused_as_they_are_no_weights():
    """Names kept `base_model.model.`, and the engine knew none of them."""

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = torch.nn.Linear(3, 3)
            self.lora_A = torch.nn.Linear(3, 1)

    peft = torch.nn.ModuleDict({"q_proj": Adapted()})
    with pytest.raises(ValueError, match=r"q_proj.base_layer.weight: .*merge_and_unload"):
        full(peft)
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="parametrizations.weight.*: is a part of a weight"):
        full(normed)


def test_weights_that_wait_in_host_memory_are_not_sent():
    model = Blocks()
    waiting = Offload(True, model)
    with pytest.raises(ValueError, match="wpe.weight: has no memory now; use `with offload.pres"):
        full(model)
    with waiting.present(model):
        assert torch.equal(full(model)["wpe.weight"], Blocks().wpe.weight)


def test_what_is_sent_is_of_the_engines_type_unless_told_otherwise(paths):
    """Bf16 into an engine of fp32, log-probabilities off by 0.08."""

    def job():
        policy = load(paths["qwen2"])
        engine = Recorder(policy)
        engine.dtype = torch.float32
        num_parameters = sum(p.numel() for p in policy.parameters())
        assert sync_weights(policy, engine) == 4 * num_parameters
        assert sync_weights(policy, engine, dtype=torch.bfloat16) == 2 * num_parameters

    run_ranks(1, job)


def test_the_root_that_a_forward_left_whole_is_sent_like_the_rest(paths):
    """After a pass of the decoder without gradients; logprobs.py reshards by itself. What is left
    whole is in the compute dtype: as master weights these would be rounded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    def job():
        with parameters_on_meta():
            config = AutoConfig.from_pretrained(paths["qwen2"])
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        settings = ModelConfig(reshard_after_forward=False)
        policy = shard(plain, mesh, settings, torch.bfloat16)
        load_shards(policy, paths["qwen2"])
        use_packed_attention(policy)
        before = full(policy)
        row = pack([sequence(torch.tensor([3, 4]), torch.tensor([5, 1]))], 8)[0]
        spans = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), row.cu_seqlens)
        lengths = dict.fromkeys(("max_length_q", "max_length_k"), row.max_seqlen)
        with torch.no_grad():
            policy(row.tokens[None], position_ids=row.position_ids[None], **spans, **lengths)
        assert any(not isinstance(p, DTensor) for p in policy.parameters())
        after = full(policy)
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_ranks(2, job)


def test_buckets_are_filled_up_to_their_limit():
    six = [(str(i), torch.zeros(5)) for i in range(6)]
    buckets = list(reshard._buckets(six, 20, 2))
    assert [[name for name, _ in bucket] for bucket in buckets] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]


# What --verify-sync proves


class Engine:
    """An engine whose loader may fuse q, k and v, and may do it wrongly, each time in the same way.

    Its own order of rows differs from the trainer's, as kernels want it.
    """

    dtype = torch.float32

    def __init__(self, parts="qkv"):
        self.model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict({"qkv": Rows(6)})})
        self.model["attn"]["norm"] = Rows(2)
        self.model.packed_modules_mapping = {"qkv": ["q", "k", "v"]}
        self.model["attn"]["scale"] = Bytes()
        self.parts = parts

    def load_weights(self, buckets):
        given = dict(pair for bucket in buckets for pair in bucket)
        fused = torch.cat([given[f"attn.{part}.weight"] for part in self.parts])
        self.model["attn"]["qkv"].weight.copy_(fused.flip(0))
        self.model["attn"]["norm"].weight.copy_(given["attn.norm.weight"])
        return 1


class Rows(torch.nn.Module):
    def __init__(self, num_rows):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(num_rows, 2), requires_grad=False)


class Bytes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)


def trainer():
    torch.manual_seed(0)
    attention = torch.nn.ModuleDict({name: Rows(2) for name in ("q", "k", "v", "norm")})
    return torch.nn.ModuleDict({"attn": attention})


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 1.2,
        lambda x: x.flip(0),
        torch.ones_like,
        lambda x: x.bfloat16().float(),
    ],
    ids=["scaled", "reversed", "ones", "rounded"],
)
def test_verify_sync_sees_what_is_sent_wrongly_each_time(monkeypatch, change):
    """Both loads were wrong in the same way, and it passed."""
    model, engine = trainer(), Engine()
    verify = [sync_weights(model, engine), verify_sync(model, engine)]
    assert verify == [1, None]
    right = reshard.iter_full_params

    def wrong(model, **options):
        for bucket in right(model, **options):
            yield [(name, change(x) if "norm" in name else x) for name, x in bucket]

    monkeypatch.setattr(reshard, "iter_full_params", wrong)
    sync_weights(model, engine)
    with pytest.raises(RuntimeError, match="attn.norm.weight is sent with other numbers"):
        verify_sync(model, engine)

    def lossy(model, **options):
        for bucket in right(model, **options):
            yield [(name, x) for name, x in bucket if "norm" not in name]

    monkeypatch.setattr(reshard, "iter_full_params", lossy)
    engine.load_weights = lambda buckets: list(buckets)
    with pytest.raises(RuntimeError, match="1 tensors of the trainer were not sent: .'attn.norm"):
        verify_sync(model, engine)


def test_verify_sync_sees_a_loader_that_fuses_the_wrong_tensors_each_time():
    model, engine = trainer(), Engine("qkk")
    sync_weights(model, engine)
    with pytest.raises(RuntimeError, match="1 of 3 engine parameters .*attn.qkv.weight"):
        verify_sync(model, engine)


def test_a_slice_of_a_vocabulary_that_is_filled_up_is_no_difference():
    """vLLM fills 14 rows up to 64: of two tensor-parallel ranks one has all, the other none."""
    model, engine = trainer(), Engine()
    engine.model["attn"]["norm"] = Rows(64)
    load = engine.load_weights

    def load_slice(buckets):
        kept = engine.model["attn"]["norm"]
        filled = kept.weight
        kept.weight = Rows(2).weight
        num_bytes = load(buckets)
        kept.weight = filled
        filled.fill_(0)
        return num_bytes

    engine.load_weights = load_slice
    engine.config = SimpleNamespace(tensor_parallel_size=2)
    sync_weights(model, engine)
    verify_sync(model, engine)
    engine.config.tensor_parallel_size = 1  # a whole vocabulary cannot be all zeros
    with pytest.raises(RuntimeError, match="1 of 3 engine parameters .*attn.norm.weight"):
        verify_sync(model, engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_sends_what_it_has_in_the_engines_type_too(paths, dtype):
    """Where nothing is gathered, and of parts that are not sharded."""

    def job():
        policy = load(paths["qwen2"])
        engine = Recorder(policy)
        engine.dtype = dtype
        num_parameters = sum(p.numel() for p in policy.parameters())
        assert sync_weights(policy, engine) == dtype.itemsize * num_parameters

    run_ranks(1, job)
    assert {x.dtype for x in full(Blocks(), dtype).values()} == {dtype}
