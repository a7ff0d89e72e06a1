# SPDX-FileCopyrightText: 2026 handful contributors (answers.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
r"""Answers: is this answer the same as that one?

The problem. A policy is to be paid for a right answer in any spelling: 1/2, \frac{1}{2}, 0.5 and
50\% are one number; (1,2) and (2,1) are two points. Compared as text, every second right answer
earns nothing. Searched in the text, "maybe 41, 42 or 43" earns the reward.

How it works.
1. Extract. The answer of a response is its last \boxed or \fbox; else what follows the last ####;
   else the end of a last line "answer is X" or "answer: X"; else the whole response if it is one
   line. What stands before </think>, or in a <think> that is still open, is no answer. The whole
   extracted answer is compared: a number mentioned in passing earns nothing.
2. Spell. Unicode, thin spaces, \left, \dfrac, \text and the like come to one spelling.
3. Take apart. Lists, unions and sets are compared in any order; tuples, intervals and matrices in
   theirs, bracket by bracket; times and dates as such. A name (x = 5) or a unit (5 cm) that one
   side lacks contradicts nothing; another name or another unit does.
4. Compare the leaves: words regardless of case, numbers and formulas by value (expressions.py,
   which must lie beside this file).
What we give up. Units are not converted. An answer far longer than the gold one is wrong at once,
and so is one with more than MAX_PAIRS pairs to compare: any text is judged in less than 0.2 s.
Sources: GSM8K (Cobbe et al. 2021), MATH (Hendrycks et al. 2021).

Copied, with expressions.py:
    from answers import math_reward
    print(math_reward(r"so it is \boxed{\frac{1}{2}}", "0.5"))  # 1.0
    print(math_reward("41 or 42", "42"))  # 0.0
"""

import functools
import importlib.util
import itertools
import os
import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

MAX_CHARS = 500  # longer answers are compared as text
MAX_PAIRS = 400
MAX_DEPTH = 20  # of brackets around parts


class _TooLongError(Exception):
    """A comparison takes too many pairs, or brackets are too deep."""


def exact_rewards(responses: list[str], answers: list[str]) -> list[float]:
    """1.0 where a response is its answer, but for white space around them, else 0.0.

    It takes a whole batch: a call for each sample would cost more than the comparison.
    """
    pairs = zip(responses, answers, strict=True)
    return [1.0 if str(mine).strip() == str(gold).strip() else 0.0 for mine, gold in pairs]


def math_reward(response: str, answer: str) -> float:
    """1.0 if the response's answer is `answer`, else 0.0.

    `answer` may be a whole solution, with #### or a box, or a list of answers of which any will do.
    """
    if answer is None or not isinstance(response, str):
        rule = "needs an answer, and the response as text; of chat messages give the last content"
        raise ValueError(f"response {response!r:.80}, answer {answer!r:.80}: math {rule}")
    if isinstance(answer, (list, tuple, set)):
        return max((math_reward(response, each) for each in answer), default=0.0)
    gold = str(answer)
    if re.search(r"####|\\boxed|\\fbox", gold):
        gold = extract_answer(gold)
    given = extract_answer(response)
    if given.split() == gold.split():
        return 1.0 if given.strip() else 0.0
    if len(given) > 4 * len(gold) + 100 or max(len(given), len(gold)) > MAX_CHARS:
        return 0.0
    steps = iter(range(MAX_PAIRS))
    try:
        return 1.0 if _same(_take_apart(_spell(given)), _take_apart(_spell(gold)), steps) else 0.0
    except _TooLongError:
        return 0.0


def extract_answer(response: str) -> str:
    """What the response gives as its answer, by the rule above; "" if it gives none."""
    text = response.rsplit("</think>", 1)[-1].strip()
    if "<think>" in text:
        return ""
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if box >= 0:
        return _boxed(text[box:])
    if "####" in text:
        lines = text.rsplit("####", 1)[1].strip().splitlines()
        return lines[0] if lines else ""
    last_line = text.rsplit("\n", 1)[-1].replace("**", "")
    stated = re.match(r".*\banswer\b[^.:=]{0,80}?(?:\bis\b|:|=)[\s:]*(.+)", last_line, re.I)
    if stated:
        return stated[1]
    return "" if "\n" in text else text


