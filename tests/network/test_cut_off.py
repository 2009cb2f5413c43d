"""A node without its network before the ranks have met: nobody tells it, and it has to end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepytorch_core.hang import store_limit
from deepytorch_core.testing.emulation import Network
from fault_matrix.cases import Case
from fault_matrix.runner import run


# The tests below show by what it does.
@pytest.mark.extended
def test_a_node_that_cannot_reach_the_store_gives_up_at_the_time_limit() -> None:
    result = run(Case("link down", "tcp", "init"))
    assert not result.skipped
    assert not result.wrong, "\n".join(result.wrong)
    assert len(result.took_s) == 2  # the one that is cut off, too


def _connected(network: Network) -> tuple[socket.socket, socket.socket]:
    """A connection's ends on the second node and on the first."""
    with network.run(0, lambda: socket.create_server((network.address(0), 0))) as server:
        asking = network.run(1, lambda: socket.create_connection(server.getsockname()))
        answering, _ = server.accept()
    return asking, answering


@pytest.mark.parametrize("arrives", [True, False])
def test_a_question_to_the_store_is_given_up_whether_or_not_it_has_arrived(arrives: bool) -> None:
    with Network(2) as network:
        asking, answering = _connected(network)
        with asking, answering:
            store_limit.set_limit(asking, 2.0)
            if arrives:
                asking.send(b"?")
                assert answering.recv(1) == b"?"
                time.sleep(0.3)  # for the acknowledgement
            network.set_link(1, up=False)
            if not arrives:
                asking.send(b"?")
            asking.settimeout(30)
            with pytest.raises(OSError, match=r"timed out|No route|unreachable") as caught:
                asking.recv(1)
            assert caught.value.errno, "by the kernel, not by the 30 seconds"


def test_who_takes_its_time_is_waited_for() -> None:
    with Network(2) as network:
        asking, answering = _connected(network)
        with asking, answering:
            store_limit.set_limit(asking, 1.0)
            asking.send(b"?")
            time.sleep(2.5)
            answering.send(b"!")
            assert asking.recv(1) == b"!"


def test_a_machine_without_its_loopback_interface_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('not reached')\n", encoding="utf-8")
    options = ["--nproc-per-node", "1", str(tmp_path / "train.py")]
    run_here = [sys.executable, "-m", "deepytorch.cli", "run", *options]
    done = subprocess.run(["unshare", "--net", *run_here], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"can't meet at localhost: [Errno 101]" in done.stderr
    assert b"ip link set lo up" in done.stderr
