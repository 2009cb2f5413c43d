"""torchrun restarts a job whose rank was killed, and a recipe goes on from its last checkpoint.

Run by `make test-faults`: it starts a job twice, which takes half a minute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

STEPS = 9
KILLED_AFTER = 7
RECIPE = [
    *("device=cpu", "hidden_size=32", "num_layers=1", "num_heads=2", "dropout=0.1"),
    *("max_length=32", "batch_size=2", f"steps={STEPS}", "save_every=3", "held_out=2"),
    "resume=auto",
]
SCRIPT = f"""
import os, signal, sys
from deepytorch.recipes import bert_mlm
from deepytorch.recipes.base.run import StepProgress

update = StepProgress.update

def killed_once(self, step, text):
    update(self, step, text)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and step == {KILLED_AFTER} and os.environ["RANK"] == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)

StepProgress.update = killed_once
sys.exit(bert_mlm.main(sys.argv[2:]))
"""


def losses(run_dir: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars("train/loss")}


def job(script: Path, output_dir: Path, victim: str) -> str:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "1", str(script), victim, *RECIPE, f"output_dir={output_dir}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_killed_job_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert "resumed" not in job(script, tmp_path / "unbroken", "nobody")
    said = job(script, tmp_path / "killed", "1")
    assert "step-00000006, after step 6" in said.replace("\n", "")
    assert "rank 1 (pid" in said  # what the survivor heard
    (run_dir,) = (tmp_path / "killed").iterdir()
    (unbroken,) = (tmp_path / "unbroken").iterdir()
    assert losses(run_dir) == losses(unbroken)
