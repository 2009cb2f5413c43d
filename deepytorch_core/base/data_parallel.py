"""Copies that nn.DataParallel makes of a module, one for each GPU, in every step.

A copy takes over what lies on the instance, so a `forward` there would compute with the weights of
the module that was copied. Copies keep to their class's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from deepytorch_core.base.patching import Patches


def leave_alone() -> None:
    """Have copies made from now on keep to their class's `forward`, where ours is in its place."""
    Patches().replace(
        nn.Module,
        "_replicate_for_data_parallel",
        _without_ours,
        why="copies that nn.DataParallel makes keep to their class's forward",
        option="DEEPYTORCH_KERNELS=off",
    )


def is_one(module: nn.Module) -> bool:
    """Whether the module is such a copy."""
    return getattr(module, "_is_replica", False)


def _without_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def replicate(module: nn.Module) -> nn.Module:
        copy: nn.Module = original(module)
        forward = vars(copy).get("forward")
        function = getattr(forward, "__func__", None)
        made_by = type(forward).__module__ if function is None else function.__module__
        if made_by.startswith("deepytorch"):
            del vars(copy)["forward"]
        return copy

    return replicate
