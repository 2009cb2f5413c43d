"""A rank that only gives keeps its memory as it is: it may be read-only, or overlap itself.

What ranks get is what gloo gives them for a dense copy. Gloo itself reads memory that is not dense
in another order, and writes to that of a reduce's other ranks.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepytorch_core.testing import spawn_ranks

BACKEND = "deepytorch"
Group = dist.ProcessGroup

# One that goes in one step, and one that takes many.
ROWS = [4, 3000]
COLUMNS = 30


def read_only(count: int) -> torch.Tensor:
    """Whole numbers in a mapping that only reads: a write to it is the process's end."""
    numbers = torch.arange(count, dtype=torch.float32) % 97
    with tempfile.TemporaryFile() as file:
        file.write(numbers.numpy().tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return torch.frombuffer(mapped, dtype=torch.float32)


LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "dense and read-only": lambda rows: read_only(rows * COLUMNS).view(rows, COLUMNS),
    "transposed and read-only": lambda rows: read_only(rows * COLUMNS).view(COLUMNS, rows).t(),
    "a read-only file's columns": lambda rows: read_only(2 * rows * COLUMNS).view(rows, -1)[:, ::2],
    "expanded": lambda rows: torch.arange(float(COLUMNS)).expand(rows, COLUMNS),
    "one number": lambda rows: torch.tensor(3.0).expand(rows, COLUMNS),
    "windows that overlap": lambda rows: torch.arange(float(rows + COLUMNS)).unfold(0, COLUMNS, 1)[
        :rows
    ],
    "strided": lambda rows: torch.arange(2.0 * rows * COLUMNS).view(rows, -1)[:, ::2],
    "lazily negated": lambda rows: (
        torch.complex(torch.ones(rows, COLUMNS), torch.ones(1)).conj().imag
    ),
}


def broadcast(group: Group, mine: torch.Tensor, asynchronous: bool) -> list[torch.Tensor]:
    root = group.size() - 1
    tensor = mine if group.rank() == root else torch.full(mine.shape, -1.0)
    done(dist.broadcast(tensor, group=group, group_src=root, async_op=asynchronous))
    return [tensor]


def reduce(group: Group, mine: torch.Tensor, asynchronous: bool) -> list[torch.Tensor]:
    tensor = mine.clone() if group.rank() == 0 else mine
    done(dist.reduce(tensor, group=group, group_dst=0, async_op=asynchronous))
    return [tensor] if group.rank() == 0 else []


def scatter(group: Group, mine: torch.Tensor, asynchronous: bool) -> list[torch.Tensor]:
    output = torch.full(mine.shape, -1.0)
    parts = [mine] * group.size() if group.rank() == 0 else None
    done(dist.scatter(output, parts, group=group, group_src=0, async_op=asynchronous))
    return [output]


def gather(group: Group, mine: torch.Tensor, asynchronous: bool) -> list[torch.Tensor]:
    outputs = [torch.full(mine.shape, -1.0) for _ in range(group.size())]
    parts = outputs if group.rank() == 0 else None
    done(dist.gather(mine, parts, group=group, group_dst=0, async_op=asynchronous))
    return outputs


def all_gather(group: Group, mine: torch.Tensor, asynchronous: bool) -> list[torch.Tensor]:
    outputs = [torch.full(mine.shape, -1.0) for _ in range(group.size())]
    done(dist.all_gather(outputs, mine, group=group, async_op=asynchronous))
    whole = torch.zeros(group.size() * mine.shape[0], COLUMNS)
    done(dist.all_gather_into_tensor(whole, mine, group=group, async_op=asynchronous))
    return [*outputs, whole]


