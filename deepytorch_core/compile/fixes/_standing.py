"""Functions of ours that stand in other libraries' files while a pass is captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# One pass at a time has its functions there.
_lock = threading.RLock()


@contextlib.contextmanager
def standing(places: Sequence[Any], name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """While open, `make(stock)` stands for the attribute `name` of each of these modules.

    Every thread meets it there: ours has to tell whose call it is.
    """
    with _lock:
        stock = [getattr(place, name) for place in places]
        for place, function in zip(places, stock, strict=True):
            setattr(place, name, make(function))
        try:
            yield
        finally:
            for place, function in zip(places, stock, strict=True):
                setattr(place, name, function)


def standing_here(
    places: Sequence[Any], name: str, known: Callable[..., Any]
) -> contextlib.AbstractContextManager[None]:
    """While open, `known` stands there for the calls of this thread; others get stock's."""
    own = threading.get_ident()

    def instead_of(stock: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (known if threading.get_ident() == own else stock)(*args, **kwargs)

        return chosen

    return standing(places, name, instead_of)
