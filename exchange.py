# SPDX-FileCopyrightText: 2026 handful contributors (exchange.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Sequences between the ranks of a host through shared memory, without pickling.

The problem. After scoring, sequences move: the balanced layout gives rank 3 a sequence that rank 0
sampled. The obvious `dist.all_gather_object` pickles every tensor, sends the bytes through sockets
and unpickles them: 64 MB between two ranks of one host take 0.4 s as 32 tensors and 5 s as 15,000.
A copy of 64 MB takes 10 ms. Both ranks see the same RAM, so one copy should be all.

How it works. All that a rank sends to another is one message; the messages lie in one segment of
shared memory, receiver by receiver. With 2 ranks, where rank 0 sends {"tokens": [5, 6, 7]} and
{"tokens": [8]} to rank 1:

    segment   | messages for rank 0 | messages for rank 1                                      |
    message   | 2 sequences, 19 bytes of names | {"tokens": "int64"} | 3 1           | 5 6 7 8 |
                int64 [2]                        JSON, padded to 8 B   lengths,        one block
                                                                       int64 [F, n]    per field

    1. Agree    all-gather of one small row per rank: its host, and how many bytes go to whom. From
                this table each rank computes where each message starts; nobody needs to ask.
    2. Write    each rank concatenates its tensors straight into its places in the segment. This is
                the one copy.
    3. Barrier  then each rank cuts its messages into tensors that are views of the segment. Nothing
                is copied.

The segment has no name. Rank 0 makes it as an unnamed file in /dev/shm, the others open it through
/proc/PID/fd, all map it. The kernel frees it with the last mapping, so a normal end, an exception
and SIGKILL leave nothing behind, and there is nothing that a next start has to clean up or could
take from another job. The segment is kept and written again by the next exchange, since fresh pages
(faults, zeroing) cost three times as much as the copy itself. Received tensors are views of it, so
each rank reports in step 1 whether it still holds one; if any does, a new segment is made, and the
old one lives as long as its tensors.

Ranks on several hosts, or that may not open each other's files, send messages by one all-to-all.
What a rank refuses is in its row of step 1, so that all ranks end with an error and none waits.

Shapes: a sequence is a dict of 1-D CPU tensors [T_field]; F fields, n sequences in a message, W
ranks in the group.

What we give up: a group that spans hosts uses the network also between ranks of one host; the
segment stays as large as the largest batch so far; the two small collectives over gloo take half a
millisecond, so tiny loads gain little; a forked child does not count as a holder of received
tensors; Linux only. Production systems (Ray's Plasma store, vLLM's shared-memory broadcast) keep
named arenas with an allocator, a server or a resource tracker, and code that cleans up after
crashes.

Copied: one process gets what it gave; under torchrun destination[i] is any rank.
    import torch
    from exchange import exchange
    mine = [{"tokens": torch.tensor([5, 6, 7])}, {"tokens": torch.tensor([8])}]
    print([len(each["tokens"]) for each in exchange(mine, destination=[0, 0])])  # [3, 1]
