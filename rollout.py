# SPDX-FileCopyrightText: 2026 handful contributors (rollout.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Sampling from the policy: an engine in the trainer's processes that runs the trainer's weights.

The problem. Sampling is most of an RL step, so it needs a real inference engine: paged attention,
continuous batching, CUDA graphs. Sharing each GPU with the trainer, it must give its memory back
and take new weights every step.

How it works. There is one engine per tensor-parallel group of consecutive ranks, inside the
training processes: with 4 ranks and size 2, ranks 0 and 1 are engine 0, ranks 2 and 3 engine 1.
`Engine` owns what must not go wrong: states, shares, seeds. It holds a backend that samples.

States have one order, and no way round it:
    asleep --awake()--> weights --load_weights()--> ready --generate()--> ready
                                                      ready --end of awake()--> asleep
- Level-2 sleep discards the weights; waking restores their memory alone. So `generate` demands
  `load_weights`.
- `load_weights` wakes the KV cache last, when the trainer's buckets are gone. It resets the prefix
  cache: cached keys belong to the old policy and would be reused without a word.
Where sleep is off (CPU, --rollout.sleep-level 0) the states are the same and no memory moves.

Each engine samples a contiguous share of the prompts; each rank of its group then owns every T-th
prompt of the share, with all its samples: a group is whole on one rank. Seeds follow from the
caller's and the place of a sample. What comes back is token ids, each with its log-probability
under the tempered distribution that it was drawn from.

What we give up: sampling while training; tools; top-p and top-k. They would cut the sampler's
distribution, not the trainer's, and every ratio would be off by the mass that was cut.
Source: Sheng 2024 (HybridFlow, arXiv:2409.19256).

Copied, with hf_backend.py and transformers; reshard.sync_weights(model, engine) takes shards.
    from hf_backend import HfBackend
    from rollout import Engine, RolloutConfig
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2))
    model.save_pretrained("tiny")
    config = RolloutConfig(engine="hf", max_response_tokens=4)
    engine = Engine(HfBackend, "tiny", config, max_prompt_tokens=8, num_samples=2, stop_ids=[1])
    with engine.awake():
        engine.load_weights([list(model.named_parameters())])
        print(engine.generate([[5, 6, 7]], num_samples=2))
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """vllm: colocated engine; hf: Transformers' generate, slower, a reference; auto: vllm where it
    is installed."""
    max_response_tokens: int = 1024
    """Longest response in tokens; one that reaches it is truncated."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in training alike; from 0.01 to 2."""
    tensor_parallel_size: int = 1
    """Consecutive ranks that share one engine; must divide the number of ranks."""
    memory_fraction: float = 0.45
    """Share of the GPU's memory for the engine's weights and KV cache; unused with kv_cache_gb."""
    kv_cache_gb: float = 0.0
    """KV cache in GiB; 0: what memory_fraction leaves (on CPU 0.25)."""
    sleep_level: Literal[0, 1, 2] = 2
    """While training: 2 frees KV cache and weights, 1 keeps weights on the host, 0 frees none."""
    max_num_seqs: int = 0
    """Requests in flight per engine; 0: as many as a step samples, at most 1024."""
    max_num_batched_tokens: int = 0
    """Tokens per engine step, prompts included; 0: 16,384."""
    length_bins: int = 0
    """Submit prompts in this many bins of expected response length, longest first; 0: in order."""
    scheduler: Literal["closed", "vllm"] = "closed"
    """closed: for batches that no request joins later, up to 4.8 times as fast; vllm: its own."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8: twice the KV cache; needs the importance correction."""
    quantization: Literal["none", "fp8", "fp8_per_channel"] = "none"
    """Engine weights in 8 bits; needs the importance correction. On a CPU: fp8_per_channel."""
    ignore_eos: bool = False
    """Sample max_response_tokens every time, for benchmarks."""
    top_p: float = 1.0
    """Only 1: nucleus sampling would put every ratio off by the mass that was cut."""

    @property
    def eight_bit(self) -> bool:
        """The engine computes in 8 bits: it is another policy, by more than rounding."""
        return self.quantization != "none" or self.kv_cache_dtype != "auto"

    @property
    def backend(self) -> Literal["vllm", "hf"]:
        """The backend by name: `engine`, or what "auto" chooses on this machine."""
        if self.engine == "auto":
            return "vllm" if importlib.util.find_spec("vllm") else "hf"
        return self.engine

    def __post_init__(self):
        world = int(os.environ.get("WORLD_SIZE", 1))
        size = self.tensor_parallel_size
        is_divisor = 1 <= size <= world and world % size == 0
        for name, kind in get_type_hints(RolloutConfig).items():
            if get_origin(kind) is Literal:
                choices = get_args(kind)
                self._require(name, getattr(self, name) in choices, f"one of {choices}")
        # Below 0.01 vLLM takes 0.01, and the trainer's logits overflow.
        self._require("temperature", 0.01 <= self.temperature <= 2, "from 0.01 to 2; try 1.0")
        self._require("top_p", self.top_p == 1, "1: the trainer scores whole distributions")
        self._require("max_response_tokens", self.max_response_tokens >= 1, "at least 1; try 1024")
        self._require("tensor_parallel_size", is_divisor, f"a divisor of the {world} ranks; try 1")
        self._require("memory_fraction", 0 < self.memory_fraction < 1, "between 0 and 1; try 0.45")
        for name in ("length_bins", "kv_cache_gb", "max_num_seqs", "max_num_batched_tokens"):
            self._require(name, 0 <= getattr(self, name) < 1e9, "at least 0, and below 1e9")
        if not torch.cuda.is_available():
            self._require("quantization", self.quantization != "fp8", "fp8_per_channel on a CPU")
        if self.backend == "hf":
            is_plain = size == 1 and not self.eight_bit
            only = "vllm (installed): hf has neither tensor parallelism nor 8 bits"
            self._require("engine", is_plain, only)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            flag = name.replace("_", "-")
            raise ValueError(f"--rollout.{flag} {getattr(self, name)}: must be {rule}")


