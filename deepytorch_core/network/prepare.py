"""Before NCCL starts in a job of several nodes: measure the link once, and set what follows.

There is nothing to measure where every node has RDMA adapters that NCCL can use. Each process then
reads what NCCL is told of them off its own machine (`rdma`). Else NCCL goes by TCP.

All ranks of the job come here when its default group is made. They learn over the store who shares
a node; one rank of each node measures, nodes in pairs at the same time, as they will train; rank 0
decides, and every rank does the same. Each step has a time limit: when something does not come, the
verdict is to set nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch_core.base import config, cpu_affinity, decisions, stores
from deepytorch_core.base.console import say_once
from deepytorch_core.network import addresses, greeting, nccl_env, nccl_table, probe, rdma
from deepytorch_core.network import link as links
from deepytorch_core.network.nccl_env import Choice

if TYPE_CHECKING:
    from deepytorch_core.topology.model import Topology

_HERE_LIMIT_S = 60.0
# A probe, and what a node may be late for it.
_RESULT_LIMIT_S = probe.LIMIT_S + 5.0
FILE = "network.json"
"""In the cache folder, see `known_links`."""

_done = False


def before_nccl(store: Any, *, rank: int, size: int, measure: bool = True) -> None:
    """Choose NCCL's settings for this job, together with all its ranks, once per process.

    Args:
        store: a torch Store with a key space of its own for this.
        rank: this process's rank in the default group.
        size: of the default group.
        measure: False leaves it at what earlier jobs have measured.

    Never raises for what a network or a machine can be. If something can't be measured it is not
    set, and a line at option log=debug says why.
    """
    global _done
    launched = config.launched()
    alone = launched is not None and launched.local_size == launched.size == size
    if _done or size == 1:
        return
    _done = True
    choice = _of_table() if alone else _of_nodes(store, rank=rank, size=size, measure=measure)
    if choice.settings:
        config.set_for_nccl(choice.settings)
        decisions.record("NCCL's settings", choice.text, "; ".join(choice.reasons))
        say_once(f"NCCL: set {choice}; DEEPYTORCH_TUNE=off leaves it alone")


def _of_nodes(store: Any, *, rank: int, size: int, measure: bool) -> Choice:
    from deepytorch_core.topology import model as topology  # loads the native core

    machine = topology.discover()
    has_rdma = _may_use_rdma(machine)
    choice = together(store, rank=rank, size=size, measure=measure, has_rdma=has_rdma)
    return choice + rdma.choose(machine, set(config.nccl_settings()))


def _of_table() -> Choice:
    """Return what makes NCCL go by the table of measured choices, if one can be used."""
    try:
        return nccl_table.choose(config.cache_dir() / nccl_table.FILE, set(config.nccl_settings()))
    except (OSError, RuntimeError, ValueError) as error:
        say_once(f"NCCL chooses algorithms by itself: {error}", level="warning")
        return Choice()


def together(
    store: Any, *, rank: int, size: int, measure: bool = True, has_rdma: bool = False
) -> Choice:
    """Return what all ranks set in common: for TCP, and the table if it is the same everywhere.

    This is the part of `before_nccl` that sets nothing.
    """
    table = _of_table()
    here = {
        "node": node_name(),
        "set": sorted(config.nccl_settings()),
        "rdma": has_rdma,
        "table": _digest(table),
    }
    store.set(f"here/{rank}", json.dumps(here))
    try:
        if rank == 0:
            store.set("plan", json.dumps(_plan(store, size)))
        plan = json.loads(_wait(store, "plan", _HERE_LIMIT_S + 5))
        for number, pair in enumerate(plan["pairs"]):
            if rank in pair:
                _measure(store, number, is_receiver=rank == pair[0], measure=measure)
        verdict = _judge(store, plan) if rank == 0 else _wait(store, "verdict", 2 * _RESULT_LIMIT_S)
    except (RuntimeError, OSError, ValueError) as error:
        say_once(f"the network was not measured: {error}", level="debug")
        verdict = json.dumps({"settings": {}, "reasons": []})
    # The first verdict stands: ranks with different settings could not talk to each other.
    final = json.loads(stores.first(store, "verdict", verdict))
    choice = Choice(final["settings"], tuple(final["reasons"]))
    return choice + table if final.get("table") else choice


def _digest(table: Choice) -> str:
    """Equal for equal tables; "" where there is none to go by."""
    path = table.settings.get("DEEPYTORCH_NCCL_TABLE")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _may_use_rdma(machine: Topology) -> bool:
    return bool(rdma.usable(machine)) and not rdma.SWITCHED_OFF & set(config.nccl_settings())


def node_name() -> str:
    """Equal for the processes that share a network: this boot of the machine, this namespace.

    Without /proc the machine's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return os.uname().nodename


