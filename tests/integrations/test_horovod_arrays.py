"""The core without torch: the communicator's binding, and what TensorFlow's adapter stands on."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepytorch.integrations.common.contract import IntegrationError
from deepytorch.integrations.common.horovod_arrays import ArrayWorld
from deepytorch.integrations.common.horovod_common import HorovodInternalError, ReduceOp
from deepytorch.integrations.common.horovod_rendezvous import LocalStore, local_store
from deepytorch_core import _core
from deepytorch_core.base.launchers import Launched
from deepytorch_core.testing import RankError, spawn_ranks

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def as_started_by_mpirun(rank: int, size: int, folder: str, job: str = "job") -> None:
    for name in TORCHRUN:
        os.environ.pop(name, None)  # noqa: TID251
    os.environ.update(  # noqa: TID251
        OMPI_COMM_WORLD_RANK=str(rank),
        OMPI_COMM_WORLD_SIZE=str(size),
        OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
        OMPI_COMM_WORLD_LOCAL_SIZE=str(size),
        PMIX_NAMESPACE=job,
        TMPDIR=folder,
    )
    import tempfile

    tempfile.tempdir = None  # read again


def binding(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    group = _core.Communicator(LocalStore(Path(folder)), rank, world_size, name="plain")
    assert (group.rank, group.size) == (rank, world_size)
    result = np.empty(5, np.float32)
    group.all_reduce("float32", "sum", np.arange(5, dtype=np.float32) + rank, result)
    outputs = [np.empty(r + 1, np.int32) for r in range(world_size)]
    group.all_gather("int32", np.full(rank + 1, rank, np.int32), outputs)
    large = np.full(300_000, float(rank))
    group.broadcast("float64", large, 1)
    in_place = bytearray([1, 2, 3])
    group.all_reduce("uint8", "max", in_place, in_place)
    group.barrier()
    errors = []
    for wrong in (
        lambda: group.all_reduce("float32", "sum", bytes(8), bytearray(4)),
        lambda: group.all_reduce("float33", "sum", bytes(8), bytearray(8)),
        lambda: group.all_reduce("float32", "sum", bytes(8), bytes(8)),
        lambda: group.all_reduce("float32", "sum", bytes(6), bytearray(6)),
        lambda: group.broadcast("uint8", bytearray(2), 7),
        lambda: group.all_gather("uint8", bytes(2), [bytearray(2)]),
        # The other rank has twice as many: an error on both, and the group goes on.
        lambda: group.broadcast("uint8", bytearray(2 + 2 * rank), 0),
    ):
        with pytest.raises((ValueError, RuntimeError, BufferError)) as error:
            wrong()
        errors.append(str(error.value))
    group.barrier()
    group.close()
    with pytest.raises(RuntimeError, match="closed"):
        group.barrier()
    rows = [row for row in _core.statistics() if row["group"] == "plain"]
    return {
        "sum": result.tolist(),
        "gathered": [output.tolist() for output in outputs],
        "broadcast": float(large.min()),
        "max": list(in_place),
        "errors": errors,
        "native": {row["op"] for row in rows if row["algorithm"] != "delegate"},
    }


def test_the_communicator_works_on_plain_buffers(tmp_path: Path) -> None:
    for found in spawn_ranks(binding, 2, str(tmp_path)):
        assert found["sum"] == [1.0, 3.0, 5.0, 7.0, 9.0]
        assert found["gathered"] == [[0], [1, 1]]
        assert found["broadcast"] == 1.0
        assert found["max"] == [1, 2, 3]
        assert found["native"] == {"all_reduce", "all_gather", "broadcast", "barrier"}
        for error, said in zip(
            found["errors"],
            [
                "the input has 8 bytes, the output 4",
                'no dtype "float33"; known: bool',
                "not writable",
                "6 bytes are no whole number of float32",
                "root 7 of 2 ranks",
                "one output per rank (2), got 1",
                "rank",
            ],
            strict=True,
        ):
            assert said in error


def test_other_threads_run_while_one_waits(tmp_path: Path) -> None:
    groups: list[Any] = [None, None]

    def take_part(rank: int) -> None:
        groups[rank] = _core.Communicator(LocalStore(tmp_path), rank, 2, name="threads")
        groups[rank].barrier()

    other = threading.Thread(target=take_part, args=(1,))
    other.start()
    take_part(0)
    other.join()
    for group in groups:
        group.close()


class BrokenStore:
    def set(self, key: str, value: bytes) -> None:
        raise OSError("the disk is full")

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        raise OSError("the disk is gone")


def test_a_store_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="rendezvous store: set failed: OSError: the disk is"):
        _core.Communicator(BrokenStore(), 0, 2, name="broken", timeout_s=2).barrier()


@pytest.mark.parametrize("settings", [{"tune": "perhaps"}, {"rank": 2}])
def test_wrong_settings(settings: dict[str, Any]) -> None:
    arguments = {"rank": 0, "size": 2, "name": "wrong", **settings}
    with pytest.raises(ValueError, match="expected off|rank 2 of 2"):
        _core.Communicator(BrokenStore(), **arguments)


def arrays(rank: int, world_size: int, folder: str) -> None:
    as_started_by_mpirun(rank, world_size, folder)
    world = ArrayWorld("test", {"timeout_s": 60})
    assert (world.placement.local_rank, world.placement.cross_size) == (rank, 1)
    many = [
        np.full((2, 3), rank, np.float32),
        np.full((400, 100), rank + 1.0),
        np.array(rank, np.float32),
        np.arange(3) + rank,
        np.array([rank - 2, 5], np.float16),
    ]
    sums = world.all_reduce(many, ReduceOp.Sum)
    assert [result.shape for result in sums] == [array.shape for array in many]
    assert [float(result.reshape(-1)[0]) for result in sums] == [1.0, 3.0, 1.0, 1.0, -3.0]
    means = world.all_reduce(many, ReduceOp.Average)
    assert [float(result.reshape(-1)[0]) for result in means] == [0.5, 1.5, 0.5, 0.0, -1.5]
    assert world.all_reduce([np.ones(2)], ReduceOp.Sum, (2.0, 0.25))[0].tolist() == [1.0, 1.0]
    rows, counts = world.all_gather(np.full((2 * rank, 2), rank, np.int16))
    assert (rows.tolist(), counts) == ([[1, 1], [1, 1]], [0, 2])
    assert world.broadcast([np.full(3, rank), np.array(rank)], 1)[1] == 1
    assert world.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(HorovodInternalError, match="all_reduce"):
        world.all_reduce([np.ones(4 + rank)], ReduceOp.Sum)
    with pytest.raises(HorovodInternalError, match="differ in dtype or beyond"):
        world.all_gather(np.ones((2, 2 + rank)))
    world.barrier()
    world.close()


def test_arrays_of_numpy(tmp_path: Path) -> None:
    spawn_ranks(arrays, 2, str(tmp_path), fresh=True)


def opened_with(rank: int, world_size: int, folder: str, given: list[dict[str, Any]]) -> str:
    as_started_by_mpirun(rank, world_size, folder)
    with pytest.raises(IntegrationError) as error:
        ArrayWorld("test", given[rank])
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{}, {"tuning": "off"}], "horovod on rank 1: unknown option 'tuning'"),
        ([{"staging_mb": 8}, {"staging_mb": 16}], "horovod: rank 0 was given staging_mb=8 and"),
        ([{"enabled": False}] * 2, "horovod: enabled=false with TensorFlow is not supported"),
    ],
)
def test_options_are_agreed(tmp_path: Path, given: list[dict[str, Any]], said: str) -> None:
    for message in spawn_ranks(opened_with, 2, str(tmp_path), given, fresh=True):
        assert message.startswith(said)


def test_several_nodes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": 0, "SIZE": 8, "LOCAL_RANK": 0, "LOCAL_SIZE": 4}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with pytest.raises(IntegrationError, match="8 ranks, 4 of them on this node: groups over"):
        ArrayWorld("test", {})


def test_a_store_that_an_earlier_job_left(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "port").write_bytes(b"1 12345 12345\n1")  # process 1 did not start then
    assert store.get_alive("port", 0.01) is None
    assert store.get("port", 10) is None
    store.set("port", b"4711")
    assert store.get_alive("port", 1) == store.get("port", 1) == b"4711"
    assert store.get("a/key with anything: ", 1) is None
    store.set("a/key with anything: ", b"\0value")
    assert store.get("a/key with anything: ", 1) == b"\0value"


def write_and_die(folder: str) -> None:
    """In a process of its own, which leaves the files of a killed rank."""
    code = (
        "import os, pathlib, signal, sys\n"
        "from deepytorch.integrations.common.horovod_rendezvous import LocalStore\n"
        "LocalStore(pathlib.Path(sys.argv[1])).set('mark', b'dead')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, folder]).returncode == -signal.SIGKILL


def test_what_a_killed_process_set_is_for_those_that_ran_then(tmp_path: Path) -> None:
    write_and_die(str(tmp_path))
    # This process may wait for that one, and has to learn that it died.
    assert LocalStore(tmp_path).get("mark", 0) == b"dead"
    assert LocalStore(tmp_path).get_alive("mark", 0) is None
    code = (
        "import pathlib, sys\n"
        "from deepytorch.integrations.common.horovod_rendezvous import LocalStore\n"
        "print(LocalStore(pathlib.Path(sys.argv[1])).get('mark', 0))\n"
    )
    started_again = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(started_again, check=True, capture_output=True, text=True)
    assert found.stdout == "None\n"


def come_back(rank: int, world_size: int, folder: str) -> list[float]:
    as_started_by_mpirun(rank, world_size, folder)
    found = []
    for turn in range(3):
        time.sleep(0.2 * (rank == turn))
        world = ArrayWorld("numpy", {})
        (mean,) = world.all_reduce([np.array([rank + turn, -rank, 7])], ReduceOp.Average)
        found.append(mean.tolist())
        world.close()
    return found


def test_the_ranks_meet_again_after_they_left(tmp_path: Path) -> None:
    found = spawn_ranks(come_back, 2, str(tmp_path), fresh=True)
    # The mean of integers is cut off, as Horovod does.
    assert found == [[[0, 0, 7], [1, 0, 7], [2, 0, 7]]] * 2


def meet_again(rank: int, world_size: int, folder: str, pause_s: float) -> float:
    time.sleep(pause_s * rank)  # rank 1 comes late, as after a slow import
    group = _core.Communicator(LocalStore(Path(folder)), rank, world_size, name="again")
    value = np.ones(4, np.float32)
    group.all_reduce("float32", "sum", value, value)
    group.close()
    return float(value[0])


def killed_as_they_meet(rank: int, world_size: int, folder: str) -> None:
    meet_again(rank, world_size, folder, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_started_again_after_a_kill_meet(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        spawn_ranks(killed_as_they_meet, 2, str(tmp_path), fresh=True)
    assert any(tmp_path.iterdir())
    assert spawn_ranks(meet_again, 2, str(tmp_path), 1.0, fresh=True) == [2, 2]


def test_torchrun_jobs_without_an_id_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launched = Launched("torchrun", 0, 2, 0, 2, "0", "none")
    for port in ("29501", "29502", "29501"):
        monkeypatch.setenv("MASTER_PORT", port)
        local_store(launched, "tensorflow").set("key", port.encode())
    (user,) = tmp_path.iterdir()
    assert len(list(user.iterdir())) == 2


@pytest.mark.parametrize("module", ["common.horovod_arrays", "common.horovod_common"])
def test_torch_is_not_imported(module: str) -> None:
    code = (
        f"import sys, deepytorch.integrations.{module}\n"
        "from deepytorch_core import _core\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_tensorflow_its_adapter_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(IntegrationError, match="not installed: pip install 'tensorflow-cpu==2"):
        importlib.import_module("deepytorch.integrations.horovod_tensorflow")
