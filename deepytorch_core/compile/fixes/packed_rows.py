"""transformers: a causal model without a mask looks whether its own positions begin anew in a row.

Those of packed sequences do. It has just counted them up itself, and to look at them waits for the
GPU.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._standing import standing_here
from deepytorch_core.compile.fixes._transformers import is_transformers

_LOOKS = "find_packed_sequence_indices"


@register_fix
class PackedRows(Fix):
    name = "no look for packed rows"

    def around(self, model: nn.Module) -> Around | None:
        if not is_transformers(model):
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            counts_itself = len(args) <= 1 and not any(
                "position" in name and value is not None for name, value in kwargs.items()
            )
            return without_look() if counts_itself else contextlib.nullcontext()

        return around


def without_look() -> AbstractContextManager[None]:
    """While open, position ids in this thread are taken to go on to the end of each row."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    places = [masks] if hasattr(masks, _LOOKS) else []
    return standing_here(places, _LOOKS, lambda position_ids: None)
