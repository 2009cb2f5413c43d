"""Places where a capture ended early: graph breaks and failures, as file:line and reason."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

_TORCH = f"{Path(torch.__file__).parent}/"
_CUT_BY_DDP = "DDPOptimizer"  # into its buckets, on purpose


def of(graph: GraphModule) -> str | None:
    """The graph break that ended `graph`, or None if its function simply returned."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or _CUT_BY_DDP in str(reason.reason):
        return None
    stack = reason.user_stack
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "?"
    return f"{where}: {_first_line(str(reason.reason))}"


def place(error: BaseException) -> str:
    """The user's line at which an exception of the compiler arose."""
    stack = getattr(error, "real_stack", None)
    if stack:
        return f"{stack[-1].filename}:{stack[-1].lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


def function(error: BaseException) -> str:
    """The function, outside of torch's own, in which an exception arose, with its place."""
    frames = list(traceback.walk_tb(error.__traceback__))
    outside = [call for call in frames if not call[0].f_code.co_filename.startswith(_TORCH)]
    if not outside:
        return place(error)
    frame, line = outside[-1]
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
