"""Sampling from the policy: an engine that lives in the trainer's processes and runs the trainer's weights.

The problem. Sampling is most of an RL step (60 to 80 % of it with long responses), so it needs a real inference engine: paged
attention, continuous batching, CUDA graphs. In a second process, on other GPUs, half of the hardware waits for the other half.
Colocated, engine and trainer share each GPU, and the engine must give its memory back and take new weights every step.

How it works. One vLLM engine per tensor-parallel group of ranks, inside the training processes (torchrun is its launcher).
`tensor_parallel_size` consecutive ranks form one engine: with 4 ranks and size 2, ranks 0, 1 are engine 0 and 2, 3 are engine 1.
The engine's states have one owner and one way through:

    asleep --awake()--> weights --load_weights()--> ready --generate()--> ready --end of awake()--> asleep

- Level-2 sleep discards the weights, and its wake-up restores the memory, not the values; so `generate` demands `load_weights` first.
- `load_weights` wakes the KV cache last, when the trainer's buckets are gone, and resets the prefix cache: cached keys belong
  to the old policy and would be reused without a word.
Where sleep is off (CPU, or sleep_level 0) the states are the same and no memory moves.

What comes back is token ids with the log-probability of each under the tempered distribution that it was drawn from; never text.
Whether a response was cut is the engine's finish reason, never a guess from its length or its last token.

Seeds. On GPU and with tensor parallelism each request has its own seed, so a sample depends on (seed, prompt, sample) and not on
its neighbours. On CPU vLLM walks over seeded requests one by one, so one seed is set per call.

`HfEngine` has the same methods on top of Transformers' `generate`, with its own unsharded copy of the model (`generate` through a
sharded model hangs when ranks stop at different lengths). It is slower and has fewer parts: the reference for the other.

What we give up: sampling while training (asynchronous RL), multi-turn tools, top-p and top-k in training (the sampler's
distribution would be cut where the trainer's is not: the ratio is off by the mass that was cut).
Sources: Kwon 2023 (PagedAttention, arXiv:2309.06180); Sheng 2024 (HybridFlow, arXiv:2409.19256).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["vllm", "hf"] = "vllm"
    """vllm: colocated engine. hf: Transformers' generate, slower, for checking and for machines without vLLM."""
    max_response_tokens: int = 1024
    """Longest response in tokens; one that reaches it is truncated."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in training alike; above 0 and at most 2."""
    tensor_parallel_size: int = 1
    """Consecutive ranks that share one engine; must divide the number of ranks."""
    memory_fraction: float = 0.45
    """Share of the GPU's memory for the engine's weights and KV cache together; ignored if kv_cache_gb is set."""
    kv_cache_gb: float = 0.0
    """KV cache in GiB; 0: what memory_fraction leaves (on CPU 0.25)."""
    sleep_level: Literal[0, 1, 2] = 2
    """While training: 2 frees KV cache and weights, 1 keeps the weights in host memory, 0 frees nothing. CPU: 0 always."""
    max_num_seqs: int = 0
    """Requests in flight per engine; 0: as many as a step samples, at most 1024."""
    max_num_batched_tokens: int = 0
    """Tokens per engine step, prompts included; 0: 16,384 or the longest sequence."""
    length_bins: int = 0
    """Submit prompts in this many bins of expected response length, longest first, for a shorter tail; 0: in order."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8: twice the KV cache; needs the importance correction."""
    quantization: Literal["none", "fp8", "fp8_per_channel"] = "none"
    """Weights of the engine in 8 bits, quantized anew at each sync; needs the importance correction. CPU: fp8_per_channel."""
    enforce_eager: bool = False
    """No CUDA graphs: starts sooner, decodes slower. CPU: always."""
    ignore_eos: bool = False
    """Sample max_response_tokens every time, for benchmarks."""
    top_p: float = 1.0
    """Only 1: nucleus sampling would put the trainer's probabilities off by the mass that was cut."""
    top_k: int = 0
    """Only 0, for the same reason."""

    @property
    def eight_bit(self) -> bool:
        """The engine computes in 8 bits: it is another policy than the trainer's, by more than rounding."""
        return self.quantization != "none" or self.kv_cache_dtype != "auto"

    def __post_init__(self):
        if not 0 < self.temperature <= 2:
            raise ValueError(f"--rollout.temperature {self.temperature}: training samples need 0 < temperature <= 2; try 1.0")
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"--rollout.top-p {self.top_p}, --rollout.top-k {self.top_k}: training samples from the whole distribution, "
                "or the trainer's probabilities are not the sampler's; use 1.0 and 0"
            )
        if self.max_response_tokens < 1 or self.tensor_parallel_size < 1 or self.length_bins < 0:
            raise ValueError(
                f"--rollout.max-response-tokens {self.max_response_tokens}, --rollout.tensor-parallel-size "
                f"{self.tensor_parallel_size}: at least 1; --rollout.length-bins {self.length_bins}: at least 0"
            )
        if not 0 < self.memory_fraction < 1 or self.kv_cache_gb < 0:
            raise ValueError(
                f"--rollout.memory-fraction {self.memory_fraction}: between 0 and 1, try 0.45; "
                f"--rollout.kv-cache-gb {self.kv_cache_gb}: at least 0"
            )
        world = int(os.environ.get("WORLD_SIZE", 1))
        if world % self.tensor_parallel_size:
            raise ValueError(f"--rollout.tensor-parallel-size {self.tensor_parallel_size}: must divide the {world} ranks; try 1")
        if self.engine == "hf" and (self.quantization, self.kv_cache_dtype, self.tensor_parallel_size) != ("none", "auto", 1):
            raise ValueError(
                f"--rollout.engine hf has no --rollout.quantization {self.quantization}, --rollout.kv-cache-dtype "
                f"{self.kv_cache_dtype} or --rollout.tensor-parallel-size {self.tensor_parallel_size}; use --rollout.engine vllm"
            )


