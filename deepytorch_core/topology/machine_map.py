"""A topology arranged for drawing: what lies at which NUMA node, and how fast the links are.

Rates are of one direction, in GB/s. The PCIe tree is the one that the distances between GPUs tell:
those behind one switch, and those behind one bridge of the processor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepytorch_core.topology.model import (
    DISTANCE_LEGEND,
    Gpu,
    GpuLink,
    Nic,
    NumaNode,
    RdmaDevice,
    Topology,
    cpu_list,
    link_word,
)

_SWITCH = frozenset({"same_board", "single_switch"})
_BRIDGE = _SWITCH | {"multiple_switches", "host_bridge"}
# GB/s of one NVLink in one direction (the GPUs' data sheets); the first name that fits.
_NVLINK_GBPS = (
    ("B200", 50.0),
    ("B300", 50.0),
    ("A40", 14.0625),
    ("A6000", 14.0625),
    ("3090", 14.0625),
    ("P100", 20.0),
    ("V100", 25.0),
    ("A100", 25.0),
    ("A800", 25.0),
    ("H100", 25.0),
    ("H200", 25.0),
    ("H20", 25.0),
    ("H800", 25.0),
)


@dataclass(frozen=True)
class NumaGroup:
    """The devices at one NUMA node; `node` is None for those of which the machine does not say.

    `bridges` are the GPUs by bridge of the processor, each of these by switch.
    """

    node: NumaNode | None
    bridges: tuple[tuple[tuple[Gpu, ...], ...], ...]
    nics: tuple[Nic, ...]
    rdma: tuple[RdmaDevice, ...]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All of them, neighbours together."""
        return tuple(gpu for bridge in self.bridges for switch in bridge for gpu in switch)


@dataclass(frozen=True)
class Links:
    """Pairs of GPUs that are joined in the same way: `word` is nvidia-smi's ("NV18", "PHB").

    `gbps` is the slowest's and the fastest's rate, zeros where it is not known.
    """

    word: str
    meaning: str
    pairs: tuple[tuple[int, int], ...]
    gbps: tuple[float, float]
    is_measured: bool
    nvlinks: int

    @property
    def speed(self) -> str:
        """The rates in words: "9.1 to 11.4 GB/s measured", "450 GB/s at most"."""
        slowest, fastest = (f"{rate:.3g}" for rate in self.gbps)
        if not self.gbps[1]:
            return "speed unknown"
        text = fastest if slowest == fastest else f"{slowest} to {fastest}"
        return f"{text} GB/s{' measured' if self.is_measured else ' at most'}"

    def __str__(self) -> str:
        return f"{self.speed}, {self.meaning}"


def groups(topology: Topology) -> list[NumaGroup]:
    """The NUMA nodes that have CPUs or devices, and what could not be placed."""
    nodes: list[NumaNode | None] = list(topology.numa_nodes)
    # With one node there is no doubt where a device is, whatever the firmware says.
    alone = topology.numa_nodes[0].index if len(topology.numa_nodes) == 1 else -1
    known = {node.index for node in topology.numa_nodes}

    def place(index: int) -> int:
        return index if index in known else alone

    if not all(place(numa_node) in known for numa_node in _devices(topology)):
        nodes.append(None)
    found = []
    for node in nodes:
        index = node.index if node is not None else -1
        group = NumaGroup(
            node=node,
            bridges=_tree([gpu for gpu in topology.gpus if place(gpu.numa_node) == index]),
            nics=tuple(nic for nic in _real(topology) if place(nic.numa_node) == index),
            rdma=tuple(device for device in topology.rdma if place(device.numa_node) == index),
        )
        if group.gpus or group.nics or group.rdma or (node is not None and node.cpus):
            found.append(group)
    return found


def _devices(topology: Topology) -> list[int]:
    devices: list[Gpu | Nic | RdmaDevice] = [*topology.gpus, *_real(topology), *topology.rdma]
    return [device.numa_node for device in devices]


def _real(topology: Topology) -> list[Nic]:
    """Adapters, and virtual interfaces that carry something."""
    # Those that an RDMA device serves too are drawn as that one.
    served = {
        gid.interface for device in topology.rdma for port in device.ports for gid in port.gids
    }
    return [
        nic
        for nic in topology.nics
        if nic.name not in served and (nic.pci or (nic.is_up and nic.addresses))
    ]


