"""The examples of docs/ddp.md and docs/fsdp.md run; the tutorials train as with plain PyTorch."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.base import config
from deepytorch_core.testing import run_program, run_script

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MARK = "# deepytorch"


def torchrun(script: Path, *arguments: str) -> tuple[str, str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_program(
        [sys.executable, *launcher, script, *arguments],
        env=config.child_environment(OMP_NUM_THREADS="1"),
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


Started = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def started(deepspeeds_ranks: dict[str, Any]) -> Started:
    """Run a script on two ranks, which have imported FSDP, torch's compiler and transformers."""
    given = {name: deepspeeds_ranks[name] for name in ("env", "preload")}
    return functools.partial(run_script, **given)


def losses(printed: str) -> list[str]:
    """Return what each rank said of its losses; the ranks' lines come mixed."""
    return sorted(re.findall(r"rank \d.*?loss \d+\.\d{6}", printed))


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.extended), "fsdp"])
def test_example(name: str, started: Started) -> None:
    printed, _ = (torchrun if name == "ddp" else started)(EXAMPLES / f"{name}.py")
    values = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert values[2] < values[0]
    assert "(100% native)" in printed
    what = {"ddp": "DDP buckets", "fsdp": "FSDP2 buffers"}[name]
    assert f"decision: {what}: " in printed


@pytest.mark.parametrize(
    "name", ["ddp_bert", pytest.param("ddp_resnet50", marks=pytest.mark.extended)]
)
def test_the_scripts_of_the_page_on_tuning_train(name: str, started: Started) -> None:
    printed, _ = started(EXAMPLES / f"{name}.py", "--steps", "10")
    assert re.findall(r"step (\d+): loss \d", printed) == ["10"]


@pytest.mark.parametrize(
    ("name", "arguments", "num_marked"),
    [
        ("ddp_tutorial", [], 1),
        pytest.param(
            "fsdp2_tutorial",
            ["--mixed-precision", "--explicit-prefetching"],
            2,
            marks=pytest.mark.extended,
        ),
    ],
)
def test_tutorial_prints_what_it_prints_without_deepytorch(
    name: str, arguments: list[str], num_marked: int, started: Started, tmp_path: Path
) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines(keepends=True)
    plain = tmp_path / f"{name}.py"
    plain.write_text("".join(line for line in lines if not line.rstrip().endswith(MARK)))
    assert plain.read_text().count("deepytorch.") == 0
    assert len(lines) - len(plain.read_text().splitlines()) == num_marked

    printed, said = started(EXAMPLES / f"{name}.py", *arguments)
    expected, said_by_stock = started(plain, *arguments)
    assert len(losses(printed)) >= 12
    assert losses(printed) == losses(expected)
    assert "go through deepytorch for cpu tensors" in said
    assert "deepytorch:" not in said_by_stock
