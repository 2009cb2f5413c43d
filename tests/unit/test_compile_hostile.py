"""Models that compilers trip over: nothing raises that eager does not, and results are eager's."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import decisions
from deepytorch_core.compile import policies
from deepytorch_core.compile.life import step_count

pytestmark = pytest.mark.usefixtures("own_profile")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Branches(Base):
    """A branch on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y - 1


class Items(Base):
    """`.item()` in the middle, and a shape that depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        scale = y.abs().max().item()
        kept = y[y > 0]
        return self.b(y / (1 + scale)) + kept.sum()


class Prints(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("shape", tuple(x.shape))
        y = super().forward(x)
        print("done")
        return y


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2)


class CustomAutograd(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Clip.apply(super().forward(x))


class InPlace(Base):
    """Buffers and activations written in place, also through views."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y = self.a(x).clone()
        y[:, :2] *= 2
        y.t()[3].add_(self.mean[3])
        return self.b(y).relu_() + self.steps


class ListOfDicts(Base):
    def forward(self, batch: list[dict[str, Any]]) -> torch.Tensor:
        x = torch.stack([sample["x"] for sample in batch])
        return super().forward(x) * sum(sample["weight"] for sample in batch)


class Complex(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.fft(self.a(x)) * torch.exp(1j * self.b(x))
        return z.abs() + z.real


class Dropouts(Base):
    """Random numbers of three kinds, with the script's seed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.a(x), 0.4, self.training)
        return self.b(y + 0.1 * torch.randn_like(y)) * torch.rand(1)


class Tied(nn.Module):
    """The embedding's weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.Sequential(*(Base() for _ in range(5)))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, :3] * 10).long().remainder(7)
        return self.head(self.layers(self.embedding(tokens)))


class Counts(Base):
    """State in Python that the result depends on, and an exception on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(len(self.seen)))
        try:
            self.a(x[:, :5])
        except RuntimeError:
            x = x + 0.5
        return super().forward(x) + self.seen[-1]


def _third_party() -> Callable[[torch.Tensor], torch.Tensor]:
    if not hasattr(torch.ops, "hostile") or not hasattr(torch.ops.hostile, "cube"):

        @torch.library.custom_op("hostile::cube", mutates_args=())
        def cube(x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.detach().numpy() ** 3)

        # No fake implementation: what a package that knows no compiler ships.
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 3 * ctx.x**2 * gradient

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            (ctx.x,) = inputs

        cube.register_autograd(backward, setup_context=setup)
    return torch.ops.hostile.cube


class ThirdParty(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_third_party()(self.a(x)))


class Repeated(nn.Module):
    """Blocks of a hostile kind, so that they are compiled as blocks."""

    def __init__(self, block: type[Base]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int, model: nn.Module) -> Any:
    rows = 3 + step if isinstance(model, Growing) else 4
    x = torch.randn(rows, 6)
    if isinstance(model, ListOfDicts):
        return [{"x": row, "weight": 0.1 * index} for index, row in enumerate(x)]
    return x


class Growing(Base):
    """A longer sequence at every step."""


class LooksUp(Growing):
    """A number from a list in Python, by the length: every length is other code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * [1 + 0.01 * number for number in range(99)][x.shape[0]]


def train(
    model: nn.Module, change: Callable[[nn.Module, int], None] | None = None, steps: int = 5
) -> Any:
    """Losses, parameters, buffers, output to the terminal: whatever could differ."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(2)
    losses = []
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for step in range(steps):
            loss = model(batch(step, model)).abs().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if change is not None:
                change(model, step)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return losses, state, out.getvalue(), torch.rand(1)


def replace_after_first(model: nn.Module, step: int) -> None:
    if step == 0:
        torch.manual_seed(9)
        model.b = nn.Sequential(nn.Linear(6, 6), nn.ReLU())


def compare(model: nn.Module, policy: str, **more: Any) -> None:
    twin = copy.deepcopy(model)
    engine.compile(model, policy, is_patient=False)
    trains_alike(model, twin, **more)


def trains_alike(model: nn.Module, twin: nn.Module, **more: Any) -> None:
    expected = train(twin, **more)
    losses, state, said, random = train(model, **more)
    assert losses == pytest.approx(expected[0], rel=1e-4)
    assert list(state) == list(expected[1])
    for name, value in state.items():
        torch.testing.assert_close(value, expected[1][name], rtol=1e-3, atol=1e-5)
    assert said == expected[2]
    assert torch.equal(random, expected[3])
    assert getattr(model, "seen", None) == getattr(twin, "seen", None)


class Clock:
    """Steps take half as long where they are compiled."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def on_step(self, model: nn.Module, step: int) -> None:
        found = engine.compilation_of(model)
        self.now += 0.5 if found is not None and found.is_on else 1.0


HOSTILE = [
    *(Branches, Items, Prints, CustomAutograd, Growing, InPlace, ListOfDicts),
    *(Complex, Dropouts, Tied, Counts, ThirdParty),
]


@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)
def test_compile_hostile_model_trains_as_eager(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    compare(kind(), "aot-eager")


# The decision for a compiled way that is faster, and for a model that has none.
COMPILED = ("aot-eager", "faster than eager")
DECIDED = {LooksUp: ("eager", "nothing of it could be compiled")}


# The test above shows that the others are compiled.
OFTEN = (Branches, Prints, InPlace, Dropouts, LooksUp)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.extended] * (kind not in OFTEN), id=kind.__name__)
        for kind in (*HOSTILE, LooksUp)
    ],
)
def test_compile_hostile_model_trains_as_eager_until_auto_has_decided_and_after(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("aot-eager")])
    monkeypatch.setattr(step_count, "time", clock := Clock())
    decisions._made.clear()
    torch.manual_seed(1)
    model = kind()
    compare(model, "auto", steps=64, change=clock.on_step)
    found = engine.compilation_of(model)  # nothing where it is eager
    assert found is None or found.is_settled
    made = decisions.made()[-1]
    assert (made["chosen"], made["reason"]) == DECIDED.get(kind, COMPILED)


