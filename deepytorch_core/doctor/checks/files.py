"""Enough files may be open: sockets of all ranks, loaders' workers, shards."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from deepytorch_core.base import config
from deepytorch_core.doctor.finding import Finding, fail, okay, warn
from deepytorch_core.doctor.machine import Machine

_BASE, _PER_RANK, _COMFORT = 512, 64, 4096


@dataclass(frozen=True)
class FileFacts:
    """The soft and hard limit (None without one), and how many ranks the job has."""

    soft: int | None
    hard: int | None
    world_size: int


def gather(machine: Machine) -> FileFacts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    launched = config.launched(machine.environment)
    return FileFacts(_limit(soft), _limit(hard), launched.size if launched else 1)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def judge(facts: FileFacts) -> list[Finding]:
    if facts.soft is None:
        return [okay("any number of files may be open")]
    needed = _BASE + _PER_RANK * facts.world_size
    wanted = max(65536, needed)
    remedy = f"ulimit -n {wanted}"
    if facts.hard is not None and facts.hard < wanted:
        remedy = f"ulimit -n {facts.hard}   # more: /etc/security/limits.conf, nofile"
    text = f"{facts.soft} files may be open"
    if facts.soft < needed:
        return [fail(f"{text}, {facts.world_size} ranks take up to {needed}", remedy)]
    if facts.soft < _COMFORT and (facts.hard is None or facts.hard > facts.soft):
        return [warn(f"{text}: many workers or shards need more", remedy)]
    return [okay(text)]
