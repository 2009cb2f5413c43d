"""A script hears what its signal handlers raise, though compilers catch errors."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2")
_NUMBERS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """While open, note what handlers raise; at the end raise it, if somebody has caught it."""
    handlers = _handlers()
    if not handlers:
        yield
        return
    raised: list[BaseException] = []
    ours = {number: _noting(handler, raised) for number, handler in handlers.items()}
    for number, noting in ours.items():
        signal.signal(number, noting)
    try:
        yield
    finally:
        for number, noting in ours.items():
            if signal.getsignal(number) is noting:
                signal.signal(number, handlers[number])
        if raised:
            raise raised[0]


def _handlers() -> dict[int, Callable[..., Any]]:
    """Those of the script's own. Only the main thread runs them, and may set them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found: dict[int, Any] = {number: signal.getsignal(number) for number in _NUMBERS}
    return {
        number: handler
        for number, handler in found.items()
        if callable(handler)
        and handler is not signal.default_int_handler
        and not isinstance(handler, signal.Handlers)
    }


def _noting(handler: Callable[..., Any], raised: list[BaseException]) -> Callable[..., Any]:
    def note(number: int, frame: Any) -> Any:
        try:
            return handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    return note
