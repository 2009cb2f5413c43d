# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint between nodes that share no storage: rank 0's disk has all of them.

Ranks find out who sees the same folder by files that each makes there. They ask for these files by
name, because file systems of a network may list what they knew a while ago.
"""

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, all_of, everyones, on_main, wait_for_all

CHUNK_BYTES = 64 << 20
CHUNKS_AT_ONCE = 16

_Files = Sequence[tuple[str, int]]


def first_beside(folder: Path, process: Process) -> int:
    """The first of the ranks that see the same ``folder`` as this one; it is made if need be.

    Collective. Raises RecipeError, on every rank, where one can't write there.
    """
    if process.world_size == 1:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(str(error)) from error
        return 0
    token = on_main(lambda: secrets.token_hex(8), process)

    def mark(rank: int) -> Path:
        return folder / f".{token}-{rank}"

    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark(process.rank).touch()
    except OSError as error:
        problem = str(error)
    problem = everyones(problem, process)
    first = process.rank
    if problem is None:
        with contextlib.suppress(OSError):
            seen = (rank for rank in range(process.rank) if mark(rank).exists())
            first = next(seen, process.rank)
        wait_for_all(process)
    with contextlib.suppress(OSError):
        mark(process.rank).unlink()
    if problem is not None:
        raise RecipeError(problem)
    return first


def collect(own: Path, place: Path, first: int, process: Process) -> None:
    """Copy what nodes that don't see rank 0's ``place`` have in their ``own`` folder into it.

    Collective; ``first`` is what `first_beside` gave. Raises RecipeError, on every rank, for files
    that can't be read or written.
    """
    is_sending = process.rank == first != 0
    problem = None
    for source, files in _offered(own if is_sending else None, process):
        folder = place if process.is_main else own
        found = _copy(files, folder, process, source=source, target=0)
        problem = problem or found
    _settle(problem, process)


def spread(place: Path, own: Path, first: int, process: Process) -> None:
    """Copy rank 0's ``place`` into the ``own`` folder of nodes that don't see it; see `collect`."""
    is_receiving = process.rank == first != 0
    receivers = all_of(is_receiving, process)
    problem = None
    for _, files in _offered(place if process.is_main else None, process):
        for target in [rank for rank, takes in enumerate(receivers) if takes]:
            folder = place if process.is_main else own
            found = _copy(files, folder, process, source=0, target=target)
            problem = problem or found
    _settle(problem, process)


def _settle(problem: str | None, process: Process) -> None:
    problem = everyones(problem, process)
    if problem is not None:
        raise RecipeError(problem)


def _offered(folder: Path | None, process: Process) -> list[tuple[int, _Files]]:
    """Return each rank with a folder, and the names and sizes of the files there."""
    own: _Files | None = None
    problem = None
    if folder is not None:
        try:
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            own = [(str(path.relative_to(folder)), path.stat().st_size) for path in paths]
        except OSError as error:
            problem = str(error)
    everything = all_of(own, process)
    _settle(problem, process)
    return [(rank, files) for rank, files in enumerate(everything) if files is not None]


def _copy(files: _Files, folder: Path, process: Process, *, source: int, target: int) -> str | None:
    """Move all bytes that were announced, also where they can't be read or written: the other end
    waits for them. Collective: every rank comes here, and is told now and then that it goes on, as
    nobody waits for longer than a group's timeout."""
    problem = None
    for name, size in files:
        for number, begin in enumerate(range(0, size, CHUNK_BYTES) or [0]):
            count = min(CHUNK_BYTES, size - begin)
            if process.rank == source:
                data, found = _read(folder / name, begin, count)
                if count:
                    dist.send(data.to(_device(process)), target)
            elif process.rank == target:
                data = torch.empty(count, dtype=torch.uint8, device=_device(process))
                if count:
                    dist.recv(data, source)
                found = None if problem else _write(folder / name, begin, data.cpu())
            else:
                found = None
            problem = problem or found
            if number % CHUNKS_AT_ONCE == 0:
                wait_for_all(process)
    return problem


def _read(path: Path, begin: int, count: int) -> tuple[torch.Tensor, str | None]:
    data = bytearray(count)
    try:
        with path.open("rb") as file:
            file.seek(begin)
            if file.readinto(data) != count:
                raise OSError(f"{path} became shorter")
    except OSError as error:
        return torch.zeros(count, dtype=torch.uint8), str(error)
    return torch.frombuffer(data, dtype=torch.uint8) if count else torch.zeros(0), None


def _write(path: Path, begin: int, data: torch.Tensor) -> str | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if begin else "wb") as file:  # closing it may raise, too
            file.write(data.numpy().tobytes())
    except OSError as error:
        return str(error)
    return None


def _device(process: Process) -> torch.device:
    return torch.device("cpu") if dist.get_backend() == "gloo" else process.device
