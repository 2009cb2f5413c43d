"""The emulated network is what it claims to be, measured with plain sockets, and leaves nothing."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time

import pytest

from deepytorch_core.testing import emulation
from deepytorch_core.testing.emulation import Network, Setting

# Slow enough for any machine: what limits is the network.
LINK_BPS, CAP_BPS = 300e6, 60e6


def serve(network: Network, node: int, *, six: bool = False) -> socket.socket:
    address = network.address6(node) if six else network.address(node)
    family = socket.AF_INET6 if six else socket.AF_INET
    return network.run(node, lambda: socket.create_server((address, 0), family=family))


def connect(network: Network, node: int, server: socket.socket) -> socket.socket:
    target = server.getsockname()[:2]
    return network.run(node, lambda: socket.create_connection(target, timeout=20))


def rate_bps(network: Network, num_flows: int, *, pairs=((1, 0),), six: bool = False) -> float:
    """Return what flows between (from, to) nodes carry together once they have started."""
    received = [0]
    stop = threading.Event()
    threads = []
    for source, target in pairs:
        with serve(network, target, six=six) as server:
            for _ in range(num_flows):
                sender = connect(network, source, server)
                receiver, _ = server.accept()
                threads.append(threading.Thread(target=_send, args=(sender, stop)))
                threads.append(threading.Thread(target=_receive, args=(receiver, received)))
    for thread in threads:
        thread.start()
    time.sleep(0.15)  # buffers and bursts
    start, before = time.monotonic(), received[0]
    time.sleep(0.4)
    measured = (received[0] - before) * 8 / (time.monotonic() - start)
    stop.set()
    for thread in threads:
        thread.join()
    return measured


def _send(connection: socket.socket, stop: threading.Event) -> None:
    with connection:
        while not stop.is_set():
            connection.sendall(bytes(32768))


def _receive(connection: socket.socket, received: list[int]) -> None:
    with connection:
        while data := connection.recv(1 << 18):
            received[0] += len(data)


def round_trip_s(network: Network) -> float:
    times = []
    with serve(network, 0) as server, connect(network, 1, server) as there:
        here, _ = server.accept()
        with here:
            for end in (here, there):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(20):
                start = time.perf_counter()
                there.send(b"?")
                here.recv(1)
                here.send(b"!")
                there.recv(1)
                times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_the_rate_holds_in_sum_and_for_each_direction() -> None:
    with Network(3, Setting(rate_bps=LINK_BPS)) as network:
        assert 0.6 * LINK_BPS < rate_bps(network, 1) < 1.15 * LINK_BPS
        assert 0.6 * LINK_BPS < rate_bps(network, 4, six=True) < 1.15 * LINK_BPS
        # The limit of one node holds for what two send to it, but not for what they send apart.
        assert rate_bps(network, 2, pairs=((1, 0), (2, 0))) < 1.15 * LINK_BPS
        both_ways = rate_bps(network, 1, pairs=((1, 0), (0, 1)))
        assert 1.2 * LINK_BPS < both_ways < 2.3 * LINK_BPS


def test_the_cap_holds_for_each_flow_and_the_rate_for_all() -> None:
    with Network(2, Setting(rate_bps=LINK_BPS, flow_cap_bps=CAP_BPS)) as network:
        one = rate_bps(network, 1)
        three = rate_bps(network, 3, six=True)
        assert 0.6 * CAP_BPS < one < 1.25 * CAP_BPS
        assert 1.7 * one < three < 3.75 * CAP_BPS
        assert rate_bps(network, 12) < 1.15 * LINK_BPS


def test_the_delay_is_added_each_way_and_the_rate_stays() -> None:
    with Network(2, Setting(rate_bps=LINK_BPS)) as network:
        direct = round_trip_s(network)
    with Network(2, Setting(rate_bps=LINK_BPS, delay_s=0.01)) as network:
        delayed = round_trip_s(network)
        assert 0.4 * LINK_BPS < rate_bps(network, 2) < 1.15 * LINK_BPS
    assert direct < 0.02 <= delayed < 0.2


@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_a_link_that_is_down_or_black_loses_what_is_sent(delay_s: float) -> None:
    with Network(2, Setting(delay_s=delay_s)) as network:
        with serve(network, 0) as server:
            there = connect(network, 1, server)
            here, _ = server.accept()
        with here, there:
            for off, on in (
                (lambda: network.set_link(1, up=False), lambda: network.set_link(1, up=True)),
                (lambda: network.set_blackhole(1, True), lambda: network.set_blackhole(1, False)),
            ):
                off()
                there.send(b"lost")
                here.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    here.recv(4)
                on()
                here.settimeout(20)
                assert here.recv(4) == b"lost", "TCP sends again"


def test_networks_are_apart_from_each_other_and_from_the_machine() -> None:
    with Network(2) as first, Network(2) as second:
        with serve(first, 0) as server:
            with pytest.raises(OSError, match="refused"):
                connect(second, 1, server)
            with socket.socket() as ours:
                ours.settimeout(0.3)
                assert ours.connect_ex(server.getsockname()) != 0
            connect(first, 1, server).close()
        names = first.run(0, lambda: {name for _, name in socket.if_nameindex()})
        assert names == {"lo", "eth0"}


def test_a_program_on_a_node_sees_that_nodes_interface() -> None:
    with Network(1) as network:
        code = "import os; print(sorted(os.listdir('/sys/class/net')))"
        program = network.start(0, [sys.executable, "-c", code], stdout=subprocess.PIPE)
        output, _ = program.communicate(timeout=30)
        assert program.returncode == 0
        assert "'eth0'" in output.decode()


# Builds a network with a relay, tells its namespaces, and waits.
HOLDER = """
import os, sys
from deepytorch_core.testing.emulation import Network, Setting

network = Network(2, Setting(delay_s=0.001))
print(*(os.readlink(f"/proc/self/fd/{network.descriptor(node)}") for node in range(2)), flush=True)
sys.stdin.read()
"""


def holders(namespaces: set[str]) -> list[str]:
    """Descriptors and processes that keep any of the namespaces alive."""
    found = []
    # Not pathlib's, which raises FileNotFoundError where a process ends while it looks.
    for link in [*glob.iglob("/proc/[0-9]*/fd/*"), *glob.iglob("/proc/[0-9]*/ns/net")]:
        with contextlib.suppress(OSError):  # gone
            if os.readlink(link) in namespaces:
                found.append(link)
    return found


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_is_left(end: str) -> None:
    ours = {name for _, name in socket.if_nameindex()}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        namespaces = set(holder.stdout.readline().decode().split())
        assert len(namespaces) == 2
        assert all(re.fullmatch(r"net:\[\d+\]", name) for name in namespaces)
        assert holders(namespaces)
        if end == "kill":
            holder.kill()
    finally:
        holder.communicate(timeout=30)  # closes its input
    deadline = time.monotonic() + 10
    while holders(namespaces) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not holders(namespaces)
    assert {name for _, name in socket.if_nameindex()} == ours


def test_without_the_privilege_the_error_names_it() -> None:
    code = (
        "import os; os.setuid(65534)\n"
        "from deepytorch_core.testing.emulation import missing_privilege\n"
        "print(missing_privilege())"
    )
    # The installation may be readable by root alone: import first.
    code = "from deepytorch_core.testing import emulation\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "CAP_SYS_ADMIN and CAP_NET_ADMIN; run as root" in done.stdout, done.stderr


def test_without_pyroute2_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    with pytest.raises(emulation.EmulationError, match="pip install pyroute2"):
        Network(1)
