"""Two-operand arithmetic in words, as a .jsonl file of question and answer.

    python examples/arithmetic.py arith.jsonl

Small enough for SmolLM2-135M to be right now and then, and for RL to make it right nearly always.
"""

from __future__ import annotations

import argparse
import json
import random
import re

FORMS = {
    "plus": (
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "{a} apples and {b} more apples: how many apples?",
    ),
    "minus": (
        "What is {a} minus {b}?",
        "Take {b} away from {a}.",
        "Of {a} birds, {b} fly away: how many are left?",
    ),
}


def problems(num_rows: int, seed: int) -> list[dict]:
    """Rows {"question", "answer"}; operands up to 20, answers never negative."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        kind = rng.choice(list(FORMS))
        a, b = (max(a, b), min(a, b)) if kind == "minus" else (a, b)
        answer = a + b if kind == "plus" else a - b
        rows.append({"question": rng.choice(FORMS[kind]).format(a=a, b=b), "answer": str(answer)})
    return rows


def last_number(response: str, answer: str) -> float:
    """1 if the last number in the response is the answer: a reward function for --reward.functions
    PATH:last_number.
    """
    numbers = re.findall(r"-?\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("num_rows", nargs="?", type=int, default=4000)
    arguments = parser.parse_args()
    with open(arguments.file, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in problems(arguments.num_rows, seed=0))
