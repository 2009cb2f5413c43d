"""Lightning Thunder, where it is installed; it brings nvFuser.

TorchScript, the other way to nvFuser, is deprecated in torch and not offered.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch.fx import GraphModule

from deepytorch_core.compile.policies import Policy, Runner, register_policy


@register_policy
class Thunder(Policy):
    """`thunder.jit` of the captured graph."""

    name = "thunder"
    automatic = True

    def why_not(self, device: torch.device) -> str | None:
        if find_spec("thunder") is None:
            return "lightning-thunder is not installed"
        return None if device.type == "cuda" else "its executors are for GPUs"

    def compile_graph(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        compiled: Runner = importlib.import_module("thunder").jit(graph)
        return compiled
