"""A Hugging Face directory: what is found, what is refused, and what an export writes."""

import json
import re
import shutil

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from ranks import run_ranks
from rows import make_model
from safetensors.torch import load_file
from tiny import save_tiny

import hub
from hub import (
    copy_model_files,
    export,
    find_model,
    find_reward_model,
    load_tokenizer,
    memory_plan,
    num_positions,
    save_safetensors,
    stop_token_ids,
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {"qwen2": save_tiny(tmp_path_factory.mktemp("models"), "qwen2")}


# Found


def test_what_is_no_model_is_refused_by_name(tmp_path, paths, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_, **__):
        raise LocalEntryNotFoundError("no connection\nand no cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ValueError, match=r"--model some/name: no such .* Hub \(no connection and no cache\)"
    ):
        find_model("some/name", 8)
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"--model .*/nowhere: no such directory, and not on the Hub"
    ):
        find_model(str(tmp_path / "nowhere"), 8)
    with pytest.raises(
        ValueError, match=r"--model .*: has no config.json; give a Hugging Face model directory"
    ):
        find_model(str(tmp_path), 8)
    assert find_model(paths["qwen2"], 128) == paths["qwen2"]
    with pytest.raises(
        ValueError,
        match="has 128 positions, --data.max-prompt-tokens .* want 129; lower one of them",
    ):
        find_model(paths["qwen2"], 129)


def test_the_memory_plan_counts_four_bytes_a_weight_four_times(paths):
    """fp32 weights, gradients and two moments: 16 bytes a parameter, over the ranks."""
    num = sum(x.numel() for x in load_file(f"{paths['qwen2']}/model.safetensors").values())
    plan = memory_plan(paths["qwen2"], "float32", frozen_copies=0)
    assert plan.startswith(
        f"{num / 1e6:.1f} M parameters on 1 ranks: weights {4 * num / 2**30:.2f}, gradients"
    )


def test_all_ids_that_end_a_response_are_found(tmp_path):
    """trl#5303: several ids in the generation config, others in the model's and the tokenizer's."""
    assert stop_token_ids(str(tmp_path), None) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    assert stop_token_ids(str(tmp_path), 2, None, 9) == [2, 3, 7, 9]
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_token_ids(str(tmp_path)) == [7]


# Written


def buckets_of(model, num_buckets=3):
    named = [(name, p.detach()) for name, p in model.named_parameters()]
    cut = -(-len(named) // num_buckets)
    return [named[i : i + cut] for i in range(0, len(named), cut)]


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 8_000])
def test_an_export_loads_in_transformers_and_gives_the_same_logits(
    tmp_path, architecture, max_shard_bytes
):
    """SkyRL#124, verl#1288, transformers#25198: tied weights once, dtype as stated, no prefix in a
    name.
    """
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = make_model(architecture)
    model.set_attn_implementation("sdpa")
    for p in model.parameters():
        p.data = p.data.bfloat16().float()  # master weights that bf16 holds exactly
    model.config.save_pretrained(tmp_path / "original")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00007-of-00009.safetensors").write_bytes(b"of an earlier export")
    buckets = [[(name, x.bfloat16()) for name, x in bucket] for bucket in buckets_of(model)]
    save_safetensors(buckets, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    copy_model_files(tmp_path / "original", tmp_path / "out", torch.bfloat16)

    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    sizes = [(tmp_path / "out" / name).stat().st_size for name in files]
    if max_shard_bytes == 8_000:
        assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        assert max(sizes) < 8_000 + 2_000  # and a header
        assert (
            len(files) <= 2 * sum(sizes) / 8_000 + 1
        )  # two that follow each other would not fit into one
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(2 * p.numel() for p in model.parameters())
        assert set(index["weight_map"].values()) == set(files)
    else:
        assert files == ["model.safetensors"]
    tensors = {}
    for name in files:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in list(file.keys())}
    assert tensors.keys() == dict(model.named_parameters()).keys()
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    )  # as config.json says
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.tensor([[5, 6, 7]])
    assert again(tokens).logits.equal(model(tokens).logits)


