"""Asks a process for its Python stacks, of which another thread of it may hold the GIL.

Two ways lead to an answer (answer.py is the other side). The first is a thread that waits for the
question: it answers safely, but needs the GIL for it. If that thread sleeps on for a while,
something else holds the GIL and runs no Python meanwhile. Only then a signal makes Python's
faulthandler write without the GIL. The faulthandler walks frames as they are, and where they are
changing just then it crashes the process; so it is never the first.
"""

from __future__ import annotations

import fcntl
import linecache
import os
import re
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepytorch_core.hang import answer, evidence, processes, record

_POLL_S = 0.01
# A thread that has slept for so long won't get the GIL soon: Python hands it on every 5 ms.
_MOST_NAPS = 75
# A page fault is a wait in the kernel, too: it is over when one looks again.
_MOST_FAULTS = 10
# The signal's handler writes a line at a time; after so long without one it is through.
_QUIET_S = 0.08
_MOST_BYTES = 1 << 18

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def ask(pid: int, signal_number: int, *, limit_s: float, gently: bool = False) -> str:
    """The stacks of all threads of process `pid`; empty if it gives none within `limit_s`.

    `gently`: without the signal, for a process that may well be in good health.
    """
    if signal_number <= 0 or not _is_running(pid):
        return ""  # what is stopped would answer once it goes on
    if not processes.catches(pid, signal_number):
        return ""
    deadline = time.monotonic() + limit_s
    descriptor = question = None
    try:
        descriptor = record.open_memfd(pid, record.STACKS_NAME, os.O_RDWR)
        if descriptor is None or not _lock(descriptor, deadline):
            return ""
        # The name says in which pipe who waits.
        name = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
        pipe, thread = (int(part) for part in name.rpartition("@")[2].split("."))
        question = os.open(f"/proc/{pid}/fd/{pipe}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        os.ftruncate(descriptor, 0)
        os.write(question, b"?")
        if not _await_thread(descriptor, pid, thread, deadline):
            if gently or time.monotonic() > deadline:
                return ""
            os.kill(pid, signal_number)
            _await_handler(descriptor, deadline)
        data = os.pread(descriptor, min(os.fstat(descriptor).st_size, _MOST_BYTES), 0)
        # The signal may have ended what held the GIL: then the thread has written as well.
        whole = [part for part in data.split(answer.BOUNDARY) if part]
        return whole[0].decode(errors="replace") if whole else ""
    except (OSError, ValueError):
        return ""
    finally:
        for each in (descriptor, question):
            if each is not None:
                os.close(each)


def _is_running(pid: int) -> bool:
    for _ in range(_MOST_FAULTS):
        state, _ = processes.state(pid)
        if state != evidence.IN_KERNEL:
            return state == evidence.RUNNING
        time.sleep(_POLL_S)
    return False


def ask_all(signals: dict[int, int], *, limit_s: float, gently: bool = False) -> dict[int, str]:
    """`ask` of several processes at once; `signals` by pid."""
    if not signals:
        return {}
    with ThreadPoolExecutor(max_workers=min(16, len(signals))) as pool:
        answers = {
            pid: pool.submit(ask, pid, number, limit_s=limit_s, gently=gently)
            for pid, number in signals.items()
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


def _await_thread(descriptor: int, pid: int, thread: int, deadline: float) -> bool:
    """Whether the thread has answered; False once it has slept for too long to get the GIL."""
    naps, ran = 0, processes.ran(pid)
    while time.monotonic() < deadline and naps < _MOST_NAPS:
        if _is_whole(descriptor):
            return True
        time.sleep(_POLL_S)
        before, ran = ran, processes.ran(pid)
        # On a busy machine who holds the GIL may want to hand it on, and have no processor for it.
        if processes.sleeps(f"{pid}/task/{thread}"):
            naps += ran > before or not processes.is_runnable(pid)
    return _is_whole(descriptor)


def _await_handler(descriptor: int, deadline: float) -> None:
    size, since = 0, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = os.fstat(descriptor).st_size
        if now != size:
            size, since = now, time.monotonic()
        elif size and time.monotonic() - since > _QUIET_S:
            return


def _is_whole(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) == answer.BOUNDARY


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
    return not any(path.startswith(folder) for folder in library_folders())


def library_folders() -> tuple[str, ...]:
    """Below these lies no code of the user's own."""
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
