# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run that was killed or told to end goes on as if it had never stopped."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepytorch.recipes import _checkpoint
from deepytorch.recipes._config import RecipeError

TINY = [
    *("device=cpu", "backend=stock", "hidden_size=32", "num_layers=1", "num_heads=2"),
    *("max_length=32", "batch_size=2", "steps=14", "save_every=3", "dropout=0.1", "held_out=2"),
]
COMMAND = [sys.executable, "-m", "deepytorch.recipes.bert_mlm", *TINY]


def only_run_dir(output_dir):
    (run_dir,) = output_dir.iterdir()
    return run_dir


def losses(run_dir):
    """{step: loss}; what a resumed run repeats replaces what was there."""
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars("train/loss")}


def killed_after(step, output_dir, number):
    """Start a run and send the signal once it has shown that ``step`` is done."""
    process = subprocess.Popen(
        [*COMMAND, f"output_dir={output_dir}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    , text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {step}/"):
            process.send_signal(number)
            break
    lines += process.stdout.readlines()
    return process.wait(), "".join(lines)
