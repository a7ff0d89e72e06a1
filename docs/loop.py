"""The picture of grpo.py's loop, drawn from its own names: docs/loop.svg.

    python docs/loop.py      # writes docs/loop.svg

The six boxes are the numbered comments of `main`. A box lists what its phase calls, by file: the
calls that name their module, those of grpo.py's own helpers, and those of the objects in OBJECTS.
Below the line is what the phase hands on; a test holds that all these names exist.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "loop.svg"

# Variables of the loop that are objects of another file; what only measures is left out.
OBJECTS = {
    "stream": "data.PromptStream",
    "scorer": "rewards.Scorer",
    "journal": "report.Report",
    "guard": "guard.Guard",
}

# What each phase hands to the next: names of `main`, and what they hold.
HANDED_ON = {
    1: ("groups", "P prompts, G responses and rewards each"),
    2: ("group_advantages", "[P, G]"),
    3: ("rows", "by minibatch: tokens [N], cu_seqlens [S+1]"),
    4: ("rows", "with old_logprobs, ref_logprobs [N]"),
    5: ("policy", "after num_epochs x num_minibatches steps"),
    6: ("state", "a line in metrics.jsonl; a checkpoint"),
}

WIDTH = 300
GAP = 34
MARGIN = 16
LINE = 17
INDENT = 12  # characters: the longest name of a file, and two
COLUMNS = 26  # characters beside it

STYLE = """
  .page { fill: #ffffff } .box { fill: #f6f8fa; stroke: #8c959f }
  .text { fill: #1f2328 } .file { fill: #0550ae } .soft { fill: #59636e }
  .line { stroke: #8c959f; fill: none } .head { fill: #8c959f }
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }
  .title { font: bold 15px system-ui, sans-serif } .soft { font: 12px system-ui, sans-serif }
  .name { font-weight: bold }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .box { fill: #151b23; stroke: #656c76 }
    .text { fill: #f0f6fc } .file { fill: #79c0ff } .soft { fill: #9198a1 }
    .line { stroke: #9198a1 } .head { fill: #9198a1 }
  }
"""


def phases(source: str) -> dict[int, tuple[str, list[str]]]:
    """{number: (title, qualified names in the order of the text)} of main's numbered comments."""
    # phases.py holds helpers that the scripts share.
    body = ast.parse(source).body + ast.parse((ROOT / "phases.py").read_text()).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    modules = {
        alias.name
        for node in body
        if isinstance(node, ast.Import)
        for alias in node.names
        if (ROOT / f"{alias.name}.py").exists()
    }
    main = functions["main"]
    loop = next(node for node in ast.walk(main) if isinstance(node, ast.For))
    starts = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        comment = re.match(r"# (\d)\. ([\w -]+?)(?: that [^.]*)?[.,:]", token.string)
        inside = loop.lineno <= token.start[0] <= loop.end_lineno
        if token.type == tokenize.COMMENT and comment and inside:
            starts.append((token.start[0], int(comment[1]), comment[2]))
    found = {}
    ends = [line for line, _, _ in starts[1:]] + [loop.end_lineno + 1]
    for (start, number, title), end in zip(starts, ends, strict=True):
        names = []
        for node in _in_order(loop):
            if start <= node.lineno < end:
                names += _qualified(node, modules, functions)
        found[number] = (title, list(dict.fromkeys(names)))
    return found


def _in_order(function: ast.FunctionDef | ast.For) -> list[ast.AST]:
    """The names and attributes of its body, in the order of the text."""
    walked = itertools.chain.from_iterable(map(ast.walk, function.body))
    nodes = [node for node in walked if isinstance(node, (ast.Attribute, ast.Name))]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def _qualified(node: ast.AST, modules: set[str], functions: dict[str, ast.AST]) -> list[str]:
    """The name at `node` as module.name; a helper's name stands for the names in its body."""
    if isinstance(node, ast.Name):
        if node.id not in functions:
            return []
        inner = _in_order(functions[node.id])
        return [name for each in inner for name in _qualified(each, modules, {})]
    if not isinstance(node.value, ast.Name):
        return []
    owner = node.value.id
    if owner in OBJECTS:
        return [f"{OBJECTS[owner]}.{node.attr}"]
    return [f"{owner}.{node.attr}"] if owner in modules else []


def by_file(names: list[str]) -> list[tuple[str, list[str]]]:
    """["a.f", "b.g", "a.h"] -> [("a", ["f", "h"]), ("b", ["g"])]."""
    files: dict[str, list[str]] = {}
    for name in names:
        module, _, rest = name.partition(".")
        files.setdefault(module, []).append(rest)
    return list(files.items())


def draw(source: str) -> str:
    """The SVG: phases 1 to 3 from left to right, 4 to 6 below them from right to left."""
    found = phases(source)
    lines = {number: _lines(names) for number, (_, names) in found.items()}
    upper = 104 + LINE * max(len(lines[number]) for number in (1, 2, 3))
    lower = 104 + LINE * max(len(lines[number]) for number in (4, 5, 6))
    width = 2 * MARGIN + 3 * WIDTH + 2 * GAP
    height = 2 * MARGIN + upper + GAP + lower
    shapes = [f'<rect class="page" width="{width}" height="{height}"/>']
    corners = {}
    for number, (title, _) in found.items():
        column = number - 1 if number <= 3 else 6 - number
        x = MARGIN + column * (WIDTH + GAP)
        y = MARGIN if number <= 3 else MARGIN + upper + GAP
        corners[number] = (x, y)
        name, holds = HANDED_ON[number]
        box_height = upper if number <= 3 else lower
        shapes += _box(x, y, box_height, f"{number}. {title}", lines[number], name, holds)
    for number in (1, 2):
        x, y = corners[number]
        shapes.append(_arrow(x + WIDTH, y + upper // 2, GAP, 0))
    x, y = corners[3]
    shapes.append(_arrow(x + WIDTH // 2, y + upper, 0, GAP))
    for number in (4, 5):
        x, y = corners[number]
        shapes.append(_arrow(x, y + lower // 2, -GAP, 0))
    x, y = corners[6]
    shapes.append(_arrow(x + WIDTH // 2, y, 0, -GAP))
    shapes.append(_text(x + WIDTH // 2 + 10, y - GAP // 2 + 4, "soft", "the next step"))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>The six phases of a step of grpo.py</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *shapes, "</svg>"]) + "\n"


def _lines(names: list[str]) -> list[tuple[str, str]]:
    """The lines of a box: (file, its functions); the file is "" where the line before goes on."""
    lines = []
    for file, functions in by_file(names):
        parts = _wrap(functions, COLUMNS)
        lines.append((file, parts[0]))
        lines += [("", part) for part in parts[1:]]
    return lines


def _box(
    x: int, y: int, height: int, title: str, lines: list[tuple[str, str]], name: str, holds: str
) -> list[str]:
    shapes = [
        f'<rect class="box" x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="8"/>',
        _text(x + 14, y + 26, "title text", title),
    ]
    for i, (file, functions) in enumerate(lines):
        baseline = y + 50 + i * LINE
        shapes.append(_text(x + 14, baseline, "file", file))
        shapes.append(_text(x + 14, baseline, "text", " " * INDENT + functions))
    rule = y + height - 48
    return [
        *shapes,
        f'<path class="line" d="M{x} {rule}h{WIDTH}"/>',
        _text(x + 14, rule + 19, "name text", name),
        _text(x + 14, rule + 37, "soft", holds),
    ]


def _wrap(names: list[str], columns: int) -> list[str]:
    lines = [names[0]]
    for name in names[1:]:
        if len(lines[-1]) + 2 + len(name) <= columns:
            lines[-1] += f", {name}"
        else:
            lines[-1] += ","
            lines.append(name)
    return lines


def _text(x: int, y: int, kind: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" xml:space="preserve">{escape(text)}</text>'


def _arrow(x: int, y: int, dx: int, dy: int) -> str:
    """From (x, y) by (dx, dy), one of them 0."""
    right = (dx > 0) - (dx < 0)
    down = (dy > 0) - (dy < 0)
    tip = (x + dx - 2 * right, y + dy - 2 * down)
    left_end = (tip[0] - 9 * right - 5 * down, tip[1] - 9 * down + 5 * right)
    right_end = (tip[0] - 9 * right + 5 * down, tip[1] - 9 * down - 5 * right)
    points = " ".join(f"{a},{b}" for a, b in (tip, left_end, right_end))
    line = f'<path class="line" d="M{x + 2 * right} {y + 2 * down}L{tip[0]} {tip[1]}"/>'
    return f'{line}<polygon class="head" points="{points}"/>'


if __name__ == "__main__":
    OUT.write_text(draw((ROOT / "grpo.py").read_text()))
    print(OUT.relative_to(ROOT))
