"""Groups that span nodes, by processes that pretend to be on several.

Data crosses the loopback interface. Every collective against stock gloo, and what survivors hear
when a rank dies elsewhere.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepytorch_core import _core
from deepytorch_core.testing import rank_store, spawn_ranks

# Five ranks, cyclic and uneven: three on one node, two on the other.
NODES = {"DEEPYTORCH_NODE_ID": "a,b,a,b,a"}
WORLD = 5
ONE_EACH = {"DEEPYTORCH_NODE_ID": "a,b"}
# This is promised for a rank that dies on another node.
NOTICED_WITHIN_S = 3.0

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
SIZES = (1, 1023, 70001)


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, so that every sum is exact in every type and order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 5, (count,), generator=generator).to(dtype)


def native_ops() -> set[str]:
    return {row["op"] for row in _core.statistics() if row["algorithm"] != "delegate"}


Collective = Callable[[dist.ProcessGroup, int, int, torch.dtype], list[torch.Tensor]]


def all_reduce(
    group: dist.ProcessGroup, rank: int, count: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    tensor = values(rank, count, dtype)
    dist.all_reduce(tensor, group=group)
    largest = values(rank, count, dtype)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return [tensor, largest]


def reduce(
    group: dist.ProcessGroup, rank: int, count: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    tensor = values(rank, count, dtype)
    dist.reduce(tensor, 3, group=group)
    return [tensor] if rank == 3 else []  # gloo uses the others' as scratch


def broadcast(
    group: dist.ProcessGroup, rank: int, count: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    tensors = [values(rank, count, dtype) for _ in range(WORLD)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, root, group=group)
    return tensors


def all_gather(
    group: dist.ProcessGroup, rank: int, count: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    parts = [torch.empty(count, dtype=dtype) for _ in range(WORLD)]
    dist.all_gather(parts, values(rank, count, dtype), group=group)
    return parts


def reduce_scatter(
    group: dist.ProcessGroup, rank: int, count: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    output = torch.empty(count, dtype=dtype)
    inputs = [values(rank, count, dtype, salt=to) for to in range(WORLD)]
    dist.reduce_scatter(output, inputs, group=group)
    return [output]


def gather(
    group: dist.ProcessGroup, rank: int, count: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    parts = [torch.empty(count, dtype=dtype) for _ in range(WORLD)] if rank == 1 else None
    dist.gather(values(rank, count, dtype), parts, dst=1, group=group)
    return parts or []


def scatter(
    group: dist.ProcessGroup, rank: int, count: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    output = torch.empty(count, dtype=dtype)
    parts = [values(9, count, dtype, salt=to) for to in range(WORLD)] if rank == 4 else None
    dist.scatter(output, parts, src=4, group=group)
    return [output]


def all_to_all(
    group: dist.ProcessGroup, rank: int, count: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Even, and uneven parts, some of them empty."""
    even = torch.empty(WORLD * count, dtype=dtype)
    dist.all_to_all_single(even, values(rank, WORLD * count, dtype), group=group)
    sent = [count * ((rank + to) % 3) for to in range(WORLD)]
    received = [count * ((rank + source) % 3) for source in range(WORLD)]
    uneven = torch.empty(sum(received), dtype=dtype)
    dist.all_to_all_single(uneven, values(rank, sum(sent), dtype), received, sent, group=group)
    return [even, uneven]


COLLECTIVES: tuple[Collective, ...] = (
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    gather,
    scatter,
    all_to_all,
)


def compared_with_gloo(rank: int, world_size: int) -> set[str]:
    ours = dist.group.WORLD
    assert ours is not None
    stock = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    _core.reset_statistics()
    for collective in COLLECTIVES:
        for dtype in DTYPES:
            for count in SIZES:
                found = collective(ours, rank, count, dtype)
                expected = collective(stock, rank, count, dtype)
                for output, other in zip(found, expected, strict=True):
                    assert torch.equal(output, other), (collective.__name__, dtype, count)
    dist.barrier()
    return native_ops()


def test_every_collective_gives_what_gloo_gives() -> None:
    done = spawn_ranks(compared_with_gloo, WORLD, backend="deepytorch", env=NODES)
    expected = {collective.__name__ for collective in COLLECTIVES} | {"barrier"}
    assert all(ops == expected for ops in done), done


