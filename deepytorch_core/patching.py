"""Replace functions of a module so that it can be undone, and told."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

MARK = "__deepytorch_original__"
"""Attribute of every function that replaces another: the one it replaces."""

# Not told by the mark: whoever wraps our function with functools.wraps copies that.
_replacements: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What stood where `function` stands, if that is a replacement of ours; else `function`."""
    original: Callable[..., Any] = (
        getattr(function, MARK) if function in _replacements else function
    )
    return original


class Patches:
    """A set of replaced attributes.

    `undo` puts the originals back wherever our function still stands, also where another module
    had taken it over with `from ... import`. If someone else has wrapped it meanwhile it stays
    under theirs and only calls the original from then on.
    """

    def __init__(self) -> None:
        self.active = True
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace `owner.name` by `make(original)`; a second time is refused by doing nothing.

        For a method of a class, static or not, give the class; it must be its own, not inherited.
        Nothing happens if the name is not there.
        """
        original = getattr(owner, name, None)
        if original is None or original in _replacements:
            return
        ours = make(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else original)(*args, **kwargs)

        setattr(replacement, MARK, original)
        _replacements.add(replacement)
        is_class = isinstance(owner, type)
        # What the class holds is not what it gives: staticmethod, or pybind11's instancemethod.
        held = inspect.getattr_static(owner, name) if is_class else original
        is_static = isinstance(held, staticmethod)
        setattr(owner, name, staticmethod(replacement) if is_static else replacement)
        self._replaced.append((owner, name, held, replacement))
        if not is_class:
            _swap_in_torch(name, original, replacement)

    def undo(self) -> None:
        self.active = False
        for owner, name, held, replacement in reversed(self._replaced):
            if getattr(owner, name, None) is replacement:
                setattr(owner, name, held)
            if not isinstance(owner, type):
                _swap_in_torch(name, replacement, held)
        self._replaced.clear()


def _swap_in_torch(name: str, old: Any, new: Any) -> None:
    """torch.distributed re-exports c10d's functions under the same name in several modules."""
    for module_name, module in list(sys.modules.items()):
        if (
            module_name.startswith("torch.distributed")
            and getattr(module, "__dict__", {}).get(name) is old
        ):
            setattr(module, name, new)
