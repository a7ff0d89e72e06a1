"""Both engines: they sample from the trainer's weights, report what they sampled from, and refuse
the rest.

vLLM runs for real, on CPU, in ranks that stay alive for this file (see lab.py): one rank, two ranks
with an engine each, two ranks that share one.
"""

import contextlib
import math
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines import ALSO_STOPS, EOS, FP32, LIMIT, PROMPTS, Kept, facts
from lab import lab
from ranks import run_ranks
from tiny import KINDS, save_tiny

from hf_backend import HfBackend
from model import load_policy
from reshard import iter_full_params, verify_sync
from rollout import Engine, Rollout, RolloutConfig


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    longer = dict(max_position_embeddings=512)
    return {kind: save_tiny(tmp_path_factory.mktemp(kind), kind, **longer) for kind in KINDS}


@pytest.fixture(scope="module")
def one_rank(paths):
    """One rank with an engine for each kind of model."""
    with lab(1, lambda: Kept(paths)) as on_ranks:
        yield on_ranks


@pytest.fixture(scope="module")
def two_engines(paths):
    """Two ranks, each with its own engine."""
    with lab(2, lambda: Kept({"qwen2": paths["qwen2"]})) as on_ranks:
        yield on_ranks


@pytest.fixture(scope="module")
def shared_engine(paths):
    """Two ranks that share an engine by tensor parallelism: a tied and an untied one."""
    with lab(2, lambda: Kept({kind: paths[kind] for kind in ("qwen2", "llama")}, 2)) as on_ranks:
        yield on_ranks


@pytest.fixture(scope="module")
def hf_rank(paths):
    """One rank with the plain engine."""
    with lab(1, lambda: Kept({"qwen2": paths["qwen2"]}, make=HfBackend)) as on_ranks:
        yield on_ranks


@pytest.fixture(params=["vllm", "hf"])
def each_engine(request):
    return request.getfixturevalue({"vllm": "one_rank", "hf": "hf_rank"}[request.param])


# The engine runs the trainer's weights


def gaps_over_updates(kept, kind):
    """[(after a sync, after the weights moved by 1 % without one)] of three updates."""
    found = []
    for update in range(3):
        synced = kept.gap(kept.sample(kind=kind, seed=update), kind)
        kept.move(kind, seed=update)
        stale = kept.gap(kept.sample(kind=kind, seed=update, sync=False), kind)
        found.append((synced, stale))
    return found


def assert_only_a_sync_closes_the_gap(results):
    for rank in results:
        for synced, stale in rank:
            assert synced < 1e-4 and stale > 100 * synced and stale > 1e-3, rank


@pytest.mark.parametrize("kind", KINDS)
def test_after_each_update_the_engine_reports_the_trainers_log_probabilities(one_rank, kind):
    """Tied and untied heads, at temperature 0.7, in fp32: 1e-4. vllm#51665: a second copy of a tied
    head kept the old values; huggingface/trl#4159: vLLM's default log-probabilities are those
    before the temperature.
    """
    assert_only_a_sync_closes_the_gap(one_rank(gaps_over_updates, kind))


def test_so_do_two_engines_on_two_ranks(two_engines):
    assert_only_a_sync_closes_the_gap(two_engines(gaps_over_updates, "qwen2"))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_so_does_one_engine_over_two_ranks(shared_engine, kind):
    assert_only_a_sync_closes_the_gap(shared_engine(gaps_over_updates, kind))


def test_after_an_interruption_in_the_middle_vllm_samples_as_before(one_rank):
    """A cell of a notebook that is stopped: the requests that ran are dropped."""

    def job(kept):
        backend = kept.engines["qwen2"].backend
        inner = backend.llm.llm_engine
        step = inner.step
        found = [kept.sample(temperature=0)]
        running = []
        for num_steps in (1, 4):
            left = iter(range(num_steps))

            def interrupted(left=left):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return step()

            inner.step = interrupted
            with contextlib.suppress(KeyboardInterrupt):
                kept.sample(seed=1)
            inner.step = step
            running.append(len(backend.inner_ids))
            found.append(kept.sample(temperature=0))
        return [facts(each) for each in found], running

    [(found, running)] = one_rank(job)
    assert all(running)
    assert found[0] == found[1] == found[2]


