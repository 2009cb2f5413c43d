"""Will it scale? What a step would take on more ranks, by what a run's report has of it.

    step(N) = the rest of a step + exposed(N)
    exposed(N) = communication(N) - min(hidden share * communication(N), computing)

The rest is today's step less its exposed communication: computing, waiting for data and for other
ranks. Every rank keeps its work (weak scaling), so the rest stays. So does the share of the
communication that computing hides, until there is more of it than computing. What was exposed
beyond the operations' own times, until their thread had started for example, is of the rest.

communication(N) follows the latency-and-bandwidth model of `deepytorch_core.bench.forecast`. alpha
and beta are fitted to the newest operations' times by size. Where these are fewer than two sizes,
to what the tuner measured; then to the mean sizes and times of each row, less what the operations
waited for other ranks; then to all that there is. The prediction is scaled so that an operation's
time today comes out as it was measured: computing beside it slows it.

On one node the model is a flat ring of the ranks, as if each further rank were reached over a link
like today's. Over several nodes, ranks in blocks, native operations go by node and stock ones round
the ring of all ranks. What runs in groups of fewer ranks, and operations that the model does not
have, are taken as today.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepytorch_core.bench.forecast import (
    FLAT,
    HIERARCHICAL,
    OPERATIONS,
    JobShape,
    Model,
    Point,
    error_of,
    fit,
)
from deepytorch_core.metering.step_timer import parts_of, timed_part
from deepytorch_core.report import html_page
from deepytorch_core.report.choices import DELEGATE, candidates, chosen

COUNTS = (2, 4, 8, 16, 64)
"""Numbers of ranks, or of nodes where the run had several, that are forecast."""

_APART = 2.0  # sizes that tell latency from bandwidth differ by so much
_MOST_ERROR = 1 / 3  # of a model, on average at the points it was fitted to
_ROUGH = 0.15  # from there on it is said
_WORDS = {FLAT: "as a flat ring", HIERARCHICAL: "by node"}
_ENOUGH = 3  # calls of a size whose median tells something
_NATIVE, _STOCK = "native", "stock"

Saved = Mapping[str, Any]


class _NotKnown(Exception):
    """Why there is no forecast, and what to do."""


@dataclass(frozen=True)
class _Place:
    """The job's ranks today, and what more of them would be."""

    ranks: int
    nodes: int

    @property
    def unit(self) -> str:
        return "nodes" if self.nodes > 1 else "ranks"

    @property
    def today(self) -> int:
        return self.nodes if self.nodes > 1 else self.ranks

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    def schedule(self, carrier: str) -> str:
        return HIERARCHICAL if self.nodes > 1 and carrier == _NATIVE else FLAT

    def shape(self, count: int) -> JobShape:
        """Return the shape of so many nodes or, on one, of ranks that each have their own link."""
        local = self.ranks_per_node if self.nodes > 1 else 1
        return JobShape(nodes=count, ranks=count * local, leaving=1)


@dataclass(frozen=True)
class _Part:
    """The part of a step in one row of the report. `time_us` of a call is None if not measured."""

    op: str
    carrier: str
    is_of_all: bool  # in a group of all ranks
    calls: float
    num_bytes: float  # of a call, as nccl-tests counts
    time_us: float | None
    reason: str

    @property
    def grows(self) -> bool:
        return self.is_of_all and self.op in OPERATIONS


@dataclass(frozen=True)
class _Fitted:
    """A model of one carrier's operations."""

    model: Model
    points: Sequence[Point]
    source: str

    @property
    def error(self) -> float:
        """How far off the model is at its points, on average."""
        return sum(abs(error_of(self.model, point)) for point in self.points) / len(self.points)

    def to_dict(self, carrier: str, schedule: str) -> dict[str, Any]:
        return {
            "carrier": carrier,
            "schedule": schedule,
            "alpha_us": self.model.alpha_us,
            "beta_us": self.model.beta_us,
            "fitted_to": self.source,
            "sizes": len({point.num_bytes for point in self.points}),
            "error": round(self.error, 4),
        }


