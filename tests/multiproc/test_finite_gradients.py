"""`debug=nan`: one rank's NaN stops every rank, and each is told whose it is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepytorch_core.c10d import backend
from deepytorch_core.testing import rank_store, spawn_ranks

NAN = {"DEEPYTORCH_DEBUG": "nan"}
ODD_ONE = 1


def train(rank: int, world_size: int) -> tuple[float, str]:
    """One good step, then one with a NaN on one rank; the loss, and the error."""
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)),
        gradient_as_bucket_view=True,
    )
    loss = model(torch.full((2, 5), float(rank))).sum()
    loss.backward()
    data = torch.ones(2, 5)
    if rank == ODD_ONE:
        data[1, 4] = float("nan")
    with pytest.raises(dist.DistBackendError) as caught:
        model(data).sum().backward()
    return loss.item(), str(caught.value)


def test_the_rank_and_the_parameters_are_named() -> None:
    results = spawn_ranks(train, 3, backend="deepytorch", env=NAN)
    for loss, text in results:
        assert loss == loss
        assert "all_reduce #" in text
        assert f"rank {ODD_ONE} gave" in text
        assert "numbers that are none" in text
        assert "gradients that aren't finite: 0.weight" in text


class Blocks(torch.nn.Module):
    """Three alike, of odd sizes that two ranks can't share evenly; a switch spoils one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, spoilt: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and spoilt:
                x.register_hook(lambda gradient: torch.where(MASK, torch.nan, gradient))
        return x


# The gradient of the middle block's output is spoilt here. So are row 3 of its weight's gradient,
# that place of its bias's, and all that the first block gets.
MASK = torch.arange(5) == 3


def train_sharded(rank: int, world_size: int) -> str:
    torch.manual_seed(3)
    model = Blocks()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 5), spoilt=False).sum().backward()
    with pytest.raises(dist.DistBackendError) as caught:
        model(torch.ones(2, 5), spoilt=rank == ODD_ONE).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp2s_parameters_are_named_in_the_very_block(world_size: int) -> None:
    for text in spawn_ranks(train_sharded, world_size, backend="deepytorch", env=NAN):
        assert "reduce_scatter" in text
        assert f"rank {ODD_ONE} gave 6 of " in text
        assert text.partition("aren't finite: ")[2].startswith(
            "layers.1.weight (5 of 25), layers.1.bias (1 of 5)"
        ), text


def train_sparse(rank: int, world_size: int) -> str:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(7, 3, mode="sum", sparse=True))
    model = DistributedDataParallel(model)
    words = torch.tensor([[1, 4, 4]])
    model(words).sum().backward()
    weights = torch.tensor([1.0, 1.0, torch.inf])
    with pytest.raises(dist.DistBackendError) as caught:
        (model(words) * weights).sum().backward()
    return str(caught.value)


def test_a_sparse_gradient_is_checked_and_its_parameter_named() -> None:
    """By the rank itself; others would wait in gloo, whose the sum is."""
    (text,) = spawn_ranks(train_sparse, 1, backend="deepytorch", env=NAN)
    assert "all_reduce #" in text
    assert "rank 0 gave 2 of 6 numbers that are none" in text
    assert "gradients that aren't finite: 0.weight (2 of 6)" in text


def reduce_all(rank: int, world_size: int) -> list[str]:
    """Return the operations that refuse a NaN; each has its own group, as a refusal ends it."""
    backend.register()
    refused = []
    nan = torch.full((world_size,), float("nan"))
    calls = {
        "sum": lambda: dist.all_reduce(nan),
        "average": lambda: dist.all_reduce(nan, dist.ReduceOp.AVG),
        "max": lambda: dist.all_reduce(nan, dist.ReduceOp.MAX),
        "reduce": lambda: dist.reduce(nan, 0),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(1), nan),
        "broadcast": lambda: dist.broadcast(nan, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(world_size**2), nan),
    }
    for name, call in calls.items():
        dist.init_process_group(
            "deepytorch", store=rank_store(name), rank=rank, world_size=world_size
        )
        dist.all_reduce(torch.ones(3))
        try:
            call()
        except dist.DistBackendError as error:
            refused.append(f"{name}: {'none' if 'numbers that are none' in str(error) else error}")
        dist.destroy_process_group()
    return refused


def test_sums_are_checked_and_nothing_else() -> None:
    everywhere = spawn_ranks(reduce_all, 2, env=NAN)
    checked = ["sum", "average", "reduce", "reduce_scatter"]
    assert everywhere == [[f"{name}: none" for name in checked]] * 2
    assert spawn_ranks(reduce_all, 2) == [[], []]
