# SPDX-FileCopyrightText: 2026 handful contributors (inputs.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""What goes into a run, looked at before it trains: 200 prompts as tokens, the reward function.

The problem. A template that ends the user's turn and does not open the assistant's, a second BOS,
an answer column of None, a reward that no answer can earn or that pays for the question: a run with
any of these starts, logs curves, and learns nothing or the wrong thing.

How it works. Each function returns rows of a table: what, figure, bound, right or wrong, and what
to do. `right` is None for a figure that is only shown.
- `data_rows` reads tokens and text. Whether the template opens the assistant's turn is seen by
  rendering a conversation with an answer: up to the answer it must read as the prompt does.
       prompt        <|im_start|>user\nx<|im_end|>\n
       conversation  <|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\ny    -> a turn is missing
- `reward_rows` asks the reward function what it pays for the data's own answer (bare, in \\boxed{}
  and after ####; the best of the three counts), for an empty response and for the prompt itself.
- `warn` is for a run that has not asked: it prints the wrong rows alone.

What we give up: rewards that need no answer are only looked at for spread and errors.

Copied: prompts are data.Prompt, or objects with text, prompt_ids and answer.
    from types import SimpleNamespace
    from inputs import answers_row
    prompts = [SimpleNamespace(answer=answer) for answer in ("4", "None", "")]
    print(answers_row(prompts).figure)  # 2 of 3 are empty
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NUM_PROMPTS = 200
NUM_SCORED = 32
EMPTY = ("", "none", "nan", "null", "[]", "{}")
# A response that is the answer, as reward functions want it: bare, or in a form of its own.
FORMS = ("{}", "\\boxed{{{}}}", "#### {}")


class Row(NamedTuple):
    """A line of the table."""

    what: str
    figure: str
    bound: str
    right: bool | None  # None: a figure, and no check
    advice: str  # what to do if it is wrong


def data_rows(
    datasets: Sequence, eval_sets: Sequence, tokenizer, options: str, wanted: Mapping[str, Any]
) -> list:
    """Rows on 200 of the training prompts, and on whether those of evaluation are among them.

    datasets, eval_sets: lists of data.Prompt. tokenizer: Transformers'. options: of the chat
    template, as a JSON object. wanted: {reward function: columns that it needs}.
    """
    prompts = [prompt for dataset in datasets for prompt in dataset]
    evals = [prompt for dataset in eval_sets for prompt in dataset]
    taken = prompts
    if len(prompts) > NUM_PROMPTS:
        taken = random.Random(0).sample(prompts, NUM_PROMPTS)
    rows = [_lengths_row(taken), _bos_row(taken, tokenizer), _end_row(taken, tokenizer)]
    if tokenizer.chat_template is not None:
        rows += [_turn_row(tokenizer, json.loads(options)), _control_row(taken, tokenizer)]
    if _wants_answer(wanted):
        rows.append(answers_row(taken))
    if evals:
        rows.append(_overlap_row(prompts, evals))
    return rows


def _wants_answer(wanted: Mapping[str, Any]) -> bool:
    return any("answer" in columns for columns in wanted.values())


