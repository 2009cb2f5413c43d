"""Programs that hypothesis makes up: every operation, type, shape and layout, exact results.

The parent draws a program, the warm workers of a world size run it. Every rank knows what every
rank puts in, so it works out by itself what must come out. Gloo is asked as well where it has the
operation. Values are small whole numbers, so that results are exact in every type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deepytorch_core.c10d import registered
from deepytorch_core.testing import spawn_ranks

BACKEND = "deepytorch"
GAP = 77  # fills what lies between and around a tensor's elements
GLOO_TYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64")
GLOO_REDUCE_OPS = ("SUM", "PRODUCT", "MIN", "MAX")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
EXCHANGES = ("all_to_all", "all_to_all_single")
OPERATIONS = (
    *REDUCING,
    *EXCHANGES,
    *("broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
)
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
MOVED_ONLY = ("bool", "complex64", "complex128", "uint16")
LAYOUTS = ("plain", "shifted", "strided", "transposed", "registered")


@dataclass(frozen=True)
class Step:
    """One operation. `lengths[a][b]` replaces the first dimension of what `a` sends to `b`."""

    op: str
    dtype: str
    reduce_op: str
    shape: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...] | None  # None: all parts have `shape`
    root: int
    layouts: tuple[str, ...]  # by rank
    asynchronous: bool
    wait_later: bool

    def part_shape(self, sender: int, receiver: int) -> tuple[int, ...]:
        if self.lengths is None:
            return self.shape
        # all_gather sends everybody the same.
        row = self.lengths[sender]
        return (row[receiver if self.op in EXCHANGES else 0], *self.shape[1:])


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    small = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    # Around thresholds and chunks of the algorithms, and past them.
    long = st.sampled_from([(1023,), (4097,), (3, 701), (20011,), (70001,)])
    return st.one_of(small, small, long)


@st.composite
def steps(draw: st.DrawFn, size: int) -> Step:
    op = draw(st.sampled_from(OPERATIONS))
    dtype = draw(st.sampled_from(FLOATS + INTEGERS + (() if op in REDUCING else MOVED_ONLY)))
    reduce_ops = ["SUM", "PRODUCT", "MIN", "MAX"]
    reduce_ops += ["AVG", "PREMUL_SUM"] if dtype in FLOATS else ["BAND", "BOR", "BXOR"]
    shape = draw(shapes())
    lengths = None
    if op in (*EXCHANGES, "all_gather") and draw(st.booleans()):
        shape = shape or (1,)
        scale = draw(st.sampled_from([1, 1, 997]))
        row = st.lists(st.integers(0, 5), min_size=size, max_size=size)
        rows = draw(st.lists(row, min_size=size, max_size=size))
        lengths = tuple(tuple(scale * length for length in row) for row in rows)
        shape = (shape[0], *(min(length, 5) for length in shape[1:]))
    if op == "all_to_all_single":
        shape = shape or (1,)
    return Step(
        op=op,
        dtype=dtype,
        reduce_op=draw(st.sampled_from(reduce_ops)),
        shape=shape,
        lengths=lengths,
        root=draw(st.integers(0, size - 1)),
        layouts=tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=size, max_size=size))),
        asynchronous=draw(st.booleans()),
        wait_later=draw(st.booleans()),
    )


class Tensors:
    """Makes the tensors of one rank in its layout, and checks what lies between their elements."""

    def __init__(self, layout: str, dtype: torch.dtype) -> None:
        self._layout = layout
        self._dtype = dtype
        self._gaps: list[torch.Tensor] = []

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = self._dtype
        if self._layout == "shifted":
            storage = torch.full((math.prod(shape) + 2,), GAP).to(dtype)
            self._gaps += [storage[:1], storage[-1:]]
            return storage[1:-1].view(shape)
        if self._layout == "strided":
            storage = torch.full((*shape, 2), GAP).to(dtype)
            self._gaps.append(storage[..., 1])
            return storage[..., 0]
        if self._layout == "transposed":
            storage = torch.empty(shape[::-1], dtype=dtype)
            return storage.permute(tuple(reversed(range(len(shape)))))
        if self._layout == "registered":
            return registered.empty(shape, dtype=dtype)
        return torch.empty(shape, dtype=dtype)

    def filled(self, value: torch.Tensor) -> torch.Tensor:
        return self.empty(tuple(value.shape)).copy_(value)

    def check_gaps(self) -> None:
        for gap in self._gaps:
            assert torch.equal(gap, torch.full_like(gap, GAP)), "written beside a tensor"


class World:
    """The values that every rank puts into a step, and what must come out on one of them."""

    def __init__(self, step: Step, number: int, size: int) -> None:
        self.step = step
        self.size = size
        self.dtype: torch.dtype = getattr(torch, step.dtype)
        # Powers of two and zero for products.
        self._limit = 2 if step.reduce_op == "PRODUCT" else 4
        draw = torch.Generator().manual_seed(number)
        self.parts = [[self._values(draw, a, b) for b in range(size)] for a in range(size)]

    def _values(self, draw: torch.Generator, sender: int, receiver: int) -> torch.Tensor:
        shape = self.step.part_shape(sender, receiver)
        numbers = torch.randint(-self._limit, self._limit + 1, shape, generator=draw)
        return (numbers > 0 if self.dtype == torch.bool else numbers).to(self.dtype)

    def reduced(self, receiver: int) -> torch.Tensor:
        """All ranks' parts for `receiver`, reduced: in float64 or int64, then rounded once."""
        name = self.step.reduce_op
        wide = torch.float64 if self.dtype.is_floating_point else torch.int64
        stack = torch.stack([row[receiver] for row in self.parts]).to(wide)
        if name in ("SUM", "AVG", "PREMUL_SUM"):
            divisor = {"SUM": 1, "AVG": self.size, "PREMUL_SUM": 2}[name]
            total = stack.sum(0)
            result = total if divisor == 1 else total / divisor
        elif name == "PRODUCT":
            result = stack.prod(0)
        elif name in ("MIN", "MAX"):
            result = stack.amin(0) if name == "MIN" else stack.amax(0)
        else:
            fold = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
            result = stack[0]
            for row in stack[1:]:
                result = fold[name](result, row)
        return result.to(self.dtype)

    @property
    def is_exact(self) -> bool:
        return self.step.op not in REDUCING or self.step.reduce_op != "AVG"


