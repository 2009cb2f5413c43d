"""Requests of a rank that begins an operation: what the others must know, and how it runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepytorch.integrations.common.horovod_common import HorovodInternalError, ReduceOp

from . import _collectives
from ._collectives import Reduction, Where, dtype_name, neutral
from ._fusion import Fusion
from ._handle import Handle
from ._world import ProcessSet

Facts = dict[str, Any]
"""Plain values by name, of which JSON gives the same back."""

# All ranks must tell these alike; the values are Horovod's words for them.
_ALIKE = {
    "kind": "operations",
    "dtype": "data types",
    "device": "devices",
    "op": "reduction operations",
    "factors": "prescale and/or postscale factors",
    "root": "root ranks",
    "shape": "tensor shapes",
    "rest": "tensor shapes beyond the first dimension",
}


@dataclass
class Request:
    """An operation as one rank asks for it.

    `start` begins it, once the facts of all ranks are known, by rank of the group. A `problem` is
    told to all, so that none waits for a rank that can't take part.
    """

    facts: Facts
    start: Callable[[Where, list[Facts]], Handle]
    device: torch.device
    problem: str | None = None

    def __post_init__(self) -> None:
        if self.problem is not None:
            self.problem = f"{self.facts['kind']}: {self.problem}"
            self.facts = {"kind": self.facts["kind"], "problem": self.problem}


def all_reduce(tensors: Sequence[torch.Tensor], reduction: Reduction) -> Request:
    """Reduce tensors in place; the result is the tensors."""
    facts = _facts_of("allreduce", tensors, op=int(reduction.op), factors=list(reduction[1:]))

    def start(where: Where, _: list[Facts]) -> Handle:
        return Fusion(tensors).all_reduce(tensors, reduction, where)

    return Request(facts, start, tensors[0].device)


def broadcast(tensors: Sequence[torch.Tensor], root: int, process_set: ProcessSet) -> Request:
    """Give every rank the tensors of the global rank `root`, in place; the result is them."""
    ranks = process_set.ranks or []
    facts = _facts_of("broadcast", tensors, root=root)

    def start(where: Where, _: list[Facts]) -> Handle:
        return Fusion(tensors).broadcast(tensors, ranks.index(root), where)

    missing = None if root in ranks else f"root_rank {root} is not in {process_set}"
    return Request(facts, start, tensors[0].device, missing)


def all_gather(tensor: torch.Tensor) -> Request:
    """Concatenate the ranks' rows; the result is (rows of all, number of rows by rank)."""
    facts = _facts_of_rows("allgather", tensor)

    def start(where: Where, told: list[Facts]) -> Handle:
        rows = [rank_facts["rows"] for rank_facts in told]
        handle = _collectives.all_gather(tensor, rows, where)
        return handle.then(lambda output: (output, rows))

    scalar = "a scalar has no rows: give it a first dimension, tensor.reshape(1)"
    return Request(facts, start, tensor.device, None if tensor.dim() else scalar)


def all_to_all(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet
) -> Request:
    """Send `splits[r]` rows to each rank r; the result is (rows received, their number by rank)."""
    facts = _facts_of_rows("alltoall", tensor)
    rows, size = facts["rows"], process_set.group.size()
    given = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    problem = None
    try:
        sent = [rows // size] * size if given is None else [operator.index(part) for part in given]
    except TypeError:
        sent, problem = [], f"splits {given} must be whole numbers"
    facts["splits"] = sent

    def start(where: Where, told: list[Facts]) -> Handle:
        received = [rank_facts["splits"][where.group.rank()] for rank_facts in told]
        handle = _collectives.all_to_all(tensor, (sent, received), where)
        return handle.then(lambda output: (output, received))

    if tensor.dim() == 0:
        problem = "a scalar has no rows to send"
    elif given is None and rows % size:
        problem = f"{rows} rows can't be split evenly over {size} ranks: give splits"
    elif not problem and (len(sent) != size or sum(sent) != rows or min(sent) < 0):
        problem = f"splits {sent} must be {size} numbers that add up to {rows} rows"
    return Request(facts, start, tensor.device, problem)


def reduce_scatter(tensor: torch.Tensor, reduction: Reduction) -> Request:
    """Reduce, and keep this rank's rows, which are the result."""
    op, before, after = reduction
    facts = _facts_of("reducescatter", [tensor], op=int(op), factors=[before, after])

    def start(where: Where, _: list[Facts]) -> Handle:
        own = tensor
        if before != 1.0:
            own = tensor.clone()
            _collectives.scale_(own, before)
        size = where.group.size()
        handle = _collectives.reduce_scatter(own, op, where)
        return handle.then(lambda rows: _collectives.finish_(rows, op, after, size))

    problem = None
    if tensor.dim() == 0:
        problem = "a scalar has no rows: give it a first dimension"
    elif op not in (ReduceOp.Average, ReduceOp.Sum):
        problem = f"op={op.name} is not supported: use Average or Sum"
    return Request(facts, start, tensor.device, problem)


def of_joined(facts: Facts) -> Request:
    """The part of a rank that joined in an allreduce that another asks for: it changes nothing."""
    op = ReduceOp(facts["op"])
    tensors = [
        neutral(shape, dtype, facts["device"], op)
        for shape, dtype in zip(facts["shape"], facts["dtype"], strict=True)
    ]
    # Without the factors: they would change what is to change nothing.
    return all_reduce(tensors, Reduction(op))


def what_differs(told: Sequence[tuple[int, Facts]]) -> str | None:
    """Return what keeps these ranks, each with its facts, from running it together, or None."""
    for rank, facts in told:
        if "problem" in facts:
            return f"{facts['problem']} (rank {rank})"
    for name, word in _ALIKE.items():
        values = [(rank, facts.get(name)) for rank, facts in told]
        if any(value != values[0][1] for _, value in values):
            said = ", ".join(f"rank {rank} has {_short(value)}" for rank, value in values)
            return f"Mismatched {word}: {said}"
    return None


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own with the same values, in one piece."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def names_of_parts(name: str | None, count: int) -> list[str | None]:
    """A name for each of several operations that are begun under one."""
    if name is None or count == 1:
        return [name] * count
    return [f"{name}.{part}" for part in range(count)]


def _facts_of(kind: str, tensors: Sequence[torch.Tensor], **more: Any) -> Facts:
    return {
        "kind": kind,
        "device": _device_of(tensors),
        "dtype": [dtype_name(tensor.dtype) for tensor in tensors],
        "shape": [list(tensor.shape) for tensor in tensors],
        **more,
    }


def _facts_of_rows(kind: str, tensor: torch.Tensor) -> Facts:
    return {
        "kind": kind,
        "device": tensor.device.type,
        "dtype": dtype_name(tensor.dtype),
        "rest": list(tensor.shape[1:]),
        "rows": tensor.shape[0] if tensor.dim() else 0,
    }


def _device_of(tensors: Sequence[torch.Tensor]) -> str:
    kinds = sorted({tensor.device.type for tensor in tensors})
    if len(kinds) > 1:
        raise HorovodInternalError(f"tensors of one group are on {' and '.join(kinds)}")
    return kinds[0] if kinds else "cpu"


def _short(value: Any) -> str:
    text = str(value[0] if isinstance(value, list) and len(value) == 1 else value)
    return text if len(text) < 200 else f"{text[:200]}..."
