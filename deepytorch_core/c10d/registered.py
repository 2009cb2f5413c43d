"""Registered memory: tensors that collectives of local ranks use without copying them.

Ordinary tensors travel through a group's shared slots. Registered ones lie in memory that the other
ranks of the node have mapped, so they read and write them in place. Ranks may mix both kinds as
they like. The memory is the process's, not a group's: tensors stay valid when the group is gone.
Freed memory is kept for the next tensor until `trim`. On GPUs see
`deepytorch_core.c10d.device_memory`.

NOTE [DDP's buckets] torch's Reducer allocates its buckets twice: when it is constructed, and once
more in the forward pass after the first backward (`Reducer._rebuild_buckets`). Both run in the
Python thread, so a dispatch mode sees `aten.empty` there, and gives registered memory in its place.
These two methods of the class are the seam; nothing else of DDP changes, and no byte more is used.
On GPUs they run with the allocations of their thread routed into a pool of registered memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from deepytorch_core.base import config
from deepytorch_core.base.console import say_once
from deepytorch_core.base.patching import Patches
from deepytorch_core.c10d import adapter, device_memory

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# The reducers whose next buckets are placed, and how.
_placed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_asked: ContextVar[bool] = ContextVar("asked", default=False)
# Activation's patches: while they are in force buckets are placed unasked.
_automatic: Patches | None = None
# The patches that place_ddp_buckets put in place without activation.
_explicit = Patches()


def empty(
    *shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A contiguous tensor in registered memory, its content undefined, like `torch.empty`.

    Args:
        shape: the sizes, as integers or as one sequence; none for a scalar.
        dtype: the element type; default: torch's default.
        group: a group that deepytorch serves; default: the default group. Other groups of this
            process make use of the memory just as well. On GPUs no group is needed.
        device: cpu, the default, or a CUDA device.

    Raises ValueError for a negative size. Raises RuntimeError when `group` has no registered
    memory, because it is not deepytorch's for CPU tensors. It does so too when the machine has no
    more, or there is none on GPUs.
    """
    import torch

    sizes: list[int] = []
    for part in shape:
        sizes.extend([part] if isinstance(part, int) else part)
    if any(size < 0 for size in sizes):
        raise ValueError(f"empty: the shape {sizes} has a negative size")
    if device is not None and torch.device(device).type != "cpu":
        return device_memory.empty(sizes, dtype=dtype, device=device)
    backend = _backend_of(_default(group))
    if backend is None:
        raise RuntimeError(
            "registered memory needs a group whose CPU tensors deepytorch serves: initialise with "
            'backend "deepytorch" or "cpu:deepytorch", or use torch.empty'
        )
    made = backend.allocate_tensor(
        math.prod(sizes), dtype=dtype or torch.get_default_dtype(), device=torch.device("cpu")
    )
    tensor: torch.Tensor = made.view(sizes)
    return tensor


def is_registered(tensor: torch.Tensor, group: ProcessGroup | None = None) -> bool:
    """Whether collectives of `group` (default: the default group) find `tensor` registered.

    True for a dense tensor whose elements lie in this process's registered memory, when
    deepytorch serves the group natively. All its elements: a view counts by where it points. On a
    GPU a new tensor may become so within a second.
    """
    import torch

    if tensor.device.type == "cuda":
        return _serves_gpus(_default(group)) and device_memory.is_registered(tensor)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    if not _is_native(_backend_of(_default(group))):
        return False
    from deepytorch_core import _core

    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return _core.is_registered(tensor.data_ptr(), elements * tensor.element_size())


def trim() -> int:
    """Give free registered memory back to the system and the GPUs; returns how many bytes.

    Costs the next tensors their page faults; worth it after a phase that needed more.
    """
    from deepytorch_core import _core

    return _core.trim_registered_memory() + device_memory.trim()


@contextlib.contextmanager
def place_ddp_buckets() -> Iterator[None]:
    """DistributedDataParallel modules made inside have their gradient buckets registered.

    Also those of the later rebuild. With `import deepytorch` in force all do, without this; those
    on GPUs only with collectives=native, since nobody has timed whole trainings with it yet. For
    modules on a group that deepytorch serves natively; others keep ordinary buckets, and a line
    says so.
    """
    _arm(_explicit)
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def install(patches: Patches) -> None:
    """Place the buckets of every DDP module made from now on, until `patches` are undone."""
    global _automatic
    _automatic = patches
    _arm(patches)


