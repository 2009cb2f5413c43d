"""`deepytorch.compile(model)`: compiled where that is measured faster, eager where not.

In place: the model is the same object, with the same state_dict, class and hooks. See
docs/compile.md.
"""

from __future__ import annotations

import weakref
from typing import TypeVar

from torch import nn

from deepytorch_core.base import compiler_import as compiler_import  # what it does to forks
from deepytorch_core.base import config
from deepytorch_core.compile import policies, regions
from deepytorch_core.compile.compilation import Compilation
from deepytorch_core.compile.fixes import Fix, register_fix
from deepytorch_core.compile.phases import OpenTrial
from deepytorch_core.compile.policies import AUTO, EAGER, OFF, Policy, register_policy

__all__ = [
    "Compilation",
    "Fix",
    "OpenTrial",
    "Policy",
    "compile",
    "compilation_of",
    "register_fix",
    "register_policy",
    "trials",
    "undo",
]

_Module = TypeVar("_Module", bound=nn.Module)

# Beside the models, whose own attributes are copied and saved with them; what stands in a model
# holds its compilation.
_compiled: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Compilation]] = (
    weakref.WeakKeyDictionary()
)


def compile(
    model: _Module,
    policy: str = AUTO,
    *,
    budget_s: float | None = None,
    steps: int | None = None,
    is_patient: bool | None = None,
) -> _Module:
    """Compile `model` for training, in place, where that makes it faster and nowhere else.

    Call it before or after wrapping the model for data parallelism. Evaluation and `generate` run
    as they are. A second call replaces the first.

    Args:
        model: any module.
        policy: "auto" measures the policies that suit the device against eager in the first
            training steps and keeps the fastest; "off" and "eager" change nothing; a policy's name
            uses that one.
        budget_s: seconds that compiling a region may take; default: option `compile_budget_s`.
        steps: how many training steps will follow, if known: a short run is not compiled.
        is_patient: for "auto" and runs of unknown length. If true, nothing is tried before the run
            has lasted so long that trying costs under 3 % of it. Default: the option `patience`.

    Returns `model`. Raises TypeError for what is no module and ValueError for a policy that is not
    known.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"deepytorch.compile takes a torch.nn.Module, not {type(model).__name__}")
    if policy not in (AUTO, OFF, EAGER):
        policies.get(policy)
    undo(model)
    options = config.current()
    if policy in (OFF, EAGER) or not options.enabled or options.compile == OFF:
        return model
    budget = options.compile_budget_s if budget_s is None else budget_s
    compilation = Compilation(
        model,
        policy,
        budget_s=budget,
        steps=steps,
        is_patient=options.patience != "off" if is_patient is None else is_patient,
        group=regions.process_group(model),
    )
    _compiled[regions.unwrapped(model)] = weakref.ref(compilation)
    return model


def expect_steps(model: nn.Module, steps: int) -> None:
    """Note that a run whose model `compile` was given will take so many passes with gradients.

    Trials may take their part of all of them from the start, not of those that have gone by.
    """
    compilation = compilation_of(model)
    if compilation is not None:
        compilation.run_length.steps = steps


def undo(model: nn.Module) -> bool:
    """Put a model that `compile` was given back to eager; False if there was nothing to undo."""
    compilation = compilation_of(model)
    _compiled.pop(regions.unwrapped(model), None)
    if compilation is None:
        return False
    compilation.undo()
    return True


def undo_all() -> None:
    """Undo what `compile` did to all models."""
    for model in list(_compiled):
        undo(model)


def trials() -> list[OpenTrial]:
    """Return the trials still to be decided for the models that `compile` was given."""
    references = list(_compiled.values())
    known = [
        compilation
        for compilation in (reference() for reference in references)
        if compilation is not None
    ]
    return [trial for trial in (compilation.trial for compilation in known) if trial is not None]


def compilation_of(model: nn.Module) -> Compilation | None:
    """Return the compilation of `model` by `compile`, or None."""
    reference = _compiled.get(regions.unwrapped(model))
    return None if reference is None else reference()
