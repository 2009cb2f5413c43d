"""Emulated nodes on one machine: network namespaces joined by links of a chosen rate and delay.

    with Network(2, Setting(rate_bps=1e9)) as network:
        network.start(0, [sys.executable, "server.py"])
        network.start(1, [sys.executable, "client.py", network.address(0)])

Each node is a network namespace with an interface, `eth0`, or several, on cables to a switch. What
is limited is the rate in each direction and, if asked, each TCP flow's; a delay is added by a relay
in user space. A link can lose its carrier and come back, or swallow everything. Processes on
different nodes share no abstract sockets and no shared memory of ours, but one machine's cores and
memory.
"""

from deepytorch_core.testing.emulation.namespaces import EmulationError, enter
from deepytorch_core.testing.emulation.network import Network, Placement, missing_privilege
from deepytorch_core.testing.emulation.setting import (
    ORDERS,
    Seat,
    Setting,
    parse_delay,
    parse_rate,
    seats,
)

__all__ = [
    "ORDERS",
    "EmulationError",
    "Network",
    "Placement",
    "Seat",
    "Setting",
    "enter",
    "missing_privilege",
    "parse_delay",
    "parse_rate",
    "seats",
]