def _arm(patches: Patches) -> None:
    from torch._C._distributed_c10d import Reducer

    why, option = "DDP's buckets lie in memory that all ranks map", "DEEPYTORCH_COLLECTIVES=stock"
    patches.replace(Reducer, "__init__", _construct, why=why, option=option)
    patches.replace(Reducer, "_rebuild_buckets", _rebuild, why=why, option=option)


def _construct(original: Callable[..., None]) -> Callable[..., None]:
    def construct(reducer: Any, *args: Any, **kwargs: Any) -> None:
        place = None
        if _asked.get() or (_automatic is not None and _automatic.active):
            parameters = args[0] if args else kwargs.get("params", ())
            group = args[3] if len(args) > 3 else kwargs.get("process_group")
            place = _place_for_buckets(parameters, group)
        if place is None:
            original(reducer, *args, **kwargs)
            return
        with place():
            original(reducer, *args, **kwargs)
        _placed[reducer] = place

    return construct


def _rebuild(original: Callable[..., bool]) -> Callable[..., bool]:
    def rebuild_buckets(reducer: Any) -> bool:
        place = _placed.get(reducer) if _placed else None
        if place is None:
            return original(reducer)
        with place():
            rebuilt = original(reducer)
        if rebuilt:  # happens once
            _placed.pop(reducer, None)
            del place
            device_memory.release_retired()
        return rebuilt

    return rebuild_buckets


def _place_for_buckets(parameters: Sequence[torch.Tensor], group: Any) -> Any:
    """Makes the context in which these parameters' buckets are allocated; None: none is needed."""
    reason = None
    collectives = config.current().collectives
    devices = {parameter.device for parameter in parameters}
    if collectives == "stock":
        reason = "collectives=stock"
    elif any(device.type not in ("cpu", "cuda") for device in devices) or len(devices) != 1:
        reason = "the module is not on the CPU, nor on one GPU"
    elif (device := devices.pop()).type == "cuda":
        if not _asked.get() and collectives != "native":
            return None
        if not _serves_gpus(group):
            reason = "deepytorch does not serve its group's GPU tensors"
        elif not device_memory.GroupMemory().is_there():
            reason = "there is no registered memory on GPUs"
        else:
            return device_memory.Routing(device)
    elif not _is_native(backend := _backend_of(group)):
        reason = "deepytorch does not serve its group's CPU tensors natively"
    else:
        return functools.partial(_mode(), backend)
    if _asked.get():
        say_once(f"the buckets of a DDP module stay in ordinary memory: {reason}", level="warning")
    return None


def _default(group: ProcessGroup | None) -> Any:
    from torch.distributed import distributed_c10d as c10d

    return c10d._get_default_group() if group is None else group


def _backend_of(group: Any, device_type: str = "cpu") -> Any:
    """This group's backend of ours for tensors of a device; None if it has none."""
    import torch

    compiled = sys.modules.get(adapter.MODULE_NAME)
    if compiled is None:
        return None
    try:
        backend = group._get_backend(torch.device(device_type))
    except RuntimeError:
        return None  # the group serves no such tensors
    return backend if isinstance(backend, compiled.Backend) else None


def _serves_gpus(group: Any) -> bool:
    return config.current().collectives != "stock" and _backend_of(group, "cuda") is not None


def _is_native(backend: Any) -> bool:
    import torch

    return backend is not None and bool(backend.supports_tensor_alloc(torch.device("cpu")))


@functools.cache
def _mode() -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    """The dispatch mode's class; made late, as torch may be just being imported."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class PlaceBuckets(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, backend: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._backend = backend

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.ops.aten.empty.memory_format and _is_bucket(args[0], kwargs):
                try:
                    return self._backend.allocate_tensor(
                        args[0][0], dtype=kwargs["dtype"], device=torch.device("cpu")
                    )
                except RuntimeError as error:
                    say_once(
                        f"a DDP bucket stays in ordinary memory: {error}",
                        level="warning",
                    )
            return func(*args, **kwargs)

    return PlaceBuckets


def _is_bucket(sizes: Sequence[int], kwargs: dict[str, Any]) -> bool:
    """A bucket is flat and holds gradients; the Reducer's bookkeeping is of integers."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    return (
        len(sizes) == 1
        and dtype is not None
        and (dtype.is_floating_point or dtype.is_complex)
        and (device is None or device.type == "cpu")
        and not kwargs.get("pin_memory")
    )
