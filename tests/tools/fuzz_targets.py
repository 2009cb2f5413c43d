"""Runs the fuzzers of what reads bytes and keeps what came of it: `make fuzz`.

`python -m fuzz_targets json framing --seconds 600` runs these two for so long each.
`--json FILE` adds a line per target to FILE: how many inputs it executed, and how many broke it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch_core.base import provenance

_BUILD = Path("build/fuzz")
_CORPUS = Path("tests/fuzz/corpus")
_ONE_INPUT_S = 20
_TAIL_LINES = 40
_EXECUTED = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
_BROKEN = "Test unit written to "  # an input that crashed it, took too long or too much memory


@dataclass(frozen=True)
class Outcome:
    """The result of fuzzing one target: inputs executed, how many of them broke it, the time."""

    target: str
    executions: int
    crashes: int
    seconds: float

    def write(self, file: Path, versions: Mapping[str, str]) -> None:
        """Adds a record to `file`; `versions` are of what fuzzed."""
        found = provenance.provenance()
        found["versions"] = {**found["versions"], **versions}
        told: dict[str, Any] = {
            "bench": "fuzz",
            "target": self.target,
            "seconds": round(self.seconds, 1),
            "executions": self.executions,
            "crashes": self.crashes,
        }
        provenance.write_record(file, {**told, **found})


def main(arguments: Sequence[str]) -> int:
    """0 if no input broke a target; the first that is broken is the last that runs."""
    parser = argparse.ArgumentParser(prog="python -m fuzz_targets")
    parser.add_argument("targets", nargs="+", help="those of tests/fuzz/targets.hpp")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line per target to FILE")
    options = parser.parse_args(arguments)
    for target in options.targets:
        _say(f"fuzz {target} for {options.seconds} s")
        log, status, seconds = _run(target, options.seconds)
        outcome = read_log(target, log, status, seconds)
        if outcome is not None:
            _say(f"{outcome.executions} executions, {outcome.crashes} crashes")
            if options.json:
                outcome.write(options.json, {"clang": _clang_version()})
        if status != 0:
            _say("\n".join(log.splitlines()[-_TAIL_LINES:]))
            return 1
    return 0


def read_log(target: str, log: str, status: int, seconds: float) -> Outcome | None:
    """Return what libFuzzer's output and its exit status tell; None if it executed nothing.

    Raises ValueError if it ended well without its final statistics: nothing would be known.
    """
    executed = _EXECUTED.search(log)
    if executed is None:
        if status == 0:
            raise ValueError(f"fuzz_{target} ended well but says not how many inputs it executed")
        return None
    # Status without an input: a leak that it found at its end.
    crashes = max(log.count(_BROKEN), int(status != 0))
    return Outcome(target, int(executed.group(1)), crashes, seconds)


def _run(target: str, seconds: int) -> tuple[str, int, float]:
    """Its output, also kept in build/fuzz, its exit status, and how long it took."""
    inputs = _BUILD / "corpus" / target
    inputs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    done = subprocess.run(
        [
            _BUILD / "tests" / "fuzz" / f"fuzz_{target}",
            f"-max_total_time={seconds}",
            f"-timeout={_ONE_INPUT_S}",
            "-print_final_stats=1",
            f"-artifact_prefix={_BUILD}/{target}-",
            inputs,
            _CORPUS / target,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    # Inputs that it shows may be any bytes.
    log = done.stdout.decode(errors="replace")
    (_BUILD / f"{target}.log").write_text(log)
    return log, done.returncode, time.monotonic() - started


def _clang_version() -> str:
    said = subprocess.run(["clang++", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\S+)", said)
    return found.group(1) if found else "unknown"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
