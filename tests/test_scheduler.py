"""The closed-batch scheduler gives vLLM's own scheduler's tokens.

Two kinds of proof. Against a stand-in for the model runner, which holds what a runner holds and
checks what it is told: many batches, small pools, late requests, aborts, in a second each. And with
real engines on a CPU, where tokens and log-probabilities must be equal in every bit.
"""

import functools
import itertools
import random
from collections import deque

import numpy as np
import pytest
import torch
from lab import lab
from tiny import save_tiny

import scheduler
from rollout import Engine, RolloutConfig
from scheduler import ClosedBatch, closed_batch_scheduler
from vllm_backend import VllmBackend

EOS = 1  # of the tiny model
BLOCK = 16
LONGEST = 400


class StandInRunner:
    """Does with a SchedulerOutput what vLLM's runner does, and samples by (request, position)."""

    def __init__(self):
        self.known = {}

    def execute(self, output):
        for name in {*output.finished_req_ids, *(output.preempted_req_ids or ())}:
            self.known.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.known[new.req_id] = {
                "tokens": list(new.prefill_token_ids),
                "done": new.num_computed_tokens,
                "blocks": [list(blocks) for blocks in new.block_ids],
            }
        self.take_over(output.scheduled_cached_reqs)
        counts = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(counts.values())
        # As the runner does: decoding requests first.
        order = sorted(counts, key=lambda name: (counts[name] != 1, counts[name]))
        written = {}
        return results_of(order, [self.advance(name, counts[name], written) for name in order])

    def take_over(self, cached):
        columns = cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids
        for name, computed, outputs, new in zip(cached.req_ids, *columns, strict=True):
            assert type(computed) is int and type(outputs) is int
            assert computed == self.known[name]["done"], "the scheduler's count and the runner's"
            for mine, more in zip(self.known[name]["blocks"], new or (), strict=new is not None):
                mine.extend(more)

    def advance(self, name, count, written):
        """The sampled ids of a request whose next `count` tokens are computed."""
        request = self.known[name]
        end = request["done"] + count
        assert end <= len(request["tokens"])
        for blocks in request["blocks"]:
            assert len(blocks) * BLOCK >= end, "a position without a block"
        for position in range(request["done"], end):
            block = request["blocks"][0][position // BLOCK]
            assert written.setdefault(block, name) == name and block > 0, "a block of two requests"
        request["done"] = end
        if end < len(request["tokens"]):
            return []
        request["tokens"].append(hash((int(name), end, 17)) % 50)
        return request["tokens"][-1:]


def results_of(order, sampled):
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    if not order:
        return ModelRunnerOutput(req_ids=[], req_id_to_index={})
    ids = np.array([ids or [0] for ids in sampled], np.int32)
    ranks = np.ones(len(order), np.int32)
    return ModelRunnerOutput(
        req_ids=order,
        req_id_to_index={name: i for i, name in enumerate(order)},
        sampled_token_ids=sampled,
        logprobs=LogprobsLists(ids, (ids / -7).astype(np.float32), ranks, None),
        prompt_logprobs_dict={},
    )


@functools.cache
def make_config(model, num_blocks, max_num_seqs):
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, dtype="float32", skip_tokenizer_init=True, max_model_len=LONGEST
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = True
    return config


def make_scheduler(model, kind, num_blocks, max_num_seqs, sliding_window):
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    config = make_config(model, num_blocks, max_num_seqs)
    sizes = dict(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**sizes))]
    if sliding_window:
        spec = SlidingWindowSpec(**sizes, sliding_window=sliding_window)
        groups.append(KVCacheGroupSpec(["sliding"], spec))
    made = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )
    made.use_v2_model_runner = True
    return made


