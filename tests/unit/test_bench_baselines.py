"""Rivals that need a package: what is said when it is missing, and what surrounds their ranks."""

import importlib.util
from importlib import metadata
from types import SimpleNamespace

import pytest

from deepytorch_core.bench import baselines, rivals
from deepytorch_core.bench.baselines import deepspeed_shm, mpi
from deepytorch_core.bench.job import BenchError


def pretend(monkeypatch, module, name, answers):
    """`module.name` gives these answers, by its first argument; torch asks it others."""
    original = getattr(module, name)

    def answer(asked, *arguments):
        if asked not in answers:
            return original(asked, *arguments)
        if isinstance(answers[asked], Exception):
            raise answers[asked]
        return answers[asked]

    monkeypatch.setattr(module, name, answer)


@pytest.fixture
def nothing_installed(monkeypatch):
    packages = ("deepspeed", "impi-rt", "mpi4py")
    missing = {name: metadata.PackageNotFoundError(name) for name in packages}
    pretend(monkeypatch, metadata, "version", missing)
    pretend(monkeypatch, importlib.util, "find_spec", {"deepspeed": None})


@pytest.fixture
def mpi_packages(monkeypatch):
    pretend(monkeypatch, metadata, "version", {"impi-rt": "1.0", "mpi4py": "1.0"})


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
        assert setup == rivals.Setup()


def test_every_baseline_has_limits():
    assert set(rivals.LIMITS) == set(rivals.BASELINES)


def test_the_record_names_the_mpi_settings_of_the_user_too(mpi_packages, monkeypatch, tmp_path):
    file = SimpleNamespace(name="mpiexec.hydra", locate=lambda: tmp_path / "mpiexec.hydra")
    pretend(monkeypatch, metadata, "files", {"impi-rt": [file]})
    monkeypatch.setenv("I_MPI_THREAD_YIELD", "3")
    setup = mpi.prepare()
    assert setup.settings["I_MPI_THREAD_YIELD"] == "3"
    assert setup.settings["I_MPI_FABRICS"] == "shm"
    assert setup.settings["I_MPI_PIN"] == "off"
    assert setup.versions == {"impi-rt": "1.0", "mpi4py": "1.0"}
    assert setup.mpiexec == (tmp_path / "mpiexec.hydra").resolve()


def test_a_package_without_mpiexec_is_an_error(mpi_packages, monkeypatch):
    pretend(monkeypatch, metadata, "files", {"impi-rt": []})
    with pytest.raises(BenchError, match=r"no mpiexec\.hydra"):
        mpi.prepare()


@pytest.fixture
def builder(monkeypatch, tmp_path):
    """The file that DeepSpeed has its builder in; the package has nothing else."""
    folder = tmp_path / "deepspeed" / "ops" / "op_builder"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pretend(monkeypatch, importlib.util, "find_spec", {"deepspeed": SimpleNamespace()})
    pretend(monkeypatch, metadata, "version", {"deepspeed": "0.1"})
    return folder / "cpu.py"


def test_too_little_shared_memory_is_said_first(builder, monkeypatch):
    monkeypatch.setattr(
        deepspeed_shm.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20)
    )
    with (
        pytest.raises(BenchError, match="66 MiB per rank.*64 MiB are free"),
        deepspeed_shm.prepare(2),
    ):
        pass


def test_what_deepspeed_leaves_in_shared_memory_is_removed(builder, monkeypatch, tmp_path):
    usage = SimpleNamespace(free=1 << 30)
    monkeypatch.setattr(deepspeed_shm.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(deepspeed_shm, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(deepspeed_shm, "_build", lambda: "op.so")
    with deepspeed_shm.prepare(2) as setup:
        address, port = (setup.environment[f"MASTER_{name}"] for name in ("ADDR", "PORT"))
        left = (
            tmp_path / f"deepspeed_allreduce_buffer_{deepspeed_shm.os.getuid()}_{address}_{port}_1"
        )
        left.write_text("")
        assert setup.environment["LOCAL_SIZE"] == "2"
        assert setup.library == "op.so"
    assert not left.exists()


def test_deepspeeds_builder_says_where_the_op_is(builder):
    builder.write_text(
        "from types import SimpleNamespace\n"
        "class ShareMemCommBuilder:\n"
        "    def load(self, verbose):\n"
        "        print('Loading extension module')\n"
        "        return SimpleNamespace(__file__='/made/op.so')\n"
    )
    with deepspeed_shm.prepare(2) as setup:
        assert setup.library == "/made/op.so"


def test_why_deepspeeds_builder_failed_is_shown(builder):
    builder.write_text("raise RuntimeError('no such type')")
    with (
        pytest.raises(BenchError, match=r"(?s)DeepSpeed 0\.1 can't build.*no such type"),
        deepspeed_shm.prepare(2),
    ):
        pass


def test_a_build_that_does_not_end_names_its_lock(builder, monkeypatch):
    builder.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(deepspeed_shm, "_BUILD_TIMEOUT_S", 0.1)
    with (
        pytest.raises(BenchError, match=r"within 0\.1 s.*deepspeed_shm_comm/lock"),
        deepspeed_shm.prepare(2),
    ):
        pass
