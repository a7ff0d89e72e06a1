"""Three losses on one policy: each alone is what it was, together they are the weighted sum, and
one of weight 0 costs nothing.
"""

import functools
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from jobs import REWARDS, SCRIPTED, joined, largest_difference, records, settings, train, weights
from ranks import run_ranks
from tiny import save_tiny

import hybrid
from attention import use_packed_attention
from data import DataConfig, read_rows
from demonstrations import load_demonstrations, load_pairs
from examples import addition, mixture
from hub import load_tokenizer
from metrics import Metrics
from model import load_policy
from offload import Offload
from packing import sequence
from rewards import Scorer
from run import from_json

SCORER = {"grpo.Scorer": functools.partial(Scorer, callables=REWARDS)}
KINDS = ("sft", "dpo", "rl")


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """Files of 7 demonstrations and 5 pairs of unequal lengths."""
    directory = tmp_path_factory.mktemp("given")
    demonstrations = [{"prompt": f"{i}+", "response": "=" * (1 + 3 * i % 8)} for i in range(7)]
    pairs = [
        {"prompt": "1" * (1 + i), "chosen": "0" * (1 + i % 3), "rejected": "+" * (5 - i)}
        for i in range(5)
    ]
    for name, rows in (("sft", demonstrations), ("dpo", pairs)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text)
    return directory


def job(tiny, files, given, out, weights, **changes):
    """Args of a small job of hybrid.py with these weights."""
    known = dict(
        sft=dict(data=(f"{given}/sft.jsonl",), samples_per_step=5, max_tokens=24),
        dpo=dict(data=(f"{given}/dpo.jsonl",), pairs_per_step=3, max_tokens=24),
    )
    for name, value in changes.items():
        known[name] = known.get(name, {}) | value if isinstance(value, dict) else value
    return settings(tiny, files, out, entry=hybrid, weights=weights, **known)


def without_times(directory):
    mine = ("timing_s/", "throughput/", "perf/", "memory/", "communication/")
    return [
        {name: x for name, x in record.items() if not name.startswith(mine)}
        for record in records(directory)
    ]


def test_with_rewards_alone_the_run_is_grpos_bit_for_bit(tiny, files, given, tmp_path):
    """Two epochs, two minibatches, a KL term, evaluation; and neither text is even looked for."""
    changes = dict(
        eval_paths=(str(files / "7.jsonl"),),
        eval_every=1,
        loss=dict(kl_coef=0.1),
        batch=dict(num_epochs=2),
    )
    theirs = train(settings(tiny, files, tmp_path / "grpo", **changes), **SCORER)
    absent = dict(sft=dict(data=("/nowhere",)), dpo=dict(data=("/nowhere",)))
    args = job(tiny, files, given, tmp_path / "ours", (0, 0, 1), **changes, **absent)
    ours = train(args, **SCORER)
    assert without_times(ours) == without_times(theirs)
    expected = weights(theirs)
    assert {name: torch.equal(x, expected[name]) for name, x in weights(ours).items()} == (
        dict.fromkeys(expected, True)
    )


@pytest.mark.parametrize(("kind", "weights"), [("sft", (1, 0, 0)), ("dpo", (0, 1, 0))])
def test_a_loss_of_weight_0_costs_nothing(tiny, files, given, tmp_path, kind, weights):
    """No prompts, no engine, no scorer; no reference but for pairs."""

    def trainable(path, mesh, config, trainable=True, **options):
        assert trainable or kind == "dpo", "no reference is needed"
        return load_policy(path, mesh, config, trainable=trainable, **options)

    def refused(*_, **__):
        raise AssertionError("is not needed")

    other = "dpo" if kind == "sft" else "sft"
    changes = {other: dict(data=("/nowhere",)), "data_paths": ("/nowhere",)}
    changes[kind] = dict(eval_data=(f"{given}/{kind}.jsonl",), samples_per_step=7)
    if kind == "dpo":
        changes[kind] = dict(eval_data=(f"{given}/dpo.jsonl",))
    changes["batch"] = dict(num_minibatches=1)
    args = job(tiny, files, given, tmp_path, weights, eval_every=1, **changes)
    stand_ins = {
        "grpo.make_engine": refused,
        "grpo.prepare": refused,
        "model.load_policy": trainable,
    }

    first, last = records(train(args, **stand_ins))
    expected = "eval/sft_loss" if kind == "sft" else "eval/dpo_accuracy"
    assert expected in first and expected in last
    assert not [name for name in last if name.startswith((f"{other}/", "reward/", "rollout_corr/"))]
    assert ("timing_s/ref_logprobs" in last) == (kind == "dpo")
    assert last["throughput/tokens_per_sec"] > 0
    if kind == "sft":
        assert (
            last["sft/loss"] < first["sft/loss"] and last["eval/sft_loss"] < first["eval/sft_loss"]
        )
        # All of them in the first step, at temperature 1 whatever the sampler's is.
        assert first["sft/loss"] == pytest.approx(first["eval/sft_loss"], rel=1e-5)
        assert last["sft/perplexity"] == pytest.approx(2.718281828 ** last["sft/loss"], rel=1e-6)
    else:
        assert first["eval/dpo_accuracy"] == 0.0 < last["eval/dpo_accuracy"]
        assert last["dpo/loss"] < first["dpo/loss"]


