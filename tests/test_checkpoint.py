"""Checkpoints: what is loaded is what was saved, at any number of ranks, or the one before; exports
for others.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import subprocess
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from rows import make_model, random_sequences
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkpoint import GeneratorState, TrainState, load, save
from data import Prompt, PromptStream
from logprobs import token_logprobs
from packing import pack


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
        self.stream = PromptStream([[Prompt([i], str(i), "", "x") for i in range(7)]], seed=3)
        self.state = {"policy": TrainState(self.model, self.optimizer), "stream": self.stream}
        self.state["generators"] = GeneratorState()

    def step(self):
        seed = int(self.stream.take(4)[0].text)
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


@pytest.mark.parametrize("before", [1, 2])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, capfd, before):
    """speculators#1049: its test compared the states of an optimizer that had never stepped."""
    saved, expected = run_ranks(before, trained_and_saved, tmp_path)[0]
    assert any(x.abs().max() > 0 for name, x in saved.items() if name.endswith("exp_avg_sq"))
    assert all(x == 2 for name, x in saved.items() if name.endswith(" step"))
    for after in (1, 2):
        for step, found, then in run_ranks(after, loaded, tmp_path):
            assert step == 2 and found.keys() == saved.keys()
            for name, x in saved.items():
                assert found[name].equal(x), name  # bit by bit, at any number of ranks
            for name, x in expected.items():
                if before == after:
                    assert then[name].equal(x), name
                else:  # gradients of two ranks are averaged in another order
                    torch.testing.assert_close(then[name], x, rtol=1e-4, atol=1e-6, msg=name)
        told = f"saved by {before} ranks, loaded by {after}: samples will differ"
        assert (told in capfd.readouterr().out) == (before != after)


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
    """google/tunix#2288: the same numbers after a resume, and still different ones on each
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


# Damage


class Number:
    """A model of one weight with its optimizer, as a whole entry."""

    def __init__(self, value=0.0, optimizer=torch.optim.AdamW, dtype=torch.float32, **options):
        self.model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
        torch.nn.init.constant_(self.model.weight, value)
        self.optimizer = optimizer(self.model.parameters(), lr=0.0, **options)
        self.model(torch.ones(1, 1, dtype=dtype)).sum().backward()
        self.optimizer.step()
        self.state = {"policy": TrainState(self.model, self.optimizer), "counter": Counter(value)}

    def value(self):
        return self.model.weight.item()


FILES = [".metadata", "__0_0.distcp", "manifest", "rank0.pt"]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(path):
    path.write_bytes(bytes(path.stat().st_size))


def flipped(path):
    """One bit of the byte in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def another(path):
    torch.save([1], path)


def names_in(directory):
    return {path.name for path in directory.iterdir()}


DAMAGES = [(how, file) for how in (cut, zeroed, flipped, Path.unlink) for file in FILES]


@pytest.mark.parametrize(
    ("how", "file"), [*DAMAGES, (another, "rank0.pt")], ids=lambda x: getattr(x, "__name__", x)
)
def test_a_damaged_checkpoint_is_said_to_be_and_the_one_before_is_loaded(
    tmp_path, capfd, how, file
):
    """unsloth#6796, metaseq#53: "is not of this model; resume with the same --model", or a
    traceback without a file's name, though the one before was whole. A flipped bit was loaded.
    """
    for step in (1, 2):
        save(tmp_path, step, Number(float(step)).state)
    assert names_in(tmp_path / "step-000002") == set(FILES)
    how(tmp_path / "step-000002" / file)
    run = Number()
    assert load(tmp_path, run.state) == 1 and run.value() == 1.0
    first, last = capfd.readouterr().out.splitlines()
    assert re.search(rf"step-000002 is damaged \(.*\b{re.escape(file.strip('.'))} ?", first)
    assert last == f"resume: from {tmp_path}/step-000001"
    if how is cut and file != "manifest":
        assert re.search(r"has (\d+) bytes of (\d+)\)", first)
    save(tmp_path, 2, run.state)  # the run goes on
    assert names_in(tmp_path) == {"step-000001", "step-000002", "step-000002.damaged"}