def test_tensors_that_are_views_of_one_buffer_are_written_one_by_one(tmp_path):
    from safetensors.torch import load_file

    buffer = torch.arange(24.0)
    pieces = {
        "a": buffer[:6].view(2, 3),
        "b": buffer[6:18],
        "c": buffer[18:].view(3, 2).t(),
        "d": buffer[23],
    }
    save_safetensors([list(pieces.items())], tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == pieces.keys() and all(x.equal(pieces[name]) for name, x in found.items())
    assert (tmp_path / "model.safetensors").stat().st_size < 25 * 4 + 400


@pytest.mark.parametrize("mode", [0o755, 0o750])
def test_who_sees_the_directory_reads_the_model(tmp_path, mode):
    """A new user's finding: the file of tensors was its owner's alone."""
    tmp_path.chmod(mode)
    buckets = [[(f"x{i}", torch.zeros(10))] for i in range(3)]
    save_safetensors(buckets, tmp_path, max_shard_bytes=40)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 3 and {file.stat().st_mode & 0o777 for file in files} == {mode & 0o666}


def test_all_ranks_take_part_in_an_export_and_the_first_writes(tmp_path):
    from safetensors.torch import load_file

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def on_a_rank():
        def gathered():
            for i in range(3):
                x = torch.full((4,), float(dist.get_rank() + i))
                dist.all_reduce(x)
                yield [(f"x{i}", x)]

        directory = tmp_path / f"rank{dist.get_rank()}"
        export(gathered(), tmp_path / "model", directory, torch.float32)
        return directory.exists()

    assert run_ranks(2, on_a_rank) == [True, False]
    found = load_file(tmp_path / "rank0" / "model.safetensors")
    assert {name: x[0].item() for name, x in found.items()} == {"x0": 1.0, "x1": 3.0, "x2": 5.0}
    assert (tmp_path / "rank0" / "config.json").exists()


def test_the_other_files_of_a_model_are_copied_and_its_config_states_the_new_dtype(tmp_path):
    """SkyRL#124: a directory without tokenizer or generation config."""
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    (model / "config.json").write_text('{"torch_dtype": "float32", "hidden_size": 8}')
    for name in (
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "merges.txt",
    ):
        (model / name).write_text(name)
    (model / "model.safetensors.index.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    copy_model_files(model, out, torch.bfloat16)
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "for tools"
    assert json.loads((out / "config.json").read_text()) == {"hidden_size": 8, "dtype": "bfloat16"}
    copied = {
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.model",
    }
    copied |= {"merges.txt", "additional_chat_templates"}
    assert {p.name for p in out.iterdir()} == copied


# Positions, and what is no model (sglang#26187, Soup#793)


def configured(source, directory, remove=(), **changes):
    """A copy of the model's directory with other settings, written as they are."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text()) | changes
    config = {name: x for name, x in config.items() if name not in remove}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "spelling, rope, longest",
    [
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0} | YARN, 512),
        ("rope_scaling", {"type": "yarn"} | YARN, 512),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, 256),
        ("rope_scaling", {"rope_type": "default"}, 128),
        (
            "rope_parameters",
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 16,
                "long_factor": [4.0] * 16,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            },
            64,
        ),
    ],
    ids=["yarn, new spelling", "yarn, old", "linear", "default", "longrope"],
)
def test_positions_follow_from_the_rotary_scaling_in_each_spelling(
    tmp_path, paths, spelling, rope, longest
):
    """Yarn was refused in the newer spelling, and any length passed with "default"."""
    others = {"rope_scaling", "rope_parameters"} - {spelling}
    path = configured(paths["qwen2"], tmp_path / "model", others, **{spelling: rope})
    assert find_model(path, longest) == path
    with pytest.raises(ValueError, match=rf"--model .*: has {longest} positions, .* want"):
        find_model(path, longest + 1)


def test_dynamic_rotary_scaling_is_refused(tmp_path, paths):
    rope = {"rope_type": "dynamic", "factor": 4.0}
    path = configured(paths["qwen2"], tmp_path / "m", ("rope_parameters",), rope_scaling=rope)
    with pytest.raises(ValueError, match="--critic.path .*: has dynamic rotary scaling: its"):
        find_model(path, 8, "--critic.path")


def test_positions_are_read_where_a_model_keeps_them(tmp_path):
    """GPT-2's n_positions; a text part inside a model of several."""
    from transformers import Gemma3Config, GPT2Config

    assert num_positions(GPT2Config(n_positions=77)) == 77
    text = {"max_position_embeddings": 99, "num_hidden_layers": 1}
    assert num_positions(Gemma3Config(text_config=text).get_text_config()) == 99


QWEN = '{"model_type": "qwen2", '


@pytest.mark.parametrize(
    "content",
    [
        "{not json",
        '{"model_type": "nothing"}',
        "[]",
        "{}",
        "[" * 100_000,
        QWEN + '"num_hidden_layers": "2"}',
        QWEN + '"layer_types": ["x"]}',
        QWEN + '"rope_parameters": 3}',
        '{"model_type": "llama", "hidden_size": "64"}',
    ],
    ids=lambda text: text[:50],
)
def test_a_config_that_is_of_no_model_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="--model .*: config.json is of no model for") as caught:
        find_model(str(tmp_path), 8)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["t5", "vit", "qwen2_vl"])