def test_so_does_the_plain_engine(hf_rank):
    assert_only_a_sync_closes_the_gap(hf_rank(gaps_over_updates, "qwen2"))


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_any_temperature_means_the_same_to_engine_and_trainer(each_engine, temperature):
    """PrimeIntellect-ai/prime-rl#679: temperature in the sampler alone; ratios were 2 at 0.6."""

    def job(kept):
        return kept.gap(kept.sample(temperature=temperature), temperature=temperature)

    assert max(each_engine(job)) < 1e-4


def test_samples_are_drawn_from_the_tempered_distribution(each_engine):
    """First tokens of 3,000 samples against the exact distribution: chi-squared of 13 degrees of
    freedom exceeds 34.5 once in 1,000 times, and the seed is fixed. At the wrong temperature it is
    some hundreds.
    """

    def job(kept):
        with kept.ready(max_response_tokens=1) as engine:
            rollouts = engine.generate([[3, 4, 5]], 3000, seed=0)
        counts = Counter(r.response_ids[0].item() for r in rollouts)
        probabilities = {r.response_ids[0].item(): math.exp(r.logprobs[0]) for r in rollouts}
        rest = 1 - sum(probabilities.values())
        return sum((counts[i] - 3000 * p) ** 2 / (3000 * p) for i, p in probabilities.items()), rest

    for chi_squared, rest in each_engine(job):
        assert chi_squared < 34.5 and rest < 0.01


def test_verify_sync_passes_after_a_sync_and_fails_once_the_weights_have_moved(one_rank):
    def job(kept):
        policy = kept.policies["qwen2"]
        with kept.ready() as engine:
            answers = [facts(engine.generate(PROMPTS, 1, temperature=0.0))]
            for _ in range(2):
                verify_sync(policy, engine, **FP32)
                answers.append(facts(engine.generate(PROMPTS, 1, temperature=0.0)))
            kept.move("qwen2", seed=99)
            with pytest.raises(
                RuntimeError, match="engine parameters are not the trainer's weights"
            ):
                verify_sync(policy, engine, **FP32)
        return answers[0] == answers[1] == answers[2]

    assert one_rank(job) == [True]


def test_every_parameter_of_the_trainer_reaches_the_engine(one_rank):
    """huggingface/trl#7104: names that a loader did not know were skipped in silence. One parameter
    at a time is scaled; the engine's log-probabilities of a fixed greedy answer must change with
    it, and come back.
    """

    def job(kept, kind):
        policy = kept.policies[kind]

        def answer():
            with kept.ready(kind, max_response_tokens=1) as engine:
                return engine.generate([[3, 4, 5, 6]], 1, temperature=0.0)[0].logprobs

        base, unmoved = answer(), []
        for name, p in policy.named_parameters():
            before = p.to_local().data.clone()
            p.to_local().data.mul_(1.5).add_(
                0.05 * torch.arange(before[..., :].numel()).view(before.shape).sin()
            )
            unmoved += [name] if torch.equal(answer(), base) else []
            p.to_local().data.copy_(before)
        return unmoved, torch.equal(answer(), base)

    for kind in KINDS:
        assert one_rank(job, kind) == [([], True)]


def test_a_sync_that_lacks_a_tensor_fails(each_engine):
    def job(kept):
        policy, engine = kept.policies["qwen2"], kept.engines["qwen2"]
        complete = list(iter_full_params(policy, **FP32))
        lacking = [
            [(name, x) for name, x in bucket if name != "model.norm.weight"] for bucket in complete
        ]
        with pytest.raises(
            RuntimeError, match="left 1 engine parameters as they were: .*model.norm.weight"
        ):
            with engine.awake():
                engine.load_weights(lacking)
        engine.state = "asleep"
        with engine.awake():
            return engine.load_weights(complete) == sum(
                x.nbytes for bucket in complete for _, x in bucket
            )

    assert each_engine(job) == [True]


