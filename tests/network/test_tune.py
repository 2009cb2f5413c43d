"""`deepytorch tune --nodes`: a whole search over emulated nodes, and the run after it.

Times decide which setting wins, so no test asks for one. The tests check that the output, the
profile and the next run's settings follow from what was measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli import compare, runner
from deepytorch_core.base import config
from deepytorch_core.testing import RankError, run_program, spawn_ranks
from deepytorch_core.testing.emulation import Network, Placement, seats
from deepytorch_core.tune import confirm, in_force, stored

STEPS = 4
# A step with buckets of 4 MiB takes so much longer or shorter.
SCRIPT = """
import sys, time
import torch, torch.distributed as dist

dist.init_process_group()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 255))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(int(sys.argv[1])):
    model(torch.randn(8, 256)).square().mean().backward()
    time.sleep(SECONDS if model.bucket_bytes_cap == 4 << 20 else 0.02)
    optimizer.step()
    optimizer.zero_grad()
"""
# Buckets are searched alone: each trial is a job.
GIVEN = {
    "DEEPYTORCH_CHUNK_BYTES": "65536",
    "DEEPYTORCH_NUM_SOCKETS": "2",
    "DEEPYTORCH_SOCKET_BYTES": "1048576",
}
TUNE = f"tune --nodes 2 --link 1gbit --steps {STEPS} --profile own.json --json record.json"
PRELOAD = ("torch._dynamo", "typer.testing")

# Many jobs one after another.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


def run_script(
    rank: int, world_size: int, arguments: list[str], folder: str, tune: str = "off"
) -> dict[str, int]:
    """Run the program as torchrun starts it on a node, in `deepytorch run`; return its settings."""
    config.set_current(config.Options.from_mapping({"tune": tune}, base=config.current()))
    os.chdir(folder)
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # noqa: TID251  as torchrun does
    runner.main(arguments)
    return in_force.current()


def spawn(network: Network, profile: Path, *args: Any) -> list[dict[str, int]]:
    """Two new ranks, a node each, with torch in them, where torchrun would take seconds."""
    env = {**GIVEN, "DEEPYTORCH_ENABLED": "1", "DEEPYTORCH_PROFILE": str(profile)}
    placement = Placement(network, seats([1, 1]))
    return spawn_ranks(run_script, 2, *args, env=env, preload=PRELOAD, placement=placement)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def entry_of(folder: Path) -> dict[str, Any]:
    """The one thing that the profile holds."""
    (entry,) = json.loads((folder / "own.json").read_text())["decisions"]
    return dict(entry)


def check(record: Mapping[str, Any], budget: int) -> None:
    """That the outcome follows from the trials and the rounds."""
    assert record["tried"][0]["settings"] == {}
    assert record["tried"][1]["settings"] == {"ddp_bucket_mb": 4}
    assert sum(len(trial["steps_ms"]) for trial in record["tried"]) <= budget
    for trial in record["tried"]:
        assert trial["problem"] or len(trial["steps_ms"]) == STEPS
        assert trial["problem"] or trial["step_ms"] == statistics.median(trial["steps_ms"])
    assert {line.partition(":")[0] for line in record["left_out"]} == {"plan", "transport"}
    assert record["loss_checked"]
    if not record["best"]:
        assert (record["settings"], record["rounds"], record["times_ms"]) == ({}, {}, {})
        assert record["reason"] == "nothing was faster than the defaults"
        return
    assert record["best"] in [trial["settings"] for trial in record["tried"]]
    rounds = {
        name: [job["step_ms"] for job in jobs if not job["problem"]]
        for name, jobs in record["rounds"].items()
    }
    assert set(rounds) == {"defaults", "tuned"}
    assert len(rounds["defaults"]) == len(rounds["tuned"]) <= confirm.ROUNDS
    assert record["times_ms"] == {name: statistics.median(times) for name, times in rounds.items()}
    won = sum(a > b for a, b in zip(rounds["defaults"], rounds["tuned"], strict=True))
    gain = record["times_ms"]["defaults"] / record["times_ms"]["tuned"] - 1
    if record["settings"]:
        assert record["settings"] == record["best"]
        assert won >= confirm.LEAST_WINS
        assert gain >= confirm.LEAST_GAIN
        assert f"faster in {won} of {confirm.ROUNDS} rounds" in record["reason"]
    else:
        assert record["reason"].startswith("the defaults stay: ddp_bucket_mb=")
        assert won < confirm.LEAST_WINS or gain < confirm.LEAST_GAIN


def test_a_search_over_nodes_keeps_what_repeats_and_the_next_run_starts_from_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = []

    def launch(
        job: compare.Job,
        place: Path,
        variables: Mapping[str, str],
        log: Path,
        watch: compare.Watch | None,
    ) -> int:
        launches.append(variables)
        assert job.network is not None
        plan = place / "plan.json"
        arguments = ["--compare", str(plan), *compare._arguments(job)]
        try:
            view = json.loads(plan.read_text())["workspace"]
            spawn(job.network, folder / "own.json", arguments, view)
        except RankError as error:
            log.write_text(str(error))
            return 1
        return 0

    monkeypatch.setattr(compare, "_launch", launch)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("SECONDS", "0.002"))
    try:
        budget = str(3 * STEPS)
        arguments = [*TUNE.split(), "--budget-steps", budget, "train.py", "1000"]
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, str(done.exception)
        record = json.loads((folder / "record.json").read_text())
        check(record, int(budget))
        # The search, the defaults again, and the rounds were jobs of their own.
        jobs = len(record["tried"]) + 1 + sum(len(each) for each in record["rounds"].values())
        assert len(launches) == jobs
        assert {each["DEEPYTORCH_PROFILE"] for each in launches} == {str(folder / "own.json")}
        assert record["reason"] in " ".join(done.output.split())

        entry = entry_of(folder)
        assert entry["for"]["emulated"]["nodes"] == 2
        assert entry["for"]["emulated"]["link_mbit"] == 1000
        assert {**entry, "for": 0} == {**record, "for": 0}

        # No real job takes what was found on such a network, but one of such nodes would.
        profile = folder / "own.json"
        with Network(2) as network:
            run = ([str(script), "2"], str(folder), "auto")
            assert spawn(network, profile, *run) == [{}, {}]
            place = stored.key(str(script.resolve()), world_size=2, local_world_size=1)
            found = stored.find(entry["for"])
            assert found is not None
            assert stored.keep(place, found, {})
            assert spawn(network, profile, *run) == [record["settings"]] * 2
    finally:
        config.set_current(None)


# By torchrun on every node. A slower setting, so that most times there are no rounds.
def test_what_is_not_faster_is_not_kept(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("SECONDS", "0.2"))
    command = [sys.executable, "-m", "deepytorch.cli", *TUNE.split()]
    command += ["--budget-steps", str(2 * STEPS), "--", "train.py", "1000"]
    done = run_program(command, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((folder / "record.json").read_text())
    check(record, 2 * STEPS)
    assert {**entry_of(folder), "for": 0} == {**record, "for": 0}
    assert record["reason"] in " ".join(done.stdout.split())
    assert "trial 1" in done.stderr
