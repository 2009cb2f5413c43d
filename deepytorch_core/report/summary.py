"""The report of what deepytorch did in this process: `deepytorch.report()`."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepytorch_core.base import config, decisions, memory
from deepytorch_core.base.console import global_rank
from deepytorch_core.c10d import activation
from deepytorch_core.hang import starts as beginnings
from deepytorch_core.hang.starts import Starts
from deepytorch_core.metering import counts, step_timer

_DELEGATE = "delegate"
# A line names the rank that begins last if it is mostly the same, and later than ranks are by
# chance.
_LEAST_LAG_US = 100.0


@dataclass(frozen=True)
class SummaryRow:
    """One operation of one group, by the algorithm that carried it out and the reason for it."""

    group: str
    op: str
    algorithm: str
    reason: str
    calls: int
    bytes: int
    time_us: float


@dataclass(frozen=True)
class Waiting:
    """The rank that others of a group waited for, in its native operations on host memory.

    In a group that spans nodes, it covers only the ranks of this rank's node. Operations that the
    stock backend or a GPU carried out are left out.

    Attributes:
        group: the group's name.
        operations: how many were looked at.
        waited_us: how long this rank was there before all were.
        slowest: the global rank that held up the others longest.
        times_last: how often that one came last.
        cost_us: how long the others would have been through earlier without it.
    """

    group: str
    operations: int
    waited_us: float
    slowest: int
    times_last: int
    cost_us: float


@dataclass(frozen=True)
class Report:
    """A snapshot; `str()` of it is a table for people.

    `loaders` is how long DataLoaders were waited for (`deepytorch_core.metering.loader_waits`).
    `course` has the run's steps and what went by between them
    (`deepytorch_core.metering.step_timer`). `memory` is what was used of it
    (`deepytorch_core.base.memory`). `failures` is how many operations ended in an error. `groups`
    has the ranks of each group by its name. `nodes` is how many nodes the launcher spoke of, 1
    where it did not. `recent` has the times of the newest operations by size (`counts.recent`).
    `starts` says who was the last of this node to begin the operations that `waiting` knows nothing
    of.
    """

    active: bool
    options: dict[str, Any]
    rows: tuple[SummaryRow, ...]
    decisions: tuple[dict[str, Any], ...]
    native_calls: int
    delegated_calls: int
    loaders: tuple[dict[str, Any], ...] = ()
    waiting: tuple[Waiting, ...] = ()
    rank: int = 0
    host: str = ""
    course: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    groups: dict[str, int] = field(default_factory=dict)
    nodes: int = 1
    recent: tuple[dict[str, Any], ...] = ()
    starts: tuple[Starts, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Report:
        """Make a report of the plain values of `to_dict`. Raises ValueError for anything else."""
        names = {attribute.name for attribute in dataclasses.fields(cls)}
        given = {name: value for name, value in saved.items() if name in names}
        try:
            return cls(
                **{
                    **given,
                    "rows": tuple(SummaryRow(**row) for row in saved["rows"]),
                    "waiting": tuple(Waiting(**wait) for wait in saved.get("waiting", ())),
                    "starts": tuple(Starts(**start) for start in saved.get("starts", ())),
                    "decisions": tuple(saved.get("decisions", ())),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no report that was saved: {error}") from None

    def __str__(self) -> str:
        calls = self.native_calls + self.delegated_calls
        share = f" ({100 * self.native_calls / calls:.0f}% native)" if calls else ""
        lines = [
            f"deepytorch {'active' if self.active else 'not active'}: {self.native_calls} native "
            f"and {self.delegated_calls} delegated collectives{share}"
        ]
        if self.rows:
            lines += _table(
                [("group", "op", "algorithm", "calls", "MB", "ms/call", "why")]
                + [_cells(row) for row in self.rows]
            )
        lines += [_waiting_sentence(wait) for wait in self.waiting]
        lines += [
            _starts_sentence(start)
            for start in self.starts
            if 2 * start.times_last > start.operations and start.lag_us >= _LEAST_LAG_US
        ]
        lines += _steps_sentence(self.course)
        return "\n".join(lines + [_sentence(decision) for decision in self.decisions])


def report(*, recent: bool = True) -> Report:
    """Return all that was done so far, on this rank; makes nothing happen. Cheap without `recent`,
    which takes about ten milliseconds for each rank of the node.

    A forked child's begins with the fork, but for choices made in Python, which are still in force.
    """
    waits = sys.modules.get("deepytorch_core.metering.loader_waits")
    rows = _merged(counts.statistics())
    delegated = sum(row.calls for row in rows if row.algorithm == _DELEGATE)
    return Report(
        active=activation.is_active(),
        options=config.current().to_dict(),
        rows=rows,
        decisions=(*(dict(plan) for plan in counts.plans()), *decisions.made()),
        native_calls=sum(row.calls for row in rows) - delegated,
        delegated_calls=delegated,
        loaders=waits.report() if waits is not None else (),
        waiting=tuple(_waiting(entry) for entry in counts.arrivals() if entry["operations"]),
        rank=global_rank(),
        host=socket.gethostname(),
        course=step_timer.current().report(),
        memory=memory.used(),
        failures=counts.failures(),
        groups=counts.group_sizes(),
        nodes=_nodes(),
        recent=tuple(counts.recent()) if recent else (),
        starts=beginnings.of_this_node() if recent else (),
    )


def _nodes() -> int:
    try:
        told = config.launched()
    except ValueError:  # a number that is none: who makes a group is told
        return 1
    return -(-told.size // told.local_size) if told is not None and told.local_size else 1


def _waiting(entry: dict[str, Any]) -> Waiting:
    slowest = max(entry["ranks"], key=lambda rank: rank["cost_us"])
    return Waiting(
        group=entry["group"],
        operations=entry["operations"],
        waited_us=entry["waited_us"],
        slowest=slowest["rank"],
        times_last=slowest["times_last"],
        cost_us=slowest["cost_us"],
    )


def _waiting_sentence(wait: Waiting) -> str:
    share = 100 * wait.times_last / wait.operations
    return (
        f"waiting: in {wait.operations} native operations of group {wait.group} this rank waited "
        f"{wait.waited_us / 1e6:.3f} s for others; rank {wait.slowest} held up the group longest, "
        f"{wait.cost_us / 1e6:.3f} s, and came last in {share:.0f}% of them"
    )


def _starts_sentence(start: Starts) -> str:
    share = 100 * start.times_last / start.operations
    return (
        f"starts: of the newest {start.operations} operations of group {start.group} on GPUs or by "
        f"the stock backend rank {start.latest} was the last of this node to begin {share:.0f}%, "
        f"{start.lag_us / 1e3:.3f} ms after the one before it"
    )


# A GPU that works less waits for something that is worth a name.
_BUSY = 0.85


def _steps_sentence(course: dict[str, Any]) -> list[str]:
    if not course.get("timed_steps"):
        return []
    seconds = course["seconds"]
    exposed, data = course["exposed_s"] / seconds, course["data_s"] / seconds
    return [
        f"steps: {course['steps']}, {1e3 * seconds / course['timed_steps']:.1f} ms each; of that "
        f"{exposed:.1%} in collectives that nothing hid and {data:.1%} waiting for data",
        *_gpu_sentence(course.get("gpu_share"), exposed, data),
    ]


def _gpu_sentence(share: float | None, exposed: float, data: float) -> list[str]:
    """Say how much of the last minute the GPU worked, and what it waited for most."""
    if share is None:
        return []
    said = f"GPU: it worked {share:.0%} of the last minute"
    if share < _BUSY:
        host = max(0.0, 1.0 - share - exposed - data)
        waits = {"collectives": exposed, "data": data, "what the host launches": host}
        said += f", and waited for {max(waits, key=lambda name: waits[name])} most"
    return [said]


def _sentence(plan: dict[str, Any]) -> str:
    """One line for a choice: a row of `_core.plans()`, or one of `decisions.made()`."""
    if "what" in plan:
        return f"decision: {decisions.sentence(plan)}"
    sizes = f"from {plan['first_bytes']} bytes"
    if plan["last_bytes"] < 1 << 62:
        sizes = f"{plan['first_bytes']} to {plan['last_bytes']} bytes"
    chosen = plan["algorithm"] or "rule of thumb"
    times = ", ".join(
        f"{time['algorithm']}{_parameters(time)} {_microseconds(time['median_us'])}"
        for time in plan["candidates"]
    )
    return (
        f"decision: {plan['op']} of {plan['ranks']} ranks{_place(plan)}, {sizes}: {chosen}"
        f"{_parameters(plan)}, {plan['source']}" + (f" ({times})" if times else "")
    )


def _place(plan: dict[str, Any]) -> str:
    return f" on {plan['device']}" if plan["device"] else ""


def _parameters(plan: dict[str, Any]) -> str:
    grid = f"/{plan['channels']}x{plan['threads']}" if plan["channels"] else ""
    chunk = f"/{plan['chunk_bytes'] >> 10}K" if plan["chunk_bytes"] else ""
    return grid + chunk + (f"/{plan['delegated']}% delegated" if plan["delegated"] else "")


def _microseconds(time_us: float) -> str:
    return f"{time_us:.0f} us" if time_us >= 100 else f"{time_us:.1f} us"


def _merged(statistics: list[dict[str, Any]]) -> tuple[SummaryRow, ...]:
    """One row for a group's name, though several groups may have had it, one after the other."""
    merged: dict[tuple[str, str, str, str], SummaryRow] = {}
    for entry in statistics:
        row = SummaryRow(**entry)
        key = (row.group, row.op, row.algorithm, row.reason)
        other = merged.get(key)
        if other is not None:
            row = dataclasses.replace(
                row,
                calls=row.calls + other.calls,
                bytes=row.bytes + other.bytes,
                time_us=row.time_us + other.time_us,
            )
        merged[key] = row
    return tuple(merged[key] for key in sorted(merged))


def _cells(row: SummaryRow) -> tuple[str, ...]:
    per_call_ms = row.time_us / max(1, row.calls) / 1e3
    return (
        row.group,
        row.op,
        row.algorithm,
        str(row.calls),
        f"{row.bytes / 1e6:.3f}",
        f"{per_call_ms:.3f}",
        row.reason,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
