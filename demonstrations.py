# SPDX-FileCopyrightText: 2026 handful contributors (demonstrations.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Demonstrations and pairs: chat or text -> token ids, and which of them are trained.

The problem. Only the assistant's words may be trained, and where these are is not in the tokens: a
search for "<|im_start|>assistant" finds it in a user's question too, and misses it where a template
writes it otherwise. A template may also write a turn in another way once turns follow it; then
what is trained is not what the model will see.

How it works. By position. A template with {% generation %} blocks says where they are. Any other is
asked turn by turn: the conversation up to a turn, with the prompt for an answer, must begin the
conversation with that turn, and what is added is the turn:
    user: 1+1?                       -> <|user|>1+1?<|end|>\\n<|assistant|>          not trained
    user: 1+1?, assistant: 2         -> <|user|>1+1?<|end|>\\n<|assistant|>2<|end|>\\n
    what is added                       2<|end|>                                    trained
                                        \\n                                          not trained
White space behind the control token that ends a turn is the template's: nobody samples it. Each
part is tokenized by itself, as in sampling, where a response begins with a token of its own. A
template that writes earlier turns anew is refused, with the turn.

Rows that are recognised:
    messages                     chat; every turn of the assistant is trained
    prompt, response             text or chat; the response alone is trained
    prompt, chosen, rejected     a pair, text or chat; without a prompt chosen and rejected are
                                 whole conversations, and what they share is the prompt
`question` serves for prompt, `completion` and `answer` for response. Text goes through the chat
template, if there is one, as a user's question and its answer; else the end token follows it.
Control tokens in a user's words are text, as in data.py.

What is too long is cut at its end. One of which nothing trained is left is dropped, a pair as a
whole. Both are counted. A pair is one sequence of two segments, chosen and rejected (packing.py).
What we give up: data sets that do not fit in memory; images. A tokenizer that puts a space before
every text (Llama 2) puts one before each part.

