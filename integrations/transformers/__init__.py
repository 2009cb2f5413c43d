"""transformers: a Trainer, or any subclass of it, that trains on deepytorch.

The seam is `Trainer.create_accelerator_and_postprocess`, where a Trainer builds its Accelerator:
right after it deepytorch is put under that Accelerator (`accelerator`). By inheritance
(`DeepytorchMixin`, before the Trainer in the list of bases), or for one Trainer that exists
(`accelerate_trainer`). Callbacks that report get some figures of deepytorch's beside the training
loss (`trainer_figures`). The Trainer's training loader may spread a step's samples over the ranks
(`trainer_balance`). Left alone is all else: arguments, data, loss, optimizer, callbacks and
checkpoints. For training loops without a Trainer `pack_batches` has a model train without padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from deepytorch.integrations.common import contract
from deepytorch.integrations.common.contract import IntegrationError
from deepytorch.integrations.padding_free import apply as _padding_free
from deepytorch.integrations.padding_free.keys import BATCH_KEY
from deepytorch.integrations.seams import accelerator
from deepytorch_core.base import by_name, config

from . import trainer_balance, trainer_figures

try:
    from transformers import Trainer
except ModuleNotFoundError:
    contract.require("transformers", ">=4.55,<6", tested="5.23.0")
    raise

__all__ = [
    "BATCH_KEY",
    "DeepytorchMixin",
    "DeepytorchTrainer",
    "IntegrationError",
    "accelerate_trainer",
    "pack_batches",
    "undo",
]

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
        deepytorch: options by name (`deepytorch_core.base.config.Options`), the same on all ranks.
            It is taken off before the Trainer sees its arguments.
        *args, **kwargs: the Trainer's.

    Raises IntegrationError, on every rank, for wrong options and versions.
    """

    def __init__(
        self, *args: Any, deepytorch: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._deepytorch_options = dict(deepytorch or {})
        super().__init__(*args, **kwargs)
        if accelerator.is_applied(self.accelerator):
            _attach(self, self._deepytorch_options)

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
        **options: see `deepytorch_core.base.config.Options`; the same on all ranks.

    Returns `trainer`. Raises IntegrationError, on every rank, for wrong options and versions.
    """
    if contract.is_marked(trainer, _NAME) or not _apply(trainer, options):
        return trainer
    changes = contract.Changes()

    def undo_accelerator() -> None:
        accelerator.undo(trainer.accelerator)

    changes.on_undo(undo_accelerator)
    _attach(trainer, options)
    # A Trainer makes another Accelerator for every trial of a hyperparameter search.
    changes.set(trainer, _SEAM, _creating(trainer, options))
    contract.mark(trainer, _NAME, changes)
    return trainer


def pack_batches(model: Any, padding_free: str = "auto", *, loaders: Iterable[Any] = ()) -> bool:
    """Have a model train without padding in a loop of your own; `undo` takes it away again.

    For loops without Accelerator, Trainer or DeepSpeed, whose adapters do it by themselves. The
    loop goes on as it is: it passes padded batches, and gets the loss of padded batches. All ranks
    must call it, after the model has been put on its device and wrapped.

    Args:
        model: a transformers model, or a wrapper of one: peft's, DistributedDataParallel.
        padding_free: auto keeps the padding of models that need it, and says so; on makes an
            error of that; off does nothing.
        loaders: `DataLoader`s whose collate function makes a dict with `input_ids`,
            `attention_mask` and, as the case may be, `labels`, [batch, length] each. They add the
            plan of each batch under `BATCH_KEY`, to be passed to the model with the rest. A model
            that gets no plan makes one, for which it waits for the device.

    Returns whether the model trains without padding. Raises IntegrationError, on every rank, if
    it can't and `padding_free` is "on".
    """
    by_name.note(model, by_name.PADDING_FREE)
    return _padding_free.attach(model, padding_free, adapter=_NAME, loaders=loaders)


def undo(changed: Any) -> bool:
    """Put a Trainer, its Accelerator and the process groups back as they were.

    Or a model of `pack_batches`, and its loaders. Returns False when there was nothing to undo.
    Collective: all ranks must call it.
    """
    if not hasattr(changed, "accelerator"):
        return _padding_free.detach(changed)
    trainer: Trainer = changed
    trainer_figures.detach(trainer)
    trainer_balance.detach(trainer)
    return contract.undo(trainer, _NAME) or accelerator.undo(trainer.accelerator)


def _apply(trainer: Trainer, options: Mapping[str, Any]) -> bool:
    if config.current().enabled:
        contract.require("transformers", ">=4.55,<6", tested="5.23.0")
    return accelerator.apply(trainer.accelerator, options, adapter=_NAME)


def _attach(trainer: Trainer, options: Mapping[str, Any]) -> None:
    """Attach what is the Trainer's own, beyond its Accelerator."""
    in_force = contract.alone(_NAME, options)
    trainer_figures.attach(trainer)
    trainer_balance.attach(trainer, in_force.token_balance if in_force.enabled else "off")


def _creating(trainer: Trainer, options: Mapping[str, Any]) -> Callable[[], None]:
    original = getattr(trainer, _SEAM)

    @functools.wraps(original)
    def create() -> None:
        original()
        _apply(trainer, options)

    return create
