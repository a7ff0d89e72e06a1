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

Ranks on several hosts (or in containers that do not see each other's processes) send the messages
by one all-to-all.

Shapes: a sequence is a dict of 1-D CPU tensors [T_field]; F fields, n sequences in a message, W
ranks in the group.

What we give up: a group that spans hosts uses the network also between ranks of one host; the
segment stays as large as the largest batch so far; the two small collectives over gloo take half a
millisecond, so tiny loads gain little; a forked child does not count as a holder of received
tensors; Linux only. Production systems (Ray's Plasma store, vLLM's shared-memory broadcast) keep
named arenas with an allocator, a server or a resource tracker, and code that cleans up after
crashes.
"""

import contextlib
import errno
import functools
import json
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SHARED_MEMORY = "/dev/shm"


class Part(NamedTuple):
    """A piece of a message before it is written: tensors to be concatenated, and their bytes."""

    tensors: list[Tensor]
    num_bytes: int


class Offer(NamedTuple):
    """What a rank tells the others before an exchange."""

    host: int  # equal for ranks that can share memory
    schema: int  # of its fields; 0 if it has no sequences
    free_bytes: int  # of the segment, if this rank holds no tensor in it any more
    num_bytes: list[int]  # to each receiver


class Segment(NamedTuple):
    """Shared memory of a group."""

    memory: mmap.mmap
    view: weakref.ref  # of it, shared by the received tensors: dead once there are none left


_segments: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> Segment


@torch.no_grad()
def exchange(
    sequences: list[dict[str, Tensor]],
    destination: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> list[dict[str, Tensor]]:
    """The sequences that all ranks of the group destined for this one, by source rank, then as in
    the source's list.

    sequences: dicts of 1-D CPU tensors [T]. All sequences of all ranks have the same keys and
    dtypes; lengths are free, also between the keys of one sequence. destination[i] is the group
    rank that gets sequences[i]. Collective; the group needs a backend for CPU tensors. Sequences
    that stay on their rank are passed through as they are; the others arrive as detached views of
    memory that no other rank reads or writes. Without a group the result is the input. ValueError
    if sequences or destinations are invalid, or, on all ranks, if the segment does not fit.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    fields = _check(sequences, destination, num_ranks)
    if num_ranks == 1:
        return list(sequences)
    group = group or dist.group.WORLD
    by_receiver: list[list[dict[str, Tensor]]] = [[] for _ in range(num_ranks)]
    for sequence, receiver in zip(sequences, destination, strict=True):
        by_receiver[receiver].append(sequence)
    staying = by_receiver[rank]
    by_receiver[rank] = []
    outgoing = [_parts(sent, fields) for sent in by_receiver]

    # 1. Agree.
    sizes = [_message_bytes(parts) for parts in outgoing]
    offers = _gather(Offer(_host_key(), _schema_key(fields), _free_bytes(group), sizes), group)
    if len({offer.schema for offer in offers} - {0}) > 1:
        raise ValueError(
            f"exchange: ranks differ in keys or dtypes (here {fields}): "
            "give all ranks the same fields"
        )

    # 2. Write, 3. Barrier.
    if len({offer.host for offer in offers}) == 1:
        received = _swap_in_segment(outgoing, offers, group)
    else:
        received = _swap_by_all_to_all(outgoing, offers, group)
    messages = received.split([offer.num_bytes[rank] for offer in offers])
    result = []
    for source, message in enumerate(messages):
        result += staying if source == rank else _read(message)
    return result


def _check(
    sequences: list[dict[str, Tensor]], destination: Sequence[int], num_ranks: int
) -> dict[str, str]:
    """The fields of the sequences, name -> dtype; empty if there are no sequences."""
    if len(sequences) != len(destination):
        raise ValueError(
            f"exchange: {len(sequences)} sequences but {len(destination)} destinations: "
            "give one for each"
        )
    if wrong := [receiver for receiver in destination if not 0 <= receiver < num_ranks]:
        raise ValueError(
            f"exchange: destination {wrong[0]} is no rank of the group: use 0 to {num_ranks - 1}"
        )
    names = sequences[0].keys() if sequences else ()
    if any(not sequence or sequence.keys() != names for sequence in sequences):
        raise ValueError(
            f"exchange: all sequences need the same keys, at least one; the first has {list(names)}"
        )
    fields = {}
    for name in names:
        values = [sequence[name] for sequence in sequences]
        dtype = values[0].dtype
        if any(x.dtype != dtype or x.ndim != 1 or x.device.type != "cpu" for x in values):
            raise ValueError(
                f"exchange: {name!r} must be 1-D, on the CPU and everywhere of one dtype: "
                "convert it"
            )
        fields[name] = str(dtype).removeprefix("torch.")
    return fields


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


def _gather(mine: Offer, group: dist.ProcessGroup) -> list[Offer]:
    """The offers of all ranks, by rank."""
    row = torch.tensor([mine.host, mine.schema, mine.free_bytes, *mine.num_bytes])
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    offers = []
    for row in rows:
        host, schema, free_bytes, *num_bytes = row.tolist()
        offers.append(Offer(host, schema, free_bytes, num_bytes))
    return offers


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
    outgoing: list[list[Part]], offers: list[Offer], group: dist.ProcessGroup
) -> Tensor:
    """The messages for this rank, by source, after all ranks have written theirs to the segment
    (uint8).
    """
    rank = dist.get_rank(group)
    num_ranks = len(offers)
    for_receiver = [sum(offer.num_bytes[r] for offer in offers) for r in range(num_ranks)]
    num_bytes = sum(for_receiver)
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    if min(offer.free_bytes for offer in offers) >= num_bytes:
        memory = _segments[group].memory
    else:
        _segments.pop(group, None)
        memory = _new_segment(num_bytes, group)
    view = memoryview(memory)
    buffer = torch.frombuffer(view, dtype=torch.uint8)
    inboxes = buffer[:num_bytes].split(for_receiver)
    for receiver, parts in enumerate(outgoing):
        start = sum(offer.num_bytes[receiver] for offer in offers[:rank])
        _write(parts, inboxes[receiver][start:])
    _barrier(group)
    # A tensor keeps its storage alive, and the storage this view.
    _segments[group] = Segment(memory, weakref.ref(view))
    return inboxes[rank]


