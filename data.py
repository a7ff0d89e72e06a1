"""Prompts: reading, tokenizing once, and an order that can be resumed.

The problem. Between a data set and the sampler sit three classic silent errors: the chat template's
text already begins with BOS and the tokenizer adds another (worth 6 points on MMLU in one report);
a prompt is too long and is cut, or breaks the run hours later; and after a restart the loader
begins at prompt 0 again, or skips what had been prefetched.

How it works. Everything is tokenized at the start, by the template once and without special tokens
on top of it; prompts over the limit are counted and dropped, or refused, before a model is loaded.
What the run then needs is an order, and an order is a pure function of counters:
    epoch e of a data set is a permutation drawn from (seed, data set, e);
    with several data sets, each next prompt comes from the one that is furthest behind its share:
        weights 3 : 1   ->   a a b a  a a b a ...
So the whole state of the stream is one integer per data set: how many prompts were taken. There is
nothing to prefetch and nothing to lose: 7,473 GSM8K prompts take 2 s at the start.

Rows that are recognised: `question` and `answer` (GSM8K; the gold number behind `####` is the
answer), `prompt` as text or chat messages with an answer column (TRL), `prompt` with
`reward_model.ground_truth` (verl). All other columns go to the reward functions by name.

What we give up: streaming of data sets that do not fit in memory.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    max_prompt_tokens: int = 512
    """Longest prompt in tokens, template included."""
    long_prompts: Literal["drop", "refuse"] = "drop"
    """What to do with longer ones: drop and count them, or stop at the start."""
    weights: tuple[float, ...] = ()
    """Share of each data set in a batch, in the order of --data; empty: by size."""
    system_prompt: str = ""
    """System message of each prompt, in place of the data's own; empty: what the data say (needs a
    chat template).
    """
    template_options: str = "{}"
    """JSON object of extra arguments of the chat template, such as {"enable_thinking": false}."""
    split: str = "train"
    """Split of a Hub data set."""

    def __post_init__(self):
        if self.max_prompt_tokens < 1:
            raise ValueError(
                f"--data.max-prompt-tokens {self.max_prompt_tokens}: must be at least 1; try 512"
            )
        if any(weight <= 0 for weight in self.weights):
            raise ValueError(
                f"--data.weights {self.weights}: must be above 0; or leave it out of --data"
            )
        flag = f"--data.template-options {self.template_options}"
        try:
            options = json.loads(self.template_options)
        except json.JSONDecodeError as error:
            raise ValueError(f"{flag}: not JSON ({error})") from error
        if not isinstance(options, dict):
            raise ValueError(f"{flag}: must be a JSON object, such as {{}}")


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready to be sampled from and scored."""

    prompt_ids: list[int]
    text: str  # what prompt_ids say, template included
    answer: str  # what the reward compares with; "" if the data has none
    source: str  # name of the data set
    columns: dict = field(default_factory=dict)  # the row's other columns


ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label")


def load_all(
    paths: Sequence[str], eval_paths: Sequence[str], tokenizer, config: DataConfig
) -> tuple[list[list[Prompt]], list[list[Prompt]]]:
    """(data sets to learn from, data sets to evaluate on), by load_prompts."""
    return (
        load_prompts(paths, tokenizer, config),
        load_prompts(eval_paths, tokenizer, config, "--eval-data"),
    )


def load_prompts(
    sources: Sequence[str], tokenizer, config: DataConfig, flag: str = "--data"
) -> list[list[Prompt]]:
    """One list of prompts per source: a file of JSON lines, a .parquet file, a Hub name, or
    reasoning_gym:NAME:SIZE:SEED.

    Raises ValueError, which begins with `flag`, for a missing, broken or empty data set, unknown
    columns, prompts that the chat template refuses, and prompts over the limit where those are
    refused.
    """
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


def require_columns(datasets: Sequence[Sequence[Prompt]], wanted: dict[str, list[str]]) -> None:
    """ValueError if a reward function wants a column that a data set has in no row; wanted:
    {function: columns}.
    """
    for prompts in datasets:
        known = {"prompt", "response", "truncated", *(name for p in prompts for name in p.columns)}
        known |= {"answer"} if any(p.answer for p in prompts) else set()
        for function, names in wanted.items():
            for name in names:
                if name not in known:
                    has = f"{prompts[0].source} has {', '.join(sorted(known))}"
                    raise ValueError(
                        f"--reward.functions {function}: wants {name}, which is no column; {has}"
                    )


