"""Decides which knobs have an effect in a job, and says why the others are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepytorch_core.tune.knobs import FRAMEWORK, KNOBS, LAYERS, Knob


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The facts that a run of the script with its defaults has shown.

    Args:
        device: "cpu" or "cuda".
        num_nodes: nodes that its ranks are on.
        native_calls: collectives that native code carried out.
        asked: the frameworks' knobs that were met, see `in_force.Asked`, as JSON has it.
        is_set: whether the user set an environment variable.
    """

    device: str
    num_nodes: int
    native_calls: int
    asked: Mapping[str, Mapping[str, Any]]
    is_set: Callable[[str], bool]


@dataclass(frozen=True)
class Space:
    """The knobs to search, and a line of why for each layer or knob that is left out."""

    knobs: tuple[Knob, ...]
    left_out: tuple[str, ...]


def of(job: JobFacts) -> Space:
    """The space of a job; no knobs where nothing can be set."""
    knobs: list[Knob] = []
    left_out: list[str] = []
    for layer in LAYERS:
        reasons: list[str] = []
        before = len(knobs)
        for knob in KNOBS:
            if knob.layer != layer:
                continue
            found, why_not = _for_job(knob, job)
            if found is not None:
                knobs.append(found)
            elif why_not:
                reasons.append(why_not)
        if len(knobs) == before and not reasons:
            reasons.append(_nothing(layer, job))
        left_out += [f"{layer}: {reason}" for reason in dict.fromkeys(reasons)]
    return Space(tuple(knobs), tuple(left_out))


def _for_job(knob: Knob, job: JobFacts) -> tuple[Knob | None, str]:
    """The knob with the values that differ in this job; or why not, "" if it has no place here."""
    if knob.layer == FRAMEWORK:
        return _for_framework(knob, job)
    if (knob.device and knob.device != job.device) or (knob.between_nodes and job.num_nodes == 1):
        return None, ""
    if job.is_set(knob.variable):
        return None, f"{knob.name} is left alone: {knob.variable} is set"
    if knob.device == "cpu" and job.native_calls == 0:
        return None, "no collective was carried out by native code"
    return knob, ""


def _for_framework(knob: Knob, job: JobFacts) -> tuple[Knob | None, str]:
    asked = job.asked.get(knob.name)
    if asked is None:
        return None, ""
    if asked["why_fixed"]:
        return None, f"{knob.name} is left alone: {asked['why_fixed']}"
    enough = asked["enough"]
    if enough is None:
        return knob, ""
    below = [value for value in knob.values if value < enough]
    # Several values mean "everything at once": one of them is tried.
    whole = min((value for value in knob.values if value >= enough), default=None)
    values = (*below, *([] if whole is None else [whole]))
    return dataclasses.replace(knob, values=values), ""


def _nothing(layer: str, job: JobFacts) -> str:
    if layer == FRAMEWORK:
        return (
            "no sizes of the script's framework can be set: DDP's, FSDP2's and, through "
            "deepytorch's adapter, DeepSpeed's are"
        )
    if job.num_nodes == 1:
        return "all ranks are on one node, so there are no sockets between them"
    return "nothing can be set for these tensors"
