"""Run `deepytorch bench scripts` on a checkout of ours, and look at its records."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli import compare, runner
from deepytorch.workloads import scripts
from deepytorch.workloads.scripts.script import OUT, Script, Size
from deepytorch_core.bench.record import SCRIPT_FIELDS
from deepytorch_core.testing import spawn_ranks

# It never ends; it says where it runs and under what, and keeps something that goes with the run.
TRAIN = """
import os, sys
from pathlib import Path
import torch

options = dict(option.lstrip("-").split("=") for option in sys.argv[1:])
assert Path("beside.txt").read_text() == "beside"
Path(options["out"]).mkdir()  # fails where an earlier run has left one
rate = 0.1
if options.get("otherwise") and os.environ["DEEPYTORCH_ENABLED"] == "1":
    rate = 3.0
weights = Path(options["data"], "inputs.txt").read_text()
with Path(os.environ["ROW"], "..", "..", "seen.txt").open("a") as file:
    names = ("DEEPYTORCH_ENABLED", "DEEPYTORCH_PROFILE", "TORCHINDUCTOR_CACHE_DIR", "ROW")
    print(*(os.environ[name] for name in names), file=file)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
inputs = torch.tensor(eval(weights))
while True:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def prepare(folder: Path, size: Size) -> None:
    (folder / "inputs.txt").write_text(
        str([[float(a + b) / 8 for a in range(8)] for b in range(4)])
    )


def row(name: str, *more: str) -> Script:
    return Script(
        name=name,
        repository="someone/thing",
        commit="0" * 40,
        path="part/train.py",
        arguments=("--no-such-size",),
        small=("--data={data}", "--out={out}", *more),
        prepare=prepare,
        variables={"ROW": "{checkout}"},
    )


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "checkouts" / "thing" / "part"
    place.mkdir(parents=True)
    (place / "train.py").write_text(TRAIN)
    (place / "beside.txt").write_text("beside")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DEEPYTORCH_COMPILE", "off")
    rows = {script.name: script for script in (row("one"), row("other", "--otherwise=yes"))}
    monkeypatch.setattr(scripts, "SCRIPTS", rows)
    return tmp_path / "checkouts"


def start(
    rank: int, world_size: int, arguments: list[str], folder: str, variables: dict[str, str]
) -> None:
    """Run what torchrun would start."""
    os.environ.update(variables)  # noqa: TID251
    os.chdir(folder)
    runner.main(arguments)


@pytest.fixture
def by_forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked with torch in them, where torchrun would take seconds for each run."""

    def launch(
        job: compare.Job,
        folder: Path,
        variables: Mapping[str, str],
        log: Path,
        watch: compare.Watch | None,
    ) -> int:
        plan = folder / "plan.json"
        view = json.loads(plan.read_text())["workspace"]
        arguments = ["--compare", str(plan), *compare._arguments(job)]
        environment = compare._environment(job, variables, view)
        spawn_ranks(start, 1, arguments, view, environment, fresh=True)
        return 0

    monkeypatch.setattr(compare, "_launch", launch)


def bench(checkouts: Path, *options: str) -> tuple[Any, list[dict[str, Any]]]:
    """Run the command; return its result and its records."""
    file = checkouts.parent / "records.jsonl"
    command = ["bench", "scripts", "--checkouts", str(checkouts), "--json", str(file)]
    done = CliRunner().invoke(cli.app, [*command, "--size", "small", *options])
    lines = file.read_text().splitlines() if file.exists() else []
    return done, [json.loads(line) for line in lines]


@pytest.mark.usefixtures("by_forking")
def test_a_script_is_run_in_turns_and_recorded(checkouts: Path) -> None:
    git = ["git", "-C", str(checkouts / "thing"), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    done, records = bench(checkouts, "--seconds", "0.2", "--only", "one")
    assert done.exit_code == 0, done.output
    (record,) = records
    assert set(record) == {*SCRIPT_FIELDS, "command"}
    assert record["script"] == "one"
    assert len(record["script_commit"]) == 40
    assert record["arguments"] == ["--data={data}", "--out={out}"]
    assert record["size"] == "small"
    assert record["device"] == "cpu"
    assert record["loss_check"] == "agree"
    assert record["loss_difference"] == 0.0
    assert record["stock_losses"] == record["ours_losses"] == record["second_losses"]
    assert record["compared_steps"] >= 9
    assert record["num_steps"] >= 2
    assert record["speedup"] > 0
    assert record["stock_busy"] is None
    assert record["stock_longest_s"] >= record["stock_ms"][1] / 1e3
    assert str(checkouts.parent) not in json.dumps(record)
    assert "one " in done.output
    # Stock, then ours twice: from the same profile and caches, which are not stock's.
    seen = (checkouts.parent / "seen.txt").read_text().splitlines()
    enabled, profiles, caches, checkout = zip(*(line.split() for line in seen), strict=True)
    assert enabled == ("0", "1", "1")
    assert profiles[1] == profiles[2] != profiles[0]
    assert caches[1] == caches[2] != caches[0]
    assert set(checkout) == {str(checkouts / "thing")}
    assert not (checkouts / "thing" / "part" / OUT).exists()
    assert not list((checkouts.parent / "scratch").iterdir())


@pytest.mark.extended
def test_a_script_that_trains_otherwise_is_told(checkouts: Path) -> None:
    done, (record,) = bench(checkouts, "--seconds", "0.1", "--only", "other")
    assert done.exit_code == 1
    assert record["wrong"] == 1
    assert "THE LOSSES DIFFER" in done.output
    assert "not claimed" in done.output