def _plan(store: Any, size: int) -> dict[str, Any]:
    keys = [f"here/{rank}" for rank in range(size)]
    if not stores.wait(store, keys, _HERE_LIMIT_S):
        raise RuntimeError(f"not all ranks came within {_HERE_LIMIT_S:g} s")
    ranks = [json.loads(text) for text in stores.texts(store, keys)]
    by_rdma = all(rank["rdma"] for rank in ranks)
    pairs = [] if by_rdma else plan_for([rank["node"] for rank in ranks])
    tables = {rank["table"] for rank in ranks}
    return {
        "pairs": pairs,
        "rdma": by_rdma,
        "set": sorted({name for rank in ranks for name in rank["set"]}),
        "table": len(tables) == 1 and "" not in tables,
    }


def plan_for(nodes: Sequence[str]) -> list[list[int]]:
    """Pairs of ranks that measure: the first rank of each node, given the node of each rank.

    Neighbours, each node once; the last of an odd number stays out. None on a single node.
    """
    leaders = list({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values())
    leaders.sort()
    return [list(pair) for pair in zip(leaders[::2], leaders[1::2], strict=False)]


def _measure(store: Any, number: int, *, is_receiver: bool, measure: bool) -> None:
    """One side's part of a pair; the receiver puts the result, or why there is none."""
    address = addresses.own_address()
    store.set(f"address/{number}/{int(is_receiver)}", address)
    theirs = _wait(store, f"address/{number}/{int(not is_receiver)}", _RESULT_LIMIT_S)
    free_cores = _free_cores()
    if not is_receiver:
        offer = json.loads(_wait(store, f"offer/{number}", _RESULT_LIMIT_S))
        if offer:
            # The receiver notices, too, what went wrong here, and reports it.
            try:
                probe.send((theirs, offer["port"]), bytes.fromhex(offer["secret"]), free_cores)
            except probe.ProbeError as error:
                say_once(f"probe of the network: {error}", level="debug")
        return
    key = "/".join(sorted([f"{address}@{node_name()}", theirs]))
    path = known_links()
    known = None
    if path is not None and config.current().tune != "force":
        known = links.recall(path, key)
    if known is not None or not measure:
        store.set(f"offer/{number}", json.dumps({}))
        _put(store, number, {"link": known.to_dict()} if known else {"error": "not measured yet"})
        return
    try:
        server = probe.listen(address)
        secret = secrets.token_bytes(greeting.SECRET_BYTES)
        offer = {"port": server.getsockname()[1], "secret": secret.hex()}
        store.set(f"offer/{number}", json.dumps(offer))
        found = probe.receive(server, secret, free_cores)
    except (probe.ProbeError, OSError) as error:
        store.set(f"offer/{number}", json.dumps({}))
        _put(store, number, {"error": f"{address} from {theirs}: {error}"})
        return
    if path is not None:
        links.remember(path, key, found)
    _put(store, number, {"link": found.to_dict()})


def known_links() -> Path | None:
    """The file of what was measured; None where the user has no home folder."""
    try:
        return config.cache_dir() / FILE
    except RuntimeError:  # no home
        return None


def _put(store: Any, number: int, result: dict[str, Any]) -> None:
    store.set(f"result/{number}", json.dumps(result))


def _judge(store: Any, plan: dict[str, Any]) -> str:
    """Rank 0's verdict as JSON; without a measurement of every pair the links say nothing."""
    found = []
    for number in range(len(plan["pairs"])):
        result = json.loads(_wait(store, f"result/{number}", _RESULT_LIMIT_S))
        if "error" in result:
            say_once(f"the network was not measured: {result['error']}", level="debug")
        else:
            found.append(links.Link.from_dict(result["link"]))
    complete = found and len(found) == len(plan["pairs"])
    choice = nccl_env.for_sockets(links.worst(found), set(plan["set"])) if complete else Choice()
    return json.dumps(
        {
            "settings": dict(choice.settings),
            "reasons": choice.reasons,
            "table": plan["table"],
        }
    )


@dataclass(frozen=True)
class MeasuredLinks:
    """The pairs of nodes that were measured, why others were not, and whether all have RDMA."""

    links: tuple[links.Link, ...]
    errors: tuple[str, ...]
    by_rdma: bool


def measured(store: Any) -> MeasuredLinks:
    """On rank 0, after `together` with the same store: what that went by.

    Raises RuntimeError or ValueError where it came to nothing.
    """
    plan = json.loads(_wait(store, "plan", _RESULT_LIMIT_S))
    results = [
        json.loads(_wait(store, f"result/{number}", _RESULT_LIMIT_S))
        for number in range(len(plan["pairs"]))
    ]
    return MeasuredLinks(
        links=tuple(links.Link.from_dict(result["link"]) for result in results if "link" in result),
        errors=tuple(result["error"] for result in results if "error" in result),
        by_rdma=plan["rdma"],
    )


def _wait(store: Any, key: str, limit_s: float) -> str:
    """The key's value; RuntimeError when it does not come in time."""
    if not stores.wait(store, [key], limit_s):
        raise RuntimeError(f"{key} did not come within {limit_s:g} s")
    return stores.text(store, key)


def _free_cores() -> float:
    from deepytorch_core import _core

    return cpu_affinity.of_rank(_core.usable_cores())
