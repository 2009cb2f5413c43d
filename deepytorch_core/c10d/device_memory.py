"""Registered memory on GPUs: what kernels of other ranks write results into where they lie.

The memory comes in chunks that every rank of the node maps, some time after they are made and
without anybody waiting for it. PyTorch's own caching allocator hands it out, as a
`torch.cuda.MemPool` over two functions of the core. So streams, `record_stream` and caching are as
with any other tensor. A collective finds by itself whether a tensor is registered, and ranks may
mix both kinds as they like. With `error_handling=raise` collectives treat it as ordinary memory.
Otherwise a rank that goes on after a failure might free it while another's kernel is still writing.

NOTE [Pools] torch refuses to route allocations into a pool twice at the same time, in whatever
threads. So what we allocate for others comes from pools of our own, one thread at a time. The pool
that a program asks for is the program's alone. Nor may a pool's last reference go while allocations
are routed or a graph is captured: torch would end the process. So they go in `trim` and where DDP
has its buckets, not when Python happens to collect them.

Collectives gain by it (docs/results/collectives-2-h100.jsonl). Nobody has timed whole trainings on
it yet, so it is for who asks: by these functions, or with `collectives=native` (FSDP2's buffers,
DDP's buckets).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deepytorch_core.base import config

if TYPE_CHECKING:
    import torch

_WAY_OUT = "use torch.empty, whose tensors collectives take as well"

# By device, what programs asked for and what is our own; and the devices that ever had a pool.
_asked: dict[int, Any] = {}
_own: dict[int, Any] = {}
_devices: set[int] = set()
_retired: list[Any] = []
_made: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()
_allocator: Any = None


def mem_pool(device: torch.device | str | int | None = None) -> torch.cuda.MemPool:
    """The pool of registered memory on a GPU, for `torch.cuda.use_mem_pool`.

    Memory that the context's thread allocates inside it is registered. There is one pool per
    device, made at the first call. It keeps the memory it has cached while a program holds it.

    Args:
        device: a CUDA device; default: the current one.

    Raises RuntimeError where there is no such memory: torch without CUDA, no GPU, or a build
    without GPU kernels. ValueError for a device that is not a GPU.
    """
    index = _index_of(device)
    with _lock:
        pool: torch.cuda.MemPool = _pool_in(_asked, index)
    return pool


def empty(
    *shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> torch.Tensor:
    """A contiguous tensor in registered memory of a GPU, its content undefined.

    Like `torch.empty`; raises what `mem_pool` does, and RuntimeError while a graph captures the
    current stream, since the memory would not be the graph's.
    """
    import torch

    sizes: list[int] = []
    for part in shape:
        sizes.extend([part] if isinstance(part, int) else part)
    index = _index_of(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "registered device memory can't be made while a graph captures the stream: make the "
            "tensor before"
        )
    place = torch.device("cuda", index)
    try:
        with _allocating(index):
            return torch.empty(sizes, dtype=dtype, device=place)
    except torch.cuda.OutOfMemoryError:
        # While allocations are routed torch's allocator gives nothing back that it only keeps.
        torch.cuda.empty_cache()
    with _allocating(index):
        return torch.empty(sizes, dtype=dtype, device=place)


def is_registered(tensor: torch.Tensor) -> bool:
    """Whether every other process that shares a group with this one has mapped a CUDA tensor.

    All its elements: a view counts by where it points. A new tensor may become so within a second.
    """
    import torch

    if tensor.device.type != "cuda" or tensor.layout != torch.strided or _why_not():
        return False
    from deepytorch_core import _core

    elements = 0
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in steps)
    bytes_ = elements * tensor.element_size()
    return _core.is_shared_on_device(tensor.data_ptr(), bytes_, tensor.get_device())


def usage(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Bytes of registered memory on a GPU: `chunk_bytes` that torch's allocator holds, and
    `shared_bytes`, which every peer process has mapped by now. Raises what `mem_pool` does."""
    index = _index_of(device)
    from deepytorch_core import _core

    now = _core.device_memory(index)
    return {"chunk_bytes": now["chunk_bytes"], "shared_bytes": now["shared_bytes"]}


