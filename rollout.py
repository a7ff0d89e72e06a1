"""Sampling from the policy: an engine that lives in the trainer's processes and runs the trainer's
weights.

The problem. Sampling is most of an RL step, so it needs a real inference engine: paged attention,
continuous batching, CUDA graphs. Sharing each GPU with the trainer, it must give its memory back
and take new weights every step.

How it works. One vLLM engine per tensor-parallel group of consecutive ranks, inside the training
processes: with 4 ranks and size 2, ranks 0, 1 are engine 0 and ranks 2, 3 engine 1. An engine's
states have one owner, and one order:
    asleep --awake()--> weights --load_weights()--> ready --generate()--> ready --end of awake()-->
    asleep
- Level-2 sleep discards the weights; waking restores their memory alone. So `generate` demands
  `load_weights`.
- `load_weights` wakes the KV cache last, when the trainer's buckets are gone, and resets the
  prefix cache: cached keys belong to the old policy and would be reused without a word.
Where sleep is off (CPU, sleep_level 0) the states are the same and no memory moves. What comes back
is token ids, each with its log-probability under the tempered distribution that it was drawn from.
On GPU and with tensor parallelism each request has its own seed, so a sample depends on (seed,
prompt, sample) and not on its neighbours. On CPU vLLM walks over seeded requests one by one, so one
seed is set per call. In bf16 the logits are fp32, and the residual stream too where an RMSNorm adds
to it (not in Granite, OLMo, Phi, nor with 8-bit weights): so sampler and trainer differ less.

`HfEngine` has the same methods on top of Transformers' `generate`, with its own unsharded copy of
the model (`generate` through a sharded model hangs when ranks stop at different lengths). Slower,
with fewer parts: a reference.

Given up: sampling while training, tools, top-p and top-k (the sampler's distribution would be cut,
ours not). Sources: Kwon 2023 (PagedAttention, arXiv:2309.06180); Sheng 2024 (HybridFlow,
arXiv:2409.19256).
"""

from __future__ import annotations

