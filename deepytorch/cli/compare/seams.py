"""Switches on in an unmodified script what `deepytorch run` alone does not: what is computed.

Compilation, kernels and padding-free training come through an Accelerator (also a Trainer's),
through `deepspeed.initialize` or, compilation alone, through DistributedDataParallel. What a user
writes to have the same is in `LINES`; DeepSpeed's also tunes the buckets that its JSON leaves open.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepytorch_core.import_hook import ImportHook
from deepytorch_core.patching import Patches, original_of

LINES = {
    "transformers": "trainer = deepytorch.integrations.transformers.accelerate_trainer(trainer)",
    "accelerate": "Accelerator(kwargs_handlers=[deepytorch.integrations.accelerate."
    "DeepytorchPlugin()])",
    "deepspeed": 'in the DeepSpeed JSON: "deepytorch": {"enabled": true}',
    "ddp": "deepytorch.compile(model)",
}
"""The line that switches the same on for good, by where it was switched on here."""

_Function = Callable[..., Any]
_patches = Patches()
_found: list[str] = []


def install() -> list[str]:
    """Hook the frameworks, as they are imported; returns the list of those met, filled later."""
    ImportHook("transformers.trainer", _transformers).install()
    ImportHook("accelerate.accelerator", _accelerate).install()
    ImportHook("deepspeed", _deepspeed).install()
    ImportHook("torch.nn.parallel.distributed", _ddp).install()
    return _found


def _met(name: str) -> None:
    if name not in _found:
        _found.append(name)


def _transformers(module: ModuleType) -> None:
    def make(original: _Function) -> _Function:
        def construct(*args: Any, **kwargs: Any) -> None:
            _met("transformers")
            original(*args, **kwargs)

        return construct

    _patches.replace(module.Trainer, "__init__", make)


def _accelerate(module: ModuleType) -> None:
    def make(original: _Function) -> _Function:
        def construct(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            from deepytorch.integrations import _accelerator

            original(accelerator, *args, **kwargs)
            _met("accelerate")
            _accelerator.apply_unasked(accelerator)

        return construct

    _patches.replace(module.Accelerator, "__init__", make)


def _deepspeed(module: ModuleType) -> None:
    stock = original_of(module.initialize)

    def initialize(*args: Any, **kwargs: Any) -> Any:
        from deepytorch.integrations import deepspeed as adapter

        _met("deepspeed")
        return adapter._initialize(stock, args, kwargs, {}, asked=False)

    module.initialize = initialize  # type: ignore[attr-defined]


def _ddp(module: ModuleType) -> None:
    def make(original: _Function) -> _Function:
        def construct(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            original(wrapper, *args, **kwargs)
            if not _found:  # else the framework's adapter compiles
                import deepytorch

                _met("ddp")
                deepytorch.compile(wrapper, is_patient=False)

        return construct

    _patches.replace(module.DistributedDataParallel, "__init__", make)
