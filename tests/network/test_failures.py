"""A job between nodes ends in time, and says who is gone, and by which interface."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.c10d import backend
from deepytorch_core.testing import rank_store, spawn_ranks
from deepytorch_core.testing.emulation import Network, Placement, Setting, links, seats

NOTICED_WITHIN_S = 3.0  # of a peer that is gone for good, as promised
LONG_S = 30.0  # of a group's operation where its limit must not be what ends it
NODE_OF = (0, 0, 1, 1)
WORLD = len(NODE_OF)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2, Setting(rate_bps=1e9)) as made:
        yield made


def placed(network: Network) -> Placement:
    return Placement(network, seats([2, 2]))


def reduce_until_told(
    rank: int, world_size: int, started: Path, stop: Path, killed: int = -1, limit_s: float = LONG_S
) -> tuple[str, float]:
    """ "fine", or the error, of all_reduces that go on until the file `stop` exists; and when."""
    backend.register()
    dist.init_process_group(
        "deepytorch",
        store=rank_store("job"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
    )
    rounds = 0
    try:
        while True:
            # The last element says whether rank 0 saw the file, to all of them.
            data = torch.ones(1 << 16)
            data[-1] = float(rank == 0 and stop.exists())
            dist.all_reduce(data)
            rounds += 1
            if not torch.equal(data[:-1], torch.full((data.numel() - 1,), float(world_size))):
                return "WRONG DATA", time.monotonic()
            if data[-1] > 0:
                return "fine", time.monotonic()
            if rounds == 3:
                (started / str(rank)).touch()
                if rank == killed:
                    (started / "death").write_text(repr(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic()
    finally:
        # A group that failed must let go of its ranks in time, too.
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """Make the folder in which every rank that has come so far leaves a file."""
    folder = tmp_path / "started"
    folder.mkdir()
    return folder


def once_started(folder: Path, act: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        deadline = time.monotonic() + 40
        while len(list(folder.iterdir())) < WORLD and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


class Lateness:
    """How much later than asked for this machine wakes its threads, summed up: it may be busy."""

    def __init__(self) -> None:
        self._ticks: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            before = time.monotonic()
            time.sleep(0.02)
            self._ticks.append((before, time.monotonic() - before - 0.02))

    def between(self, start: float, end: float) -> float:
        return sum(late for at, late in self._ticks if start - 1 <= at <= end)


def check_told(
    network: Network, end: tuple[str, float] | None, since: float, late: Lateness, rank: int
) -> None:
    """The error names a rank of the other node with its address and interface, and is in time."""
    assert end is not None
    text, at = end
    other = 1 - NODE_OF[rank]
    names = [
        f"rank {peer} ({network.address(other)}:" for peer in range(WORLD) if NODE_OF[peer] == other
    ]
    assert any(name in text for name in names), (rank, text)
    assert f" by {links.INTERFACE})" in text, (rank, text)
    assert at - since < NOTICED_WITHIN_S + late.between(since, at), (rank, at - since, text)


def cut(network: Network, how: str) -> None:
    if how == "link down":
        network.set_link(1, up=False)
    else:
        network.set_blackhole(1, True)


@pytest.mark.parametrize(
    "how", [pytest.param("link down", marks=pytest.mark.extended), "blackhole"]
)
def test_a_node_that_is_gone_is_named_on_every_rank_in_time(
    network: Network, started: Path, how: str
) -> None:
    since: list[float] = []

    def act() -> None:
        since.append(time.monotonic())
        cut(network, how)

    thread = once_started(started, act)
    with Lateness() as late:
        ended = spawn_ranks(
            reduce_until_told,
            WORLD,
            started,
            started / "never",
            placement=placed(network),
            timeout_s=60,
        )
    thread.join()
    for rank, end in enumerate(ended):
        check_told(network, end, since[0], late, rank)


def test_a_killed_peer_is_named_on_every_other_rank_in_time(
    network: Network, started: Path
) -> None:
    with Lateness() as late:
        ended = spawn_ranks(
            reduce_until_told,
            WORLD,
            started,
            started / "never",
            3,
            placement=placed(network),
            timeout_s=60,
            expect_dead={3},
        )
    since = float((started / "death").read_text())
    assert ended[3] is None
    for rank in (0, 1):
        check_told(network, ended[rank], since, late, rank)
        # By its own connection, or by rank 2, which has another word for it and is named with it.
        named = (f"rank 3 ({network.address(1)}:", f"told by rank 2 ({network.address(1)}:")
        assert any(words in ended[rank][0] for words in named), ended[rank][0]
        assert "rank 3 (" in ended[rank][0]
    # Its neighbour saw the process end.
    text, at = ended[2]
    assert "rank 3 (" in text, text
    assert at - since < NOTICED_WITHIN_S + late.between(since, at)


# Longer than silence is borne, and less.
@pytest.mark.parametrize("limit_s", [LONG_S, 1.0])
def test_a_link_that_is_down_for_two_seconds(
    network: Network, started: Path, tmp_path: Path, limit_s: float
) -> None:
    stop = tmp_path / "stop"

    def interrupt() -> None:
        network.set_link(1, up=False)
        time.sleep(2)
        network.set_link(1, up=True)
        time.sleep(0.5)
        stop.touch()

    thread = once_started(started, interrupt)
    ended = spawn_ranks(
        reduce_until_told,
        WORLD,
        started,
        stop,
        limit_s=limit_s,
        placement=placed(network),
        timeout_s=60,
    )
    thread.join()
    # Recovered, or failed within the time limit: on all ranks alike, and never wrong data.
    texts = [text for text, _ in ended]
    assert "WRONG DATA" not in texts
    assert len({text == "fine" for text in texts}) == 1, texts
    if limit_s < 2:
        assert "fine" not in texts
    if "fine" not in texts:
        # A rank that waited for its neighbour, which waited for the link, may name that one.
        assert all("rank " in text.partition(":")[2] for text in texts), texts
        assert any(f" by {links.INTERFACE})" in text for text in texts), texts
