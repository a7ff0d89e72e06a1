"""Host memory: what waits there is gone from the device and comes back as it was; a run does not
notice.
"""

import pytest
import torch
import torch.distributed as dist
from jobs import records, settings, train, weights
from ranks import run_ranks
from tiny import save_tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from attention import use_packed_attention
from checkpoint import TrainState, save
from logprobs import token_logprobs
from model import load_policy
from offload import Offload
from optim import OptimConfig, make_optimizer, optimizer_step
from packing import pack, sequence


def storage_bytes(owner) -> int:
    if isinstance(owner, torch.nn.Module):
        tensors = list(owner.parameters())
    else:
        tensors = [x for state in owner.state.values() for x in state.values() if x.ndim]
    storages = {
        x.to_local().untyped_storage().data_ptr(): x.to_local().untyped_storage().nbytes()
        for x in tensors
    }
    return sum(storages.values())


def learn(policy, optimizer, *, seed: int) -> None:
    ids = torch.randint(2, 14, (9,), generator=torch.Generator().manual_seed(seed))
    [row] = pack([sequence(ids[:3], ids[3:])], 16)
    logprobs, _ = token_logprobs(policy, row)
    (-logprobs.sum()).backward()
    optimizer_step(policy, optimizer, 1e-2, 1.0)


def made(path):
    policy = load_policy(
        path, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    )
    use_packed_attention(policy)
    return policy, make_optimizer(policy, OptimConfig(), 1e-2)


@pytest.mark.parametrize("kind, world_size", [("qwen2", 1), ("llama", 2), ("gemma3", 3)])
def test_what_waits_in_host_memory_has_no_storage_and_learns_as_if_it_had_stayed(
    tmp_path, kind, world_size
):
    """3 ranks do not divide the rows: shards are padded, and some ranks hold no row of the smallest
    tensors.
    """
    path = save_tiny(tmp_path, kind)

    def job():
        stayed, moved = made(path), made(path)
        offload = Offload(True, *moved)
        for step in range(3):
            learn(*stayed, seed=step)
            assert (
                storage_bytes(moved[0]) == storage_bytes(moved[1]) == 0 < storage_bytes(stayed[1])
            )
            with offload.present(*moved):
                learn(*moved, seed=step)
        with offload.present(*moved):
            assert storage_bytes(moved[0]) == storage_bytes(stayed[0])
            for p, q in zip(stayed[0].parameters(), moved[0].parameters(), strict=True):
                assert torch.equal(p.to_local(), q.to_local())
            for p, q in zip(stayed[1].state.values(), moved[1].state.values(), strict=True):
                assert all(
                    torch.equal(p[name].to_local(), q[name].to_local())
                    for name in ("exp_avg", "exp_avg_sq")
                )

    run_ranks(world_size, job)


def test_buffers_in_host_memory_are_made_once(tmp_path):
    path = save_tiny(tmp_path)

    def job():
        policy, optimizer = made(path)
        offload = Offload(True, policy)
        first = [buffer.data_ptr() for buffer in offload._host[id(policy)]]
        with offload.present(policy):
            learn(policy, optimizer, seed=0)
        assert first == [buffer.data_ptr() for buffer in offload._host[id(policy)]]

    run_ranks(1, job)


def test_off_means_that_nothing_moves(tmp_path):
    path = save_tiny(tmp_path)

    def job():
        policy, optimizer = made(path)
        before = [p.to_local().data_ptr() for p in policy.parameters()]
        offload = Offload(False, policy, optimizer, None)
        with offload.present(policy, None):
            learn(policy, optimizer, seed=0)
        assert before == [p.to_local().data_ptr() for p in policy.parameters()]

    run_ranks(1, job)


def test_nested_use_of_one_owner_is_an_error(tmp_path):
    path = save_tiny(tmp_path)

    def job():
        policy, _ = made(path)
        offload = Offload(True, policy)
        with (
            pytest.raises(AssertionError, match="nested"),
            offload.present(policy),
            offload.present(policy),
        ):
            pass

    run_ranks(1, job)