def test_a_prompt_that_was_cached_under_the_old_weights_is_computed_again(one_rank):
    """vllm-project/vllm#9744: cached keys are found by the prompt's text, whatever the weights. 200
    tokens of prompt, some blocks of 16; then the answers of the new weights must be those of a
    plain model.
    """

    def job(kept):
        prompt = [3 + i % 11 for i in range(200)]
        kept.sample([prompt], 2, temperature=0.0)
        for p in kept.policies["qwen2"].parameters():
            p.to_local().data.mul_(1.1)
        rollouts = kept.sample([prompt], 2, temperature=0.0)
        return kept.gap(rollouts, temperature=1.0)

    assert max(one_rank(job)) < 1e-4


# States


def test_the_states_have_one_way_through(each_engine):
    """huggingface/trl#5312: the engine woke without its weights and answered "!!!!".
    vllm-omni#4473, vllm#48310: a request while weights or cache were asleep.
    """

    def job(kept):
        engine = kept.engines["qwen2"]
        buckets = list(iter_full_params(kept.policies["qwen2"], **FP32))

        def refused(action):
            with pytest.raises(RuntimeError) as error:
                action()
            return str(error.value)

        messages = [
            refused(lambda: engine.load_weights(buckets)),
            refused(lambda: engine.generate(PROMPTS, 1)),
        ]
        with engine.awake():
            messages.append(refused(lambda: engine.generate(PROMPTS, 1)))
            engine.load_weights(buckets)
            engine.generate(PROMPTS, 1)
            engine.load_weights(buckets)  # a second update while awake
            engine.generate(PROMPTS, 1)
            messages.append(refused(lambda: engine.awake().__enter__()))
        messages.append(refused(lambda: engine.generate(PROMPTS, 1)))
        return messages

    [messages] = each_engine(job)
    asleep = "generate() needs load_weights() first, inside `engine.awake()` (the engine is asleep)"
    assert messages == [
        "load_weights() needs `with engine.awake():` around it (the engine is asleep)",
        asleep,
        asleep.replace("asleep", "weights"),
        "awake() may not be nested (the engine is ready)",
        asleep,
    ]


def test_engines_leave_the_trainers_generators_and_threads_alone(each_engine):
    """LLM() seeds torch, and so does a seeded call; without care every rank would drop out and
    shuffle alike.
    """

    def job(kept):
        torch.manual_seed(5)
        before, set_num_threads = torch.get_rng_state(), torch.set_num_threads
        kept.sample(seed=3)
        same = (
            torch.equal(torch.get_rng_state(), before) and torch.set_num_threads is set_num_threads
        )
        torch.set_num_threads(1)  # vLLM's replacement would refuse
        return same, dist.is_initialized()

    assert each_engine(job) == [(True, True)]


# Samples


def test_a_seed_repeats_and_nothing_else_does(each_engine):
    """huggingface/trl#7040: a constant seed gave equal samples everywhere, or --seed never reached
    the engine.
    """

    def job(kept):
        runs = [
            facts(kept.sample([[3, 4]], 8, seed=seed, ignore_eos=True))
            for seed in (1, 1, 2, None, None)
        ]
        return runs, len({tuple(ids) for ids, _ in runs[0]})

    for (first, again, other, unseeded, unseeded_again), num_different in each_engine(job):
        assert first == again and num_different == 8
        assert first != other and unseeded != unseeded_again and first != unseeded


def test_rollouts_are_the_prompts_groups_in_order_with_a_log_probability_for_each_token(
    each_engine,
):
    """rllm-org/rllm#816: text as the interface lost tokens; here ids go in and come out."""

    def job(kept):
        seen = []
        rollouts = kept.sample(PROMPTS, 3, on_finished=seen.extend)
        assert sorted(index for index, _ in seen) == list(range(12))
        assert all(rollouts[index] is rollout for index, rollout in seen)
        return rollouts

    [rollouts] = each_engine(job)
    assert [r.prompt_ids.tolist() for r in rollouts] == [
        prompt for prompt in PROMPTS for _ in range(3)
    ]
    for r in rollouts:
        assert len(r.logprobs) == len(r.response_ids) <= LIMIT and (r.logprobs <= 0).all()
        assert r.response_ids.dtype == torch.int64 and r.logprobs.dtype == torch.float32


