"""Shared memory is large enough for loaders' workers and NCCL."""

from __future__ import annotations

import os
from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, okay, warn
from deepytorch_core.doctor.machine import Machine

# Docker's default is 64 MiB; a batch of images for each of some workers is more.
_TOO_LITTLE = 512 << 20
_LOW_FREE = 1 << 30


@dataclass(frozen=True)
class ShmFacts:
    """Bytes of /dev/shm; `error` where there is none or it can't be written."""

    total_bytes: int
    free_bytes: int
    error: str


def gather(machine: Machine) -> ShmFacts:
    folder = machine.path("dev/shm")
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return ShmFacts(0, 0, str(error.strerror))
    problem = "" if os.access(folder, os.W_OK) and not status.f_flag & os.ST_RDONLY else "read-only"
    return ShmFacts(status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail, problem)


def judge(facts: ShmFacts) -> list[Finding]:
    remedy = "sudo mount -o remount,rw,size=16G /dev/shm   # a container: docker run --shm-size=16g"
    if facts.error:
        return [fail(f"/dev/shm can't be used: {facts.error}", remedy)]
    size = f"/dev/shm has {_size(facts.total_bytes)}, {_size(facts.free_bytes)} free"
    if facts.total_bytes < _TOO_LITTLE:
        text = f"{size}: loaders' workers die with a bus error"
        return [fail(text, remedy)]
    if facts.free_bytes < min(_LOW_FREE, facts.total_bytes // 2):
        return [warn(size, "ls -lS /dev/shm   # files of jobs that are gone may be deleted")]
    return [okay(size)]


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.0f} MiB"
