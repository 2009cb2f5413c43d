"""A copy-on-write view of a folder: real folders, copies of its small files, links to the others.

A script that runs in it reads what it always reads. What it creates, deletes and renames stays in
the view. Before it writes to a file that is a link, `before_write` puts a copy in the link's place.
Small files are copies from the start. So a script's own path leads to the view. Code that
`before_write` knows nothing of, such as SQLite's or a child process's, writes there, too. The
folders above are there too, with links to all that they hold, so that `..` leads where it did.
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
_LINKED_WHOLE = {".git", ".venv", "venv", "node_modules"}
_SYSTEM = {"/dev", "/proc", "/sys"}  # reading what looks like a file there may never end
LARGEST_COPY = 1 << 20
"""Bytes of a file; a larger one is linked, and so is every one beyond the limits in all."""
MOST_COPIES = 4_000
MOST_COPIED = 64 << 20
_MARK = ".deepytorch-view-of"  # beside the folders above, a link to what the view is of


def make(source: Path, root: Path) -> tuple[Path, list[str]]:
    """A view of `source` in the empty folder `root`.

    Returns the view, and the folders of `source` that are linked as a whole: what a script writes
    in those goes to the real folder. Folders nearer the top are mirrored first.
    """
    source = source.resolve()
    os.symlink(source, root / _MARK)
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
    copies = _Copies()
    entries = 0
    waiting = deque([(source, view)])
    while waiting:
        folder, target = waiting.popleft()
        found = _entries(folder)
        entries += len(found)
        for entry in sorted(found, key=_is_no_script):
            place = target / entry.name
            if not entry.is_dir(follow_symlinks=False):
                if not copies.add(entry, place):
                    os.symlink(_goal(entry, source, view), place)
            elif entry.name in _LINKED_WHOLE or entry.path in _SYSTEM:
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


def _is_no_script(entry: os.DirEntry[str]) -> bool:
    """Scripts come first: among many files of data they are copied all the same."""
    return not entry.name.endswith(".py")


def _goal(entry: os.DirEntry[str], source: Path, view: Path) -> Path:
    """Return where a link to `entry` leads: a link within `source` stays one in `view`."""
    if entry.is_symlink():
        real = Path(os.path.realpath(entry.path))
        if real.is_relative_to(source):
            return view / real.relative_to(source)
    return Path(entry.path)


class _Copies:
    """Copies files while they are small and few."""

    def __init__(self) -> None:
        self._files = 0
        self._bytes = 0

    def add(self, entry: os.DirEntry[str], place: Path) -> bool:
        """Whether `place` is a copy of `entry` now."""
        try:
            if not entry.is_file(follow_symlinks=False):
                return False
            size = entry.stat().st_size
            is_much = self._files == MOST_COPIES or self._bytes + size > MOST_COPIED
            if is_much or size > LARGEST_COPY:
                return False
            shutil.copy2(entry.path, place)
        except OSError:  # not ours to read, or gone
            place.unlink(missing_ok=True)
            return False
        self._files += 1
        self._bytes += size
        return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # not ours to read
        return []


def source_of(view: str) -> str | None:
    """The folder that `make` made `view` of."""
    for folder in (Path(view), *Path(view).parents):
        mark = folder / _MARK
        if mark.is_symlink():
            return os.readlink(mark)
    return None


def original(path: str, view: str) -> str:
    """Return the path in the viewed folder for one in `view`, and others as they are."""
    view, source = os.path.realpath(view), source_of(view)
    if source is None or not is_within(path, view):
        return path
    return os.path.join(source, os.path.relpath(path, view))


def is_within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it; neither is looked up."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def located(path: str) -> str:
    """Return where `path` itself lies, behind links to folders; one at its end isn't followed."""
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
