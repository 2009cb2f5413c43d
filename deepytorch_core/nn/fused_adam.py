"""Steps of torch's fused Adam and AdamW, by one launch for all parameters of a group.

A table says on the device where parameters, gradients and state lie. The last few of a group are
kept, since gradients that are set to None mostly come back where they lay some steps before. Then a
call compares addresses and launches; else another is made, and copied without a wait.

NOTE [Known tensors]. To ask a tensor for its dtype, shape and strides takes as long as to update
some thousand elements of it. So parameters and state are asked once, and are known by their
identity and address from then on. Gradients are others in each step and are always asked, which
also tells of a parameter whose layout was changed in place.
"""

from __future__ import annotations

import math
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from deepytorch_core import guard
from deepytorch_core.base.transfers import to_device

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A GPU updates fewer in less time than the host takes for the table and the launch.
LEAST_ELEMENTS = 1 << 24
# Below, what the kernel leaves out of roots and quotients may be seen.
LEAST_EPS = 1e-15
# Groups that tables are kept for, tables of each, and decays.
_MOST_GROUPS = 64
_MOST_TABLES = 8
_MOST_CORRECTIONS = 64
# Steps of a table of corrections: decays of 0.99998 and less reach 1 within.
_MOST_STEPS = 1 << 20

_dtype: Any = Tensor.dtype
_dtype_of = _dtype.__get__

Lists = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]


# On the device: see `adam_kernels.launch`.
Table = tuple[Tensor, Tensor]


