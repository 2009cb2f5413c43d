# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint between nodes that share no storage: rank 0's disk has all of them.

Ranks find out who sees the same folder by files that each makes there, asked for by name: file
systems of a network may list what they knew a while ago.
"""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.recipes._config import RecipeError
from deepytorch.recipes._run import Process, everyones, on_main, wait_for_all

CHUNK_BYTES = 64 << 20

_Files = Sequence[tuple[str, int]]


def first_beside(folder: Path, process: Process) -> int:
    """The first of the ranks that see the same ``folder`` as this one; it is made if need be.

    Collective. Raises RecipeError, on every rank, where one can't write there.
    """
    if process.world_size == 1:
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
        first = next(rank for rank in range(process.rank + 1) if mark(rank).exists())
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
        if process.rank == source:
            problem = _send(own, files, 0, process)
        elif process.is_main:
            found = _receive(place, files, source, process)
            problem = problem or found
    _settle(problem, process)


def spread(place: Path, own: Path, first: int, process: Process) -> None:
    """Copy rank 0's ``place`` into the ``own`` folder of nodes that don't see it; see `collect`."""
    is_receiving = process.rank == first != 0
    receivers: list[Any] = [None] * process.world_size
    dist.all_gather_object(receivers, is_receiving)
    problem = None
    for _, files in _offered(place if process.is_main else None, process):
        for target in [rank for rank, takes in enumerate(receivers) if takes]:
            if process.is_main:
                found = _send(place, files, target, process)
                problem = problem or found
            elif process.rank == target:
                problem = _receive(own, files, 0, process)
    _settle(problem, process)


def _settle(problem: str | None, process: Process) -> None:
    problem = everyones(problem, process)
    if problem is not None:
        raise RecipeError(problem)


def _offered(folder: Path | None, process: Process) -> Iterator[tuple[int, _Files]]:
    """Of each rank with a folder its number, and the names and sizes of the files there."""
    own: _Files | None = None
    if folder is not None:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        own = [(str(path.relative_to(folder)), path.stat().st_size) for path in paths]
    everything: list[Any] = [None] * process.world_size
    dist.all_gather_object(everything, own)
    yield from ((rank, files) for rank, files in enumerate(everything) if files is not None)


def _send(folder: Path, files: _Files, target: int, process: Process) -> str | None:
    """Send all bytes that were announced, also where they can't be read: the other end waits."""
    problem = None
    for name, size in files:
        with contextlib.ExitStack() as stack:
            file: Any = None
            for begin in range(0, size, CHUNK_BYTES):
                data = bytearray(min(CHUNK_BYTES, size - begin))
                try:
                    file = file or stack.enter_context((folder / name).open("rb"))
                    if file.readinto(data) != len(data):
                        raise OSError(f"{name} became shorter")
                except OSError as error:
                    problem = problem or str(error)
                dist.send(torch.frombuffer(data, dtype=torch.uint8).to(_device(process)), target)
    return problem


def _receive(folder: Path, files: _Files, source: int, process: Process) -> str | None:
    problem = None
    for name, size in files:
        with contextlib.ExitStack() as stack:
            file: Any = None
            try:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((folder / name).open("wb"))
            except OSError as error:
                problem = problem or str(error)
            for begin in range(0, size, CHUNK_BYTES):
                count = min(CHUNK_BYTES, size - begin)
                data = torch.empty(count, dtype=torch.uint8, device=_device(process))
                dist.recv(data, source)
                try:
                    if file is not None and problem is None:
                        file.write(data.cpu().numpy())
                except OSError as error:
                    problem = str(error)
    return problem


def _device(process: Process) -> torch.device:
    return torch.device("cpu") if dist.get_backend() == "gloo" else process.device
