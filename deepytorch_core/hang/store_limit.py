"""How long a rank waits for the job's store whose network is gone, or whose server is busy."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from deepytorch_core.base import unlisted

_MOST_S = 900.0  # about what Linux takes by itself
_LEAST_S = 10.0  # an outage that jobs are to live through
_CUT_AGAIN_S = 0.1  # since torch may connect anew


def server_below(store: Any) -> Any:
    """The TCPStore below `store`; None where it is of another kind."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def limit(store: Any, seconds: float) -> None:
    """Has the connection to `store`'s server end `seconds` after the network to it has gone.

    A TCPStore's questions have no time limit of their own. Without this a rank that is cut off
    while it waits for the others hangs for as long as Linux sends again. That is a quarter of an
    hour. If the rank's question had arrived, the rank hangs for ever. Nothing happens where the
    store is no TCPStore.
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
    """Ends a TCP connection when its other end has not been heard of for so long.

    What was sent and has not arrived tells that by itself (TCP_USER_TIMEOUT, RFC 5482). A question
    that has arrived and whose answer is lost leaves nothing to send again. So from half of the time
    on the kernel asks whether the other end is there (keepalive, RFC 9293, section 3.8.4). It
    answers such without its program, so one that takes its time is not given up.
    """
    if not _is_ip(connection):
        return
    options = {
        socket.TCP_USER_TIMEOUT: 1e3 * seconds,
        socket.TCP_KEEPIDLE: max(1, seconds / 2),
        socket.TCP_KEEPINTVL: max(1, seconds / 10),
    }
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, int(value))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


@contextlib.contextmanager
def at_most(store: Any, seconds: float) -> Iterator[None]:
    """End the connections to `store`'s server that are made inside once so many seconds are over.

    A question under way over one of them then raises RuntimeError. Neither a question to a TCPStore
    nor the greeting of a new connection has a time limit. A server may live and not answer: its
    node is busy, or DNS, which it asks for the name of each caller, says nothing.
    Nothing happens where the store is no TCPStore.
    """
    server = server_below(store)
    known = sockets()
    over = threading.Event()

    def cut() -> None:
        pause_s = seconds
        while server is not None and not over.wait(pause_s):
            for number, _ in sockets() - known:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as own:
                    if _is_ip(own) and own.getpeername()[1] == server.port:
                        own.shutdown(socket.SHUT_RDWR)
            pause_s = _CUT_AGAIN_S

    thread = unlisted.Thread(cut, name="deepytorch-limit")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_ip(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def sockets() -> set[tuple[str, str]]:
    """This process's: descriptor and name of each; none where /proc does not show them."""
    found: set[tuple[str, str]] = set()
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for number in numbers:
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found.add((number, name))
    return found
