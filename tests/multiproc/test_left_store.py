"""Rank 0, which serves the job's store, ends before the others use a group for the first time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from datetime import timedelta
from typing import Any

import pytest

from deepytorch_core.testing.ports import free_port

LATE_S = 1.0  # so much later than the end of rank 0 the others use their group
SOON_S = 1.0
PATIENCE_S = 60.0


def work(rank: int, port: int, how: str, told: Any) -> None:
    """Rank 0 ends in the way of `how`; the others use their group after that."""
    os.environ.update(  # noqa: TID251  as a launcher would
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="3",
        LOCAL_WORLD_SIZE="3",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    import deepytorch  # noqa: F401

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    if how != "no groups":
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        if how == "destroys":
            dist.destroy_process_group()
        told.put((rank, time.time()))
        if how == "raises":
            raise SystemExit(3)
        return
    time.sleep(LATE_S)
    if how in ("destroys", "returns"):
        value = torch.ones(3)
        dist.all_reduce(value, group=second)
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,))
        dist.all_reduce(sparse, group=second)  # gloo's, which connects now
        assert value.tolist() == [2.0] * 3
        assert first is not second
    told.put((rank, time.time()))


def run(how: str) -> tuple[dict[int, int | None], dict[int, float], float]:
    """Each rank's status, when each had done its work, and when rank 0's process had ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "deepytorch"])
    told, port = context.SimpleQueue(), free_port()
    ranks = [context.Process(target=work, args=(rank, port, how, told)) for rank in range(3)]
    for each in ranks:
        each.start()
    ranks[0].join(PATIENCE_S)
    ended_at = time.time()
    for each in ranks:
        each.join(PATIENCE_S)
        each.kill()
    done = {}
    while not told.empty():
        rank, at = told.get()
        done[rank] = at
    return {rank: each.exitcode for rank, each in enumerate(ranks)}, done, ended_at


@pytest.mark.parametrize("how", ["destroys", "returns"])
def test_a_group_is_used_first_after_rank_0_is_through(how: str) -> None:
    statuses, done, ended_at = run(how)
    assert statuses == {0: 0, 1: 0, 2: 0}
    assert done[0] + LATE_S / 2 < done[1]
    assert ended_at > max(done[1], done[2])
    assert ended_at < max(done[1], done[2]) + 5.0


@pytest.mark.parametrize("how", ["no groups", "raises"])
def test_nobody_is_waited_for_without_need(how: str) -> None:
    statuses, done, ended_at = run(how)
    assert statuses == {0: 3 if how == "raises" else 0, 1: 0, 2: 0}
    assert ended_at < done[0] + SOON_S


def test_connections_of_this_process_are_no_others() -> None:
    from deepytorch_core.c10d import store_keeping

    def connected(server: socket.socket, family: socket.AddressFamily, host: str) -> socket.socket:
        client = socket.socket(family)
        client.connect((host, server.getsockname()[1]))
        return client

    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.listen()
        port = server.getsockname()[1]
        by_4 = connected(server, socket.AF_INET, "127.0.0.1")
        by_6 = connected(server, socket.AF_INET6, "::ffff:127.0.0.1")
        accepted = [server.accept()[0] for _ in range(2)]
        try:
            assert store_keeping._others(port) == 0
            by_4.close()  # its end is another's now, as far as this process can tell
            assert store_keeping._others(port) == 1
        finally:
            for each in (by_4, by_6, *accepted):
                each.close()
    assert store_keeping._others(port) == 0
