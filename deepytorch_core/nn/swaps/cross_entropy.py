"""The cross-entropy of many classes, wherever a training computes it under autocast on a GPU.

Losses are called as functions, which belong to no module. So the kernel stands behind the operator
`aten::cross_entropy_loss`, at autocast's key, where torch has none for GPUs. Python sees the same
function as ever, and whoever traces or transforms a call gets stock's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch_core import guard
from deepytorch_core.nn.cross_entropy import cross_entropy
from deepytorch_core.nn.kernels import (
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    Undo,
    register_kernel,
    register_place,
)

KIND = "cross_entropy"
KEY = "AutocastCUDA"
# With fewer, logits are small beside all that makes them.
LEAST_CLASSES = 4096
_MOST_ROWS = 4096
# Logits of the trial, in elements.
_MOST_LOGITS = 1 << 28
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MEAN, _SUM = 1, 2  # of aten's `reduction`
_OTHERS = (-100, 0.0)  # the operator's defaults of `ignore_index` and `label_smoothing`

_stock: Any = torch.ops.aten.cross_entropy_loss.default


@register_place(KIND)
def find(setting: KernelSetting) -> Iterable[KernelPlace]:
    """The loss of the model's widest layer, if that has many classes."""
    if setting.autocast is None or setting.device.type != "cuda":
        return
    widths = [getattr(module, "out_features", 0) for module in setting.model.modules()]
    classes = max((width for width in widths if isinstance(width, int)), default=0)
    if classes >= LEAST_CLASSES:
        yield KernelPlace(
            kind=KIND,
            what=f"cross-entropy({classes})",
            targets=(None,),
            probe=lambda: _probe(classes, setting),
            saves_memory=True,
            facts={"classes": classes},
        )


class _Logits(nn.Module):
    def __init__(self, rows: int, classes: int, setting: KernelSetting) -> None:
        super().__init__()
        generator = torch.Generator(setting.device).manual_seed(rows)
        self.logits = nn.Parameter(
            torch.randn(
                (rows, classes), device=setting.device, dtype=torch.float32, generator=generator
            ).to(setting.autocast)
        )


def _probe(classes: int, setting: KernelSetting) -> KernelProbe:
    rows = max(64, min(_MOST_ROWS, _MOST_LOGITS // classes))
    module = _Logits(rows, classes, setting)
    targets = torch.arange(rows, device=setting.device, dtype=torch.int64) % classes
    targets[::5] = -100

    def run() -> list[Tensor]:
        loss = nn.functional.cross_entropy(module.logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss]

    return KernelProbe(module, None, run)


@register_kernel
class FusedCrossEntropy(Kernel):
    """`deepytorch_core.nn.cross_entropy`, for the whole process while any model wants it."""

    kind = KIND
    name = "fused"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(_stock.name(), KEY)
        if has_kernel and not _serving.is_on:
            return "torch has an autocast of its own for it"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        return None

    def apply(self, target: Any, setting: KernelSetting) -> Undo:
        return _serving.begin()


class _Serving:
    """The operator's kernel, for as long as anybody wants it."""

    def __init__(self) -> None:
        self._num_wanted = 0
        self._library: Any = None

    @property
    def is_on(self) -> bool:
        return self._library is not None

    def begin(self) -> Callable[[], None]:
        """Have calls served from here on; returns what ends that, once."""
        self._num_wanted += 1
        if self._library is None:
            self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            self._library.impl("cross_entropy_loss", _called, KEY)
        ended: list[None] = []

        def end() -> None:
            if not ended:
                ended.append(None)
                self._end()

        return end

    def _end(self) -> None:
        self._num_wanted -= 1
        if not self._num_wanted:
            self._library._destroy()
            self._library = None


_serving = _Serving()


def _called(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    *others: Any,
) -> Any:
    """Take the operator's call; it ends with `ignore_index` and `label_smoothing`."""
    rest: tuple[Any, ...] = others + _OTHERS[len(others) :]
    ignore_index, label_smoothing = rest
    is_plain = weight is None and label_smoothing == 0.0 and reduction in (_MEAN, _SUM)
    if is_plain and is_served(logits, target) and not _is_looked_at():
        return cross_entropy(logits, target, is_mean=reduction == _MEAN, ignore_index=ignore_index)
    return _stock.decompose(logits, target, weight, reduction, ignore_index, label_smoothing)


def is_served(logits: Tensor, target: Tensor) -> bool:
    """Whether the kernels can take tensors of these types, dtypes and shapes."""
    are_plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in (logits, target))
    return (
        are_plain
        and logits.is_cuda
        and logits.device == target.device
        and logits.dtype in _DTYPES
        and target.dtype == torch.int64
        and (logits.dim(), target.dim()) == (2, 1)
        and len(logits) == len(target) > 0
        and logits.shape[1] >= LEAST_CLASSES
        and logits.stride(1) == 1
        and target.stride(0) == 1
    )


def _is_looked_at() -> bool:
    """Whether the call is traced, transformed, or each of its operations is looked at."""
    return torch.compiler.is_compiling() or guard.is_looked_at()
