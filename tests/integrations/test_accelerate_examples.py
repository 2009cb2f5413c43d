"""The examples of the Accelerate and transformers guides."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.base import config
from deepytorch_core.testing import free_port, run_program, run_script

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LAUNCH = [
    *["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"],
    *["--mixed_precision", "no", "--dynamo_backend", "no"],
]
REPORTING = """
import runpy
import sys
{activation}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
if "deepytorch" in sys.modules:
    import deepytorch
    from deepytorch_core.base.config import rank
    if rank() == 0:
        print(deepytorch.report())
"""
# torch's gloo deadlocks in about 1 of 4 runs in which DDP's reducer has the last reference to its
# group. The reducer goes with Python's lock held, and waits for gloo's thread. That thread still
# drops the last gather, for which it waits for Python's lock.
SETTLING = """
import time
import torch.distributed
destroy = torch.distributed.destroy_process_group
def destroy_settled(*arguments):
    time.sleep(0.5)
    destroy(*arguments)
torch.distributed.destroy_process_group = destroy_settled
"""


def run(module: list[str], *arguments: str | Path, **variables: str) -> str:
    """Return what `python -m module` prints, both streams; fail with it when it fails."""
    variables = {"OMP_NUM_THREADS": "1", "DEEPYTORCH_TUNE": "off", **variables}
    done = run_program(
        [sys.executable, "-m", *module, *map(str, arguments)],
        env=config.child_environment(**variables),
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def started(deepspeeds_ranks: dict[str, Any]) -> Callable[..., str]:
    """Return what two ranks print, in turn."""
    given = {name: deepspeeds_ranks[name] for name in ("env", "preload")}

    def start(*script_and_arguments: str | Path, **variables: str) -> str:
        variables = {"DEEPYTORCH_TUNE": "off", **variables}
        return "".join(run_script(*script_and_arguments, variables=variables, **given))

    return start


def native_calls(output: str) -> int:
    found = re.search(r"deepytorch active: (\d+) native and 0 delegated", output)
    assert found is not None, output
    return int(found[1])


@pytest.fixture
def reporting(tmp_path: Path) -> Path:
    """Runs a script as it is, then prints the report."""
    path = tmp_path / "reporting.py"
    path.write_text(REPORTING.format(activation=""))
    return path


@pytest.fixture
def activated(tmp_path: Path) -> Path:
    """The same, of a script that the line `import deepytorch` has been put before."""
    path = tmp_path / "activated.py"
    path.write_text(REPORTING.format(activation="import deepytorch"))
    return path


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("accelerate_cv_example.py", ["--cpu"], marks=pytest.mark.extended),
        pytest.param("accelerate_ddp.py", ["--cpu"], marks=pytest.mark.extended),
        ("transformers_trainer.py", ["--use_cpu", "--disable_tqdm", "True", "--output_dir"]),
    ],
)
def test_the_guides_examples_run(
    name: str,
    arguments: list[str],
    activated: Path,
    started: Callable[..., str],
    tmp_path: Path,
) -> None:
    folder = [tmp_path] if "--output_dir" in arguments else []
    output = started(activated, EXAMPLES / name, *arguments, *folder)
    assert native_calls(output) > 20


@pytest.mark.parametrize(
    "name",
    [
        "accelerate_nlp_example.py",
        pytest.param("accelerate_cv_example.py", marks=pytest.mark.extended),
    ],
)
def test_the_published_examples_learn_the_same_with_their_one_line(
    name: str, reporting: Path, started: Callable[..., str], tmp_path: Path
) -> None:
    settling = tmp_path / "settling.py"
    settling.write_text(REPORTING.format(activation=SETTLING))
    ours = started(reporting, EXAMPLES / name, "--cpu")
    stock = started(settling, EXAMPLES / name, "--cpu", DEEPYTORCH_ENABLED="0")
    results = re.findall(r"^epoch .*$", ours, re.MULTILINE)
    assert len(results) == 3
    assert re.findall(r"^epoch .*$", stock, re.MULTILINE) == results
    assert native_calls(ours) > 20


def test_accelerate_launch_starts_it(reporting: Path) -> None:
    launch = [*LAUNCH, "--main_process_port", str(free_port())]
    output = run(launch, reporting, EXAMPLES / "accelerate_ddp.py", ACCELERATE_USE_CPU="true")
    assert native_calls(output) > 20
