"""The network interface that gloo takes in a job of several nodes."""

from __future__ import annotations

import ipaddress
import socket

from deepytorch_core import config
from deepytorch_core.console import say_once
from deepytorch_core.network import prepare

VARIABLE = "GLOO_SOCKET_IFNAME"

_done = False


def before_gloo() -> None:
    """Name the interface between the nodes to gloo where its own choice is none, once per process.

    gloo takes the interface of the address that the machine's own name stands for, else the
    loopback one. Many distributions let that name be 127.0.1.1, and then gloo's start fails on
    one node and waits on the others. What the user set stays; where no interface is found, gloo
    goes by its own choice.
    """
    global _done
    if _done or not config.spans_nodes():
        return
    _done = True
    if config.is_set(VARIABLE) or _has_usable_name(socket.gethostname()):
        return
    try:
        name = interface_of(prepare.own_address())
    except OSError as error:
        say_once(f"gloo chooses its network interface by itself: {error}", level="debug")
        return
    config.set_where_unset({VARIABLE: name})
    say_once(f"gloo: set GLOO_SOCKET_IFNAME={name}, since this machine's name leads back into it")


def interface_of(address: str) -> str:
    """The interface that has `address`. Raises OSError when there is none."""
    from deepytorch_core import topology  # loads the native core

    for nic in topology.discover().nics:
        if address in nic.addresses:
            return nic.name
    raise OSError(f"no interface has {address}")


def _has_usable_name(hostname: str) -> bool:
    """Whether other nodes can reach what gloo finds under the machine's name."""
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
