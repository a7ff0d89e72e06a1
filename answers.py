r"""Answers: is this answer the same as that one?

The answer of a response: its last \boxed or \fbox, else what follows the last ####, else the end of a last line
"answer is X" or "answer: X", else the whole response if it is one line; behind </think>, where there is one.
The whole extracted answer is compared: a number mentioned in passing earns nothing.

Sources: GSM8K (Cobbe et al. 2021), MATH (Hendrycks et al. 2021), math-verify.
"""

import re
import unicodedata
from dataclasses import replace


def exact_reward(response: str, answer: str) -> float:
    """1.0 if the response is the answer, but for white space around them, else 0.0."""
    return float(str(response).strip() == str(answer).strip())


def gym_reward(response: str, entry: dict) -> float:
    """The reward by the verifier of the reasoning_gym data set that made the sample's entry."""
    import reasoning_gym

    verifier = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    text = response.rsplit("<answer>", 1)[-1].split("</answer>")[0].strip()
    return verifier(text, entry)


gym_reward.packages = ("reasoning_gym",)


def math_reward(response: str, answer: str) -> float:
    """1.0 if the response's answer equals `answer`, or the answer of a whole solution (with #### or a box), else 0.0.
    SymPy may take for ever on hostile text: score a policy's text by Scorer or score(), which limit the time."""
    given, unit, name = _spell(extract_answer(response))
    gold, *others = _spell(
        extract_answer(answer) if re.search(r"####|\\f?box", str(answer)) else str(answer)
    )
    if (
        not given
        or not gold
        or any(a != b for mine, theirs in zip((unit, name), others) for a, b in zip(mine, theirs))
    ):
        return 0.0
    if given == gold or (given.isalpha() and given.casefold() == gold.casefold()):
        return 1.0
    # Words are no expressions (math-verify reads Paris as P*a*r*i*s); 41 = 42, 42 \approx 43 and 42_5 are not 42.
    signs = [set(re.findall(r"=|\\approx|\\sim\b|\d_", x)) for x in (given, gold)]
    if signs[0] - signs[1] or re.search(r"[a-zA-Z]{3,}", re.sub(r"\\[a-zA-Z]+", "", given + gold)):
        return 0.0
    from math_verify import LatexExtractionConfig, parse, verify

    normalization = replace(
        LatexExtractionConfig().normalization_config, units=False
    )  # with its units 2t is 2
    config = [
        LatexExtractionConfig(normalization_config=normalization)
    ]  # its other extractors search in the text
    parsed = [
        parse(f"${x}$", config, "no_fallback", parsing_timeout=None, raise_on_error=True)
        for x in (gold, given)
    ]
    return float(
        verify(*parsed, timeout_seconds=None, raise_on_error=True)
    )  # its own time limit scores 0 in silence


math_reward.packages = ("math_verify",)


def extract_answer(response: str) -> str:
    """What the response gives as its answer, by the rule in the module docstring; "" if it gives none."""
    text = response.rsplit("</think>", 1)[-1].strip()
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if box >= 0:
        opening, depth = re.compile(r"\\[a-z]+\s*\{").match(text, box), 1
        for brace in re.compile(r"\\.|[{}]").finditer(text, opening.end()) if opening else ():
            depth += {"{": 1, "}": -1}.get(brace[0], 0)  # the brace of a set, "\{", opens no group
            if depth == 0:
                return text[opening.end() : brace.start()]
        return ""
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0]
    last_line = text.rsplit("\n", 1)[-1].replace("**", "")
    statement = re.match(
        r".*\banswer\b[^.:=]{0,80}?(?:\bis\b|:|=)[\s:]*(.+)", last_line, re.IGNORECASE
    )
    return statement[1] if statement else "" if "\n" in text else text


