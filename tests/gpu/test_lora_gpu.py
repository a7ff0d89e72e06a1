"""Adapters on a GPU: a frozen base in bf16 and adapters in fp32 in one FSDP2 group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import functools, sys, torch
import attention, logprobs, lora, model, packing, reshard, run
mesh = run.init_distributed(0, 60)
settings = model.ModelConfig(compile=sys.argv[2] == "compiled")
adapt = functools.partial(lora.attach, config=lora.LoraConfig(rank=8))
policy = model.load_policy(sys.argv[1], mesh, settings, adapt=adapt)
base = model.load_policy(sys.argv[1], mesh, settings, trainable=False)
for each in (policy, base):
    attention.use_packed_attention(each)
adapters = lora.adapters(policy)
values = {name: 0.02 * torch.randn(p.shape) for name, p in adapters.items()}
for name, p in policy.named_parameters():
    assert p.dtype == (torch.float32 if name in adapters else torch.bfloat16), name
lora.fill(policy, 0, values)
sequence = packing.sequence(torch.tensor([3, 4, 5]), torch.arange(2, 14).repeat(3))
row = packing.pack([sequence] * 4, 256)[0].to("cuda")
expected = logprobs.token_logprobs(base, row)[0].detach()
with lora.disabled(policy):
    assert torch.equal(logprobs.token_logprobs(policy, row)[0], expected)
found = logprobs.token_logprobs(policy, row)[0]
found.sum().backward()
for name, p in adapters.items():
    assert p.grad.dtype == torch.float32 and p.grad.full_tensor().abs().max() > 0, name
sampler = dict(base.named_parameters())
for bucket in reshard.iter_full_params(policy, merges=lora.merges(policy)):
    for name, x in bucket:
        sampler[name].detach().to_local().copy_(x)
assert not torch.equal(found, expected)
far = (logprobs.token_logprobs(base, row)[0] - found).abs().max().item()
assert far <= (0.02 if sys.argv[2] == "compiled" else 0.0), far
print("sampler and trainer differ by", far)
"""


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_what_is_sent_has_the_trainers_log_probabilities_to_a_bit_and_gradients_are_fp32(
    tmp_path, how
):
    """In its own process, so that no other test has compiled the layers."""
    path = save_tiny(tmp_path / "model", "qwen2", hidden_size=64, intermediate_size=96)
    job = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert job.returncode == 0, job.stderr[-3000:]
