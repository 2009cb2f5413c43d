"""What continuous integration runs exists, and leaves nothing out in silence."""

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
