"""The files of docs/platforms have fields that exist, and their commands train on two ranks.

A command runs with the variables that its platform sets. What a test can't have is put in place of
it: srun and scontrol, the nodes' addresses, a free port, one rank on each node.
"""

from __future__ import annotations

# ruff: noqa: TID251
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deepytorch_core.testing import free_port

sys.path.insert(0, str(Path(__file__).parent))
import page
import platform_fields

FILES = page.DOCS / "examples" / "platforms"
PAGES = sorted((page.DOCS / "platforms").glob("*.md"))
NODES = 2
_MOST_S = 280  # on a busy machine each process takes half a minute to import torch
pytestmark = pytest.mark.timeout(300)
SRUN = """#!/bin/bash
for node in $(seq 0 $((SLURM_NNODES - 1))); do
  SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=$SLURM_NNODES \\
    SLURM_STEP_TASKS_PER_NODE="1(x$SLURM_NNODES)" "$@" &
  started+=($!)
done
for pid in "${started[@]}"; do wait "$pid" || status=$?; done
exit "${status:-0}"
"""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FILES / name).read_text(encoding="utf-8")))


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """A container's: variables of launchers are those given; the path has our commands."""
    others = ("PET_", "SLURM_", "SKYPILOT_", "TORCHELASTIC_")
    own = {
        name: value
        for name, value in page.environment(folder).items()
        if not name.startswith(others) and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
    return own | {"PATH": path} | variables


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The place that users start their jobs in."""
    shutil.copy(FILES / "train.py", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def stock_losses() -> list[str]:
    """The lines that the script prints, of one process that has both ranks' data and no group."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks = [torch.Generator().manual_seed(rank) for rank in range(2)]
    lines = []
    for step in range(1, 61):
        batches = [torch.randn(32, 64, generator=data) for data in ranks]
        both = [torch.nn.functional.mse_loss(model(x), x[:, :8]) for x in batches]
        (sum(both) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            lines.append(f"step {step} on 2 ranks: loss {both[0].item():.4f}")
    return lines


def losses(printed: str) -> list[str]:
    found = re.findall(r"^step \d+ on 2 ranks: loss \d\.\d+$", printed, re.M)
    assert len(found) == 3, printed
    return found


def ran(nodes: list[subprocess.Popen[str]]) -> str:
    """All that the nodes printed; fails where one of them failed."""
    printed = ""
    try:
        for node in nodes:
            printed += node.communicate(timeout=_MOST_S)[0]
    finally:
        for node in nodes:
            node.kill()
    assert all(node.returncode == 0 for node in nodes), printed
    return printed


def check_trained(printed: str, stock_losses: list[str]) -> None:
    assert losses(printed) == stock_losses
    assert "collectives of 2 ranks go through deepytorch" in printed


def start(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_show_the_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"\(\.\./examples/platforms/([\w.]+)\)", text):
        shown = [block.text for block in page.blocks(path) if block.title == name]
        if path.stem != "index":
            assert shown == [(FILES / name).read_text(encoding="utf-8")], name


def test_every_file_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert {path.name for path in FILES.iterdir() if path.is_file()} == set(
        re.findall(r"\(\.\./examples/platforms/([\w.]+)\)", text)
    )


@pytest.mark.parametrize("name", ["trainjob.yaml", "rayjob.yaml"])
def test_objects_of_kubernetes_have_fields_that_exist(name: str) -> None:
    for document in documents(name):
        fields = platform_fields.OBJECTS[document["apiVersion"], document["kind"]]
        platform_fields.check(document, fields, document["kind"])


def test_a_field_that_does_not_exist_is_found() -> None:
    runtime, job = documents("trainjob.yaml")
    fields = platform_fields.OBJECTS[job["apiVersion"], "TrainJob"]
    job["spec"]["trainer"]["nprocPerNode"] = 8  # the legacy job's name for it
    with pytest.raises(AssertionError, match=r"spec\.trainer: there is no field nprocPerNode"):
        platform_fields.check(job, fields, "TrainJob")
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    del pod["spec"]["containers"][0]["name"]
    fields = platform_fields.OBJECTS[runtime["apiVersion"], "TrainingRuntime"]
    with pytest.raises(AssertionError, match=r"containers\[0\]: \['name'\] must be there"):
        platform_fields.check(runtime, fields, "TrainingRuntime")


def test_kubeflow_finds_the_container_that_trains() -> None:
    """It goes by a label, and by the names `node` of job and container."""
    runtime, job = documents("trainjob.yaml")
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    labels = node["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node"
    assert pod["securityContext"]["runAsNonRoot"] is True
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


# A pod of one rank has the same command, and Slurm's script trains on two nodes.
@pytest.mark.extended
@pytest.mark.parametrize(("nodes", "ranks"), [(NODES, 1), (1, 2)])
def test_a_pods_command_trains_with_the_controllers_variables(
    folder: Path, stock_losses: list[str], nodes: int, ranks: int
) -> None:
    command = documents("trainjob.yaml")[1]["spec"]["trainer"]["command"]
    given = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(ranks),
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
    }
    pods = [start(command, folder, PET_NODE_RANK=str(number), **given) for number in range(nodes)]
    check_trained(ran(pods), stock_losses)


def test_a_pod_of_one_rank_is_a_job(folder: Path) -> None:
    """The controller says one node and one rank: a script may go by torchrun's variables."""
    command = documents("trainjob.yaml")[1]["spec"]["trainer"]["command"]
    given = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}
    meeting = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port())}
    assert "step 60 on 1 ranks" in ran([start(command, folder, **given, **meeting)])


