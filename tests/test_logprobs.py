"""Log-probabilities and entropy against full logits in float64, in a quarter of their memory."""

import contextlib
import ctypes
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from rows import ARCHITECTURES, VOCAB_SIZE, make_model, plain_logprobs, random_sequences
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import logprobs
import logprobs as logprobs_file
from logprobs import (
    head_logprobs,
    model_scores,
    response_positions,
    token_logprobs,
    token_values,
    warm_up,
    with_logprobs,
)
from packing import pack, pack_alike, sequence, unpack


def reference(hidden, weight, bias, targets, temperature, softcap):
    """The same two results from all logits at once, in float64."""
    z = hidden @ weight.t() + (0 if bias is None else bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = (z / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one(monkeypatch):
    products = []
    monkeypatch.setattr(logprobs_file, "_add_product", lambda *x: products.append(x))
    hidden = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(11, 8)
    bias = torch.randn(11)
    targets = torch.tensor([1, 2, 3, 4])
    head_logprobs(hidden, weight, bias, targets)[0].sum().backward()
    z = (hidden.detach() @ weight.t() + bias).requires_grad_()
    z.log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    torch.testing.assert_close(hidden.grad, z.grad @ weight)
    assert not products


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_equal_those_of_all_logits_in_float64(
    has_bias, temperature, softcap, chunk
):
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 16), torch.randn(97, 16)
    targets = torch.randint(97, (30,))
    inputs = [hidden, weight, torch.randn(97)] if has_bias else [hidden, weight]
    on_logprobs, on_entropy = torch.randn(30), torch.randn(30)
    bias = [None] * (not has_bias)
    for use in ((1, 1), (1, 0), (0, 1)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        logprobs, entropy = head_logprobs(*leaves, *bias, targets, temperature, softcap, chunk)
        exact_leaves = [x.double().requires_grad_() for x in inputs]
        exact = reference(*exact_leaves, *bias, targets, temperature, softcap)
        torch.testing.assert_close(logprobs, exact[0].float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy, exact[1].float(), rtol=1e-5, atol=1e-5)
        terms = [
            (logprobs, entropy, on_logprobs, on_entropy),
            (*exact, on_logprobs.double(), on_entropy.double()),
        ]
        # A term that is left out, not multiplied by 0: its gradient does not arrive at all.
        losses = [
            sum((x * w).sum() for x, w, used in zip(t[:2], t[2:], use, strict=True) if used)
            for t in terms
        ]
        found = torch.autograd.grad(losses[0], leaves)
        expected = torch.autograd.grad(losses[1], exact_leaves)
        assert max(map(relative_error, found, expected)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_compiled_it_gives_the_same_and_is_as_near_to_float64(softcap):
    """Also words of probability 0, and a last chunk of another size."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 16), torch.randn(97, 16)
    bias = torch.zeros(97)
    bias[5] = -math.inf if softcap is None else -30.0
    targets = torch.randint(6, 97, (30,))
    grads = torch.randn(2, 30)
    results = []
    for kind in ("plain", "fused", "exact"):
        dtype = torch.float64 if kind == "exact" else torch.float32
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        if kind == "exact":
            logprobs, entropy = reference(*leaves[:2], leaves[2].clamp(-1e4), targets, 0.7, softcap)
        else:
            options = 0.7, softcap, 8, kind == "fused"
            logprobs, entropy = head_logprobs(*leaves, targets, *options)
        terms = [logprobs, entropy]
        found = torch.autograd.grad(terms, leaves, list(grads.to(dtype)))
        results.append([*terms, *found])
    plain, fused, exact = results
    assert not all(map(torch.equal, plain, fused))  # it did take another way
    for x, y in zip(fused, exact, strict=True):
        assert relative_error(x, y) < 1e-5


def test_the_head_is_compiled_where_a_models_layers_are(monkeypatch):
    asked = []
    monkeypatch.setattr(logprobs, "_compiled", lambda function: asked.append(function) or function)
    model = make_model()
    (row,) = pack(random_sequences([(3, 9)]), 12)
    plain = token_logprobs(model, row)[0]
    assert not asked
    model.get_decoder().layers[0].compile(backend="eager")
    found = token_logprobs(model, row)[0]
    found.sum().backward()
    assert asked == [logprobs._chunk_values, logprobs._chunk_gradient]
    torch.testing.assert_close(found, plain)


def test_bf16_products_keep_fp32_sums():
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(3000, 16).bfloat16()
    targets = torch.randint(3000, (40,))
    logprobs, entropy = head_logprobs(hidden, weight, None, targets)
    log_p = (hidden.double() @ weight.t().double()).log_softmax(
        -1
    )  # logits in bf16 would be off by up to 0.03
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(
        logprobs, log_p.gather(-1, targets[:, None])[:, 0].float(), rtol=1e-5, atol=1e-5
    )
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    exact_leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    found = torch.autograd.grad(head_logprobs(*leaves, None, targets, chunk=4)[0].sum(), leaves)
    expected = torch.autograd.grad(
        reference(*exact_leaves, None, targets, 1.0, None)[0].sum(), exact_leaves
    )
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    assert (
        max(map(relative_error, found, expected)) < 1e-2
    )  # the logits' gradient enters its product in bf16


def test_many_chunks_add_up_in_fp32_to_a_bf16_gradient():
    hidden, weight = torch.ones(2000, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    logprobs, _ = head_logprobs(hidden, weight, None, torch.zeros(2000, dtype=torch.int64), chunk=1)
    logprobs.sum().backward()
    assert weight.grad.tolist() == [
        [1000.0],
        [-1000.0],
    ]  # sums in bf16 stop at 128: 128 + 0.5 rounds to 128


def from_logits(*logits, temperature=1.0):
    """(logprob of word 0, entropy, gradient of their sum) where the head's bias is the logits."""
    bias = torch.tensor(logits, requires_grad=True)
    hidden, weight = torch.zeros(1, 2), torch.zeros(len(logits), 2)
    logprobs, entropy = head_logprobs(hidden, weight, bias, torch.tensor([0]), temperature)
    (logprobs + entropy).sum().backward()
    return logprobs.item(), entropy.item(), bias.grad


@pytest.mark.parametrize("fused", [False, True])
def test_the_likeliest_tokens_are_those_of_the_largest_logit(fused):
    torch.manual_seed(0)
    hidden = torch.randn(40, 8)
    weight = torch.randn(11, 8, requires_grad=True)
    best = (hidden @ weight.t()).argmax(-1)
    targets = torch.where(torch.arange(40) % 3 == 0, best, (best + 1) % 11)
    options = {"chunk": 16, "fused": fused}
    logprobs, likeliest = head_logprobs(hidden, weight, None, targets, likeliest=True, **options)
    assert likeliest.tolist() == [float(i % 3 == 0) for i in range(40)]
    logprobs.sum().backward()
    found, weight.grad = weight.grad, None
    plain, _ = head_logprobs(hidden, weight, None, targets, **options)
    plain.sum().backward()
    torch.testing.assert_close(found, weight.grad)
    assert torch.equal(logprobs, plain)


def test_temperature_divides_the_logits():
    """trl#4159: the sampler's log-probabilities were tempered, the trainer's not."""
    assert from_logits(1.0, 0.0, temperature=0.6)[0] == pytest.approx(-0.1730, abs=1e-4)
    assert from_logits(1.0, 0.0)[0] == pytest.approx(-0.3133, abs=1e-4)


def test_a_word_of_probability_0_leaves_entropy_and_gradients_finite():
    """trl#2496, trl#7221: 0 times minus infinity."""
    logprob, entropy, gradient = from_logits(0.0, 0.0, -math.inf)
    assert logprob == pytest.approx(-math.log(2)) and entropy == pytest.approx(math.log(2))
    torch.testing.assert_close(gradient, torch.tensor([0.5, -0.5, 0.0]))
    logprob, entropy, gradient = from_logits(0.0, 200.0)
    assert logprob == -200.0 and entropy == 0.0 and gradient.isfinite().all()


def test_the_entropy_is_the_distributions_and_masked_positions_have_none():
    """SkyRL#2259: not the sampled token's negative log-probability, and no sentinel on pads."""
    model = make_model()
    nn.init.zeros_(model.lm_head.weight)
    (row,) = pack([sequence(torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10]))], 8)
    _, entropy = token_logprobs(model, row)
    torch.testing.assert_close(entropy, torch.tensor([0, 0, 0, 1, 1, 1]) * math.log(VOCAB_SIZE))


class Bigram(nn.Module):
    """A model whose next word depends on the current word alone: logits of word w are table[w]."""

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())

    def __init__(self, table):
        super().__init__()
        self.head = nn.Linear(*reversed(table.shape), bias=False)
        self.head.weight = nn.Parameter(table.t().contiguous())

    def get_decoder(self):
        def decoder(input_ids, **boundaries):
            return SimpleNamespace(
                last_hidden_state=nn.functional.one_hot(input_ids, len(self.head.weight)).float()
            )

        return decoder

    def get_output_embeddings(self):
        return self.head


