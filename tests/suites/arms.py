"""Another project's tests in two arms: without deepytorch, and with it in every process.

The commands beside this file say which tests; here they are run, and their outcomes compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from deepytorch_core.base import config

HERE = Path(__file__).parent
STOCK = "stock"

Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Batch:
    """Files whose tests run in one process, one after the other.

    Attributes:
        label: a name for it, and for what it prints.
        files: below `Setting.root`.
        environment: variables of this batch alone.
        path: folders to import from.
    """

    label: str
    files: Sequence[Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    path: Sequence[Path] = ()


@dataclass(frozen=True)
class Setting:
    """How both arms run tests.

    Attributes:
        root: the folder that tests are named by, and run in.
        logs: a folder for what they print.
        start: "fork", where children that tests spawn are forks of a process that imported torch,
            or "spawn".
        until_killed_s: how long one test may take.
        options: of pytest.
        environment: variables of every process.
    """

    root: Path
    logs: Path
    start: str
    until_killed_s: float
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Arm:
    """One of the two ways to run tests."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self.took_s = 0.0
        self._setting = setting
        self._folder = setting.logs / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._groups = self._folder / "groups"
        self._decisions = self._folder / "decisions"
        for told in (self._groups, self._decisions):
            told.write_text("")
        self._env = {
            **config.child_environment(),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "DEEPYTORCH_PROFILE": str(self._folder / "profile.json"),
            # Both arms make what they compile themselves, and once.
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),
            "OMP_NUM_THREADS": "1",
            **setting.environment,
            "SUITE_ARM": name,
            "SUITE_START": setting.start,
            "SUITE_GROUPS": str(self._groups),
            "SUITE_DECISIONS": str(self._decisions),
        }
        self._path = [HERE / "both_arms"]
        given = self._env.get("PYTHONPATH")
        self._path += map(Path, given.split(os.pathsep)) if given else []

    def run(self, batch: Batch, tests: Sequence[str] | None = None) -> Rows:
        """Run all tests of these files, or some of them again; return what becomes of each."""
        rows = self._folder / f"{batch.label}{'.again' if tests else ''}.jsonl"
        rows.write_text("")
        began = time.monotonic()
        while True:
            in_time = self._pytest(rows, batch, tests)
            last = lines(rows)[-1:]
            if not last or last[0]["outcome"] is not None:
                break
            ended = {**last[0], "outcome": "crashed" if in_time else "timeout"}
            with rows.open("a") as file:
                file.write(json.dumps(ended) + "\n")
        if not tests:
            self.took_s += time.monotonic() - began
        return {row["test"]: row for row in lines(rows)}

    def _pytest(self, rows: Path, batch: Batch, tests: Sequence[str] | None) -> bool:
        """False if a test took too long. What `rows` has already does not run again."""
        root = self._setting.root
        command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={root}"]
        command += ["-p", "no:cacheprovider", "-p", "suite_plugin"]
        command += ["--continue-on-collection-errors", *self._setting.options]
        command += [str(root / file) for file in tests or batch.files]
        env = {**self._env, **batch.environment, "SUITE_ROWS": str(rows)}
        env["PYTHONPATH"] = os.pathsep.join(map(str, (*self._path, *batch.path)))
        with tempfile.TemporaryDirectory() as folder, rows.with_suffix(".log").open("a") as log:
            pytest = subprocess.Popen(
                command,
                cwd=root,
                env={**env, "TEMP_DIR": folder, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                return self._ends_in_time(pytest, rows)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pytest.pid, signal.SIGKILL)
                pytest.wait()

    def _ends_in_time(self, pytest: subprocess.Popen[bytes], rows: Path) -> bool:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.wait(1)
                return True
            for row in lines(rows)[-1:]:
                still = row["outcome"] is None
                if still and time.time() - row["began"] > self._setting.until_killed_s:
                    return False

    def groups(self) -> Counter[str]:
        """How many groups deepytorch took over, on all ranks, by test."""
        return Counter(line["test"] for line in lines(self._groups))

    def decisions(self) -> dict[str, Counter[str]]:
        """Count choices, as `deepytorch.report()` of all processes would list them."""
        chosen: dict[str, Counter[str]] = {}
        for line in lines(self._decisions):
            chosen.setdefault(line["what"], Counter())[line["chosen"]] += 1
        return chosen


def add_options(parser: argparse.ArgumentParser, *, limit_s: int) -> None:
    """The options that all commands have."""
    parser.add_argument("--json", type=Path, help="file for what became of each test")
    parser.add_argument("--logs", type=Path, help="folder for what the tests print")
    parser.add_argument("--limit", type=int, default=limit_s, help="seconds that a test may take")
    parser.add_argument("--grace", type=int, default=30, help="then, until it is killed")
    parser.add_argument(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="fork: children that tests spawn are forks of a process that imported torch",
    )


def run(arms: tuple[Arm, Arm], batches: Sequence[Batch]) -> tuple[tuple[Rows, Rows], list[str]]:
    """Run all batches in both arms and say how they went; returns rows, and tests that differ."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the tests, too
    found: tuple[Rows, Rows] = {}, {}
    differing: list[str] = []
    for batch in batches:
        first, differ = _compare(arms, batch)
        for all_rows, rows in zip(found, first, strict=True):
            all_rows.update(rows)
        differing += differ
    return found, differing


def _compare(arms: tuple[Arm, Arm], batch: Batch) -> tuple[list[Rows], list[str]]:
    first = [arm.run(batch) for arm in arms]
    names = list(first[0] | first[1])
    if not names:
        print(f"{batch.label}: nothing was run, see {batch.label}.log")
        return first, [batch.label]
    by_file = groupby(names, lambda test: test.partition("::")[0])
    for file, tests in by_file:
        of_file = list(tests)
        passed = [sum(_outcome(rows, test) == "passed" for test in of_file) for rows in first]
        took = [sum(rows[test]["seconds"] for test in of_file if test in rows) for rows in first]
        print(
            f"{file:64} {len(of_file):4} tests, {arms[0].name} passed {passed[0]} in "
            f"{took[0]:.0f} s, {arms[1].name} {passed[1]} in {took[1]:.0f} s",
            flush=True,
        )
    unlike = [test for test in names if _outcome(first[0], test) != _outcome(first[1], test)]
    if not unlike:
        return first, []
    again = [arm.run(batch, unlike) for arm in arms]
    differing = []
    for test in unlike:
        seen = [[_outcome(rows, test) for rows in pair] for pair in zip(first, again, strict=True)]
        differs = seen[0][1] != seen[1][1]
        differing += [test] if differs else []
        words = "; ".join(
            f"{arm.name} {', '.join(outcomes)}" for arm, outcomes in zip(arms, seen, strict=True)
        )
        print(f"    {'differs' if differs else 'unsteady'}: {test}: {words}", flush=True)
    return first, differing


def _outcome(rows: Rows, test: str) -> str:
    return str(rows[test]["outcome"]) if test in rows else "absent"


def lines(file: Path) -> list[dict[str, Any]]:
    """Return what processes have told so far, one JSON object a line."""
    written, _, _ = file.read_text().rpartition("\n")  # the last may still be on its way
    return [json.loads(line) for line in written.splitlines()]
