"""Lists what a process holds that must be as before once its groups are gone, to test for leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Holdings = dict[str, list[str]]

_SOCKETS = "sockets"  # each by its number, to tell which of them are new
_SETTLING_S = 4.0  # sockets between nodes say their farewell in the background


def holdings() -> Holdings:
    """Descriptors by kind, threads by name, children, shared memory mapped, names in /dev/shm."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    links = _descriptors().values()
    return {
        "descriptors": sorted(map(_kind, links)),
        _SOCKETS: sorted(link for link in links if _kind(link) == "socket"),
        "threads": _threads(),
        "children": _children(),
        "shared memory mapped": [line for line in maps if "memfd" in line],
        "/dev/shm": sorted(path.name for path in Path("/dev/shm").glob("*deepytorch*")),
    }


def num_mappings() -> int:
    """How many areas of memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("\n")


def names_mapped_of_shm() -> set[str]:
    """The files of /dev/shm that this process has mapped, those included that have no name now."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, is_there, name = line.partition(" /dev/shm/")
        if is_there:
            found.add(name.removesuffix(" (deleted)"))
    return found


def left_over(before: Mapping[str, list[str]], *, settling_s: float = _SETTLING_S) -> list[str]:
    """Say what this process holds more than `before` (from `holdings`); empty if nothing.

    It waits up to `settling_s` seconds for what ends in the background.
    """
    return _once_settled(lambda: _more(before, holdings()), settling_s)


def _once_settled(look: Callable[[], list[str]], settling_s: float) -> list[str]:
    deadline = time.monotonic() + settling_s
    found = look()
    while found and time.monotonic() < deadline:
        time.sleep(0.05)
        found = look()
    return found


def _more(before: Mapping[str, list[str]], after: Holdings) -> list[str]:
    found = []
    for kind, held in after.items():
        previous = before[kind]
        if kind == _SOCKETS:
            continue  # they are among the descriptors
        if kind == "threads" and len(held) <= len(previous):
            continue  # they may change their names
        rest = list(held)
        for each in previous:
            if each in rest:
                rest.remove(each)
        if rest:
            found.append(f"{kind}: {', '.join(sorted(set(rest)))} ({len(rest)})")
        if "socket" in rest:
            found[-1] += f": {', '.join(_new_sockets(before[_SOCKETS]))}"
    return found


def _new_sockets(before: list[str]) -> list[str]:
    """Say what they are: "listens at ...", or from where to where they go."""
    found = []
    for number, link in _descriptors().items():
        if _kind(link) == "socket" and link not in before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as each:
                found.append(_describe(each))
    return sorted(found)


def _describe(each: socket.socket) -> str:
    here = _address(each.getsockname())
    if each.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return f"listens at {here}"
        with contextlib.suppress(OSError):  # not connected
            return f"{here} to {_address(each.getpeername())}"
    return here


def _address(address: object) -> str:
    if isinstance(address, tuple):
        return f"{address[0]}:{address[1]}"
    return str(address) or "no name"


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _kind(link: str) -> str:
    """Return a descriptor's kind: "socket", "anon_inode:[eventpoll]", "/memfd:name", or a path."""
    return link if link.startswith(("anon_inode", "/memfd")) else link.split(":")[0]


def _threads() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            found.append((task / "comm").read_text().strip())
    return sorted(found)


def _children() -> list[str]:
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += (task / "children").read_text().split()
    return sorted(found)
