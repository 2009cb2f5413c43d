"""The connections to the job's store that explanations of hangs are asked for over."""

from __future__ import annotations

import contextlib
import os
import socket

from torch._C._distributed_c10d import PrefixStore, TCPStore

from deepytorch_core.hang import live


def limits_to(port: int) -> list[int]:
    """How long, in ms, each connection from here to that port waits for a lost network; 0: long."""
    found = []
    for number, _ in live._sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as own:
            is_ip = own.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and own.getpeername()[1] == port:
                found.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return sorted(found)


def test_a_store_of_our_own_is_given_up_when_its_network_is_gone() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("job", server)
    before = limits_to(server.port)
    assert not any(before)
    clone = live._clone(store)
    assert limits_to(server.port) == [*before, 10_000]
    clone.set("key", "value")
    assert store.get("key") == b"value"
