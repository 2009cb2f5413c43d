"""Hooks of transformers, peft and TRL on parts of their own models, which a replay may hold.

One kind collects router logits, hidden states and attentions. The library puts them on once such an
output is asked for, and they stay. They collect only where the model's own pass has begun to, and
are gone through within it. So they are no reason against replaying that pass, nor, while nothing of
theirs is collected, against code without them.

The other kind has embeddings require gradients, so that checkpointed blocks get some. It launches
nothing, and a graph is recorded with what it asks for.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

_MODULE = "transformers.utils.output_capturing"
_HOOK = "output_capturing_hook"
_COLLECTOR = "_active_collector"
_LIBRARIES = ("transformers", "peft", "trl")
_ASKS = "make_inputs_require_grad"


def collects(hook: Callable[..., Any]) -> str | None:
    """Name the output that a hook of this kind collects; None for any other hook."""
    if getattr(hook, "__module__", None) != _MODULE or getattr(hook, "__name__", "") != _HOOK:
        return None
    key = inspect.getclosurevars(hook).nonlocals.get("key")
    return key if isinstance(key, str) else None


def asks_for_gradients(hook: Callable[..., Any]) -> bool:
    """Whether a hook does nothing but have its module's output require gradients."""
    library = (getattr(hook, "__module__", None) or "").partition(".")[0]
    return library in _LIBRARIES and getattr(hook, "__name__", "").startswith(_ASKS)


def collected() -> Iterable[str]:
    """The outputs that are collected now, in this thread."""
    collector: Any = getattr(sys.modules.get(_MODULE), _COLLECTOR, None)
    now = collector.get() if collector is not None else None
    return now.keys() if now is not None else ()


def asked(root: nn.Module) -> set[str]:
    """The outputs that each pass collects, as the configurations of models inside say."""
    return {
        what
        for module in root.modules()
        if begins(module)
        for what in ("router_logits", "hidden_states", "attentions")
        if getattr(getattr(module, "config", None), f"output_{what}", False)
    }


def begins(module: nn.Module) -> bool:
    """Whether collecting begins in the module's own pass."""
    return bool(vars(module).get("_output_capturing_hooks_installed"))


@contextlib.contextmanager
def set_aside(hooks: Iterable[dict[int, Any]]) -> Iterator[None]:
    """Keep recorders out of `hooks` while open: compilers would make them part of their code."""
    taken = [(own, dict(own)) for own in hooks if own]
    for own, _ in taken:
        own.clear()
    try:
        yield
    finally:
        for own, before in taken:
            # Hooks that were put on meanwhile come behind.
            added = dict(own)
            own.clear()
            own.update(before | added)