def test_the_logprob_of_a_token_comes_from_the_token_before_it_in_its_own_sequence():
    """prime-rl#1525, ms-swift#8196: log-probabilities shifted by one against the mask."""
    eos = 2
    torch.manual_seed(0)
    table = torch.randn(10, 10)
    log_p = table.log_softmax(-1)
    first = sequence(torch.tensor([5, 6]), torch.tensor([7, 8, eos]))
    second = sequence(torch.tensor([3, 9]), torch.tensor([4]))
    (row,) = pack([first, second], 8)
    logprobs, entropy = token_logprobs(Bigram(table), row)
    zero = torch.zeros(())
    expected = [zero, zero, log_p[6, 7], log_p[7, 8], log_p[8, eos], zero, zero, log_p[9, 4]]
    torch.testing.assert_close(logprobs, torch.stack(expected))
    spread = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(
        entropy, torch.stack([zero, zero, *spread[[6, 7, 8]], zero, zero, spread[9]])
    )


def test_response_positions_are_those_of_the_mask_in_order():
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
    assert response_positions(mask, 3).tolist() == [1, 2, 5]
    assert response_positions(~mask, 4).tolist() == [0, 3, 4, 6]
    assert response_positions(torch.zeros(3, dtype=torch.bool), 0).tolist() == []


