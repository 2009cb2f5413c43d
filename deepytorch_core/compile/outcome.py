"""The outcome for a model's regions, as decisions, the report and the profile have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepytorch_core.compile import reasons
from deepytorch_core.compile.phases import Phases
from deepytorch_core.compile.policies import EAGER
from deepytorch_core.compile.region import CompiledRegion

LATE = "helpers have not compiled it in time"
# A gain that noise hides is looked for again if it may be larger: a trial takes a minute.
_LEAST_HIDDEN = 0.05


def chosen(regions: Sequence[CompiledRegion], default: str) -> str:
    """The policies in use, as one name; `default` where none compiles anything yet."""
    names = {name for region in regions for name in region.told.chosen if name != EAGER}
    return "+".join(sorted(names)) or default


def dropped(regions: Sequence[CompiledRegion]) -> dict[str, str]:
    """Why policies were given up, by name and, of several regions, by region."""
    return {
        f"{region.region.name} ({name})" if len(regions) > 1 else name: why
        for region in regions
        for name, why in region.told.dropped.items()
    }


def is_final(regions: Sequence[CompiledRegion], reason: str, times_ms: Mapping[str, float]) -> bool:
    """Whether the next run takes the outcome over.

    It measures again where noise may have hidden a gain that is worth a trial, and tries what
    helpers were late with.
    """
    if any(region.failure is not None and region.failure.endswith(LATE) for region in regions):
        return False
    if reason != reasons.UNDECIDED or EAGER not in times_ms:
        return reason != reasons.UNDECIDED
    return min(times_ms.values()) >= (1 - _LEAST_HIDDEN) * times_ms[EAGER]


def give_up_alike(regions: Sequence[CompiledRegion], failures: Sequence[Mapping[str, str]]) -> None:
    """Have what has failed on a rank fail on all: `failures` says why, for each, by region."""
    for rank, failed in enumerate(failures):
        for region in regions:
            if region.region.name in failed and not region.failure:
                region.failure = f"rank {rank}: {failed[region.region.name]}"


def facts(regions: Sequence[CompiledRegion]) -> dict[str, Any]:
    """The profile's facts of each region, and of all together."""
    return {
        "dropped": dropped(regions),
        "regions": {
            region.region.name: [EAGER] if region.failure else sorted(region.told.chosen)
            for region in regions
        },
        "blocks": {region.region.name: len(region.region.modules) for region in regions},
        "compile_s": round(sum(region.told.compile_s for region in regions), 2),
        "graph_breaks": [line for region in regions for line in region.told.breaks],
    }


def entry(
    regions: Sequence[CompiledRegion],
    chosen: str,
    reason: str,
    times_ms: Mapping[str, float],
    *,
    was_helped: bool,
    phases: Phases,
) -> dict[str, Any]:
    """Make the profile's entry of a model's trial."""
    return {
        "chosen": chosen,
        "reason": reason,
        "times_ms": {name: round(ms, 4) for name, ms in times_ms.items()},
        **facts(regions),
        "was_helped": was_helped,
        "trial_s": {name: round(spent.seconds, 2) for name, spent in phases.spent.items()},
    }
