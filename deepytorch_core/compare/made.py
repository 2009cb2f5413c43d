"""Clears what a script has made outside its view, by a journal that each process keeps.

The next run, or the user's next training, would resume from a checkpoint that a run has left. So
every file is noted before it is there. The checkpoints among them are removed when all of the
run's processes are gone, however they ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from deepytorch_core.compare import weights

_FILE, _WEIGHTS, _FOLDER, _NOT = "file", "weights", "folder", "not"
_JOURNAL = ".made-"


class MadeFiles:
    """The files that this process and its forks have made; `path in made` says whether they have.

    Args:
        folder: where the journal goes.
    """

    def __init__(self, folder: str) -> None:
        self._journal = Path(folder) / f"{_JOURNAL}{os.getpid()}"
        self._handle: int | None = None
        self._known: dict[str, str] = {}

    def __contains__(self, path: str) -> bool:
        return self._known.get(path, _NOT) != _NOT

    def weights(self) -> set[str]:
        """Return those that are weights by how they were written, or by name; some may be gone."""
        return {
            path
            for path, kind in self._known.items()
            if kind == _WEIGHTS or (kind == _FILE and path.endswith(weights.TORCH))
        }

    def folders(self) -> list[str]:
        """The folders, in the order in which they were made."""
        return [path for path, kind in self._known.items() if kind == _FOLDER]

    def add(self, path: str, *, is_weights: bool = False) -> None:
        """Note a file, which is not there yet."""
        self._note(_WEIGHTS if is_weights or self._known.get(path) == _WEIGHTS else _FILE, path)

    def add_folder(self, path: str) -> None:
        """Note a folder, which is not there yet."""
        self._note(_FOLDER, path)

    def move(self, source: str, target: str) -> None:
        """Note that a file, made by this run, gets another name."""
        self.add(target, is_weights=self._known.get(source) == _WEIGHTS)

    def discard(self, path: str) -> None:
        """Note that something else takes the place of `path`, which stays."""
        if path in self:
            self._note(_NOT, path)

    def _note(self, kind: str, path: str) -> None:
        if self._known.get(path) == kind:
            return
        self._known[path] = kind
        if self._handle is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._handle = os.open(self._journal, flags, 0o600)
        os.write(self._handle, (json.dumps([kind, path]) + "\n").encode())


def clear(folder: Path, began: float) -> None:
    """Remove the checkpoints of a run whose processes are gone, and folders that are empty then.

    A folder that the run made and put a checkpoint in goes with all that is in it. What is older
    than the run stays, wherever a rank has moved it, and so does what can't be removed.

    Args:
        folder: where the processes had their journals.
        began: when the run did, in seconds since the epoch.
    """
    known: dict[str, str] = {}
    for journal in folder.glob(f"{_JOURNAL}*"):
        for line in journal.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # cut off where the disk was full
                kind, path = json.loads(line)
                known[path] = kind
    files = [path for path, kind in known.items() if kind in (_FILE, _WEIGHTS)]
    # Judged before the first is removed: a description goes with what it describes.
    useless = [path for path in files if known[path] == _WEIGHTS or _is_useless(path)]
    for path in useless:
        with contextlib.suppress(OSError):
            if os.lstat(path).st_mtime >= began:
                os.unlink(path)
    for path in files:
        with contextlib.suppress(OSError):
            if os.path.islink(path) and not os.path.exists(path):
                os.unlink(path)
    folders = sorted((path for path, kind in known.items() if kind == _FOLDER), key=len)
    for path in reversed(folders):
        if any(os.path.dirname(file) == path for file in useless):
            _remove_tree(path, began)
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _is_useless(path: str) -> bool:
    return weights.is_checkpoint(path) or any(map(weights.is_checkpoint, weights.described(path)))


def _remove_tree(folder: str, began: float) -> None:
    files = [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]
    with contextlib.suppress(OSError):
        if all(os.lstat(file).st_mtime >= began for file in files):
            shutil.rmtree(folder)
