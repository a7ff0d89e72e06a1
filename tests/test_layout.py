"""The shape of the project: which files there are, what they import and how long they are;
importing has no effect.
"""

import ast
import itertools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENTRIES = {"grpo", "ppo", "hybrid"}
WIRING = ENTRIES | {"phases"}  # with what they share
ALGORITHM = {"data", "batch", "advantages", "packing", "prefix", "losses", "logprobs"}
ALGORITHM |= {"demonstrations", "supervised"}
MACHINE = {
    "model",
    "optim",
    "attention",
    "lora",
    "adapter",
    "rollout",
    "sampling",
    "vllm_backend",
    "hf_backend",
    "scheduler",
}
MACHINE |= {"reshard", "comms", "exchange", "offload", "memory"}
RUN = {
    "run",
    "plan",
    "hub",
    "rewards",
    "worker",
    "answers",
    "expressions",
    "checkpoint",
    "guard",
    "metrics",
    "hardware",
    "report",
    "curves",
    "check",
    "inputs",
    "witness",
}
MECHANISMS = ALGORITHM | MACHINE | RUN
STANDARD_LIBRARY_ALONE = {"data", "rewards", "worker", "answers", "expressions"}
OTHER_FILES = {
    "launch.sh",
    "README.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
    "LICENSE",
    "Dockerfile",
}
FOLDERS = {"tests", "examples", "benchmarks", "docs", "tools"}
THIRD_PARTY = {
    "vllm",
    "transformers",
    "safetensors",
    "tyro",
    "wandb",
    "datasets",
    "pyarrow",
    "pandas",
    "matplotlib",
    "accelerate",
    "gguf",
    "huggingface_hub",
    "tokenizers",
    "pynvml",
    "peft",
    "flash_attn",
}

PRESENT = sorted(path.stem for path in ROOT.glob("*.py"))
TREES = {name: ast.parse((ROOT / f"{name}.py").read_text()) for name in PRESENT}
every_file = pytest.mark.parametrize("name", PRESENT)


def imports(nodes):
    """The names of the top packages that the nodes import, with line numbers."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or ".").split(".")[0], node.lineno


def at_import(node):
    """The nodes that run when the file is imported: all but the bodies of functions, and blocks for
    type checkers.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import(child)


