"""A graph that was captured once for any size, and a graph of fixed sizes for each that comes.

Dynamo takes a second for a block of a large model, in the step that it captures. Batches come in a
dozen sizes, and code for one size is the fastest. So the second size is captured for any (torch
calls that automatic dynamic shapes), and the graphs of all others are made from that one. Each
operation is run on tensors without memory, of the sizes in question, and what gives numbers alone
is put in as numbers. That takes a twentieth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from deepytorch_core.compile.policies import Runner

Make = Callable[[GraphModule, Sequence[Tensor]], Runner]
"""Gives what runs a graph of fixed sizes, of which the tensors are examples of its inputs."""


def is_for_any(graph: GraphModule) -> bool:
    """Whether sizes are inputs of the graph."""
    places = (node for node in graph.graph.nodes if node.op == "placeholder")
    return any(isinstance(node.meta.get("example_value"), torch.SymInt) for node in places)


def why_not(graph: GraphModule) -> str | None:
    """Why no graph of fixed sizes can be made from this one; None if it can be."""
    for node in graph.graph.nodes:
        example = node.meta.get("example_value")
        if node.op == "placeholder" and not isinstance(example, Tensor | torch.SymInt):
            return f"{node.name} is neither a tensor nor a size"
        if isinstance(example, torch.SymFloat):
            return f"{node.name} is a number that may change, and no size"
        if node.target is torch.amp.autocast_mode._enter_autocast:
            return f"{node.name} changes autocast"
        if isinstance(node.target, HigherOrderOperator) or node.op == "call_module":
            return f"{node.name} has a graph of its own"
    return None


class GraphForAnySize:
    """Runs such a graph: each size by a graph of its own.

    Args:
        graph: as Dynamo captured it.
        make: asked at the first call of each size.
        failed: told why there is no graph of some size. Such calls run as they were captured.
    """

    def __init__(
        self, graph: GraphModule, make: Make, *, failed: Callable[[Exception], None]
    ) -> None:
        self._graph = graph
        self._make = make
        self._failed = failed
        self._of_size: dict[Hashable, tuple[Runner | None, list[Any]]] = {}

    def __call__(self, *args: Any) -> list[Any]:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        key = tuple(
            (arg.shape, arg.stride()) if isinstance(arg, Tensor) else arg
            for arg in args
            if not isinstance(arg, nn.Parameter)
        )
        if key not in self._of_size:
            self._of_size[key] = self._made(args)
        run, constants = self._of_size[key]
        if run is None:
            found: list[Any] = self._graph.forward(*args)
            return found
        outputs = iter(run(*tensors))
        return [next(outputs) if value is _TENSOR else value for value in constants]

    def _made(self, args: Sequence[Any]) -> tuple[Runner | None, list[Any]]:
        try:
            # The same ones in both places: compilers know their stand-ins by them.
            args = [_leaf(arg) if isinstance(arg, Tensor) else arg for arg in args]
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # as it is, if that fails within
                fixed, constants, mode = of_size(self._graph, args)
        except Exception as error:  # an operation may look at what its inputs hold
            self._failed(error)
            return None, []
        with tracing(TracingContext(mode)):
            return self._make(fixed, [arg for arg in args if isinstance(arg, Tensor)]), constants


_TENSOR = object()
"""Stands in the list of a graph's outputs for those that it computes."""


def of_size(
    graph: GraphModule, args: Sequence[Any]
) -> tuple[GraphModule, list[Any], FakeTensorMode]:
    """Make the graph of fixed sizes for these inputs, leaves; it takes the tensors among them.

    Returns it, the outputs that are no tensors with `_TENSOR` for all others, and the mode that its
    examples are of. It computes the outputs that are tensors.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    made = _Fixed(graph, mode)
    given = iter(args)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            made.place(node, next(given))
        elif node.op == "output":
            constants = made.end(node)
        else:
            made.run(node)
    fixed = GraphModule(graph, made.graph)
    fixed.meta = dict(graph.meta)
    return fixed, constants, mode


class _Fixed:
    """A graph of fixed sizes in the making."""

    def __init__(self, graph: GraphModule, mode: FakeTensorMode) -> None:
        self.graph = Graph()
        self._owner = graph
        self._mode = mode
        self._values: dict[Node, Any] = {}
        self._nodes: dict[Node, Any] = {}  # of the new graph; numbers as they are

    def place(self, node: Node, arg: Any) -> None:
        if not isinstance(arg, Tensor):
            self._values[node] = self._nodes[node] = int(arg)
            return
        value = self._mode.from_tensor(arg, static_shapes=True)
        copied: Any = self.graph.node_copy(node)
        copied._dynamo_source = getattr(node, "_dynamo_source", None)
        copied.meta = {"example_value": value}
        self._values[node], self._nodes[node] = value, copied

    def run(self, node: Node) -> None:
        value = self._value_of(node)
        if _is_of_numbers(value):
            self._values[node] = self._nodes[node] = value
        else:
            copied = self.graph.node_copy(node, lambda other: self._nodes[other])
            copied.meta = {**node.meta, "example_value": value}
            self._values[node], self._nodes[node] = value, copied

    def end(self, node: Node) -> list[Any]:
        ends: Any = node.args[0]
        results = list(map_arg(ends, lambda other: self._nodes[other]))
        self.graph.output(tuple(result for result in results if isinstance(result, Node)))
        return [_TENSOR if isinstance(result, Node) else result for result in results]

    def _value_of(self, node: Node) -> Any:
        args = map_arg(node.args, lambda other: self._values[other])
        kwargs = map_arg(node.kwargs, lambda other: self._values[other])
        if node.op == "get_attr":
            value = self._owner
            for name in str(node.target).split("."):
                value = getattr(value, name)
            return self._mode.from_tensor(value) if isinstance(value, Tensor) else value
        with self._mode:
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]


def _leaf(tensor: Tensor) -> Tensor:
    """As helpers have it, whose caches go by that."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


def _is_of_numbers(value: Any) -> bool:
    """Whether a value is made of sizes alone; None comes of what is done for its effect."""
    if isinstance(value, tuple | list):
        return all(map(_is_of_numbers, value))
    return isinstance(value, bool | int | float | torch.dtype | torch.device)
