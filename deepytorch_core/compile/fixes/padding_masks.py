"""transformers: models look whether a padding mask is all ones, and do without it then.

That waits for the GPU. Where its code is traced it applies the mask as it is, to the same effect.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._standing import standing_here
from deepytorch_core.compile.fixes._transformers import is_transformers

_ASKS = "is_tracing"


@register_fix
class PaddingMasks(Fix):
    name = "no look at padding masks"

    def around(self, model: nn.Module) -> Around | None:
        masks: Any = sys.modules.get("transformers.masking_utils")
        if not hasattr(masks, _ASKS) or not any(map(is_transformers, model.modules())):
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return standing_here([masks], _ASKS, _known)

        return around


def _known(tensor: Any = None) -> bool:
    """Have masks made as for a tracer."""
    return True
