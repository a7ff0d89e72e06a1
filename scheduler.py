# SPDX-FileCopyrightText: 2026 handful contributors (scheduler.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""A vLLM scheduler for closed batches: a decode step costs a few array operations.

The problem. vLLM's scheduler looks at each request twice a step. With 512 requests and a model of
135 M parameters a step took 19 ms on an H200; the GPU worked 3 of them. A rollout does not need
that care: all requests are there from the start, and each takes one token a step until it ends.

How it works. While requests wait, read their prompts or ask for anything unusual, AsyncScheduler
does everything. When all that run only decode, a window opens. A row of it is a request, a column
a step; here 7 is a stop id, and the length limits leave 4, 4 and 2 tokens:
    step     0  1  2  3
    row 0    5  3  7        ends by its stop id
    row 1    2  2  9  4     ends by its limit
    row 2    6  1           ends by its limit
In a window
- blocks for the next TOKENS_AHEAD tokens of each row are allocated at once, and not hashed;
- what the model runner is told is what it was told the step before, with positions one larger;
- a step's ids and log-probabilities are one assignment each, and one comparison finds the rows
  that end. A request's output leaves once, when it ends.
The Request objects lag behind until the window closes. It closes when a request arrives, when the
pool lacks blocks, when the engine pauses. It stays open while requests only wait for a place, until
FREE_SHARE of the places is free: else it would open and close with each response that ends.

The same tokens come out, bit for bit, as long as a sample does not depend on its neighbours.
Log-probabilities stay here: vLLM would append them to Python lists one by one. take_logprobs()
returns those of a request that has ended, if it asked for the sampled token's alone.
What we give up: vLLM's scheduler interface is not public, so versions that were not tested keep
vLLM's own. Requests with stop strings, grammars, minimum lengths, more log-probabilities, adapters
or images never enter a window. Source: vLLM's Scheduler and AsyncScheduler, 0.26 and 0.32.

Copied, with vllm, VLLM_ENABLE_V1_MULTIPROCESSING=0 and a model in the directory tiny:
    from scheduler import closed_batch_scheduler
    from vllm import LLM
    LLM("tiny", scheduler_cls=closed_batch_scheduler(), gpu_memory_utilization=0.4)
"""

from __future__ import annotations

import itertools
import os
import re
from array import array
from typing import Any

import torch
from torch import Tensor

TESTED = ((0, 26), (0, 32))  # versions of vLLM: what lies between is taken
TOKENS_AHEAD = 512  # a row's blocks are allocated for so many tokens at a time
FREE_SHARE = 1 / 8  # of the places: with fewer free, those who wait for a place go on waiting


def closed_batch_scheduler() -> type | None:
    """A class for vLLM's `scheduler_cls`; None, and a line that says so, for an untested vLLM."""
    import vllm
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = tuple(int(part) for part in found.groups()) if found else (0, 0)
    if not min(TESTED) <= version <= max(TESTED):
        if os.environ.get("RANK", "0") == "0":
            print(f"vLLM {vllm.__version__} keeps its own scheduler: ours knows 0.26 to 0.32")
        return None

    class ClosedBatchScheduler(ClosedBatch, AsyncScheduler):
        """AsyncScheduler with windows."""

    return ClosedBatchScheduler


