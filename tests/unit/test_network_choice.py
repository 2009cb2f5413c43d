"""Tests of choices by a measured link: pure ones, the file of links, who measures with whom."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed

from deepytorch_core.base import config, decisions
from deepytorch_core.c10d import backend, delegates
from deepytorch_core.network import addresses, nccl_env, nccl_table, prepare
from deepytorch_core.network import link as links
from deepytorch_core.network.link import Link


def link(*gbits: float, round_trip_s=1e-4, busy_cores=0.2, free_cores=8.0) -> Link:
    return Link(tuple(rate * 1e9 for rate in gbits), round_trip_s, busy_cores, free_cores)


UNCAPPED = link(23.1, 23.2, 23.2, 23.1)
CAPPED = link(4.8, 9.6, 19.0, 23.2)  # 5 Gbit/s a connection, 24 in all
NARROW = link(0.24, 0.48, 0.96, 1.7)  # 0.25 of 2
CPU_BOUND = link(18, 36, 60, 80, busy_cores=0.97)


def test_what_a_link_says_of_itself():
    assert UNCAPPED.flow_cap_bps is None
    assert UNCAPPED.flows_needed == 1
    assert CAPPED.flow_cap_bps == 4.8e9
    assert CAPPED.flows_needed == 8
    assert link(5, 10, 20, 20).flows_needed == 4
    assert CPU_BOUND.flow_cap_bps is None, "a core is the limit, not the network"
    assert CAPPED.bytes_in_flight == pytest.approx(23.2e9 / 8 * 1e-4)
    assert str(CAPPED) == "23.2 Gbit/s, 4.8 Gbit/s a connection, 100 us round trip"


@pytest.mark.parametrize("found", [UNCAPPED, CPU_BOUND])
def test_without_a_cap_nothing_is_set(found):
    assert nccl_env.for_sockets(found, set()).settings == {}
    assert nccl_env.for_sockets(found, set(), prefer="helpers").settings == {}


def test_under_a_cap_more_channels_and_no_helpers():
    assert nccl_env.for_sockets(link(5, 10, 20, 20), set()).settings == {"NCCL_MIN_NCHANNELS": "4"}
    # Eight still gained: more than were measured may be needed, within reason.
    choice = nccl_env.for_sockets(CAPPED, set())
    assert choice.settings == {"NCCL_MIN_NCHANNELS": "10"}
    assert str(choice) == (
        "NCCL_MIN_NCHANNELS=10 (23.2 Gbit/s, 4.8 Gbit/s a connection, 100 us round trip: 10 "
        "connections fill it)"
    )
    assert nccl_env.for_sockets(NARROW, set()).settings == {"NCCL_MIN_NCHANNELS": "14"}


def test_helpers_where_asked_or_where_the_channels_are_the_users():
    expected = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "3"}
    assert nccl_env.for_sockets(CAPPED, set(), prefer="helpers").settings == expected
    assert nccl_env.for_sockets(CAPPED, {"NCCL_MAX_NCHANNELS"}).settings == expected
    few_cores = link(4.8, 9.6, 19.0, 23.2, free_cores=1.0)
    assert nccl_env.for_sockets(few_cores, {"NCCL_MAX_NCHANNELS"}).settings == {}


@pytest.mark.parametrize(
    "variable",
    ["NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_NET_PLUGIN", "NCCL_NET"],
)
def test_who_chose_the_sockets_is_left_alone(variable):
    assert nccl_env.for_sockets(CAPPED, {variable}).settings == {}


def test_buffers_hold_what_is_in_flight():
    far = link(0.8, 1.6, 3.2, 6.4, round_trip_s=0.1)  # 76 MiB in flight
    assert nccl_env.for_sockets(far, set()).settings["NCCL_BUFFSIZE"] == str(16 << 20)
    assert "NCCL_BUFFSIZE" not in nccl_env.for_sockets(far, {"NCCL_BUFFSIZE"}).settings
    farther = link(8, 8, 8, 8, round_trip_s=0.5)
    assert nccl_env.for_sockets(farther, set()).settings == {}, "no cap was measured"


def test_the_worst_of_several_links():
    found = links.worst([CAPPED, link(6, 9, 20, 20, round_trip_s=1e-3, free_cores=2.0)])
    assert found.rates_bps == (4.8e9, 9e9, 19e9, 20e9)
    assert (found.round_trip_s, found.free_cores) == (1e-3, 2.0)


def test_links_are_kept_and_forgotten(tmp_path, monkeypatch):
    path = tmp_path / "new" / "network.json"
    assert links.recall(path, "a/b") is None
    links.remember(path, "a/b", CAPPED)
    links.remember(path, "a/c", UNCAPPED)
    assert links.recall(path, "a/b") == CAPPED
    assert links.recall(path, "a/c") == UNCAPPED
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"
    later = time.time() + 8 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    assert links.recall(path, "a/b") is None, "networks change"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 0, "links": {}}',
        '{"version": 1, "links": []}',
        '{"version": 1, "links": {"a/b": {"measured_at": 4e12, "link": {"rates_bps": [1]}}}}',
        '{"version": 1, "links": {"a/b": {"measured_at": "x"}}}',
        '{"version": 1, "links": {"a/b": {"measured_at": 4e12, "link": 3}}}',
    ],
)
def test_a_file_that_is_no_longer_understood_counts_for_nothing(tmp_path, text):
    path = tmp_path / "network.json"
    path.write_text(text)
    assert links.recall(path, "a/b") is None
    links.remember(path, "a/b", CAPPED)
    assert links.recall(path, "a/b") == CAPPED


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    links.remember(tmp_path / "file" / "network.json", "a/b", CAPPED)


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        ("aaaa", []),
        ("aabb", [[0, 2]]),
        ("abab", [[0, 1]]),
        ("abcab", [[0, 1]]),
        ("aabbccdd", [[0, 2], [4, 6]]),
    ],
)
def test_the_first_ranks_of_neighbouring_nodes_measure(nodes, pairs):
    assert prepare.plan_for(nodes) == pairs


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("", None),
        ("^docker", None),
        ("eth", "eth0"),
        ("=eth", None),
        ("=eth1", "eth1"),
        ("ib,eth1", "eth1"),
        ("wlan", None),
    ],
)
def test_interfaces_are_named_as_nccl_has_it(asked, name):
    assert addresses.matching_interface(asked, ["lo", "docker0", "eth0", "eth1"]) == name


def test_what_the_user_set_for_nccl_also_in_files(tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("# site\nNCCL_IB_HCA = mlx5_0\nNCCL_DEBUG=WARN\nnonsense\nHOME=/\n")
    environment = {"NCCL_CONF_FILE": str(file), "NCCL_DEBUG": "INFO", "HOME": "/root"}
    found = config.nccl_settings(environment)
    assert found["NCCL_IB_HCA"] == "mlx5_0"
    assert found["NCCL_DEBUG"] == "INFO"
    assert "HOME" not in found


def test_only_nccls_own_unset_variables_are_set(monkeypatch):
    monkeypatch.setenv("NCCL_BUFFSIZE", "1")
    for name in ("NCCL_BUFFSIZE", "PATH"):
        with pytest.raises(ValueError, match=name):
            config.set_for_nccl({name: "2"})
    assert config.nccl_settings()["NCCL_BUFFSIZE"] == "1"


@pytest.fixture
def one_node(monkeypatch, tmp_path):
    """A job of two ranks on one node, and what is set for NCCL in it."""
    monkeypatch.setattr(prepare, "_done", False)
    monkeypatch.setattr(decisions, "_made", [])
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**launched, "DEEPYTORCH_CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    done: dict[str, str] = {}
    monkeypatch.setattr(config, "set_for_nccl", done.update)
    return done


def test_one_node_measures_nothing(one_node):
    prepare.before_nccl(None, rank=0, size=2)  # no store: it would fail at the first key
    assert one_node == {}


def test_one_node_goes_by_its_table_and_says_so(one_node, tmp_path, capsys):
    entry = nccl_table.Entry(
        collective="all_reduce", first_bytes=0, last_bytes=9, algorithm="tree", protocol="ll"
    )
    nccl_table.write(tmp_path / nccl_table.FILE, [entry])
    prepare.before_nccl(None, rank=0, size=2)
    assert set(one_node) == {"NCCL_TUNER_PLUGIN", "DEEPYTORCH_NCCL_TABLE"}
    said = capsys.readouterr().err
    assert "1 measured choices in" in said
    assert "DEEPYTORCH_TUNE=off leaves it alone" in said
    assert [decision["what"] for decision in decisions.made()] == ["NCCL's settings"]
    one_node.clear()
    prepare.before_nccl(None, rank=0, size=2)
    assert one_node == {}, "once per process"


def test_a_broken_table_is_said_and_nothing_is_set(one_node, tmp_path, capsys):
    (tmp_path / nccl_table.FILE).write_text("{")
    prepare.before_nccl(None, rank=0, size=2)
    assert one_node == {}
    assert "NCCL chooses algorithms by itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, [True]),
        ({"tune": "off"}, []),
        ({"collectives": "stock"}, []),
        ({"enabled": False}, []),
        ({"deterministic": True}, [False]),
    ],
)
def test_it_runs_where_a_job_of_gpus_starts_and_the_options_allow(monkeypatch, options, times):
    """On a machine without GPUs: what it hangs on is replaced."""
    from torch.distributed import distributed_c10d as c10d

    called: list[bool] = []
    monkeypatch.setattr(backend, "_accelerator", lambda: "cuda")
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(
        prepare, "before_nccl", lambda store, rank, size, measure: called.append(measure)
    )
    store = torch.distributed.HashStore()
    spec = delegates.GroupSpec(store, 0, 2, timedelta(seconds=1), "0", [0, 1])
    backend._measure_network(spec, config.Options(**{"tune": "auto", **options}))
    assert called == times
