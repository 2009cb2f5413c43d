"""Measures the link between two nodes with plain TCP, in less than three seconds.

One side listens and receives, the other connects and sends. On every connection both prove first
that they know a secret from the rendezvous store (`greeting`); others are closed. Rates are taken
by the receiver, over a window in which the sender sends without pause.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from deepytorch_core.network import greeting
from deepytorch_core.network.link import FLOWS, Link

LIMIT_S = 3.0
"""A probe may take so long; a side that gets no further by then raises."""

_NUM_PINGS = 20
_WARM_S, _WINDOW_S = 0.1, 0.2
_PIECE_BYTES = 1 << 18
_NUM_CONNECTIONS = 1 + max(FLOWS)
_MOST_REPORT_BYTES = 1024
# Greetings at a time; further connections wait in the kernel.
_MOST_GREETINGS = 64


class ProbeError(RuntimeError):
    """The link could not be measured; the message says why."""


def listen(address: str) -> socket.socket:
    """The receiving side's socket on a port of the kernel's choice. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=2 * max(FLOWS))


def receive(server: socket.socket, secret: bytes, free_cores: float) -> Link:
    """Serves one probe on `server`, which is closed after it.

    Args:
        server: from `listen`.
        secret: `greeting.SECRET_BYTES` that the sender has too.
        free_cores: cores of this node for each of its ranks.

    Raises ProbeError when the sender does not come or gets no further.
    """
    with _within_limit("receiving") as deadline, contextlib.ExitStack() as stack:
        stack.enter_context(server)
        connections = _accept(server, secret, deadline, stack)
        control, *flows = connections
        meter = _Meter(flows, deadline)
        stack.callback(meter.stop)
        for _ in range(_NUM_PINGS):
            control.sendall(_exactly(control, 1))
        rates, busy = [], []
        for _ in FLOWS:
            _exactly(control, 1)
            meter.rate_bps(_WARM_S)
            cpu, start = time.process_time(), time.monotonic()
            rates.append(meter.rate_bps(_WINDOW_S))
            busy.append((time.process_time() - cpu) / (time.monotonic() - start))
            control.sendall(b".")
        (num_bytes,) = struct.unpack("!H", _exactly(control, 2))
        if num_bytes > _MOST_REPORT_BYTES:
            raise ProbeError(f"the other side's report has {num_bytes} bytes")
        theirs = json.loads(_exactly(control, num_bytes))
        if min(rates) <= 0:
            raise ProbeError("nothing arrived")
        return Link(
            rates_bps=tuple(rates),
            round_trip_s=float(theirs["round_trip_s"]),
            busy_cores=max(busy[0], float(theirs["busy_cores"])),
            free_cores=min(free_cores, float(theirs["free_cores"])),
        )


def send(address: tuple[str, int], secret: bytes, free_cores: float) -> None:
    """The other side of `receive`, at `address`. Raises ProbeError as that does."""
    with _within_limit("sending") as deadline, contextlib.ExitStack() as stack:
        control, *flows = _connect(address, secret, deadline, stack)
        times = []
        for _ in range(_NUM_PINGS):
            start = time.perf_counter()
            control.sendall(b"?")
            _exactly(control, 1)
            times.append(time.perf_counter() - start)
        busy = [_flood(control, flows[:count], deadline) for count in FLOWS]
        found = {
            "round_trip_s": statistics.median(times),
            "busy_cores": busy[0],
            "free_cores": free_cores,
        }
        text = json.dumps(found).encode()
        control.sendall(struct.pack("!H", len(text)) + text)
        with contextlib.suppress(OSError):
            control.recv(1)  # until the receiver has read it and closes