LENGTHS = [(3, 9), (5, 1), (2, 20), (7, 7)]


def largest_difference(model, sequences, temperature):
    (row,) = pack(sequences, 100)
    found = token_logprobs(model, row, temperature=temperature, chunk=5)
    largest = 0.0
    for x, y, i in zip(*(unpack(row, x) for x in found), row.source, strict=True):
        live = sequences[i]["response_mask"]
        for mine, plain in zip(
            (x, y), plain_logprobs(model, sequences[i]["tokens"], temperature), strict=True
        ):
            largest = max(largest, (mine - plain)[live].abs().max().item())
            assert (mine[~live] == 0).all()
    return largest


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logprobs_equal_those_from_all_logits_of_the_models_own_forward(
    architecture, temperature
):
    """trl#3682: nothing is asked of the model's forward but the last hidden states."""
    assert (
        largest_difference(make_model(architecture), random_sequences(LENGTHS), temperature) < 1e-5
    )


def test_the_models_own_soft_cap_and_head_bias_are_applied():
    capped = make_model("gemma3", final_logit_softcapping=2.0)
    assert largest_difference(capped, random_sequences(LENGTHS), 0.7) < 1e-5
    biased = make_model()
    biased.lm_head.bias = nn.Parameter(
        torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    )
    assert largest_difference(biased, random_sequences(LENGTHS), 0.7) < 1e-5


def test_the_ratio_is_exactly_1_before_the_first_update_also_in_training_mode():
    """minimind#814: old and new log-probabilities from two precisions, or with dropout in one of
    them.
    """
    model = make_model().train()
    sequences = random_sequences(LENGTHS)
    (row,) = pack(sequences, 100)
    with torch.no_grad():
        old_logprobs, old_entropy = token_logprobs(model, row)
    logprobs, entropy = token_logprobs(model, row)
    assert logprobs.equal(old_logprobs) and entropy.equal(old_entropy) and logprobs.requires_grad
    for other in pack(sequences, 30):  # another layout: the same up to rounding
        found = unpack(other, token_logprobs(model, other)[0])
        for x, i in zip(found, other.source, strict=True):
            expected = unpack(row, logprobs)[row.source.index(i)]
            torch.testing.assert_close(x, expected, rtol=0, atol=1e-4)