def read_rows(source: str, split: str) -> list[dict]:
    """The rows of one source as dictionaries."""
    kind = Path(source).suffix
    if not kind and Path(source).is_file():
        kind = ".jsonl"
    if source.startswith("reasoning_gym:"):
        return _reasoning_gym_rows(*source.split(":")[1:4])
    if kind in (".jsonl", ".json", ".parquet") and not Path(source).is_file():
        raise ValueError(f"{source}: no such file")
    if kind in (".jsonl", ".json"):
        with open(source, encoding="utf-8") as lines:
            rows = [
                _parse_line(line, f"{source}, line {i}")
                for i, line in enumerate(lines, 1)
                if line.strip()
            ]
    elif kind == ".parquet":
        pq = _import("pyarrow.parquet", "pyarrow", source)
        rows = pq.read_table(source).to_pylist()
    else:
        name, _, subset = source.partition(":")
        datasets = _import("datasets", "datasets", source)
        try:
            rows = list(datasets.load_dataset(name, subset or None, split=split))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{source}: not a .jsonl or .parquet file, and not on the Hub ({error})"
            ) from error
    if not rows:
        raise ValueError(f"{source}: is empty; it needs at least one row")
    return rows


def _parse_line(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON ({error}); each line must be one object") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: is not a JSON object; each line must be one, such as {{'prompt': ...}}"
        )
    return row


def _import(module: str, package: str, source: str):
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{source}: needs {package}; install it with: pip install {package}"
        ) from error


def _reasoning_gym_rows(name: str, size: str = "2000", seed: str = "0") -> list[dict]:
    """Problems made by the reasoning_gym package; its verifier needs the whole entry, which travels
    as a column.
    """
    source = f"reasoning_gym:{name}:{size}"
    gym = _import("reasoning_gym", "reasoning-gym", source)
    try:
        # Entry i is made from seed + i: seeds closer than the sizes would give the same problems
        # twice.
        entries = list(gym.create_dataset(name, size=int(size), seed=int(seed) * 1_000_000))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return [
        {"question": e["question"], "answer": e["answer"], "reasoning_gym": name, "entry": e}
        for e in entries
    ]


def to_prompts(rows: Sequence[dict], tokenizer, config: DataConfig, source: str) -> list[Prompt]:
    """Tokenized prompts of `rows`, over-long ones dropped (and counted on the console) or refused.

    Raises ValueError as load_prompts does.
    """
    parsed = [_parse_row(row, f"{source}, row {i}") for i, row in enumerate(rows, 1)]
    texts = [_render(messages, tokenizer, config, source) for messages, _, _ in parsed]
    # Templated text brings its own BOS. Plain text gets what the tokenizer adds.
    ids = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    prompts = [
        Prompt(list(prompt_ids), text, answer, source, columns)
        for prompt_ids, text, (_, answer, columns) in zip(ids, texts, parsed, strict=True)
    ]
    if not all(p.prompt_ids for p in prompts):
        raise ValueError(f"{source}: has an empty prompt; remove the row")
    kept = [p for p in prompts if len(p.prompt_ids) <= config.max_prompt_tokens]
    num_long = len(prompts) - len(kept)
    limit = f"--data.max-prompt-tokens {config.max_prompt_tokens}"
    rule = f"{num_long} of {len(prompts)} prompts exceed {limit}"
    if num_long and (config.long_prompts == "refuse" or not kept):
        longest = max(len(p.prompt_ids) for p in prompts)
        instead = " or use --data.long-prompts drop" if kept else ""
        raise ValueError(
            f"{source}: {rule}; the longest has {longest} tokens: raise the limit{instead}"
        )
    if num_long and os.environ.get("RANK", "0") == "0":
        print(f"data: {source}: {rule} and are dropped", flush=True)
    return kept


