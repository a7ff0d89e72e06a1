"""Checkpoints: what is loaded is what was saved, at any number of ranks, or the one before; exports
for others.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import sys
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from ranks import run_ranks
from rows import make_model, random_sequences
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkpoint import GeneratorState, TrainState, load, save
from data import Prompt, PromptStream
from hub import copy_model_files, export, save_safetensors
from logprobs import token_logprobs
from packing import pack
from run import RunConfig, command_line, from_json


def full(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


class Run:
    """A small sharded model in training, with all that decides its next step."""

    def __init__(self, seed=0, architecture="llama", frozen=()):
        self.model = make_model(architecture, seed=seed)
        for name, p in self.model.named_parameters():
            p.requires_grad_(not any(part in name for part in frozen))
        if dist.is_initialized():
            for part in [*self.model.model.layers, self.model]:
                fully_shard(part)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=1e-2
        )
        self.stream = PromptStream([[Prompt([i], str(i), "", "x") for i in range(7)]], 4, seed=3)
        self.state = {"policy": TrainState(self.model, self.optimizer), "stream": self.stream}
        self.state["generators"] = GeneratorState()

    def step(self):
        seed = int(next(self.stream)[0].text)
        (row,) = pack(random_sequences([(3, 9), (2, 5)], seed=seed), 30)
        (-token_logprobs(self.model, row)[0].mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def numbers(self):
        """Everything that training changes, in full: name -> tensor."""
        found = {name: full(p) for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"{name} {key}"] = full(value)
        return found


def trained_and_saved(directory, num_steps=2):
    run = Run()
    for _ in range(num_steps):
        run.step()
    save(directory, num_steps, run.state)
    saved = run.numbers()
    run.step()
    return saved, run.numbers()


def loaded(directory):
    run = Run(seed=1)  # other weights, an optimizer that never stepped, a stream at its beginning
    step = load(directory, run.state)
    found = run.numbers()
    run.step()
    return step, found, run.numbers()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, capfd, before, after):
    """speculators#1049: its test compared the states of an optimizer that had never stepped."""
    saved, expected = run_ranks(before, trained_and_saved, tmp_path)[0]
    assert any(x.abs().max() > 0 for name, x in saved.items() if name.endswith("exp_avg_sq"))
    assert all(x == 2 for name, x in saved.items() if name.endswith(" step"))
    for step, found, then in run_ranks(after, loaded, tmp_path):
        assert step == 2 and found.keys() == saved.keys()
        for name, x in saved.items():
            assert found[name].equal(x), name  # bit by bit, at any number of ranks
        for name, x in expected.items():
            if before == after:
                assert then[name].equal(x), name
            else:  # gradients of two ranks are averaged in another order
                torch.testing.assert_close(then[name], x, rtol=1e-4, atol=1e-6, msg=name)
    said = (
        f"saved by {before} ranks, loaded by {after}: samples will differ" in capfd.readouterr().out
    )
    assert said == (before != after)


def test_without_a_process_group_a_plain_model_is_saved_and_loaded_alike(tmp_path):
    saved, expected = trained_and_saved(tmp_path)
    step, found, then = loaded(tmp_path)
    assert step == 2
    for name, x in saved.items():
        assert found[name].equal(x), name
    for name, x in expected.items():
        assert then[name].equal(x), name


