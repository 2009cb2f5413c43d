"""`deepytorch run --compare` on scripts of three frameworks, and on scripts that misbehave."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli import compare, launcher, runner
from deepytorch_core.testing import free_port, spawn_ranks

# Never ends; two micro-batches a step; saves into its folder, over what is there, and elsewhere.
PLAIN = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8, num_workers=1)
elsewhere = sys.argv[1]
Path("progress").mkdir(exist_ok=True)
while True:
    for (x,) in batches:
        for micro in x.split(4):
            (model(micro).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), "weights.pt")
        if dist.get_rank() == 0:
            for name in ("log.txt", Path(__file__).resolve().with_name("log.txt")):
                with open(name, "a") as file:
                    file.write("x")
            os.makedirs(elsewhere, exist_ok=True)
            torch.save(model.state_dict(), elsewhere + "/draft")
            os.replace(elsewhere + "/draft", elsewhere + "/weights.pt")
            torch.load(elsewhere + "/weights.pt")
    Path("progress/mark").write_text("")
"""
# Ends after 6 steps, each of two micro-batches.
ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = DataLoader(TensorDataset(torch.randn(48, 64)), batch_size=4)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for (x,) in batches:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state(sys.argv[1])
"""
TRAINER = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
tokens = torch.arange(64 * 9).reshape(64, 9) % 61 + 3
rows = [dict(input_ids=t, attention_mask=torch.ones_like(t), labels=t) for t in tokens]
arguments = TrainingArguments(
    sys.argv[1], max_steps=10000, save_steps=3, save_total_limit=1, use_cpu=True, report_to=[],
    per_device_train_batch_size=2, gradient_accumulation_steps=2, disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=rows).train()
"""
# Writes over checkpoints that were there before, in two ways, and removes them; it may catch the
# first refusal, not the second.
DELETES = """
import os, shutil, sys
import torch

torch.save({}, sys.argv[1] + "/old.pt")
torch.save({}, "draft")
os.replace("draft", sys.argv[1] + "/old.pt")
try:
    os.remove(sys.argv[1] + "/old.pt")
except RuntimeError as error:
    print("caught:", error)
shutil.rmtree(sys.argv[1])
"""
# Its second rank fails while its first, which has saved, is at work: that one a signal ends.
FAILS = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with open(sys.argv[1] + "/last.pt", "wb") as file:
        torch.save({}, file)
    torch.save({}, sys.argv[1] + "/epoch1.pth.tar")
    assert os.path.getsize(sys.argv[1] + "/epoch1.pth.tar")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("no luck")
time.sleep(1000)
"""


# Under deepytorch it has another learning rate or is no DDP, or has drawn a random number more.
OTHERWISE = """
import os, sys
import torch, torch.distributed as dist

what = sys.argv[1] if os.environ["DEEPYTORCH_ENABLED"] == "1" else ""
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
data = torch.Generator().manual_seed(1 + dist.get_rank())
inputs, targets = torch.randn(32, 16, generator=data), torch.arange(32) % 4
layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)]
model = torch.nn.Sequential(*layers)
if what == "alone":
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
torch.rand(1 if what == "draws" else 0)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0 if what == "rate" else 0.1)
while True:
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Project:
    """A folder with a script, in which comparisons are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.elsewhere = folder / "elsewhere"
        self.record = folder / "record.json"
        self.receipt = folder / "receipt.html"
        self.scratch = folder / "scratch"
        self.folder.mkdir()
        self.scratch.mkdir()

    def compare(self, script: str, *options: str, given: str = "") -> Result:
        (self.folder / "train.py").write_text(script)
        command = ["run", "--compare", "--rounds", "1", "--json", str(self.record)]
        command += ["--html", str(self.receipt), *options, "train.py"]
        done = CliRunner().invoke(cli.app, [*command, given or str(self.elsewhere)])
        assert not list(self.scratch.iterdir())
        return done

    def files(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*")} - {"train.py"}

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.record.read_text())
        return found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    found = Project(tmp_path)
    monkeypatch.chdir(found.folder)
    monkeypatch.setattr(tempfile, "tempdir", str(found.scratch))
    monkeypatch.setenv("DEEPYTORCH_TUNE", "off")
    monkeypatch.setenv("DEEPYTORCH_COMPILE", "off")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return found


@pytest.fixture
def without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the one process of a run directly, which halves its time."""

    def command(job: compare.Job, plan: str) -> list[str]:
        return [sys.executable, str(launcher._RUNNER), "--compare", plan, *compare._arguments(job)]

    monkeypatch.setattr(compare, "_command", command)


def losses_agree(found: dict[str, Any]) -> None:
    stock, ours = found["runs"]
    assert (stock["arm"], ours["arm"]) == ("stock", "deepytorch")
    assert None not in stock["losses"] + ours["losses"]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert stock["native_calls"] == 0


# This starts two ranks in place of torchrun, which imports torch before it does.
LAUNCHER = """
import os, subprocess, sys
port, *command = sys.argv[1:]
os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RUN_ID=port)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
def start(rank):
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return subprocess.Popen([sys.executable, *command], env={**os.environ, **own})
sys.exit(max(abs(process.wait()) for process in [start(rank) for rank in range(2)]))
"""


