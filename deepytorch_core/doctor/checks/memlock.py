"""RDMA may pin memory: the limit of locked memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, not_here, okay
from deepytorch_core.doctor.machine import Machine

_ENOUGH = 64 << 30


@dataclass(frozen=True)
class MemlockFacts:
    """The soft limit in bytes, None without one; whether this process may exceed it (root)."""

    limit_bytes: int | None
    may_exceed: bool
    num_rdma: int


def gather(machine: Machine) -> MemlockFacts:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = machine.read("proc/self/status") or ""
    effective = next((line for line in status.splitlines() if line.startswith("CapEff:")), "")
    capabilities = int(effective.split()[1], 16) if effective else 0
    ipc_lock = 1 << 14
    return MemlockFacts(
        limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        may_exceed=bool(capabilities & ipc_lock),
        num_rdma=len(machine.topology.rdma),
    )


def judge(facts: MemlockFacts) -> list[Finding]:
    limit = "none" if facts.limit_bytes is None else f"{facts.limit_bytes / 2**20:.0f} MiB"
    if not facts.num_rdma:
        return [not_here(f"no RDMA adapter (limit of locked memory: {limit})")]
    if facts.limit_bytes is None or facts.limit_bytes >= _ENOUGH or facts.may_exceed:
        return [okay(f"limit of locked memory: {limit}, {facts.num_rdma} RDMA adapters")]
    text = f"only {limit} may be locked: RDMA can't register the GPUs' buffers"
    remedy = "ulimit -l unlimited   # /etc/security/limits.conf; docker run --ulimit memlock=-1"
    return [fail(text, remedy)]
