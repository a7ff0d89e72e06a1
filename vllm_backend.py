# SPDX-FileCopyrightText: 2026 handful contributors (vllm_backend.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""vLLM inside the training processes: the fast backend of rollout.Engine.

The problem. vLLM is a server that owns its GPU, its weights and its processes. Here it must live in
the trainer's process, take the trainer's tensors, compute the trainer's probabilities, and give its
memory back after each rollout.

How it works. What is asked of vLLM, and why:
    external launcher     the ranks that torchrun started are its tensor-parallel workers
    one process           weights are handed over as live tensors
    sleep mode            level 2 frees KV cache and weights, level 1 keeps weights in host memory
    processed logprobs    of the tempered distribution, the one that the trainer computes
    fp32 logits           rounded to bf16 they would be off by up to 0.06
    fp32 residual         the stream that all layers add to, where the trainer keeps it in fp32
    FINAL_ONLY            one output a request, when it has ended
    a scheduler           of the caller's, for --rollout.scheduler closed (scheduler.py)
On a GPU and with tensor parallelism each request has its own seed, so a sample depends on (seed,
prompt, sample) and not on its neighbours. On a CPU vLLM walks over seeded requests one by one, so
one seed is set per call.

The residual stream. vLLM adds to it inside its RMSNorm kernels, in bf16. A subclass of its norms,
registered through its own out-of-tree registry, keeps it in fp32. That holds for models whose
residual goes through an RMSNorm; Granite, OLMo and Phi add elsewhere. Engines with 8-bit weights
keep bf16. On SmolLM2 the log-probabilities of sampler and trainer then differ by a third less.

What we give up: vLLM's server, its tokenizer, speculative decoding, LoRA kernels.
Source: Kwon 2023 (PagedAttention, arXiv:2309.06180). vLLM 0.26 to 0.32.

Copied, with rollout.py, vllm and transformers. For all engines of the process it sets
VLLM_ENABLE_V1_MULTIPROCESSING=0 and changes the norms in bf16. Make your process group before.
    from rollout import Engine, RolloutConfig
    from transformers import GPT2Config, GPT2LMHeadModel
    from vllm_backend import VllmBackend
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=2))
    model.save_pretrained("tiny")
    config = RolloutConfig(max_response_tokens=4)
    engine = Engine(VllmBackend, "tiny", config, max_prompt_tokens=8, num_samples=2, stop_ids=[1])
    with engine.awake():
        engine.load_weights([list(model.named_parameters())])
        print(engine.generate([[5, 6, 7]], num_samples=2))
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What vLLM raises where it has no kernel, no room or no rule for a model.
FAILURES = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError)
FAILURES += (TypeError, ValueError)
AT_ONCE = 64  # responses that are handed over together


