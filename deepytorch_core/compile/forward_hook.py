"""What tells a compilation of each forward pass of its model, and nobody of a copy's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepytorch_core import console, replicas


class ForwardHook:
    """A forward pre-hook, with keyword arguments, that calls `on_forward` with what is passed."""

    def __init__(self, on_forward: Callable[[Any, Any], None]) -> None:
        self._on_forward = on_forward

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not measured, and one that is saved needs nothing of ours.
        return getattr, (contextlib.nullcontext(), "__exit__")  # which does nothing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if replicas.is_one(module):  # several at once, each in a thread of its own
            console.say_once(
                f"{type(module).__name__}: copies that nn.DataParallel makes run eagerly; "
                "DistributedDataParallel, with a process for each GPU, is compiled",
                level="warning",
            )
            return
        self._on_forward(args, kwargs)
