# SPDX-FileCopyrightText: 2026 handful contributors (expressions.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
r"""Expressions: whether two that are written in LaTeX have the same value.

The problem. 2\sqrt{2} and \sqrt{8} are one number, 2ab and ab + ab one product. A computer algebra
system can tell, but it may take for ever on hostile text, and one that rounds to six decimals takes
1.6 \times 10^{-19} for 9.1 \times 10^{-31}.

How it works. A text falls into tokens (\frac, 12, x, a bracket). They become Python, Python's own
parser makes a tree of it, and the tree is computed at three points. Two expressions that agree at
all three are the same.
    2ab -> "((2)*a*b)" -> at a = 28/11, b = 5/11: 280/121
Integers, fractions and decimals are computed exactly, as fractions. What is irrational is a complex
float, and two floats are the same if they differ by less than 1e-10 of the larger. Only a decimal
may round an irrational number: to 1e-6 of it.

If the gold answer is a number, a response must write the number down: 17 \times 23, 10! and 40 + 2
are refused. It may have a sign, a fraction, roots, powers and pi, and any sort of operation that
the gold answer has.

What we give up. Sums, integrals and limits are no expressions here. Nor is a text of more than
MAX_TOKENS tokens or a number of more than MAX_BITS bits: so every text is read within milliseconds.

Source. Polynomials that agree at random points are equal: Schwartz 1980.

Copied:
    from expressions import equal
    print(equal(r"2\sqrt{2}", r"\sqrt{8}"))  # True
    print(equal("17 + 25", "42"))  # False
"""

import ast
import cmath
import functools
import math
import operator
import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

MAX_TOKENS = 200
MAX_BITS = 2048
TOLERANCE = 1e-10
DECIMAL_TOLERANCE = 1e-6
NUM_POINTS = 3
LITERAL = {"fraction", "root", "power"}

TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\.\d+|.", re.S)
BRACKETS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\langle": "\\rangle", "\\begin": "\\end"}
GREEK = "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu"
GREEK += " xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma"
GREEK = {f"\\{name}" for name in f"{GREEK} Upsilon Phi Psi Omega infty ell pi".split()}
CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}
SIGNS = {"+": "+", "-": "-", "*": "*", "\\times": "*", "\\cdot": "*", "/": "/", "\\div": "/"}
KINDS = {"+": "sum", "-": "sum", "*": "product", "/": "fraction"}
CALLS = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "exp": cmath.exp,
    "ln": cmath.log,
    "log": lambda x, base=10: cmath.log(x) / cmath.log(base),
}
STOPS = {*SIGNS, *BRACKETS.values(), "|", ",", *(f"\\{name}" for name in CALLS)}


def bracketed(text: str) -> tuple[str, str, str]:
    """("(", "1,2", "]") of (1,2]: of a text whose first bracket closes at its end."""
    depths = list(_depths(text))
    first_closed = next((i for i, (_, depth) in enumerate(depths) if depth <= 0), 0)
    if not 0 < first_closed == len(depths) - 1:
        return "", "", ""
    tokens = [token for token, _ in depths]
    return tokens[0], "".join(tokens[1:-1]), tokens[-1]