def _lengths_row(prompts: Sequence) -> Row:
    lengths = sorted(len(prompt.prompt_ids) for prompt in prompts)
    middle = lengths[len(lengths) // 2]
    figure = f"{lengths[0]} to {lengths[-1]} tokens, median {middle}, of {len(lengths)} prompts"
    return Row("prompt lengths", figure, "", None, "")


def _bos_row(prompts: Sequence, tokenizer) -> Row:
    bos = tokenizer.bos_token_id
    is_added = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    heads = [list(prompt.prompt_ids[:2]) for prompt in prompts]
    num_double = heads.count([bos, bos]) if bos is not None else 0
    num_missing = sum(1 for head in heads if is_added and head[0] != bos)
    figure = f"{num_double} double, {num_missing} missing"
    advice = "put the BOS token into the chat template once, or take it out of it"
    return Row("BOS", figure, "0", num_double + num_missing == 0, advice)


def _end_row(prompts: Sequence, tokenizer) -> Row:
    ends = sum(1 for prompt in prompts if prompt.prompt_ids[-1] == tokenizer.eos_token_id)
    figure = f"{ends} of {len(prompts)} end in the token that ends a text"
    advice = "the model would answer after its end: mend the chat template"
    return Row("end of prompt", figure, "0", ends == 0, advice)


def _turn_row(tokenizer, options: dict) -> Row:
    """Whether a prompt ends where the assistant's words begin in a whole conversation."""
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
    render = tokenizer.apply_chat_template
    try:
        begun = render(turns[:1], tokenize=False, add_generation_prompt=True, **options).rstrip()
        whole, found, _ = render(turns, tokenize=False, **options).partition("ANSWER")
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        found = begun = ""  # it wants more than a question and an answer
        whole = type(error).__name__
    if not found:
        return Row("generation prompt", f"cannot be told: {whole:.60}", "", None, "")
    missing = whole.removeprefix(begun) if whole.startswith(begun) else ""
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    # Qwen3 puts an empty <think> there, which is no marker of a turn.
    markers = [*special, *tokenizer.all_special_tokens, "assistant", "model"]
    is_open = not any(marker in missing for marker in markers)
    what = "opens the assistant's turn" if is_open else f"lacks {missing.strip()!r}"
    advice = "add the part `if add_generation_prompt` to the chat template"
    return Row("generation prompt", f"the template {what}", "", is_open, advice)


def _control_row(prompts: Sequence, tokenizer) -> Row:
    special = {t: tokenizer.convert_tokens_to_ids(t) for t in tokenizer.all_special_tokens}
    num_spelt = 0
    for prompt in prompts:
        in_text = sum(prompt.text.count(text) for text in special)
        in_tokens = sum(1 for token in prompt.prompt_ids if token in special.values())
        num_spelt += in_text > in_tokens
    figure = f"{num_spelt} of {len(prompts)} prompts spell some; there they are text"
    return Row("control tokens in text", figure, "", None, "")


def answers_row(prompts: Sequence) -> Row:
    """How many answers are empty, or the word None."""
    empty = sum(1 for prompt in prompts if not _has_answer(prompt))
    figure = f"{empty} of {len(prompts)} are empty"
    advice = "no response to them can be right: mend the answer column, or drop these rows"
    return Row("answers", figure, "1 %", empty <= 0.01 * len(prompts), advice)


def _has_answer(prompt: Any) -> bool:
    """Whether there is an answer: "None" and "nan" are what a table makes of an empty cell."""
    return str(prompt.answer).strip().lower() not in EMPTY


def _overlap_row(prompts: Sequence, evals: Sequence) -> Row:
    held_out = {prompt.text for prompt in evals}
    shared = held_out & {prompt.text for prompt in prompts}
    figure = f"{len(shared)} of {len(held_out)} prompts are trained on"
    advice = "take them out of --data, or evaluation measures what was learned by heart"
    return Row("evaluation", figure, "0", not shared, advice)


def borders(prompt: Any, tokenizer) -> str:
    """The prompt's text with a bar between tokens."""
    return "|".join(tokenizer.decode([token]) for token in prompt.prompt_ids)


def warn(
    datasets: Sequence, eval_sets: Sequence, tokenizer, options: str, wanted: Mapping[str, Any]
) -> None:
    """Prints what is wrong with the data, on rank 0; arguments as in data_rows."""
    if os.environ.get("RANK", "0") != "0":
        return
    for row in data_rows(datasets, eval_sets, tokenizer, options, wanted):
        if row.right is False:
            print(f"warning: {row.what}: {row.figure}; {row.advice}", flush=True)


def reward_rows(prompts: Sequence, scorer, num_samples: int) -> list:
    """Rows on what the reward function pays for; this rank asks, others need not.

    prompts: training prompts. scorer: rewards.Scorer; it can't be used again if most calls fail.
    num_samples: that this rank scores in a step.
    """
    taken = [prompt for prompt in prompts if _has_answer(prompt)][:NUM_SCORED]
    if not (_wants_answer(scorer.wanted) and taken):
        return []
    responses = []
    for prompt in taken:
        copies = [form.format(prompt.text) for form in FORMS]
        responses.append([form.format(prompt.answer) for form in FORMS] + [""] + copies)
    start = time.perf_counter()
    width = len(responses[0])
    for i, prompt in enumerate(taken):
        for k, response in enumerate(responses[i]):
            known = {"prompt": prompt.text, "answer": prompt.answer, "truncated": False}
            scorer.submit(width * i + k, {**prompt.columns, **known, "response": response})
    try:
        scores, stats = scorer.collect(width * len(taken))
    except RuntimeError as error:  # too many calls failed; its message has the first
        advice = "mend the function: it meets empty responses and copied prompts in a run too"
        return [Row("reward function", " ".join(str(error).split()), "", False, advice)]
    seconds = (time.perf_counter() - start) / len(scores)
    by_prompt = [scores[width * i : width * (i + 1)] for i in range(len(taken))]
    return [*paid_rows(by_prompt), _cost_row(seconds, num_samples), _errors_row(stats)]


def paid_rows(scores: Sequence[Sequence[float]]) -> list:
    """Rows on the scores of each prompt: its answer in three forms, nothing, its copy in three."""
    num = len(scores)
    gold = [max(each[:3]) for each in scores]
    empty = [each[3] for each in scores]
    copied = [max(each[4:]) for each in scores]
    earned = sum(1 for x, y in zip(gold, empty, strict=True) if x > y) / num
    means = [sum(values) / num for values in (gold, empty, copied)]
    figure = f"{earned:.2f} of {num} pay more than nothing does; mean {means[0]:.3f}"
    advice = "the data's own answers must earn it: see --reward.functions and the answer column"
    rows = [Row("reward of the answer", figure, "0.9", earned >= 0.9, advice)]
    gain = max(means[0] - means[1], 0.0)
    figure = f"empty {means[1]:.3f}, the prompt copied {means[2]:.3f}"
    bound = f"{means[1] + 0.05 * gain:.3f}"
    is_right = means[2] - means[1] <= 0.05 * gain
    advice = "a policy finds that out: have the function ask for more than the question holds"
    return [*rows, Row("reward of the question", figure, bound, is_right, advice)]


def _cost_row(seconds: float, num_samples: int) -> Row:
    figure = f"{1000 * seconds:.2f} ms a sample, {seconds * num_samples:.2f} s a step"
    return Row("reward time", figure, "", None, "")


def _errors_row(stats: Mapping[str, float]) -> Row:
    share = stats["error_frac"]
    advice = "the first error of each function is printed above"
    return Row("reward errors", f"{share:.3f} of the calls", "0", share == 0, advice)


def sample_rows(record: Mapping[str, Any], rewards: Sequence[float], ignore_eos: bool) -> list:
    """Rows on the responses of a real step. record: its metrics; rewards: of all its samples."""
    num = len(rewards)
    low = min(rewards, default=0.0)
    high = max(rewards, default=0.0)
    mean = sum(rewards) / max(1, num)
    figure = f"from {low:.3f} to {high:.3f}, mean {mean:.3f}, of {num} samples"
    advice = "all are alike, so nothing is learned: prompts too hard or easy, or a wrong function"
    rows = [Row("rewards of real samples", figure, "some spread", high > low, advice)]
    cut = record.get("response_length/clip_ratio")
    if cut is not None and not ignore_eos:
        figure = f"{cut:.2f} of the responses, of mean length {record['response_length/mean']:.1f}"
        advice = "raise --rollout.max-response-tokens, or use a model that ends its answers"
        rows.append(Row("cut by the limit", figure, "0.5", cut <= 0.5, advice))
    return rows
