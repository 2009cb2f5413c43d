"""The fused cross-entropy: which calls it takes, its gradients, and that it comes and goes."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from deepytorch_core.nn import cross_entropy as fused
from deepytorch_core.nn.kernels import KernelSetting
from deepytorch_core.nn.swaps import cross_entropy as swap

GPU = torch.device("cuda")


def forward(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Compute by torch's operations as the kernels do."""
    normalizers = torch.logsumexp(logits.float(), 1)
    counts = targets != ignore_index
    chosen = logits.float().gather(1, torch.where(counts, targets, 0)[:, None])[:, 0]
    return torch.where(counts, normalizers - chosen, 0.0), normalizers


def backward(
    logits: Tensor, targets: Tensor, normalizers: Tensor, scale: Tensor, *, ignore_index: int
) -> Tensor:
    counts = targets != ignore_index
    chosen = F.one_hot(torch.where(counts, targets, 0), logits.shape[1])
    probabilities = torch.exp(logits.float() - normalizers[:, None])
    return torch.where(counts[:, None], (probabilities - chosen) * scale, 0.0).to(logits.dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = types.ModuleType("cross_entropy_kernels")
    made.forward, made.backward = forward, backward
    monkeypatch.setitem(sys.modules, "deepytorch_core.nn.cross_entropy_kernels", made)
    monkeypatch.setattr("deepytorch_core.nn.cross_entropy_kernels", made, raising=False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_losses_and_gradients_of_both_orders_are_stocks(is_mean: bool, ignore_index: int) -> None:
    torch.manual_seed(ignore_index % 7)
    logits = torch.randn((9, 31), dtype=torch.float32, requires_grad=True)
    targets = torch.randint(0, 31, (9,), dtype=torch.int64)
    targets[4] = ignore_index
    exact = logits.detach().double().requires_grad_()
    reduction = "mean" if is_mean else "sum"
    found, firsts, seconds = [], [], []
    for x, loss in (
        (logits, fused.cross_entropy(logits, targets, is_mean=is_mean, ignore_index=ignore_index)),
        (exact, F.cross_entropy(exact, targets, ignore_index=ignore_index, reduction=reduction)),
    ):
        (plain,) = torch.autograd.grad(2 * loss, x, retain_graph=True)
        (first,) = torch.autograd.grad(2 * loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        torch.testing.assert_close(plain, first.detach())
        found.append(loss.detach().double())
        firsts.append(first.detach().double())
        seconds.append(second.double())
    for ours, expected in (found, firsts, seconds):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("kernels")
def test_rows_that_all_do_not_count_have_no_mean_and_no_gradient() -> None:
    logits = torch.randn((3, 5), dtype=torch.float32, requires_grad=True)
    targets = torch.full((3,), -100, dtype=torch.int64)
    loss = fused.cross_entropy(logits, targets, is_mean=True, ignore_index=-100)
    assert loss.isnan()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.equal(gradient, torch.zeros_like(logits))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": torch.linspace(0.5, 2.0, 6)},
        {"ignore_index": 2},
    ],
)
def test_calls_that_are_not_taken_are_stocks_bit_for_bit(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.randn((7, 6), dtype=torch.float32, requires_grad=True)
    targets = torch.arange(7, dtype=torch.int64) % 6
    expected = F.cross_entropy(logits, targets, **options)
    reduction = {"none": 0, "mean": 1, "sum": 2}[options.get("reduction", "mean")]
    others = (options.get("ignore_index", -100), options.get("label_smoothing", 0.0))
    ours = swap._called(logits, targets, options.get("weight"), reduction, *others)
    assert torch.equal(ours, expected)
    gradients = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, expected)]
    assert torch.equal(*gradients)


def on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_tensors_are_taken_by_kind_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    logits, targets = on_gpu((8, 5000), torch.bfloat16), on_gpu((8,), torch.int64)
    assert swap.is_served(logits, targets)
    assert swap.is_served(logits[:, :4500], targets)
    others = [
        (logits[:, :4000], targets),  # few classes
        (logits.t(), on_gpu((5000,), torch.int64)),
        (logits[:, ::1].double(), targets),
        (logits, on_gpu((8, 5000), torch.float32)),  # probabilities
        (on_gpu((8, 5000, 3), torch.bfloat16), on_gpu((8, 3), torch.int64)),
        (logits[:0], targets[:0]),
        (logits, targets.int()),
        (logits.as_subclass(type("Own", (Tensor,), {})), targets),
    ]
    for arguments in others:
        assert not swap.is_served(*arguments)
    monkeypatch.undo()
    assert not swap.is_served(logits, targets)


def test_who_traces_or_transforms_gets_stocks_operations() -> None:
    assert not swap._is_looked_at()
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(swap._is_looked_at())
        return x.sum()

    x = torch.ones(3)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.jit.trace(look, (x,), check_trace=False)
    with FlopCounterMode(display=False):
        look(x)
    assert seen == [True] * 4


def test_the_operators_kernel_is_there_while_somebody_wants_it() -> None:
    name = "aten::cross_entropy_loss"

    def is_there() -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, swap.KEY))

    assert not is_there()
    first, second = swap.FusedCrossEntropy().apply(None, None), swap._serving.begin()  # type: ignore[arg-type]
    first()
    first()
    assert is_there()
    second()
    assert not is_there()


@pytest.mark.parametrize(
    ("width", "autocast", "device", "is_found"),
    [
        (5000, torch.bfloat16, GPU, True),
        (5000, None, GPU, False),
        (5000, torch.bfloat16, torch.device("cpu"), False),
        (100, torch.float16, GPU, False),
    ],
)
def test_a_model_with_many_classes_under_autocast_has_the_place(
    width: int, autocast: torch.dtype | None, device: torch.device, is_found: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, width))
    places = list(swap.find(KernelSetting(model=model, device=device, autocast=autocast)))
    assert [place.what for place in places] == ([f"cross-entropy({width})"] if is_found else [])
