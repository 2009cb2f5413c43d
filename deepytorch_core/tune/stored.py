"""The outcome of `deepytorch tune` in the profile: read, checked and written.

It is one of the profile's decisions (`guard.profile`), for one script, number of ranks, machine and
versions. Where nothing beat the defaults it holds no settings, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepytorch_core.base import config
from deepytorch_core.base.console import say_once
from deepytorch_core.guard import profile
from deepytorch_core.tune.knobs import Setting, as_dict, checked, in_words

WHAT = "deepytorch tune"


@dataclass(frozen=True)
class Tuned:
    """The profile's entry for a job.

    `times_ms` are a step's, as measured when the winner was confirmed, of "defaults" and "tuned";
    empty if none was.
    """

    setting: Setting
    reason: str
    times_ms: Mapping[str, float]


def key(
    script: str,
    *,
    world_size: int,
    local_world_size: int,
    emulated: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what settings hold for, besides this machine and these versions.

    Args:
        script: the script's resolved path.
        world_size: ranks of the job.
        local_world_size: those on rank 0's node.
        emulated: the network that was emulated, if one was: no job finds such an entry.
    """
    facts: dict[str, Any] = {"script": script, "local_world_size": local_world_size}
    if emulated is not None:
        facts["emulated"] = dict(emulated)
    return profile.key(WHAT, facts, world_size=world_size)


def look_up(script: str, *, world_size: int, local_world_size: int) -> Tuned | None:
    """Return the profile's entry for a job of this script, machine and versions; see `key`."""
    # Most profiles have nothing of the kind, and what this machine is takes a moment to learn.
    if not any(entry["for"].get("what") == WHAT for entry in profile.entries()):
        return None
    return find(key(script, world_size=world_size, local_world_size=local_world_size))


def find(wanted: Mapping[str, Any]) -> Tuned | None:
    """Return the profile's entry for this job; None if there is none, or none to be believed."""
    found = profile.find(wanted)
    if found is None:
        return None
    try:
        setting = checked(found.get("settings"))
        times = found.get("times_ms", {})
        if not isinstance(times, Mapping) or not all(
            isinstance(value, int | float) for value in times.values()
        ):
            raise ValueError("times_ms are no numbers")
    except ValueError as error:
        say_once(
            f"settings of deepytorch tune in {config.profile_path()} are left out: {error}",
            level="warning",
        )
        return None
    return Tuned(setting, str(found.get("reason", "")), dict(times))


def keep(wanted: Mapping[str, Any], tuned: Tuned, details: Mapping[str, Any]) -> bool:
    """Write an outcome to the profile, with what was tried; whether it is there now."""
    profile.keep(wanted, {**entry(tuned), **details})
    return find(wanted) == tuned


def entry(tuned: Tuned) -> dict[str, Any]:
    """An outcome as JSON has it."""
    return {
        "chosen": in_words(tuned.setting),
        "reason": tuned.reason,
        "settings": as_dict(tuned.setting),
        "times_ms": dict(tuned.times_ms),
    }
