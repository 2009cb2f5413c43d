"""Nobody waits for a build of a torch extension that was killed.

torch's builder creates a file `lock` beside each extension (`torch.utils.file_baton`) and has it
open until it is done. A process that is killed leaves the file, and all later ones wait for it
without a word.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepytorch_core.doctor.finding import Finding, fail, not_here, okay
from deepytorch_core.doctor.machine import Machine


@dataclass(frozen=True)
class ExtensionFacts:
    """The folder of extensions, "" without one, and locks in it that no process has open."""

    folder: str
    left: tuple[str, ...]


def gather(machine: Machine) -> ExtensionFacts:
    folder = _folder(machine)
    if folder is None or not folder.is_dir():
        return ExtensionFacts("", ())
    # Each is in a folder of its own, which is in one of Python's and CUDA's versions by default.
    locks = sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")})
    is_open = _are_open(machine, locks)
    return ExtensionFacts(str(folder), tuple(str(lock) for lock in locks if lock not in is_open))


def _folder(machine: Machine) -> Path | None:
    given = machine.environment.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    cache, home = (machine.environment.get(name) for name in ("XDG_CACHE_HOME", "HOME"))
    if not (cache or home):
        return None
    return Path(cache or f"{home}/.cache") / "torch_extensions"


def _are_open(machine: Machine, files: Iterable[Path]) -> set[Path]:
    """Those that a process has open, of the processes that this one may look into."""
    wanted = {str(file.resolve()): file for file in files}
    found: set[Path] = set()
    for process in machine.entries("proc") if wanted else ():
        if not process.name.isdecimal():
            continue
        try:
            for descriptor in os.scandir(process / "fd"):
                target = os.readlink(descriptor.path)
                if target in wanted:
                    found.add(wanted[target])
        except OSError:  # another user's, or gone meanwhile
            continue
    return found


def judge(facts: ExtensionFacts) -> list[Finding]:
    if not facts.folder:
        return [not_here("torch has built no extensions here")]
    if not facts.left:
        return [okay(f"no build was left unfinished in {facts.folder}")]
    return [
        fail(
            f"{lock} was left by a build that was killed: whatever needs "
            f"{Path(lock).parent.name} waits for it for ever",
            f"rm {shlex.quote(lock)}",
        )
        for lock in facts.left
    ]