def _tree(gpus: Sequence[Gpu]) -> tuple[tuple[tuple[Gpu, ...], ...], ...]:
    return tuple(
        tuple(tuple(switch) for switch in _near(bridge, _SWITCH)) for bridge in _near(gpus, _BRIDGE)
    )


def _near(gpus: Sequence[Gpu], distances: Iterable[str]) -> list[list[Gpu]]:
    """GPUs that are joined by one of these distances, in the order of the first of each."""
    near: list[list[Gpu]] = []
    for gpu in gpus:
        peers = {link.peer for link in gpu.links if link.distance in distances}
        mine = next((group for group in near if any(other.index in peers for other in group)), None)
        if mine is None:
            near.append([gpu])
        else:
            mine.append(gpu)
    return near


def links(topology: Topology) -> list[Links]:
    """Each kind of link between GPUs with its pairs, the fastest first."""
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    both_ways: dict[tuple[int, int], list[tuple[float, bool]]] = {}
    how: dict[tuple[int, int], tuple[str, int]] = {}
    for gpu in topology.gpus:
        for link in gpu.links:
            pair = (min(gpu.index, link.peer), max(gpu.index, link.peer))
            both_ways.setdefault(pair, []).append(gbps(gpu, link, by_index[link.peer]))
            how.setdefault(pair, (link_word(link), link.nvlinks))
    kinds: dict[tuple[str, bool, int], dict[tuple[int, int], float]] = {}
    for pair, rates in both_ways.items():
        measured = [rate for rate, is_measured in rates if is_measured]
        word, nvlinks = how[pair]
        slower = min(measured) if measured else min(rate for rate, _ in rates)
        kinds.setdefault((word, bool(measured), nvlinks), {})[pair] = slower
    found = [
        Links(
            word=word,
            meaning=DISTANCE_LEGEND.get(word, f"{nvlinks} NVLink{'s' if nvlinks > 1 else ''}"),
            pairs=tuple(sorted(speeds)),
            gbps=(min(speeds.values()), max(speeds.values())),
            is_measured=is_measured,
            nvlinks=nvlinks,
        )
        for (word, is_measured, nvlinks), speeds in kinds.items()
    ]
    return sorted(found, key=lambda kind: (-kind.gbps[1], kind.word, kind.pairs))


def gbps(gpu: Gpu, link: GpuLink, peer: Gpu) -> tuple[float, bool]:
    """Return the rate of a link and whether it was measured; (0, False) if it is not known."""
    if link.measured_mbps:
        return link.measured_mbps / 8000, True
    if link.nvlinks:
        each = next((rate for name, rate in _NVLINK_GBPS if name in gpu.name), 0.0)
        return each * link.nvlinks, False
    return min(gpu.pcie_mbps, peer.pcie_mbps) / 8000, False


def with_measured(topology: Topology, rates: Mapping[tuple[str, str], float]) -> Topology:
    """The topology with what copies between GPUs carry, GB/s by the UUIDs of both."""
    names = {gpu.index: gpu.uuid for gpu in topology.gpus}

    def measured(gpu: Gpu, link: GpuLink) -> GpuLink:
        rate = rates.get((gpu.uuid, names[link.peer]), 0.0)
        return dataclasses.replace(link, measured_mbps=round(rate * 8000)) if rate else link

    gpus = [
        dataclasses.replace(gpu, links=tuple(measured(gpu, link) for link in gpu.links))
        for gpu in topology.gpus
    ]
    return dataclasses.replace(topology, gpus=tuple(gpus))


def pairs_text(pairs: Sequence[tuple[int, int]], num_gpus: int) -> str:
    """ "all pairs", or "0-1, 2-3", cut after some."""
    if len(pairs) == num_gpus * (num_gpus - 1) // 2 and num_gpus > 2:
        return "all pairs"
    if len(pairs) > 8:
        return f"{len(pairs)} pairs"
    return ", ".join(f"{first}-{second}" for first, second in pairs)


def cpus_text(node: NumaNode) -> str:
    """Its CPUs, as a list where that is short: "CPUs 0-15,32-47"."""
    listed = cpu_list(node.cpus)
    if len(listed) <= 24:
        return f"CPUs {listed}" if listed else "no CPUs"
    return f"{len(node.cpus)} CPUs of {node.cpus[0]}-{node.cpus[-1]}"


def short_pci(address: str) -> str:
    """Without the domain where that is the usual one; "virtual" for none."""
    return address.removeprefix("0000:") or "virtual"


def short_name(gpu: Gpu) -> str:
    """Without the maker's name: "H100 80GB HBM3", "RTX 4090"."""
    return gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
