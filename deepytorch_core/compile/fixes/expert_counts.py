"""transformers: the loss that balances experts counts the tokens of each by `torch.bincount`.

That waits for the GPU, as there may be more experts than it was told. The loss has taken the
numbers of experts from the columns of its logits, so there are not.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._standing import standing
from deepytorch_core.compile.fixes._transformers import is_transformers

_COUNTS = "bincount"
_LOSS = "load_balancing_loss_func"
_CHOICES = "routing_weights"  # what it has chosen the experts from: a column each


@register_fix
class ExpertCounts(Fix):
    name = "no look at counts of experts"

    def around(self, model: nn.Module) -> Around | None:
        files = {sys.modules.get(type(module).__module__) for module in model.modules()}
        if not (is_transformers(model) and any(hasattr(file, _LOSS) for file in files)):
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return without_look()

        return around


def without_look() -> AbstractContextManager[None]:
    """While open, losses that balance experts in this thread don't wait for their counts."""
    own = threading.get_ident()

    def instead_of(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(stock)
        def known(
            input: Tensor,  # as stock's is called
            weights: Tensor | None = None,
            minlength: int = 0,
        ) -> Tensor:
            is_ours = weights is None and threading.get_ident() == own
            if is_ours and _num_choices(sys._getframe(1)) in range(1, minlength + 1):
                return counted(input, minlength)
            return stock(input, weights, minlength)

        return known

    return standing([torch], _COUNTS, instead_of)


def counted(numbers: Tensor, most: int) -> Tensor:
    """Count how often each number below `most` occurs in `numbers`, of any integer dtype, (n,).

    Returns (most,) int64, without waiting. On a GPU another number ends the process, as for an
    embedding; on a CPU it raises.
    """
    counts = torch.zeros(most, dtype=torch.int64, device=numbers.device)
    increment = torch.ones((), dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers.long(), increment.expand_as(numbers))


def _num_choices(frame: FrameType) -> int:
    """How many experts the loss in `frame` can have chosen from; 0 in any other function."""
    choices = frame.f_locals.get(_CHOICES) if frame.f_code.co_name == _LOSS else None
    return choices.shape[-1] if isinstance(choices, Tensor) else 0
