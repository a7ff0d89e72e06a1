"""Wrong command lines and settings files, drawn over the flags of both scripts; see
test_wrong_commands.py.
"""

import dataclasses
import json
import random
import typing

from run import FLAGS


def settings_of(args, group=(), prefix="--"):
    """(names, flag, type) of every setting."""
    kinds = typing.get_type_hints(type(args))
    for setting in dataclasses.fields(args):
        value = getattr(args, setting.name)
        path = (*group, setting.name)
        flag = prefix + FLAGS.get(setting.name, setting.name.replace("_", "-"))
        if dataclasses.is_dataclass(value):
            is_plain = setting.name in ("run", "batch")
            yield from settings_of(value, path, "--" if is_plain else f"{flag}.")
        else:
            yield path, flag, kinds[setting.name]


# Settings that take any text.
ANY_TEXT = ("--output-dir", "--data.system-prompt", "--log.wandb-project", "--data.split")


def wrong_words(flag, kind):
    """What may not follow the flag, or None where anything may."""
    if typing.get_origin(kind) is typing.Literal:
        return ["nonsense"]
    if kind is bool:
        return ["true"]
    if kind in (int, float):
        return ["many", "-3", "nan"] if kind is float else ["many", "1.5", "-3"]
    if typing.get_origin(kind) is tuple and float in typing.get_args(kind):
        return ["x", "nan", "-1 -1"]
    if flag in ANY_TEXT:
        return None
    if flag == "--name":
        return ["../a", "''"]
    return ["/nowhere/x.jsonl"]


# Where a negative number has a meaning.
SIGNED = ("--reward.error-reward", "--reward.weights", "--loss.entropy-coef")


def wrong_commands(args, seed):
    """[(words of a command line, flag that its refusal must name)], one for each flag."""
    draw = random.Random(seed)
    known = [
        (flag, kind) for _, flag, kind in settings_of(args) if wrong_words(flag, kind) is not None
    ]
    draw.shuffle(known)
    found = []
    for flag, kind in known:
        words = wrong_words(flag, kind)
        if flag in SIGNED:
            words = [word for word in words if not word.startswith("-")]
        found.append(([flag, *draw.choice(words).replace("''", "").split(" ")], flag))
    return found


def wrong_files(args, num, seed, directory):
    """[(settings file, flag or file that its refusal must name)]."""
    draw = random.Random(seed)
    known = list(settings_of(args))
    found = []
    for i in range(num):
        path, flag, _ = draw.choice(known)
        nested = draw.choice([None, {"a": 1}])
        for name in reversed(path):
            nested = {name: nested}
        file = directory / f"{i}.json"
        file.write_text(json.dumps(nested))
        found.append((file, flag))
    for i, text in enumerate(["", "[1]", '{"seed": ', "\udcff", "[" * 100_000]):
        file = directory / f"torn{i}.json"
        file.write_text(text, errors="surrogateescape")
        found.append((file, str(file)))
    return found
