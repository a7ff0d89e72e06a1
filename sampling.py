# SPDX-FileCopyrightText: 2026 handful contributors (sampling.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""From prompts to scored groups: draw, decode, score; and the same for evaluation.

The problem. Rewards want text and the engine gives tokens. Decoded and scored after the rollout,
responses keep the GPU waiting. Decoded one by one during the rollout, they compete with the engine
for the interpreter's lock.

How it works. The engine hands over the responses that ended, in bunches. A thread decodes
these together, in the tokenizer's own threads, and submits them to the scorer, whose workers are
processes; the engine runs on. What is scored is the text without the token that ended it. Special
tokens inside it are content, such as <think>.

What we give up: rewards that look at tokens; they get text and the data's columns.
Source: TRL's and verl's names for what a reward function sees.

Copied: draw() takes a rollout.Engine and a rewards.Scorer, or objects with their methods.
    from sampling import to_groups
    drawn = {0: ["the first response", "the second"]}
    [group] = to_groups(["2 + 2"], drawn, [0.0, 1.0])
    print(group.rewards)  # [0.0, 1.0]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple


class Group(NamedTuple):
    """The responses to one prompt."""

    position: int  # of the prompt in the order that all ranks agree on
    prompt: Any  # data.Prompt
    rollouts: list  # [G] of rollout.Rollout
    rewards: list[float]  # [G]


def draw(
    engine,
    scorer,
    tokenizer,
    prompts: Sequence,
    num_samples: int,
    seed: int,
    temperature: float | None = None,
) -> dict[int, list]:
    """{position: rollouts} for the prompts that this rank owns. Collective.

    prompts: data.Prompt, the same on all ranks. Each response that has ended goes to `scorer`
    (rewards.Scorer, or None) under its place in the flat order of the result.
    """
    to_texts = _decoder(tokenizer)

    def submit(ended: list[tuple[int, int, Any]]) -> None:
        texts = to_texts([rollout for _, _, rollout in ended])
        for (index, position, rollout), text in zip(ended, texts, strict=True):
            prompt = prompts[position]
            known = {"prompt": prompt.text, "response": text}
            known |= {"answer": prompt.answer, "truncated": rollout.truncated}
            scorer.submit(index, prompt.columns | known)

    def later(ended: list) -> None:
        jobs.append(beside.submit(submit, ended))

    jobs: list[Future] = []
    with ThreadPoolExecutor(max_workers=1) as beside:  # the engine runs on while text is made
        drawn = engine.generate_share(
            [prompt.prompt_ids for prompt in prompts],
            num_samples,
            temperature=temperature,
            seed=seed,
            on_finished=later if scorer is not None else None,
        )
    for job in jobs:
        job.result()  # raises what it raised
    return drawn


def _decoder(tokenizer) -> Callable[[list], list[str]]:
    """What turns responses into the texts that are scored: without the token that ended them."""
    special = set(tokenizer.all_special_ids)
    structure = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}

    def content(rollout) -> list[int]:
        ids = rollout.response_ids.tolist()
        if not rollout.truncated and ids[-1] in special:
            ids.pop()  # the end; other special tokens are content, such as <think>
        return [token for token in ids if token not in structure]

    def to_texts(rollouts: list) -> list[str]:
        responses = list(map(content, rollouts))
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is not None:  # many at once, on all cores, without the interpreter's lock
            return fast.decode_batch(responses, skip_special_tokens=False)
        return [tokenizer.decode(ids) for ids in responses]

    return to_texts


def to_groups(
    prompts: Sequence, drawn: Mapping[int, list], rewards: Sequence[float]
) -> list[Group]:
    """What draw() returned, with the rewards of all its rollouts in their flat order."""
    groups = []
    flat = iter(rewards)
    for position, rollouts in drawn.items():
        own = list(itertools.islice(flat, len(rollouts)))
        groups.append(Group(position, prompts[position], rollouts, own))
    return groups


def sample(
    engine, scorer, tokenizer, prompts: Sequence, num_samples: int, seed: int, meter
) -> list[Group]:
    """This rank's groups for `prompts`, with the scorer's rewards. Collective."""
    with meter.timer("rollout"):
        drawn = draw(engine, scorer, tokenizer, prompts, num_samples, seed)
    with meter.timer("reward"):
        rewards, stats = scorer.collect(len(drawn) * num_samples)
    meter.update(stats, len(rewards), prefix="reward/")
    groups = to_groups(prompts, drawn, rewards)
    for group in groups:
        meter.add_group(group.prompt.source, group.rewards, group.rollouts)
    return groups


def evaluate(
    engine, scorer, tokenizer, prompts: Sequence, num_samples: int, seed: int, meter
) -> list[list[Group]]:
    """Adds to `meter` the greedy reward and, with num_samples k > 0, mean@k and pass@k. Returns
    this rank's groups: the greedy ones, and then those of k samples.
    """
    made = []
    for k, temperature in ((1, 0.0), (num_samples, None)):
        if k == 0:
            continue
        with meter.timer("eval"):
            drawn = draw(engine, scorer, tokenizer, prompts, k, seed, temperature)
            rewards, stats = scorer.collect(len(drawn) * k)
        failed = {name: stats[name] for name in ("error_frac", "timeout_frac")}
        meter.update(failed, len(rewards), prefix="eval/")
        made.append(to_groups(prompts, drawn, rewards))
        for group in made[-1]:
            mean = sum(group.rewards) / k
            found = {f"mean@{k}": mean, f"pass@{k}": max(group.rewards)}
            if temperature == 0:
                found = {"reward": mean, f"{group.prompt.source}/reward": mean}
            meter.update(found, prefix="eval/")
    return made