Copied, with data.py and transformers:
    from data import DataConfig
    from demonstrations import load_demonstrations
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    inner = Tokenizer(models.WordLevel({"1": 0, "+": 1, "2": 2, "</s>": 3}, unk_token="1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    rows = [{"prompt": "1 +", "response": "2 "}]
    [[made]] = load_demonstrations(["x"], tokenizer, DataConfig(), 9, read_rows=lambda *_: rows)
    print(made["response_mask"].tolist())  # [False, False, True, True]
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

MARK = "\ue000"  # no character: it stands in no text
RESPONSES = ("response", "completion", "answer")
NONE = torch.zeros(0, dtype=torch.int64)
# A pair without tokens: the names and types of empty rows on a rank without pairs.
PAIR = {"tokens": NONE, "response_mask": NONE.bool(), "segment": NONE}
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Part(NamedTuple):
    """A piece of a conversation's text; what stands between marks in it spells no control token."""

    text: str
    learn: bool


class Chat(NamedTuple):
    """A conversation; the assistant's turns are trained from message number num_given on."""

    messages: list[dict]
    num_given: int


def load_demonstrations(
    sources: Sequence[str],
    tokenizer,
    config,
    max_tokens: int,
    *,
    read_rows: Callable[[str, str], list[dict]],
    flag: str = "--sft.data",
) -> list[list[dict[str, Tensor]]]:
    """For each source its demonstrations {"tokens" [L], "response_mask" [L]}, ready to be packed.

    config: data.DataConfig. read_rows(source, split): data.read_rows. Raises ValueError, which
    begins with `flag` and names the row.
    """
    encoder = Encoder(tokenizer, config)
    return [
        [each for [each] in _load(source, flag, _demonstration, encoder, max_tokens, read_rows)]
        for source in sources
    ]


def load_pairs(
    sources: Sequence[str],
    tokenizer,
    config,
    max_tokens: int,
    *,
    read_rows: Callable[[str, str], list[dict]],
    flag: str = "--dpo.data",
) -> list[list[dict[str, Tensor]]]:
    """For each source its pairs: chosen and rejected as one sequence with the field "segment" [L],
    0 and 1. max_tokens: of each half; the rest as in load_demonstrations.
    """
    encoder = Encoder(tokenizer, config)
    return [
        [pair(*both) for both in _load(source, flag, _pair, encoder, max_tokens, read_rows)]
        for source in sources
    ]


def pair(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> dict[str, Tensor]:
    """One sequence of two segments: "tokens", "response_mask" and "segment", [L + L'] each."""
    made = {name: torch.cat([chosen[name], rejected[name]]) for name in chosen}
    lengths = torch.tensor([len(chosen["tokens"]), len(rejected["tokens"])])
    return made | {"segment": torch.repeat_interleave(torch.arange(2), lengths)}


def split_pairs(row: Any) -> Any:
    """The packed row (packing.PackedRow) with each pair as two sequences, chosen and rejected; one
    without pairs as it is. `source` then has a pair's index twice.
    """
    if "segment" not in row.fields or not row.source:
        return row
    segment = row.fields["segment"]
    begins = torch.ones(len(segment), dtype=torch.bool)
    begins[1:] = segment[1:] != segment[:-1]  # of a pair's second half, and of the next pair
    starts = begins.nonzero()[:, 0]
    edges = torch.cat([starts, torch.tensor([len(segment)])])
    lengths = edges.diff()
    return replace(
        row,
        position_ids=torch.arange(len(segment)) - torch.repeat_interleave(starts, lengths),
        cu_seqlens=edges.to(torch.int32),
        max_seqlen=int(lengths.max()),
        source=tuple(i for i in row.source for _ in range(2)),
    )


def _load(
    source: str, flag: str, to_chats: Callable, encoder: Encoder, max_tokens: int, read_rows
) -> list[list[dict[str, Tensor]]]:
    """The sequences of each row of a source, those that are too long cut or left out."""
    parts = []
    try:
        rows = read_rows(source, encoder.config.split)
        for i, row in enumerate(rows, 1):
            try:
                parts.append([encoder.parts(chat) for chat in to_chats(row)])
            except ValueError as error:
                raise ValueError(f"{source}, row {i}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error
    flat = iter(encoder.encode([each for own in parts for each in own]))
    whole = [[next(flat) for _ in own] for own in parts]
    made = [[{k: x[:max_tokens] for k, x in each.items()} for each in own] for own in whole]
    kept = [own for own in made if all(each["response_mask"].any() for each in own)]
    differ = [own for own in kept if len(own) == 1 or _differ(*own)]
    num_long = sum(1 for own in whole if max(len(x["tokens"]) for x in own) > max_tokens)
    rule = f"exceed {flag.split('.')[0]}.max-tokens {max_tokens}"
    if not kept:
        raise ValueError(f"{flag} {source}: all {len(whole)} rows {rule} before what is trained")
    if not differ:
        raise ValueError(f"{flag} {source}: chosen and rejected are the same in all rows")
    if os.environ.get("RANK", "0") == "0":
        if num_long:
            what = f"{num_long} of {len(whole)} {rule}: cut, and {len(whole) - len(kept)} dropped"
            print(f"data: {source}: {what}", flush=True)
        if len(differ) < len(kept):
            alike = f"{len(kept) - len(differ)} of {len(whole)} dropped"
            print(f"data: {source}: {alike}: chosen and rejected are the same", flush=True)
    return differ


def _differ(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> bool:
    return not torch.equal(chosen["tokens"], rejected["tokens"])


def _demonstration(row: dict) -> list[Chat]:
    if row.get("messages"):
        return [Chat(_messages("messages", row["messages"], "user"), 0)]
    name = next((name for name in RESPONSES if row.get(name)), "")
    if not name:
        raise ValueError(f"{_has(row)}; needs messages, or prompt and response")
    prompt = _prompt(row)
    return [Chat(prompt + _messages(name, row[name], "assistant"), len(prompt))]


def _pair(row: dict) -> list[Chat]:
    if not (row.get("chosen") and row.get("rejected")):
        raise ValueError(f"{_has(row)}; needs prompt, chosen and rejected")
    names = ("chosen", "rejected")
    chosen, rejected = (_messages(name, row[name], "assistant") for name in names)
    if chosen[0]["role"] == "assistant":
        prompt = _prompt(row)
        return [Chat(prompt + chosen, len(prompt)), Chat(prompt + rejected, len(prompt))]
    num_shared = 0
    for mine, theirs in zip(chosen, rejected, strict=False):
        if mine != theirs:
            break
        num_shared += 1
    if num_shared == 0:
        raise ValueError("chosen and rejected are conversations that share no first message")
    return [Chat(chosen, num_shared), Chat(rejected, num_shared)]


def _has(row: dict) -> str:
    empty = [name for name in sorted(row) if not row[name]]
    return f"has columns {sorted(row)}" + (f", of which {empty} are empty" if empty else "")


def _prompt(row: dict) -> list[dict]:
    name = next((name for name in ("prompt", "question") if row.get(name)), "")
    if not name:
        raise ValueError(f"{_has(row)}; needs a prompt")
    return _messages(name, row[name], "user")


def _messages(name: str, given: Any, role: str) -> list[dict]:
    """Chat messages whose content is text; a text is one message of `role`."""
    if isinstance(given, str):
        given = [{"role": role, "content": given}]
    if not isinstance(given, list) or not all(isinstance(m, dict) for m in given):
        raise ValueError(f"`{name}` is {given!r:.80}; must be text or chat messages")
    messages = []
    for message in given:
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(parts) if all(isinstance(x, str) for x in parts) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise ValueError(f"`{name}` has {message!r:.80}; needs a role, and content as text")
        content.encode()  # half of a surrogate pair is no text
        plain = {key: x for key, x in message.items() if x is not None}
        messages.append(plain | {"content": content.replace(MARK, "")})
    return messages


class Encoder:
    """Conversations -> parts -> token ids, by one tokenizer and its template."""

    def __init__(self, tokenizer, config):
        self.tokenizer = tokenizer
        self.config = config
        self.options = json.loads(config.template_options)
        added = [x.content for x in tokenizer.added_tokens_decoder.values() if x.special]
        self.control = tuple(dict.fromkeys([*added, *tokenizer.all_special_tokens]))
        longest_first = sorted(self.control, key=len, reverse=True)
        acts = [] if config.control_tokens else longest_first
        self.pattern = re.compile("|".join(map(re.escape, acts)) or "(?!)")
        self.front: list[int] = []  # what the tokenizer puts before plain text
        if tokenizer.chat_template is None:
            inner = tokenizer("1", add_special_tokens=False)["input_ids"]
            whole = tokenizer("1")["input_ids"]
            places = (k for k in range(len(whole)) if whole[k : k + len(inner)] == inner)
            self.front = whole[: next(places)]

    def parts(self, chat: Chat) -> list[Part]:
        """The text of a conversation, and what of it is trained. ValueError if nothing is, or if
        the template does not say where.
        """
        messages, num_given = chat
        if not any(m["role"] == "assistant" for m in messages[num_given:]):
            raise ValueError("has no turn of the assistant to train on")
        if self.config.system_prompt:
            kept = [m for m in messages[:num_given] if m["role"] != "system"]
            later = [m for m in messages[num_given:] if m["role"] != "system"]
            messages = [{"role": "system", "content": self.config.system_prompt}, *kept, *later]
            num_given = len(kept) + 1
        messages = list(map(self._marked, messages))
        template = self.tokenizer.chat_template
        if template is None:
            return self._text_parts(messages)
        from jinja2 import TemplateError

        try:
            if GENERATION.search(self.tokenizer.get_chat_template()):
                return self._told_parts(messages, num_given)
            return self._turn_parts(messages, num_given)
        except (TemplateError, ArithmeticError, LookupError, TypeError) as error:
            what = f"the chat template refuses it ({type(error).__name__}: {error})"
            raise ValueError(what) from error

    def _marked(self, message: dict) -> dict:
        if message["role"] == "assistant":
            return message
        marked = self.pattern.sub(MARK + r"\g<0>" + MARK, message["content"])
        return message | {"content": marked}

    def _text_parts(self, messages: list[dict]) -> list[Part]:
        if [m["role"] for m in messages] != ["user", "assistant"]:
            raise ValueError("chat messages need a chat template, and the tokenizer has none")
        end = self.tokenizer.eos_token or ""
        prompt, response = (m["content"] for m in messages)
        return [Part(prompt, False), Part(response + end, True)]

    def _told_parts(self, messages: list[dict], num_given: int) -> list[Part]:
        """By the template's own {% generation %} blocks, but for those of the given messages."""
        _, given = self._spans(messages[:num_given]) if num_given else ("", [])
        text, spans = self._spans(messages)
        parts = []
        done = 0
        for start, end in spans[len(given) :]:
            parts.append(Part(text[done:start], False))
            parts.append(Part(text[start:end], True))
            done = end
        if not parts:
            raise ValueError("the chat template's generation blocks hold nothing of it")
        return parts

    def _spans(self, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            [messages],
            chat_template=self.tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            **self.options,
        )
        return texts[0], spans[0]

    def _turn_parts(self, messages: list[dict], num_given: int) -> list[Part]:
        parts = []
        done = ""
        for k in range(num_given, len(messages)):
            if messages[k]["role"] != "assistant":
                continue
            before = self._render(messages[:k], add_generation_prompt=True)
            after = self._render(messages[: k + 1])
            if not (before.startswith(done) and after.startswith(before)):
                what = f"the chat template writes what precedes message {k + 1} in another way"
                advice = "give it {% generation %} blocks, or rows of one answer each"
                raise ValueError(f"{what} once that follows, so nobody can tell it apart; {advice}")
            turn = after[len(before) :]
            stripped = turn.rstrip()
            trained = stripped if stripped.endswith(self.control) else turn
            parts += [Part(before[len(done) :], False), Part(trained, True)]
            done = before + trained
        return parts

    def _render(self, messages: list[dict], **options: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, **options, **self.options
        )

    def encode(self, conversations: Sequence[Sequence[Part]]) -> list[dict[str, Tensor]]:
        """{"tokens" [L], "response_mask" [L]} of each conversation."""
        texts = {part.text for parts in conversations for part in parts if MARK not in part.text}
        ordered = sorted(texts)
        ids_of: dict[str, list[int]] = {}
        for start in range(0, len(ordered), 1000):
            some = ordered[start : start + 1000]
            found = self.tokenizer(some, add_special_tokens=False)["input_ids"]
            ids_of |= dict(zip(some, found, strict=True))
        return [self._joined(parts, ids_of) for parts in conversations]

    def _joined(self, parts: Sequence[Part], ids_of: dict[str, list[int]]) -> dict[str, Tensor]:
        ids = list(self.front)
        mask = [False] * len(ids)
        for part in parts:
            found = ids_of.get(part.text)
            if found is None:
                found = self._with_marks(part.text)
            ids += found
            mask += [part.learn] * len(found)
        mask[:1] = [False]  # nothing predicts the first token
        return {"tokens": torch.tensor(ids), "response_mask": torch.tensor(mask)}

    def _with_marks(self, text: str) -> list[int]:
        ids = []
        for k, piece in enumerate(text.split(MARK)):
            options = {"split_special_tokens": True} if k % 2 == 1 else {}
            ids += self.tokenizer(piece, add_special_tokens=False, **options)["input_ids"]
        return ids
