"""Forecasts a collective's cost on more nodes by a fitted, checked latency-and-bandwidth model.

The time of one operation is taken to be

    rounds * latency + messages * alpha + (volume - burst) * beta

The `rounds` wait for each other, and one rank sends the `messages` one after the other. The busiest
node's link carries `volume` bytes in one direction. This is Hockney's alpha-beta model with the
counts of Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication Operations in
MPICH", 2005). As LogP does (Culler et al., 1993), it tells two costs apart. All messages of a round
share the time on the wire, and every message costs the processor's overhead. A direct exchange is
thus one round of N - 1 messages. The latency and the burst, which is what an idle emulated link
lets through at once, are known; alpha and beta are fitted to the points of one run, by relative
error, for each arm. Other numbers of nodes have other counts, and the same alpha and beta.

| schedule | all_reduce: rounds | messages | volume of n bytes on N nodes of R ranks, P = N R |
|---|---|---|---|
| flat ring | 2 (P - 1) | one a round | 2 n (P - 1) / P for each ring edge that leaves a node |
| tree | 2 log2 N | one a round | 2 n (N - 1) / N |
| hierarchical, small | 1 | N - 1 | n (N - 1) |
| hierarchical, 2 nodes | 2 | 2 | n |
| hierarchical, 3 to 8 nodes | 3 | 3 (N - 1) | 2 n (N - 1) / N |
| hierarchical, more nodes | 1 + 2 (N - 1) | 3 (N - 1) | 2 n (N - 1) / N |

The hierarchical counts are those of the algorithms on CPUs. Their first round is the meeting of the
nodes, in which each tells all others what it was called with; small messages travel in it. An
all_gather and a reduce_scatter take half a ring, or the meeting and one direct exchange of half the
volume; a small all_gather says n / N to each other node. Trees are not for them. A flat ring's edge
leaves the node once where ranks are in blocks, from every rank where they are dealt out in turns.

It leaves out the work inside a node, which a pipeline hides while the link is the slower part. It
leaves out collisions in the network between nodes, and ranks that wait for a core, as on emulated
nodes with fewer cores than ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench.job import BenchError, format_size
from deepytorch_core.network.link import Link
from deepytorch_core.testing.emulation import Seat, Setting, seats

FLAT, TREE, HIERARCHICAL = "flat ring", "tree", "hierarchical"
SCHEDULES = (FLAT, TREE, HIERARCHICAL)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
_DIRECT_NODES = 8  # up to so many, nodes exchange their shares of an all_reduce directly
_SMALL_BYTES = 64 << 10  # what all nodes say to one together, where it travels in their meeting


@dataclass(frozen=True)
class JobShape:
    """A job's places: `leaving` is how many edges of the ring of ranks leave the busiest node."""

    nodes: int
    ranks: int
    leaving: int

    @classmethod
    def of(cls, places: Sequence[Seat]) -> JobShape:
        nodes = [seat.node for seat in places]
        leaving = [0] * (max(nodes) + 1)
        for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            leaving[here] += here != there
        return cls(len(leaving), len(nodes), max(leaving))


@dataclass(frozen=True)
class Counts:
    """The parts of one operation: see the table above."""

    rounds: float
    messages: float
    volume: float


def counts(schedule: str, op: str, num_bytes: int, shape: JobShape) -> Counts:
    """Return the counts of `op` in this schedule; `num_bytes` as nccl-tests counts."""
    halves = 2 if op == "all_reduce" else 1
    if schedule == FLAT:
        rounds: float = halves * (shape.ranks - 1)
        return Counts(rounds, rounds, rounds * num_bytes / shape.ranks * shape.leaving)
    others = shape.nodes - 1
    volume = halves * num_bytes * others / shape.nodes
    if schedule == TREE:
        rounds = halves * math.log2(shape.nodes)
        return Counts(rounds, rounds, volume)
    if _is_small(op, num_bytes, shape):
        return Counts(1, others, volume if op == "all_gather" else num_bytes * others)
    if op == "all_reduce" and shape.nodes > _DIRECT_NODES:
        return Counts(1 + 2 * others, 3 * others, volume)
    # With two nodes each one's sum goes to the other, and that is all.
    exchanges = 1 if shape.nodes == 2 else halves
    return Counts(1 + exchanges, (1 + exchanges) * others, volume)


def _is_small(op: str, num_bytes: int, shape: JobShape) -> bool:
    """Whether it travels in the meeting: csrc/tuner/choose.cpp's `is_small_between_nodes`."""
    others = 1 if op == "all_gather" else shape.nodes - 1
    return num_bytes * others <= _SMALL_BYTES


