"""Shared prefixes: a group's prompt once in a row, and everything else as with a copy for each
response.
"""

import contextlib
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from jobs import Scripted, largest_difference, records, settings, train, weights
from ranks import run_ranks
from rows import ARCHITECTURES, VOCAB_SIZE, make_model
from test_logprobs import tiny_reward_model
from test_model import kernel_attention
from torch.distributed.fsdp import FSDPModule, fully_shard

import attention
import logprobs
import memory
from advantages import GaeConfig, estimate
from attention import use_packed_attention
from batch import BatchConfig
from exchange import exchange
from logprobs import model_scores, token_logprobs, token_values, warm_up, with_values
from losses import CriticConfig, LossConfig, actor_loss, critic_loss
from metrics import Cost, Metrics
from packing import (
    common_prefixes,
    lay_out,
    pack,
    pack_alike,
    rows_of_all_sizes,
    sequence,
    unpack,
)
from prefix import share


def ids(*numbers):
    return torch.tensor(numbers)


def random_group(num_prompt, lengths, generator, learn=True):
    """Sequences of one prompt with the fields that a loss reads."""
    prompt = torch.randint(3, VOCAB_SIZE, (num_prompt,), generator=generator)
    made = []
    for length in lengths:
        response = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
        numbers = torch.randn(3, length, generator=generator)
        fields = dict(advantages=numbers[0], rollout_logprobs=numbers[1] - 4, scores=numbers[2][0])
        fields |= dict(old_logprobs=numbers[1] - 4.1, ref_logprobs=numbers[2] - 4)
        made.append(sequence(prompt, response, learn=learn, **fields))
    return made


def random_groups(sizes, most_prompt, most_response, seed=0):
    """(sequences, the group of each): groups of these sizes, lengths up to the limits."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    groups = []
    for i, size in enumerate(sizes):
        lengths = [draw.randint(1, most_response) for _ in range(size)]
        sequences += random_group(draw.randint(1, most_prompt), lengths, generator)
        groups += [i] * size
    return sequences, groups


def both_layouts(sequences, groups, capacity):
    """(plain rows, shared rows)."""
    return pack(sequences, capacity), pack(sequences, capacity, groups=groups, share=share)


def by_sequence(rows, values, name="response_mask"):
    """{sequence: its values at the tokens that it learns from}."""
    found = {}
    for row, value in zip(rows, values, strict=True):
        parts = zip(row.source, unpack(row, value), unpack(row, row.fields[name]), strict=True)
        found |= {i: x[mask] for i, x, mask in parts}
    return found


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def test_a_row_has_a_groups_prompt_once_and_knows_what_stands_before_each_token():
    """The picture of the file's lesson."""
    prompt = ids(7, 8, 9)
    group = [sequence(prompt, ids(*r), advantages=a) for r, a in (((1, 2), 0.5), ((3, 4, 5), -1.0))]
    group.append(sequence(prompt, ids(6), advantages=2.0))
    other = sequence(ids(4), ids(4, 4), advantages=3.0)
    (row,) = pack([*group, other], 20, groups=[5, 5, 5, 2], share=share)
    assert row.tokens.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6, 4, 4, 4]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 3, 0, 1, 2]
    assert row.cu_seqlens.tolist() == [0, 5, 8, 9, 12] and row.max_seqlen == 5
    assert row.prefix.previous.tolist() == [-1, 0, 1, 2, 3, 2, 5, 6, 2, -1, 9, 10]
    keys = [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 0, 1, 2, 8, 9, 10, 11]
    assert row.prefix.keys.tolist() == keys
    assert row.prefix.cu_seqlens_k.tolist() == [0, 5, 11, 15, 18]
    assert row.prefix.max_seqlen_k == 6 and row.prefix.lengths == (0, 3, 3, 0)
    assert row.source == (0, 1, 2, 3) and row.num_response_tokens == 8
    assert row.cu_seqlens.dtype == row.prefix.cu_seqlens_k.dtype == torch.int32
    advantages = [0, 0, 0, 0.5, 0.5, -1, -1, -1, 2, 0, 3, 3]
    assert row.fields["advantages"].tolist() == advantages
    # At a capacity of 10 the other one lies alone; 8 tokens hold two responses, and the third one
    # has the prompt again.
    first, second = pack([*group, other], 10, groups=[5, 5, 5, 2], share=share)
    assert (first.source, second.source) == ((0, 1, 2), (3,))
    assert second.prefix.keys.tolist() == [0, 1, 2] and second.prefix.lengths == (0,)
    rows = pack(group, 8, groups=[0, 0, 0], share=share)
    assert [row.source for row in rows] == [(0, 1), (2,)]
    assert rows[1].tokens.tolist() == [7, 8, 9, 6]


