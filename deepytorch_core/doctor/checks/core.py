"""The native core can be loaded and belongs to this version."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.base import distribution
from deepytorch_core.doctor.finding import Finding, fail, okay
from deepytorch_core.doctor.machine import Machine


@dataclass(frozen=True)
class CoreFacts:
    """Versions of the native core and of the package; `error` why the core can't be loaded."""

    core: str
    package: str
    instructions: str
    error: str


def gather(machine: Machine) -> CoreFacts:
    package = machine.distributions.get(distribution.NAME, "")
    try:
        from deepytorch_core import _core
    except ImportError as error:
        return CoreFacts("", package, "", str(error))
    return CoreFacts(_core.__version__, package, _core.reduce_isa(), "")


def judge(facts: CoreFacts) -> list[Finding]:
    remedy = distribution.REINSTALL
    if facts.error:
        return [fail(f"the native core can't be loaded: {facts.error}", remedy)]
    if facts.package and facts.core != facts.package:
        text = f"the native core is of version {facts.core}, deepytorch of {facts.package}"
        return [fail(text, remedy)]
    return [okay(f"version {facts.core}, reductions use {facts.instructions}")]
