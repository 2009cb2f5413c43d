"""Compile policies: ways to run a captured graph, one file each, and the table of them."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from deepytorch_core.compile import registry

EAGER = "eager"
AUTO = "auto"
OFF = "off"

# In the order in which `auto` tries them.
_FILES = (
    "inductor",
    "max_autotune",
    "reduce_overhead",
    "cuda_graphs",
    "aot_eager",
    "thunder",
)

Runner = Callable[..., Any]


class Policy(ABC):
    """A way to run a graph that was captured from a module's `forward`.

    `name` is what `deepytorch.compile(model, policy=name)` calls it; `automatic` says whether
    `auto` tries it, `is_replayed` whether passes are tried as CUDA graphs where it is asked for.
    """

    name: str
    automatic: bool = False
    is_replayed: bool = False

    def why_not(self, device: torch.device) -> str | None:
        """Why it can't be used for a module on `device`; None if it can."""
        return None

    @abstractmethod
    def compile_graph(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        """Compile `graph`, which is the policy's to change.

        Args:
            graph: takes what `inputs` are examples of: tensors, and integers that stand for sizes
                that may change. Returns a tuple of tensors.
            inputs: examples; must not be written to.

        Returns a callable in place of the graph, differentiable where the graph is. May raise
        whatever it likes: the region then stays eager, and the user is told.
        """


_Class = TypeVar("_Class", bound=type[Policy])
_table: dict[str, Policy] = {}
_is_loaded = False


def register_policy(policy: _Class) -> _Class:
    """Make a subclass of `Policy` known by its `name`; a class decorator.

    Raises ValueError when the name is taken by another class.
    """
    registry.add(_table, policy, "policy", taken=(AUTO, OFF, EAGER))
    return policy


def names() -> list[str]:
    """All policies, with `auto`, `off` and `eager`."""
    _load()
    return [AUTO, OFF, EAGER, *_table]


def get(name: str) -> Policy:
    """The policy called `name`; raises ValueError listing what there is."""
    _load()
    if name not in _table:
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown compile policy {name!r}{hint}; known: {', '.join(names())}")
    return _table[name]


def automatic(device: torch.device) -> list[Policy]:
    """Return the policies that `auto` tries on `device`, in order."""
    _load()
    return [
        policy for policy in _table.values() if policy.automatic and policy.why_not(device) is None
    ]


def tried(asked: str, known: list[str] | None, device: torch.device) -> list[Policy]:
    """Policies of a region: the one asked for, else those known to be good, else all."""
    if asked != AUTO:
        return [get(asked)]
    return automatic(device) if known is None else [get(name) for name in known if name != EAGER]


def _load() -> None:
    global _is_loaded
    if not _is_loaded:
        _is_loaded = True
        for file in _FILES:
            importlib.import_module(f"{__name__}.{file}")
