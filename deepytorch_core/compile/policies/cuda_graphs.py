"""Eager kernels replayed as CUDA graphs: no fusion, no launches.

Only when asked for by name, as for "reduce-overhead".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from deepytorch_core.compile.policies import Policy, Runner, register_policy


@register_policy
class CudaGraphs(Policy):
    """torch's back end "cudagraphs"."""

    name = "cuda-graphs"

    def why_not(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "CUDA graphs need a CUDA device"

    def compile_graph(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        from torch._dynamo.backends.registry import lookup_backend

        compiled: Runner = lookup_backend("cudagraphs")(graph, list(inputs))
        return compiled
