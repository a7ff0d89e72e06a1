"""From prompts to scored groups: texts, while the engine runs, and what a reward sees."""

import functools
import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from engines import EOS
from ranks import run_ranks

import sampling
from data import Prompt
from examples import addition
from hub import load_tokenizer
from metrics import Metrics
from rollout import Engine, Rollout, RolloutConfig
from sampling import draw


class Ends:
    """A backend that ends each prompt's samples with these ids and log-probabilities."""

    def __init__(self, *_, response=(3,), logprob=-1.0, truncated=False, **__):
        self.ids = torch.tensor(response)
        self.logprobs = torch.full((len(response),), logprob)
        self.logprobs[:-1] = -1.0
        self.truncated = truncated

    def run(self, prompts, order, num_samples, temperature, seed):
        for index in range(len(prompts) * num_samples):
            yield [(index, self.ids, self.logprobs, self.truncated)]


class Submitted(list):
    """A scorer that keeps what it is given."""

    def submit(self, index, sample):
        self.append(sample)


def engine_that_ends(**response):
    engine = Engine(
        functools.partial(Ends, **response),
        "",
        RolloutConfig("hf", 8),
        max_prompt_tokens=8,
        num_samples=1,
        stop_ids=[EOS],
    )
    engine.state = "ready"
    return engine


class OneByOne:
    """Stands for an engine: one response a prompt, each handed on when `wait(index)` returns."""

    def __init__(self, wait):
        self.wait = wait

    def generate_share(self, prompts, num_samples, *, temperature, seed, on_finished):
        drawn = {}
        for i, prompt in enumerate(prompts):
            response = torch.tensor([2 + i, EOS])
            drawn[i] = [Rollout(torch.tensor(prompt), response, torch.zeros(2), False)]
            on_finished([(i, i, *drawn[i])])
            self.wait(i)
        return drawn


def test_responses_are_decoded_and_submitted_while_the_engine_runs():
    """The engine goes on only when the scorer has the response before."""
    scorer = Submitted()

    def until_it_is_there(index):
        limit = time.monotonic() + 20
        while len(scorer) <= index:
            assert time.monotonic() < limit, "submitted at the end alone"
            time.sleep(0.001)

    prompts = [Prompt([i], f"p{i}", "", "") for i in (3, 4, 5)]
    drawn = draw(OneByOne(until_it_is_there), scorer, addition.make_tokenizer(), prompts, 1, 0)
    assert list(drawn) == [0, 1, 2]
    assert [sample["prompt"] for sample in scorer] == ["p3", "p4", "p5"]
    assert [sample["response"] for sample in scorer] == ["0", "1", "2"]


@pytest.mark.parametrize("what", ["decode", "submit"])
def test_what_fails_beside_the_engine_stops_the_run(monkeypatch, what):
    def fail(*_):
        raise OverflowError("out of range")

    scorer = Submitted()
    tokenizer = addition.make_tokenizer()
    if what == "decode":
        monkeypatch.setattr(sampling, "_decoder", lambda tokenizer: fail)
    else:
        monkeypatch.setattr(scorer, what, fail)
    with pytest.raises(OverflowError, match="out of range"):
        draw(OneByOne(lambda _: None), scorer, tokenizer, [Prompt([3], "p", "", "")], 1, 0)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_sampler_that_reports_what_is_not_finite_is_said_to(bad, capsys):
    """One such number ended the run. actor_loss makes a skipped minibatch of it."""
    prompts = [Prompt([3], "1", "", "", {})] * 3
    tokenizer = addition.make_tokenizer()
    draw(engine_that_ends(response=(3, 4, EOS), logprob=bad), None, tokenizer, prompts, 1, seed=0)
    what = "log-probabilities of 3 of 3 responses are not finite: it computes garbage"
    assert capsys.readouterr().out == f"warning: the sampler's {what}\n"
    draw(engine_that_ends(response=(3, 4, EOS)), None, tokenizer, prompts, 1, seed=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "tags", [("<think>", "</think>"), ("<tool_call>", "</tool_call>")], ids=["think", "tool"]
)
@pytest.mark.parametrize("truncated", [False, True])
def test_special_tokens_that_are_content_reach_the_reward_and_the_end_does_not(tags, truncated):
    """trl#2897, #4521, verl#1724, #3958: tags that are special tokens were cut from the text, so
    that no format reward could be earned.
    """
    tokenizer = addition.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tags)})
    first, last = tokenizer.convert_tokens_to_ids(tags)
    four = tokenizer("4").input_ids
    ids = (first, *four, last, *four) + (() if truncated else (EOS,))
    scorer = Submitted()
    engine = engine_that_ends(response=ids, truncated=truncated)
    draw(engine, scorer, tokenizer, [Prompt([3], "1+3=", "4", "", {"level": 2})], 1, seed=0)
    [sample] = scorer
    assert sample["response"].replace(" ", "") == f"{tags[0]}4{tags[1]}4"
    assert sample["truncated"] is truncated and sample["level"] == 2


