"""An engine and a trainer's policy side by side on a rank, and what is compared between them."""

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attention import use_packed_attention
from logprobs import token_logprobs
from model import load_policy
from packing import pack, sequence
from reshard import sync_weights
from rollout import Engine, RolloutConfig
from vllm_backend import VllmBackend

EOS, ALSO_STOPS = 1, 12  # of the tiny models' vocabulary of 14
LIMIT = 12
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11], [4, 4, 4, 4]]
FP32 = dict(dtype=torch.float32)


def differences(policy, rollouts, temperature=1.0):
    """The trainer's log-probabilities less those that the engine reports, at all response tokens:
    [R].
    """
    row = pack(
        [sequence(r.prompt_ids, r.response_ids, reported=r.logprobs) for r in rollouts], 1 << 20
    )[0]
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy, row, temperature=temperature)
    return (logprobs - row.fields["reported"])[row.fields["response_mask"]]


class Kept:
    """What a rank keeps: a trainer's policy and an engine of each kind of model."""

    def __init__(self, paths, tensor_parallel_size=1, make=VllmBackend, num_samples=64):
        self.paths = paths
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        kind = "vllm" if make is VllmBackend else "hf"
        # Fewer at a time than the tests ask for, and prompts in chunks.
        small = dict(max_num_seqs=16, max_num_batched_tokens=64) if kind == "vllm" else {}
        config = RolloutConfig(
            kind, LIMIT, temperature=0.7, tensor_parallel_size=tensor_parallel_size, **small
        )
        sizes = dict(max_prompt_tokens=256, num_samples=num_samples, stop_ids=[EOS, ALSO_STOPS])
        self.policies = {name: load_policy(path, mesh) for name, path in paths.items()}
        self.engines = {name: Engine(make, path, config, **sizes) for name, path in paths.items()}
        for policy in self.policies.values():
            use_packed_attention(policy)

    @contextlib.contextmanager
    def ready(self, kind="qwen2", sync=True, **settings):
        """The engine of that kind, with the policy's weights and with these settings of its
        configuration.
        """
        engine = self.engines[kind]
        config = engine.config
        engine.config = engine.backend.config = replace(config, **settings)
        with engine.awake():
            if sync:
                sync_weights(self.policies[kind], engine, **FP32)
            else:
                engine.state = "ready"  # as on CPU, where nothing is lost in between
            yield engine
        engine.config = engine.backend.config = config

    def sample(
        self,
        prompts=PROMPTS,
        num_samples=8,
        *,
        kind="qwen2",
        sync=True,
        ignore_eos=False,
        seed=0,
        **options,
    ):
        """Rollouts of the engine of that kind."""
        with self.ready(kind, sync, ignore_eos=ignore_eos) as engine:
            return engine.generate(prompts, num_samples, seed=seed, **options)

    def move(self, kind, seed):
        """Change all weights of the policy by 1 %, alike on any number of ranks up to the noise
        itself.
        """
        generator = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
        for p in self.policies[kind].parameters():
            local = p.to_local().data
            local.mul_(1 + 0.01 * torch.randn(local.shape, generator=generator))

    def gap(self, rollouts, kind="qwen2", temperature=0.7):
        """Largest difference between the log-probabilities that the engine reports and the
        trainer's.
        """
        return differences(self.policies[kind], rollouts, temperature).abs().max().item()


def facts(rollouts):
    """What can be compared for equality."""
    return [(r.response_ids.tolist(), r.truncated) for r in rollouts]
