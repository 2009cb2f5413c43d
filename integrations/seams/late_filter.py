"""Whether a loss is a number is decided on the GPU, so that nobody waits for it.

After each micro-batch transformers' Trainer asks whether the loss is NaN or infinite, which it
leaves out of the logged mean (`logging_nan_inf_filter`). It waits for the backward pass to know,
and launches nothing of the optimizer's step meanwhile. Here the sum of losses is told apart on the
GPU, by the same arithmetic, and the Trainer goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

# Those whose training loops do nothing else with what `training_step` returns.
_KNOWN = ("transformers", "trl")
_METHODS = ("training_step", "_inner_training_loop", "_run_epoch")


def late(trainer: Any, loss: Any) -> Any:
    """Return the loss of a micro-batch for the Trainer's loop, which then doesn't wait for it.

    Args:
        trainer: a transformers Trainer.
        loss: as its `training_step` returns it; unless it is a number on a GPU, and the loop a
            known one that filters it, it is returned as it is.
    """
    if not (type(loss) is Tensor and loss.dim() == 0 and _is_waited_for(loss)):
        return loss
    if not (getattr(trainer.args, "logging_nan_inf_filter", False) and _is_known(trainer)):
        return loss
    made = loss.as_subclass(_Late)
    made.trainer = weakref.ref(trainer)
    return made


def _is_waited_for(loss: Tensor) -> bool:
    return loss.is_cuda


def _is_known(trainer: Any) -> bool:
    """Whether nobody but the loop that filters losses gets this one."""
    own = vars(trainer)
    methods = [getattr(type(trainer), name, None) for name in _METHODS]
    return (
        hasattr(trainer, "_globalstep_last_logged")
        and not any(name in own for name in _METHODS)
        and all(
            method is None or method.__module__.partition(".")[0] in _KNOWN for method in methods
        )
    )


class _Late(Tensor):
    """A loss that says of itself that it is a number, and is filtered as it is added."""

    trainer: weakref.ref[Any]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.isnan, torch.isinf):
                return torch.zeros((), dtype=torch.bool, device="cpu")
            if func in (Tensor.__iadd__, Tensor.__add__, Tensor.add_, Tensor.add):
                total, loss = args[:2]
                if type(loss) is _Late and type(total) is Tensor:
                    args = (total, _filtered(total, loss), *args[2:])
            plain = [
                argument.as_subclass(Tensor) if type(argument) is _Late else argument
                for argument in args
            ]
            return func(*plain, **(kwargs or {}))


def _filtered(total: Tensor, loss: _Late) -> Tensor:
    """Return what the Trainer adds to losses not yet logged: this one, or else their mean."""
    trainer, own = cast(Any, loss.trainer()), loss.as_subclass(Tensor)
    steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
    return torch.where(torch.isfinite(own), own, total / steps)
