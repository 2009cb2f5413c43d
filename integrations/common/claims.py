"""Keeps who takes care of a model: an adapter, the script by name, or nobody yet.

Changes that are on unasked come to a model once, by whoever is first. Those that somebody asks for
by name stay, and replace those that came unasked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# Modules and optimizers, each with the adapter's name.
_taken: Any = WeakIdKeyDictionary()
_is_left = False


def take(things: Iterable[Any], adapter: str) -> None:
    """Note that `adapter` takes care of the models and optimizers among `things`, parts included.

    Accelerate's optimizers stand for those inside them.
    """
    for thing in things:
        if isinstance(thing, nn.Module):
            for module in thing.modules():
                _taken.setdefault(module, adapter)
        else:
            inner = getattr(thing, "optimizer", thing)
            if hasattr(inner, "param_groups"):
                _taken.setdefault(inner, adapter)


def leave_to_stock() -> None:
    """Have nobody come to models of this process unasked: the script has switched it off."""
    global _is_left
    _is_left = True


def is_left_to_stock() -> bool:
    """Whether the script wants nothing unasked."""
    return _is_left


def is_taken(thing: Any) -> bool:
    """Whether somebody takes care of a model, of a part of it, or of an optimizer."""
    if isinstance(thing, nn.Module):
        return any(module in _taken for module in thing.modules())
    return thing in _taken


def trains_taken(parameters: Iterable[Any]) -> bool:
    """Whether any of `parameters` belongs to a model that somebody takes care of."""
    wanted = {id(parameter) for parameter in parameters}
    return any(
        id(parameter) in wanted
        for module in list(_taken)
        if isinstance(module, nn.Module)
        for parameter in module._parameters.values()
        if parameter is not None
    )
