"""Models, optimizers, objects and elastic states that Horovod's API gives to all ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch.integrations.horovod as hvd
from deepytorch_core.testing import assert_same_on_all_ranks, spawn_ranks

Make = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def without_state(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)


def fill(rank: int, world_size: int, make: Make) -> None:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    reference = copy.deepcopy(model)
    plain = make(reference.parameters())
    for parameter in reference.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    plain.step()  # what Horovod's own does to an optimizer that has made none
    optimizer = make(model.parameters())
    if rank == 0:  # both kinds
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model[1].bias.grad is None
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own, expected)
        if own.requires_grad:
            assert own.grad is not None
            assert not own.grad.any()
    state = optimizer.state_dict()["state"]
    expected_state = plain.state_dict()["state"]
    assert state.keys() == expected_state.keys()
    for index, entry in state.items():
        for name, value in entry.items():
            torch.testing.assert_close(value, expected_state[index][name], rtol=0, atol=0)
    hvd.shutdown()


@pytest.mark.parametrize("make", [momentum, adamw, without_state])
def test_a_fresh_optimizers_state_is_filled_as_horovod_does(make: Make) -> None:
    spawn_ranks(fill, 2, make, backend="deepytorch")


def resume(rank: int, world_size: int) -> None:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = momentum(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)  # of the optimizer within
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    if rank == 0:  # has loaded a checkpoint, say
        optimizer.load_state_dict(momentum_after_a_step(copy.deepcopy(model)))
    before = copy.deepcopy(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "the other rank's weights would decay alone"
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(rank + step))).sum().backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (step + 1))
    for name, parameter in model.named_parameters():
        assert_same_on_all_ranks(parameter.detach(), name)
    hvd.shutdown()


def momentum_after_a_step(model: nn.Module) -> dict[str, Any]:
    optimizer = momentum(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def test_where_the_root_has_a_state_weights_and_schedulers_stay_alike() -> None:
    spawn_ranks(resume, 2, backend="deepytorch")


def other_kinds(rank: int, world_size: int) -> None:
    hvd.init()
    table = nn.Embedding(4, 2, sparse=True)
    for kind in (torch.optim.SGD, torch.optim.SparseAdam):
        hvd.broadcast_optimizer_state(kind([table.weight], lr=0.1), 0, model=table)
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        table.weight.grad = None
    weight = nn.Parameter(torch.ones(2))
    hvd.broadcast_optimizer_state(torch.optim.LBFGS([weight], lr=0.5 + rank), 1)
    assert weight.grad is None
    values = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
    hvd.broadcast_parameters(values, root_rank=1)
    hvd.broadcast_parameters((value for value in values), root_rank=0)
    assert [value.tolist() for value in values] == [[1.0, 1.0], [1.0, 1.0, 1.0]]
    hvd.broadcast_parameters({}, root_rank=0)
    for gives in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises(Exception, match=r"pickle|lock") as error:
            gives(threading.Lock() if rank == 0 else None)
        assert ("rank 0 could not pickle its own" in str(error.value)) == (rank == 1)
    assert hvd.allgather_object([rank] * rank) == [[], [1]]
    hvd.shutdown()


def test_sparse_gradients_lists_of_tensors_and_objects_that_do_not_pickle() -> None:
    spawn_ranks(other_kinds, 2, backend="deepytorch")


def names_of(rank: int, world_size: int) -> None:
    hvd.init()
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    groups = [{"params": first.parameters()}, {"params": second.parameters()}]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, lr=0.1), backward_passes_per_step=3
    )
    names = [f"allreduce.noname.{group}.{index}" for group in range(2) for index in range(2)]
    assert sorted(optimizer._parameter_names.values()) == names
    assert optimizer.backward_passes_per_step == 3
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    third = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [third]})
    assert optimizer._parameter_names[third] == "allreduce.noname.2.0"
    hvd.shutdown()


def test_names_of_parameters() -> None:
    spawn_ranks(names_of, 2, backend="deepytorch")


def train_elastically(rank: int, world_size: int) -> list[list[int]]:
    hvd.init()
    torch.manual_seed(rank)
    model = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()))
    sampler = hvd.elastic.ElasticSampler(range(11), seed=1)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, batch=7 * rank
    )
    state.register_reset_callbacks([lambda: seen.append([-1])])
    seen: list[list[int]] = []

    @hvd.elastic.run
    def train(state: Any, epochs: int) -> str:
        assert state.batch == 0  # the root's
        for epoch in range(epochs):
            state.sampler.set_epoch(epoch)
            seen.append(list(state.sampler))
            for index, sample in enumerate(state.sampler):
                optimizer.zero_grad()
                model(torch.tensor([float(sample)])).sum().backward()
                optimizer.step()
                state.sampler.record_batch(index, 1)
                if index == 2:
                    break
            state.batch = epoch
            state.commit()
        return "done"

    assert train(state, 2) == "done"
    kept = copy.deepcopy(model.state_dict())
    model.weight.data.zero_()
    state.batch = 100
    state.restore()
    state.on_reset()
    assert (state.batch, sampler.state_dict()) == (1, {"epoch": 1, "processed_num": 6})
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name])
        assert_same_on_all_ranks(value, name)
    seen.append(list(sampler))
    assert len(sampler) == 3
    state.check_host_updates()
    hvd.shutdown()
    return seen


def test_an_elastic_script_in_a_job_whose_ranks_stay() -> None:
    first, second = spawn_ranks(train_elastically, 2, backend="deepytorch")
    for epoch in range(2):
        # Every sample, and the first one again, as 11 can't be halved; in another order each time.
        dealt = [
            sample for pair in zip(first[epoch], second[epoch], strict=True) for sample in pair
        ]
        assert sorted(dealt[:11]) == list(range(11))
        assert dealt[11] == dealt[0]
    assert first[0] != first[1]
    assert first[2] == second[2] == [-1]
    rest = [sample for pair in zip(first[3], second[3], strict=True) for sample in pair][:5]
    assert sorted(rest + first[1][:3] + second[1][:3]) == list(range(11))
