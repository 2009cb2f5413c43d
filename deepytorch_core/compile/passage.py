"""The way between compiled code and autograd for calls that `Border` can't serve.

Activation checkpointing, for one, has hooks for saved tensors. Under these autograd has to save
whatever lies between a call and its backward pass. When a call is made again, autograd has to save
each tensor as often as before. A backward pass within another one would compute everything anew.
Tensors of other classes, such as DTensors, may not be cut off and put together again as `Border`
does. So here compiled code stays part of the caller's graph, between two nodes. If another backward
pass comes than the compiled one, the node behind computes it from the graph as it was captured. The
node before drops what compiled code gives.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepytorch_core.compile.border import Border, Held
from deepytorch_core.compile.policies import Runner


def through(border: Border, run: Runner, args: Sequence[Any]) -> list[Any]:
    """The outputs of `run`, between the two nodes."""
    held = border.held(args)
    wanted = [arg for arg, is_wanted in zip(args, held.wanted, strict=True) if is_wanted]
    state = _State(border, held)
    passed = iter(_Before.apply(state, *wanted))  # type: ignore[no-untyped-call]
    outputs = list(
        run(*(next(passed) if is_ else arg for arg, is_ in zip(args, held.wanted, strict=True)))
    )
    state.places = [place for place in border.places() if outputs[place].requires_grad]
    if not state.places:
        return outputs
    # Autograd is to save these. Parameters live on, and stock's hooks saw them already.
    state.saved = [
        place
        for place, arg in enumerate(args)
        if isinstance(arg, Tensor) and not isinstance(arg, torch.nn.Parameter)
    ]
    given = [args[place] for place in state.saved]
    for place in state.saved:
        held.args[place] = None
    raw = [outputs[place] for place in state.places]
    made = _Behind.apply(state, given, len(raw), *raw, *wanted)  # type: ignore[no-untyped-call]
    for place, value in zip(state.places, made, strict=True):
        outputs[place] = value
    return outputs


@dataclass
class _State:
    """One call's, for both nodes.

    Attributes:
        held: what its eager backward pass needs, without what autograd saves.
        places: the outputs that have gradients.
        saved: the arguments that autograd saves.
        dropped: the backward pass in which compiled code has no say.
    """

    border: Border
    held: Held
    places: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    dropped: int | None = None


class _Before(torch.autograd.Function):
    """Between what a call is given and compiled code."""

    @staticmethod
    def forward(ctx: Any, state: _State, *wanted: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.state = state
        return tuple(tensor.detach() for tensor in wanted)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if ctx.state.dropped == torch._C._current_graph_task_id():
            return (None, *([None] * len(gradients)))
        return (None, *gradients)


class _Behind(torch.autograd.Function):
    """Between compiled code and its outputs, with a second way to what the call was given."""

    @staticmethod
    def forward(ctx: Any, state: _State, given: list[Tensor], number: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        ctx.state = state
        return tuple(tensor.detach() for tensor in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor | None) -> Any:
        state: _State = ctx.state
        border, is_differentiated = state.border, torch.is_grad_enabled()
        pairs = zip(state.places, seeds, strict=True)
        found = {place: seed for place, seed in pairs if seed is not None}
        nothing = [None] * sum(state.held.wanted)
        used = set(found)
        if border.used is None:
            border.note(used)
        is_usual = not is_differentiated and (border.used is None or used == border.used)
        if used:
            border.unusual(not is_usual)
        if is_usual or border.used is None or not used:
            return (None, None, None, *seeds, *nothing)
        state.dropped = torch._C._current_graph_task_id()
        held = copy.copy(state.held)
        held.fill(state.saved, ctx.saved_tensors)
        return (None, None, None, *([None] * len(seeds)), *held.eagerly(found))
