"""DistributedOptimizer against plain averaging over gloo, and what goes around training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deepytorch
import deepytorch.integrations.horovod as hvd
from deepytorch_core.testing import assert_same_on_all_ranks, spawn_ranks

STEPS = 20


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    # The first layer is large enough to travel alone, the others are fused.
    return nn.Sequential(nn.Linear(16, 2400), nn.Tanh(), nn.Linear(2400, 8), nn.Linear(8, 4))


def batch(rank: int, step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(rows, 16, generator=generator)
    return inputs, torch.randn(rows, 4, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def by_hand(rank: int, world_size: int, passes: int = 1) -> list[float]:
    """The reference: gradients averaged over gloo, without us."""
    deepytorch.deactivate()
    dist.init_process_group("gloo")
    model = small_model()
    optimizer = sgd(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            loss = loss_of(model, rank, step * passes + number)
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
    return losses


def with_horovod(
    rank: int, world_size: int, passes: int = 1, **settings: Any
) -> tuple[list[float], set[str], str]:
    hvd.init()
    model = small_model(seed=rank)
    hvd.broadcast_parameters(small_model().state_dict() if rank == 0 else model.state_dict(), 0)
    model = small_model() if rank == 0 else model
    optimizer = hvd.DistributedOptimizer(
        sgd(model),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **settings,
    )
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            loss = loss_of(model, rank, step * passes + number)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    assert isinstance(optimizer, torch.optim.SGD)
    for name, parameter in model.named_parameters():
        assert_same_on_all_ranks(parameter.detach(), name)
    rows = deepytorch.report().rows
    hvd.shutdown()
    native = {row.op for row in rows if row.algorithm != "delegate"}
    return losses, native, type(optimizer).__name__


@pytest.mark.parametrize("passes", [1, 2])
def test_losses_are_bitwise_those_of_averaging_over_gloo(passes: int) -> None:
    expected = spawn_ranks(by_hand, 2, passes, fresh=True)
    found = spawn_ranks(with_horovod, 2, passes, backend="deepytorch")
    assert [losses for losses, _, _ in found] == expected
    for _, ops, kind in found:
        assert {"all_reduce", "broadcast"} <= ops
        assert kind == "SGD"


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"compression": hvd.Compression.fp16}, 2e-3),
        ({"compression": hvd.Compression.bf16}, 2e-2),
        ({"groups": 2}, 1e-6),
        ({"gradient_predivide_factor": 2.0}, 1e-6),
    ],
)
def test_other_ways_to_reduce_train_alike(settings: dict[str, Any], tolerance: float) -> None:
    expected = spawn_ranks(with_horovod, 2, backend="deepytorch")
    found = spawn_ranks(with_horovod, 2, backend="deepytorch", **settings)
    for (losses, _, _), (reference, _, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(reference, rel=tolerance, abs=tolerance)


def clip_and_schedule(rank: int, world_size: int) -> None:
    hvd.init()
    ours, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(sgd(ours))
    plain = sgd(reference)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for step in range(5):
        loss_of(ours, rank, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

        (sum(loss_of(reference, r, step) for r in range(world_size)) / world_size).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        plain_scheduler.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.05 / 4
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    hvd.shutdown()


def test_clipping_between_synchronize_and_step_and_a_scheduler() -> None:
    spawn_ranks(clip_and_schedule, 2, backend="deepytorch")


class Branches(nn.Module):
    """Uses another layer on each rank, and one on none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, value: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](value)


def miss_gradients(rank: int, world_size: int) -> None:
    hvd.init()
    torch.manual_seed(0)
    model = Branches()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = copy.deepcopy(model)
    for _ in range(2):
        model(torch.ones(1, 2), rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for index, layer in enumerate(model.layers):
        change = (before.layers[index].weight - layer.weight).detach()
        expected = 1.0 if index < 2 else 0.0
        torch.testing.assert_close(change, torch.full((1, 2), expected))
    hvd.shutdown()


def test_a_gradient_that_some_or_all_ranks_lack_counts_as_zero() -> None:
    spawn_ranks(miss_gradients, 2, backend="deepytorch")


def embed(rank: int, world_size: int, as_dense: bool) -> None:
    hvd.init()
    if rank == 0:  # one that never steps, as some have on one rank to save its state
        hvd.DistributedOptimizer(sgd(small_model()), sparse_as_dense=as_dense)
    torch.manual_seed(0)
    table = nn.Embedding(6, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense
    )
    table(torch.tensor([rank, 5])).sum().backward()
    optimizer.step()
    change = (before - table.weight.detach())[:, 0].tolist()
    assert change == pytest.approx([0.5, 0.5, 0.0, 0.0, 0.0, 1.0])
    hvd.shutdown()


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool) -> None:
    spawn_ranks(embed, 2, as_dense, backend="deepytorch")


