"""Gradients at the border of a compiled region: as stock's, whatever backward pass is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.compile import usage

pytestmark = pytest.mark.usefixtures("own_profile", "one_thread")

Use = Callable[[nn.Module, Any, Tensor], Any]


class Heads(nn.Module):
    """Two outputs of one trunk; a dictionary if asked for."""

    def __init__(self, *, is_dict: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.is_dict, self.dropout = is_dict, dropout

    def forward(self, x: Tensor) -> Any:
        h = F.dropout(torch.tanh(self.trunk(x)), self.dropout)
        a, b = self.a(h), self.b(h)
        return {"a": a, "b": b} if self.is_dict else (a, b)


class Logged(nn.Module):
    """Returns a value to be logged that has no finite gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.out, self.kind = nn.Linear(6, 5), nn.Linear(5, 3), kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = F.softmax(1000 * self.fc(x), -1)
        logged = {
            "sqrt": lambda: p.sub(p.detach()).abs().sum().sqrt(),
            "log": lambda: p.log().clamp(min=-5).mean(),
            "norm": lambda: (p - p.detach()).pow(2).sum().sqrt(),
            "kept": lambda: p.sum(),
        }[self.kind]()
        if self.kind == "kept":
            self.entropy = -(p * p.log()).sum(-1)
        return self.out(p), logged


