"""The plain backend: pads on the left change nothing, batches neither, and the first stop ends."""

from dataclasses import replace

import pytest
import torch
from engines import EOS, PROMPTS, Kept, facts
from lab import lab
from tiny import save_tiny
from transformers import AutoModelForCausalLM

from hf_backend import HfBackend


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    path = save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2")
    with lab(1, lambda: Kept({"qwen2": path}, make=HfBackend)) as on_ranks:
        yield path, on_ranks


def greedy(kept, batch_size):
    with kept.ready() as engine:
        engine.backend.batch_size = batch_size
        return facts(engine.generate(PROMPTS, 1, temperature=0.0))


def test_greedy_answers_are_those_of_a_loop_over_one_prompt_at_a_time(rank):
    """Independent of `generate`: the whole prefix is computed anew for each token."""
    path, on_ranks = rank
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    [found] = on_ranks(greedy, 64)
    for prompt, (response, _) in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        for token in response:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert logits.argmax() == token
            ids.append(token)


def test_batches_of_any_size_give_the_same_answers(rank):
    _, on_ranks = rank
    [[whole], [ones]] = on_ranks(greedy, 64), on_ranks(greedy, 1)
    assert whole == ones


def test_the_scores_of_a_batch_fit_in_4_gib(rank):
    """generate keeps the scores of every step: 152,000 words x 8,192 steps are 5 GB a sequence."""
    _, on_ranks = rank

    def size(kept, limit):
        config = kept.engines["qwen2"].config

        backend = HfBackend(
            kept.paths["qwen2"],
            replace(config, max_response_tokens=limit),
            dtype=torch.float32,
            max_model_len=8,
            num_samples=10**9,
            stop_ids=[EOS],
            seed=0,
        )
        return backend.batch_size * limit * 14 * 4

    [small] = on_ranks(size, 1000)
    [large] = on_ranks(size, 2**28)
    assert 0.9 * 2**32 < small <= 2**32 < large
