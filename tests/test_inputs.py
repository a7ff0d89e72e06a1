"""Prompts and rewards before a run: what is right passes, and each planted fault is seen."""

import pytest

import inputs
from data import Prompt
from examples import addition
from rewards import RewardConfig, Scorer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}<think>"
    "\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def made_tokenizer(template=None, bos=False):
    tokenizer = addition.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.add_special_tokens({"bos_token": "<s>"})
        front = [("<s>", tokenizer.bos_token_id)]
        post = TemplateProcessing(single="<s> $A", special_tokens=front)
        tokenizer.backend_tokenizer.post_processor = post
    return tokenizer


def prompts_of(*texts, answer="4", ids=(5, 6)):
    return [Prompt(list(ids), text, answer, "mine") for text in texts]


def wrong(rows):
    return [row.what for row in rows if row.right is False]


def looked_at(prompts, evals=(), tokenizer=None, wanted=("answer",)):
    tokenizer = tokenizer or made_tokenizer()
    return inputs.data_rows([prompts], [list(evals)], tokenizer, "{}", {"f": list(wanted)})


@pytest.mark.parametrize(
    ("template", "is_right"),
    [
        (CHATML + OPENS, True),
        (CHATML, False),
        (INST, True),
        (THINKS + OPENS, True),
        (THINKS, False),
    ],
)
def test_a_template_opens_the_assistants_turn(template, is_right):
    rows = looked_at(prompts_of("2+2="), tokenizer=made_tokenizer(template))
    assert wrong(rows) == ([] if is_right else ["generation prompt"])
    if not is_right:
        assert "<|im_start|>assistant" in next(x.figure for x in rows if x.right is False)


@pytest.mark.parametrize("template", ["{{ raise_exception('a system message first') }}", "{{ 1 }}"])
def test_a_template_that_wants_more_than_a_question_is_no_reason_to_stop(template):
    rows = looked_at(prompts_of("2+2="), tokenizer=made_tokenizer(template))
    assert wrong(rows) == []
    [row] = [row for row in rows if row.what == "generation prompt"]
    assert row.right is None


@pytest.mark.parametrize("num_bos", [0, 1, 2])
def test_a_prompt_has_one_bos_if_the_tokenizer_adds_it(num_bos):
    tokenizer = made_tokenizer(bos=True)
    ids = [tokenizer.bos_token_id] * num_bos + [5, 6]
    rows = looked_at(prompts_of("2+2=", ids=ids), tokenizer=tokenizer)
    assert wrong(rows) == ([] if num_bos == 1 else ["BOS"])


def test_answers_of_none_are_seen_where_a_reward_wants_them():
    few = [prompt for text in ("None", "nan", "") for prompt in prompts_of("x", answer=text)]
    rows = looked_at(prompts_of(*"abc") + few)
    assert wrong(rows) == ["answers"]
    assert "3 of 6 are empty" in next(row.figure for row in rows if row.what == "answers")
    assert wrong(looked_at(prompts_of(*"abc") + few, wanted=())) == []
    assert wrong(looked_at(prompts_of(*map(str, range(200))) + few[:1])) == []  # 0.5 %


def test_an_end_in_the_prompt_and_what_is_held_out_but_learned():
    assert wrong(looked_at(prompts_of("a", ids=(5, 1)))) == ["end of prompt"]
    assert wrong(looked_at(prompts_of("a", "b"), prompts_of("b", "c"))) == ["evaluation"]
    assert wrong(looked_at(prompts_of("a", "b"), prompts_of("c"))) == []


def test_the_prompt_is_shown_with_borders_and_control_tokens_in_text_are_counted():
    tokenizer = made_tokenizer(CHATML + OPENS)
    [prompt] = prompts_of("<eos>", ids=tokenizer("12=")["input_ids"])
    assert inputs.borders(prompt, tokenizer) == "1|2|="
    rows = looked_at([prompt], tokenizer=tokenizer)
    assert "1 of 1 prompts spell" in next(x.figure for x in rows if x.what.startswith("control"))


FUNCTIONS = {
    "right": lambda response, answer: float(response == answer),
    "boxed alone": lambda response, answer: float(response == f"\\boxed{{{answer}}}"),
    "constant": lambda response, answer: 1.0,
    "nothing": lambda response, answer: 0.0,
    "copied question": lambda response, answer: float("4" in response),
    "fails on nothing": lambda response, answer: float(response.split()[-1] == answer),
    "fails": lambda response, answer: 1 / 0,
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("right", []),
        ("boxed alone", []),
        ("constant", ["reward of the answer"]),
        ("nothing", ["reward of the answer"]),
        ("copied question", ["reward of the question"]),
        ("fails on nothing", ["reward errors"]),
        ("fails", ["reward function"]),
    ],
)
def test_the_reward_pays_for_the_answer_and_not_for_the_question(function, expected, capfd):
    scorer = Scorer(RewardConfig((function,), num_workers=1), FUNCTIONS)
    prompts = prompts_of(*(f"{i}+4=" for i in range(8)))
    assert wrong(inputs.reward_rows(prompts, scorer, 100)) == expected
    if expected != ["reward function"]:
        scorer.close()


def test_real_samples_need_spread_and_an_end():
    record = {"response_length/clip_ratio": 0.6, "response_length/mean": 7.5}
    rows = inputs.sample_rows(record, [0.5, 0.5], False)
    assert wrong(rows) == ["rewards of real samples", "cut by the limit"]
    record["response_length/clip_ratio"] = 0.5
    assert wrong(inputs.sample_rows(record, [0.5, 0.6], False)) == []
    assert len(inputs.sample_rows(record, [0.5, 0.6], True)) == 1
    assert wrong(inputs.sample_rows({}, [], False)) == ["rewards of real samples"]


def test_a_run_that_has_not_asked_is_warned(capfd):
    tokenizer = made_tokenizer(CHATML)
    inputs.warn([prompts_of("a")], [prompts_of("b")], tokenizer, "{}", {"f": ["answer"]})
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith("warning: generation prompt: the template lacks '<|im_start|>assistant'")
    assert "add the part `if add_generation_prompt`" in line
