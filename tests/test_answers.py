"""Answers: which are the same, where they are found in a response, and what hostile ones cost.

answers.jsonl holds a gold answer a line, with other spellings of it (same) and its near neighbours:
another number, sign, unit, order, bracket, name (other).
"""

import itertools
import json
import pathlib
import random
import time

import pytest

from answers import exact_rewards, extract_answer, math_reward

TABLE = [
    json.loads(line)
    for line in (pathlib.Path(__file__).parent / "answers.jsonl").read_text().splitlines()
]


def boxed(text):
    return "\\boxed{" + text + "}"


HALF = r"\boxed{\frac{1}{2}}"

EQUAL = [
    # GSM8K and plain numbers
    ("6 * 7 is 42.\n#### 42", "42"),
    ("#### 1,234", "1234"),
    ("#### 1234", "He pays 1,000 + 234.\n#### 1,234"),
    ("#### -7", "-7"),
    ("#### $18", "18"),
    ("#### 18 dollars", "18"),
    ("068", "68"),
    ("68", "068"),
    ("+5", "5"),
    ("42.", "42"),
    ("$42$", "42"),
    (r"\(42\)", "42"),
    ("1 234", "1234"),
    ("1e3", "1000"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1,234,567.5}", "1234567.50"),
    (r"\boxed{1.5\times10^3}", "1500"),
    (r"\boxed{10^{-3}}", "0.001"),
    # signs and Unicode
    ("\\boxed{\u22125}", "-5"),
    ("\\boxed{- 5}", "-5"),
    ("\\boxed{\uff14\uff12}", "42"),
    ("\\boxed{\u00bd}", "0.5"),
    ("\\boxed{1\u00bd}", "1.5"),
    ("\\boxed{5\u00b2}", "25"),
    ("\\boxed{2\u221a2}", r"\sqrt{8}"),
    ("\\boxed{2\u03c0}", r"2\pi"),
    # fractions
    (HALF, r"\frac{1}{2}"),
    (r"\boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{\dfrac{2}{4}}", "1/2"),
    (r"\boxed{0.5}", r"\frac12"),
    (r"\boxed{-\frac{1}{2}}", r"\frac{-1}{2}"),
    (r"\boxed{1\frac{1}{2}}", "3/2"),
    (r"\boxed{1 1/2}", "1.5"),
    # percent, currency, units
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50%}", "0.5"),
    (r"\boxed{0.5}", r"50\%"),
    (r"\boxed{\$1,200.00}", "1200"),
    ("The answer is $18.", "18"),
    (r"\boxed{5 \text{ cm}}", "5"),
    (r"\boxed{5 cm}", r"5\text{ cm}"),
    (r"\boxed{5cm}", "5"),
    (r"\boxed{25 \text{ cm}^2}", "25"),
    (r"\boxed{42 apples}", "42"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{90^{\circ}}", "90 degrees"),
    (r"\boxed{\frac{180^\circ}{7}}", r"\frac{180}{7}"),
    (r"\boxed{40^\circ}", "40 degrees Fahrenheit"),
    ("5 boxes", "5 box"),
    ("5 classes", "5 class"),
    ("5 miles", "5 mile"),
    ("25 feet squared", "25 ft^2"),
    ("8 meters cubed", "8"),
    ("The answer is 3 times.", "3"),
    ("4 quarters", "4"),
    ("12 third graders", "12"),
    ("9 half gallons", "9"),
    (r"\boxed{204_5}", "204_{5}"),
    ("#### x = **5**", "5"),
    (r"\boxed{x \approx 3.14}", "3.14"),
    (r"\boxed{N=5}", "n = 5"),
    (r"\boxed{25 \text{ centimeters}^2}", "25 cm^2"),
    ("\u00a55", "5"),
    ("\u200b5", "5"),
    # tuples, intervals, sets
    (r"\boxed{(1,2)}", "(1, 2)"),
    (r"\boxed{(\frac12,3)}", "(0.5,3)"),
    (r"\boxed{\left[0,\infty\right)}", r"[0,\infty)"),
    ("\\boxed{(0,1)\u222a(2,3)}", r"(0,1)\cup(2,3)"),
    (r"\boxed{x \in [1,2]}", "[1,2]"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    (r"\boxed{2,1}", "1,2"),
    (r"\boxed{3,-3}", r"\pm 3"),
    # expressions
    (r"\boxed{\sqrt8}", r"2\sqrt{2}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}2"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5}", "x = 5"),
    (r"\boxed{y=2x+1}", "y = 1+2x"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{3<x}", "x>3"),
    # texts
    (r"\boxed{\text{Friday}}", "friday"),
    (r"\boxed{\text{(A)}}", "A"),
    ("B", "B"),
    # where the answer is
    (r"\boxed{41} or rather \boxed{42}", "42"),
    (r"\fbox{42}", "42"),
    (r"\boxed{41}, no: \fbox{42}", "42"),
    (r"<think>\boxed{41}</think> The answer is 42", "42"),
    ("Half of 84.\n\n**Final Answer:** 42", "42"),
    ("Half of 84.\nSo the answer to the question is 42.", "42"),
]
UNEQUAL = [
    (HALF, r"\frac{1}{3}"),
    (r"\boxed{\frac12}", r"\frac13"),
    (r"\boxed{\frac{1}{2}}", r"\frac{2}{1}"),
    (r"\boxed{-\frac12}", r"\frac12"),
    (r"\boxed{0.333}", "1/3"),
    (r"\boxed{-5}", "5"),
    (r"\boxed{5}", "-5"),
    ("#### -7", "7"),
    (r"\boxed{12,34}", "1234"),
    (r"\boxed{1,234}", "(1,234)"),
    ("\\boxed{5\u00b2}", "52"),
    ("\\boxed{1\u00bd}", "5.5"),
    (r"\boxed{50}", "0.5"),
    (r"\boxed{0.5\%}", r"50\%"),
    (r"\boxed{5\text{ cm}}", r"5\text{ m}"),
    (r"\boxed{5 km}", "5 m"),
    (r"\boxed{5 \text{ m}^2}", r"5 \text{ m}^3"),
    ("5 s", "5 m"),
    (r"\boxed{5^\circ}", "5 m"),
    ("5 millions", "5"),
    ("5 halves", "5"),
    ("5 thirds", "5"),
    ("5 sixths", "5"),
    ("5 thousandths", "5"),
    ("5 cubed", "5"),
    ("5 factorial", "5"),
    ("6 divided by two", "6"),
    ("5 plus six", "5"),
    (r"\boxed{42 \sim 43}", "42"),
    (r"\boxed{5^\circ \text{C}}", "5 m"),
    ("5 squared", "5"),
    ("5 minus one", "5"),
    (r"\boxed{5x}", "5"),
    (r"\boxed{2 ab}", "2"),
    (r"\boxed{2t}", "2"),
    (r"\boxed{5 million}", "5"),
    (r"\boxed{42 \text{ or } 43}", "42"),
    (r"\boxed{42, 43}", "42"),
    (r"\boxed{(1,2)}", "[1,2]"),
    (r"\boxed{(1,2)}", "(2,1)"),
    (r"\boxed{[0,\infty)}", r"(0,\infty)"),
    (r"\boxed{1,2}", "1,2,3"),
    (r"\boxed{x^2+2x}", "(x+1)^2"),
    (r"\boxed{\sqrt{2}}", "1.41"),
    (r"\boxed{3.14}", r"\pi"),
    (r"\boxed{x}", "y"),
    (r"\boxed{x=2}", "y=2"),
    (r"\boxed{f(x)=3}", "g(x)=3"),
    (r"\boxed{42 \approx 43}", "42"),
    ("\\boxed{42 \u2248 41}", "42"),
    (r"\boxed{42_5}", "42"),
    (r"\boxed{x<3}", "x>3"),
    (r"\boxed{41 = 42}", "42"),
    (r"\boxed{\pm 3}", "3"),
    (r"\boxed{sPari}", "Paris"),
    ("A", "B"),
    # a number that is left to be computed
    (r"\boxed{45^\circ + 30^\circ}", "75"),
    ("45 degrees + 30 degrees", "75"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{\int_0^1 x dx}", r"\frac12"),
    (r"\boxed{10!}", "3628800"),
    # no answer, or another one last
    ("maybe 41, 42 or 43", "42"),
    ("I think it is 42", "42"),
    ("42\nor 43", "42"),
    ("The answer is not 42", "42"),
    ("The answer is 42. No, 41.", "42"),
    ("The answer is 42.\nI hope this helps!", "42"),
    (r"\boxed{42} but \boxed{41}", "42"),
    (r"\boxed{42", "42"),
    (r"\boxed{42} \boxed{", "42"),
    (r"\boxed{\frac{42}{1}", "42"),
    (r"\boxed 42", "42"),
    (r"\boxed{}", "42"),
    ("", "42"),
    ("", ""),
    (r"<think>\boxed{42}</think> 41", "42"),
    ("1" * 5000, "42"),
]


@pytest.mark.parametrize(("response", "answer"), EQUAL)
def test_an_answer_in_another_spelling_earns_the_reward(response, answer):
    assert math_reward(response, answer) == 1.0


@pytest.mark.parametrize(("response", "answer"), UNEQUAL)
def test_another_answer_or_one_in_passing_earns_nothing(response, answer):
    assert math_reward(response, answer) == 0.0


def test_long_and_short_names_of_a_unit_are_the_same_and_those_of_different_units_are_not():
    names = (
        "feet foot ft",
        "inches inch in",
        "meters meter m",
        "centimeters cm",
        "millimeters mm",
        "kilometers km",
    )
    names += (
        "grams g",
        "kilograms kg",
        "liters l",
        "seconds sec s",
        "minutes min",
        "hours hrs hr h",
        "pounds lb lbs",
    )
    names += ("ounces oz",)
    for i, mine in enumerate(names):
        for j, theirs in enumerate(names):
            for a, b in itertools.product(mine.split(), theirs.split()):
                assert math_reward(f"5 {a}", f"5 {b}") == (i == j), (a, b)


def test_an_answer_ends_at_the_brace_that_closes_its_box():
    assert (
        extract_answer(r"So \boxed{\frac{1}{\sqrt{2}}}, as {was} to be shown.")
        == r"\frac{1}{\sqrt{2}}"
    )
    assert extract_answer(r"\boxed{\{1, 2\}} \}") == r"\{1, 2\}"


def test_the_table_has_at_least_400_pairs_of_both_sorts():
    assert sum(len(row["same"]) for row in TABLE) >= 200
    assert sum(len(row["other"]) for row in TABLE) >= 200


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['kind']}: {row['gold']}"[:60])
def test_each_kind_of_answer_equals_its_spellings_and_none_of_its_neighbours(row):
    assert math_reward(boxed(row["gold"]), row["gold"]) == 1.0
    assert [text for text in row["same"] if math_reward(boxed(text), row["gold"]) != 1.0] == []
    assert [text for text in row["other"] if math_reward(boxed(text), row["gold"]) != 0.0] == []


ONE_VALUE = [
    {"0.5", "\\frac{1}{2}", "50\\%"},
    {"3\\frac{1}{2}", "\\$3.50"},
    {"1024", "2^{10}"},
    {"120", "\\binom{10}{3}"},
    {"2\\sqrt{3}", "\u221a12"},
    {"1,234", "1\u202f234"},
    {"3", "3 hours", "f(2)=3"},
    {"5 \\text{ cm}", "x = 5", "AB=5"},
    {"5 \\text{ MHz}", "x = 5", "AB=5"},
    {"5", "5 \\text{ cm}"},
    {"5", "x = 5", "AB=5"},
    {"5", "5 \\text{ MHz}"},
    {"60 \\text{ mph}", "60 mph"},
    {"\\lambda=2", "2\\,\\text{m/s}"},
    {"\\{1,2\\}", "1,2"},
]


@pytest.mark.parametrize("num_pairs", [3000, pytest.param(None, marks=pytest.mark.slow)])
def test_no_two_rows_of_the_table_are_the_same_answer_but_for_those_of_one_value(num_pairs):
    pairs = list(itertools.permutations([row["gold"] for row in TABLE], 2))
    random.Random(0).shuffle(pairs)
    for mine, theirs in pairs[:num_pairs]:
        if math_reward(boxed(mine), theirs) == 1.0:
            assert any({mine, theirs} <= values for values in ONE_VALUE), (mine, theirs)


FOUND = [
    # huggingface/trl#6966: the template has put <think> into the prompt
    ("First 2.\n</think>\nThe answer is 42.", "42", 1),
    ("I count.</think>\\boxed{7}", "7", 1),
    # prime-rl#475: unfinished reasoning is no answer
    ("<think>first try \\boxed{42} hmm, let me check", "42", 0),
    ("<think>answer is 42", "42", 0),
    ("<think>a</think> \\boxed{41} <think> \\boxed{42}", "42", 0),
    ("<think>#### 42", "42", 0),
    # Thinking-Space/Rethinking-OPD#26, lm-evaluation-harness#3477: braces in data
    ("\\boxed{{Paris}}", "Paris", 1),
    ("\\boxed{{{\\frac{1}{2}}}}", "0.5", 1),
    ("\\boxed{2}", "so $\\boxed 2$.", 1),
    ("\\boxed 2", "2", 1),
    ("\\boxed\\pi", "\\pi", 1),
    ("\\boxed 42", "42", 0),
    # lm-evaluation-harness#4030: matrices and vectors
    (boxed("\\begin{pmatrix}1\\\\2\\end{pmatrix}"), "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", 1),
    (boxed("\\begin{array}{c}1\\\\2\\end{array}"), "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", 1),
    (boxed("\\begin{pmatrix}1\\cr2\\end{pmatrix}"), "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}", 0),
    # lm-evaluation-harness#2212: gold answers in the data set's own spelling
    *((boxed(text), "10,\\!000", 1) for text in ("10000", "10,000", "\\$10,\\!000")),
    (boxed("10,\\!000"), "10000", 1),
    (boxed("10,\\!001"), "10000", 0),
    (boxed("xy+1"), "1+xy", 1),
    (boxed("No solution"), "\\text{no solution}", 1),
    (boxed("3,5"), "3 \\text{ and } 5", 1),
    (boxed("3,6"), "3 \\text{ and } 5", 0),
    # huggingface/trl#5415: repetitive text
    (boxed("1/2 " * 20), "42", 0),
    (boxed("\\frac" * 2000), "42", 0),
    # huggingface/Math-Verify#14, #21
    (boxed("1:00"), "12:00", 0),
    (boxed("0:00"), "0", 0),
    # several right answers, and answers that are no text
    ("paris", ["Lyon", "Paris"], 1),
    ("Nice", ["Lyon", "Paris"], 0),
    ("4", 4.0, 1),
    ("True", True, 1),
    ("42", [], 0),
    # half a surrogate
    (boxed("\ud83d"), "\ud83d", 1),
    (boxed("42 \ud83d"), "42", 0),
]


@pytest.mark.parametrize(("response", "answer", "reward"), FOUND)
def test_answers_of_public_bug_reports(response, answer, reward):
    assert math_reward(response, answer) == reward


LATEX = "\\boxed{ \\fbox{ } { \\frac \\sqrt ( ) [ ] \\{ \\} ^ _ | ! + - * / = < > , ; 1 42 3.14 9 x"
LATEX += (
    " \\pi \\times \\cdot \\sin \\log \\begin{pmatrix} \\end{pmatrix} \\\\ & \\text{ #### <think>"
)
LATEX += (
    " </think> $ \\$ % \\% ^\\circ \\cup \\infty \\pm 9^{ e i cm meters m^2 1:30 pm March f( ' ab"
)
LATEX += " \\left( \\right) \\overline{3} million \\binom \\ldots a_ 1,234 answer: \\degree \\in"
PIECES = [*LATEX.split(), " ", "\n", "1/2 ", " and ", " or ", "answer is ", "\x00", "\ud83d"]
PIECES += ["\u00bd", "\u00b2", "\u221a", "\ufdfa"]


def drawn(generator):
    """A text of at most 20,000 characters: pieces at random, one repeated, or any characters."""
    size = generator.choice((5, 20, 100, 1000, 20000))
    kind = generator.choice(("pieces", "repeated", "after pieces", "characters"))
    if kind == "pieces":
        text = "".join(generator.choices(PIECES, k=size))
    elif kind == "repeated":
        text = "".join(generator.choices(PIECES, k=generator.randint(1, 3))) * size
    elif kind == "after pieces":
        start = "".join(generator.choices(PIECES, k=generator.randint(1, 30)))
        text = start + generator.choice(PIECES) * size
    else:
        text = "".join(map(chr, generator.choices(range(32, 0x2200), k=size)))
    return text[:19990]


def judge(seed, num_texts):
    """The most CPU seconds that one text took, as a response or as a gold answer."""
    generator = random.Random(seed)
    slowest = 0.0
    for _ in range(num_texts):
        text = drawn(generator)
        response = text if generator.random() < 0.3 else boxed(text)
        gold = generator.choice(("42", "x=5", "(1,2)", "\\frac12", drawn(generator), text[::-1]))
        start = time.process_time()
        assert math_reward(response, gold) in (0.0, 1.0)
        slowest = max(slowest, time.process_time() - start)
    return slowest


def test_any_text_is_judged_in_less_than_200_ms_without_an_error():
    assert judge(seed=0, num_texts=2000) < 0.2


@pytest.mark.slow
def test_20000_texts_are_judged_in_less_than_200_ms_each_without_an_error():
    assert judge(seed=1, num_texts=20000) < 0.2


LONG = ",".join(str(number) for number in range(10, 100))
HOSTILE = [
    ("{" * 250 + "}" * 250, "{" * 249 + "}" * 249),
    ("(" * 250 + ")" * 250, "(" * 249 + "1" + ")" * 249),
    (LONG, ",".join(reversed(LONG.split(",")))),
    ("\ufdfa" * 500, "\ufdfa" * 499),
    ("+".join(f"1/{number}" for number in range(101, 160)), "1"),
    ("\\sqrt" * 90 + "2", "\\sqrt" * 89 + "2"),
    ("9^" * 90 + "9", "9^" * 89 + "9"),
    ("9^{" * 12 + "9" + "}" * 12, "9"),
    ("!" * 200, "1" + "!" * 150),
    ("pm" * 90, "mp" * 90),
    ("_aa" * 100 + "=1", "_ab" * 100 + "=1"),
    ("answer " * 2850, "42"),
]


@pytest.mark.parametrize(("given", "gold"), HOSTILE, ids=lambda text: text[:12])
def test_hostile_answers_cost_less_than_200_ms(given, gold):
    start = time.process_time()
    math_reward(boxed(given), gold)
    assert time.process_time() - start < 0.2


def test_an_exact_answer_is_the_whole_stripped_response():
    assert exact_rewards([" 068\n", "68", "7"], ["068", "068", 7]) == [1.0, 0.0, 1.0]


def test_answers_beyond_the_limits_are_wrong_whatever_they_hold():
    items = LONG.split(",")
    assert math_reward(boxed(",".join(items[:20])), ",".join(items[19::-1])) == 1.0
    assert math_reward(boxed(LONG), ",".join(reversed(items))) == 0.0  # too many pairs
    assert math_reward(boxed("5." + "0" * 50), "5") == 1.0
    assert math_reward(boxed("5." + "0" * 200), "5") == 0.0  # far longer than the gold one
    assert math_reward(boxed("{" * 10 + "5" + "}" * 10), "5") == 1.0
    assert math_reward(boxed("{" * 30 + "5" + "}" * 30), "5") == 0.0  # too deep


def test_several_lines_without_a_box_or_a_sentence_give_no_answer():
    assert extract_answer("3\n4") == ""
    assert math_reward("3\n4", "3 4") == 0.0 and math_reward("3 4", "3 4") == 1.0