def test_tied_and_frozen_parameters_and_a_model_without_an_optimizer_are_saved_too(tmp_path):
    """litgpt#1538: a frozen embedding has no moments, and stays as it is bit by bit."""

    def saved_numbers():
        run = Run(architecture="gemma", frozen=["embed_tokens"])
        before = full(run.model.model.embed_tokens.weight)
        run.step()
        reference = Run(seed=5).model
        save(tmp_path, 1, run.state | {"reference": TrainState(reference, ())})
        return run.numbers(), {name: full(p) for name, p in reference.named_parameters()}, before

    def loaded_numbers():
        run = Run(seed=1, architecture="gemma", frozen=["embed_tokens"])
        reference = Run(seed=1).model
        load(tmp_path, run.state | {"reference": TrainState(reference, ())})
        return run.numbers(), {name: full(p) for name, p in reference.named_parameters()}

    ((expected, expected_reference, embedding), _) = run_ranks(2, saved_numbers)
    assert expected["model.embed_tokens.weight"].equal(embedding)
    assert not any(name.startswith("model.embed_tokens.weight ") for name in expected)
    for found, reference in run_ranks(2, loaded_numbers):
        assert found.keys() == expected.keys() and all(
            x.equal(expected[name]) for name, x in found.items()
        )
        assert all(x.equal(expected_reference[name]) for name, x in reference.items())


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_each_ranks_generators_go_on_where_they_were(tmp_path):
    """google/tunix#2288, F04: the same numbers after a resume, and still different ones on each
    rank.
    """

    def saved_draws():
        seed = 10 + dist.get_rank()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        draws()
        save(tmp_path, 1, {"generators": GeneratorState()})
        return draws()

    def loaded_draws():
        load(tmp_path, {"generators": GeneratorState()})
        return draws()

    first, second = run_ranks(2, saved_draws)
    assert run_ranks(2, loaded_draws) == [first, second] and first != second


class Counter:
    """State that is nothing but a number."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_the_newest_checkpoints_are_kept_and_the_newest_is_loaded(tmp_path):
    for step in (4, 8, 999_999, 1_000_000):
        save(tmp_path, step, {"counter": Counter(step)}, keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {"step-999999", "step-1000000"}
    counter = Counter()
    assert load(tmp_path, {"counter": counter}) == 1_000_000 and counter.count == 1_000_000


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 4, {"counter": Counter(1)})
    save(tmp_path, 4, {"counter": Counter(2)})
    counter = Counter()
    load(tmp_path, {"counter": counter})
    assert counter.count == 2


def test_where_nothing_was_saved_a_run_begins_at_step_0(tmp_path):
    counter = Counter(7)
    assert load(tmp_path / "nowhere", {"counter": counter}) == 0 and counter.count == 7


def test_a_directory_that_a_run_left_unfinished_is_ignored_and_then_removed(tmp_path):
    save(tmp_path, 4, {"counter": Counter(4)})
    for name in (".step-000006", ".step-000008", "step-000008.old", "step-x"):
        (tmp_path / name).mkdir()
    counter = Counter()
    assert load(tmp_path, {"counter": counter}) == 4 and counter.count == 4
    save(tmp_path, 8, {"counter": Counter(8)})
    assert {p.name for p in tmp_path.iterdir()} == {
        "step-000004",
        "step-000008",
        "step-000008.old",
        "step-x",
    }


def save_without_room(directory, queue):
    run = Run(seed=2)
    run.step()
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (20_000, 20_000)
    )  # bytes of a file: less than the weights take
    try:
        save(directory, 3, run.state)
    except OSError as error:
        queue.put(str(error))


def test_a_save_that_fails_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path):
    """pytorch-lightning#688: the disk is full, and the good checkpoint is gone."""
    saved, _ = trained_and_saved(tmp_path)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=save_without_room, args=(tmp_path, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    message = queue.get()
    assert (
        "step-000003: not saved" in message and "File too large" in message and "\n" not in message
    )
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    step, found, _ = loaded(tmp_path)
    assert step == 2 and all(found[name].equal(x) for name, x in saved.items())


class Broken(Counter):
    """State that cannot be had on rank 1."""

    def state_dict(self):
        return {"count": 1 // (1 - dist.get_rank())}


def test_a_rank_that_dies_while_saving_leaves_no_complete_checkpoint(tmp_path):
    def dies():
        run = Run(seed=2)
        save(tmp_path, 1, run.state | {"counter": Counter()})
        save(tmp_path, 2, run.state | {"counter": Broken()})  # fails when all shards are written

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, dies)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000001", ".step-000002"}
    assert load(tmp_path, {"counter": Counter()}) == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trained_and_saved(tmp_path)
    with pytest.raises(
        ValueError, match="step-000002: is not of this model .*resume with the same --model"
    ):
        load(tmp_path, Run(architecture="qwen2").state)


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
            tensors |= {key: file.get_tensor(key) for key in file.keys()}
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
    copy_model_files(model, out, torch.bfloat16)
    assert json.loads((out / "config.json").read_text()) == {"hidden_size": 8, "dtype": "bfloat16"}
    copied = {
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.model",
    }
    assert {p.name for p in out.iterdir()} == copied | {"merges.txt"}


@dataclass(frozen=True)
class Inner:
    betas: tuple[float, float] = (0.9, 0.95)
    """Two numbers."""
    names: tuple[str, ...] = ()
    """Words."""


@dataclass(frozen=True)
class Settings:
    model: str = "built-in"
    """A word."""
    num_steps: int = 5
    """A number."""
    limit: float = float("inf")
    """Another."""
    inner: Inner = field(default_factory=Inner)
    """More."""

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"--num-steps {self.num_steps}: at least 1")


