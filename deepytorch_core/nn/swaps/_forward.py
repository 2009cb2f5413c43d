"""A module's forward replaced on the instance: copies and checkpoints stay what they are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepytorch_core.base import data_parallel

Function = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@functools.cache
def _replacing(function: Function) -> Callable[..., Any]:
    """The `forward` of modules that `function` replaces: of all of them the same.

    Under torch.compile the class's own is traced, since a compiler fuses it by itself; and equal
    blocks share a compile only if nothing in them is an object of its own.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = len(args) == 1 and not kwargs and not torch.compiler.is_compiling()
        if plain and _fits(self, args[0]):
            return function(self, args[0])
        return type(self).forward(self, *args, **kwargs)

    return forward


def _fits(module: nn.Module, x: Any) -> bool:
    """Whether stock computes in one dtype, on one device: else it promotes in its own way."""
    # FSDP1 keeps parameters as plain attributes.
    own = [*module._parameters.values(), *vars(module).values()]
    return isinstance(x, torch.Tensor) and all(
        value.dtype == x.dtype and value.device == x.device
        for value in own
        if isinstance(value, torch.Tensor)
    )


def why_not(targets: tuple[nn.Module, ...]) -> str | None:
    """Why the forward of these modules can't be replaced."""
    if any("forward" in vars(target) for target in targets):
        return "its forward is replaced already"
    return None


def replace(module: nn.Module, function: Function) -> Callable[[], None]:
    """Have `function(module, x)` serve where it can; returns what puts the class's forward back."""
    return put(module, _replacing(function))


def put(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Put a `forward` in place of the class's; returns what puts that back.

    A copy of the module has a forward of its own, a pickled one its class's: a bound method is
    pickled by its name.
    """
    data_parallel.leave_alone()
    vars(module)["forward"] = types.MethodType(forward, module)

    def undo() -> None:
        vars(module).pop("forward", None)

    return undo


def alike(modules: list[nn.Module]) -> list[tuple[nn.Module, ...]]:
    """Modules sorted into those of the same class, shapes, dtypes and settings."""
    groups: dict[str, list[nn.Module]] = {}
    for module in modules:
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
        settings = sorted(
            (name, value) for name, value in vars(module).items() if isinstance(value, float | int)
        )
        groups.setdefault(f"{type(module)} {shapes} {settings}", []).append(module)
    return [tuple(group) for group in groups.values()]


def is_whole(module: nn.Module) -> bool:
    """Whether the weights are here: neither on the meta device nor partitioned by ZeRO-3."""
    return not any(
        parameter.is_meta or hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh")
        for parameter in module.parameters()
    )


def random_input(
    module: nn.Module, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """An input of many rows and a gradient for the output, the same each time."""
    rows = 256 if device.type == "cpu" else 4096
    generator = torch.Generator().manual_seed(rows + width)
    x, gradient = (
        torch.randn(rows, width, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(2)
    )
    return x.to(device, dtype), gradient.to(device)
