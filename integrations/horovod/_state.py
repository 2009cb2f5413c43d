"""Models, optimizers and objects of one rank given to all."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deepytorch.integrations._contract import IntegrationError
from deepytorch.integrations._horovod_common import HorovodInternalError

from ._fusion import Fusion
from ._ops import allgather, broadcast_
from ._world import ProcessSet, default_device, global_process_set, rank


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's parameters, in place.

    Args:
        params: a `state_dict()`, or the pairs of `named_parameters()`. What is no tensor stays.
        root_rank: the global rank whose values are taken.
        process_set: the ranks that take part.

    Raises ValueError for another type, HorovodInternalError, on every rank, when names, shapes or
    dtypes differ between ranks.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable):
        pairs = list(params)
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    named = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    _check_same([f"{name} {list(t.shape)} {t.dtype}" for name, t in named], process_set)
    tensors = [tensor.detach() for _, tensor in named]
    Fusion(tensors).broadcast(tensors, root_rank, process_set).wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state: momenta, step counts, learning rates.

    The other ranks' optimizers need not have made a step.

    Args:
        optimizer: for parameters of the same shapes on every rank.
        root_rank: the global rank whose state is taken.
        model: not needed, there for scripts that give it.
        process_set: the ranks that take part.
    """
    del model
    is_root = rank() == root_rank
    device = _device_of(optimizer)
    tensors: list[torch.Tensor] = []

    def outline(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Outline(leaf.shape, leaf.dtype, leaf.device.type == "cpu")

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, _Outline):
            return leaf
        tensors.append(leaf.empty(device))
        return tensors[-1]

    state = _mapped(optimizer.state_dict(), outline) if is_root else None
    state = broadcast_object(state, root_rank, process_set=process_set)
    if not is_root:
        state = _mapped(state, fill)
    Fusion(tensors).broadcast(tensors, root_rank, process_set).wait()
    if not is_root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, on every rank; it must pickle. The root gets its own back."""
    device = default_device(process_set)
    is_root = rank() == root_rank
    data = _to_bytes(obj, device) if is_root else torch.empty(0, dtype=torch.uint8, device=device)
    count = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    broadcast_(count, root_rank, name, process_set)
    if not is_root:
        data = data.new_empty(int(count.item()))
    broadcast_(data, root_rank, name, process_set)
    return obj if is_root else _from_bytes(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, by rank; they must pickle."""
    data = _to_bytes(obj, default_device(process_set))
    size = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    sizes = allgather(size, name, process_set)
    parts = torch.split(allgather(data, name, process_set), sizes.tolist())
    return [_from_bytes(part) for part in parts]


class _Outline:
    """A tensor without its values."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, on_cpu: bool) -> None:
        self.shape, self.dtype, self.on_cpu = shape, dtype, on_cpu

    def empty(self, device: torch.device) -> torch.Tensor:
        # Step counts stay on the CPU beside parameters on a GPU.
        where = torch.device("cpu") if self.on_cpu else device
        return torch.empty(self.shape, dtype=self.dtype, device=where)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dictionaries, lists and tuples with every leaf changed."""
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, change) for part in value)
    return change(value)


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device
    raise IntegrationError("horovod: broadcast_optimizer_state: the optimizer has no parameters")


def _check_same(lines: list[str], process_set: ProcessSet) -> None:
    device = default_device(process_set)
    checked = [zlib.crc32("\n".join(lines).encode())]
    code = torch.tensor(checked, dtype=torch.int64, device=device)
    if len(set(allgather(code, process_set=process_set).tolist())) == 1:
        return
    all_lines = allgather_object(lines, process_set=process_set)
    first = set(all_lines[0])
    said = [
        f"rank {(process_set.ranks or [])[member]}: {', '.join(sorted(set(theirs) ^ first)[:4])}"
        for member, theirs in enumerate(all_lines)
        if theirs != all_lines[0]
    ]
    raise HorovodInternalError(
        "broadcast_parameters: parameters differ between ranks (name, shape, dtype), against "
        f"the first rank: {'; '.join(said)}"
    )


def _to_bytes(obj: Any, device: torch.device) -> torch.Tensor:
    file = io.BytesIO()
    pickle.dump(obj, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