def split(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """(parts, what separates them), outside of all brackets."""
    parts = [""]
    found = []
    for token, depth in _depths(text):
        if depth == 0 and token in separators:
            parts.append("")
            found.append(token)
        else:
            parts[-1] += token
    return parts, found


def _depths(text: str) -> Iterator[tuple[str, int]]:
    """Each token and how many brackets are open after it."""
    depth = 0
    for token in TOKEN.findall(text):
        if token in BRACKETS:
            depth += 1
        elif token in BRACKETS.values():
            depth -= 1
        yield token, depth


class Reading(NamedTuple):
    """What a text is read as at a point."""

    value: complex | Fraction | None  # None: it is no expression, or too large a one
    symbols: frozenset[str]
    kinds: Counter  # how many sums, products, fractions, roots, powers, calls


def has_words(text: str) -> bool:
    """Whether a run of letters is a word (Paris), not a product (xyz, 2abc)."""
    text = re.sub(r"\\[a-zA-Z]+", " ", text)
    for run in re.findall(r"[^\W\d_]{2,}", text):
        is_product = run.islower() and (set(run) <= set("abcxyz") or not set(run) & set("aeiouy"))
        is_alone = re.search(rf"(?<!\S){run}(?!\S)", text)
        if not is_product and (len(run) > 3 or is_alone):
            return True
    return False


def equal(given: str, gold: str) -> bool:
    """Whether two expressions have the same value, and a gold number is given as a number."""
    tolerance = DECIMAL_TOLERANCE if "." in given + gold else TOLERANCE
    for point in range(NUM_POINTS):
        mine = read(given, point)
        theirs = read(gold, point)
        if mine.value is None or theirs.value is None:
            return False
        if not theirs.symbols and (mine.symbols or not _is_literal(mine.kinds, theirs.kinds)):
            return False
        if not _near(mine.value, theirs.value, tolerance):
            return False
    return True


def proportion(given: str, gold: str) -> float | None:
    """given / gold, if it is the same real number, not 0, at all points; else None."""
    factors = []
    for point in range(NUM_POINTS):
        mine = read(given, point).value
        theirs = read(gold, point).value
        if not mine or not theirs:
            return None
        factors.append(mine / theirs)
    if all(_near(factor, factors[0], TOLERANCE) for factor in factors):
        return complex(factors[0]).real
    return None


def _is_literal(given: Counter, gold: Counter) -> bool:
    if not set(given) <= set(gold) | LITERAL:
        return False
    return not set(gold) <= LITERAL or given["fraction"] <= max(1, gold["fraction"])


def _near(a: complex | Fraction, b: complex | Fraction, tolerance: float) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    try:
        return abs(a - b) <= tolerance * max(abs(a), abs(b))
    except OverflowError:  # a fraction that no float holds
        return False


@functools.lru_cache(maxsize=1024)
def read(text: str, point: int = 0) -> Reading:
    """The value of an expression at a point, and what it is made of."""
    tokens = [token for token in TOKEN.findall(text) if not token.isspace()]
    symbols: dict[str, Fraction] = {}
    kinds: Counter = Counter()
    value = None
    if len(tokens) <= MAX_TOKENS:
        tokens.reverse()
        try:
            tree = ast.parse(_translate(tokens, kinds), mode="eval")
            value = _compute(tree.body, symbols, point)
        except (ArithmeticError, ValueError, SyntaxError, IndexError, RecursionError, MemoryError):
            value = None
    return Reading(value, frozenset(symbols), kinds)


def _translate(tokens: list[str], kinds: Counter, closing: str = "", *, stops=frozenset()) -> str:
    """Python for the tokens, the last of which is the next, up to the closing bracket or a stop."""
    python: list[str] = []
    while tokens and tokens[-1] != closing and tokens[-1] not in stops:
        token = tokens.pop()
        after_value = bool(python) and python[-1] not in ("+", "-", "*", "/")
        if token in SIGNS:
            sign = SIGNS[token]
            is_scientific = sign == "*" and tokens[-2:] == ["^", "10"]  # 1.5 \times 10^3
            if python and not is_scientific:  # --5, too, is left to be computed
                kinds[KINDS[sign]] += 1
            python.append(sign)
        elif token == "^":
            kinds["power"] += 1
            python[-1] = f"{python[-1]}**{_exponent(tokens, kinds)}"
        elif token == "!":
            kinds["factorial"] += 1
            python[-1] = f"factorial({python[-1]})"
        elif token == "\\degree":
            python[-1] = f"({python[-1]}*pi/180)"
        else:
            value = _atom(token, tokens, kinds)
            if after_value:
                _juxtapose(python, token, value, kinds)
            else:
                python.append(value)
    if closing and tokens.pop() != closing:
        raise ValueError("a bracket stays open")
    if not python:
        raise ValueError("nothing stands here")
    return f"({''.join(python)})"


def _juxtapose(python: list[str], token: str, value: str, kinds: Counter) -> None:
    """Two values side by side: a mixed number like 3\\frac{1}{2}, or a product."""
    is_number = re.fullmatch(r"\(\d+(/\d+)?\)", python[-1])
    if is_number and token == "\\frac" and re.fullmatch(r"\(\(+\d+\)+/\(+\d+\)+\)", value):
        python[-1] = f"({python[-1]}+{value})"
        return
    if token[0].isdigit():
        raise ValueError("3 4 and x2 are no products")
    if token in ("(", "\\frac"):
        kinds["product"] += 1
    python.append("*")
    python.append(value)


def _atom(token: str, tokens: list[str], kinds: Counter) -> str:
    name = token.removeprefix("\\")
    if token[-1].isdigit():
        return f"({Fraction(token)})"
    if token in ("(", "{", "|"):
        group = _translate(tokens, kinds, BRACKETS.get(token, "|"))
        if token != "|":
            return group
        kinds["modulus"] += 1
        return f"abs{group}"
    if token in ("\\frac", "\\binom"):
        kinds["fraction" if name == "frac" else name] += 1
        top = _argument(tokens, kinds)
        bottom = _argument(tokens, kinds)
        return f"({top}/{bottom})" if name == "frac" else f"binom({top},{bottom})"
    if token == "\\sqrt":
        kinds["root"] += 1
        degree = "(2)"
        if tokens[-1] == "[":
            tokens.pop()
            degree = _translate(tokens, kinds, "]")
        return f"root({_argument(tokens, kinds)},{degree})"
    if name in CALLS and token != name:
        return _call(name, tokens, kinds)
    if token in GREEK or re.fullmatch("[a-zA-Z]", token):
        return _symbol(name, tokens, kinds)
    raise ValueError(f"{token} is not known")


def _argument(tokens: list[str], kinds: Counter) -> str:
    """An argument, as in \\frac12 or \\frac{1}{2}: {...}, or one digit, letter or command."""
    token = tokens.pop()
    if token.isdigit() and len(token) > 1:
        tokens.append(token[1:])
        token = token[0]
    return _atom(token, tokens, kinds)


def _exponent(tokens: list[str], kinds: Counter) -> str:
    token = tokens.pop()
    if token == "-":
        return f"(-{_exponent(tokens, kinds)})"
    return _atom(token, tokens, kinds)


def _symbol(name: str, tokens: list[str], kinds: Counter) -> str:
    """A variable with its marks: x, x_1, f', f(2)."""
    if len(name) > 1 and name != "pi":
        name += "_"  # lambda is a word of Python
    while tokens and tokens[-1] in ("_", "'"):
        name += "_prime" if tokens.pop() == "'" else _word(_argument(tokens, kinds))
    if name[0] in "fgh" and tokens and tokens[-1] == "(":
        tokens.pop()
        name += "_of" + _word(_translate(tokens, kinds, ")"))
    return name


def _word(python: str) -> str:
    return "".join(c if c.isalnum() else f"_{ord(c)}_" for c in python)


def _call(name: str, tokens: list[str], kinds: Counter) -> str:
    """log((8),(2)) of \\log_2 8; without brackets, all up to the next sign is the argument."""
    kinds["call"] += 1
    base = ""
    power = ""
    while tokens[-1] in ("_", "^"):
        if tokens.pop() == "_":
            base = f",{_argument(tokens, kinds)}"
        else:
            power = f"**{_exponent(tokens, kinds)}"
    if (base and name != "log") or "-" in power:
        raise ValueError(f"{name}{base}{power}: \\sin^{{-1}} is no power")
    if tokens[-1] in ("(", "{"):
        argument = _atom(tokens.pop(), tokens, kinds)
    else:
        argument = _translate(tokens, kinds, stops=STOPS)
    return f"({name}({argument}{base}){power})"


def _compute(node: ast.AST, symbols: dict[str, Fraction], point: int) -> complex | Fraction:
    if isinstance(node, ast.Constant):
        return _checked(Fraction(node.value))
    if isinstance(node, ast.Name):
        if node.id in CONSTANTS:
            return CONSTANTS[node.id]
        if node.id not in symbols:
            symbols[node.id] = _place(node.id, point)
        return symbols[node.id]
    if isinstance(node, ast.UnaryOp):
        value = _compute(node.operand, symbols, point)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Call):
        values = [_compute(argument, symbols, point) for argument in node.args]
        if node.func.id in EXACT:
            return _checked(EXACT[node.func.id](*values))
        return _checked(CALLS[node.func.id](*map(complex, values)))
    if isinstance(node, ast.BinOp):
        left = _compute(node.left, symbols, point)
        right = _compute(node.right, symbols, point)
        return _checked(OPERATIONS[type(node.op)](left, right))
    raise ValueError("no expression")