class Window:
    """Requests that decode in lockstep, R rows; tensors [R], or [steps, R]."""

    def __init__(self, requests: list, limits: list[int]):
        num_outputs = [r.num_output_tokens + r.num_output_placeholders for r in requests]
        params = [r.sampling_params for r in requests]
        self.requests = requests
        self.row_of = {request.request_id: row for row, request in enumerate(requests)}
        # Before step 0, tokens in flight included.
        self.num_outputs = torch.tensor(num_outputs)
        self.num_computed = torch.tensor([r.num_computed_tokens for r in requests])
        self.num_left = torch.tensor(limits) - self.num_outputs  # steps, by the length limits
        self.alive = torch.ones(len(requests), dtype=torch.bool)
        self.stops = [{p.eos_token_id, *(p.stop_token_ids or ())} - {None} for p in params]
        self.any_stop = torch.tensor(sorted(set().union(*self.stops)), dtype=torch.int64)
        shape = max(0, int(self.num_left.max())), len(requests)
        self.ids = torch.empty(shape, dtype=torch.int32)
        self.logprobs = torch.empty(shape, dtype=torch.float32)
        self.scheduled = 0  # steps, as the next two
        self.received = 0
        self.allocated = 0
        self.list_rows()
        self._order: list[str] = []
        self._order_rows = self.rows

    def list_rows(self) -> None:
        """The rows of the next step, and what a SchedulerOutput says of them that stays."""
        self.rows = (self.alive & (self.num_left > self.scheduled)).nonzero()[:, 0]
        left = self.num_left[self.rows]
        self.req_ids = [self.requests[row].request_id for row in self.rows.tolist()]
        self.one_each = dict.fromkeys(self.req_ids, 1)
        self.no_blocks = [None] * len(self.req_ids)
        self.listed_until = int(left.min()) if len(left) else self.scheduled

    def extent(self) -> tuple[Tensor, Tensor]:
        """(tokens of each row that is listed, tokens that it may still write) before this step."""
        num_tokens = self.num_computed[self.rows] + self.scheduled
        return num_tokens, self.num_left[self.rows] - self.scheduled

    def rows_of(self, req_ids: list[str]) -> Tensor:
        """Rows in the order of the model runner, which is the same for many steps."""
        if req_ids != self._order:
            self._order = req_ids
            self._order_rows = torch.tensor([self.row_of[name] for name in req_ids])
        return self._order_rows

    def record(self, step: int, rows: Tensor, ids: Tensor, logprobs: Tensor | None) -> Tensor:
        """Keeps a step's results; returns which of them may end a request: [len(rows)]."""
        self.ids[step, rows] = ids.int()
        if logprobs is not None:
            self.logprobs[step, rows] = logprobs
        self.received = step + 1
        ends = (self.num_left[rows] == step + 1) | torch.isin(ids, self.any_stop)
        return ends & self.alive[rows]

    def end(self, row: int) -> None:
        """The row is scheduled no more."""
        self.alive[row] = False
        self.listed_until = self.scheduled


