"""Interfaces, addresses and rates inside the namespaces, set over netlink by pyroute2.

Rates are the kernel's HTB. With a cap per flow, TCP flows are spread over leaves by bits 1 to 4 of
both ports. Bit 0 is left out, as the kernel's own choice of ports prefers one parity. Flows with
equal bits share one cap: of the flows to one listener every sixteenth pair, so 8 flows carry 6.5
caps on average.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.testing.emulation.namespaces import EmulationError
from deepytorch_core.testing.emulation.setting import burst_bytes

INTERFACE = "eth0"  # of a node, the first
BRIDGE = "br0"
_FIRST_SUBNET = 77
_STALLED_RATE = 1000  # bytes per second
_IFA_F_NODAD = 0x02
_IP, _IPV6, _TCP = 0x0800, 0x86DD, 6
_ROOT_CLASS, _DEFAULT_CLASS, _STALLED_CLASS, _FIRST_LEAF = 0x10001, 0x10002, 0x10003, 0x10010
_PORT_BITS = 4
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04 | 0x08  # checksums, TCP segmentation for IPv4 and IPv6, its ECN


def interface(number: int) -> str:
    """A node's interface by its number; all nodes' equal ones form a network of their own."""
    return f"eth{number}"


def bridge(number: int) -> str:
    """The bridge that joins all nodes' interfaces of the number."""
    return f"br{number}"


def address(host: int, number: int = 0) -> str:
    """The IPv4 address of a node by its number, or of the switch, on the interface `number`."""
    return f"10.{_FIRST_SUBNET + number}.{host // 250}.{host % 250 + 1}"


def address6(host: int, number: int = 0) -> str:
    return f"fd00:{_FIRST_SUBNET + number}::{host + 1:x}"


def netlink() -> Any:
    """pyroute2's connection to the namespace of the calling thread; a context manager."""
    try:
        from pyroute2 import IPRoute
    except ImportError as error:
        raise EmulationError(
            "emulated nodes need the package pyroute2: pip install pyroute2"
        ) from error
    return IPRoute()


def make_switch(num_interfaces: int = 1) -> None:
    """Makes the bridges that join the cables, in the namespace of the calling thread."""
    with netlink() as ip:
        _up(ip, "lo")
        # Without a forwarding delay: no spanning tree, the cables form none but stars.
        for name in map(bridge, range(num_interfaces)):
            ip.link("add", ifname=name, kind="bridge", br_forward_delay=0, br_stp_state=0)
            _up(ip, name)


def make_veth(ports: dict[str, int], name: str = INTERFACE) -> None:
    """Cables as veth pairs: `ports` names the switch's end, and gives the node's namespace.

    `name` is that of the interface on the nodes.
    """
    with netlink() as ip:
        for port, namespace in ports.items():
            peer = {"ifname": name, "net_ns_fd": namespace}
            ip.link("add", ifname=port, kind="veth", peer=peer)


def make_tap(name: str) -> int:
    """A TAP interface in the namespace of the calling thread; it lives as long as the descriptor.

    Raises EmulationError where the machine has no such interfaces.
    """
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS)
    except OSError as error:
        raise EmulationError(
            f"an emulated delay needs TAP interfaces through /dev/net/tun ({error}): load the "
            "kernel module tun, or leave the delay out"
        ) from error
    return descriptor


def plug_in(port: str, into: str = BRIDGE) -> None:
    """Joins the switch's end of a cable to its bridge."""
    with netlink() as ip:
        ip.link("set", index=_index(ip, port), master=_index(ip, into), state="up")


def pull_out(port: str) -> None:
    """Takes the cable's end out of the bridge: the node's link stays up, and nothing arrives."""
    with netlink() as ip:
        ip.link("set", index=_index(ip, port), master=0)


def stall_flow(name: str, tcp_port: int) -> None:
    """Holds back all but the first packets of IPv4 that the interface sends from that TCP port.

    At 1 KB per second: the kernels of many machines have no action that drops packets. Needs
    `limit` first.
    """
    with netlink() as ip:
        index = _index(ip, name)
        _add_class(ip, index, _STALLED_CLASS, _ROOT_CLASS, (_STALLED_RATE, _STALLED_RATE))
        ip.tc(
            "add-filter",
            "u32",
            index,
            parent=0x10000,
            prio=1,
            protocol=_IP,
            target=_STALLED_CLASS,
            keys=[f"{_TCP}/0xff+9", f"{tcp_port >> 8:#x}/0xff+20", f"{tcp_port & 0xFF:#x}/0xff+21"],
        )