def test_settings_come_back_from_json_as_they_were():
    settings = Settings(num_steps=7, inner=Inner((0.5, 0.6), ("a", "b")))
    assert from_json(Settings(), json.loads(json.dumps(asdict(settings)))) == settings
    assert from_json(settings, {"inner": {"names": ["c"]}}) == Settings(
        "built-in", 7, inner=Inner((0.5, 0.6), ("c",))
    )


def test_settings_of_another_version_and_refused_values_are_errors():
    with pytest.raises(ValueError, match="Inner has no setting 'gone'"):
        from_json(Settings(), {"inner": {"gone": 1}})
    with pytest.raises(ValueError, match="Settings has no setting '__doc__'"):
        from_json(Settings(), {"__doc__": 1})
    with pytest.raises(ValueError, match="--num-steps 0: at least 1"):
        from_json(Settings(), {"num_steps": 0})


def test_the_command_line_goes_over_an_earlier_runs_settings(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(asdict(Settings("mine", 7, inner=Inner(names=("a",))))))

    def parsed(*argv):
        monkeypatch.setattr(sys, "argv", ["script.py", *argv])
        return command_line(Settings(), {"num_steps": 3}, "what it does")

    assert parsed() == Settings(num_steps=3)  # the built-in job's
    assert parsed("--model", "built-in") == parsed("--model=built-in") == Settings(num_steps=3)
    assert parsed("--model", "m") == parsed("--model=m") == Settings("m")
    expected = Settings("mine", 8, inner=Inner(names=("a",)))
    assert parsed("--config", str(file), "--num-steps", "8") == expected
    assert parsed("--num-steps", "8", f"--config={file}") == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--config", "nowhere.json"],
            "error: --config nowhere.json: no such file; give an earlier run's config.json",
        ),
        (["--num-steps", "0"], "error: .*--num-steps 0: at least 1"),
        (["--num-stepz", "1"], "error: .*--num-stepz"),
        (["--num-steps", "many"], "error: .*many"),
        (
            ["--config", __file__],
            "error: --config .*test_checkpoint.py: is not a JSON object; give an earlier run's",
        ),
        (["--limit", "nan"], "error: --limit nan: is not a number"),
        (["--inner.betas", "1", "nan"], "error: --inner.betas nan: is not a number"),
    ],
)
def test_a_refused_command_line_is_one_line_from_the_first_rank_alone(
    argv, message, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            command_line(Settings(), {}, "what it does")
        assert stop.value.code == 2
        shown = capsys.readouterr().err
        if rank == "0":
            assert re.search(message, shown), shown
        assert shown.count("\n") == (rank == "0")


def test_the_directory_of_an_earlier_run_is_kept_under_a_number_unless_it_is_resumed(
    tmp_path, capfd
):
    run = RunConfig(str(tmp_path), "mine")
    for num_steps in (
        1,
        2,
        3,
    ):  # each in a process of its own, which ends: a run in progress holds its directory
        run_ranks(1, run.open, Settings(num_steps=num_steps))
    steps = {
        p.name: json.loads((p / "config.json").read_text())["num_steps"] for p in tmp_path.iterdir()
    }
    assert steps == {"mine": 3, "mine.1": 1, "mine.2": 2}
    assert f"{tmp_path}/mine.2" in capfd.readouterr().out
    (tmp_path / "mine" / "checkpoints" / "step-000001").mkdir(parents=True)
    run_ranks(1, RunConfig(str(tmp_path), "mine", resume=True).open, Settings(num_steps=4))
    assert {p.name for p in tmp_path.iterdir()} == {"mine", "mine.1", "mine.2"}
    assert json.loads((run.directory / "config.json").read_text())["num_steps"] == 4


def test_settings_without_meaning_are_refused():
    for setting in (dict(save_every=-1), dict(keep=0)):
        with pytest.raises(ValueError, match="--save-every"):
            RunConfig(**setting)
    for name in ("", ".", "..", "a/b", "../a"):  # "" would rename the directory of all runs
        with pytest.raises(ValueError, match=f"--name '{name}': must be the name of a directory"):
            RunConfig(name=name)


def test_a_run_in_progress_its_own_model_and_a_resume_from_nothing_are_refused(tmp_path):
    """Two jobs of one name would write into one directory; a model in it would be renamed away
    before it is read.
    """
    run = RunConfig(str(tmp_path), "x")
    with pytest.raises(
        ValueError,
        match="--resume: there is no saved state in .*leave it out, and set --save-every",
    ):
        RunConfig(str(tmp_path), "x", resume=True).open(Settings())
    run.open(Settings())
    (tmp_path / "x" / "hf").mkdir()
    with pytest.raises(ValueError, match="lies in the directory of this run; give another --name"):
        run.open(Settings(), str(tmp_path / "x" / "hf"))
    with pytest.raises(
        ValueError, match=f"--name x: process {os.getpid()} on .* is at work there; end it or give"
    ):
        run.open(Settings())
    assert not (tmp_path / "x.1").exists()


def test_a_resume_with_another_seed_is_refused_and_leaves_the_settings_as_they_were(tmp_path):
    """They were overwritten first, and a later --config began with the refused ones."""
    run = RunConfig(str(tmp_path), "x", resume=True)
    (tmp_path / "x" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "x" / "config.json").write_text('{"seed": 3}')
    with pytest.raises(ValueError, match="--resume: .*/x was made with --seed 3; give the same"):
        run.open(Settings())
    assert (tmp_path / "x" / "config.json").read_text() == '{"seed": 3}'


def test_a_resume_with_another_model_or_fewer_steps_than_were_made_is_refused(tmp_path):
    """It was found out when the weights were loaded; and fewer steps cut the records and put older
    weights in place.
    """
    run = RunConfig(str(tmp_path), "x", resume=True)
    (tmp_path / "x" / "checkpoints" / "step-000007").mkdir(parents=True)
    for earlier, message in (
        ({"model_path": "a/b"}, "--resume: .*/x was made with --model a/b; give the same"),
        ({}, "--num-steps 6: .*/x has 7 already; give more"),
    ):
        (tmp_path / "x" / "config.json").write_text(json.dumps(earlier))
        with pytest.raises(ValueError, match=message):
            run_ranks(1, run.open, Settings(num_steps=6))
        assert json.loads((tmp_path / "x" / "config.json").read_text()) == earlier
    run_ranks(
        1, run.open, Settings(num_steps=7)
    )  # as when the last save was made and the model not yet written
