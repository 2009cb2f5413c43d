"""Tables of plugins, which policies and fixes are, by their names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def add(table: dict[str, Any], made: type, what: str, *, taken: Collection[str] = ()) -> None:
    """Put an object of `made` into `table` under its `name`.

    Args:
        table: of objects by their names.
        made: a class with a `name`. The same one again, of a module that was loaded anew, takes the
            former's place.
        what: what the objects are, for messages.
        taken: names that mean something else.

    Raises ValueError when it has no name that it can have, or another class has it.
    """
    name = getattr(made, "name", "")
    if not isinstance(name, str) or not name or name in taken:
        raise ValueError(f"{made.__qualname__}.name = {name!r} can't name a {what}")
    other = table.get(name)
    if other is not None and type(other).__qualname__ != made.__qualname__:
        raise ValueError(f"there is a {what} {name!r} already: {type(other).__qualname__}")
    table[name] = made()
