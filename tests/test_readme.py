"""What the documents say is so: commands parse, links lead somewhere, tables are current."""

import ast
import importlib
import json
import math
import pathlib
import re
import shlex
import struct
import subprocess
import sys

import pytest

import grpo
import hub
import hybrid
import ppo
import rewards
import run
from docs import loop
from examples import addition, mixture

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
ENTRIES = {"grpo.py": (grpo, addition.SETTINGS), "ppo.py": (ppo, addition.PPO_SETTINGS)}
ENTRIES["hybrid.py"] = hybrid, mixture.SETTINGS
ENTRIES["tools/evaluate.py"] = ENTRIES["grpo.py"]  # whose flags it takes
README = (ROOT / "README.md").read_text()
every_document = pytest.mark.parametrize("document", DOCUMENTS)


def prose(text):
    """The text without its indented blocks, each paragraph on one line."""
    kept = [line for line in text.splitlines() if not line.startswith("    ")]
    return re.sub(r"(?<!\n)\n(?![\n|#-])", " ", "\n".join(kept))


def commands(document):
    """The command lines of a document's blocks and of its text, without their comments."""
    text = (ROOT / document).read_text()
    blocks = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`]+)`", prose(text))
    starts = r"([A-Z_]+=\S+ )*(bash launch\.sh|python|torchrun|sbatch|bash) \S"
    return [line for line in lines if re.match(starts, line) and "..." not in line]


def script_and_arguments(command):
    """("grpo.py", its arguments) of any way to start it; ("", []) where no script is started."""
    words = shlex.split(command, comments=True)
    for i, word in enumerate(words):
        if word.endswith((".py", ".sh")) and word != "launch.sh":
            return word, words[i + 1 :]
    return "", []


def table(heading, text=README):
    """The rows of the tables below a heading, as lists of cells."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def parse(script, arguments, monkeypatch):
    """The settings of grpo.py or ppo.py; ends the test if they are refused."""
    entry, built_in = ENTRIES[script]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    return run.command_line(entry.Args(), built_in, entry.__doc__)


EVERY_COMMAND = [(document, command) for document in DOCUMENTS for command in commands(document)]


def test_the_documents_hold_commands():
    assert len([command for document, command in EVERY_COMMAND if document == "README.md"]) > 8
    assert len(EVERY_COMMAND) > 25


@pytest.mark.parametrize("document, command", EVERY_COMMAND)
def test_each_command_names_a_script_that_knows_its_flags(document, command, monkeypatch):
    script, arguments = script_and_arguments(command)
    arguments = [word for word in arguments if word != "--help"]
    if script in ENTRIES:
        parse(script, arguments, monkeypatch)
    elif script:
        source = (ROOT / script).read_text()
        flags = [word for word in arguments if word.startswith("--")]
        if script != "examples/slurm.sh":  # hands them to grpo.py
            assert not [flag for flag in flags if f'"{flag}"' not in source]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_each_command_runs_in_the_environment_that_launch_makes(document):
    """A new user's finding: "python grpo.py --help" after the quick start: no module torch."""
    assert not [command for command in commands(document) if command.startswith("python")]


def test_dapos_buffer_on_the_built_in_job_is_the_one_that_the_text_gives(monkeypatch, capsys):
    """A new user's finding: the table's line was refused there, by a limit that was not named."""
    told = re.search(r"on the built-in job, of 8 tokens,\s+`([^`]+)`", README)[1]
    args = parse("grpo.py", told.split(), monkeypatch)
    assert (args.advantage.overlong_buffer, args.rollout.max_response_tokens) == (4, 8)
    with pytest.raises(SystemExit):
        parse("grpo.py", ["--advantage.overlong-buffer", "512"], monkeypatch)
    refusal = "overlong-buffer 512: must be at most --rollout.max-response-tokens 8"
    assert refusal in capsys.readouterr().err


