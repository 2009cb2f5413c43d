"""The `forward` of a module whose region is compiled, below the module's hooks."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Protocol

from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase

from deepytorch_core.compile import border, module_state, recorders
from deepytorch_core.compile.structure import Structure


class RunsModules(Protocol):
    """A region, which runs its modules."""

    @property
    def is_used(self) -> bool:
        """Whether a call now goes the compiled way."""

    def on_call(self) -> None:
        """Called before each call of one of the modules, whichever way that goes."""

    def is_prepared_for(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a call with these takes no compiler's time."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiled `forward` of one of the modules."""

    def give_up(self, why: str) -> None:
        """Run eagerly from now on."""


class Forward:
    """Stands for a module's `forward`; the module has this and is not kept by it.

    Args:
        compiled: the module's region.
        module: one of its modules.
        owner: lives as long as one of the region's modules does.
    """

    def __init__(self, compiled: RunsModules, module: nn.Module, owner: object) -> None:
        self._compiled, self._owner = compiled, owner
        self._module_of = weakref.ref(module)
        self._hooks = module_state.hooks_inside(module)
        inside = [submodule for submodule in module.modules() if submodule is not module]
        self._norms = [submodule for submodule in inside if isinstance(submodule, _NormBase)]
        self._structure = Structure(module)
        self._was_used = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module_of()
        self._compiled.on_call()
        if not border.is_made_again():
            compiled = self._compiled
            self._was_used = compiled.is_used and compiled.is_prepared_for(module, args, kwargs)
        if not self._was_used:
            return module.forward(*args, **kwargs)
        recorded: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if any(self._hooks):
            place = module_state.hooked(module)
            if place is None and any(map(recorders.begins, module.modules())):
                return module.forward(*args, **kwargs)  # it collects outputs of its own parts
            if place is not None:
                self._compiled.give_up(f"a hook was put on {place} inside after it was compiled")
                return module.forward(*args, **kwargs)
            if module_state.hooked(module, collected=recorders.collected()) is not None:
                return module.forward(*args, **kwargs)
            recorded = recorders.set_aside(self._hooks)
        if not self._structure.is_same(module):
            self._compiled.give_up("modules, classes or methods were changed after it was compiled")
            return module.forward(*args, **kwargs)
        norms = [module, *self._norms] if isinstance(module, _NormBase) else self._norms
        with _kept_versions(norms), recorded:
            return self._compiled.call(module, args, kwargs)


def _kept_versions(norms: list[_NormBase]) -> contextlib.AbstractContextManager[None]:
    """While open, running statistics are written to as eager kernels do it: unseen by autograd.

    An eager pass that still waits for its backward pass has saved them, and uses none of them.
    """
    kept = [
        buffer
        for norm in norms
        if norm.training
        for buffer in (norm.running_mean, norm.running_var)
        if buffer is not None
    ]
    return _unsafe_preserve_version_counter(tuple(kept)) if kept else contextlib.nullcontext()