def test_truncated_means_that_the_limit_ended_it_whatever_its_length(each_engine):
    """areal-project/AReaL#1637: truncation was guessed from the length. Any stop id finishes; among
    400 samples some have their stop id as the very last token that the limit allows.
    """

    def job(kept):
        return [(r.response_ids.tolist(), r.truncated) for r in kept.sample(num_samples=100)]

    [found] = each_engine(job)
    for ids, truncated in found:
        assert not {EOS, ALSO_STOPS} & set(ids[:-1])
        assert truncated == (ids[-1] not in (EOS, ALSO_STOPS)) and (
            not truncated or len(ids) == LIMIT
        )
    assert {ids[-1] for ids, truncated in found if not truncated} == {EOS, ALSO_STOPS}
    assert any(len(ids) == LIMIT and not truncated for ids, truncated in found)
    assert any(truncated for _, truncated in found)


def test_ignoring_the_stop_ids_fills_every_response(each_engine):
    def job(kept):
        return [(len(r.response_ids), r.truncated) for r in kept.sample(ignore_eos=True)]

    assert set(each_engine(job)[0]) == {(LIMIT, True)}


def test_all_engines_give_the_same_greedy_answers(one_rank, shared_engine, hf_rank, paths):
    """vllm#15895: with tensor parallelism over ranks that differ it was garbage."""
    prompts = [[3 + (i * j + i) % 11 for j in range(1 + i % 7)] for i in range(64)]

    def job(kept):
        trained = kept.policies["qwen2"]
        kept.policies["qwen2"] = load_policy(
            paths["qwen2"], trained.lm_head.weight.device_mesh
        )  # not moved yet
        answers = facts(kept.sample(prompts, 1, temperature=0.0))
        kept.policies["qwen2"] = trained
        return answers

    [expected] = hf_rank(job)
    assert one_rank(job) == [expected] and shared_engine(job) == [expected, expected]
    assert len({tuple(ids) for ids, _ in expected}) > 8


def test_an_engine_looks_at_its_models_class_in_this_process(one_rank):
    """In one of its own that took 23 of the 61 s in which an engine was first built on an H200."""

    def job(kept):
        from vllm.model_executor.models import registry

        return registry._run_in_subprocess(os.getpid) == os.getpid()

    assert one_rank(job) == [True]


def test_responses_are_handed_on_while_others_still_run(one_rank):
    """So that scoring hides behind sampling."""

    def job(kept):
        running = []
        watch = kept.engines["qwen2"].backend.llm.llm_engine.get_num_unfinished_requests
        kept.sample(on_finished=lambda ended: running.extend(watch() for _ in ended))
        return running

    [running] = one_rank(job)
    assert len(running) == 32 and running[0] > 0 and running[-1] == 0


def test_length_bins_submit_the_longest_first_and_change_no_answer(one_rank):
    def job(kept):
        plain = facts(kept.sample(num_samples=1, temperature=0.0))
        with kept.ready(length_bins=2) as engine:
            engine.expected_lengths = {
                hash(tuple(p)): n for p, n in zip(PROMPTS, (5, 9, 2, 7), strict=True)
            }
            order = engine._submission_order(PROMPTS)
            binned = facts(engine.generate(PROMPTS, 1, temperature=0.0))
        return order, plain == binned, engine._submission_order(PROMPTS)

    assert one_rank(job) == [([1, 3, 0, 2], True, [0, 1, 2, 3])]


# Ranks


def shares(kept, prompts, num_samples, seed):
    """{position: facts} that this rank owns, and the indices that were handed on."""
    seen = []
    with kept.ready(ignore_eos=True) as engine:
        options = dict(seed=seed, on_finished=lambda ended: seen.extend(each[:2] for each in ended))
        owned = engine.generate_share(prompts, num_samples, **options)
    assert sorted(seen) == [
        (i, p) for i, p in enumerate(p for p in owned for _ in range(num_samples))
    ]
    assert all(
        r.prompt_ids.tolist() == prompts[p] for p, rollouts in owned.items() for r in rollouts
    )
    return {p: facts(rollouts) for p, rollouts in owned.items()}


