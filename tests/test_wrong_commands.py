"""What must hold of any wrong command: one line that names the flag or the file, soon, and no file
of an earlier run is changed.
"""

import itertools
import json
import shutil
import sys
import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from test_grpo import SMALL, run_command
from wrong_commands import settings_of, wrong_commands, wrong_files

import grpo
import hybrid
import ppo
from examples import addition, mixture
from run import command_line

ENTRIES = {"grpo": (grpo, addition.SETTINGS), "ppo": (ppo, addition.PPO_SETTINGS)}
ENTRIES["hybrid"] = hybrid, mixture.SETTINGS
# hybrid.py's settings are grpo.py's and two groups more.
every_entry = pytest.mark.parametrize(
    "entry", ["grpo", "ppo", pytest.param("hybrid", marks=pytest.mark.slow)]
)


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refusal(words, entry, monkeypatch, capfd):
    """What is printed for these words, once checked against the rules; None if they are taken."""
    module, built_in = ENTRIES[entry]
    monkeypatch.setattr(sys, "argv", [f"{entry}.py", "--reward.num-workers", "1", *words])
    began = time.monotonic()
    try:
        args = command_line(module.Args(), built_in, "")
        made = mixture if entry == "hybrid" else addition
        module.prepare(made.with_paths(args))
    except SystemExit as stop:
        assert stop.code == 2
        told = capfd.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1, told
    except ValueError as error:  # run.one_line_errors makes one line of it
        told = f"error: {error}"
        assert "\n" not in told
    else:
        return None
    assert time.monotonic() - began < 20
    return told


@every_entry
def test_a_wrong_command_line_for_each_flag_is_refused_by_it(
    entry, group, tiny, files, tmp_path, monkeypatch, capfd
):
    """Every flag that can be wrong; of ppo.py its own, and a third of those that grpo.py has; of
    hybrid.py its own.
    """
    own = ["--data", str(files / "16.jsonl"), *SMALL, tiny]
    failed = []
    commands = wrong_commands(ENTRIES[entry][0].Args(), seed=0)
    shared = {flag for _, flag, _ in settings_of(grpo.Args())}
    if entry == "hybrid":
        row = {"prompt": "1+", "response": "2", "chosen": "2", "rejected": "3"}
        (tmp_path / "given").write_text(json.dumps(row))
        given = str(tmp_path / "given")
        own += ["--sft.data", given, "--dpo.data", given, "--sft.max-tokens", "9"]
        own += ["--dpo.max-tokens", "9"]
        commands = [each for each in commands if each[1] not in shared]
        assert len(commands) > 8
    elif entry == "ppo":
        own_or_third = [i % 3 == 0 or flag not in shared for i, (_, flag) in enumerate(commands)]
        commands = list(itertools.compress(commands, own_or_third))
    else:
        assert len(commands) > 60
        assert {"--save-minutes", "--max-skipped"} <= {flag for _, flag in commands}
    for words, flag in commands:
        told = refusal([*own, *words], entry, monkeypatch, capfd)
        if told is None or flag not in told:
            failed.append((words, told))
    assert not failed, "\n".join(map(str, failed))


@every_entry
def test_wrong_settings_files_are_refused_by_the_flag_or_the_file(
    entry, tmp_path, monkeypatch, capfd
):
    failed = []
    for file, name in wrong_files(ENTRIES[entry][0].Args(), 25, 1, tmp_path):
        told = refusal(["--config", str(file)], entry, monkeypatch, capfd)
        if told is None or name not in told:
            failed.append((file.read_bytes()[:80], told))
    assert not failed, "\n".join(map(str, failed))


# What new users met, and others of the kind: the flag, the file and the place are named.

GOOD_ROW = b'{"question": "1+1=", "answer": "2"}\n'
WRONG_DATA = {
    "Latin-1": ('{"question": "caf\u00e9"}\n'.encode("latin-1"), "line 2: is not JSON"),
    "UTF-16": ('{"question": "1"}\n'.encode("utf-16"), "line 2: is not JSON"),
    "binary": (bytes(range(128, 256)), "line 2: is not JSON"),
    "cut": (b'{"question": "1", "ans', "line 2: is not JSON"),
    "brackets": (b'{"question": ' + b"[" * 100_000 + b"\n", "line 2: is not JSON"),
    "a NUL": (b'{"question": "1\x00"}\n', "line 2: is not JSON"),
    "an array": (b'[{"question": "1"}]\n', "line 2: is [{'question': '1'}]"),
    "pretty": (json.dumps({"question": "1"}, indent=1).encode(), "line 2: is not JSON"),
    "half a surrogate": (b'{"question": "\\ud800"}\n', "row 2: 'utf-8' codec can't encode"),
    "its other half": (b'{"prompt": "a \\udfff"}\n', "row 2: 'utf-8' codec can't encode"),
    "a number": (b'{"question": 12, "answer": "2"}\n', "row 2: `question` is 12; must be text"),
    "a truth": (b'{"prompt": true, "answer": "2"}\n', "row 2: `prompt` is True; must be text"),
    "no prompt": (b'{"prompt": [], "answer": "2"}\n', "row 2: has columns ['answer', 'prompt']"),
    "blank": (b'{"question": " ", "answer": "2"}\n', "row 2: has columns ['answer', 'question']"),
    "no content": (b'{"prompt": [{"role": "user", "content": null}]}\n', "row 2: `prompt` has"),
    "no role": (b'{"prompt": [{"content": "1"}]}\n', "row 2: `prompt` has {'content': '1'}"),
    "a picture": (
        b'{"prompt": [{"role": "user", "content": [{"image": 1}]}]}\n',
        "row 2: `prompt`",
    ),
}


