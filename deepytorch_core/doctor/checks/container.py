"""The container grants the processors and the memory that the job counts on."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.base.cgroup import CgroupMemory, ControlGroup
from deepytorch_core.doctor.finding import Finding, fail, okay, warn
from deepytorch_core.doctor.machine import Machine

_THROTTLED = 0.05
_NEARLY_FULL = 0.92


@dataclass(frozen=True)
class ContainerFacts:
    """The control group, version 1 or 2, and what it limits.

    There are CPUs' worth of time, the share of periods in which it was cut off, memory in bytes,
    and the number of processes killed. CPUs and memory are None without a limit.
    """

    allowed_cpus: int
    quota_cpus: float | None
    throttled: float
    memory_limit: int | None
    memory_used: int
    num_killed: int
    threads: str | None


def gather(machine: Machine) -> ContainerFacts:
    cpu, memory = (ControlGroup(machine.read, name) for name in ("cpu", "memory"))
    periods = cpu.table("cpu.stat")
    quota, period = (cpu.text("cpu.max").split() + ["", ""])[:2]
    if not quota:
        quota, period = cpu.text("cpu.cfs_quota_us"), cpu.text("cpu.cfs_period_us")
    killed = memory.table("memory.events") or memory.table("memory.oom_control")
    taken = CgroupMemory.of(memory, machine.topology.memory.total_bytes)
    return ContainerFacts(
        allowed_cpus=len(machine.affinity),
        quota_cpus=int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None,
        throttled=periods.get("nr_throttled", 0) / max(1, periods.get("nr_periods", 0)),
        memory_limit=taken.limit,
        memory_used=taken.used,
        num_killed=killed.get("oom_kill", 0),
        threads=machine.environment.get("OMP_NUM_THREADS"),
    )


def judge(facts: ContainerFacts) -> list[Finding]:
    findings = []
    quota = facts.quota_cpus
    if quota is not None and quota < facts.allowed_cpus:
        whole = max(1, int(quota))
        text = f"a quota of {quota:g} CPUs where {facts.allowed_cpus} are seen"
        if facts.throttled > _THROTTLED:
            text += f": cut off in {facts.throttled:.0%} of all periods"
            remedy = "docker update --cpus N <container>   # Kubernetes: resources.limits.cpu"
            findings.append(warn(text, remedy))
        elif not facts.threads:
            text += ": libraries start a thread for each and wait for each other"
            findings.append(warn(text, f"export OMP_NUM_THREADS={whole}"))
    limit = facts.memory_limit
    if limit is not None and facts.memory_used > _NEARLY_FULL * limit:
        text = f"{facts.memory_used / 2**30:.1f} of {limit / 2**30:.1f} GiB are in use"
        remedy = "docker update --memory <more> <container>   # Kubernetes: resources.limits.memory"
        findings.append(fail(f"{text}: the next process may be killed", remedy))
    if facts.num_killed:
        text = f"{facts.num_killed} processes were killed here for want of memory"
        remedy = "docker update --memory <more> <container>   # or fewer workers in loaders"
        findings.append(warn(text, remedy))
    if findings:
        return findings
    cpus = f"quota {quota:g} CPUs" if quota is not None else "no CPU quota"
    memory = f"limit {limit / 2**30:.1f} GiB" if limit is not None else "no memory limit"
    return [okay(f"{cpus}, {facts.allowed_cpus} allowed; {memory}")]