def batches_of(path, given):
    """{kind: (sequences, minibatch of each)}, of one minibatch; and a hybrid.Args for them."""
    tokenizer = load_tokenizer(path, "--model")
    known = tokenizer, DataConfig(), 24
    [sft] = load_demonstrations([f"{given}/sft.jsonl"], *known, read_rows=read_rows)
    [dpo] = load_pairs([f"{given}/dpo.jsonl"], *known, read_rows=read_rows)
    draw = torch.Generator().manual_seed(0)
    rl = []
    for length in (1, 9, 4, 2, 6):
        ids = torch.randint(2, 14, (3 + length,), generator=draw)
        own = dict(advantages=float(length - 4), rollout_logprobs=torch.full((length,), -2.5))
        rl.append(sequence(ids[:3], ids[3:], **own))
    return {"sft": sft, "dpo": dpo[:3], "rl": rl}


def gradient(path, args, sequences, weight, order):
    """The full gradient of hybrid.py's update over the sequences of each kind, which lie on the
    ranks by `order`: {kind: ranks of its sequences in turn}; and the number of empty rows here.
    """
    policy, reference = (load_policy(path, joined(0, 0.0)) for _ in range(2))
    for model in (policy, reference):
        use_packed_attention(model)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.9)
    rank = dist.get_rank()
    batches = {}
    for kind, mine in sequences.items():
        here = [s for i, s in enumerate(mine) if order[kind][i % len(order[kind])] == rank]
        batches[kind] = here, [0] * len(here)
    meter = Metrics()
    rows, [totals] = hybrid.lay_out(args, batches, weight, meter, "cpu")
    [flat] = hybrid.with_fixed(args, range(1), policy, reference, rows, Offload(False), meter)
    hybrid.gradients(args, policy, flat, totals, meter)
    found = {name: p.grad.full_tensor() for name, p in policy.named_parameters()}
    return found, sum(1 for row in flat if not row.source)


def by_hand(path, sequences, kl_coef):
    """{kind: gradient} of cross-entropy and of DPO as the papers write them, in float64: a plain
    model, a text at a time; the reference is 0.9 of the policy.
    """
    from transformers import AutoModelForCausalLM

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for _ in range(2)
    )
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.9)

    def logprob(model, tokens, mask):
        log_p = model(tokens[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        return log_p.gather(-1, tokens[1:, None])[mask[1:]].sum()

    num_tokens = sum(int(s["response_mask"].sum()) for s in sequences["sft"])
    every = [logprob(policy, s["tokens"], s["response_mask"]) for s in sequences["sft"]]
    losses = {"sft": -sum(every) / num_tokens}
    margins = []
    for s in sequences["dpo"]:
        halves = [
            (s["tokens"][s["segment"] == i], s["response_mask"][s["segment"] == i]) for i in (0, 1)
        ]
        gained = [logprob(policy, *half) - logprob(reference, *half) for half in halves]
        margins.append(kl_coef * (gained[0] - gained[1]))
    losses["dpo"] = -sum(torch.log(1 / (1 + torch.exp(-m))) for m in margins) / len(margins)
    found = {}
    for kind, loss in losses.items():
        policy.zero_grad()
        loss.backward()
        found[kind] = {name: p.grad.float() for name, p in policy.named_parameters()}
    return found


def row_args(num_tokens):
    base = dict(
        batch=dict(tokens_per_row=num_tokens, num_minibatches=1, prompts_per_step=4, group_size=1),
        advantage=dict(baseline="batch"),
        data=dict(max_prompt_tokens=8),
        rollout=dict(max_response_tokens=16, temperature=0.7),
        sft=dict(data=("x",), max_tokens=12),
        dpo=dict(data=("x",), max_tokens=12, kl_coef=0.5),
        loss=dict(kl_coef=0.1),
    )
    return from_json(hybrid.Args(), base)


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4],
)
def test_the_gradient_of_a_mixed_batch_is_the_weighted_sum_of_each_kind_alone(
    tmp_path, given, world_size
):
    """1e-5 of the largest entry, on 1, 2 and 4 ranks, in short and long rows, where ranks lack one
    kind or all, and where the minibatch has none of one.
    """
    path = save_tiny(tmp_path, "llama")
    sequences = batches_of(path, given)
    weight = {"sft": 0.4, "dpo": 0.25, "rl": 0.35}
    one = dict.fromkeys(KINDS, 1.0)

    def alone():
        every = {kind: [0] for kind in KINDS}
        return {
            kind: gradient(path, row_args(512), {kind: sequences[kind]}, one, every)[0]
            for kind in KINDS
        }

    [parts] = run_ranks(1, alone)
    for kind, exact in by_hand(path, sequences, kl_coef=0.5).items():
        assert largest_difference(parts[kind], exact) < 1e-5, kind

    def expected(kinds):
        return {name: sum(weight[k] * parts[k][name] for k in kinds) for name in parts["sft"]}

    def mixed(orders):
        found = []
        for num_tokens, kinds, order in orders:
            own = {kind: sequences[kind] for kind in kinds}
            made, num_empty = gradient(path, row_args(num_tokens), own, weight, order)
            found.append((largest_difference(made, expected(kinds)), num_empty))
        return found

    everywhere = dict.fromkeys(KINDS, range(world_size))
    apart = {"sft": [0], "dpo": [world_size - 1], "rl": [0]}
    orders = [
        (24, KINDS, everywhere),
        (512, KINDS, apart),
        (24, ("sft", "dpo"), apart),
    ]
    ranks = run_ranks(world_size, mixed, orders)
    assert max(difference for rank in ranks for difference, _ in rank) < 1e-5
    assert world_size < 4 or any(num for rank in ranks for _, num in rank)