def _chunks(sizes: Sequence[int], chunk: int) -> Tensor:
    """List (row, number) of all chunks, int32."""
    counts = torch.tensor([-(-size // chunk) for size in sizes], dtype=torch.int64, device="cpu")
    rows = torch.arange(len(sizes), dtype=torch.int64, device="cpu")
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    numbers = torch.arange(len(first), dtype=torch.int64, device="cpu") - first
    return torch.stack([torch.repeat_interleave(rows, counts), numbers], 1).to(torch.int32)


class _Entry:
    """Tables of a group, and which tensors they are of. Keeps none of these alive.

    Attributes:
        is_alive: whether all are there.
        places: by addresses of gradients, those of the last steps.
        addresses: of all others.
    """

    def __init__(self, lists: Lists, steps: Sequence[Tensor], chunk: int) -> None:
        self.is_alive = True
        self.identities = _identities(lists, steps)
        self.gradients = _described(lists[1])
        self.places: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self.addresses: list[int] = []
        sizes = self.gradients[2]
        self._sizes = array("q", sizes)
        self.chunks = to_device(_chunks(sizes, chunk), lists[0][0].device)
        own = weakref.ref(self)

        def gone(_: Any) -> None:
            entry = own()
            if entry is not None:
                entry.is_alive = False

        self._references = [weakref.ref(tensor, gone) for tensor in _kept(lists, steps)]

    def table(self, gradients: tuple[int, ...], device: torch.device) -> Table:
        """The table for gradients at these addresses."""
        places = self.places.get(gradients)
        if places is None:
            columns = array("q", self.addresses)
            columns.extend(gradients)
            columns.extend(self._sizes)
            rows = torch.frombuffer(columns, dtype=torch.int64).view(6, -1).t().contiguous()
            places = to_device(rows, device)
            self.places[gradients] = places
            if len(self.places) > _MOST_TABLES:
                self.places.popitem(last=False)
        else:
            self.places.move_to_end(gradients)
        return places, self.chunks


class Known:
    """Tables of the groups that were updated last.

    Args:
        chunk: elements of a chunk.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._corrections: OrderedDict[Any, Tensor] = OrderedDict()

    def table(self, lists: Lists, steps: Sequence[Tensor], stream: int) -> Table | None:
        """The table of these tensors, or None if the kernel can't take them.

        Args:
            lists: parameters, gradients, first and second moments; there is a parameter.
            steps: the numbers of steps.
            stream: which one the kernel is launched on: others may not have waited for its copy.
        """
        key = (id(lists[0][0]), stream)
        entry = self._entries.get(key)
        if (
            entry is None
            or not entry.is_alive
            or entry.identities != _identities(lists, steps)
            or entry.gradients != _described(lists[1])
        ):
            self._entries.pop(key, None)
            if not _are_served(lists, steps):
                return None
            entry = self._entries[key] = _Entry(lists, steps, self._chunk)
            if len(self._entries) > _MOST_GROUPS:
                self._entries.popitem(last=False)
        addresses = list(map(Tensor.data_ptr, _kept(lists, steps)))
        if entry.addresses != addresses:
            # Parameters and state are asked for more where one has moved.
            if entry.addresses and not _are_served(lists, steps):
                del self._entries[key]
                return None
            entry.addresses = addresses
            entry.places.clear()
        return entry.table(tuple(map(Tensor.data_ptr, lists[1])), lists[0][0].device)

    def corrections(self, beta: float, device: torch.device, stream: int) -> Tensor | None:
        """All 1 - beta**step that differ, float32, or None if there are too many.

        torch's kernel has the same function for powers as torch's operator.
        """
        key = (beta, device, stream)
        found = self._corrections.get(key)
        if found is None:
            if not 0.0 <= beta < 1.0:
                return None
            # 1 - 2**-26 is 1, in float32.
            last = 1 + math.ceil(-26.0 / math.log2(beta)) if beta else 1
            if last > _MOST_STEPS:
                return None
            base = torch.full((1,), beta, dtype=torch.float32, device=device)
            found = 1 - base.pow(torch.arange(last + 1, dtype=torch.float32, device=device))
            self._corrections[key] = found
            if len(self._corrections) > _MOST_CORRECTIONS:
                self._corrections.popitem(last=False)
        else:
            self._corrections.move_to_end(key)
        return found


def _kept(lists: Lists, steps: Sequence[Tensor]) -> Iterable[Tensor]:
    """All but gradients."""
    return chain(lists[0], lists[2], lists[3], steps)


def _identities(lists: Lists, steps: Sequence[Tensor]) -> list[int]:
    return list(map(id, _kept(lists, steps)))


def _described(gradients: Sequence[Tensor]) -> list[list[Any]]:
    return [
        list(map(type, gradients)),
        list(map(_dtype_of, gradients)),
        list(map(Tensor.numel, gradients)),
        list(map(Tensor.stride, gradients)),
    ]


def _are_served(lists: Lists, steps: Sequence[Tensor]) -> bool:
    first = lists[0][0]
    if first.dtype not in DTYPES or len({len(tensors) for tensors in (*lists, steps)}) != 1:
        return False
    for parameter, *others in zip(*lists, strict=True):
        if not _is_plain(parameter, first) or not _is_dense(parameter):
            return False
        for other in others:
            is_alike = other.shape == parameter.shape and other.stride() == parameter.stride()
            if not is_alike or not _is_plain(other, first):
                return False
    are_counts = all(_is_scalar(step, first) for step in steps)
    return are_counts and sum(tensor.numel() for tensor in lists[0]) >= LEAST_ELEMENTS


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, each in a place of its own."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_plain(tensor: Tensor, like: Tensor) -> bool:
    """Whether it is torch's own, on the same device, and what its elements say is what it holds."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device == like.device
        and tensor.dtype == like.dtype
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


def _is_scalar(tensor: Tensor, like: Tensor) -> bool:
    is_one = tensor.numel() == 1 and tensor.dtype == torch.float32
    return is_one and type(tensor) is Tensor and tensor.device == like.device


def is_known(dtype: torch.dtype, weight_decay: float, *, is_decoupled: bool) -> bool:
    """Whether the kernel's arithmetic is torch's to the last bit, nearly everywhere.

    torch's sum of a float32 gradient and its decay has another one in one element of twenty.
    """
    return dtype != torch.float32 or not weight_decay or is_decoupled


def is_looked_at() -> bool:
    """Whether calls are traced, transformed or looked at, or torch would refuse them."""
    return bool(
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
        or guard.is_transformed()
        or torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
    )


def is_taken(
    known: Known,
    launch: Callable[..., None],
    lists: Sequence[Sequence[Tensor]],
    settings: Mapping[str, Any],
    *,
    is_decoupled: bool,
) -> bool:
    """Take a call of `torch._fused_adamw_` or `torch._fused_adam_`, unless it is torch's.

    Args:
        known: tables so far.
        launch: `adam_kernels.launch`, with what is said of neither call.
        lists: what torch's functions take before their settings.
        settings: these, by name.
        is_decoupled: whether it is the former, whose decay goes past the gradient.

    Returns whether it is done: False leaves everything as it is, and waits for nothing.
    """
    if len(lists) != 6 or settings.get("amsgrad") or lists[4] or not lists[0]:
        return False
    parameter = lists[0][0]
    if not _is_here(parameter.device):
        return False
    lr = settings["lr"]
    if isinstance(lr, Tensor):
        if lr.device.type == "cpu" and type(lr) is Tensor:
            lr = float(lr)
        elif not _is_scalar(lr, parameter):
            return False
    names = ("beta1", "beta2", "weight_decay", "eps")
    numbers = {name: settings[name] for name in names}
    if not all(isinstance(number, float | int) for number in numbers.values()):
        return False
    if numbers["eps"] < LEAST_EPS:
        return False
    if not is_known(parameter.dtype, numbers["weight_decay"], is_decoupled=is_decoupled):
        return False
    given = settings.get("grad_scale"), settings.get("found_inf")
    if not all(scalar is None or _is_scalar(scalar, parameter) for scalar in given):
        return False
    gradients, firsts, seconds = lists[1], lists[2], lists[3]
    stream = _stream(parameter.device)
    table = known.table((lists[0], gradients, firsts, seconds), lists[5], stream)
    if table is None:
        return False
    betas = float(numbers["beta1"]), float(numbers["beta2"])
    corrections = [known.corrections(beta, parameter.device, stream) for beta in betas]
    if corrections[0] is None or corrections[1] is None:
        return False
    launch(
        *table,
        parameter.dtype,
        corrections=(corrections[0], corrections[1]),
        lr=lr if isinstance(lr, Tensor) else float(lr),
        betas=betas,
        weight_decay=float(numbers["weight_decay"]),
        eps=float(numbers["eps"]),
        is_decoupled=is_decoupled,
        is_maximized=bool(settings["maximize"]),
        grad_scale=given[0],
        found_inf=given[1],
    )
    return True


def _is_here(device: torch.device) -> bool:
    """Whether kernels are launched on it without switching to it, and run at once.

    A graph would keep a table's address, and the table changes.
    """
    return (
        device.type == "cuda"
        and device.index == torch.cuda.current_device()
        and not torch.cuda.is_current_stream_capturing()
    )


def _stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream
