"""Tests that all that continuous integration runs exists and leaves nothing out in silence."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_every_target_of_the_makefile_has_a_rule() -> None:
    text = (ROOT / "Makefile").read_text()
    (names,) = re.findall(r"^\.PHONY:((?:.*\\\n)*.*)", text, re.MULTILINE)
    named = set(names.replace("\\", " ").split())
    assert {"test", "test-network"} <= named
    # A rule alone is not enough: without a recipe `make` says that there is nothing to be done.
    rules = {
        name: after
        for name, after in re.findall(r"^([a-z][a-z-]*):(?!=)((?:.*\\\n)*.*\n\t?)", text, re.M)
    }
    assert named == rules.keys()
    for name, after in rules.items():
        needs = after.split("##")[0].split()
        assert after.endswith("\t") or needs, f"make {name} does nothing"


def test_the_workflow_runs_what_is_in_the_folder() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    scripts = [command.removeprefix("bash ") for command in commands if command]
    assert scripts == [".ci/run", ".ci/network", ".ci/extended"]
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_image_is_made_of_the_wheel_and_tried() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["image"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make wheel PYTHONS=python3.12 ADAPTERS=2.13.0", "bash .ci/image"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    (torch,) = re.findall(r"torch==(\S+)", dockerfile)
    assert f"ADAPTERS={torch}" in commands[0]
    assert set(re.findall(r"python:3\.(\d+)", dockerfile)) == {"12"}
    assert re.findall(r"^COPY (dist/\S+)", dockerfile, re.M) == ["dist/*-cp312-*.whl"]


@pytest.mark.parametrize(("user", "status"), [("10001", 0), ("0", 1)])
def test_an_image_that_runs_as_root_is_refused(tmp_path: Path, user: str, status: int) -> None:
    """With a docker that says what it is asked for."""
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\n[ "$4" = id ] && echo {user} || echo "docker $@"\n')
    docker.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "image")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert "docker build --build-arg WHEEL=dist" in done.stdout
    assert ("train llama_sft" in done.stdout) == (status == 0)
    assert ("runs as root" in done.stderr) == (status == 1)


@pytest.mark.parametrize("allowed", [True, False])
def test_tests_on_emulated_nodes_run_as_root_or_fail(tmp_path: Path, *, allowed: bool) -> None:
    """With a sudo and a make that say what they are asked for."""
    sudo = 'shift; "$@"' if allowed else "echo a password is required >&2; exit 1"
    for name, line in {
        "id": "echo 1000",
        "sudo": sudo,
        "modprobe": "exit 0",
        "make": 'echo "make $@ in $HOME"',
    }.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{line}\n")
        os.chmod(file, 0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "network")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if allowed:
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"make test-network in {tmp_path}\n"
    else:
        assert done.returncode != 0
        assert "a password is required" in done.stderr
        assert not done.stdout


def build_operator(folder: Path, python: str) -> tuple[str, Path]:
    """Build DeepSpeed's operator with `python` as Python; return make's words and its mark."""
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "python").write_text(f"#!/bin/sh\n{python}\n")
    (bin_ / "python").chmod(0o755)
    made = folder / "extensions" / ".made"
    variables = [f"VENV={folder}", f"BIN={bin_}", f"TORCH_EXTENSIONS_DIR={made.parent}"]
    command = ["make", "--no-print-directory", "-o", f"{folder}/.dependencies", *variables, made]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, made


@pytest.mark.parametrize(
    "error",
    [
        "ModuleNotFoundError: No module named 'hjson'",
        "RuntimeError: Ninja is required to load C++ extensions",
        "subprocess.CalledProcessError: Command 'c++' returned non-zero exit status 1.",
    ],
)
def test_what_deepspeeds_operator_lacks_is_said_and_ends_nothing(
    error: str, tmp_path: Path
) -> None:
    said, made = build_operator(tmp_path, f'echo Traceback; echo "{error}" >&2; exit 1')
    log = made.parent / "log"
    assert said.splitlines()[1:] == [
        f"DeepSpeed's operator is left out: {error} (all of it: {log})"
    ]
    assert not made.exists()


def test_deepspeeds_operator_finds_the_ninja_beside_python(tmp_path: Path) -> None:
    said, made = build_operator(tmp_path, 'echo "$PATH"')
    assert made.exists()
    assert said.splitlines() == ["Building DeepSpeed's operator for CPUs ..."]
    assert (made.parent / "log").read_text().startswith(f"{tmp_path}/bin:")