def test_a_run_with_offload_is_the_run_without(tiny, files, tmp_path):
    """With a reference that is refreshed and a state that is saved and resumed: both touch what
    waits.
    """
    changes = dict(num_steps=4, loss=dict(kl_coef=0.1), refresh_every=2)
    plain = train(settings(tiny, files, tmp_path / "plain", **changes), 2)
    changes |= dict(offload=True)
    first = dict(num_steps=2, run=dict(save_every=2))
    train(settings(tiny, files, tmp_path / "moved", **changes | first), 2)
    run = dict(save_every=2, resume=True)
    moved = train(settings(tiny, files, tmp_path / "moved", **changes | dict(run=run)), 2)
    assert all(torch.equal(weights(moved)[name], x) for name, x in weights(plain).items())
    for name in ("actor/kl_loss", "actor/grad_norm", "reward/mean"):
        assert [record[name] for record in records(moved)] == [
            record[name] for record in records(plain)
        ]


# What is away can't be used, lost or taken twice


class Plain:
    """A model without shards and an optimizer with state, on the CPU; both wait."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.learn()
        self.weight = self.model.weight.detach().clone()
        self.offload = Offload(True, self.model, self.optimizer)

    def learn(self):
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def state(self):
        return TrainState(self.model, self.optimizer)


@pytest.mark.parametrize(
    "use",
    [
        lambda plain, path: plain.model(torch.ones(1, 3)),
        lambda plain, path: plain.model.state_dict(),
        lambda plain, path: plain.model.load_state_dict({}),
        lambda plain, path: plain.optimizer.state_dict(),
        lambda plain, path: plain.optimizer.load_state_dict({}),
        lambda plain, path: plain.optimizer.step(),
        lambda plain, path: save(path, 1, {"policy": plain.state()}),
    ],
    ids=["forward", "save", "load", "save Adam", "load Adam", "step", "checkpoint"],
)
def test_what_waits_is_refused_where_it_is_used(tmp_path, use):
    """A forward raised from within torch, a step or a checkpoint ended the process, and what
    torch.save wrote had no numbers in it.
    """
    plain = Plain()
    with pytest.raises(
        ValueError, match=r"(Linear|AdamW): waits in host memory; put this in `with"
    ):
        use(plain, tmp_path)
    with plain.offload.present(plain.model, plain.optimizer):
        plain.learn()
        save(tmp_path, 2, {"policy": plain.state()})


def test_a_second_offload_of_one_owner_is_refused_and_restore_gives_it_back():
    """A cell that runs twice: the second copied from storages of 0 bytes."""
    plain = Plain()
    with pytest.raises(ValueError, match=r"Linear: waits in host memory already; call restore\(\)"):
        Offload(True, plain.model)
    first = plain.offload
    del plain.offload  # the owner holds the copy, so it isn't lost
    first.restore()
    assert torch.equal(plain.model.weight, plain.weight)
    plain.learn()
    again = Offload(True, plain.model, plain.optimizer)
    with again.present(plain.optimizer, plain.model):
        plain.learn()


def test_after_an_exception_inside_present_it_can_be_used_again():
    plain = Plain()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), plain.offload.present(plain.model):
            raise KeyboardInterrupt
        assert plain.model.weight.untyped_storage().nbytes() == 0
    with plain.offload.present(plain.model):
        assert torch.equal(plain.model.weight, plain.weight)


def test_the_root_that_a_forward_left_whole_leaves_the_device_too(tmp_path):
    path = save_tiny(tmp_path)

    def job():
        policy, _ = made(path)
        row = pack([sequence(torch.tensor([3, 4]), torch.tensor([5, 1]))], 8)[0]
        spans = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), row.cu_seqlens)
        lengths = dict.fromkeys(("max_length_q", "max_length_k"), row.max_seqlen)
        offload = Offload(True, policy)
        with offload.present(policy), torch.no_grad():
            policy(row.tokens[None], position_ids=row.position_ids[None], **spans, **lengths)
            assert any(not isinstance(p, DTensor) for p in policy.parameters())
        assert all(isinstance(p, DTensor) for p in policy.parameters())
        assert storage_bytes(policy) == 0

    run_ranks(2, job)
