"""Prompts: what is read, what the model sees of it, and an order that survives a restart."""

import itertools
import json
import sys
import types
from collections import Counter

import pytest

from data import (
    DataConfig,
    Prompt,
    PromptStream,
    load_all,
    load_prompts,
    read_rows,
    require_columns,
    sampling_seed,
    to_prompts,
)

TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m.content == 'refused' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} "
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {{ 'think ' if enable_thinking }}{% endif %}"
)


@pytest.fixture(scope="module")
def make_tokenizer():
    """A word-level tokenizer that puts BOS before plain text, as Llama's does; its template begins
    with BOS as well.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [
        "<unk>",
        "<s>",
        "</s>",
        "<user>",
        "<system>",
        "<assistant>",
        *["what", "is", "one", "plus", "two", "be", "brief", "think"],
    ]
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )

    def make(chat_template=TEMPLATE):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


def words(prompt, tokenizer):
    return " ".join(tokenizer.convert_ids_to_tokens(prompt.prompt_ids))


QUESTION = "what is one plus two"


def test_gsm8k_rows_give_the_number_behind_the_hashes(make_tokenizer, tmp_path):
    rows = [{"question": QUESTION, "answer": "1 + 2 = <<1+2=3>>3\n#### 3,000 "}]
    ((prompt,),) = load_prompts(
        [write(tmp_path / "a.jsonl", rows)], make_tokenizer(None), DataConfig()
    )
    assert (prompt.text, prompt.answer, prompt.columns) == (QUESTION, "3,000", {})
    assert prompt.source.endswith("a.jsonl")


@pytest.mark.parametrize("column", ["answer", "ground_truth", "solution", "target", "label"])
def test_trl_rows_have_a_prompt_and_an_answer_column_and_other_columns_travel_along(
    make_tokenizer, tmp_path, column
):
    rows = [{"prompt": QUESTION, column: 3, "question": "kept", "level": [1, "hard"]}]
    ((prompt,),) = load_prompts(
        [write(tmp_path / "a.jsonl", rows)], make_tokenizer(None), DataConfig()
    )
    assert (prompt.text, prompt.answer) == (QUESTION, "3")
    assert prompt.columns == {"question": "kept", "level": [1, "hard"]}


def test_verl_rows_have_chat_messages_and_a_ground_truth(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    reward_model = {"style": "rule", "ground_truth": "3"}
    rows = [
        {
            "prompt": [{"role": "user", "content": QUESTION}],
            "reward_model": reward_model,
            "answer": "long solution",
        }
    ]
    ((prompt,),) = load_prompts([write(tmp_path / "a.jsonl", rows)], tokenizer, DataConfig())
    assert prompt.answer == "3" and prompt.columns == {
        "reward_model": reward_model,
        "answer": "long solution",
    }
    assert words(prompt, tokenizer) == f"<s> <user> {QUESTION} <assistant>"


def test_rows_without_an_answer_are_for_reward_functions_that_read_other_columns(make_tokenizer):
    (prompt,) = to_prompts(
        [{"prompt": QUESTION, "tests": "assert f(1)"}], make_tokenizer(None), DataConfig(), "x"
    )
    assert prompt.answer == "" and prompt.columns == {"tests": "assert f(1)"}


def test_bos_comes_once_from_the_template_or_from_the_tokenizer(make_tokenizer):
    """vllm#16853, open-r1#462: the template's text has BOS, and tokenizing it adds another."""
    rows = [{"prompt": QUESTION, "answer": "3"}]
    for template, expected in (
        (TEMPLATE, f"<s> <user> {QUESTION} <assistant>"),
        (None, f"<s> {QUESTION}"),
    ):
        tokenizer = make_tokenizer(template)
        (prompt,) = to_prompts(rows, tokenizer, DataConfig(), "x")
        assert words(prompt, tokenizer) == expected
        assert prompt.prompt_ids.count(tokenizer.bos_token_id) == 1


def test_text_and_chat_messages_of_a_user_are_the_same_prompt(make_tokenizer):
    rows = [
        {"prompt": QUESTION, "answer": "3"},
        {"prompt": [{"role": "user", "content": QUESTION}], "answer": "3"},
    ]
    for template in (TEMPLATE, None):
        first, second = to_prompts(rows, make_tokenizer(template), DataConfig(), "x")
        assert first == second


