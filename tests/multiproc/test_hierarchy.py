"""Collectives in stages, within nodes and between them, against exact sums; nodes are names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from deepytorch_core.c10d import adapter
from deepytorch_core.c10d.delegates import GroupSpec, StockFactory
from deepytorch_core.testing import rank_store, spawn_ranks

RANKS = 4
COUNTS = [1, 7, 64, 10_001]

# Groups to the end of their process: torch's gloo now and then hangs in letting one go.
_kept: list[Any] = []


def _staged(rank: int, node_of: list[int], piece_bytes: int) -> Any:
    from datetime import timedelta

    adapter.load()
    spec = GroupSpec(
        store=rank_store("hierarchy"),
        rank=rank,
        size=RANKS,
        timeout=timedelta(seconds=30),
        name="nodes",
        global_ranks=list(range(RANKS)),
    )
    factory = StockFactory(spec)
    staged = factory.by_nodes("cpu", node_of, piece_bytes=piece_bytes)
    assert factory("cpu").size() == RANKS
    _kept.append((factory, staged))
    return factory, staged


def _numbers(seed: int, count: int) -> torch.Tensor:
    """Small whole ones, whose sums are exact in every order."""
    return torch.randint(-50, 50, (count,), generator=torch.Generator().manual_seed(seed)).float()


def everything(rank: int, world_size: int, node_of: list[int], piece_bytes: int) -> str:
    factory, staged = _staged(rank, node_of, piece_bytes)
    for count in COUNTS:
        inputs = [_numbers(seed, count) for seed in range(RANKS)]
        for op, expected in [
            (dist.ReduceOp.SUM, torch.stack(inputs).sum(0)),
            (dist.ReduceOp.MAX, torch.stack(inputs).amax(0)),
        ]:
            value = inputs[rank].clone()
            options = AllreduceOptions()
            options.reduceOp = op
            work = staged.allreduce([value], options)
            work.wait()
            assert work.is_completed()
            assert torch.equal(value, expected), (op, count)

        gathered = torch.empty(RANKS, count)
        staged._allgather_base(gathered, inputs[rank], AllgatherOptions()).wait()
        assert torch.equal(gathered, torch.stack(inputs)), count
        in_place = torch.empty(RANKS, count)
        in_place[rank] = inputs[rank]
        staged._allgather_base(in_place, in_place[rank], AllgatherOptions()).wait()
        assert torch.equal(in_place, gathered), count

        # Lists, also of what is not in one piece.
        columns = torch.empty(count, RANKS)
        parts = [[torch.empty(count) for _ in range(RANKS)], list(columns.unbind(1))]
        for places in parts:
            staged.allgather([places], [inputs[rank]], AllgatherOptions()).wait()
            assert all(map(torch.equal, places, inputs)), count
            share = torch.empty(count)
            staged.reduce_scatter([share], [places], ReduceScatterOptions()).wait()
            assert torch.equal(share, inputs[rank] * RANKS), count

        sent = [_numbers(seed, count * RANKS) for seed in range(RANKS)]
        received = torch.empty(count * RANKS)
        staged.alltoall_base(received, sent[rank], [], [], AllToAllOptions()).wait()
        mine = torch.cat([each.chunk(RANKS)[rank] for each in sent])
        assert torch.equal(received, mine), count

        whole = [_numbers(RANKS + seed, count * RANKS) for seed in range(RANKS)]
        part = torch.empty(count)
        staged._reduce_scatter_base(part, whole[rank], ReduceScatterOptions()).wait()
        assert torch.equal(part, torch.stack(whole).sum(0).chunk(RANKS)[rank]), count
    return str(staged.name())


@pytest.mark.parametrize("piece_bytes", [1024, 1 << 20])  # up to four pieces, and one
@pytest.mark.parametrize("node_of", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]])
def test_every_collective_in_stages(node_of: list[int], piece_bytes: int) -> None:
    found = spawn_ranks(everything, RANKS, node_of, piece_bytes)
    assert found == ["deepytorch, by nodes"] * RANKS


def uneven(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="nodes with different numbers of ranks") as caught:
        adapter.load().Hierarchy(
            0, flat=None, local=None, rail=None, node_of=[0, 0, 1], piece_bytes=1
        )
    return str(caught.value)


def test_nodes_must_be_alike() -> None:
    spawn_ranks(uneven, 1)
