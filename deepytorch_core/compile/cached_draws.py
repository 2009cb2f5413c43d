"""Random numbers that a function under `lru_cache` draws: once, but in a graph every time.

Dynamo goes into such functions past their caches.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch.fx import GraphModule

_DRAWING = re.compile(
    r"(rand|randn|randint|randperm|rand_like|randn_like|randint_like|bernoulli_?|normal_?|uniform_"
    r"|random_|exponential_|multinomial|poisson|(\w*_)?dropout(\dd)?_?)$"
)


def are_in(graph: GraphModule, calls: Collection[str]) -> bool:
    """Whether the graph draws some below these calls, given as lines of stack traces."""
    return bool(calls) and any(
        _DRAWING.match(_name(node.target)) is not None
        and any(call in (node.meta.get("stack_trace") or "") for call in calls)
        for node in graph.graph.nodes
        if node.op in ("call_function", "call_method")
    )


def _name(target: object) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))