import contextlib
import itertools
import os
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
    """vllm: colocated engine. hf: Transformers' generate, slower, for checking and for machines
    without vLLM.
    """
    max_response_tokens: int = 1024
    """Longest response in tokens; one that reaches it is truncated."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in training alike; above 0 and at most 2."""
    tensor_parallel_size: int = 1
    """Consecutive ranks that share one engine; must divide the number of ranks."""
    memory_fraction: float = 0.45
    """Share of the GPU's memory for the engine's weights and KV cache together; ignored if
    kv_cache_gb is set.
    """
    kv_cache_gb: float = 0.0
    """KV cache in GiB; 0: what memory_fraction leaves (on CPU 0.25)."""
    sleep_level: Literal[0, 1, 2] = 2
    """While training: 2 frees KV cache and weights, 1 keeps weights in host memory, 0 frees
    nothing. CPU: 0.
    """
    max_num_seqs: int = 0
    """Requests in flight per engine; 0: as many as a step samples, at most 1024."""
    max_num_batched_tokens: int = 0
    """Tokens per engine step, prompts included; 0: 16,384."""
    length_bins: int = 0
    """Submit prompts in this many bins of expected response length, longest first, for a shorter
    tail; 0: in order.
    """
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8: twice the KV cache; needs the importance correction."""
    quantization: Literal["none", "fp8", "fp8_per_channel"] = "none"
    """Engine weights in 8 bits, quantized anew at each sync; needs the importance correction. CPU:
    fp8_per_channel.
    """
    ignore_eos: bool = False
    """Sample max_response_tokens every time, for benchmarks."""
    top_p: float = 1.0
    """Only 1: nucleus sampling would put the trainer's probabilities off by the mass that was cut.
    """

    @property
    def eight_bit(self) -> bool:
        """The engine computes in 8 bits: it is another policy than the trainer's, by more than
        rounding.
        """
        return self.quantization != "none" or self.kv_cache_dtype != "auto"

    def __post_init__(self):
        world = int(os.environ.get("WORLD_SIZE", 1))
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        only_vllm = "vllm: hf has neither tensor parallelism nor 8 bits"
        rules = [
            (
                "temperature",
                0 < self.temperature <= 2,
                "above 0 and at most 2 in training; try 1.0",
            ),
            (
                "top_p",
                self.top_p == 1,
                "1: the trainer's probabilities are those of the whole distribution",
            ),
            ("max_response_tokens", self.max_response_tokens >= 1, "at least 1; try 1024"),
            (
                "tensor_parallel_size",
                self.tensor_parallel_size in divisors,
                f"a divisor of the {world} ranks; try 1",
            ),
            ("memory_fraction", 0 < self.memory_fraction < 1, "between 0 and 1; try 0.45"),
            *(
                (n, getattr(self, n) >= 0, "at least 0")
                for n in ("length_bins", "kv_cache_gb", "max_num_seqs")
            ),
            (
                "engine",
                self.engine == "vllm" or (self.tensor_parallel_size, self.eight_bit) == (1, False),
                only_vllm,
            ),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(
                    f"--rollout.{name.replace('_', '-')} {getattr(self, name)}: must be {rule}"
                )


@dataclass(frozen=True)
class Rollout:
    """One sampled response; 1-D CPU tensors, and one log-probability per response id."""

    prompt_ids: Tensor  # [prompt tokens] int64
    response_ids: Tensor  # [response tokens] int64, the stop token included
    logprobs: (
        Tensor  # [response tokens] fp32: log-probability of each id under the tempered distribution
    )
    truncated: bool  # the length limit ended it

    def __post_init__(self):
        assert len(self.logprobs) == len(self.response_ids) > 0, (
            self.logprobs.shape,
            self.response_ids.shape,
        )


class _Engine:
    """The states, and what both engines promise. num_samples: responses of a step over all engines."""

    def __init__(
        self,
        path: str,
        config: RolloutConfig,
        *,
        max_prompt_tokens: int,
        num_samples: int,
        stop_ids: list[int],
        seed=0,
    ):
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.num_samples = -(-num_samples * config.tensor_parallel_size // world)
        self.max_model_len = max_prompt_tokens + config.max_response_tokens
        self.config, self.stop_ids = config, stop_ids
        self.dtype = (
            torch.bfloat16
            if torch.cuda.is_available() or config.quantization != "none"
            else torch.float32
        )
        self.state: Literal["asleep", "weights", "ready"] = "asleep"
        self.fp32_residual = self.dtype == torch.bfloat16 and config.quantization == "none"
        self.llm, self.sleeps = (
            None,
            False,
        )  # vLLM's object, where that is the engine; whether memory moves
        self.expected_lengths: dict[
            int, int
        ] = {}  # by hash of the prompt: length of its response that ended last
        self._build(path, seed)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the engine's weights have memory. It must load_weights before it can generate;
        then it sleeps.
        """
        self._require("asleep", "awake() may not be nested")
        if self.sleeps:
            # The trainer's cached blocks count as used: without this the engine's wake-up runs out
            # of memory.
            torch.cuda.empty_cache()
            self.llm.wake_up(["weights"])
        self.state = "weights"
        yield
        # not in a finally: after an error the engine may be in any state, and the job ends
        self._sleep()

    def load_weights(self, buckets: Iterable[list[tuple[str, Tensor]]]) -> int:
        """Bytes taken from `buckets` of (checkpoint name, full tensor); the engine is then ready to
        generate.

        Collective, as far as making the buckets is. Raises RuntimeError if a parameter of the
        engine got no tensor.
        """
        self._require("weights ready", "load_weights() needs `with engine.awake():` around it")
        sizes: list[int] = []

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in itertools.chain.from_iterable(buckets):
                sizes.append(tensor.numel() * tensor.element_size())
                yield name, tensor

        if missing := self._load(stream()):
            raise RuntimeError(
                f"weight sync left {len(missing)} engine parameters as they were: {sorted(missing)[:4]}"
            )
        if self.sleeps and self.state == "weights":
            self.llm.wake_up(["kv_cache"])
        if self.llm is not None and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self.state = "ready"
        return sum(sizes)

    def generate(
        self,
        prompts: list[list[int]],
        num_samples: int,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[Rollout]:
        """num_samples responses per prompt of token ids, sample g of prompt p at p * num_samples +
        g.

        temperature None: the configured one; 0: greedy. seed: same seed and prompts, same
        responses; None: unseeded. on_finished(index, rollout) is called as each response ends,
        while others still run.
        """
        self._require(
            "ready", "generate() needs load_weights() first, inside `with engine.awake():`"
        )
        temperature = self.config.temperature if temperature is None else temperature
        rollouts: list[Rollout | None] = [None] * (len(prompts) * num_samples)

        def finish(index: int, rollout: Rollout) -> None:
            rollouts[index] = rollout
            self.expected_lengths[hash(tuple(prompts[index // num_samples]))] = len(
                rollout.response_ids
            )
            if on_finished is not None:
                on_finished(index, rollout)

        seed = int(torch.randint(1 << 31, ())) if seed is None else seed
        with _globals_restored():
            torch.manual_seed(seed)
            self._run(prompts, num_samples, temperature, seed, finish)
        return rollouts

    def generate_share(
        self,
        prompts: list[list[int]],
        num_samples: int,
        *,
        temperature: float | None = None,
        seed: int,
        on_finished: Callable[[int, int, Rollout], None],
    ) -> dict[int, list[Rollout]]:
        """{position in `prompts`: its num_samples rollouts} for the prompts that this rank owns.

        The same arguments on all ranks; a difference raises RuntimeError on all. Engines sample
        contiguous shares. All ranks of a tensor-parallel group hold its results; rank t of T owns
        every T-th prompt, so groups are whole on a rank. on_finished(index, position, rollout) is
        called as owned ones end; index counts in the result's order.
        """
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if world > 1:
            asked = [None] * world
            dist.all_gather_object(asked, repr((prompts, num_samples, temperature, seed)))
            if len(set(asked)) > 1:
                raise RuntimeError("the ranks called generate_share() with different arguments")
        tp = self.config.tensor_parallel_size
        start, stop = (len(prompts) * (rank // tp + k) // (world // tp) for k in (0, 1))
        owned = range(start + rank % tp, stop, tp)

        def finished(index: int, rollout: Rollout) -> None:
            position = start + index // num_samples
            if position in owned:
                on_finished(
                    owned.index(position) * num_samples + index % num_samples, position, rollout
                )

        how = dict(temperature=temperature, seed=seed + start * num_samples, on_finished=finished)
        rollouts = self.generate(prompts[start:stop], num_samples, **how) if start < stop else []
        return {
            p: rollouts[(p - start) * num_samples : (p - start + 1) * num_samples] for p in owned
        }

    def _sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=self.config.sleep_level)
        self.state = "asleep"

    def _require(self, states: str, message: str) -> None:
        if self.state not in states.split():
            raise RuntimeError(f"{message} (the engine is {self.state})")


class VllmEngine(_Engine):
    """One vLLM engine over this rank's tensor-parallel group. Construction is a collective; it ends
    asleep.
    """

    def _build(self, path: str, seed: int) -> None:
        self.on_gpu = torch.cuda.is_available()
        # In this process, and set before the import: weights are handed over as live tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with _globals_restored():
            import vllm._custom_ops

            if not self.on_gpu:
                vllm._custom_ops._supports_onednn = (
                    False  # packed linears refuse new weights, and round more
                )
            if self.fp32_residual:
                _keep_residual_in_fp32()
            self.llm = vllm.LLM(path, seed=seed, **self._arguments())
            for module in self.model.modules():
                if "do_not_compile" in vars(
                    module
                ):  # vLLM decorates Transformers' own classes, the trainer's too
                    type(module).do_not_compile = True
            warm_up = self._sampling_params(1.0, 0)
            warm_up.max_tokens = (
                2  # kernels are compiled at their first use: before step 0, not in it
            )
            self.llm.generate(
                [{"prompt_token_ids": [0]}] * self.num_samples, warm_up, use_tqdm=False
            )
        # What ranks share on CPU has the same name in every job; left behind by a killed one, it
        # would fail the next.
        for file in [] if self.on_gpu else Path("/dev/shm").glob("*-cpushm_*"):
            with contextlib.suppress(
                FileNotFoundError, PermissionError
            ):  # another rank was faster; another user's
                file.unlink()
        if finalizer := getattr(self.llm.llm_engine.engine_core, "_finalizer", None):
            # deleting the engine would destroy the trainer's process group (0.26 has none)
            finalizer.detach()
        self.sleeps = self.on_gpu and self.config.sleep_level > 0
        self._sleep()

    def _arguments(self) -> dict:
        config = self.config
        max_num_seqs = config.max_num_seqs or min(1024, self.num_samples)
        arguments = dict(
            **dict(
                tensor_parallel_size=config.tensor_parallel_size,
                distributed_executor_backend="external_launcher",
            ),
            dtype=str(self.dtype).removeprefix("torch."),
            quantization=None if config.quantization == "none" else config.quantization,
            **dict(
                kv_cache_dtype=config.kv_cache_dtype,
                max_model_len=self.max_model_len,
                max_num_seqs=max_num_seqs,
            ),
            max_num_batched_tokens=max(config.max_num_batched_tokens or 16384, self.max_model_len),
            gpu_memory_utilization=config.memory_fraction,
            # of the tempered distribution, the one the trainer computes
            logprobs_mode="processed_logprobs",
            hf_overrides={
                "head_dtype": "float32"
            },  # logits rounded to bf16 would be off by up to 0.06
            generation_config="vllm",  # none of the model's own top-p or penalties
            additional_config={
                "fp32_residual": self.fp32_residual
            },  # vLLM keeps compiled models by configuration
            **dict(skip_tokenizer_init=True, disable_log_stats=True, use_tqdm_on_load=False),
        )
        if config.kv_cache_gb or not self.on_gpu:
            arguments["kv_cache_memory_bytes"] = int((config.kv_cache_gb or 0.25) * 2**30)
        if not self.on_gpu:  # a seeded request whose prompt is split over two steps fails on CPU
            return arguments | dict(enforce_eager=True, enable_chunked_prefill=False)
        sizes = {
            1,
            2,
            4,
            *(s for s in range(8, max_num_seqs, 8) if s <= 64 or s % 32 == 0),
            max_num_seqs,
        }
        graphs = dict(
            compilation_config=dict(cudagraph_capture_sizes=sorted(sizes)), async_scheduling=True
        )
        return arguments | graphs | dict(enable_sleep_mode=config.sleep_level > 0)

    @property
    def model(self) -> torch.nn.Module:
        """The engine's module on this rank, with fused and sliced parameters."""
        return self.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.llm.llm_engine.vllm_config):
            if self.config.quantization != "none":
                self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
                return set()
            # The loader alone takes a quarter of reload_weights' time, and keeps addresses for CUDA
            # graphs as well.
            loaded = self.model.load_weights(weights)
        return {name for name, _ in self.model.named_parameters()} - set(loaded)

    def _run(
        self, prompts, num_samples: int, temperature: float, seed: int, finish: Callable
    ) -> None:
        engine = self.llm.llm_engine
        own_seeds = self.on_gpu or self.config.tensor_parallel_size > 1
        for p in self._submission_order(prompts):
            for index in range(p * num_samples, (p + 1) * num_samples):
                params = self._sampling_params(temperature, seed + index if own_seeds else None)
                engine.add_request(str(index), {"prompt_token_ids": prompts[p]}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    index, response = int(output.request_id), output.outputs[0]
                    truncated = (
                        response.finish_reason == "length"
                    )  # eos, stop ids and stop strings are all "stop"
                    ids, logprobs = (
                        torch.tensor(response.token_ids),
                        torch.tensor(response.logprobs.logprobs),
                    )
                    finish(
                        index,
                        Rollout(
                            torch.tensor(prompts[index // num_samples]), ids, logprobs, truncated
                        ),
                    )

    def _submission_order(self, prompts: list[list[int]]) -> list[int]:
        """Indices of prompts in the order of submission: by bins of expected response length, the
        longest bin first.
        """
        # A prompt's last response predicts its next ones; for a new prompt its own length is the
        # best guess at hand.
        expected = [
            self.expected_lengths.get(hash(tuple(prompt)), len(prompt)) for prompt in prompts
        ]
        by_length = sorted(range(len(prompts)), key=lambda p: -expected[p])
        size = -(
            -len(prompts) // max(1, self.config.length_bins)
        )  # one bin: the order they came in
        return [p for i in range(0, len(prompts), size) for p in sorted(by_length[i : i + size])]

    def _sampling_params(self, temperature: float, seed: int | None):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        stop_ids = [] if self.config.ignore_eos else self.stop_ids
        stop = dict(max_tokens=self.config.max_response_tokens, stop_token_ids=stop_ids)
        # Of the sampled token alone, in one list of floats instead of a dictionary per token.
        output = dict(
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return SamplingParams(
            temperature=temperature, seed=seed, ignore_eos=self.config.ignore_eos, **stop, **output
        )


def _keep_residual_in_fp32() -> None:
    """vLLM's norms, which add to the residual stream too, keep it in fp32 from now on, in this
    process's engines.
    """
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    class Fp32Residual:
        def forward_native(self, x, residual=None):
            if residual is None:
                return super().forward_native(x)
            stream = x.float() + residual
            square = (
                stream[..., : getattr(self, "variance_size_override", None)]
                .square()
                .mean(-1, keepdim=True)
            )
            weight = self.weight.float() + isinstance(
                self, GemmaRMSNorm
            )  # whose weights are what is added to 1
            return (stream * torch.rsqrt(square + self.variance_epsilon) * weight).to(
                x.dtype
            ), stream

    for norm in (RMSNorm, GemmaRMSNorm):
        if norm.__name__ not in op_registry_oot:
            norm.register_oot(type("Fp32Residual", (Fp32Residual, norm), {}))


@contextlib.contextmanager
def _globals_restored() -> Iterator[None]:
    """vLLM reseeds torch, rewrites LOCAL_WORLD_SIZE and replaces torch.set_num_threads; sampling
    draws numbers.
    """
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    with torch.random.fork_rng(
        devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []
    ):
        yield
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(num_threads)
    os.environ["LOCAL_WORLD_SIZE"] = local_world_size


class HfEngine(_Engine):
    """Transformers' `generate` on an unsharded copy of the model, with the methods of VllmEngine."""

    def _build(self, path: str, seed: int) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype).to(device).eval()
        self.model.generation_config = (
            GenerationConfig()
        )  # none of the model's own top-p or penalties
        # generate keeps the scores of every step, [batch, V] fp32: at most 4 GiB of them.
        score_bytes = 4 * self.model.config.vocab_size * self.config.max_response_tokens
        self.batch_size = max(
            1, min(self.config.max_num_seqs or self.num_samples, (4 << 30) // score_bytes)
        )

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameters.pop(name).copy_(tensor)
        return set(parameters)

    def _run(
        self, prompts, num_samples: int, temperature: float, seed: int, finish: Callable
    ) -> None:
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        for start in range(0, len(repeated), self.batch_size):
            batch = repeated[start : start + self.batch_size]
            for index, rollout in enumerate(self._generate_batch(batch, temperature), start):
                finish(index, rollout)

    @torch.no_grad()
    def _generate_batch(self, prompts: list[list[int]], temperature: float) -> Iterator[Rollout]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor(
            [[0] * (width - len(p)) + p for p in prompts], device=self.model.device
        )  # pads on the left
        mask = torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.model.device
        )
        sampling = (
            dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else {}
        )
        stop_ids = None if self.config.ignore_eos else self.stop_ids
        stop = dict(
            max_new_tokens=self.config.max_response_tokens, eos_token_id=stop_ids, pad_token_id=0
        )
        result = dict(return_dict_in_generate=True, output_scores=True)
        output = self.model.generate(ids, attention_mask=mask, **sampling, **stop, **result)
        logprobs = self.model.compute_transition_scores(
            output.sequences, output.scores, normalize_logits=True
        ).cpu()
        responses = output.sequences[:, width:].cpu()
        stops = torch.isin(responses, torch.tensor(self.stop_ids)) & (not self.config.ignore_eos)
        for prompt, response, stop, logprob in zip(
            prompts, responses, stops, logprobs, strict=True
        ):
            stopped = bool(stop.any())
            length = int(stop.int().argmax()) + 1 if stopped else len(response)
            yield Rollout(
                torch.tensor(prompt),
                response[:length].clone(),
                logprob[:length].clone(),
                not stopped,
            )
