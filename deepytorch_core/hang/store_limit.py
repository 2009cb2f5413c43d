"""How long a rank waits for the job's store over a network that is gone."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

_MOST_S = 900.0  # about what Linux takes by itself
_LEAST_S = 10.0  # an outage that jobs are to live through


def server_below(store: Any) -> Any:
    """The TCPStore below `store`; None where it is of another kind."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def limit(store: Any, seconds: float) -> None:
    """Has the connection to `store`'s server end `seconds` after the network to it has gone.

    A TCPStore's questions have no time limit of their own: without this a rank that is cut off
    while it waits for the others hangs for as long as Linux sends again, a quarter of an hour.
    Nothing happens where the store is no TCPStore.
    """
    server = server_below(store)
    if server is None:
        return
    for number, _ in sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as own:
            # The server's own connections have its port at this end.
            if _is_ip(own) and own.getpeername()[1] == server.port:
                set_limit(own, min(max(seconds, _LEAST_S), _MOST_S))


def set_limit(connection: socket.socket, seconds: float) -> None:
    """Ends a TCP connection when nothing that it sent has arrived for so long."""
    if _is_ip(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * seconds))


def _is_ip(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def sockets() -> set[tuple[str, str]]:
    """This process's: descriptor and name of each."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found.add((number, name))
    return found
