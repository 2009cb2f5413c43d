"""What the control group of this process, version 1 or 2, says: a container's limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class ControlGroup:
    """The files of this process's control group, wherever they are mounted.

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
        top = "sys/fs/cgroup"
        # A container may see its own group as the top, or by the host's path, which is not there.
        self._folders = [f"{top}/{own}", f"{top}/{controller}/{own}", top, f"{top}/{controller}"]
        self._read = read

    def text(self, name: str) -> str:
        """A file's text; nothing where there is none."""
        for folder in self._folders:
            found = self._read(f"{folder}/{name}")
            if found:
                return found
        return ""

    def table(self, name: str) -> dict[str, int]:
        """A file of names and numbers."""
        rows = (line.split() for line in self.text(name).splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


@dataclass(frozen=True)
class Memory:
    """In bytes: what the group may take (None without a limit), and takes, caches left out."""

    limit: int | None
    used: int

    @classmethod
    def of(cls, group: ControlGroup, total_bytes: int) -> Memory:
        """That of a group on a machine of `total_bytes`: a limit of as much is none."""
        limit = group.text("memory.max") or group.text("memory.limit_in_bytes")
        used = group.text("memory.current") or group.text("memory.usage_in_bytes")
        cached = group.table("memory.stat").get("inactive_file", 0)
        bytes_limit = int(limit) if limit.isdecimal() else 0
        return cls(
            limit=bytes_limit if 0 < bytes_limit < (total_bytes or 1 << 62) else None,
            used=max(0, (int(used) if used.isdecimal() else 0) - cached),
        )


def read_file(name: str) -> str | None:
    """The text of a file of this machine, by its path below the root; None if it can't be read."""
    try:
        return Path("/", name).read_text(errors="replace").strip()
    except OSError:
        return None