SYMBOLS = {
    "\u2212": "-",
    "\u2013": "-",
    "\u2044": "/",
    "\u00d7": "\\times ",
    "\u00b7": "\\cdot ",
    "\u03c0": "\\pi ",
}
SYMBOLS |= {
    "\u221e": "\\infty ",
    "\u221a": "\\sqrt ",
    "\u222a": "\\cup ",
    "\u2248": "\\approx ",
    "\u200b": "",
}
SPELLINGS = (  # applied in this order
    (r"(?<!\\)(?:\\[!,;: ()\[\]]|~)", " "),
    (r"\\?[$\u20ac\u00a3\u00a5]", " "),  # math mode and currencies
    (r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree\b|\u00b0", " degree "),
    (r"\s+", " "),
    (r"^\\(?:text|mbox|textbf|mathrm) ?\{([^{}]*)\}$", r"\1"),
    (
        r"(?<=[a-z]) (?:squar|(cub))ed(?=\W*$)",
        lambda found: "^3" if found[1] else "^2",
    ),  # 25 feet squared
    (r"(?<=\d) (?=\d{3}\b)", ""),  # 1 234 -> 1234
    (r"(\d) (\d+) ?/ ?(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(\d)[eE]([+-]?\d{1,3})$", r"\1\\times 10^{\2}"),
)
NO_UNIT = "or|and|not|hundred|thousand|[mb]illion|trillion|dozen|infinity|alpha|beta|gamma|delta|theta|lambda|omega"
NO_UNIT += "|plus|minus|divided|squared|cubed|factorial"  # nor a fraction, but in 12 third graders
NO_UNIT += "|(?:third|half|halve|(?:four|fif|six|seven|eigh|nin|ten|twelf|hundred|thousand|million)th)(?!s? [a-zA-Z])"
SAME_UNIT = "feet ft foot ft inch in meter m centimeter cm millimeter mm kilometer km gram g kilogram kg liter l"
SAME_UNIT += (
    " second s sec s minut min hour h hr h pound lb ounc oz"  # words without their last s and es
)
SAME_UNIT = dict(zip(SAME_UNIT.split()[::2], SAME_UNIT.split()[1::2]))
SHORT_UNIT = "(?:cm|mm|km|kg|mg|ml|ft|in|lb|oz|hr)"  # other short words may be products: 2 ab
UNIT = rf"(?!(?:{NO_UNIT})s?\b)(?:[a-zA-Z]{{3,}}|{SHORT_UNIT}|[mgslh])\b"
BEFORE_UNIT = rf"(?<=[\d)}}])(?: ?\\(?:text|mbox|mathrm) ?\{{ ?| |(?={SHORT_UNIT}\b))"


def _spell(text: str) -> tuple[str, list[str], list[str]]:
    """("5", ["m2"], ["x"]) of "$x = 5 \\text{ meters}^2$.": answer in one spelling, words of its unit, its name."""
    text = re.sub(
        "([\u00bc-\u00be\u2150-\u215e])", r" \1", text
    )  # one and a half; NFKC alone makes 11/2 of it
    text = re.sub(
        "([\u00b2\u00b3\u00b9\u2070-\u2079]+)", r"^{\1}", text
    )  # 5 squared; NFKC alone makes 52 of it
    text = unicodedata.normalize("NFKC", text).translate(str.maketrans(SYMBOLS))
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text).lstrip(" *`'\"").rstrip(" *`'\".,;:")
    found = re.search(rf"{BEFORE_UNIT}({UNIT}(?:[ /]{UNIT})*)[ .}}]*(?:\^\W*(\d)\W*)?$", text)
    text, power = (text[: found.start()], found[2] or "") if found else (text, "")
    words = (
        re.sub(r"(?<=..)[es]*\b", "", found[1].lower()).split(" ") if found else []
    )  # inches -> inch
    named = re.match(
        r"([a-zA-Z](?:\([a-zA-Z]\))?) ?(?:=|\\approx\b|\\in\b)[ *`]*", text
    )  # x = 5 -> 5, f(x) = 2x -> 2x
    text = re.sub(r" degrees?\b", "", text[named.end() :] if named else text)
    units = (" ".join(SAME_UNIT.get(word, word) for word in words) + power).split()
    return text, units, [named[1].casefold()] if named else []
