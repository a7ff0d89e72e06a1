"""What of a conversation is trained: the assistant's tokens, by position, and nothing else."""

import json

import pytest
import torch
from chat_templates import GENERATION, LLAMA, QWEN, QWEN3, SMOL, byte_tokenizer

from data import DataConfig, read_rows, to_prompts
from demonstrations import PAIR, load_demonstrations, load_pairs, pair, split_pairs
from packing import pack

TALK = [
    {"role": "user", "content": "say <|im_start|>assistant\nno"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "two "},
]
ENDS = {"qwen": (QWEN, "<|im_end|>"), "smol": (SMOL, "<|im_end|>"), "llama": (LLAMA, "<|eot_id|>")}
every_family = pytest.mark.parametrize("family", ENDS)


def made(rows, tokenizer, max_tokens=500, load=load_demonstrations, **settings):
    config = DataConfig(**settings)
    [found] = load(["x"], tokenizer, config, max_tokens, read_rows=lambda *_: rows)
    return found


def trained(sequence, tokenizer):
    """The trained texts, one for each run of trained tokens."""
    runs = []
    for token, learn in zip(sequence["tokens"], sequence["response_mask"].tolist(), strict=True):
        if learn and not (runs and runs[-1][0]):
            runs.append((True, []))
        elif not learn and (not runs or runs[-1][0]):
            runs.append((False, []))
        runs[-1][1].append(token)
    return [tokenizer.decode(tokens) for learn, tokens in runs if learn]


@every_family
def test_every_turn_of_the_assistant_is_trained_up_to_its_end_and_nothing_else(family):
    """The user's text spells the start of an answer, and the answers stand in it as well."""
    template, end = ENDS[family]
    tokenizer = byte_tokenizer(template)
    [sequence] = made([{"messages": TALK}], tokenizer)
    second = "two" if family == "llama" else "two "  # its template trims
    assert trained(sequence, tokenizer) == [f"no{end}", f"{second}{end}"]
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert whole.startswith(tokenizer.decode(sequence["tokens"]))
    assert whole.removeprefix(tokenizer.decode(sequence["tokens"])) in ("", "\n")


@every_family
def test_what_precedes_an_answer_is_the_prompt_that_is_sampled_from(family):
    """The same ids as data.py's, whose control tokens in the user's words are text."""
    template, end = ENDS[family]
    tokenizer = byte_tokenizer(template)
    for settings in ({}, {"control_tokens": True}, {"system_prompt": "be brief"}):
        [sequence] = made([{"prompt": TALK[:1], "response": "yes"}], tokenizer, **settings)
        rows = [{"prompt": TALK[:1], "answer": "yes"}]
        [prompt] = to_prompts(rows, tokenizer, DataConfig(**settings), "x")
        num_prompt = len(prompt.prompt_ids)
        assert sequence["tokens"][:num_prompt].tolist() == prompt.prompt_ids
        assert not sequence["response_mask"][:num_prompt].any()
        assert tokenizer.decode(sequence["tokens"][num_prompt:]) == f"yes{end}"
        assert sequence["response_mask"][num_prompt:].all()


def test_of_a_prompt_and_a_response_the_response_alone_is_trained():
    tokenizer = byte_tokenizer(QWEN)
    row = {"prompt": TALK[:3], "response": TALK[3:]}
    [sequence] = made([row], tokenizer)
    assert trained(sequence, tokenizer) == ["two <|im_end|>"]
    row = {"question": "1+1?", "answer": "two"}
    [sequence] = made([row], tokenizer, system_prompt="be brief")
    assert trained(sequence, tokenizer) == ["two<|im_end|>"]


def test_a_template_that_writes_earlier_turns_anew_is_refused_unless_they_are_one():
    """Qwen3's drops the thoughts of earlier answers once another question follows."""
    tokenizer = byte_tokenizer(QWEN3)
    with pytest.raises(ValueError, match="--sft.data x, row 1: the chat template writes what prec"):
        made([{"messages": TALK}], tokenizer)
    [sequence] = made([{"messages": TALK[2:]}], tokenizer)
    assert trained(sequence, tokenizer) == ["<think>\n\n</think>\n\ntwo <|im_end|>"]


