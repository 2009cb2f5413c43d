"""Rivals that need a package: what is said when it is missing, and what surrounds their ranks."""

import importlib.util
from importlib import metadata
from types import SimpleNamespace

import pytest

from deepytorch_core.bench import baselines
from deepytorch_core.bench.baselines import deepspeed_shm, mpi
from deepytorch_core.bench.job import BenchError


@pytest.fixture
def nothing_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ("mpi", "--baseline mpi needs the package impi-rt: pip install impi-rt mpi4py"),
        ("deepspeed-shm", "--baseline deepspeed-shm needs DeepSpeed: .*pip install deepspeed"),
    ],
)
def test_a_missing_package_is_named(nothing_installed, baseline, message):
    with pytest.raises(BenchError, match=message), baselines.prepare(baseline, 2):
        pass


def test_backends_of_torch_need_nothing():
    with baselines.prepare("gloo", 2) as setup:
        assert setup == baselines.Setup()


def test_every_baseline_has_limits():
    assert set(baselines.LIMITS) == set(baselines.BASELINES)


def test_the_record_names_the_mpi_settings_of_the_user_too(monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    file = SimpleNamespace(name="mpiexec.hydra", locate=lambda: tmp_path / "mpiexec.hydra")
    monkeypatch.setattr(metadata, "files", lambda name: [file])
    monkeypatch.setenv("I_MPI_THREAD_YIELD", "3")
    setup = mpi.prepare()
    assert setup.settings["I_MPI_THREAD_YIELD"] == "3"
    assert setup.settings["I_MPI_FABRICS"] == "shm"
    assert setup.settings["I_MPI_PIN"] == "off"
    assert setup.versions == {"impi-rt": "1.0", "mpi4py": "1.0"}
    assert setup.mpiexec == (tmp_path / "mpiexec.hydra").resolve()


def test_a_package_without_mpiexec_is_an_error(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(metadata, "files", lambda name: [])
    with pytest.raises(BenchError, match=r"no mpiexec\.hydra"):
        mpi.prepare()


@pytest.fixture
def deepspeed_package(monkeypatch, tmp_path):
    """An installed DeepSpeed as far as its files go."""
    comm = tmp_path / "deepspeed" / "ops" / "csrc" / "cpu" / "comm"
    comm.mkdir(parents=True)
    for name in ("shm_interface.cpp", "shm.cpp"):
        (comm / name).write_text("")
    origin = str(tmp_path / "deepspeed" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=origin))
    monkeypatch.setattr(metadata, "version", lambda name: "0.1")
    return comm


def test_deepspeed_without_the_op_is_an_error(deepspeed_package):
    (deepspeed_package / "shm.cpp").unlink()
    with (
        pytest.raises(BenchError, match=r"DeepSpeed 0\.1 has no sources.*pip install -U"),
        deepspeed_shm.prepare(2),
    ):
        pass


def test_too_little_shared_memory_is_said_first(deepspeed_package, monkeypatch):
    monkeypatch.setattr(
        deepspeed_shm.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20)
    )
    with (
        pytest.raises(BenchError, match="66 MiB per rank.*64 MiB are free"),
        deepspeed_shm.prepare(2),
    ):
        pass


def test_what_deepspeed_leaves_in_shared_memory_is_removed(
    deepspeed_package, monkeypatch, tmp_path
):
    usage = SimpleNamespace(free=1 << 30)
    monkeypatch.setattr(deepspeed_shm.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(deepspeed_shm, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(deepspeed_shm, "_build", lambda folder: "op.so")
    with deepspeed_shm.prepare(2) as setup:
        address, port = (setup.environment[f"MASTER_{name}"] for name in ("ADDR", "PORT"))
        left = (
            tmp_path / f"deepspeed_allreduce_buffer_{deepspeed_shm.os.getuid()}_{address}_{port}_1"
        )
        left.write_text("")
        assert setup.environment["LOCAL_SIZE"] == "2"
        assert setup.library == "op.so"
    assert not left.exists()
