"""Many tensors in few collectives: small ones travel together in one buffer, large ones alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import _collectives
from ._collectives import Reduction, Where
from ._handle import Handle

# A collective of its own costs about as much as copying this many bytes into a buffer and back.
FUSED_BELOW_BYTES = 128 << 10


class Fusion:
    """How tensors of given shapes are put together; made once, used for many reductions.

    Args:
        tensors: tensors like the ones to come, on every rank alike. Only their shapes, types and
            devices count.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.alone: list[int] = []
        together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel() * tensor.element_size() < FUSED_BELOW_BYTES:
                together.setdefault((tensor.dtype, tensor.device), []).append(index)
            else:
                self.alone.append(index)
        self.buffers: list[tuple[list[int], torch.Tensor, list[torch.Tensor]]] = []
        for indices in together.values():
            if len(indices) == 1:
                self.alone += indices
                continue
            counts = [tensors[index].numel() for index in indices]
            buffer = tensors[indices[0]].new_empty(sum(counts), requires_grad=False)
            parts = [
                part.view(tensors[index].shape)
                for part, index in zip(torch.split(buffer, counts), indices, strict=True)
            ]
            self.buffers.append((indices, buffer, parts))
        self.alone.sort()

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        reduction: Reduction,
        where: Where,
        start: Callable[[torch.Tensor], Handle] | None = None,
    ) -> Handle:
        """Reduce tensors in place, by `start` in place of `_collectives.all_reduce` if given."""
        op, before, after = reduction
        size = where.group.size()

        def begin(tensor: torch.Tensor) -> Handle:
            _collectives.scale_(tensor, before)
            return start(tensor) if start else _collectives.all_reduce(tensor, op, where)

        return self._run(tensors, begin, lambda t: _collectives.finish_(t, op, after, size))

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, where: Where) -> Handle:
        """Give every rank the values of rank `root` of the group, in place."""
        return self._run(
            tensors, lambda tensor: _collectives.broadcast(tensor, root, where), lambda tensor: None
        )

    def _run(
        self,
        tensors: Sequence[torch.Tensor],
        start: Callable[[torch.Tensor], Handle],
        after: Callable[[torch.Tensor], object],
    ) -> Handle:
        begun: list[tuple[torch.Tensor, Handle]] = []
        for index in self.alone:
            # A collective wants its memory in one piece, in the order of the elements.
            whole = tensors[index].detach().contiguous()
            begun.append((whole, start(whole)))
        for indices, buffer, parts in self.buffers:
            torch._foreach_copy_(parts, [tensors[index].detach() for index in indices])
            begun.append((buffer, start(buffer)))

        def finish() -> list[torch.Tensor]:
            for tensor, handle in begun:
                handle.wait()
                after(tensor)
            for index, (whole, _) in zip(self.alone, begun, strict=False):
                if whole.data_ptr() != tensors[index].data_ptr():
                    tensors[index].detach().copy_(whole)
            for indices, _, parts in self.buffers:
                torch._foreach_copy_([tensors[index].detach() for index in indices], parts)
            return list(tensors)

        return Handle([handle for _, handle in begun], finish)