class _Communication:
    """The communication of a step, in milliseconds."""

    def __init__(
        self,
        parts: Sequence[_Part],
        models: Mapping[str, _Fitted],
        place: _Place,
        exposed_ms: float,
    ) -> None:
        self._parts, self._models, self._place = parts, models, place
        timed_ms, untimed_ms = self._on(place.today)
        # The exposed part took that long at least: the tuner's times are those of a quiet machine.
        self._slower = max(1.0, (exposed_ms - timed_ms) / untimed_ms) if untimed_ms else 1.0

    def on(self, count: int) -> float:
        """With so many ranks or nodes."""
        timed_ms, untimed_ms = self._on(count)
        return timed_ms + self._slower * untimed_ms

    def _on(self, count: int) -> tuple[float, float]:
        """Return milliseconds of timed parts, today's time today, and of the rest, by the model."""
        timed_us = untimed_us = 0.0
        for part in self._parts:
            if not part.grows:
                timed_us += part.calls * (part.time_us or 0.0)
            elif part.time_us is None:
                untimed_us += part.calls * self._model_us(part, count)
            else:
                ratio = self._model_us(part, count) / self._model_us(part, self._place.today)
                timed_us += part.calls * ratio * part.time_us
        return timed_us / 1e3, untimed_us / 1e3

    def _model_us(self, part: _Part, count: int) -> float:
        schedule, shape = self._place.schedule(part.carrier), self._place.shape(count)
        size = max(1, round(part.num_bytes))
        return self._models[part.carrier].model.time_us(schedule, part.op, size, shape)


def forecast(saved: Saved) -> dict[str, Any]:
    """Plain values, for JSON: `known`, and either the `forecast` or the `reason` there is none.

    Args:
        saved: `deepytorch.report().to_dict()` of a rank.

    Times are milliseconds of a step. `efficiency` is today's step over the one that is predicted;
    what has more ranks than today is `extrapolated`.
    """
    try:
        return {"known": True, **_forecast(saved)}
    except _NotKnown as reason:
        return {"known": False, "reason": str(reason)}


def lines(found: Saved) -> Iterator[str]:
    """A forecast for people."""
    if not found["known"]:
        yield f"will it scale: not known: {found['reason']}"
        return
    yield f"will it scale: {_today(found)}; {_steps(found)}"
    yield f"  assumed: {_assumed(found)}"


def of_slowest(reports: Sequence[Saved]) -> dict[str, Any]:
    """Return the forecast of the rank whose steps take longest."""
    every = [forecast(report) for report in reports]
    return max(every, key=lambda prediction: prediction["step_ms"] if prediction["known"] else -1.0)


def section(reports: Sequence[Saved]) -> str:
    """The forecast of a page: of the rank whose steps take longest."""
    found = of_slowest(reports)
    if not found["known"]:
        return f'<p class="note">Not known: {html.escape(found["reason"])}.</p>'
    cells = [
        (
            str(row[found["unit"]]),
            f"{row['step_ms']:.1f}",
            f"{row['exposed_ms']:.1f}",
            f"{row['efficiency']:.0%}",
            "extrapolated" if row["extrapolated"] else "",
        )
        for row in found["forecast"]
    ]
    columns = (found["unit"], "ms a step", "ms exposed", "efficiency", "")
    return (
        f"<p>{html.escape(_capital(_today(found)))}.</p>\n{html_page.table(columns, cells)}\n"
        f'<p class="note">Assumed: {html.escape(_assumed(found))}.</p>'
    )


def _forecast(saved: Saved) -> dict[str, Any]:
    place, course = _place(saved), timed_part(saved)
    if course is None:
        raise _NotKnown(
            "no step was timed; let an optimizer take two steps or more, then save the report"
        )
    if saved.get("memory", {}).get("devices"):
        raise _NotKnown(
            "collectives of GPU tensors run on streams, and what of them is exposed is not "
            "measured; compare the steps' times in reports of two numbers of GPUs"
        )
    parts = list(_parts(saved, course, place.ranks))
    growing = [part for part in parts if part.grows]
    if not growing:
        raise _NotKnown(
            f"no {', '.join(OPERATIONS[:-1])} or {OPERATIONS[-1]} of all {place.ranks} ranks was "
            "in every other step or more, so nothing that was seen grows with the ranks"
        )
    models = {
        carrier: _model(saved, growing, carrier, place)
        for carrier in dict.fromkeys(part.carrier for part in growing)
    }
    steps = course["timed_steps"]
    spent = {name: 1e3 * seconds / steps for name, seconds in parts_of(course).items()}
    waited_ms = min(spent["exposed"], 1e3 * course["waited_s"] / steps)
    exposed_ms = spent["exposed"] - waited_ms
    communication = _Communication(parts, models, place, exposed_ms)
    today_ms = communication.on(place.today)
    besides_ms = max(0.0, exposed_ms - today_ms)
    hidden_ms = today_ms - (exposed_ms - besides_ms)
    window_ms = max(spent["compute"], hidden_ms)
    step_ms = sum(spent.values()) - spent["overhead"]
    rows = []
    for count in COUNTS:
        there_ms = communication.on(count)
        there_hidden_ms = min(hidden_ms / today_ms * there_ms, window_ms)
        there_exposed_ms = besides_ms + there_ms - there_hidden_ms
        there_step_ms = step_ms - exposed_ms + there_exposed_ms
        rows.append(
            {
                place.unit: count,
                "step_ms": round(there_step_ms, 4),
                "exposed_ms": round(there_exposed_ms, 4),
                "efficiency": round(step_ms / there_step_ms, 4),
                "extrapolated": count > place.today,
            }
        )
    return {
        "unit": place.unit,
        "today": place.today,
        "ranks_per_node": place.ranks_per_node,
        "step_ms": round(step_ms, 4),
        "window_ms": round(window_ms, 4),
        "communication_ms": round(today_ms, 4),
        "exposed_ms": round(exposed_ms, 4),
        "hidden_share": round(hidden_ms / today_ms, 4),
        "waited_ms": round(waited_ms, 4),
        "besides_ms": round(besides_ms, 4),
        "models": [model.to_dict(name, place.schedule(name)) for name, model in models.items()],
        "as_today": sorted({_words(part) for part in parts if not part.grows}),
        "forecast": rows,
    }