@pytest.mark.parametrize("num_prompts", [4, 3, 1])
def test_ranks_share_any_number_of_prompts_in_whole_groups(two_engines, num_prompts):
    first, second = two_engines(shares, PROMPTS[:num_prompts], 4, 0)
    assert (
        sorted([*first, *second]) == list(range(num_prompts)) and abs(len(first) - len(second)) <= 1
    )
    assert all(len(rollouts) == 4 for rollouts in [*first.values(), *second.values()])


def test_ranks_with_their_own_engines_sample_different_things(two_engines):
    """verl#912: one seed for all ranks gave identical responses to one prompt. 16 responses of 12
    tokens, all new.
    """
    same_prompt = [[3, 4, 5]] * 2

    def distinct(seed):
        ranks = two_engines(shares, same_prompt, 8, seed)
        return {tuple(ids) for rank in ranks for rollouts in rank.values() for ids, _ in rollouts}

    first = distinct(1)
    assert len(first) == 16
    assert distinct(1) == first and not distinct(2) & first


@pytest.mark.parametrize("num_prompts", [4, 3, 1])
def test_ranks_that_share_an_engine_own_every_other_group_of_it(shared_engine, num_prompts):
    first, second = shared_engine(shares, PROMPTS[:num_prompts], 4, 0)
    assert list(first) == list(range(0, num_prompts, 2)) and list(second) == list(
        range(1, num_prompts, 2)
    )
    assert shared_engine(shares, PROMPTS[:num_prompts], 4, 0) == [first, second]
    different = {
        tuple(ids) for rank in (first, second) for rollouts in rank.values() for ids, _ in rollouts
    }
    assert len(different) == 4 * num_prompts


def test_ranks_that_share_an_engine_hold_the_same_samples(shared_engine):
    """vllm#15895: ranks of a tensor-parallel group that drew differently gave garbage, or hung."""

    def job(kept, seed):
        return facts(kept.sample(num_samples=4, seed=seed, ignore_eos=True))

    first, second = shared_engine(job, 3)
    assert first == second and len({tuple(ids) for ids, _ in first}) == 16
    assert shared_engine(job, 4)[0] != first


def test_ranks_that_share_an_engine_share_memory_under_a_name_of_their_own(shared_engine):
    """By vLLM it was that of every job on the host. All have opened it: no name is left."""

    def name_of_shared_memory(kept):
        from vllm.distributed import parallel_state

        communicator = parallel_state.get_tp_group().device_communicator
        return communicator.dist_module.group_name, os.environ["MASTER_PORT"]

    for name, port in shared_engine(name_of_shared_memory):
        assert name.startswith(f"handful{port}.0-tp:") and name.endswith("-[0-1]-cpushm")
        assert not list(Path("/dev/shm").glob(f"handful{port}.*"))


@pytest.mark.parametrize("ranks", ["two_engines", "shared_engine"])
def test_ranks_that_ask_for_different_things_are_told_so_at_once(ranks, request):
    """vllm#12071: nothing enforces equal prompts within a tensor-parallel group, and a difference
    hangs.
    """

    def job(kept):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="called generate_share.. with different arguments"):
            shares(kept, [[3 + dist.get_rank()]], 4, 0)
        kept.engines["qwen2"].state = "asleep"  # a job would end here
        return time.monotonic() - began

    assert max(request.getfixturevalue(ranks)(job)) < 10


# Configuration


