"""`run_program` runs a program again only where torch alone took it down."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepytorch_core.testing import run_program

PROGRAM = """
import sys
from pathlib import Path
log = Path(sys.argv[1])
log.write_text(log.read_text() + "x" if log.exists() else "x")
print(sys.argv[2], file=sys.stderr)
sys.exit(0 if len(log.read_text()) == 3 else 1)
"""


@pytest.mark.parametrize(
    ("said", "runs"),
    [
        ("terminate called without an active exception", 3),
        ("collectives go through deepytorch\nterminate called without an active exception", 1),
        ("another error", 1),
    ],
)
def test_how_often(said: str, runs: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = run_program([sys.executable, "-c", PROGRAM, log, said], capture_output=True)
    assert len(log.read_text()) == runs
    assert (done.returncode == 0) == (runs == 3)
    assert said in done.stderr
