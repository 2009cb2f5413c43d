"""deepytorch makes PyTorch training faster. One line, before or after torch:

    import deepytorch

From then on the collectives of torch.distributed go through deepytorch's native algorithms where
they can, and through gloo or NCCL where not. Models that are trained are compiled, get fused
kernels and train without padding, where that is measured faster and changes nothing else.
`DEEPYTORCH_ENABLED=0` makes the import do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepytorch_core.c10d.activation import activate, activate_on_import, deactivate, is_active

if TYPE_CHECKING:
    from typing import Any

    from deepytorch_core.report.summary import Report

__all__ = ["activate", "compile", "deactivate", "is_active", "report"]


def compile(
    model: Any,
    policy: str = "auto",
    *,
    budget_s: float | None = None,
    steps: int | None = None,
    is_patient: bool | None = None,
) -> Any:
    """Compile a model for training, in place, where that is measured faster and nowhere else.

    Args:
        model: a torch.nn.Module; it keeps its class, its parameters' names and its hooks.
        policy: "auto", "off", or the name of a policy: "inductor", "max-autotune", ...
        budget_s: seconds that compiling a region may take; default: option `compile_budget_s`.
        steps: how many training steps will follow, if known: a short run is not compiled.
        is_patient: whether "auto", in a run of unknown length, tries nothing before the run has
            lasted long enough for that; default: option `patience`.

    Returns `model`. Raises TypeError for what is no module and ValueError for a policy that is not
    known.
    """
    from deepytorch_core.base import by_name
    from deepytorch_core.compile import compile as make

    if hasattr(model, "modules"):
        by_name.note(model, by_name.COMPILE)
    return make(model, policy, budget_s=budget_s, steps=steps, is_patient=is_patient)


def report() -> Report:
    """Return what deepytorch did so far in this process; print it, or take its `to_dict()`."""
    from deepytorch_core.report.summary import report as make

    return make()


# By name: what is switched on where a framework is met is imported with the first of them.
activate_on_import(
    seams=f"{__name__}.integrations.seams.arm",
    reporters={
        "metrics": "deepytorch_core.report.metrics",
        "report": "deepytorch_core.report.run_folder",
    },
)
