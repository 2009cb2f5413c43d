"""Jobs over emulated nodes: the same results as gloo."""

from __future__ import annotations

import os
import random
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepytorch_core import _core
from deepytorch_core.c10d import backend
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
    # Parts of another size go from each rank to each.
    out_sizes, in_sizes = (
        [1 + (rank + 2 * peer) % 3 for peer in range(size)],
        [1 + (peer + 2 * rank) % 3 for peer in range(size)],
    )
    uneven = torch.empty(sum(in_sizes))
    dist.all_to_all_single(uneven, data(sum(out_sizes)), in_sizes, out_sizes, group=group)
    dist.barrier(group=group)
    return [total, largest, copied, *gathered, share, exchanged, uneven]


def results(rank: int, world_size: int, counts: list[int]) -> list[bool]:
    """Return by collective and count whether ours gave what gloo gave; none was gloo's."""
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


@pytest.mark.parametrize(
    "order",
    [pytest.param(order, marks=[pytest.mark.extended] * (order != "random")) for order in ORDERS],
)
def test_collectives_equal_gloos_in_every_rank_order(network: Network, order: str) -> None:
    counts = [1, 40001]
    for same in spawn_ranks(results, 4, counts, placement=placed(network, order)):
        assert len(same) == 10 * len(counts)
        assert all(same)


# The nodes have no other addresses, and `results` sees that nothing is left to gloo.
@pytest.mark.parametrize("order", ["block", pytest.param("cyclic", marks=pytest.mark.extended)])
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


def sent_by_interface(rank: int, world_size: int, named: str) -> dict[str, int]:
    """Bytes that each interface of the rank's node sent while it reduced, alone on its node."""
    os.environ["DEEPYTORCH_IFNAME"] = named  # noqa: TID251

    def counters() -> dict[str, int]:
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
        rows = (line.partition(":") for line in lines)
        return {name.strip(): int(numbers.split()[8]) for name, _, numbers in rows}

    backend.register()
    dist.init_process_group(
        "deepytorch",
        store=rank_store("interfaces"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=40),
    )
    before = counters()
    total = torch.arange(1_000_003.0) + rank
    dist.all_reduce(total)
    assert torch.equal(total, 2 * torch.arange(1_000_003.0) + 1)
    dist.barrier()  # a rank is through when it has the result, though its own part may be under way
    after = counters()
    assert {row["algorithm"] for row in _core.statistics()}.isdisjoint({"delegate"})
    dist.destroy_process_group()
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("only_ipv6", [False, True])
def test_several_interfaces_that_are_named_carry_their_parts(*, only_ipv6: bool) -> None:
    with Network(2, SETTING, num_interfaces=2, only_ipv6=only_ipv6) as network:
        placement = Placement(network, seats([1, 1]))
        by_route = spawn_ranks(sent_by_interface, 2, "", placement=placement)
        by_both = spawn_ranks(sent_by_interface, 2, "eth0,eth1", placement=placement)
    crossing = 4_000_012  # bytes that each node sends the other at least, in halves and results
    for sent in by_route:  # one, the first of those that lead to the other node equally well
        assert sent["eth0"] > crossing
        assert sent["eth1"] < crossing / 100
    for sent in by_both:
        assert min(sent["eth0"], sent["eth1"]) > crossing / 4, sent
        assert sent["eth0"] + sent["eth1"] > crossing
