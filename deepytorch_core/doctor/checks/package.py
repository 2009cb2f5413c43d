"""The installed package is this project's, not the one that has its import name."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.base import distribution
from deepytorch_core.doctor.finding import Finding, fail, not_here, okay
from deepytorch_core.doctor.machine import Machine


@dataclass(frozen=True)
class PackageFacts:
    """Versions of this project's package and of somebody else's `deepytorch`; "" without."""

    ours: str
    theirs: str


def gather(machine: Machine) -> PackageFacts:
    installed = machine.distributions
    return PackageFacts(
        installed.get(distribution.NAME, ""),
        installed.get(distribution.IMPORTED, ""),
    )


def judge(facts: PackageFacts) -> list[Finding]:
    if facts.theirs:
        text = (
            f"the package {distribution.IMPORTED} {facts.theirs} is somebody else's and writes "
            f"into the same folder: this project's package is {distribution.NAME}"
        )
        remedy = f"pip uninstall -y {distribution.IMPORTED} && {distribution.REINSTALL}"
        return [fail(text, remedy)]
    if not facts.ours:
        return [not_here(f"{distribution.NAME} is not installed: this is a source tree")]
    return [okay(f"{distribution.NAME} {facts.ours}")]
