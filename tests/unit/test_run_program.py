"""`run_program` runs a program again only where torch alone took it down or held it up."""

from __future__ import annotations

import subprocess
import sys
import time
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
    done = run_program([sys.executable, "-c", PROGRAM, log, said])
    assert len(log.read_text()) == runs
    assert (done.returncode == 0) == (runs == 3)
    assert said in done.stderr


HANGING = """
import subprocess
import sys
import time
from pathlib import Path
log = Path(sys.argv[1])
log.write_text(log.read_text() + "x" if log.exists() else "x")
print(sys.argv[2], flush=True)
if len(log.read_text()) < 2:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(101.25)", log])
"""


@pytest.mark.parametrize("limit", [{"timeout": 2}, {"idle": 2}])
def test_a_stock_program_that_never_ends_is_run_again(
    limit: dict[str, float], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    done = run_program([sys.executable, "-c", HANGING, log, "trained"], **limit)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert len(log.read_text()) == 2


def test_a_program_of_ours_that_never_ends_is_an_error(tmp_path: Path) -> None:
    said = "collectives go through deepytorch"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_program([sys.executable, "-c", HANGING, tmp_path / "log", said], timeout=4, idle=1)
    assert said in str(caught.value.output)
    until = time.monotonic() + 30  # a killed process takes a moment to end
    while is_somewhere(str(tmp_path)):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_somewhere(word: str) -> bool:
    return word in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