def _boxed(text: str) -> str:
    """The box's content: 2 of "\\boxed{2} ...", and of "\\boxed 2", where TeX takes one token."""
    opening = re.match(r"\\f?box(?:ed)?\s*", text).end()
    if text[opening : opening + 1] != "{":
        token = re.match(r"\\[a-zA-Z]+|\w(?!\w)", text[opening:])
        return token[0] if token else ""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[opening:]):  # \{, of a set, opens no group
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0 and brace[0] == "}":
            return text[opening + 1 : opening + brace.start()]
    return ""


# 2. Spell

SYMBOLS = {"\u2212": "-", "\u2013": "-", "\u2044": "/", "\u00d7": "\\times ", "\u00b7": "\\cdot "}
SYMBOLS |= {"\u03c0": "\\pi ", "\u221e": "\\infty ", "\u222a": "\\cup "}
SYMBOLS |= {"\u2248": "\\approx ", "\u2264": "\\leq ", "\u2265": "\\geq ", "\u2260": "\\neq "}
SYMBOLS |= {"\u2208": "\\in ", "\u00b1": "\\pm ", "\u00f7": "/", "\u200b": "", "\u2032": "'"}
SYMBOLS |= {"\u20ac": " euro ", "\u00a3": " gbp ", "\u00a5": " yen ", "\u00a2": " cent "}
TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf|mathit|operatorname|emph) ?"
FUNCTIONS = "sin|cos|tan|cot|csc|arcsin|arccos|arctan|ln|log|exp|sqrt|pi"
SPELLINGS = (  # applied in this order
    (r"\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
    (r"\\!|\{,\}", lambda found: found[0].strip("\\!{}")),
    (r"\\(?:q?quad\b|[,;: ()\[\]])(?<!\\\\.)|~", " "),
    (r"\\\$", " dollar "),
    (r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree\b|\u00b0", " degree "),
    (r"\\%|\bper ?cent\b", "%"),
    (TEXT + r"\{([^{}]*)\}", r" \1 "),
    (r"\\[dtc](frac|binom)", r"\\\1"),
    (r"\\([lg](eqslant|[et])|ne|mid|[lr]brace|cr)(?![a-zA-Z])|[<>!]=", lambda f: SIGNS[f[0]]),
    (r"\\varnothing\b|\u2205|\\\{ ?\\\}", r"\\emptyset"),
    (r"\\[lc]?dots\b|\.{3}", r" \\ldots "),
    (rf"(?<![a-zA-Z\\])({FUNCTIONS})(?![a-zA-Z])", r"\\\1"),
    (r"(?<![a-zA-Z\\])(?:inf|infinity)(?![a-zA-Z])", r"\\infty"),
    (r"\s+", " "),
    (r"(?<=[a-z]) (squared|cubed)(?=\W*$)", lambda f: f"^{POWERS[f[1]]}"),
    (r"(?<=[\d)}i] )(?:square|sq\.?) ([a-zA-Z]+)", r"\1^2"),
    (r"(?<=[\d)}i] )cubic ([a-zA-Z]+)", r"\1^3"),
    (r"(?<=[a-z]) ?/ ?(?=[a-z])", "/"),
    (r"(?<=\d) ?x ?(?=10\^)", r"\\times "),
    (r"(?<=\d) (?=\d{3}\b)", ""),  # 1 234 -> 1234
    (r"(\d) (\d+) ?/ ?(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d) (thousand|[mb]illion|trillion)\b", lambda f: rf"\times 10^{{{POWERS[f[1]]}}}"),
    (r"(\d)[eE]([+-]?\d{1,3})$", r"\1\\times 10^{\2}"),
    (r" (?:mph|MPH)\b", " miles per hour"),
    (r"\bdegrees\b", "degree"),
    (r",? (?:and|or) |,? and$", " , "),
)
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
POWERS = {"squared": 2, "cubed": 3, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SIGNS = {"\\lt": "<", "\\gt": ">", "<=": "\\leq ", ">=": "\\geq ", "!=": "\\neq ", "\\ne": "\\neq "}
SIGNS |= {"\\le": "\\leq ", "\\leqslant": "\\leq ", "\\ge": "\\geq ", "\\geqslant": "\\geq "}
SIGNS |= {"\\mid": ":", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\cr": "\\\\"}


def _spell(text: str) -> str:
    """ "5 m^2" of "$5 \\text{ m}^2$.": the answer in one spelling."""
    text = re.sub("([\u00bc-\u00be\u2150-\u215e])", r" \1", text)  # one and a half, not 11/2
    text = re.sub(r"\u221a ?(\d+|)", r"\\sqrt{\1}", text).replace("\\sqrt{}", "\\sqrt ")
    text = re.sub("([\u00b2\u00b3\u00b9\u2070-\u2079]+)", r"^{\1}", text)  # 5 squared, not 52
    text = unicodedata.normalize("NFKC", text).translate(str.maketrans(SYMBOLS))
    text = re.sub(r"(?<!\\)\$([^$]*[^$\\])\$", r" \1 ", text)  # math mode
    text = re.sub(r"(?<!\\)\$", r"\\$", text)
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    if not re.search(r"[(\[]|\\\{", text):  # there a comma separates
        text = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    return text


# 3. Take apart

RELATIONS = {"=", "<", ">", "\\leq", "\\geq", "\\neq", "\\approx", "\\sim", "\\in", "\\equiv"}
FLIPPED = {">": "<", "\\geq": "\\leq"}
MATRIX = r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}"
NO_LABEL = FUNCTIONS + "|sec|frac|infty|binom|times|cdot|sum|int|lim|prod|ldots|begin|pm"
LABEL = rf"(?:\\(?!(?:{NO_LABEL})(?![a-zA-Z]))[a-zA-Z]++|[a-zA-Z' ]"  # x, f(2), \lambda, S_{n}
LABEL += r"|_(?>\{\w+\}|\w)|\^\{-1\}|\([^()=]*\)|\{[a-zA-Z]+\})++"


class _Part(NamedTuple):
    """A node: what kind it is, its parts, its text, and the x of x = 5."""

    kind: str
    parts: list
    text: str
    label: str = ""


def _take_apart(text: str, depth: int = 0) -> _Part:
    """The tree of an answer; its leaves are numbers, formulas, words, times, dates."""
    if depth > MAX_DEPTH or len(text) > 2 * MAX_CHARS:
        raise _TooLongError
    text = text.lstrip(" *`'\"").rstrip(" *`'\".,;:")
    split = _expressions().split
    opening, inner, closing = _expressions().bracketed(text)
    if opening == "{":
        return _take_apart(inner, depth + 1)
    moment = _moment(text)
    if moment:
        return _Part("moment", list(moment), text)
    kind = "list"
    items = _signed(split(text, {",", ";"})[0])
    if len(items) == 1:
        kind = "union"
        items = split(text, {"\\cup"})[0]
    if len(items) == 1 and opening:
        items = split(inner, {",", ";"})[0]
        kind = opening + closing
        if kind == "\\{\\}" and len(items) > 1:
            kind = "list"
    if len(items) > 1 or kind == "\\{\\}":
        return _Part(kind, [_take_apart(item, depth + 1) for item in items], text)
    matrix = re.fullmatch(rf"[(\[]?\s*{MATRIX}\s*[)\]]?", text, re.S)
    if matrix:
        rows = re.split(r"\\\\(?:\[\w+\])?", matrix[2].strip().removesuffix("\\\\"))
        cells = [[_take_apart(cell, depth + 1) for cell in row.split("&")] for row in rows]
        return _Part("matrix", [_Part("row", row, "row") for row in cells], text)
    return _relation(text, depth)


def _signed(items: list[str]) -> list[str]:
    """3 and -3 for \\pm 3."""
    return [x.replace("\\pm", sign) for x in items for sign in ("+-" if "\\pm" in x else "+")]


def _relation(text: str, depth: int) -> _Part:
    """5 with the label x of x = 5; else the sides of an equation or inequality, > turned to <."""
    operands, signs = _expressions().split(text, RELATIONS)
    if not signs:
        return _Part("value", [], text)
    if signs == ["="] and not _is_label(operands[0]):
        operands.reverse()  # 5 = x
    if len(signs) == 1 and signs[0] in ("=", "\\approx", "\\in") and _is_label(operands[0]):
        labelled = _take_apart(operands[1], depth + 1)
        return labelled._replace(label=_squeeze(operands[0]).casefold())
    sides = []
    for index, sign in enumerate(signs):
        pair = [operand.strip() for operand in operands[index : index + 2]]
        if sign in FLIPPED:
            pair.reverse()
        sides.append(_Part(FLIPPED.get(sign, sign), pair, sign))
    return _Part("relation", sides, text)


def _is_label(text: str) -> bool:
    return re.fullmatch(LABEL, text.strip()) is not None and text.strip() not in ("e", "i")


MONTHS = "january february march april may june july august september october november december"
MONTHS = {month: number for number, month in enumerate(MONTHS.split(), 1)}
MONTHS |= {month[:3]: number for month, number in MONTHS.items()}


def _moment(text: str) -> tuple:
    """(13, 30) of 1:30 PM, (3, 5, 2021) of March 5, 2021; () of what is neither."""
    text = {"noon": "12 pm", "midnight": "12 am"}.get(text.lower(), text)
    text = re.sub(r"^(\d\d?)/(\d\d?)/(\d{4})$", r"\3-\1-\2", text)
    clock = re.fullmatch(r"(\d{1,2})(?::(\d\d))? ?(?:([ap])\.? ?m)?", text, re.I)
    if clock and (clock[2] or clock[3]):
        hours = int(clock[1]) % 12 if clock[3] else int(clock[1])
        return hours + (12 if clock[3] in ("p", "P") else 0), int(clock[2] or 0)
    date = re.fullmatch(r"(\d{4})-(\d\d?)-(\d\d?)", text)
    if date:
        return int(date[2]), int(date[3]), int(date[1])
    words = re.findall(r"\b(?!of\b)[a-z]+|\d+", re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text.lower()))
    months = [MONTHS[word] for word in words if word in MONTHS]
    numbers = [int(word) for word in words if word.isdigit() and len(word) <= 4]
    if len(months) == 1 and len(numbers) in (1, 2) and len(words) == 1 + len(numbers):
        return months[0], *numbers
    return ()


def _same(given: _Part, gold: _Part, steps: Iterator[int]) -> bool:
    """Whether two trees are the same; a label that one side lacks contradicts nothing."""
    if next(steps, None) is None:
        raise _TooLongError
    if given == gold:
        return gold.text != ""
    if given.label and gold.label and given.label != gold.label:
        return False
    if given.kind == gold.kind == "value":
        return _same_quantity(given.text, gold.text)
    if given.kind != gold.kind or len(given.parts) != len(gold.parts):
        return False
    if given.kind == "moment":
        return given.parts == gold.parts
    if given.kind in RELATIONS:
        return _same_side(given, gold)
    if given.kind in ("list", "union", "relation"):
        return _same_in_any_order(given.parts, gold.parts, steps)
    return all(map(_same, given.parts, gold.parts, itertools.repeat(steps)))


def _same_in_any_order(given: list[_Part], gold: list[_Part], steps: Iterator[int]) -> bool:
    mine = {part.label for part in given}
    theirs = {part.label for part in gold}
    if {""} in (mine, theirs) and len(mine | theirs) > 2:
        return False  # 3, 2 is not x=2, y=3
    left = list(gold)
    for part in given:
        index = next((i for i, each in enumerate(left) if _same(part, each, steps)), None)
        if index is None:
            return False
        del left[index]
    return True


def _same_side(given: _Part, gold: _Part) -> bool:
    """left - right is the same in both, but for a factor: positive in an inequality."""
    if given.kind != gold.kind or given.kind not in ("=", "<", "\\leq", "\\neq"):
        return given == gold
    if any(map(_is_label, gold.parts)):  # x > 3 is not earned by 2x > 6
        orders = [given.parts, given.parts[::-1]] if given.kind == "\\neq" else [given.parts]
        return any(all(map(_same_value, parts, gold.parts)) for parts in orders)
    differences = ["({})-({})".format(*side.parts) for side in (given, gold)]
    factor = _expressions().proportion(*differences)
    return factor is not None and (factor > 0 or given.kind in ("=", "\\neq"))


# 4. Compare the leaves

NO_UNIT = "or|and|not|hundred|thousand|[mb]illion|trillion|dozen|plus|minus|divided|factorial"
ORDINAL = "third|half|halve|(?:four|fif|six|seven|eigh|nin|ten|twelf|hundred|thousand|million)th"
NO_UNIT += rf"|squared|cubed|(?:{ORDINAL})(?!s? [a-zA-Z])"  # but in 12 third graders
SHORT = "(?:cm|mm|km|kg|mg|m[lL]|ft|in|lb|oz|hr|mi|yd)"  # other short words may be products: 2 ab
UNIT = rf"(?!(?:{NO_UNIT})s?\b)(?:[a-zA-Z]{{3,}}|{SHORT}|[mgslhL]|(?<=degree )[CF])\b"
MEASURED = rf"(?:(?<=[\d)}}])|(?<=\\pi))(?: | ?(?={SHORT}\b))({UNIT}(?:[ /]{UNIT})*)"
MEASURED += r" ?(?:\^\{?(\d)\}?)?$"
SAME = "feet ft foot ft inch in meter m centimeter cm millimeter mm kilometer km gram g hour h"
SAME += " kilogram kg liter l second s sec s minut min hr h pound lb ounc oz mil mi yard yd"
SAME = f"{SAME} celsiu C fahrenheit F mL ml milliliter ml L l".split()
SAME_UNIT = dict(zip(SAME[::2], SAME[1::2], strict=True))  # names without their last e and s
PREFIXED = re.compile(r"^(-?) ?(dollar|euro|gbp|yen) (.*?)( per .*)?$")


def _quantity(text: str) -> tuple[str, list[str], bool]:
    """("5", ["m2"], False) of 5 meters^2."""
    text = PREFIXED.sub(r"\1\3 \2\4", text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = text.replace(" degree", "\\degree ")
    found = re.search(MEASURED, text)
    units = []
    if found:
        text = text[: found.start()]
        for word in re.split("[ /]", found[1].replace(" per ", "/")):
            word = word if word.isupper() or word[1:] != word[1:].lower() else word.lower()
            word = re.sub(r"(?<=..)[es]*$", "", word.replace("tre", "ter"))  # inches -> inch
            units.append(SAME_UNIT.get(word, word))
        units[-1] += found[2] or ""
    text = re.sub(r" degrees?\b", "", text).strip()
    value = text.removesuffix("%").strip()
    return value, units, value != text


def _same_quantity(given: str, gold: str) -> bool:
    mine, units, is_percent = _quantity(given)
    theirs, gold_units, gold_is_percent = _quantity(gold)
    if units and gold_units:
        shortest = min(units, gold_units, key=len)  # in part: $15 per hour, 25 degrees C
        num = 1 if shortest in (["degr"], ["dollar"], ["euro"]) else None
        if units[:num] != gold_units[:num]:
            return False
    if is_percent and not gold_is_percent and _same_value(f"({mine})/100", theirs):
        return True
    if gold_is_percent and not is_percent and _same_value(mine, f"({theirs})/100"):
        return True
    return _same_value(mine, theirs)


def _same_value(given: str, gold: str) -> bool:
    if _squeeze(given) == _squeeze(gold):
        return gold != ""
    if _expressions().has_words(given + " " + gold):
        return _squeeze(given).strip("()").casefold() == _squeeze(gold).strip("()").casefold()
    return _expressions().equal(given, gold)


@functools.cache
def _expressions():
    """The file beside this one; it is not imported, so that each root file can be copied alone."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "expressions.py")
    found = importlib.util.spec_from_file_location("expressions", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _squeeze(text: str) -> str:
    """Without white space, but for that of 4 2, which is not 42."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))
