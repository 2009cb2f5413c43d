"""`deepytorch run --report` leaves a report of the script, which is not edited for it."""

import json
import os
import subprocess
import sys

import pytest

from deepytorch_core.base import config
from deepytorch_core.report.summary import Report
from deepytorch_core.testing.forked import ForkedProgram

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

is_rank = "RANK" in os.environ
if is_rank:
    dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
if is_rank:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.randn(48, 64), batch_size=4, num_workers=1):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if is_rank:
    dist.destroy_process_group()
os.chdir("/")
raise SystemExit(int(sys.argv[1]))
"""


@pytest.fixture
def run(tmp_path):
    """Runs the script with a report in a folder; returns the exit status and what it printed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def start(*options, status=0, **variables):
        command = [sys.executable, "-m", "deepytorch.cli", "run", *options, "train.py", str(status)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=config.child_environment(**variables),
            timeout=200,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    return start


def test_ranks_make_one_report(run, tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    left = folder / "rank-7.json"  # by an earlier run on more ranks
    left.write_text(json.dumps({"rank": 7}))
    os.utime(left, (1e9, 1e9))
    status, said = run("--nproc-per-node", "2", "--report", "report")
    assert status == 0, said
    assert said.count("the report of this run: ") == 1
    whole = json.loads((folder / "report.json").read_text())
    assert list(whole["ranks"]) == ["0", "1"]
    assert "known" in whole["will_it_scale"]
    origin = whole["provenance"]
    assert origin["script"] == str(tmp_path / "train.py")
    assert origin["command"].endswith("train.py 0")
    assert "runner.py" not in origin["command"]
    assert origin["ranks"] == 2
    assert origin["versions"]["torch"]
    assert origin["machine"]["cores"] >= 1
    assert origin["commit"]
    for rank in range(2):
        saved = Report.from_dict(json.loads((folder / f"rank-{rank}.json").read_text()))
        assert saved.rank == rank
        assert saved.native_calls + saved.delegated_calls > 0
        assert saved.course["steps"] == 12
    page = (folder / "report.html").read_text()
    assert "rank 1" in page
    assert "Where this comes from" in page
    assert str(tmp_path / "train.py") in page
    assert {path.name for path in folder.iterdir()} == {
        *(".lock", "rank-0.json", "rank-1.json", "rank-7.json", "report.html", "report.json")
    }


def test_one_process_leaves_one_also_where_the_script_fails(run, tmp_path):
    """Its DataLoader's worker leaves none; the script's commit is its repository's."""

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "Train")
    status, said = run(status=3, DEEPYTORCH_REPORT="report")
    assert status == 3, said
    whole = json.loads((tmp_path / "report" / "report.json").read_text())
    assert list(whole["ranks"]) == ["0"]
    assert whole["ranks"]["0"]["course"]["steps"] == 12
    assert whole["provenance"]["script_commit"] == git("rev-parse", "HEAD")
    assert said.count("the report of this run: ") == 1


def test_a_place_that_cannot_be_written_is_an_error_before_the_script_starts(tmp_path):
    """By forks that have imported torch, as the script's process never starts."""
    (tmp_path / "file").write_text("")
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')")

    def fails(*options):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "deepytorch.cli", "run", *options, str(script)]
        status = ForkedProgram(command, log, dict(os.environ)).wait(100)  # noqa: TID251
        assert "it was started" not in log.read_text()
        return status, log.read_text()

    place = str(tmp_path / "file" / "report")
    status, said = fails("--report", place)
    assert status != 0
    assert f"--report {place} can't be written" in said
    status, said = fails("--report", str(tmp_path / "report"), "--compare")
    assert status == 2
    assert "--html" in said