def test_rows_can_carry_a_models_logprobs_as_a_field():
    model = make_model()
    rows = pack(random_sequences(LENGTHS), 30)
    ((first, *_), others) = with_logprobs(
        model, [rows[:2], rows[2:]], "old_logprobs", temperature=0.7
    )
    assert len(others) == len(rows) - 2 and first.fields.keys() == rows[0].fields.keys() | {
        "old_logprobs"
    }
    assert first.tokens is rows[0].tokens and "old_logprobs" not in rows[0].fields
    expected = token_logprobs(model, rows[0], temperature=0.7)[0]
    assert (
        first.fields["old_logprobs"].equal(expected)
        and not first.fields["old_logprobs"].requires_grad
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_a_row_without_response_tokens_gives_every_parameter_a_zero_gradient(architecture):
    model = make_model(architecture)
    for row in pack(random_sequences([(4, 0)]), 8, num_rows=2):
        model.zero_grad()
        logprobs, entropy = token_logprobs(model, row)
        assert (logprobs == 0).all() and (entropy == 0).all()
        (logprobs.sum() + entropy.sum()).backward()
        assert all(
            (p.grad == 0).all() for p in model.parameters()
        )  # None would hang FSDP's reduction


def test_a_sharded_model_gives_the_same_in_training_and_without_gradients_and_stays_sharded():
    sequences = random_sequences(LENGTHS)
    (row,) = pack(sequences, 100)
    expected = token_logprobs(make_model(), row)[0].detach()

    def on_a_rank():
        model = make_model()
        for part in [*model.model.layers, model]:
            fully_shard(part, reshard_after_forward=part is not model)
        with torch.no_grad():
            without = token_logprobs(model, row)[0]
        within = token_logprobs(model, row)[0]
        within.sum().backward()
        return without, within.detach(), all(isinstance(p, DTensor) for p in model.parameters())

    for without, within, is_sharded in run_ranks(2, on_a_rank):
        torch.testing.assert_close(without, expected, rtol=1e-5, atol=1e-5)
        assert within.equal(without) and is_sharded


def test_rows_are_not_written_to():
    (row,) = pack(random_sequences(LENGTHS), 100)
    copy = replace(
        row, tokens=row.tokens.clone(), fields={name: x.clone() for name, x in row.fields.items()}
    )
    token_logprobs(make_model(), row)[0].sum().backward()
    assert row.tokens.equal(copy.tokens) and all(
        x.equal(copy.fields[name]) for name, x in row.fields.items()
    )


def kib(name):
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if name in line
    )


def peak_kib(way):
    """Memory that the log-probabilities of 2,048 tokens and their gradient take on top of inputs,
    in this process.
    """
    # Large blocks come from the system and go back at once, so that the peak is of what is alive
    # (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 65536)
    hidden, weight = (
        torch.randn(2048, 64, requires_grad=True),
        torch.randn(32000, 64, requires_grad=True),
    )
    targets = torch.randint(32000, (2048,))
    before = kib("VmRSS")
    if way == "plain":
        log_p = (hidden @ weight.t()).log_softmax(-1)
        log_p.gather(-1, targets[:, None]).sum().backward()
    else:
        head_logprobs(hidden, weight, None, targets)[0].sum().backward()
    return kib("VmHWM") - before


def test_the_memory_of_2048_tokens_and_32000_words_is_at_most_a_quarter_of_the_plain_way():
    """The plain way is spared the entropy: two more matrices there and none here."""
    plain, chunked = (run_ranks(1, peak_kib, way)[0] for way in ("plain", "chunked"))
    assert plain > 700_000  # three matrices of 250 MiB
    assert chunked <= plain / 4


# Scores of a reward model


def tiny_reward_model(kind="Llama", attention="sdpa", **options):
    import transformers

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    options = (
        sizes | dict(num_key_value_heads=2, num_labels=1, pad_token_id=2, eos_token_id=2) | options
    )
    config = getattr(transformers, f"{kind}Config")(**options, attn_implementation=attention)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        model.score.weight.normal_()  # its 0.02 would hide differences
    return model


def texts(num=5):
    """Token ids of several lengths with EOS, the pad token as well, inside and at the end."""
    torch.manual_seed(1)
    return [[5, 2, *torch.randint(3, 32, (7 * (i * 3 % 5) + 1,)).tolist(), 2] for i in range(num)]


def scores_alone(model, sequences):
    """The last token's hidden state times the head, one text at a time."""
    with torch.no_grad():
        hidden = [
            model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
            for ids in sequences
        ]
        return [(model.score.weight @ h).item() for h in hidden]


