"""Holds all that is known of each rank when a job hangs: plain values, which travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENTERED, ENDED, FAILED, ISSUED = "entered", "ended", "failed", "issued"
STATES = (ENTERED, ENDED, FAILED, ISSUED)
NATIVE, DELEGATED = "native", "delegated"

RUNNING, STOPPED, TRACED, IN_KERNEL, GONE, MISSING, UNKNOWN = (
    "running",
    "stopped",
    "traced",
    "in the kernel",
    "gone",
    "missing",
    "unknown",
)
PROCESS_STATES = (RUNNING, STOPPED, TRACED, IN_KERNEL, GONE, MISSING, UNKNOWN)

MESSAGES = ("send", "recv")
ANY_RANK = -1

_MOST_RANKS = 1 << 16
_MOST_OPERATIONS = 1 << 14
_MOST_GROUPS = 1 << 12
_MOST_TEXT = 1 << 18


@dataclass(frozen=True)
class Group:
    """A process group as one of its ranks knows it.

    `collectives` and `messages` count what this rank has begun in it so far; `ranks` are global.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    collectives: int
    messages: int


@dataclass(frozen=True)
class Place:
    """A line of the program. Of a long `file` only the end is known, behind three dots."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Operation:
    """One call of a rank. `sequence` counts the group's collectives, or its sends and receives.

    `root` is a rank in the group: the root, or the peer of a message. `asynchronous`: nobody has
    waited for it yet. Ages are seconds before the evidence was taken; `ended_age_s` is None where
    it has not ended, or nobody could tell. `at` is the line that called it, of the user's own code
    if there is any; None: not sampled. `limit_s` is its time limit; 0: not known.
    """

    group: str
    sequence: int
    op: str
    dtype: str
    reduce_op: str
    count: int
    bytes: int
    root: int
    tag: int
    uneven: bool
    on_device: bool
    asynchronous: bool
    how: str
    state: str
    age_s: float
    ended_age_s: float | None
    at: Place | None = None
    limit_s: float = 0.0

    @property
    def is_message(self) -> bool:
        return self.op in MESSAGES


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack; `code` is the source line, where it could be read."""

    file: str
    line: int
    function: str
    code: str = ""
    mine: bool = False
    """Whether it is of the user's own code, not of a library's."""


@dataclass(frozen=True)
class Rank:
    """One rank. `idle_s` is how long ago it last began or ended an operation.

    `operations` are its newest, oldest first; `frames` is its main thread, innermost first.
    """

    rank: int
    host: str = ""
    pid: int = 0
    process: str = RUNNING
    detail: str = ""
    idle_s: float = 0.0
    groups: tuple[Group, ...] = ()
    operations: tuple[Operation, ...] = ()
    frames: tuple[Frame, ...] = ()
    stacks: str = ""

    @property
    def has_record(self) -> bool:
        return bool(self.groups)

    def group(self, name: str) -> Group | None:
        """Its view of the group called `name`."""
        return next((group for group in self.groups if group.name == name), None)


def to_json(rank: Rank) -> str:
    """One rank's evidence as text."""
    return json.dumps(dataclasses.asdict(rank), separators=(",", ":"))


def from_json(text: str | bytes) -> Rank:
    """The reverse of `to_json`.

    Raises ValueError for anything that `to_json` can't have written: it may come from anywhere.
    """
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no evidence of a rank: {error}") from None
    fields = _fields(Rank, values)
    fields["groups"] = tuple(_group(group) for group in _list(fields, "groups", _MOST_GROUPS))
    fields["operations"] = tuple(
        _operation(operation) for operation in _list(fields, "operations", _MOST_OPERATIONS)
    )
    fields["frames"] = tuple(
        Frame(**_fields(Frame, frame)) for frame in _list(fields, "frames", 4096)
    )
    rank = Rank(**fields)
    if rank.process not in PROCESS_STATES or not 0 <= rank.rank < 1 << 31:
        raise ValueError("no evidence of a rank: an unknown process state or rank")
    return rank


def _group(values: Any) -> Group:
    fields = _fields(Group, values)
    ranks = _list(fields, "ranks", _MOST_RANKS)
    if not all(isinstance(rank, int) for rank in ranks):
        raise ValueError("no evidence of a rank: a group's ranks are no numbers")
    return Group(**{**fields, "ranks": tuple(ranks)})


def _operation(values: Any) -> Operation:
    fields = _fields(Operation, values)
    if fields["at"] is not None:
        fields["at"] = Place(**_fields(Place, fields["at"]))
    operation = Operation(**fields)
    if operation.state not in STATES:
        raise ValueError(f"no evidence of a rank: an operation is {operation.state!r}")
    return operation


_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "Place | None": (dict, type(None)),
}


def _fields(kind: Any, values: Any) -> dict[str, Any]:
    """`values` as keywords of the record `kind`, each of its type."""
    expected = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if not isinstance(values, dict) or values.keys() != expected.keys():
        raise ValueError(f"no evidence of a rank: not the fields of {kind.__name__}")
    for name, type_name in expected.items():
        allowed = _KINDS.get(type_name, (list,))
        value = values[name]
        right = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
        if not right or (isinstance(value, str) and len(value) > _MOST_TEXT):
            raise ValueError(f"no evidence of a rank: {kind.__name__}.{name} is {type(value)}")
    return dict(values)


def _list(fields: dict[str, Any], name: str, most: int) -> list[Any]:
    values: list[Any] = fields[name]
    if len(values) > most:
        raise ValueError(f"no evidence of a rank: {len(values)} {name}")
    return values
