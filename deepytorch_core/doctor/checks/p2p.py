"""GPUs copy to each other directly, rightly, and faster than by way of the host."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.doctor.torch_facts import GpuPair

_HANGS = (
    "export NCCL_P2P_DISABLE=1   # at once; for good: deepytorch doctor --only iommu, "
    "then switch off ACS, or the IOMMU in the BIOS"
)
_HANGING_S = 2.0  # a copy takes milliseconds
_SLOWER = 0.9


@dataclass(frozen=True)
class P2pFacts:
    """`pairs`: every ordered pair that was measured; `doing`: what had not ended after
    `stuck_s` seconds, "" when all was done."""

    num_devices: int
    pairs: tuple[GpuPair, ...]
    doing: str
    stuck_s: float
    error: str
    is_disabled: bool


def gather(machine: Machine) -> P2pFacts:
    torch = machine.torch
    return P2pFacts(
        num_devices=len(torch.devices),
        pairs=torch.pairs,
        doing=torch.doing,
        stuck_s=torch.stuck_s,
        error=torch.error,
        is_disabled=machine.environment.get("NCCL_P2P_DISABLE") == "1",
    )


def judge(facts: P2pFacts) -> list[Finding]:
    if facts.num_devices < 2:
        return [not_here(f"{facts.num_devices} GPU{'s' if facts.num_devices != 1 else ''}")]
    findings = []
    wrong = [pair for pair in facts.pairs if not pair.is_right]
    if wrong:
        text = f"copies arrive with wrong bytes: {_list(wrong)}"
        findings.append(fail(text, _HANGS))
    if facts.doing.startswith("copying") and facts.stuck_s >= _HANGING_S:
        text = f"{facts.doing} did not end within {facts.stuck_s:.0f} s: peer traffic is blocked"
        findings.append(fail(text, _HANGS))
    elif facts.error:
        text = f"{len(facts.pairs)} pairs were measured, then: {facts.error}"
        findings.append(warn(text, "deepytorch topology --measure   # takes all the time it needs"))
    slow = [
        pair
        for pair in facts.pairs
        if pair.can_access and pair.direct_gbps < _SLOWER * pair.host_gbps
    ]
    if slow and not facts.is_disabled:
        text = f"peer copies are slower than the way by the host: {_list(slow)}"
        remedy = "export NCCL_P2P_LEVEL=PXB   # peer copies only below one PCIe root"
        findings.append(warn(text, remedy))
    if findings:
        return findings
    return [okay(_matrix(facts))]


def _matrix(facts: P2pFacts) -> str:
    peers = [pair for pair in facts.pairs if pair.can_access]
    host = min(pair.host_gbps for pair in facts.pairs)
    if not peers:
        return f"no GPU reaches another's memory: all goes by the host, {host:.3g} GB/s"
    slowest = min(pair.direct_gbps for pair in peers)
    fastest = max(pair.direct_gbps for pair in peers)
    text = f"{len(peers)} of {len(facts.pairs)} pairs reach each other, {slowest:.3g} to "
    return text + f"{fastest:.3g} GB/s; by the host {host:.3g} GB/s"


def _list(pairs: list[GpuPair]) -> str:
    shown = [
        f"{pair.source}-{pair.target} {pair.direct_gbps:.3g} GB/s (host {pair.host_gbps:.3g})"
        for pair in pairs[:4]
    ]
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return "GPUs " + ", ".join(shown) + more