def _flood(control: socket.socket, flows: list[socket.socket], deadline: float) -> float:
    """Sends on all `flows` until the receiver has seen enough; returns the cores that took."""
    stop = threading.Event()

    def pour(flow: socket.socket) -> None:
        piece = bytes(_PIECE_BYTES)
        with contextlib.suppress(OSError):
            while not stop.is_set() and time.monotonic() < deadline:
                flow.sendall(piece)

    threads = [threading.Thread(target=pour, args=(flow,), daemon=True) for flow in flows]
    cpu, start = time.process_time(), time.monotonic()
    try:
        control.sendall(b"!")
        for thread in threads:
            thread.start()
        _exactly(control, 1)
        return (time.process_time() - cpu) / (time.monotonic() - start)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


class _Meter:
    """Reads all that comes on some connections, in threads, and counts it."""

    def __init__(self, flows: list[socket.socket], deadline: float) -> None:
        self._counts = [0] * len(flows)
        self._deadline = deadline
        self._flows = flows
        self._threads = [
            threading.Thread(target=self._read, args=(index,), daemon=True)
            for index in range(len(flows))
        ]
        for thread in self._threads:
            thread.start()

    def rate_bps(self, seconds: float) -> float:
        """Return the rate of what arrives in the next `seconds`."""
        before, start = sum(self._counts), time.monotonic()
        time.sleep(min(seconds, _left(self._deadline)))
        return (sum(self._counts) - before) * 8 / (time.monotonic() - start)

    def stop(self) -> None:
        for flow in self._flows:
            with contextlib.suppress(OSError):
                flow.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _read(self, index: int) -> None:
        buffer = bytearray(1 << 20)
        with contextlib.suppress(OSError):
            while count := self._flows[index].recv_into(buffer):
                self._counts[index] += count


def _connect(
    address: tuple[str, int], secret: bytes, deadline: float, stack: contextlib.ExitStack
) -> list[socket.socket]:
    """Connections to a receiver that has proved to be it; together, for the sake of long lines."""

    def connect(number: int) -> socket.socket:
        made = stack.enter_context(socket.create_connection(address, _left(deadline)))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting.introduce(made, secret, number, deadline)
        made.settimeout(_left(deadline))
        return made

    with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
        return list(pool.map(connect, range(_NUM_CONNECTIONS)))


def _accept(
    server: socket.socket, secret: bytes, deadline: float, stack: contextlib.ExitStack
) -> list[socket.socket]:
    """The sender's connections in its order; strangers are turned away, and hold up nobody."""
    known: dict[int, socket.socket] = {}
    seats = threading.Semaphore(_MOST_GREETINGS)
    refused: list[str] = []

    def greet(connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = greeting.welcome(connection, secret, deadline)
            connection.settimeout(_left(deadline))
            if number >= _NUM_CONNECTIONS or known.setdefault(number, connection) is not connection:
                raise greeting.StrangerError(f"there is no second connection {number}")
        except (OSError, ProbeError, greeting.StrangerError) as error:
            refused.append(str(error))
            connection.close()
        finally:
            seats.release()

    while len(known) < _NUM_CONNECTIONS:
        if (left := deadline - time.monotonic()) <= 0:
            last = f"; {len(refused)} strangers, the last: {refused[-1]}" if refused else ""
            raise ProbeError(f"the other node did not come within {LIMIT_S:g} s{last}")
        # Not for longer: the last greeting ends in another thread.
        server.settimeout(min(left, 0.02))
        if not seats.acquire(timeout=min(left, 0.02)):
            continue
        try:
            connection = stack.enter_context(server.accept()[0])
        except TimeoutError:
            seats.release()
            continue
        threading.Thread(target=greet, args=(connection,), daemon=True).start()
    return [known[number] for number in sorted(known)]


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ProbeError("the other side closed the connection")
        data += piece
    return data


@contextlib.contextmanager
def _within_limit(doing: str) -> Iterator[float]:
    """The time of the end by the monotonic clock; errors of sockets become ProbeError."""
    try:
        yield time.monotonic() + LIMIT_S
    except (ProbeError, greeting.StrangerError) as error:
        raise ProbeError(f"{doing}: {error}") from None
    except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
        raise ProbeError(f"{doing}: {type(error).__name__}: {error}") from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ProbeError(f"not done within {LIMIT_S:g} s")
    return left
