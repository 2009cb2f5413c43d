"""Figures of deepytorch's beside what a script logs with its Accelerator."""

from __future__ import annotations

import functools
from typing import Any

from deepytorch_core import activation, live

from . import _contract


def log_figures(accelerator: Any, changes: _contract.Changes) -> None:
    """Have `accelerator.log` also give its trackers what went by since the last call.

    Nothing is added where no step has ended since: what an evaluation logs stays as it is. The
    caller's own dict is not touched.
    """
    if not activation.is_active():
        return
    original = accelerator.log
    figures = live.Figures()

    @functools.wraps(original)
    def log(values: Any, *args: Any, **kwargs: Any) -> Any:
        if not accelerator.is_main_process:
            return original(values, *args, **kwargs)
        step = kwargs.get("step", args[0] if args else None)
        live.logged(values, step)
        return original({**values, **figures.take()}, *args, **kwargs)

    changes.set(accelerator, "log", log)