def _place(saved: Saved) -> _Place:
    groups = saved.get("groups") or {}
    if not groups and saved.get("rows"):
        raise _NotKnown("the report does not say of how many ranks; save one with this version")
    if max(groups.values(), default=1) < 2:
        raise _NotKnown("the run communicated with no other rank; report on a run of two or more")
    return _Place(max(groups.values()), max(1, saved.get("nodes", 1)))


def _parts(saved: Saved, course: Saved, ranks: int) -> Iterator[_Part]:
    """Yield what a step communicates. Operations rarer than every other step belong to none."""
    steps = course["steps"]
    totals: dict[tuple[str, str], int] = {}
    for row in saved.get("rows", ()):
        key = row["group"], row["op"]
        totals[key] = totals.get(key, 0) + row["calls"]
    times_us: dict[str, float] = {}
    for row in saved.get("rows", ()):
        times_us[row["group"]] = times_us.get(row["group"], 0.0) + row["time_us"]
    # It is not kept which of a group's operations waited: each did by its share of their time.
    own = {
        wait["group"]: 1 - wait["waited_us"] / times_us[wait["group"]]
        for wait in saved.get("waiting", ())
        if times_us.get(wait["group"])
    }
    for row in saved.get("rows", ()):
        size = saved["groups"].get(row["group"], 0)
        if not row["calls"] or size == 1 or 2 * totals[row["group"], row["op"]] < steps:
            continue
        carrier = _STOCK if row["algorithm"] == DELEGATE else _NATIVE
        own_us = row["time_us"] / row["calls"] * own.get(row["group"], 1.0)
        yield _Part(
            op=row["op"],
            carrier=carrier,
            is_of_all=size == ranks,
            calls=row["calls"] / steps,
            num_bytes=_counted(row["op"], row["bytes"] / row["calls"], size),
            time_us=own_us if carrier == _NATIVE and own_us > 0 else None,
            reason=row["reason"],
        )


def _counted(op: str, num_bytes: float, ranks: int) -> float:
    """Bytes of an operation as nccl-tests counts: a report has those of a rank's part."""
    return num_bytes * (1 if op not in OPERATIONS or op == "all_reduce" else ranks)


