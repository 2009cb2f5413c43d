"""The probe of a link: strangers of every kind are refused in time, and learn nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from deepytorch_core.network import greeting, probe

SECRET = os.urandom(greeting.SECRET_BYTES)
WRONG = os.urandom(greeting.SECRET_BYTES)
GREETING_S = 0.5
# Above the limits, for a machine that is busy with other tests.
SPARE_S = 5.0


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "LIMIT_S", GREETING_S)


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "LIMIT_S", 30.0)
    monkeypatch.setattr(probe, "LIMIT_S", 30.0)


def far() -> float:
    return time.monotonic() + 60


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    near, other = socket.socketpair()
    with near, other:
        yield near, other


def garbage(connection: socket.socket) -> None:
    connection.sendall(os.urandom(4096))


def web_request(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.0\r\nHost: a-name-of-some-length\r\n\r\n")


def hang_up(connection: socket.socket) -> None:
    connection.sendall(b"DPTM")
    connection.close()


def be_silent(connection: socket.socket) -> None:
    """Says nothing, and keeps the connection open."""


def drip(connection: socket.socket) -> None:
    """A proper beginning, byte by byte, each sooner than a wait for one byte would end."""

    def send() -> None:
        with suppress(OSError):
            for byte in b"DPTM\0\1" + bytes(200):
                connection.sendall(bytes([byte]))
                time.sleep(GREETING_S / 10)

    threading.Thread(target=send, daemon=True).start()


def another_version(connection: socket.socket) -> None:
    connection.sendall(b"DPTM\0\2" + bytes(200))


STRANGERS = pytest.mark.parametrize(
    ("act", "reason"),
    [
        (garbage, "does not speak deepytorch's protocol"),
        (web_request, "does not speak deepytorch's protocol"),
        (hang_up, "hung up"),
        (be_silent, "in time"),
        (drip, "in time"),
        (another_version, "version 2 of the protocol, this one 1"),
    ],
)


def greet(side: str, connection: socket.socket) -> None:
    if side == "listening":
        greeting.welcome(connection, SECRET, far())
    else:
        greeting.introduce(connection, SECRET, 3, far())


@STRANGERS
@pytest.mark.parametrize("side", ["listening", "connecting"])
def test_a_stranger_is_refused_within_the_limit(
    ends: Ends, act: Callable[[socket.socket], None], reason: str, side: str
) -> None:
    ours, theirs = ends
    act(theirs)
    start = time.monotonic()
    # A reset in place of an end is the system's word for "hung up".
    with pytest.raises((greeting.StrangerError, BrokenPipeError), match=f"{reason}|Broken pipe"):
        greet(side, ours)
    assert time.monotonic() - start < GREETING_S + SPARE_S


def both(ends: Ends, theirs: bytes) -> tuple[object, object]:
    """Return what a listening end with SECRET and a connecting one with `theirs` come to."""

    def result(call: Callable[..., object], connection: socket.socket, *rest: object) -> object:
        try:
            return call(connection, *rest, far())
        except greeting.StrangerError as error:
            connection.close()
            return str(error)

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(result, greeting.welcome, ends[0], SECRET)
        connecting = result(greeting.introduce, ends[1], theirs, 7)
        return listening.result(), connecting


def test_the_right_peer_is_known_by_its_number(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    assert both(ends, SECRET) == (7, None)


def test_a_wrong_secret_is_noticed_on_both_ends(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    listening, connecting = both(ends, WRONG)
    assert connecting == "the other side does not know the secret"
    assert "hung up" in str(listening)


def test_who_goes_on_without_the_secret_proves_nothing(ends: Ends) -> None:
    ours, theirs = ends
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(greeting.welcome, ours, SECRET, far())
        theirs.sendall(b"DPTM\0\1" + bytes(33))
        theirs.sendall(theirs.recv(1000)[-32:])  # the server's own proof, back to it
        with pytest.raises(greeting.StrangerError, match="does not know the secret"):
            listening.result()


def relayed(between: Ends, client: socket.socket, server: socket.socket) -> tuple[bytes, bytes]:
    """Both ends of one greeting through somebody who listens; what each of them has sent."""
    heard = (bytearray(), bytearray())

    def pump(source: socket.socket, target: socket.socket, log: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1000):
                log += data
                target.sendall(data)

    with ThreadPoolExecutor(4) as pool:
        pool.submit(pump, between[0], between[1], heard[0])
        pool.submit(pump, between[1], between[0], heard[1])
        listening = pool.submit(greeting.welcome, server, SECRET, far())
        greeting.introduce(client, SECRET, 7, far())
        assert listening.result() == 7
        client.close()
        server.close()
    return bytes(heard[0]), bytes(heard[1])


def test_a_listener_on_the_line_learns_nothing_that_opens_another_connection(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, to_client = socket.socketpair()
    to_server, server = socket.socketpair()
    with to_client, to_server, monkeypatch.context() as patch:
        patch.setattr(greeting, "LIMIT_S", 30.0)
        from_client, from_server = relayed((to_client, to_server), client, server)
    assert SECRET not in from_client + from_server
    ours, theirs = ends
    theirs.sendall(from_client)
    with pytest.raises(greeting.StrangerError, match="does not know the secret"):
        greeting.welcome(ours, SECRET, far())
    near, other = socket.socketpair()
    with near, other:
        other.sendall(from_server)
        with pytest.raises(greeting.StrangerError, match="does not know the secret"):
            greeting.introduce(near, SECRET, 7, far())


@contextmanager
def receiving(pool: ThreadPoolExecutor) -> Iterator[tuple[tuple[str, int], Callable]]:
    """A receiver on this machine: its address, and what waits for its result."""
    server = probe.listen("127.0.0.1")
    result = pool.submit(probe.receive, server, SECRET, 4.0)
    yield server.getsockname()[:2], result.result


def test_the_right_peer_measures_among_many_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The silent ones are still there: none of them holds up the probe."""
    patient(monkeypatch)
    strangers = []
    with ThreadPoolExecutor(1) as pool, receiving(pool) as (address, result):
        for act in (be_silent, garbage, be_silent, web_request, drip, hang_up, be_silent):
            strangers.append(socket.create_connection(address, 5))
            act(strangers[-1])
        start = time.monotonic()
        probe.send(address, SECRET, 2.0)
        assert time.monotonic() - start < 20, "a silent stranger has 30 s"
        found = result()
    for each in strangers:
        each.close()
    assert min(found.rates_bps) > 0
    assert found.round_trip_s > 0
    assert found.free_cores == 2.0


