"""The link between nodes carries what its adapters can, with one connection or with several."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.base import config
from deepytorch_core.doctor.checks import interface
from deepytorch_core.doctor.finding import Finding, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.network import link as links
from deepytorch_core.network import nccl_env, prepare
from deepytorch_core.network.link import Link

_POOR = 0.5
_FILE_HINT = "torchrun --nnodes N --nproc-per-node 1 ... -m deepytorch.cli doctor --only link"


@dataclass(frozen=True)
class LinkFacts:
    """`link`: the slowest pair of nodes, None when nothing is known; `is_new` if measured now."""

    link: Link | None
    is_new: bool
    errors: tuple[str, ...]
    speed_mbps: int
    nccl_set: frozenset[str]
    active: bool
    by_rdma: bool


def gather(machine: Machine) -> LinkFacts:
    measured = machine.together
    found = interface.gather(machine)
    chosen = next((nic for nic in found.nics if nic.name == found.chosen), None)
    known = links.worst(measured.links) if measured and measured.links else None
    path = prepare.known_links()
    earlier = None if path is None else links.latest(path)
    return LinkFacts(
        link=known or earlier,
        is_new=known is not None,
        errors=measured.link_errors if measured else (),
        speed_mbps=chosen.speed_mbps if chosen else 0,
        nccl_set=frozenset(config.nccl_settings(machine.environment)),
        active=config.current().enabled and config.current().collectives != "stock",
        by_rdma=bool(measured and measured.by_rdma),
    )


def judge(facts: LinkFacts) -> list[Finding]:
    failed = [warn(f"not measured: {error}", _FILE_HINT) for error in facts.errors]
    if facts.link is None:
        if failed:
            return failed
        if facts.by_rdma:
            return [not_here("the nodes have RDMA: TCP is not measured")]
        return [not_here(f"nothing measured: {_FILE_HINT}")]
    link = facts.link
    when = "measured now" if facts.is_new else "as a job measured it in the last week"
    findings = []
    if 0 < link.rate_bps < _POOR * facts.speed_mbps * 1e6:
        text = f"{link} ({when}), the adapter has {facts.speed_mbps / 1000:g} Gbit/s"
        findings.append(warn(text, "iperf3 -s   # on one node; on another: iperf3 -P 8 -c <it>"))
    choice = nccl_env.for_sockets(link, facts.nccl_set)
    if link.flow_cap_bps is not None and choice.settings and not facts.active:
        # If deepytorch is on, it sets these by itself.
        text = f"{link} ({when}): NCCL's usual connections leave it idle"
        findings.append(warn(text, f"export {choice.text}   # or train with deepytorch on"))
    if findings or failed:
        return findings + failed
    filled = ""
    if link.flow_cap_bps is not None:
        own = f"deepytorch sets {choice.text}" if choice.settings else "you have set NCCL for it"
        filled = f"; {link.flows_needed} connections fill it, {own}"
    return [okay(f"{link} ({when}){filled}")]
