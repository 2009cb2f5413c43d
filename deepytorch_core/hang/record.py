"""Reads a process's flight record (csrc/comm/flight_record.hpp) from outside or inside.

The record is a memfd, found by its name among the process's descriptors. Its content is another
process's word: every length and index is checked before it is used.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from deepytorch_core.hang import evidence

NAME = "deepytorch-flight"
STACKS_NAME = "deepytorch-stacks"
VERSION = 2

_MAGIC = b"dptfly01"
_HEADER = struct.Struct("<8s10Iqqqiiqq64s40s40sQ")
_GROUP = struct.Struct("<Iiqqii96s96sQQ120i")
_PEER = struct.Struct("<qq")
_PLACE = struct.Struct("<Ii56s192s")
_ENTRY = struct.Struct("<QQqqQQiiiBBBBBBH")
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
_HOW = ("", "native", "delegated")


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
    descriptor = open_memfd(pid, NAME, os.O_RDONLY)
    if descriptor is None:
        raise NoRecordError(f"process {pid} has no flight record: it made no group with deepytorch")
    try:
        return read_descriptor(descriptor)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int) -> Record:
    """The record behind an open descriptor."""
    size = os.fstat(descriptor).st_size
    if not _HEADER.size <= size <= _MOST_BYTES:
        raise RecordError(f"a flight record of {size} bytes")
    # Copied first: what another process still writes can't change under our checks.
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return parse(os.pread(descriptor, size, 0), now_ns=now)


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
    """Processes of this user with a flight record of their own."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError, RecordError):
            status = os.stat(f"/proc/{entry}")
            if status.st_uid == os.geteuid() and read(int(entry)).pid == int(entry):
                found.append(int(entry))
    return sorted(found)


def parse(data: bytes, *, now_ns: int) -> Record:
    """A record's bytes, read when the monotonic clock was at `now_ns`. Raises RecordError."""
    if len(data) < _HEADER.size:
        raise RecordError("a flight record that is too short")
    magic, version, *rest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise RecordError("not a flight record")
    if version != VERSION:
        raise RecordError(
            f"a flight record of version {version}; this deepytorch reads version {VERSION}: use "
            "the deepytorch that the job runs with"
        )
    header_bytes, group_bytes, peer_bytes, place_bytes, entry_bytes, *rest = rest
    groups, peers, places, entries, *rest = rest
    pid, rank, world_size, signal, _, _, _, host, boot_id, job, begun = rest
    sizes = (group_bytes, peer_bytes, place_bytes, entry_bytes)
    if sizes != (_GROUP.size, _PEER.size, _PLACE.size, _ENTRY_BYTES) or header_bytes % _PAGE:
        raise RecordError("a flight record of another layout")
    peers_at = _round_up(header_bytes + groups * group_bytes)
    places_at = _round_up(peers_at + peers * peer_bytes)
    entries_at = _round_up(places_at + places * place_bytes)
    if entries_at + entries * entry_bytes > len(data) or header_bytes < _HEADER.size:
        raise RecordError("a flight record that is shorter than it says")
    tables = dict(
        each
        for i in range(groups)
        if (each := _group(data, header_bytes + i * group_bytes)) is not None
    )
    lines = [_place(data, places_at + i * place_bytes) for i in range(places)]
    found = [
        _operation(data, entries_at + i * entry_bytes, (tables, lines), now_ns)
        for i in range(entries)
    ]
    operations = [each for _, each in sorted(_present(found), key=lambda pair: pair[0])]
    started = rest[6]
    ages = [each.age_s if each.ended_age_s is None else each.ended_age_s for each in operations]
    known = {}
    for i in range(peers):
        peer, peer_pid = _PEER.unpack_from(data, peers_at + i * peer_bytes)
        if peer > 0 and peer_pid > 0:
            known[peer - 1] = peer_pid
    return Record(
        pid=pid,
        rank=rank,
        world_size=world_size,
        signal=signal,
        host=_text(host),
        boot_id=_text(boot_id),
        job=_text(job),
        peers=known,
        begun=begun,
        idle_s=min(ages, default=max(0, now_ns - started) / 1e9),
        groups=tuple(tables.values()),
        operations=tuple(operations),
    )


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
    data = b""
    with contextlib.suppress(OSError):
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        return []
    _, _, header_bytes, group_bytes, peer_bytes, place_bytes, _, *rest = _HEADER.unpack_from(data)
    groups, peers, places, entries, pid, *_ = rest
    if pid != os.getpid():
        return []
    at = _round_up(_round_up(header_bytes + groups * group_bytes) + peers * peer_bytes)
    at = _round_up(at + places * place_bytes)
    names: dict[int, str] = {}
    for index in range(groups):
        each = _group(data, header_bytes + index * group_bytes)
        if each is not None:
            names[each[0]] = each[1].name
    found = []
    for entry in _ENTRIES.iter_unpack(data[at : at + entries * _ENTRY_BYTES]):
        number, _, entered_ns, ended_ns, _, size, _, _, index, op, *rest = entry
        _, _, flags, state, how, _ = rest
        told = _STATES[state] == evidence.ENDED and _HOW[how] and not flags & 3
        if number and told and index in names:
            one = Ended(names[index], _COLLECTIVES[op], how == 1, size, entered_ns, ended_ns)
            found.append((number, one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


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
    data: bytes,
    at: int,
    tables: tuple[dict[int, evidence.Group], list[evidence.Place | None]],
    now_ns: int,
) -> tuple[int, evidence.Operation] | None:
    groups, places = tables
    number, sequence, entered, ended, count, size, *rest = _ENTRY.unpack_from(data, at)
    root, tag, index, collective, dtype, reduce_op, flags, state, how, place = rest
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
