"""How a verdict words ranks, operations and places."""

from __future__ import annotations

import os
from collections.abc import Sequence

from deepytorch_core.hang import evidence, stacks
from deepytorch_core.hang.evidence import Group, Operation, Rank

_MOST_NAMED = 6
_MOST_CODE = 60
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def rank(known: Rank) -> str:
    """ "rank 5 (node b, pid 4711)"."""
    facts = [f"node {known.host}"] if known.host else []
    facts += [f"pid {known.pid}"] if known.pid else []
    return f"rank {known.rank}" + (f" ({', '.join(facts)})" if facts else "")


def ranks(numbers: Sequence[int]) -> str:
    """ "rank 5", "ranks 5 and 7", "ranks 1, 2, 3, 4, 5, 6 and 58 more"."""
    named = [str(number) for number in numbers[:_MOST_NAMED]]
    if len(numbers) > _MOST_NAMED:
        return f"ranks {', '.join(named)} and {len(numbers) - _MOST_NAMED} more"
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def group(known: Group) -> str:
    """ "group dp": what its maker called it, or else its name."""
    description = known.description
    return f"group {description if description not in ('', 'undefined') else known.name}"


def operation(known: Operation, group_text: str) -> str:
    """ "all_reduce #1234 of group dp (64 MB bfloat16)"."""
    size = f" ({sized(known.bytes)} {known.dtype})" if known.op != "barrier" else ""
    return f"{known.op} #{known.sequence} of {group_text}{size}"


def call(known: Operation) -> str:
    """ "all_reduce (1024 x float32, sum)": all that ranks must agree on."""
    if known.op == "barrier":
        return known.op
    parts = [f"{'uneven parts' if known.uneven else known.count} x {known.dtype}"]
    parts += [known.reduce_op] if known.reduce_op else []
    parts += [f"root {known.root}"] if known.op in _ROOTED else []
    return f"{known.op} ({', '.join(parts)})"


def signature(known: Operation) -> object:
    """Equal where ranks agree. A part of an uneven exchange may be of any size."""
    if known.op == "barrier":
        return known.op
    count = -1 if known.uneven or known.op == "all_to_all" else known.count
    root = known.root if known.op in _ROOTED else 0
    return known.op, known.dtype, known.reduce_op, count, root


def state(known: Rank) -> str:
    """Say what this rank does instead, as half a sentence."""
    if known.process == evidence.STOPPED:
        return (
            f"it is stopped by a signal (SIGSTOP or Ctrl-Z): kill -CONT {known.pid} lets it go on"
        )
    if known.process == evidence.TRACED:
        return "it is held by a debugger" + (f" ({known.detail})" if known.detail else "")
    if known.process == evidence.GONE:
        return "its process has ended" + (f" ({known.detail})" if known.detail else "")
    if known.process == evidence.MISSING:
        return f"nothing is known of it{known.detail}"
    for_long = f" for {duration(known.idle_s)}"
    if known.process == evidence.IN_KERNEL:
        return f"it waits in the kernel for a device or a file system{_detail(known)}{for_long}"
    place = stacks.where(known.frames)
    if place is None:
        facts = [each for each in (known.detail, _last(known)) if each]
        text = f"it is outside of any operation{for_long}, and gave no Python stack"
        return text + (f": {', '.join(facts)}" if facts else "")
    return f"it is in {frame(place)}{for_long}"


def place(known: Rank) -> str:
    """Return where its main thread is; empty if that is not known."""
    found = stacks.where(known.frames)
    return frame(found) if found is not None else ""


def last_call(known: Rank) -> str:
    """ "called all_reduce #12 at train.py:57 step": the newest whose line was sampled."""
    for each in reversed(known.operations):
        if each.at is not None:
            where = f"{os.path.basename(each.at.file)}:{each.at.line or '?'} {each.at.function}"
            return f"called {each.op} #{each.sequence} at {where}"
    return ""


def _last(known: Rank) -> str:
    call = last_call(known)
    return f"its last known call is {call.removeprefix('called ')}" if call else ""


def frame(known: evidence.Frame) -> str:
    """ "train.py:88 next(loader)"."""
    code = known.code or known.function
    shown = code if len(code) <= _MOST_CODE else code[: _MOST_CODE - 3] + "..."
    return f"{os.path.basename(known.file)}:{known.line or '?'} {shown}"


def message_not_answered(known: Operation, waiting: int, *, any_of: int) -> str:
    """Say what a peer did not do about a rank's send or receive."""
    done = "sent to" if known.op == "recv" else "received from"
    if known.root == evidence.ANY_RANK and any_of > 1:
        return f"and {any_of - 1} others never sent to rank {waiting}, which receives from any rank"
    return (
        f"never {done} rank {waiting}, which waits in {known.op} #{known.sequence} "
        f"({sized(known.bytes)} {known.dtype}, tag {known.tag})"
    )


def halves_fit(half: Operation, other: Operation) -> bool:
    """Whether a send and a receive belong together."""
    return half.tag == other.tag and half.bytes == other.bytes and half.dtype == other.dtype


def two_halves(first: int, first_half: Operation, second: int, second_half: Operation) -> str:
    """Both sides of a message that does not arrive."""

    def half(number: int, known: Operation) -> str:
        verb = "sends" if known.op == "send" else "receives"
        return f"rank {number} {verb} {known.count} x {known.dtype} with tag {known.tag}"

    what = f"{half(first, first_half)}, {half(second, second_half)}"
    if halves_fit(first_half, second_half):
        return f"{what}: a message that does not get through; not the program is stuck"
    return f"{what}: these do not belong together"


def sized(size: int) -> str:
    """ "64 MB": powers of ten, as bandwidths are."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"


def duration(seconds: float) -> str:
    """ "0.4 s", "312 s", "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _detail(known: Rank) -> str:
    return f" {known.detail}" if known.detail else ""
