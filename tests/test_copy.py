"""Files are copied out, alone, into other code: each has an example that runs as it is written, and
says what is wrong in words that its host can act on.
"""

import ast
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import traceback

import pytest
import torch
import torch._dynamo  # fully_shard and optimizers do: once, not in each fork
import torch.distributed.checkpoint
import torch.distributed.fsdp

from test_layout import ENTRIES, MECHANISMS, THIRD_PARTY
from tiny import save_tiny

ROOT = pathlib.Path(__file__).resolve().parent.parent
OF_THE_HOST = ("logging", "types", "json", "random", "copy", "data", "model")
ENGINES = {"scheduler", "vllm_backend"}  # their examples start vLLM, which takes half a minute

# After a file's example, in its names: a mistake, and what is said of it.
MISTAKES = {
    "advantages": (
        "group_advantages(torch.ones(2, 4), baseline='rloo')",
        "baseline rloo: must be group, leave_one_out or batch",
    ),
    "answers": ("math_reward('4', None)", "needs an answer"),
    "attention": ("model(torch.tensor([[7, 8]]))", "pass the row's cu_seqlens"),
    "checkpoint": ("save('checkpoints', 1, state)", "is of a later step, so of another run"),
    "comms": ("quantize_gradients(nn.Linear(8, 8))", "no FSDP module: call fully_shard first"),
    "data": (
        "from data import DataConfig; DataConfig(long_prompts='dropped')",
        "--data.long-prompts dropped: must be drop or refuse",
    ),
    "exchange": ("exchange(mine, destination=[0, 1])", "destination 1 is no rank of the group"),
    "hub": ("from hub import find_model; find_model('.', 8)", "--model .: has no config.json"),
    "logprobs": (
        "token_logprobs(torch.nn.Linear(2, 2), row)",
        "Linear is no Transformers model; if it wraps one: put the call into the forward",
    ),
    "losses": (
        "policy_loss(*flat, normalizer=3.0, ratio='gspo')",
        "ratio gspo: must be token or sequence",
    ),
    "metrics": ("meter.add('loss', 1.0, reduction='average')", "must be mean, sum, max or min"),
    "model": (
        "from model import ModelConfig; load_policy('tiny', None, ModelConfig('float16'))",
        "--model.master-dtype float16: must be float32 or bfloat16",
    ),
    "offload": (
        "Offload(True, critic); critic(torch.ones(4))",
        "Linear: waits in host memory; put this in `with offload.present(owner):`",
    ),
    "packing": (
        "pack([{'tokens': row.tokens, 'response_mask': row.tokens.bool()}], 8)",
        "sequence 0: response_mask has its first token: nothing predicts it",
    ),
    "plan": ("require(64 % 3 == 0, '--num-minibatches', 3, 'a divisor of 64')", "must be a div"),
    "report": ("LogConfig(plot_every=-1)", "--log.plot-every -1: must be at least 0 (never)"),
    "reshard": (
        "list(iter_full_params(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))",
        "merge the adapters or parametrizations first",
    ),
    "rewards": ("score(near, [{'completion': '4'}])", "near wants ['answer', 'response'], and"),
    "rollout": ("RolloutConfig(scheduler='close')", "--rollout.scheduler close: must be one of"),
    "run": ("from run import RunConfig; RunConfig(name='a/b')", "--name 'a/b': must be the name"),
}
# Who has nothing to refuse: no setting, and any text is an answer.
WITHOUT = {"curves", "expressions", "guard", "hardware", "hf_backend", "sampling", "worker"}


def example_of(name):
    """(what is said before it, its code): the last paragraph of a file's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()), clean=False)
    form = r".*\n\n(Copied[^\n]*\n(?:\S[^\n]*\n)*)((?: {4}[^\n]*\n)+)"
    return re.fullmatch(form, text, re.S).groups()


def lay_out(name, folder):
    """The folder, with the file and those that it names; returns packages that it may not use."""
    said, _ = example_of(name)
    folder.mkdir()
    for file in [f"{name}.py", *re.findall(r"\w+\.py", said)]:
        shutil.copy(ROOT / file, folder)
    needs = {package for package in THIRD_PARTY if re.search(rf"\b{package}\b", said)}
    if "transformers" in needs:
        needs |= {"safetensors", "huggingface_hub", "tokenizers", "accelerate", "peft"}
    return THIRD_PARTY - needs


def run_alone(name, folder, blocked):
    """In a fork: the example, then the mistake; to a file goes what was printed and raised."""
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if not is_ours(entry))]
    for module in [*MECHANISMS, *ENTRIES, "tests", "examples"]:
        sys.modules.pop(module, None)
    sys.modules |= dict.fromkeys(blocked)  # what is None there cannot be imported
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    names = {}
    error = said = ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(re.sub("^    ", "", example_of(name)[1], flags=re.M), names)
            exec(MISTAKES.get(name, [""])[0], names)
        except ValueError as refusal:
            said = str(refusal)
            error = traceback.format_exc()
        except BaseException:
            error = traceback.format_exc()
    found = {"printed": printed.getvalue(), "said": said, "error": error}
    pathlib.Path("found.json").write_text(json.dumps(found))
    os._exit(0)


def is_ours(entry):
    return pathlib.Path(entry or ".").resolve() in (ROOT, ROOT / "tests")


@pytest.mark.parametrize("name", sorted(MECHANISMS - ENGINES))
def test_a_file_runs_its_example_alone_and_says_what_is_wrong(name, tmp_path):
    blocked = lay_out(name, tmp_path / name)
    if "transformers" not in blocked:
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")  # once, not in each fork
    context = multiprocessing.get_context("fork")
    job = context.Process(target=run_alone, args=(name, tmp_path / name, blocked))
    job.start()
    job.join(60)
    found = json.loads((tmp_path / name / "found.json").read_text())
    code = example_of(name)[1]
    promised = re.findall(r"print\(.*\)  # (.*)", code)
    printed = [line for line in found["printed"].splitlines() if line in promised]
    assert printed == promised, found
    if name in WITHOUT:
        assert not found["error"]
    else:
        assert MISTAKES[name][1] in found["said"], found["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENGINES))
def test_an_engine_runs_its_example_alone(name, tmp_path):
    lay_out(name, tmp_path / name)
    code = re.sub("^    ", "", example_of(name)[1], flags=re.M)
    if name == "scheduler":
        save_tiny(tmp_path / name / "tiny", "qwen2")
    environment = os.environ | {"PYTHONPATH": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    job = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / name,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert job.returncode == 0, job.stderr[-3000:]


def test_each_file_says_under_which_licence_it_is_and_where_it_is_from():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    origin = f"{project['name']} {project['version']}"
    for path in [*ROOT.glob("*.py"), ROOT / "launch.sh"]:
        head = path.read_text()
        owner = f"# SPDX-FileCopyrightText: 2026 handful contributors ({path.name} of {origin})\n"
        assert f"{owner}# SPDX-License-Identifier: MIT-0\n" in head, path.name
        assert path.suffix != ".py" or head.startswith(owner), path.name
    assert (ROOT / "LICENSE").read_text().startswith("MIT No Attribution\n")


def test_examples_are_short():
    assert MISTAKES.keys() | WITHOUT == MECHANISMS - ENGINES
    for name in MECHANISMS:
        assert 3 <= len(example_of(name)[1].splitlines()) <= 10, name
