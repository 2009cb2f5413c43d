"""The network interface that gloo takes in a job of several nodes."""

from __future__ import annotations

import socket

from deepytorch_core.base import config
from deepytorch_core.base.console import say_once
from deepytorch_core.network import addresses

_VARIABLE = "GLOO_SOCKET_IFNAME"

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
    if config.is_set(_VARIABLE) or addresses.is_known_by(socket.gethostname()):
        return
    try:
        name = addresses.interface_of(addresses.own_address())
    except OSError as error:
        say_once(f"gloo chooses its network interface by itself: {error}", level="debug")
        return
    config.set_where_unset({_VARIABLE: name})
    say_once(f"gloo: set GLOO_SOCKET_IFNAME={name}, since this machine's name leads back into it")