"""

import contextlib
import errno
import functools
import json
import mmap
import os
import tempfile
import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SHARED_MEMORY = "/dev/shm"
REFUSED = -1


class Part(NamedTuple):
    """A piece of a message before it is written: tensors to be concatenated, and their bytes."""

    tensors: list[Tensor]
    num_bytes: int


class Table(NamedTuple):
    """What the ranks tell each other before an exchange, W entries each."""

    host: Tensor  # equal for ranks that can share memory
    schema: Tensor  # of the fields; 0 from a rank without sequences, REFUSED with wrong ones
    free_bytes: Tensor  # of the segment, if the rank holds no tensor in it any more
    num_bytes: Tensor  # [source, receiver]


class Segment(NamedTuple):
    """Shared memory of a group."""

    memory: mmap.mmap
    view: weakref.ref  # of it, shared by the received tensors: dead once there are none left


_segments: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> Segment
_without_memory: weakref.WeakSet = weakref.WeakSet()  # groups that turned out not to share any


@torch.no_grad()
def exchange(
    sequences: list[dict[str, Tensor]],
    destination: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> list[dict[str, Tensor]]:
    """What all ranks of the group destined for this one, by source rank, then as in its list.

    sequences: dicts of 1-D CPU tensors [T], of the same keys and dtypes on all ranks and of any
    lengths. destination[i] is the group rank that gets sequences[i]. Collective. Sequences that
    stay are passed through as they are; the others arrive as detached views of memory that no other
    rank reads or writes. Without a group the result is the input. ValueError on all ranks if the
    sequences of one are invalid, or if the segment does not fit.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    problem = _find_problem(sequences, destination, num_ranks)
    if num_ranks == 1 and problem:
        raise ValueError(problem)
    if num_ranks == 1:
        return list(sequences)
    group = group or dist.group.WORLD
    _check_group(group)
    if problem:  # the others are told first
        sequences = destination = []
    fields = _fields(sequences)
    by_receiver: list[list[dict[str, Tensor]]] = [[] for _ in range(num_ranks)]
    for sequence, receiver in zip(sequences, destination, strict=True):
        by_receiver[int(receiver)].append(sequence)
    staying = by_receiver[rank]
    by_receiver[rank] = []
    outgoing = [_parts(sent, fields) for sent in by_receiver]

    # 1. Agree.
    host = rank if group in _without_memory else _host_key()
    schema = REFUSED if problem else _schema_key(fields)
    table = _gather_table([host, schema, _free_bytes(group), *map(_message_bytes, outgoing)], group)
    if problem:
        raise ValueError(problem)
    _check_schemas(table.schema.tolist(), fields)

    # 2. Write, 3. Barrier.
    received = None
    if len(set(table.host.tolist())) == 1:
        received = _swap_in_segment(outgoing, table, group)
    if received is None:
        received = _swap_by_all_to_all(outgoing, table, group)
    result = []
    for source, message in enumerate(received.split(table.num_bytes[:, rank].tolist())):
        result += staying if source == rank else _read(message)
    return result


def _find_problem(
    sequences: list[dict[str, Tensor]], destination: Sequence[int], num_ranks: int
) -> str:
    """What is wrong with them and how to mend it; empty if nothing is."""
    if len(sequences) != len(destination):
        counts = f"{len(sequences)} sequences but {len(destination)} destinations"
        return f"exchange: {counts}: give one for each"
    for receiver in destination:
        if receiver not in range(num_ranks):
            last = num_ranks - 1
            return f"exchange: destination {receiver} is no rank of the group: use 0 to {last}"
    names = getattr(sequences[0], "keys", tuple)() if sequences else ()
    if any(not isinstance(x, Mapping) or not x or x.keys() != names for x in sequences):
        rule = "all sequences need the same keys, at least one"
        return f"exchange: {rule}; the first has {list(names)}"
    for name in names:
        values = [sequence[name] for sequence in sequences]
        if not isinstance(name, str) or not all(isinstance(x, Tensor) for x in values):
            return f"exchange: {name!r} must be a name with a tensor in each sequence: convert it"
        dtype = values[0].dtype
        if any(x.dtype != dtype or x.ndim != 1 or x.device.type != "cpu" for x in values):
            rule = "1-D, on the CPU and everywhere of one dtype"
            return f"exchange: {name!r} must be {rule}: convert it"
    return ""


def _check_group(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) < 0:
        raise ValueError("exchange: this rank is not in the group: call it on the group's ranks")
    backends = dist.get_backend_config(group)
    if "cpu" not in backends:
        fix = 'init_process_group("cpu:gloo,cuda:nccl")'
        raise ValueError(f"exchange: the group ({backends}) can't send CPU tensors: use {fix}")


def _fields(sequences: list[dict[str, Tensor]]) -> dict[str, str]:
    """name -> dtype, of sequences that agree."""
    first = sequences[0] if sequences else {}
    return {name: str(x.dtype).removeprefix("torch.") for name, x in first.items()}


