"""Neither ACS nor a translating IOMMU sends the GPUs' traffic for each other through the root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepytorch_core.doctor import pci
from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine

# Bits of the ACS control word: request redirect, completion redirect, upstream forwarding.
_REDIRECTS = 0x1C


@dataclass(frozen=True)
class IommuFacts:
    """`acs`: control words of the bridges above the GPUs, None where a bridge has no ACS;
    `unread`: bridges whose registers only root may read; `types`: the IOMMU's mode for each GPU;
    `by_nvlink`: NVLink joins all GPUs, so that PCIe carries only what goes to the network."""

    gpus: tuple[str, ...]
    acs: Mapping[str, int | None]
    unread: tuple[str, ...]
    types: Mapping[str, str]
    by_nvlink: bool
    has_rdma: bool


def gather(machine: Machine) -> IommuFacts:
    gpus = pci.gpus(machine)
    acs: dict[str, int | None] = {}
    unread = []
    for bridge in dict.fromkeys(address for gpu in gpus for address in pci.above(machine, gpu)):
        config = pci.configuration(machine, bridge)
        if len(config) <= 0x100:
            unread.append(bridge)
        else:
            acs[bridge] = pci.acs_control(config)
    found = machine.topology
    links = [link.nvlinks for gpu in found.gpus for link in gpu.links]
    return IommuFacts(
        gpus=tuple(gpus),
        acs=acs,
        unread=tuple(unread),
        types={gpu: pci.iommu_type(machine, gpu) for gpu in gpus},
        by_nvlink=bool(links) and all(links),
        has_rdma=bool(found.rdma),
    )


def judge(facts: IommuFacts) -> list[Finding]:
    if not facts.gpus or (len(facts.gpus) < 2 and not facts.has_rdma):
        return [not_here(f"{len(facts.gpus)} GPUs: no traffic between PCIe devices to redirect")]
    findings = []
    redirecting = [bridge for bridge, control in facts.acs.items() if (control or 0) & _REDIRECTS]
    # Between GPUs joined by NVLink only the way to the network suffers.
    worse = warn if facts.by_nvlink else fail
    if redirecting:
        text = f"ACS sends peer traffic through the root at {', '.join(redirecting)}"
        command = (
            f"for b in {' '.join(redirecting)}; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done"
        )
        findings.append(worse(f"{text}: copies between GPUs are slow or hang", command))
    translated = sorted(gpu for gpu, kind in facts.types.items() if kind.startswith("DMA"))
    if translated:
        text = f"the IOMMU translates what GPUs {', '.join(translated)} send"
        remedy = "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), then reboot"
        findings.append(warn(text, remedy))
    if findings:
        return findings
    if facts.unread:
        text = f"no translating IOMMU; ACS of {len(facts.unread)} bridges not read: only root may"
        return [okay(text + " (sudo deepytorch doctor --only iommu)")]
    return [okay(f"no redirection at {len(facts.acs)} bridges above {len(facts.gpus)} GPUs")]