def _parse_row(row: dict, source: str) -> tuple[list[dict], str, dict]:
    """(chat messages, answer, other columns) of one row."""
    columns = dict(row)
    question = columns.pop("prompt", None) if "prompt" in row else columns.pop("question", None)
    verl = row.get("reward_model")
    if isinstance(verl, dict) and "ground_truth" in verl:
        answer = verl["ground_truth"]
    else:
        name = next((name for name in ANSWER_COLUMNS if name in row), None)
        answer = columns.pop(name) if name else None
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    is_chat = (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, dict) and "content" in m for m in messages)
    )
    if not is_chat or (answer is None and not columns):
        raise ValueError(
            f"{source}: has columns {sorted(row)}; needs `prompt` or `question` (text or chat "
            f"messages), and {', '.join(ANSWER_COLUMNS)} or reward_model.ground_truth"
        )
    answer = "" if answer is None else str(answer)
    if "####" in answer:
        answer = answer.split("####")[-1].strip()
    return messages, answer, columns


def _render(messages: list[dict], tokenizer, config: DataConfig, source: str) -> str:
    """The text of a conversation up to where the response begins."""
    if config.system_prompt:
        messages = [
            {"role": "system", "content": config.system_prompt},
            *(m for m in messages if m["role"] != "system"),
        ]
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            raise ValueError(
                f"{source}: chat messages or a --data.system-prompt need a chat template, and the "
                "model's tokenizer has none; give prompts as text"
            )
        return messages[0]["content"]
    from jinja2 import TemplateError

    options = {"add_generation_prompt": True} | json.loads(config.template_options)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError as error:
        raise ValueError(
            f"{source}: the model's chat template refuses a prompt ({error})"
        ) from error


def sampling_seed(*place: object) -> int:
    """A seed that follows from `place` (the run's seed, the step, ...) alone: a resumed run does
    not repeat samples.
    """
    return random.Random(repr(place)).getrandbits(31)


class PromptStream:
    """An endless stream of prompts, the same on every rank, with a state of one integer per data
    set.
    """

    def __init__(
        self,
        datasets: Sequence[Sequence[Prompt]],
        *,
        weights: Sequence[float] = (),
        seed: int = 0,
    ):
        if weights and len(weights) != len(datasets):
            raise ValueError(
                f"--data.weights {tuple(weights)}: must be {len(datasets)} numbers, "
                "one for each data set"
            )
        self.datasets = datasets
        self.weights = list(weights) or [len(d) for d in datasets]
        self.seed = seed
        self.num_taken = [0] * len(datasets)
        self._orders: dict[int, tuple[int, list[int]]] = {}  # data set -> its epoch and permutation

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next num_prompts prompts; a data set that ends begins its next epoch."""
        return [self._next_prompt() for _ in range(num_prompts)]

    def _next_prompt(self) -> Prompt:
        total = sum(self.num_taken) + 1
        shares = [weight / sum(self.weights) for weight in self.weights]
        d = max(range(len(shares)), key=lambda i: (shares[i] * total - self.num_taken[i], -i))
        epoch, offset = divmod(self.num_taken[d], len(self.datasets[d]))
        if self._orders.get(d, (-1, []))[0] != epoch:
            self._orders[d] = (epoch, self._permutation(d, epoch))
        self.num_taken[d] += 1
        return self.datasets[d][self._orders[d][1][offset]]

    def _permutation(self, d: int, epoch: int) -> list[int]:
        size = len(self.datasets[d])
        return random.Random(repr((self.seed, d, epoch))).sample(range(size), size)

    def state_dict(self) -> dict:
        """How many prompts were taken from each data set, and what the order of prompts follows
        from.
        """
        origin = {
            "sizes": [len(d) for d in self.datasets],
            "weights": self.weights,
            "seed": self.seed,
        }
        return {"num_taken": list(self.num_taken), "origin": origin}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state` was saved. Raises ValueError if the order of prompts would be
        another one now.
        """
        origin = self.state_dict()["origin"]
        if state["origin"] != origin:
            raise ValueError(
                f"the checkpoint's order of prompts follows from {state['origin']}, this one from "
                f"{origin}: resume with the same --data, --data.weights and --seed"
            )
        self.num_taken = list(state["num_taken"])
