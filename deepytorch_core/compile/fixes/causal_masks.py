"""torch: `nn.TransformerEncoder` and `TransformerDecoder` look whether a mask is the causal one.

That waits for the GPU. The answer only chooses between the mask and a kernel's own causal form, so
a captured pass takes the mask as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.modules import transformer

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._standing import standing

_LOOKS = "_detect_is_causal_mask"


@register_fix
class CausalMasks(Fix):
    name = "no look for causal masks"

    def around(self, model: nn.Module) -> Around | None:
        stacks = (nn.TransformerEncoder, nn.TransformerDecoder)
        if not hasattr(transformer, _LOOKS):
            return None
        if not any(isinstance(module, stacks) for module in model.modules()):
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return _without_look()

        return around


def _without_look() -> AbstractContextManager[None]:
    """While open, masks in this thread are causal only where the caller says so."""
    own = threading.get_ident()

    def instead_of(look: Callable[..., bool]) -> Callable[..., bool]:
        def known(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
            if threading.get_ident() == own:
                return is_causal is True
            return look(mask, is_causal, size)

        return known

    return standing([transformer], _LOOKS, instead_of)
