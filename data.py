# SPDX-FileCopyrightText: 2026 handful contributors (data.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Prompts: reading, tokenizing once, and an order that can be resumed.

The problem. Silent errors: the chat template's text begins with BOS and the tokenizer adds another;
a prompt is too long and is cut; the gold answer of a row is empty; after a restart the loader
begins at prompt 0 again.

How it works. Everything is tokenized at the start, by the template once and without special tokens
on top of it; prompts over the limit are counted and dropped, or refused, before a model is loaded.
What the run then needs is an order, and an order is a pure function of counters:
    epoch e of a data set is a permutation drawn from (seed, data set, e);
    with several data sets, each next prompt comes from the one that is furthest behind its share:
        weights 3 : 1   ->   a a b a  a a b a ...
So the state of the stream is one integer per data set: how many prompts were taken.

Rows that are recognised: `question` and `answer` (GSM8K; the gold number behind `####` is the
answer), `prompt` as text or chat messages with an answer column (TRL), `prompt` with
`reward_model.ground_truth` (verl). All other columns go to the reward functions by name, and
answers as they are. A conversation that ends in the assistant's words goes on there. Control tokens
(<|im_end|>) in a user's words are text.
What we give up: streaming of data sets that do not fit in memory; images.

Copied: load_prompts takes a Transformers tokenizer; an order of your own prompts needs none.
    from data import Prompt, PromptStream
    prompts = [Prompt([token], "text", "answer", "mine") for token in range(4)]
    stream = PromptStream([prompts], seed=1)
    stream.take(3)
    print(stream.state_dict()["num_taken"])  # [3]
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class DataConfig:
    max_prompt_tokens: int = 512
    """Longest prompt in tokens, template included."""
    long_prompts: Literal["drop", "refuse"] = "drop"
    """What to do with longer ones: drop and count them, or stop at the start."""
    weights: tuple[float, ...] = ()
    """Share of each data set in a batch, in the order of --data; empty: by size."""
    system_prompt: str = ""
    """System message in place of the data's own (needs a chat template); empty: the data's own."""
    template_options: str = "{}"
    """JSON object of extra arguments of the chat template, such as {"enable_thinking": false}."""
    control_tokens: bool = False
    """Let control tokens (such as <|im_end|>) in users' text act as such; off: they are text."""
    split: str = "train"
    """Split of a Hub data set."""

    def __post_init__(self):
        limit = self.max_prompt_tokens
        if limit < 1:
            raise ValueError(f"--data.max-prompt-tokens {limit}: must be at least 1; try 512")
        if self.long_prompts not in ("drop", "refuse"):
            raise ValueError(f"--data.long-prompts {self.long_prompts}: must be drop or refuse")
        if not all(0 < weight < 1e100 for weight in self.weights):
            shares = " ".join(map(str, self.weights))
            raise ValueError(f"--data.weights {shares}: must be above 0 and below 1e100")
        flag = f"--data.template-options {self.template_options}"
        with _explained(f"{flag}: not JSON"):
            options = json.loads(self.template_options)
        if not isinstance(options, dict) or options.keys() & {"tokenize", "conversation"}:
            raise ValueError(f"{flag}: must be a JSON object, such as {{}}, without `tokenize`")


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready to be sampled from and scored."""

    prompt_ids: list[int]
    text: str  # what prompt_ids say, template included
    answer: Any  # what the reward compares with, as the data have it; "" if there is none
    source: str  # name of the data set
    columns: dict = field(default_factory=dict)  # the row's other columns


ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label")
HUB_NAME = re.compile(r"(?!.*\.(j\w+|parquet|csv|tsv|txt|gz)$)\w[\w.-]*(/[\w.-]+)?(:.+)?")
MARK = "\ue000"  # no character: it stands in no text
MARKED = MARK + r"\g<0>" + MARK
# What templates, tokenizers and data packages raise where they cannot use their input.
FOREIGN = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def load_all(
    paths: Sequence[str], eval_paths: Sequence[str], tokenizer, config: DataConfig
) -> tuple[list[list[Prompt]], list[list[Prompt]]]:
    """(data sets to learn from, data sets to evaluate on), by load_prompts."""
    if not paths:
        raise ValueError("--data: must name at least one data set")
    datasets = load_prompts(paths, tokenizer, config)
    return datasets, load_prompts(eval_paths, tokenizer, config, "--eval-data")


def load_prompts(
    sources: Sequence[str], tokenizer, config: DataConfig, flag: str = "--data"
) -> list[list[Prompt]]:
    """One list of prompts per source: a file of JSON lines, a .parquet file, a Hub name, or
    reasoning_gym:NAME:SIZE:SEED. Raises ValueError, which begins with `flag` and names the row."""
    names = [Path(source).name for source in sources]  # in metrics and samples
    if len(set(names)) < len(names):
        names = list(sources)
    datasets = []
    for source, name in zip(sources, names, strict=True):
        try:
            prompts = to_prompts(read_rows(source, config.split), tokenizer, config, source)
        except ValueError as error:
            raise ValueError(f"{flag} {error}") from error
        datasets.append([replace(prompt, source=name) for prompt in prompts])
    return datasets


def read_rows(source: str, split: str) -> list[dict]:
    """The rows of one source as dictionaries."""
    path = Path(source)
    if source.startswith("reasoning_gym:"):
        rows = _reasoning_gym_rows(*source.split(":")[1:4])
    elif path.is_file() and path.suffix == ".parquet":
        rows = _parquet_rows(source)
    elif path.is_file() and path.suffix in (".jsonl", ".json", ""):
        with _explained(f"{source}: cannot be read"), open(source, "rb") as file:
            numbered = [(i, line) for i, line in enumerate(file, 1) if line.strip()]
        rows = [_parse_line(line, f"{source}, line {i}") for i, line in numbered]
    elif path.is_file():
        raise ValueError(f"{source}: must be JSON lines (.jsonl, an object a line) or .parquet")
    elif HUB_NAME.fullmatch(source) or (source and path.is_dir()):
        rows = _hub_rows(source, split)
    else:
        raise ValueError(f"{source}: no such file")
    if not rows:
        raise ValueError(f"{source}: is empty; it needs at least one row")
    return rows


def _parse_line(line: bytes, where: str) -> dict:
    with _explained(f"{where}: is not JSON; each line must be one object"):
        row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"{where}: is {row!r:.80}; each line must be one object")
    return row


def _parquet_rows(source: str) -> list[dict]:
    pq = _import("pyarrow.parquet", "pyarrow", f"{source}:")
    with _explained(f"{source}: is no parquet file"), pq.ParquetFile(source) as file:
        # In parts: Arrow converts no nested column of more than 2 GB at once.
        return [row for part in file.iter_batches(batch_size=64) for row in part.to_pylist()]


def _hub_rows(source: str, split: str) -> list[dict]:
    name, _, subset = source.partition(":")
    datasets = _import("datasets", "datasets", f"{source}: no such file; as a name on the Hub it")
    what = f"{source}: no such file, and not on the Hub"
    with _explained(what, datasets.exceptions.DatasetsError):
        return list(datasets.load_dataset(name, subset or None, split=split))


def _reasoning_gym_rows(name: str, size: str = "2000", seed: str = "0") -> list[dict]:
    """Problems of the reasoning_gym package; its verifier needs the whole entry, as a column."""
    source = f"reasoning_gym:{name}:{size}"
    gym = _import("reasoning_gym", "reasoning-gym", f"{source}:")
    with _explained(f"{source}: cannot be made", AssertionError):
        # Entry i is made from seed + i: closer seeds would give the same problems twice.
        entries = list(gym.create_dataset(name, size=int(size), seed=int(seed) * 1_000_000))
    own = {"reasoning_gym": name}
    return [{"question": e["question"], "answer": e["answer"], "entry": e} | own for e in entries]


def _import(module: str, package: str, what: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        command = f"{sys.executable} -m pip install {package}"
        raise ValueError(f"{what} needs {package}; install it with: {command}") from error


@contextlib.contextmanager
def _explained(what: str, *errors: type[Exception]) -> Iterator[None]:
    """What foreign code raises inside becomes a ValueError that says what it is about."""
    try:
        yield
    except (*errors, *FOREIGN) as error:
        raise ValueError(f"{what} ({type(error).__name__}: {error})") from error


def to_prompts(rows: Sequence[dict], tokenizer, config: DataConfig, source: str) -> list[Prompt]:
    """Tokenized prompts of `rows`, over-long ones dropped or refused. Raises ValueError."""
    control = _control_tokens(tokenizer, config)
    prompts = []
    marked = []
    for i, row in enumerate(rows, 1):
        try:
            messages, answer, columns = _parse_row(row)
            marked.append(_render(_mark(messages, control), tokenizer, config))
            marked[-1].encode()  # half of a surrogate pair is no text
        except ValueError as error:
            raise ValueError(f"{source}, row {i}: {error}") from error
        prompts.append(Prompt([], marked[-1].replace(MARK, ""), answer, source, columns))
    with _explained(f"{source}: the tokenizer refuses a prompt"):
        all_ids = _tokenize(marked, tokenizer, config.max_prompt_tokens)
    if [] in all_ids:
        raise ValueError(f"{source}, row {all_ids.index([]) + 1}: is an empty prompt")
    prompts = [replace(p, prompt_ids=ids) for p, ids in zip(prompts, all_ids, strict=True)]
    kept = [prompt for prompt in prompts if len(prompt.prompt_ids) <= config.max_prompt_tokens]
    num_long = len(prompts) - len(kept)
    too_long = f"prompts exceed --data.max-prompt-tokens {config.max_prompt_tokens}"
    if num_long and (config.long_prompts == "refuse" or not kept):
        advice = "raise the limit" + (" or use --data.long-prompts drop" if kept else "")
        rule = f"{too_long}; the longest has {max(map(len, all_ids))} tokens: {advice}"
        raise ValueError(f"{source}: {num_long} of {len(prompts)} {rule}")
    num_marked = sum(1 for text in marked if MARK in text)
    hidden = [p for p in prompts if {"response", "truncated"} & p.columns.keys()]
    counts = {
        f"{too_long} and are dropped": num_long,
        "rows have no answer": sum(1 for prompt in prompts if prompt.answer == ""),
        "rows have columns that the sample's response and truncated hide": len(hidden),
        "prompts spell control tokens, here text (--data.control-tokens lets them act)": num_marked,
    }
    for what, count in counts.items():
        if count and os.environ.get("RANK", "0") == "0":
            print(f"data: {source}: {count} of {len(prompts)} {what}", flush=True)
    return kept


def _parse_row(row: dict) -> tuple[list[dict], Any, dict]:
    """(chat messages, answer, other columns): of several columns the first that is not empty."""
    filled = [name for name, value in row.items() if not _is_empty(value)]
    columns = dict(row)
    name = next((name for name in ("prompt", "question") if name in filled), None)
    if name is None:
        rule = "needs `prompt` or `question` (text or chat messages), and not empty"
        raise ValueError(f"has columns {sorted(row)}; {rule}")
    messages = _to_messages(name, columns.pop(name))
    if "images" in filled or "videos" in filled:
        raise ValueError("has images or videos, and prompts are text alone")
    verl = row.get("reward_model")
    answer = verl.get("ground_truth") if isinstance(verl, dict) else None
    if _is_empty(answer):
        name = next((name for name in ANSWER_COLUMNS if name in filled), "answer")
        answer = columns.pop(name, "")
    if isinstance(answer, str) and "####" in answer:
        last = answer.rpartition("####")[2].strip()
        # Of a text with other headings the whole is the answer.
        if re.findall("#+", answer) == ["####"] or re.fullmatch(r"[-+$]*\.?\d[\d.,/ ]*%?", last):
            answer = last
    return messages, "" if _is_empty(answer) else answer, columns


def _is_empty(value: Any) -> bool:
    is_blank = isinstance(value, str) and not value.strip()
    return is_blank or value in (None, [], {}) or value != value  # NaN: a table's empty cell


def _to_messages(name: str, prompt: Any) -> list[dict]:
    """Messages whose content is text: of text a user's message, of parts their texts, joined."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(m, dict) for m in prompt):
        raise ValueError(f"`{name}` is {prompt!r:.80}; must be text or chat messages")
    messages = []
    for given in prompt:
        message = {key: value for key, value in given.items() if value is not None}
        content = message.get("content", "" if "tool_calls" in message else None)
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(parts) if all(isinstance(x, str) for x in parts) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise ValueError(f"`{name}` has {given!r:.80}; needs a role, and content that is text")
        messages.append(message | {"content": content.replace(MARK, "")})
    return messages