def reduce_op_of(step: Step) -> Any:
    if step.reduce_op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(0.5)
    return getattr(dist.ReduceOp, step.reduce_op)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts)


Results = list[tuple[torch.Tensor, torch.Tensor]]  # found and expected


def start(
    world: World, rank: int, tensors: Tensors, group: dist.ProcessGroup, asynchronous: bool
) -> tuple[dist.Work | None, Results]:
    """Start the step on this rank; returns its work and what to compare when that is done."""
    step, size, parts = world.step, world.size, world.parts
    root, is_root = step.root, rank == step.root
    options: dict[str, Any] = {"group": group, "async_op": asynchronous}
    reducing = {"op": reduce_op_of(step)} if step.op in REDUCING else {}
    # Operations with one buffer per rank take the part that the rank has for itself.
    mine = [
        parts[peer][peer if step.op not in (*EXCHANGES, "all_gather") else 0]
        for peer in range(size)
    ]

    def tensor_of(value: torch.Tensor) -> torch.Tensor:
        return tensors.filled(value)

    def outputs(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensors.empty(tuple(value.shape)) for value in values]

    results: Results = []

    def all_reduce() -> Any:
        tensor = tensor_of(parts[rank][0])
        results.append((tensor, world.reduced(0)))
        return dist.all_reduce(tensor, **reducing, **options)

    def reduce() -> Any:
        tensor = tensor_of(parts[rank][0])
        if is_root:
            results.append((tensor, world.reduced(0)))
        return dist.reduce(tensor, group_dst=root, **reducing, **options)

    def reduce_scatter() -> Any:
        (output,) = outputs([parts[rank][rank]])
        results.append((output, world.reduced(rank)))
        inputs = [tensor_of(part) for part in parts[rank]]
        results.extend(zip(inputs, parts[rank], strict=True))
        return dist.reduce_scatter(output, inputs, **reducing, **options)

    def reduce_scatter_tensor() -> Any:
        (output,) = outputs([parts[rank][rank]])
        results.append((output, world.reduced(rank)))
        whole = joined(parts[rank])
        source = tensor_of(whole)
        results.append((source, whole))
        return dist.reduce_scatter_tensor(output, source, **reducing, **options)

    def broadcast() -> Any:
        tensor = tensor_of(mine[rank])
        results.append((tensor, mine[root]))
        return dist.broadcast(tensor, group_src=root, **options)

    def all_gather() -> Any:
        gathered = outputs(mine)
        results.extend(zip(gathered, mine, strict=True))
        source = tensor_of(mine[rank])
        results.append((source, mine[rank]))
        return dist.all_gather(gathered, source, **options)

    def all_gather_into_tensor() -> Any:
        whole = joined(mine)
        (output,) = outputs([whole])
        results.append((output, whole))
        return dist.all_gather_into_tensor(output, tensor_of(mine[rank]), **options)

    def gather() -> Any:
        gathered = outputs(mine) if is_root else None
        results.extend(zip(gathered or [], mine, strict=False))
        return dist.gather(tensor_of(mine[rank]), gathered, group_dst=root, **options)

    def scatter() -> Any:
        (output,) = outputs([parts[root][rank]])
        results.append((output, parts[root][rank]))
        inputs = [tensor_of(part) for part in parts[root]] if is_root else None
        return dist.scatter(output, inputs, group_src=root, **options)

    def all_to_all() -> Any:
        incoming = [parts[peer][rank] for peer in range(size)]
        received = outputs(incoming)
        results.extend(zip(received, incoming, strict=True))
        return dist.all_to_all(received, [tensor_of(part) for part in parts[rank]], **options)

    def all_to_all_single() -> Any:
        incoming = [parts[peer][rank] for peer in range(size)]
        whole = torch.cat(incoming)
        (output,) = outputs([whole])
        results.append((output, whole))
        splits: list[Any] = [None, None]
        if step.lengths is not None:
            splits = [[len(part) for part in side] for side in (incoming, parts[rank])]
        # Every backend refuses an input that is not contiguous.
        whole_input = tensor_of(torch.cat(parts[rank])).contiguous()
        return dist.all_to_all_single(output, whole_input, *splits, **options)

    calls: dict[str, Callable[[], Any]] = {
        call.__name__: call
        for call in (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, broadcast)
    }
    for call in (
        all_gather,
        all_gather_into_tensor,
        gather,
        scatter,
        all_to_all,
        all_to_all_single,
    ):
        calls[call.__name__] = call
    return calls[step.op](), results