def test_only_what_a_whole_group_has_in_common_and_none_learns_from_is_shared():
    def prefix_of(*pairs, learn=True):
        made = [sequence(ids(*prompt), ids(*response), learn=learn) for prompt, response in pairs]
        return common_prefixes(made, len(made))[0]

    assert prefix_of(((1, 2, 3), (4, 5)), ((1, 2, 3), (4, 6))) == 3  # both have advantages of 4
    assert prefix_of(((1, 2, 3), (4, 5)), ((1, 2), (3, 4))) == 2
    assert prefix_of(((1, 2, 3), (4,)), ((1, 9, 3), (4,))) == 1
    assert prefix_of(((1, 2), (4,)), ((3, 2), (4,))) == 0
    assert prefix_of(((1, 2), (4,))) == 0
    assert prefix_of(((1, 2), ()), ((1, 2), (3,))) == 1  # a token of its own is left of each
    assert prefix_of(((1, 2), (4, 5, 6)), ((1, 2), (4, 5, 7)), learn=False) == 4
    with pytest.raises(ValueError, match="3 sequences: are no whole groups of 2"):
        common_prefixes([sequence(ids(1), ids(2))] * 3, 2)
    # Sequences without anything in common are as they were.
    pair = [sequence(ids(1, 2), ids(4)), sequence(ids(3, 2), ids(4))]
    (row,) = pack(pair, 8, groups=[0, 0], share=share)
    assert row.tokens.tolist() == [1, 2, 4, 3, 2, 4] and row.prefix.keys.tolist() == list(range(6))


@pytest.mark.parametrize("capacity", [90, 200, 10_000])
def test_the_copies_can_be_put_back(capacity):
    sequences, groups = random_groups([4, 1, 3], 30, 40)
    for row in pack(sequences, capacity, groups=groups, share=share):
        plain = row.plain()
        (expected,) = pack([sequences[i] for i in row.source], 10_000)
        for name in ("tokens", "position_ids", "cu_seqlens"):
            assert getattr(plain, name).equal(getattr(expected, name))
        assert plain.max_seqlen == expected.max_seqlen and plain.prefix is None
        assert plain.source == row.source
        for name, x in expected.fields.items():
            assert plain.fields[name].equal(x)
        assert expected.plain() is expected