def _control_tokens(tokenizer, config: DataConfig) -> re.Pattern:
    """Finds the texts that would become special tokens and must not; nothing if they may."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    texts = [] if config.control_tokens else [*added, *tokenizer.all_special_tokens]
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _mark(messages: list[dict], control: re.Pattern) -> list[dict]:
    """The messages with marks around each control token, but for those of the assistant."""
    return [
        m if m["role"] == "assistant" else m | {"content": control.sub(MARKED, m["content"])}
        for m in messages
    ]


def _render(messages: list[dict], tokenizer, config: DataConfig) -> str:
    """The text of a conversation up to where the response begins."""
    if config.system_prompt:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": config.system_prompt}, *others]
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            rule = "need a chat template, and the tokenizer has none; give prompts as text"
            raise ValueError(f"chat messages or a --data.system-prompt {rule}")
        return messages[0]["content"]
    from jinja2 import TemplateError

    begun = messages[-1]["role"] == "assistant"
    options = {"continue_final_message" if begun else "add_generation_prompt": True}
    options |= json.loads(config.template_options)
    with _explained("the chat template refuses the prompt", TemplateError, ArithmeticError):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def _tokenize(texts: list[str], tokenizer, limit: int) -> list[list[int]]:
    """Token ids of each text; what stands between marks is text also where it spells a token. Of a
    text of a million characters, too many for `limit`, that many zeros: 50 MB take 2 minutes."""
    longest = max(map(len, tokenizer.get_vocab()))
    least = [len(text) // longest if len(text) > 1_000_000 else 0 for text in texts]
    texts = [text if n <= limit else "" for text, n in zip(texts, least, strict=True)]
    same: dict[int, int] = {}  # one object for each id: a list takes 8 bytes a token, not 36
    all_ids = []
    for start in range(0, len(texts), 1000):  # of all at once it makes lists and masks as well
        made = tokenizer(texts[start : start + 1000], add_special_tokens=False)["input_ids"]
        all_ids += [list(map(same.setdefault, ids, ids)) for ids in made]
    for i, text in enumerate(texts):
        if MARK in text:
            all_ids[i] = []
            for k, part in enumerate(text.split(MARK)):
                options = {"split_special_tokens": True} if k % 2 == 1 else {}
                all_ids[i] += tokenizer(part, add_special_tokens=False, **options)["input_ids"]
    all_ids = [ids or [0] * n for ids, n in zip(all_ids, least, strict=True)]
    if tokenizer.chat_template is not None:
        return all_ids
    # Plain text gets what the tokenizer puts in front of it, but not what it puts behind: its end.
    inner = tokenizer("1", add_special_tokens=False)["input_ids"]
    whole = tokenizer("1")["input_ids"]
    num_front = next(k for k in range(len(whole)) if whole[k : k + len(inner)] == inner)
    return [whole[:num_front] + ids for ids in all_ids]


def sampling_seed(*place: object) -> int:
    """A seed that follows from `place` alone (the run's seed, the step ...), after a resume too."""
    return random.Random(repr(place)).getrandbits(31)


class PromptStream:
    """An endless stream of prompts, the same on all ranks; its state: an integer per data set."""

    def __init__(
        self, datasets: Sequence[Sequence[Prompt]], *, weights: Sequence[float] = (), seed: int = 0
    ):
        self.datasets = datasets
        self.weights = list(weights) or [len(d) for d in datasets]
        self.seed = seed
        self.num_taken = [0] * len(datasets)
        self._orders: dict[int, tuple[int, list[int]]] = {}  # data set -> its epoch and permutation
        if len(self.weights) != len(datasets):
            shares = " ".join(map(str, weights))
            raise ValueError(f"--data.weights {shares}: must be {len(datasets)} numbers")

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next num_prompts prompts; a data set that ends begins its next epoch."""
        return [self._next_prompt() for _ in range(num_prompts)]

    def _next_prompt(self) -> Prompt:
        total = sum(self.num_taken) + 1
        shares = [weight / sum(self.weights) for weight in self.weights]
        d = max(range(len(shares)), key=lambda i: (shares[i] * total - self.num_taken[i], -i))
        size = len(self.datasets[d])
        epoch, offset = divmod(self.num_taken[d], size)
        if self._orders.get(d, (-1, []))[0] != epoch:
            order = random.Random(repr((self.seed, d, epoch))).sample(range(size), size)
            self._orders[d] = (epoch, order)
        self.num_taken[d] += 1
        return self.datasets[d][self._orders[d][1][offset]]

    def state_dict(self) -> dict:
        """How many prompts were taken of each data set, and what their order follows from."""
        origin = {"sizes": list(map(len, self.datasets)), "weights": self.weights}
        return {"num_taken": list(self.num_taken), "origin": origin | {"seed": self.seed}}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state` was saved. Raises ValueError if the order is another one now."""
        origin = self.state_dict()["origin"]
        if state["origin"] != origin:
            rule = "resume with the same --data, --data.weights and --seed"
            saved = f"the checkpoint's order of prompts follows from {state['origin']}"
            raise ValueError(f"{saved}, this one from {origin}: {rule}")
        self.num_taken = list(state["num_taken"])