def by_two_flags(kinds, first, second):
    """Every kind by the first flag, each fifth by the second as well."""
    return [(kind, first) for kind in kinds] + [(kind, second) for kind in list(kinds)[::5]]


@pytest.mark.parametrize(("kind", "flag"), by_two_flags(WRONG_DATA, "--data", "--eval-data"))
def test_wrong_data_are_refused_by_flag_file_and_place(
    kind, flag, group, tiny, files, tmp_path, monkeypatch, capfd
):
    """Of several files one had to guess: "'utf-8' codec can't decode byte 0xe9 in position 16"."""
    wrong, place = WRONG_DATA[kind]
    file = tmp_path / "wrong.jsonl"
    file.write_bytes(GOOD_ROW + wrong)
    sources = [str(files / "16.jsonl"), str(file), str(files / "3.jsonl")]
    words = ["--data", *sources[:: 1 if flag == "--data" else 2]]
    if flag == "--eval-data":
        words += ["--eval-every", "1", "--eval-data", *sources]
    told = refusal([*words, *SMALL, tiny], "grpo", monkeypatch, capfd)
    assert told and told.startswith(f"error: {flag} {file}, {place}"), told


@pytest.mark.parametrize(
    "text", [b"\xef\xbb\xbf" + GOOD_ROW, GOOD_ROW.replace(b"\n", b"\r\n")], ids=["BOM", "CRLF"]
)
def test_files_of_other_editors_are_read(text, group, tiny, tmp_path, monkeypatch, capfd):
    (tmp_path / "x.jsonl").write_bytes(text)
    words = ["--data", str(tmp_path / "x.jsonl"), *SMALL, tiny]
    assert refusal(words, "grpo", monkeypatch, capfd) is None


@pytest.mark.parametrize("name", ["gsm.csv", "gsm.tsv", "gsm.txt", "gsm.jsnl", "gsm.parquet", ""])
@pytest.mark.parametrize("is_there", [True, False])
def test_no_file_of_another_format_is_looked_for_on_the_hub(
    name, is_there, group, tiny, tmp_path, monkeypatch, capfd
):
    """`--data gsm.csv` was "needs datasets; install it": 200 MB to learn that it is no format."""
    file = tmp_path / name
    if is_there and name:
        file.write_bytes(b"question,answer\n1,2\n")
    told = refusal(["--data", str(file), *SMALL, tiny], "grpo", monkeypatch, capfd)
    assert told.startswith(f"error: --data {file}: ") and "install" not in told, told


def config(**changes):
    """A change of a model's directory: of its config.json."""

    def change(directory):
        known = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(known | changes))

    return change


def written(name, text):
    """Another: of a file's text; None removes it."""

    def change(directory):
        if text is None:
            (directory / name).unlink()
        else:
            (directory / name).write_text(text, encoding="latin-1")

    return change


TINY_GEMMA2 = dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"])
INDEX = "model.safetensors.index.json"
WRONG_MODELS = {
    "no tensors": (written("model.safetensors", None), "has no model.safetensors and no index"),
    "garbled tensors": (written("model.safetensors", "\xff" * 99), "model.safetensors cannot be"),
    "torn index": (written(INDEX, "{"), f"{INDEX} lists no files"),
    "missing shard": (
        written(INDEX, '{"weight_map": {"x": "model-1.safetensors"}}'),
        f"model-1.safetensors, which {INDEX} names, is missing",
    ),
    "torn config": (written("config.json", "{a"), "config.json is of no model"),
    "a list": (written("config.json", "[1]"), "config.json is of no model"),
    "no config": (written("config.json", None), "has no config.json"),
    "no such kind": (config(model_type="nonsense"), "config.json is of no model"),
    "no kind": (written("config.json", "{}"), "config.json is of no model"),
    "encoder and decoder": (config(model_type="t5"), "is of the type t5, which is no decoder"),
    "pictures": (config(model_type="vit"), "is of the type vit, which is no decoder"),
    "pictures and text": (config(model_type="qwen2_vl"), "is of the type qwen2_vl, which is no"),
    "text for a number": (config(hidden_size="64"), "config.json is of no model"),
    "no tokenizer": (written("tokenizer.json", None), "has no tokenizer"),
    "another tokenizer": (written("tokenizer.json", '{"a": 1}'), "its tokenizer does not load"),
    "soft-capped scores": (
        config(**TINY_GEMMA2),
        "soft-caps its attention scores, which packed rows do not; give Llama",
    ),
    "latent attention": (config(model_type="deepseek_v3"), "has latent attention, which packed"),
    "few positions": (config(max_position_embeddings=20), "has 20 positions"),
}


