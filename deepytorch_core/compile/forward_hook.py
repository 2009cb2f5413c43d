"""What tells a compilation of each forward pass of its model, and nobody of a copy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ForwardHook:
    """A forward pre-hook, with keyword arguments, that calls `on_forward` with what is passed."""

    def __init__(self, on_forward: Callable[[Any, Any], None]) -> None:
        self._on_forward = on_forward

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()  # a copy of the model is not measured

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._on_forward(args, kwargs)


class _Inert:
    """What becomes of the hook in a copy of the model."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        return None
