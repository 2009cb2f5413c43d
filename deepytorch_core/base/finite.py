"""Finds numbers that are none (NaN, infinite) in what ranks are about to sum: `debug=nan`.

One rank's NaN is in every rank's gradients after an all_reduce, and nobody can tell any more where
it came from. Here each rank looks at its own part before it goes in. That reads the data once more
and waits for the GPU, so it is for finding a fault, not for training.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

_MOST_NAMES = 5


def fault_of(tensor: Tensor) -> str:
    """Say what is wrong with the numbers of `tensor`; "" if all are finite.

    Args:
        tensor: any dtype, shape and device; sparse ones by their values. Integers have no fault,
            nor have those that a CUDA graph captures, as nothing can be looked at there.

    Parameters whose gradients aren't finite are named: those of DistributedDataParallel models of
    this process and, where FSDP2 is about to scatter `tensor`, those within it.
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
    names = list(_bad_in_fsdp2(tensor)) or list(_bad_parameters())
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
            if gradient is not None:
                values = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
                bad = int(_not_finite(values).sum().item())
                if bad:
                    yield f"{name} ({bad} of {values.numel()})"


def _bad_in_fsdp2(tensor: Tensor) -> Iterator[str]:
    """The parameters whose gradients FSDP2 reduces, where `tensor` is among them.

    Nothing leads from the tensor to the parameters, and blocks of a model are alike. But FSDP2 is
    still in the call that put them together (torch's `foreach_reduce`), one row for each rank.
    """
    found = _fsdp2_locals(tensor)
    try:
        whole, params, num_ranks = (
            found[name] for name in ("reduce_scatter_input", "fsdp_params", "world_size")
        )
        rows = _not_finite(whole).reshape(num_ranks, -1)
        counts, start = [], 0
        for each, size in zip(params, found["padded_unsharded_sizes"], strict=True):
            end = start + math.prod(size) // num_ranks
            count = int(rows[:, start:end].sum().item())
            counts.append((each._param_fqn or "a parameter", count, math.prod(each._orig_size)))
            start = end
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return  # another torch's FSDP2: the place in the whole is told all the same
    for name, count, size in counts:
        if count:
            yield f"{name} ({count} of {size})"


def _fsdp2_locals(tensor: Tensor) -> dict[str, Any]:
    """Return FSDP2's locals in the call on this thread that is about to reduce `tensor`, or {}."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "foreach_reduce":
            whole = frame.f_locals.get("reduce_scatter_input")
            # A rank's part of it, as it comes here.
            if whole is not None and 0 <= tensor.data_ptr() - whole.data_ptr() < whole.nbytes:
                return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def _models() -> list[DistributedDataParallel]:
    """Those of this process. Nobody keeps a list of them; this is asked once, before the end."""
    from torch.nn.parallel import DistributedDataParallel

    # By type alone: isinstance would wake lazy modules and proxies among all objects.
    return [found for found in gc.get_objects() if type(found) is DistributedDataParallel]