def scored(model, sequences, tokens_per_row=8192):
    """The scores of token-id lists, packed into rows that are as many on all ranks."""
    made = [sequence(torch.tensor(ids[:1]), torch.tensor(ids[1:])) for ids in sequences]
    return model_scores(model, pack_alike(made, tokens_per_row))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("attention", ["sdpa", "packed"])
def test_a_text_has_the_same_score_alone_and_in_any_packing(kind, attention):
    model = tiny_reward_model(kind)
    expected = scores_alone(model, texts())
    assert max(expected) - min(expected) > 0.1
    if attention == "packed":
        from attention import use_packed_attention

        use_packed_attention(model)
    rows = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(args), with_kwargs=True
    )
    for tokens_per_row, num_rows in (
        (1, 5),
        (40, 3),
        (10_000, 1),
    ):  # the texts have 4, 25, 11, 32 and 18 tokens
        rows.clear()
        got = scored(model, texts(), tokens_per_row)
        assert got == pytest.approx(expected, abs=1e-4)  # fp32 sums in another order
        assert len(rows) == num_rows
    assert scored(model, texts()[::-1]) == pytest.approx(expected[::-1], abs=1e-4)
    assert scored(model, []) == []


def test_the_score_of_a_bf16_model_is_not_rounded_to_bf16():
    """Whose neighbours of 10 are a sixteenth apart: samples of one prompt would tie."""
    model = tiny_reward_model().bfloat16()
    with torch.no_grad():
        hidden = [
            model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
            for ids in texts()
        ]
    expected = [(model.score.weight.float() @ h.float()).item() for h in hidden]
    assert max(abs(x - torch.tensor(x).bfloat16().item()) for x in expected) > 1e-3
    assert scored(model, texts(), 1) == pytest.approx(expected, abs=1e-5)


def test_texts_that_differ_only_behind_the_first_eos_have_different_scores():
    first, second = scored(tiny_reward_model(), [[5, 6, 2, 7, 8, 2], [5, 6, 2, 9, 10, 2]])
    assert abs(first - second) > 1e-2


def test_a_model_whose_score_would_be_wrong_is_refused():
    with pytest.raises(ValueError, match="num_labels 1"):
        scored(tiny_reward_model(num_labels=2), texts())
    with pytest.raises(ValueError, match="other than eager"):
        scored(tiny_reward_model(attention="eager"), texts())
    with pytest.raises(ValueError, match="needs a `score` head"):
        scored(tiny_reward_model().model, texts())
    both_ways = tiny_reward_model(attention="sdpa")
    both_ways.config.is_causal = False  # neighbours would be seen
    with pytest.raises(ValueError, match="causal attention"):
        scored(both_ways, texts())


def test_a_score_that_is_not_finite_stops_the_run():
    model = tiny_reward_model()
    with torch.no_grad():
        model.score.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="LlamaForSequenceClassification gave a score of NaN"):
        scored(model, texts())


def scores_on_each_rank():
    from torch.distributed.fsdp import fully_shard

    model = tiny_reward_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return scored(model, texts(5)[: [5, 0, 2][dist.get_rank()]], 20)


def test_a_sharded_model_scores_on_ranks_with_different_numbers_of_texts():
    expected = scores_alone(tiny_reward_model(), texts())
    got = run_ranks(3, scores_on_each_rank)
    for scores, count in zip(got, (5, 0, 2), strict=True):
        assert scores == pytest.approx(expected[:count], abs=1e-4)


# Heads that are more than a matrix, first tokens, wrapped models


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, as PEFT puts into a head's place."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias


@pytest.mark.parametrize(
    "name", ["logits_scaling", "logit_scale", "lm_head_multiplier", "logits_multiplier"]
)
def test_a_model_that_scales_its_logits_is_refused(name):
    """Granite, logits_scaling 4: loss 4.89 in place of 4.86."""
    (row,) = pack(random_sequences([(3, 9)]), 50)
    model = make_model()
    setattr(model.config, name, 1.0)
    token_logprobs(model, row)
    setattr(model.config, name, 4.0)
    with pytest.raises(ValueError, match=rf"models that scale their logits \({name}\)"):
        token_logprobs(model, row)


