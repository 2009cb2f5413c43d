"""Parts of a model that are compiled together: its repeated blocks, or all of it.

A compile takes as long for one block as for eighty equal ones. So blocks are worth more than the
whole as soon as most of a model is repeated. Below the hooks: a region never contains a module that
has hooks or is one of FSDP's or DeepSpeed's, but may be one.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from deepytorch_core.compile import module_state, recorders

# How many times fewer modules are compiled by blocks than as a whole, at least.
LEAST_SAVING = 3.0
# A model's trunk has at least this part of its modules with parameters.
SHARE_OF_TRUNK = 0.7
# Below a block that can't be compiled as one, of its parameters.
LEAST_OF_BLOCK = 0.05
# A part has at most the one share of a model's modules with parameters, and at least the other.
SMALLEST_SHARES = 16, 100
_FRAMEWORKS = ("deepspeed", "torch.distributed.fsdp", "torch.distributed._composable")


class Region:
    """Modules of one structure that share a compile. They go with their last user: none is kept.

    Args:
        name: the first one's place.
        modules: at least one.
        is_model: whether it is all of a model, compiled as one.
    """

    def __init__(
        self, name: str, modules: tuple[nn.Module, ...], *, is_model: bool = False
    ) -> None:
        self.name = name
        self.is_model = is_model
        self._references = tuple(map(weakref.ref, modules))

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those that are still there."""
        found = (reference() for reference in self._references)
        return tuple(module for module in found if module is not None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module under DistributedDataParallel, FSDP1, checkpointing or DeepSpeed."""
    inner = getattr(model, "_checkpoint_wrapped_module", None)
    if inner is None and (
        isinstance(model, nn.parallel.DistributedDataParallel) or _is_of_framework(model)
    ):
        inner = getattr(model, "module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def trunk(root: nn.Module) -> nn.Module | None:
    """The innermost module with most of the model's modules; None if that is `root`.

    Around it are heads, losses and adapters' wrappers.
    """
    found, least = root, SHARE_OF_TRUNK * num_modules(root)
    while children := list(found.children()):
        largest = max(children, key=num_modules)
        if num_modules(largest) < least or not _runs(largest):
            break
        found = largest
    return None if found is root else found


def process_group(model: nn.Module) -> Any:
    """The ProcessGroup of DistributedDataParallel's or FSDP1's ranks; None for other modules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = [nn.parallel.DistributedDataParallel]
    wrappers += [fsdp.FullyShardedDataParallel] if fsdp is not None else []
    return model.process_group if isinstance(model, tuple(wrappers)) else None


def find(model: nn.Module) -> list[Region]:
    """The regions of `model`, largest first; empty when nothing below the hooks is left."""
    root = unwrapped(model)
    blocks = list(_blocks(root, "", recorders.asked(root)))
    groups: dict[object, list[tuple[str, nn.Module]]] = {}
    for name, block in blocks:
        groups.setdefault(signature(block), []).append((name, block))
    if _saving(root, list(groups.values())) < LEAST_SAVING and _can_be_region(root):
        return [Region(type(root).__name__, (root,), is_model=True)]
    regions = [
        Region(members[0][0], tuple(module for _, module in members)) for members in groups.values()
    ]
    return sorted(regions, key=lambda region: -sum(map(num_modules, region.modules)))


def parts(root: nn.Module) -> list[Region]:
    """The regions of a model that `find` takes as a whole, if it is to be compiled part by part.

    Small parts, since the largest is waited for longest; what is too small to be worth a compile of
    its own is left out. Equal ones share a compile only where they stand side by side. In other
    places of such a model they are given inputs of other sizes.
    """
    whole = num_modules(root)
    most, least = whole // SMALLEST_SHARES[0], whole // SMALLEST_SHARES[1]
    groups: dict[object, list[tuple[str, nn.Module]]] = {}
    for name, module in _parts(root, "", most, max(1, least)):
        place = name.rpartition(".")[0]
        groups.setdefault((place, signature(module)), []).append((name, module))
    return [Region(some[0][0], tuple(module for _, module in some)) for some in groups.values()]


def _parts(
    module: nn.Module, prefix: str, most: int, least: int
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path, size = (f"{prefix}.{name}" if prefix else name), num_modules(child)
        if least <= size <= most and _can_be_region(child) and _runs(child):
            yield path, child
        elif size >= least:
            yield from _parts(child, path, most, least)


def _runs(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def signature(module: nn.Module) -> object:
    """Equal for modules that can share a compile: classes, shapes, dtypes and plain attributes."""
    return tuple(
        (
            name,
            type(submodule),
            tuple(
                (key, _shape_of(value), value.dtype, value.requires_grad)
                for key, value in submodule._parameters.items()
                if value is not None
            ),
            tuple(
                (key, value)
                for key, value in sorted(vars(submodule).items())
                if isinstance(value, bool | float | str) and not key.startswith("_")
            ),
        )
        for name, submodule in module.named_modules()
    )


def _shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the whole, also if ZeRO-3 has only a part of it here."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _blocks(module: nn.Module, prefix: str, collected: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Outermost modules that have a sibling of their class in a list or a Sequential.

    Where one contains a module of which an output is `collected`, the parts beside that.
    """
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    children = [
        (name, unwrapped(child))
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    ]
    classes = [type(child) for _, child in children]
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        repeated = is_list and classes.count(type(child)) > 1 and any(child.children())
        if repeated and _can_be_region(child, collected):
            yield path, child
        elif repeated and module_state.hooked(child) is None:  # but for what is collected
            yield from _beside(child, path, collected, LEAST_OF_BLOCK * _num_parameters(child))
        else:
            yield from _blocks(child, path, collected)


def _beside(
    block: nn.Module, prefix: str, collected: set[str], least: float
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in block.named_children():
        path = f"{prefix}.{name}"
        if _num_parameters(child) < least:
            continue
        if _can_be_region(child, collected) and _runs(child):
            yield path, child
        else:
            yield from _beside(child, path, collected, least)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _can_be_region(module: nn.Module, collected: Iterable[str] = ()) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or not _has_its_classs_forward(module):
        return False
    if not isinstance(getattr(type(module), "forward", None), types.FunctionType):
        return False
    # ZeRO-3 gathers the parameters of each module as that is called, which compiled code is not;
    # but of its leaf modules all together, before the forward pass and before the backward pass.
    is_partitioned = any(hasattr(parameter, "ds_tensor") for parameter in module.parameters())
    if is_partitioned and not getattr(module, "_z3_leaf", False):
        return False
    if any(
        _is_of_framework(submodule) for submodule in module.modules() if submodule is not module
    ):
        return False
    # Collecting begins in its own pass, or in that of a part: the code is to do it.
    if any(map(recorders.begins, module.modules())):
        return not any(module_state.hooks_inside(module))
    # Equal blocks share code, so it can't go by the hooks of one of them.
    return module_state.hooked(module, collected=collected) is None


def _has_its_classs_forward(module: nn.Module) -> bool:
    """Also where it lies on the module: it does on a copy of one that is compiled."""
    own = vars(module).get("forward")
    if own is None:
        return True
    is_bound = isinstance(own, types.MethodType) and own.__self__ is module
    return is_bound and own.__func__ is type(module).forward


def _is_of_framework(module: nn.Module) -> bool:
    return any(base.__module__.startswith(_FRAMEWORKS) for base in type(module).__mro__)


def _saving(root: nn.Module, groups: list[list[tuple[str, nn.Module]]]) -> float:
    """Modules with parameters of the whole, over those that compiling by blocks has to look at."""
    shared = sum(num_modules(members[0][1]) * (len(members) - 1) for members in groups)
    whole = num_modules(root)
    return whole / max(1, whole - shared)


def num_modules(module: nn.Module) -> int:
    """Modules with parameters, of which the time goes that a compiler takes."""
    return sum(
        1
        for submodule in module.modules()
        if any(True for _ in submodule.parameters(recurse=False))
    )
