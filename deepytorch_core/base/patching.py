"""Replace functions of a module so that it can be undone, and told."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "__deepytorch_original__"
"""Attribute of every function that replaces another: the one it replaces."""

ENABLED = "DEEPYTORCH_ENABLED=0"
"""The setting that leaves everything as it is."""

_Function = Callable[..., Any]


@dataclass(frozen=True)
class Replaced:
    """One attribute of another library that a function of ours stands in for.

    Attributes:
        owner: the module or class, by its full name.
        name: the attribute.
        why: what it is replaced for.
        option: the setting that leaves it as it is.
    """

    owner: str
    name: str
    why: str
    option: str


@dataclass(frozen=True)
class _Layer:
    """One function of ours, and what it stands for."""

    patches: Patches
    owner: Any
    name: str
    held: Any
    code: Any
    told: Replaced


# Not told by the mark: whoever wraps our function with functools.wraps copies that.
_layers: weakref.WeakKeyDictionary[_Function, _Layer] = weakref.WeakKeyDictionary()


def original_of(function: _Function) -> _Function:
    """Return the function that was here before all replacements of ours; else `function`."""
    while function in _layers:
        function = getattr(function, MARK)
    return function


def replaced() -> list[Replaced]:
    """All attributes that are replaced now, in the order of their names."""
    found = {layer.told for layer in list(_layers.values()) if layer.patches.active}
    return sorted(found, key=lambda attribute: (attribute.owner, attribute.name, attribute.why))


class Patches:
    """A set of replaced attributes.

    `undo` puts the originals back wherever our function still stands, also where another module
    had taken it over with `from ... import`. If someone else has wrapped it meanwhile it stays
    under theirs and only calls the original from then on.
    """

    def __init__(self) -> None:
        self.active = True
        self._replaced: list[_Function] = []

    def replace(
        self,
        owner: Any,
        name: str,
        make: Callable[[_Function], _Function],
        *,
        why: str = "",
        option: str = ENABLED,
    ) -> None:
        """Replace `owner.name` by `make(original)`; the same `make` a second time does nothing.

        For a method of a class, static or not, give the class; it must be its own, not inherited.
        Nothing happens if the name is not there.

        Args:
            owner: a module or a class.
            name: the attribute.
            make: returns the function that is called from now on.
            why: what for, and `option` how it stays as it is; see `Replaced`.
        """
        original = getattr(owner, name, None)
        code = getattr(getattr(make, "func", make), "__code__", make)
        if original is None or _stands(original, code):
            return
        ours = make(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else original)(*args, **kwargs)

        setattr(replacement, MARK, original)
        is_class = isinstance(owner, type)
        # A class gives other things than it holds: staticmethod, or pybind11's instancemethod.
        held = inspect.getattr_static(owner, name) if is_class else original
        told = Replaced(_full_name(owner), name, why, option)
        _layers[replacement] = _Layer(self, owner, name, held, code, told)
        is_static = isinstance(held, staticmethod)
        setattr(owner, name, staticmethod(replacement) if is_static else replacement)
        self._replaced.append(replacement)
        if not is_class:
            _swap_in_torch(name, original, replacement)

    def undo(self) -> None:
        """Put the originals back. A second call does nothing."""
        self.active = False
        for replacement in reversed(self._replaced):
            layer = _layers[replacement]
            held = layer.held
            # Another set's function, which stood beneath and has been undone meanwhile.
            while (beneath := _layer_of(held)) is not None and not beneath.patches.active:
                held = beneath.held
            if getattr(layer.owner, layer.name, None) is replacement:
                setattr(layer.owner, layer.name, held)
            if not isinstance(layer.owner, type):
                _swap_in_torch(layer.name, replacement, held)
        self._replaced.clear()


def _layer_of(held: Any) -> _Layer | None:
    function = getattr(held, "__func__", held) if isinstance(held, staticmethod) else held
    try:
        return _layers.get(function)
    except TypeError:  # what can't be referenced weakly is none of ours
        return None


def _stands(function: Any, code: Any) -> bool:
    """Whether a replacement by this code is in force there."""
    while (layer := _layer_of(function)) is not None:
        if layer.code is code and layer.patches.active:
            return True
        function = getattr(function, MARK)
    return False


def _full_name(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(getattr(owner, "__name__", type(owner).__name__))


def _swap_in_torch(name: str, old: Any, new: Any) -> None:
    """torch.distributed re-exports c10d's functions under the same name in several modules."""
    for module_name, module in list(sys.modules.items()):
        if (
            module_name.startswith("torch.distributed")
            and getattr(module, "__dict__", {}).get(name) is old
        ):
            setattr(module, name, new)