def test_a_model_that_is_no_decoder_is_refused_by_its_kind(tmp_path, kind):
    """A new user's finding: the names of 100 classes, in a traceback, after the plan."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    refusal = f"^--model {tmp_path}: is of the type {kind}, which is no decoder of text alone; give"
    with pytest.raises(ValueError, match=refusal):
        find_model(str(tmp_path), 8)


TORN = {
    "cut in its header": lambda data: data[:1000],
    "cut in its tensors": lambda data: data[:-1000],
    "another format": lambda data: b"PK\x03\x04" + data,
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", TORN)
def test_a_damaged_file_of_tensors_is_named_before_a_plan_is_made(tmp_path, paths, damage):
    """A new user's finding: a SafetensorError in a traceback, without a flag or a file."""
    directory = tmp_path / "model"
    shutil.copytree(paths["qwen2"], directory)
    file = directory / "model.safetensors"
    file.write_bytes(TORN[damage](file.read_bytes()))
    unread = r"model.safetensors cannot be read \(.*\); copy it again$"
    with pytest.raises(ValueError, match=f"^--model {directory}: {unread}"):
        find_model(str(directory), 8)
    with pytest.raises(ValueError, match=f"^--reward-model {directory}: {unread}"):
        find_reward_model(str(directory), 8, paths["qwen2"])


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}', "\xff"])
def test_a_damaged_index_of_tensors_is_named(tmp_path, paths, text):
    directory = tmp_path / "model"
    shutil.copytree(paths["qwen2"], directory)
    (directory / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    unread = "model.safetensors.index.json .*; copy it again$"
    with pytest.raises(ValueError, match=f"^--model {directory}: {unread}"):
        find_model(str(directory), 8)


def test_a_damaged_generation_config_is_named(tmp_path):
    for text in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"^{tmp_path}: generation_config.json has no list of"):
            stop_token_ids(str(tmp_path))


def test_files_that_the_index_names_and_others_beside_it(tmp_path, paths):
    """mlx-vlm#1464: an adapter was counted in the memory plan; a missing shard is named."""
    shutil.copytree(paths["qwen2"], tmp_path / "model")
    plan = memory_plan(paths["qwen2"], "float32", frozen_copies=0)
    shutil.copy(tmp_path / "model/model.safetensors", tmp_path / "model/adapter_model.safetensors")
    assert memory_plan(str(tmp_path / "model"), "float32", frozen_copies=0) == plan
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002.*, which .* names, is missing"):
        find_model(str(tmp_path / "model"), 8)
    (tmp_path / "model/model.safetensors.index.json").unlink()
    (tmp_path / "model/model.safetensors").unlink()
    with pytest.raises(ValueError, match="--model .* has no model.safetensors and no index"):
        find_model(str(tmp_path / "model"), 8)


def headers():
    """Bytes that are no safetensors file: nothing, zeros, a pointer of Git LFS, half a header."""
    yield from (b"", bytes(2000), b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 99)
    yield (200).to_bytes(8, "little") + b'{"x": {"dtype": "F32", "shape": [1]'


BROKEN = [("model.safetensors", content) for content in headers()]
BROKEN += [
    ("model.safetensors.index.json", content)
    for content in (b"{", b"{}", b"[]", b"\xff", b'{"weight_map": []}', b'{"weight_map": {"a": 3}}')
]


@pytest.mark.parametrize(("name", "content"), BROKEN)
def test_a_file_of_tensors_or_an_index_that_is_broken_is_refused_by_model_and_file(
    tmp_path, paths, name, content
):
    """SafetensorError, KeyError 'weight_map': tracebacks without a file's name."""
    shutil.copytree(paths["qwen2"], tmp_path / "m")
    (tmp_path / "m" / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=f"^--critic.path .*/m: {name} .*; copy it again$"
    ) as refusal:
        find_model(str(tmp_path / "m"), 8, "--critic.path")
    assert "\n" not in str(refusal.value)


