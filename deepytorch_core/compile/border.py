"""The border between compiled code and autograd: gradients go over it as stock's graph has them.

Compiled code has one backward pass, for the outputs that it was compiled for. It gives zeros for
what nobody has asked for, can't be differentiated, and knows nothing of one output's gradient by
another. So each call of a captured graph has nodes of its own here. A backward pass like those that
were seen before is the compiled one's; any other is computed from the graph as it was captured.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd as autograd
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule, Node

from deepytorch_core import guard
from deepytorch_core.compile.graph_facts import GraphFacts
from deepytorch_core.compile.policies import Runner

_PLAIN = (Tensor, torch.nn.Parameter)


class Border:
    """That of one captured graph.

    Args:
        graph: as it was captured.
        facts: what was seen of it.
        used: which outputs the compiled code has gradients for; None: it is not compiled yet, and
            `note` is told of each output that gets one.
        note: told of outputs that get gradients.
        unusual: told of each backward pass whether it was another than the compiled one's.
    """

    def __init__(
        self,
        graph: GraphModule,
        facts: GraphFacts,
        *,
        used: frozenset[int] | None,
        note: Callable[[set[int]], None],
        unusual: Callable[[bool], None],
    ) -> None:
        self.used = used
        self.note = note
        self.unusual = unusual
        self._graph = graph
        self._facts = facts
        self._above = _ancestors(graph, facts.differentiable)
        self._is_linked = any(self._above.values())
        self._parts: dict[int, GraphModule] = {}

    def is_needed_for(self, args: Sequence[Any]) -> bool:
        """Whether a call with these has gradients."""
        return torch.is_grad_enabled() and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in args
        )

    def is_open_for(self, args: Sequence[Any]) -> bool:
        """Whether such a call can go over it; else it takes a `passage`."""
        return is_saved_plainly() and all(
            type(arg) in _PLAIN for arg in args if isinstance(arg, Tensor)
        )

    def held(self, args: Sequence[Any]) -> Held:
        """A call with these arguments."""
        return Held(self, list(args), self._facts)

    def __call__(self, run: Runner, args: Sequence[Any]) -> list[Any]:
        """The outputs of `run`, over the border."""
        held = self.held(args)
        sources = [
            _source(arg) if is_wanted else arg
            for arg, is_wanted in zip(args, held.wanted, strict=True)
        ]
        outputs = list(run(*sources))
        held.sources = [source for source, is_ in zip(sources, held.wanted, strict=True) if is_]
        places = self._facts.differentiable
        held.edges = {
            place: get_gradient_edge(outputs[place])
            for place in places
            if outputs[place].requires_grad
        }
        raw = [outputs[place].detach() for place in places]
        wanted = [arg for arg, is_ in zip(args, held.wanted, strict=True) if is_]
        made = _Call.apply(held, raw, _leaf, *wanted)  # type: ignore[no-untyped-call]
        values = dict(zip(places, made, strict=True))
        for place in sorted(places, key=lambda place: len(self._above[place])):
            if self._above[place]:
                given = [values[other] for other in self._above[place]]
                output: Any = values[place]
                values[place] = _Output.apply(held, place, _leaf, output, *given)  # type: ignore[no-untyped-call]
            if self._is_linked or place in self._facts.kept:
                held.tensors[place] = weakref.ref(values[place])
        for place, value in values.items():
            outputs[place] = value
        return outputs

    def part(self, place: int) -> GraphModule:
        """The graph of one output, with the outputs above it as further inputs."""
        if place not in self._parts:
            graph = copy.deepcopy(self._graph.graph)
            *_, end = graph.nodes
            results = list(end.args[0])
            last = [node for node in graph.nodes if node.op == "placeholder"][-1]
            for other in reversed(self._above[place]):
                with graph.inserting_after(last):
                    given = graph.placeholder(f"above_{other}")
                results[other].replace_all_uses_with(given)
            end.args = ((results[place],),)
            self._parts[place] = GraphModule(self._graph, graph)
        return self._parts[place]

    def above(self, place: int) -> list[int]:
        """The outputs that another one is computed from, in order."""
        return self._above[place]

    def places(self) -> list[int]:
        """The outputs that have gradients."""
        return self._facts.differentiable


@dataclass
class Held:
    """One call, until its backward pass is over."""

    border: Border
    args: list[Any]
    facts: GraphFacts
    wanted: list[bool] = field(init=False)
    sources: list[Tensor] = field(default_factory=list)
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    tensors: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    partial: list[Tensor | None] | None = None
    task: int = -1

    def __post_init__(self) -> None:
        self.wanted = [isinstance(arg, Tensor) and arg.requires_grad for arg in self.args]
        self._versions = [arg._version if isinstance(arg, Tensor) else 0 for arg in self.args]
        self._numbers = self.facts.random_numbers() if self.facts.draws else None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in self.facts.kinds
        ]
        self._before = {place: self.args[place].detach().clone() for place in self.facts.reread}

    def backward(self, seeds: dict[int, Tensor]) -> list[Tensor | None]:
        """Gradients of the wanted arguments."""
        self._begin()
        border, used = self.border, set(seeds)
        if border.used is None:
            border.note(used | self.given)
        is_compiled = not torch.is_grad_enabled() and (border.used is None or used == border.used)
        is_usual = is_compiled and self.partial is None
        if used or self.given:
            border.unusual(not is_usual)
        if not used:
            found: list[Tensor | None] = [None] * len(self.sources)
        elif is_compiled:
            pairs = [
                (self.edges[place], seed) for place, seed in seeds.items() if place in self.edges
            ]
            found = list(
                torch.autograd.grad(
                    [edge for edge, _ in pairs],
                    self.sources,
                    [seed for _, seed in pairs],
                    retain_graph=autograd._get_current_graph_task_keep_graph(),
                    allow_unused=True,
                )
            )
        else:
            found = self.eagerly(seeds)
        return found if self.partial is None else list(map(_sum, found, self.partial))

    def eagerly(self, seeds: dict[int, Tensor]) -> list[Tensor | None]:
        """Gradients of the wanted arguments, by the graph as it was captured."""
        is_differentiated = torch.is_grad_enabled()
        with torch.enable_grad(), self._as_then():
            inputs, passed = self._aliases()
            outputs = self.border._graph.forward(*passed)
            with torch.set_grad_enabled(is_differentiated):
                return _derived([outputs[place] for place in seeds], inputs, list(seeds.values()))

    def fill(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Put arguments there that autograd has saved, and compared with what they were."""
        self.args, self._versions = list(self.args), list(self._versions)
        for place, tensor in zip(places, tensors, strict=True):
            self.args[place], self._versions[place] = tensor, tensor._version

    def backward_of(self, place: int, seed: Tensor, above: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the outputs above one, by a part of the graph; `backward` has the rest."""
        self._begin()
        self.given.add(place)
        is_differentiated = torch.is_grad_enabled()
        with torch.enable_grad(), self._as_then():
            inputs, passed = self._aliases()
            others = [
                tensor.view_as(tensor) if is_differentiated else _leaf_of(tensor)
                for tensor in above
            ]
            (output,) = self.border.part(place).forward(*passed, *others)
            with torch.set_grad_enabled(is_differentiated):
                found = _derived([output], [*others, *inputs], [seed])
        rest = found[len(others) :]
        self.partial = rest if self.partial is None else list(map(_sum, self.partial, rest))
        return found[: len(others)]

    def _begin(self) -> None:
        """Forget what belongs to a backward pass that has ended before it came to the inputs."""
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task, self.partial, self.given = task, None, set()

    def is_looked_at(self, places: Sequence[int]) -> bool:
        """Whether somebody wants gradients of these outputs, or changes them."""
        tensors = [self.tensors[place]() for place in places]
        return any(
            tensor is not None and (tensor.retains_grad or tensor._backward_hooks)
            for tensor in tensors
        )

    def check_kept(self) -> None:
        """Raise what stock does where an output that its graph keeps was cut off in place."""
        tensors = [self.tensors[place]() for place in self.facts.kept]
        if any(tensor is not None and tensor.grad_fn is None for tensor in tensors):
            raise RuntimeError(
                "Trying to use a saved tensor that has been detached in-place, i.e. with "
                ".detach_().This is not supported, please use out-of-place `.detach()` instead"
            )

    def _aliases(self) -> tuple[list[Tensor], list[Any]]:
        """Stand-ins of the wanted arguments, and all that the graph takes with them."""
        for place, (arg, version) in enumerate(zip(self.args, self._versions, strict=True)):
            if self.wanted[place] and arg._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: is at version {arg._version}; expected version {version}"
                )
        passed = [self._before.get(place, arg) for place, arg in enumerate(self.args)]
        inputs = []
        for place, arg in enumerate(self.args):
            if self.wanted[place]:
                passed[place] = arg.view_as(arg)
                inputs.append(passed[place])
        return inputs, passed

    @contextlib.contextmanager
    def _as_then(self) -> Iterator[None]:
        """While open, generators and autocast are as they were; then all is as it is now."""
        written = guard.Contents([self.args[place] for place in self.facts.written])
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if self._numbers is not None:
                stack.enter_context(guard.same_random_numbers())
                self.facts.rewind(self._numbers)
            try:
                yield
            finally:
                written.put_back()


class _Call(torch.autograd.Function):
    """Between a graph's outputs and what it was given."""

    @staticmethod
    def forward(ctx: Any, held: Held, raw: list[Tensor], leaf: Tensor, *_: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # Gone after a backward pass, as what stock's nodes keep. Whoever writes to an output that
        # these keep, or cuts it off, hears of it.
        kept = [raw[held.border.places().index(place)] for place in held.facts.kept]
        ctx.save_for_backward(leaf, *kept)
        ctx.held = held
        return tuple(raw)

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        held: Held = ctx.held
        held.check_kept()
        pairs = zip(held.border.places(), seeds, strict=True)
        found = held.backward({place: seed for place, seed in pairs if seed is not None})
        held.task = -1
        if not autograd._get_current_graph_task_keep_graph():
            ctx.held = None
        return (None, None, None, *found)


class _Output(torch.autograd.Function):
    """Between an output and those that it is computed from."""

    @staticmethod
    def forward(
        ctx: Any, held: Held, place: int, leaf: Tensor, output: Tensor, *above: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*above)
        ctx.held, ctx.place = held, place
        return output.detach()

    @staticmethod
    def backward(ctx: Any, seed: Tensor | None) -> Any:
        above = ctx.saved_tensors
        held, place = ctx.held, ctx.place
        nothing = [None] * len(above)
        if not autograd._get_current_graph_task_keep_graph():
            ctx.held = None
        if seed is None:
            return (None, None, None, None, *nothing)
        if _is_for_some(ctx) or held.is_looked_at(held.border.above(place)):
            return (None, None, None, None, *held.backward_of(place, seed, above))
        return (None, None, None, seed, *nothing)


def is_saved_plainly() -> bool:
    """Whether no hooks take what autograd saves."""
    return autograd._top_saved_tensors_default_hooks(True) is None


def is_made_again() -> bool:
    """Whether checkpointing makes this call again; what it saves is counted, so it goes as then."""
    return torch._C._current_graph_task_id() != -1 and not is_saved_plainly()


def restricted(graph: GraphModule, places: Sequence[int], used: frozenset[int]) -> GraphModule:
    """The graph without gradients of those outputs that get none."""
    left_out = [place for place in places if place not in used]
    if not left_out:
        return graph
    own = GraphModule(graph, copy.deepcopy(graph.graph))
    own.meta = dict(graph.meta)
    *_, end = own.graph.nodes
    results = list(end.args[0])
    for place in left_out:
        with own.graph.inserting_before(end):
            node = own.graph.call_method("detach", (results[place],))
        example = results[place].meta.get("example_value")
        if example is not None:
            node.meta["example_value"] = example.detach()
        results[place] = node
    end.args = (tuple(results),)
    own.recompile()
    return own


def differentiable(graph: GraphModule) -> list[int] | None:
    """The outputs that have gradients, by what was seen at the capture; None if that is unknown."""
    *_, end = graph.graph.nodes
    results = end.args[0] if end.args else ()
    if not isinstance(results, tuple | list):
        return None
    examples = [
        result.meta.get("example_value") if isinstance(result, Node) else None for result in results
    ]
    return [
        place for place, example in enumerate(examples) if getattr(example, "requires_grad", False)
    ]


def _ancestors(graph: GraphModule, places: Sequence[int]) -> dict[int, list[int]]:
    """For each output that has gradients the others that it is computed from."""
    *_, end = graph.graph.nodes
    results = end.args[0]
    above: dict[Node, frozenset[int]] = {}
    own = {results[place]: place for place in reversed(places)}
    for node in graph.graph.nodes:
        found = frozenset[int]().union(*(above[input_node] for input_node in node.all_input_nodes))
        above[node] = found | {own[node]} if node in own else found
    return {place: sorted(above[results[place]] - {own[results[place]]}) for place in places}


def _is_for_some(ctx: Any) -> bool:
    """Whether the backward pass is for some tensors only, which `_leaf` is none of."""
    return not torch._C._will_engine_execute_node(ctx.next_functions[0][0])


def _derived(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> list[Tensor | None]:
    pairs = [
        (output, seed) for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    return list(
        torch.autograd.grad(
            [output for output, _ in pairs],
            inputs,
            [seed for _, seed in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )


def _leaf_of(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _source(tensor: Tensor) -> Tensor:
    """Make a leaf for compiled code. A parameter is one, but its hooks would run twice."""
    is_plain = type(tensor) is torch.nn.Parameter and not tensor._backward_hooks
    return tensor if is_plain else _leaf_of(tensor)


def _sum(gradient: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if gradient is None else gradient if other is None else gradient + other


# Tells whether a backward pass is for all leaves.
_leaf = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
