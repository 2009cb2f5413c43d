"""Shows the checks a machine: files below a root, the environment, a child process's knowledge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from deepytorch_core.base import config

if TYPE_CHECKING:
    from deepytorch_core.doctor.smi import GpuState
    from deepytorch_core.doctor.torch_facts import TorchFacts
    from deepytorch_core.network.link import Link
    from deepytorch_core.network.path_mtu import PathMtu
    from deepytorch_core.topology.model import Topology

LIMIT_S = 8.5
"""Asking torch and the GPUs may take so many of the ten seconds that all checks may."""


@dataclass(frozen=True)
class Together:
    """Rank 0's knowledge of all; other ranks have only `is_leader`, the first of its node."""

    is_leader: bool = True
    links: tuple[Link, ...] = ()
    link_errors: tuple[str, ...] = ()
    paths: tuple[PathMtu, ...] = ()
    path_errors: tuple[str, ...] = ()
    by_rdma: bool = False
    num_nodes: int = 1
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass
class Machine:
    """This machine, or a recorded one below `root`; facts are looked up once, when first asked for.

    Attributes:
        root: the folder that has `sys`, `proc` and `dev`.
        environment: the variables of the job that is examined.
        limit_s: what asking torch and the GPUs may take.
        report: a run's report, as `deepytorch.report().to_dict()`, or None.
        together: what was measured with the job's other ranks, None without any.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=config.child_environment)
    limit_s: float = LIMIT_S
    report: Mapping[str, object] | None = None
    together: Together | None = None

    def path(self, name: str) -> Path:
        """A file below the root: `path("proc/cmdline")`."""
        return self.root / name

    def read(self, name: str) -> str | None:
        """A file's text without the last newline; None when it can't be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    def entries(self, name: str) -> list[Path]:
        """Return what is in a folder, in order of names; nothing when there is no such folder."""
        try:
            return sorted(self.path(name).iterdir())
        except OSError:
            return []

    @cached_property
    def topology(self) -> Topology:
        """Raises ImportError when the native core can't be loaded."""
        from deepytorch_core import _core
        from deepytorch_core.topology.model import Topology

        root = "" if self.root == Path("/") else str(self.root)
        return Topology.from_json(_core.topology_json(root=root))

    @cached_property
    def distributions(self) -> Mapping[str, str]:
        """Installed packages with their versions, by normalised names."""
        found: dict[str, str] = {}
        for distribution in metadata.distributions():
            name = distribution.metadata["Name"]
            if name:
                found.setdefault(name.lower().replace("_", "-"), distribution.version)
        return found

    @cached_property
    def affinity(self) -> frozenset[int]:
        """The CPUs that this process may run on."""
        return frozenset(os.sched_getaffinity(0))

    def begin(self) -> None:
        """Start what takes long, torch and nvidia-smi, at the same time."""
        with ThreadPoolExecutor() as pool:
            pool.submit(lambda: self.gpu_states)
            pool.submit(lambda: self.torch)

    @cached_property
    def gpu_states(self) -> tuple[GpuState, ...]:
        """The words of nvidia-smi on each GPU; nothing if there is none."""
        from deepytorch_core.doctor import smi

        return smi.ask()

    @cached_property
    def torch(self) -> TorchFacts:
        """The words of torch, from a process of its own."""
        from deepytorch_core.doctor import torch_facts

        return torch_facts.ask(self.limit_s)
