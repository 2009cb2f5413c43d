"""PyTorch's own tests of torch.distributed, test by test: without deepytorch and with it.

    python tests/suites/torch_distributed.py CHECKOUT [--files GLOB ... | --all] [--json FILE]

CHECKOUT is a clone of PyTorch at the tag of the installed torch. Both arms run the same tests, the
second with `import deepytorch` before torch in every process. Tests that differ run once more in
both, and count if they differ again. Ends with status 1 if any do. Needs the package expecttest.
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
from itertools import groupby
from pathlib import Path
from typing import Any

from deepytorch_core import config

HERE = Path(__file__).parent
STOCK, OURS = "stock", "deepytorch"
# Globs in test/distributed. No GPU: what it takes is skipped. Ten minutes an arm on two idle cores.
CHOICE = [
    "test_c10d_*.py",
    "test_functional_api.py",
    "test_device_mesh.py",
    "test_distributed_spawn.py",
    "_composable/test_replicate.py",
    "algorithms/test_join.py",
    "optim/*.py",
    "_tensor/test_*.py",  # the next one's name up to torch 2.6
    "tensor/test_*.py",
    "tensor/parallel/*.py",
    "checkpoint/*.py",
    "pipelining/*.py",
    "elastic/**/*.py",
    "launcher/*.py",
]
# What PyTorch's run_test.py sets for a file; such a file has a process of its own.
ENVIRONMENT = {"test_distributed_spawn.py": {"BACKEND": "gloo", "WORLD_SIZE": "3"}}

Rows = dict[str, dict[str, Any]]


class Arm:
    """One of the two ways to run tests."""

    def __init__(self, name: str, asked: argparse.Namespace) -> None:
        self.name = name
        self._root = asked.checkout / "test"
        # PyTorch ends a test's children when its time is up, and says where they were.
        self._until_killed_s = asked.limit + asked.grace
        self._folder = asked.logs / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._groups = self._folder / "groups"
        self._groups.write_text("")
        self._env = {
            **config.child_environment(),
            "PYTHONPATH": str(HERE / "both_arms"),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "DEEPYTORCH_PROFILE": str(self._folder / "profile.json"),
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(asked.limit),
            "SUITE_ARM": name,
            "SUITE_START": asked.start,
            "SUITE_GROUPS": str(self._groups),
        }

    def run(self, label: str, files: list[Path], tests: list[str] | None = None) -> Rows:
        """What becomes of all tests of these files, or of some of them."""
        rows = self._folder / f"{label}.jsonl"
        rows.write_text("")
        while True:
            in_time = self._pytest(rows, files, tests)
            last = _lines(rows)[-1:]
            if not last or last[0]["outcome"] is not None:
                return {row["test"]: row for row in _lines(rows)}
            ended = {**last[0], "outcome": "crashed" if in_time else "timeout"}
            with rows.open("a") as file:
                file.write(json.dumps(ended) + "\n")

    def _pytest(self, rows: Path, files: list[Path], tests: list[str] | None) -> bool:
        """False if a test took too long. What `rows` has already does not run again."""
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull]
        command += [f"--rootdir={self._root}", "--noconftest", "-p", "no:cacheprovider"]
        command += ["-p", "suite_plugin", "--continue-on-collection-errors"]
        command += [str(self._root / one) for one in tests or files]
        env = {**self._env, **ENVIRONMENT.get(files[0].name, {}), "SUITE_ROWS": str(rows)}
        # PyTorch runs each file as a script, whose folder is looked into for what it imports.
        env["PYTHONPATH"] += f"{os.pathsep}{files[0].parent}"
        with tempfile.TemporaryDirectory() as folder, rows.with_suffix(".log").open("a") as log:
            pytest = subprocess.Popen(
                command,
                cwd=self._root,
                env={**env, "TEMP_DIR": folder, "TMPDIR": folder},
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
            for row in _lines(rows)[-1:]:
                still = row["outcome"] is None
                if still and time.time() - row["began"] > self._until_killed_s:
                    return False

    def groups(self) -> Counter[str]:
        """How many groups deepytorch took over, on all ranks, by test."""
        return Counter(line["test"] for line in _lines(self._groups))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="+", metavar="GLOB", help="in test/distributed")
    parser.add_argument("--all", action="store_true", help="all files of test/distributed")
    parser.add_argument("--json", type=Path, help="file for what became of each test")
    parser.add_argument("--logs", type=Path, help="folder for what the tests print")
    parser.add_argument("--limit", type=int, default=60, help="seconds that a test may take")
    parser.add_argument("--grace", type=int, default=30, help="then, until it is killed")
    parser.add_argument(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="fork: children that tests spawn are forks of a process that imported torch",
    )
    asked = parser.parse_args()
    asked.checkout = asked.checkout.resolve()
    asked.logs = (asked.logs or Path(tempfile.mkdtemp(prefix="torch_distributed_"))).resolve()
    suite = asked.checkout / "test" / "distributed"
    globs = asked.files or (["**/*.py"] if asked.all else CHOICE)
    files = {file for glob in globs for file in suite.glob(glob) if "test" in file.stem}
    if not files:
        parser.error(f"{suite} has no such files")

    arms = Arm(STOCK, asked), Arm(OURS, asked)
    found: tuple[Rows, Rows] = {}, {}
    differing: list[str] = []
    # A process for the files of a folder: importing torch for each would take half of the time.
    labelled = sorted((_label(file, suite), file) for file in files)
    for label, members in groupby(labelled, lambda each: each[0]):
        first, differ = compare(arms, label, [file for _, file in members])
        for all_rows, rows in zip(found, first, strict=True):
            all_rows.update(rows)
        differing += differ
    groups = arms[1].groups()
    print(f"{len(differing)} of {len(found[0])} tests differ; what they print is in {asked.logs}")
    print(f"deepytorch took over {groups.total()} groups, in {len(groups)} tests")
    if asked.json:
        outcome = {STOCK: found[0], OURS: found[1], "differing": differing, "groups": groups}
        asked.json.write_text(json.dumps(outcome, indent=1))
    return 1 if differing else 0


def compare(arms: tuple[Arm, Arm], label: str, files: list[Path]) -> tuple[list[Rows], list[str]]:
    """Run files in both arms and say how they went; returns rows, and the tests that differ."""
    first = [arm.run(label, files) for arm in arms]
    names = list(first[0] | first[1])
    if not names:
        print(f"{label}: nothing was run, see {label}.log")
        return first, [label]
    by_file = groupby(names, lambda test: test.partition("::")[0])
    for file, tests in by_file:
        of_file = list(tests)
        passed = [sum(_outcome(rows, test) == "passed" for test in of_file) for rows in first]
        took = [sum(rows[test]["seconds"] for test in of_file if test in rows) for rows in first]
        print(
            f"{file:64} {len(of_file):4} tests, {STOCK} passed {passed[0]} in {took[0]:.0f} s, "
            f"{OURS} {passed[1]} in {took[1]:.0f} s",
            flush=True,
        )
    unlike = [test for test in names if _outcome(first[0], test) != _outcome(first[1], test)]
    if not unlike:
        return first, []
    again = [arm.run(f"{label}.again", files, unlike) for arm in arms]
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


def _label(file: Path, suite: Path) -> str:
    own = file if file.name in ENVIRONMENT else file.parent
    return "_".join(("distributed", *own.relative_to(suite).parts))


def _outcome(rows: Rows, test: str) -> str:
    return str(rows[test]["outcome"]) if test in rows else "absent"


def _lines(file: Path) -> list[dict[str, Any]]:
    written, _, _ = file.read_text().rpartition("\n")  # the last may still be on its way
    return [json.loads(line) for line in written.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
