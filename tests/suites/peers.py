"""Tests of projects that deepytorch works under, test by test: without it, and with the line on.

    python tests/suites/peers.py CHECKOUT SUITE [--compile inductor] [--patience off] [--json FILE]

CHECKOUT is a clone of the project at the version that is installed (see `SUITES`). If a suite ships
in an installed package, CHECKOUT is the folder of installed packages. Both arms run the same tests.
The second has `import deepytorch` in every process and compute switched on at every seam. Tests
that differ run once more in both, and count if they differ again. Ends with status 1 if any do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import arms
from arms import STOCK, Arm, Batch, Setting

LINE = "line"
OFFLINE = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_FROM_THE_HUB = ("big_modeling", "cli", "examples", "modeling_utils", "quantization", "sagemaker")
_SCRIPTS = "accelerate/test_utils/scripts"
# Without a GPU, or without a program to test.
_FAILING = ("cli", "ddp_comm_hook", "distributed_data_loop", "notebook")
_CHECKPOINTS = ("latest_checkpoint", "lr_scheduler", "shared_weights", "tag_validation")
_ZERO = (
    "ignore_unused_parameters",
    "zero_config",
    "zero_context*",
    "zero_dynamic_class",
    "zero_grad_clip",
    "zero_leaf_module",
    "zero_nesting_init",
)
# Newer versions have most of its zero tests in another folder.
_ZERO_V1 = (
    "overlap_comm_record_stream",
    "zero_activation_checkpoint_lifecycle",
    "zero_functorch_linear",
    "zero_hook_count_regression",
    "zero_init_pg_contradiction",
    "zero_torch_func",
)


@dataclass(frozen=True)
class Suite:
    """Selects tests of a project, and says how they run.

    Attributes:
        files: globs below the checkout; what follows "!" is left out.
        root: folder of the checkout that pytest takes for the root.
        path: folders of the checkout to import from.
        options: of pytest.
        environment: variables of every process.
    """

    files: Sequence[str]
    root: str = "."
    path: Sequence[str] = ()
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


# No GPU, no network: what takes them fails or is skipped in both arms. Ten minutes an arm at most.
SUITES = {
    # Needs the packages parameterized and torchdata.
    "accelerate": Suite(
        files=["tests/test_*.py", *(f"!tests/test_{name}.py" for name in _FROM_THE_HUB)],
        environment=OFFLINE,
    ),
    # CHECKOUT is the folder that has the package accelerate.
    "accelerate-scripts": Suite(
        files=[f"{_SCRIPTS}/test_*.py", *(f"!{_SCRIPTS}/test_{name}.py" for name in _FAILING)],
        options=["-c", os.devnull, "-p", "no:python", "-p", "scripts_plugin"],
        environment=OFFLINE,
    ),
    # Needs the package parameterized.
    "transformers": Suite(
        files=["tests/trainer/test_*.py"],
        environment=OFFLINE,
    ),
    # Needs what requirements/fabric/test.txt and requirements/pytorch/test.txt name.
    "lightning-fabric": Suite(
        files=[
            "tests/tests_fabric/test_*.py",
            "tests/tests_fabric/plugins/**/test_*.py",
            "tests/tests_fabric/strategies/test_*.py",
        ],
        root="tests",
        path=["src"],
    ),
    "lightning": Suite(
        files=[
            "tests/tests_pytorch/callbacks/test_*.py",
            "tests/tests_pytorch/core/**/test_*.py",
            "tests/tests_pytorch/loops/**/test_*.py",
            "tests/tests_pytorch/models/test_hooks.py",
            "tests/tests_pytorch/strategies/test_ddp*.py",
        ],
        root="tests",
        path=["src"],
    ),
    # Needs ninja and a compiler, for DeepSpeed's own Adam.
    "deepspeed": Suite(
        files=[
            "tests/unit/comm/test_*.py",
            "tests/unit/pipe/test_*.py",
            "tests/unit/runtime/pipe/test_*.py",
            *(f"tests/unit/checkpoint/test_{name}.py" for name in _CHECKPOINTS),
            *(f"tests/unit/runtime/zero/test_{name}.py" for name in _ZERO),
            *(f"tests/unit/v1/zero/test_{name}.py" for name in _ZERO_V1),
        ],
        root="tests",
        environment={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4"},
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--files", nargs="+", metavar="GLOB", help="in place of the suite's own")
    parser.add_argument("--compile", default="auto", help="option compile of the line's arm")
    parser.add_argument("--patience", default="auto", help="its option patience")
    arms.add_options(parser, limit_s=200)
    asked = parser.parse_args()
    suite, checkout = SUITES[asked.suite], asked.checkout.resolve()
    files = _files(checkout, asked.files or suite.files)
    if not files:
        parser.error(f"{checkout} has no such files")
    logs = (asked.logs or Path(tempfile.mkdtemp(prefix=f"{asked.suite}_"))).resolve()
    setting = Setting(
        root=checkout / suite.root,
        logs=logs,
        start=asked.start,
        until_killed_s=asked.limit + asked.grace,
        options=suite.options,
        environment={
            **suite.environment,
            "DEEPYTORCH_COMPILE": asked.compile,
            "DEEPYTORCH_PATIENCE": asked.patience,
        },
    )
    both = Arm(STOCK, setting), Arm(LINE, setting)
    path = [checkout / part for part in suite.path]
    found, differing = arms.run(both, _batches(files, setting.root, path))
    _tell(both, differing, len(found[0] | found[1]), logs)
    if asked.json:
        outcome = {
            STOCK: found[0],
            LINE: found[1],
            "differing": differing,
            "seconds": {arm.name: arm.took_s for arm in both},
            "groups": both[1].groups(),
            "decisions": both[1].decisions(),
        }
        asked.json.write_text(json.dumps(outcome, indent=1))
    return 1 if differing else 0


def _files(checkout: Path, globs: Sequence[str]) -> list[Path]:
    """Sorted by folder, so that those of one come together."""
    found: set[Path] = set()
    for glob in globs:
        if glob.startswith("!"):
            found -= set(checkout.glob(glob[1:]))
        else:
            found |= set(checkout.glob(glob))
    return sorted(found, key=lambda file: (file.parent, file))


def _batches(files: Sequence[Path], root: Path, path: Sequence[Path]) -> list[Batch]:
    """A process for the files of a folder."""
    return [
        Batch("_".join(folder.relative_to(root).parts), list(several), path=path)
        for folder, several in groupby(files, lambda file: file.parent)
    ]


def _tell(both: tuple[Arm, Arm], differing: list[str], number: int, logs: Path) -> None:
    stock, line = both
    print(f"{len(differing)} of {number} tests differ; what they print is in {logs}")
    for test in differing:
        print(f"    {test}")
    ratio = line.took_s / max(stock.took_s, 1e-9)
    print(f"{STOCK} took {stock.took_s:.0f} s, {LINE} {line.took_s:.0f} s ({ratio:.2f} times)")
    groups = line.groups()
    print(f"deepytorch took over {groups.total()} groups, in {len(groups)} tests, and decided:")
    for what, chosen in sorted(_by_kind(line).items()):
        print(
            f"    {what}: " + ", ".join(f"{name} {times}" for name, times in chosen.most_common())
        )


def _by_kind(line: Arm) -> dict[str, Counter[str]]:
    """Decisions, those about different models or buckets taken together."""
    kinds: dict[str, Counter[str]] = {}
    for what, chosen in line.decisions().items():
        kinds.setdefault(what.partition(" of ")[0], Counter()).update(chosen)
    return kinds


if __name__ == "__main__":
    sys.exit(main())
