"""The probe finds what the emulated link is, and all ranks set the same for NCCL."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from deepytorch_core.base import config
from deepytorch_core.network import addresses, nccl_table, prepare, probe
from deepytorch_core.network import link as links
from deepytorch_core.testing import rank_store, spawn_ranks
from deepytorch_core.testing.emulation import Network, Placement, Setting, seats

SECRET = bytes(range(32))


def measured(network: Network, meanwhile=None) -> links.Link:
    server = network.run(0, lambda: probe.listen(network.address(0)))
    target = server.getsockname()[:2]
    with ThreadPoolExecutor(3) as pool:
        received = pool.submit(network.run, 0, lambda: probe.receive(server, SECRET, 4.0))
        if meanwhile is not None:
            pool.submit(meanwhile, target).result()
        sent = pool.submit(network.run, 1, lambda: probe.send(target, SECRET, 2.0))
        sent.result()
        return received.result()


def test_a_cap_is_found_and_the_delay_and_the_rate(monkeypatch) -> None:
    monkeypatch.setattr(probe, "LIMIT_S", 30.0)  # the machine may be busy with other tests
    setting = Setting(rate_bps=400e6, flow_cap_bps=80e6, delay_s=0.005)
    with Network(2, setting) as network:
        found = measured(network)
    assert 30e6 < found.flow_cap_bps < 100e6
    assert 150e6 < found.rate_bps < 460e6
    assert found.flows_needed >= 4
    assert 0.01 <= found.round_trip_s < 0.1
    assert found.free_cores == 2.0


def test_a_link_without_a_cap_has_none_and_strangers_change_nothing(monkeypatch) -> None:
    monkeypatch.setattr(probe, "LIMIT_S", 30.0)

    def knock(target) -> None:
        for text in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(64)):
            with network.run(1, lambda: socket.create_connection(target, 5)) as stranger:
                stranger.sendall(text)
                time.sleep(0.02)

    with Network(2, Setting(rate_bps=400e6)) as network:
        found = measured(network, meanwhile=knock)
    assert found.flow_cap_bps is None
    assert found.flows_needed == 1


def test_nobody_comes_or_the_link_swallows_everything(monkeypatch) -> None:
    monkeypatch.setattr(probe, "LIMIT_S", 0.8)
    with Network(2) as network:
        server = network.run(0, lambda: probe.listen(network.address(0)))
        start = time.monotonic()
        with pytest.raises(probe.ProbeError, match="receiving: "):
            probe.receive(server, SECRET, 1.0)
        server = network.run(0, lambda: probe.listen(network.address(0)))
        cut = threading.Timer(0.2, lambda: network.set_blackhole(1, True))
        cut.start()
        target = server.getsockname()[:2]
        with ThreadPoolExecutor(2) as pool:
            received = pool.submit(probe.receive, server, SECRET, 1.0)
            sent = pool.submit(network.run, 1, lambda: probe.send(target, SECRET, 1.0))
            for side in (received, sent):
                with pytest.raises(probe.ProbeError):
                    side.result()
        cut.join()
        assert time.monotonic() - start < 10


def chosen(rank: int, world_size: int, folder: Path, names: list[str], *, user_set: bool) -> list:
    """The settings of each job in turn; with `user_set` the last rank has set one itself."""
    probe.LIMIT_S = 30.0
    if user_set and rank == world_size - 1:
        config.set_for_nccl({"NCCL_NSOCKS_PERTHREAD": "4"})
    with mock.patch.object(config, "cache_dir", return_value=folder):
        return [
            dict(prepare.together(rank_store(name), rank=rank, size=world_size).settings)
            for name in names
        ]


def with_table(rank: int, world_size: int, folder: Path) -> list:
    """The settings with equal tables on all nodes, then with the last rank's different."""
    own = folder / str(rank)
    entry = {"collective": "all_reduce", "first_bytes": 0, "algorithm": "tree"}
    found = []
    for name, last_bytes in (("equal", 9), ("other", 9 if rank < world_size - 1 else 99)):
        table = nccl_table.Entry(**entry, protocol="simple", last_bytes=last_bytes)
        nccl_table.write(own / nccl_table.FILE, [table])
        with mock.patch.object(config, "cache_dir", return_value=own):
            choice = prepare.together(rank_store(name), rank=rank, size=world_size, measure=False)
        found.append(sorted(choice.settings))
    return found


def without_address(rank: int, world_size: int) -> dict:
    """The first rank takes an address for its own that it doesn't have."""
    wrong = "192.0.2.77" if rank == 0 else addresses.own_address()
    with mock.patch.object(addresses, "own_address", return_value=wrong):
        return dict(prepare.together(rank_store("job"), rank=rank, size=world_size).settings)


def test_what_cannot_be_measured_is_not_set() -> None:
    with Network(2, Setting(rate_bps=800e6, flow_cap_bps=100e6)) as network:
        placement = Placement(network, seats([1, 1]))
        assert spawn_ranks(without_address, 2, placement=placement) == [{}, {}]


def test_tables_for_nccl_count_only_where_they_are_equal(tmp_path: Path) -> None:
    with Network(2) as network:
        placement = Placement(network, seats([1, 1]))
        runs = spawn_ranks(with_table, 2, tmp_path, placement=placement)
    assert runs == [[["DEEPYTORCH_NCCL_TABLE", "NCCL_TUNER_PLUGIN"], []]] * 2


def test_all_ranks_set_the_same_and_the_next_job_measures_nothing(tmp_path: Path) -> None:
    with Network(2, Setting(rate_bps=800e6, flow_cap_bps=100e6)) as network:
        placement = Placement(network, seats([2, 1], "cyclic"))
        runs = spawn_ranks(
            chosen, 3, tmp_path, ["first", "second"], user_set=False, placement=placement
        )
        file = tmp_path / "network.json"
        (entry,) = json.loads(file.read_text())["links"].values()
        left_alone = spawn_ranks(chosen, 3, tmp_path, ["third"], user_set=True, placement=placement)
    first, second = runs[0]
    assert runs == [[first, second]] * 3
    assert 4 <= int(first["NCCL_MIN_NCHANNELS"]) <= 16
    assert second == first, "from the file, so the very same"
    (after,) = json.loads(file.read_text())["links"].values()
    assert after == entry, "measured once"
    assert links.Link.from_dict(entry["link"]).flow_cap_bps < 130e6
    assert left_alone == [[{}]] * 3, "what one rank has set is left alone by all"
