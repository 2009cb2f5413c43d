"""With which algorithm and protocol NCCL is fastest: what is measured, and the table of the best.

Each candidate takes turns with NCCL's own choice, see `nccl_ranks`. What wins becomes an entry of
the table that NCCL's tuner plugin goes by (`network.nccl_table`).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol

from deepytorch_core.bench import timing
from deepytorch_core.bench.job import BenchError, Run, format_size, parse_sizes
from deepytorch_core.bench.ops import OPERATIONS, Operation
from deepytorch_core.bench.record import Record
from deepytorch_core.network import nccl_table
from deepytorch_core.network.nccl_table import Entry

CANDIDATES = {
    "all_reduce": ("tree", "ring"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("ring",),
}
"""The algorithms of each operation that depend on no special hardware."""
DEFAULT_OPS = ("all_reduce", "all_gather", "reduce_scatter")
DEFAULT_SIZES = "16K:64M"
LEAST_GAIN = 1.03
"""What a choice must win over NCCL's own, as for all that deepytorch chooses."""
_BUDGET_S = 0.1  # for each candidate at each size


@dataclass(frozen=True, kw_only=True)
class ChoicesJob(Run):
    """`bench nccl`: ranks of stock NCCL with the tuner plugin, whose table they change."""

    WORKER: ClassVar[str] = "deepytorch_core.bench.nccl_ranks"

    ops: tuple[str, ...] = DEFAULT_OPS
    sizes: tuple[int, ...] = parse_sizes(DEFAULT_SIZES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline != "nccl" or self.device != "cuda":
            raise BenchError("the choices are NCCL's: they are measured on GPUs")
        if self.world_size < 2:
            raise BenchError(f"one rank has nothing to choose: --world-size {self.world_size}")
        check_ops(self.ops)
        if not (self.ops and self.sizes):
            raise BenchError("nothing to measure: --ops and --sizes need a value each")

    def environment(self, process: int, store_ports: Sequence[int]) -> dict[str, str]:
        """What torchrun would say of the rank, and that NCCL is stock."""
        seat = self.seats[process]
        return {
            "DEEPYTORCH_ENABLED": "0",
            "RANK": str(process),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(seat.local_rank),
            "LOCAL_WORLD_SIZE": str(sum(other.node == seat.node for other in self.seats)),
            "GROUP_RANK": str(seat.node),
        }


def check_ops(ops: Iterable[str]) -> None:
    """Raises BenchError for an operation that has no candidates."""
    for op in ops:
        if op not in CANDIDATES:
            raise BenchError(f"NCCL has no choices for {op!r}; known: {', '.join(CANDIDATES)}")


@dataclass(frozen=True)
class Candidate:
    """An algorithm with a protocol, by the table's names."""

    algorithm: str
    protocol: str


@dataclass(frozen=True)
class Found:
    """How a candidate compares with NCCL's own choice for `op` of `num_bytes`."""

    op: str
    num_bytes: int
    candidate: Candidate
    comparison: timing.Comparison

    @property
    def is_worth_it(self) -> bool:
        return self.comparison.speedup >= LEAST_GAIN and self.comparison.spread[0] > 1.0


Bind = Callable[[Operation, int], timing.Call]
"""Makes the call of an operation of that many bytes."""


class Communicators(Protocol):
    """What `measure` compares."""

    own: Bind
    """NCCL chooses."""

    def choosing(self, candidate: Candidate) -> AbstractContextManager[Bind]:
        """With the candidate where NCCL offers it, for as long as the context is open."""
        ...


def measure(
    cases: Sequence[tuple[str, int]],
    communicators: Communicators,
    clock: timing.Clock,
    ranks: timing.Agreement,
) -> list[Found]:
    """Every candidate of every case (operation, bytes) against NCCL's own choice.

    Runs on every rank with equal cases; what it returns is equal too.
    """
    found: list[Found] = []
    algorithms = dict.fromkeys(name for op, _ in cases for name in CANDIDATES[op])
    for algorithm in algorithms:
        for protocol in nccl_table.PROTOCOLS:
            candidate = Candidate(algorithm, protocol)
            with communicators.choosing(candidate) as bind:
                for name, num_bytes in cases:
                    if algorithm not in CANDIDATES[name]:
                        continue
                    op = OPERATIONS[name]
                    calls = (bind(op, num_bytes), communicators.own(op, num_bytes))
                    blocks = timing.sample(calls, clock=clock, ranks=ranks, budget_s=_BUDGET_S)
                    found.append(Found(name, num_bytes, candidate, timing.compare(blocks)))
    return found


def best(found: Iterable[Found]) -> dict[tuple[str, int], Found | None]:
    """The fastest of each case that is worth it, None where NCCL's own choice is to stay."""
    chosen: dict[tuple[str, int], Found | None] = {}
    for one in found:
        case = one.op, one.num_bytes
        before = chosen.setdefault(case, None)
        if one.is_worth_it and (before is None or _gain(one) > _gain(before)):
            chosen[case] = one
    return chosen


def _gain(found: Found) -> float:
    return found.comparison.speedup


def entries(chosen: dict[tuple[str, int], Found | None], *, nodes: int, ranks: int) -> list[Entry]:
    """The table: a choice holds from its size up to the next one measured, the last up to twice."""
    table: list[Entry] = []
    for op in dict.fromkeys(op for op, _ in chosen):
        sizes = sorted(size for other, size in chosen if other == op)
        for size, following in zip(sizes, [*sizes[1:], 2 * sizes[-1]], strict=True):
            one = chosen[op, size]
            if one is None:
                continue
            entry = Entry(
                collective=op,
                first_bytes=size,
                last_bytes=following - 1,
                algorithm=one.candidate.algorithm,
                protocol=one.candidate.protocol,
                nodes=nodes,
                ranks=ranks,
            )
            table.append(entry)
    return table


def record(found: Sequence[Found], *, nodes: int, ranks: int) -> Record:
    """What was found, and the table that follows from it."""
    table = entries(best(found), nodes=nodes, ranks=ranks)
    return {
        "bench": "nccl",
        "world_size": ranks,
        "nodes": nodes,
        "rows": [
            {
                "op": one.op,
                "bytes": one.num_bytes,
                "algorithm": one.candidate.algorithm,
                "protocol": one.candidate.protocol,
                "time_us": round(one.comparison.time_us, 2),
                "baseline_time_us": round(one.comparison.baseline_time_us, 2),
                "speedup": round(one.comparison.speedup, 3),
                "speedup_spread": [round(value, 3) for value in one.comparison.spread],
            }
            for one in found
        ],
        "choices": [dataclasses.asdict(entry) for entry in table],
    }


def lines(result: Record) -> Iterator[str]:
    """A line for each case: NCCL's own time, each candidate against it, and what is chosen."""
    chosen = {
        (one["collective"], one["first_bytes"]): f"{one['algorithm']} {one['protocol']}"
        for one in result["choices"]
    }
    for case in dict.fromkeys((row["op"], row["bytes"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["op"], row["bytes"]) == case]
        own = statistics.median(row["baseline_time_us"] for row in rows)
        others = ", ".join(
            f"{row['algorithm']} {row['protocol']} {row['speedup']:.2f}x" for row in rows
        )
        name = f"{case[0]:<14} {format_size(case[1]):>5}"
        yield f"{name}  NCCL {own:10.1f} us  {others}: {chosen.get(case, 'NCCL chooses')}"