def test_a_scale_that_the_config_computes_is_refused_too():
    """MiniCPM 3's is a property, from the size of its base model: 46 nats off."""
    import transformers

    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    config = transformers.MiniCPM3Config(**sizes, num_attention_heads=4, pad_token_id=0)
    assert config.logits_scaling != 1 and "logits_scaling" not in vars(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    (row,) = pack(random_sequences([(3, 9)]), 50)
    with pytest.raises(ValueError, match="scale their logits .logits_scaling"):
        token_logprobs(model, row)


def test_a_head_with_an_adapter_is_refused():
    """Its adapter got no gradient, and the log-probabilities were those without it."""
    (row,) = pack(random_sequences([(3, 9)]), 50)
    model = make_model()
    model.lm_head = Adapted(model.lm_head)
    with pytest.raises(ValueError, match="the head is a Adapted, not a matrix; merge its adapters"):
        token_logprobs(model, row)


def test_first_tokens_have_logprob_0_whatever_the_mask_says():
    """Scored from the neighbour's last state: gradient off by 44 %."""
    model = make_model()
    (row,) = pack(random_sequences([(3, 9), (2, 4)]), 50)
    everything = replace(
        row,
        fields=row.fields | {"response_mask": torch.ones(len(row.tokens), dtype=torch.bool)},
        num_response_tokens=len(row.tokens),
    )
    firsts = row.cu_seqlens[:-1].long()
    others = torch.ones(len(row.tokens), dtype=torch.bool).index_fill(0, firsts, False)
    allowed = replace(
        everything,
        fields=row.fields | {"response_mask": others},
        num_response_tokens=int(others.sum()),
    )
    gradients = []
    for each in (everything, allowed):
        model.zero_grad()
        logprobs, entropy = token_logprobs(model, each)
        assert logprobs[firsts].eq(0).all() and entropy[firsts].eq(0).all()
        assert logprobs[others].lt(0).all()
        logprobs.sum().backward()
        gradients.append(model.lm_head.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_model_under_ddp_is_refused_and_the_way_that_is_named_reduces_gradients():
    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def forward(self, row):
            return token_logprobs(self.model, row)

    def job():
        (row,) = pack(random_sequences([(3, 9)], seed=dist.get_rank()), 50)
        wrapped = nn.parallel.DistributedDataParallel(make_model())
        with pytest.raises(ValueError, match="DistributedDataParallel is no .* forward of"):
            token_logprobs(wrapped, row)
        scorer = nn.parallel.DistributedDataParallel(Scorer())
        scorer(row)[0].sum().backward()
        return scorer.module.model.lm_head.weight.grad

    first, second = run_ranks(2, job)
    assert torch.equal(first, second) and first.abs().max() > 0


# Mutants that lived


def test_a_warm_up_leaves_no_gradient(monkeypatch):
    """Step 0 of every GPU run would add that of the warm-up's rows."""
    monkeypatch.setattr(logprobs_file, "_is_compiled", lambda model: True)
    monkeypatch.setattr(logprobs_file, "_compiled", lambda function: function)
    model, row = make_model(), pack(random_sequences([(3, 9)]), 50)[0]
    backwards, passes = [], []
    model.lm_head.weight.register_hook(lambda grad: backwards.append(grad))
    model.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    warm_up([model, None], [row], lambda model: contextlib.nullcontext())
    assert len(backwards) == 1 and all(p.grad is None for p in model.parameters())
    warm_up([model], [row], lambda model: contextlib.nullcontext(), kinds=[True])
    model.requires_grad_(False)
    warm_up([model], [row], lambda model: contextlib.nullcontext(), kinds=[True])
    assert passes == [False, True, True, False] and len(backwards) == 2


def test_values_of_a_bf16_critic_are_not_rounded_to_bf16():
    critic = make_model().bfloat16()
    critic.score = nn.Linear(32, 1, bias=False).bfloat16()
    (row,) = pack(random_sequences([(3, 20)]), 50)
    states = []
    critic.model.register_forward_hook(lambda *x: states.append(x[2].last_hidden_state[0]))
    values = token_values(critic, row).detach()
    expected = states[0][2:-1].float() @ critic.score.weight[0].float()
    torch.testing.assert_close(values[3:], expected, rtol=1e-6, atol=1e-6)


def test_after_a_pass_without_gradients_a_sharded_model_holds_shards_again():
    """The root stays gathered for a backward that never comes."""

    def job():
        model = make_model()
        for part in [*model.model.layers, model]:
            fully_shard(part)
        with torch.no_grad():
            token_logprobs(model, pack(random_sequences([(3, 9)]), 50)[0])
        return all(isinstance(p, DTensor) for p in model.parameters())

    assert run_ranks(2, job) == [True, True]
