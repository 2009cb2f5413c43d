"""Fixes: what keeps known models from being replayed, left out of captured passes, one file each.

A pass that waits for the GPU can't be replayed as a CUDA graph (`capture`). Where it waits for an
answer that is known, or makes what nobody uses, a fix has the captured pass do without. Passes that
are not captured stay as they are, and so does the result of those that are.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import nn

from deepytorch_core.base.console import say
from deepytorch_core.compile import registry
from deepytorch_core.compile.region_forward import Forward

# In the order in which they are entered.
_FILES = (
    "packed_rows",
    "ones_masks",
    "causal_masks",
    "padding_masks",
    "grouped_products",
    "expert_counts",
)

Around = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
"""From a call's arguments, of which it may change the named ones, to what is open during it."""


class Fix(ABC):
    """One known case. `name` is what it is called in messages."""

    name: str

    @abstractmethod
    def around(self, model: nn.Module) -> Around | None:
        """Return what opens around captured passes of `model`; None if the case can't arise.

        Its changes outside the model for the pass must not reach other threads. All of them have to
        be undone once it is closed.
        """

    def during(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context that is open while passes of `model` are captured; empty by default.

        It is open for forward and backward passes. The latter have threads of their own, so
        changes have to tell captures by themselves.
        """
        return contextlib.nullcontext()


_Class = TypeVar("_Class", bound=type[Fix])
_table: dict[str, Fix] = {}
_is_loaded = False


def register_fix(fix: _Class) -> _Class:
    """Make a subclass of `Fix` known by its `name`; a class decorator.

    Raises ValueError when it has no name, or the name is taken by another class.
    """
    registry.add(_table, fix, "fix")
    return fix


def names() -> list[str]:
    """All fixes there are."""
    _load()
    return list(_table)


def applied(root: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `forward`, the module's; `forward` itself if nothing is known."""
    # Compiled code would be compiled anew for another function in the same place.
    if isinstance(forward, Forward):
        return forward
    _load()
    model = _within(root)
    found = {name: around for name, fix in _table.items() if (around := fix.around(model))}
    if not found:
        return forward
    say(f"captured passes of {type(model).__name__}: {', '.join(found)}", level="debug")

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for around in found.values():
                stack.enter_context(around(args, kwargs))
            return forward(*args, **kwargs)

    return run


@contextlib.contextmanager
def during(root: nn.Module) -> Iterator[None]:
    """Open what is known while passes of `root` are captured, forward and backward."""
    _load()
    with contextlib.ExitStack() as stack:
        for fix in _table.values():
            stack.enter_context(fix.during(_within(root)))
        yield


def _within(root: nn.Module) -> nn.Module:
    base_of = getattr(root, "get_base_model", None)  # peft's
    model: nn.Module = base_of() if callable(base_of) else root
    return model


def _load() -> None:
    global _is_loaded
    if not _is_loaded:
        _is_loaded = True
        for file in _FILES:
            importlib.import_module(f"{__name__}.{file}")
