"""A copy-on-write view of a folder: real folders, links to its files.

A script that runs in it reads what it always reads. What it creates, deletes and renames stays in
the view. Before it writes to a file that is a link, `before_write` puts a copy in the link's place.
The folders above are there too, with links to all that they hold, so that `..` leads where it did.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import deque
from pathlib import Path

# A tree with more entries is linked in part as whole folders: data sets, mostly.
MAX_ENTRIES = 20_000
_LINKED_WHOLE = {".git", ".venv", "venv", "node_modules", "__pycache__"}


def make(source: Path, root: Path) -> tuple[Path, list[str]]:
    """A view of `source` in the empty folder `root`.

    Returns the view, and the folders of `source` that are linked as a whole: what a script writes
    in those goes to the real folder. Folders nearer the top are mirrored first.
    """
    source = source.resolve()
    view = root
    for parent, part in zip(reversed(source.parents), source.parts[1:], strict=True):
        for entry in _entries(parent):
            if entry.name != part:
                os.symlink(entry.path, view / entry.name)
        view = view / part
        view.mkdir()
    return view, _mirror(source, view, root)


def _mirror(source: Path, view: Path, root: Path) -> list[str]:
    whole: list[str] = []
    entries = 0
    waiting = deque([(source, view)])
    while waiting:
        folder, target = waiting.popleft()
        found = _entries(folder)
        entries += len(found)
        for entry in found:
            place = target / entry.name
            if not entry.is_dir(follow_symlinks=False) or entry.name in _LINKED_WHOLE:
                os.symlink(entry.path, place)
            elif root.is_relative_to(entry.path):
                continue  # the view itself
            elif entries > MAX_ENTRIES:
                os.symlink(entry.path, place)
                whole.append(os.path.relpath(entry.path, source))
            else:
                place.mkdir()
                waiting.append((Path(entry.path), place))
    return whole


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # not ours to read
        return []


def located(path: str) -> str:
    """Where `path` itself lies, behind links to folders; a link at its end is not followed."""
    folder, name = os.path.split(path.rstrip(os.sep))
    if name in ("", os.curdir, os.pardir):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(folder), name)


def before_write(place: str, view: str, *, keeps_content: bool) -> None:
    """Put a file of its own in place of a link in `view` that is about to be written to.

    Both paths are `located`.
    """
    if not (place.startswith(view + os.sep) and os.path.islink(place) and os.path.isfile(place)):
        return
    # Renamed into place, so that other ranks never see a part of it.
    handle, copy = tempfile.mkstemp(dir=os.path.dirname(place), prefix=".deepytorch-")
    os.close(handle)
    if keeps_content:
        shutil.copyfile(place, copy)
    with contextlib.suppress(OSError):
        shutil.copymode(place, copy)
    os.replace(copy, place)