@dataclass(frozen=True)
class Rollout:
    """One sampled response; 1-D CPU tensors, and one log-probability per response id."""

    prompt_ids: Tensor  # [prompt tokens] int64
    response_ids: Tensor  # [response tokens] int64, the stop token included
    logprobs: Tensor  # [response tokens] fp32: log-probability of each id under the tempered distribution
    truncated: bool  # the length limit ended it

    def __post_init__(self):
        assert len(self.logprobs) == len(self.response_ids) > 0, (self.logprobs.shape, self.response_ids.shape)


def stop_token_ids(path: str, *more: int | None) -> list[int]:
    """All ids that end a response of the model at `path`: generation_config.json, config.json, and `more` (the tokenizer's)."""
    ids = set(more) - {None}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        eos = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return sorted(ids)


def make_engine(
    path: str, config: RolloutConfig, *, max_prompt_tokens: int, num_samples: int, eos_token_id: int | None, seed: int
) -> VllmEngine | HfEngine:
    """The configured engine for the model at `path`, asleep. num_samples: responses of a step over all engines. Collective."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    num_engines = world // config.tensor_parallel_size
    return (VllmEngine if config.engine == "vllm" else HfEngine)(
        path,
        config,
        max_prompt_tokens=max_prompt_tokens,
        num_samples=-(-num_samples // num_engines),
        stop_ids=stop_token_ids(path, eos_token_id),
        seed=seed,
    )


class _Engine:
    """What both engines share: the states, and the tensor that each request becomes."""

    def _set_up(self, config: RolloutConfig, stop_ids: list[int]) -> None:
        self.dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        self.config = config
        self.stop_ids = stop_ids
        self.state: Literal["asleep", "weights", "ready"] = "asleep"

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the engine's weights have memory. It must load_weights before it can generate; at the end it sleeps."""
        self._require("asleep", "awake() may not be nested")
        self._wake()
        self.state = "weights"
        yield
        # Not in a finally: after an error the engine may be in any state, and the job ends.
        self._sleep()
        self.state = "asleep"

    def load_weights(self, buckets: Iterable[list[tuple[str, Tensor]]]) -> int:
        """Bytes of the full tensors taken from `buckets` of (checkpoint name, tensor); leaves the engine ready to generate.

        Collective over the ranks that produce the buckets. Raises RuntimeError if a parameter of the engine got no tensor.
        """
        self._require(("weights", "ready"), "load_weights() needs `with engine.awake():` around it")
        num_bytes = 0

        def stream():
            nonlocal num_bytes
            for bucket in buckets:
                for name, tensor in bucket:
                    num_bytes += tensor.numel() * tensor.element_size()
                    yield name, tensor

        self._load(stream())
        if self.state == "weights":
            self._wake_cache()
        self._reset_cache()
        self.state = "ready"
        return num_bytes

    def generate_share(
        self,
        prompts: list[list[int]],
        num_samples: int,
        *,
        temperature: float | None = None,
        seed: int,
        on_finished: Callable[[int, int, Rollout], None],
    ) -> dict[int, list[Rollout]]:
        """{position in `prompts`: its num_samples rollouts} for the prompts that this rank owns; the same arguments on all ranks.

        Each engine samples a contiguous share of the prompts. Ranks of a tensor-parallel group all hold its results, so rank t
        of T owns every T-th: a group of samples is whole on one rank. on_finished(index, position, rollout) is called for owned
        ones as they end; index counts them in the order of the result.
        """
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        tp = self.config.tensor_parallel_size
        start, stop = (len(prompts) * (rank // tp + k) // (world // tp) for k in (0, 1))
        owned = range(start + rank % tp, stop, tp)

        def finished(index: int, rollout: Rollout) -> None:
            position, sample = divmod(index, num_samples)
            if start + position in owned:
                on_finished(owned.index(start + position) * num_samples + sample, start + position, rollout)

        options = dict(temperature=temperature, seed=seed + start * num_samples, on_finished=finished)
        rollouts = self.generate(prompts[start:stop], num_samples, **options) if start < stop else []
        return {p: rollouts[(p - start) * num_samples : (p - start + 1) * num_samples] for p in owned}

    @torch.no_grad()
    def verify_weights(self, buckets: Iterable[list[tuple[str, Tensor]]]) -> None:
        """Load `buckets` once more and compare: raises RuntimeError naming engine parameters that had held something else.

        Parameters are overwritten with NaN in between, so that one which the loader does not reach shows as well.
        """
        before = _fingerprints(self.model)
        if self.config.quantization == "none":
            for p in self.model.parameters():
                p.fill_(float("nan"))
        self.load_weights(buckets)
        after = _fingerprints(self.model)
        differing = [name for name in after if before[name] != after[name]]
        if differing:
            raise RuntimeError(
                f"--verify-sync: {len(differing)} of {len(after)} engine parameters do not hold the trainer's weights: {differing[:4]}"
            )

    def _require(self, states: str | tuple[str, ...], message: str) -> None:
        if self.state not in states:
            raise RuntimeError(f"{message} (the engine is {self.state})")


def _fingerprints(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Two sums over each parameter's bytes, one weighted by position: equal contents, equal sums."""
    found = {}
    for name, p in model.named_parameters():
        data = p.detach().contiguous().view(torch.uint8).flatten()
        total = weighted = 0
        for piece in data.split(1 << 26):  # int64 copies of a whole embedding would not fit
            wide = piece.to(torch.int64)
            weights = torch.arange(len(wide), device=wide.device) % 65521 + 1
            total = total + wide.sum()
            weighted = weighted * 31 + (wide * weights).sum()
        found[name] = int(total), int(weighted)
    return found


class VllmEngine(_Engine):
    """One vLLM engine over this rank's tensor-parallel group. Construction is a collective; it ends asleep."""

    def __init__(
        self, path: str, config: RolloutConfig, *, max_prompt_tokens: int, num_samples: int, stop_ids: list[int], seed: int = 0
    ):
        """num_samples: responses that a step asks of this engine; graphs are captured up to it. Raises as vLLM does."""
        self._set_up(config, stop_ids)
        self.on_gpu = torch.cuda.is_available()
        self.sleeps = self.on_gpu and config.sleep_level > 0
        self.request_seeds = self.on_gpu or config.tensor_parallel_size > 1
        self.expected_lengths: dict[int, float] = {}  # by hash of the prompt: mean length of its last responses
        self.tp_group = _tensor_parallel_group(config.tensor_parallel_size)
        max_model_len = max_prompt_tokens + config.max_response_tokens
        # In this process, and set before the import: weights are handed over as live tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with _globals_restored():
            import vllm
            import vllm._custom_ops

            if not self.on_gpu:
                vllm._custom_ops._supports_onednn = False  # packed linears refuse new weights, and round more
            self.llm = vllm.LLM(path, **_engine_arguments(config, max_model_len, num_samples, self.on_gpu, seed))
        # Deleting the engine would destroy the trainer's process group.
        self.llm.llm_engine.engine_core._finalizer.detach()
        self._sleep()

    @property
    def model(self) -> torch.nn.Module:
        """The engine's module on this rank, with fused and sliced parameters."""
        return self.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()

    def _wake(self) -> None:
        if self.sleeps:
            self.llm.wake_up(["weights"])

    def _wake_cache(self) -> None:
        if self.sleeps:
            self.llm.wake_up(["kv_cache"])

    def _sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=self.config.sleep_level)

    def _reset_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.llm.llm_engine.vllm_config):
            if self.config.quantization != "none":
                self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
                return
            # The loader alone takes a quarter of reload_weights' time, and keeps addresses for CUDA graphs as well.
            loaded = self.model.load_weights(weights)
        missing = {name for name, _ in self.model.named_parameters()} - set(loaded)
        if missing:
            raise RuntimeError(f"weight sync left {len(missing)} engine parameters as they were: {sorted(missing)[:4]}")

    def generate(
        self,
        prompts: list[list[int]],
        num_samples: int,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[Rollout]:
        """num_samples responses per prompt of token ids, sample g of prompt p at p * num_samples + g.

        temperature None: the configured one; 0: greedy. seed: same seed and prompts, same responses; None: unseeded.
        on_finished(index, rollout) is called as each response ends, while others still run. The ranks of a tensor-parallel
        group must pass the same arguments; a difference raises RuntimeError on all of them.
        """
        self._require("ready", "generate() needs load_weights() first, inside `with engine.awake():`")
        self._check_same(prompts, num_samples, temperature, seed)
        engine = self.llm.llm_engine
        with _globals_restored():
            if seed is not None:
                torch.manual_seed(seed)
            for p in self._submission_order(prompts):
                for g in range(num_samples):
                    params = self._sampling_params(len(prompts[p]), temperature, seed, p * num_samples + g)
                    engine.add_request(str(p * num_samples + g), {"prompt_token_ids": prompts[p]}, params)
            rollouts: list[Rollout | None] = [None] * (len(prompts) * num_samples)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        index = int(output.request_id)
                        rollouts[index] = _to_rollout(prompts[index // num_samples], output.outputs[0])
                        if on_finished is not None:
                            on_finished(index, rollouts[index])
        for p, prompt in enumerate(prompts):
            lengths = [len(r.response_ids) for r in rollouts[p * num_samples : (p + 1) * num_samples]]
            self.expected_lengths[hash(tuple(prompt))] = sum(lengths) / len(lengths)
        return rollouts

    def _check_same(self, *arguments) -> None:
        if self.tp_group is not None:
            seen = [None] * dist.get_world_size(self.tp_group)
            dist.all_gather_object(seen, hash(repr(arguments)), group=self.tp_group)
            if len(set(seen)) > 1:
                raise RuntimeError("ranks of one tensor-parallel group called generate() with different arguments")

    def _submission_order(self, prompts: list[list[int]]) -> list[int]:
        """Indices of prompts in the order of submission: by bins of expected response length, the longest bin first."""
        if not self.config.length_bins:
            return list(range(len(prompts)))
        # A prompt's last responses predict its next ones; for a new prompt its own length is the best guess at hand.
        expected = [self.expected_lengths.get(hash(tuple(prompt)), len(prompt)) for prompt in prompts]
        by_length = sorted(range(len(prompts)), key=lambda p: -expected[p])
        size = -(-len(prompts) // self.config.length_bins)
        bins = [sorted(by_length[start : start + size]) for start in range(0, len(prompts), size)]
        return [p for members in bins for p in members]

    def _sampling_params(self, prompt_length: int, temperature: float | None, seed: int | None, index: int):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=self.config.temperature if temperature is None else temperature,
            max_tokens=self.config.max_response_tokens,
            seed=None if seed is None or not self.request_seeds else seed + index,
            stop_token_ids=self.stop_ids,
            ignore_eos=self.config.ignore_eos,
            min_tokens=self.config.max_response_tokens if self.config.ignore_eos else 0,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,  # one list of floats instead of a dictionary per token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _to_rollout(prompt: list[int], output) -> Rollout:
    """`output`: a finished vLLM completion; finish_reason "stop" for eos, stop ids and stop strings, "length" for the limit."""
    return Rollout(
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(output.token_ids, dtype=torch.int64),
        logprobs=torch.tensor(output.logprobs.logprobs, dtype=torch.float32),
        truncated=output.finish_reason == "length",
    )


def _engine_arguments(config: RolloutConfig, max_model_len: int, num_samples: int, on_gpu: bool, seed: int) -> dict:
    max_num_seqs = config.max_num_seqs or min(1024, max(1, num_samples))
    memory = {"gpu_memory_utilization": config.memory_fraction}
    if config.kv_cache_gb or not on_gpu:
        memory["kv_cache_memory_bytes"] = int((config.kv_cache_gb or 0.25) * 2**30)
    arguments = dict(
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend="external_launcher",
        dtype="bfloat16" if on_gpu else "float32",
        quantization=None if config.quantization == "none" else config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        seed=seed,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens or 16384, max_model_len),
        logprobs_mode="processed_logprobs",  # of the tempered distribution, the one the trainer computes
        generation_config="vllm",  # none of the model's own top-p or penalties
        skip_tokenizer_init=True,
        enforce_eager=config.enforce_eager or not on_gpu,
        disable_log_stats=True,
        **memory,
    )
    if not on_gpu:
        return arguments | dict(enable_chunked_prefill=False)  # a seeded request split over two steps fails on CPU
    sizes = [1, 2, 4] + [s for s in range(8, max_num_seqs + 1, 8) if s <= 64 or s % 32 == 0]
    graphs = dict(cudagraph_capture_sizes=sorted({*sizes, max_num_seqs}))
    return arguments | dict(
        enable_sleep_mode=config.sleep_level > 0, async_scheduling=True, compilation_config=graphs
    )


def _tensor_parallel_group(size: int) -> dist.ProcessGroup | None:
    """A group for host objects over this rank's `size` consecutive ranks; None for size 1. Collective over all ranks."""
    if size == 1:
        return None
    groups = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    made = [dist.new_group(ranks, backend="gloo") for ranks in groups]
    return made[dist.get_rank() // size]


@contextlib.contextmanager
def _globals_restored() -> Iterator[None]:
    """vLLM reseeds all generators, rewrites LOCAL_WORLD_SIZE and (CPU) replaces torch.set_num_threads; undo that."""
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    states = random.getstate(), numpy_random and numpy_random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    yield
    random.setstate(states[0])
    if numpy_random:
        numpy_random.set_state(states[1])
    torch.set_rng_state(states[2])
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(num_threads)
    if local_world_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_world_size


class HfEngine(_Engine):
    """Transformers' `generate` on an unsharded copy of the model, with the methods of VllmEngine."""

    def __init__(
        self, path: str, config: RolloutConfig, *, max_prompt_tokens: int, num_samples: int, stop_ids: list[int], seed: int = 0
    ):
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._set_up(config, stop_ids)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype).to(self.device).eval()
        self.model.generation_config = GenerationConfig()  # none of the model's own top-p or penalties
        self.max_num_seqs = config.max_num_seqs or max(1, num_samples)

    def _wake(self) -> None: ...

    def _sleep(self) -> None: ...

    def _wake_cache(self) -> None: ...

    def _reset_cache(self) -> None: ...

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameters.pop(name).copy_(tensor)
        if parameters:
            raise RuntimeError(f"weight sync left {len(parameters)} engine parameters as they were: {sorted(parameters)[:4]}")

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        num_samples: int,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[Rollout]:
        """As VllmEngine.generate."""
        self._require("ready", "generate() needs load_weights() first, inside `with engine.awake():`")
        temperature = self.config.temperature if temperature is None else temperature
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        rollouts: list[Rollout] = []
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            if seed is not None:
                torch.manual_seed(seed)
            for start in range(0, len(repeated), self.max_num_seqs):
                for rollout in self._generate_batch(repeated[start : start + self.max_num_seqs], temperature):
                    rollouts.append(rollout)
                    if on_finished is not None:
                        on_finished(len(rollouts) - 1, rollout)
        return rollouts

    def _generate_batch(self, prompts: list[list[int]], temperature: float) -> Iterator[Rollout]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)  # pads on the left
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        recorder = _LogprobRecorder(temperature)
        options = dict(do_sample=temperature > 0)
        if temperature > 0:
            options |= dict(temperature=1.0, top_k=0, top_p=1.0)  # the recorder has applied the temperature
        output = self.model.generate(
            ids,
            attention_mask=mask,
            logits_processor=[recorder],
            max_new_tokens=self.config.max_response_tokens,
            eos_token_id=None if self.config.ignore_eos else self.stop_ids,
            pad_token_id=0,
            **options,
        )
        logprobs = recorder.finish(output).cpu()
        responses = output[:, width:].cpu()
        stops = torch.isin(responses, torch.tensor(self.stop_ids)) & (not self.config.ignore_eos)
        for prompt, response, stop, logprob in zip(prompts, responses, stops, logprobs, strict=True):
            stopped = bool(stop.any())
            length = int(stop.int().argmax()) + 1 if stopped else len(response)
            yield Rollout(torch.tensor(prompt), response[:length].clone(), logprob[:length].clone(), not stopped)


class _LogprobRecorder:
    """A logits processor that applies the temperature and keeps the log-probability of what is then sampled."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.log_p: Tensor | None = None  # [B, V] of the newest position: one position is alive, not all
        self.chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.log_p is not None:
            self._record(input_ids)
        scores = scores.float() / (self.temperature or 1.0)
        self.log_p = scores.log_softmax(-1)
        return scores

    def _record(self, input_ids: Tensor) -> None:
        self.chosen.append(self.log_p.gather(-1, input_ids[:, -1:]))

    def finish(self, sequences: Tensor) -> Tensor:
        """Log-probabilities [B, new tokens] of the finished sequences [B, prompt + new tokens]."""
        self._record(sequences)
        return torch.cat(self.chosen, dim=1)