def _model(saved: Saved, growing: Sequence[_Part], carrier: str, place: _Place) -> _Fitted:
    """Fitted to the operations' own times, or else to the tuner's, or to both."""
    schedule, today = place.schedule(carrier), place.shape(place.today)
    by_tuner = [
        Point(schedule, plan["op"], round(size), today, 1e3 * ms)
        for plan in saved.get("decisions", ())
        if "what" not in plan and not plan.get("device") and plan["ranks"] == place.ranks
        if plan["op"] in OPERATIONS
        if (ms := _measured_ms(plan, carrier))
        if (size := _counted(plan["op"], plan.get("measured_bytes", 0), place.ranks))
    ]
    by_calls = [
        Point(schedule, part.op, round(part.num_bytes), today, part.time_us)
        for part in growing
        if part.carrier == carrier and part.time_us and part.num_bytes >= 1
    ]
    # The same, each size by itself.
    by_size = [
        Point(schedule, timing["op"], round(size), today, timing["median_us"])
        for timing in saved.get("recent", ())
        if timing["native"] == (carrier == _NATIVE) and timing["calls"] >= _ENOUGH
        if timing["op"] in OPERATIONS and saved["groups"].get(timing["group"]) == place.ranks
        if timing["median_us"] and (size := _counted(timing["op"], timing["bytes"], place.ranks))
    ]
    errors = []
    for points, source in (
        (by_size, "the operations' own times"),
        (by_tuner, "the tuner's times"),
        (by_calls, "the operations' mean times"),
        ([*by_tuner, *(by_size or by_calls)], "the tuner's and the operations' own times"),
    ):
        sizes = [point.num_bytes for point in points]
        if points and max(sizes) >= _APART * min(sizes):
            fitted = _Fitted(fit(points), points, source)
            if fitted.error <= _MOST_ERROR:
                return fitted
            errors.append(fitted.error)
    own = [part for part in growing if part.carrier == carrier]
    ops = ", ".join(dict.fromkeys(part.op for part in own))
    if not (by_tuner or by_size or by_calls):
        reasons = ", ".join(dict.fromkeys(part.reason for part in own))
        raise _NotKnown(
            f"nothing timed the {carrier} {ops} ({reasons}); save the report before the "
            "groups are destroyed, which has the newest operations' times"
        )
    if errors:
        raise _NotKnown(
            f"the times of the {carrier} {ops} don't follow a latency and a bandwidth: "
            f"{min(errors):.0%} off on average; run on a machine that does nothing "
            "else, with sizes that differ more (DDP's bucket_cap_mb)"
        )
    raise _NotKnown(
        f"the {carrier} {ops} was timed at one size, or at some less than {_APART:g} times apart, "
        "which does not tell latency from bandwidth; save the report before the groups are "
        "destroyed and let sizes differ (DDP's bucket_cap_mb), or see deepytorch bench collectives "
        "--forecast"
    )


def _measured_ms(plan: Saved, carrier: str) -> float | None:
    name = chosen(plan)
    if carrier == _STOCK:
        name = _STOCK
    elif name == _STOCK:
        return None
    return candidates(plan).get(name)


def _words(part: _Part) -> str:
    return part.op if part.is_of_all else f"{part.op} of fewer ranks"


def _today(found: Saved) -> str:
    unit = found["unit"]
    local = found["ranks_per_node"]
    each = f" of {local} rank{'s' if local > 1 else ''}" if unit == "nodes" else ""
    hidden = f"{found['hidden_share']:.0%} of {found['communication_ms']:.1f} ms hidden"
    return (
        f"step {found['step_ms']:.1f} ms today on {found['today']} {unit}{each}, "
        f"{found['exposed_ms']:.1f} ms of it exposed communication ({hidden})"
    )


def _steps(found: Saved) -> str:
    unit = found["unit"]
    texts: list[str] = []
    for row in found["forecast"]:
        if row[unit] == found["today"]:
            continue
        efficiency = f"{row['efficiency']:.0%}" + ("" if texts else " efficiency")
        mark = ", extrapolated" if row["extrapolated"] else ""
        texts.append(f"on {row[unit]} {unit} {row['step_ms']:.1f} ms ({efficiency}{mark})")
    return ", ".join(texts)


def _assumed(found: Saved) -> str:
    texts = [
        "the same work on each rank",
        f"the same share hidden, by at most the {found['window_ms']:.1f} ms of computing",
    ]
    for model in found["models"]:
        beta = model["beta_us"]
        rate = f"{8e-3 / beta:.3g} Gbit/s" if beta else "no time by size"
        off = f"{model['error']:.0%} off on average"
        off += ", so this is rough" if model["error"] > _ROUGH else ""
        texts.append(
            f"{model['carrier']} operations {_WORDS[model['schedule']]} over links like today's, "
            f"alpha {model['alpha_us']:.1f} us and {rate}, fitted to {model['fitted_to']} at "
            f"{model['sizes']} sizes ({off})"
        )
    as_today = [*found["as_today"]]
    if found["waited_ms"]:
        as_today.append(f"waiting for other ranks ({found['waited_ms']:.1f} ms)")
    if found["besides_ms"]:
        as_today.append(f"what starting operations takes ({found['besides_ms']:.1f} ms)")
    if as_today:
        texts.append(f"as today: {', '.join(as_today)}")
    return "; ".join(texts)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
