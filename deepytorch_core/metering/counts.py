"""The counts that the core and the c10d adapter have made in this process.

A fork copies native memory, and with it all that the parent had counted. That is left out here: a
forked child begins at nothing. The parent notes it before the fork. The child can't, as a lock of
the core's may be held for ever there, by a thread that isn't there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

Counted = dict[str, Any]
_SUMS = ("calls", "bytes", "time_us")


@dataclass(frozen=True)
class _Counts:
    """All that is known at a moment, as the core and the adapter tell it."""

    statistics: list[Counted]
    arrivals: list[Counted]
    plans: list[Counted]
    tuning_s: float
    exposed_s: float
    failures: int


_group_sizes: dict[str, int] = {}
_parents: _Counts | None = None  # what this process was forked with; None: it has loaded all itself
_at_fork: _Counts | None = None  # as it was before the last fork


def note_group(name: str, size: int) -> None:
    """Keep how many ranks a group of ours has."""
    _group_sizes[name] = size


def group_sizes() -> dict[str, int]:
    """Ranks of each group that this process made, by the name that its rows have."""
    return dict(_group_sizes)


def statistics() -> list[Counted]:
    """Rows of `_core.statistics()`, those with calls."""
    core = _core()
    rows: list[Counted] = core.statistics() if core is not None else []
    return rows if _parents is None else _without(rows, _parents.statistics)


def arrivals() -> list[Counted]:
    """Groups of `_core.arrivals()`."""
    core = _core()
    groups: list[Counted] = core.arrivals() if core is not None else []
    # A child can't go on with its parent's native groups, so theirs stay as they were.
    return (
        groups
        if _parents is None
        else [group for group in groups if group not in _parents.arrivals]
    )


def plans() -> list[Counted]:
    """Return the plans that the native tuner settled on: `_core.plans()`."""
    core = _core()
    settled: list[Counted] = core.plans() if core is not None else []
    return settled if _parents is None else [plan for plan in settled if plan not in _parents.plans]


def serves(plan: Mapping[str, Any], op: str, share_bytes: int) -> bool:
    """Whether a row of `plans` is of an operation whose ranks have so many bytes each."""
    return bool(plan["op"] == op and plan["first_bytes"] <= share_bytes <= plan["last_bytes"])


def recent() -> list[Counted]:
    """The newest operations on host memory by group, op, who carried them out, and bytes.

    A row has their number, `calls`, and the median of the time that each took by itself. That time
    begins at the call or, if the operation had to wait, at the end of the group's one before.
    """
    core = _core()
    if core is None:
        return []
    from deepytorch_core.hang import record

    times: dict[tuple[str, str, bool, int], list[int]] = {}
    last_ns: dict[str, int] = {}
    for operation in record.ended(core.flight_record_fd()):
        began_ns = max(operation.entered_ns, last_ns.get(operation.group, 0))
        last_ns[operation.group] = max(operation.ended_ns, began_ns)
        key = operation.group, operation.op, operation.native, operation.bytes
        times.setdefault(key, []).append(max(0, operation.ended_ns - began_ns))
    return [
        {
            "group": group,
            "op": op,
            "native": native,
            "bytes": size,
            "calls": len(each),
            "median_us": median(each) / 1e3,
        }
        for (group, op, native, size), each in sorted(times.items())
    ]


def tuning_s() -> float:
    """Seconds spent measuring plans."""
    core = _core()
    spent: float = core.spent_on_tuning_s() if core is not None else 0.0
    return spent if _parents is None else spent - _parents.tuning_s


def exposed_s() -> float:
    """Seconds of this process's threads in collectives on host memory that nothing hid."""
    adapter = _adapter()
    spent: float = adapter.exposed_s() if adapter is not None else 0.0
    return spent if _parents is None else spent - _parents.exposed_s


def failures() -> int:
    """Operations that ended in an error."""
    adapter = _adapter()
    failed: int = adapter.failures() if adapter is not None else 0
    return failed if _parents is None else failed - _parents.failures


def given_bytes() -> int:
    """Bytes that went into operations with other ranks, a parent's too. One element is left out."""
    adapter = _adapter()
    given: int = adapter.given_bytes() if adapter is not None else 0
    return given


def _core() -> Any:
    """None where it is not loaded: then nothing has run."""
    return sys.modules.get("deepytorch_core._core")


def _adapter() -> Any:
    return sys.modules.get("deepytorch_c10d")


def _without(rows: list[Counted], before: list[Counted]) -> list[Counted]:
    """Return the counts added since `before`. Several groups may have had a name, one by one."""
    left: dict[tuple[str, ...], Counted] = {}
    for row in before:
        sums = left.setdefault(_key(row), dict.fromkeys(_SUMS, 0))
        for name in _SUMS:
            sums[name] += row[name]
    own = []
    for row in rows:
        sums = left.get(_key(row), {})
        for name in sums:
            known = min(sums[name], row[name])
            sums[name] -= known
            row[name] -= known
        if row["calls"]:
            own.append(row)
    return own


def _key(row: Counted) -> tuple[str, ...]:
    return row["group"], row["op"], row["algorithm"], row["reason"]


def _note() -> None:
    """Before a fork. All of it: what this process has from its own parent goes along as well."""
    global _at_fork
    core, adapter = _core(), _adapter()
    _at_fork = _Counts(
        statistics=core.statistics() if core is not None else [],
        arrivals=core.arrivals() if core is not None else [],
        plans=core.plans() if core is not None else [],
        tuning_s=core.spent_on_tuning_s() if core is not None else 0.0,
        exposed_s=adapter.exposed_s() if adapter is not None else 0.0,
        failures=adapter.failures() if adapter is not None else 0,
    )


def _begin_anew() -> None:
    global _parents
    _parents = _at_fork
    _group_sizes.clear()  # it can't go on with its parent's


os.register_at_fork(before=_note, after_in_child=_begin_anew)
