"""The interleaved sampler: two arms, timed in blocks in the order A-B-B-A, in the same run.

Interleaving lets slow drift of the machine (frequency, neighbours, page cache) hit both arms alike.
The order A-B-B-A also cancels a drift that is linear in time. A block is one untimed call, which
absorbs the change of arm, then some timed calls back to back. Blocks are short and many. A block's
start in the scheduler's cycle can fix the block's pace to its end, on machines with few cores by a
factor. Neighbouring blocks are compared, so the spread says how far single comparisons lie apart.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MIN_PAIRS = 8
NUM_PROBES = 3

OURS, BASELINE = 0, 1
Call = Callable[[], object]


class Clock(Protocol):
    """Times `repetitions` calls back to back; one time in microseconds for each."""

    def __call__(self, call: Call, repetitions: int) -> list[float]: ...


class Agreement(Protocol):
    """The ranks' common steps; the methods are called by all ranks in the same order."""

    def barrier(self) -> None: ...

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over the ranks."""
        ...


@dataclass(frozen=True)
class Pace:
    """How long blocks get (`block_us`), and at most how many pairs and calls in a block."""

    block_us: float
    max_pairs: int
    max_repetitions: int


CALLS = Pace(block_us=2000.0, max_pairs=100, max_repetitions=50)
# A replay is many calls, and a GPU's clock has no scheduler to average out.
REPLAYS = Pace(block_us=3000.0, max_pairs=25, max_repetitions=20)


@dataclass(frozen=True)
class TimeComparison:
    """Medians in microseconds over all samples, and how they compare.

    `speedup` is the median of the ratios of neighbouring blocks (baseline / ours, > 1 is faster),
    `spread` their quartiles, `num_blocks` how many blocks each arm had.
    """

    time_us: float
    baseline_time_us: float
    speedup: float
    spread: tuple[float, float]
    num_blocks: int


@dataclass(frozen=True)
class Schedule:
    """`num_pairs` blocks of each arm, `repetitions[arm]` timed calls in each."""

    num_pairs: int
    repetitions: tuple[int, ...]


def wall_clock(call: Call, repetitions: int) -> list[float]:
    """A `Clock` for calls that return when their work is done."""
    stamps = [time.perf_counter_ns()]
    for _ in range(repetitions):
        call()
        stamps.append(time.perf_counter_ns())
    return [(end - start) / 1e3 for start, end in zip(stamps, stamps[1:], strict=False)]


def block_order(num_pairs: int) -> list[int]:
    """The arm of each block: ours, baseline, baseline, ours, ours, ..."""
    order: list[int] = []
    for pair in range(num_pairs):
        order += [OURS, BASELINE] if pair % 2 == 0 else [BASELINE, OURS]
    return order


def plan(
    probes_us: Sequence[float], *, iterations: int, budget_s: float, pace: Pace = CALLS
) -> Schedule:
    """Short blocks, and as many pairs as fit `budget_s`, given the time of one call per arm."""
    repetitions = tuple(
        iterations or int(min(max(pace.block_us / max(probe_us, 1.0), 1), pace.max_repetitions))
        for probe_us in probes_us
    )
    # One call more per block for the untimed one.
    calls = zip(repetitions, probes_us, strict=True)
    pair_us = sum((count + 1) * probe_us for count, probe_us in calls)
    affordable = budget_s * 1e6 / max(pair_us, 1.0)
    return Schedule(int(min(max(affordable, MIN_PAIRS), pace.max_pairs)), repetitions)


def enqueueing(call_us: float) -> Schedule:
    """Blocks for the CPU's time of calls that take `call_us` on a GPU; its queue never fills."""
    depth = int(min(max(CALLS.block_us / max(call_us, 1.0), 4), 16))
    return Schedule(MIN_PAIRS, (depth, depth))


def sample(
    calls: tuple[Call, Call],
    *,
    clock: Clock,
    ranks: Agreement,
    iterations: int = 0,
    budget_s: float = 1.0,
    pace: Pace = CALLS,
) -> list[list[list[float]]]:
    """Times both arms; returns [arm][block][repetition] in microseconds, the slowest rank's.

    `calls` are (ours, baseline). `iterations` fixes the timed calls per block, 0 adapts them; the
    number of blocks follows `budget_s`. Runs on every rank with equal arguments.
    """
    probes = probe(calls, clock=clock, ranks=ranks)
    schedule = plan(probes, iterations=iterations, budget_s=budget_s, pace=pace)
    return follow(schedule, calls, clock=clock, ranks=ranks)


def probe(calls: Sequence[Call], *, clock: Clock, ranks: Agreement) -> list[float]:
    """About how long one of each of `calls` takes, in microseconds; the slowest rank's."""
    return ranks.maximum([min(clock(call, NUM_PROBES)[1:]) for call in calls])


def follow(
    schedule: Schedule, calls: tuple[Call, Call], *, clock: Clock, ranks: Agreement
) -> list[list[list[float]]]:
    """Times both arms in the blocks of `schedule`; returns what `sample` does."""
    blocks: list[list[list[float]]] = [[], []]
    for arm in block_order(schedule.num_pairs):
        ranks.barrier()
        calls[arm]()
        blocks[arm].append(clock(calls[arm], schedule.repetitions[arm]))
    flat = ranks.maximum([t for arm_blocks in blocks for block in arm_blocks for t in block])
    slowest = iter(flat)
    return [[[next(slowest) for _ in block] for block in arm_blocks] for arm_blocks in blocks]


def divided(blocks: Sequence[Sequence[Sequence[float]]], count: int) -> list[list[list[float]]]:
    """Return `sample`'s result for one of the `count` calls in each that it timed."""
    return [[[value / count for value in block] for block in arm_blocks] for arm_blocks in blocks]


def compare(blocks: Sequence[Sequence[Sequence[float]]]) -> TimeComparison:
    """Medians, the ratio and its spread from what `sample` returned."""
    medians = [
        statistics.median([value for block in arm_blocks for value in block])
        for arm_blocks in blocks
    ]
    ratios = [
        statistics.median(baseline) / statistics.median(ours)
        for ours, baseline in zip(blocks[OURS], blocks[BASELINE], strict=True)
    ]
    return TimeComparison(
        time_us=medians[OURS],
        baseline_time_us=medians[BASELINE],
        speedup=statistics.median(ratios),
        spread=quartiles(ratios),
        num_blocks=len(ratios),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The 25th and 75th percentile, interpolated linearly between the ordered values."""
    if len(values) == 1:
        return values[0], values[0]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper
