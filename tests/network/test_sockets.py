"""The connections between nodes: options that reach them, and one that turns silent."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from deepytorch_core.c10d import backend
from deepytorch_core.testing import rank_store, spawn_ranks
from deepytorch_core.testing.emulation import Network, Placement, Setting, links, seats

TCP_NOTSENT_LOWAT, NOTSENT_OF_OURS = 25, 64 << 10  # no other socket of a rank has it


def join(rank: int, world_size: int, limit_s: float = 40.0) -> None:
    backend.register()
    dist.init_process_group(
        "deepytorch",
        store=rank_store("sockets"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
    )
    dist.all_reduce(torch.ones(100_003))


@contextlib.contextmanager
def own_sockets() -> Iterator[list[socket.socket]]:
    """This process's connections to other nodes."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # no socket, or none of TCP
                duplicate = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                if duplicate.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == NOTSENT_OF_OURS:
                    found.append(duplicate)
        yield found


def settings(rank: int, world_size: int, variables: dict[str, str]) -> list[tuple[int, int, str]]:
    """Return what each connection may hold in either direction, and its congestion control."""
    os.environ.update(variables)  # noqa: TID251
    join(rank, world_size)
    with own_sockets() as sockets:
        found = [
            (
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF),
                connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                .partition(b"\0")[0]
                .decode(),
            )
            for connection in sockets
        ]
    dist.destroy_process_group()
    return found


def test_options_reach_every_connection() -> None:
    asked = {
        "DEEPYTORCH_NUM_SOCKETS": "3",
        "DEEPYTORCH_SOCKET_BYTES": str(100 << 10),
        "DEEPYTORCH_TCP_CONGESTION": "reno",
    }
    with Network(2) as network:
        placement = Placement(network, seats([1, 1]))
        for found in spawn_ranks(settings, 2, asked, placement=placement):
            # Three for data and one for control; Linux doubles a size for its own needs.
            assert found == [(200 << 10, 200 << 10, "reno")] * 4
        usual = {"DEEPYTORCH_NUM_SOCKETS": "3"}
        for found in spawn_ranks(settings, 2, usual, placement=placement):
            assert len(found) == 4
            assert {control for *_, control in found} == {network.congestion_control}
            assert all(sent != 200 << 10 for sent, *_ in found)


EXPLAINING_S = 4.0  # kExplaining in csrc/comm/end_process.cpp


def reduce_until_told(
    rank: int, world_size: int, folder: Path, limit_s: float
) -> tuple[str, float]:
    """The error of all_reduces that go on, and when; rank 1 names a port of a data connection."""
    os.environ["DEEPYTORCH_NUM_SOCKETS"] = "2"  # noqa: TID251
    join(rank, world_size, limit_s)
    if rank == 1:
        with own_sockets() as sockets:
            user_timeout = socket.TCP_USER_TIMEOUT
            data = [
                connection
                for connection in sockets
                if not connection.getsockopt(socket.IPPROTO_TCP, user_timeout)
            ]
            assert len(data) == 2, "the third is for control"
            (folder / "name").write_text(str(data[0].getsockname()[1]))
        (folder / "name").rename(folder / "port")
    try:
        while True:
            total = torch.arange(100_003.0) + rank
            dist.all_reduce(total)
            if not torch.equal(total, 2 * torch.arange(100_003.0) + 1):
                return "WRONG DATA", time.monotonic()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic()
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def test_a_connection_that_turns_silent_ends_in_an_error_that_names_the_peer(
    tmp_path: Path,
) -> None:
    """One of two for data: the other and that for control go on, so the node seems well."""
    lost: list[float] = []
    limit_s = 4.0
    with Network(2, Setting(rate_bps=1e9)) as network:

        def lose() -> None:
            deadline = time.monotonic() + 60
            while not (tmp_path / "port").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            network.stall_flow(1, int((tmp_path / "port").read_text()))
            lost.append(time.monotonic())

        thread = threading.Thread(target=lose)
        thread.start()
        ended = spawn_ranks(
            reduce_until_told,
            2,
            tmp_path,
            limit_s,
            placement=Placement(network, seats([1, 1])),
            timeout_s=80,
        )
        thread.join()
        for rank, (text, at) in enumerate(ended):
            # The rank whose limit ended first tells the other of the one that it waited for.
            names = (f"rank {peer} ({network.address(peer)}:" for peer in range(2))
            assert any(name in text for name in names), (rank, text)
            assert f" by {links.INTERFACE})" in text, (rank, text)
            assert "timed out after 4000 ms" in text, text
            # At the limit; what the error begins with is looked for, EXPLAINING_S at most.
            assert at - lost[0] < limit_s + EXPLAINING_S + 1.0, (rank, at - lost[0], text)