class Play:
    """One batch through a scheduler: 40 requests, some that come later, some that are aborted."""

    def __init__(self, made, seed, depth, max_num_requests=40):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = made
        self.draw = random.Random(seed)
        self.runner = StandInRunner()
        self.depth = depth  # steps in flight
        self.found = {}  # name: (ids, log-probabilities)
        self.reasons = {}
        self.aborted = set()
        for i in range(max_num_requests):
            self.add(i, shared_prompt=i % 4 == 0)

    def add(self, name, shared_prompt=False):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=self.draw.choice([1, 2, 30, 150, 1000]),
            stop_token_ids=self.draw.choice([[], [3], [3, 4]]),
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        size = self.draw.randrange(1, 80)
        prompt = [self.draw.randrange(50) for _ in range(size)]
        self.add_request(name, list(range(40)) if shared_prompt else prompt, params)

    def add_request(self, name, prompt, params):
        from vllm.v1.request import Request

        request = Request(
            request_id=str(name),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)

    def run(self):
        """{name: (ids, log-probabilities, finish reason, stop reason)} of those not aborted."""
        late = {self.draw.randrange(1, 150): 100 + i for i in range(3)}
        aborts = {self.draw.randrange(1, 100): self.draw.sample(range(40), 3) for _ in range(3)}
        in_flight = deque()
        step = 0
        while self.scheduler.has_requests() or in_flight or step <= max(late):
            if step in late:
                self.add(late[step])
            self.abort(map(str, aborts.get(step, [])))
            if self.scheduler.has_requests():
                output = self.scheduler.schedule()
                in_flight.append((output, self.runner.execute(output)))
            is_last = in_flight and not self.scheduler.has_unfinished_requests()
            if len(in_flight) == self.depth or is_last:
                self.receive(*in_flight.popleft())
            step += 1
            assert step < 20_000
        return {name: (*self.found[name], *self.reasons[name]) for name in self.reasons}

    def abort(self, names):
        from vllm.v1.request import RequestStatus

        ended = self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        self.aborted |= {request.request_id for request in ended}

    def receive(self, output, results):
        for each in self.scheduler.update_from_output(output, results).values():
            for part in each.outputs:
                name = part.request_id
                if name in self.aborted:
                    continue
                assert name not in self.reasons, "an output behind the last one"
                ids, logprobs = self.found.setdefault(name, ([], []))
                ids.extend(part.new_token_ids)
                if part.new_logprobs is not None:
                    logprobs.extend(part.new_logprobs.logprobs[:, 0].tolist())
                if part.finish_reason is not None:
                    self.reasons[name] = part.finish_reason, part.stop_reason
                    if isinstance(self.scheduler, ClosedBatch):
                        logprobs.extend(self.scheduler.take_logprobs(name).tolist())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_suffice_wherever_in_a_block_a_row_begins(model, monkeypatch, depth):
    """The stand-in fails at a position without a block; here every row takes blocks many times, and
    some row's last token of each time is the last of a block.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    monkeypatch.setattr(scheduler, "TOKENS_AHEAD", 48)
    made = make_scheduler(model, closed_batch_scheduler(), 2000, 64, None)
    play = Play(made, 0, depth, max_num_requests=0)
    final = RequestOutputKind.FINAL_ONLY
    for size in range(1, 2 * BLOCK):
        params = SamplingParams(max_tokens=350, logprobs=0, output_kind=final)
        play.add_request(200 + size, list(range(size)), params)
    found = play.run()
    assert all(len(found[str(200 + size)][0]) == 350 for size in range(1, 2 * BLOCK))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sliding_window", [None, 64])
@pytest.mark.parametrize(
    "num_blocks, max_num_seqs", [(2000, 64), (150, 64), (70, 64), (2000, 16), (100, 16)]
)
def test_tokens_and_ends_are_those_of_vllms_scheduler(
    model, monkeypatch, num_blocks, max_num_seqs, sliding_window, depth
):
    """Pools that hold all requests or a part of them, more requests than places, layers with a
    sliding window, one and two steps in flight. Late requests and aborts among them.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    monkeypatch.setattr(scheduler, "TOKENS_AHEAD", 48)
    for seed in range(2):
        found = []
        for kind in (AsyncScheduler, closed_batch_scheduler()):
            made = make_scheduler(model, kind, num_blocks, max_num_seqs, sliding_window)
            play = Play(made, seed, depth)
            found.append(play.run())
            assert not made.requests and not made.running
            assert made.kv_cache_manager.block_pool.get_num_free_blocks() == num_blocks - 1
            assert made.reset_prefix_cache()
        ours = found.pop()
        [theirs] = found
        # A request may have ended in one before it was to be aborted, and not in the other.
        both = ours.keys() & theirs.keys()
        assert len(both) > 30 and all(ours[name] == theirs[name] for name in both)
        assert not made._logprobs and not made._withheld and made.window is None
        assert made.window_steps > 20
        for ids, logprobs, *_ in ours.values():
            assert np.allclose(logprobs, [-i / 7 for i in ids])


@pytest.mark.parametrize(
    "version, is_known",
    [
        ("0.26.1", True),
        ("0.29.0rc1", True),
        ("0.32.0", True),
        ("0.25.9", False),
        ("0.33.0", False),
        ("1.26.0", False),
        ("dev", False),
    ],
)
def test_a_vllm_that_nobody_tried_keeps_its_own_scheduler_and_one_line_says_so(
    monkeypatch, capsys, version, is_known
):
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    made = closed_batch_scheduler()
    printed = capsys.readouterr().out
    assert (made is not None) == is_known
    assert printed.startswith(f"vLLM {version} keeps its own scheduler") != is_known
    assert printed.count("\n") == (not is_known)


