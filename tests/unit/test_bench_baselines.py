"""Rivals that need a package: what is said when it is missing, and what surrounds their ranks."""

import importlib.util
from importlib import metadata
from types import SimpleNamespace

import pytest

from deepytorch_core.bench import baselines
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
        assert setup == baselines.Setup()


def test_every_baseline_has_limits():
    assert set(baselines.LIMITS) == set(baselines.BASELINES)


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
def deepspeed_package(monkeypatch, tmp_path):
    """An installed DeepSpeed as far as its files go."""
    comm = tmp_path / "deepspeed" / "ops" / "csrc" / "cpu" / "comm"
    comm.mkdir(parents=True)
    for name in ("shm_interface.cpp", "shm.cpp"):
        (comm / name).write_text("")
    spec = SimpleNamespace(origin=str(tmp_path / "deepspeed" / "__init__.py"))
    pretend(monkeypatch, importlib.util, "find_spec", {"deepspeed": spec})
    pretend(monkeypatch, metadata, "version", {"deepspeed": "0.1"})
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


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(deepspeed_shm.config, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_deepspeeds_op_needs_a_compiler(deepspeed_package, own_cache, monkeypatch):
    monkeypatch.setattr(deepspeed_shm.config, "compiler", lambda: None)
    with pytest.raises(BenchError, match=r"no C\+\+ compiler: install"), deepspeed_shm.prepare(2):
        pass


def test_a_failed_compilation_shows_why_and_leaves_nothing(
    deepspeed_package, own_cache, monkeypatch
):
    monkeypatch.setattr(
        deepspeed_shm.config, "compiler", lambda: ["sh", "-c", "echo no such type >&2; exit 1"]
    )
    prepared = deepspeed_shm.prepare(2)
    with pytest.raises(BenchError, match="does not compile with sh") as why, prepared:
        pass
    assert "no such type" in str(why.value)
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_deepspeeds_op_is_compiled_once(deepspeed_package, own_cache, monkeypatch):
    # Writes to the file after -o, its last argument.
    compiler = ["sh", "-c", 'for last; do :; done; echo code > "$last"']
    monkeypatch.setattr(deepspeed_shm.config, "compiler", lambda: compiler)
    with deepspeed_shm.prepare(2) as first:
        pass
    monkeypatch.setattr(deepspeed_shm.config, "compiler", lambda: None)
    with deepspeed_shm.prepare(2) as second:
        assert second.library == first.library


def test_a_cache_that_cannot_be_used_is_named(deepspeed_package, own_cache):
    own_cache.write_text("a file")
    with pytest.raises(BenchError, match="cache.*DEEPYTORCH_CACHE_DIR"), deepspeed_shm.prepare(2):
        pass
