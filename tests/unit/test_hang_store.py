"""The connections to the job's store that explanations of hangs are asked for over."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from deepytorch_core.base import stores
from deepytorch_core.hang import live, store_limit


def limits_to(port: int) -> list[int]:
    """How long, in ms, each connection from here to that port waits for a lost network; 0: long."""
    found = []
    for number, _ in store_limit.sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as own:
            is_ip = own.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and own.getpeername()[1] == port:
                found.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return sorted(found)


def test_a_store_of_our_own_is_given_up_when_its_network_is_gone() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    home = live._Home(PrefixStore("job", server), "job", rank=0, size=2, job="a")
    before = limits_to(server.port)
    assert not any(before)
    clone = live._clone(home)
    assert limits_to(server.port) == [*before, 10_000]
    clone.set("key", "value")
    assert home.store.get("key") == b"value"


@pytest.mark.parametrize(("seconds", "milliseconds"), [(77.5, 77_500), (3, 10_000), (1e6, 900_000)])
def test_a_store_is_waited_for_no_longer_than_its_group(seconds: float, milliseconds: int) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store_limit.limit(PrefixStore("job", PrefixStore("group", server)), seconds)
    assert limits_to(server.port) == [milliseconds]
    assert limits_to(other.port) == [0]
    store_limit.limit(PrefixStore("job", HashStore()), seconds)
    server.set("key", "value")
    assert server.get("key") == b"value"


def test_a_store_that_dies_while_it_is_connected_to_is_given_up_soon() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    home = live._Home(PrefixStore("job", server), "job", rank=0, size=2, job="a")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = SimpleNamespace(host="127.0.0.1", port=gone.getsockname()[1])
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_limit, "server_below", lambda store: dead)
        with pytest.raises(RuntimeError):
            live._clone(home)
    assert time.monotonic() - started < 60  # its own timeout is five minutes


def test_other_stores_are_cloned() -> None:
    home = live._Home(PrefixStore("job", HashStore()), "job", rank=0, size=2, job="a")
    clone = live._clone(home)
    clone.set("key", "value")
    assert home.store.get("key") == b"value"


@pytest.fixture
def silent() -> Iterator[Any]:
    """A store whose server lives and says nothing, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = SimpleNamespace(host="127.0.0.1", port=listening.getsockname()[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_limit, "server_below", lambda store: place)
            yield place


def test_a_server_that_says_nothing_is_given_up(silent: Any) -> None:
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=1)
    with store_limit.at_most(silent, 0.3):
        kept = TCPStore("127.0.0.1", other.port, is_master=False)
        with pytest.raises(RuntimeError):
            TCPStore(silent.host, silent.port, is_master=False, timeout=limit)
    kept.set("key", "value")
    assert other.get("key") == b"value"


def test_a_failure_is_explained_in_time_whatever_the_store_does(
    silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    home = live._Home(PrefixStore("job", server), "job", rank=0, size=2, job="a")
    monkeypatch.setattr(live, "_AGREE_LIMIT_S", 0.3)
    monkeypatch.setattr(live, "_LOST_LIMIT_S", 0.1)
    with pytest.raises(RuntimeError):
        live._meet(home, "case", "0", None)


def test_connections_that_last_shorter_than_the_limit_stay() -> None:
    server = stores.serve("127.0.0.1")
    with store_limit.at_most(server, 60):
        clone = TCPStore(server.host, server.port, is_master=False)
    clone.set("key", "value")
    assert server.get("key") == b"value"


def test_a_store_of_our_own_listens_at_its_address_alone() -> None:
    server = stores.serve("127.0.0.1", timedelta(seconds=7))
    assert server.timeout == timedelta(seconds=7)
    clone = TCPStore("127.0.0.1", server.port, is_master=False)
    clone.set("key", "value")
    assert server.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)