@pytest.mark.parametrize(
    "torchrun", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["ranks", "torchrun"]
)
def test_plain_ddp_that_never_ends_and_saves(
    project: Project, torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(job: compare.Job, plan: str) -> list[str]:
        arguments = compare._arguments(job)[1:]  # without torchrun's own
        runner = [str(launcher._RUNNER), "--compare", plan, *arguments]
        return [sys.executable, "-c", LAUNCHER, str(free_port()), *runner]

    if not torchrun:
        monkeypatch.setattr(compare, "_command", command)
    monkeypatch.setenv("DEEPYTORCH_PATIENCE", "off")
    (project.folder / "weights.pt").write_text("old")
    (project.folder / "log.txt").write_text("old")
    done = project.compare(PLAIN, "--nproc-per-node", "2", "--steps", "10")
    assert done.exit_code == 0, done.exception
    assert project.files() == {"weights.pt", "log.txt"}
    assert (project.folder / "weights.pt").read_text() == "old"
    assert (project.folder / "log.txt").read_text() == "old"
    assert not project.elsewhere.exists()
    found = project.found()
    losses_agree(found)
    assert [run["steps"] for run in found["runs"]] == [10, 10]
    assert len(found["runs"][0]["block_s"]) == 8
    assert found["runs"][1]["native_calls"] > 0
    assert found["runs"][1]["seams"] == ["ddp"]
    assert "no difference beyond the noise" in done.stdout
    assert f"checkpoints not kept: in {project.elsewhere}" in " ".join(done.stdout.split())
    assert "<svg" in project.receipt.read_text()


# Imported once, not by each of many ranks.
PRELOAD = ("torch._dynamo", "torch.distributed.fsdp", "deepytorch_core.compare.probe")


def start(rank: int, world_size: int, arguments: list[str], folder: str) -> None:
    """Run what torchrun would start."""
    os.chdir(folder)
    runner.main(arguments)


@pytest.fixture
def by_forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked with torch in them, where torchrun would take seconds for each run."""

    def launch(job: compare.Job, folder: Path, variables: Any, log: Path, watch: Any) -> int:
        plan = folder / "plan.json"
        arguments = ["--compare", str(plan), *compare._arguments(job)[1:]]
        view = json.loads(plan.read_text())["workspace"]
        env = {**variables, "DEEPYTORCH_TUNE": "off", "DEEPYTORCH_COMPILE": "off"}
        ranks = job.world_size
        spawn_ranks(start, ranks, arguments, view, env=env, preload=PRELOAD, fresh=True)
        return 0

    monkeypatch.setattr(compare, "_launch", launch)


@pytest.mark.usefixtures("by_forking")
@pytest.mark.parametrize(
    "what",
    [
        "rate",
        "nothing",
        *(pytest.param(what, marks=pytest.mark.extended) for what in ("alone", "draws")),
    ],
)
def test_a_wrong_run_is_told_from_other_random_numbers(project: Project, what: str) -> None:
    steps = ["--nproc-per-node", "2", "--steps", "16"]
    done = project.compare(OTHERWISE, *steps, given=what)
    assert done.exit_code == 0, done.exception
    found = project.found()
    said, (verdict,) = " ".join(done.stdout.split()), found["verdicts"]
    reasons = {
        "rate": "so no speed-up is claimed: its loss is",
        "alone": "so no speed-up is claimed: its ranks end with different weights, where stock's",
    }
    assert (verdict["word"] == "not the same training") == (what in reasons)
    assert reasons.get(what, "no difference") in said
    assert ("others than stock's from step 1 on, so dropout and noise" in said) == (what == "draws")
    stock, _, *nudged = found["runs"]
    assert stock["is_replicated"]
    assert [run["arm"] for run in nudged] == ["stock, nudged"] * (what in ("rate", "draws"))
    for run in nudged:
        assert run["losses"][0] == stock["losses"][0]
        assert run["losses"][1:] != stock["losses"][1:]


@pytest.mark.extended
@pytest.mark.extended
@pytest.mark.usefixtures("without_torchrun")
def test_accelerate_that_ends_early(project: Project) -> None:
    done = project.compare(ACCELERATE, "--steps", "30")
    assert done.exit_code == 0, done.exception
    assert "the script ends after 6 optimizer steps" in done.stderr
    found = project.found()
    losses_agree(found)
    assert found["steps"] == 6
    assert found["runs"][1]["seams"] == ["accelerate"]
    assert not project.files()
    assert not project.elsewhere.exists()


@pytest.mark.extended
@pytest.mark.usefixtures("without_torchrun")
def test_a_trainer_that_rotates_checkpoints(project: Project) -> None:
    old = project.folder / "out" / "checkpoint-1"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_text("old")
    done = project.compare(TRAINER, "--steps", "8", given="out")
    assert done.exit_code == 0, done.exception
    losses_agree(project.found())
    assert project.found()["runs"][1]["seams"] == ["accelerate"]
    assert project.files() == {"out", "checkpoint-1", "model.safetensors"}
    assert (old / "model.safetensors").read_text() == "old"


@pytest.mark.usefixtures("without_torchrun")
@pytest.mark.parametrize(
    "given",
    [
        "",
        *(
            pytest.param(f"{folder}elsewhere", marks=pytest.mark.extended)
            for folder in ("../", "linked/")
        ),
    ],
)
def test_a_checkpoint_that_was_there_is_not_deleted(project: Project, given: str) -> None:
    project.elsewhere.mkdir()
    (project.folder / "linked").symlink_to(project.elsewhere.parent)
    weights = project.elsewhere / "old.pt"
    weights.write_text("old")
    done = project.compare(DELETES, given=given)
    assert done.exit_code == 1
    message = str(done.exception)
    assert "\n" not in message
    assert re.search(r"train\.py, line \d+\)$", message)
    assert f"would delete {project.elsewhere}, which was there" in message
    assert weights.read_text() == "old"
    assert not project.receipt.exists()


def test_no_training_resumes_from_a_run_that_failed(project: Project) -> None:
    project.elsewhere.mkdir()
    done = project.compare(FAILS, "--nproc-per-node", "2")
    assert "no luck" in str(done.exception)
    assert not list(project.elsewhere.iterdir())