def misuse(rank: int, world_size: int) -> None:
    hvd.init()
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, rank, 0).backward()
    with pytest.raises(AssertionError, match="zero_grad.. was called after loss.backward"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        loss_of(model, rank, 1).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    named = list(model.named_parameters())
    for arguments, message in [
        ({"named_parameters": [p for _, p in named]}, "sequence of tuples"),
        ({"named_parameters": [("a", p) for _, p in named]}, "must be unique.*duplicates: a"),
        ({"named_parameters": named[1:]}, r"were not named: those of shapes \[\(2400, 16\)\]"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op != Average"),
        ({"groups": [[named[0][1], named[0][1]]]}, "only appear once"),
    ]:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(sgd(model), **arguments)
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(hvd.IntegrationError, match="Adasum is not supported: use op=hvd.Average"):
        hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum)
    hvd.shutdown()


def test_misuse_is_told() -> None:
    spawn_ranks(misuse, 2, backend="deepytorch")


def grow(rank: int, world_size: int) -> None:
    hvd.init()
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=1.0))
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.1})
    (first(torch.ones(2)) + second(torch.ones(2)) * rank).sum().backward()
    optimizer.step()
    assert second.bias.grad is not None
    assert second.bias.grad.item() == 0.5
    state = optimizer.state_dict()
    assert state.keys() == torch.optim.SGD(first.parameters(), lr=1.0).state_dict().keys()
    optimizer.load_state_dict(state)
    hvd.shutdown()


def test_parameters_added_later_and_the_state_dict() -> None:
    spawn_ranks(grow, 2, backend="deepytorch")


def train_a_layer_later(
    model: nn.Module, layer: nn.Module, optimizer: Any, rank: int, *, add: bool = False
) -> None:
    layer.requires_grad_(False)
    for step in range(5):
        if step == 2:
            layer.requires_grad_(True)
            if add:
                optimizer.add_param_group({"params": layer.parameters()})
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def unfreeze(rank: int, world_size: int) -> None:
    hvd.init()
    stock, added, forgotten = (small_model() for _ in range(3))
    in_ddp = DistributedDataParallel(stock, find_unused_parameters=True)
    train_a_layer_later(in_ddp, stock[2], sgd(stock), rank)
    optimizer = hvd.DistributedOptimizer(sgd(nn.ModuleList([added[0], added[3]])))
    train_a_layer_later(added, added[2], optimizer, rank, add=True)
    for name, weight in added.named_parameters():
        assert torch.equal(weight, stock.get_parameter(name))
        assert_same_on_all_ranks(weight, name)

    forgotten[2].requires_grad_(False)
    named = forgotten.named_parameters()
    optimizer = hvd.DistributedOptimizer(sgd(forgotten), named_parameters=named)
    with pytest.warns(UserWarning, match=r"^2\.weight, 2\.bias: frozen when the") as told:
        train_a_layer_later(forgotten, forgotten[2], optimizer, rank)
    assert len(told) == 1
    hvd.shutdown()


def test_a_layer_that_trains_later_is_added_then_or_named() -> None:
    spawn_ranks(unfreeze, 2, backend="deepytorch")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)


def hand_over(rank: int, world_size: int, make: Callable[[nn.Module], Any]) -> None:
    hvd.init()
    model = small_model(seed=rank)
    optimizer = make(model)
    if rank == 1:
        for step in range(2):  # only the root has a state, and another learning rate
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.125
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1, model=model)
    assert optimizer.param_groups[0]["lr"] == 0.125
    state = optimizer.state_dict()["state"]
    assert len(state) == len(list(model.parameters()))
    for index, entry in state.items():
        for name, value in entry.items():
            assert_same_on_all_ranks(value, f"{index}.{name}")
    loss_of(model, 0, 5).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert_same_on_all_ranks(parameter.detach(), name)
    hvd.shutdown()