def set_state(port: str, *, up: bool) -> None:
    """Takes the carrier of the node's link away, or gives it back."""
    with netlink() as ip:
        ip.link("set", index=_index(ip, port), state="up" if up else "down")


def set_up_host(
    interfaces: Sequence[str],
    number: int,
    congestion_controls: Sequence[str],
    *,
    only_ipv6: bool = False,
) -> str:
    """Addresses and the congestion control of the calling thread's namespace.

    Returns the first of `congestion_controls` that the machine allows namespaces.
    """
    with netlink() as ip:
        _up(ip, "lo")
        for place, name in enumerate(interfaces):
            index = _index(ip, name)
            if not only_ipv6:
                ip.addr("add", index=index, address=address(number, place), prefixlen=16)
            # Without duplicate detection, which holds an address back for a second.
            six = address6(number, place)
            ip.addr("add", index=index, address=six, prefixlen=64, flags=_IFA_F_NODAD)
            ip.link("set", index=index, state="up")
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    for name in congestion_controls:
        # Some machines keep all but reno from namespaces.
        with contextlib.suppress(OSError):
            control.write_text(name)
            break
    return control.read_text().strip()


def limit(interface: str, rate_bps: float, flow_cap_bps: float | None = None) -> None:
    """Limits what the interface sends, in bits per second: in sum and, if asked, each TCP flow."""
    total = int(rate_bps / 8)
    with netlink() as ip:
        index = _index(ip, interface)
        ip.tc("add", "htb", index, handle="1:", default=_DEFAULT_CLASS & 0xFFFF)
        _add_class(ip, index, _ROOT_CLASS, 0x10000, (total, total))
        _add_class(ip, index, _DEFAULT_CLASS, _ROOT_CLASS, (total, total))
        if flow_cap_bps is not None:
            _cap_flows(ip, index, total, int(flow_cap_bps / 8))


def _cap_flows(ip: Any, index: int, total: int, cap: int) -> None:
    steps = range(1 << _PORT_BITS)
    leaf = _FIRST_LEAF
    # Children get their own `rate` even beyond the parent's: they must borrow all but a little.
    guaranteed = max(1000, total // (64 * len(steps) ** 2))
    mask = ((1 << _PORT_BITS) - 1) << 1  # of a port's low byte
    for source in steps:
        for target in steps:
            _add_class(ip, index, leaf, _ROOT_CLASS, (guaranteed, cap))
            # These are the header's offsets of its next protocol and of the ports.
            for protocol, next_header, ports in ((_IP, 9, 20), (_IPV6, 6, 40)):
                matches = [
                    f"{_TCP}/0xff+{next_header}",
                    f"{source << 1:#x}/{mask:#x}+{ports + 1}",
                    f"{target << 1:#x}/{mask:#x}+{ports + 3}",
                ]
                ip.tc(
                    "add-filter",
                    "u32",
                    index,
                    parent=0x10000,
                    prio=1 if protocol == _IP else 2,
                    protocol=protocol,
                    target=leaf,
                    keys=matches,
                )
            leaf += 1


def _add_class(ip: Any, index: int, handle: int, parent: int, rates: tuple[int, int]) -> None:
    rate, ceiling = rates  # bytes per second
    ip.tc(
        "add-class",
        "htb",
        index,
        handle,
        parent=parent,
        rate=rate,
        ceil=ceiling,
        burst=burst_bytes(rate),
        cburst=burst_bytes(ceiling),
        quantum=60000,
    )


def _up(ip: Any, name: str) -> None:
    ip.link("set", index=_index(ip, name), state="up")


def _index(ip: Any, name: str) -> int:
    found = ip.link_lookup(ifname=name)
    if not found:
        raise EmulationError(f"the emulated network has no interface {name} (any more)")
    return int(found[0])
