"""Whether a file that decides what this process does could have been written by somebody else."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def why_not_private(path: Path, *, group_may_write: bool = False) -> str | None:
    """Who else can write the file or folder `path`; None if nobody.

    Args:
        path: must exist.
        group_may_write: its group counts as ourselves, as on systems where everybody has one.

    Raises OSError when it can't be looked at.
    """
    status = path.stat()
    # Root could write our files anyway.
    if status.st_uid not in {os.geteuid(), 0}:
        return f"{path} belongs to another user (id {status.st_uid})"
    others = stat.S_IWOTH if group_may_write else stat.S_IWGRP | stat.S_IWOTH
    if status.st_mode & others:
        return f"{path} can be written by others"
    return None


def why_not_believed(path: Path) -> str | None:
    """Why nothing is taken from a file of settings or measurements, with the remedy; None if it is.

    A file that is not there, or can't be looked at, is nobody's: None.
    """
    try:
        reason = why_not_private(path, group_may_write=True)
    except OSError:
        return None
    if reason is None:
        return None
    return f"{reason}: make it yours alone (copy it, chmod o-w), remove it, or name another file"
