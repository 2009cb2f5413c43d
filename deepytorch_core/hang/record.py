"""Reads a process's flight record (csrc/comm/flight_record.hpp) from outside or inside.

The record is a memfd, found by its name among the process's descriptors. Its content is another
process's word: every length and index is checked before it is used.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch_core.hang import evidence

NAME = "deepytorch-flight"
STACKS_NAME = "deepytorch-stacks"
VERSION = 3

_MAGIC = b"dptfly01"
_HEADER = struct.Struct("<8s10Iqqqiiqq64s40s40sQ")
_GROUP = struct.Struct("<Iiqqii96s96sQQ120i")
_PEER = struct.Struct("<qq")
_PLACE = struct.Struct("<Ii56s192s")
_ENTRY = struct.Struct("<QQqqQQiiiBBBBBBH4xq")
_ENTRY_BYTES = 128
_ENTRIES = struct.Struct(f"{_ENTRY.format}{_ENTRY_BYTES - _ENTRY.size}x")
_PAGE = 4096
_MOST_BYTES = 64 << 20
_MOST_SIZE = 1 << 16
_WRITTEN = 2

# In the order of the core's enums.
_COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "reduce"),
    *("gather", "scatter", "all_to_all", "send", "recv"),
)
_DTYPES = (
    *("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "complex128", "bytes"),
)
_REDUCE_OPS = (
    *("sum", "avg", "product", "min", "max", "premul_sum", "band", "bor", "bxor", ""),
)  # fmt: skip
_STATES = ("", *evidence.STATES)
_HOW = ("", evidence.NATIVE, evidence.DELEGATED)
_DELEGATED = _HOW.index(evidence.DELEGATED)
_FIRST_MESSAGE = _COLLECTIVES.index("send")
_ON_DEVICE = 2  # of an entry's flags


class RecordError(ValueError):
    """This is no flight record that this version can read."""


class NoRecordError(RecordError):
    """A process has no flight record, or there is no such process."""


@dataclass(frozen=True)
class Record:
    """A flight record at one moment. `peers` are pids by global rank, of ranks on its node."""

    pid: int
    rank: int
    world_size: int
    signal: int
    host: str
    boot_id: str
    job: str
    peers: dict[int, int]
    begun: int
    idle_s: float
    groups: tuple[evidence.Group, ...]
    operations: tuple[evidence.Operation, ...]


def read(pid: int) -> Record:
    """The record of process `pid`. Raises RecordError where it has none, OSError where one can't
    look."""
    return parse(_copy_of(pid), now_ns=_now_ns())


def read_descriptor(descriptor: int) -> Record:
    """The record behind an open descriptor."""
    return parse(_copy(descriptor), now_ns=_now_ns())


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def _copy_of(pid: int) -> bytes:
    descriptor = open_memfd(pid, NAME, os.O_RDONLY)
    if descriptor is None:
        raise NoRecordError(f"process {pid} has no flight record: it made no group with deepytorch")
    try:
        return _copy(descriptor)
    finally:
        os.close(descriptor)


def _copy(descriptor: int) -> bytes:
    # We check a copy: another process still writes to the file itself.
    size = os.fstat(descriptor).st_size
    if not _HEADER.size <= size <= _MOST_BYTES:
        raise RecordError(f"a flight record of {size} bytes")
    return os.pread(descriptor, size, 0)


def open_memfd(pid: int, name: str, flags: int) -> int | None:
    """Opens the memfd of that name that process `pid` holds; None if it holds none.

    A name may go on behind an `@`.
    """
    folder = Path("/proc") / str(pid) / "fd"
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        raise NoRecordError(f"there is no process {pid}") from None
    for entry in entries:
        with contextlib.suppress(OSError):
            link = os.readlink(folder / entry).removesuffix(" (deleted)")
            if link.partition("@")[0] == f"/memfd:{name}":
                return os.open(folder / entry, flags | os.O_CLOEXEC)
    return None


def find() -> list[int]:
    """Processes of this user with a flight record of their own, as far as /proc shows them."""
    found: list[int] = []
    try:
        entries = os.listdir("/proc")
    except OSError:
        return found
    for entry in entries:
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError, RecordError):
            status = os.stat(f"/proc/{entry}")
            if status.st_uid == os.geteuid() and _Layout.of(_copy_of(int(entry))).pid == int(entry):
                found.append(int(entry))
    return sorted(found)


@dataclass(frozen=True)
class _Layout:
    """A record's header, and where its tables lie; groups come behind the header's bytes."""

    pid: int
    rank: int
    world_size: int
    signal: int
    started_ns: int
    host: str
    boot_id: str
    job: str
    begun: int
    groups_at: int
    groups: int
    peers_at: int
    peers: int
    places_at: int
    places: int
    entries_at: int
    entries: int

    @classmethod
    def of(cls, data: bytes) -> _Layout:
        """Raises RecordError unless all tables are in `data`."""
        if len(data) < _HEADER.size:
            raise RecordError("a flight record that is too short")
        magic, version, *rest = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise RecordError("not a flight record")
        if version != VERSION:
            raise RecordError(
                f"a flight record of version {version}; this deepytorch reads version {VERSION}: "
                "use the deepytorch that the job runs with"
            )
        header_bytes, *sizes = rest[:5]
        if sizes != [_GROUP.size, _PEER.size, _PLACE.size, _ENTRY_BYTES] or header_bytes % _PAGE:
            raise RecordError("a flight record of another layout")
        groups, peers, places, entries, pid, rank, world_size, signal, *rest = rest[5:]
        _, _, started_ns, host, boot_id, job, begun = rest
        peers_at = _round_up(header_bytes + groups * _GROUP.size)
        places_at = _round_up(peers_at + peers * _PEER.size)
        entries_at = _round_up(places_at + places * _PLACE.size)
        if entries_at + entries * _ENTRY_BYTES > len(data) or header_bytes < _HEADER.size:
            raise RecordError("a flight record that is shorter than it says")
        return cls(
            *(pid, rank, world_size, signal, started_ns, _text(host), _text(boot_id), _text(job)),
            *(begun, header_bytes, groups, peers_at, peers, places_at, places),
            *(entries_at, entries),
        )

    def read_groups(self, data: bytes) -> dict[int, evidence.Group]:
        """Those that are open, by their id."""
        ats = range(self.groups_at, self.groups_at + self.groups * _GROUP.size, _GROUP.size)
        return dict(each for at in ats if (each := _group(data, at)) is not None)

    def read_peers(self, data: bytes) -> dict[int, int]:
        """Pids of the node's ranks that groups have met, by global rank."""
        table = data[self.peers_at : self.peers_at + self.peers * _PEER.size]
        return {peer - 1: pid for peer, pid in _PEER.iter_unpack(table) if peer > 0 and pid > 0}

    def raw_entries(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        """The fields of each entry, in no order; of those never written the number is 0."""
        return _ENTRIES.iter_unpack(
            data[self.entries_at : self.entries_at + self.entries * _ENTRY_BYTES]
        )


def parse(data: bytes, *, now_ns: int) -> Record:
    """A record's bytes, read when the monotonic clock was at `now_ns`. Raises RecordError."""
    layout = _Layout.of(data)
    groups = layout.read_groups(data)
    places = [_place(data, layout.places_at + i * _PLACE.size) for i in range(layout.places)]
    found = [_operation(entry, (groups, places), now_ns) for entry in layout.raw_entries(data)]
    operations = [each for _, each in sorted(_present(found), key=lambda pair: pair[0])]
    ages = [each.age_s if each.ended_age_s is None else each.ended_age_s for each in operations]
    return Record(
        pid=layout.pid,
        rank=layout.rank,
        world_size=layout.world_size,
        signal=layout.signal,
        host=layout.host,
        boot_id=layout.boot_id,
        job=layout.job,
        peers=layout.read_peers(data),
        begun=layout.begun,
        idle_s=min(ages, default=max(0, now_ns - layout.started_ns) / 1e9),
        groups=tuple(groups.values()),
        operations=tuple(operations),
    )


@dataclass(frozen=True)
class Calls:
    """When a process called which collectives that the core doesn't time: those on devices and
    those of the stock backend. `begun_ns` is by group, sequence and operation, on the clock that
    all processes of the machine share; `groups` are those that are open."""

    rank: int
    job: str
    peers: dict[int, int]
    groups: frozenset[str]
    begun_ns: dict[tuple[str, int, str], int]


def calls(pid: int) -> Calls:
    """Those of process `pid`, at a tenth of what `read` costs; raises as that does."""
    return parse_calls(_copy_of(pid))


def parse_calls(data: bytes) -> Calls:
    """Those in a record's bytes. Raises RecordError."""
    layout = _Layout.of(data)
    names = {number: group.name for number, group in layout.read_groups(data).items()}
    begun_ns = {}
    for entry in layout.raw_entries(data):
        number, sequence, entered_ns, _, _, _, _, _, index, op, *rest = entry
        _, _, flags, _, how, *_ = rest
        timed = how != _DELEGATED and not flags & _ON_DEVICE
        if number and not timed and index in names and op < _FIRST_MESSAGE:
            begun_ns[names[index], sequence, _COLLECTIVES[op]] = entered_ns
    peers = layout.read_peers(data)
    return Calls(layout.rank, layout.job, peers, frozenset(names.values()), begun_ns)


@dataclass(frozen=True)
class Ended:
    """One operation on host memory that has ended; times on the monotonic clock."""

    group: str
    op: str
    native: bool
    bytes: int
    entered_ns: int
    ended_ns: int


def ended(descriptor: int) -> list[Ended]:
    """The newest operations that have ended, oldest first, of this process's own record.

    Some of what `read_descriptor` costs. Without those on devices and those of uneven parts; none
    where the process has no record. A forked child has the number of its parent's descriptor left,
    which may be another file's by now.
    """
    try:
        data = _copy(descriptor)
        layout = _Layout.of(data)
    except (OSError, RecordError):
        return []
    if layout.pid != os.getpid():
        return []
    names = {number: group.name for number, group in layout.read_groups(data).items()}
    found = []
    for entry in layout.raw_entries(data):
        number, _, entered_ns, ended_ns, _, size, _, _, index, op, *rest = entry
        _, _, flags, state, how, *_ = rest
        told = _STATES[state] == evidence.ENDED and _HOW[how] and not flags & 3
        if number and told and index in names:
            operation = Ended(names[index], _COLLECTIVES[op], how == 1, size, entered_ns, ended_ns)
            found.append((number, operation))
    return [operation for _, operation in sorted(found, key=lambda pair: pair[0])]


def _group(data: bytes, at: int) -> tuple[int, evidence.Group] | None:
    """The group at this place with its id; None where there is none, or no longer one."""
    is_open, size, first, stride, listed, number, name, description, *rest = _GROUP.unpack_from(
        data, at
    )
    collectives, messages, *ranks = rest
    sound = name.rstrip(b"\0") and 0 < size <= _MOST_SIZE and 0 <= listed <= len(ranks)
    if not is_open or not sound:
        return None
    # Else listed one by one, as far as there is room.
    evenly = range(first, first + size * stride, stride) if stride else ranks[:listed]
    return number, evidence.Group(
        _text(name), _text(description), tuple(evenly), collectives, messages
    )


def _place(data: bytes, at: int) -> evidence.Place | None:
    """The line of the program in this place of the table; None where there is none yet."""
    state, line, function, file = _PLACE.unpack_from(data, at)
    if state != _WRITTEN or line < 0:
        return None
    return evidence.Place(_text(file), line, _text(function))


def _operation(
    entry: tuple[Any, ...],
    tables: tuple[dict[int, evidence.Group], list[evidence.Place | None]],
    now_ns: int,
) -> tuple[int, evidence.Operation] | None:
    groups, places = tables
    number, sequence, entered, ended, count, size, *rest = entry
    root, tag, index, collective, dtype, reduce_op, flags, state, how, place, limit_ms = rest
    group = groups.get(index)
    if number == 0 or group is None:
        return None  # not written yet, or of a group that is gone
    known = collective < len(_COLLECTIVES) and dtype < len(_DTYPES) and how < len(_HOW)
    if not known or not 0 < state < len(_STATES) or reduce_op >= len(_REDUCE_OPS):
        return None
    return number, evidence.Operation(
        group=group.name,
        sequence=sequence,
        op=_COLLECTIVES[collective],
        dtype=_DTYPES[dtype],
        reduce_op=_REDUCE_OPS[reduce_op],
        count=count,
        bytes=size,
        root=root,
        tag=tag,
        uneven=bool(flags & 1),
        on_device=bool(flags & 2),
        asynchronous=bool(flags & 4),
        how=_HOW[how],
        state=_STATES[state],
        age_s=max(0, now_ns - entered) / 1e9,
        ended_age_s=max(0, now_ns - ended) / 1e9 if ended > 0 and state in (2, 3) else None,
        at=places[place - 1] if 0 < place <= len(places) else None,
        limit_s=max(0, limit_ms) / 1e3,
    )


def _present(
    found: list[tuple[int, evidence.Operation] | None],
) -> list[tuple[int, evidence.Operation]]:
    return [each for each in found if each is not None]


def _round_up(value: int) -> int:
    return (value + _PAGE - 1) // _PAGE * _PAGE


def _text(field: bytes) -> str:
    text = field.partition(b"\0")[0].decode(errors="replace")
    # It is shown on terminals.
    return "".join(letter if letter.isprintable() else "?" for letter in text)