CASES = {
    "one response": ([1, 1], 20, 20, 10_000),
    "random": ([1, 16, 7, 2], 40, 30, 10_000),
    "split over rows": ([16, 9], 30, 40, 150),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_entropy_values_and_gradients_equal_those_of_plain_rows(architecture, case):
    """gemma3 has a sliding window of 4 tokens, gpt2 learned positions."""
    compare(make_model(architecture), *random_groups(*CASES[case][:3]), CASES[case][3])


@pytest.mark.slow
def test_groups_of_16_with_prompts_of_500_and_responses_of_300_are_the_same_too():
    model = make_model(max_position_embeddings=1024)
    compare(model, *random_groups([16, 3, 1, 8], 500, 300, seed=3), 4096)
    model.train().gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    compare(model, *random_groups([16, 3, 1, 8], 500, 300, seed=4), 2048)


def compare(model, sequences, groups, capacity):
    found = []
    draws = torch.Generator().manual_seed(5)
    factors = [torch.randn(len(s["tokens"]), 2, generator=draws) for s in sequences]
    for s, factor in zip(sequences, factors, strict=True):
        s |= {"first": factor[:, 0].contiguous(), "second": factor[:, 1].contiguous()}
    model.score = torch.nn.Linear(32, 1, bias=False)
    torch.nn.init.ones_(model.score.weight)
    rows_of = both_layouts(sequences, groups, capacity)
    for rows in rows_of:
        model.zero_grad()
        seen = []
        for row in rows:
            mask = row.fields["response_mask"]
            logprobs, entropy = token_logprobs(model, row)
            values = token_values(model, row)
            first, second = row.fields["first"][mask], row.fields["second"][mask]
            loss = (logprobs[mask] * first).sum() + (entropy[mask] * second).sum()
            (loss + (values[mask] * first * second).sum()).backward()
            seen.append(torch.stack([logprobs, entropy, values], -1).detach())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append((by_sequence(rows, seen), gradients))
    del model.score
    (plain, plain_gradients), (shared, shared_gradients) = found
    assert plain.keys() == shared.keys() == set(range(len(sequences)))
    for i, x in plain.items():
        torch.testing.assert_close(shared[i], x, rtol=1e-5, atol=1e-5 * x.abs().max().item())
    for name, x in plain_gradients.items():
        assert relative_error(shared_gradients[name], x) < 1e-5, name
    num_plain, num_shared = (sum(len(row.tokens) for row in rows) for rows in rows_of)
    assert num_shared <= num_plain and (num_shared < num_plain) == (
        max(groups.count(g) for g in groups) > 1
    )


@pytest.mark.parametrize("wrong", ["previous", "previous of first", "keys", "alignment"])
def test_the_same_comparison_sees_a_table_that_is_wrong_by_one(wrong):
    sequences, groups = random_groups([4, 3], 20, 20)
    [plain], [row] = both_layouts(sequences, groups, 10_000)
    seen = row.prefix
    firsts = row.cu_seqlens[1:4].long()  # the first tokens of three responses
    if wrong == "previous":
        seen = replace(seen, previous=(seen.previous + 1).clamp(max=len(row.tokens) - 1))
    elif wrong == "previous of first":
        previous = seen.previous.clone()
        previous[firsts] = firsts - 1  # the neighbour's last state
        seen = replace(seen, previous=previous)
    elif wrong == "keys":
        seen = replace(seen, keys=(seen.keys - 1).clamp(min=0))
    else:
        edges = seen.cu_seqlens_k.clone()
        edges[1:-1] += 1
        seen = replace(seen, cu_seqlens_k=edges, max_seqlen_k=seen.max_seqlen_k + 1)
    model = make_model()
    with torch.no_grad():
        expected = by_sequence([plain], [token_logprobs(model, plain)[0]])
        right = by_sequence([row], [token_logprobs(model, row)[0]])
        broken = replace(row, prefix=seen)
        found = by_sequence([broken], [token_logprobs(model, broken)[0]])
    assert max((right[i] - x).abs().max() for i, x in expected.items()) < 1e-4
    assert max((found[i] - x).abs().max() for i, x in expected.items()) > 0.1


LOSSES = {
    "token": LossConfig(kl_coef=0.1, entropy_coef=0.01),
    "sequence": LossConfig(normalize="sequence", ratio="sequence", importance="sequence"),
    "constant": LossConfig(normalize="constant"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_and_their_statistics_are_those_of_plain_rows(kind):
    """In one row, so that means over tokens are of the same tokens."""
    sequences, groups = random_groups([5, 1, 3], 20, 20)
    generator = torch.Generator().manual_seed(9)
    sequences += random_group(6, [4, 9], generator, learn=False)
    groups += [3, 3]
    totals = {"tokens": 400, "sequences": 9}
    model = make_model()
    found = []
    for [row] in both_layouts(sequences, groups, 10_000):
        model.zero_grad()
        logprobs, entropy = token_logprobs(model, row)
        loss, stats = actor_loss(logprobs, entropy, row, totals, LOSSES[kind], 20)
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append(({"loss": loss.detach()} | stats, gradients))
    (plain, plain_gradients), (shared, shared_gradients) = found
    assert plain["loss"] != 0
    for name, x in plain.items():
        torch.testing.assert_close(shared[name], x, rtol=1e-5, atol=1e-6, msg=name)
    assert relative_error(shared_gradients, plain_gradients) < 1e-5


def test_a_critics_advantages_returns_and_loss_are_those_of_plain_rows():
    sequences, groups = random_groups([5, 1, 3], 20, 20)
    critic = make_model()
    critic.score = torch.nn.Linear(32, 1, bias=False)
    totals = {"tokens": sum(int(s["response_mask"].sum()) for s in sequences)}
    found = []
    for rows in both_layouts(sequences, groups, 10_000):
        [[row]], stats = estimate(with_values(critic, [rows]), GaeConfig(kl_coef=0.1), 0.1)
        loss, _ = critic_loss(token_values(critic, row), row, totals, CriticConfig())
        names = ("advantages", "returns", "values")
        fields = torch.stack([row.fields[name] for name in names], -1)
        found.append((by_sequence([row], [fields]), loss.item(), stats))
    (plain, plain_loss, plain_stats), (shared, shared_loss, shared_stats) = found
    for i, x in plain.items():
        torch.testing.assert_close(shared[i], x, rtol=1e-4, atol=1e-5)
    assert shared_loss == pytest.approx(plain_loss, rel=1e-5)
    assert shared_stats == pytest.approx(plain_stats, rel=1e-4)


def test_scores_of_a_reward_model_are_those_of_plain_rows():
    model = tiny_reward_model()
    generator = torch.Generator().manual_seed(0)
    texts = []
    for num_prompt in (5, 9):
        prompt = torch.randint(3, 32, (num_prompt,), generator=generator)
        for n in (4, 1, 12):
            texts.append(sequence(prompt, torch.randint(3, 32, (n,), generator=generator)))
    rows = pack_alike(texts, 30, num_sharing=3, share=share)
    assert [len(row.tokens) for row in rows] == [26, 22]
    with pytest.raises(ValueError, match="needs a `score` head"):  # sdpa knows no keys
        model_scores(model, rows)
    use_packed_attention(model)
    expected = model_scores(model, pack_alike(texts, 30))
    assert model_scores(model, rows) == pytest.approx(expected, abs=1e-5)
    assert all(row.prefix is None for row in pack_alike(texts, 30, share=share))


def gradients_of_a_step(num_ranks, make_groups, share_it):
    """Full gradients of a loss of a step, its rows' lengths, and the totals, on each rank."""
    rank = dist.get_rank()
    model = make_model()
    for part in [*model.model.layers, model]:
        fully_shard(part)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    sequences, groups = make_groups()
    mine = [s for s, group in zip(sequences, groups, strict=True) if group % num_ranks == rank]
    config = BatchConfig(group_size=4, prompts_per_step=2, num_minibatches=2, tokens_per_row=120)
    minibatches = [i // 4 % 2 for i in range(len(mine))]
    if num_ranks == 4:
        minibatches = [rank // 2 % 2] * len(mine)
    rows, totals = lay_out(
        mine,
        minibatches,
        config,
        exchange=exchange,
        like=sequences[0],
        share=share if share_it else None,
    )
    for row in rows[0] + rows[1]:
        logprobs, entropy = token_logprobs(model, row)
        loss, _ = actor_loss(
            logprobs, entropy, row, {"tokens": 100, "sequences": 9}, LossConfig(), 9
        )
        loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    lengths = [[len(row.tokens) if row.source else 0 for row in part] for part in rows]
    return found, lengths, totals


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_step_is_the_same_on_any_ranks_and_groups_are_split_where_it_pays(num_ranks):
    def four_groups():
        return random_groups([4, 4, 4, 4], 40, 40, seed=2)

    [(expected, plain_lengths, plain_totals)] = run_ranks(
        1, gradients_of_a_step, 1, four_groups, False
    )
    results = run_ranks(num_ranks, gradients_of_a_step, num_ranks, four_groups, True)
    for found, lengths, totals in results:
        for name, x in expected.items():
            assert relative_error(found[name], x) < 1e-5, name
        assert [len(part) for part in lengths] == [len(part) for part in results[0][1]]
        assert sum(t["tokens"] for t in totals) == sum(t["tokens"] for t in plain_totals)
        assert [t["sequences"] for t in totals] == [8, 8]
    num_computed = sum(sum(map(sum, lengths)) for _, lengths, _ in results)
    assert num_computed < 0.9 * sum(map(sum, plain_lengths))


def test_parts_of_several_groups_on_a_rank_have_one_prompt_each():
    """3 groups on 2 ranks are dealt in halves: 3 prompts of 5 tokens, 6 responses of 50."""

    def job():
        generator = torch.Generator().manual_seed(0)
        groups = [random_group(5, [50] * 4, generator) for _ in range(3)]
        mine = [*groups[0], *groups[1]] if dist.get_rank() == 0 else groups[2]
        config = BatchConfig(group_size=4)
        options = dict(exchange=exchange, like=mine[0], share=share)
        [[row]], _ = lay_out(mine, [0] * len(mine), config, **options)
        return len(row.tokens), row.prefix.lengths

    assert run_ranks(2, job) == [(3 * 5 + 6 * 50, (0, 5) * 3)] * 2


def test_a_limit_of_positions_is_of_sequences_with_their_prompt():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = make_model(rope_parameters=rope, max_position_embeddings=16)
    group = random_group(8, [2, 9], torch.Generator().manual_seed(0))
    [row] = pack(group, 100, groups=[0, 0], share=share)
    assert row.max_seqlen == 10
    with pytest.raises(ValueError, match="above 16 tokens, this row's has 17"):
        token_logprobs(model, row)


def test_a_shared_row_that_is_cut_in_two_has_the_prompt_in_both_parts():
    sequences, groups = random_groups([6, 2], 20, 20)
    [row] = pack(sequences, 10_000, groups=groups, share=share)
    parts = memory.halves(row)
    assert parts[0].source + parts[1].source == row.source
    assert all(part.prefix and part.prefix.lengths[0] == 0 for part in parts)
    model = make_model()
    with torch.no_grad():
        expected = by_sequence([row], [token_logprobs(model, row)[0]])
        found = by_sequence(parts, [token_logprobs(model, part)[0] for part in parts])
    for i, x in expected.items():
        torch.testing.assert_close(found[i], x, rtol=1e-5, atol=1e-5)
    assert sum(part.num_response_tokens for part in parts) == row.num_response_tokens
    num_prompt = max(row.prefix.lengths[:6])
    assert sum(len(part.tokens) for part in parts) == len(row.tokens) + num_prompt


def test_flops_and_efficiency_count_what_is_computed():
    group = [sequence(ids(1, 2, 3), ids(*r)) for r in ((4, 5), (6, 7))]
    [row] = pack(group, 20, groups=[0, 0], share=share)
    meter = Metrics()
    model = torch.nn.Linear(1, 1)
    meter._costs[model] = Cost(token=10.0, scored=100.0, pair=1.0)
    meter.add_pass(model, row)
    [entry] = meter._entries.values()
    # 7 tokens; 5^2 = 25 for the first sequence, 2 queries on 5 keys less the 2^2 / 2 above the
    # diagonal: 2 x (2 x 5 - 2) = 16 for the second
    assert entry.value == 70 + 25 + 16 + 400
    meter.add_layout([[row]], 14)
    assert meter.reduce()["packing/efficiency"] == 0.5


def test_moved_rows_are_whole_and_plain_ones_stay_as_they_were():
    sequences, groups = random_groups([3], 9, 9)
    [row] = pack(sequences, 100, groups=groups, share=share)
    on_meta = row.to("meta")
    assert on_meta.prefix.keys.is_meta and on_meta.prefix.previous.is_meta
    assert on_meta.prefix.cu_seqlens_k.is_meta and on_meta.prefix.lengths == row.prefix.lengths
    config = BatchConfig(group_size=3, share_prefixes=False)
    rows, _ = lay_out(sequences, [0] * 3, config, exchange=exchange, like=sequences[0], share=share)
    assert rows[0][0].prefix is None and len(rows[0][0].tokens) == sum(
        len(s["tokens"]) for s in sequences
    )


@pytest.mark.slow
def test_20_steps_of_a_job_have_the_metrics_of_plain_rows(tiny, files, tmp_path):
    """The responses follow from the prompts, as one other token would make another run of it."""
    found = []
    for shares in (False, True):
        args = settings(
            tiny,
            files,
            tmp_path / str(shares),
            num_steps=20,
            learning_rate=1e-3,
            batch=dict(num_epochs=2, share_prefixes=shares),
            loss=dict(kl_coef=0.05, entropy_coef=0.01, ratio="sequence"),
        )
        out = train(args, world_size=2, **{"hf_backend.HfBackend": Scripted})
        found.append((records(out), weights(out)))
    (plain, plain_weights), (shared, shared_weights) = found
    assert largest_difference(shared_weights, plain_weights) < 1e-4
    names = [
        name for name in plain[0] if name.split("/")[0] in ("actor", "reward", "response_length")
    ]
    assert len(names) > 12
    for one, other in zip(plain, shared, strict=True):
        for name in names:
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
        assert other["packing/efficiency"] < one["packing/efficiency"]


@pytest.mark.slow
def test_after_a_warm_up_no_shared_row_compiles_anything(monkeypatch):
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **_: compile_layer(self, backend="eager", dynamic=True),
    )
    monkeypatch.setattr(attention, "_segment_attention", kernel_attention("shared_warm_up"))
    monkeypatch.setattr(logprobs, "_compiled", lambda function: function)

    def job():
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        model = make_model()
        for layer in model.model.layers:
            layer.compile(dynamic=True)
        config = BatchConfig(group_size=4, tokens_per_row=2048)
        warm_up([model], rows_of_all_sizes(config, 60, share), contextlib.nullcontext)
        compiled = counters["stats"]["unique_graphs"]
        rows = pack([], 2048, num_rows=1, like=sequence(ids(3), ids(4)), share=share)
        for seed, sizes in enumerate(([4] * 8, [1], [1, 1], [4], [2, 4, 3])):
            sequences, groups = random_groups(sizes, 60, 30, seed=seed)
            rows += pack(sequences, 2048, groups=groups, share=share)
        for row in rows:
            token_logprobs(model, row)[0].sum().backward()
            with torch.no_grad():
                token_logprobs(model, row)
        return compiled, counters["stats"]["unique_graphs"]

    [(compiled, after)] = run_ranks(1, job, timeout_s=300)
    assert 1 <= compiled == after
