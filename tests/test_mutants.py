"""The list of planted faults: each is still one place of today's code, and its tests are there; and
the program that plants them.
"""

import ast
import json
import subprocess
import sys

import pytest
from mutants import ROOT, read_faults

FAULTS = read_faults(ROOT)


def test_each_fault_is_one_place_of_todays_code():
    """`planted` raises unless its text stands in the file once."""
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text()
        assert fault.planted(text) != text, fault


def statement_of(fault, tree, text):
    """The statement of the file, a function or a class, that has the fault's place."""
    first = text[: text.index(fault.old)].count("\n") + 1
    last = first + fault.old.rstrip("\n").count("\n")
    for node in tree.body:
        start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        if start <= first and last <= node.end_lineno:
            return "\n".join(text.split("\n")[start - 1 : node.end_lineno]) + "\n"
    raise AssertionError(fault)


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_code_with_a_fault_in_it_compiles_and_is_other_code(file):
    text = (ROOT / file).read_text()
    tree = ast.parse(text)
    for fault in FAULTS:
        if fault.file == file:
            whole = statement_of(fault, tree, text)
            changed = ast.parse(fault.planted(whole))
            assert ast.dump(changed) != ast.dump(ast.parse(whole)), fault


def test_at_least_150_faults_of_different_names_are_in_all_files():
    assert len({(fault.file, fault.fault) for fault in FAULTS}) == len(FAULTS) >= 150
    files = {path.name for path in ROOT.glob("*.py")} | {"tools/launch.py"}
    assert {fault.file for fault in FAULTS} == files


def test_the_tests_that_ought_to_see_a_fault_are_there():
    for fault in FAULTS:
        for argument in fault.tests.split():
            file, _, name = argument.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), argument


def test_at_most_3_percent_are_accepted_to_survive_each_with_a_reason():
    accepted = [fault for fault in FAULTS if fault.why]
    assert len(accepted) <= 0.03 * len(FAULTS)


CODE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TEST = "from code_ import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


@pytest.mark.slow
def test_what_a_test_sees_is_told_from_what_survives(tmp_path):
    """A repository of two functions, one of them without a test. Its files stay as they were."""
    tests = tmp_path / "tests"
    results = tmp_path / "benchmarks" / "results"
    tests.mkdir()
    results.mkdir(parents=True)
    (tmp_path / "code_.py").write_text(CODE)
    (tests / "test_code.py").write_text(TEST)
    (tests / "mutants.py").write_text((ROOT / "tests" / "mutants.py").read_text())
    faults = [
        {"fault": "three times", "old": "2 * x", "new": "3 * x"},
        {"fault": "a third", "old": "x / 2", "new": "x / 3", "why": "nobody uses it"},
        {"fault": "an exit", "old": "return 2", "new": "raise SystemExit(3)\n    return 2"},
    ]
    lines = [each | {"file": "code_.py", "tests": "tests/test_code.py"} for each in faults]
    (tests / "mutants.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)

    program = "import sys, mutants; mutants.PRELOADED = ('pytest',); sys.exit(mutants.main())"
    job = subprocess.run(
        [sys.executable, "-c", program, "--jobs", "2"],
        cwd=tests,
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = job.stdout.splitlines()[-2:]
    assert told[0] == "survived: code_.py:6: a third (nobody uses it)", job.stdout + job.stderr
    assert told[1] == "2 of 3 planted faults are seen: 66.7 %"
    assert job.returncode == 1  # less than 97 %
    versions, *found = map(json.loads, (results / "mutants.jsonl").read_text().splitlines())
    assert "pytest" in versions
    assert [(each["fault"], each["by"]) for each in found] == [
        ("a third", ""),
        ("an exit", "tests/test_code.py::test_double"),
        ("three times", "tests/test_code.py::test_double"),
    ]
    assert (tmp_path / "code_.py").read_text() == CODE

    (tests / "test_code.py").write_text(TEST.replace("== 6", "== 7"))
    job = subprocess.run(
        [sys.executable, "-c", program], cwd=tests, capture_output=True, text=True, timeout=60
    )
    assert "tests/test_code.py::test_double: fails without a fault" in job.stderr
