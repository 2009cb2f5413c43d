"""Finds numbers that are none (NaN, infinite) in what ranks are about to sum: `debug=nan`.

One rank's NaN is in every rank's gradients after an all_reduce, and nobody can tell any more where
it came from. Here each rank looks at its own part before it goes in. That reads the data once more
and waits for the GPU, so it is for finding a fault, not for training.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

_MOST_NAMES = 5


def fault_of(tensor: Tensor) -> str:
    """What is wrong with the numbers of `tensor`; "" if all are finite.

    Args:
        tensor: any dtype, shape and device; sparse ones by their values. Integers have no fault,
            nor has what a CUDA graph captures, where nothing can be looked at.

    Where a DistributedDataParallel model of this process has parameters whose gradients aren't
    finite, they are named.
    """
    import torch

    values = tensor.coalesce().values() if tensor.is_sparse else tensor.detach()
    if not (values.is_floating_point() or values.is_complex()):
        return ""
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        return ""
    bad = _not_finite(values)
    count = int(bad.sum().item())
    if not count:
        return ""
    first = int(bad.reshape(-1).to(torch.uint8).argmax().item())
    value = values.reshape(-1)[first].item()
    text = (
        f"{count} of {bad.numel()} numbers that are none, the first at {first} ({value}, "
        f"{str(values.dtype).removeprefix('torch.')})"
    )
    names = list(_bad_parameters())
    if names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        text += f"; gradients that aren't finite: {', '.join(names[:_MOST_NAMES])}{more}"
    return text


def _not_finite(values: Tensor) -> Tensor:
    import torch

    if values.dtype.itemsize == 1:  # float8, which has no such test of its own
        values = values.to(torch.float32)
    return ~torch.isfinite(values)


def _bad_parameters() -> Iterator[str]:
    for model in _models():
        for name, parameter in model.module.named_parameters():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                bad = int(_not_finite(gradient.detach()).sum().item())
                if bad:
                    yield f"{name} ({bad} of {gradient.numel()})"


def _models() -> list[DistributedDataParallel]:
    """Those of this process. Nobody keeps a list of them; this is asked once, before the end."""
    from torch.nn.parallel import DistributedDataParallel

    # By type alone: isinstance would wake lazy modules and proxies among all objects.
    return [found for found in gc.get_objects() if type(found) is DistributedDataParallel]
