"""Figures of deepytorch's beside the training loss that a transformers Trainer logs.

They go to every callback that reports (TensorBoard, Weights & Biases, one's own). They go neither
into the lines that are printed nor into `state.log_history`, which checkpoints keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from deepytorch.integrations.common import contract
from deepytorch_core.c10d import activation
from deepytorch_core.report import live

_NAME = "figures"


class _Figures(TrainerCallback):
    """Comes before all others, which get the same `logs`."""

    def __init__(self) -> None:
        self._figures = live.Figures()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        live.logged(logs, state.global_step)
        logs.update(self._figures.take())


def attach(trainer: Any) -> None:
    """Have a Trainer's callbacks see the figures; nothing where deepytorch is not active."""
    if not activation.is_active() or contract.is_marked(trainer, _NAME):
        return
    changes = contract.Changes()
    callbacks = trainer.callback_handler.callbacks
    first = _Figures()
    callbacks.insert(0, first)
    changes.on_undo(lambda: callbacks.remove(first))
    for callback in callbacks:
        if isinstance(callback, PrinterCallback | ProgressCallback):
            changes.set(callback, "on_log", _without_figures(callback.on_log))
    contract.mark(trainer, _NAME, changes)


def detach(trainer: Any) -> None:
    """Undo `attach`, if it was called."""
    contract.undo(trainer, _NAME)


def _without_figures(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_log(args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        if logs and any(name.startswith(live.PREFIX) for name in logs):
            logs = {name: value for name, value in logs.items() if not name.startswith(live.PREFIX)}
        return original(args, state, control, logs=logs, **kwargs)

    return on_log
