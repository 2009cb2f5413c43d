"""Code is loaded by names that another user can swap: a second of what swap_race.py does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import swap_race  # noqa: E402


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("place", swap_race.PLACES)
def test_what_a_stranger_swaps_in_is_never_read_as_code(place: str, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o5 != 0o5 and folder != Path("/"):
            folder.chmod(0o755)  # pytest's folders are the tester's alone
    found = swap_race.race(tmp_path, place, seconds=1.0)
    assert found["foreign"] == 0
    expected = "own" if place == "of the victim" else "refused"
    assert found[expected] > 0