@pytest.mark.parametrize(
    "setting, message",
    [
        (
            dict(temperature=0.0),
            "--rollout.temperature 0.0: must be from 0.01 to 2; try 1.0",
        ),
        (dict(temperature=2.5), "--rollout.temperature 2.5: must be from 0.01 to 2"),
        (
            dict(top_p=0.9),
            "--rollout.top-p 0.9: must be 1: the trainer scores whole distributions",
        ),
        (dict(max_response_tokens=0), "--rollout.max-response-tokens 0: must be at least 1"),
        (
            dict(tensor_parallel_size=0),
            "--rollout.tensor-parallel-size 0: must be a divisor of the 3 ranks; try 1",
        ),
        (
            dict(tensor_parallel_size=2),
            "--rollout.tensor-parallel-size 2: must be a divisor of the 3 ranks; try 1",
        ),
        (
            dict(memory_fraction=1.0),
            "--rollout.memory-fraction 1.0: must be between 0 and 1; try 0.45",
        ),
        (dict(length_bins=-1), "--rollout.length-bins -1: must be at least 0"),
        (dict(kv_cache_gb=-1.0), "--rollout.kv-cache-gb -1.0: must be at least 0"),
        (dict(max_num_seqs=-1), "--rollout.max-num-seqs -1: must be at least 0"),
        (
            dict(engine="hf", quantization="fp8_per_channel"),
            "--rollout.engine hf: must be vllm (installed): hf has neither",
        ),
        (
            dict(engine="hf", tensor_parallel_size=3),
            "--rollout.engine hf: must be vllm (installed): hf has neither",
        ),
    ],
)
def test_what_would_bias_or_break_training_is_refused(monkeypatch, setting, message):
    """vllm#42259: with top_p 0.9 and 0.95 of the mass kept every ratio is off by 1 / 0.95."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError) as error:
        RolloutConfig(**setting)
    assert str(error.value).startswith(message)


# Over a backend that records what it is asked


class Recorder:
    """Responses of one token more than the prompt's first."""

    def __init__(self, path, config, **sizes):
        self.sizes = sizes
        self.calls = []

    def __getattr__(self, name):
        return lambda: self.calls.append(name)

    def load(self, weights):
        self.calls.append("load")
        list(weights)
        return set()

    def run(self, prompts, order, num_samples, temperature, seed):
        self.calls.append(order)
        for index in range(len(prompts) * num_samples):
            num = 1 + prompts[index // num_samples][0]
            yield [(index, torch.zeros(num, dtype=torch.int64), torch.zeros(num), False)]


def recorder(**settings):
    config = RolloutConfig("hf", 8, **settings)
    sizes = dict(max_prompt_tokens=8, num_samples=10, stop_ids=[EOS])
    return Engine(Recorder, "", config, **sizes)


def test_memory_comes_in_the_order_in_which_there_is_room_for_it():
    """The KV cache last, once a wake; keys of the old policy are forgotten at each load."""
    engine = recorder()
    buckets = [[("a", torch.zeros(3))], [("b", torch.zeros(2, dtype=torch.bfloat16))]]
    with engine.awake():
        assert engine.load_weights(buckets) == 3 * 4 + 2 * 2  # bytes
        engine.load_weights([])
    load = ["load", "wake_cache", "forget_prefixes", "load", "forget_prefixes"]
    assert engine.backend.calls == ["wake_weights", *load, "sleep"]
    assert engine.state == "asleep"


def test_prompts_of_the_longest_responses_are_submitted_first_by_what_the_last_ones_were():
    engine = recorder(length_bins=2)
    engine.state = "ready"
    prompts = [[6], [0, 0, 0], [5, 0], [1, 0, 0, 0]]
    for _ in range(2):
        rollouts = engine.generate(prompts, 1, seed=0)
    # By their own lengths at first, then by 7, 1, 6 and 2 tokens.
    assert engine.backend.calls == [[1, 3, 0, 2], [0, 2, 1, 3]]
    assert [rollout.prompt_ids.tolist() for rollout in rollouts] == prompts


@pytest.mark.parametrize(("size", "num_samples"), [(1, 5), (2, 10)])
def test_an_engine_is_built_for_its_own_share_of_the_samples(monkeypatch, size, num_samples):
    monkeypatch.setattr(RolloutConfig, "__post_init__", lambda config: None)

    def job():
        sizes = recorder(tensor_parallel_size=size).backend.sizes
        return sizes["num_samples"], sizes["max_model_len"]

    assert run_ranks(2, job) == [(num_samples, 16)] * 2


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_response_has_tokens_and_a_log_probability_for_each(num):
    with pytest.raises(AssertionError):
        Rollout(torch.tensor([3]), torch.zeros(num), torch.zeros(num and 2), False)
