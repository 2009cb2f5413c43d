"""transformers: decoders of the BART kind make a mask of ones where there is none, and look at it.

That waits for the GPU. Where a compiler traces them they leave it out, to the same effect.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._standing import standing
from deepytorch_core.compile.fixes._transformers import is_transformers

_ASKS = "is_torchdynamo_compiling"
_MAKES_MASK = "mask_seq_length"  # a variable of who makes a mask of ones


@register_fix
class OnesMasks(Fix):
    name = "no mask of ones"

    def around(self, model: nn.Module) -> Around | None:
        if not is_transformers(model):
            return None
        files = {sys.modules.get(type(module).__module__) for module in model.modules()}
        asking = [file for file in files if hasattr(file, _ASKS)]
        if not asking:
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return _without_masks(asking)

        return around


def _without_masks(files: Sequence[Any]) -> AbstractContextManager[None]:
    """While open, models of these files make no masks of ones in this thread."""
    own = threading.get_ident()

    def instead_of(ask: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            frame = sys._getframe(1)
            makes_mask = (
                _MAKES_MASK in frame.f_code.co_varnames
                and frame.f_locals.get("attention_mask", frame) is None
            )
            return (makes_mask and threading.get_ident() == own) or ask()

        return answer

    return standing(files, _ASKS, instead_of)
