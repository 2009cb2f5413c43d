"""Option `kernels` in the adapters: fused kernels for the models that a framework is handed.

They come in before the framework wraps, shards or moves a model (`Accelerator.prepare`,
`deepspeed.initialize`), as `deepytorch_core.nn.kernels` decides, and go out with its undo.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepytorch_core import decisions
from deepytorch_core.config import Options
from deepytorch_core.nn import channels_last
from deepytorch_core.nn.kernels import STOCK, Setting, apply_kernels

from . import _causal_loss as _causal_loss  # registers its kernels
from . import _contract
from . import _masked_loss as _masked_loss  # registers its kernels

_NAME = "kernels"


def apply(
    things: Iterable[Any],
    options: Options,
    changes: _contract.Changes,
    *,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> None:
    """Swap kernels in for the models and optimizers among `things`, each once."""
    if options.kernels == "off":
        return
    if importlib.util.find_spec("liger_kernel") is not None:
        importlib.import_module(f"{__package__}._liger")  # registers its kernels
    given = list(things)
    models = [
        one for one in given if isinstance(one, nn.Module) and not _contract.is_marked(one, _NAME)
    ]
    optimizers = [one for one in given if isinstance(one, torch.optim.Optimizer)]
    for model in models:
        setting = Setting(
            model=model,
            optimizers=optimizers if model is models[0] else (),
            device=device,
            autocast=autocast,
        )
        own = _contract.Changes()
        own.on_undo(apply_kernels(setting, options.kernels).undo)
        # It is tried by a pass of the model.
        if changes.asked and channels_last.is_convolutional(model):
            # All of them: which of several models an optimizer is for is not told.
            own.on_undo(channels_last.choose(model, mode=options.kernels))
        _contract.mark(model, _NAME, own)
        changes.on_undo_of(model, _undo)
        # What stands in its parts would keep them, until cycles are collected.
        weakref.finalize(model, own.undo).atexit = False


def _undo(model: nn.Module) -> None:
    _contract.undo(model, _NAME)


def swap_in(
    options: Options, changes: _contract.Changes, accelerator: Any, given: tuple[Any, ...]
) -> None:
    """Swap kernels in for what `accelerator.prepare` is given, before it does its work."""
    several = accelerator.num_processes == 1 and torch.cuda.device_count() > 1
    if several and accelerator.device.type == "cuda":
        reason = "one process has several GPUs, and nn.DataParallel copies modules on its own"
        decisions.record(_NAME, STOCK, reason)
        return
    how = {"device": accelerator.device, "autocast": _autocast_of(accelerator)}
    changes.attempt("kernels", functools.partial(apply, given, options, changes, **how))


def _autocast_of(accelerator: Any) -> torch.dtype | None:
    if not getattr(accelerator, "native_amp", False):
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
