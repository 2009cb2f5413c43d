"""The start of a job: what `deepytorch tune` found for it, the same on every rank.

Rank 0 looks in its profile and tells the others over the store, when the job's default group is
made: bucket sizes or numbers of sockets that differ between ranks would not fit together.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from deepytorch_core import guard
from deepytorch_core.base import config, decisions, stores
from deepytorch_core.base.console import say
from deepytorch_core.tune import in_force, stored
from deepytorch_core.tune.knobs import DEFAULTS, checked, in_words

_LIMIT_S = 60.0
_KEY = "settings"

_script: str | None = None
_done = False


def script() -> str | None:
    """The program's resolved path, as it was when the default group was made; None before."""
    return _script


def together(store: Any, *, rank: int, size: int) -> None:
    """Put in force what rank 0's profile has for this job; called by all ranks for each group.

    Args:
        store: a torch Store with a key space of its own for this.
        rank: this process's in the default group.
        size: of the default group.

    With tune=off or force nothing is taken. Never raises for what a profile can be.
    """
    global _script, _done
    # The first of several groups in the life of a process is the job. Others may be new to it:
    # rank 0 answers those too.
    is_late = _done or in_force.is_decided()
    if not _done:
        _script = os.path.realpath(sys.argv[0]) if sys.argv else ""
    _done = True
    if size == 1 or (is_late and rank != 0):
        return
    mine = json.dumps({}) if is_late else _look_up(size) if rank == 0 else ""
    if rank != 0 and not stores.wait(store, [_KEY], _LIMIT_S):
        mine = json.dumps({})  # then nothing is set, on no rank
    final = stores.first(store, _KEY, mine) if mine else stores.text(store, _KEY)
    if is_late:
        return
    told = json.loads(final)
    if not told:
        return
    setting = checked(told["settings"])
    in_force.put_in_force(setting)
    if setting:
        decisions.record(
            f"settings of {stored.WHAT}",
            in_words(setting),
            f"{told['reason']}; DEEPYTORCH_TUNE=off leaves them out",
            times_ms=told["times_ms"],
        )


def _look_up(size: int) -> str:
    """Return what rank 0's profile has, as JSON; an empty object for nothing."""
    if config.current().tune != "auto" or not _script:
        return json.dumps({})
    try:
        found = stored.look_up(_script, world_size=size, local_world_size=config.local_world_size())
    except Exception as error:  # the other ranks wait for an answer, whatever a profile holds
        say(f"settings of {stored.WHAT} are left out: {guard.first_line(error)}", level="warning")
        return json.dumps({})
    if found is None or found.setting == DEFAULTS:
        return json.dumps({})
    settings = dict(found.setting)
    told = {"settings": settings, "reason": found.reason, "times_ms": dict(found.times_ms)}
    return json.dumps(told)
