"""Scripts for Horovod, started as their users start them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepytorch_core.base import config
from deepytorch_core.base.launchers import Launched
from deepytorch_core.testing import free_port, run_program, spawn_ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
IMPORT = re.compile(r"^import deepytorch\.integrations\.horovod as hvd  # was: (.*)$", re.MULTILINE)

# In place of torchvision's: seconds of imports and a large model say nothing about the script.
MODELS = """
from torch import nn

def resnet18():
    block = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000))
"""


def clean(**more: str) -> dict[str, str]:
    """The environment without any launcher's variables."""
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "OMPI_", "HOROVOD_", "PMI")
    kept = {
        name: value
        for name, value in config.child_environment().items()
        if not name.startswith(unwanted)
    }
    return {**kept, "OMP_NUM_THREADS": "1", "DEEPYTORCH_TUNE": "off", **more}


def torchrun(script: str, *arguments: str, **more: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(EXAMPLES / script), *arguments]
    done = run_program(command, env=clean(**more), timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "collectives of 2 ranks go through deepytorch" in done.stdout + done.stderr
    return done.stdout


def losses_of(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.extended
def test_the_short_example_learns() -> None:
    losses = losses_of(torchrun("horovod_short.py"))
    assert len(losses) == 3
    assert losses[2] < 0.1 * losses[0]


@pytest.mark.extended
def test_the_digits_example_learns() -> None:
    arguments = ["--epochs", "2", "--samples", "1600", "--batch-size", "32", "--fp16-allreduce"]
    output = torchrun("horovod_mnist.py", *arguments)
    accuracies = [float(found) for found in re.findall(r"Accuracy: (\d+\.\d+)%", output)]
    assert len(accuracies) == 2
    assert accuracies[1] > 90


@pytest.mark.extended
def test_the_synthetic_benchmark_counts_images(tmp_path: Path) -> None:
    sizes = ["--model", "resnet18", "--batch-size", "2", "--image-size", "32"]
    rounds = ["--num-warmup-batches", "1", "--num-iters", "2", "--num-batches-per-iter", "1"]
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    (tmp_path / "torchvision" / "models.py").write_text(MODELS)
    more = {"PYTHONPATH": str(tmp_path)}
    output = torchrun("horovod_synthetic_benchmark.py", *sizes, *rounds, **more)
    assert re.search(r"Iter #1: \d+\.\d img/sec per CPU", output)
    assert re.search(r"Total img/sec on 2 CPU\(s\): \d+\.\d \+-\d+\.\d", output)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("horovod_[!t]*.py"), key=str))
def test_one_line_of_an_example_differs_from_horovod(script: Path) -> None:
    assert IMPORT.findall(script.read_text()) == ["import horovod.torch as hvd"]


MPIRUN = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "JOB": "PMIX_NAMESPACE",
}
MPIEXEC = {
    "RANK": "PMI_RANK",
    "SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "LOCAL_SIZE": "MPI_LOCALNRANKS",
}


# Rank 0, which has the store, ends long before rank 1.
EARLY = """
import time, torch, deepytorch.integrations.horovod as hvd
hvd.init()
print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
time.sleep(2 * hvd.rank())
"""


HOROVODRUN = {
    "RANK": "HOROVOD_RANK",
    "SIZE": "HOROVOD_SIZE",
    "LOCAL_RANK": "HOROVOD_LOCAL_RANK",
    "LOCAL_SIZE": "HOROVOD_LOCAL_SIZE",
    "JOB": "HOROVOD_GLOO_RENDEZVOUS_PORT",
}

# As Horovod's gloo controller allows. Rank 0 is late once, and early once.
AGAIN = """
import time, torch, deepytorch.integrations.horovod as hvd
for turn in range(3):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="x")
    print(hvd.synchronize(handle).item(), hvd.allgather(torch.tensor([rank])).tolist())
    hvd.shutdown()
    assert not hvd.is_initialized()
    time.sleep(0.3 * (rank == turn))
"""


def as_launched(
    rank: int, world_size: int, launcher: dict[str, str], program: str, more: dict[str, str]
) -> str:
    """Return what a rank prints that finds a launcher's variables; it has imported torch."""
    environment = clean(**variables_of(launcher, rank), **more)
    os.environ.clear()  # noqa: TID251
    os.environ.update(environment)  # noqa: TID251
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "again.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def variables_of(launcher: dict[str, str], rank: int) -> dict[str, str]:
    facts = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2, "JOB": 12345}
    return {variable: str(facts[fact]) for fact, variable in launcher.items()}


def started_by(launcher: dict[str, str], folder: Path, *command: str, **more: str) -> list[str]:
    """Return what two ranks print that find a launcher's variables."""
    ranks = []
    for rank in range(2):
        said = variables_of(launcher, rank)
        ranks.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=clean(TMPDIR=str(folder), DEEPYTORCH_LOG="error", **said, **more),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        (first, _), (second, complaints) = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], complaints
    # A slow rank 0 makes others warn, as torch's store ends with rank 0; they say nothing else.
    assert not [line for line in complaints.splitlines() if not line.startswith("[W")]
    assert not list(folder.glob("*/*")), "rank 0 takes the meeting point away"
    return [first, second]


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        pytest.param(MPIRUN, [str(EXAMPLES / "horovod_short.py")], marks=pytest.mark.extended),
        (MPIEXEC, ["-c", EARLY]),
    ],
)
def test_other_launchers_variables(
    tmp_path: Path, launcher: dict[str, str], command: list[str]
) -> None:
    first, second = started_by(launcher, tmp_path, *command)
    assert len(losses_of(first)) == 3 or first == second == "2.0\n"


@pytest.mark.parametrize(
    ("launcher", "address"),
    [
        (HOROVODRUN, False),
        (MPIRUN, True),
        pytest.param(MPIEXEC, False, marks=pytest.mark.extended),
        pytest.param({"RANK": "RANK", "SIZE": "WORLD_SIZE"}, True, marks=pytest.mark.extended),
    ],
)
def test_init_after_shutdown(tmp_path: Path, launcher: dict[str, str], address: bool) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if address else {}
    more = {"TMPDIR": str(tmp_path), "DEEPYTORCH_LOG": "error", **meeting}
    for printed in spawn_ranks(as_launched, 2, launcher, AGAIN, more, fresh=True):
        assert printed == "2.0 [0, 1]\n" * 3
    assert not list(tmp_path.glob("*/*")), "rank 0 takes the meeting point away"


def test_what_a_launcher_says() -> None:
    found = config.launched({"RANK": "3", "WORLD_SIZE": "8", "GROUP_RANK": "1"})
    assert found == Launched("torchrun", 3, 8, None, None, "1", None)
    both = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "a@1"}
    assert config.launched(both) == Launched("mpirun", 1, 2, None, None, None, "a@1")
    horovod = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}
    assert config.launched(horovod) == Launched("horovodrun", 0, 2, None, None, None, "4711")
    assert config.launched({}) is None
    assert config.launched({"RANK": "3"}) is None
    with pytest.raises(ValueError, match="WORLD_SIZE='two': expected a whole number"):
        config.launched({"RANK": "3", "WORLD_SIZE": "two"})


def test_several_nodes_need_an_address() -> None:
    said = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    code = "import deepytorch.integrations.horovod as hvd; hvd.init()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean(**said, **local),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "4 ranks, 2 of them on this node: set MASTER_ADDR to the host of rank 0" in done.stderr
