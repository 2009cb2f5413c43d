"""Writes evidence as torch's flight recorder dumps it, for torch's own analyzer.

`python -m torch.distributed.flight_recorder.fr_trace DIR` reads one pickle for each rank. What it
can't express (sends and receives from any rank, uneven parts) is left out or written as sizes.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.hang import evidence
from deepytorch_core.hang.evidence import Frame, Group, Operation, Place, Rank

VERSION = "2.10"
"""The version of the dump's layout, which torch 2.13 writes."""
PREFIX = "deepytorch_trace_"

_NAMES = {
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
}
# torch's states: a collective that was only put on a stream is scheduled for it.
_STATES = {
    evidence.ENTERED: "started",
    evidence.ENDED: "completed",
    evidence.FAILED: "started",
    evidence.ISSUED: "scheduled",
}
_DTYPES = {
    "bool": "Bool",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


def write(ranks: Iterable[Rank], folder: Path) -> list[Path]:
    """One file for each rank that has a record; returns their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in ranks:
        if not rank.has_record:
            continue
        path = folder / f"{PREFIX}{rank.rank}"
        path.write_bytes(pickle.dumps(dump(rank)))
        paths.append(path)
    return paths


def dump(rank: Rank) -> dict[str, Any]:
    """A rank's record as the dict that torch pickles."""
    now_ns = time.time_ns()
    groups = {group.name: group for group in rank.groups}
    entries = []
    for number, operation in enumerate(rank.operations):
        group = groups.get(operation.group)
        skipped = operation.is_message and operation.root == evidence.ANY_RANK
        if group is not None and not skipped:
            entries.append(_entry(rank, group, operation, number, now_ns))
    return {
        "version": VERSION,
        "pg_config": {
            group.name: {
                "name": group.name,
                "desc": group.description or "undefined",
                "ranks": json.dumps(list(group.ranks)),
            }
            for group in rank.groups
        },
        "pg_status": {
            group.name: {
                "last_enqueued_collective": group.collectives,
                "last_started_collective": -1,
                "last_completed_collective": -1,
            }
            for group in rank.groups
        },
        "entries": entries,
    }


def _entry(
    rank: Rank, group: Group, operation: Operation, number: int, now_ns: int
) -> dict[str, Any]:
    size = len(group.ranks)
    whole, part = [operation.count * size], [operation.count]
    inputs = whole if operation.op in ("reduce_scatter", "scatter") else part
    outputs = whole if operation.op in ("all_gather", "gather") else part
    dtype = _DTYPES.get(operation.dtype, "Byte")
    created = now_ns - int(operation.age_s * 1e9)
    ended = operation.ended_age_s
    return {
        "record_id": number,
        "pg_id": list(g.name for g in rank.groups).index(group.name),
        "process_group": (group.name, group.description or "undefined"),
        "collective_seq_id": 0 if operation.is_message else operation.sequence,
        "p2p_seq_id": operation.sequence if operation.is_message else 0,
        "op_id": number + 1,
        "profiling_name": f"gloo:{_profiling_name(rank, group, operation)}",
        "time_created_ns": created,
        "input_sizes": [] if operation.op == "recv" else [inputs],
        "input_dtypes": [] if operation.op == "recv" else [dtype],
        "output_sizes": [] if operation.op == "send" else [outputs],
        "output_dtypes": [] if operation.op == "send" else [dtype],
        "state": _STATES[operation.state],
        "time_discovered_started_ns": created,
        "time_discovered_completed_ns": now_ns - int(ended * 1e9) if ended is not None else None,
        "retired": operation.state == evidence.ENDED,
        "timeout_ms": 0,
        "is_p2p": operation.is_message,
        "frames": [
            {"name": frame.function, "filename": frame.file, "line": frame.line}
            for frame in _frames(rank, operation)
        ],
    }


def _frames(rank: Rank, operation: Operation) -> Sequence[Frame | Place]:
    """The whole stack of who is inside; of the others the line that called it, where sampled."""
    if operation.state == evidence.ENTERED and rank.frames:
        return rank.frames
    return () if operation.at is None else (operation.at,)


def _profiling_name(rank: Rank, group: Group, operation: Operation) -> str:
    if not operation.is_message:
        return _NAMES.get(operation.op, operation.op)
    mine = group.ranks.index(rank.rank) if rank.rank in group.ranks else 0
    arrow = "->" if operation.op == "send" else "<-"
    return f"{operation.op} {mine}{arrow}{operation.root}"