def random_sums(rank: int, world_size: int) -> list[tuple[float, bytes]]:
    """Relative errors against float64, and the bits."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (333, 200001):
            inputs = [
                torch.randn(count, generator=torch.Generator().manual_seed(each)).to(dtype)
                for each in range(world_size)
            ]
            exact = torch.stack(inputs).double()
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, async_op=True).wait()
            error = (tensor.double() - exact.sum(0)).abs() / exact.abs().sum(0)
            average = inputs[rank].clone()
            dist.all_reduce(average, dist.ReduceOp.AVG)
            error = error.maximum((average.double() - exact.mean(0)).abs() / exact.abs().mean(0))
            epsilon = torch.finfo(dtype).eps
            bits = torch.cat([tensor, average]).view(torch.uint8).numpy().tobytes()
            found.append((error.max().item() / epsilon, bits))
    return found


def test_random_sums_are_close_to_float64_and_the_same_bits_on_all_ranks() -> None:
    done = spawn_ranks(random_sums, WORLD, backend="deepytorch", env=NODES)
    assert all(rank == done[0] for rank in done)
    # One rounding on each node and one at the end.
    assert max(error for error, _ in done[0]) < 2


def pass_token(rank: int) -> None:
    token = torch.tensor([rank])
    if rank == 0:
        dist.send(token, 1)
    elif rank == 1:
        dist.recv(token, 0)
        assert token.item() == 0


def messages_and_subgroups(rank: int, world_size: int) -> tuple[set[str], list[str]]:
    pass_token(rank)  # between two nodes, before the group did anything together
    # Groups within a node and across nodes side by side, made alike on all ranks.
    within = [dist.new_group([0, 2, 4]), dist.new_group([1, 3])][rank % 2]
    across = dist.new_group([4, 1])
    for _ in range(3):
        tensor = torch.ones(50000)
        dist.all_reduce(tensor, group=within)
        assert tensor[0] == (2 if rank % 2 else 3)
        if rank in {1, 4}:
            two = torch.full((50000,), float(rank))
            dist.all_reduce(two, group=across)
            assert two[-1] == 5
    # Sends and receives of a group that spans nodes are gloo's.
    _core.reset_statistics()
    pass_token(rank)
    dist.barrier()
    rows = _core.statistics()
    delegated = {row["op"] for row in rows if row["algorithm"] == "delegate"}
    return delegated, [row["reason"] for row in rows if row["op"] in {"send", "recv"}]


def test_groups_live_side_by_side_and_messages_are_delegated_with_the_reason() -> None:
    done = spawn_ranks(messages_and_subgroups, WORLD, backend="deepytorch", env=NODES)
    assert done[0][0] == {"send"}
    assert done[1][0] == {"recv"}
    assert "different nodes" in done[0][1][0]
    assert all(delegated == set() for delegated, _ in done[2:])


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1 << 20))


def killed(rank: int, world_size: int) -> tuple[str, float]:
    survivors = dist.new_group([0, 2, 4])
    dist.all_reduce(torch.ones(5000))
    dist.all_reduce(torch.ones(10), group=survivors) if rank % 2 == 0 else None
    store = rank_store("time")

    def die() -> None:
        store.set("of death", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 3:
        threading.Timer(0.2, die).start()
    with pytest.raises(RuntimeError) as caught:
        reduce_for_ever()
    noticed = time.time() - float(store.get("of death"))
    if rank % 2 == 0:  # a group without the dead rank goes on
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=survivors)
        assert tensor[0] == 3
    return str(caught.value), noticed


def test_a_rank_killed_on_another_node_is_named_by_every_survivor() -> None:
    done = spawn_ranks(killed, WORLD, backend="deepytorch", env=NODES, expect_dead={3})
    for rank, said in enumerate(done):
        if rank == 3:
            assert said is None
            continue
        message, noticed = said
        assert "rank 3" in message, (rank, message)
        assert "died" in message, (rank, message)
        assert noticed < NOTICED_WITHIN_S, (rank, noticed)
        # By the network's own name where it is how the rank learnt of it.
        assert "by lo" in message or "pid" in message, message


def skipped(rank: int, world_size: int) -> str:
    group = dist.new_group()
    dist.all_reduce(torch.ones(5000), group=group)
    group.set_timeout(timedelta(seconds=1))
    if rank == 1:
        time.sleep(2.5)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(5000), group=group)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_on_every_node() -> None:
    done = spawn_ranks(skipped, 2, backend="deepytorch", env=ONE_EACH)
    assert "rank 1" in done[0], done[0]
    assert "timed out" in done[0], done[0]
    assert "though alive" in done[0], done[0]
    # The late one hears of it.
    assert "timed out" in done[1], done[1]
    assert "rank 0" in done[1], done[1]


def leaves(rank: int, world_size: int) -> str:
    dist.all_reduce(torch.ones(5000))
    if rank == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(5000))
    return str(caught.value)


def test_a_rank_that_left_is_named() -> None:
    done = spawn_ranks(leaves, 2, backend="deepytorch", env=ONE_EACH)
    assert "rank 1" in done[0], done[0]
    assert "has left the group" in done[0], done[0]


def refused(rank: int, world_size: int) -> list[str]:
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert tensor[0] == 2
    return [row["reason"] for row in _core.statistics() if row["op"] == "all_reduce"]


def test_an_interface_that_is_not_there_leaves_the_group_to_gloo_and_says_why() -> None:
    env = {**ONE_EACH, "DEEPYTORCH_IFNAME": "nosuch7"}
    for reasons in spawn_ranks(refused, 2, backend="deepytorch", env=env):
        assert len(reasons) == 1, reasons
        assert "nosuch7" in reasons[0], reasons
        assert "DEEPYTORCH_IFNAME" in reasons[0], reasons
