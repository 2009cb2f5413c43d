# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a run continues from exactly: ``<run>/checkpoints/step-<number>/``.

A checkpoint is written beside its place and moved there when every rank's part is on the disk, so
what has the name is whole; an older one goes only after that. ``manifest.json`` says how many
ranks wrote it, and the SHA-256 of every file. Those of a course of training that was left, by going
on from an older one, are moved to ``checkpoints/abandoned/``.
"""

import contextlib
import hashlib
import json
import os
import platform
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.recipes.base import file_transfer
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process, all_of, everyones, on_main, runs, wait_for_all
from deepytorch.recipes.runner.engines import Engine

FOLDER = "checkpoints"  # in a run's folder

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_MANIFEST = "manifest.json"

Facts = Mapping[str, str]


@dataclass(frozen=True)
class Written:
    """By how many ranks a checkpoint was written, and what each took for a step; 0: unknown."""

    world_size: int
    batch_size: int = 0
    accumulation: int = 0


def save(
    engine: Engine,
    state: dict[str, Any],
    folder: Path,
    process: Process,
    *,
    keep: int,
    facts: Facts,
    written: Written,
    previous: int | None = None,
) -> str | None:
    """Write the checkpoint of ``state["step"]``; None, or why it could not be written.

    Collective. ``state`` is this rank's: of tensors, numbers, texts and lists. ``facts`` are of the
    whole run and go into the manifest. The newest ``keep`` checkpoints stay; if writing fails on
    any rank, all older ones stay and nothing else is left. ``previous`` is the step of the
    checkpoint that this one goes on from: any other beyond it is abandoned.
    """
    step = state["step"]
    place = folder / f"step-{step:08d}"
    partial = place.with_name(place.name + _PARTIAL)
    problem = _attempt(lambda: _begin(partial) if process.is_main else None, process)
    if problem is None:
        problem = _caught(lambda: _write_all(engine, state, partial, process))
    if problem is None:
        manifest = {**facts, "step": step, **asdict(written)}
        after = step - 1 if previous is None else previous
        problem = _attempt(
            lambda: _finish(partial, place, manifest, after) if process.is_main else None, process
        )
    if process.is_main:
        if problem is not None:
            # torch does not say that a disk is full, only where it stopped.
            problem += f" ({_free_mb(folder)} MB were free on the disk of {folder})"
            shutil.rmtree(partial, ignore_errors=True)
        else:
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    return problem


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step_of)


def find(resume: str, output_dir: str, name: str) -> Path | None:
    """The checkpoint that ``resume`` means: "auto", a run's folder or a checkpoint's.

    "auto" is the newest of the runs called ``name``, None if there is none. Raises RecipeError for
    a path without a checkpoint.
    """
    if resume == "auto":
        found = [checkpoints(run / FOLDER) for run in runs(output_dir, name)]
        return next((own[-1] for own in reversed(found) if own), None)
    path = Path(resume).resolve()
    if (path / _MANIFEST).is_file():
        return path
    own = checkpoints(path / FOLDER)
    if not own:
        raise RecipeError(
            f"resume={resume} is no checkpoint and no run with one: give a run's folder (its "
            "checkpoints/ has step-... in it), or resume=auto"
        )
    return own[-1]


def find_on_all(resume: str, options: RunOptions, process: Process) -> Path | None:
    """Return what `find` gives on rank 0. Collective.

    Raises RecipeError, on every rank, if another node has a later one. torchrun makes any of the
    nodes the first if they share no storage: going on from less would lose the rest.
    """
    path: Path | None = None
    problem = None
    try:
        path = find(resume, options.output_dir, options.name)
    except (RecipeError, OSError) as error:
        problem = str(error)
    run = "" if path is None else (run_of(path) or path).name
    own = (run, 0 if path is None else _step_of(path) if _NAME.fullmatch(path.name) else 0)
    found = all_of((own, str(path), problem, platform.node()), process)
    latest = max(range(len(found)), key=lambda rank: (found[rank][0], -rank))
    if found[latest][0] > found[0][0]:
        _, place, _, node = found[latest]
        raise RecipeError(
            f"resume={resume}: {place} is on {node}, with rank {latest}, and {found[0][3]}, where "
            "rank 0 is, has none as late: copy that run's folder there"
        )
    if found[0][2] is not None:
        raise RecipeError(found[0][2])
    return on_main(lambda: path, process) if process.world_size > 1 else path


def run_of(path: Path) -> Path | None:
    """The folder of the run that the checkpoint ``path`` is in; None if it lies elsewhere."""
    return path.parents[1] if path.parent.name == FOLDER else None


def written(path: Path) -> Written:
    """Return what the manifest of the checkpoint ``path`` says; RecipeError if unreadable."""
    try:
        manifest = _manifest(path)
    except RecipeError as error:
        raise RecipeError(f"cannot resume from {path}: {error}") from error
    fields = ("world_size", "batch_size", "accumulation")
    return Written(*(int(manifest.get(name, 0)) for name in fields))


def load(engine: Engine, path: Path, process: Process, *, facts: Facts) -> dict[str, Any]:
    """Put the checkpoint into ``engine`` and give this rank's state back.

    Of more ranks than wrote it, the others get rank 0's without the random numbers. Collective.
    Raises RecipeError, on every rank, for files that are missing or changed. Raises it also for a
    checkpoint of other ``facts``, or of another number of ranks where the engine can't have that.
    """
    saved_by = 0
    state: dict[str, Any] = {}

    def check() -> None:
        nonlocal saved_by
        saved_by = _check(path, engine, process, facts)

    def read() -> None:
        engine.load(path, process.rank, saved_by)
        own = process.rank if process.rank < saved_by else 0
        state.update(torch.load(path / f"rank-{own}.pt", weights_only=True))
        if own != process.rank:
            state.pop("random", None)

    original = path
    with _there(path, process) as path:
        # All ranks know that the files are whole before any takes part in loading them.
        problem = _attempt(check, process) or _attempt(read, process)
    if problem is not None:
        raise RecipeError(f"cannot resume from {original}: {problem}")
    return state


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of torch's and Python's random numbers."""
    version, numbers, spare = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": [version, list(numbers), spare]}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on with the numbers of `random_state`."""
    torch.set_rng_state(state["torch"])
    version, numbers, spare = state["python"]
    random.setstate((version, tuple(numbers), spare))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _free_mb(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free // 2**20


def _begin(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_all(engine: Engine, state: dict[str, Any], partial: Path, process: Process) -> None:
    """Every rank's part, in rank 0's ``partial``; RecipeError, on every rank, if one fails."""
    first = file_transfer.first_beside(partial.parent, process)
    own = partial if first == 0 else partial.with_name(f"{partial.name}-{first}")

    if process.rank == first != 0:
        for left in partial.parent.glob(f"*{_PARTIAL}-*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
    if process.world_size > 1:
        wait_for_all(process)

    def write() -> None:
        own.mkdir(exist_ok=True)
        engine.save(own, process.rank)
        torch.save(state, own / f"rank-{process.rank}.pt")

    try:
        problem = _attempt(write, process)
        if problem is not None:
            raise RecipeError(problem)
        if process.world_size > 1:
            file_transfer.collect(own, partial, first, process)
    finally:
        if process.rank == first != 0:
            shutil.rmtree(own, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _finish(partial: Path, place: Path, facts: dict[str, Any], previous: int) -> None:
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    facts["files"] = {str(path.relative_to(partial)): _digest(path) for path in files}
    (partial / _MANIFEST).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for left in checkpoints(place.parent):
        if _step_of(left) > previous:
            aside = place.parent / "abandoned" / left.name
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            left.rename(aside)
    partial.rename(place)


@contextlib.contextmanager
def _there(path: Path, process: Process) -> Iterator[Path]:
    """The checkpoint of rank 0, or a copy of it for as long as the context is open. Collective."""
    if process.world_size == 1:
        yield path
        return
    own = _bytes_of(path / _MANIFEST)
    known = on_main(lambda: own, process)
    sees = known is None or own == known
    if everyones(None if sees else "it is elsewhere", process) is None:
        yield path
        return
    copy = path.with_name(f"{path.name}.copy")
    try:
        first = file_transfer.first_beside(path.parent, process)
        first = 0 if sees else first
        if process.rank == first != 0:
            shutil.rmtree(copy, ignore_errors=True)  # of a run that was killed
        file_transfer.spread(path, copy, first, process)
        yield path if sees else copy
    finally:
        if not sees:
            shutil.rmtree(copy, ignore_errors=True)


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"its {_MANIFEST} cannot be read ({error})") from error
    return manifest


def _check(path: Path, engine: Engine, process: Process, facts: Facts) -> int:
    """How many ranks wrote it; RecipeError where it does not fit or is damaged."""
    manifest = _manifest(path)
    for key, value in facts.items():
        if manifest.get(key) != value:
            raise RecipeError(f"it was written with {key}={manifest.get(key)}, this is {value}")
    saved_by = int(manifest["world_size"])
    if saved_by != process.world_size and not engine.resizes:
        raise RecipeError(
            f"{saved_by} processes wrote it and this run has {process.world_size}: start as many, "
            "or start a new run with model=<its exported checkpoint>"
        )
    # Every rank reads its own part; the first of a node looks at all of it.
    if dist.get_node_local_rank(fallback_rank=0) == 0:
        for name, digest in manifest["files"].items():
            if not (path / name).is_file():
                raise RecipeError(f"{name} is missing")
            if _digest(path / name) != digest:
                raise RecipeError(
                    f"{name} is not what was written: the file is damaged; use an older checkpoint"
                )
    return saved_by


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _attempt(action: Any, process: Process) -> str | None:
    """Do it on every rank; None, or the first rank's problem, the same on all."""
    return everyones(_caught(action), process)


def _caught(action: Any) -> str | None:
    try:
        action()
    except Exception as error:
        # torch reports a full disk as a RuntimeError of its zip writer, and a damaged file as
        # whatever its bytes lead to; a rank that raised alone would leave the others waiting.
        return " ".join(str(error).split()) or type(error).__name__
    return None