@dataclass(frozen=True)
class Model:
    """The costs of a message, a byte and a round.

    Attributes:
        alpha_us: microseconds that a message costs the rank that sends it.
        beta_us: microseconds a byte.
        latency_us: microseconds on the way, once a round.
        burst_bytes: what the idle link lets through at once.
    """

    alpha_us: float
    beta_us: float
    latency_us: float = 0.0
    burst_bytes: int = 0

    def time_us(self, schedule: str, op: str, num_bytes: int, shape: JobShape) -> float:
        """Return the time that one operation takes."""
        of = counts(schedule, op, num_bytes, shape)
        queued = max(0.0, of.volume - self.burst_bytes)
        return of.rounds * self.latency_us + of.messages * self.alpha_us + queued * self.beta_us

    @classmethod
    def of_link(cls, link: Link) -> Model:
        """Return what a probe alone says: half a round trip a round, and the link's rate."""
        return cls(0.0, 8e6 / link.rate_bps, latency_us=link.round_trip_s * 1e6 / 2)


@dataclass(frozen=True)
class Point:
    """One measurement."""

    schedule: str
    op: str
    num_bytes: int
    shape: JobShape
    time_us: float


def fit(points: Sequence[Point], latency_us: float = 0.0, burst_bytes: int = 0) -> Model:
    """The model with the least sum of relative errors; neither alpha nor beta is negative.

    It sums the errors and not their squares. Small messages on a busy machine now and then take
    many times as long, and one of them must not bend the line. Such an optimum goes through two of
    the points, or through one with alpha or beta 0, so those are all tried.

    Raises ValueError without points that tell a size.
    """
    parts = []
    for point in points:
        of = counts(point.schedule, point.op, point.num_bytes, point.shape)
        left = max(0.0, point.time_us - of.rounds * latency_us)
        parts.append((of.messages, max(0.0, of.volume - burst_bytes), left))
    lines = [(0.0, time / size) for _, size, time in parts if size]
    lines += [(time / count, 0.0) for count, _, time in parts if count]
    for (count, size, time), (count2, size2, time2) in itertools.combinations(parts, 2):
        determinant = count * size2 - count2 * size
        if determinant:
            alpha = (time * size2 - time2 * size) / determinant
            beta = (count * time2 - count2 * time) / determinant
            lines += [(alpha, beta)] if min(alpha, beta) >= 0 else []
    if not lines:
        raise ValueError("no point to fit a model to")
    return min(
        (Model(alpha, beta, latency_us, burst_bytes) for alpha, beta in lines),
        key=lambda model: sum(abs(error_of(model, point)) for point in points),
    )


def error_of(model: Model, point: Point) -> float:
    """Predicted over measured, less 1."""
    predicted = model.time_us(point.schedule, point.op, point.num_bytes, point.shape)
    return predicted / point.time_us - 1


def points_of(record: Record) -> Iterator[Point]:
    """Both arms of a record over several nodes, where their schedule is known.

    The baselines reduce in a flat ring over the ranks; so does what we delegate to them.
    """
    emulated = record.get("emulated")
    op = record.get("op")
    if emulated is None or emulated["nodes"] < 2 or op not in OPERATIONS:
        return
    shape = JobShape.of(seats(emulated["ranks_per_node"], emulated["order"]))
    size = int(record["bytes"])
    yield Point(FLAT, op, size, shape, float(record["baseline_time_us"]))
    if record["algorithm"] not in ("delegate", record["baseline"]):
        yield Point(HIERARCHICAL, op, size, shape, float(record["time_us"]))


@dataclass(frozen=True)
class Forecast:
    """Models by operation and schedule, what is asked of them, and what they are checked against.

    `cases` are operations with sizes in bytes; `points` may be none.
    """

    models: Mapping[tuple[str, str], Model]
    cases: Sequence[tuple[str, int]]
    points: Sequence[Point]
    ranks_per_node: int
    order: str = "block"

    def time_us(self, schedule: str, op: str, num_bytes: int, nodes: int) -> float:
        """Return the time that one operation takes on so many nodes."""
        shape = JobShape.of(seats([self.ranks_per_node] * nodes, self.order))
        return self._model(schedule, op).time_us(schedule, op, num_bytes, shape)

    def errors(self) -> list[tuple[Point, float]]:
        """Each measured point and how far off the model is there."""
        return [(p, error_of(self._model(p.schedule, p.op), p)) for p in self.points]

    def to_record(self, node_counts: Sequence[int]) -> Record:
        """The fields of the record: the models, their errors at the measured points, the table."""
        return {
            "bench": "forecast",
            "ranks_per_node": self.ranks_per_node,
            "order": self.order,
            "models": [
                {"op": op, "schedule": schedule, **dataclasses.asdict(model)}
                for (op, schedule), model in self.models.items()
            ],
            "checked": [
                {**_place(point), "time_us": point.time_us, "error": round(error, 4)}
                for point, error in self.errors()
            ],
            "forecast": [
                {
                    "op": op,
                    "bytes": size,
                    "nodes": nodes,
                    "time_us": {
                        name: round(self.time_us(name, op, size, nodes), 1)
                        for name in _schedules(op)
                    },
                }
                for op, size in self.cases
                for nodes in node_counts
            ],
        }

    def _model(self, schedule: str, op: str) -> Model:
        # An unmeasured schedule runs over the same link as a measured one.
        known = (self.models.get((op, name)) for name in (schedule, FLAT, HIERARCHICAL))
        return next(model for model in known if model is not None)


