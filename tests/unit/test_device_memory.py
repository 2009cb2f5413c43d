"""Registered memory on GPUs where there are none: errors name the way out, and who is asked."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepytorch_core import _core
from deepytorch_core.base import config
from deepytorch_core.c10d import device_memory, registered


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_core, "why_no_device_memory", lambda: "GPU kernels absent: built so")


@pytest.mark.parametrize(
    ("missing", "said"),
    [(no_gpu, "torch has no CUDA device here"), (no_kernels, "GPU kernels absent: built so")],
)
def test_where_there_is_none_the_error_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, missing: Any, said: str
) -> None:
    missing(monkeypatch)
    for attempt in (
        device_memory.mem_pool,
        device_memory.usage,
        lambda: device_memory.empty(3),
        lambda: registered.empty(3, device="cuda"),
        lambda: registered.empty([3, 2], device=torch.device("cuda", 0)),
        lambda: device_memory.Routing(torch.device("cuda", 0)),
    ):
        with pytest.raises(RuntimeError, match=rf"can't be had: {said}; use torch\.empty"):
            attempt()
    assert not device_memory.GroupMemory().is_there()
    assert device_memory.trim() == 0


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match=r"for cuda devices, not for .*registered\.empty makes it"):
        device_memory.mem_pool(device)


def test_a_negative_size_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match="negative size"):
        registered.empty(3, -1, device="cuda")


def test_tensors_elsewhere_are_not_registered() -> None:
    assert not device_memory.is_registered(torch.ones(3))
    assert not device_memory.is_registered(torch.ones(3, device="meta"))
    assert not device_memory.is_registered(torch.ones(3).to_sparse())


def test_groups_give_it_to_who_asks_for_native_collectives_on_one_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "spans_nodes", lambda: False)
    native = config.Options(collectives="native")
    assert device_memory.for_groups(native) is not None
    assert device_memory.for_groups(config.Options()) is None
    assert device_memory.for_groups(config.Options(collectives="stock")) is None
    assert device_memory.for_groups(config.Options(collectives="native", enabled=False)) is None
    monkeypatch.setattr(config, "spans_nodes", lambda: True)
    assert device_memory.for_groups(native) is None


def test_torch_finds_the_cores_functions() -> None:
    core = ctypes.CDLL(_core.__file__)
    allocate, free = core.deepytorch_device_allocate, core.deepytorch_device_free
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    no_such_device = 4711
    assert allocate(1 << 20, no_such_device, None) is None
    free(1 << 20, 1 << 20, no_such_device, None)
    with pytest.raises(RuntimeError):
        _core.device_memory(no_such_device)


class FakePool:
    def __init__(self, active: list[Any]) -> None:
        self._active = active

    def use_count(self) -> int:
        return 1 + self._active.count(self)


class FakePools:
    """torch.cuda as far as pools go; "cuda" tensors are on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: int = 0) -> None:
        self.made: list[Any] = []
        self.active: list[Any] = []
        self.emptied = 0
        self.fails = fails
        self.capturing = False
        self.asked_on: list[Any] = []
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "init", lambda: None)
        monkeypatch.setattr(cuda, "current_device", lambda: 1)
        monkeypatch.setattr(cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cuda, "MemPool", self.make)
        monkeypatch.setattr(cuda, "use_mem_pool", self.use)
        monkeypatch.setattr(cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(device_memory, "_torch_allocator", lambda: self)
        monkeypatch.setattr(_core, "why_no_device_memory", lambda: "")
        monkeypatch.setattr(
            _core, "device_memory", lambda index: {"chunk_bytes": 100 - 60 * self.emptied}
        )
        for name in ("_asked", "_own"):
            monkeypatch.setattr(device_memory, name, {})
        monkeypatch.setattr(device_memory, "_devices", set())
        monkeypatch.setattr(device_memory, "_retired", [])
        monkeypatch.setattr(device_memory, "_made", weakref.WeakSet())
        monkeypatch.setattr(atexit, "register", lambda function: function)
        monkeypatch.setattr(torch, "empty", self.empty)

    def allocator(self) -> Any:
        return self

    def make(self, allocator: Any) -> Any:
        assert allocator is self
        self.made.append(FakePool(self.active))
        return self.made[-1]

    @contextlib.contextmanager
    def use(self, pool: Any, device: int | None = None) -> Iterator[None]:
        assert pool not in self.active, "torch refuses that"
        self.active.append(pool)
        try:
            yield
        finally:
            self.active.remove(pool)

    def empty_cache(self) -> None:
        self.emptied += 1

    def empty(self, size: Any, *, dtype: Any, device: Any) -> Any:
        self.asked_on.append((list(self.active), device))
        if self.fails:
            self.fails -= 1
            raise torch.cuda.OutOfMemoryError
        return torch.zeros(size, dtype=dtype)


def test_each_device_has_one_pool_of_the_programs_and_one_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakePools(monkeypatch)
    pool: Any = device_memory.mem_pool()
    assert device_memory.mem_pool("cuda:1") == pool
    other: Any = device_memory.mem_pool(0)
    assert other != pool
    with torch.cuda.use_mem_pool(pool):
        made = device_memory.empty(2, 3, dtype=torch.int64)
        assert made.shape == (2, 3)
        assert device_memory.empty([4], device="cuda:1").dtype == torch.float32
    ((first, where), (second, _)) = fake.asked_on
    assert where == torch.device("cuda", 1)
    assert first == second != [pool]
    assert first[0] == pool
    assert len(fake.made) == 3
    assert device_memory.trim() == 2 * 60
    assert device_memory.mem_pool() != pool


def test_pools_go_only_where_torch_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePools(monkeypatch)
    routing = device_memory.Routing(torch.device("cuda", 1))
    own = fake.made[0]
    with routing():
        assert fake.active == [own]
    del routing
    assert device_memory._retired == [own]
    pool: Any = device_memory.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        device_memory.release_retired()
        with pytest.raises(RuntimeError, match="call it outside"):
            device_memory.trim()
    fake.capturing = True
    device_memory.release_retired()
    with pytest.raises(RuntimeError, match="call it outside"):
        device_memory.trim()
    assert device_memory._retired == [own]
    fake.capturing = False
    device_memory.release_retired()
    assert not device_memory._retired


def test_at_the_end_pools_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePools(monkeypatch)
    pool = device_memory.mem_pool()
    before = sys.getrefcount(pool)
    device_memory._leave_to_the_system()
    assert sys.getrefcount(pool) == before + 1
    assert len(fake.made) == 1


def test_torchs_cache_makes_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePools(monkeypatch, fails=1)
    device_memory.empty(3)
    assert fake.emptied == 1
    fake.fails = 2
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device_memory.empty(3)
    assert fake.emptied == 2


def test_what_a_graph_allocates_is_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePools(monkeypatch)
    fake.capturing = True
    with pytest.raises(RuntimeError, match="make the tensor before"):
        device_memory.empty(3)
    device_memory.GroupMemory().allocate(3, torch.float32, torch.device("cuda", 1))
    assert fake.asked_on == [([], torch.device("cuda", 1))]
    fake.capturing = False
    device_memory.GroupMemory().allocate(3, torch.float32, torch.device("cuda", 1))
    assert fake.asked_on[1] == ([fake.made[0]], torch.device("cuda", 1))
