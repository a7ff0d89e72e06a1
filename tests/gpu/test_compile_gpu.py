"""The layers' compilation on a GPU: once for all row sizes."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# A norm over 16,384 x 576 numbers is large to the compiler, one over 4,096 x 576 is small.
PROGRAM = """
import contextlib, sys
import torch
import attention, logprobs, model, packing, prefix, run
from batch import BatchConfig
from transformers import LlamaConfig, LlamaForCausalLM
heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 3}
config = LlamaConfig(vocab_size=999, hidden_size=576, intermediate_size=1536, **heads)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
policy = model.load_policy(sys.argv[1], run.init_distributed(0, 60))
attention.use_packed_attention(policy)
compiled = []
torch._dynamo.callback_handler.register_start_callback(compiled.append)
share = prefix.share if sys.argv[2] == "shared" else None
rows = packing.rows_of_all_sizes(BatchConfig(tokens_per_row=16384), 1024, share)
logprobs.warm_up([policy], rows, lambda model: contextlib.nullcontext(), kinds=[True])
before = len(compiled)
for row in rows[1:4]:
    logprobs.token_logprobs(policy, row.to("cuda"))[0].sum().backward()
print("layers", torch._dynamo.utils.counters["stats"]["unique_graphs"], len(compiled) - before)
"""


@pytest.mark.parametrize("layout", ["plain", "shared"])
def test_a_layer_is_compiled_once_for_all_row_sizes(tmp_path, layout):
    command = [sys.executable, "-c", PROGRAM, tmp_path / "model", layout]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert job.returncode == 0, job.stderr[-4000:]
    num_graphs, num_later = job.stdout.split("layers ")[1].split()
    # The layer, and the head's two functions.
    assert int(num_graphs) == 3, job.stdout
    assert int(num_later) == 0, job.stdout
