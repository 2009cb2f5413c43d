"""A run of stock that is moved a little: how far that takes its losses is a yardstick for others.

Its weights are moved by rounding, once, after the first step. Its random generators begin anew
where an accelerated run draws other numbers. Such a run does so for dropout if it is without
padding or compiled. Whoever trains rightly lies no further from stock than that.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from deepytorch_core.base import memory

_SEED = 11
# How many nodes away from a backward's root types are looked at.
_FAR = 4096
_MOVED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Nudge:
    """Moves the weights of every optimizer after its first step; random numbers once, if asked."""

    def __init__(self, *, is_redrawn: bool) -> None:
        self._redraws = is_redrawn
        self._unit: float | None = None
        self._moved: weakref.WeakSet[Any] = weakref.WeakSet()

    def see(self, root: Any) -> None:
        """A backward begins here; the first one tells what the model computes in."""
        if self._unit is None and isinstance(root, torch.Tensor):
            self._unit = coarsest(root)

    def after(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if optimizer in self._moved:
            return
        self._moved.add(optimizer)
        move(optimizer, self._unit or torch.finfo(torch.float32).eps)
        if self._redraws:
            self._redraws = False
            # Ranks that drew the same numbers still do.
            torch.manual_seed((torch.initial_seed() + 1) % 2**63)


def coarsest(root: torch.Tensor) -> float:
    """The unit in the last place of 1 of the least precise type in a graph."""
    units = [torch.finfo(root.dtype).eps] if root.is_floating_point() else []
    near, seen = deque([root.grad_fn]), {root.grad_fn}
    for _ in range(_FAR):
        if not near:
            break
        node: Any = near.popleft()
        if node is None:
            continue
        dtypes = [made.dtype for made in getattr(node, "_input_metadata", ())]
        units += [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
        fresh = [after for after, _ in node.next_functions if after not in seen]
        seen.update(fresh)
        near.extend(fresh)
    if memory.gpus():
        with contextlib.suppress(RuntimeError):  # where a program has set them in two ways
            if torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32:
                units.append(2**-10)
    return max(units, default=torch.finfo(torch.float32).eps)


def move(optimizer: Any, unit: float) -> None:
    """Multiply each weight by a number within `unit` of 1; replicas by the same."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for weight in weights_of(optimizer):
            if weight.dtype in _MOVED and weight.numel():
                device = weight.device
                if device not in generators:
                    generators[device] = torch.Generator(device).manual_seed(_SEED)
                noise = torch.rand(
                    weight.shape, generator=generators[device], dtype=torch.float32, device=device
                )
                # Tensors of a script's own kind may not know how.
                with contextlib.suppress(RuntimeError, TypeError):
                    weight.mul_((1 + (2 * noise - 1) * unit).to(weight.dtype))


def weights_of(optimizer: Any) -> list[torch.Tensor]:
    """Return this rank's part of the weights that an optimizer trains."""
    return [
        (weight.to_local() if hasattr(weight, "to_local") else weight).detach()
        for group in optimizer.param_groups
        for weight in group["params"]
    ]


def told_apart(optimizers: Iterable[Any]) -> float | None:
    """A number that ranks with the same weights have alike; None where it can't be had."""
    total = 0.0
    try:
        for optimizer in optimizers:
            for place, weight in enumerate(weights_of(optimizer), 1):
                if weight.dtype in _MOVED and weight.numel():
                    norm: Any = torch.linalg.vector_norm(weight, dtype=torch.float64)
                    total += place * float(norm)
    except Exception:  # optimizers and tensors of whatever kind a script has
        return None
    return total


def drawn() -> int:
    """How far this process's random generators are: alike where as many numbers were drawn."""
    told = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # while a graph is captured
            told = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), told)
    return told
