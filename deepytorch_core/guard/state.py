"""What a trial may change without the training noticing: saved before, put back after."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def preserved(module: nn.Module, *, scaler: Any = None) -> Iterator[None]:
    """While open, anything may run on `module`; then it is as before.

    Kept are the parameters' gradients (none inside), buffers, modes (training or not), the random
    numbers of Python, the CPU and every accelerator, and the state of a GradScaler. Not kept are
    the parameters' values and the modules' other attributes: a trial has no optimizer step.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    modes = [(one, one.training) for one in module.modules()]
    buffers = [(one, dict(one._buffers)) for one in module.modules() if one._buffers]
    contents = [
        (buffer, buffer.detach().clone())
        for _, own in buffers
        for buffer in own.values()
        if buffer is not None
    ]
    scaling = copy.deepcopy(vars(scaler)) if scaler is not None else {}
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with same_random_numbers():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for one, training in modes:
            one.training = training
        for one, own in buffers:
            one._buffers.clear()
            one._buffers.update(own)
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)
        if scaler is not None:
            vars(scaler).update(scaling)


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Puts every generator back to where it was when this was opened."""
    python, host = random.getstate(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if _cuda_is_used() else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(host)
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
    modes = [(one, one.training) for one in module.modules()]
    for one, training in modes:
        one.training = training and isinstance(one, _BatchNorm)
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training


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
