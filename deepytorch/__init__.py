"""deepytorch makes PyTorch training faster. One line, before or after torch:

    import deepytorch

From then on the collectives of torch.distributed go through deepytorch's native algorithms where
they can, and through gloo or NCCL where not. `DEEPYTORCH_ENABLED=0` makes the import do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepytorch_core.activation import activate, activate_on_import, deactivate, is_active

if TYPE_CHECKING:
    from deepytorch_core.report import Report

__all__ = ["activate", "deactivate", "is_active", "report"]


def report() -> Report:
    """What deepytorch did so far in this process; print it, or take its `to_dict()`."""
    from deepytorch_core.report import report as make

    return make()


activate_on_import()