def reduce_scatter(group: Group, mine: torch.Tensor, asynchronous: bool) -> list[torch.Tensor]:
    output, part = torch.zeros(mine.shape), torch.zeros(mine.shape[0] // group.size(), COLUMNS)
    parts = [mine] * group.size()
    done(dist.reduce_scatter(output, parts, group=group, async_op=asynchronous))
    whole = mine[: part.shape[0] * group.size()]
    done(dist.reduce_scatter_tensor(part, whole, group=group, async_op=asynchronous))
    return [output, part]


def all_to_all(group: Group, mine: torch.Tensor, asynchronous: bool) -> list[torch.Tensor]:
    outputs = [torch.zeros(mine.shape) for _ in range(group.size())]
    done(dist.all_to_all(outputs, [mine] * group.size(), group=group, async_op=asynchronous))
    rows = mine.shape[0] // group.size() * group.size()
    whole = torch.zeros(rows, COLUMNS)
    dense = mine[:rows].contiguous()  # gloo refuses others
    done(dist.all_to_all_single(whole, dense, group=group, async_op=asynchronous))
    return [*outputs, whole]


def send(group: Group, mine: torch.Tensor, asynchronous: bool) -> list[torch.Tensor]:
    received = torch.zeros(mine.shape)
    if group.rank() == 0:
        done(dist.isend(mine, group=group, group_dst=1))
    elif group.rank() == 1:
        done(dist.irecv(received, group=group, group_src=0))
    return [received]


def done(work: Any) -> None:
    if work is not None:
        work.wait()


COLLECTIVES = [broadcast, reduce, scatter, gather, all_gather, reduce_scatter, all_to_all]


def gives(rank: int, world_size: int, cases: list[str]) -> None:
    gloo = dist.new_group(backend="gloo")
    ours = dist.group.WORLD
    assert ours is not None
    dist.barrier()  # who has no part in a case would leave while others still connect to it
    for case_name in cases:
        case = globals()[case_name]
        for name, made in LAYOUTS.items():
            for rows in ROWS:
                label = f"{case_name} of {rows} rows, {name}"
                mine = made(rows)
                dense = mine.clone(memory_format=torch.contiguous_format)
                expected = case(gloo, dense.clone(), False)
                version = mine._version
                for asynchronous in (False, True):
                    found = case(ours, mine, asynchronous)
                    assert mine._version == version, label
                    assert torch.equal(mine, dense), label
                    for result, other in zip(found, expected, strict=True):
                        assert torch.equal(result, other), label


def test_givers_keep_their_memory() -> None:
    spawn_ranks(gives, 3, [each.__name__ for each in (*COLLECTIVES, send)], backend=BACKEND)


def test_givers_keep_their_memory_between_nodes() -> None:
    """But for messages, which are gloo's there: it refuses what is not dense."""
    nodes = {"DEEPYTORCH_NODE_ID": "a,b,a"}
    names = [each.__name__ for each in COLLECTIVES]
    spawn_ranks(gives, 3, names, backend=BACKEND, env=nodes)


def versions(group: Group) -> list[int]:
    """How often outputs that are not dense count as written to, as graphs see it."""

    def transposed(rows: int) -> torch.Tensor:
        return torch.ones(5, rows).t()

    size, is_root = group.size(), group.rank() == 0
    share, whole, dense = transposed(3), transposed(3 * size), [torch.ones(3, 5)] * size
    parts = [transposed(3) for _ in range(size)]
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(share, group=group),
        lambda: dist.broadcast(share, group=group, group_src=0),
        lambda: dist.reduce(share, group=group, group_dst=0),
        lambda: dist.scatter(share, parts if is_root else None, group=group, group_src=0),
        lambda: dist.gather(share, parts if is_root else None, group=group, group_dst=0),
        lambda: dist.all_gather(parts, share, group=group),
        lambda: dist.reduce_scatter(share, parts, group=group),
        lambda: dist.reduce_scatter_tensor(share, whole, group=group),
        lambda: dist.all_to_all(parts, dense, group=group),
    ]
    counted = []
    for call in calls:
        tensors = [share, whole, *parts]
        before = [tensor._version for tensor in tensors]
        call()
        counted += [tensor._version - then for tensor, then in zip(tensors, before, strict=True)]
    return counted


def stand_ins_and_autograd(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    gloo = dist.new_group(backend="gloo")
    assert dist.group.WORLD is not None
    return versions(dist.group.WORLD), versions(gloo)


def test_autograd_hears_of_stand_ins_what_it_hears_of_gloo() -> None:
    for ours, theirs in spawn_ranks(stand_ins_and_autograd, 2, backend=BACKEND):
        assert ours == theirs


def saved_for_backward(rank: int, world_size: int) -> torch.Tensor:
    """A sum into a transposed tensor that a graph has saved: as stock, without a complaint."""
    weight = torch.ones(4, 3, requires_grad=True)
    saved = torch.ones(3, 4).t()
    loss = (weight * saved).sum()
    with torch.no_grad():
        dist.all_reduce(saved)
    loss.backward()
    assert weight.grad is not None
    return weight.grad


def test_a_graph_goes_on_after_its_tensor_was_summed() -> None:
    for grad in spawn_ranks(saved_for_backward, 2, backend=BACKEND):
        assert torch.equal(grad, torch.full((4, 3), 2.0))