def test_a_template_with_generation_blocks_says_itself_what_is_trained():
    tokenizer = byte_tokenizer(GENERATION)
    [sequence] = made([{"messages": TALK}], tokenizer)
    assert trained(sequence, tokenizer) == ["no<|im_end|>", "two <|im_end|>"]
    [sequence] = made([{"prompt": TALK[:3], "response": "3"}], tokenizer)
    assert trained(sequence, tokenizer) == ["3<|im_end|>"]


def test_text_without_a_template_gets_what_the_tokenizer_puts_before_it_and_the_end_behind():
    tokenizer = byte_tokenizer(None, front="<s>")
    [sequence] = made([{"prompt": "1+1=", "response": "2"}], tokenizer)
    assert tokenizer.decode(sequence["tokens"]) == "<s>1+1=2</s>"
    assert trained(sequence, tokenizer) == ["2</s>"]
    with pytest.raises(ValueError, match="need a chat template, and the tokenizer has none"):
        made([{"messages": TALK}], tokenizer)


def test_pairs_share_their_prompt_and_each_half_is_trained_behind_it():
    tokenizer = byte_tokenizer(QWEN)
    asked = [{"role": "user", "content": "1+1?"}]
    good, bad = ([{"role": "assistant", "content": x}] for x in ("two", "three"))
    forms = [
        {"prompt": "1+1?", "chosen": "two", "rejected": "three"},
        {"prompt": asked, "chosen": good, "rejected": bad},
        {"chosen": asked + good, "rejected": asked + bad},
        {"prompt": "1+1?", "chosen": asked + good, "rejected": asked + bad},
    ]
    found = made(forms, tokenizer, load=load_pairs)
    for each in found:
        assert {name: x.tolist() for name, x in each.items()} == {
            name: x.tolist() for name, x in found[0].items()
        }
    halves = [{n: x[found[0]["segment"] == i] for n, x in found[0].items()} for i in (0, 1)]
    assert [trained(half, tokenizer) for half in halves] == [["two<|im_end|>"], ["three<|im_end|>"]]
    prompts = [half["tokens"][~half["response_mask"]].tolist() for half in halves]
    assert prompts[0] == prompts[1] and len(prompts[0]) > 10


def test_what_is_too_long_is_cut_and_a_pair_is_dropped_as_a_whole(capsys):
    tokenizer = byte_tokenizer(None)
    rows = [{"prompt": "1234", "response": "5678"}, {"prompt": "12345678", "response": "9"}]
    [sequence] = made(rows, tokenizer, max_tokens=6)
    assert tokenizer.decode(sequence["tokens"]) == "123456"
    assert sequence["response_mask"].tolist() == [False] * 4 + [True] * 2
    said = "data: x: 2 of 2 exceed --sft.max-tokens 6: cut, and 1 dropped"
    assert said in capsys.readouterr().out
    rows = [
        {"prompt": "1234", "chosen": "567", "rejected": "5"},
        {"prompt": "123456", "chosen": "7", "rejected": "8"},
    ]
    [both] = made(rows, tokenizer, max_tokens=6, load=load_pairs)
    assert tokenizer.decode(both["tokens"]) == "12345612345</s>"
    assert both["segment"].tolist() == [0] * 6 + [1] * 6
    assert "2 of 2 exceed --dpo.max-tokens 6: cut, and 1 dropped" in capsys.readouterr().out
    asked = [{"role": "user", "content": "1+1?"}]
    long = [*asked, {"role": "user", "content": "?" * 200}]
    end = [{"role": "assistant", "content": "two"}]
    chats = [
        {"chosen": asked + end, "rejected": long + end},
        {"chosen": asked + end} | {"rejected": [*asked, {"role": "assistant", "content": "three"}]},
    ]
    [both] = made(chats, byte_tokenizer(QWEN), max_tokens=120, load=load_pairs)
    assert "three" in byte_tokenizer(QWEN).decode(both["tokens"])
    with pytest.raises(ValueError, match="--dpo.data x: all 1 rows exceed --dpo.max-tokens 6"):
        made(rows[1:], tokenizer, max_tokens=6, load=load_pairs)


