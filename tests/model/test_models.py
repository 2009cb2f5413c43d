"""Every order of steps of the protocols in shared memory, by Spin (G. J. Holzmann, spinroot.com).

The models beside this file say what the code's threads read and write. Spin goes through all
interleavings, as if memory were sequentially consistent: what weaker orders may do is
ThreadSanitizer's part. A model with a planted fault must be found wrong, or it checks nothing.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parent

SOUND = [
    ("segment", ""),
    ("segment", "N=2 ABORT"),
    ("mailbox", ""),
    ("rendezvous", ""),
    ("device", ""),
    ("queue", ""),
]
# One of each model, found soonest, is always planted: it shows that the model checks something.
SOONEST = {
    *("FAULT_SLEEPS_UNSEEING", "FAULT_NO_SECOND_LOOK", "FAULT_BROADCAST_ENDS_ALONE"),
    *("FAULT_WITHDRAWS_BLINDLY", "FAULT_ONE_TOO_MANY"),
}
FAULTS = [
    ("segment", "FAULT_ONE_COPY"),
    ("segment", "FAULT_EPOCH_BEFORE_COUNT"),
    ("segment", "FAULT_SLEEPS_UNANNOUNCED"),
    ("segment", "FAULT_SLEEPS_UNSEEING"),
    ("mailbox", "FAULT_NO_SECOND_LOOK"),
    ("mailbox", "FAULT_SLEEPS_UNANNOUNCED"),
    ("mailbox", "FAULT_READS_BELL_LATE"),
    ("mailbox", "FAULT_TAKES_IN_SILENCE"),
    ("mailbox", "FAULT_WRITES_BEFORE_IT_READS"),
    ("rendezvous", "FAULT_WITHDRAWS_BLINDLY"),
    ("device", "FAULT_ONE_COPY"),
    ("device", "FAULT_BROADCAST_ENDS_ALONE"),
    ("queue", "FAULT_ONE_TOO_MANY"),
    ("queue", "FAULT_FREED_TOO_EARLY"),
    ("queue", "FAULT_SAID_TOO_EARLY"),
]


def errors(name: str, defines: str, folder: Path) -> int:
    """How many errors Spin's exhaustive search finds: 0, or 1, where it stops."""
    options = [f"-D{each}" for each in defines.split()]
    run(folder, "spin", *options, "-a", str(MODELS / f"{name}.pml"))
    run(folder, "cc", "-w", "-DSAFETY", "-o", "pan", "pan.c")
    told = run(folder, "./pan", "-m200000", "-n")
    assert "search depth too small" not in told
    return int(told.split("errors: ")[1].split()[0])


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "defines"), SOUND)
def test_no_order_of_steps_goes_wrong(name: str, defines: str, tmp_path: Path) -> None:
    assert errors(name, defines, tmp_path) == 0


@pytest.mark.parametrize(
    ("name", "defines"),
    [
        pytest.param(name, fault, marks=[pytest.mark.extended] * (fault not in SOONEST))
        for name, fault in FAULTS
    ],
)
def test_a_planted_fault_is_found(name: str, defines: str, tmp_path: Path) -> None:
    assert errors(name, defines, tmp_path) == 1


def test_every_fault_of_the_models_is_planted() -> None:
    written = {
        (path.stem, word)
        for path in MODELS.glob("*.pml")
        for word in path.read_text().split()
        if word.startswith("FAULT_")
    }
    assert written == set(FAULTS)