@pytest.mark.parametrize(("kind", "flag"), by_two_flags(WRONG_MODELS, "--model", "--critic.path"))
def test_wrong_models_are_refused_by_their_flag_before_the_plan(
    kind, flag, group, tiny, files, tmp_path, monkeypatch, capfd
):
    """Many were a traceback of 3 kB below a plan as if all was well."""
    change, rule = WRONG_MODELS[kind]
    shutil.copytree(tiny, tmp_path / "model")
    change(tmp_path / "model")
    own = [*SMALL, tiny, flag, str(tmp_path / "model")] if flag != "--model" else [*SMALL]
    own += [str(tmp_path / "model")] if flag == "--model" else []
    words = ["--data", str(files / "16.jsonl"), *own]
    told = refusal(words, "ppo", monkeypatch, capfd)
    assert told and told.startswith(f"error: {flag} {tmp_path / 'model'}: {rule}"), told
    assert len(told) < 600 and " prompts for " not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--offload true", "--offload true: a word too many"),
        ("--verify-sync yes", "--verify-sync yes: a word too many"),
        ("--num-steps many", "--num-steps: invalid literal for int() with base 10: 'many'"),
        ("--prompts-per-step 0", "--prompts-per-step 0: must be at least 1; try 64"),
        ("--loss.target-kl -1", "--loss.target-kl -1.0: must be at least 0 (never)"),
        ("--loss.clip-low -1", "--loss.clip-low -1.0: must be above 0 and at most 1; try 0.2"),
        ("--keep 0", "--keep 0: must be at least 1"),
        ("--timeout-s 0", "--timeout-s 0.0: must be at least 1; try 3600"),
        ("--seed -5", "--seed -5: must be at least 0"),
        ("--data.weights inf", "--data.weights inf: must be above 0 and below 1e100"),
        (
            "--rollout.quantization fp8",
            "--rollout.quantization fp8: must be fp8_per_channel on a CPU",
        ),
        ("--rollout.max-num-seqs -1", "--rollout.max-num-seqs -1: must be at least 0"),
        ("--rollout.tensor-parallel-size 2", "--rollout.tensor-parallel-size 2: must be a divisor"),
        ("--critic.warmup-steps 300", "--critic.warmup-steps 300: must be below --num-steps 200"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes fp8")
def test_a_wrong_value_is_refused_by_its_own_flag_alone(words, told, group, monkeypatch, capfd):
    """Groups of settings were named as a whole, three of four flags innocent; some were taken."""
    found = refusal(["--model", "x", *words.split()], "ppo", monkeypatch, capfd)
    assert found.strip().startswith(f"error: {told}") and len(found) < 150, found


@pytest.mark.slow
@every_entry
def test_a_refused_command_changes_no_file_of_an_earlier_run(entry, tiny, files, tmp_path):
    """A run that failed while its model loaded had renamed the good run of its name."""
    earlier = tmp_path / "x"
    (earlier / "hf").mkdir(parents=True)
    (earlier / "config.json").write_text(json.dumps(asdict(ENTRIES[entry][0].Args())))
    (earlier / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "empty").mkdir()
    before = {path: path.stat().st_mtime_ns for path in earlier.rglob("*")}
    prompts = ["--data", str(files / "16.jsonl")]
    if entry == "hybrid":
        prompts += ["--weights", "0", "0", "1"]
    for words, name in (
        ([*prompts, *SMALL, str(tmp_path / "empty")], "--model"),
        ([*prompts, *SMALL, tiny, "--resume"], "--resume"),
        (["--learning-rate", "2"], "--learning-rate"),
    ):
        own = "--output-dir", str(tmp_path), "--name", "x"
        seconds, code, output = run_command(*own, *words, program=f"{entry}.py")
        assert code in (1, 2) and seconds < 60 and "Traceback" not in output, output
        told = [line for line in output.splitlines() if "error: " in line]
        assert len(told) == 1 and name in told[0], output
        assert {p: p.stat().st_mtime_ns for p in earlier.rglob("*") if p.name != "lock"} == before
        assert not (tmp_path / "x.1").exists()


def test_a_reference_is_refreshed_every_so_many_steps_or_never(monkeypatch, capfd):
    """-1 copied the policy into it in each step: the KL term did nothing."""
    words = ["--model", "x", "--refresh-every", "-1", "--loss.kl-coef", "0.1"]
    found = refusal(words, "grpo", monkeypatch, capfd)
    assert found.strip() == "error: --refresh-every -1: must be at least 0 (never)"
