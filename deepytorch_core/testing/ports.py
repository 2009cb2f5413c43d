"""A port for a program that can't choose one itself."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 16384


def free_port() -> int:
    """A free TCP port of this machine that the system gives to nobody who asks for any port.

    So it is still free seconds later, when the program binds it. Raises OSError if there is none.
    """
    first = int(_RANGE.read_text().split()[0])
    if first <= _LOWEST:
        raise OSError(f"{_RANGE} leaves no ports from {_LOWEST} on that are not given to anybody")
    for port in random.sample(range(_LOWEST, first), min(100, first - _LOWEST)):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port from {_LOWEST} to {first}")
