"""Options `compile` and `compile_budget_s`, for the adapters whose users make their model there.

Nobody knows how long a run will be, so `auto` waits until it has lasted so long that trying costs
little of it (option `patience`). A policy that is named waits for nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from deepytorch_core.base import by_name, compiler_import, decisions
from deepytorch_core.base.config import Options

from . import contract


def is_wanted(options: Options) -> bool:
    """Whether models are to be compiled."""
    return options.compile != "off"


def is_compiled_by_script(model: Any) -> bool:
    """Whether the script has called torch.compile on it, or on a part of it."""
    from deepytorch_core.compile import seam

    return any(
        (getattr(module, seam.PLACE, None) is not None and seam.of(module) is None)
        or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def is_begun(model: Any) -> bool:
    """Whether `deepytorch.compile` was called for the model or a part of it."""
    engine = sys.modules.get("deepytorch_core.compile")
    if engine is None:
        return False
    return any(engine.compilation_of(module) is not None for module in model.modules())


def start(model: Any, options: Options, changes: contract.Changes) -> None:
    """Compile `model` as the options say; nothing for what is no module.

    Unasked nothing either for what is compiled already, or left alone by the script's own word.

    Args:
        model: as it is trained, wrapped or not.
        options: those in force.
        changes: take it back with the rest.

    Raises IntegrationError for a policy that is not known.
    """
    import torch

    if not is_wanted(options) or not isinstance(model, torch.nn.Module):
        return
    compiler_import.load()
    from deepytorch_core import compile as engine
    from deepytorch_core.compile import regions

    if is_compiled_by_script(model):
        what = f"compile of {type(regions.unwrapped(model)).__name__}"
        decisions.record(what, "stock", "compiled by the script")
        return
    if not changes.asked and (
        by_name.is_noted(model, by_name.COMPILE) or engine.compilation_of(model) is not None
    ):
        return
    try:
        engine.compile(
            model,
            options.compile,
            budget_s=options.compile_budget_s,
        )
    except ValueError as error:
        raise contract.IntegrationError(f"option compile: {error}") from None
    changes.on_undo_of(model, engine.undo)
