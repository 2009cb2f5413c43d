"""The parts of this machine: cores, caches, NUMA nodes, memory, networks, GPUs and their links.

The native core discovers them and owns the JSON format; here they are frozen dataclasses and a
picture in plain text. Unknown is -1 for a NUMA node, 0 for a number and "" for a string.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch_core import _core


@dataclass(frozen=True)
class Cores:
    """CPU cores; `usable` is what affinity and the cgroup's CPU quota leave to this process."""

    physical: int
    logical: int
    usable: int


@dataclass(frozen=True)
class Cache:
    """Caches of one kind: `bytes` is one instance's, `shared_by` counts hardware threads."""

    level: int
    type: str
    bytes: int
    shared_by: int
    instances: int


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node with its CPUs (none for a node of memory only)."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True)
class Memory:
    """Main memory, in bytes."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Nic:
    """A network interface other than loopback; `pci` is "" for a virtual one."""

    name: str
    speed_mbps: int
    mtu: int
    addresses: tuple[str, ...]
    is_up: bool
    numa_node: int
    pci: str


@dataclass(frozen=True)
class RdmaGid:
    """An address of an RDMA port; `type` is "RoCE v2" or "IB/RoCE v1", "" for InfiniBand."""

    index: int
    gid: str
    type: str
    interface: str


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device: `state` is "ACTIVE" when it can be used, `link_layer` "InfiniBand",
    "Ethernet" or "Unspecified"; `gids` are those in use."""

    number: int
    state: str
    link_layer: str
    rate_mbps: int
    gids: tuple[RdmaGid, ...]


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA adapter; `driver` is the kernel's: "mlx5_core", "erdma", "efa", ..."""

    name: str
    driver: str
    pci: str
    numa_node: int
    ports: tuple[RdmaPort, ...]


@dataclass(frozen=True)
class GpuLink:
    """One GPU's view of another: active NVLinks, and how far apart they are on PCIe.

    `measured_mbps` is what copies to it were measured to carry, in Mbit/s; 0 if they were not.

    `distance` is "unknown", "same_board", "single_switch", "multiple_switches", "host_bridge",
    "numa_node" or "system".
    """

    peer: int
    nvlinks: int
    distance: str
    measured_mbps: int = 0


@dataclass(frozen=True)
class Gpu:
    """A GPU by NVML's index, in PCI order; CUDA may order devices otherwise, so match by `uuid`.

    `pcie_mbps` is what one direction of its PCIe link carries at full speed, in Mbit/s.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    pci: str
    numa_node: int
    pcie_mbps: int
    links: tuple[GpuLink, ...]


@dataclass(frozen=True)
class Topology:
    """A machine; `gpu_note` says why `gpus` is empty.

    `gpudirect` is the kernel module by which RDMA devices reach GPU memory, "" without one.
    """

    version: int
    host_name: str
    boot_id: str
    cores: Cores
    caches: tuple[Cache, ...]
    numa_nodes: tuple[NumaNode, ...]
    memory: Memory
    nics: tuple[Nic, ...]
    rdma: tuple[RdmaDevice, ...]
    gpudirect: str
    gpus: tuple[Gpu, ...]
    gpu_note: str

    @classmethod
    def from_json(cls, text: str) -> "Topology":
        """Raises ValueError that names a wrong, missing or unknown field by its path."""
        fields: dict[str, Any] = json.loads(_core.normalize_topology_json(text))
        fields["cores"] = Cores(**fields["cores"])
        fields["caches"] = tuple(Cache(**cache) for cache in fields["caches"])
        fields["numa_nodes"] = tuple(
            NumaNode(**{**node, "cpus": tuple(node["cpus"])}) for node in fields["numa_nodes"]
        )
        fields["memory"] = Memory(**fields["memory"])
        fields["nics"] = tuple(
            Nic(**{**nic, "addresses": tuple(nic["addresses"])}) for nic in fields["nics"]
        )
        fields["rdma"] = tuple(_rdma_device(device) for device in fields["rdma"])
        fields["gpus"] = tuple(
            Gpu(**{**gpu, "links": tuple(GpuLink(**link) for link in gpu["links"])})
            for gpu in fields["gpus"]
        )
        return cls(**fields)

    def to_json(self) -> str:
        """Raises ValueError when a field does not hold what the format allows."""
        return _core.normalize_topology_json(json.dumps(dataclasses.asdict(self)))


def _rdma_device(fields: dict[str, Any]) -> RdmaDevice:
    ports = tuple(
        RdmaPort(**{**port, "gids": tuple(RdmaGid(**gid) for gid in port["gids"])})
        for port in fields["ports"]
    )
    return RdmaDevice(**{**fields, "ports": ports})


def discover() -> Topology:
    """Look at this machine now. Never fails for want of a driver: what is not found is unknown."""
    return Topology.from_json(_core.topology_json())


def load(path: str | Path) -> Topology:
    """Read a file that `dump` wrote. Raises OSError, or ValueError that names the wrong field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds no topology: {error}") from None
    return Topology.from_json(text)


def dump(topology: Topology, path: str | Path) -> None:
    """Write `topology` as JSON. Raises OSError, or ValueError that names the wrong field."""
    Path(path).write_text(topology.to_json(), encoding="utf-8")


