"""A process's side of being asked for its Python stacks (stacks.py asks).

With its default group each process starts a thread that waits in a pipe for the question. The
process also registers Python's faulthandler for a real-time signal that nothing else uses. Both
write into a memfd, where whoever asked reads the answer. The thread sees frames that stand still,
because it holds the GIL; the signal is for the case that it can't get it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
from types import FrameType

from deepytorch_core.base import unlisted
from deepytorch_core.hang import processes, record

# Before and behind what the thread writes.
BOUNDARY = b"\0"
_MOST_FRAMES = 200  # of a thread

_END_LIMIT_S = 3.0

_registered = 0
_watches_forks = False
_descriptors: tuple[int, ...] = ()
_thread: unlisted.Thread | None = None


def register() -> int:
    """Lets others ask this process for its stacks; returns the signal, 0 where there is none.

    Idempotent. A forked child answers to nobody until it calls this itself.
    """
    global _registered, _descriptors, _thread, _watches_forks
    if _registered:
        return _registered
    chosen = processes.free_signal(range(signal.SIGRTMAX - 8, signal.SIGRTMIN, -1))
    if not chosen:
        return 0
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        reading, writing = os.pipe2(os.O_CLOEXEC)
        thread = unlisted.Thread(_serve, (reading, chosen), name="deepytorch-stacks")
        thread.start()
        name = f"{record.STACKS_NAME}@{reading}.{thread.native_id}"
        memory = os.memfd_create(name, os.MFD_CLOEXEC)
        # A reader empties the file first, so each answer begins where the file then ends.
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
        _descriptors, _thread = (memory, reading, writing), thread
        faulthandler.register(chosen, file=memory, all_threads=True, chain=False)
        _registered = chosen
        if not _watches_forks:
            os.register_at_fork(after_in_child=_forget)
            _watches_forks = True
    return _registered


def unregister() -> None:
    """Answers nobody from now on, and ends the thread. Nothing where `register` did nothing."""
    global _registered, _descriptors, _thread
    if _registered:
        faulthandler.unregister(_registered)
        (memory, _, writing), thread = _descriptors, _thread
        _registered, _descriptors, _thread = 0, (), None
        os.close(writing)  # which the thread sees
        os.close(memory)
        if thread is not None:
            thread.join(_END_LIMIT_S)


def _forget() -> None:
    """In a forked child, where the thread is gone: its answers would go to its parent's readers."""
    reading = _descriptors[1:2]
    unregister()
    for descriptor in reading:
        os.close(descriptor)


def _serve(questions: int, number: int) -> None:
    # A program may have blocked all signals before it started threads: one must take this.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    with contextlib.suppress(OSError):
        while os.read(questions, 1):
            text = _all_stacks().encode(errors="replace")
            for memory in _descriptors[:1]:
                os.write(memory, BOUNDARY + text + BOUNDARY)
        os.close(questions)


def _all_stacks() -> str:
    """As faulthandler writes them: the main thread last, this one not at all."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()} | unlisted.names()
    main = threading.main_thread().ident
    frames.pop(threading.get_ident(), None)
    in_order = sorted(frames, key=lambda ident: ident == main)
    return "\n".join(
        _stack(frames[ident], ident, names.get(ident, ""), is_main=ident == main)
        for ident in in_order
    )


def _stack(frame: FrameType | None, ident: int, name: str, *, is_main: bool) -> str:
    heading = "Current thread" if is_main else "Thread"
    lines = [f"{heading} 0x{ident:016x} [{name}] (most recent call first):"]
    while frame is not None and len(lines) <= _MOST_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"
