"""Gradients that lie in the memory of CUDA graphs, and who still has them.

A copy of a large model's gradients takes time, and as much memory as they do. DDP copies them into
its buckets as it is, and an optimizer is done with them before the next pass: so they are lent.
Before graphs write there again, gradients that are still there are moved, in place: whoever has the
tensor keeps its content. An alias of it that somebody else has is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class BorrowedGrads:
    """Tensors of others over the graphs' memory. Graphs outlive them, and so does the memory."""

    def __init__(self) -> None:
        _forget_the_dead()
        self.is_overdue = False
        """Whether somebody else than a parameter ever had a loan for too long."""
        self._lent: list[StorageWeakRef] = []
        self._graphs: list[object] = []
        weakref.finalize(self, _bury, self._lent, self._graphs).atexit = False

    def keep(self, graphs: Iterable[object]) -> None:
        """More graphs whose memory is lent."""
        self._graphs.extend(graphs)

    def drop(self, graphs: Iterable[object]) -> None:
        """Let go of these graphs, never to run again; others go on in the same memory."""
        dropped = list(graphs)
        self._graphs[:] = [
            graph for graph in self._graphs if not any(graph is gone for gone in dropped)
        ]
        _bury(self._lent, dropped)

    def let_go(self) -> None:
        """Let go of all graphs, never to run again. With this object they might stay very long."""
        _bury(self._lent, list(self._graphs))
        self._graphs.clear()

    def note(self, lent: torch.UntypedStorage) -> None:
        """Another loan."""
        self._lent.append(StorageWeakRef(lent))  # type: ignore[no-untyped-call]

    def reclaim(self, parameters: Iterable[nn.Parameter]) -> bool:
        """See `Recorder.reclaim`."""
        _forget_the_dead()
        self._lent[:] = _living(self._lent)
        if not self._lent:
            return True
        places = {storage.cdata for storage in self._lent}
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        there = [
            grad for grad in gradients if grad.layout == torch.strided and _place(grad) in places
        ]
        for gradient, copy in zip(there, copies_of(there), strict=True):
            gradient.data = copy
        self._lent[:] = _living(self._lent)
        self.is_overdue |= bool(self._lent)
        return not self._lent


_Burial = tuple[list[StorageWeakRef], list[object]]
_buried: list[_Burial] = []


def _bury(lent: list[StorageWeakRef], graphs: list[object]) -> None:
    """Keep graphs that nobody needs while somebody still has some of their memory."""
    _buried.append((lent, graphs))
    _forget_the_dead()


def _forget_the_dead() -> None:
    _buried[:] = [burial for burial in _buried if _living(burial[0])]


def _living(lent: list[StorageWeakRef]) -> list[StorageWeakRef]:
    return [storage for storage in lent if not storage.expired()]  # type: ignore[no-untyped-call]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, in few launches: gradients are many small tensors. Times one is exact."""
    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        for dtype in {tensor.dtype for tensor in tensors}:
            mine = [tensor for tensor in tensors if tensor.dtype == dtype]
            made = torch._foreach_mul(mine, 1.0)
            copies.update({id(tensor): copy for tensor, copy in zip(mine, made, strict=True)})
    return [copies[id(tensor)] for tensor in tensors]
