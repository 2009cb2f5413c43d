"""Tests of users' doings around a replayed model: it trains as stock does, or is left alone."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepytorch_core.compile import capture
from deepytorch_core.compile.capture import Capture
from deepytorch_core.compile.fixes import packed_rows
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)]

DEVICE = "cuda"
STEPS = 14


def rows(number: int) -> Tensor:
    return torch.randn(9, 6, generator=torch.Generator().manual_seed(number)).to(DEVICE)


def train(model: nn.Module, loss_of: Callable[[Any, int], Tensor]) -> list[float]:
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def captured(model: Any) -> Capture:
    found = Capture(model, is_on=lambda: True)
    found.install()
    return found


def trains_alike(model: nn.Module, loss_of: Callable[[Any, int], Tensor]) -> Capture:
    """Losses, parameters and buffers are those of a twin without graphs."""
    model.to(DEVICE).train()
    twin = copy.deepcopy(model)
    found = captured(model)
    assert train(model, loss_of) == pytest.approx(train(twin, loss_of), rel=1e-4, abs=1e-6)
    for mine, theirs in zip(
        (*model.parameters(), *model.buffers()), (*twin.parameters(), *twin.buffers()), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return found


class Layers(nn.Module):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), *more, nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def squares(model: Any, number: int) -> Tensor:
    return model(rows(number)).square().mean()  # type: ignore[no-any-return]


def test_an_attribute_that_is_only_called_hooks_is_a_plain_one() -> None:
    model = Layers()
    model.layers[0].use_hooks = True
    model.layers[0].num_hooks_ = 1
    assert trains_alike(model, squares).has_replays


def test_three_passes_before_one_backward_pass() -> None:
    def triplet(model: Any, number: int) -> Tensor:
        anchor, other, far = (model(rows(100 * number + n)) for n in range(3))
        return (anchor - other).square().mean() + (2 - (anchor - far).square().mean()).relu()

    trains_alike(Layers(nn.BatchNorm1d(6)), triplet)


class Average(nn.Module):
    """A moving average that the output goes by, written in place or anew."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            change = 0.2 * (y.mean(0) - self.average)
            if self.in_place:
                self.average.add_(change)
            else:
                self.average = self.average + change
        return y - self.average


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_passes_write_goes_on(in_place: bool) -> None:
    found = trains_alike(Average(in_place), squares)
    assert found.has_replays == in_place


class Drawing(nn.Module):
    """Draws from a generator that nobody else knows."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.generator, torch.Generator):
            factor = float(torch.rand((), generator=self.generator).numpy())
        else:
            factor = self.generator.random()
        return x + (0.5 + factor) * self.linear(x)


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_who_draws_from_a_generator_of_its_own_is_left_alone(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    made = {
        "python": lambda: random.Random(5),
        "numpy": lambda: numpy.random.default_rng(5),
        "torch": lambda: torch.Generator().manual_seed(5),
    }[kind]
    model = Drawing(None).to(DEVICE).train()
    twin = copy.deepcopy(model)
    model.generator, twin.generator = made(), made()
    found = captured(model)
    assert train(model, squares) == pytest.approx(train(twin, squares), rel=1e-4)
    assert found.problem == "generator is a generator of random numbers of its own"


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.one(h), self.other(h)


def test_a_head_without_a_part_in_the_loss_gets_no_gradient() -> None:
    def of_one_head(model: Any, number: int) -> Tensor:
        first, other = model(rows(number))
        return (first if number < STEPS // 2 else other).square().mean()  # type: ignore[no-any-return]

    found = trains_alike(Heads(), of_one_head)
    assert found.has_replays


class Marks(nn.Module):
    """Assigns numbers: of the code, and one of the module's that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mark = nn.Linear(6, 6), 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).clone()
        x[..., 0] = 2
        x[:, 1:3] = self.mark
        return self.inner(x)