def test_slurms_script_trains(folder: Path, stock_losses: list[str]) -> None:
    text = (FILES / "train.sbatch").read_text(encoding="utf-8")
    for line in re.findall(r"^#SBATCH (.*)$", text, re.M):
        name, _, value = line.removeprefix("--").partition("=")
        kind = platform_fields.SBATCH[name]
        patterns = {
            "name": r"\S+",
            "number": r"\d+",
            "time": r"(\d+-)?\d+:\d\d:\d\d",
            "size": r"\d+[KMGT]?",
            "signal": r"[A-Z]+@\d+",
            "": "",
        }
        assert re.fullmatch(patterns[kind], value), line
    (folder / "train.sbatch").write_text(text.replace("29500", str(free_port())))
    (folder / "srun").write_text(SRUN)
    hosts = "localhost\\n" * NODES
    (folder / "scontrol").write_text(
        f"#!/bin/bash\n[ \"$*\" = 'show hostnames node[1-2]' ] && printf '{hosts}'\n"
    )
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    variables = {
        "SLURM_NNODES": str(NODES),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_ON_NODE": "1",
    }
    check_trained(ran([start(["bash", "train.sbatch"], folder, **variables)]), stock_losses)


def test_skypilots_task_has_fields_that_exist() -> None:
    (task,) = documents("skypilot.yaml")
    platform_fields.check(task, platform_fields.SKYPILOT, "task")
    for commands in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[commands], text=True, check=True)


# Slurm's script starts the same torchrun.
@pytest.mark.extended
def test_skypilots_commands_train(folder: Path, stock_losses: list[str]) -> None:
    (task,) = documents("skypilot.yaml")
    run = task["run"].replace("29500", str(free_port()))
    given = {
        "SKYPILOT_NUM_NODES": str(NODES),
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * NODES),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }
    nodes = [
        start(["bash", "-c", run], folder, SKYPILOT_NODE_RANK=str(number), **given)
        for number in range(NODES)
    ]
    check_trained(ran(nodes), stock_losses)


def test_rays_workers_have_the_gpus_that_the_script_asks_for() -> None:
    (job,) = documents("rayjob.yaml")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["python", "ray_train.py"]
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert words[2:] == ["--workers", str(gpus), "--gpu"]
