"""Figures of deepytorch's beside what is logged with an Accelerator or DeepSpeed's monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepytorch_core.c10d import activation
from deepytorch_core.report import live

from . import contract

_NAME = "figures"
_Method = Callable[..., Any]


def log_figures(accelerator: Any, changes: contract.Changes) -> None:
    """Have `accelerator.log` also give its trackers what went by since the last call.

    Nothing is added where no step has ended since: what an evaluation logs stays as it is. The
    caller's own dict is not touched.
    """
    if not activation.is_active():
        return
    figures = live.Figures()

    def log(original: _Method, accelerator: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if not accelerator.is_main_process:
            return original(values, *args, **kwargs)
        step = kwargs.get("step", args[0] if args else None)
        live.logged(values, step)
        return original({**values, **figures.take()}, *args, **kwargs)

    changes.around(accelerator, "log", log)


# DeepSpeed's engine writes the first at each step, and the loss before it.
_STEP_EVENT, _LOSS_EVENT = "Train/Samples/lr", "Train/Samples/train_loss"


def write_figures(monitor: Any, changes: contract.Changes) -> None:
    """Have a DeepSpeed engine's monitor also write what went by since the step before.

    Nothing happens where no writer is switched on in DeepSpeed's configuration.
    """
    if not activation.is_active() or not getattr(monitor, "enabled", False):
        return
    figures = live.Figures()

    def write_events(original: _Method, _: Any, events: Any) -> Any:
        place = {name: (value, samples) for name, value, samples in events}
        if _LOSS_EVENT in place:
            live.logged({"loss": place[_LOSS_EVENT][0]})
        if _STEP_EVENT in place:
            samples = place[_STEP_EVENT][1]
            ours = [(name, value, samples) for name, value in figures.take().items()]
            events = [*events, *ours]
        return original(events)

    own = contract.Changes()
    own.around(monitor, "write_events", write_events)
    contract.mark(monitor, _NAME, own)
    changes.on_undo_of(monitor, _undo)


def _undo(monitor: Any) -> None:
    contract.undo(monitor, _NAME)
