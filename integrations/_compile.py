"""Options `compile` and `compile_budget_s`, for the adapters whose users make their model there."""

from __future__ import annotations

import weakref
from typing import Any

from deepytorch_core.config import Options

from . import _contract


def start(model: Any, options: Options, changes: _contract.Changes) -> None:
    """Compile `model` as the options say; nothing for what is no module.

    Args:
        model: as it is trained, wrapped or not.
        options: those in force.
        changes: take it back with the rest.

    Raises IntegrationError for a policy that is not known.
    """
    import torch

    if options.compile == "off" or not isinstance(model, torch.nn.Module):
        return
    from deepytorch_core import compile as engine

    try:
        engine.compile(model, options.compile, budget_s=options.compile_budget_s)
    except ValueError as error:
        raise _contract.IntegrationError(f"option compile: {error}") from None
    reference = weakref.ref(model)

    def undo() -> None:
        compiled = reference()
        if compiled is not None:
            engine.undo(compiled)

    changes.on_undo(undo)
