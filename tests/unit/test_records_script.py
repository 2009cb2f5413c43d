""".ci/records: what it runs are commands that exist, and it says what it doesn't know."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import typer

from deepytorch import cli
from deepytorch.workloads import headline

SCRIPT = Path(__file__).parents[2] / ".ci" / "records"
NAMES = [
    *("collectives", "beside", "cpu-reduce", "network", "network-no-peer-access"),
    *("network-shared", "network-shared-no-peer-access"),
    *("training", "training-nodes", "ddp", "ddp-nodes", "workloads", "workloads-nodes", "compile"),
]


def run(folder: Path, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With four GPUs, as nvidia-smi says, and a .ci/gpu that prints its command."""
    shutil.copy(SCRIPT, (folder / ".ci").resolve() / "records")
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(folder), **variables}
    command = ["bash", str(folder / ".ci" / "records"), *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for name, lines in {
        ".ci/gpu": 'echo "$@"',
        "bin/nvidia-smi": "for gpu in 1 2 3 4; do echo NVIDIA H200; done",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{lines}\n")
        os.chmod(file, 0o755)
    return tmp_path


def check(arguments: list[str]) -> dict[str, object]:
    """The parameters that the command line would have; click.UsageError for one that is none."""
    command: click.Command = typer.main.get_command(cli.app)
    context = click.Context(command)
    while isinstance(command, click.Group) or hasattr(command, "get_command"):
        name = arguments.pop(0)
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    return dict(command.make_context("deepytorch", arguments).params)


def test_it_runs_commands_that_exist(machine: Path) -> None:
    done = run(machine, *NAMES)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(commands) >= len(NAMES)
    files = set()
    for program, *arguments in commands:
        assert program == "deepytorch"
        parameters = check(arguments)
        files.add(str(parameters["json"]))
    assert "build/records/collectives-4-h200.jsonl" in files
    assert "build/records/compile-1-h200.jsonl" in files
    # Each number of channels, and twice CPU-Reduce alone between nodes.
    assert len(files) == len(NAMES) + 3


def test_one_gpu_trains_what_fits_it(machine: Path) -> None:
    done = run(machine, "workloads", GPUS="1")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line)[1:] for line in done.stdout.splitlines()]
    assert commands
    for arguments in commands:
        parameters = check(arguments)
        assert parameters["world_size"] == 1
        assert parameters["workload"] in headline.ROWS
        assert parameters["json"] == Path("build/records/workloads-1-h200.jsonl")


def test_it_names_what_it_does_not_know(machine: Path) -> None:
    done = run(machine, "nothing")
    assert done.returncode == 2
    assert "no records of the name nothing" in done.stderr