def test_shares_of_data_and_names_of_other_libraries_work_as_the_text_says(tmp_path, monkeypatch):
    """A new user's finding: neither stood in the README."""
    told = re.search(r"`(--data a.jsonl b.jsonl\s+--data.weights [\d ]+)`", README)[1]
    args = parse("grpo.py", ["--model", "x", *told.split()], monkeypatch)
    assert (args.data_paths, args.data.weights) == (("a.jsonl", "b.jsonl"), (3.0, 1.0))
    (tmp_path / "mine.py").write_text(
        "async def one(solution_str, ground_truth):\n    return solution_str == ground_truth\n"
        "def many(completions, answers):\n"
        "    return [float(x in y) for x, y in zip(answers, completions)]\n"
    )
    samples = [{"response": "an a", "answer": "a"}, {"response": "b", "answer": "b"}]
    functions = [f"{tmp_path}/mine.py:{name}" for name in ("one", "many")]
    assert rewards.score(functions, samples, num_workers=1)[0] == [1.0, 2.0]


def test_each_variant_of_the_docstring_is_accepted(monkeypatch):
    told = grpo.__doc__.split("Variants are flags")[1].split("Source:")[0]
    told = re.findall(r"^ {4}(\S.*?)  +(--.*(?:\n {8,}--.*)*)", told, flags=re.MULTILINE)
    assert len(told) == 6
    for _, flags in told:
        parse("grpo.py", ["--model", "x", *flags.split()], monkeypatch)


@every_document
def test_each_flag_in_the_text_is_one_of_a_script(document, monkeypatch, capsys):
    for script in ENTRIES:
        with pytest.raises(SystemExit):
            parse(script, ["--help"], monkeypatch)
    known = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out)) | {"--help", "--config"}
    assert len(known) > 60
    sources = [*ROOT.glob("benchmarks/*.py"), ROOT / "launch.sh"]
    known |= {flag for p in sources for flag in re.findall(r"--[a-z][\w-]*", p.read_text())}
    text = prose((ROOT / document).read_text())
    flags = [flag for span in re.findall(r"`([^`]+)`", text) for flag in re.findall(FLAG, span)]
    assert not set(flags) - known


FLAG = r"(?<!\S)--[a-z][\w.-]*"


@every_document
def test_each_link_leads_to_a_file_and_a_heading(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
            assert anchor in slugs, target


@every_document
def test_each_file_named_in_the_text_exists(document):
    text = prose((ROOT / document).read_text())
    named = re.findall(r"`((?:\w+/)*[\w.-]+\.(?:py|sh|svg|yml))`", text)
    named = [name for name in named if "NAME" not in name]
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
    records = re.findall(r"`(\w+\.(?:json|jsonl|txt|png))`", text)
    if document == "benchmarks/README.md":
        results = ROOT / "benchmarks" / "results"
        made_by_a_run = {"metrics.jsonl", "gsm8k.jsonl"}
        missing = [name for name in records if not (results / name).exists()]
        assert set(missing) <= made_by_a_run


def test_each_root_file_stands_on_a_shelf_with_its_lines():
    rows = {row[0].strip("`"): row[1] for row in table("The files") if row[0].startswith("`")}
    files = {path.name: path for pattern in ("*.py", "launch.sh") for path in ROOT.glob(pattern)}
    assert rows.keys() == files.keys()
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    off = {name: num for name, num in lines.items() if abs(int(rows[name]) - num) > 0.1 * num}
    assert not off, "the table has others, off by more than a tenth"


def test_the_memory_table_is_the_arithmetic_of_the_start(tmp_path):
    head, _, *rows = [row for row in table("Memory") if len(row) == 6]
    ranks = [int(cell.split()[0]) for cell in head[1:]]
    assert ranks == [1, 2, 4, 8, 16]
    for size, *cells in rows:
        directory = tmp_path / size
        directory.mkdir()
        pretend(directory, round(float(size.removesuffix(" B")) * 1e9))
        plan = hub.memory_plan(str(directory), "float32", 0)  # of one rank, here
        parts = re.findall(r"(?:weights|gradients|optimizer) ([\d.]+)", plan)
        assert len(parts) == 3
        total = sum(map(float, parts))
        for num_ranks, cell in zip(ranks, cells, strict=True):
            share = total / num_ranks
            assert float(cell) == pytest.approx(share, rel=0.02, abs=0.05), (size, num_ranks)


def pretend(directory, num_parameters, num_files=32):
    """A model of so many parameters, in sparse files that take no room."""
    share = num_parameters // num_files
    about = {"dtype": "I8", "shape": [share], "data_offsets": [0, share]}
    for i in range(num_files):
        header = json.dumps({f"x{i}": about}).encode()
        with open(directory / f"{i}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + share)
    names = {f"x{i}": f"{i}.safetensors" for i in range(num_files)}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))


