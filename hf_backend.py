# SPDX-FileCopyrightText: 2026 handful contributors (hf_backend.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Transformers' `generate` as the backend of rollout.Engine: slow, with few parts, a reference.

The problem. A fast engine has its own kernels, scheduler and loader, and each can be silently
wrong. Beside it stands the plainest sampler there is: the same model class as the trainer's, one
padded batch at a time. It also runs where vLLM does not.

How it works. It has an unsharded copy of the model: through a sharded model `generate` hangs when
ranks stop at different lengths. Prompts are padded on the left. A response ends at the first stop
id, found by its place; tokens behind it are pads that are never looked at.

What we give up: continuous batching (a batch takes as long as its longest response), paged
attention, sleep: the copy stays on the device.

Copied, with rollout.py and transformers; rollout.Engine is the way to use it.
    import torch
    from hf_backend import HfBackend
    from rollout import RolloutConfig
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2))
    model.save_pretrained("tiny")
    config = RolloutConfig(engine="hf", max_response_tokens=4)
    sizes = {"max_model_len": 8, "num_samples": 2, "stop_ids": [1], "seed": 0}
    backend = HfBackend("tiny", config, dtype=torch.float32, **sizes)
    print(list(backend.run([[5, 6]], order=[0], num_samples=2, temperature=1.0, seed=0)))
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class HfBackend:
    """Transformers' `generate` on an unsharded copy of the model; nothing sleeps."""

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
    ):
        from transformers import AutoModelForCausalLM, GenerationConfig

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config = config
        self.stop_ids = stop_ids
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        self.model.generation_config = GenerationConfig()  # none of the model's own top-p
        # generate keeps the scores of every step, [batch, V] fp32: at most 4 GiB of them.
        score_bytes = 4 * self.model.config.vocab_size * config.max_response_tokens
        room = (4 << 30) // score_bytes
        self.batch_size = max(1, min(config.max_num_seqs or num_samples, room))

    def wake_weights(self) -> None:
        """The weights have memory afterwards."""

    def wake_cache(self) -> None:
        """The KV cache has memory afterwards."""

    def forget_prefixes(self) -> None:
        """No key of an earlier policy is reused."""

    def sleep(self) -> None:
        """Memory goes back to the trainer."""

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        """The names of the parameters that got no tensor."""
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            if name not in parameters:
                rule = "is no parameter of the engine's model, or was sent before"
                raise ValueError(f"{name}: {rule}; send each by its name in the checkpoint")
            parameters.pop(name).copy_(tensor)
        return set(parameters)

    def run(
        self,
        prompts: list[list[int]],
        order: list[int],
        num_samples: int,
        temperature: float,
        seed: int,
    ) -> Iterator[list[tuple[int, Tensor, Tensor, bool]]]:
        """[(p * num_samples + g, response ids, log-probabilities, truncated), ...] as they end.

        torch is seeded already, for backends without a seed per request.
        """
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        for start in range(0, len(repeated), self.batch_size):
            batch = repeated[start : start + self.batch_size]
            ended = self._generate_batch(batch, temperature)
            yield [(index, *response) for index, response in enumerate(ended, start)]

    @torch.no_grad()
    def _generate_batch(
        self, prompts: list[list[int]], temperature: float
    ) -> Iterator[tuple[Tensor, Tensor, bool]]:
        width = max(len(prompt) for prompt in prompts)
        padded = [[0] * (width - len(p)) + p for p in prompts]  # pads on the left
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        sampling = {}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = self.model.generate(
            torch.tensor(padded, device=self.model.device),
            attention_mask=torch.tensor(mask, device=self.model.device),
            max_new_tokens=self.config.max_response_tokens,
            eos_token_id=None if self.config.ignore_eos else self.stop_ids,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **sampling,
        )
        logprobs = self.model.compute_transition_scores(
            output.sequences, output.scores, normalize_logits=True
        ).cpu()
        responses = output.sequences[:, width:].cpu()
        is_stop = torch.isin(responses, torch.tensor(self.stop_ids))
        if self.config.ignore_eos:
            is_stop = torch.zeros_like(is_stop)
        for response, stops, logprob in zip(responses, is_stop, logprobs, strict=True):
            stopped = bool(stops.any())
            length = int(stops.int().argmax()) + 1 if stopped else len(response)
            yield response[:length].clone(), logprob[:length].clone(), not stopped
