"""What a module's Python code may go by: everything that a replayed pass has frozen.

A pass that is replayed runs no Python, so it is the same only while all of this is the same. What
can't be seen are globals and closures of functions.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""What is compared by value; everything else is who it is."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Objects within objects that are looked into, such as dictionaries of a model's configuration.
_DEPTH = 3
# Of a list or dictionary; longer ones are data rather than settings.
_MOST_ITEMS = 256


def hooked(root: nn.Module) -> str | None:
    """The name of a module inside with hooks, which a replay would not run."""
    for one in root.modules():
        if one is not root and any(vars(one).get(hooks) for hooks in _HOOKS):
            found: str = next(name for name, other in root.named_modules() if other is one)
            return found
    return None


def state_of(root: nn.Module) -> tuple[Hashable, ...]:
    """Modules' attributes, the plain values in them, and where parameters and buffers lie."""
    facts: list[Hashable] = [
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    ]
    seen: set[int] = set()
    for module in root.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks") or "_hooks_" in name:
                continue  # the root's run outside of its pass, and others have none
            if isinstance(value, PLAIN):
                facts.append((name, value))
            elif name == "forward" or "deepytorch" in name:
                facts.append(id(value))  # ours count calls; what they compute stays
            else:
                _look_into(value, facts, seen, _DEPTH)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                facts.append((tensor.data_ptr(), tensor.requires_grad, tensor.dtype))
    return tuple(facts)


def _look_into(value: Any, facts: list[Hashable], seen: set[int], depth: int) -> None:
    facts.append(id(value))
    if id(value) in seen or isinstance(value, nn.Module | torch.Tensor | type):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items: Any = value.values()
    elif isinstance(value, list | tuple | set):
        items = value
    else:
        items = getattr(value, "__dict__", {}).values()
    facts.append(len(items))
    if len(items) > _MOST_ITEMS:
        return
    for item in items:
        if isinstance(item, PLAIN):
            facts.append(item)
        elif depth:
            _look_into(item, facts, seen, depth - 1)


def host_random_numbers() -> tuple[Any, ...]:
    """The state of all generators on the host; it differs after one was asked."""
    numpy = sys.modules.get("numpy")
    other = numpy.random.get_state() if numpy is not None else ("", [], 0)
    return bytes(torch.get_rng_state().tolist()), random.getstate(), other[2], bytes(other[1])


Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, int]]]


def attributes_of(root: nn.Module) -> Attributes:
    """What modules' attributes are, and how long lists among them."""
    return [
        (one, dict(vars(one)), {n: len(v) for n, v in vars(one).items() if isinstance(v, list)})
        for one in root.modules()
    ]


def put_back(attributes: Attributes) -> None:
    """Undo what passes have done to attributes since `attributes_of`."""
    for module, values, lengths in attributes:
        vars(module).clear()
        vars(module).update(values)
        for name, length in lengths.items():
            del values[name][length:]
