"""Checkpoints: what is loaded is what was saved, at any number of ranks, or the one before; exports
for others.
"""

import multiprocessing
import random
import resource

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
