"""`deepytorch run --compare` on scripts of three frameworks, and on scripts that misbehave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core import config

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
Path("progress").mkdir()
while True:
    for (x,) in batches:
        for micro in x.split(4):
            (model(micro).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), "weights.pt")
        if dist.get_rank() == 0:
            with open("log.txt", "a") as file:
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
FAILS = """
import sys
import torch
import deepytorch

if deepytorch.is_active() or sys.argv[1] == "always":
    raise KeyError("from the script")
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(int(sys.argv[1])):
    parameter.sum().backward()
    optimizer.step()
"""


class Project:
    """A folder with a script, in which comparisons are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.elsewhere = folder / "elsewhere"
        self.record = folder / "record.json"
        self.receipt = folder / "receipt.html"
        self.folder.mkdir()

    def compare(
        self, script: str, *options: str, given: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        (self.folder / "train.py").write_text(script)
        command = [sys.executable, "-m", "deepytorch.cli", "run", "--compare", "--rounds", "1"]
        command += ["--json", str(self.record), "--html", str(self.receipt), *options]
        scratch = self.folder.parent / "scratch"
        scratch.mkdir(exist_ok=True)
        environment = config.child_environment(
            DEEPYTORCH_TUNE="off", OMP_NUM_THREADS="1", TMPDIR=str(scratch)
        )
        done = subprocess.run(
            [*command, "train.py", *(given or (str(self.elsewhere),))],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert not list(scratch.glob("deepytorch-compare-*"))
        return done

    def files(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*")} - {"train.py"}

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.record.read_text())
        return found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def losses_agree(found: dict[str, Any]) -> None:
    stock, ours = found["runs"]
    assert (stock["arm"], ours["arm"]) == ("stock", "deepytorch")
    assert None not in stock["losses"] + ours["losses"]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert stock["native_calls"] == 0


def test_plain_ddp_that_never_ends_and_saves(project: Project) -> None:
    (project.folder / "weights.pt").write_text("old")
    (project.folder / "log.txt").write_text("old")
    done = project.compare(PLAIN, "--nproc-per-node", "2", "--steps", "10")
    assert done.returncode == 0, done.stderr
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
    assert f"{project.elsewhere}/weights.pt" in done.stdout.replace("\n", "")
    assert "<svg" in project.receipt.read_text()


def test_accelerate_that_ends_early(project: Project) -> None:
    done = project.compare(ACCELERATE, "--steps", "30")
    assert done.returncode == 0, done.stderr
    assert "the script ends after 6 optimizer steps" in done.stderr
    found = project.found()
    losses_agree(found)
    assert found["steps"] == 6
    assert found["runs"][1]["seams"] == ["accelerate"]
    assert not project.files()
    assert not project.elsewhere.exists()


def test_a_trainer_that_rotates_checkpoints(project: Project) -> None:
    old = project.folder / "out" / "checkpoint-1"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_text("old")
    done = project.compare(TRAINER, "--steps", "8", given=("out",))
    assert done.returncode == 0, done.stderr
    losses_agree(project.found())
    assert project.found()["runs"][1]["seams"] == ["transformers", "accelerate"]
    assert project.files() == {"out", "checkpoint-1", "model.safetensors"}
    assert (old / "model.safetensors").read_text() == "old"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("always", "failed with exit status 1 under the arm 'stock'"),
        ("8", "failed with exit status 1 under the arm 'deepytorch'"),
        ("2", "ended after 2 optimizer steps"),
    ],
)
def test_scripts_that_fail(project: Project, given: str, message: str) -> None:
    done = project.compare(FAILS, "--steps", "8", given=(given,))
    assert done.returncode == 1
    assert message in done.stderr
    if given != "2":
        assert "train.py" in done.stderr
        assert "KeyError: 'from the script'" in done.stderr
        assert ("DEEPYTORCH_ENABLED=0" in done.stderr) == (given == "8")
    assert not project.receipt.exists()


@pytest.mark.parametrize("remove", ["os.remove(path)", "shutil.rmtree(os.path.dirname(path))"])
def test_a_checkpoint_that_was_there_is_not_deleted(project: Project, remove: str) -> None:
    project.elsewhere.mkdir()
    weights = project.elsewhere / "old.pt"
    weights.write_text("old")
    os.utime(weights, (1e9, 1e9))
    done = project.compare(f"import os, shutil\npath = {str(weights)!r}\n{remove}\n")
    assert done.returncode == 1
    assert f"would delete {project.elsewhere}" in done.stderr
    assert weights.read_text() == "old"
