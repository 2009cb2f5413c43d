"""Network namespaces without names: they live as long as somebody holds them, and no longer.

A namespace is a descriptor in the process that made it. When that process ends, however it ends,
the kernel removes the namespace with all its interfaces as soon as no process is left inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
from collections.abc import Callable
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
# Sysfs shows interfaces there: each mount of it shows one namespace's.
_SYSFS_OF_INTERFACES = ("class/net", "devices/virtual/net")

T = TypeVar("T")


class EmulationError(RuntimeError):
    """Nodes cannot be emulated here; the message names what is missing."""


def create() -> int:
    """A descriptor of a new network namespace, without a name, with nothing in it but `lo`.

    Raises EmulationError without the privilege.
    """

    def make() -> int:
        _check(_libc().unshare(_CLONE_NEWNET), "make a network namespace")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_a_thread(make)


def run_inside(namespace: int, function: Callable[[], T], *, private_sysfs: bool = False) -> T:
    """Calls `function` in a thread inside the namespace; returns or raises what it does.

    Sockets and processes that it makes stay inside. Threads of its own must not outlive it if they
    use files of the namespace by path.

    Args:
        namespace: a descriptor from `create`.
        function: takes nothing.
        private_sysfs: show /sys/class/net of the namespace to processes that `function` starts,
            where mounts are allowed; otherwise they see the machine's interfaces there.
    """

    def call() -> T:
        enter(namespace, private_sysfs=private_sysfs)
        return function()

    return _in_a_thread(call)


def enter(namespace: int, *, private_sysfs: bool = False) -> None:
    """Moves the calling thread, and what it starts from now on, into the namespace for good."""
    _check(_libc().setns(namespace, _CLONE_NEWNET), "enter a network namespace")
    if private_sysfs:
        # If mounting is forbidden, programs still run; they only see the machine's interfaces.
        with contextlib.suppress(EmulationError):
            _show_own_interfaces()


def _show_own_interfaces() -> None:
    """Mounts this namespace's view of interfaces over the machine's, for this thread alone.

    Only those folders: the rest of /sys, control groups among it, is mounted below and stays.
    """
    _check(_libc().unshare(_CLONE_NEWNS), "make a mount namespace")
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    fresh = tempfile.mkdtemp(prefix="deepytorch-sysfs-")
    try:
        _mount("sysfs", fresh, kind="sysfs")
        try:
            for folder in _SYSFS_OF_INTERFACES:
                _mount(f"{fresh}/{folder}", f"/sys/{folder}", flags=_MS_BIND)
        finally:
            _check(_libc().umount2(fresh.encode(), _MNT_DETACH), "unmount")
    finally:
        os.rmdir(fresh)


def _mount(source: str, target: str, *, kind: str = "", flags: int = 0) -> None:
    result = _libc().mount(source.encode(), target.encode(), kind.encode() or None, flags, None)
    _check(result, f"mount {target}")


def _libc() -> ctypes.CDLL:
    # Python has setns and unshare only from 3.12 on, and no mount.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = [
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p),
        *(ctypes.c_ulong, ctypes.c_char_p),
    ]
    return libc


def _check(result: int, what: str) -> None:
    if result == -1:
        reason = os.strerror(ctypes.get_errno())
        raise EmulationError(
            f"cannot {what} ({reason}): emulated nodes need the capabilities CAP_SYS_ADMIN and "
            "CAP_NET_ADMIN; run as root, in a container with --cap-add SYS_ADMIN --cap-add "
            "NET_ADMIN"
        )


def _in_a_thread(function: Callable[[], T]) -> T:
    """A thread's namespace is its own, so nothing has to be undone in the caller's."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="deepytorch-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