def functions(tree):
    return [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def is_text(node):
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def test_the_root_holds_the_files_of_the_design_and_nothing_else():
    shown = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    top = {name.split("/")[0] for name in shown if not name.startswith(".")} | {
        f"{name}.py" for name in PRESENT
    }
    allowed = {f"{name}.py" for name in WIRING | MECHANISMS} | OTHER_FILES | FOLDERS
    assert top <= allowed, sorted(top - allowed)


@every_file
def test_no_root_file_imports_another_except_the_entry_scripts(name):
    # An entry script may take a function from grpo.py, whose loop is the first that one reads.
    mine = ENTRIES - {"grpo"} if name in WIRING else WIRING | MECHANISMS
    found = [
        (package, line)
        for package, line in imports(ast.walk(TREES[name]))
        if package in mine | {"tests", "."}
    ]
    assert not found


@every_file
def test_importing_a_file_needs_the_standard_library_and_torch_alone(name):
    own = (
        WIRING | MECHANISMS | {"tyro", "examples", "tools"} if name in WIRING else set()
    )  # an entry has a command line
    allowed = (
        sys.stdlib_module_names | own | (set() if name in STANDARD_LIBRARY_ALONE else {"torch"})
    )
    assert not [found for found in imports(at_import(TREES[name])) if found[0] not in allowed]


def test_each_file_imports_in_a_fresh_interpreter_without_the_packages_and_changes_nothing():
    program = f"""
import importlib, logging, os, random, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {THIRD_PARTY!r}:
            raise ImportError(name + " is imported at the top")
sys.meta_path.insert(0, Blocked())
names = {[name for name in PRESENT if name in MECHANISMS]!r}
if "rewards" in names:
    importlib.import_module("rewards")
    assert "torch" not in sys.modules, "rewards.py imports torch: its workers must start fast"
import torch, torch.distributed.fsdp, torch.distributed.checkpoint
def state():
    loggers = (None, "torch", "vllm", "transformers")
    handlers = [logging.getLogger(name).handlers for name in loggers]
    return (dict(os.environ), list(sys.path), str(handlers), torch.get_default_dtype(),
            torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
            random.getstate())
for name in names:
    before = state()
    importlib.import_module(name)
    assert state() == before, name + ".py does something on import"
"""
    job = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr


def code_lines(name):
    """The lines of a root file without docstrings, comments and blank lines."""
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    texts = [node for node in ast.walk(TREES[name]) if is_text(node)]
    prose = {i for node in texts for i in range(node.lineno, node.end_lineno + 1)}
    code = [line for i, line in enumerate(lines, 1) if i not in prose and line.strip()]
    return [line for line in code if not line.strip().startswith("#")]


def mean_length(lines):
    return sum(map(len, lines)) / len(lines)


@every_file
def test_a_file_holds_one_concept_and_a_function_fits_a_screen(name):
    assert len((ROOT / f"{name}.py").read_text().splitlines()) <= 400, "two concepts? split it"
    long = {node.name: node.end_lineno - node.lineno + 1 for node in functions(TREES[name])}
    assert not {key: n for key, n in long.items() if n > (110 if key == "main" else 50)}


@every_file
def test_a_line_of_code_is_short(name):
    """The best of the field write 37 to 56 characters a line."""
    assert mean_length(code_lines(name)) <= 58


def test_lines_of_code_are_short_over_all_files():
    assert mean_length([line for name in PRESENT for line in code_lines(name)]) <= 55


@every_file
def test_nothing_is_packed_to_save_a_line(name):
    """No tuple assignment of unrelated values, no dict(...) made to be unpacked at once, no nested
    comprehension that unpacks.
    """
    for node in ast.walk(TREES[name]):
        where = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Assign):
            both = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            names = (
                {x.id for x in ast.walk(node.targets[0]) if isinstance(x, ast.Name)}
                if both
                else set()
            )
            used = {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
            assert not both or names & used, where  # a swap, or a step of a recurrence
        if isinstance(node, ast.keyword) and node.arg is None:
            assert not ast.unparse(node.value).startswith("dict("), where
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            unpacks = any(isinstance(g.target, ast.Tuple) for g in node.generators)
            assert len(node.generators) == 1 or not unpacks, where


# What differs between the two scripts, by intent; another function that both need is imported.
DIFFERENT = {"main", "prepare", "load_models", "to_sequences", "__post_init__"}
DIFFERENT_HELP = {"num_steps", "learning_rate"}
DIFFERENT_DEFAULT = {"run", "batch"}


def parts_of(name):
    """{function: text}, {field of Args: text of its annotation, default and help}."""
    source = (ROOT / f"{name}.py").read_text()
    tree = TREES[name]
    bodies = {node.name: ast.get_source_segment(source, node) for node in functions(tree)}
    [args] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args"]
    fields = {}
    for node, following in itertools.pairwise(args.body):
        if isinstance(node, ast.AnnAssign):
            help_text = following.value.value if is_text(following) else ""
            default = ast.unparse(node.value)
            if node.target.id in DIFFERENT_DEFAULT:
                default = ""
            if node.target.id in DIFFERENT_HELP:
                help_text = ""
            fields[node.target.id] = ast.unparse(node.annotation), default, help_text
    return bodies, fields


def test_a_diff_of_the_two_scripts_shows_the_algorithms_and_little_else():
    (ours, our_fields), (theirs, their_fields) = parts_of("grpo"), parts_of("ppo")
    assert (ours.keys() & theirs.keys()) == DIFFERENT
    both = our_fields.keys() & their_fields.keys()
    assert len(both) > 15
    assert not {name for name in both if our_fields[name] != their_fields[name]}


@pytest.mark.parametrize("other", ["ppo", "hybrid"])
def test_the_scripts_have_the_same_phases(other):
    def phases(name):
        lines = [line.strip() for line in (ROOT / f"{name}.py").read_text().splitlines()]
        return [re.split(r"[.,:]", line)[:2] for line in lines if re.match(r"# \d\. ", line)]

    ours, theirs = phases("grpo"), phases(other)
    assert [number for number, _ in ours] == [number for number, _ in theirs]
    assert [number for number, _ in ours] == [f"# {i}" for i in range(1, 7)]
    assert [name.split()[0] for _, name in ours] == [name.split()[0] for _, name in theirs]


@pytest.mark.parametrize(
    "path",
    sorted(
        p
        for pattern in ("*.py", "*.sh", "tests/*.py", "examples/*", "benchmarks/*.py")
        for p in ROOT.glob(pattern)
        if p.is_file()
    ),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_lines_are_ascii_and_at_most_100_columns_without_banners_or_reminders(path):
    lines = list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
    assert not [number for number, line in lines if len(line) > 100 or not line.isascii()]
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b|^\s*#.*[-=#*~]{4}")
    assert not [number for number, line in lines if marks.search(line)]


@every_file
def test_there_is_one_statement_on_a_line(name):
    statements = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.stmt)]
    lines = [
        node.lineno for node in statements if ast.unparse(node) != "..."
    ]  # the body of a Protocol's method
    assert not {line for line in lines if lines.count(line) > 1}