def _place(name: str, point: int) -> Fraction:
    """The value of a variable: positive at point 0, negative at point 1, for |x| is not x."""
    generator = random.Random(f"{name} {point}")
    sign = (1, -1, generator.choice((1, -1)))[point]
    return sign * Fraction(11 * generator.randint(0, 9) + generator.randint(1, 10), 11)


def _checked(value: complex | Fraction) -> complex | Fraction:
    """The value itself; ValueError if it is too large."""
    if isinstance(value, Fraction):
        size = max(value.numerator.bit_length(), value.denominator.bit_length())
        if size > MAX_BITS:
            raise ValueError("too large")
    elif not cmath.isfinite(value):
        raise ValueError("infinite")
    return value


def _small(value: complex | Fraction) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 300:
        raise ValueError("no small natural number")
    return int(value)


def _power(base: complex | Fraction, exponent: complex | Fraction) -> complex | Fraction:
    if not isinstance(base, Fraction) or not isinstance(exponent, Fraction):
        return complex(base) ** complex(exponent)
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MAX_BITS:
        raise ValueError("too large")
    if exponent.denominator == 1:
        return base ** int(exponent)
    if base < 0 and exponent.denominator % 2:  # the real root
        return (-1) ** exponent.numerator * _power(-base, exponent)
    root = complex(base) ** (1 / exponent.denominator)
    if base >= 0:
        exact = Fraction(
            round(base.numerator ** (1 / exponent.denominator)),
            round(base.denominator ** (1 / exponent.denominator)),
        )
        if exact**exponent.denominator == base:
            root = exact
    return root**exponent.numerator


EXACT = {
    "factorial": lambda n: Fraction(math.factorial(_small(n))),
    "binom": lambda n, k: Fraction(math.comb(_small(n), _small(k))),
    "root": lambda x, degree: _power(x, 1 / degree),
    "abs": abs,
}
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}
