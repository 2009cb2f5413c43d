"""How the command talks: tables on standard output, errors and remarks on standard error."""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Written to a file or a pipe, a table must not lose columns to an assumed width of 80.
PIPED_WIDTH = 200


_interrupted = False


def prepare() -> None:
    """Make the best of what the process was started with: closed streams, poor encodings.

    Ctrl-C is remembered, see `was_interrupted`.
    """
    if threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    signal.default_int_handler(number, frame)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """While open, SIGTERM is a SystemExit: what this process started is ended before it.

    For who starts processes in sessions of their own, which nobody else's signal reaches.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the ending
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def was_interrupted() -> bool:
    """Whether Ctrl-C came: torch's import may swallow it, or make another error of it."""
    return _interrupted


def out() -> Console:
    """Standard output, looked up now: tests and redirections replace it."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def err() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def error(error: Exception) -> None:
    """Prints an error for a person: what went wrong, without where in our code."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "the output"
        wrong_use(f"{where} can't be written: {error.strerror}; make room, or write elsewhere")
        return
    if isinstance(error, OSError) and error.filename is not None:
        wrong_use(f"{error.filename}: {error.strerror}")
        return
    if isinstance(error, (RuntimeError, ImportError, OSError)) and str(error):
        text = str(error)  # speaks for itself, where another type needs its name
    err().print(f"[bold red]error:[/] {escape(text)}")
    err().print("[dim]DEEPYTORCH_DEBUG=1 shows the traceback[/]")


def wrong_use(text: str) -> None:
    """Prints what is wrong with the command line: one line, with nothing to look into."""
    err().print(f"[bold red]error:[/] {escape(text)}")


def is_first_rank() -> bool:
    """Whether this process speaks for its job: rank 0, or one that no launcher started."""
    from deepytorch_core.base import config

    launched = config.launched()
    return launched is None or launched.rank == 0


def shows_tracebacks() -> bool:
    """Whether the option `debug` is on; a bad option elsewhere must not hide the first error."""
    from deepytorch_core.base import config

    try:
        return bool(config.current().debug)
    except ValueError:
        return False


def fields(title: str, rows: list[tuple[str, str]]) -> Table:
    """A two-column table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    return table
