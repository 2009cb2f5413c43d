"""GPUs and network adapters have the PCIe generation and the lanes that they were made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepytorch_core.doctor import pci
from deepytorch_core.doctor.finding import Finding, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_BUSY_STATES = ("P0", "P1", "P2")


@dataclass(frozen=True)
class PcieFacts:
    """`power_states`: nvidia-smi's, by PCI address; idle GPUs lower the speed of their link."""

    links: tuple[pci.PciLink, ...]
    power_states: Mapping[str, str]


def gather(machine: Machine) -> PcieFacts:
    devices = [(address, "GPU") for address in pci.gpus(machine)]
    devices += [(address, "network adapter") for address in pci.network_adapters(machine)]
    links = tuple(pci.link(machine, address, kind) for address, kind in devices)
    return PcieFacts(
        # Virtual functions and devices of a hypervisor have no link of their own.
        links=tuple(link for link in links if link.width and link.max_width),
        power_states={state.pci: state.power_state for state in machine.gpu_states},
    )


def judge(facts: PcieFacts) -> list[Finding]:
    if not facts.links:
        return [not_here("no GPU or network adapter with a PCIe link of its own")]
    findings = []
    for link in facts.links:
        at = f"{link.kind} {link.address}"
        if link.width < link.max_width:
            slot = 0 < link.slot_width < link.max_width
            text = f"{at}: {link.width} lanes of {link.max_width}"
            text += (
                ", all that its slot has" if slot else f" (its slot has {link.slot_width or '?'})"
            )
            remedy = (
                "use a slot with more lanes" if slot else "power off, reseat the card and risers"
            )
            findings.append(warn(text, f"{remedy}; then: sudo lspci -vv -s {link.address}"))
        if 0 < link.speed < link.max_speed and not _rests(facts, link):
            text = f"{at}: PCIe {_generation(link.speed)}, made for {_generation(link.max_speed)}"
            slot = 0 < link.slot_speed < link.max_speed
            remedy = "use a newer slot" if slot else "set the slot's speed to Auto in the BIOS"
            text += f"; its slot is {_generation(link.slot_speed)}" if slot else ""
            findings.append(warn(text, f"{remedy}; then: sudo lspci -vv -s {link.address}"))
    return findings or [okay(_summary(facts))]


def _rests(facts: PcieFacts, link: pci.PciLink) -> bool:
    """Whether a GPU may have lowered its link for want of work: then only the slot tells."""
    if link.kind != "GPU" or 0 < link.slot_speed < link.max_speed:
        return False
    return facts.power_states.get(link.address) not in _BUSY_STATES


def _summary(facts: PcieFacts) -> str:
    counts: dict[str, int] = {}
    for link in facts.links:
        text = f"{link.kind} with {link.width} lanes of {_generation(link.max_speed)}"
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} x {text}" for text, count in counts.items())


def _generation(speed: float) -> str:
    number = _GENERATIONS.get(speed)
    return f"generation {number}" if number else f"{speed:g} GT/s"
