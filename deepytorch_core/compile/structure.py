"""The source of a module's compiled code: its modules, their classes and those classes' functions.

Dynamo compares values that the code has read, and takes classes to stay as they are.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

# These methods of `nn.Module` itself decide how modules inside are called.
_OF_ALL_MODULES = ("__call__", "_call_impl", "__getattr__", "__setattr__")
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property)


class Structure:
    """One look at a module; compared at each call, in a microsecond or two for a small one.

    The module itself, which leads to this, is not kept.
    """

    def __init__(self, module: nn.Module) -> None:
        self._inside = [submodule for submodule in module.modules() if submodule is not module]
        self._type, self._types = type(module), list(map(type, self._inside))
        self._children = [module._modules, *(submodule._modules for submodule in self._inside)]
        self._known = list(self._children_now())
        self._own = [vars(submodule) for submodule in self._inside]
        self._has_own = [("forward" in own) for own in (vars(module), *self._own)]
        types_ = (self._type, *self._types)
        classes = dict.fromkeys(base for type_ in types_ for base in type_.__mro__)
        self._classes = [_Functions(base) for base in classes if base is not object]
        self._code = _code_of(module)

    def is_same(self, module: nn.Module) -> bool:
        """Whether all of the module is as it was."""
        return (
            type(module) is self._type
            and list(map(type, self._inside)) == self._types
            and list(itertools.chain.from_iterable(map(dict.items, self._children))) == self._known
            and ["forward" in own for own in (vars(module), *self._own)] == self._has_own
            and all([functions.are_same() for functions in self._classes])
            and _code_of(module) is self._code
        )

    def _children_now(self) -> Iterator[tuple[str, nn.Module | None]]:
        return itertools.chain.from_iterable(map(dict.items, self._children))


class _Functions:
    """Those of one class, without what it inherits."""

    def __init__(self, owner: type) -> None:
        self._space = vars(owner)
        if owner is nn.Module:
            names: Iterable[str] = _OF_ALL_MODULES
        else:
            names = [name for name, value in self._space.items() if isinstance(value, _FUNCTIONS)]
        self._names = list(names)
        self._size = len(self._space)
        self._is_fixed = owner is nn.Module
        self._get: Any = operator.itemgetter(*self._names) if self._names else len
        self._known = self._get(self._space)

    def are_same(self) -> bool:
        """Whether none was put in another's place, added or taken away."""
        if not self._is_fixed and len(self._space) != self._size:
            # Counters of a class may come; functions may not.
            now = [name for name, value in self._space.items() if isinstance(value, _FUNCTIONS)]
            if now != self._names:
                return False
            self._size = len(self._space)
            self._known = self._get(self._space) if not self._names else self._known
        try:
            return bool(self._get(self._space) == self._known)
        except KeyError:
            return False


def _code_of(module: nn.Module) -> Any:
    return getattr(getattr(type(module), "forward", None), "__code__", None)