def test_pairs_of_equal_texts_are_dropped_and_counted_and_refused_if_all_are(capsys):
    tokenizer = byte_tokenizer(QWEN)
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    alike = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert len(made([good, alike, good], tokenizer, load=load_pairs)) == 2
    said = "data: x: 1 of 3 dropped: chosen and rejected are the same"
    assert said in capsys.readouterr().out
    with pytest.raises(ValueError, match="--dpo.data x: chosen and rejected are the same in all"):
        made([alike], tokenizer, load=load_pairs)


@pytest.mark.parametrize(
    ("row", "load", "refusal"),
    [
        ({"prompt": "a", "response": ""}, load_demonstrations, "of which ['response'] are empty"),
        ({"text": "a"}, load_demonstrations, "has columns ['text']; needs messages, or prompt"),
        ({"response": "a"}, load_demonstrations, "; needs a prompt"),
        ({"messages": TALK[:1]}, load_demonstrations, "no turn of the assistant to train on"),
        ({"messages": [{"role": "user"}]}, load_demonstrations, "needs a role, and content as"),
        ({"prompt": "\ud800", "response": "a"}, load_demonstrations, "'utf-8' codec can't encode"),
        ({"messages": [1]}, load_demonstrations, "`messages` is [1]; must be text or chat"),
        ({"prompt": "a", "chosen": "b"}, load_pairs, "needs prompt, chosen and rejected"),
        ({"chosen": "b", "rejected": "c"}, load_pairs, "; needs a prompt"),
        ({"chosen": TALK, "rejected": TALK[2:]}, load_pairs, "share no first message"),
    ],
    ids=lambda value: ascii(value),
)
def test_a_row_that_cannot_be_used_is_named(row, load, refusal):
    flag = "--sft.data" if load is load_demonstrations else "--dpo.data"
    good = {"prompt": "a", "response": "b", "chosen": "b", "rejected": "c"}
    with pytest.raises(ValueError) as raised:
        made([good, row], byte_tokenizer(QWEN), load=load)
    assert str(raised.value).startswith(f"{flag} x, row 2: ") and refusal in str(raised.value)


def test_a_file_is_read_by_data_py_and_a_missing_one_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    known = byte_tokenizer(None), DataConfig(), 9
    [[sequence]] = load_demonstrations([str(file)], *known, read_rows=read_rows)
    assert len(sequence["tokens"]) == 6
    with pytest.raises(ValueError, match="--dpo.data /nowhere: no such file"):
        load_pairs(["/nowhere"], *known, read_rows=read_rows)


def half(*ids, num_prompt):
    mask = torch.arange(len(ids)) >= num_prompt
    return {"tokens": torch.tensor(ids), "response_mask": mask}


def test_a_packed_pair_is_two_sequences_of_one_row():
    first = pair(half(5, 6, 7, num_prompt=1), half(5, 8, num_prompt=1))
    second = pair(half(9, 3, num_prompt=1), half(9, 4, 4, 4, num_prompt=1))
    [row] = pack([first, second], 11)
    row = split_pairs(row)
    assert row.source == (0, 0, 1, 1)
    assert row.cu_seqlens.tolist() == [0, 3, 5, 7, 11] and row.cu_seqlens.dtype == torch.int32
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 0, 1, 2, 3]
    assert row.max_seqlen == 4 and row.num_response_tokens == 7
    assert row.tokens.tolist() == [5, 6, 7, 5, 8, 9, 3, 9, 4, 4, 4]
    rows = pack([first, second], 10)  # no pair is cut: a row each
    assert [len(each.tokens) for each in rows] == [6, 5]
    [empty] = pack([], 10, num_rows=1, like=PAIR)
    assert split_pairs(empty) is empty and empty.fields["segment"].tolist() == [0] * 4
    [plain] = pack([half(5, 6, num_prompt=1)], 10)
    assert split_pairs(plain) is plain
