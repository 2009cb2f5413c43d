"""The report that a run leaves in a folder when it ends, where option `report` asks for it.

Each rank writes its own, `rank-0.json` and so on, as `deepytorch.report().to_dict()`. Whoever ends
later makes one of all that are there: `report.json`, with the forecast and where all of it comes
from, and `report.html`. A rank that is killed leaves none, and the others' is made without it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deepytorch_core.base import config, provenance
from deepytorch_core.base.console import global_rank, has_joined, say
from deepytorch_core.metering import step_timer

# Between this machine and the one that keeps the folder.
_CLOCKS_APART_S = 1.0
_folder: Path | None = None
_began = 0.0  # by the clock of files
_asked_by: int | None = None


def begin(folder: str) -> None:
    """Have this process leave its report in the folder when it ends by itself.

    Children that train nothing leave none: the workers of a DataLoader, for instance.
    """
    global _folder, _began, _asked_by
    _folder = Path(folder).absolute()  # the script may go elsewhere
    _began = time.time()
    if _asked_by != os.getpid():
        _asked_by = os.getpid()
        atexit.register(_leave)


def stop() -> None:
    """Leave none."""
    global _folder
    _folder = None


def _leave() -> None:
    is_child = multiprocessing.parent_process() is not None or os.getpid() != _asked_by
    is_rank = has_joined() or step_timer.current().steps > 0
    if _folder is None or (is_child and not is_rank):
        return
    try:
        page = write(_folder)
    except Exception as error:  # whatever it is, the run itself has done its work
        say(f"report={_folder} is left out: {type(error).__name__}: {error}", level="warning")
        return
    if global_rank() == 0:
        say(f"the report of this run: {page}")


def write(folder: Path) -> Path:
    """Write this rank's report, and that of all ranks so far; return the page's path.

    Raises OSError where the folder can't be written to.
    """
    from deepytorch_core.report import page as report_page
    from deepytorch_core.report import scaling
    from deepytorch_core.report.summary import report

    folder.mkdir(parents=True, exist_ok=True)
    own = {**report().to_dict(), "provenance": _provenance()}
    _replace(folder / f"rank-{own['rank']}.json", own)
    page = folder / "report.html"
    with _locked(folder):
        ranks = _ranks(folder)
        first = ranks[min(ranks)]
        whole = {
            "provenance": first["provenance"],
            "will_it_scale": scaling.of_slowest(list(ranks.values())),
            "ranks": {str(rank): _without_origin(saved) for rank, saved in sorted(ranks.items())},
        }
        _replace(folder / "report.json", whole)
        named = {f"rank {rank}": saved for rank, saved in sorted(ranks.items())}
        report_page.write(page, named, origin=first["provenance"])
    return page


def _ranks(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the reports that the run's ranks have left; an earlier run's are older than this one."""
    found = {}
    for path in folder.glob("rank-*.json"):
        if path.stat().st_mtime >= _began - _CLOCKS_APART_S:
            saved = json.loads(path.read_text(encoding="utf-8"))
            found[int(saved["rank"])] = saved
    return found


def _without_origin(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in saved.items() if name != "provenance"}


def _provenance() -> dict[str, Any]:
    """Return the script, its commit and the command, and what every record has."""
    words = list(sys.orig_argv)
    # `deepytorch run` starts the script by a program of its own.
    words = [word for word in words if not word.endswith(os.path.join("cli", "runner.py"))]
    script = os.path.abspath(getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0])
    return {
        "script": script,
        "script_commit": provenance.commit_of(script, Path(script).parent) or None,
        "command": shlex.join(words),
        "ranks": config.world_size(),
        **provenance.provenance(),
    }


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file in one step, so that no other process reads a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make the report of all."""
    with (folder / ".lock").open("w") as file:
        with contextlib.suppress(OSError):  # file systems without locks: the last one wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
