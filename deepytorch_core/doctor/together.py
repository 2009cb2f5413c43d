"""Has a job's ranks find out together: the link, the path's MTU, whether versions agree.

Under a launcher every rank comes here. The first rank of each node measures, nodes in pairs; rank 0
gathers what all found. Nothing is sent to anybody but the job's ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from deepytorch_core.base import config, distribution
from deepytorch_core.doctor.finding import Finding, State
from deepytorch_core.doctor.machine import Machine, Together
from deepytorch_core.network import addresses, path_mtu, prepare
from deepytorch_core.network.path_mtu import PathMtu

# Ranks start the same command at about the same time.
_HERE_LIMIT_S = 60.0
_STEP_LIMIT_S = 20.0


class LaunchedJob:
    """The ranks that the launcher started, joined by their store.

    Raises RuntimeError when rank 0 can't be reached within a minute.
    """

    def __init__(self, rank: int, size: int) -> None:
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.size = rank, size
        made = rendezvous("env://", rank, size, timeout=timedelta(seconds=_HERE_LIMIT_S))
        whole, _, _ = next(iter(made))
        self._store = PrefixStore("doctor", whole)
        self._link_store = PrefixStore("link", self._store)
        self._nodes: list[str] = []

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return sorted(self._nodes.index(node) for node in set(self._nodes))

    def measure(self, machine: Machine, *, with_link: bool = True) -> Together:
        """All ranks call it; `with_link` sends data between nodes for some seconds.

        Raises RuntimeError when a rank does not come within a minute.
        """
        here = _here(machine)
        self._put(f"here/{self.rank}", here)
        self._store.wait(
            [f"here/{rank}" for rank in range(self.size)], timedelta(seconds=_HERE_LIMIT_S)
        )
        ranks = [self._get(f"here/{rank}") for rank in range(self.size)]
        self._nodes = [rank["node"] for rank in ranks]
        if with_link:
            config.set_current(dataclasses.replace(config.current(), tune="force"))  # measure anew
            prepare.together(
                self._link_store, rank=self.rank, size=self.size, has_rdma=here["rdma"]
            )
        pairs = prepare.plan_for(self._nodes)
        for number, pair in enumerate(pairs):
            for sender, receiver in (pair, pair[::-1]):
                self._measure_path(f"{number}/{sender}", sender, receiver, ranks=ranks)
        is_leader = self.rank in self.leaders
        if self.rank != 0:
            return Together(is_leader=is_leader, num_nodes=len(self.leaders))
        measuring = [rank for pair in pairs for rank in pair]
        errors = [
            f"rank {rank}: {ranks[rank]['error']}" for rank in measuring if ranks[rank]["error"]
        ]
        found = self._paths(pairs, errors)
        if with_link:
            found = self._links(found)
        return dataclasses.replace(
            found,
            num_nodes=len(self.leaders),
            versions={
                f"{ranks[rank]['host']} (rank {rank})": ranks[rank]["versions"]
                for rank in self.leaders
            },
        )

    def exchange(self, findings: Sequence[Finding]) -> list[Finding]:
        """Leaders hand in what they found; rank 0 gets its own, and of others what is wrong."""
        if self.rank != 0:
            if self.rank in self.leaders:
                # No more than is shown: the path to rank 0 may be what swallows large packets.
                wrong = [
                    finding for finding in findings if finding.state in {State.WARN, State.FAIL}
                ]
                self._put(f"findings/{self.rank}", [finding.to_dict() for finding in wrong])
            self._put(f"done/{self.rank}", True)
            return []
        everything = list(findings)
        for rank in self.leaders[1:]:
            name = self._get(f"here/{rank}")["host"]
            try:
                theirs = self._get(f"findings/{rank}")
            except RuntimeError:
                text = f"{name} (rank {rank}) handed in nothing within {_STEP_LIMIT_S:g} s"
                remedy = "deepytorch doctor   # on that node"
                everything.append(Finding(State.WARN, text, remedy, check="ranks"))
                continue
            found = [Finding.from_dict(finding) for finding in theirs]
            everything += [dataclasses.replace(finding, node=name) for finding in found]
        with contextlib.suppress(RuntimeError):
            for rank in range(1, self.size):
                self._get(f"done/{rank}")  # this process may serve the store: the last to leave
        return everything

    def _paths(self, pairs: list[list[int]], errors: list[str]) -> Together:
        """Collect what all pairs found of their paths, both ways."""
        paths = []
        for number, pair in enumerate(pairs):
            for sender in pair:
                try:
                    found = self._get(f"path/{number}/{sender}/found")
                except RuntimeError:
                    found = {"error": f"rank {sender} did not answer"}
                if "error" in found:
                    errors.append(found["error"])
                else:
                    paths.append(PathMtu(**found))
        return Together(paths=tuple(paths), path_errors=tuple(errors))

    def _links(self, found: Together) -> Together:
        try:
            measured = prepare.measured(self._link_store)
        except (RuntimeError, ValueError) as error:
            return dataclasses.replace(found, link_errors=(str(error),))
        return dataclasses.replace(
            found,
            links=measured.links,
            link_errors=measured.errors,
            by_rdma=measured.by_rdma,
        )

    def _measure_path(
        self, name: str, sender: int, receiver: int, *, ranks: list[dict[str, Any]]
    ) -> None:
        """One direction; the sender puts the result, or why there is none."""
        if self.rank not in (sender, receiver):
            return
        mine, theirs = ranks[sender], ranks[receiver]
        key = f"path/{name}"
        try:
            if self.rank == receiver:
                secret = secrets.token_bytes(path_mtu.SECRET_BYTES)
                echo = path_mtu.Echo(theirs["address"], secret)
                try:
                    self._put(f"{key}/offer", {"port": echo.port, "secret": secret.hex()})
                    self._get(f"{key}/found")
                finally:
                    echo.close()
                return
            offer = self._get(f"{key}/offer")
            target = (theirs["address"], offer["port"])
            largest = path_mtu.largest(target, bytes.fromhex(offer["secret"]), mine["mtu"])
            found = PathMtu(
                sender=sender,
                receiver=receiver,
                interface=mine["interface"],
                address=theirs["address"],
                mtu=mine["mtu"],
                receiver_mtu=theirs["mtu"],
                largest=largest,
            )
            self._put(f"{key}/found", dataclasses.asdict(found))
        except (OSError, RuntimeError, ValueError) as error:
            if self.rank == sender:
                text = f"rank {sender} to rank {receiver}: {type(error).__name__}: {error}"
                self._put(f"{key}/found", {"error": text})

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        self._store.wait([key], timedelta(seconds=_STEP_LIMIT_S))
        return json.loads(self._store.get(key).decode())


def _here(machine: Machine) -> dict[str, Any]:
    """Return what others need to know of this rank; `error` is why it has no address."""
    from deepytorch_core.network import rdma

    error, address, interface, mtu = "", "", "", 0
    try:
        address = addresses.own_address()
        nic = next(nic for nic in machine.topology.nics if address in nic.addresses)
        interface, mtu = nic.name, nic.mtu
    except (OSError, StopIteration) as problem:
        error = f"no interface towards the other ranks: {problem}"
    return {
        "node": prepare.node_name(),
        "host": socket.gethostname(),
        "address": address,
        "interface": interface,
        "mtu": mtu,
        "rdma": bool(rdma.usable(machine.topology)),
        "versions": _versions(machine.distributions),
        "error": error,
    }


def _versions(installed: Mapping[str, str]) -> dict[str, str]:
    names = (distribution.NAME, "torch", "deepspeed", "accelerate", "transformers", "megatron-core")
    found = {name: installed[name] for name in names if name in installed}
    found |= {name: installed[name] for name in installed if name.startswith("nvidia-nccl-")}
    return {"python": platform.python_version(), **found}