@pytest.mark.parametrize("kind", [Prints, Dropouts], ids=lambda kind: kind.__name__)
def test_compile_hostile_blocks_train_as_eager(kind: type[Base]) -> None:
    torch.manual_seed(1)
    compare(Repeated(kind), "aot-eager")


def test_compile_hostile_replacement_of_a_part() -> None:
    torch.manual_seed(1)
    compare(Base(), "aot-eager", change=replace_after_first)


def test_compile_hostile_hooks_see_what_they_saw() -> None:
    def hooked() -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(1)
        model, seen = Repeated(Base), []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
            layer.a.register_forward_hook(lambda _, args, y: y + 1)
            layer.register_full_backward_hook(lambda _, gi, go: seen.append(go[0].sum().item()))
        model.layers[0].a.weight.register_hook(lambda gradient: gradient * 0.5)
        return model, seen

    stock, expected = hooked()
    model, seen = hooked()
    deepytorch.compile(model, "aot-eager")
    assert train(model)[0] == pytest.approx(train(stock)[0], rel=1e-4)
    assert seen == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_compile_errors_of_the_model_come_through() -> None:
    class Refuses(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if x.shape[0] == 5:
                raise KeyError("five")
            return y

    model = Refuses()
    deepytorch.compile(model, "aot-eager")
    model(torch.randn(4, 6)).sum().backward()
    for _ in range(2):
        with pytest.raises(KeyError, match="five"):
            model(torch.randn(5, 6))
        with pytest.raises(RuntimeError, match="shapes|size"):
            model(torch.randn(4, 7))
    model(torch.randn(4, 6)).sum().backward()


@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [*HOSTILE, LooksUp], ids=lambda kind: kind.__name__)
def test_compile_hostile_model_trains_as_eager_under_inductor(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    compare(kind(), "inductor")


def test_compile_hostile_model_under_inductor() -> None:
    class Both(InPlace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.dropout(super().forward(x), 0.4, self.training)
            return y + 0.1 * torch.randn_like(y) * torch.rand(1)

    torch.manual_seed(1)
    model = Both()
    compare(model, "inductor")
    found = engine.compilation_of(model)
    assert found is not None
    (region,) = found.regions
    assert region.failure is None
    assert region.told.chosen.get("inductor")