def test_tensors_that_end_too_early_are_refused(tmp_path, paths):
    shutil.copytree(paths["qwen2"], tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="--model .*: model.safetensors cannot be read .*; copy"):
        find_model(str(tmp_path / "m"), 8)


@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 100_000, '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}']
)
def test_stop_ids_that_are_none_are_refused_by_their_file(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match="^/.*: generation_config.json has no list of token ids"):
        stop_token_ids(str(tmp_path))


@pytest.mark.parametrize("factor", ["x", None, [2]])
def test_a_rotary_scaling_without_a_number_is_refused(factor):
    from transformers import Qwen2Config

    config = Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    config.rope_parameters |= {"rope_type": "linear", "factor": factor}
    with pytest.raises(ValueError, match="--model m: has a rotary scaling without a factor"):
        num_positions(config, "--model m")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("model", "type"), "Nonsense"),
        (("decoder",), {"type": "Nonsense"}),
        (("normalizer",), {"type": "Nonsense"}),
        (("version",), "9.0"),
        (("pre_tokenizer", "pattern"), {"Regex": "("}),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_tokenizer_of_a_type_that_is_not_known_is_refused_in_one_line(
    tmp_path, paths, place, value
):
    """The tokenizers library raises a bare Exception."""
    shutil.copytree(paths["qwen2"], tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    whole = json.loads(file.read_text())
    inner = whole
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    file.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="^--model a/b: its tokenizer does not load .*; save the"):
        load_tokenizer(str(tmp_path / "m"), "--model a/b")


def test_what_is_a_fault_of_our_own_is_no_broken_file():
    from hub import _explained

    for kind in (AssertionError, KeyboardInterrupt, NotImplementedError):
        with pytest.raises(kind), _explained("--model a/b: is broken"):
            raise kind


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma3"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "\xff"),
        ("tokenizer_config.json", "nonsense"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_a_tokenizer_that_is_missing_or_of_another_kind_is_refused_by_its_model(
    tmp_path, kind, name, text
):
    """A user's KeyError 'added_tokens'; without one Transformers 5 makes one of no words."""
    save_tiny(tmp_path, kind)
    if text is None:
        for each in tmp_path.glob("tokenizer*"):
            each.unlink()
    else:
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="^--model a/b: .*; save the model's tokenizer") as refusal:
        load_tokenizer(str(tmp_path), "--model a/b")
    assert "\n" not in str(refusal.value)


def test_a_good_tokenizer_loads(paths):
    assert load_tokenizer(paths["qwen2"], "--model a/b")("1+2=").input_ids == [3, 12, 4, 13]


def test_the_memory_plan_is_of_a_rank_and_adam_has_two_moments(tmp_path):
    """2^30 parameters, in a file without a body that takes room: 4 GiB of fp32 over the ranks."""
    shape = {"dtype": "I8", "shape": [1 << 30], "data_offsets": [0, 1 << 30]}
    header = json.dumps({"x": shape}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 30))
    for world_size, sizes in ((1, [4, 4, 8]), (2, [2, 2, 4])):
        [plan, *_] = run_ranks(world_size, memory_plan, str(tmp_path), "float32", 1)
        found = re.findall(r"(?:weights|gradients|optimizer) ([\d.]+)", plan)
        assert [float(x) for x in found] == sizes


def test_the_memory_plan_of_adapters_is_the_frozen_weights_and_what_is_trained(monkeypatch):
    """A layer [2^15, 2^15], a norm and a head; adapters have 2^12 (2^15 + 2^15) numbers."""
    shapes = {
        "model.layers.0.q.weight": [1 << 15, 1 << 15],
        "model.layers.0.norm.weight": [1 << 15],
    }
    shapes["lm_head.weight"] = [1 << 15, 1 << 15]
    monkeypatch.setattr(hub, "_shapes", lambda path, label: list(shapes.items()))
    plan = memory_plan("x", "float32", frozen_copies=1, rank=1 << 12)
    assert plan.endswith(
        "adapters 1.00, gradients 1.00, optimizer 2.00, frozen models 8.00 GiB a rank"
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_a_download_that_fails_on_one_rank_stops_all_with_its_message(failing):
    """The first rank of the host downloads, the other one looks into the cache."""

    def job():
        problem = "the disk is full" if dist.get_rank() == failing else None
        hub._snapshot = lambda name, flag: ("somewhere", problem)
        with pytest.raises(ValueError, match="the disk is full"):
            hub._fetch("somebody/model", "--model")

    run_ranks(2, job)
