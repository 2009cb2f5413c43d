"""`deepytorch test`: a self-check of two minutes, which trains on this machine."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from deepytorch.cli import console, help

_PATIENCE_S = 120


@dataclass(frozen=True)
class _Check:
    """A command whose exit status says whether it is well, and words for either case."""

    what: str
    words: Sequence[str]
    remedy: str


def add_to(app: typer.Typer) -> None:
    app.command(name="test", epilog=help.examples("deepytorch test"))(check)


def check() -> None:
    """Check, in about two minutes, that this machine trains with deepytorch as it does without."""
    out = console.out()
    from deepytorch.cli import launcher

    with tempfile.TemporaryDirectory() as folder:
        checks = _checks(launcher.num_gpus(), folder)
        failed = [command for command in checks if not _passes(command)]
    if failed:
        raise typer.Exit(1)
    out.print("all is well: this machine trains to the same losses with deepytorch as without")


def _checks(num_gpus: int, folder: str) -> list[_Check]:
    # A single GPU has nothing to reduce with, so its job is one process.
    processes = str(min(num_gpus or 2, 2))
    where = ["--world-size", "2"]
    if num_gpus > 1:
        where += ["--device", "cuda"]
    train = ["train", "llama_sft", "--nproc-per-node", processes, f"output_dir={folder}"]
    train += ["sample_tokens=4"]
    return [
        _Check("what deepytorch needs is here", ["doctor"], "deepytorch doctor says what to mend"),
        _Check(
            "collectives give the right sums",
            ["bench", "collectives", *where, "--sizes", "1K:1M"],
            "please report what is above",
        ),
        _Check(
            "a training has stock's losses",
            [*train, "--compare", "steps=8", "precision=fp32"],
            "please report what is above",
        ),
        _Check(
            "a training saves a checkpoint",
            [*train, "steps=2", "save_every=2"],
            "please report what is above",
        ),
        _Check(
            "and goes on from it",
            [*train, "steps=3", "resume=auto"],
            "please report what is above",
        ),
    ]


def _passes(command: _Check) -> bool:
    """Run it, and print a line; what it printed only where it fails."""
    out, begun = console.out(), time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deepytorch.cli", *command.words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
        status, printed = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        status, printed = 1, f"it took longer than {error.timeout:.0f} s"
    seconds = time.monotonic() - begun
    out.print(f"{'ok  ' if status == 0 else 'FAIL'}  {command.what}  {seconds:.0f} s", markup=False)
    if status:
        out.print(printed, markup=False, soft_wrap=True)
        out.print(f"      {command.remedy}: deepytorch {' '.join(command.words)}", markup=False)
    return status == 0
