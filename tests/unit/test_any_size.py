"""Graphs of fixed sizes made from one that was captured for any size: they compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from deepytorch_core.compile import any_size
from deepytorch_core.compile.any_size import GraphForAnySize


class Block(nn.Module):
    """Heads, positions, masks and halves: uses of sizes in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(12), nn.Linear(12, 36)
        self.out, self.scale = nn.Linear(12, 12), 0.5

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        batch, length = x.shape[:-1]
        heads = self.mix(self.norm(x)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        cos, sin = (each[:, None] for each in positions)
        first, second = query.chunk(2, dim=-1)
        query = query * cos + torch.cat([-second, first], dim=-1) * sin
        mask = torch.ones(length, length, dtype=torch.bool).tril(diagonal=length // 1000)
        scores = (query @ key.transpose(-1, -2) * self.scale).masked_fill(~mask, -1e4)
        with torch.no_grad():
            mean = scores.mean() / (length * batch)
        mixed = scores.softmax(-1) @ value
        y = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 12))
        return y, mean.expand(length)


def raised(error: Exception) -> None:
    raise error


def inputs(length: int, *, batch: int = 1, is_leaf: bool = True) -> Any:
    generator = torch.Generator().manual_seed(length)
    x, cos, sin = (
        torch.randn(batch, length, width, generator=generator, dtype=torch.float64)
        for width in (12, 6, 6)
    )
    x = x.requires_grad_()
    return x if is_leaf else x * 1.0, (cos, sin)


def captured(module: nn.Module, lengths: list[int]) -> list[GraphModule]:
    """Return the graphs that Dynamo captures for the lengths, with automatic dynamic shapes."""
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for length in lengths:
        compiled(*inputs(length))
    torch._dynamo.reset()
    return graphs


def results(run: Callable[..., Any], x: Tensor, positions: Any, module: nn.Module) -> list[Any]:
    module.zero_grad()
    outputs = run(x, positions)
    outputs[0].square().sum().backward()
    return [*outputs, x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def test_sizes_are_served_by_one_capture() -> None:
    torch.manual_seed(0)
    module = Block().double()
    stock = copy.deepcopy(module)
    made: list[tuple[GraphModule, list[tuple[int, ...]]]] = []

    def make(graph: GraphModule, examples: Any) -> Callable[..., Any]:
        made.append((graph, [tuple(example.shape) for example in examples]))
        return graph.forward

    num_captured = 0

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal num_captured
        num_captured += 1
        if not any_size.is_for_any(graph):
            return graph.forward
        assert any_size.why_not(graph) is None
        return GraphForAnySize(graph, make, failed=raised)

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for length in (5, 7, 9, 7, 33, 9, 2):
        x, positions = inputs(length)
        other = x.detach().clone().requires_grad_()
        torch.testing.assert_close(
            results(compiled, x, positions, module),
            results(stock, other, positions, stock),
            rtol=1e-12,
            atol=1e-13,
        )
    assert num_captured == 2
    assert len(made) == 4  # 5 was captured for itself
    for graph, shapes in made:
        assert not any_size.is_for_any(graph)
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        examples = [node.meta["example_value"] for node in places]
        assert [tuple(example.shape) for example in examples] == shapes
        assert all(type(size) is int for example in examples for size in example.shape)
        assert {isinstance(example, nn.Parameter) for example in examples} == {True, False}
        *_, end = graph.graph.nodes
        assert [result.meta["example_value"].requires_grad for result in end.args[0]] == [
            True,
            False,
        ]
    torch._dynamo.reset()


def test_no_number_is_left_to_be_computed() -> None:
    module = Block().double()
    first, for_any = captured(module, [5, 7])
    assert not any_size.is_for_any(first)
    x, (cos, sin) = inputs(11)
    args = {
        "x": x,
        "cos": cos,
        "sin": sin,
        **{name.replace(".", "_"): p for name, p in module.named_parameters()},
    }
    places = [node for node in for_any.graph.nodes if node.op == "placeholder"]
    given = []
    for node in places:
        example = node.meta["example_value"]
        if isinstance(example, torch.SymInt):
            given.append(11)
        else:
            given.append(
                next(
                    value
                    for value in args.values()
                    if list(value.shape)
                    == [11 if isinstance(size, torch.SymInt) else size for size in example.shape]
                )
            )
    fixed, constants, _ = any_size.of_size(for_any, given)
    assert len(constants) == 2
    tensors = [node for node in fixed.graph.nodes if node.op != "output"]
    assert all(
        not isinstance(node.meta.get("example_value"), int | torch.SymInt) for node in tensors
    )
    assert len(tensors) < len(for_any.graph.nodes)


def test_inputs_that_are_no_leaves_are_left_alone() -> None:
    module = Block().double()
    seen = []

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(any_size.is_for_any(graph))
        if not seen[-1]:
            return graph.forward
        return GraphForAnySize(graph, lambda own, _: own.forward, failed=raised)

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for length in (5, 8, 6):
        x, positions = inputs(length, is_leaf=False)
        y, _ = compiled(x, positions)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        other, _ = inputs(length)
        expected = torch.autograd.grad(module(other, positions)[0].sum(), other)
        torch.testing.assert_close(gradient, expected[0], rtol=1e-12, atol=1e-13)
        assert x.grad_fn is not None
    assert seen == [False, True]
    torch._dynamo.reset()


def test_a_number_that_may_change_is_a_reason_not_to() -> None:
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, by: x * by, backend=backend, dynamic=True)
    compiled(torch.ones(5, 2), 0.3)
    assert "a number that may change" in str(any_size.why_not(graphs[0]))
    torch._dynamo.reset()


