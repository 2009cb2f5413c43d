"""Races a user who swaps links against one who loads code by them: python swap_race.py --minutes 10

Needs root, to be both users. In turns the link leads to a folder of the user who loads and to one
of the other, whose file is another. Ends with status 1 if that was ever read as code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

from deepytorch_core.base import file_permissions

VICTIM, STRANGER = 12_345, 12_346
OWN, FOREIGN = b"own", b"foreign"
# The link's folder belongs to the stranger, to root, open to all and sticky, or to the victim.
# Nobody else can swap a link in the last.
PLACES = ("of the stranger", "sticky", "of the victim")
_NAME = "code.so"


def _as(user: int, act: Callable[[], None]) -> multiprocessing.Process:
    def run() -> None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        act()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def _folder(place: Path, owner: int, content: bytes) -> Path:
    place.mkdir(mode=0o755)
    (place / _NAME).write_bytes(content)
    for path in (place / _NAME, place):
        os.chown(path, owner, owner)
    return place


def race(folder: Path, place: str, seconds: float) -> Counter[str]:
    """Race for so long; returns how often each user's file was read, or reading was refused.

    Args:
        folder: an empty one that all users may enter.
        place: one of `PLACES`.
        seconds: how long.
    """
    theirs = _folder(folder / "stranger", STRANGER, FOREIGN)
    ours = _folder(folder / "victim", VICTIM, OWN)
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o1777 if place == "sticky" else 0o755)
    owner = {"sticky": 0, "of the stranger": STRANGER, "of the victim": VICTIM}[place]
    os.chown(shared, owner, owner)
    link, answer = shared / "link", folder / "answer"
    if owner == VICTIM:
        link.symlink_to(ours)
    answer.touch()
    os.chown(answer, VICTIM, VICTIM)
    context = multiprocessing.get_context("fork")
    is_over: Event = context.Event()

    def swap() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            fresh = shared / "fresh"
            with contextlib.suppress(OSError):
                fresh.symlink_to(ours if number % 2 else theirs)
                fresh.replace(link)

    def load() -> None:
        found: Counter[str] = Counter()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(100):
                try:
                    with file_permissions.opened(link / _NAME) as file:
                        found[file.read().decode()] += 1
                except file_permissions.UntrustedError:
                    found["refused"] += 1
                except OSError:  # the link was not there
                    found["missing"] += 1
        answer.write_text(json.dumps(found))
        is_over.set()

    for process in [_as(STRANGER, swap), _as(VICTIM, load)]:
        process.join(seconds + 60.0)
    return Counter(json.loads(answer.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    status = 0
    for place in PLACES:
        with tempfile.TemporaryDirectory() as name:
            os.chmod(name, 0o755)
            found = race(Path(name), place, 60.0 * minutes / len(PLACES))
        print(f"link in a folder that is {place}: {dict(found)}")
        status |= found["foreign"] > 0 or found.total() == 0
    return status


if __name__ == "__main__":
    sys.exit(main())
