"""TorchInductor as it comes: C++ and OpenMP on the CPU, Triton on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from deepytorch_core.compile.policies import Policy, Runner, register_policy


def lower(graph: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Runner:
    """Compile with Inductor under `options` (names of torch._inductor.config)."""
    from torch._inductor.compile_fx import compile_fx

    # Random numbers are torch's own, so that dropout with a seed drops what eager drops.
    patches = {"fallback_random": True, **options}
    compiled: Any = compile_fx(graph, list(inputs), config_patches=patches)
    runner: Runner = compiled
    return runner


@register_policy
class Inductor(Policy):
    """Inductor's defaults."""

    name = "inductor"
    is_replayed = True
    automatic = True

    def compile_graph(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        return lower(graph, inputs, {})
