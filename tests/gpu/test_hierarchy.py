"""GPU collectives between nodes, which here are names of parts of one host, against exact sums.

With two GPUs ranks of different nodes share one, which NCCL takes for GPUs of different hosts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.base import config
from deepytorch_core.testing import needs_gpus, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(2)]

BACKEND = "cuda:deepytorch,cpu:deepytorch"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# bf16: 8 MiB and a bit, which goes by nodes, and a small one, which doesn't.
COUNTS = [(4 << 20) + 5, 1000]
IN_PIECES = (33 << 20) + 5  # of which a rail carries 33 MiB of an all_reduce, 66 of the others


def _own_gpu(rank: int, nodes: str) -> torch.device:
    """The rank's own if there are as many as ranks, else its own within its node."""
    names = nodes.split(",")
    if torch.cuda.device_count() < len(names):
        config.set_where_unset({"NCCL_HOSTID": names[rank]})
        rank = names[:rank].count(names[rank])
    return torch.device("cuda", rank)


def _stages(rank: int, world_size: int, nodes: str, counts: list[int]) -> set[tuple[str, str]]:
    from deepytorch_core import _core

    device = _own_gpu(rank, nodes)
    torch.cuda.set_device(device)
    for count in counts:
        generator = torch.Generator(device=device).manual_seed(count)
        wide = [
            torch.randint(-20, 20, (count * world_size,), generator=generator, device=device)
            for _ in range(world_size)
        ]
        whole = [each.to(torch.bfloat16) for each in wide]
        for asynchronous in (False, True):
            value = whole[rank][:count].clone()
            work = dist.all_reduce(value, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert torch.equal(value, torch.stack(wide).sum(0)[:count].to(torch.bfloat16))

            gathered = torch.empty(count * world_size, dtype=torch.bfloat16, device=device)
            part = whole[rank][:count].clone()
            work = dist.all_gather_into_tensor(gathered, part, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert torch.equal(gathered, torch.cat([each[:count] for each in whole]))

            places = [torch.empty_like(part) for _ in range(world_size)]
            work = dist.all_gather(places, part, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert torch.equal(torch.cat(places), gathered)
            share = torch.empty_like(part)
            work = dist.reduce_scatter(share, places, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert torch.equal(share, (wide[rank][:count] * world_size).to(torch.bfloat16))

            work = dist.all_to_all_single(gathered, whole[rank], async_op=asynchronous)
            if work is not None:
                work.wait()
            assert torch.equal(
                gathered, torch.cat([each.chunk(world_size)[rank] for each in whole])
            )

            work = dist.reduce_scatter_tensor(part, whole[rank].clone(), async_op=asynchronous)
            if work is not None:
                work.wait()
            total = torch.stack(wide).sum(0).to(torch.bfloat16)
            assert torch.equal(part, total.chunk(world_size)[rank])
    torch.cuda.synchronize()
    rows = [row for row in _core.statistics() if row["calls"]]
    return {(str(row["op"]), str(row["algorithm"])) for row in rows}


def _in_flight(rank: int, world_size: int, nodes: str) -> str:
    """Operations of all kinds that begin before any is waited for."""
    device = _own_gpu(rank, nodes)
    torch.cuda.set_device(device)
    generator = torch.Generator(device=device).manual_seed(0)
    begun: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for count in [COUNTS[0], COUNTS[0] + 2, COUNTS[0] - 1, IN_PIECES, COUNTS[1]]:
        shape = (world_size, count)
        wide = torch.randint(-20, 20, shape, generator=generator, device=device)
        whole = wide.to(torch.bfloat16)
        value, gathered = whole[rank].clone(), torch.empty_like(whole)
        share = torch.empty(count, dtype=torch.bfloat16, device=device)
        parts = whole[rank].expand(shape).contiguous()
        begun += [
            (
                dist.all_reduce(value, async_op=True),
                value,
                wide.sum(0).to(torch.bfloat16),
            ),
            (
                dist.all_gather_into_tensor(gathered, whole[rank].clone(), async_op=True),
                gathered,
                whole,
            ),
            (
                dist.reduce_scatter_tensor(share, parts, async_op=True),
                share,
                wide.sum(0).to(torch.bfloat16),
            ),
        ]
    for work, _, _ in begun:
        work.wait()
    wrong = [number for number, (_, got, right) in enumerate(begun) if not torch.equal(got, right)]
    torch.cuda.synchronize()
    return f"wrong: {wrong}"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("nodes", ["a,a,b,b", "a,b,a,b"])
def test_operations_in_flight_together_give_exact_sums(nodes: str) -> None:
    env = {"DEEPYTORCH_NODE_ID": nodes, "DEEPYTORCH_COLLECTIVES": "native"}
    how: Any = {"backend": BACKEND, "env": env, "fresh": True, "timeout_s": 120}
    assert spawn_ranks(_in_flight, 4, nodes, **how) == ["wrong: []"] * 4


@pytest.mark.timeout(150)
def test_what_is_measured_gives_exact_sums() -> None:
    """Allow either way: the machine decides which is faster."""
    nodes = "a,a,b,b"
    env = {"DEEPYTORCH_NODE_ID": nodes, "DEEPYTORCH_COLLECTIVES": "auto"}
    how: Any = {"backend": BACKEND, "env": env, "fresh": True, "timeout_s": 120}
    used = spawn_ranks(_stages, 4, nodes, COUNTS, **how)
    assert used[0] == used[1] == used[2] == used[3]
    assert {algorithm for op, algorithm in used[0] if op in OPS} <= {"hierarchical", "delegate"}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("nodes", ["a,a,b,b", "a,b,a,b"])
def test_stages_give_exact_sums(nodes: str) -> None:
    env = {"DEEPYTORCH_NODE_ID": nodes, "DEEPYTORCH_COLLECTIVES": "native"}
    how: Any = {"backend": BACKEND, "env": env, "fresh": True, "timeout_s": 120}
    used = spawn_ranks(_stages, 4, nodes, [*COUNTS, IN_PIECES], **how)
    for op in OPS:
        assert {(op, "hierarchical"), (op, "delegate")} <= used[0]
