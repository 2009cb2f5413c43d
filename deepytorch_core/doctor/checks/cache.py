"""The folder for compiled adapters and decisions can be written and is nobody else's."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from deepytorch_core.c10d import adapter
from deepytorch_core.doctor.finding import Finding, fail, okay, warn
from deepytorch_core.doctor.machine import Machine

_ENOUGH_BYTES = 64 << 20


@dataclass(frozen=True)
class CacheFacts:
    """`problem`: why the folder can't be used; `fallback_problem`: why the one among the temporary
    files can't either; "" where they can."""

    folder: str
    problem: str
    fallback: str
    fallback_problem: str
    free_bytes: int


def gather(machine: Machine) -> CacheFacts:
    del machine
    *usual, fallback = adapter.cache_folders()
    problem = (adapter.why_not_usable(usual[0]) or "") if usual else adapter.NO_HOME
    other = ""
    if problem:
        other = adapter.why_not_usable(fallback.parent) or adapter.why_not_usable(fallback) or ""
    used = fallback if problem else usual[0]
    free = 0 if problem and other else shutil.disk_usage(used).free
    folder = str(usual[0].parent) if usual else ""
    return CacheFacts(folder, problem, str(fallback), other, free)


def judge(facts: CacheFacts) -> list[Finding]:
    remedy = "export DEEPYTORCH_CACHE_DIR=/a/folder/of/your/own"
    if facts.problem and facts.fallback_problem:
        return [fail(f"{facts.problem}; {facts.fallback_problem}", remedy)]
    if facts.problem:
        text = f"{facts.problem}: adapters go to {facts.fallback}, decisions are lost"
        return [warn(text, remedy)]
    if facts.free_bytes < _ENOUGH_BYTES:
        text = f"{facts.folder}: {facts.free_bytes >> 20} MiB free, {_ENOUGH_BYTES >> 20} are used"
        return [warn(text, f"df -h {facts.folder}   # make room, or {remedy}")]
    return [okay(f"{facts.folder} can be written, {facts.free_bytes / 2**30:.1f} GiB free")]
