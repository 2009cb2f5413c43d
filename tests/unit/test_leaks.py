"""Tests of what a test of leaks finds, and how it says so."""

from __future__ import annotations

import os
import socket
import threading

from deepytorch_core.testing.leaks import holdings, left_over


def test_a_thread_is_named_until_it_ends() -> None:
    before = holdings()
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    (found,) = left_over(before, settling_s=0.0)
    assert found.startswith("threads: ")
    assert found.endswith(" (1)")
    over.set()
    thread.join()
    assert left_over(before, settling_s=10.0) == []


def test_descriptors_are_counted_by_kind() -> None:
    before = holdings()
    pipes = [os.pipe() for _ in range(2)]
    assert left_over(before, settling_s=0.0) == ["descriptors: pipe (4)"]
    for each in pipes:
        for descriptor in each:
            os.close(descriptor)
    assert left_over(before, settling_s=0.0) == []


def test_a_socket_is_told_with_its_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as known:
        before = holdings()
        address = f"127.0.0.1:{known.getsockname()[1]}"
        with socket.create_connection(known.getsockname()) as mine:
            here = f"127.0.0.1:{mine.getsockname()[1]}"
            (found,) = left_over(before, settling_s=0.0)
            assert found == f"descriptors: socket (1): {here} to {address}"
    before = holdings()
    with socket.create_server(("127.0.0.1", 0)) as new:
        (found,) = left_over(before, settling_s=0.0)
        assert found.endswith(f"socket (1): listens at 127.0.0.1:{new.getsockname()[1]}")