class Wide(Number):
    """Whose state takes some 30 pages of a disk."""

    def __init__(self, value=0.0):
        super().__init__(value)
        self.model = torch.nn.Linear(64, 128)
        torch.nn.init.constant_(self.model.weight, value)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.model(torch.ones(1, 64)).sum().backward()
        self.optimizer.step()
        self.state = {"policy": TrainState(self.model, self.optimizer), "counter": Counter(value)}

    def value(self):
        return self.model.weight.unique().item()


def saved_or_not(directory, step):
    """Whether a save of `step` succeeds; either way what was or is the newest state loads."""
    try:
        save(directory, step, Wide(float(step)).state)
        newest = step
    except OSError as error:
        assert f"step-{step:06d}: not saved" in str(error) and "\n" not in str(error)
        newest = step - 1
    run = Wide()
    assert load(directory, run.state) == newest and run.value() == newest
    names = {"step-000001", f"step-{newest:06d}"}
    assert names_in(directory) == names
    shutil.rmtree(directory / "step-000002", ignore_errors=True)
    return newest == step


def test_a_disk_that_is_full_at_any_page_costs_no_earlier_state(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = 1 << 20
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        save(disk / "x", 1, Wide(1.0).state)
        found = []
        for num_pages in range(50):
            room = os.statvfs(disk)
            ballast = (room.f_bfree - num_pages) * room.f_bsize
            (disk / "ballast").write_bytes(bytes(ballast))
            found.append(saved_or_not(disk / "x", 2))
            (disk / "ballast").unlink()
        assert not any(found[:25]) and found[-1]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_if_no_checkpoint_is_whole_it_says_so_and_leaves_them(tmp_path):
    save(tmp_path, 1, Number(1.0).state)
    cut(tmp_path / "step-000001" / ".metadata")
    with pytest.raises(
        ValueError, match="step-000001 is damaged, and no other one is whole; start"
    ):
        load(tmp_path, Number().state)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_damage_that_one_rank_sees_sends_all_ranks_to_the_one_before(tmp_path):
    def saved():
        for step in (1, 2):
            save(tmp_path, step, {"counter": Counter(step), "policy": Run().state["policy"]})

    def loaded():
        counter = Counter()
        return load(tmp_path, {"counter": counter, "policy": Run().state["policy"]}), counter.count

    run_ranks(2, saved)
    cut(tmp_path / "step-000002" / "rank1.pt")
    assert run_ranks(2, loaded) == [(1, 1), (1, 1)]


def test_each_file_of_each_rank_is_in_the_manifest_and_a_missing_one_is_named(tmp_path, capfd):
    def saved():
        for step in (1, 2):
            save(tmp_path, step, Run().state)

    def loaded():
        return load(tmp_path, Run().state)

    run_ranks(2, saved)
    files = names_in(tmp_path / "step-000002")
    assert files >= {"rank0.pt", "rank1.pt", "__0_0.distcp", "__1_0.distcp"}
    known = json.loads((tmp_path / "step-000002" / "manifest").read_text().splitlines()[0])
    assert known["files"].keys() == files - {"manifest"}
    for name, (size, crc) in known["files"].items():
        data = (tmp_path / "step-000002" / name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (size, crc)
    (tmp_path / "step-000002" / "rank1.pt").unlink()
    assert run_ranks(1, loaded) == [1]  # which would not have read it
    assert "step-000002 is damaged (rank1.pt is gone)" in capfd.readouterr().out


def test_another_format_is_refused_by_name_and_one_without_a_manifest_is_passed_over(
    tmp_path, capfd
):
    save(tmp_path, 1, Number(1.0).state)
    save(tmp_path, 2, Number(2.0).state)
    manifest = tmp_path / "step-000002" / "manifest"
    text = json.dumps(json.loads(manifest.read_text().splitlines()[0]) | {"format": 3})
    manifest.write_text(f"{text}\n{zlib.crc32(text.encode())}")
    with pytest.raises(ValueError, match="step-000002: is of format 3; this version reads 2; resu"):
        load(tmp_path, Number().state)
    manifest.unlink()  # as it was before there were any
    assert load(tmp_path, Number().state) == 1
    assert "(no manifest: it is gone, or an earlier version has saved" in capfd.readouterr().out


def test_the_files_are_on_the_disk_before_they_get_their_name_and_then_the_name_is(
    tmp_path, monkeypatch
):
    """A power cut after the rename left a directory of empty files, or none."""
    events = []
    sync, rename = os.fsync, Path.rename

    def synced(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def renamed(path, target):
        events.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path / "x", 1, Number(1.0).state)
    renamed_at = events.index(".step-000001 -> step-000001")
    assert {*FILES, ".step-000001"} <= set(events[:renamed_at])
    assert events[renamed_at + 1 :] == ["x"]


def test_a_checkpoint_that_is_half_removed_has_no_name_any_more(tmp_path, monkeypatch):
    """It was taken for a damaged one."""
    save(tmp_path, 1, {"counter": Counter(1)})

    def dies(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, {"counter": Counter(2)}, keep=1)
    monkeypatch.undo()
    assert names_in(tmp_path) == {".step-000001.old", "step-000002"}
    save(tmp_path, 3, {"counter": Counter(3)})
    assert names_in(tmp_path) == {"step-000002", "step-000003"}


def test_a_directory_that_takes_nothing_is_told_on_all_ranks(tmp_path):
    """The other ranks waited for the first one."""
    (tmp_path / "file").touch()

    def job():
        with pytest.raises(OSError, match="step-000001: not saved .*Not a directory"):
            save(tmp_path / "file" / "x", 1, {"counter": Counter()})

    run_ranks(2, job)


def test_saving_draws_no_random_numbers(tmp_path):
    before = GeneratorState().state_dict()
    save(tmp_path, 1, Run().state)
    after = GeneratorState().state_dict()
    assert str(before) == str(after) and before["torch"].equal(after["torch"])


def test_ranks_that_do_not_share_a_directory_are_told_at_the_first_save(tmp_path):
    """Each host kept its half, nothing was said, and all was lost."""

    def job():
        own = tmp_path / f"host{dist.get_rank()}"
        with pytest.raises(OSError, match="not saved .ranks write to different dir.* shared file"):
            save(own, 1, Run().state)
        assert not list(own.glob("*")) and not list(own.glob(".*"))
        if dist.get_rank() == 0:
            (own / "step-000001").mkdir(parents=True)
            (own / "step-000001" / "rank0.pt").touch()
        dist.barrier()
        with pytest.raises(
            ValueError, match="ranks see different checkpoints in it; the directory"
        ):
            load(own, Run().state)

    run_ranks(2, job)


def test_the_weights_are_the_newest_ones_too(tmp_path):
    """Step, stream and generators of the newest, weights of the oldest."""
    for step in (1, 2):
        save(tmp_path, step, Number(float(step)).state)
    run = Number()
    assert load(tmp_path, run.state) == 2 and run.value() == 2.0


@pytest.mark.parametrize("with_weights", [True, False])
def test_no_rank_begins_to_write_before_what_was_left_is_removed(
    tmp_path, monkeypatch, with_weights
):
    """A rank wrote into the directory that another was still removing. The collectives that gather
    a model's state would hide it.
    """

    def state():
        return Run().state if with_weights else {"generators": GeneratorState()}

    left = tmp_path / ".step-000002" / "left"
    left.mkdir(parents=True)

    def job():
        remove, write = shutil.rmtree, dcp.save
        found = []

        def slow(*arguments, **options):
            time.sleep(0.5)
            remove(*arguments, **options)

        def watched(*arguments, **options):
            found.append(left.exists())
            return write(*arguments, **options)

        monkeypatch.setattr(shutil, "rmtree", slow)
        monkeypatch.setattr(dcp, "save", watched)
        save(tmp_path, 2, state())
        return found, load(tmp_path, state())

    assert run_ranks(2, job) == [([False], 2)] * 2


# Settings and entries of a resume


@pytest.mark.parametrize(
    "optimizer, saved, given",
    [
        (torch.optim.AdamW, {"weight_decay": 0.0}, {"weight_decay": 0.1, "betas": (0.5, 0.6)}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5}),
    ],
)
def test_an_optimizers_settings_are_those_of_the_flags_and_a_line_says_so(
    tmp_path, capfd, optimizer, saved, given
):
    """Automodel#3883, Megatron-LM#7468: the checkpoint's weight decay held, not the flag's."""
    save(tmp_path, 1, Number(1.0, optimizer, **saved).state)
    run = Number(2.0, optimizer, **given)
    before = {key: x for key, x in run.optimizer.param_groups[0].items() if key != "params"}
    load(tmp_path, run.state)
    after = run.optimizer.param_groups[0]
    assert {key: after[key] for key in before} == before and run.value() == 1.0
    said = capfd.readouterr().out
    for name, value in given.items():
        assert f"resume: {name} was " in said and f", is {value} from now on" in said
    load(tmp_path, Number(2.0, optimizer, **saved).state)
    assert "from now on" not in capfd.readouterr().out


def test_the_rate_of_a_schedule_that_goes_on_from_the_last_one_is_restored(tmp_path):
    run = Number(1.0)
    run.optimizer.param_groups[0]["lr"] = 0.25
    save(tmp_path, 1, run.state)
    again = Number()
    load(tmp_path, again.state)
    assert again.optimizer.param_groups[0]["lr"] == 0.25


def test_entries_and_types_that_the_checkpoint_lacks_are_refused_and_it_stays(tmp_path):
    """KeyError: 'ema'. unsloth#6796: a reference since --refresh-every; other masters."""
    save(tmp_path, 1, Number(1.0).state)
    run = Number()
    with pytest.raises(ValueError, match="step-000001: has no entry ema; resume with the settings"):
        load(tmp_path, run.state | {"ema": Counter()})
    with pytest.raises(ValueError, match="Missing key .*reference.*the same --model and settings"):
        load(tmp_path, run.state | {"reference": TrainState(Number().model, ())})
    with pytest.raises(
        ValueError, match="is torch.float32 in it and torch.bfloat16 here: see --mod"
    ):
        load(tmp_path, Number(dtype=torch.bfloat16).state)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


# What others have written


def test_a_run_that_begins_anew_in_a_directory_loses_nothing(tmp_path):
    """Its own checkpoints vanished as older, and the first run's weights were resumed."""
    for step in (1000, 2000):
        save(tmp_path, step, {"counter": Counter(step)})
    with pytest.raises(
        ValueError, match="step-002000: is of a later step, so of another run; save"
    ):
        save(tmp_path, 10, {"counter": Counter(10)})
    assert {p.name for p in tmp_path.iterdir()} == {"step-001000", "step-002000"}


def test_a_hosts_own_directories_are_neither_removed_nor_loaded(tmp_path):
    """With keep=1 two of them went, and beside step-9999999 the save itself."""
    for name in ("step-001000", "step-9999999"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").touch()
    for step in (4, 8):
        save(tmp_path, step, {"counter": Counter(step)}, keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {"step-001000", "step-9999999", "step-000008"}
    counter = Counter()
    assert load(tmp_path, {"counter": counter}) == 8 and counter.count == 8


def test_the_first_rank_waits_for_the_files_of_a_slow_one(tmp_path, monkeypatch):
    """Else it would miss them, and say that the ranks write to different directories."""

    def job():
        write = torch.save

        def slow(*arguments):
            time.sleep(0.5)
            write(*arguments)

        if dist.get_rank() == 1:
            monkeypatch.setattr(torch, "save", slow)
        save(tmp_path, 1, {"generators": GeneratorState()})
        monkeypatch.undo()
        return load(tmp_path, {"generators": GeneratorState()})

    assert run_ranks(2, job) == [1, 1]


def test_a_save_before_the_first_step_is_no_step_of_the_optimizer(tmp_path):
    run = Run()
    save(tmp_path, 0, run.state)
    steps = [state["step"].item() for state in run.optimizer.state.values()]
    assert steps and set(steps) == {0.0}