# Real engines


class Pair:
    """On a rank: an engine with vLLM's scheduler and one with ours; the same weights."""

    def __init__(self, path, tensor_parallel_size=1):
        make = functools.partial(VllmBackend, make_scheduler=closed_batch_scheduler)
        self.engines = {}
        for kind in ("vllm", "closed"):
            config = RolloutConfig(
                max_response_tokens=300,
                temperature=0.9,
                tensor_parallel_size=tensor_parallel_size,
                kv_cache_gb=0.065,  # 532 blocks of 128 tokens, or 1,064 where two ranks share them
                max_num_seqs=512,
                scheduler=kind,
            )
            sizes = dict(max_prompt_tokens=60, num_samples=8, stop_ids=[EOS])
            self.engines[kind] = Engine(make, path, config, **sizes)
        self.num_preempted = dict.fromkeys(self.engines, 0)

    def sample(self, kind, num, limits, *, temperature=0.9, seeds=True, torch_seed=0):
        """{index: (ids, log-probabilities, truncated)} of requests; limits and stops by turns."""
        backend = self.engines[kind].backend
        backend.forget_prefixes()
        preempt = backend.scheduler._preempt_request

        def counted(*arguments, **options):
            self.num_preempted[kind] += 1
            return preempt(*arguments, **options)

        backend.scheduler._preempt_request = counted
        torch.manual_seed(torch_seed)
        draw = random.Random(num)
        for index in range(num):
            params = backend._sampling_params(temperature)
            params.max_tokens = limits[index % len(limits)]
            params.stop_token_ids = [[EOS], [EOS, 12], []][index % 3]
            prompt = [draw.randrange(2, 14) for _ in range(draw.randrange(1, 60))]
            backend._add(index, prompt, params, index if seeds else None)
        found = {}
        for index, ids, logprobs, truncated in itertools.chain(*backend._finish_all()):
            found[index] = ids.tolist(), logprobs.tolist(), truncated
        assert not backend.inner_ids and backend.forget_prefixes() is None
        backend.scheduler._preempt_request = preempt
        return found

    def compare(self, num, limits, **options):
        """(equal, tokens, steps in windows, preemptions by vLLM's scheduler and by ours)."""
        ours = self.engines["closed"].backend.scheduler
        before = ours.window_steps
        self.num_preempted = dict.fromkeys(self.engines, 0)
        found = [self.sample(kind, num, limits, **options) for kind in self.engines]
        num_tokens = sum(len(ids) for ids, _, _ in found[0].values())
        is_equal = found[0] == found[1] and len(found[0]) == num
        return is_equal, num_tokens, ours.window_steps - before, *self.num_preempted.values()


@pytest.fixture(scope="module")
def pair(model):
    with lab(1, lambda: Pair(model)) as on_ranks:
        yield on_ranks


@pytest.mark.parametrize(
    "num, limits, options",
    [
        (1, [40], dict(temperature=0.0)),
        (1, [40], dict()),
        (17, [1, 2, 12, 40], dict()),
        (64, [3, 30], dict(temperature=0.0)),
        (64, [3, 30], dict(seeds=False)),
        (512, [4, 16, 30], dict(temperature=0.0)),
    ],
)
def test_engines_give_the_same_tokens_and_log_probabilities(pair, num, limits, options):
    """In every bit; stops and limits mixed, with a seed a request, with one for all, and greedy."""
    compare = functools.partial(Pair.compare, num=num, limits=limits, **options)
    [(is_equal, num_tokens, window_steps, *_)] = pair(compare)
    assert is_equal and num_tokens >= num and window_steps > 20


def test_the_plain_path_is_a_setting_away(pair):
    def job(kept):
        return [isinstance(e.backend.scheduler, ClosedBatch) for e in kept.engines.values()]

    assert pair(job) == [[False, True]]


def test_so_they_do_with_a_pool_that_is_too_small(pair):
    compare = functools.partial(Pair.compare, num=500, limits=[120, 150], temperature=0.0)
    [(is_equal, _, window_steps, theirs, ours)] = pair(compare)
    assert is_equal and window_steps > 50 and theirs > 0 and ours > 0


@pytest.mark.slow
def test_so_they_do_over_two_ranks(model):
    def job(pair):
        return [
            pair.compare(17, [1, 2, 12, 40]),
            pair.compare(64, [3, 30], temperature=0.0),
            pair.compare(40, [30], temperature=0.9),
        ]

    with lab(2, lambda: Pair(model, 2)) as on_ranks:
        first, second = on_ranks(job)
    assert all(is_equal and steps > 10 for is_equal, _, steps, *_ in first) and first == second