class Chain(nn.Module):
    """Outputs that go by each other, two deep."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.tanh(self.a(x))
        second = torch.sigmoid(self.b(first))
        return self.c(second) + first[:, :2], first, second


def trained(model: nn.Module, use: Use, steps: int) -> list[Any]:
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said = []
    for step in range(steps):
        x = torch.randn(5, 6, requires_grad=True)
        optimizer.zero_grad()
        try:
            said.append(use(model, step, x))
        except RuntimeError as error:
            said.append(str(error)[:40])
            optimizer.zero_grad()  # how far stock's pass came is its own affair
        said.append([parameter.grad is None for parameter in model.parameters()])
        optimizer.step()
    return [*said, *(parameter.detach().clone() for parameter in model.parameters())]


def numbers(said: list[Any]) -> list[Any]:
    return [value for value in said if not isinstance(value, str) and value is not None]


def alike(model: nn.Module, use: Use, *, steps: int = 7) -> Any:
    """Trains stock and compiled; the compilation. All that was said and the weights must agree."""
    twin = copy.deepcopy(model)
    expected = trained(twin, use, steps)
    deepytorch.compile(model, "aot-eager")
    found = engine.compilation_of(model)
    ours = trained(model, use, steps)
    assert [value for value in ours if isinstance(value, str)] == [
        value for value in expected if isinstance(value, str)
    ]
    torch.testing.assert_close(*map(numbers, (ours, expected)))
    return found


def first_head(model: nn.Module, step: int, x: Tensor) -> None:
    outputs = model(x)
    (outputs["a"] if isinstance(outputs, dict) else outputs[0]).square().mean().backward()


@pytest.mark.parametrize("is_dict", [False, True])
def test_an_output_that_nobody_uses_trains_nothing(is_dict: bool) -> None:
    found = alike(Heads(is_dict=is_dict), first_head)
    assert found.regions[0].failure is None
    assert found.regions[0].told.chosen == {"aot-eager": 1}


@pytest.mark.parametrize("kind", ["sqrt", "log", "norm", "kept"])
def test_what_is_logged_has_no_gradient_that_is_no_number(kind: str) -> None:
    model = Logged(kind)
    found = alike(model, first_head)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert found.regions[0].failure is None


def alternating(model: nn.Module, step: int, x: Tensor) -> None:
    model(x)[step % 2].square().mean().backward()


def other_head_at_last(model: nn.Module, step: int, x: Tensor) -> None:
    model(x)[int(step == 5)].square().mean().backward()


def both_at_last(model: nn.Module, step: int, x: Tensor) -> None:
    a, b = model(x)
    (a.sum() + (b.square().sum() if step > 3 else 0)).backward()


def through_a_second_pass(model: nn.Module, step: int, x: Tensor) -> None:
    first, second = model(x), model(x.detach() * 2)
    (first[0].sum() + second[1].square().sum()).backward()


@pytest.mark.parametrize(
    "use", [alternating, other_head_at_last, both_at_last, through_a_second_pass]
)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_outputs_that_are_used_by_turns(use: Use, dropout: float) -> None:
    alike(Heads(dropout=dropout), use, steps=12)


def test_a_rare_other_backward_pass_does_not_end_it() -> None:
    found = alike(Heads(), other_head_at_last, steps=9)
    assert found.regions[0].failure is None


def test_ever_other_backward_passes_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = alike(Heads(), alternating, steps=6 * usage.MOST_UNUSUAL)
    assert "begin at ever other outputs" in found.regions[0].failure
    assert capsys.readouterr().err.count("runs eagerly: its backward passes") == 1


def penalty(model: nn.Module, step: int, x: Tensor) -> float:
    y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.mean() + (g.norm(dim=1) - 1).square().mean()
    loss.backward()
    return loss.item()


def hessian_product(model: nn.Module, step: int, x: Tensor) -> float:
    y = model(x)
    loss = (y[0] if isinstance(y, tuple) else y).square().mean()
    weights = list(model.parameters())
    first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    inner = sum(
        (gradient * gradient.detach().sign()).sum() for gradient in first if gradient is not None
    )
    assert isinstance(inner, Tensor)
    inner.backward()
    return inner.item()


def penalty_of_a_generated_input(model: nn.Module, step: int, x: Tensor) -> float:
    fake = (2 * x).tanh()
    y = model(fake)
    (g,) = torch.autograd.grad((y[0] if isinstance(y, tuple) else y).sum(), fake, create_graph=True)
    g.square().sum().backward()
    assert x.grad is not None
    return x.grad.sum().item()


def only_late(model: nn.Module, step: int, x: Tensor) -> float:
    return penalty(model, step, x) if step == 5 else model(x)[0].mean().backward() or 0.0


@pytest.mark.parametrize("use", [penalty, hessian_product, penalty_of_a_generated_input, only_late])
@pytest.mark.parametrize("make", [lambda: Heads(dropout=0.3), Chain])
def test_a_backward_pass_is_differentiated(use: Use, make: Callable[[], nn.Module]) -> None:
    alike(make(), use)


def between(model: nn.Module, step: int, x: Tensor) -> list[float]:
    y, first, second = model(x)
    found = torch.autograd.grad(y.sum(), [first, second], retain_graph=True)
    y.square().mean().backward()
    return [gradient.sum().item() for gradient in found]


def with_weights(model: nn.Module, step: int, x: Tensor) -> list[float]:
    y, first, _ = model(x)
    found = torch.autograd.grad(y.sum(), [first, model.a.weight, x])
    model(x)[0].mean().backward()
    return [gradient.sum().item() for gradient in found]


def scaled(model: nn.Module, step: int, x: Tensor) -> None:
    y, first, second = model(x)
    first.register_hook(lambda g: 0.5 * g)
    second.register_hook(lambda g: 2 * g)
    (y.sum() + second.sum()).backward()


def kept(model: nn.Module, step: int, x: Tensor) -> list[float]:
    y, first, second = model(x)
    first.retain_grad()
    second.retain_grad()
    y.square().sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    return [first.grad.sum().item(), second.grad.sum().item()]


def written_to(model: nn.Module, step: int, x: Tensor) -> None:
    y, first, _ = model(x)
    first.mul_(2)  # tanh has kept it: torch raises
    y.sum().backward()


def cut_off(model: nn.Module, step: int, x: Tensor) -> None:
    y, _, second = model(x)
    second.detach_()
    y.sum().backward()


def twice(model: nn.Module, step: int, x: Tensor) -> str:
    y, _, _ = model(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError) as raised:
        y.sum().backward()
    return str(raised.value)[:40]


def only_at_the_end(model: nn.Module, step: int, x: Tensor) -> Any:
    return kept(model, step, x) if step > 4 else first_head(model, step, x)


@pytest.mark.parametrize(
    "use", [between, with_weights, scaled, kept, written_to, cut_off, twice, only_at_the_end]
)
def test_one_output_goes_by_another(use: Use) -> None:
    alike(Chain(), use)


def test_a_loss_beside_its_logits_stays_compiled() -> None:
    found = alike(Chain(), first_head)
    (region,) = found.regions
    assert region.failure is None
    assert region.told.chosen == {"aot-eager": 1}


def test_what_a_graph_keeps_goes_with_its_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    deepytorch.compile(model, "aot-eager")
    for _ in range(3):
        loss = model(torch.randn(4, 6)).sum()
        loss.backward()
    node: Any = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert node.held is None


def test_tensors_that_cannot_be_checked_train_eagerly() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x)
            return h, h.to(torch.float8_e5m2)

    alike(Half(), first_head)
