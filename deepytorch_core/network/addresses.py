"""Finds how other nodes know this machine: its name, its address and the interface that has it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

from deepytorch_core.base import config

_SIOCGIFADDR = 0x8915


def own_address() -> str:
    """The address of the interface that carries the job.

    Option `ifname`, else NCCL's own choice by NCCL_SOCKET_IFNAME, else the one that leads to the
    rendezvous store or, without one, into the world. Raises OSError when there is none.
    """
    asked = config.current().ifname or config.nccl_settings().get("NCCL_SOCKET_IFNAME", "")
    name = matching_interface(asked, [name for _, name in socket.if_nameindex()])
    if name is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24])
    return address_towards(*(config.rendezvous_address() or ("192.0.2.1", 9)))


def address_towards(host: str, port: int) -> str:
    """The address from which this machine would speak to `host`.

    Raises OSError when there is no way, or only one that leads back into this machine.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(address)  # sends nothing
        found: str = asking.getsockname()[0]
    if ipaddress.ip_address(found.split("%")[0]).is_loopback:
        raise OSError(
            f"the route to {host} leads back into this machine: name the interface between the "
            "nodes with option ifname"
        )
    return found


def matching_interface(asked: str, names: Sequence[str]) -> str | None:
    """The first of `names` that NCCL_SOCKET_IFNAME=`asked` means; None for what excludes only.

    "eth" is a prefix, "=eth0" a whole name, "^lo" what it is not.
    """
    if not asked or asked.startswith("^"):
        return None
    whole = asked.startswith("=")
    for wanted in asked.lstrip("=").split(","):
        for name in names:
            if name == wanted or (not whole and name.startswith(wanted)):
                return name
    return None


def interface_of(address: str) -> str:
    """The interface that has `address`. Raises OSError when there is none."""
    from deepytorch_core.topology import model as topology  # loads the native core

    for nic in topology.discover().nics:
        if address in nic.addresses:
            return nic.name
    raise OSError(f"no interface has {address}")


def has_address(hostname: str, address: str) -> bool:
    """Whether `hostname`, a name or an address, stands for `address`. Raises OSError for one
    that nobody knows."""
    return any(found[0] == address for *_, found in socket.getaddrinfo(hostname, None))


def check_localhost(limit_s: float = 5.0) -> None:
    """Connects to a socket of its own at "localhost". Raises OSError when none of the addresses of
    that name can be reached, as where the loopback interface is down."""
    failure: OSError | None = None
    for family, kind, _, _, address in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind) as server:
                server.bind(address)
                server.listen()
                socket.create_connection(server.getsockname()[:2], limit_s).close()
                return
        except OSError as error:
            failure = error
    assert failure is not None  # getaddrinfo raises rather than give nothing
    raise failure


def is_known_by(hostname: str) -> bool:
    """Whether one of the addresses that `hostname` stands for is this machine's, and other nodes
    could reach it."""
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    if ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
        return False
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind(address)
    except OSError:
        return False
    return True
