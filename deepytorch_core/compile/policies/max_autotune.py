"""TorchInductor that measures templates for matrix products and convolutions, without CUDA graphs.

On GPUs only: on the CPU its templates are for inference. Only when asked for by name: measuring
takes minutes of a model's first steps, anew for sizes that change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from deepytorch_core.compile.policies import Policy, Runner, register_policy
from deepytorch_core.compile.policies.inductor import lower


@register_policy
class MaxAutotune(Policy):
    """Mode "max-autotune-no-cudagraphs" of torch.compile."""

    name = "max-autotune"
    is_replayed = True

    def why_not(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "its templates for training are for GPUs"

    def compile_graph(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        return lower(graph, inputs, {"max_autotune": True, "coordinate_descent_tuning": True})
