"""What exchange.py promises, on real gloo groups: order, ragged and empty loads, lifetimes, errors,
no segment left.
"""

import mmap
import os
import pickle
import signal
import tempfile
import time
import warnings
import weakref
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import exchange as exchange_module
from exchange import exchange

DTYPES = {
    "tokens": torch.int64,
    "position_ids": torch.int32,
    "logprobs": torch.float32,
    "response_mask": torch.bool,
    "values": torch.bfloat16,
}


def random_sequence(generator: torch.Generator) -> dict[str, Tensor]:
    """Five fields of five dtypes and five lengths from 0 to 40; values of 1 to 8 bytes, so that
    padding matters.
    """
    lengths = torch.randint(0, 41, (5,), generator=generator).tolist()
    sequence = {}
    for (name, dtype), length in zip(DTYPES.items(), lengths, strict=True):
        if dtype == torch.bool:
            sequence[name] = torch.rand(length, generator=generator) > 0.5
        else:
            values = torch.randint(0, 256, (length * dtype.itemsize,), generator=generator)
            sequence[name] = values.to(torch.uint8).view(dtype)
    return sequence


def assert_same(received: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """Equal bits (random floats hold NaNs), dtypes and order."""
    assert len(received) == len(expected)
    for a, b in zip(received, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
            assert torch.equal(
                a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)
            )


def compare_with_pickled_objects(
    num_sequences: tuple[int, ...], receivers: str, one_host: bool
) -> None:
    """Exchanges random sequences three times and compares with all_gather_object, the slow
    reference.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not one_host:
        exchange_module._host_key = lambda: rank % 2
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        sequences = [random_sequence(generator) for _ in range(num_sequences[rank])]
        destination = {
            "random": torch.randint(0, world_size, (len(sequences),), generator=generator).tolist(),
            "last": [world_size - 1] * len(sequences),
            "self": [rank] * len(sequences),
        }[receivers]
        everything = [None] * world_size
        dist.all_gather_object(everything, (sequences, destination))
        expected = []
        for sent, to in everything:
            expected += [s for s, receiver in zip(sent, to, strict=True) if receiver == rank]
        assert_same(exchange(sequences, destination), expected)


@pytest.mark.parametrize("one_host", [True, False], ids=["shared memory", "all to all"])
@pytest.mark.parametrize(
    "num_sequences, receivers",
    [
        ((7, 12), "random"),
        ((5, 0, 9), "random"),
        ((3, 8, 1, 20), "random"),
        ((0, 0), "random"),
        ((30, 0), "last"),
        ((0, 30), "last"),
        ((4, 6), "self"),
        ((6, 6, 6), "last"),
    ],
)
def test_received_sequences_are_ordered_by_source_rank_then_position(
    num_sequences, receivers, one_host
):
    """Ragged, empty and one-sided loads; ranks without a sequence do not know the fields."""
    run_ranks(len(num_sequences), compare_with_pickled_objects, num_sequences, receivers, one_host)


def test_a_sequence_of_zero_tokens_arrives():
    def swap():
        received = exchange(
            [{"tokens": torch.zeros(0, dtype=torch.int64)}] * 2, [1 - dist.get_rank()] * 2
        )
        return [s["tokens"].tolist() for s in received]

    assert run_ranks(2, swap) == [[[], []], [[], []]]


def test_a_subgroup_exchanges_by_its_own_ranks():
    def swap():
        pair = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            return None
        group_rank = dist.get_rank(pair)
        sent = [{"tokens": torch.tensor([10 * dist.get_rank()])}]
        return exchange(sent, [1 - group_rank], pair)[0]["tokens"].item()

    assert run_ranks(3, swap) == [None, 20, 10]


def test_without_a_process_group_and_on_one_rank_the_result_is_the_input():
    sequences = [{"tokens": torch.arange(3)}, {"tokens": torch.arange(5)}]
    assert_same(exchange(sequences, [0, 0]), sequences)
    run_ranks(1, lambda: assert_same(exchange(sequences, [0, 0]), sequences))


def test_keys_may_come_in_another_order_on_another_rank_and_in_another_sequence():
    def swap():
        a, b = torch.tensor([1]), torch.tensor([2.0])
        pairs = [{"a": a, "b": b}, {"b": b, "a": a}]
        sent = pairs if dist.get_rank() == 0 else pairs[::-1]
        return [(s["a"].item(), s["b"].item()) for s in exchange(sent, [1 - dist.get_rank()] * 2)]

    assert run_ranks(2, swap) == [[(1, 2.0)] * 2] * 2


def test_the_payload_is_never_pickled():
    def swap():
        refuse = Mock(side_effect=AssertionError("pickled"))
        with (
            patch.multiple(
                pickle, dump=refuse, dumps=refuse, Pickler=refuse, load=refuse, loads=refuse
            ),
            patch.multiple(dist.distributed_c10d, _pickler=refuse, _unpickler=refuse),
        ):
            with pytest.raises(AssertionError, match="pickled"):
                dist.all_gather_object([None, None], "the patch works")
            return len(
                exchange([{"tokens": torch.arange(100)}], [1 - dist.get_rank()])[0]["tokens"]
            )

    assert run_ranks(2, swap) == [100, 100]


def test_received_tensors_keep_their_values_through_later_exchanges_and_writes_by_others():
    def swap():
        rank, world_size = dist.get_rank(), dist.get_world_size()

        def step(value: int) -> list[dict[str, Tensor]]:
            return exchange(
                [{"x": torch.full((50,), value)} for _ in range(world_size)],
                list(range(world_size)),
            )

        held = step(10 + rank)
        for value in range(20, 30):
            step(value)
        dist.barrier()
        assert [s["x"].tolist() for s in held] == [
            [10 + source] * 50 for source in range(world_size)
        ]
        for s in held:
            s["x"].fill_(rank)
        dist.barrier()
        assert all((s["x"] == rank).all() for s in held)

    run_ranks(3, swap)


def test_the_segment_is_written_again_only_when_no_rank_holds_a_tensor_of_it():
    def swap():
        def step(holder: int) -> tuple[mmap.mmap, list]:
            received = exchange(
                [{"x": torch.arange(9)}, {"x": torch.arange(5)}], [1 - dist.get_rank()] * 2
            )
            held = [received[1]["x"][2:3]] if dist.get_rank() == holder else []
            return exchange_module._segments[dist.group.WORLD][0], held

        first, held = step(holder=-1)
        second, held = step(holder=1)
        third, _ = step(holder=-1)  # rank 1 still holds one element of the second
        assert (second is first, third is first) == (True, False)
        assert held == [] or held[0].item() == 2

    run_ranks(2, swap)


def test_a_larger_batch_gets_a_larger_segment_and_a_smaller_one_reuses_it():
    def swap():
        sizes = []
        for length in (100, 1000, 10):
            exchange([{"x": torch.arange(length)}], [1 - dist.get_rank()])
            sizes.append(len(exchange_module._segments[dist.group.WORLD][0]))
        return sizes

    (small, large, again), other = run_ranks(2, swap)
    assert [small, large, again] == other
    assert small >= 2 * 800 and large >= 2 * 8000 and again == large


def test_the_message_of_the_docstring_has_the_bytes_that_it_says():
    sequences = [{"tokens": torch.tensor([5, 6, 7])}, {"tokens": torch.tensor([8])}]
    parts = exchange_module._parts(sequences, exchange_module._fields(sequences))
    assert [part.num_bytes for part in parts] == [16, 19, 16, 32]
    assert exchange_module._message_bytes(parts) == 16 + 24 + 16 + 32
    assert [exchange_module._padded(n) for n in (0, 1, 7, 8, 9)] == [0, 8, 8, 8, 16]


@pytest.mark.parametrize(
    "sequences, destination, message",
    [
        ([{"x": torch.arange(3)}], [], "1 sequences but 0 destinations"),
        ([{"x": torch.arange(3)}], [1], "destination 1 is no rank"),
        ([{"x": torch.arange(3)}], [-1], "destination -1 is no rank"),
        ([{"x": torch.arange(3)}, {"y": torch.arange(3)}], [0, 0], "the same keys"),
        ([{"x": torch.arange(3)}, {"x": torch.zeros(3)}], [0, 0], "one dtype"),
        ([{}, {}], [0, 0], "at least one"),
        ([torch.arange(3)], [0], "at least one"),
        ([{"x": torch.arange(3)}, None], [0, 0], "at least one"),
        ([{"id": "a"}], [0], "'id' must be a name with a tensor"),
        ([{1: torch.arange(3)}], [0], "1 must be a name with a tensor"),
        ([{"x": torch.arange(3)}], ["a"], "destination a is no rank"),
        ([{"x": torch.arange(3)}], [0.5], "destination 0.5 is no rank"),
        ([{"x": torch.zeros(3, 2)}], [0], "1-D"),
        ([{"x": torch.zeros(3, device="meta")}], [0], "on the CPU"),
    ],
)
def test_invalid_sequences_are_refused(sequences, destination, message):
    with pytest.raises(ValueError, match=message):
        exchange(sequences, destination)


@pytest.mark.parametrize(
    "sequences, destination, message",
    [
        ([{"x": torch.arange(3)}], [3], "destination 3 is no rank"),
        ([{"x": "text"}], [0], "'x' must be a name with a tensor"),
        (["text"], [0], "at least one"),
    ],
)
def test_what_one_rank_refuses_ends_the_exchange_on_all_and_the_next_one_works(
    sequences, destination, message
):
    """Else the others would wait for it until the timeout, or be one exchange behind for ever."""

    def swap():
        rank = dist.get_rank()
        right = [{"x": torch.tensor([rank])}], [(rank + 1) % 3]
        expected = message if rank == 1 else "rank 1 of the group has wrong sequences"
        with pytest.raises(ValueError, match=expected):
            exchange(*(sequences, destination) if rank == 1 else right)
        return exchange(*right)[0]["x"].item()

    assert run_ranks(3, swap) == [2, 0, 1]


def test_destinations_may_be_a_tensor():
    def swap():
        return exchange([{"x": torch.tensor([7])}], torch.tensor([1 - dist.get_rank()]))

    assert [received[0]["x"].item() for received in run_ranks(2, swap)] == [7, 7]


def test_a_rank_outside_the_group_is_told():
    def swap():
        group = dist.new_group([1])
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="this rank is not in the group"):
                exchange([], [], group)

    run_ranks(2, swap)


def test_a_group_without_a_backend_for_the_cpu_is_told():
    def swap():
        with (
            patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"),
            pytest.raises(ValueError, match=r"\(cuda:nccl\) can't send CPU tensors: use init_pro"),
        ):
            exchange([], [])

    run_ranks(2, swap)


def test_ranks_of_several_hosts_do_not_try_to_share_memory():
    """On one host both roads give the same."""

    def swap():
        exchange_module._host_key = dist.get_rank
        refuse = Mock(side_effect=AssertionError("shared memory"))
        with patch.object(exchange_module, "_swap_in_segment", refuse):
            return exchange([{"x": torch.tensor([7])}], [1 - dist.get_rank()])[0]["x"].item()

    assert run_ranks(2, swap) == [7, 7]


@pytest.mark.parametrize("fails", ["to make", "to open"])
def test_ranks_that_cannot_share_memory_use_the_network_from_then_on(fails, tmp_path):
    """No /dev/shm, or a container that does not let a process look at another's files."""

    def swap():
        rank = dist.get_rank()
        if fails == "to make":
            exchange_module.SHARED_MEMORY = str(tmp_path / "missing")
        elif rank == 1:
            exchange_module.mmap = Mock(mmap=Mock(side_effect=PermissionError))
        real = exchange_module._new_segment
        tried = []
        exchange_module._new_segment = lambda *args: tried.append(1) or real(*args)
        found = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for value in range(3):
                sent = [{"x": torch.tensor([value])}]
                found.append(exchange(sent, [1 - rank])[0]["x"].item())
        assert [str(w.message) for w in caught if "can't share memory" in str(w.message)] == [
            "exchange: ranks of this host can't share memory: slower"
        ]
        return found, len(tried)

    assert run_ranks(2, swap) == [([0, 1, 2], 1)] * 2


def test_the_old_segment_is_gone_on_all_ranks_before_room_is_looked_for(tmp_path):
    """Its pages are room for the new one."""

    class Slow(weakref.WeakKeyDictionary):
        def pop(self, *args):
            time.sleep(0.5)
            super().pop(*args)
            (tmp_path / "gone").touch()

    def swap():
        peer = 1 - dist.get_rank()
        exchange([{"x": torch.arange(9)}], [peer])
        statvfs = os.statvfs

        def look(path):
            assert (tmp_path / "gone").exists()
            return statvfs(path)

        if dist.get_rank() == 0:
            os.statvfs = look
        else:
            exchange_module._segments = Slow(exchange_module._segments)
        return len(exchange([{"x": torch.arange(90)}], [peer])[0]["x"])

    assert run_ranks(2, swap) == [90, 90]


def test_ranks_with_different_fields_are_all_told():
    def swap():
        name = "tokens" if dist.get_rank() == 0 else "token_ids"
        with pytest.raises(ValueError, match="ranks differ in keys or dtypes"):
            exchange([{name: torch.arange(3)}], [0])
        return True

    assert run_ranks(2, swap) == [True, True]


def test_a_segment_that_does_not_fit_says_so_on_all_ranks_with_the_room_and_the_next_one_works():
    shm = os.statvfs("/dev/shm")
    too_many = (
        shm.f_blocks * shm.f_frsize // 8 + 1
    )  # int64 values: more than /dev/shm could ever hold

    def swap():
        peer = 1 - dist.get_rank()
        x = torch.zeros(1, dtype=torch.int64).expand(too_many if dist.get_rank() == 0 else 1)
        with pytest.raises(
            ValueError, match=r"needs [\d,.]+ MB and /dev/shm has room for [\d,.]+ MB: enlarge it"
        ):
            exchange([{"x": x}], [peer])
        return exchange([{"x": torch.tensor([5 + peer])}], [peer])[0]["x"].item()

    assert run_ranks(2, swap) == [5, 6]


@pytest.mark.parametrize("moment", ["made", "written"])
@pytest.mark.parametrize("ending", ["normal", "exception", "sigkill"])
def test_no_segment_is_left_after_a_normal_end_an_exception_or_sigkill(ending, moment):
    """The failing rank has just made a segment of 256 MB, or is half way through its message. A
    foreign file stays.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        foreign = Path(directory) / "of_another_job"
        foreign.write_text("keep")
        room_before = os.statvfs(directory).f_bfree * os.statvfs(directory).f_frsize
        broadcast, write = dist.broadcast, exchange_module._write

        def end(rank: int) -> None:
            if dist.get_rank() == rank and ending == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == rank and ending == "exception":
                raise RuntimeError("in the middle")

        def broadcast_and_end(*args, **kwargs):
            end(rank=0)  # the one that makes the segment
            broadcast(*args, **kwargs)

        def write_half_and_end(parts, buffer):
            write(parts[:3], buffer)
            end(rank=1)
            write(parts, buffer)

        def swap():
            exchange_module.SHARED_MEMORY = directory
            if moment == "made":
                dist.broadcast = broadcast_and_end
            else:
                exchange_module._write = write_half_and_end
            exchange(
                [{"x": torch.zeros(1, dtype=torch.int64).expand(1 << 24)}], [1 - dist.get_rank()]
            )

        if ending == "normal":
            run_ranks(2, swap)
        else:
            with pytest.raises(
                RuntimeError, match="in the middle" if ending == "exception" else "signal 9"
            ):
                run_ranks(2, swap)
        assert os.listdir(directory) == ["of_another_job"] and foreign.read_text() == "keep"
        room = os.statvfs(directory).f_bfree * os.statvfs(directory).f_frsize
        assert room > room_before - (1 << 27)  # half of the segment: others use /dev/shm too
