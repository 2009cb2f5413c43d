"""Installed frameworks are versions that deepytorch's adapters know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from deepytorch_core.base import distribution
from deepytorch_core.doctor.finding import Finding, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine

# The package's extras that are adapters, each with the framework's name for pip.
_ADAPTERS = {
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "accelerate": "accelerate",
    "transformers": "transformers",
}


@dataclass(frozen=True)
class FrameworkFacts:
    """Versions known to the adapters, as the package declares them, and those installed."""

    ranges: Mapping[str, str]
    installed: Mapping[str, str]


def gather(machine: Machine) -> FrameworkFacts:
    ranges = declared(metadata.requires(distribution.NAME) or [])
    installed = {
        name: machine.distributions[name] for name in ranges if name in machine.distributions
    }
    return FrameworkFacts(ranges, installed)


def declared(requirements: list[str]) -> dict[str, str]:
    """The range of each adapter's framework in a package's metadata."""
    ranges = {}
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        for extra, name in _ADAPTERS.items():
            is_asked = requirement.marker is not None and requirement.marker.evaluate(
                {"extra": extra}
            )
            if requirement.name == name and is_asked and requirement.specifier:
                ranges[name] = str(requirement.specifier)
    return ranges


def judge(facts: FrameworkFacts) -> list[Finding]:
    findings = []
    for name, version in sorted(facts.installed.items()):
        known = facts.ranges[name]
        if not SpecifierSet(known).contains(version.partition("+")[0], prereleases=True):
            text = f"{name} {version} is not known to its adapter, which is for {known}"
            findings.append(warn(text, f"pip install '{name}{known}'"))
    if findings:
        return findings
    if not facts.installed:
        return [not_here("no framework with an adapter is installed")]
    listed = ", ".join(f"{name} {version}" for name, version in sorted(facts.installed.items()))
    return [okay(listed)]
