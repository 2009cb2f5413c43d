"""PyTorch's own tests of torch.distributed, test by test: without deepytorch and with it.

    python tests/suites/torch_distributed.py CHECKOUT [--files GLOB ... | --all] [--json FILE]

CHECKOUT is a clone of PyTorch at the tag of the installed torch. Both arms run the same tests, the
second with `import deepytorch` before torch in every process. Tests that differ run once more in
both, and count if they differ again. Ends with status 1 if any do. Needs the package expecttest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import arms
from arms import STOCK, Arm, Batch, Setting

OURS = "deepytorch"
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
# PyTorch's run_test.py sets these for a file; such a file has a process of its own.
ENVIRONMENT = {"test_distributed_spawn.py": {"BACKEND": "gloo", "WORLD_SIZE": "3"}}
OPTIONS = ("-c", os.devnull, "--noconftest")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="+", metavar="GLOB", help="in test/distributed")
    parser.add_argument("--all", action="store_true", help="all files of test/distributed")
    arms.add_options(parser, limit_s=60)
    asked = parser.parse_args()
    root = asked.checkout.resolve() / "test"
    logs = (asked.logs or Path(tempfile.mkdtemp(prefix="torch_distributed_"))).resolve()
    suite = root / "distributed"
    globs = asked.files or (["**/*.py"] if asked.all else CHOICE)
    files = {file for glob in globs for file in suite.glob(glob) if "test" in file.stem}
    if not files:
        parser.error(f"{suite} has no such files")

    # PyTorch ends a test's children when its time is up, and says where they were.
    until_killed_s = asked.limit + asked.grace
    limit = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(asked.limit)}
    setting = Setting(root, logs, asked.start, until_killed_s, OPTIONS, limit)
    both = Arm(STOCK, setting), Arm(OURS, setting)
    found, differing = arms.run(both, _batches(files, suite))
    groups = both[1].groups()
    print(f"{len(differing)} of {len(found[0])} tests differ; what they print is in {logs}")
    print(f"deepytorch took over {groups.total()} groups, in {len(groups)} tests")
    if asked.json:
        outcome = {STOCK: found[0], OURS: found[1], "differing": differing, "groups": groups}
        asked.json.write_text(json.dumps(outcome, indent=1))
    return 1 if differing else 0


def _batches(files: set[Path], suite: Path) -> list[Batch]:
    """A process for the files of a folder: importing torch for each would take half of the time."""
    labelled = sorted((_label(file, suite), file) for file in files)
    return [
        # PyTorch runs each file as a script, whose folder is looked into for what it imports.
        Batch(label, members, ENVIRONMENT.get(members[0].name, {}), [members[0].parent])
        for label, several in groupby(labelled, lambda each: each[0])
        for members in ([file for _, file in several],)
    ]


def _label(file: Path, suite: Path) -> str:
    own = file if file.name in ENVIRONMENT else file.parent
    return "_".join(("distributed", *own.relative_to(suite).parts))


if __name__ == "__main__":
    sys.exit(main())
