"""What a collective costs on more nodes: a latency-and-bandwidth model, fitted and checked.

The time of one operation is taken to be `steps * alpha + volume * beta`: `steps` messages that wait
for each other, and `volume` bytes that the busiest node's link carries in one direction (Hockney's
model; Thakur, Rabenseifner and Gropp give the counts). alpha and beta are fitted to the points of
one run, by relative error, for each arm; other numbers of nodes have other steps and volumes, and
the same alpha and beta.

| schedule | steps of all_reduce | volume of n bytes on N nodes of R ranks, P = N R |
|---|---|---|
| flat ring | 2 (P - 1) | 2 n (P - 1) / P for each ring edge that leaves a node |
| tree | 2 log2 N | 2 n (N - 1) / N |
| hierarchical | 2 (N - 1), to 8 nodes 2 | 2 n (N - 1) / N |

all_gather and reduce_scatter take half of it; trees are not for them. A flat ring's edge leaves the
node once where ranks are in blocks, from every rank where they are dealt out in turns.

What it leaves out: the work inside a node, which a pipeline hides while the link is the slower
part, and collisions in the network between nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepytorch_core.bench.job import BenchError, format_size
from deepytorch_core.bench.record import Record
from deepytorch_core.network.link import Link
from deepytorch_core.testing.emulation import Seat, seats

FLAT, TREE, HIERARCHICAL = "flat ring", "tree", "hierarchical"
SCHEDULES = (FLAT, TREE, HIERARCHICAL)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
_DIRECT_NODES = 8  # up to so many, nodes exchange their shards directly


@dataclass(frozen=True)
class Shape:
    """A job's places: `leaving` is how many edges of the ring of ranks leave the busiest node."""

    nodes: int
    ranks: int
    leaving: int

    @classmethod
    def of(cls, places: Sequence[Seat]) -> Shape:
        nodes = [seat.node for seat in places]
        leaving = [0] * (max(nodes) + 1)
        for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            leaving[here] += here != there
        return cls(len(leaving), len(nodes), max(leaving))


def steps(schedule: str, op: str, shape: Shape) -> float:
    """Messages that wait for each other."""
    halves = 2 if op == "all_reduce" else 1
    if schedule == FLAT:
        return halves * (shape.ranks - 1)
    if schedule == TREE:
        return halves * math.log2(shape.nodes)
    return halves * (1 if shape.nodes <= _DIRECT_NODES else shape.nodes - 1)


def volume(schedule: str, op: str, num_bytes: int, shape: Shape) -> float:
    """Bytes through the busiest node's link, in one direction; `num_bytes` as nccl-tests counts."""
    halves = 2 if op == "all_reduce" else 1
    if schedule == FLAT:
        return halves * num_bytes * (shape.ranks - 1) / shape.ranks * shape.leaving
    return halves * num_bytes * (shape.nodes - 1) / shape.nodes


@dataclass(frozen=True)
class Model:
    """alpha in microseconds a step, beta in microseconds a byte."""

    alpha_us: float
    beta_us: float

    def time_us(self, schedule: str, op: str, num_bytes: int, shape: Shape) -> float:
        return self.alpha_us * steps(schedule, op, shape) + self.beta_us * volume(
            schedule, op, num_bytes, shape
        )

    @classmethod
    def of_link(cls, link: Link) -> Model:
        """What a probe alone says: half a round trip a step, and the link's rate."""
        return cls(link.round_trip_s * 1e6 / 2, 8e6 / link.rate_bps)


@dataclass(frozen=True)
class Point:
    """One measurement."""

    schedule: str
    op: str
    num_bytes: int
    shape: Shape
    time_us: float


def fit(points: Sequence[Point]) -> Model:
    """The model with the least sum of relative errors; neither part is negative.

    Of errors and not of their squares: small messages on a busy machine now and then take many
    times as long, and one of them must not bend the line. Such an optimum goes through two of the
    points, or through one with alpha or beta 0, so those are all tried.

    Raises ValueError without points that tell a size.
    """
    parts = [
        (
            steps(point.schedule, point.op, point.shape),
            volume(point.schedule, point.op, point.num_bytes, point.shape),
            point.time_us,
        )
        for point in points
    ]
    candidates = [Model(0.0, time / size) for _, size, time in parts if size]
    candidates += [Model(time / count, 0.0) for count, _, time in parts if count]
    for (count, size, time), (count2, size2, time2) in itertools.combinations(parts, 2):
        determinant = count * size2 - count2 * size
        if determinant:
            alpha = (time * size2 - time2 * size) / determinant
            beta = (count * time2 - count2 * time) / determinant
            candidates += [Model(alpha, beta)] if min(alpha, beta) >= 0 else []
    if not candidates:
        raise ValueError("no point to fit a model to")
    return min(candidates, key=lambda model: sum(abs(error_of(model, point)) for point in points))


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
    shape = Shape.of(seats(emulated["ranks_per_node"], emulated["order"]))
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
        """What one operation takes on so many nodes."""
        shape = Shape.of(seats([self.ranks_per_node] * nodes, self.order))
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
                {"op": op, "schedule": schedule, "alpha_us": m.alpha_us, "beta_us": m.beta_us}
                for (op, schedule), m in self.models.items()
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
        # What was not measured runs over the same link as what was.
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
    others = [
        point
        for record in earlier
        if _same_link(record.get("emulated"), emulated)
        for point in points_of(record)
        if (point.op, point.schedule) in groups
    ]
    return Forecast(
        models={key: fit(group) for key, group in groups.items()},
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


def _same_link(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    names = ("link_mbit", "flow_cap_mbit", "delay_ms", "order")
    return one is not None and all(one[name] == other[name] for name in names)


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
        "steps x alpha + bytes on the link x beta"
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
