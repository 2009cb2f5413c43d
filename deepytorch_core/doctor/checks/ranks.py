"""All nodes of the job run the same versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, not_here, okay
from deepytorch_core.doctor.machine import Machine


@dataclass(frozen=True)
class RankFacts:
    """Versions by package, for each node by its name."""

    versions: Mapping[str, Mapping[str, str]]


def gather(machine: Machine) -> RankFacts:
    return RankFacts(machine.together.versions if machine.together else {})


def judge(facts: RankFacts) -> list[Finding]:
    if not facts.versions:
        return [not_here("not started on several ranks (torchrun ... -m deepytorch.cli doctor)")]
    names = sorted({name for versions in facts.versions.values() for name in versions})
    findings = []
    for name in names:
        held = {node: versions.get(name, "none") for node, versions in facts.versions.items()}
        if len(set(held.values())) == 1:
            continue
        text = f"{name} differs: " + ", ".join(
            f"{node} {version}" for node, version in held.items()
        )
        first = next(iter(held.values()))
        remedy = f"pip install {name}=={first.partition('+')[0]}   # on every node"
        if name == "python":
            remedy = f"use Python {first} on every node"
        findings.append(fail(text, remedy))
    if findings:
        return findings
    num_nodes = len(facts.versions)
    return [okay(f"{num_nodes} node{'s' if num_nodes > 1 else ''}, {len(names)} packages agree")]