def _check_schemas(schemas: list[int], fields: dict[str, str]) -> None:
    """ValueError on all ranks if one refused its sequences, or if they differ."""
    if REFUSED in schemas:
        refused = schemas.index(REFUSED)
        raise ValueError(
            f"exchange: rank {refused} of the group has wrong sequences: see its error"
        )
    if len(set(schemas) - {0}) > 1:
        rule = f"ranks differ in keys or dtypes (here {fields})"
        raise ValueError(f"exchange: {rule}: give all ranks the same fields")


@functools.cache
def _host_key() -> int:
    """Equal on two ranks if one can open the other's files through /proc: same kernel, same process
    namespace.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    # The name too: virtual machines that were cloned while running have equal boot ids.
    return zlib.crc32(f"{os.uname().nodename} {boot_id} {namespace}".encode())


def _schema_key(fields: dict[str, str]) -> int:
    """A checksum of the fields, whatever their order; 0 from a rank without sequences, which agrees
    with any other.
    """
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode()) + 1 if fields else 0


def _free_bytes(group: dist.ProcessGroup) -> int:
    """The size of the group's segment if this rank holds no tensor in it any more, else 0."""
    segment = _segments.get(group)
    if segment is None or segment.view() is not None:
        return 0
    return len(segment.memory)


def _gather_table(mine: list[int], group: dist.ProcessGroup) -> Table:
    """The rows of all ranks: each has a host, a schema, free bytes, and the bytes to each rank."""
    row = torch.tensor(mine)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    table = torch.stack(rows)
    return Table(table[:, 0], table[:, 1], table[:, 2], table[:, 3:])


def _parts(sequences: list[dict[str, Tensor]], fields: dict[str, str]) -> list[Part]:
    """The message of these sequences, before it is written."""
    if not sequences:
        return []
    names = torch.frombuffer(bytearray(json.dumps(fields), "ascii"), dtype=torch.uint8)
    columns = [[sequence[name] for sequence in sequences] for name in fields]
    lengths = torch.tensor([[x.numel() for x in column] for column in columns])  # [F, n]
    sizes = torch.tensor([len(sequences), len(names)])
    parts = [Part([head], head.nbytes) for head in (sizes, names, lengths.flatten())]
    for column in columns:
        parts.append(Part(column, sum(x.nbytes for x in column)))
    return parts


def _message_bytes(parts: list[Part]) -> int:
    return sum(_padded(part.num_bytes) for part in parts)


def _padded(num_bytes: int) -> int:
    """Rounded up to 8: a view of bytes as int64 must start at a multiple of 8."""
    return (num_bytes + 7) // 8 * 8


def _write(parts: list[Part], buffer: Tensor) -> None:
    """Writes a message to the start of buffer (uint8)."""
    start = 0
    for part in parts:
        place = buffer[start : start + part.num_bytes]
        torch.cat(part.tensors, out=place.view(part.tensors[0].dtype))
        start += _padded(part.num_bytes)


def _read(message: Tensor) -> list[dict[str, Tensor]]:
    """The sequences of a message (uint8), as views of it."""
    if not message.numel():
        return []
    start = 0

    def take(num_values: int, dtype: torch.dtype) -> Tensor:
        nonlocal start
        end = start + num_values * dtype.itemsize
        block = message[start:end].view(dtype)
        start = _padded(end)
        return block

    num_sequences, names_bytes = take(2, torch.int64).tolist()
    fields = json.loads(bytes(take(names_bytes, torch.uint8).tolist()))
    flat_lengths = take(len(fields) * num_sequences, torch.int64)
    columns = []
    for dtype, lengths in zip(fields.values(), flat_lengths.split(num_sequences), strict=True):
        block = take(int(lengths.sum()), getattr(torch, dtype))
        columns.append(block.split(lengths.tolist()))
    return [dict(zip(fields, values, strict=True)) for values in zip(*columns, strict=True)]