class Scoring(nn.Module):
    """Returns a loss, and the scores that its user makes another loss of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.second(self.first(x).tanh())
        return {"loss": scores.square().mean(), "scores": scores}


def test_a_loss_of_other_outputs_than_the_models_loss_is_replayed() -> None:
    found = trains_alike(Scoring(), lambda model, number: model(rows(number))["scores"].exp().sum())
    assert found.has_replays
    assert found.problem is None
    assert found._num_repeated == 0


def test_numbers_may_be_assigned() -> None:
    def loss_of(model: Any, number: int) -> Tensor:
        model.mark = 0.5 if number < STEPS // 2 else 1.5
        return model(rows(number)).square().mean()

    found = trains_alike(Marks(), loss_of)
    assert found.failure is None
    assert found.has_replays


def test_a_second_backward_pass_adds_up() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(DEVICE).train()
    twin = copy.deepcopy(model)
    apply_kernels(KernelSetting(model=model, device=torch.device(DEVICE)), "on")
    found = captured(model)
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 131, (3, 24), generator=generator).to(DEVICE)
        for own in (model, twin):
            own.zero_grad()
            loss = own(input_ids=ids, labels=ids.clone()).loss
            loss.backward(retain_graph=True)
            loss.backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    assert found.has_replays


def test_transformations_of_functions_see_the_model_as_it_is() -> None:
    from torch.func import functional_call, grad, vmap

    model = Layers().to(DEVICE).train()
    found = captured(model)
    train(model, squares)
    assert found.has_replays
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: Any, row: Tensor) -> Tensor:
        return functional_call(model, weights, (row[None],)).square().mean()

    gradients = vmap(grad(loss), in_dims=(None, 0))(weights, rows(1))
    assert gradients["layers.0.weight"].shape == (9, 6, 6)


def test_an_expanded_buffer_is_nobodys_hindrance() -> None:
    model = Layers(nn.BatchNorm1d(6))
    model.register_buffer("mask", torch.ones(1).expand(8))
    assert trains_alike(model, squares).has_replays


def test_replays_that_are_only_made_on_top_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MOST_MISSES", 5)

    def twice(model: Any, number: int) -> Tensor:
        loss = squares(model, number)
        loss.backward(retain_graph=True)
        return loss

    found = trains_alike(Layers(), twice)
    assert found.failure is not None
    assert "backward passes are made twice" in found.failure


def test_packed_rows_are_looked_for_again_after_two_captures_at_once() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    look = masks.find_packed_sequence_indices
    both = threading.Barrier(2)

    def look_often() -> None:
        both.wait(30)
        for _ in range(50):
            with packed_rows.without_look():
                assert masks.find_packed_sequence_indices(torch.arange(3)[None]) is None

    threads = [threading.Thread(target=look_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert masks.find_packed_sequence_indices is look


class Seen(list[int]):
    """A list that a pass adds to, as generation does to its cache."""


class Large(Layers):
    """No room for passes of many rows beside graphs; random numbers, which have one device."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__(*more, *([nn.Dropout(0.4)] if DEVICE == "cuda" else []))
        self.found: Capture | None = None

    def forward(self, x: Tensor, seen: Any = None) -> Tensor:
        y = super().forward(x)
        if seen is not None:
            seen.append(1) if isinstance(seen, list) else seen.add_(1)
        if len(x) > 9 and self.found is not None and self.found.has_replays:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return y


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_graphs_make_room_for_a_larger_pass(is_evaluation: bool) -> None:
    model = Large().to(DEVICE)
    twin, x = copy.deepcopy(model), rows(7).repeat(3, 1)
    found = captured(model)
    train(model, squares)
    train(twin, squares)
    vars(model)["found"] = found
    assert found.has_replays
    for network in (model, twin):
        torch.manual_seed(1)
        with torch.set_grad_enabled(not is_evaluation):
            network.train(not is_evaluation)
            network.result = network(x)
    torch.testing.assert_close(model.result, twin.result, rtol=1e-4, atol=1e-5)
    assert "another pass needs their memory" in str(found.failure)
    assert not found.has_replays
    assert train(model, squares) == pytest.approx(train(twin, squares), rel=1e-4, abs=1e-6)


def test_a_pass_that_has_counted_something_is_not_made_twice() -> None:
    model = Large(nn.BatchNorm1d(6)).to(DEVICE)
    found = captured(model)
    train(model, squares)
    vars(model)["found"] = found
    with pytest.raises(torch.OutOfMemoryError):
        model(rows(7).repeat(3, 1))


@pytest.mark.parametrize("kind", ["object", "list", "tensor", "inference"])
def test_a_pass_that_has_written_to_what_it_was_given_is_not_made_twice(kind: str) -> None:
    model = Large().to(DEVICE)
    found = captured(model)
    train(model, squares)
    vars(model)["found"] = found
    model.eval()
    seen: Any = {"object": Seen(), "list": []}.get(kind, torch.zeros(1, device=DEVICE))
    with torch.inference_mode(kind == "inference"), pytest.raises(torch.OutOfMemoryError):
        model(rows(7).repeat(3, 1), seen=seen)
    assert sum(seen) == 1
    assert found.has_replays


class _OtherEachTime(torch.autograd.Function):
    """Returns its first input; the second's gradient is another in each pass."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, unit: float) -> Tensor:
        ctx.save_for_backward(bias)
        ctx.unit = unit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (bias,) = ctx.saved_tensors
        _OtherEachTime.passes += 1
        return gradient, torch.full_like(bias, _OtherEachTime.passes * ctx.unit), None


class Cancelling(Layers):
    """A gradient cancels but for `unit`, as that of a bias of attention's keys does."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _OtherEachTime.apply(super().forward(x), self.bias, self.unit)
        return result


@pytest.mark.parametrize("unit", [1e-7, 0.1])
def test_gradients_that_are_rounding_alone_may_differ(unit: float) -> None:
    _OtherEachTime.passes = 0
    torch.manual_seed(0)
    model = Cancelling(unit).to(DEVICE).train()
    twin = copy.deepcopy(model)
    found = captured(model)
    assert train(model, squares) == pytest.approx(train(twin, squares), rel=1e-4, abs=1e-6)
    assert found.has_replays == (unit < 1e-3)
    if not found.has_replays:
        assert str(found.problem).startswith("given the same twice, its gradient")
