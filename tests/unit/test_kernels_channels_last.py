"""kernels: channels_last is tried on the first batch; weights and optimizers see nothing of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepytorch_core import guard
from deepytorch_core.base import decisions
from deepytorch_core.nn import channels_last
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels

pytestmark = pytest.mark.usefixtures("quiet_profile")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # its gradient would be zero but for rounding
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.Flatten(),
        nn.Linear(6 * 4 * 3, 5),
    )


class Layouts(TorchDispatchMode):
    """Notes whether inputs and weights of convolutions are in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            x, weight = args[:2]
            self.seen.append((_is_last(x), _is_last(weight)))
        return func(*args, **(kwargs or {}))


def _is_last(tensor: torch.Tensor) -> bool:
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return is_last and not tensor.is_contiguous()


def is_channels_last(model: nn.Module) -> bool:
    """Whether convolutions get their inputs so; weights never are."""
    with torch.no_grad(), Layouts() as layouts:
        model.eval()(torch.ones(2, 3, 9, 7))
    model.train()
    assert not any(weight for _, weight in layouts.seen)
    return all(x for x, _ in layouts.seen)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        torch.manual_seed(step)
        x, y = torch.randn(4, 3, 9, 7), torch.randint(0, 5, (4,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    def interleaved(arms: Any, device: Any, **_: Any) -> dict[str, list[float]]:
        for call in arms.values():
            call()
        return {name: [seconds[name]] * 5 for name in arms}

    monkeypatch.setattr(guard, "interleaved", interleaved)


@pytest.mark.parametrize("wins", [True, False])
def test_kernels_channels_last_is_kept_if_faster_and_trains_the_same(
    wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {"stock": 2.0, "channels_last": 1.0 if wins else 3.0})
    model, reference = network(), network()
    optimizers = [torch.optim.AdamW(either.parameters()) for either in (model, reference)]
    undo = channels_last.choose(model)
    assert not is_channels_last(model), "before there is a batch"
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 3, 9, 7)).isfinite().all(), torch.tensor(True))
        reference(torch.ones(2, 3, 9, 7))
    assert not is_channels_last(model), "nor by a batch without gradients"
    losses = train(model, optimizers[0], range(4))
    assert losses == pytest.approx(train(reference, optimizers[1], range(4)), rel=1e-5)
    assert is_channels_last(model) == wins
    for name, value in model.state_dict().items():
        assert value.is_contiguous()
        # BatchNorm has counted its batches once each: the trials left no trace.
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5)
    undo()
    assert not is_channels_last(model)
    assert not model._forward_pre_hooks
    assert train(model, optimizers[0], range(4, 6)) == pytest.approx(
        train(reference, optimizers[1], range(4, 6)), rel=1e-5
    )
    (decision,) = decisions.made()
    assert decision["chosen"] == ("channels_last" if wins else "stock")
    assert set(decision["times_ms"]) == {"stock", "channels_last"}


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("is_fused", [False, True])
def test_kernels_channels_last_changes_nothing_of_weights_gradients_and_state(
    make: Any, is_fused: bool
) -> None:
    model, reference = network(), network()
    keywords = {"lr": 0.01, **({"momentum": 0.9} if make is torch.optim.SGD else {})}
    ours, stock = (make(either.parameters(), **keywords) for either in (model, reference))
    if is_fused:
        setting = KernelSetting(
            model=nn.Linear(1, 1), optimizers=[ours], device=torch.device("cpu")
        )
        assert apply_kernels(setting, "on").names
    undo = channels_last.choose(model, mode="on")
    assert is_channels_last(model)
    train(model, ours, range(3))
    train(reference, stock, range(3))
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        assert mine.stride() == theirs.stride()
        assert mine.grad.stride() == theirs.grad.stride()
        state, expected = ours.state[mine], stock.state[theirs]
        assert {name: tensor.stride() for name, tensor in state.items()} == {
            name: tensor.stride() for name, tensor in expected.items()
        }
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat, model.parameters())
    train(model, ours, range(3, 5))
    undo()
    assert not is_channels_last(model)


class Nested(nn.Module):
    """Takes its inputs in containers, and changes one of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, batch: dict[str, Any], *, more: list[torch.Tensor]) -> torch.Tensor:
        images, (other,) = batch["images"], batch["others"]
        return self.inner(images.mul_(0.5) + other + more[0])


@pytest.mark.parametrize("wins", [True, False])
def test_kernels_channels_last_is_tried_apart_from_what_made_the_inputs(
    wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {"stock": 2.0, "channels_last": 1.0 if wins else 3.0})
    gradients = []
    for ours in (True, False):
        model, encoder = Nested(), nn.Conv2d(3, 3, 1)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.fill_(0.3)
        image = nn.Parameter(torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(1)))
        if ours:
            channels_last.choose(model)
        made = encoder(image)
        loss = model({"images": made, "others": (image,)}, more=[torch.ones(4, 3, 9, 7)])
        loss.square().mean().backward()
        assert bool(model._forward_pre_hooks) == ours
        gradients.append([weight.grad for weight in (image, *encoder.parameters())])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_kernels_channels_last_leaves_other_models() -> None:
    conv = nn.Conv2d(3, 16, 3)
    cases = {
        "0% of the parameters": nn.Linear(4, 4),
        "in channels_last already": nn.Sequential(conv).to(memory_format=torch.channels_last),
        "SyncBatchNorm communicates": nn.Sequential(nn.Conv2d(3, 16, 3), nn.SyncBatchNorm(16)),
    }
    for reason, model in cases.items():
        channels_last.choose(model, mode="on")
        assert reason in decisions.made()[-1]["reason"]
        assert not model._forward_pre_hooks


def test_kernels_channels_last_of_a_copy_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    channels_last.choose(model)
    copied = copy.deepcopy(model)
    monkeypatch.setattr(guard, "choose", lambda *_, **__: pytest.fail("measured"))
    copied(torch.randn(2, 3, 9, 7)).sum().backward()
    assert not is_channels_last(copied)
