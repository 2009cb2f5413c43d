"""Mixtures of experts: products of groups read the groups' sizes back, unless torch has a kernel.

It has one for bfloat16 on some GPUs. Weights in float32, which autocast leaves alone here, wait for
the GPU once a layer forward and twice backward.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.nn.grouped_mm import grouped_mm

_OPERATOR = "_grouped_mm"  # torch.nn.functional.grouped_mm and transformers call it from here
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Major compute capabilities that torch has a kernel for.
_WITH_KERNEL = (9, 10)

# One pass at a time has its function in torch.
_one = threading.RLock()


@register_fix
class GroupedProducts(Fix):
    name = "no look at sizes of groups"

    def around(self, model: nn.Module) -> Around | None:
        has_experts = any(
            one.dim() == 3 and one.is_floating_point() and waits(one) for one in model.parameters()
        )
        if not (has_experts and hasattr(torch, _OPERATOR) and _has_triton()):
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return without_look()

        return around


def waits(weight: Tensor) -> bool:
    """Whether torch's products with such a weight of experts wait for its GPU."""
    if weight.device.type != "cuda" or weight.dtype not in _DTYPES:
        return False
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and _casts(kind):
        return False  # they need not be of this dtype
    major, _ = torch.cuda.get_device_capability(weight.device)
    return weight.dtype != torch.bfloat16 or major not in _WITH_KERNEL


@contextlib.contextmanager
def without_look() -> Iterator[None]:
    """While open, products of groups in this thread don't read the groups' sizes back."""
    own = threading.get_ident()

    @functools.wraps(getattr(torch, _OPERATOR))
    def known(
        left: Tensor,
        right: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if (
            offs is not None
            and bias is None
            and out_dtype in (None, left.dtype)
            and threading.get_ident() == own
            and (left.dim(), right.dim(), left.dtype) == (2, 3, right.dtype)
            and waits(right)
        ):
            return grouped_mm(left, right, offs)
        product: Tensor = stock(left, right, offs=offs, bias=bias, out_dtype=out_dtype)
        return product

    with _one:
        stock = getattr(torch, _OPERATOR)
        setattr(torch, _OPERATOR, known)
        try:
            yield
        finally:
            setattr(torch, _OPERATOR, stock)


def _casts(kind: str) -> bool:
    """Whether autocast has a say in products of groups."""
    key = f"Autocast{kind.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_OPERATOR}", key)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