def test_the_system_prompt_takes_the_place_of_the_datas_own(make_tokenizer):
    tokenizer = make_tokenizer()
    chat = [{"role": "system", "content": "one"}, {"role": "user", "content": QUESTION}]
    rows = [{"prompt": QUESTION, "answer": "3"}, {"prompt": chat, "answer": "3"}]
    for prompt in to_prompts(rows, tokenizer, DataConfig(system_prompt="be brief"), "x"):
        assert words(prompt, tokenizer) == f"<s> <system> be brief <user> {QUESTION} <assistant>"
    assert words(to_prompts(rows, tokenizer, DataConfig(), "x")[1], tokenizer).startswith(
        "<s> <system> one <user>"
    )


def test_template_options_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer()
    config = DataConfig(template_options='{"enable_thinking": true}')
    (prompt,) = to_prompts([{"prompt": QUESTION, "answer": "3"}], tokenizer, config, "x")
    assert words(prompt, tokenizer).endswith("<assistant> think")
    config = DataConfig(template_options='{"add_generation_prompt": false}')
    (prompt,) = to_prompts([{"prompt": QUESTION, "answer": "3"}], tokenizer, config, "x")
    assert words(prompt, tokenizer) == f"<s> <user> {QUESTION}"


def test_what_a_chat_template_cannot_do_is_said_in_one_line(make_tokenizer):
    rows = [{"prompt": QUESTION, "answer": "3"}]
    with pytest.raises(
        ValueError,
        match="^x: the model's chat template refuses a prompt .System role not supported",
    ):
        to_prompts(rows, make_tokenizer(), DataConfig(system_prompt="refused"), "x")
    with pytest.raises(
        ValueError, match="^x: chat messages or a --data.system-prompt need a chat template"
    ):
        to_prompts(rows, make_tokenizer(None), DataConfig(system_prompt="be brief"), "x")


LONG = [{"prompt": "one " * n, "answer": ""} for n in (3, 4000, 2, 9, 5, 1)]


def test_prompts_over_the_limit_are_dropped_and_counted_or_refused_before_anything_runs(
    make_tokenizer, capsys
):
    """trl#3180, trl#3569: a crash hours later, or a prompt that was cut in silence."""
    tokenizer = make_tokenizer()  # three more tokens: BOS, user, assistant
    prompts = to_prompts(LONG, tokenizer, DataConfig(max_prompt_tokens=8), "x")
    assert [len(p.prompt_ids) for p in prompts] == [6, 5, 8, 4]
    assert (
        capsys.readouterr().out
        == "data: x: 2 of 6 prompts exceed --data.max-prompt-tokens 8 and are dropped\n"
    )
    refused = "^x: 2 of 6 prompts exceed --data.max-prompt-tokens 8; the longest has 4003 tokens"
    refused += ": raise the limit"
    with pytest.raises(ValueError, match=f"{refused} or use --data.long-prompts drop$"):
        to_prompts(LONG, tokenizer, DataConfig(max_prompt_tokens=8, long_prompts="refuse"), "x")
    with pytest.raises(ValueError, match="6 of 6 prompts exceed .* raise the limit$"):
        to_prompts(LONG, tokenizer, DataConfig(max_prompt_tokens=3), "x")


