"""Files are copied out, alone, into other code: each has an example that runs as it is written, and
says what is wrong in words that its host can act on.
"""

import ast
import contextlib
import copy
import functools
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
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # fully_shard and optimizers do: once, not in each fork
import torch.distributed as dist
import torch.distributed.checkpoint
import trl_losses
from ranks import run_ranks
from rows import make_model
from test_layout import ENTRIES, MECHANISMS, THIRD_PARTY
from tiny import save_tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_backend
from advantages import AdvantageConfig
from answers import math_reward
from attention import use_packed_attention
from comms import quantize_gradients, quantized_all_reduce
from hf_backend import HfBackend
from logprobs import token_logprobs
from losses import LossConfig, actor_loss, policy_loss, token_weights
from packing import pack, sequence
from reshard import iter_full_params, sync_weights
from rewards import score
from rollout import Engine, RolloutConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
OF_THE_HOST = ("logging", "types", "json", "random", "fractions", "copy", "data", "model")
ENGINES = {"scheduler", "vllm_backend"}  # their examples start vLLM, which takes half a minute

SLOW_IMPORTS = {"transformers": "transformers.models.gpt2.modeling_gpt2"}
SLOW_IMPORTS["matplotlib"] = "matplotlib.figure"

# After a file's example, in its names: a mistake, and what is said of it.
MISTAKES = {
    "adapter": (
        "read(LoraConfig(rank=4, path='out'))",
        "--lora.path out: was trained with other settings; give --lora.rank 2 --lora.alpha 32.0",
    ),
    "advantages": (
        "group_advantages(torch.ones(2, 4), baseline='rloo')",
        "baseline rloo: must be group, leave_one_out or batch",
    ),
    "answers": ("math_reward('4', None)", "needs an answer"),
    "attention": ("model(torch.tensor([[7, 8]]))", "pass the row's cu_seqlens"),
    "batch": (
        "BatchConfig(prompts_per_step=8, num_minibatches=3)",
        "--prompts-per-step 8: must be divisible by --num-minibatches 3; try --prompts-per-step 9",
    ),
    "checkpoint": ("save('checkpoints', 1, state)", "is of a later step, so of another run"),
    "comms": ("quantize_gradients(nn.Linear(8, 8))", "no FSDP module: call fully_shard first"),
    "data": (
        "from data import DataConfig; DataConfig(long_prompts='dropped')",
        "--data.long-prompts dropped: must be drop or refuse",
    ),
    "demonstrations": (
        "load_demonstrations(['x'], tokenizer, DataConfig(), 9, read_rows=lambda *_: [{'a': 'b'}])",
        "--sft.data x, row 1: has columns ['a']; needs messages, or prompt and response",
    ),
    "exchange": ("exchange(mine, destination=[0, 1])", "destination 1 is no rank of the group"),
    "hf_backend": (
        "backend.load([('module.lm_head.weight', torch.ones(1))])",
        "module.lm_head.weight: is no parameter of the engine's model",
    ),
    "hub": ("from hub import find_model; find_model('.', 8)", "--model .: has no config.json"),
    "logprobs": (
        "token_logprobs(torch.nn.Linear(2, 2), row)",
        "Linear is no Transformers model; if it wraps one: put the call into the forward",
    ),
    "lora": (
        "attach(torch.nn.Sequential(torch.nn.Linear(8, 8)), LoraConfig(2, targets=('c_attn',)))",
        "--lora.targets c_attn: must be the end of a name; there are: 0",
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
    "optim": (
        "OptimConfig(decay='cosin')",
        "--optim.decay cosin: must be constant, linear or cosine",
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
    "supervised": ("DpoConfig(loss='hinge')", "--dpo.loss hinge: must be sigmoid or ipo"),
    "run": ("from run import RunConfig; RunConfig(name='a/b')", "--name 'a/b': must be the name"),
}
# Who has nothing to refuse: no setting, and any text is an answer.
WITHOUT = {"curves", "expressions", "guard", "hardware", "memory", "sampling", "worker"}
WITHOUT |= {"check", "inputs", "prefix", "witness"}


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
    for package, module in SLOW_IMPORTS.items():
        if package not in blocked:
            importlib.import_module(module)  # once, not in each fork
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


# docs/copying.md

GUIDE = (ROOT / "docs" / "copying.md").read_text()


def test_the_readmes_table_has_the_guides_numbers_in_its_order():
    section = (ROOT / "README.md").read_text().split("## Copying a file out")[1].split("\n## ")[0]
    rows = re.findall(r"^\|.*\| ([\d;, ]+) \|$", section, re.M)
    counted = re.findall(r"^\|.*\| \[?(\d+).*\|$", GUIDE, re.M)
    left = iter(counted)
    assert len(rows) == 5 and all(n in left for n in re.findall(r"\d+", " ".join(rows)))


def snippets(heading):
    """The code below a heading of the guide, joined."""
    part = GUIDE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", part, re.S))


def test_the_table_counts_the_lines_of_the_code_below():
    sections = re.findall(r"## ([^\n]*)\n(.*?)(?=\n## |\Z)", GUIDE, re.S)
    blocks = {
        re.sub(r"[^a-z0-9-]", "", title.lower().replace(" ", "-")): re.findall(
            r"```python\n(.*?)```", text, re.S
        )
        for title, text in sections
    }
    found = re.findall(r"\[(\d+)\]\(#(.*?)\)", GUIDE)
    assert len(found) >= 8
    for count, anchor in found:
        lines = [re.findall(r"^ *[^# \n].*", block, re.M) for block in blocks[anchor]]
        calls = {1} if anchor.startswith("fsdp2") else set()  # beside the host's own two lines
        assert int(count) in {len(each) for each in lines} | calls, (anchor, list(map(len, lines)))


def test_a_padded_batch_has_the_loss_of_its_own_code():
    logprobs, old_logprobs, _, advantages, mask = trl_losses.batch()
    names = {"torch": torch, "policy_loss": policy_loss, "token_weights": token_weights}
    names |= {"logprobs": logprobs, "old_logprobs": old_logprobs, "mask": mask}
    names["advantages"] = advantages[:, None].expand(mask.shape)
    names["totals"] = {"tokens": int(mask.sum()), "sequences": len(mask)}
    exec(snippets("A padded batch and a loss"), names)
    ratio = (logprobs - old_logprobs).exp()
    surrogate = torch.min(ratio * names["advantages"], ratio.clamp(0.8, 1.2) * names["advantages"])
    expected = -((surrogate * mask).sum(1) / mask.sum(1)).mean()
    torch.testing.assert_close(names["loss"], expected)


def test_a_padded_batch_that_is_packed_has_the_models_own_loss_and_gradient():
    model = make_model("llama")
    padded = copy.deepcopy(model)
    padded.set_attn_implementation("sdpa")
    mask = torch.arange(9) < torch.tensor([9, 4, 6])[:, None]
    input_ids = torch.where(mask, torch.arange(3, 30).view(3, 9), 0)
    labels = torch.where(mask, input_ids, -100)
    labels[1, :2] = -100
    names = {"torch": torch, "model": model, "labels": labels, "input_ids": input_ids}
    names |= {"attention_mask": mask.long(), "use_packed_attention": use_packed_attention}
    names |= {"pack": pack, "token_logprobs": token_logprobs}
    exec(snippets("A padded batch to be packed"), names)
    names["loss"].backward()
    own = padded(input_ids, attention_mask=mask.long(), labels=labels).loss
    own.backward()
    torch.testing.assert_close(names["loss"], own, rtol=1e-5, atol=0)
    for mine, theirs in zip(model.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_under_ddp_gradients_are_the_mean_over_ranks_also_in_int8():
    def gradient(code, rank):
        model = make_model("llama")
        ids = torch.arange(3 + 5 * rank, 11 + 5 * rank)
        [row] = pack([sequence(ids[:2], ids[2:])], capacity=16)
        names = {"torch": torch, "nn": nn, "dist": dist, "model": model, "row": row}
        names |= {"token_logprobs": token_logprobs, "quantized_all_reduce": quantized_all_reduce}
        exec(code, names)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def both():
        shown = snippets("DDP")
        last = "scored(row)[0].sum().backward()\n"
        plain, _, hook = shown.partition(last)
        return gradient(plain + last, dist.get_rank()), gradient(
            plain + hook + last, dist.get_rank()
        )

    alone = [gradient("token_logprobs(model, row)[0].sum().backward()", rank) for rank in (0, 1)]
    for exact, coarse in run_ranks(2, both):
        torch.testing.assert_close(exact, (alone[0] + alone[1]) / 2, rtol=1e-4, atol=1e-5)
        assert 0 < (coarse - exact).norm() < 0.02 * exact.norm()


def test_a_mesh_of_other_names_and_replicas_is_taken():
    def full():
        torch.manual_seed(0)
        names = {"nn": nn, "fully_shard": fully_shard, "init_device_mesh": init_device_mesh}
        names |= {"quantize_gradients": quantize_gradients, "iter_full_params": iter_full_params}
        exec(snippets("FSDP2 with your mesh"), names)
        names["model"](torch.ones(2, 8)).sum().backward()
        return names["full"], names["model"].weight.grad.full_tensor()

    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    for parameters, gradient in run_ranks(2, full):
        torch.testing.assert_close(parameters["weight"], layer.weight.detach().bfloat16())
        torch.testing.assert_close(gradient, torch.full((8, 8), 2.0), rtol=0.01, atol=0)


def test_trl_calls_the_reward_with_texts_and_with_messages():
    names = {"score": score}
    exec(snippets("TRL: a reward"), names)
    given = {"prompts": ["", ""], "completion_ids": [[1], [2]], "trainer_state": None}
    answers = {"answer": ["4", "5"]}
    texts = ["so \\boxed{4}", "so \\boxed{4}"]
    assert names["is_right"](completions=texts, **given, **answers) == [1.0, 0.0]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert names["is_right"](completions=chats, **given, **answers) == [1.0, 0.0]


@pytest.mark.parametrize("name", trl_losses.SETTINGS)
def test_losses_and_gradients_are_trls(name):
    """Numbers of TRL's own code: tests/trl_losses.py."""
    known = json.loads(trl_losses.FILE.read_text())[name]
    logprobs, old_logprobs, ref_logprobs, advantages, mask = trl_losses.batch()
    flat = logprobs.flatten().requires_grad_()
    fields = {"response_mask": mask.flatten(), "old_logprobs": old_logprobs.flatten()}
    fields["rollout_logprobs"] = fields["old_logprobs"]
    fields["ref_logprobs"] = ref_logprobs.flatten()
    fields["advantages"] = advantages[:, None].expand(mask.shape).flatten()
    edges = torch.arange(0, mask.numel() + 1, mask.shape[1])
    row = SimpleNamespace(cu_seqlens=edges, num_response_tokens=int(mask.sum()), fields=fields)
    totals = {"tokens": int(mask.sum()), "sequences": len(mask)}
    config = LossConfig(importance="off", **trl_losses.SETTINGS[name][1])
    zeros = torch.zeros_like(flat)
    loss, _ = actor_loss(flat, zeros, row, totals, config, trl_losses.LONGEST)
    loss.backward()
    theirs = torch.tensor(known["gradient"])
    off = (flat.grad[mask.flatten()] - theirs).norm() / theirs.norm()
    if name == "default KL":
        assert off > 1e-3
    else:
        assert loss.item() == pytest.approx(known["loss"], rel=1e-6, abs=1e-7)
        assert off < 1e-6


# What a host may do


def test_files_work_beside_a_hosts_own_of_the_standard_librarys_names(tmp_path):
    """As lib.rewards beside lib/logging.py; a worker's folder is first on no path."""
    library = tmp_path / "lib"
    library.mkdir()
    for name in MECHANISMS - set(OF_THE_HOST):
        shutil.copy(ROOT / f"{name}.py", library)
    for name in OF_THE_HOST:
        (library / f"{name}.py").write_text("raise RuntimeError('of the host')\n")

    def use():
        sys.path.insert(0, str(tmp_path))
        for name in MECHANISMS - set(OF_THE_HOST):
            importlib.import_module(f"lib.{name}")
        samples = [{"response": "4", "answer": "4.0"}]
        return sys.modules["lib.rewards"].score(["math", "exact"], samples)[0]

    assert run_ranks(1, use) == [[1.0]]


def test_samples_without_a_wanted_column_and_answers_that_are_none_are_said(capsys):
    with pytest.raises(ValueError, match=r"exact wants \['response'\], and samples have"):
        score("exact", [{"completion": "4", "answer": "4"}])
    with pytest.raises(ValueError, match="math needs an answer, and the response as text"):
        math_reward([{"role": "assistant", "content": "4"}], "4")

    class Half:
        def __call__(self, response):
            return 0.5

    with pytest.raises(ValueError, match="of different names"):
        score([lambda response: 1.0, lambda response: 2.0], [{"response": ""}])
    rewards, stats = score(
        [functools.partial(lambda x, response: x, 3.0), Half()], [{"response": ""}]
    )
    assert rewards == [3.5]
    assert stats["Half_mean"] == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RolloutConfig(engine="vlm"), "--rollout.engine vlm: must be one of"),
        (lambda: RolloutConfig(sleep_level=3), "--rollout.sleep-level 3: must be one of"),
        (lambda: LossConfig(importance="tis"), "--loss.importance tis: must be token, sequence"),
        (lambda: AdvantageConfig(baseline="loo"), "--advantage.baseline loo: must be group"),
    ],
)
def test_a_misspelt_choice_is_refused_without_a_command_line(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_after_an_exception_an_engine_can_be_woken_again(tmp_path):
    path = save_tiny(tmp_path / "tiny", "qwen2")
    names = {"RolloutConfig": RolloutConfig, "Engine": Engine, "HfBackend": HfBackend}
    model = AutoModelForCausalLM.from_pretrained(path)
    names |= {"sync_weights": sync_weights, "path": path, "model": model}
    exec(snippets("An engine in your loop"), names)
    engine = names["engine"]
    assert len(names["rollouts"]) == 2
    with pytest.raises(KeyboardInterrupt), engine.awake():
        raise KeyboardInterrupt
    with engine.awake():
        sync_weights(model, engine)
        with pytest.raises(ValueError, match="prompt 'text': must be a list of token ids"):
            engine.generate(["text"], 1)
        with pytest.raises(RuntimeError, match="may not be nested"), engine.awake():
            pass
    assert engine.state == "asleep"


def test_vllm_finds_what_it_reads_of_torchrun_in_a_process_of_its_own(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # to be as it was afterwards
        monkeypatch.delenv(name)
    vllm_backend._name_rank()
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("0", "0")
    assert int(os.environ["MASTER_PORT"]) > 0
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="vLLM reads RANK and LOCAL_RANK of the environment"):
        vllm_backend._name_rank()


def test_a_file_that_is_loaded_again_computes_with_its_new_functions():
    model = make_model("llama")
    [row] = pack([sequence(torch.tensor([5]), torch.tensor([7, 8]))], capacity=8)
    token_logprobs(model, row)
    spec = importlib.util.spec_from_file_location("again", ROOT / "logprobs.py")
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    again._response_logprobs = lambda *_: "new"
    again._response_logprobs.__name__ = "_response_logprobs"
    assert again.token_logprobs(model, row) == "new"


@pytest.mark.slow
def test_trl_trains_with_the_reward_of_the_guide(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    names = {"score": score}
    exec(snippets("TRL: a reward"), names)
    path = save_tiny(tmp_path / "tiny", "qwen2")
    rows = [{"prompt": "2+2=", "answer": "4"}] * 4
    settings = trl.GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.GRPOTrainer(
        path,
        names["is_right"],
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    trainer.train()
    assert any("rewards/is_right/mean" in line for line in trainer.state.log_history)


@pytest.mark.slow
def test_lora_in_the_layers_is_scored_exactly_and_on_the_head_refused():
    peft = pytest.importorskip("peft")
    [row] = pack([sequence(torch.tensor([5]), torch.tensor([7, 8, 9]))], capacity=8)
    for target, works in (("q_proj", True), ("lm_head", False)):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=[target], init_lora_weights=False)
        model = peft.get_peft_model(make_model("llama"), config)
        if not works:
            with pytest.raises(ValueError, match="not a matrix; merge its adapters"):
                token_logprobs(model, row)
            continue
        token_logprobs(model, row)[0].sum().backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(g is not None and g.abs().sum() > 0 for g in gradients)
        merged = model.merge_and_unload()
        use_packed_attention(merged)
        torch.testing.assert_close(token_logprobs(merged, row), token_logprobs(model, row))