def test_a_graph_within_a_graph_is_a_reason_not_to() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 12)

        def forward(self, x: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
            y = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return y, y

    _, for_any = captured(Checkpointed().double(), [5, 7])
    assert any_size.is_for_any(for_any)
    assert "a graph of its own" in str(any_size.why_not(for_any))


@pytest.mark.parametrize("length", [6, 9])
def test_sizes_among_the_outputs_stay_numbers(length: int) -> None:
    class Told(nn.Module):
        def forward(self, x: Tensor, positions: Any) -> tuple[Tensor, int, Tensor]:
            return x * 2, x.shape[1] * 3 + 1, x + x.shape[1]

    torch._dynamo.reset()
    seen = []

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(any_size.is_for_any(graph))
        if not seen[-1]:
            return graph.forward
        return GraphForAnySize(graph, lambda graph, _: graph.forward, failed=raised)

    compiled = torch.compile(Told(), backend=backend, fullgraph=True)
    for each in (5, 7, length):
        x, positions = inputs(each)
        found, expected = compiled(x, positions), Told()(x, positions)
        assert found[1] == expected[1]
        torch.testing.assert_close(found, expected)
    assert seen == [False, True]
    torch._dynamo.reset()


def test_a_failure_is_told_and_such_calls_run_as_they_were_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> Any:
        torch._C._set_grad_enabled(False)
        raise RuntimeError("no such size")

    module, told = Block().double(), []

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        if not any_size.is_for_any(graph):
            return graph.forward
        return GraphForAnySize(graph, lambda own, _: own.forward, failed=told.append)

    monkeypatch.setattr(any_size, "of_size", failing)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for length in (5, 8, 8):
        x, positions = inputs(length)
        torch.testing.assert_close(compiled(x, positions), module(x, positions))
        assert torch.is_grad_enabled()
    assert [str(error) for error in told] == ["no such size"]
    torch._dynamo.reset()


def test_a_made_graph_reads_as_one_captured_for_its_size() -> None:
    module = Block().double()
    args: list[Any] = []

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            args.append((graph, given))
            return graph.forward(*given)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for length in (5, 7):
        compiled(*inputs(length))
    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True)(*inputs(7))
    (_, _), (for_any, given), (alone, _) = args
    assert any_size.is_for_any(for_any)
    assert not any_size.is_for_any(alone)
    fixed, _, _ = any_size.of_size(for_any, given)
    assert fixed.code == alone.code
    torch._dynamo.reset()