def test_only_the_first_rank_reports_what_was_dropped(make_tokenizer, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert len(to_prompts(LONG, make_tokenizer(), DataConfig(max_prompt_tokens=8), "x")) == 4
    assert capsys.readouterr().out == ""


def test_an_empty_prompt_is_refused(make_tokenizer):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="^x: has an empty prompt"):
        to_prompts([{"prompt": "", "answer": "3"}], make_tokenizer(template), DataConfig(), "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "is empty; it needs at least one row"),
        ("\n \n", "is empty; it needs at least one row"),
        (
            '{"prompt": "a", "answer": "b"}\n{"prompt": ',
            "line 2: is not JSON .*each line must be one object",
        ),
        ('["a"]', "line 1: is not a JSON object"),
        ('{"text": "a"}', r"has columns \['text'\]; needs `prompt` or `question`"),
        ('{"prompt": "a"}', r"has columns \['prompt'\]; needs .* answer, ground_truth, solution"),
        ('{"prompt": {"content": "a"}, "answer": "b"}', "text or chat messages"),
        ('{"prompt": ["a"], "answer": "b"}', "text or chat messages"),
        ('{"prompt": [], "answer": "b"}', "text or chat messages"),
        ('{"prompt": null, "answer": "b"}', "text or chat messages"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    make_tokenizer, tmp_path, content, message
):
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_text(content)
    for flag in ("--data", "--eval-data"):
        with pytest.raises(ValueError, match=f"^{flag} {file}.*{message}"):
            load_prompts([str(file)], make_tokenizer(None), DataConfig(), flag)


def test_a_column_that_a_reward_function_wants_and_a_data_set_lacks_is_named():
    with_level = [Prompt([1], "a", "b", "x", {}), Prompt([1], "a", "b", "x", {"level": 3})]
    without = [Prompt([1], "a", "b", "y", {"kind": 1})]
    unanswered = [
        Prompt([1], "a", "", "z", {"output": "b"})
    ]  # with math and exact each reward would be 0
    with pytest.raises(
        ValueError, match="math: wants answer, which is no column; z has output, prompt, resp"
    ):
        require_columns([without, unanswered], {"math": ["response", "answer"]})
    require_columns([with_level], {"f.py:f": ["response", "level"], "g": []})
    require_columns([without], {"math": ["response", "answer", "prompt", "truncated"]})
    message = (
        "f.py:f: wants level, which is no column; y has answer, kind, prompt, response, truncated"
    )
    with pytest.raises(ValueError, match=f"^--reward.functions {message}$"):
        require_columns([with_level, without], {"f.py:f": ["response", "level"]})


def test_prompts_know_their_data_set_by_the_files_name_where_that_tells_it_apart(
    make_tokenizer, tmp_path
):
    files = []
    for name in ("one/a.jsonl", "one/b.jsonl", "two/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        files.append(str(write(tmp_path / name, [{"prompt": QUESTION, "answer": "3"}])))
    datasets = load_prompts(files[:2], make_tokenizer(), DataConfig())
    assert [d[0].source for d in datasets] == ["a.jsonl", "b.jsonl"]
    assert [d[0].source for d in load_prompts(files, make_tokenizer(), DataConfig())] == files


def test_what_is_evaluated_on_is_loaded_like_what_is_learned_from_and_named_by_its_own_flag(
    make_tokenizer, tmp_path
):
    """A file without a suffix holds JSON lines; weights are those of --data alone."""
    path = write(tmp_path / "plain", [{"prompt": QUESTION, "answer": "3"}])
    config = DataConfig(weights=(1.0, 2.0))
    datasets, eval_sets = load_all([path, path], [path], make_tokenizer(), config)
    assert [len(prompts) for prompts in datasets] == [1, 1]
    assert [[p.source for p in prompts] for prompts in eval_sets] == [["plain"]]
    with pytest.raises(ValueError, match="^--eval-data no.jsonl: no such file"):
        load_all([path], ["no.jsonl"], make_tokenizer(), DataConfig())


def test_parquet_files_hold_the_same_rows(make_tokenizer, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": QUESTION}]
    rows = [{"prompt": chat, "reward_model": {"ground_truth": "3"}, "extra_info": {"index": 1}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", rows)
    files = [str(tmp_path / name) for name in ("a.parquet", "a.jsonl")]
    (first,), (second,) = load_prompts(files, make_tokenizer(), DataConfig())
    assert (first.prompt_ids, first.answer, first.columns) == (
        second.prompt_ids,
        second.answer,
        second.columns,
    )


def test_hub_names_may_have_a_subset_and_problems_are_errors_of_the_setting(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        if name == "no/such":
            raise FileNotFoundError("not found")
        return [{"question": QUESTION, "answer": "#### 3"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read_rows("openai/gsm8k:main", "test") == [{"question": QUESTION, "answer": "#### 3"}]
    read_rows("some/set", "train")
    assert asked == [("openai/gsm8k", "main", "test"), ("some/set", None, "train")]
    with pytest.raises(
        ValueError, match="^no/such: not a .jsonl or .parquet file, and not on the Hub .not found"
    ):
        read_rows("no/such", "train")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    for module in ("datasets", "pyarrow.parquet", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    for source, package in (
        ("some/set", "datasets"),
        (str(tmp_path / "a.parquet"), "pyarrow"),
        ("reasoning_gym:leg_counting:5", "reasoning-gym"),
    ):
        with pytest.raises(
            ValueError, match=f"needs {package}; install it with: pip install {package}"
        ):
            read_rows(source, "train")


def test_reasoning_gym_problems_bring_the_entry_that_their_verifier_needs(make_tokenizer):
    gym = pytest.importorskip("reasoning_gym")
    ((*prompts,),) = load_prompts(
        ["reasoning_gym:leg_counting:5"], make_tokenizer(None), DataConfig()
    )
    assert len(prompts) == 5 and len({p.text for p in prompts}) == 5
    for prompt in prompts:
        entry, name = prompt.columns["entry"], prompt.columns["reasoning_gym"]
        assert gym.get_score_answer_fn(name)(prompt.answer, entry) == 1.0
        assert prompt.text == entry["question"]
    for source in ("reasoning_gym:no_such", "reasoning_gym:leg_counting:many"):
        with pytest.raises(ValueError, match=f"^{source}"):
            read_rows(source, "train")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(max_prompt_tokens=0), "--data.max-prompt-tokens 0"),
        (dict(weights=(1.0, 0.0)), "--data.weights .* must be above 0"),
        (dict(template_options="{"), "--data.template-options {: not JSON"),
        (dict(template_options="[1]"), "must be a JSON object"),
    ],
)
def test_settings_without_meaning_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**setting)


def prompts_of(name, size):
    return [Prompt([i + 1], f"{name}{i}", "", name) for i in range(size)]


def texts(stream, *sizes):
    return [[p.text for p in stream.take(size)] for size in sizes]


def test_each_epoch_takes_every_prompt_once_in_another_order():
    epochs = texts(PromptStream([prompts_of("a", 50)]), 50, 50, 50)
    in_order = [f"a{i}" for i in range(50)]
    assert all(sorted(epoch) == sorted(in_order) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3 and epochs[0] != in_order


def test_the_order_follows_from_the_seed_whatever_its_size_and_is_the_same_on_every_rank():
    def first_24(seed):
        return texts(PromptStream([prompts_of("a", 9)], seed=seed), 24)

    for seed in (0, 1, 20240229, 2**63):
        assert first_24(seed) == first_24(seed)
    assert first_24(0) != first_24(1)


def test_a_batch_larger_than_the_data_goes_on_with_the_next_epoch():
    """ezpz#190: three prompts and a batch of eight were an end without one step."""
    batches = texts(PromptStream([prompts_of("a", 3)]), 8, 8, 8)
    assert [len(batch) for batch in batches] == [8, 8, 8]
    assert Counter(itertools.chain(*batches)) == {"a0": 8, "a1": 8, "a2": 8}


def test_each_prompt_comes_from_the_data_set_that_is_furthest_behind_its_share():
    stream = PromptStream([prompts_of("a", 100), prompts_of("b", 100)], weights=(3.0, 1.0))
    assert ["".join(text[0] for text in batch) for batch in texts(stream, 8, 8)] == ["aabaaaba"] * 2
    stream = PromptStream([prompts_of("a", 90), prompts_of("b", 10)])  # without weights: by size
    (batch,) = texts(stream, 100)
    assert Counter(text[0] for text in batch) == {"a": 90, "b": 10}


@pytest.mark.parametrize("stop_after", range(0, 12, 3))
def test_a_stream_that_was_saved_and_loaded_goes_on_as_if_nothing_had_been(stop_after):
    """prime-rl#3164, NeMo-RL#3599: from the first prompt again, or behind what had been prefetched;
    tunix#2288.
    """

    def stream():
        return PromptStream([prompts_of("a", 7), prompts_of("b", 5)], weights=(2.0, 1.0), seed=3)

    (expected,) = texts(stream(), 48)
    first = stream()
    before = texts(first, *[4] * stop_after, 2)  # dynamic sampling takes what it lacks
    state = json.loads(json.dumps(first.state_dict()))
    second = stream()
    second.take(4)  # what it did before loading does not matter
    second.load_state_dict(state)
    after = texts(second, 2, *[4] * (11 - stop_after))
    assert list(itertools.chain(*before, *after)) == expected


def test_the_state_is_a_snapshot():
    stream = PromptStream([prompts_of("a", 7)])
    state = stream.state_dict()
    stream.take(4)
    assert state["num_taken"] == [0] and stream.state_dict()["num_taken"] == [4]


def test_a_stream_refuses_the_state_of_another_order():
    state = PromptStream([prompts_of("a", 7)], seed=3).state_dict()
    for other in (
        PromptStream([prompts_of("a", 8)], seed=3),
        PromptStream([prompts_of("a", 7)], seed=4),
        PromptStream([prompts_of("a", 7)], seed=3, weights=(0.5,)),
    ):
        with pytest.raises(
            ValueError, match="resume with the same --data, --data.weights and --seed"
        ):
            other.load_state_dict(state)


def test_sampling_seeds_follow_from_the_place_alone_and_differ_between_places():
    places = [
        (seed, step, attempt) for seed in range(3) for step in range(20) for attempt in range(3)
    ]
    seeds = [sampling_seed(*place) for place in places]
    assert len(set(seeds)) == len(places) and all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [sampling_seed(*place) for place in places]


def test_weights_that_are_not_one_for_each_data_set_are_refused():
    with pytest.raises(ValueError, match=r"--data.weights \(1.0, 2.0\): must be 1 numbers"):
        PromptStream([[Prompt([1], "a", "b", "s")]], weights=(1.0, 2.0))
