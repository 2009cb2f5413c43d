"""The network interface that carries the job is up, a real one, and the fastest there is."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.topology.model import Nic


@dataclass(frozen=True)
class InterfaceFacts:
    """`chosen`: the interface that leads to the other ranks, "" when there is none (`error`);
    `shares_node`: this one has all of the job's ranks."""

    nics: tuple[Nic, ...]
    chosen: str
    error: str
    has_rdma: bool
    shares_node: bool = False


def gather(machine: Machine) -> InterfaceFacts:
    from deepytorch_core.network import addresses, rdma

    nics = machine.topology.nics
    alone = machine.together is not None and machine.together.num_nodes == 1
    has_rdma = bool(rdma.usable(machine.topology))
    try:
        address = addresses.own_address()
    except (OSError, socket.gaierror) as error:
        return InterfaceFacts(nics, "", str(error), has_rdma, alone)
    name = next((nic.name for nic in nics if address in nic.addresses), "")
    return InterfaceFacts(
        nics, name, f"no interface has {address}" if not name else "", has_rdma, alone
    )


def judge(facts: InterfaceFacts) -> list[Finding]:
    if facts.shares_node:
        return [not_here("all ranks are on this node")]
    chosen = next((nic for nic in facts.nics if nic.name == facts.chosen), None)
    others = [nic for nic in facts.nics if nic.is_up and nic.pci and nic.addresses]
    best = max(others, key=lambda nic: nic.speed_mbps, default=None)
    if chosen is None:
        if best is None:
            return [not_here(f"no network between nodes ({facts.error})")]
        text = f"no way to the other ranks ({facts.error}); {best.name} is up"
        return [warn(text, _take(best))]
    if not chosen.is_up:
        remedy = f"sudo ip link set {chosen.name} up"
        return [fail(f"{chosen.name} is to carry the job but is down", remedy)]
    if best is not None and best is not chosen:
        if not chosen.pci and not chosen.speed_mbps:
            text = f"{chosen.name} is virtual and would carry the job; {best.name} is an adapter"
            return [warn(text, _take(best))]
        if 0 < chosen.speed_mbps < best.speed_mbps and not facts.has_rdma:
            text = f"{chosen.name} with {_speed(chosen)} would carry the job"
            return [warn(f"{text}, {best.name} has {_speed(best)}", _take(best))]
    beside = ", RDMA adapters beside it" if facts.has_rdma else ""
    return [okay(f"{chosen.name}, {_speed(chosen)}, {chosen.addresses[0]}{beside}")]


def _take(nic: Nic) -> str:
    names = ("DEEPYTORCH_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    return "export " + " ".join(f"{name}={nic.name}" for name in names)


def _speed(nic: Nic) -> str:
    return f"{nic.speed_mbps / 1000:g} Gbit/s" if nic.speed_mbps else "speed unknown"
