"""Reports on a run that failed: the script's own error, not the launcher's words or ours."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from deepytorch_core.compare import result
from deepytorch_core.compare.probe import STEPPED

_TAIL_LINES = 40
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?")
_REFUSAL = re.compile(r"^deepytorch_core\.base\.errors\.CompareError: (.*)")
_LAUNCHER = re.compile(r"^(=+$|[IWEF]\d{4} .* torch/distributed/)")
# The launcher says this as it ends the processes; before that it says only how it starts them.
_END = re.compile(r"^[WEF]\d{4} .* torch/distributed/elastic/(agent|multiprocessing)/")
# It begins before the script, and may say so.
_BEGIN = re.compile(r"^[IWEF]\d{4} .* torch/distributed/run\.py:")
_OWN_RANKS = re.compile(r"^deepytorch: (the script starts processes itself; .*)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+)')
_LIBRARY = re.compile(r"/site-packages/|/lib/python3|^<")
# Between the launcher and the script's first line.
_CLI, _CORE = Path(__file__).parents[1], Path(__file__).parents[3] / "deepytorch_core"
_OURS = (
    *(str(_CLI / "runner.py"), str(_CORE / "compare"), str(_CORE / "patching.py")),
    "<frozen runpy>",
)


def words(output: str, status: int | None, *, arm: str, hint: str, limit_s: float) -> str:
    """An error's text, its first line the whole of it.

    Args:
        output: what the processes of the run wrote.
        status: the launcher's exit status; None where the time was over.
        arm: the arm's name.
        hint: what else to say; may be empty.
        limit_s: how long the run might have taken.
    """
    lines = [_RANK.sub("", line) for line in output.splitlines()]
    for number, line in enumerate(lines):
        refusal = _REFUSAL.match(line)
        if refusal is not None:  # by which we have stopped the script ourselves
            return f"{refusal[1]}{_place(lines[:number])}"
    how = f"failed with exit status {status}"
    if status is None:
        how = f"did not take its steps within {limit_s:g} s (--timeout-s)"
    traceback = [] if status is None else _first_traceback(lines)
    own = _scripts_own(lines)
    shown = traceback[: 2 * _TAIL_LINES] or own[-_TAIL_LINES:]
    if status is None:
        reason = next((told[1] for line in lines if (told := _OWN_RANKS.match(line))), "")
    else:
        reason = _error(traceback) or next((line for line in reversed(own) if line.strip()), "")
    first = f"the script {how} under the arm {arm!r}" + (f": {reason}" if reason else "")
    return "\n".join([first, *shown, *([hint] if hint else [])])


def with_ranks(words: str, folder: Path, world_size: int, *, arm: str) -> str:
    """The same, with what ranks that were stopped have to do with it.

    Args:
        words: the error's text.
        folder: where the ranks left what they measured.
        world_size: their number.
        arm: the arm's name.
    """
    records = {rank: folder / f"rank{rank}.json" for rank in range(world_size)}
    done = [
        rank
        for rank, file in records.items()
        if file.exists() and json.loads(file.read_text(encoding="utf-8"))["is_complete"]
    ]
    missing = [rank for rank, file in records.items() if not file.exists()]
    if not done or not missing:
        return words
    idle = [rank for rank in missing if not (folder / f"{STEPPED}{rank}").exists()]
    if idle:
        return f"{result.no_steps(arm, idle, world_size)}\n{words}"
    stopped, other = done[0], missing[0]
    why = f"rank {stopped} had its steps and was stopped before rank {other}: maybe that is why"
    return f"{words}\n{why}"


def _scripts_own(lines: Sequence[str]) -> list[str]:
    """Without what the launcher says, up to where it ends the processes."""
    end = next((number for number, line in enumerate(lines) if _END.match(line)), len(lines))
    return [line for line in lines[:end] if not _BEGIN.match(line)]


def _place(before: Sequence[str]) -> str:
    """Return the script's place, in parentheses: the last frame neither a library's nor ours."""
    for line in reversed(before):
        frame = _FRAME.match(line)
        if frame is not None and not frame[1].startswith(_OURS) and not _LIBRARY.search(frame[1]):
            return f" ({frame[1]}, line {frame[2]})"
    return ""


def _first_traceback(lines: Sequence[str]) -> list[str]:
    """The first one with its error, from the script's own first line on; empty if there is none."""
    if _TRACEBACK not in lines:
        return []
    taken: list[str] = []
    ours = False
    for line in lines[lines.index(_TRACEBACK) :]:
        if line == _TRACEBACK and taken and not _is_chained(taken):
            break  # another rank's
        frame = _FRAME.match(line)
        if frame is not None:
            ours = frame[1].startswith(_OURS)
        elif not line.startswith("    "):
            ours = False
            if _LAUNCHER.match(line):
                break
        if not ours:
            taken.append(line)
    while taken and not taken[-1].strip():
        taken.pop()
    return taken


def _is_chained(taken: Sequence[str]) -> bool:
    said = next((line for line in reversed(taken) if line.strip()), "")
    return said.startswith(("During handling of the above", "The above exception was"))


def _error(traceback: Sequence[str]) -> str:
    """The line that follows the last frame."""
    after = len(traceback)
    while after > 0 and not traceback[after - 1].startswith(("  ", _TRACEBACK)):
        after -= 1
    return traceback[after] if after < len(traceback) else ""
