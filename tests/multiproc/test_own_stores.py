"""Groups over rendezvous stores of the program's own: of those only what gloo needs is asked."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store

from deepytorch_core.base import stores
from deepytorch_core.c10d import activation
from deepytorch_core.report import summary
from deepytorch_core.testing import rank_store, spawn_ranks


class Five(Store):
    """A store with what gloo needs, and add and check."""

    def __init__(self, below: Store) -> None:
        super().__init__()
        self.below: Any = below

    def set(self, key: str, value: Any) -> None:
        self.below.set(key, value)

    def get(self, key: str) -> bytes:
        return self.below.get(key)

    def add(self, key: str, number: int) -> int:
        return self.below.add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self.below.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        self.below.wait(keys, timeout)


class Stubs(Five):
    """Everything has a body, and not everything works."""

    def compare_set(self, *_: Any) -> bytes:
        raise NotImplementedError("compare_set")

    def multi_get(self, *_: Any) -> list[bytes]:
        raise OSError("multi_get")

    def delete_key(self, key: str) -> bool:
        raise AttributeError(key)

    def clone(self) -> Store:
        raise TypeError("clone")

    def set_timeout(self, *_: Any) -> None:
        raise TypeError("set_timeout")


class OfFiles(Store):
    """Like those over a database: no store of torch's below, and errors of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.user = threading.Lock()

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "%")

    def set(self, key: str, value: Any) -> None:
        fresh = self._path(key + f".{threading.get_native_id()}")
        fresh.write_bytes(value if isinstance(value, bytes) else value.encode())
        fresh.replace(self._path(key))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._path(key).read_bytes()

    def add(self, key: str, number: int) -> int:
        with FileLock(self._path(key + ".lock")):
            path = self._path(key)
            total = number + (int(path.read_bytes()) if path.exists() else 0)
            self.set(key, str(total))
            return total

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise LookupError(keys)
            time.sleep(0.001)


class FileLock:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        while True:
            try:
                self.path.touch(exist_ok=False)
                return
            except FileExistsError:
                time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.path.unlink()


class Bare(Five):
    """Exactly what gloo needs."""

    add = Store.add  # type: ignore[assignment]
    check = Store.check  # type: ignore[assignment]


class Silent(Five):
    """Counts, and keeps the number to itself: gloo does not ask."""

    def add(self, key: str, number: int) -> int:
        super().add(key, number)
        return None  # type: ignore[return-value]


def make(kind: str, rank: int, folder: str) -> Any:
    below = rank_store("below")
    if kind == "file":
        return FileStore(f"{folder}/store")
    if kind == "of files":
        return OfFiles(Path(folder))
    if kind == "mixed":
        return Stubs(below) if rank == 0 else below
    if kind == "prefixed":
        return PrefixStore("one", PrefixStore("two", keep(Stubs(below))))
    if kind in ("bare", "silent"):
        return keep({"bare": Bare, "silent": Silent}[kind](below))
    return {"five": Five, "stubs": Stubs}[kind](below)


_kept: list[Any] = []


def keep(store: Any) -> Any:
    """Torch keeps no Python object that is below a prefix: gloo's second group would lack it."""
    _kept.append(store)
    return store


def over(rank: int, world_size: int, kind: str, folder: str, backend: str) -> list[Any]:
    if backend == "gloo":
        activation.activate()
    # Nobody but torch has it, as where it is made in the call.
    dist.init_process_group(
        backend, store=make(kind, rank, folder), rank=rank, world_size=world_size
    )
    ones = torch.ones(3)
    work = dist.all_reduce(ones, async_op=True)
    work.wait()
    dist.all_reduce(ones)
    parts = [torch.zeros(1, dtype=torch.bool) for _ in range(world_size)]
    dist.all_gather(parts, torch.tensor([rank == 1]))
    received = torch.zeros(2)
    if rank == 0:
        dist.send(torch.full((2,), 7.0), 1)
    elif rank == 1:
        dist.recv(received, 0)
    counts = torch.arange(rank * 3, rank * 3 + 3)
    dist.all_reduce(counts, dist.ReduceOp.BXOR)  # gloo's own
    group = dist.new_group([0, 1])
    own = torch.full((2,), float(rank + 1))
    if rank < 2:
        dist.all_reduce(own, group=group)
    dist.barrier()
    native = summary.report().native_calls > 0
    dist.destroy_process_group()
    told = [ones.tolist(), [part.item() for part in parts], received.tolist(), counts.tolist()]
    return [native, *told, own.tolist()]


def expected(rank: int, *, native: bool) -> list[Any]:
    return [
        native,
        [9.0, 9.0, 9.0],
        [False, True, False],
        [7.0, 7.0] if rank == 1 else [0.0, 0.0],
        [0 ^ 3 ^ 6, 1 ^ 4 ^ 7, 2 ^ 5 ^ 8],
        [3.0, 3.0],
    ]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        pytest.param(backend, kind, marks=[pytest.mark.extended] * (backend != shown_by))
        for kind, shown_by in {
            "file": "deepytorch",
            "five": "gloo",
            "stubs": "deepytorch",
            "of files": "deepytorch",
            "prefixed": "gloo",
            "mixed": "deepytorch",
        }.items()
        for backend in ("gloo", "deepytorch")
    ],
)
def test_native_code_serves_groups_over_any_store(kind: str, backend: str, tmp_path: Path) -> None:
    found = spawn_ranks(over, 3, kind, str(tmp_path), backend, fresh=True)
    for rank in range(2):
        assert found[rank] == expected(rank, native=True)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("gloo", "bare"),
        pytest.param("gloo", "silent", marks=pytest.mark.extended),
        pytest.param("deepytorch", "bare", marks=pytest.mark.extended),
        ("deepytorch", "silent"),
    ],
)
def test_without_what_ranks_agree_by_gloo_serves_them(
    kind: str, backend: str, tmp_path: Path
) -> None:
    found = spawn_ranks(over, 3, kind, str(tmp_path), backend, fresh=True)
    for rank in range(2):
        assert found[rank] == expected(rank, native=False)


def left_by_another(rank: int, world_size: int) -> str:
    """A hang is explained, or not, but its error is the operation's."""
    activation.activate()
    store = Five(rank_store("hang"))
    limit = timedelta(seconds=2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    dist.barrier()
    if rank == 1:
        rank_store("over").wait(["done"])
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3))
    rank_store("over").set("done", "")
    assert stores.lacks(store) == ""
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    said, _ = spawn_ranks(left_by_another, 2, fresh=True)
    assert "rank 1" in said or "rank(s) 1" in said
