"""A process's Python stacks, asked for by a signal: without its GIL, and without its help.

At its first group each process registers Python's faulthandler for a real-time signal that nothing
else uses. The handler writes into a memfd, where whoever sent the signal reads the answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import linecache
import os
import re
import signal
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepytorch_core.hang import evidence, processes, record

_POLL_S = 0.01
# The handler writes a line at a time; after so long without one it is through.
_QUIET_S = 0.08
_MOST_BYTES = 1 << 18

_registered = 0
_descriptor = -1

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def register() -> int:
    """Lets others ask this process for its stacks; returns the signal, 0 where there is none.

    Idempotent. A forked child answers to nobody until it calls this itself.
    """
    global _registered, _descriptor
    if _registered:
        return _registered
    chosen = processes.free_signal(range(signal.SIGRTMAX - 8, signal.SIGRTMIN, -1))
    if not chosen:
        return 0
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        _descriptor = os.memfd_create(record.STACKS_NAME, os.MFD_CLOEXEC)
        # A reader empties the file first, so each answer begins where the file then ends.
        fcntl.fcntl(_descriptor, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(chosen, file=_descriptor, all_threads=True, chain=False)
        _registered = chosen
        os.register_at_fork(after_in_child=_forget)
    return _registered


def _forget() -> None:
    """In a forked child: what it wrote would go to its parent's readers."""
    global _registered, _descriptor
    if _registered:
        faulthandler.unregister(_registered)
        os.close(_descriptor)
        _registered, _descriptor = 0, -1


def ask(pid: int, signal_number: int, *, limit_s: float = 2.0) -> str:
    """The stacks of all threads of process `pid`; empty if it gives none within `limit_s`."""
    if signal_number <= 0 or processes.state(pid)[0] != evidence.RUNNING:
        return ""  # what is stopped would answer once it goes on
    if not processes.catches(pid, signal_number):
        return ""
    deadline = time.monotonic() + limit_s
    descriptor = None
    try:
        descriptor = record.open_memfd(pid, record.STACKS_NAME, os.O_RDWR)
        if descriptor is None or not _lock(descriptor, deadline):
            return ""
        os.ftruncate(descriptor, 0)
        os.kill(pid, signal_number)
        return _await_answer(descriptor, deadline)
    except OSError:
        return ""
    finally:
        if descriptor is not None:
            os.close(descriptor)


def ask_all(signals: dict[int, int], *, limit_s: float = 2.0) -> dict[int, str]:
    """`ask` of several processes at once; `signals` by pid."""
    if not signals:
        return {}
    with ThreadPoolExecutor(max_workers=min(16, len(signals))) as pool:
        answers = {
            pid: pool.submit(ask, pid, number, limit_s=limit_s) for pid, number in signals.items()
        }
        return {pid: answer.result() for pid, answer in answers.items()}


def _lock(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)


def _await_answer(descriptor: int, deadline: float) -> str:
    size, since = 0, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = os.fstat(descriptor).st_size
        if now != size:
            size, since = now, time.monotonic()
        elif size and time.monotonic() - since > _QUIET_S:
            break
    return os.pread(descriptor, min(size, _MOST_BYTES), 0).decode(errors="replace")


def main_thread(text: str) -> tuple[evidence.Frame, ...]:
    """The main thread's frames in what faulthandler wrote, innermost first."""
    threads: list[tuple[bool, list[evidence.Frame]]] = []
    for line in text.splitlines():
        heading = _THREAD.match(line)
        if heading:
            threads.append((heading.group(1) == "Current thread", []))
            continue
        frame = _FRAME.match(line)
        if frame and threads:
            number = int(frame.group(2)) if frame.group(2).isdecimal() else 0
            threads[-1][1].append(_frame(frame.group(1), number, frame.group(3)))
    # It lists the main thread last, whose outermost frame is the script itself.
    scripts = [frames for _, frames in threads if frames and frames[-1].function == "<module>"]
    current = [frames for is_current, frames in threads if is_current]
    chosen = scripts[-1:] or current[-1:] or [frames for _, frames in threads[-1:]]
    return tuple(chosen[0]) if chosen else ()


def _frame(file: str, line: int, function: str) -> evidence.Frame:
    code = linecache.getline(file, line).strip() if line and os.path.isabs(file) else ""
    return evidence.Frame(file, line, function, code[:200], mine=is_mine(file))


def is_mine(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    if "/site-packages/" in path or "/dist-packages/" in path:
        return False
    return not any(path.startswith(folder) for folder in _library_folders())


def _library_folders() -> tuple[str, ...]:
    global _folders
    if not _folders:
        package = Path(__file__).resolve().parents[1]
        found = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
        # Beside ours in an editable install lie the facade, the adapters and the recipes.
        parts = ("deepytorch", "integrations", "recipes")
        found |= {str(package)} | {str(package.parent / part) for part in parts}
        _folders = tuple(sorted(folder + os.sep for folder in found))
    return _folders


_folders: tuple[str, ...] = ()


def where(frames: tuple[evidence.Frame, ...]) -> evidence.Frame | None:
    """The frame to name: the innermost of the user's own, else the innermost."""
    return next((frame for frame in frames if frame.mine), frames[0] if frames else None)
