"""State that a trial may change without the training noticing: saved before, put back after."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def preserved(module: nn.Module, *, scaler: Any = None) -> Iterator[None]:
    """While open, anything may run on `module`; then it is as before.

    Kept are the parameters' gradients (none inside), buffers, modes (training or not) and the state
    of a GradScaler. So are the random numbers of Python, numpy, the CPU and every accelerator. Not
    kept are the parameters' values and the modules' other attributes: a trial has no optimizer
    step.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    buffers = [
        (submodule, dict(submodule._buffers))
        for submodule in module.modules()
        if submodule._buffers
    ]
    contents = Contents(
        [buffer for _, own in buffers for buffer in own.values() if buffer is not None]
    )
    scaling = copy.deepcopy(vars(scaler)) if scaler is not None else {}
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with same_random_numbers():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for submodule, training in modes:
            submodule.training = training
        for submodule, own in buffers:
            submodule._buffers.clear()
            submodule._buffers.update(own)
        contents.put_back()
        if scaler is not None:
            vars(scaler).update(scaling)


class Contents:
    """The values of some tensors. Expanded ones, which nothing can write to, are left out."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kept = [
            (tensor, tensor.detach().clone()) for tensor in tensors if not _is_expanded(tensor)
        ]

    def put_back(self) -> None:
        """Unseen by autograd: who saved one of the tensors finds in it what he saved."""
        unseen = _unsafe_preserve_version_counter(tuple(kept for kept, _ in self._kept))
        with torch.no_grad(), unseen:
            for tensor, content in self._kept:
                tensor.copy_(content)


def _is_expanded(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


class HostNumbers:
    """The state of the host's generators: torch's, Python's and numpy's. It equals an equal one."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy.random")
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = None if numpy is None else numpy.get_state()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostNumbers):
            return NotImplemented
        return self._python == other._python and self._bytes() == other._bytes()

    def _bytes(self) -> tuple[Any, ...]:
        of_numpy = () if self._numpy is None else (self._numpy[1].tobytes(), *self._numpy[2:])
        return self._torch.numpy().tobytes(), of_numpy

    def put_back(self) -> None:
        """Let the generators go on from here."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Puts every generator back to where it was when this was opened."""
    host = HostNumbers()
    devices = torch.cuda.get_rng_state_all() if _cuda_is_used() else None
    try:
        yield
    finally:
        host.put_back()
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)


def random_numbers() -> list[torch.Tensor]:
    """The state of torch's generators; it differs after random numbers have been drawn."""
    devices = torch.cuda.get_rng_state_all() if _cuda_is_used() else []
    return [torch.get_rng_state(), *devices]


def _cuda_is_used() -> bool:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(initialized)


@contextlib.contextmanager
def dropout_off(module: nn.Module) -> Iterator[None]:
    """While open, `module` draws no random numbers, but its BatchNorms train on."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    for submodule, training in modes:
        submodule.training = training and isinstance(submodule, _BatchNorm)
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def is_transformed() -> bool:
    """Whether the call is within a transform of `torch.func`: grad, vmap, jvp and what they make.

    Values can't be looked at there, and an autograd function needs a form for each transform.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_looked_at() -> bool:
    """Whether each operation of a call is looked at, traced or transformed, but for Dynamo."""
    return bool(
        _len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or is_transformed()
    )


@contextlib.contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """While open, autograd saves tensors plainly, as if no checkpointing was around.

    Activation checkpointing counts what is saved, so that a trial inside it would be an error.
    """
    from torch._C import _autograd as autograd

    hooks: list[Any] = []
    # The stack has no other way in; torch's own compiler looks at it like this.
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
