"""A verdict with all that it is drawn from, for people: a table of ranks, then their stacks."""

from __future__ import annotations

from collections.abc import Sequence

from deepytorch_core.hang import evidence, words
from deepytorch_core.hang.evidence import Operation, Rank
from deepytorch_core.hang.verdict import Verdict

_MOST_STACKS = 8
_MOST_ROWS = 64
_MOST_STACK_LINES = 60


def full(ranks: Sequence[Rank], found: Verdict) -> str:
    """The table, then the stacks of the ranks that are to blame first; no sentence."""
    shown = _in_order(ranks, found)
    lines = table(shown[:_MOST_ROWS], found)
    if len(shown) > _MOST_ROWS:
        lines.append(f"... and {len(shown) - _MOST_ROWS} more")
    with_stacks = [rank for rank in shown if rank.stacks]
    for rank in with_stacks[:_MOST_STACKS]:
        stack = _without_ours(rank.stacks).splitlines()
        lines += ["", f"--- {words.rank(rank)}: Python stacks", *stack[-_MOST_STACK_LINES:]]
    if len(with_stacks) > _MOST_STACKS:
        lines += ["", f"... and the stacks of {len(with_stacks) - _MOST_STACKS} more ranks"]
    return "\n".join(lines)


def table(ranks: Sequence[Rank], found: Verdict) -> list[str]:
    """One row for each rank: what it is in, since when, and what it does."""
    rows: list[tuple[str, ...]] = [
        ("rank", "node", "pid", "process", "operation", "for", "last of the group", "at")
    ]
    rows += [_row(rank, found) for rank in ranks]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _without_ours(text: str) -> str:
    """Without the threads that were asking others for their stacks just then."""
    threads = text.rstrip().split("\n\n")
    asking = "deepytorch_core/hang/stacks.py"
    return "\n\n".join(thread for thread in threads if asking not in thread) or text.rstrip()


def _in_order(ranks: Sequence[Rank], found: Verdict) -> list[Rank]:
    return sorted(ranks, key=lambda rank: (rank.rank not in found.ranks, rank.rank))


def _row(rank: Rank, found: Verdict) -> tuple[str, ...]:
    now = current(rank)
    group = rank.group(found.group) if found.group else None
    place = words.place(rank) or words.last_call(rank)
    return (
        str(rank.rank),
        rank.host,
        str(rank.pid or ""),
        rank.process,
        f"{now.op} #{now.sequence} of {now.group} ({now.state})" if now else "none",
        words.duration(now.age_s if now else rank.idle_s),
        f"#{group.collectives} of {group.name}" if group else "",
        place,
    )


def current(rank: Rank) -> Operation | None:
    """Return the operation that the rank is in, or else the one that has just failed."""
    inside = [each for each in rank.operations if each.state == evidence.ENTERED]
    if inside:
        return min(inside, key=lambda each: (each.is_message, each.asynchronous))
    last = rank.operations[-1] if rank.operations else None
    return last if last is not None and last.state == evidence.FAILED else None
