"""Nodes in network namespaces, joined by cables to a switch; see the package's docstring."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from deepytorch_core.base import config
from deepytorch_core.testing.emulation import links, namespaces
from deepytorch_core.testing.emulation.namespaces import EmulationError
from deepytorch_core.testing.emulation.setting import Seat, Setting

_RELAY = Path(__file__).with_name("relay.py")
# The first that the machine allows. BBR, the default of some machines, paces by its own estimate
# and leaves half of an HTB link idle; these two fill it.
_CONGESTION_CONTROLS = ("cubic", "reno")
_MAX_NODES = 64
_MAX_INTERFACES = 8
_SWITCH_NUMBER = 15000  # beyond every node's: the address of the switch, where stores are served

T = TypeVar("T")


class Network:
    """`num_nodes` emulated nodes and the switch between them; a context manager.

    Everything ends with `close`, and with this process even when it is killed: nothing has a name
    outside. Each network is apart from all others, and from the machine's own.

    Args:
        num_nodes: 1 to 64.
        setting: rates and the delay; none by default.
        only_ipv6: the nodes have no IPv4 addresses but the loopback's.
        num_interfaces: of each node, eth0, eth1 and so on. Each has a cable of its own and is in a
            network with all nodes' interfaces of that name. Limits are for each one's rate.
            `set_link` and `set_blackhole` cut all of a node's.

    Raises EmulationError, naming what is missing, where nodes cannot be emulated.
    """

    def __init__(
        self,
        num_nodes: int,
        setting: Setting | None = None,
        *,
        only_ipv6: bool = False,
        num_interfaces: int = 1,
    ) -> None:
        if not 1 <= num_nodes <= _MAX_NODES:
            raise EmulationError(f"1 to {_MAX_NODES} nodes can be emulated, not {num_nodes}")
        if not 1 <= num_interfaces <= _MAX_INTERFACES:
            raise EmulationError(
                f"nodes can have 1 to {_MAX_INTERFACES} interfaces, not {num_interfaces}"
            )
        self.num_interfaces = num_interfaces
        self.num_nodes = num_nodes
        self.setting = setting or Setting()
        self.only_ipv6 = only_ipv6
        self.congestion_control = ""
        self._relay: subprocess.Popen[bytes] | None = None
        self._namespaces: list[int] = []
        try:
            self._switch = self._new_namespace()
            self._nodes = [self._new_namespace() for _ in range(num_nodes)]
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of everything; what still runs inside keeps its namespace until it ends."""
        if self._relay is not None:
            assert self._relay.stdin is not None
            self._relay.stdin.close()
            self._relay.wait()
            self._relay = None
        while self._namespaces:
            os.close(self._namespaces.pop())

    def to_dict(self) -> dict[str, Any]:
        """Return what is emulated, for records."""
        return {**self.setting.to_dict(), "congestion_control": self.congestion_control}

    def address(self, node: int) -> str:
        """The node's IPv4 address; its IPv6 address where it has none."""
        return links.address6(node) if self.only_ipv6 else links.address(node)

    def address6(self, node: int) -> str:
        """The node's IPv6 address."""
        return links.address6(node)

    @property
    def switch_address(self) -> str:
        """The address of a store served by `on_switch`, from every node."""
        return self.address(_SWITCH_NUMBER)

    def descriptor(self, node: int) -> int:
        """The node's namespace, to be entered by a process of one's own; valid until `close`."""
        return self._nodes[node]

    def environment(self, node: int) -> dict[str, str]:
        """Return what programs on the node need to know: its interface, and that it is a host."""
        return {
            "GLOO_SOCKET_IFNAME": links.INTERFACE,
            "NCCL_SOCKET_IFNAME": links.INTERFACE,
            "NCCL_HOSTID": f"deepytorch-node-{node}",
            "DEEPYTORCH_IFNAME": links.INTERFACE,
        }

    def run(self, node: int, function: Callable[[], T]) -> T:
        """Calls `function` in a thread on the node: sockets that it makes belong there."""
        return namespaces.run_inside(self._nodes[node], function)

    def on_switch(self, function: Callable[[], T]) -> T:
        """Calls `function` in a thread at the switch, which no node's failure takes away."""
        return namespaces.run_inside(self._switch, function)

    def start(self, node: int, command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        """`subprocess.Popen` on the node; `env` gets the node's variables in addition."""
        env = {**settings.pop("env", config.child_environment()), **self.environment(node)}
        return namespaces.run_inside(
            self._nodes[node],
            lambda: subprocess.Popen(command, env=env, **settings),
            private_sysfs=True,
        )

    def set_link(self, node: int, *, up: bool) -> None:
        """Takes the carrier of the node's link away, as a pulled cable does, or gives it back."""

        def change() -> None:
            for number in range(self.num_interfaces):
                links.set_state(_port(node, number), up=up)

        self.on_switch(change)

    def set_blackhole(self, node: int, on: bool) -> None:
        """Loses all that goes to and from the node while its link stays up, or stops that."""

        def change() -> None:
            for number in range(self.num_interfaces):
                if on:
                    links.pull_out(_port(node, number))
                else:
                    links.plug_in(_port(node, number), links.bridge(number))

        self.on_switch(change)

    def stall_flow(self, node: int, tcp_port: int) -> None:
        """From now on holds back what the node sends from that TCP port over eth0, nothing else.

        Needs a rate without a cap per flow, and can be done once for each node.
        """
        self.run(node, lambda: links.stall_flow(links.INTERFACE, tcp_port))

    @property
    def _interfaces(self) -> list[str]:
        return [links.interface(number) for number in range(self.num_interfaces)]

    def _new_namespace(self) -> int:
        made = namespaces.create()
        self._namespaces.append(made)
        return made

    def _build(self) -> None:
        with _named_errors():
            self.on_switch(lambda: links.make_switch(self.num_interfaces))
            if self.setting.delay_s:
                self._make_taps()
            else:
                self.on_switch(self._make_cables)
            self._set_up()

    def _make_cables(self) -> None:
        for number, interface in enumerate(self._interfaces):
            nodes = enumerate(self._nodes)
            links.make_veth({_port(node, number): there for node, there in nodes}, interface)

    def _set_up(self) -> None:
        setting = self.setting
        bridges = [links.bridge(number) for number in range(self.num_interfaces)]

        def at_switch() -> None:
            for node, number in itertools.product(range(self.num_nodes), range(len(bridges))):
                links.plug_in(_port(node, number), bridges[number])
                if setting.rate_bps is not None:
                    links.limit(_port(node, number), setting.rate_bps)
            self.congestion_control = links.set_up_host(
                bridges, _SWITCH_NUMBER, _CONGESTION_CONTROLS
            )

        for node in range(self.num_nodes):
            self.run(node, lambda node=node: self._set_up_node(node))  # type: ignore[misc]
        self.on_switch(at_switch)

    def _set_up_node(self, node: int) -> None:
        names = self._interfaces
        links.set_up_host(names, node, _CONGESTION_CONTROLS, only_ipv6=self.only_ipv6)
        if self.setting.rate_bps is not None:
            for name in names:
                links.limit(name, self.setting.rate_bps, self.setting.flow_cap_bps)

    def _make_taps(self) -> None:
        with contextlib.ExitStack() as stack:
            descriptors: list[int] = []

            def make(name: str) -> None:
                descriptors.append(links.make_tap(name))
                stack.callback(os.close, descriptors[-1])

            for node, number in itertools.product(
                range(self.num_nodes), range(self.num_interfaces)
            ):
                name, port = links.interface(number), _port(node, number)
                self.run(node, lambda name=name: make(name))  # type: ignore[misc]
                self.on_switch(lambda port=port: make(port))  # type: ignore[misc]
            # Isolated: it needs no package, and must not find ours beside it.
            command = [sys.executable, "-I", "-S", str(_RELAY), f"{self.setting.delay_s * 1e6:.0f}"]
            self._relay = subprocess.Popen(
                [*command, *map(str, descriptors)],
                stdin=subprocess.PIPE,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for this process, which then ends it
            )


@dataclass(frozen=True)
class Placement:
    """A network, and where on it each rank of a job lives."""

    network: Network
    seats: list[Seat]

    def namespace(self, rank: int) -> int:
        """The descriptor of the rank's node."""
        return self.network.descriptor(self.seats[rank].node)


def missing_privilege() -> str | None:
    """Why this process may not make nodes; None if it may, whatever else could be missing."""
    try:
        os.close(namespaces.create())
    except EmulationError as error:
        return str(error)
    return None


def _port(node: int, number: int = 0) -> str:
    """The switch's end of the cable to the node's interface of that number."""
    return f"p{node}" if number == 0 else f"p{node}-{number}"


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Errors of the kernel as ours, saying what could not be emulated."""
    try:
        yield
    except EmulationError:
        raise
    except Exception as error:  # pyroute2's NetlinkError has no base of its own to name here
        raise EmulationError(
            f"the kernel refused a part of the emulated network ({error}): it needs bridges, veth "
            "and, for rates, sch_htb and cls_u32"
        ) from error
