"""torch: `nn.TransformerEncoder` and `TransformerDecoder` look whether a mask is the causal one.

That waits for the GPU. The answer only chooses between the mask and a kernel's own causal form, so
a captured pass takes the mask as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.modules import transformer

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._standing import standing_here

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
            return standing_here([transformer], _LOOKS, _known)

        return around


def _known(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Tell that a mask is causal only where the caller says so."""
    return is_causal is True