def compare(results: Results, exact: bool, label: str) -> None:
    for found, expected in results:
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(
            found, expected, equal_nan=True, msg=lambda text: f"{label}: {text}", **tolerance
        )


def gloo_has(step: Step) -> bool:
    # torch 2.11's gloo has no all_to_all of lists.
    if step.dtype not in GLOO_TYPES or step.op == "all_to_all":
        return False
    if step.lengths is not None and step.op != "all_to_all_single":
        return False
    if not step.shape and step.op in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        return False
    return step.op not in REDUCING or step.reduce_op in GLOO_REDUCE_OPS


def run_program(rank: int, world_size: int, program: list[Step]) -> None:
    world_group = dist.group.WORLD
    assert world_group is not None
    gloo = dist.new_group(backend="gloo") if any(map(gloo_has, program)) else None
    checks: list[Callable[[], None]] = []
    for number, step in enumerate(program):
        world = World(step, number, world_size)
        tensors = Tensors(step.layouts[rank], world.dtype)
        work, results = start(world, rank, tensors, world_group, step.asynchronous)

        def check(
            work: Any = work,
            results: Results = results,
            tensors: Tensors = tensors,
            exact: bool = world.is_exact,
            label: str = f"step {number}",
        ) -> None:
            if work is not None:
                work.wait()
            compare(results, exact, label)
            tensors.check_gaps()

        checks.append(check)
        if not step.wait_later:
            check()
        if gloo is not None and gloo_has(step):
            work, results = start(world, rank, Tensors("plain", world.dtype), gloo, False)
            compare(results, world.is_exact, f"gloo's step {number}")
    for check in checks:
        check()


# Not the one that explains: each run of a failing program costs new workers.
PHASES = (Phase.generate, Phase.shrink)
EXAMPLES = {1: 15, 2: 40, 3: 20, 4: 20, 8: 8}


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(number, marks=[pytest.mark.extended] * (number in (3, 8)))
        for number in EXAMPLES
    ],
)
def test_programs(world_size: int) -> None:
    @settings(max_examples=EXAMPLES[world_size], phases=PHASES)
    @given(st.lists(steps(world_size), min_size=1, max_size=12))
    def run(program: list[Step]) -> None:
        spawn_ranks(run_program, world_size, program, backend=BACKEND)

    run()
