"""Jobs over emulated nodes: the same results as gloo."""

from __future__ import annotations

import os
import random
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepytorch_core import _core, backend
from deepytorch_core.testing import rank_store, spawn_ranks
from deepytorch_core.testing.emulation import ORDERS, Network, Placement, Setting, links, seats

SETTING = Setting(rate_bps=1e9)


@pytest.fixture(scope="module")
def network():
    with Network(2, SETTING) as made:
        yield made


def placed(network: Network, order: str = "block") -> Placement:
    return Placement(network, seats([2, 2], order, seed=1))


def every_collective(group: dist.ProcessGroup, rank: int, size: int, count: int) -> list:
    """Results on integers, which every order of additions sums alike."""
    numbers = random.Random(rank * 1000 + count)

    def data(length: int) -> torch.Tensor:
        return torch.tensor([float(numbers.randrange(-99, 99)) for _ in range(length)])

    total = data(count)
    dist.all_reduce(total, group=group)
    largest = data(count)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    copied = data(count)
    dist.broadcast(copied, group_src=size - 1, group=group)
    gathered = [torch.empty(count) for _ in range(size)]
    dist.all_gather(gathered, data(count), group=group)
    share = torch.empty(count)
    dist.reduce_scatter(share, list(data(count * size).split(count)), group=group)
    exchanged = torch.empty(count * size)
    dist.all_to_all_single(exchanged, data(count * size), group=group)
    # Of another size from each rank to each.
    out_sizes, in_sizes = (
        [1 + (rank + 2 * peer) % 3 for peer in range(size)],
        [1 + (peer + 2 * rank) % 3 for peer in range(size)],
    )
    uneven = torch.empty(sum(in_sizes))
    dist.all_to_all_single(uneven, data(sum(out_sizes)), in_sizes, out_sizes, group=group)
    dist.barrier(group=group)
    return [total, largest, copied, *gathered, share, exchanged, uneven]


def results(rank: int, world_size: int, counts: list[int]) -> list[bool]:
    """Of every collective and every count, whether ours gave what gloo gave; none was gloo's."""
    backend.register()
    arms = []
    for name in ("gloo", "deepytorch"):
        dist.init_process_group(
            name,
            store=rank_store(name),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=40),
        )
        world = dist.group.WORLD
        _core.reset_statistics()
        arms.append([every_collective(world, rank, world_size, count) for count in counts])
        dist.destroy_process_group()
    ours = {row["op"]: row["algorithm"] for row in _core.statistics()}
    assert len(ours) >= 6, ours
    assert "delegate" not in ours.values(), ours
    return [
        torch.equal(ours, stock)
        for mine, theirs in zip(*arms, strict=True)
        for ours, stock in zip(mine, theirs, strict=True)
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_collectives_equal_gloos_in_every_rank_order(network: Network, order: str) -> None:
    counts = [1, 40001]
    for same in spawn_ranks(results, 4, counts, placement=placed(network, order)):
        assert len(same) == 10 * len(counts)
        assert all(same)


# The nodes have no other addresses, and `results` sees that nothing is left to gloo.
@pytest.mark.parametrize("order", ["block", "cyclic"])
def test_collectives_equal_gloos_over_ipv6(order: str) -> None:
    with Network(2, SETTING, only_ipv6=True) as network:
        with pytest.raises(OSError, match="unreachable"):
            network.run(0, lambda: socket.create_connection((links.address(1), 1), 5))
        counts = [1, 40001]
        for same in spawn_ranks(results, 4, counts, placement=placed(network, order)):
            assert len(same) == 10 * len(counts)
            assert all(same)


def test_collectives_equal_gloos_with_a_delay_and_uneven_nodes() -> None:
    with Network(2, Setting(rate_bps=1e9, flow_cap_bps=250e6, delay_s=0.001)) as network:
        for same in spawn_ranks(results, 3, [333], placement=Placement(network, seats([2, 1]))):
            assert all(same)


def with_gloos_own_choice(rank: int, world_size: int) -> str | None:
    os.environ.pop("GLOO_SOCKET_IFNAME")  # noqa: TID251
    backend.register()
    dist.init_process_group(
        "deepytorch",
        store=rank_store("own choice"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=40),
    )
    if rank % 2 == 0:  # between nodes these are gloo's
        dist.send(torch.full((5,), float(rank)), rank + 1)
    else:
        received = torch.empty(5)
        dist.recv(received, rank - 1)
        assert received.eq(rank - 1).all()
    return os.environ.get("GLOO_SOCKET_IFNAME")  # noqa: TID251


# The machine's own name leads nowhere on these nodes, as where /etc/hosts says 127.0.1.1.
def test_gloo_finds_the_way_to_other_nodes(network: Network) -> None:
    cyclic = placed(network, "cyclic")
    interface = network.environment(0)["GLOO_SOCKET_IFNAME"]
    assert spawn_ranks(with_gloos_own_choice, 4, placement=cyclic) == [interface] * 4
