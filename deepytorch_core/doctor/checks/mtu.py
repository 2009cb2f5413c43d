"""Packets as large as the interfaces allow arrive at the other nodes."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.doctor.checks import interface
from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.network.path_mtu import PathMtu
from deepytorch_core.topology.model import Nic

_FAST_MBPS = 25_000
_JUMBO = 4000


@dataclass(frozen=True)
class MtuFacts:
    """`paths`: what was measured between nodes, with the interface's name at the sender."""

    nics: tuple[Nic, ...]
    chosen: str
    paths: tuple[PathMtu, ...]
    errors: tuple[str, ...]


def gather(machine: Machine) -> MtuFacts:
    found = interface.gather(machine)
    measured = machine.together
    return MtuFacts(
        nics=found.nics,
        chosen=found.chosen,
        paths=measured.paths if measured else (),
        errors=measured.path_errors if measured else (),
    )


def judge(facts: MtuFacts) -> list[Finding]:
    findings = []
    for path in facts.paths:
        where = f"from rank {path.sender} to rank {path.receiver}"
        if path.largest is None:
            text = f"no packet arrived {where} over {path.interface}: is UDP let through?"
            findings.append(warn(text, f"ping -M do -s {path.mtu - 28} {path.address}"))
        elif path.largest < path.mtu:
            text = f"{where} packets of {path.mtu} bytes are lost, of {path.largest} arrive"
            remedy = f"sudo ip link set {path.interface} mtu {path.largest}"
            findings.append(fail(text, f"{remedy}   # on every node, or raise it on the way"))
        elif path.receiver_mtu != path.mtu:
            text = f"{where} the interfaces' MTUs are {path.mtu} and {path.receiver_mtu}"
            least = min(path.mtu, path.receiver_mtu)
            findings.append(warn(text, f"sudo ip link set {path.interface} mtu {least}"))
    hint = "deepytorch doctor --only interface"
    findings += [warn(f"not measured: {error}", hint) for error in facts.errors]
    adapters = [nic for nic in facts.nics if nic.is_up and nic.pci and nic.mtu]
    fast = max((nic.speed_mbps for nic in adapters), default=0)
    alike = [nic for nic in adapters if nic.speed_mbps == fast]
    if len({nic.mtu for nic in alike}) > 1:
        text = "equal adapters differ: " + ", ".join(f"{nic.name} mtu {nic.mtu}" for nic in alike)
        most = max(nic.mtu for nic in alike)
        low = [nic.name for nic in alike if nic.mtu < most]
        commands = "; ".join(f"sudo ip link set {name} mtu {most}" for name in low)
        findings.append(warn(text, commands))
    chosen = next((nic for nic in facts.nics if nic.name == facts.chosen), None)
    if chosen is not None and chosen.speed_mbps >= _FAST_MBPS and chosen.mtu < _JUMBO:
        text = f"{chosen.name} has {chosen.speed_mbps / 1000:g} Gbit/s but an MTU of {chosen.mtu}"
        remedy = f"sudo ip link set {chosen.name} mtu 9000   # where the switches pass it"
        findings.append(warn(text, remedy))
    if findings:
        return findings
    if chosen is None:
        return [not_here("no network between nodes")]
    measured = [f"{path.largest} bytes arrive at rank {path.receiver}" for path in facts.paths]
    far = "; ".join(measured) or "not measured: run under torchrun on the nodes"
    return [okay(f"{chosen.name} {chosen.mtu}; {far}")]
