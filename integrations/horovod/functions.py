"""Models, optimizers and objects of one rank given to all."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deepytorch.integrations.common.contract import IntegrationError
from deepytorch.integrations.common.horovod_common import HorovodInternalError
from deepytorch.integrations.horovod import _requests
from deepytorch.integrations.horovod._world import (
    ProcessSet,
    default_device,
    global_process_set,
    rank,
)
from deepytorch.integrations.horovod.mpi_ops import allgather, broadcast_
from deepytorch.integrations.horovod.optimizer import parameters_of, step_alone


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any] | torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's parameters, in place.

    Args:
        params: a `state_dict()`, the pairs of `named_parameters()`, or `parameters()`. What is no
            tensor stays.
        root_rank: the global rank whose values are taken.
        process_set: the ranks that take part.

    Raises ValueError for another type, HorovodInternalError, on every rank, when names, shapes or
    dtypes differ between ranks.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable):
        pairs = [item if isinstance(item, tuple) else ("", item) for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    named = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    _check_same([f"{name} {list(t.shape)} {t.dtype}" for name, t in named], process_set)
    _broadcast_all([tensor.detach() for _, tensor in named], root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state: momenta, step counts, learning rates.

    The other ranks' optimizers need not have made a step. One that has no state yet has gradients
    of zero afterwards. If that is the root's, it has made a step with them, as in Horovod. Its
    weight decay has acted once then, and its step count is 1.

    Args:
        optimizer: for parameters of the same shapes on every rank.
        root_rank: the global rank whose state is taken.
        model: names the embeddings whose gradients are sparse.
        process_set: the ranks that take part.
    """
    is_root = rank() == root_rank
    is_fresh = not optimizer.state_dict()["state"] and not isinstance(optimizer, torch.optim.LBFGS)
    if is_fresh:
        _zero_gradients(optimizer, model)
        if is_root:
            step_alone(optimizer)
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

    told = (is_fresh, _mapped(optimizer.state_dict(), outline)) if is_root else None
    root_was_fresh, state = broadcast_object(told, root_rank, process_set=process_set)
    if not is_root:
        state = _mapped(state, fill)
    _broadcast_all(tensors, root_rank, process_set)
    if not is_root:
        if is_fresh and root_was_fresh:
            step_alone(optimizer)
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
    data, error = _to_bytes(obj, device) if is_root else (_nothing(device), None)
    count = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    broadcast_(count, root_rank, name, process_set)
    if error is not None:
        raise error
    if not count.item():
        raise HorovodInternalError(f"broadcast_object: rank {root_rank} could not pickle its own")
    if not is_root:
        data = data.new_empty(int(count.item()))
    broadcast_(data, root_rank, name, process_set)
    return obj if is_root else _from_bytes(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, by rank; they must pickle."""
    data, error = _to_bytes(obj, default_device(process_set))
    everything, counts = process_set.rounds.begin(
        lambda: _requests.all_gather(data), name, asynchronous=False
    ).wait()
    if error is not None:
        raise error
    if 0 in counts:
        culprit = (process_set.ranks or [])[counts.index(0)]
        raise HorovodInternalError(f"allgather_object: rank {culprit} could not pickle its own")
    return [_from_bytes(part) for part in torch.split(everything, counts)]


def _broadcast_all(tensors: list[torch.Tensor], root_rank: int, process_set: ProcessSet) -> None:
    if tensors:
        process_set.rounds.begin(
            lambda: _requests.broadcast(tensors, root_rank, process_set), None, asynchronous=False
        ).wait()


def _zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    embeddings = [m for m in model.modules() if getattr(m, "sparse", False)] if model else []
    is_sparse = {parameter for module in embeddings for parameter in module.parameters()}
    takes_sparse = isinstance(optimizer, torch.optim.SGD)
    for parameter in parameters_of(optimizer):
        if parameter.requires_grad:
            zeros = torch.zeros_like(parameter)
            sparse = isinstance(optimizer, torch.optim.SparseAdam) or (
                takes_sparse and parameter in is_sparse
            )
            parameter.grad = zeros.to_sparse() if sparse else zeros


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


def _to_bytes(obj: Any, device: torch.device) -> tuple[torch.Tensor, Exception | None]:
    """The pickled object; nothing and the error where that fails, which the others must know."""
    try:
        data = _pickled(obj)
    except Exception as error:
        return _nothing(device), error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), None


def _pickled(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj)
    except Exception as error:
        # It takes functions and classes that can't be imported by name too; Horovod needs it.
        if importlib.util.find_spec("cloudpickle") is None:
            error.add_note("pip install cloudpickle, where Horovod's own library would take this")
            raise
    data: bytes = importlib.import_module("cloudpickle").dumps(obj)
    return data


def _nothing(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