class ClosedBatch:
    """Windows over AsyncScheduler, which must come behind it among a class's bases."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.window: Window | None = None
        self.window_steps = 0
        self.other_steps = 0
        groups = self.kv_cache_config.kv_cache_groups
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._withheld: list[tuple[int, Any]] = []  # (client, output) of windows that closed
        self._logprobs: dict[str, list[Tensor]] = {}
        self._is_plain = not self._has_extras()

    def _has_extras(self) -> bool:
        """The engine may do what a window does not know."""
        config = self.vllm_config
        names = ["use_pp", "log_stats", "enable_kv_cache_events", "has_mamba_layers"]
        names += ["is_encoder_decoder", "defer_block_free"]
        extras = [getattr(self, name) for name in names]
        extras += [config.speculative_config, config.lora_config]
        extras += [config.kv_transfer_config, config.ec_transfer_config]
        # Not in all versions.
        extras.append(getattr(self, "aux_output_connector", None))
        extras.append(getattr(config.model_config, "enable_return_routed_experts", False))
        extras.append(getattr(config.model_config, "return_sampling_mask", False))
        is_single = self.dcp_world_size == 1 and self.num_sampled_tokens_per_step == 1
        return any(extras) or not is_single or self.finished_req_ids_dict is not None

    def schedule(self, *args, **kwargs) -> Any:
        """The next step's SchedulerOutput."""
        is_closed = self._is_closed()
        if self.window is None and is_closed and self._is_plain:
            self._open()
        window = self.window
        if window is not None:
            if window.scheduled >= window.listed_until:
                window.list_rows()
            needs_blocks = len(window.rows) > 0 and window.scheduled >= window.allocated
            if is_closed and not (needs_blocks and self._num_steps(*window.extent()) == 0):
                self.window_steps += 1
                blocks = self._allocate(window) if needs_blocks else window.no_blocks
                return self._next_step(window, blocks)
            self._close()
        self.other_steps += 1
        return super().schedule(*args, **kwargs)

    def _is_closed(self) -> bool:
        """No request will join those that run."""
        num_running = len(self.running)
        # By the interface, since versions have different queues. Negative: the engine is paused.
        num_waiting = self.get_num_unfinished_requests() - num_running
        num_free = self.max_num_running_reqs - num_running
        enough = min(num_waiting, int(FREE_SHARE * self.max_num_running_reqs) + 1)
        return num_running > 0 and (num_waiting == 0 or num_free < enough)

    def _num_steps(self, num_tokens: Tensor, num_left: Tensor) -> int:
        """Steps for which the pool has blocks, for rows of num_tokens [R]; 0 if below 16."""
        num_free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        num_steps = TOKENS_AHEAD
        while num_steps >= 16:
            ends = num_tokens + num_left.clamp(max=num_steps)
            # From ceil(tokens / size) blocks to ceil(ends / size).
            needed = [(-num_tokens // size) - (-ends // size) for size in self._block_sizes]
            if sum(int(each.sum()) for each in needed) <= num_free:
                return num_steps
            num_steps //= 2
        return 0

    def _open(self) -> None:
        """A window, if all that run do nothing but decode and the pool has blocks."""
        if not all(map(_only_decodes, self.running)):
            return
        room = self.max_model_len
        limits = [min(r.max_tokens, room - r.num_prompt_tokens) for r in self.running]
        window = Window(list(self.running), limits)
        if len(window.ids) and self._num_steps(*window.extent()):
            self.window = window

    def _allocate(self, window: Window) -> list[tuple[list[int], ...] | None]:
        """New block ids of each row, for its next steps."""
        num_steps = self._num_steps(*window.extent())
        in_flight = window.scheduled - window.received
        blocks = []
        for row in window.rows.tolist():
            request = window.requests[row]
            left = int(window.num_left[row]) - window.scheduled
            # Not beyond what came back: steps in flight read blocks that a sliding window leaves.
            request.num_computed_tokens = int(window.num_computed[row]) + window.received
            count = in_flight + min(num_steps, left)
            new = self.kv_cache_manager.allocate_slots(request, count, delay_cache_blocks=True)
            blocks.append(new.get_block_ids(allow_none=True))
        window.allocated = window.scheduled + num_steps
        return blocks

    def _next_step(self, window: Window, blocks: list):
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        self.current_step += 1
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = self.finished_req_ids
        output.preempted_req_ids = self.reset_preempted_req_ids
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()
        output.num_common_prefix_blocks = [0] * len(self._block_sizes)
        if len(window.rows) == 0:  # all wait for the output of their last step
            return output
        step = window.scheduled
        output.num_scheduled_tokens = window.one_each
        output.total_num_scheduled_tokens = len(window.rows)
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=window.req_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=blocks,
            num_computed_tokens=(window.num_computed[window.rows] + step).tolist(),
            num_output_tokens=(window.num_outputs[window.rows] + step).tolist(),
        )
        if blocks is not window.no_blocks:
            output.new_block_ids_to_zero = self._get_new_block_ids_to_zero()
        output.window_step = window, step  # comes back with the results: it is one process
        window.scheduled += 1
        return output

    def _close(self) -> None:
        """Brings the requests to where AsyncScheduler would have them."""
        from vllm.v1.engine import EngineCoreOutput

        window = self.window
        self.window = None
        for row in window.alive.nonzero()[:, 0].tolist():
            request = window.requests[row]
            left = int(window.num_left[row])
            scheduled = min(window.scheduled, left)
            received = min(window.received, left)
            request.num_computed_tokens = int(window.num_computed[row]) + scheduled
            request.num_in_flight_tokens += scheduled - received
            request.num_output_placeholders += scheduled - received
            if received > 0:
                ids = window.ids[:received, row].tolist()
                request.append_output_token_ids(ids)
                self._keep_logprobs(window, row, received)
                output = EngineCoreOutput(request.request_id, ids)
                self._withheld.append((request.client_index, output))
        if window.scheduled and not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(window.one_each)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict:
        """{client: EngineCoreOutputs} of a step whose results are there."""
        from vllm.v1.engine import EngineCoreOutputs

        window, step = getattr(scheduler_output, "window_step", (None, 0))
        if window is not None and window is self.window:
            outputs = self._receive(window, step, model_runner_output)
        else:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self._take_aside(outputs)
        if not self.running:
            self.window = None  # what is still in flight is of requests that ended
        withheld = self._withheld
        self._withheld = []
        for client, output in reversed(withheld):
            outputs.setdefault(client, EngineCoreOutputs(outputs=[])).outputs.insert(0, output)
        return outputs

    def _receive(self, window: Window, step: int, result) -> dict:
        """Results of a step of the open window; one output for each request that ends."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.request import RequestStatus

        rows = window.rows_of(result.req_ids)
        # One id a row; through an array, which takes a fifth of torch.tensor's time.
        sampled = array("q", itertools.chain.from_iterable(result.sampled_token_ids))
        ids = torch.frombuffer(sampled, dtype=torch.int64)
        logprobs = None
        if result.logprobs is not None:
            logprobs = torch.as_tensor(result.logprobs.logprobs[:, 0])
        ends = window.record(step, rows, ids, logprobs)
        outputs = {}
        for row, token in zip(rows[ends].tolist(), ids[ends].tolist(), strict=True):
            request = window.requests[row]
            if token in window.stops[row]:
                is_eos = token == request.sampling_params.eos_token_id
                request.status = RequestStatus.FINISHED_STOPPED
                request.stop_reason = None if is_eos else token
            elif window.num_left[row] == step + 1:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            else:
                continue  # another request's stop id
            self._keep_logprobs(window, row, step + 1)
            output = EngineCoreOutput(
                request.request_id,
                window.ids[: step + 1, row].tolist(),
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            self._free_request(request)
            answers = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            answers.outputs.append(output)
        if outputs:
            self.running = [request for request in self.running if not request.is_finished()]
        return outputs

    def _keep_logprobs(self, window: Window, row: int, count: int) -> None:
        request = window.requests[row]
        if request.sampling_params.num_logprobs is not None:
            kept = self._logprobs.setdefault(request.request_id, [])
            kept.append(window.logprobs[:count, row].clone())

    def _take_aside(self, outputs: dict) -> None:
        """As _keep_logprobs, of a step outside a window; those of more tokens go on to vLLM."""
        for output in itertools.chain.from_iterable(each.outputs for each in outputs.values()):
            found = output.new_logprobs
            if found is not None and found.logprobs.shape[1] == 1:
                kept = self._logprobs.setdefault(output.request_id, [])
                kept.append(torch.tensor(found.logprobs[:, 0]))
                output.new_logprobs = None

    def take_logprobs(self, request_id: str) -> Tensor:
        """[response tokens] fp32, once, of a request that ended; by add_request()'s answer."""
        return torch.cat(self._logprobs.pop(request_id))

    def _free_request(self, request, *args, **kwargs):
        """All ways for a request to end lead here: stops, aborts, errors."""
        if self.window is not None and request.request_id in self.window.row_of:
            self.window.end(self.window.row_of[request.request_id])
        return super()._free_request(request, *args, **kwargs)

    def finish_requests(self, *args, **kwargs) -> list:
        """Requests that are ended from outside."""
        ended = super().finish_requests(*args, **kwargs)
        for request in ended:
            self._logprobs.pop(request.request_id, None)
        return ended

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args, **kwargs) -> bool:
        """Cached prefixes are forgotten; with True, the requests that run start anew."""
        if reset_running_requests and self.window is not None:
            self._close()
        return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)


def _only_decodes(request) -> bool:
    """The request's next step is one token, and it asks for nothing that a window does not know."""
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    num_known = request.num_tokens + request.num_output_placeholders
    # Tokens of before a preemption that still come back; two versions have a name each.
    stale = getattr(request, "num_stale_output_tokens", 0)
    stale += getattr(request, "async_tokens_to_discard", 0)
    return (
        num_known - request.num_computed_tokens == 1
        and not stale
        and params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and params.num_logprobs in (None, 0)
        and not params.stop
        and not params.min_tokens
        and not params.repetition_detection
        and not request.has_encoder_inputs
        and not request.lora_request
        and not request.use_structured_output
        and not request.resumable
    )
