"""TorchInductor whose kernels are replayed as CUDA graphs.

It is taken only when asked for by name. Outputs live in the graphs' memory, which the next step
overwrites. So a script that keeps outputs over steps fails where eager does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from deepytorch_core.compile.policies import Policy, Runner, register_policy
from deepytorch_core.compile.policies.inductor import lower


@register_policy
class ReduceOverhead(Policy):
    """Mode "reduce-overhead" of torch.compile."""

    name = "reduce-overhead"

    def why_not(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "CUDA graphs need a CUDA device"

    def compile_graph(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        return lower(graph, inputs, {"triton.cudagraphs": True})
