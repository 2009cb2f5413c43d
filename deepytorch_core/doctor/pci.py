"""PCI devices as sysfs shows them: who is who, what lies above, how fast the link is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from deepytorch_core.doctor.machine import Machine

_NVIDIA = 0x10DE
_ACS = 0x000D
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_FOLDER = "sys/bus/pci/devices"


@dataclass(frozen=True)
class PciLink:
    """A device's link: transfers per second in GT/s and lanes, now and at most; 0 is unknown.

    `slot_speed` and `slot_width` are the most of the port above.
    """

    address: str
    kind: str
    speed: float
    max_speed: float
    width: int
    max_width: int
    slot_speed: float
    slot_width: int


def gpus(machine: Machine) -> list[str]:
    """Addresses of NVIDIA's GPUs, whether or not a driver has them."""
    found = []
    for device in machine.entries(_FOLDER):
        kind = _hexadecimal(_read(device / "class")) >> 8
        if kind in {0x0300, 0x0302} and _hexadecimal(_read(device / "vendor")) == _NVIDIA:
            found.append(device.name)
    return found


def network_adapters(machine: Machine) -> list[str]:
    """Addresses of network and RDMA adapters that have a PCI Express link."""
    found = []
    for device in machine.entries(_FOLDER):
        if _hexadecimal(_read(device / "class")) >> 16 == 0x02:
            found.append(device.name)
    return found


def above(machine: Machine, address: str) -> list[str]:
    """Bridges between the root and a device, the root's port first."""
    try:
        path = machine.path(f"{_FOLDER}/{address}").resolve()
    except OSError:
        return []
    return [part for part in path.parts[:-1] if _ADDRESS.fullmatch(part)]


def link(machine: Machine, address: str, kind: str) -> PciLink:
    """The link of a device; numbers that sysfs does not say are 0."""
    device = machine.path(f"{_FOLDER}/{address}")
    bridges = above(machine, address)
    port = machine.path(f"{_FOLDER}/{bridges[-1]}") if bridges else None
    return PciLink(
        address=address,
        kind=kind,
        speed=_leading(_read(device / "current_link_speed")),
        max_speed=_leading(_read(device / "max_link_speed")),
        width=int(_leading(_read(device / "current_link_width"))),
        max_width=int(_leading(_read(device / "max_link_width"))),
        slot_speed=_leading(_read(port / "max_link_speed")) if port else 0.0,
        slot_width=int(_leading(_read(port / "max_link_width"))) if port else 0,
    )


def acs_control(config: bytes) -> int | None:
    """The control word of Access Control Services in a configuration space; None without it.

    Extended capabilities are a list from 0x100 on: identity, version and the next one's place in a
    word each (PCI Express Base Specification, Extended Capabilities).
    """
    place, seen = 0x100, 0
    while 0x100 <= place <= len(config) - 8 and seen < 96:
        head = int.from_bytes(config[place : place + 4], "little")
        if head in {0, 0xFFFFFFFF}:
            return None
        if head & 0xFFFF == _ACS:
            return int.from_bytes(config[place + 6 : place + 8], "little")
        place, seen = head >> 20, seen + 1
    return None


def configuration(machine: Machine, address: str) -> bytes:
    """A device's configuration space; only its first 64 bytes for who is not root."""
    try:
        return machine.path(f"{_FOLDER}/{address}/config").read_bytes()
    except OSError:
        return b""


def iommu_type(machine: Machine, address: str) -> str:
    """ "DMA" or "DMA-FQ" where the IOMMU translates a device's addresses, "identity", or ""."""
    try:
        group = machine.path(f"{_FOLDER}/{address}/iommu_group").resolve().name
    except OSError:
        return ""
    return machine.read(f"sys/kernel/iommu_groups/{group}/type") or ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _leading(text: str) -> float:
    """The number at the start of "16.0 GT/s PCIe"; 0 for "Unknown" and for 255 lanes."""
    found = re.match(r"\d+(\.\d+)?", text)
    number = float(found.group()) if found else 0.0
    return 0.0 if number == 255 else number
