"""A container's limits, as told by the control group of this process, version 1 or 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class ControlGroup:
    """The files of this process's control group and those above it, wherever they are mounted.

    Args:
        read: the text of a file below the root, `proc/self/cgroup` for one; None without it.
        controller: "cpu" or "memory".
    """

    def __init__(self, read: Callable[[str], str | None], controller: str) -> None:
        own = ""
        for line in (read("proc/self/cgroup") or "").splitlines():
            parts = line.split(":", 2)
            if len(parts) == 3 and (parts[1] == "" or controller in parts[1].split(",")):
                own = parts[2].strip("/")
        # A container may see its own group as the top, or by the host's path, which is not there.
        names = own.split("/") if own else []
        paths = ["/".join(["", *names[:depth]]) for depth in range(len(names), -1, -1)]
        top = "sys/fs/cgroup"
        self.levels = [Level(read, (f"{top}{path}", f"{top}/{controller}{path}")) for path in paths]

    def text(self, name: str) -> str:
        """A file's text in the nearest group that has it; nothing where none has."""
        return next((found for level in self.levels if (found := level.text(name))), "")

    def table(self, name: str) -> dict[str, int]:
        """A file of names and numbers, of the nearest group that has it."""
        return _table(self.text(name))


@dataclass(frozen=True)
class Level:
    """One group: a process's own, or one above it.

    Args:
        read: as of a `ControlGroup`.
        folders: where it may be, version 2 first.
    """

    read: Callable[[str], str | None]
    folders: tuple[str, ...]

    def text(self, name: str) -> str:
        """A file's text; nothing where there is none."""
        texts = (self.read(f"{folder}/{name}") for folder in self.folders)
        return next((found for found in texts if found), "")


@dataclass(frozen=True)
class CgroupMemory:
    """In bytes: what a group may take (None without a limit), and takes, caches left out."""

    limit: int | None
    used: int

    @classmethod
    def of(cls, group: ControlGroup, total_bytes: int) -> CgroupMemory:
        """Return the memory of the group with the least left, a process's own or one above it.

        Without any limit it is the process's own. A limit of all of the machine's `total_bytes` is
        none.
        """
        found = [cls._at(level, total_bytes) for level in group.levels]
        limited = [
            (memory.limit - memory.used, memory) for memory in found if memory.limit is not None
        ]
        if limited:
            return min(limited, key=lambda pair: pair[0])[1]
        return next((memory for memory in found if memory.used), found[0])

    @classmethod
    def _at(cls, level: Level, total_bytes: int) -> CgroupMemory:
        limit = level.text("memory.max") or level.text("memory.limit_in_bytes")
        used = level.text("memory.current") or level.text("memory.usage_in_bytes")
        stat = _table(level.text("memory.stat"))
        # Version 1 counts those of groups below apart.
        cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        bytes_limit = int(limit) if limit.isdecimal() else 0
        return cls(
            limit=bytes_limit if 0 < bytes_limit < (total_bytes or 1 << 62) else None,
            used=max(0, (int(used) if used.isdecimal() else 0) - cached),
        )


def _table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def read_file(name: str) -> str | None:
    """The text of a file of this machine, by its path below the root; None if it can't be read."""
    try:
        return Path("/", name).read_text(errors="replace").strip()
    except OSError:
        return None