FADING = (0, 1, 1, 0.5, 2, 0.5, 0, 0.5, 3, 0, 0, 1)


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one_in_the_middle_of_a_schedule(
    tiny, files, given, tmp_path
):
    """Its data go on where they were, the engine's seeds and the weights of the losses too."""
    changes = dict(num_steps=4, loss=dict(kl_coef=0.1), run=dict(save_every=1, keep=9))
    whole = train(job(tiny, files, given, tmp_path / "whole", FADING, **changes), **SCORER)
    seen = [
        [name for name in ("sft/loss", "dpo/loss", "reward/mean") if name in record]
        for record in records(whole)
    ]
    assert seen == [
        ["sft/loss", "dpo/loss", "reward/mean"],
        ["sft/loss", "dpo/loss", "reward/mean"],
        ["sft/loss", "reward/mean"],
        ["reward/mean"],
    ]
    half = changes | dict(num_steps=2)
    train(job(tiny, files, given, tmp_path / "half", FADING, **half), **SCORER)
    changes["run"]["resume"] = True
    resumed = train(job(tiny, files, given, tmp_path / "half", FADING, **changes), **SCORER)
    assert without_times(resumed) == without_times(whole)
    expected = weights(whole)
    assert all(torch.equal(x, expected[name]) for name, x in weights(resumed).items())