def trim() -> int:
    """Give free registered memory of all GPUs back; returns how many bytes that were.

    Pools that the program still holds keep what they have cached. Raises RuntimeError inside
    `torch.cuda.use_mem_pool` and while a graph captures the current stream.
    """
    import torch

    with _lock:
        if not _devices:
            return 0
        if _is_routing():
            raise RuntimeError(
                "trim: not while allocations go to a memory pool or a graph captures the stream: "
                "call it outside"
            )
        before = _chunk_bytes(_devices)
        # Their pools go with the last reference, and what is in use of them when it is freed.
        _asked.clear()
        _own.clear()
        _retired.clear()
        torch.cuda.empty_cache()
        return max(0, before - _chunk_bytes(_devices))


class Routing:
    """Contexts inside which what the thread allocates on a GPU is registered, in a pool of its own.

    Its free memory goes back to the GPU with this object, at the next `release_retired`.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = _index_of(device)
        with _lock:
            self._pool = _pool_in({}, self._index)

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        import torch

        return torch.cuda.use_mem_pool(self._pool, device=self._index)

    def __del__(self) -> None:
        if hasattr(self, "_pool") and _retired is not None:  # None at the interpreter's end
            _retired.append(self._pool)


def release_retired() -> None:
    """Let the pools of Routings that are gone go too, if now is a time for that."""
    with _lock:
        if _retired and not _is_routing():
            _retired.clear()


class GroupMemory:
    """Memory on GPUs that a group's backend gives to those who ask for it."""

    def is_there(self) -> bool:
        return not _why_not()

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        import torch

        # Memory that a graph allocates while it captures has to be the graph's.
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(size, dtype=dtype, device=device)
        return empty(size, dtype=dtype, device=device)


def for_groups(options: config.Options) -> GroupMemory | None:
    """The memory that groups give away; None: they leave that to NCCL.

    It is for a job of one node that asks for native collectives. Elsewhere NCCL carries out the
    operations that would use it, and NCCL's own memory is better for them.
    """
    if not options.enabled or options.collectives != "native" or config.spans_nodes():
        return None
    return GroupMemory()


@contextlib.contextmanager
def _allocating(index: int) -> Iterator[None]:
    import torch

    with _lock, torch.cuda.use_mem_pool(_pool_in(_own, index), device=index):
        yield


def _is_routing() -> bool:
    import torch

    if torch.cuda.is_current_stream_capturing():
        return True
    # A context that a pool is used in holds it as well.
    return any(pool.use_count() > 1 for pool in [*_asked.values(), *_own.values(), *_retired])


def _pool_in(pools: dict[int, Any], index: int) -> Any:
    import torch

    pool = pools.get(index)
    if pool is None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        _devices.add(index)
        with torch.cuda.device(index):
            pool = pools[index] = torch.cuda.MemPool(_torch_allocator().allocator())
        if not _made:
            atexit.register(_leave_to_the_system)
        _made.add(pool)
    return pool


def _leave_to_the_system() -> None:
    """At the program's end nothing is freed, as with torch's other memory.

    That would wait for the GPU, where a kernel may hang for good.
    """
    for pool in list(_made):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


def _torch_allocator() -> Any:
    """The core as torch's allocators call it. Never given up: pools may outlive their objects."""
    global _allocator
    if _allocator is None:
        import torch

        from deepytorch_core import _core

        _allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _core.__file__, "deepytorch_device_allocate", "deepytorch_device_free"
        )
    return _allocator


def _chunk_bytes(devices: set[int]) -> int:
    from deepytorch_core import _core

    return sum(_core.device_memory(index)["chunk_bytes"] for index in devices)


def _index_of(device: torch.device | str | int | None) -> int:
    import torch

    if device is not None and not isinstance(device, int):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(
                f"registered device memory is for cuda devices, not for {device}: "
                "deepytorch_core.registered.empty makes it for the CPU"
            )
        device = device.index
    if why := _why_not():
        raise RuntimeError(f"registered device memory can't be had: {why}; {_WAY_OUT}")
    return torch.cuda.current_device() if device is None else device


def _why_not() -> str:
    """Why this process has no registered device memory; empty: it can have."""
    import torch

    if not torch.cuda.is_available():
        return "torch has no CUDA device here"
    from deepytorch_core import _core

    return _core.why_no_device_memory()
