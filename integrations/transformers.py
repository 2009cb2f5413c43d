"""transformers: a Trainer, or any subclass of it, that trains on deepytorch.

The seam is `Trainer.create_accelerator_and_postprocess`, where a Trainer builds its Accelerator:
right after it deepytorch is put under that Accelerator (`_accelerator`). By inheritance
(`DeepytorchMixin`, before the Trainer in the list of bases), or for one Trainer that exists
(`accelerate_trainer`). Left alone is all else: arguments, data, loss, optimizer, callbacks and
checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from deepytorch_core import config

from . import _accelerator, _contract

try:
    from transformers import Trainer
except ModuleNotFoundError:
    _contract.require("transformers", ">=4.55,<6", tested="5.23.0")
    raise

__all__ = ["DeepytorchMixin", "DeepytorchTrainer", "accelerate_trainer", "undo"]

_NAME = "transformers"
_SEAM = "create_accelerator_and_postprocess"

_Trainer = TypeVar("_Trainer", bound=Trainer)

if TYPE_CHECKING:  # a mixin derives from nothing, but is checked as what it is mixed into
    _Base = Trainer
else:
    _Base = object


class DeepytorchMixin(_Base):
    """Makes a Trainer's class train on deepytorch: `class Mine(DeepytorchMixin, SFTTrainer): ...`.

    Args:
        deepytorch: options by name (`deepytorch_core.config.Options`), the same on all ranks. It
            is taken off before the Trainer sees its arguments.
        *args, **kwargs: the Trainer's.

    Raises IntegrationError, on every rank, for wrong options and versions.
    """

    def __init__(
        self, *args: Any, deepytorch: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._deepytorch_options = dict(deepytorch or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        _apply(self, self._deepytorch_options)


class DeepytorchTrainer(DeepytorchMixin, Trainer):
    """transformers' Trainer on deepytorch: `DeepytorchTrainer(..., deepytorch={...})`."""


def accelerate_trainer(trainer: _Trainer, **options: Any) -> _Trainer:
    """Put deepytorch under a Trainer that exists, of whatever class; `undo` takes it away again.

    Collective: all ranks must call it. A second call does nothing.

    Args:
        trainer: changed in place.
        **options: see `deepytorch_core.config.Options`; the same on all ranks.

    Returns `trainer`. Raises IntegrationError, on every rank, for wrong options and versions.
    """
    if _contract.is_marked(trainer, _NAME) or not _apply(trainer, options):
        return trainer
    changes = _contract.Changes()

    def undo_accelerator() -> None:
        _accelerator.undo(trainer.accelerator)

    changes.on_undo(undo_accelerator)
    # A Trainer makes another Accelerator for every trial of a hyperparameter search.
    changes.set(trainer, _SEAM, _creating(trainer, options))
    _contract.mark(trainer, _NAME, changes)
    return trainer


def undo(trainer: Trainer) -> bool:
    """Put the Trainer, its Accelerator and the process groups back as they were.

    Returns False when there was nothing to undo. Collective: all ranks must call it.
    """
    return _contract.undo(trainer, _NAME) or _accelerator.undo(trainer.accelerator)


def _apply(trainer: Trainer, options: Mapping[str, Any]) -> bool:
    if config.current().enabled:
        _contract.require("transformers", ">=4.55,<6", tested="5.23.0")
    return _accelerator.apply(trainer.accelerator, options, adapter=_NAME)


def _creating(trainer: Trainer, options: Mapping[str, Any]) -> Callable[[], None]:
    original = getattr(trainer, _SEAM)

    @functools.wraps(original)
    def create() -> None:
        original()
        _apply(trainer, options)

    return create
