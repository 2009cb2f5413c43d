"""Environment variables that contradict each other, the machine, or this release.

A rule looks at all variables and says what is wrong, with the command that mends it; the rules are
listed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deepytorch_core.base import config
from deepytorch_core.doctor.finding import Finding, State, fail, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.network.addresses import matching_interface

_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "DEEPYTORCH_IFNAME")
# NCCL's documentation: threads times sockets of each must not exceed it.
_MOST_SOCKETS = 64


@dataclass(frozen=True)
class VariableFacts:
    """Variables, and what they are held against."""

    variables: Mapping[str, str]
    interfaces: tuple[str, ...]
    has_rdma: bool
    has_nvlink: bool
    num_gpus: int
    usable_cpus: int
    local_size: int


Rule = Callable[[VariableFacts], Iterator[Finding]]


def gather(machine: Machine) -> VariableFacts:
    from deepytorch_core.network import rdma

    found = machine.topology
    launched = config.launched(machine.environment)
    return VariableFacts(
        variables=machine.environment,
        interfaces=tuple(nic.name for nic in found.nics),
        has_rdma=bool(rdma.usable(found)),
        has_nvlink=any(link.nvlinks for gpu in found.gpus for link in gpu.links),
        num_gpus=len(found.gpus),
        usable_cpus=found.cores.usable,
        local_size=(launched.local_size or 1) if launched else 1,
    )


def judge(facts: VariableFacts) -> list[Finding]:
    findings = [finding for rule in RULES for finding in rule(facts)]
    if findings:
        return sorted(findings, key=lambda finding: finding.state != State.FAIL)
    shown = sorted(
        name for name in facts.variables if name.startswith(("NCCL_", "DEEPYTORCH_", "TORCH_NCCL"))
    )
    return [okay(f"set: {', '.join(shown)}" if shown else "none of ours, NCCL's or torch's is set")]


def _is_on(facts: VariableFacts, name: str) -> bool:
    return facts.variables.get(name, "").strip().lower() in {"1", "true", "yes", "on", "y"}


def _misspelt(facts: VariableFacts) -> Iterator[Finding]:
    for line in config.unknown_variables(facts.variables):
        yield warn(line, f"unset {line.partition(' ')[0]}")


def _wrong_option(facts: VariableFacts) -> Iterator[Finding]:
    try:
        config.Options.from_env(facts.variables)
    except ValueError as error:
        yield fail(str(error), f"unset {str(error).partition('=')[0]}")


def _switched_off(facts: VariableFacts) -> Iterator[Finding]:
    value = facts.variables.get("DEEPYTORCH_ENABLED", "").strip().lower()
    names = {f"DEEPYTORCH_{name.upper()}" for name in config.Options.names()}
    others = sorted(names & set(facts.variables) - {"DEEPYTORCH_ENABLED", "DEEPYTORCH_LOG"})
    if value in {"0", "false", "off", "no"} and others:
        text = f"DEEPYTORCH_ENABLED={value} turns all off, {', '.join(others)} do nothing"
        yield warn(text, "unset DEEPYTORCH_ENABLED")


def _no_such_interface(facts: VariableFacts) -> Iterator[Finding]:
    for name in _INTERFACES:
        asked = facts.variables.get(name, "")
        if not asked or asked.startswith("^"):
            continue
        whole = asked if name == "NCCL_SOCKET_IFNAME" else f"={asked}"
        names = [*facts.interfaces, "lo"]
        if matching_interface(whole, names) is None:
            text = f"{name}={asked}: there are {', '.join(facts.interfaces) or 'none'}"
            yield fail(text, f"unset {name}")


def _different_interfaces(facts: VariableFacts) -> Iterator[Finding]:
    known = facts.interfaces
    chosen = {}
    for name in _INTERFACES:
        asked = facts.variables.get(name, "")
        if asked and (found := matching_interface(asked, known)) is not None:
            chosen[name] = found
    if len(set(chosen.values())) > 1:
        text = ", ".join(f"{name} takes {found}" for name, found in chosen.items())
        first = next(iter(chosen.values()))
        command = "export " + " ".join(f"{name}={first}" for name in chosen)
        yield warn(f"{text}: ranks talk over different networks", command)


def _peer_copies_off(facts: VariableFacts) -> Iterator[Finding]:
    if _is_on(facts, "NCCL_P2P_DISABLE") and facts.has_nvlink:
        yield fail("NCCL_P2P_DISABLE=1 leaves the NVLinks unused", "unset NCCL_P2P_DISABLE")
    level = facts.variables.get("NCCL_P2P_LEVEL", "").upper()
    if level == "LOC" and facts.num_gpus > 1:
        yield warn("NCCL_P2P_LEVEL=LOC forbids all peer copies", "unset NCCL_P2P_LEVEL")


def _shared_memory_off(facts: VariableFacts) -> Iterator[Finding]:
    if _is_on(facts, "NCCL_SHM_DISABLE") and facts.num_gpus > 1 and not facts.has_nvlink:
        text = "NCCL_SHM_DISABLE=1: GPUs of this machine talk over the network"
        yield warn(text, "unset NCCL_SHM_DISABLE")


def _rdma_off(facts: VariableFacts) -> Iterator[Finding]:
    if _is_on(facts, "NCCL_IB_DISABLE") and facts.has_rdma:
        text = "NCCL_IB_DISABLE=1: the RDMA adapters are left unused"
        yield warn(text, "unset NCCL_IB_DISABLE")
    if facts.variables.get("NCCL_NET", "").lower() == "ib" and not facts.has_rdma:
        yield fail("NCCL_NET=IB: no RDMA adapter is usable here", "unset NCCL_NET")


def _too_many_sockets(facts: VariableFacts) -> Iterator[Finding]:
    names = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
    values = [facts.variables.get(name, "") for name in names]
    if all(value.isdecimal() for value in values):
        product = int(values[0]) * int(values[1])
        if product > _MOST_SOCKETS:
            text = f"{names[0]} x {names[1]} is {product}, NCCL allows {_MOST_SOCKETS}"
            yield fail(text, f"unset {' '.join(names)}")


def _chosen_by_hand(facts: VariableFacts) -> Iterator[Finding]:
    by_hand = sorted({"NCCL_ALGO", "NCCL_PROTO"} & set(facts.variables))
    table = facts.variables.get("DEEPYTORCH_NCCL_TABLE")
    if by_hand and table:
        text = f"{' and '.join(by_hand)} win over the measured table {table}"
        yield warn(text, f"unset {' '.join(by_hand)}")


def _renamed(facts: VariableFacts) -> Iterator[Finding]:
    for old in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"):
        if old in facts.variables:
            value = facts.variables[old]
            yield warn(f"{old} has a new name in torch", f"unset {old}; export TORCH_{old}={value}")


def _blocking(facts: VariableFacts) -> Iterator[Finding]:
    for name, effect in (
        ("CUDA_LAUNCH_BLOCKING", "the CPU waits for every kernel"),
        ("TORCH_NCCL_BLOCKING_WAIT", "the CPU waits for every collective"),
    ):
        if _is_on(facts, name):
            yield warn(f"{name}={facts.variables[name]}: {effect}", f"unset {name}")


def _chatty(facts: VariableFacts) -> Iterator[Finding]:
    for name, values, effect in (
        ("NCCL_DEBUG", {"TRACE"}, "NCCL writes a line for every call"),
        ("TORCH_DISTRIBUTED_DEBUG", {"DETAIL"}, "every collective is checked over gloo first"),
        ("TORCH_CPP_LOG_LEVEL", {"INFO"}, "torch logs in inner loops"),
    ):
        value = facts.variables.get(name, "")
        if value.upper() in values:
            yield warn(f"{name}={value}: {effect}", f"unset {name}")


def _two_allocators(facts: VariableFacts) -> Iterator[Finding]:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    values = facts.variables.get(old), facts.variables.get(new)
    if all(values) and values[0] != values[1]:
        yield warn(f"{old}={values[0]} and {new}={values[1]} differ", f"unset {old}")


def _threads(facts: VariableFacts) -> Iterator[Finding]:
    value = facts.variables.get("OMP_NUM_THREADS", "").partition(",")[0]
    if not value:
        return
    if not value.isdecimal() or int(value) < 1:
        yield fail(f"OMP_NUM_THREADS={value}: expected 1 or more", "unset OMP_NUM_THREADS")
        return
    fair = max(1, facts.usable_cpus // facts.local_size)
    if int(value) > fair:
        ranks = f" x {facts.local_size} ranks" if facts.local_size > 1 else ""
        text = f"OMP_NUM_THREADS={value}{ranks} on {facts.usable_cpus} usable CPUs"
        yield warn(text, f"export OMP_NUM_THREADS={fair}")


RULES: tuple[Rule, ...] = (
    _misspelt,
    _wrong_option,
    _switched_off,
    _no_such_interface,
    _different_interfaces,
    _peer_copies_off,
    _shared_memory_off,
    _rdma_off,
    _too_many_sockets,
    _chosen_by_hand,
    _renamed,
    _blocking,
    _chatty,
    _two_allocators,
    _threads,
)