@pytest.mark.parametrize("text", ["x != y", "a , b . c", "do n't", "1 ? 2 ! 3", "  two  spaces "])
def test_spaces_before_punctuation_reach_the_reward_as_they_were_sampled(tmp_path, text):
    """transformers#44914: `x != y` was decoded as `x!= y` where the tokenizer's settings ask for
    it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", *sorted(set(text))]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=True)
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), "--model x")
    scorer = Submitted()
    engine = engine_that_ends(response=(*tokenizer(text).input_ids, EOS))
    draw(engine, scorer, tokenizer, [Prompt([2], "", "", "", {})], 1, seed=0)
    assert scorer[0]["response"] == text


def test_a_response_cut_off_behind_a_special_token_keeps_it():
    """The limit ended it: its last token is no end."""
    scorer = Submitted()
    tokenizer = addition.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    [end] = tokenizer.convert_tokens_to_ids(["</think>"])
    engine = engine_that_ends(response=(3, end), truncated=True)
    draw(engine, scorer, tokenizer, [Prompt([3], "1", "", "", {})], 1, seed=0)
    assert scorer[0]["response"].endswith("</think>")


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_texts_are_those_of_decode_whatever_the_tokenizer(fast):
    """Cleaning up spaces, which some configs ask for, is made for WordPiece."""
    tokenizer = addition.make_tokenizer()
    responses = [[3, 4, EOS], [5], [EOS, 6, EOS]]
    made = [
        Rollout(torch.tensor([2]), torch.tensor(ids), torch.zeros(len(ids)), False)
        for ids in responses
    ]
    plain = SimpleNamespace(
        decode=tokenizer.decode,
        all_special_ids=tokenizer.all_special_ids,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    found = sampling._decoder(tokenizer if fast else plain)(made)
    assert found == [tokenizer.decode(ids) for ids in ([3, 4], [5], [6])]


def test_responses_of_one_step_are_decoded_together():
    scorer = Submitted()
    seen = []
    tokenizer = addition.make_tokenizer()
    backend = SimpleNamespace(
        decode_batch=lambda ids, **_: seen.append(len(ids)) or ["x"] * len(ids)
    )
    engine = engine_that_ends(response=(3, EOS))
    ended = [Prompt([i], f"p{i}", "", "", {}) for i in (3, 4)]
    watched = SimpleNamespace(
        backend_tokenizer=backend,
        all_special_ids=tokenizer.all_special_ids,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
    )
    engine.backend.run = lambda *_: iter(
        [[(i, torch.tensor([3, EOS]), torch.zeros(2), False) for i in range(4)]]
    )
    draw(engine, scorer, watched, ended, 2, seed=0)
    assert seen == [4] and len(scorer) == 4


def test_begins_ends_and_pads_inside_a_response_are_no_content():
    scorer = Submitted()
    tokenizer = addition.make_tokenizer()
    pad = tokenizer.pad_token_id
    engine = engine_that_ends(response=(pad, 3, EOS, 4, pad), truncated=True)
    draw(engine, scorer, tokenizer, [Prompt([3], "1", "", "", {})], 1, seed=0)
    assert scorer[0]["response"] == tokenizer.decode([3, 4])


def test_a_response_is_scored_in_its_own_place_on_every_rank():
    """3 prompts x 2 samples on 2 ranks: one prompt on the first, two on the second. The places are
    those of the flat order of what a rank owns.
    """

    def job():
        engine = engine_that_ends(response=(3, EOS))
        ended = []
        drawn = engine.generate_share([[3], [4], [5]], 2, seed=0, on_finished=ended.extend)
        flat = [(p, rollout) for p, rollouts in drawn.items() for rollout in rollouts]
        for place, position, rollout in ended:
            assert flat[place][0] == position and flat[place][1] is rollout
        return [place for place, _, _ in ended], [position for _, position, _ in ended]

    assert run_ranks(2, job) == [([0, 1], [0, 0]), ([0, 1, 2, 3], [1, 1, 2, 2])]


def test_a_group_has_the_rewards_of_its_own_samples():
    one = Rollout(torch.tensor([3]), torch.tensor([4]), torch.tensor([-1.0]), False)
    prompts = [Prompt([i], f"p{i}", "", "", {}) for i in range(3)]
    groups = sampling.to_groups(prompts, {2: [one] * 2, 0: [one] * 2}, [1.0, 2.0, 3.0, 4.0])
    assert [(g.position, g.prompt.text, g.rewards) for g in groups] == [
        (2, "p2", [1.0, 2.0]),
        (0, "p0", [3.0, 4.0]),
    ]


def test_an_end_of_turn_that_ended_a_response_is_no_part_of_it():
    """Of a tokenizer with an end of turn beside its end."""
    scorer = Submitted()
    tokenizer = addition.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    engine = engine_that_ends(response=(3, end))
    draw(engine, scorer, tokenizer, [Prompt([3], "1", "", "", {})], 1, seed=0)
    assert scorer[0]["response"] == tokenizer.decode([3])


def test_the_engine_does_not_wait_for_texts():
    """Nothing is submitted before it has ended."""
    ended = threading.Event()

    class Late(Submitted):
        def submit(self, index, sample):
            assert ended.wait(5), "the engine waited"
            super().submit(index, sample)

    scorer = Late()
    engine = OneByOne(lambda i: ended.set() if i == 2 else None)
    prompts = [Prompt([i], f"p{i}", "", "") for i in (3, 4, 5)]
    draw(engine, scorer, addition.make_tokenizer(), prompts, 1, 0)
    assert len(scorer) == 3


def test_what_was_sampled_is_not_hidden_by_the_datas_columns():
    scorer = Submitted()
    columns = {"response": "of the data", "truncated": "yes", "level": 1}
    prompt = Prompt([3], "p", "7", "", columns)
    draw(engine_that_ends(response=(3, EOS)), scorer, addition.make_tokenizer(), [prompt], 1, 0)
    sample = {"prompt": "p", "response": "1", "answer": "7", "truncated": False, "level": 1}
    assert scorer == [sample]


def test_an_evaluation_is_greedy_and_then_of_k_samples_under_names_of_its_own(monkeypatch):
    """Two prompts of two sets, k = 2."""
    asked = []

    def drawn(engine, scorer, tokenizer, prompts, num_samples, seed, temperature):
        asked.append((num_samples, seed, temperature))
        return {i: ["rollout"] * num_samples for i in range(len(prompts))}

    monkeypatch.setattr(sampling, "draw", drawn)
    found = {2: [1.0, 0.0], 4: [1.0, 0.0, 0.0, 0.0]}
    stats = {"error_frac": 0.5, "timeout_frac": 0.25, "f_mean": 9.0}
    scorer = SimpleNamespace(collect=lambda num: (found[num], stats))
    prompts = [Prompt([3], "p", "", source) for source in ("easy", "hard")]
    meter = Metrics()
    made = sampling.evaluate(None, scorer, None, prompts, 2, 7, meter)
    assert asked == [(1, 7, 0.0), (2, 7, None)]
    assert [[group.rewards for group in groups] for groups in made] == [
        [[1.0], [0.0]],
        [[1.0, 0.0], [0.0, 0.0]],
    ]
    record = meter.reduce()
    assert record["timing_s/eval"] > 0
    own = {name: x for name, x in record.items() if name.startswith(("eval/", "reward/"))}
    rewards = {"eval/reward": 0.5, "eval/easy/reward": 1.0, "eval/hard/reward": 0.0}
    failed = {"eval/error_frac": 0.5, "eval/timeout_frac": 0.25}
    assert own == rewards | failed | {"eval/mean@2": 0.25, "eval/pass@2": 0.5}
