# SPDX-FileCopyrightText: 2026 handful contributors (offload.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Models and optimizers that a phase does not use wait in host memory.

The problem. The phases of a step need different things: sampling the engine, scoring the reward
model, the update the optimizers. For a 7 B model Adam's two fp32 moments are 57 GB, and the KV
cache would like that room while it samples.

How it works. What is to wait is copied into pinned host memory, and its device storage is resized
to 0 bytes. The tensors stay what they are: FSDP2's flat views of a shard and its DTensors share one
storage, so giving that its bytes back brings all of them back at once, and nobody holds a stale
pointer.
    waiting = Offload(True, critic, critic_optimizer)    # nn.Module, torch.optim.Optimizer or None
    with waiting.present(critic, critic_optimizer):      # copied in; at the end copied out again
        ...
Until `present`, an owner's tensors have no memory: a forward, a step or a save of it is refused,
and touching one of its tensors directly ends the process. `restore` gives all back for good.
Pinned memory is taken once, in one piece per owner, and kept: pinning is slower than the copy.
Copies of one owner overlap each other, and the host waits once.

    what                    fp32 bytes a parameter     7 B over 1 rank: time at 50 GB/s
    Adam's moments          8                          57 GB, 1.1 s each way
    a frozen model (bf16)   2                          14 GB, 0.3 s

What we give up: moving the policy's own weights and gradients; overlap of a copy with computation.
Source: the manual offloading between phases of Sheng 2024 (HybridFlow, arXiv:2409.19256).

Copied:
    import torch
    from offload import Offload
    critic = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(critic.parameters())
    waiting = Offload(True, critic, optimizer)
    with waiting.present(critic, optimizer):
        critic(torch.ones(4)).backward()
        optimizer.step()
    waiting.restore()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Owner = nn.Module | torch.optim.Optimizer


class Offload:
    """Keeps `owners` in host memory except inside `present`; with enabled False everything stays
    where it is.
    """

    def __init__(self, enabled: bool, *owners: Owner | None):
        """The owners leave the device now. None stands for a model that a run does without.

        Raises ValueError for an owner that waits in another Offload already.
        """
        self._host: dict[int, list[Tensor]] = {}  # by id of the owner: pinned buffers
        # By id of the owner: its tensors that have no storage now.
        self._away: dict[int, list[Tensor]] = {}
        self._owners = [owner for owner in owners if owner is not None] if enabled else []
        self._hooks = []
        for owner in self._owners:
            if getattr(owner, "_waits_in", None) is not None:
                rule = "waits in host memory already; call restore() of the first Offload"
                raise ValueError(f"{type(owner).__name__}: {rule}")
        for owner in self._owners:
            # It holds this object, and so the only copy of its numbers.
            owner.__dict__["_waits_in"] = self
            self._guard(owner)
            self._park(owner)

    def _guard(self, owner: Owner) -> None:
        """What would read or write an owner that is away raises instead of crashing or saving
        nothing.
        """

        def refuse(*_) -> None:
            if id(owner) in self._away:
                rule = "waits in host memory; put this in `with offload.present(owner):`"
                raise ValueError(f"{type(owner).__name__}: {rule}")

        register = [owner.register_state_dict_pre_hook, owner.register_load_state_dict_pre_hook]
        if isinstance(owner, nn.Module):
            register.append(owner.register_forward_pre_hook)
        else:
            register.append(owner.register_step_pre_hook)
        self._hooks += [each(refuse) for each in register]

    @contextlib.contextmanager
    def present(self, *owners: Owner | None) -> Iterator[None]:
        """Inside, these are on the device. Other owners than the constructor's were never away."""
        mine = [owner for owner in owners if any(owner is known for known in self._owners)]
        brought = []
        try:
            for owner in mine:
                self._bring(owner)
                brought.append(owner)
            yield
        finally:  # after an error too: a session may go on
            for owner in brought:
                self._park(owner)

    def restore(self) -> None:
        """Bring all owners back and let go of them."""
        for owner in self._owners:
            if id(owner) in self._away:
                self._bring(owner)
            owner.__dict__.pop("_waits_in")
        for hook in self._hooks:
            hook.remove()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the pinned buffers may go only when they have been copied
        self._owners = []

    def _park(self, owner: Owner) -> None:
        tensors = list(_storages(owner))
        buffers = self._host.get(id(owner), [])
        sizes = [t.numel() for t in tensors]
        # Otherwise it is the first time, or Adam has made its state.
        if [b.numel() for b in buffers] != sizes:
            # In one piece: torch rounds each pinned block up to a power of two.
            buffers = torch.empty(
                sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            ).split(sizes)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the storage may go only when the copy has been made
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
        self._host[id(owner)] = buffers
        self._away[id(owner)] = tensors

    def _bring(self, owner: Owner) -> None:
        assert id(owner) in self._away, "present() is nested for one owner"
        for buffer, tensor in zip(self._host[id(owner)], self._away[id(owner)], strict=True):
            tensor.untyped_storage().resize_(buffer.numel())
            tensor.copy_(buffer, non_blocking=True)
        del self._away[id(owner)]  # all are back: none was, if memory has run out on the way


def _storages(owner: Owner) -> Iterator[Tensor]:
    """The bytes of each storage, [bytes] uint8, that holds the owner's parameters or optimizer
    state on this rank.
    """
    if isinstance(owner, nn.Module):
        for module in owner.modules():
            if isinstance(module, FSDPModule):
                # a forward without backward leaves whole parameters in the place of the shards
                module.reshard()
        tensors = list(owner.parameters())
    else:
        tensors = [
            x for state in owner.state.values() for x in state.values() if isinstance(x, Tensor)
        ]
    seen = set()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        storage = local.untyped_storage()
        if tensor.ndim == 0 or storage.nbytes() == 0 or storage.data_ptr() in seen:
            continue  # Adam's step counts stay; a rank may hold no row of a small tensor
        seen.add(storage.data_ptr())
        yield torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