# nvidia-smi's words for the path between two GPUs that no NVLink joins.
_DISTANCE_WORDS = {
    "unknown": "?",
    "same_board": "PSB",
    "single_switch": "PIX",
    "multiple_switches": "PXB",
    "host_bridge": "PHB",
    "numa_node": "NODE",
    "system": "SYS",
}
DISTANCE_LEGEND = {
    "PSB": "PCIe on one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    "?": "unknown",
}


def describe(topology: Topology) -> str:
    """A picture of the machine in plain text, several lines without a final newline."""
    sections = [
        ("machine", [f"{topology.host_name or 'unknown'} (boot {topology.boot_id or 'unknown'})"]),
        ("cores", [_cores_text(topology.cores)]),
        ("caches", [_cache_text(cache) for cache in topology.caches]),
        ("memory", [_memory_text(topology.memory)]),
        ("NUMA", [_numa_text(node) for node in topology.numa_nodes]),
        ("networks", _align([_nic_cells(nic) for nic in topology.nics])),
        ("RDMA", _rdma_lines(topology)),
        ("GPUs", _align([_gpu_cells(gpu) for gpu in topology.gpus]) or [topology.gpu_note]),
        ("links", _link_matrix(topology.gpus)),
    ]
    lines = []
    for title, body in sections:
        for i, line in enumerate(body):
            lines.append(f"{title if i == 0 else '':<10}{line}".rstrip())
    return "\n".join(lines)


def _cores_text(cores: Cores) -> str:
    return (
        f"{cores.usable} usable of {cores.logical} hardware threads on {cores.physical} "
        "physical cores"
    )


def _cache_text(cache: Cache) -> str:
    letter = "d" if cache.type == "data" else ""
    sharing = f", each shared by {cache.shared_by} threads" if cache.shared_by > 1 else ""
    return f"L{cache.level}{letter} {cache.instances} x {size_text(cache.bytes)}{sharing}"


def _memory_text(memory: Memory) -> str:
    return f"{size_text(memory.total_bytes)}, {size_text(memory.available_bytes)} available"


def _numa_text(node: NumaNode) -> str:
    cpus = f"CPUs {cpu_list(node.cpus)}" if node.cpus else "no CPUs"
    return f"node {node.index}: {cpus}, {size_text(node.memory_bytes)}"


def _nic_cells(nic: Nic) -> list[str]:
    speed = f"{nic.speed_mbps / 1000:g} Gbit/s" if nic.speed_mbps else "speed unknown"
    state = "up" if nic.is_up else "down"
    where = [nic.name, state, speed, f"mtu {nic.mtu}", _numa_cell(nic.numa_node)]
    return [*where, nic.pci or "virtual", ", ".join(nic.addresses)]


def _rdma_lines(topology: Topology) -> list[str]:
    if not topology.rdma:
        return []
    rows = [_rdma_cells(device, port) for device in topology.rdma for port in device.ports]
    module = topology.gpudirect
    direct = f"GPU memory by {module}" if module else "no module for GPU memory (nvidia_peermem)"
    return [*_align(rows), direct]


def _rdma_cells(device: RdmaDevice, port: RdmaPort) -> list[str]:
    speed = f"{port.rate_mbps / 1000:g} Gbit/s" if port.rate_mbps else "speed unknown"
    gids = [f"{gid.index}: {gid.type} {gid.interface}" for gid in port.gids if gid.type]
    where = [_numa_cell(device.numa_node), device.pci or "virtual", "; ".join(gids)]
    state = [port.state.lower(), port.link_layer or "link unknown", speed]
    return [f"{device.name}:{port.number}", device.driver or "driver unknown", *state, *where]


def _gpu_cells(gpu: Gpu) -> list[str]:
    where = [size_text(gpu.memory_bytes), _numa_cell(gpu.numa_node), gpu.pci]
    return [f"GPU {gpu.index}", gpu.name, *where, gpu.uuid]


def _numa_cell(node: int) -> str:
    return f"NUMA {node}" if node >= 0 else "NUMA ?"


def _link_matrix(gpus: Sequence[Gpu]) -> list[str]:
    if len(gpus) < 2:
        return []
    table = [["", *(f"GPU {gpu.index}" for gpu in gpus)]]
    words: set[str] = set()
    for gpu in gpus:
        row = {link.peer: link_word(link) for link in gpu.links}
        cells = ["-" if peer is gpu else row.get(peer.index, "?") for peer in gpus]
        words.update(cells)
        table.append([f"GPU {gpu.index}", *cells])
    legend = ["NVn: n NVLinks"] if any(word.startswith("NV") for word in words) else []
    legend += [f"{word}: {text}" for word, text in DISTANCE_LEGEND.items() if word in words]
    return [*_align(table), "; ".join(legend)]


def link_word(link: GpuLink) -> str:
    """nvidia-smi's word for it: "NV18" or how far apart the two are on PCIe."""
    return f"NV{link.nvlinks}" if link.nvlinks else _DISTANCE_WORDS[link.distance]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equally many cells as lines with straight columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def cpu_list(numbers: Sequence[int]) -> str:
    """Ascending numbers as the kernel writes lists of CPUs: "0-3,8"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, item)) for item in ranges)


def size_text(num_bytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more."""
    if num_bytes <= 0:
        return "size unknown"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