def _new_segment(num_bytes: int, group: dist.ProcessGroup) -> mmap.mmap:
    """An unnamed file in shared memory, mapped by all ranks of the group. ValueError on all if it
    does not fit.
    """
    # All ranks have dropped the old segment: its pages count as room for the new one.
    _barrier(group)
    place = torch.zeros(3, dtype=torch.int64)
    with contextlib.ExitStack() as stack:
        if dist.get_rank(group) == 0:
            room = os.statvfs(SHARED_MEMORY)
            file = stack.enter_context(tempfile.TemporaryFile(dir=SHARED_MEMORY))
            place = torch.tensor([os.getpid(), file.fileno(), room.f_bavail * room.f_frsize])
            try:
                # Reserved now: a page that is missing when it is first written ends the process
                # with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                place[0] = 0
        dist.broadcast(place, group=group, group_src=0)
        pid, fileno, room_bytes = place.tolist()
        if not pid:
            raise ValueError(
                f"exchange: the segment needs {num_bytes / 1e6:,.1f} MB and {SHARED_MEMORY} "
                f"has room for {room_bytes / 1e6:,.1f} MB: enlarge it "
                "(docker run --shm-size=...) or exchange in smaller batches"
            )
        with open(f"/proc/{pid}/fd/{fileno}", "r+b") as file:
            segment = mmap.mmap(file.fileno(), num_bytes)
        _barrier(group)  # rank 0 may close its file once all have opened it
    return segment


def _barrier(group: dist.ProcessGroup) -> None:
    # Not dist.barrier: in a group that also has NCCL it would wait on the GPU.
    dist.all_reduce(torch.zeros(1), group=group)


def _swap_by_all_to_all(
    outgoing: list[list[Part]], offers: list[Offer], group: dist.ProcessGroup
) -> Tensor:
    """The messages for this rank, by source, through the network (uint8)."""
    rank = dist.get_rank(group)
    send_bytes = offers[rank].num_bytes
    send = torch.empty(sum(send_bytes), dtype=torch.uint8)
    for parts, message in zip(outgoing, send.split(send_bytes), strict=True):
        _write(parts, message)
    receive_bytes = [offer.num_bytes[rank] for offer in offers]
    received = torch.empty(sum(receive_bytes), dtype=torch.uint8)
    dist.all_to_all_single(received, send, receive_bytes, send_bytes, group=group)
    return received
