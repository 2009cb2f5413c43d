"""Operations on GPUs that are known to be the stock backend's, through the adapter, without a GPU.

The GPU is a fake (fake_gpu.cpp). As a program this file prints what a call costs on top of the
stock backend's own, with caches and TLBs full of other things.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch  # noqa: F401  (the fake's libraries)
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from deepytorch_core import _core
from deepytorch_core.base import config, torch_builds
from deepytorch_core.c10d import adapter
from deepytorch_core.testing import spawn_ranks

# Compiles for half a minute, or longer beside other things.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]
RANKS = 2
_SOURCE = Path(__file__).with_name("fake_gpu.cpp")


def _compiled() -> Path:
    """The fake GPU as a module, compiled once for each change of it and each torch."""
    torch_build = torch_builds.installed()
    path = _SOURCE.parents[2] / "build" / "fake-gpu" / torch_build.name / "fake_gpu.so"
    if not path.exists() or path.stat().st_mtime < _SOURCE.stat().st_mtime:
        compiler = config.compiler()
        assert compiler is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [*compiler, "-shared", "-fPIC", "-std=c++20", "-O2"]
        command += ["-DTORCH_EXTENSION_NAME=fake_gpu", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        command += [*torch_build.compile_flags(), "-isystem", sysconfig.get_paths()["include"]]
        command += [str(_SOURCE), "-o", str(path), *torch_build.link_flags()]
        subprocess.run(command, check=True, timeout=300)
    return path


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _backends(fake: ModuleType) -> tuple[Any, Any]:
    stock = fake.Stock(0, RANKS)
    ours = adapter.load().create_backend(
        dist.HashStore(),
        0,
        RANKS,
        timeout=timedelta(seconds=20),
        group_name="short way",
        global_ranks=list(range(RANKS)),
        delegates=lambda device, limit_s=0.0: stock,
        native=True,
        raise_errors=True,
    )
    return stock, ours


def _each_operation(ours: Any, fake: ModuleType, elements: int) -> None:
    tensor = fake.tensor_on_gpu(elements)
    whole = fake.tensor_on_gpu(RANKS * elements)
    ours.allreduce([tensor], AllreduceOptions())
    ours._allgather_base(whole, tensor, AllgatherOptions())
    ours._reduce_scatter_base(tensor, whole, ReduceScatterOptions())


def _counted() -> list[tuple[str, str, int]]:
    rows = _core.statistics()
    return [(row["op"], row["algorithm"], row["calls"]) for row in rows if row["calls"]]


def call_twice(rank: int, world_size: int, path: str) -> tuple[int, list[tuple[str, str, int]]]:
    fake = _load(path)
    stock, ours = _backends(fake)
    for _ in range(2):
        _each_operation(ours, fake, 1000)
    return stock.calls, _counted()


def fail_at_once(rank: int, world_size: int, path: str) -> tuple[list[str], int]:
    """Return what is raised while the stock backend fails, the first and the second time."""
    fake = _load(path)
    stock, ours = _backends(fake)
    tensor = fake.tensor_on_gpu(1000)
    ours.allreduce([tensor], AllreduceOptions())
    stock.failure = "NCCL is out of memory"
    raised = []
    for _ in range(2):
        with pytest.raises(dist.DistBackendError) as failed:
            ours.allreduce([tensor], AllreduceOptions())
        raised.append(str(failed.value))
    stock.failure = ""
    ours.allreduce([tensor], AllreduceOptions())
    return raised, adapter.load().failures()


def call_lists(rank: int, world_size: int, path: str) -> dict[str, tuple[int, list[int]]]:
    """For each kind of list: calls of the stock backend, and what is counted of each operation."""
    fake = _load(path)
    stock, ours = _backends(fake)
    parts = [fake.tensor_on_gpu(elements) for elements in (1000, 3000, 1000)]
    wholes = [fake.tensor_on_gpu(RANKS * part.numel()) for part in parts]
    mixed = [*parts[:2], fake.tensor_on_gpu(1000, integers=True)]
    kinds = {
        "all_reduce": lambda: ours.allreduce_coalesced(parts, AllreduceCoalescedOptions()),
        "all_gather": lambda: fake.all_gather_coalesced(ours, wholes, parts),
        "reduce_scatter": lambda: fake.reduce_scatter_coalesced(ours, parts, wholes),
        "one alone": lambda: ours.allreduce_coalesced(parts[:1], AllreduceCoalescedOptions()),
        "two types": lambda: ours.allreduce_coalesced(mixed, AllreduceCoalescedOptions()),
    }
    found = {}
    for kind, call in kinds.items():
        before = stock.calls
        _core.reset_statistics()
        call()
        found[kind] = stock.calls - before, [calls for _, _, calls in _counted()]
    before = stock.calls
    with pytest.raises(ValueError, match="need"):  # of the last; the others are not started
        fake.all_gather_coalesced(ours, wholes, [*parts[:2], wholes[2]])
    assert stock.calls == before
    stock.failure = "NCCL is out of memory"
    with pytest.raises(dist.DistBackendError, match="NCCL is out of memory"):
        fake.all_gather_coalesced(ours, wholes, parts)
    assert stock.calls == before + 1
    return found


def call_with_gil(rank: int, world_size: int, path: str) -> tuple[int, int]:
    fake = _load(path)
    stock, ours = _backends(fake)
    for _ in range(2):
        fake.all_reduce_with_gil(ours, fake.tensor_on_gpu(1000))
    return stock.calls, stock.calls_with_gil


def abort_between(rank: int, world_size: int, path: str) -> tuple[str, int]:
    fake = _load(path)
    stock, ours = _backends(fake)
    tensor = fake.tensor_on_gpu(1000)
    for _ in range(2):
        ours.allreduce([tensor], AllreduceOptions())
    ours.abort()
    with pytest.raises(RuntimeError) as failed:
        ours.allreduce([tensor], AllreduceOptions())
    return str(failed.value), stock.calls


def test_each_call_comes_to_the_stock_backend_and_is_counted() -> None:
    ((calls, counted),) = spawn_ranks(call_twice, 1, str(_compiled()), fresh=True)
    assert calls == 6
    operations = ("all_reduce", "all_gather", "reduce_scatter")
    assert sorted(counted) == sorted((each, "delegate", 2) for each in operations)


def test_lists_come_to_the_stock_backend_in_one_piece() -> None:
    (found,) = spawn_ranks(call_lists, 1, str(_compiled()), fresh=True)
    assert found == {
        "all_reduce": (1, [3]),
        "all_gather": (1, [3]),
        "reduce_scatter": (1, [3]),
        "one alone": (1, [1]),
        "two types": (3, [3]),
    }


def test_the_stock_backends_own_exception_is_raised_each_time() -> None:
    (((first, second), failures),) = spawn_ranks(fail_at_once, 1, str(_compiled()), fresh=True)
    assert "NCCL is out of memory" in first
    assert "NCCL is out of memory" in second
    assert failures == 2


def test_nobody_waits_for_the_gil_meanwhile() -> None:
    ((calls, with_gil),) = spawn_ranks(call_with_gil, 1, str(_compiled()), fresh=True)
    assert (calls, with_gil) == (2, 0)


def test_nothing_is_started_in_a_group_that_was_aborted() -> None:
    ((message, calls),) = spawn_ranks(abort_between, 1, str(_compiled()), fresh=True)
    assert "all_reduce of group short way on rank 0" in message
    assert calls == 2


def main() -> None:
    """Print the cost of a call, in microseconds."""
    fake = _load(str(_compiled()))
    stock, ours = _backends(fake)
    for pages in (1, 256, 1024, 3000):
        for operation, (alone, with_ours) in fake.cost(
            stock, ours, calls=2000, pages=pages
        ).items():
            print(
                f"{pages:4} pages of code and of data between calls: {operation:14} stock "
                f"{alone / 1000:.2f} us, on top of it {(with_ours - alone) / 1000:.2f} us"
            )


if __name__ == "__main__":
    sys.exit(main())
