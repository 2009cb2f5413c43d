"""Mixtures of experts: products of groups read the groups' sizes back, unless torch has a kernel.

It has one for bfloat16 on some GPUs. Weights in float32, which autocast leaves alone here, wait for
the GPU once a product forward and twice backward. Compiled experts of transformers have an operator
of the library's own in its place, which waits as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._standing import standing
from deepytorch_core.nn.grouped_mm import grouped_mm

_OPERATOR = "_grouped_mm"  # torch.nn.functional.grouped_mm and transformers call it from here
# transformers' operators in compiled code, their names as functions, and the file of these.
_FORWARD = ("grouped_mm_fallback", "_grouped_mm_fallback")
_BACKWARD = ("grouped_mm_fallback_backward", "_grouped_mm_fallback_bwd")
_LIBRARY, _FILE = "transformers", "transformers.integrations.moe"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FORBIDDEN = 2  # torch's number of the mode in which waiting is an error
# Major compute capabilities that torch has a kernel for.
_WITH_KERNEL = (9, 10)


@register_fix
class GroupedProducts(Fix):
    name = "no look at sizes of groups"

    def around(self, model: nn.Module) -> Around | None:
        if not (hasattr(torch, _OPERATOR) and _has_waiting_experts(model)):
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return without_look()

        return around

    def during(self, model: nn.Module) -> AbstractContextManager[None]:
        file = sys.modules.get(_FILE)
        is_known = all(hasattr(file, name) for _, name in (_FORWARD, _BACKWARD))
        if not (is_known and _has_waiting_experts(model)):
            return contextlib.nullcontext()
        return compiled_without_look(file, "CUDA")


def waits(weight: Tensor) -> bool:
    """Whether torch's products with such a weight of experts wait for its GPU."""
    if weight.device.type != "cuda" or weight.dtype not in _DTYPES:
        return False
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and _casts(kind):
        return False  # they need not be of this dtype
    major, _ = torch.cuda.get_device_capability(weight.device)
    return weight.dtype != torch.bfloat16 or major not in _WITH_KERNEL


def without_look() -> AbstractContextManager[None]:
    """While open, products of groups in this thread don't read the groups' sizes back."""
    own = threading.get_ident()

    def instead_of(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(stock)
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
            return stock(left, right, offs=offs, bias=bias, out_dtype=out_dtype)

        return known

    return standing([torch], _OPERATOR, instead_of)


@contextlib.contextmanager
def compiled_without_look(file: Any, key: str) -> Iterator[None]:
    """While open, captured products of transformers' compiled code don't read groups' sizes back.

    `file` has the library's own functions, which others get; `key` is that of the device.
    """
    from deepytorch_core.nn import grouped_mm_kernels as kernels

    def forward(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        if is_captured():
            return kernels.by_rows(left, right, offs)
        product: Tensor = getattr(file, _FORWARD[1])(left, right, offs)
        return product

    def backward(
        left: Tensor, right: Tensor, offs: Tensor, upstream: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not is_captured():
            left_gradient, right_gradient = getattr(file, _BACKWARD[1])(left, right, offs, upstream)
            return left_gradient, right_gradient
        is_transposed = right.stride(-2) == 1
        left_gradient = kernels.by_rows(upstream, right.mT, offs)
        right_gradient = kernels.by_groups(left, upstream, offs, is_transposed=is_transposed)
        return _laid_out(left_gradient, left), _laid_out(right_gradient, right)

    library = torch.library.Library(_LIBRARY, "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl(_FORWARD[0], forward, key)  # type: ignore[no-untyped-call]
        library.impl(_BACKWARD[0], backward, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def is_captured() -> bool:
    """Whether waiting is out of the question here: in a capture, and in its rehearsal."""
    capturing = torch._C._cuda_isCurrentStreamCapturing()  # not what a capture tells others
    return capturing or torch.cuda.get_sync_debug_mode() == _FORBIDDEN


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """The same in memory as its tensor is: compiled code goes by that."""
    same = gradient.stride() == like.stride()
    return gradient if same else torch.empty_like(like).copy_(gradient)


def _has_waiting_experts(model: nn.Module) -> bool:
    return _has_triton() and any(
        parameter.dim() == 3 and parameter.is_floating_point() and waits(parameter)
        for parameter in model.parameters()
    )


def _casts(kind: str) -> bool:
    """Whether autocast has a say in products of groups."""
    key = f"Autocast{kind.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_OPERATOR}", key)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
