"""Hooks of modules that are of no effect in copies of the modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from deepytorch_core import guard


class Hook:
    """A hook of a module that does nothing in its copies, nor where there is no deepytorch.

    Nor where `torch.func` transforms the call, as stock's pass is what it has to see.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    # Work on the CPU is no part of a compiled forward pass.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        return None if guard.is_transformed() else self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything and does nothing
