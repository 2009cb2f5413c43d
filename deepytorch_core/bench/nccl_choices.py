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

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import timing
from deepytorch_core.bench.job import BenchError, Run, format_size, parse_sizes
from deepytorch_core.bench.ops import OPERATIONS, Collective
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
"""A choice must win so much over NCCL's own, as all that deepytorch chooses."""
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
        """Return what torchrun would say of the rank, and that NCCL is stock."""
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
class NcclCandidate:
    """An algorithm with a protocol, by the table's names."""

    algorithm: str
    protocol: str


@dataclass(frozen=True)
class NcclTrial:
    """A candidate for `op` of `num_bytes`, as nccl-tests counts them."""

    op: str
    num_bytes: int
    candidate: NcclCandidate

    @property
    def case(self) -> tuple[str, int]:
        return self.op, self.num_bytes


@dataclass(frozen=True)
class Found:
    """How a candidate compares with NCCL's own choice."""

    trial: NcclTrial
    comparison: timing.TimeComparison

    @property
    def is_worth_it(self) -> bool:
        return self.comparison.speedup >= LEAST_GAIN and self.comparison.spread[0] > 1.0


Bind = Callable[[Collective, int], timing.Call]
"""Makes the call of an operation of that many bytes."""


class Communicators(Protocol):
    """The communicators that `measure` compares."""

    own: Bind
    """NCCL chooses."""

    def choosing(self, candidate: NcclCandidate) -> AbstractContextManager[Bind]:
        """With the candidate where NCCL offers it, for as long as the context is open."""
        ...


def trials(cases: Sequence[tuple[str, int]]) -> list[NcclTrial]:
    """Every candidate of every case (operation, bytes)."""
    return [
        NcclTrial(op, num_bytes, NcclCandidate(algorithm, protocol))
        for op, num_bytes in cases
        for algorithm in CANDIDATES[op]
        for protocol in nccl_table.PROTOCOLS
    ]


def measure(
    tried: Sequence[NcclTrial],
    communicators: Communicators,
    clock: timing.Clock,
    ranks: timing.Agreement,
) -> list[Found]:
    """Each trial against NCCL's own choice, in turns.

    Runs on every rank with equal trials; what it returns is equal too.
    """
    found: list[Found] = []
    for candidate in dict.fromkeys(trial.candidate for trial in tried):
        with communicators.choosing(candidate) as bind:
            for trial in tried:
                if trial.candidate != candidate:
                    continue
                op = OPERATIONS[trial.op]
                calls = (bind(op, trial.num_bytes), communicators.own(op, trial.num_bytes))
                blocks = timing.sample(calls, clock=clock, ranks=ranks, budget_s=_BUDGET_S)
                found.append(Found(trial, timing.compare(blocks)))
    return found


def best(found: Iterable[Found]) -> list[Found]:
    """The fastest of each case that is worth it, none where NCCL's own choice is to stay."""
    chosen: dict[tuple[str, int], Found] = {}
    for result in found:
        before = chosen.get(result.trial.case)
        if result.is_worth_it and (before is None or _gain(result) > _gain(before)):
            chosen[result.trial.case] = result
    return list(chosen.values())


def _gain(found: Found) -> float:
    return found.comparison.speedup


def settle(
    cases: Sequence[tuple[str, int]],
    communicators: Communicators,
    clock: timing.Clock,
    ranks: timing.Agreement,
) -> tuple[list[Found], list[Found]]:
    """Return what all trials gave, and each case's best that a second measurement confirms.

    The best of many is often the luckiest. Runs on every rank with equal cases.
    """
    found = measure(trials(cases), communicators, clock, ranks)
    again = measure([result.trial for result in best(found)], communicators, clock, ranks)
    return found, best(again)


def entries(
    cases: Iterable[tuple[str, int]], chosen: Iterable[Found], *, nodes: int, ranks: int
) -> list[Entry]:
    """The table: a choice holds from its size up to the next one measured, the last up to twice."""
    choices = {result.trial.case: result.trial.candidate for result in chosen}
    table: list[Entry] = []
    sizes: dict[str, list[int]] = {}
    for op, size in sorted(cases):
        sizes.setdefault(op, []).append(size)
    for op, measured in sizes.items():
        for size, following in zip(measured, [*measured[1:], 2 * measured[-1]], strict=True):
            candidate = choices.get((op, size))
            if candidate is None:
                continue
            entry = Entry(
                collective=op,
                first_bytes=size,
                last_bytes=following - 1,
                algorithm=candidate.algorithm,
                protocol=candidate.protocol,
                nodes=nodes,
                ranks=ranks,
            )
            table.append(entry)
    return table


def record(found: Sequence[Found], chosen: Sequence[Found], *, nodes: int, ranks: int) -> Record:
    """Return a record of what was found, and the table of what was chosen."""
    cases = dict.fromkeys(result.trial.case for result in found)
    table = entries(cases, chosen, nodes=nodes, ranks=ranks)
    return {
        "bench": "nccl",
        "world_size": ranks,
        "nodes": nodes,
        "rows": [
            {
                "op": result.trial.op,
                "bytes": result.trial.num_bytes,
                "algorithm": result.trial.candidate.algorithm,
                "protocol": result.trial.candidate.protocol,
                "time_us": round(result.comparison.time_us, 2),
                "baseline_time_us": round(result.comparison.baseline_time_us, 2),
                "speedup": round(result.comparison.speedup, 3),
                "speedup_spread": [round(value, 3) for value in result.comparison.spread],
            }
            for result in found
        ],
        "choices": [dataclasses.asdict(entry) for entry in table],
    }


def lines(result: Record) -> Iterator[str]:
    """A line for each case: NCCL's own time, each candidate against it, and what is chosen."""
    chosen = {
        (choice["collective"], choice["first_bytes"]): f"{choice['algorithm']} {choice['protocol']}"
        for choice in result["choices"]
    }
    for case in dict.fromkeys((row["op"], row["bytes"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["op"], row["bytes"]) == case]
        own = statistics.median(row["baseline_time_us"] for row in rows)
        others = ", ".join(
            f"{row['algorithm']} {row['protocol']} {row['speedup']:.2f}x" for row in rows
        )
        name = f"{case[0]:<14} {format_size(case[1]):>5}"
        yield f"{name}  NCCL {own:10.1f} us  {others}: {chosen.get(case, 'NCCL chooses')}"
