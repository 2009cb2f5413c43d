"""Processes run near their GPUs and network adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepytorch_core.base import config
from deepytorch_core.doctor.finding import Finding, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine


@dataclass(frozen=True)
class NumaFacts:
    """`nodes`: CPUs of each NUMA node; `allowed`: those of this process; `gpus`: the node of each
    GPU, -1 where the machine does not say; `mine`: this rank's GPU, None outside a job."""

    nodes: Mapping[int, frozenset[int]]
    allowed: frozenset[int]
    gpus: Mapping[int, int]
    mine: int | None
    local_size: int
    balances: bool


def gather(machine: Machine) -> NumaFacts:
    found = machine.topology
    launched = config.launched(machine.environment)
    rank = launched.local_rank if launched else None
    visible = [gpu.index for gpu in found.gpus]
    chosen = (machine.environment.get("CUDA_VISIBLE_DEVICES") or "").split(",")
    if all(device.strip().isdecimal() for device in chosen):  # else none, or by UUID
        visible = [int(device) for device in chosen]
        if len(visible) == 1 and rank is not None:
            rank = 0  # the launcher gives each rank its own
    return NumaFacts(
        nodes={node.index: frozenset(node.cpus) for node in found.numa_nodes if node.cpus},
        allowed=machine.affinity,
        gpus={gpu.index: gpu.numa_node for gpu in found.gpus if gpu.index in visible},
        mine=visible[rank] if rank is not None and rank < len(visible) else None,
        local_size=(launched.local_size or 1) if launched else 1,
        balances=machine.read("proc/sys/kernel/numa_balancing") == "1",
    )


def judge(facts: NumaFacts) -> list[Finding]:
    if len(facts.nodes) < 2:
        return [not_here(f"{len(facts.nodes)} NUMA node: everything is equally near")]
    findings = []
    here = sorted(node for node, cpus in facts.nodes.items() if cpus & facts.allowed)
    unknown = [gpu for gpu, node in facts.gpus.items() if node < 0]
    if unknown:
        text = f"the machine does not say which NUMA node GPUs {_list(unknown)} are on"
        findings.append(warn(text, "lspci -vv | grep -i numa   # set NPS/SNC in the BIOS"))
    mine = facts.gpus
    if facts.mine is not None and facts.mine in mine:
        mine = {facts.mine: mine[facts.mine]}
    far = {gpu: node for gpu, node in mine.items() if node >= 0 and node not in here}
    for gpu, node in far.items():
        cpus = facts.nodes.get(node)
        text = f"this process may run on node {_list(here)} only, GPU {gpu} is on node {node}"
        remedy = f"numactl --cpunodebind={node} --membind={node} python ..."
        if cpus is not None and facts.mine is None:
            remedy = "torchrun --numa-binding=node ...   # or widen taskset, docker --cpuset-cpus"
        findings.append(warn(text, remedy))
    spread = len({node for node in facts.gpus.values() if node >= 0}) > 1
    if not far and spread and len(here) > 1 and facts.local_size > 1:
        text = f"ranks may run on nodes {_list(here)}, their GPUs are on one each"
        findings.append(warn(text, "torchrun --numa-binding=node ..."))
    if facts.balances and facts.gpus:
        text = "the kernel moves memory between NUMA nodes by itself (numa_balancing=1)"
        findings.append(warn(text, "sudo sysctl kernel.numa_balancing=0"))
    if findings:
        return findings
    return [okay(f"{len(facts.nodes)} NUMA nodes, this process may run on {_list(here)}")]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
