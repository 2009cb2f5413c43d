"""How each fault is made, in the rank that it happens to.

What happens to the network or to the store is made by the runner, from outside.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepytorch_core.testing.worker import UncaughtError

_STOPPED_S = 5
_JUMP_S = 3600
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MNT_DETACH = 2
# A process that may not map any more can still take so much: less than any buffer of ours.
_REST_BYTES = 256 << 10

_taken: list[int] = []  # descriptors that fill the gaps
_hoarded: list[Any] = []  # tensors that fill a GPU
_filled: list[str] = []  # folders that a full disk stands in for
FOR_GOOD = {
    *("no memory", "no GPU memory", "no descriptors"),
    *("disk full", "/dev/shm full", "clock jump"),
}
FULL = "full"  # the folder, in the case's own, that the disk is full in


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(status: int) -> None:
    """Do what the interpreter does at its end; a thread can't end the program otherwise."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def fail() -> None:
    """The main thread's alone: in another it would end that one, and not the program."""
    raise UncaughtError("the program's own")


def terminate() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def stop() -> None:
    command = f"sleep {_STOPPED_S}; kill -CONT {os.getpid()}"
    # A session of its own: what stops the rank must not stop who wakes it.
    waker = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def no_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _REST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def no_device_memory() -> None:
    import torch

    size, _ = torch.cuda.mem_get_info()
    while size >= _REST_BYTES:
        try:
            _hoarded.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2


def no_descriptors() -> None:
    # New ones get the lowest free number, so what is free below the highest has to go too.
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    open_ones = len(os.listdir("/proc/self/fd")) - 1
    _taken.extend(os.dup(0) for _ in range(highest + 1 - open_ones))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))


def back_to_plenty() -> None:
    """Lifts the limits again, so that the rank can tell what it saw."""
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    while _taken:
        os.close(_taken.pop())
    while _filled:
        # Files that are open there keep it alive, out of sight.
        _check(_libc().umount2(_filled.pop().encode(), _MNT_DETACH), "umount")
    if _hoarded:
        import torch

        _hoarded.clear()
        torch.cuda.empty_cache()


def fill(folder: str) -> None:
    """Puts a full disk in the place of `folder`, for this process alone."""
    libc = _libc()
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    _check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=4k"), f"mount {folder}")
    with open(f"{folder}/full", "wb", buffering=0) as file:
        file.write(bytes(4096))
    _filled.append(folder)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def jump() -> None:
    ctypes.CDLL(None).shift_clock(_JUMP_S)


INJECT: dict[str, Callable[[Path], None]] = {
    "SIGKILL": lambda folder: kill(),
    "SIGKILL with DataLoaders": lambda folder: kill(),
    "SIGSEGV": lambda folder: crash(),
    "exit(0)": lambda folder: leave(0),
    "exception": lambda folder: fail(),
    "SIGTERM": lambda folder: terminate(),
    "SIGSTOP 5 s": lambda folder: stop(),
    "no memory": lambda folder: no_memory(),
    "no GPU memory": lambda folder: no_device_memory(),
    "no descriptors": lambda folder: no_descriptors(),
    "disk full": lambda folder: fill(str(folder / FULL)),
    "/dev/shm full": lambda folder: fill("/dev/shm"),
    "clock jump": lambda folder: jump(),
}
"""By fault; takes the case's folder."""
