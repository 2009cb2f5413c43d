"""Ranks that disagree, in every operation and every way: an error on each that names both sides.

The buffers lie between guard bytes, plain or in registered memory. Whatever a rank asked for, no
byte of any rank may change, and the group must work as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.c10d import registered
from deepytorch_core.testing import spawn_ranks

BACKEND = "deepytorch"
WORLD_SIZE = 3
ODD_ONE = 1  # the rank that asks for something else
GUARD_BYTES = 64
FILLING, GUARD = 1, 0xA5
DELEGATED = torch.uint16  # no native reduction


@dataclass(frozen=True)
class Ask:
    """The call that one rank asks for; `count` is the elements of one part."""

    op: str
    count: int = 300
    dtype: torch.dtype = torch.float32
    reduce_op: Any = dist.ReduceOp.SUM
    root: int = 0
    extra: dict[int, int] = field(default_factory=dict)  # per peer: more elements are expected


class Buffers:
    """The tensors of one rank, each between guard bytes in a memory of its own."""

    def __init__(self, *, in_registered_memory: bool) -> None:
        self._allocate = registered.empty if in_registered_memory else torch.empty
        self._memories: list[torch.Tensor] = []

    def __call__(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = count * dtype.itemsize
        memory = self._allocate(num_bytes + 2 * GUARD_BYTES, dtype=torch.uint8).fill_(GUARD)
        memory[GUARD_BYTES : GUARD_BYTES + num_bytes] = FILLING
        self._memories.append(memory)
        return memory[GUARD_BYTES : GUARD_BYTES + num_bytes].view(dtype)

    def check_unchanged(self) -> None:
        for memory in self._memories:
            assert memory[:GUARD_BYTES].eq(GUARD).all(), "bytes before a buffer were written"
            assert memory[-GUARD_BYTES:].eq(GUARD).all(), "bytes after a buffer were written"
            assert memory[GUARD_BYTES:-GUARD_BYTES].eq(FILLING).all(), "a buffer was written"


def call(ask: Ask, rank: int, buffers: Buffers, asynchronous: bool) -> dist.Work | None:
    """Start what `ask` says on this rank."""
    count, dtype, root, size = ask.count, ask.dtype, ask.root, WORLD_SIZE
    lengths = [count + ask.extra.get(peer, 0) for peer in range(size)]

    def parts() -> list[torch.Tensor]:
        return [buffers(length, dtype) for length in lengths]

    def part() -> torch.Tensor:
        return buffers(count, dtype)

    is_root = rank == root
    options: dict[str, Any] = {"async_op": asynchronous}
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(part(), ask.reduce_op, **options),
        "reduce": lambda: dist.reduce(part(), root, ask.reduce_op, **options),
        "broadcast": lambda: dist.broadcast(part(), root, **options),
        "all_gather": lambda: dist.all_gather(parts(), part(), **options),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            buffers(count * size, dtype), part(), **options
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(part(), parts(), ask.reduce_op, **options),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            part(), buffers(count * size, dtype), ask.reduce_op, **options
        ),
        "gather": lambda: dist.gather(part(), parts() if is_root else None, root, **options),
        "scatter": lambda: dist.scatter(part(), parts() if is_root else None, root, **options),
        "all_to_all": lambda: dist.all_to_all(parts(), [part() for _ in range(size)], **options),
        "all_to_all_single": lambda: dist.all_to_all_single(
            buffers(sum(lengths), dtype),
            buffers(count * size, dtype),
            lengths,
            [count] * size,
            **options,
        ),
        "barrier": lambda: dist.barrier(**options),
    }
    work: dist.Work | None = calls[ask.op]()
    return work


REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
OPERATIONS = (
    *REDUCING,
    *("broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("all_to_all", "all_to_all_single"),
)


def disagreements(op: str) -> Iterator[tuple[Ask, Ask]]:
    """Yield what all ranks but one ask for, and what that one does."""
    usual = Ask(op)
    yield usual, replace(usual, count=301)
    yield usual, replace(usual, count=0)
    yield usual, replace(usual, count=200_000)  # where another algorithm or chunk may be chosen
    yield replace(usual, count=200_000), usual
    yield usual, replace(usual, dtype=torch.int32)
    yield usual, replace(usual, dtype=torch.bfloat16)
    yield usual, Ask("barrier")
    yield usual, Ask("all_reduce" if op != "all_reduce" else "all_to_all_single")
    if op in REDUCING:
        yield usual, replace(usual, reduce_op=dist.ReduceOp.MAX)
        yield usual, replace(usual, dtype=DELEGATED)
    if op in ROOTED:
        yield usual, replace(usual, root=ODD_ONE)
    if op in ("all_gather", "all_to_all", "all_to_all_single"):
        for peer in range(WORLD_SIZE):
            if peer == ODD_ONE and op == "all_gather":
                continue  # refused at once: its one input tells what it gets from itself
            # It expects another size from `peer`.
            yield usual, replace(usual, extra={peer: 5})
            yield usual, replace(usual, extra={peer: -300})


def works(world_size: int) -> None:
    for count in (3, 200_000):
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((count,), float(world_size)))


def disagree(rank: int, world_size: int, op: str) -> list[tuple[str, str]]:
    """Go through all disagreements in `op`; returns what each is called, and this rank's error."""
    works(world_size)
    found = []
    for usual, odd in disagreements(op):
        for asynchronous in (False, True):
            # Everybody's buffers plain; one rank's registered; all but one rank's registered.
            for registered_ranks in ((), (ODD_ONE,), (0, 2)):
                buffers = Buffers(in_registered_memory=rank in registered_ranks)
                ask = odd if rank == ODD_ONE else usual
                name = f"{usual} / {odd}, {asynchronous=}, {registered_ranks=}"
                text = f"no error: {name}"
                try:
                    work = call(ask, rank, buffers, asynchronous)
                    if work is not None:
                        work.wait()
                except dist.DistBackendError as error:
                    text = str(error)
                except ValueError as error:
                    # Refused by its own rank alone would leave the others waiting.
                    text = f"not an error of all ranks: {error}: {name}"
                buffers.check_unchanged()
                found.append((name, text))
        works(world_size)
    return found


@pytest.mark.parametrize("op", OPERATIONS)
def test_disagreement_is_an_error_on_every_rank_that_names_both_sides(op: str) -> None:
    results = spawn_ranks(disagree, WORLD_SIZE, op, backend=BACKEND)
    for rank, found in enumerate(results):
        for name, text in found:
            named = {int(number) for number in re.findall(r"rank (\d)", text)}
            assert {rank, ODD_ONE} <= named, f"rank {rank}: {name}: {text}"
            to_itself = f"rank {ODD_ONE} sends" in text and f"to rank {ODD_ONE}," in text
            assert len(named) >= 2 or to_itself, f"rank {rank}: {name}: {text}"
