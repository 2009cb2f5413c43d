"""NVLinks are up, as many on each GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.topology.model import Gpu


@dataclass(frozen=True)
class NvlinkFacts:
    """GPUs with their links, as the topology has them."""

    gpus: tuple[Gpu, ...]


def gather(machine: Machine) -> NvlinkFacts:
    return NvlinkFacts(machine.topology.gpus)


def judge(facts: NvlinkFacts) -> list[Finding]:
    if len(facts.gpus) < 2:
        return [not_here(f"{len(facts.gpus)} GPU{'s' if len(facts.gpus) != 1 else ''}")]
    most = {gpu.index: max(link.nvlinks for link in gpu.links) for gpu in facts.gpus}
    joined = [index for index, count in most.items() if count]
    if not joined:
        # Server boards are sold with NVSwitch alone; without its manager no link comes up.
        if all("SXM" in gpu.name or "HGX" in gpu.name for gpu in facts.gpus):
            names = facts.gpus[0].name
            text = f"{len(facts.gpus)} x {names} without one NVLink: the fabric is not running"
            return [fail(text, "sudo systemctl restart nvidia-fabricmanager")]
        return [not_here(f"no NVLink between {len(facts.gpus)} GPUs")]
    usual = Counter(count for count in most.values() if count).most_common(1)[0][0]
    findings = []
    for index, count in most.items():
        if count < usual:
            text = f"GPU {index} has {count} NVLinks to a neighbour, the others have {usual}"
            status = f"nvidia-smi nvlink --status -i {index}"
            remedy = f"{status}   # then reset: sudo nvidia-smi -r -i {index}"
            findings.append(fail(text, remedy) if count == 0 else warn(text, remedy))
    if findings:
        return findings
    everyone = all(link.nvlinks for gpu in facts.gpus for link in gpu.links)
    return [okay(f"{usual} NVLinks {'between all GPUs' if everyone else 'between neighbours'}")]
