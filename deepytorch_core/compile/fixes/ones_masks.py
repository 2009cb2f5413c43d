"""transformers: decoders of the BART kind make a mask of ones where there is none, and look at it.

That waits for the GPU. Where a compiler traces them they leave it out, to the same effect.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._transformers import is_transformers

_ASKS = "is_torchdynamo_compiling"
_MAKES_MASK = "mask_seq_length"  # a variable of who makes a mask of ones

# One pass at a time has its function in transformers' files.
_one = threading.RLock()


@register_fix
class OnesMasks(Fix):
    name = "no mask of ones"

    def around(self, model: nn.Module) -> Around | None:
        if not is_transformers(model):
            return None
        files = {sys.modules.get(type(one).__module__) for one in model.modules()}
        asking = [file for file in files if hasattr(file, _ASKS)]
        if not asking:
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return _without_masks(asking)

        return around


@contextlib.contextmanager
def _without_masks(files: Sequence[Any]) -> Iterator[None]:
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

    with _one:
        asks = [getattr(file, _ASKS) for file in files]
        for file, ask in zip(files, asks, strict=True):
            setattr(file, _ASKS, instead_of(ask))
        try:
            yield
        finally:
            for file, ask in zip(files, asks, strict=True):
                setattr(file, _ASKS, ask)
