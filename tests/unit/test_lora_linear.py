"""LoRA's layers in products alone: as PEFT computes them, in eager passes and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.nn.lora_linear import lora_linear
from deepytorch_core.nn.swaps import lora

pytestmark = pytest.mark.usefixtures("quiet_profile")

CPU = torch.device("cpu")


class Network(nn.Module):
    """Two layers that get an adapter, one of them with a bias, and a head that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20, bias=False)
        self.second = nn.Linear(20, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def adapted(dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["first", "second"], **config}
    model = get_peft_model(Network().to(dtype), LoraConfig(**options))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) / 3
    return model


def layers(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if type(module).__name__ == "Linear" and hasattr(module, "base_layer")
    ]


def step(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output and all gradients, the input's too."""
    model.zero_grad()
    rows = x.clone().requires_grad_()
    out = model(rows)
    out.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": rows.grad, **{n: g.clone() for n, g in found.items()}}


def served(model: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same model with ours in place, and its calls counted."""

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[0].shape)
        return lora_linear(*args, **kwargs)

    monkeypatch.setattr(lora, "lora_linear", counted)
    own = copy.deepcopy(model)
    swapped = apply_kernels(KernelSetting(model=own, device=CPU), "on")
    assert set(swapped.names.values()) == {"accumulated"}
    own.swapped = swapped
    calls.clear()
    return own


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12), (12,), (0, 12)], ids=str)
def test_outputs_and_gradients_are_pefts(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = adapted(), []
    own = served(model, calls, monkeypatch)
    x = torch.randn(*shape, dtype=torch.float64)
    torch.testing.assert_close(step(own, x), step(model, x), rtol=1e-12, atol=1e-14, equal_nan=True)
    assert len(calls) == 2
    own.swapped.undo()
    step(own, x)
    assert len(calls) == 2
    assert not any("forward" in vars(layer) for layer in layers(own))


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_nearer_to_float64_than_pefts(
    base: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = adapted(base), []
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    own = served(model, calls, monkeypatch)
    exact = copy.deepcopy(model).double()
    x = torch.randn(257, 12, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, stock = step(own, x), step(model, x)
    wanted = step(exact, x.double())
    assert len(calls) == 2
    assert {name: (g.dtype, g.shape) for name, g in ours.items()} == {
        name: (g.dtype, g.shape) for name, g in stock.items()
    }

    def apart(found: dict[str, torch.Tensor]) -> float:
        return sum(
            float((g.double() - wanted[n]).norm() / wanted[n].norm()) for n, g in found.items()
        )

    assert apart(ours) < 1.1 * apart(stock)


def test_dropout_drops_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = adapted(lora_dropout=0.3), []
    own = served(model, calls, monkeypatch)
    x = torch.randn(9, 12, dtype=torch.float64)
    for mode in (True, False):
        found = []
        for each in (own, model):
            torch.manual_seed(3)
            found.append(step(each.train(mode), x))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
    assert len(calls) == 4


def disabled(model: Any, x: torch.Tensor) -> Any:
    with model.disable_adapter():
        return model(x)


def merged(model: Any, x: torch.Tensor) -> Any:
    model.merge_adapter()
    try:
        return model(x)
    finally:
        model.unmerge_adapter()


def with_another(model: Any, x: torch.Tensor) -> Any:
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=["first"], init_lora_weights=False)
    model.add_adapter("other", config)
    model.base_model.set_adapter(["default", "other"])
    return model(x)


def hooked(model: Any, x: torch.Tensor) -> Any:
    for layer in layers(model):
        layer.lora_B["default"].register_forward_hook(lambda module, args, out: 2 * out)
    return model(x)


def trained(model: Any, x: torch.Tensor) -> Any:
    for layer in layers(model):
        layer.base_layer.weight.requires_grad_()
    out = model(x)
    out.sum().backward()
    return [out, *(layer.base_layer.weight.grad for layer in layers(model))]


@pytest.mark.parametrize("way", [disabled, merged, with_another, hooked, trained])
def test_other_uses_of_adapters_take_pefts_way(
    way: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = adapted(), []
    own = served(model, calls, monkeypatch)
    x = torch.randn(4, 12, dtype=torch.float64)
    torch.testing.assert_close(way(own, x), way(model, x), rtol=1e-12, atol=1e-14)
    assert len(calls) == (1 if way is with_another else 0)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_variants_take_pefts_way(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = adapted(**config), torch.randn(4, 12, dtype=torch.float64)
    expected = step(model, x)
    swapped = apply_kernels(KernelSetting(model=model, device=CPU), "on")
    monkeypatch.setattr(lora, "lora_linear", None)
    torch.testing.assert_close(step(model, x), expected, rtol=1e-12, atol=1e-14)
    swapped.undo()


def test_second_derivatives_are_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = adapted(), []
    own = served(model, calls, monkeypatch)
    x = torch.randn(4, 12, dtype=torch.float64)
    found = []
    for each in (own, model):
        each.zero_grad()
        rows = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(each(rows).square().sum(), rows, create_graph=True)
        first.square().sum().backward()
        found.append([p.grad for p in each.parameters() if p.requires_grad] + [rows.grad])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-13)
    assert calls


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiled_passes_take_one_operator(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = adapted(lora_dropout=dropout), []
    own = served(model, calls, monkeypatch)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph.code)
        return aot_eager(graph, inputs)

    compiled = torch.compile(own, backend=backend, fullgraph=True)
    x = torch.randn(6, 12, dtype=torch.float64)
    found = []
    for each in (compiled, model):
        torch.manual_seed(3)
        found.append(step(each, x))
    ours = {name.removeprefix("_orig_mod."): g for name, g in found[0].items()}
    torch.testing.assert_close(ours, found[1], rtol=1e-12, atol=1e-14)
    assert len(graphs) == 1
    assert graphs[0].count("deepytorch.lora_linear") == 2
    torch._dynamo.reset()


def test_the_operators_are_what_they_say() -> None:
    def made(*shape: int, is_wanted: bool = True) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64).requires_grad_(is_wanted)

    frozen = [made(5, 7, is_wanted=False), made(5, is_wanted=False)]
    for dropped in (None, made(6, 7)):
        for of_x in (True, False):
            args = made(6, 7, is_wanted=of_x), dropped, frozen, [made(3, 7), made(5, 3)], 0.5
            torch.library.opcheck(torch.ops.deepytorch.lora_linear.default, args)
