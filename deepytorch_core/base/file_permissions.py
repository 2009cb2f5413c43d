"""Whether a file that decides what this process does could have been written by somebody else.

The open file is looked at, not its name: a moment later that may lead elsewhere. `opened` is for
code, `opened_data` for settings and measurements.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import io
import os
import pwd
import stat
from pathlib import Path

_REMEDY = "make it yours alone (copy it, chmod o-w), remove it, or name another file"
# As Linux follows.
_MOST_LINKS = 40


class UntrustedError(ValueError):
    """Somebody else can write a file, or put another in its place; the message names it."""


def opened(path: Path) -> io.BufferedReader:
    """Open a file of code for reading that nobody else can have written or put there.

    As for ssh's files, all folders on the way are ours or root's, and nobody else can write them.
    In a sticky one, as /tmp is, others can replace nothing that is not theirs.

    Raises UntrustedError naming what others can write, and OSError.
    """
    found = _reached(path, is_file=True)
    try:
        return os.fdopen(found, "rb")
    except BaseException:
        os.close(found)
        raise


def why_not_reached(folder: Path) -> str | None:
    """Say who else can write this folder or put another in its place; None if nobody can.

    What `opened` shall open later has to lie in such a folder. Raises OSError.
    """
    try:
        os.close(_reached(folder, is_file=False))
    except UntrustedError as error:
        return str(error)
    return None


def _reached(path: Path, *, is_file: bool) -> int:
    """A descriptor of what `path` leads to, by folders that nobody else can change."""
    found = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        left = list(Path(os.path.abspath(path)).parts[1:])
        shown, num_links = Path("/"), 0
        _check_folder(os.fstat(found), shown)
        while left:
            name = left.pop(0)
            status = os.stat(name, dir_fd=found, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                _check_owner(status, shown / name)
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                target = Path(os.readlink(name, dir_fd=found))
                left = [*target.parts, *left]
                if target.is_absolute():
                    left, shown = left[1:], Path("/")
                    found = _instead(found, os.open("/", os.O_PATH | os.O_CLOEXEC))
                continue
            shown = shown / name
            if left or not is_file:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                found = _instead(found, os.open(name, flags, dir_fd=found))
                _check_folder(os.fstat(found), shown)
            else:
                found = _instead(found, _open_file(name, os.O_NOFOLLOW, folder=found))
                _check_file(os.fstat(found), shown, stat.S_IWGRP | stat.S_IWOTH)
        return found
    except BaseException:
        os.close(found)
        raise


def opened_data(path: Path) -> io.BufferedReader:
    """Open a file of settings or measurements for reading that others can't have written.

    Its own owner and mode count. Its folders may be a project's: whoever may write those can put
    there what is ours already, and nothing of theirs.

    Raises UntrustedError with the remedy, and OSError.
    """
    found = _open_file(os.fspath(path), 0)
    try:
        try:
            _check_file(os.fstat(found), path, stat.S_IWOTH)
        except UntrustedError as error:
            raise UntrustedError(f"{error}: {_REMEDY}") from None
        return os.fdopen(found, "rb")
    except BaseException:
        os.close(found)
        raise


def why_not_private(path: Path, *, group_may_write: bool = False) -> str | None:
    """Say who else can write the file or folder `path`; None if nobody can.

    For what is written there. What is read is opened by `opened` or `opened_data`.

    Args:
        path: must exist.
        group_may_write: its group counts as ourselves, as on systems where everybody has one.

    Raises OSError when it can't be looked at.
    """
    others = stat.S_IWOTH if group_may_write else stat.S_IWGRP | stat.S_IWOTH
    try:
        _check_owner(path.stat(), path)
        _check_mode(path.stat(), path, others)
    except UntrustedError as error:
        return str(error)
    return None


def why_not_believed(path: Path) -> str | None:
    """Why nothing is to be kept in a file of settings, with the remedy; None if it may be.

    A file that is not there, or can't be looked at, is nobody's: None.
    """
    try:
        reason = why_not_private(path, group_may_write=True)
    except OSError:
        return None
    return None if reason is None else f"{reason}: {_REMEDY}"


def _instead(old: int, new: int) -> int:
    os.close(old)
    return new


def _open_file(name: str, flags: int, *, folder: int | None = None) -> int:
    # A pipe without a writer would hold up the open itself.
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=folder)


def _check_file(status: os.stat_result, path: Path, others: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedError(f"{path} is no regular file")
    _check_owner(status, path)
    _check_mode(status, path, others)


def _check_folder(status: os.stat_result, path: Path) -> None:
    _check_owner(status, path)
    if status.st_mode & stat.S_ISVTX:
        return  # what is in it is looked at next
    others = stat.S_IWOTH if _is_own_group(status.st_gid) else stat.S_IWGRP | stat.S_IWOTH
    _check_mode(status, path, others)


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid not in _trusted():
        raise UntrustedError(f"{path} belongs to another user (id {status.st_uid})")


def _trusted() -> set[int]:
    """This user, and root, who could write our files anyway.

    The owner of "/" is root where that has no id of its own, as in a container of one user.
    """
    return {os.geteuid(), 0, os.stat("/").st_uid}


def _check_mode(status: os.stat_result, path: Path, others: int) -> None:
    if status.st_mode & others:
        raise UntrustedError(f"{path} can be written by others")


def _is_own_group(group: int) -> bool:
    """Whether it is the group that some systems give each user, with nobody else in it."""
    if group != os.getegid():
        return False
    with contextlib.suppress(KeyError, OSError):
        own, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return found.gr_name == own.pw_name and set(found.gr_mem) <= {own.pw_name}
    return False
