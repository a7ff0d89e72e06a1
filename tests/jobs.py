"""Small training jobs of the entry scripts in forked ranks, and what they wrote."""

import functools
import json
import math
import random
import sys

import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import grpo
from hf_backend import HfBackend
from rewards import Scorer
from run import from_json

TEMPERATURE = 0.7

# In a fork, which is there sooner than a new interpreter; most groups have some spread by the
# first.
REWARDS = {
    "spread": lambda response: sum(map(ord, response)) % 5 / 4,
    "low": lambda response: float(response[:1] in ("0", "1", "2", "3", "4")),
    "quarter": lambda response: 0.25,
    "broken": lambda response: [0.0, 1.0, None, math.nan, "1", 1j][sum(map(ord, response)) % 6],
    "odd": lambda response, number: float(number % 2 and len(response) % 2),
}


def settings(tiny, files, out, entry=grpo, **changes):
    """Args of a small job of grpo.py, or of ppo.py: 4 prompts x 4 samples of up to 6 tokens by the
    plain engine.
    """
    base = dict(
        model_path=tiny,
        data_paths=(str(files / "16.jsonl"),),
        num_steps=2,
        learning_rate=1e-2,
        run=dict(output_dir=str(out), name="run", save_minutes=0.0),
        batch=dict(prompts_per_step=4, group_size=4, num_minibatches=2, tokens_per_row=512),
        data=dict(max_prompt_tokens=16),
        optim=dict(warmup_steps=0),
        log=dict(plot_every=0, samples_per_step=1000),
        rollout=dict(engine="hf", max_response_tokens=6, temperature=TEMPERATURE),
        reward=dict(functions=("spread",), num_workers=1),
    )
    for name, value in changes.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return from_json(entry.Args(), base)


def train(args, world_size=1, **replaced):
    """The run's directory after the entry's main(args); `replaced`: stand-ins by "module.name"."""
    entry = sys.modules[type(args).__module__]
    replaced = {"run.init_distributed": joined} | replaced

    def job():
        entry.Scorer = functools.partial(Scorer, callables=REWARDS)
        for name, value in replaced.items():
            module, _, attribute = name.partition(".")
            assert hasattr(sys.modules[module], attribute), name
            setattr(sys.modules[module], attribute, value)
        try:
            entry.main(args)
        except Exception:
            sys.excepthook(*sys.exc_info())  # which saves the run
            raise

    run_ranks(world_size, job, timeout_s=120)
    return args.run.directory


def joined(seed, timeout_s):
    """init_distributed's result for ranks that are already joined."""
    torch.manual_seed(seed)
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def samples(directory, step=None):
    lines = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    return [sample for sample in lines if step in (None, sample["step"])]


def weights(directory):
    return load_file(directory / "hf" / "model.safetensors")


def largest_difference(found, expected):
    """Over all tensors, as a share of the largest value."""
    assert found.keys() == expected.keys()
    scale = max(x.abs().max().item() for x in expected.values())
    assert scale > 0
    return max((found[name] - x).abs().max().item() for name, x in expected.items()) / scale


def distance(found, expected):
    """Of all weights together, in the Euclidean sense."""
    return sum((found[name] - x).double().square().sum() for name, x in expected.items()) ** 0.5


class Scripted(HfBackend):
    """Its responses follow from the prompt alone: the same ones on any number of ranks."""

    def run(self, prompts, order, num_samples, temperature, seed):
        for index in range(len(prompts) * num_samples):
            prompt = prompts[index // num_samples]
            draw = random.Random(repr((prompt, index % num_samples)))
            num = draw.choice([1, 2, self.config.max_response_tokens])
            ids = torch.tensor([draw.randrange(2, 14) for _ in range(num)])
            logprobs = torch.tensor([draw.uniform(-3.5, -1.5) for _ in range(num)])
            yield [(index, ids, logprobs, num > 2)]


SCRIPTED = {"hf_backend.HfBackend": Scripted}
