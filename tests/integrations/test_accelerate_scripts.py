"""Accelerate's own test scripts, which ship in its wheel, with compute on at every seam.

`tests/suites/peers.py` runs them as they are, and all that Accelerate tests besides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate.test_utils
import pytest

from deepytorch_core.testing import run_script

SCRIPTS = Path(accelerate.test_utils.__file__).parent / "scripts"
REPORTING = """
import json
import runpy
import sys

import deepytorch
from deepytorch_core.base import config

sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    report = deepytorch.report()
    told = {"groups": report.groups, "decisions": report.decisions}
    print(f"\\nrank {config.rank()} did: {json.dumps(told, default=str)}", flush=True)
"""


def did(script: str, world_size: int, folder: Path, ranks: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each rank's report has; raise what the script raises."""
    reporting = folder / "reporting.py"
    reporting.write_text(REPORTING)
    variables = {
        "ACCELERATE_USE_CPU": "true",
        "DEEPYTORCH_PATIENCE": "off",
        "DEEPYTORCH_PROFILE": str(folder / "profile.json"),
    }
    printed, _ = run_script(
        reporting,
        SCRIPTS / script,
        world_size=world_size,
        variables=variables,
        env=ranks["env"],
        preload=ranks["preload"],
        timeout_s=110,
    )
    told = [line for line in printed.splitlines() if " did: " in line]
    return [json.loads(line.partition(" did: ")[2]) for line in told]


@pytest.mark.parametrize(
    ("script", "world_size", "decided"),
    [
        ("test_ops.py", 2, set()),  # trains nothing
        ("test_script.py", 2, {"SGD", "compile of RegressionModel"}),
        ("test_sync.py", 2, {"AdamW", "compile of RegressionModel"}),
        pytest.param("test_merge_weights.py", 1, set(), marks=pytest.mark.extended),
        pytest.param("test_ops.py", 1, set(), marks=pytest.mark.extended),
        pytest.param(
            "test_script.py", 1, {"SGD", "compile of RegressionModel"}, marks=pytest.mark.extended
        ),
    ],
)
def test_accelerates_own_scripts_succeed(
    script: str,
    world_size: int,
    decided: set[str],
    tmp_path: Path,
    deepspeeds_ranks: dict[str, Any],
) -> None:
    ranks = did(script, world_size, tmp_path, deepspeeds_ranks)
    assert len(ranks) == world_size
    for rank in ranks:
        assert decided <= {decision["what"] for decision in rank["decisions"] if "what" in decision}
        assert rank["groups"] == {"0": world_size}
