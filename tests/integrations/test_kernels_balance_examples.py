"""The examples of docs/token-balance.md and docs/kernels.md run and say what they should."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.base import config
from deepytorch_core.testing import run_program, run_script

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(name: str, *arguments: str, ranks: int, cache: Path) -> str:
    launcher = ["-m", "deepytorch.cli", "run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = run_program(
        [sys.executable, *launcher, EXAMPLES / name, *arguments],
        env=config.child_environment(
            OMP_NUM_THREADS="1", DEEPYTORCH_PROFILE=str(cache / "profile.json")
        ),
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\d\S*)", printed)]


@pytest.mark.extended
def test_token_balance_example_learns_from_even_steps(tmp_path: Path) -> None:
    printed = run("token_balance.py", ranks=2, cache=tmp_path)
    before, after = (float(x) for x in re.findall(r"(\d\.\d+) times", printed))
    assert before > after >= 1.0
    assert losses(printed)[-1] < losses(printed)[0]


def test_kernels_example_says_what_is_in_place(
    tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    words = [EXAMPLES / "fused_kernels.py", "--cpu", "--kernels", "on"]
    how = {name: deepspeeds_ranks[name] for name in ("env", "preload")}
    profile = {"DEEPYTORCH_PROFILE": str(tmp_path / "profile.json")}
    printed, _ = run_script(*words, world_size=1, variables=profile, **how)
    assert losses(printed)[-1] < losses(printed)[0]
    for decision in ("loss of LlamaForCausalLM(64, 2000): chunked", "AdamW: fused"):
        assert decision in printed
