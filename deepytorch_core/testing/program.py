"""Programs that tests run as a user would."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ABORTED = "terminate called without an active exception"
_OURS = "through deepytorch"
_MOST_RUNS = 4


def run_program(command: Sequence[str | Path], **settings: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, once more where torch itself took the program down.

    A process in which a gloo group of torch's own lives on to the interpreter's end dies there in
    about 1 of 80 cases. Only programs that deepytorch had no part in are run again for that.

    Args:
        command: the program and its arguments.
        **settings: as for `subprocess.run`; the output is text and should be captured.

    Returns what became of the last run; its status is not checked.
    """
    for _ in range(_MOST_RUNS):
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, text=True, check=False, **settings
        )
        said = (done.stdout or "") + (done.stderr or "")
        if done.returncode == 0 or _ABORTED not in said or _OURS in said:
            break
    return done
