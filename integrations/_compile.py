"""Options `compile` and `compile_budget_s`, for the adapters whose users make their model there.

`auto` compiles nothing here yet: what trying costs is only made good by a run that is long enough,
and an adapter does not know how long it will be. A policy that is named does, and so does
`deepytorch.compile(model)`.
"""

from __future__ import annotations

import weakref
from typing import Any

from deepytorch_core.config import Options

from . import _contract


def is_wanted(options: Options) -> bool:
    """Whether a policy is named."""
    return options.compile not in ("off", "auto")


def start(model: Any, options: Options, changes: _contract.Changes) -> None:
    """Compile `model` as the options say; nothing for what is no module.

    Args:
        model: as it is trained, wrapped or not.
        options: those in force.
        changes: take it back with the rest.

    Raises IntegrationError for a policy that is not known.
    """
    import torch

    if not is_wanted(options) or not isinstance(model, torch.nn.Module):
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
