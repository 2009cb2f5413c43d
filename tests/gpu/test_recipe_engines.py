"""A recipe's command under each engine on GPUs: the losses of stock DDP.

On CPUs, and across checkpoints: tests/multiproc/test_recipe_engines.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepytorch_core.base import config
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(2), pytest.mark.timeout(300)]

STEPS = 10  # a run whose output is no terminal prints the loss of so many
_LINE = re.compile(r"^step \d+/\d+ +loss +([\d.]+)", re.MULTILINE)
# Printed with four digits; sums are in another order, and Adam carries that on.
TOLERANCE = 2e-3
ENGINES = {
    "ddp": ["engine=ddp"],
    "fsdp2": ["engine=fsdp2"],
    "zero1": ["engine=deepspeed", "zero_stage=1"],
    "zero2": ["engine=deepspeed", "zero_stage=2"],
    "zero3": ["engine=deepspeed", "zero_stage=3"],
    "accelerate": ["engine=accelerate"],
    "megatron": ["engine=megatron"],
}


def _losses(folder: Path, *settings: str) -> list[float]:
    """Return each step's loss of a small Llama, trained from its command by two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--module", "deepytorch.recipes.llama_sft"]
    command += [f"steps={STEPS}", f"output_dir={folder}", "sample_tokens=1", *settings]
    profile = str(folder / "profile.json")
    env = config.child_environment(OMP_NUM_THREADS="1", DEEPYTORCH_PROFILE=profile)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(each) for each in _LINE.findall(done.stdout)]
    assert len(losses) == STEPS, done.stdout
    return losses


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return _losses(tmp_path_factory.mktemp("stock"), "engine=ddp", "backend=stock")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_as_stock_ddp_does(
    engine: str, stock: list[float], tmp_path: Path
) -> None:
    losses = _losses(tmp_path, *ENGINES[engine])
    assert losses == pytest.approx(stock, abs=TOLERANCE)
    assert losses[-1] < losses[0] - 0.5
