"""Methods of single objects that calls go through, without an attribute on those objects.

A function that stood on the object in place of its method would have to hold that object. Then the
object would live on until cycles of garbage are looked for, with all the memory that it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from deepytorch_core.base.patching import Patches

Around = Callable[..., Any]
_Place = tuple[type, str]

_WHY = "calls on single objects go through what an adapter has put there"
# The functions that calls go through, by object and method.
_arounds: Any = WeakIdKeyDictionary()
_dispatching: dict[_Place, Patches] = {}


def put(owner: Any, name: str, function: Around) -> Callable[[Any], None]:
    """Have calls of the method `owner.name` go through `function(original, owner, ...)`.

    The method is replaced in the class that defines it, which calls the original for all others.

    Returns what undoes it, given `owner`.
    """
    place = next(base for base in type(owner).__mro__ if name in vars(base)), name
    if place not in _dispatching:
        _dispatching[place] = Patches()
        _dispatching[place].replace(*place, functools.partial(_dispatch, place), why=_WHY)
    _arounds.setdefault(owner, {}).setdefault(place, []).append(function)

    def undo(changed: Any) -> None:
        _arounds[changed][place].remove(function)
        forget_unused()

    return undo


def forget_unused() -> None:
    """Give classes their methods back that no call goes through, also by objects that are gone."""
    for place in list(_dispatching):
        if not any(found.get(place) for found in _arounds.values()):
            _dispatching.pop(place).undo()


def is_put(owner: Any, name: str) -> bool:
    """Whether calls of `owner.name` go through anything."""
    return any(found and place[1] == name for place, found in _arounds.get(owner, {}).items())


def _dispatch(place: _Place, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        through = functools.partial(original, owner)
        for function in _arounds.get(owner, {}).get(place, ()):
            through = functools.partial(function, through, owner)
        return through(*args, **kwargs)

    return call
