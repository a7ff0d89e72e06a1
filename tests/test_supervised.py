"""Losses on given texts: the numbers of a hand, of float64, of Transformers and of TRL."""

import json

import pytest
import torch
import trl_dpo
from rows import make_model, random_sequences

from logprobs import token_logprobs
from packing import pack
from supervised import (
    DpoConfig,
    SftConfig,
    check_weights,
    cross_entropy,
    preference_loss,
    sequence_sums,
    weights_at,
)


def test_cross_entropy_is_a_sum_over_trained_tokens_divided_once():
    logprobs = torch.tensor([torch.nan, -1.0, -2.0, -9.0], requires_grad=True)
    mask = torch.tensor([False, True, True, False])
    likeliest = torch.tensor([0.0, 0.0, 1.0, 1.0])
    loss, stats = cross_entropy(logprobs, likeliest, mask, 4.0)
    loss.backward()
    assert loss.item() == 0.75
    assert logprobs.grad.tolist() == [0.0, -0.25, -0.25, 0.0]
    assert stats["sft/loss"].item() == 1.5  # of this row's own tokens
    assert stats["sft/token_accuracy"].item() == 0.5
    nothing, stats = cross_entropy(logprobs, likeliest, torch.zeros(4, dtype=torch.bool), 4.0)
    assert nothing.item() == stats["sft/loss"].item() == stats["sft/token_accuracy"].item() == 0.0


def test_loss_and_gradient_are_those_of_transformers_causal_lm():
    """1e-5 of the largest entry: fp32 sums in another order."""
    from transformers import AutoModelForCausalLM

    model = make_model("llama")
    sequences = random_sequences([(3, 5), (2, 1), (6, 9)])
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa")
    plain.load_state_dict(model.state_dict())
    width = max(len(s["tokens"]) for s in sequences)
    ids = torch.zeros(3, width, dtype=torch.int64)
    labels = torch.full((3, width), -100)
    for i, s in enumerate(sequences):
        length = len(s["tokens"])
        ids[i, :length] = s["tokens"]
        labels[i, :length] = torch.where(s["response_mask"], s["tokens"], -100)
    theirs = plain(ids, labels=labels, attention_mask=(ids > 0).long()).loss
    theirs.backward()
    rows = pack(sequences, 16)
    assert len(rows) == 2
    total = 0.0
    for row in rows:
        logprobs, likeliest = token_logprobs(model, row, likeliest=True)
        loss, _ = cross_entropy(logprobs, likeliest, row.fields["response_mask"], 15.0)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(theirs.item(), rel=1e-5)
    largest = max(p.grad.abs().max() for p in plain.parameters())
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - other.grad).abs().max() < 1e-5 * largest


EDGES = torch.tensor([0, 3, 5, 9, 11])  # two pairs
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1]).bool()


def two_pairs(dtype=torch.float32):
    place = torch.arange(11.0, dtype=dtype)
    return (-1 - place.sin()).requires_grad_(), -1 - (3 * place).cos()


def by_hand(logprobs, ref_logprobs, config):
    """DPO as it is written in the papers, a pair at a time, in Python's loops."""
    losses = []
    for k in range(2):
        gained = []
        for start, end in ((EDGES[2 * k], EDGES[2 * k + 1]), (EDGES[2 * k + 1], EDGES[2 * k + 2])):
            places = [i for i in range(start, end) if MASK[i]]
            ref = 0.0 if config.reference_free else sum(ref_logprobs[i] for i in places)
            value = sum(logprobs[i] for i in places) - ref
            gained.append(value / len(places) if config.length_normalize else value)
        h = gained[0] - gained[1]
        if config.loss == "ipo":
            losses.append((h - 1 / (2 * config.kl_coef)) ** 2)
        else:
            p = 1 / (1 + torch.exp(-config.kl_coef * h))
            share = config.label_smoothing
            losses.append(-(1 - share) * p.log() - share * (1 - p).log())
    return sum(losses) / 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl_coef": 0.7},
        {"loss": "ipo"},
        {"label_smoothing": 0.2},
        {"length_normalize": True},
        {"reference_free": True},
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_float64(changes):
    config = DpoConfig(**changes)
    logprobs, ref_logprobs = two_pairs()
    loss, _ = preference_loss(logprobs, ref_logprobs, MASK, EDGES, config, 2.0)
    loss.backward()
    exact, exact_ref = two_pairs(torch.float64)
    expected = by_hand(exact, exact_ref, config)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    difference = (logprobs.grad - exact.grad).abs().max()
    assert exact.grad.abs().max() > 0 and difference < 1e-5 * exact.grad.abs().max()


