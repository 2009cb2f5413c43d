"""The few lines that deepytorch prints by itself, on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from deepytorch_core.base import config

_LEVELS = ("debug", "info", "warning", "error")

_given_up: Any = None  # the stream that could not be written
_joined_as: int | None = None
_said: set[str] = set()
_when_joined: list[Callable[[], object]] = []


def say(text: str, *, level: str = "info") -> None:
    """Print one line, whatever the rank, if option `log` lets `level` through.

    Raises nothing: where stderr is closed, full or read by nobody, nothing more goes there.
    """
    global _given_up
    if _LEVELS.index(level) < _LEVELS.index(config.current().log):
        return
    stream = sys.stderr
    if stream is None or stream is _given_up:
        return
    try:
        with _without_broken_pipe():
            # In one write, so that lines of several ranks don't mix.
            _write(stream, f"deepytorch: {text}\n")
    except Exception:  # whatever a stream of the program's own raises
        _given_up = stream


def _write(stream: Any, line: str) -> None:
    buffer = getattr(stream, "buffer", None)
    if type(stream) is not io.TextIOWrapper or not isinstance(
        getattr(buffer, "raw", None), io.FileIO
    ):
        stream.write(line)
        stream.flush()
        return
    # Past the buffers, because a line that can't be written would stay in them. The interpreter
    # tries again at its end, and lets the program fail with status 120.
    stream.flush()
    data = line.encode(stream.encoding, stream.errors or "strict")
    while data:
        data = data[os.write(stream.fileno(), data) :]


@contextlib.contextmanager
def _without_broken_pipe() -> Iterator[None]:
    """Keep the signal of a pipe that nobody reads from a program that does not ignore it."""
    if signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN:  # as Python leaves it
        yield
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    was_pending = signal.SIGPIPE in signal.sigpending()
    try:
        yield
    finally:
        if not was_pending:
            signal.sigtimedwait({signal.SIGPIPE}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def say_first(text: str, *, level: str = "info") -> None:
    """As `say`, unless this process has said the same before."""
    if text not in _said:
        _said.add(text)
        say(text, level=level)


def say_once(text: str, *, level: str = "info") -> None:
    """Print one line on rank 0 only."""
    if global_rank() == 0:
        say(text, level=level)


def joined_as(rank: int) -> None:
    """Note this process's rank in the default group that is being made.

    A process may have been started by spawn or fork, or by a framework that gives its ranks no
    RANK. Nothing else tells its rank then before that group is there, nor when it is gone again.
    """
    global _joined_as
    _joined_as = rank
    for act in _when_joined:
        act()


def when_joined(act: Callable[[], object]) -> None:
    """Have `act` called whenever this process's rank is noted."""
    if act not in _when_joined:
        _when_joined.append(act)


def has_joined() -> bool:
    """Whether this process has or had a default group, which says what its rank is."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return _joined_as is not None or (c10d is not None and bool(c10d.is_initialized()))


def global_rank() -> int:
    """This process's rank: torch.distributed's, now or last; before any group the launcher's."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and c10d.is_initialized():
        return int(c10d.get_rank())
    return config.rank() if _joined_as is None else _joined_as
