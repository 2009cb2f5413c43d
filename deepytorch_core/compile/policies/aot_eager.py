"""Captured forward and backward graphs, run by eager kernels: for finding out who is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from deepytorch_core.compile.policies import Policy, Runner, register_policy


@register_policy
class AotEager(Policy):
    """torch's back end "aot_eager": Inductor's way without Inductor, for debugging."""

    name = "aot-eager"

    def compile_graph(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        from torch._dynamo.backends.registry import lookup_backend

        compiled: Runner = lookup_backend("aot_eager")(graph, list(inputs))
        return compiled