@pytest.mark.parametrize("make", [sgd, adam])
def test_the_optimizers_state_goes_to_all(make: Callable[[nn.Module], Any]) -> None:
    spawn_ranks(hand_over, 2, make, backend="deepytorch")


def run_out_of_batches(rank: int, world_size: int) -> tuple[list[int], list[float]]:
    hvd.init()
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    last, metrics = [], []
    for epoch in range(2):
        # The ranks have 1, 3 and 2 batches, then 3, 1 and 2.
        num_batches = [1, 3, 2][rank] if epoch == 0 else [3, 1, 2][rank]
        for step in range(num_batches):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            total = hvd.allreduce(torch.tensor(float(rank + 1)), op=hvd.Sum, name="metric")
            metrics.append(total.item())
        last.append(hvd.join())
        metrics.append(hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum).item())
    optimizer.zero_grad()
    hvd.shutdown()
    return last, metrics


def test_join_lets_ranks_have_different_numbers_of_batches() -> None:
    found = spawn_ranks(run_out_of_batches, 3, backend="deepytorch")
    assert [last for last, _ in found] == [[1, 0]] * 3
    # Sums over the ranks that were still there: 1 + 2 + 3, then 2 + 3, then 2 alone.
    assert found[0][1] == [6.0, 3.0, 6.0, 4.0, 1.0, 3.0]
    assert found[1][1] == [6.0, 5.0, 2.0, 3.0, 6.0, 3.0]
    assert found[2][1] == [6.0, 5.0, 3.0, 6.0, 4.0, 3.0]


def join_and_reduce(rank: int, world_size: int) -> int:
    hvd.init()
    everyone = float(world_size)
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(4), op=hvd.Sum, name="early")
        last = hvd.join()  # with an operation of its own under way
        assert hvd.synchronize(handle).tolist() == [everyone] * 4
        hvd.shutdown()
        return last
    assert hvd.allreduce(torch.ones(4), op=hvd.Sum, name="early").tolist() == [everyone] * 4
    assert hvd.allreduce(torch.ones(4), op=hvd.Sum).tolist() == [everyone - 1] * 4
    assert hvd.allreduce(torch.ones(4)).tolist() == pytest.approx([(everyone - 1) / everyone] * 4)
    assert hvd.allreduce(torch.tensor([-2, 5]), op=hvd.Max).tolist() == [-2, 5]
    assert hvd.allreduce(torch.tensor([-2.0, 5.0]), op=hvd.Product).tolist() == [4.0, 25.0]
    both = [torch.ones(2), torch.tensor([3])]
    sums = hvd.grouped_allreduce(both, op=hvd.Sum, prescale_factor=2.0)
    assert [total.tolist() for total in sums] == [[4.0, 4.0], [12]]
    for refused in (
        lambda: hvd.broadcast(torch.tensor([rank]), root_rank=2),
        lambda: hvd.alltoall(torch.arange(3), splits=[0, 1, 2]),
        lambda: hvd.reducescatter(torch.ones(3), op=hvd.Sum),
        lambda: hvd.broadcast_object(rank, root_rank=1),
        lambda: hvd.allgather(torch.ones(rank)),
    ):
        with pytest.raises(hvd.HorovodInternalError, match="not supported with Join at this time"):
            refused()
    hvd.barrier()
    last = hvd.join()
    hvd.shutdown()
    return last


def test_a_rank_that_joined_takes_part_in_reductions_alone() -> None:
    last = spawn_ranks(join_and_reduce, 3, backend="deepytorch")
    assert last[0] in (1, 2)
    assert last == [last[0]] * 3


def with_closure(rank: int, world_size: int) -> list[float]:
    hvd.init()
    model = small_model()
    stock = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    optimizer = hvd.DistributedOptimizer(stock, named_parameters=model.named_parameters())
    losses = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    for name, parameter in model.named_parameters():
        assert_same_on_all_ranks(parameter.detach(), name)
    return losses


def test_closures_that_are_evaluated_again_and_again_keep_the_ranks_alike() -> None:
    first, second = spawn_ranks(with_closure, 2)
    assert first == second
    assert first[-1] < 2.0
