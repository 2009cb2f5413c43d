"""Hooks of others on a model's modules, and whether they mind a packed row."""

from __future__ import annotations

import functools
from typing import Any

# Hooks of these take a row as they take a batch: wrappers', and those that ask for gradients.
_WRAPPERS = {"torch", "deepspeed", "accelerate", "transformers", "peft"}
_WRAPPERS |= {"deepytorch", "deepytorch_core"}


def is_foreign(hook: Any) -> bool:
    """Whether a hook looks into the model, and would see one packed row."""
    module = getattr(_function_of(hook), "__module__", None) or ""
    is_wrappers = module.partition(".")[0] in _WRAPPERS
    return not is_wrappers or "neftune" in f"{module} {name_of(hook)}".lower()


def name_of(hook: Any) -> str:
    """Return the name that the hook's function has in the source."""
    function = _function_of(hook)
    return getattr(function, "__qualname__", None) or type(hook).__name__


def _function_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook if hasattr(hook, "__qualname__") else type(hook)