class VllmBackend:
    """One vLLM engine over this rank's tensor-parallel group; it ends its construction asleep.

    config: rollout.RolloutConfig. num_samples: responses of a step on this engine. make_scheduler:
    returns a class for vLLM's scheduler_cls, or None for vLLM's own; asked where config.scheduler
    is "closed" (scheduler.closed_batch_scheduler). Construction is a collective. ValueError, in one
    line, if vLLM cannot sample from this model here.
    """

    def __init__(
        self,
        path: str,
        config,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        num_samples: int,
        stop_ids: list[int],
        seed: int,
        make_scheduler: Callable[[], type | None] | None = None,
    ):
        self.config = config
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.max_num_seqs = config.max_num_seqs or min(1024, num_samples)
        self.stop_ids = stop_ids
        # What ranks share on a CPU: of this job, by the port of torchrun's store, and this engine.
        engine = int(os.environ.get("RANK", 0)) // config.tensor_parallel_size
        self.memory_name = f"handful{os.environ.get('MASTER_PORT', 0)}.{engine}"
        self.inner_ids: dict[int, str] = {}  # vLLM's names of the requests that run
        self.on_gpu = torch.cuda.is_available()
        self.sleeps = self.on_gpu and config.sleep_level > 0
        self.fp32_residual = dtype == torch.bfloat16 and config.quantization == "none"
        _name_rank()
        # In this process, and set before the import.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # vLLM 0.32 sets its level only after it has logged that Triton has no CPU backend.
        logging.getLogger("vllm").setLevel(level.upper())
        with _globals_restored(), warnings.catch_warnings():
            # vLLM looks at each name of each module; this one warns whoever looks at it.
            warnings.filterwarnings("ignore", ".*torch[.]distributed[.]reduce_op", FutureWarning)
            try:
                self._build(path, seed, make_scheduler if config.scheduler == "closed" else None)
                self._warm_up(num_samples)
            except FAILURES as error:
                raise ValueError(_reason(error)) from error
        self._clean_up()
        self.sleep()

    def _build(self, path: str, seed: int, make_scheduler: Callable | None) -> None:
        import vllm._custom_ops
        from vllm.model_executor.models import registry

        if not self.on_gpu:
            # Packed linears refuse new weights, and round more.
            vllm._custom_ops._supports_onednn = False
            # It binds all memory of this process, the trainer's too, to one NUMA node, and warns.
            torch.ops._C.init_cpu_memory_env = lambda nodes: None
            _name_shared_memory(self.memory_name)
        # It warms up penalties, bad words and more, request by request, for 16 s. Nobody here asks
        # for any of it.
        params = self._sampling_params(1.0)
        vllm.SamplingParams.for_sampler_warmup = staticmethod(lambda: params)
        # It looks at the model's class in a new process, to leave the GPU untouched in this one,
        # where the trainer has used it already: 20 s at a first start.
        registry._run_in_subprocess = lambda look: look()
        if self.fp32_residual:
            _keep_residual_in_fp32()
        scheduler = make_scheduler() if make_scheduler else None
        self.llm = vllm.LLM(path, seed=seed, scheduler_cls=scheduler, **self._arguments())
        self.keeps_logprobs = scheduler is not None
        for module in self.model.modules():
            if "do_not_compile" in vars(module):
                # vLLM decorates Transformers' own classes, the trainer's too.
                type(module).do_not_compile = True

    def _arguments(self) -> dict[str, Any]:
        config = self.config
        arguments = {
            "tensor_parallel_size": config.tensor_parallel_size,
            "distributed_executor_backend": "external_launcher",
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": None if config.quantization == "none" else config.quantization,
            "kv_cache_dtype": config.kv_cache_dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(
                config.max_num_batched_tokens or 16384, self.max_model_len
            ),
            "gpu_memory_utilization": config.memory_fraction,
            "logprobs_mode": "processed_logprobs",
            "hf_overrides": {"head_dtype": "float32"},
            "generation_config": "vllm",  # none of the model's own top-p or penalties
            # vLLM keeps compiled models by configuration.
            "additional_config": {"fp32_residual": self.fp32_residual},
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if config.kv_cache_gb or not self.on_gpu:
            arguments["kv_cache_memory_bytes"] = int((config.kv_cache_gb or 0.25) * 2**30)
        if self.on_gpu:
            arguments["compilation_config"] = {"cudagraph_capture_sizes": self._graph_sizes()}
            arguments["async_scheduling"] = True
            arguments["enable_sleep_mode"] = config.sleep_level > 0
        else:
            arguments["enforce_eager"] = True
            # A seeded request whose prompt is split over two steps fails on CPU.
            arguments["enable_chunked_prefill"] = False
        return arguments

    def _graph_sizes(self) -> list[int]:
        """Batch sizes whose decode step is captured: fine where batches are small."""
        largest = self.max_num_seqs
        middle = [size for size in range(8, largest, 8) if size <= 64 or size % 32 == 0]
        return sorted({1, 2, 4, *middle, largest})

    def _warm_up(self, num_samples: int) -> None:
        """Kernels are compiled at their first use: before step 0, not in it."""
        params = self._sampling_params(1.0)
        params.max_tokens = 2
        for index in range(num_samples):
            self._add(index, [0], params, seed=0)
        list(self._finish_all())

    def _clean_up(self) -> None:
        # All ranks of the engine have opened what they share. A job that is killed leaves no name.
        for file in Path("/dev/shm").glob(f"{self.memory_name}-*-cpushm_*"):
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                file.unlink()
        finalizer = getattr(self.llm.llm_engine.engine_core, "_finalizer", None)  # none in 0.26
        if finalizer is not None:
            finalizer.detach()  # deleting the engine would destroy the trainer's process group

    @property
    def model(self) -> torch.nn.Module:
        """The engine's module on this rank, with fused and sliced parameters."""
        return self.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()

    def wake_weights(self) -> None:
        """The weights have memory afterwards; after level-2 sleep they are garbage."""
        if self.sleeps:
            # The trainer's cached blocks count as used: the wake-up would run out of memory.
            torch.cuda.empty_cache()
            self._wake("weights")

    def wake_cache(self) -> None:
        """The KV cache has memory afterwards."""
        if self.sleeps:
            self._wake("kv_cache")

    def _wake(self, part: str) -> None:
        try:
            self.llm.wake_up([part])
        except RuntimeError as error:  # out of memory, as a rule; the job ends, and gives all back
            why = f"the engine's {part} did not wake ({' '.join(str(error).split()):.200})"
            given = f"--rollout.memory-fraction {self.config.memory_fraction}"
            raise RuntimeError(f"{given}: {why}; lower it, or give --offload") from error

    def forget_prefixes(self) -> None:
        """No key of an earlier policy is reused."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def sleep(self) -> None:
        """Memory goes back to the trainer; requests that an exception left running are dropped."""
        if self.inner_ids:
            self.llm.llm_engine.abort_request([str(index) for index in self.inner_ids])
            self.inner_ids.clear()
        if self.sleeps:
            self.llm.sleep(level=self.config.sleep_level)

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        """The names of the engine's parameters that got no tensor; none with 8-bit weights."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.llm.llm_engine.vllm_config):
            if self.config.quantization != "none":
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                return set()
            # The loader alone takes a quarter of reload_weights' time, and keeps addresses for CUDA
            # graphs as well.
            loaded = self.model.load_weights(weights)
        return {name for name, _ in self.model.named_parameters()} - set(loaded)

    def run(
        self,
        prompts: list[list[int]],
        order: list[int],
        num_samples: int,
        temperature: float,
        seed: int,
    ) -> Iterator[list[tuple[int, Tensor, Tensor, bool]]]:
        """[(p * num_samples + g, response ids, log-probabilities, truncated), ...] as they end.

        Prompts are submitted by `order`.
        """
        own_seeds = self.on_gpu or self.config.tensor_parallel_size > 1
        params = self._sampling_params(temperature)
        for p in order:
            for index in range(p * num_samples, (p + 1) * num_samples):
                self._add(index, prompts[p], params, seed + index if own_seeds else None)
        yield from self._finish_all()

    def _add(self, index: int, prompt: list[int], params, seed: int | None) -> None:
        own = copy.copy(params)
        own.seed = seed
        known = {"type": "token", "prompt_token_ids": prompt}  # vLLM need not look what it is
        self.inner_ids[index] = self.llm.llm_engine.add_request(str(index), known, own)

    def _finish_all(self) -> Iterator[list[tuple[int, Tensor, Tensor, bool]]]:
        """Runs the engine until all requests have ended; what ended, step by step."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            ended = [output for output in engine.step() if output.finished]
            for i in range(0, len(ended), AT_ONCE):  # the first are scored while others come
                yield [self._result(output) for output in ended[i : i + AT_ONCE]]

    def _result(self, output) -> tuple[int, Tensor, Tensor, bool]:
        index = int(output.request_id)
        response = output.outputs[0]
        inner_id = self.inner_ids.pop(index)
        if self.keeps_logprobs:
            logprobs = self.scheduler.take_logprobs(inner_id)
        else:
            logprobs = torch.tensor(response.logprobs.logprobs)
        # The end token, stop ids and stop strings are all "stop".
        truncated = response.finish_reason == "length"
        return index, torch.tensor(response.token_ids), logprobs, truncated

    @property
    def scheduler(self) -> Any:
        """vLLM's, in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def _sampling_params(self, temperature: float):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            temperature=temperature,
            max_tokens=self.config.max_response_tokens,
            stop_token_ids=[] if self.config.ignore_eos else self.stop_ids,
            ignore_eos=self.config.ignore_eos,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,  # one list of floats instead of a dictionary per token
            detokenize=False,
            skip_clone=True,  # vLLM need not copy each request's deeply: nobody changes them
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _name_rank() -> None:
    """What vLLM reads of torchrun's variables, for a process that was started without it."""
    if os.environ.keys() >= {"RANK", "LOCAL_RANK"}:
        return
    if dist.is_initialized() and dist.get_world_size() > 1:
        rule = "set them as torchrun does, before the engine is made"
        raise ValueError(f"vLLM reads RANK and LOCAL_RANK of the environment: {rule}")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    if not dist.is_initialized():  # vLLM makes the process group
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", str(port))


def _reason(error: BaseException) -> str:
    """Why vLLM does not sample from a model, and what to do, in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    why = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    at = f"{os.path.basename(place.filename)}:{place.lineno}"
    advice = "if memory is short, lower --rollout.memory-fraction, else try --rollout.engine hf"
    return f"--rollout.engine vllm: does not take the model ({why}, {at}); {advice}"


@contextlib.contextmanager
def _globals_restored() -> Iterator[None]:
    """vLLM reseeds torch, rewrites LOCAL_WORLD_SIZE and replaces torch.set_num_threads."""
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(num_threads)
    os.environ["LOCAL_WORLD_SIZE"] = local_world_size


def _name_shared_memory(name: str) -> None:
    """From now on the names of what ranks share on a CPU begin with `name`.

    vLLM gives them the same name in every job of a host: one that starts meanwhile would join it.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def make_group_name(communicator) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        return f"{name}-{communicator.unique_name}-[{ranks}]-cpushm"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def _keep_residual_in_fp32() -> None:
    """From now on vLLM's norms, which add to the residual stream too, keep it in fp32."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    def add_and_normalize(norm, x, residual, offset: float):
        stream = x.float() + residual
        size = getattr(norm, "variance_size_override", None)
        square = stream[..., :size].square().mean(-1, keepdim=True)
        weight = norm.weight.float() + offset
        normal = stream * torch.rsqrt(square + norm.variance_epsilon) * weight
        return normal.to(x.dtype), stream

    class Fp32RMSNorm(RMSNorm):
        def forward_native(self, x, residual=None):
            if residual is None:
                return super().forward_native(x)
            return add_and_normalize(self, x, residual, offset=0.0)

    class Fp32GemmaRMSNorm(GemmaRMSNorm):
        def forward_native(self, x, residual=None):
            if residual is None:
                return super().forward_native(x)
            return add_and_normalize(self, x, residual, offset=1.0)  # its weights are less 1

    for norm, replacement in ((RMSNorm, Fp32RMSNorm), (GemmaRMSNorm, Fp32GemmaRMSNorm)):
        if norm.__name__ not in op_registry_oot:
            norm.register_oot(replacement)
