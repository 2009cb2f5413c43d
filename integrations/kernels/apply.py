"""Option `kernels` in the adapters: fused kernels for the models that a framework is handed.

They come in before the framework wraps, shards or moves a model (`Accelerator.prepare`,
`deepspeed.initialize`), as `deepytorch_core.nn.kernels` decides, and go out with its undo.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepytorch.integrations.common import contract
from deepytorch_core.base import compiler_import, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.nn import swaps
from deepytorch_core.nn.kernels import STOCK, KernelSetting, apply_kernels

_NAME = "kernels"


def apply(
    things: Iterable[Any],
    options: Options,
    changes: contract.Changes,
    *,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> None:
    """Swap kernels in for the models and optimizers among `things`, each once."""
    if options.kernels == "off":
        return
    given = list(things)
    models = [
        thing
        for thing in given
        if isinstance(thing, nn.Module) and not contract.is_marked(thing, _NAME)
    ]
    if models:
        _register()
    optimizers = [thing for thing in given if isinstance(thing, torch.optim.Optimizer)]
    for model in models:
        setting = KernelSetting(
            model=model,
            optimizers=optimizers if model is models[0] else (),
            device=device,
            autocast=autocast,
        )
        own = contract.Changes()
        own.on_undo(apply_kernels(setting, options.kernels).undo)
        # It is tried by a pass of the model.
        if changes.asked and any(isinstance(module, nn.Conv2d) for module in model.modules()):
            from deepytorch_core.nn import channels_last

            own.on_undo(channels_last.choose(model, mode=options.kernels))
        contract.mark(model, _NAME, own)
        changes.on_undo_of(model, _undo)
        # Stand-ins in its parts would keep the parts, until cycles are collected.
        weakref.finalize(model, own.undo).atexit = False


def apply_to_optimizers(
    optimizers: Iterable[Any], options: Options, changes: contract.Changes, *, device: torch.device
) -> None:
    """Swap kernels in for optimizers alone, whose models stay as they are."""
    if options.kernels == "off":
        return
    for optimizer in optimizers:
        setting = KernelSetting(model=nn.Module(), optimizers=[optimizer], device=device)
        swapped = apply_kernels(setting, options.kernels)
        changes.on_undo(swapped.undo)


def _register() -> None:
    compiler_import.load()
    swaps.load()  # first: how fast stock's loss is, to which others are compared
    importlib.import_module(f"{__package__}.causal_loss")
    importlib.import_module(f"{__package__}.masked_loss")
    if importlib.util.find_spec("liger_kernel") is not None:
        importlib.import_module(f"{__package__}.liger")


def _undo(model: nn.Module) -> None:
    contract.undo(model, _NAME)


def prepare(
    options: Options,
    changes: contract.Changes,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`accelerator.prepare` with kernels swapped in first, as `Changes.around` calls it."""
    accelerator, *things = args
    several = accelerator.num_processes == 1 and torch.cuda.device_count() > 1
    if several and accelerator.device.type == "cuda":
        reason = "one process has several GPUs, and nn.DataParallel copies modules on its own"
        decisions.record(_NAME, STOCK, reason)
    else:
        autocast = _autocast_of(accelerator)
        swap = functools.partial(
            apply, things, options, changes, device=accelerator.device, autocast=autocast
        )
        changes.attempt("kernels", swap)
    return original(*things, **kwargs)


def _autocast_of(accelerator: Any) -> torch.dtype | None:
    if not getattr(accelerator, "native_amp", False):
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
