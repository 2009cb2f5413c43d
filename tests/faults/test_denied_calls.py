"""A container's profile denies system calls that stock does without: ours trains all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import denied_calls

# Calls that only ours makes, each with another way.
OWN = ("eventfd2", "getrandom", "memfd_create", "pidfd_open", "fallocate", "prctl", "madvise")


@pytest.mark.parametrize(
    "name",
    [pytest.param(call, marks=[pytest.mark.extended] if call != OWN[0] else []) for call in OWN],
)
def test_a_job_trains_without_a_call(name: str, tmp_path: Path) -> None:
    has_trained, said = denied_calls.run("ours", name, tmp_path)
    assert has_trained, said