def test_a_sender_with_another_secret_is_refused_and_both_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "LIMIT_S", 1.0)
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool, receiving(pool) as (address, result):
        with pytest.raises(probe.ProbeError, match=r"sending: .*(know the secret|in time)"):
            probe.send(address, WRONG, 2.0)
        with pytest.raises(probe.ProbeError, match=r"receiving: .* strangers, the last: "):
            result()
    assert time.monotonic() - start < 1.0 + SPARE_S


def test_a_sender_does_not_trust_who_answers_in_the_receivers_place() -> None:
    """A listener that accepts and echoes gets nothing but greetings, and none twice."""
    heard: list[bytes] = []
    with probe.listen("127.0.0.1") as server:

        def echo() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(SPARE_S)
                        heard.append(connection.recv(1000))
                        connection.sendall(heard[-1] + bytes(100))

        threading.Thread(target=echo, daemon=True).start()
        with pytest.raises(probe.ProbeError, match=r"sending: .*(know the secret|in time|Broken)"):
            probe.send(server.getsockname()[:2], SECRET, 2.0)
        server.shutdown(socket.SHUT_RDWR)
    assert heard
    assert all(SECRET not in each for each in heard)
    assert len({bytes(each) for each in heard}) == len(heard)


def test_a_report_of_any_length_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    monkeypatch.setattr(probe.json, "dumps", lambda found: " " * 5000 + "{}")
    with ThreadPoolExecutor(1) as pool, receiving(pool) as (address, result):
        with suppress(probe.ProbeError):
            probe.send(address, SECRET, 2.0)
        with pytest.raises(probe.ProbeError, match="report has 5002 bytes"):
            result()
