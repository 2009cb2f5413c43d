"""Reads what the system says of a process in /proc: nothing if that is not there, or not ours."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from deepytorch_core.hang import evidence

_PROC = Path("/proc")


def state(pid: int) -> tuple[str, str]:
    """One of `evidence.PROCESS_STATES`, and what more is known of it."""
    try:
        letter = _stat(pid)[0]
    except FileNotFoundError:
        return evidence.GONE if _is_seen() else evidence.UNKNOWN, ""
    except (OSError, ValueError, IndexError):
        return evidence.UNKNOWN, ""
    if letter in "ZX":
        return evidence.GONE, "its parent has not noticed it yet"
    if letter == "T":
        return evidence.STOPPED, ""
    if letter == "t":
        return evidence.TRACED, _tracer(pid)
    if letter == "D":
        return evidence.IN_KERNEL, _kernel_function(pid)
    return evidence.RUNNING, ""


def main_thread(pid: int) -> str:
    """Say what a main thread does as the system sees it, for a process that gave no Python stack.

    "its main thread waits in the kernel (futex_wait)"; empty if the system doesn't say.
    """
    try:
        letter = _stat(f"{pid}/task/{pid}")[0]
    except (OSError, IndexError):
        return ""
    if letter == "R":
        return "its main thread computes, in native code if something keeps the GIL"
    function = _kernel_function(pid).removeprefix("in ")
    return "its main thread waits in the kernel" + (f" ({function})" if function else "")


def ancestors(pid: int) -> list[int]:
    """Return the process's parent, that one's parent, and so on; the next first."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        while (pid := int(_stat(pid)[1])) > 0:
            found.append(pid)
    return found


def sleeps(task: str) -> bool:
    """Whether a thread, named by its path in /proc, waits for something else than a processor."""
    try:
        return _stat(task)[0] in "SD"
    except (OSError, IndexError):
        return False


def ran(pid: int) -> int:
    """Processor time of all its threads so far, in the kernel's ticks; 0 where that isn't said."""
    try:
        stat = _stat(pid)
        return int(stat[11]) + int(stat[12])
    except (OSError, ValueError, IndexError):
        return 0


def is_runnable(pid: int) -> bool:
    """Whether any thread of it runs, or waits for nothing but a processor."""
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return False
    for thread in threads:
        with contextlib.suppress(OSError, IndexError):  # it has ended
            if _stat(f"{pid}/task/{thread}")[0] == "R":
                return True
    return False


def start_time(pid: int) -> int:
    """When the process began, in the kernel's ticks: tells it from another of the same number.

    0 where the system doesn't say.
    """
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return 0


def catches(pid: int, signal: int) -> bool:
    """Whether the process has a handler for the signal: without one it would end it."""
    return _in_mask(pid, "SigCgt", signal)


def free_signal(candidates: range) -> int:
    """The first signal that this process neither handles nor ignores; 0 if none is known."""
    pid = os.getpid()
    if not _is_seen():
        return 0
    for signal in candidates:
        taken = any(_in_mask(pid, mask, signal) for mask in ("SigCgt", "SigIgn"))
        if not taken:
            return signal
    return 0


def _is_seen() -> bool:
    """Whether /proc shows this process by its own number: not one of another pid namespace."""
    try:
        return os.readlink(_PROC / "self") == str(os.getpid())
    except OSError:
        return False


def _in_mask(pid: int, mask: str, signal: int) -> bool:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        name, _, value = line.partition(":")
        if name == mask:
            return bool(int(value, 16) >> (signal - 1) & 1)
    return False


def _stat(pid: int | str) -> list[str]:
    # The name, in parentheses, may hold anything.
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _tracer(pid: int) -> str:
    try:
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("TracerPid:"):
                tracer = int(line.split()[1])
                name = (_PROC / str(tracer) / "comm").read_text().strip()
                return f"{name}, pid {tracer}"
    except (OSError, ValueError, IndexError):
        pass
    return ""


def _kernel_function(pid: int) -> str:
    try:
        name = (_PROC / str(pid) / "wchan").read_text().strip()
    except OSError:
        return ""
    return f"in {name}" if name not in ("", "0") else ""