def test_the_example_of_the_docstring_and_its_statistics():
    logprobs = torch.tensor([0.0, -2.0, 0.0, -2.5], requires_grad=True)
    ref_logprobs = torch.tensor([0.0, -3.0, 0.0, -2.0])
    mask = torch.tensor([False, True, False, True])
    edges = torch.tensor([0, 2, 4])
    loss, stats = preference_loss(logprobs, ref_logprobs, mask, edges, DpoConfig(), 1.0)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.04626, 0.0, 0.04626], abs=1e-5)
    found = {name: round(x.item(), 4) for name, x in stats.items()}
    assert found == {
        "dpo/loss": 0.621,
        "dpo/accuracy": 1.0,
        "dpo/margin": 0.15,
        "dpo/chosen_logprob": -2.0,
        "dpo/rejected_logprob": -2.5,
    }
    _, stats = preference_loss(ref_logprobs, ref_logprobs, mask, edges, DpoConfig(), 1.0)
    assert (stats["dpo/accuracy"], stats["dpo/loss"].item()) == (
        0.0,
        pytest.approx(0.6931, abs=1e-4),
    )


def test_an_empty_row_gives_zero_and_a_gradient_of_zero():
    logprobs = torch.zeros(4, requires_grad=True)
    nothing = torch.zeros(4, dtype=torch.bool)
    loss, stats = preference_loss(
        logprobs, torch.zeros(4), nothing, torch.tensor([0, 4]), DpoConfig(), 1.0
    )
    loss.backward()
    assert loss.item() == 0.0 and logprobs.grad.tolist() == [0.0] * 4
    assert all(x.item() == 0.0 for x in stats.values())


@pytest.mark.parametrize("name", trl_dpo.SETTINGS)
def test_loss_and_gradient_are_those_that_trl_gave(name):
    """Of the numbers that `python tests/trl_dpo.py` wrote with TRL 1.16's own code."""
    expected = json.loads(trl_dpo.FILE.read_text())[name]
    logprobs, ref_logprobs, mask = trl_dpo.batch()
    logprobs.requires_grad_()
    in_pairs = torch.arange(8).view(2, 4).t().flatten()  # chosen 0, rejected 0, chosen 1, ...
    own, ref, trained = (x[in_pairs].flatten() for x in (logprobs, ref_logprobs, mask))
    config = DpoConfig(kl_coef=trl_dpo.KL_COEF, **trl_dpo.SETTINGS[name])
    loss, _ = preference_loss(own, ref, trained, torch.arange(0, 65, 8), config, 4.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    assert logprobs.grad[mask].tolist() == pytest.approx(expected["gradient"], rel=1e-4, abs=1e-7)


def test_sums_are_over_a_sequences_own_trained_tokens():
    x = torch.tensor([1.0, 2.0, 4.0, 8.0, torch.inf])
    mask = torch.tensor([True, False, True, True, False])
    assert sequence_sums(x, mask, torch.tensor([0, 2, 5])).tolist() == [1.0, 12.0]


def test_weights_are_constant_or_linear_between_knots():
    assert weights_at((0.4, 0.4, 0.2), 7) == (0.4, 0.4, 0.2)
    fading = (10, 1, 0, 0, 110, 0, 0, 1, 120, 0, 0.5, 1)
    assert weights_at(fading, 0) == weights_at(fading, 10) == (1, 0, 0)
    assert weights_at(fading, 35) == (0.75, 0, 0.25)
    assert weights_at(fading, 110) == (0, 0, 1)
    assert weights_at(fading, 115) == (0, 0.25, 1)
    assert weights_at(fading, 120) == weights_at(fading, 999) == (0, 0.5, 1)
    assert weights_at((5, 1, 0, 0), 0) == (1, 0, 0)


@pytest.mark.parametrize(
    ("weights", "refusal"),
    [
        ((), "--weights : must be three numbers, sft dpo rl, or knots of four"),
        ((1.0, 0.0), "--weights 1.0 0.0: must be three numbers"),
        ((0.0, 0.0, 0.0), "must be at least 0 each, and one above 0"),
        ((5.0, 0.0, 0.0, 0.0), "must be at least 0 each, and one above 0"),
        ((0.0, 1.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0), "each knot must have a weight above 0"),
        ((-1.0, 1.0, 1.0), "must be at least 0 each, and one above 0"),
        ((float("nan"), 1.0, 1.0), "must be at least 0 each, and one above 0"),
        ((5, 1, 0, 0, 5, 0, 1, 0), "the steps of the knots must ascend"),
    ],
    ids=str,
)
def test_weights_that_mean_nothing_are_refused(weights, refusal):
    with pytest.raises(ValueError, match=refusal):
        check_weights(weights)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: SftConfig(samples_per_step=0), "--sft.samples-per-step 0: must be at least 1"),
        (lambda: SftConfig(max_tokens=1), "--sft.max-tokens 1: must be at least 2"),
        (lambda: DpoConfig(pairs_per_step=0), "--dpo.pairs-per-step 0: must be at least 1"),
        (lambda: DpoConfig(kl_coef=0.0), "--dpo.kl-coef 0.0: must be above 0"),
        (lambda: DpoConfig(loss="hinge"), "--dpo.loss hinge: must be sigmoid or ipo"),
        (lambda: DpoConfig(label_smoothing=0.5), "--dpo.label-smoothing 0.5: must be from 0"),
        (
            lambda: DpoConfig(label_smoothing=0.1, loss="ipo"),
            "--dpo.label-smoothing 0.1: must be 0 with ipo",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_cannot_be_are_refused_in_a_line(make, refusal):
    with pytest.raises(ValueError, match=refusal):
        make()
