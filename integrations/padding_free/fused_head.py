"""TRL's fused head on a packed row scores every position, so that nobody waits for their number.

On a GPU the head computes the positions that have a label, and waits until the GPU has counted
them: all work before it has to be done, and no graph holds the pass. In a packed row most have one.
There all are scored, as TRL does on devices whose tiles must not change their shape; those without
a label are zero either way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepytorch.integrations.common import contract

if TYPE_CHECKING:
    from deepytorch_core.data import Packing

# Shares of a row's tokens with a label: from the first on all positions are scored, below the
# second only these. Between them it stays as it is, since each way has graphs of its own.
_ENOUGH, _TOO_FEW = 0.75, 0.6
_WHY = "a head that scores all positions of a packed row waits for no count of labels"
_OPTION = "DEEPYTORCH_PADDING_FREE=off"


class _Running(threading.local):
    scores_all = False
    packing: Packing | None = None


_running = _Running()


def install(changes: contract.Changes) -> None:
    """Have TRL's heads go by what `expect` was told, from now on."""
    module: Any = sys.modules.get("trl.trainer.utils")
    if hasattr(module, "_use_triton"):
        changes.replace(module, "_use_triton", _unless_all, why=_WHY, option=_OPTION)


def expect(scores_all: bool) -> None:
    """From here on heads score all positions, or those that have a label."""
    _running.scores_all = scores_all


def note(packing: Packing) -> None:
    """A packed batch goes through a model that has the head."""
    _running.packing = packing


def take_packing() -> Packing | None:
    """How the last batch was packed, told once."""
    packing, _running.packing = _running.packing, None
    return packing


def _unless_all(original: Callable[..., bool]) -> Callable[..., bool]:
    def use_triton(*args: Any, **kwargs: Any) -> bool:
        return original(*args, **kwargs) and not _running.scores_all

    return use_triton


class Labelled:
    """Knows how many tokens of a model's batches have a label.

    Attributes:
        are_most: whether so many have one that all positions may be scored.
    """

    def __init__(self) -> None:
        self.are_most = False
        self._num_tokens = self._num_targets = 0

    def add(self, packing: Packing) -> None:
        """Count those of a batch."""
        if packing.num_targets is None:
            return
        self._num_tokens += packing.num_tokens
        self._num_targets += packing.num_targets
        least = _TOO_FEW if self.are_most else _ENOUGH
        self.are_most = self._num_targets >= least * self._num_tokens
