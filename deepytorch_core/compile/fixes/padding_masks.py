"""transformers: models look whether a padding mask is all ones, and do without it then.

That waits for the GPU. Where its code is traced it applies the mask as it is, to the same effect.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._standing import standing
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
            return _as_traced(masks)

        return around


def _as_traced(masks: Any) -> AbstractContextManager[None]:
    """While open, masks that are made in this thread are made as for a tracer."""
    own = threading.get_ident()

    def instead_of(ask: Callable[..., bool]) -> Callable[..., bool]:
        def answer(*args: Any, **kwargs: Any) -> bool:
            return threading.get_ident() == own or ask(*args, **kwargs)

        return answer

    return standing([masks], _ASKS, instead_of)