@dataclass(frozen=True)
class Rollout:
    """One sampled response; 1-D CPU tensors, and one log-probability per response id."""

    prompt_ids: Tensor  # [prompt tokens] int64
    response_ids: Tensor  # [response tokens] int64, the stop token included
    logprobs: Tensor  # [response tokens] fp32, of the tempered distribution it was drawn from
    truncated: bool  # the length limit ended it

    def __post_init__(self):
        shapes = self.logprobs.shape, self.response_ids.shape
        assert len(self.logprobs) == len(self.response_ids) > 0, shapes


class Engine:
    """States, shares and seeds over a backend. Construction is a collective; it ends asleep.

    make_backend: vllm_backend.VllmBackend, hf_backend.HfBackend, or a class with their methods.
    num_samples: responses of a step over all engines. stop_ids: token ids that end a response.
    """

    def __init__(
        self,
        make_backend: Callable,
        path: str,
        config: RolloutConfig,
        *,
        max_prompt_tokens: int,
        num_samples: int,
        stop_ids: list[int],
        seed: int = 0,
    ):
        world = dist.get_world_size() if dist.is_initialized() else 1
        is_half = torch.cuda.is_available() or config.quantization != "none"
        self.config = config
        self.dtype = torch.bfloat16 if is_half else torch.float32
        self.max_model_len = max_prompt_tokens + config.max_response_tokens
        self.state: Literal["asleep", "weights", "ready", "interrupted"] = "asleep"
        self.holds_weights = False  # all that the last whole load_weights() brought
        is_lost = torch.cuda.is_available() and config.sleep_level == 2
        # From one awake() to the next. 8-bit weights are loaded as a whole.
        self.keeps_weights = config.backend == "hf" or not (is_lost or config.eight_bit)
        # By hash of a prompt: the length of its last response.
        self.expected_lengths: dict[int, int] = {}
        self.backend = make_backend(
            path,
            config,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            num_samples=-(-num_samples * config.tensor_parallel_size // world),
            stop_ids=stop_ids,
            seed=seed,
        )

    @property
    def model(self) -> torch.nn.Module:
        """The engine's module on this rank; vLLM's has fused and sliced parameters."""
        return self.backend.model

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the engine's weights have memory; at the end it sleeps.

        It must load_weights before it can generate. After an exception it is put to sleep by the
        next awake(): a job ends by the exception, a session goes on.
        """
        self._require("asleep interrupted", "awake() may not be nested")
        if self.state == "interrupted":
            self.backend.sleep()
        self.backend.wake_weights()
        self.holds_weights = self.holds_weights and self.keeps_weights
        self.state = "weights"
        try:
            yield
        finally:
            self.state = "interrupted"
        self.backend.sleep()
        self.state = "asleep"

    def load_weights(
        self, buckets: Iterable[list[tuple[str, Tensor]]], *, partial: bool = False
    ) -> int:
        """Bytes taken from `buckets` of (checkpoint name, full tensor); leads to ready.

        Collective if making the buckets is. RuntimeError if a parameter got no tensor; partial: it
        then stays as it is, which holds_weights must allow.
        """
        self._require("weights ready", "load_weights() needs `with engine.awake():` around it")
        sizes: list[int] = []

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in itertools.chain.from_iterable(buckets):
                sizes.append(tensor.numel() * tensor.element_size())
                yield name, tensor

        assert self.holds_weights or not partial, "a sleep has discarded the others"
        missing = sorted(self.backend.load(stream()))
        if missing and not partial:
            kept = f"{len(missing)} engine parameters as they were: {missing[:4]}"
            raise RuntimeError(f"weight sync left {kept}")
        if self.state == "weights":
            self.backend.wake_cache()
        self.backend.forget_prefixes()
        self.holds_weights = True
        self.state = "ready"
        return sum(sizes)

    def generate(
        self,
        prompts: list[list[int]],
        num_samples: int,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        on_finished: Callable[[list[tuple[int, Rollout]]], None] | None = None,
    ) -> list[Rollout]:
        """num_samples responses per prompt of token ids, sample g of prompt p at p * G + g.

        temperature None: the configured one; 0: greedy. seed: the same seed and prompts give the
        same responses; None: unseeded. on_finished([(index, rollout), ...]) is called with those
        that ended at one time, while others still run.
        """
        self._require("ready", "generate() needs load_weights() first, inside `engine.awake()`")
        for prompt in prompts:
            if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
                rule = "must be a list of token ids, at least one, as tokenizer(text).input_ids"
                raise ValueError(f"prompt {prompt!r:.80}: {rule}")
        temperature = self.config.temperature if temperature is None else temperature
        seed = int(torch.randint(1 << 31, ())) if seed is None else seed
        rollouts: list[Rollout | None] = [None] * (len(prompts) * num_samples)
        order = self._submission_order(prompts)
        made = [torch.tensor(prompt) for prompt in prompts]
        num_garbled = 0
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):  # the trainer's own draws go on as they were
            torch.manual_seed(seed)
            for ended in self.backend.run(prompts, order, num_samples, temperature, seed):
                num_garbled += _num_not_finite(ended)
                for index, ids, logprobs, truncated in ended:
                    prompt = made[index // num_samples]
                    rollouts[index] = Rollout(prompt, ids, logprobs, truncated)
                if on_finished is not None:
                    on_finished([(index, rollouts[index]) for index, *_ in ended])
        if num_garbled:
            what = f"log-probabilities of {num_garbled} of {len(rollouts)} responses"
            print(f"warning: the sampler's {what} are not finite: it computes garbage", flush=True)
        for prompt, last in zip(prompts, rollouts[num_samples - 1 :: num_samples], strict=True):
            self.expected_lengths[hash(tuple(prompt))] = len(last.response_ids)
        return rollouts

    def generate_share(
        self,
        prompts: list[list[int]],
        num_samples: int,
        *,
        temperature: float | None = None,
        seed: int,
        on_finished: Callable[[list[tuple[int, int, Rollout]]], None] | None = None,
    ) -> dict[int, list[Rollout]]:
        """{position in `prompts`: its num_samples rollouts} for the prompts that this rank owns.

        The same arguments on all ranks; a difference raises RuntimeError on all. Engines sample
        contiguous shares. All ranks of a tensor-parallel group hold its results; rank t of T owns
        every T-th prompt. on_finished([(index, position, rollout), ...]) is called as owned ones
        end; index counts in the result's flat order.
        """
        has_ranks = dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if has_ranks else (0, 1)
        if not _agree(prompts, num_samples, temperature, seed):
            raise RuntimeError("the ranks called generate_share() with different arguments")
        size = self.config.tensor_parallel_size
        num_engines = world // size
        number = rank // size
        start = len(prompts) * number // num_engines
        stop = len(prompts) * (number + 1) // num_engines
        owned = range(start + rank % size, stop, size)

        def finished(ended: list[tuple[int, Rollout]]) -> None:
            own = []
            for index, rollout in ended:
                position = start + index // num_samples
                if position in owned:
                    place = owned.index(position) * num_samples + index % num_samples
                    own.append((place, position, rollout))
            if own:
                on_finished(own)

        if start == stop:
            return {}
        rollouts = self.generate(
            prompts[start:stop],
            num_samples,
            temperature=temperature,
            seed=seed + start * num_samples,
            on_finished=finished if on_finished is not None else None,
        )
        firsts = {position: (position - start) * num_samples for position in owned}
        return {position: rollouts[i : i + num_samples] for position, i in firsts.items()}

    def _submission_order(self, prompts: list[list[int]]) -> list[int]:
        """Indices of prompts by bins of expected response length, the bin of the longest first."""
        # A prompt's last response predicts its next ones; a new prompt's own length must do.
        known = self.expected_lengths
        expected = [known.get(hash(tuple(prompt)), len(prompt)) for prompt in prompts]
        by_length = sorted(range(len(prompts)), key=lambda p: -expected[p])
        size = -(-len(prompts) // max(1, self.config.length_bins))
        bins = [by_length[i : i + size] for i in range(0, len(prompts), size)]
        return [p for each in bins for p in sorted(each)]

    def _require(self, states: str, message: str) -> None:
        if self.state not in states.split():
            raise RuntimeError(f"{message} (the engine is {self.state})")


def _num_not_finite(ended: list[tuple[int, Tensor, Tensor, bool]]) -> int:
    """Of the responses."""
    if torch.isfinite(torch.cat([logprobs for _, _, logprobs, _ in ended])).all():
        return 0
    return sum(not bool(logprobs.isfinite().all()) for _, _, logprobs, _ in ended)


def _agree(*values: object) -> bool:
    """Whether all ranks have the same values; a hash travels, whatever the number of prompts."""
    if not dist.is_initialized():
        return True
    mine = hashlib.sha256(repr(values).encode()).hexdigest()
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return len(set(everyone)) == 1