def of_run(records: Iterable[Record], earlier: Iterable[Record] = ()) -> Forecast:
    """The forecast from one run's records; `earlier` ones of the same link are only checked.

    Raises BenchError when no record is of an operation over several nodes.
    """
    records = list(records)
    points = [point for record in records for point in points_of(record)]
    if not points:
        raise BenchError(
            "--forecast needs a measured link: give --nodes 2 or more, and all_reduce, all_gather "
            "or reduce_scatter"
        )
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.op, point.schedule), []).append(point)
    emulated = records[0]["emulated"]
    known = _known_of(emulated)
    others = [
        point
        for record in earlier
        if _same_link(record.get("emulated"), emulated)
        for point in points_of(record)
        if (point.op, point.schedule) in groups
    ]
    return Forecast(
        models={key: fit(group, *known) for key, group in groups.items()},
        cases=list(dict.fromkeys((point.op, point.num_bytes) for point in points)),
        points=[*points, *others],
        ranks_per_node=max(emulated["ranks_per_node"]),
        order=emulated["order"],
    )


def of_link(link: Link, cases: Iterable[tuple[str, int]], ranks_per_node: int) -> Forecast:
    """The forecast that a probe alone allows; there is nothing to check it against."""
    model = Model.of_link(link)
    wanted = [(op, size) for op, size in cases if op in OPERATIONS]
    return Forecast(
        models={(op, FLAT): model for op, _ in wanted},
        cases=wanted,
        points=(),
        ranks_per_node=ranks_per_node,
    )


def _known_of(emulated: Mapping[str, Any]) -> tuple[float, int]:
    """Return what needs no measurement: microseconds on the way, and the bytes of a burst."""
    megabits = emulated["link_mbit"]
    setting = Setting(rate_bps=None if megabits is None else 1e6 * megabits)
    return 1e3 * emulated["delay_ms"], setting.burst_bytes


def _same_link(link: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    names = ("link_mbit", "flow_cap_mbit", "delay_ms", "order")
    return link is not None and all(link[name] == other[name] for name in names)


def _schedules(op: str) -> tuple[str, ...]:
    return SCHEDULES if op == "all_reduce" else (FLAT, HIERARCHICAL)


def _place(point: Point) -> dict[str, Any]:
    return {
        "op": point.op,
        "schedule": point.schedule,
        "bytes": point.num_bytes,
        "nodes": point.shape.nodes,
        "ranks": point.shape.ranks,
    }


def parse_nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes of "2,4,8", ascending; BenchError for anything else."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 2 <= int(part) <= 4096 for part in parts):
        raise BenchError(f"--forecast {text!r}: write numbers of nodes from 2 to 4096, as 2,4,8")
    return tuple(sorted({int(part) for part in parts}))


def lines(forecast: Forecast, node_counts: Sequence[int]) -> Iterator[str]:
    """The table for people: a block for each operation and size, then how well the model fits."""
    yield (
        f"forecast for {forecast.ranks_per_node} ranks a node, {forecast.order} order: "
        "messages x alpha + bytes on the link x beta"
    )
    for (op, schedule), model in forecast.models.items():
        rate = f"{8e-3 / model.beta_us:.3g} Gbit/s" if model.beta_us else "no size dependence"
        yield f"  {op}, {schedule}: alpha {model.alpha_us:.1f} us, beta {rate}"
    yield (
        f"{'op':<14}  {'size':>6}  {'nodes':>5}  "
        + "  ".join(f"{name + ' us':>16}" for name in SCHEDULES)
        + "  hierarchical against flat"
    )
    for op, size in forecast.cases:
        for nodes in node_counts:
            times = {name: forecast.time_us(name, op, size, nodes) for name in _schedules(op)}
            shown = [f"{times[name]:.0f}" if name in times else "-" for name in SCHEDULES]
            cells = [f"{text:>16}" for text in shown]
            ratio = times[FLAT] / times[HIERARCHICAL] if times[HIERARCHICAL] else math.inf
            yield (
                f"{op:<14}  {format_size(size):>6}  {nodes:>5}  "
                + "  ".join(cells)
                + f"  {ratio:.2f}x"
            )
    if forecast.points:
        yield from _fit_lines(forecast)
    else:
        yield "predicted against measured: nothing, the probe of the link is all that is known"


def _fit_lines(forecast: Forecast) -> Iterator[str]:
    groups: dict[tuple[str, str, int], list[str]] = {}
    for point, error in forecast.errors():
        key = (point.op, point.schedule, point.shape.nodes)
        groups.setdefault(key, []).append(f"{format_size(point.num_bytes)} {100 * error:+.0f}%")
    for (op, schedule, nodes), errors in groups.items():
        yield f"predicted against measured: {op}, {schedule}, {nodes} nodes: {', '.join(errors)}"