def test_the_reward_function_of_the_readme_scores():
    code = re.search(r"( {4}def score\(.*\n(?: {8}.*\n)+)", README)[1]
    scope = {}
    exec("\n".join(line[4:] for line in code.splitlines()), scope)
    assert scope["score"]("it is 12", "12") == 1.0
    assert scope["score"]("it is 12.", "12") == 0.0


@pytest.mark.slow
def test_one_step_prints_what_each_phase_hands_to_the_next():
    job = subprocess.run(
        [sys.executable, ROOT / "examples" / "one_step.py"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert job.returncode == 0, job.stderr[-2000:]
    phases = re.split(r"^\d\. ", job.stdout, flags=re.MULTILINE)
    first, second = (part for part in phases if part.startswith("Update"))
    for pass_number, part in enumerate((first, second)):
        lines = re.findall(r"^ {3}\S+((?: +-?\d+\.\d{4}){6})$", part, flags=re.MULTILINE)
        rows = [[float(number) for number in line.split()] for line in lines]
        loss = float(re.search(r"these terms: (-?[\d.]+)", part)[1])
        assert sum(row[5] for row in rows) == pytest.approx(loss, abs=0.001)
        assert any(row[0] for row in rows), "no group has spread: take another seed"
        for _, sampler, old, new, ratio, _ in rows:
            assert sampler == pytest.approx(old, abs=0.001)  # the same weights
            assert ratio == pytest.approx(math.exp(new - old), abs=0.001)
        assert any(row[4] != 1 for row in rows) == (pass_number == 1)


def test_one_step_calls_public_functions_alone():
    path = ROOT / "examples" / "one_step.py"
    assert len(path.read_text().splitlines()) < 100
    tree = ast.parse(path.read_text())
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not [node.attr for node in used if node.attr.startswith("_")]
    for node in used:
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if (ROOT / f"{owner}.py").exists():
            assert hasattr(importlib.import_module(owner), node.attr), ast.unparse(node)


SOURCE = (ROOT / "grpo.py").read_text()


def test_the_picture_is_that_of_the_loop():
    assert loop.OUT.read_text() == loop.draw(SOURCE), "run python docs/loop.py"
    assert "docs/loop.svg" in README


def test_each_name_in_the_picture_exists():
    phases = loop.phases(SOURCE)
    assert list(phases) == [1, 2, 3, 4, 5, 6] == list(loop.HANDED_ON)
    for _, names in phases.values():
        assert names
        for name in names:
            module, *path = name.split(".")
            found = ast.parse((ROOT / f"{module}.py").read_text())
            for part in path:
                inside = [node for node in found.body if getattr(node, "name", "") == part]
                assert inside, name
                found = inside[0]


def test_what_a_phase_hands_on_is_a_variable_of_main():
    main = next(f for f in ast.parse(SOURCE).body if getattr(f, "name", "") == "main")
    names = [node for node in ast.walk(main) if isinstance(node, ast.Name)]
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    assert {name for name, _ in loop.HANDED_ON.values()} <= assigned


def test_a_call_that_leaves_the_loop_leaves_the_picture():
    changed = SOURCE.replace("optim.learning_rate_at(", "other_rate(")
    assert loop.draw(changed) != loop.draw(SOURCE)