@every_file
def test_the_file_and_its_public_functions_and_classes_have_docstrings(name):
    tree = TREES[name]
    assert ast.get_docstring(tree), "the lesson of the file"
    public = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
    ]
    missing = {node.name for node in public if not ast.get_docstring(node)}
    assert not {
        each for each in missing - {"main", "Args"} if not each.endswith("Config")
    }  # told field by field


# Objects of other files or packages, which a mechanism does not import; their docstrings name them.
FOREIGN = {"meter", "engine", "tokenizer", "scorer", "row", "config", "device"}
FOREIGN |= {"group", "residual"}  # comms.py's: a process group, a tensor, or None


def without_type(function):
    """Of its parameters those without annotation, and "return"; a number's default is its type."""
    args = function.args
    plain = args.posonlyargs + args.args
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults + args.kw_defaults
    for parameter, default in zip(plain + args.kwonlyargs, defaults, strict=True):
        is_number = isinstance(default, ast.Constant) and isinstance(default.value, (int, float))
        if not (parameter.annotation or is_number or parameter.arg in FOREIGN | {"self", "cls"}):
            yield parameter.arg
    if function.returns is None and function.name != "__init__":
        yield "return"


@every_file
def test_public_functions_and_methods_state_their_types(name):
    if name in WIRING:  # their helpers are parts of main
        return
    tree = TREES[name]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies = [tree.body, *(node.body for node in classes if node.name[0] != "_")]
    found = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
    public = [node for node in found if node.name[0] != "_" or node.name == "__init__"]
    assert not [(node.name, names) for node in public if (names := list(without_type(node)))]


@every_file
def test_each_file_has_its_tests(name):
    if name == "phases":  # test_grpo.py and test_ppo.py go through it
        return
    assert (ROOT / "tests" / f"test_{name}.py").exists()


@every_file
def test_each_configuration_field_has_its_help_below_it(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ClassDef) and (node.name == "Args" or node.name.endswith("Config")):
            fields = [
                (field, text)
                for field, text in zip(node.body, [*node.body[1:], None], strict=True)
                if isinstance(field, ast.AnnAssign)
                and not re.search(r"Config\b", ast.unparse(field.annotation))
            ]
            assert not [ast.unparse(field) for field, text in fields if not is_text(text)]
            assert any(
                "frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list
            ), node.name


@every_file
def test_errors_are_caught_by_name(name):
    if name == "worker":  # a user's own reward function may raise anything; it is counted and shown
        return
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            if ast.unparse(node.body[0]).startswith("if type(error) is not Exception:\n    raise"):
                continue  # the class itself, which a library raises that has no other
            assert not re.search(r"\b(everything|Exception|BaseException)\b", caught), (
                f"line {node.lineno}"
            )


def test_launch_and_examples_are_short():
    assert len((ROOT / "launch.sh").read_text().splitlines()) <= 200
    for path in (ROOT / "examples").glob("*.sh"):
        assert len(path.read_text().splitlines()) <= 15, path.name


SCRIPTS = sorted(
    p
    for folder in ("benchmarks", "examples")
    for p in (ROOT / folder).glob("[!_]*.py")
    if "__main__" in p.read_text() or "parse_args" in p.read_text()
)


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_each_script_starts_and_says_how_it_is_run(path, tmp_path):
    job = subprocess.run(
        [sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr[-2000:]
    assert str(path.relative_to(ROOT)) in job.stdout, job.stdout
    assert not list(tmp_path.iterdir())
