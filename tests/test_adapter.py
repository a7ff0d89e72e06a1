"""An adapter's directory is PEFT's: what is written here loads there, and the other way round."""

import json
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from test_lora import load, random_adapters, row_of
from tiny import save_tiny

import adapter
from attention import use_packed_attention
from hub import export
from logprobs import token_logprobs
from lora import LoraConfig, adapters, fill, merges
from reshard import iter_full_params

RESPONSES = [6, 7, 8, 9, 1], [10, 1], [11, 12, 1]
KINDS = {
    "all": LoraConfig(rank=3, alpha=6.0),
    "some": LoraConfig(rank=4, rank_stabilized=True, targets=("q_proj", "v_proj")),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama")


def trainers(path, config, out=None, stored=None, world_size=1):
    """The trainer's log-probabilities with random adapters, or those of `stored`; with `out` they
    and the merged model are written.
    """

    def job():
        policy = load(path, config, stored)
        if not stored:
            fill(policy, 0, random_adapters(policy))
        if out:
            adapter.write(config, adapters(policy), out / "adapter", base=path)
            weights = iter_full_params(policy, dtype=torch.float32, merges=merges(policy))
            export(weights, path, out / "hf", torch.float32)
        return token_logprobs(policy, row_of(*RESPONSES))[0].detach()

    return run_ranks(world_size, job)[0]


def answers(model):
    """Log-probabilities of a Transformers model, by packed attention."""
    use_packed_attention(model)
    with torch.no_grad():
        return token_logprobs(model, row_of(*RESPONSES))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again_and_the_merged_model_is_the_trainers(path, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    expected = trainers(path, KINDS[kind], tmp_path, world_size=2)
    config = replace(KINDS[kind], path=str(tmp_path / "adapter"))
    stored = adapter.read(config)
    assert torch.equal(trainers(path, config, stored=stored), expected)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(answers(merged), expected, rtol=0, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(path)
    assert (answers(base) - expected).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_is_written_and_what_peft_writes_loads_here(path, tmp_path, kind):
    """To 1e-4: the sums are taken in another order."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    expected = trainers(path, KINDS[kind], tmp_path)
    base = AutoModelForCausalLM.from_pretrained(path)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(answers(theirs.base_model.model), expected, rtol=0, atol=1e-4)

    torch.manual_seed(0)
    config = KINDS[kind]
    made = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(path),
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            use_rslora=config.rank_stabilized,
            target_modules=list(config.targets) or "all-linear",
            init_lora_weights=False,
            lora_dropout=0.5,
        ),
    ).eval()
    made.save_pretrained(tmp_path / "theirs")
    ours = replace(config, path=str(tmp_path / "theirs"))
    found = trainers(path, ours, stored=adapter.read(ours))
    torch.testing.assert_close(found, answers(made.base_model.model), rtol=0, atol=1e-4)


def test_another_rank_or_scale_and_more_than_plain_lora_are_refused_in_a_line(tmp_path):
    config = LoraConfig(rank=2, alpha=4.0, path=str(tmp_path / "a"))
    tensors = {"q.lora_A": torch.ones(2, 8), "q.lora_B": torch.ones(8, 2)}
    adapter.write(config, tensors, config.path, base="x")
    file = tmp_path / "a" / "adapter_config.json"
    plain = json.loads(file.read_text())
    assert adapter.read(config).keys() == tensors.keys()
    flags = "--lora.rank 2 --lora.alpha 4.0 --lora.no-rank-stabilized"
    for other in (dict(rank=4), dict(alpha=8.0), dict(rank_stabilized=True)):
        settings = dict(rank=2, alpha=4.0, path=config.path) | other
        with pytest.raises(ValueError, match=f"was trained with other settings; give {flags}"):
            adapter.read(LoraConfig(**settings))
    for change, message in (
        (dict(use_dora=True), "its use_dora is True, must be False"),
        (dict(bias="all"), "its bias is 'all', must be 'none'"),
        (dict(rank_pattern={"q": 8}), "its rank_pattern is"),
        (dict(modules_to_save=["lm_head"]), r"its modules_to_save is \['lm_head'\], must be None"),
        (dict(peft_type="LOHA"), "its peft_type is 'LOHA'"),
    ):
        file.write_text(json.dumps(plain | change))
        with pytest.raises(ValueError, match=f"--lora.path .*{message}"):
            adapter.read(config)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"--lora.path .*/a: holds no adapter_config.json with"):
        adapter.read(config)
    file.write_text(json.dumps(plain))
    (tmp_path / "a" / "adapter_model.safetensors").write_text("torn")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors \(.*header"):
        adapter.read(config)


def test_names_are_pefts_and_rank_0_writes(tmp_path):
    def job():
        return adapter.write(
            LoraConfig(rank=2), {"a.q.lora_A": torch.ones(2, 8)}, tmp_path, base="x"
        )

    run_ranks(2, job)
    assert list(load_file(tmp_path / "adapter_model.safetensors")) == [
        "base_model.model.a.q.lora_A.weight"
    ]
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q"] and settings["base_model_name_or_path"] == "x"
