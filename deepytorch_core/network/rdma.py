"""Tells NCCL about RDMA adapters: which ones, and by which address.

NCCL finds adapters by itself, and from 2.21 on the address (GID) of a RoCE port too. It is told
only what it can't know or takes wrongly:

* adapters much slower than the fastest (a management network beside the training's) would be
  chosen where they lie nearer to a GPU: they are left out;
* eRDMA's verbs need the address that belongs to the IPv4 network, by its number;
* EFA has no verbs of the kind that NCCL's own transport uses. Without the plugin aws-ofi-nccl NCCL
  goes by TCP. That is said, and the adapters are left out.

NCCL goes on choosing by the PCIe tree how near an adapter must be to a GPU for direct access
(`NCCL_NET_GDR_LEVEL`). The exception is eRDMA: a virtual machine shows its adapters on one flat
bus, where nothing looks near. So with the module for it loaded the level is SYS, as the cloud's
guide has it.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv6Address

from deepytorch_core.network.nccl_env import Choice
from deepytorch_core.topology.model import RdmaDevice, RdmaPort, Topology

_MUCH_SLOWER = 0.5
_ERDMA, _EFA = "erdma", "efa"
_HCA = "NCCL_IB_HCA"
SWITCHED_OFF = frozenset({"NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN"})
"""A user who sets one of these has chosen the transport."""


def usable(topology: Topology) -> list[tuple[RdmaDevice, RdmaPort]]:
    """The ports that NCCL's own RDMA transport can use now."""
    return [
        (device, port)
        for device in topology.rdma
        for port in device.ports
        if device.driver != _EFA and port.state == "ACTIVE"
    ]


def choose(topology: Topology, user_set: Collection[str]) -> Choice:
    """NCCL's settings for the adapters of this machine, and remarks where there is nothing to set.

    Args:
        topology: of this machine.
        user_set: variables that are set already; they are left alone, and all where one of
            `SWITCHED_OFF` is among them.
    """
    if SWITCHED_OFF & set(user_set):
        return Choice()
    ports = usable(topology)
    if not ports:
        return Choice()
    fastest = max(port.rate_mbps for _, port in ports)
    chosen = [pair for pair in ports if pair[1].rate_mbps >= _MUCH_SLOWER * fastest]
    choice = _adapters(topology, chosen) if _HCA not in user_set else Choice()
    if "NCCL_IB_GID_INDEX" not in user_set:
        choice += _address(chosen)
    is_erdma = all(device.driver == _ERDMA for device, _ in chosen)
    if is_erdma and topology.gpudirect and "NCCL_NET_GDR_LEVEL" not in user_set:
        choice += Choice(
            {"NCCL_NET_GDR_LEVEL": "SYS"}, (f"eRDMA reaches GPU memory by {topology.gpudirect}",)
        )
    return choice


def remarks(topology: Topology) -> list[str]:
    """Return what a person should know of this machine's adapters and could change."""
    found = []
    if any(device.driver == _EFA for device in topology.rdma):
        found.append("EFA adapters: NCCL uses them only through the plugin aws-ofi-nccl")
    for device in topology.rdma:
        down = [port.number for port in device.ports if port.state != "ACTIVE"]
        found += [f"{device.name} port {number} is not active" for number in down]
    if topology.gpus and usable(topology) and not topology.gpudirect:
        found.append(
            "no kernel module gives RDMA adapters access to GPU memory: load nvidia_peermem, "
            "unless the drivers use DMA-BUF"
        )
    return found


def _adapters(topology: Topology, chosen: list[tuple[RdmaDevice, RdmaPort]]) -> Choice:
    every = [
        (device, port)
        for device in topology.rdma
        for port in device.ports
        if port.state == "ACTIVE"
    ]
    if len(every) == len(chosen):
        return Choice()
    left_out = [device.name for device, port in every if (device, port) not in chosen]
    # "=" is for whole names: mlx5_1 would mean mlx5_10 too.
    names = ",".join(f"{device.name}:{port.number}" for device, port in chosen)
    return Choice({_HCA: f"={names}"}, (f"without {', '.join(left_out)}",))


def _address(chosen: list[tuple[RdmaDevice, RdmaPort]]) -> Choice:
    """The GID for eRDMA: one number for all adapters, or none."""
    if any(device.driver != _ERDMA for device, _ in chosen):
        return Choice()
    numbers = {gid_index(port) for _, port in chosen}
    if len(numbers) != 1 or None in numbers:
        return Choice()
    return Choice({"NCCL_IB_GID_INDEX": str(numbers.pop())}, ("eRDMA's IPv4 address",))


def gid_index(port: RdmaPort) -> int | None:
    """The number of the port's RoCE v2 address in an IPv4 network, else in an IPv6 one that routes.

    None for InfiniBand, whose addresses need no choice, and for a port without such an address.
    """
    if port.link_layer == "InfiniBand":
        return None
    routable = None
    for gid in port.gids:
        address = IPv6Address(gid.gid)
        if gid.type != "RoCE v2" or address.is_link_local:
            continue
        if address.ipv4_mapped is not None:
            return gid.index
        routable = gid.index if routable is None else routable
    return routable