def _swap_in_segment(
    outgoing: list[list[Part]], table: Table, group: dist.ProcessGroup
) -> Tensor | None:
    """The messages for this rank, by source, once all ranks have written theirs to the segment
    (uint8); None if they can't share one.
    """
    rank = dist.get_rank(group)
    inbox_bytes = table.num_bytes.sum(0).tolist()
    starts = table.num_bytes[:rank].sum(0).tolist()  # of this rank's messages, in each inbox
    num_bytes = sum(inbox_bytes)
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    if table.free_bytes.min() >= num_bytes:
        memory = _segments[group].memory
    else:
        _segments.pop(group, None)
        memory = _new_segment(num_bytes, group)
    if memory is None:
        warnings.warn("exchange: ranks of this host can't share memory: slower", stacklevel=3)
        _without_memory.add(group)
        return None
    view = memoryview(memory)
    buffer = torch.frombuffer(view, dtype=torch.uint8)
    inboxes = buffer[:num_bytes].split(inbox_bytes)
    for parts, inbox, start in zip(outgoing, inboxes, starts, strict=True):
        _write(parts, inbox[start:])
    _all(True, group)
    # A tensor keeps its storage alive, and the storage this view.
    _segments[group] = Segment(memory, weakref.ref(view))
    return inboxes[rank]


def _new_segment(num_bytes: int, group: dist.ProcessGroup) -> mmap.mmap | None:
    """An unnamed file in shared memory, mapped by all ranks of the group. ValueError on all if it
    does not fit, None on all if one can't make or open it.
    """
    # All ranks have dropped the old segment: its pages count as room for the new one.
    _all(True, group)
    place = torch.zeros(3, dtype=torch.int64)  # process, file, room; no process: why not
    segment = None
    with contextlib.ExitStack() as stack:
        if dist.get_rank(group) == 0:
            try:
                room = os.statvfs(SHARED_MEMORY)
                file = stack.enter_context(tempfile.TemporaryFile(dir=SHARED_MEMORY))
                # Reserved now: a page that is missing when it is first written ends the process
                # with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                place = torch.tensor([os.getpid(), file.fileno(), 0])
            except OSError as error:
                is_full = error.errno == errno.ENOSPC
                place[2] = room.f_bavail * room.f_frsize if is_full else REFUSED
        dist.broadcast(place, group=group, group_src=0)
        pid, fileno, room_bytes = place.tolist()
        if not pid and room_bytes != REFUSED:
            raise ValueError(
                f"exchange: the segment needs {num_bytes / 1e6:,.1f} MB and {SHARED_MEMORY} "
                f"has room for {room_bytes / 1e6:,.1f} MB: enlarge it "
                "(docker run --shm-size=...) or exchange in smaller batches"
            )
        with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{fileno}", "r+b") as file:
            segment = mmap.mmap(file.fileno(), num_bytes)
        # Rank 0 may close its file once all have opened it.
        return segment if _all(segment is not None, group) else None


def _all(holds: bool, group: dist.ProcessGroup) -> bool:
    """Whether it holds on all ranks, once all have come here."""
    # Not dist.barrier: in a group that also has NCCL it would wait on the GPU.
    num_not = torch.tensor(0.0 if holds else 1.0)
    dist.all_reduce(num_not, group=group)
    return num_not.item() == 0


def _swap_by_all_to_all(
    outgoing: list[list[Part]], table: Table, group: dist.ProcessGroup
) -> Tensor:
    """The messages for this rank, by source, through the network (uint8)."""
    rank = dist.get_rank(group)
    send_bytes = table.num_bytes[rank].tolist()
    send = torch.empty(sum(send_bytes), dtype=torch.uint8)
    for parts, message in zip(outgoing, send.split(send_bytes), strict=True):
        _write(parts, message)
    receive_bytes = table.num_bytes[:, rank].tolist()
    received = torch.empty(sum(receive_bytes), dtype=torch.uint8)
    dist.all_to_all_single(received, send, receive_bytes, send_bytes, group=group)
    return received
