"""Measuring the largest packet: only answers of who knows the secret count, and it is not sent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from deepytorch_core.network import path_mtu

HERE = "127.0.0.1"
SECRET = os.urandom(path_mtu.SECRET_BYTES)
MTU = 1500


@contextmanager
def in_its_place(answer: Callable[[bytes], bytes]) -> Iterator[tuple[tuple[str, int], list[bytes]]]:
    """Somebody at the address who gives `answer`; what he has heard."""
    heard: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((HERE, 0))

        def serve() -> None:
            while data := taken.recvfrom(1 << 16):
                if data[0] == b"end":
                    return
                heard.append(data[0])
                taken.sendto(answer(data[0]), data[1])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield taken.getsockname(), heard
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ending:
                ending.sendto(b"end", taken.getsockname())
            thread.join()


def test_the_right_one_answers() -> None:
    echo = path_mtu.Echo(HERE, SECRET)
    try:
        assert path_mtu.largest((HERE, echo.port), SECRET, MTU) == MTU
    finally:
        echo.close()


ANSWERS: list[Callable[[bytes], bytes]] = [
    lambda data: data,
    lambda data: data[:36],  # the question's own head
    lambda data: SECRET + data[len(SECRET) : 36],
    lambda data: os.urandom(36),
    lambda data: b"",
]


def test_whoever_else_is_there_is_not_believed_and_does_not_hear_the_secret() -> None:
    """Each is asked until the time is over: all at once."""

    def ask(answer: Callable[[bytes], bytes]) -> tuple[int | None, list[bytes]]:
        with in_its_place(answer) as (target, heard):
            return path_mtu.largest(target, SECRET, MTU), heard

    with ThreadPoolExecutor(len(ANSWERS)) as threads:
        for number, (found, heard) in enumerate(threads.map(ask, ANSWERS)):
            assert found is None, number
            assert any(len(each) == MTU - 28 for each in heard), number
            assert all(SECRET not in each for each in heard), number


def test_a_changed_size_is_not_answered() -> None:
    """A question from the way can't be made one of another size."""
    with in_its_place(lambda data: b"") as (target, heard):
        path_mtu.largest(target, SECRET, MTU)
    echo = path_mtu.Echo(HERE, SECRET)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((HERE, echo.port))
            asking.send(heard[0][:32] + (9000).to_bytes(4, "big"))
            asking.send(heard[0][:20])
            asking.send(heard[0])  # answered, and the others before it would have been
            asking.settimeout(20)
            answer = asking.recv(1000)
            assert int.from_bytes(answer[32:], "big") == MTU
            assert answer != heard[0][:36]
    finally:
        echo.close()