@pytest.mark.slow
def test_a_run_of_three_on_two_ranks_is_that_on_one(tiny, files, given, tmp_path):
    """The samples follow from the prompts alone; 1e-4 of the largest weight after two steps."""
    found = []
    for world_size in (1, 2):
        args = job(tiny, files, given, tmp_path / str(world_size), (0.4, 0.3, 0.3))
        found.append(weights(train(args, world_size, **SCORER, **SCRIPTED)))
    assert largest_difference(found[1], found[0]) < 1e-4


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (dict(weights=(1.0, 0.0)), "--weights 1.0 0.0: must be three numbers"),
        (
            dict(model_path="x", weights=(1.0, 0.0, 0.0)),
            "--weights 1.0 0.0 0.0: must be 0 for sft, or with --sft.data FILE",
        ),
        (
            dict(model_path="x", weights=(0.0, 0.5, 0.0)),
            "--weights 0.0 0.5 0.0: must be 0 for dpo, or with --dpo.data FILE",
        ),
        (
            dict(check=True, model_path="x", weights=(1.0, 0.0, 0.0), sft=dict(data=["a"])),
            "--check True: must be with a weight for rl",
        ),
        (
            dict(
                model_path="x",
                weights=(1.0, 0.0, 0.0),
                sft=dict(data=["a"]),
                loss=dict(kl_coef=0.1),
                refresh_every=1,
            ),
            "--refresh-every 1: must be 0 without --loss.kl-coef: there is no reference",
        ),
        (
            dict(lora=dict(rank=4), model=dict(master_dtype="bfloat16")),
            "--model.master-dtype bfloat16: must be float32 with --lora.rank",
        ),
        (
            dict(dpo=dict(max_tokens=9000)),
            "--tokens-per-row 16384: must be at least 18000, for --dpo.max-tokens 9000",
        ),
        (
            dict(sft=dict(eval_data=["a"])),
            "--sft.eval-data a: must be with --eval-every 20",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_do_not_fit_together_are_refused(changes, refusal):
    with pytest.raises(ValueError) as raised:
        from_json(hybrid.Args(), changes)
    assert refusal in str(raised.value)


def test_rows_need_not_hold_responses_where_none_is_sampled():
    only = {"model_path": "x", "weights": (1.0, 0.0, 0.0), "batch": {"tokens_per_row": 512}}
    given = {"data": ["a"], "max_tokens": 128}
    assert from_json(hybrid.Args(), only | {"sft": given}).longest == 128
    with pytest.raises(ValueError, match="--tokens-per-row 512: must be at least 1536"):
        from_json(hybrid.Args(), only | {"sft": given, "weights": (1.0, 0.0, 0.1)})


def test_the_first_samples_are_compared_where_rewards_come_later(monkeypatch):
    counts = []
    monkeypatch.setattr(
        hybrid.witness, "compare", lambda args, num_done, *_: counts.append(num_done)
    )
    monkeypatch.setattr(hybrid.logprobs, "with_logprobs", lambda model, rows, *_: rows)
    args = hybrid.Args(weights=(0.0, 1.0, 0.0, 0.0, 2.0, 1.0, 0.0, 1.0))
    for step in range(4):
        rows = {"rl": [[]]} if step else {}
        hybrid.with_fixed(args, range(step), None, None, rows, Offload(False), Metrics())
    assert counts == [0, 1, 2]


def test_a_check_reads_what_is_given(tiny, files, given, tmp_path):
    args = job(tiny, files, given, tmp_path, (0.5, 0.0, 0.5), check=True)
    args = replace(args, sft=replace(args.sft, data=("/nowhere",)))
    with pytest.raises(SystemExit, match="error: --sft.data /nowhere: no such file"):
        train(args, **SCORER)


def test_the_built_in_data_are_held_out_and_say_what_they_teach():
    (demonstrations, some), (pairs, others) = mixture.demonstrations(), mixture.pairs()
    assert not {row["prompt"] for row in demonstrations} & {row["prompt"] for row in some}
    assert not {row["prompt"] for row in pairs} & {row["prompt"] for row in others}
    assert len(pairs) + len(others) == 100
    for row in demonstrations + some:
        a, b = map(int, row["prompt"].strip("=").split("+"))
        assert int(row["response"]) == a + b and len(row["response"]) == 4
    for row in pairs + others:
        assert int(row["chosen"]) == int(row["rejected"]) == eval(row["prompt"].strip("="))
        assert row["chosen"] == row["rejected"].zfill(3) != row["rejected"]
    texts = {row["prompt"] for row in addition.problems(held_out=False)}
    assert not texts & {row["prompt"] for row in pairs + demonstrations}


@pytest.mark.slow
def test_texts_teach_beside_rewards_and_a_measure_stays_where_its_weight_is_0(tmp_path):
    """18 steps of the built-in job; that rewards rise too takes more (benchmarks/one_run.py)."""
    found = {}
    for name, given in (("all", (0.1, 0.1, 0.8)), ("no dpo", (0.1, 0.0, 0.8))):
        changes = dict(num_steps=18, eval_every=18, weights=given, log=dict(plot_every=0))
        changes["run"] = dict(output_dir=str(tmp_path), name=name, save_minutes=0.0)
        args = from_json(hybrid.Args(), mixture.SETTINGS | changes | dict(rollout=HF))
        found[name] = records(train(args))
    first, last = found["all"][0], found["all"][-1]
    assert last["eval/sft_token_accuracy"] > first["eval/sft_token_accuracy"] + 0.02
    assert last["eval/dpo_preferred"] > 0.8 > first["eval/dpo_preferred"]
    assert last["eval/dpo_accuracy"] > 0.8 and first["eval/dpo_accuracy"] == 0
    assert last["eval/reward"] > first["eval/reward"] - 0.15
    first, last = found["no dpo"][0], found["no dpo"][-1]
    assert abs(last["eval/dpo_preferred"] - first["eval/dpo_preferred"]) < 0.25
    assert "dpo/loss" not in last and "eval/dpo_accuracy" not in last


HF = dict(engine="hf", max_response_tokens=8)


def test_a_kind_is_used_if_it_has_a_weight_in_any_step():
    args = from_json(hybrid.Args(), dict(weights=(0.0, 1.0, 0.0, 0.0, 9.0, 0.0, 0.0, 1.0)))
    assert [args.uses(kind) for kind in KINDS] == [True, False, True]
    assert [hybrid.Args().uses(kind) for kind in KINDS] == [True, True, True]
