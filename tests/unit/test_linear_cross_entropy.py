"""kernels: the loss that never holds all logits, and logits that are computed when read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch_core.nn.deferred_logits import DeferredLogits
from deepytorch_core.nn.linear_cross_entropy import chunk_size, linear_cross_entropy_sum

TOKENS, WIDTH, VOCABULARY = 77, 24, 101


class LoRA(nn.Module):
    """A frozen head with a trained low-rank part, as PEFT wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 3, bias=False, dtype=base.weight.dtype)
        self.b = nn.Linear(3, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


def head_of(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(4)
    head = nn.Linear(WIDTH, VOCABULARY, bias=kind == "bias", dtype=dtype)
    if kind == "frozen":
        head.requires_grad_(False)
    return LoRA(head) if kind == "lora" else head


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[10:31] = -100  # a whole chunk without targets among them
    return hidden, targets


def gradients(head: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor | None]:
    return [hidden.grad, *(parameter.grad for parameter in head.parameters())]


@pytest.mark.parametrize("kind", ["plain", "bias", "frozen", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 10, 1000])
def test_kernels_loss_and_gradients_are_those_of_all_logits(
    kind: str, dtype: torch.dtype, chunk: int
) -> None:
    head, (hidden, targets) = head_of(kind, dtype), inputs(dtype)
    # The reference is exact: the same weights and inputs in float64.
    exact, wide = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    expected = F.cross_entropy(exact(wide), targets, reduction="sum")
    (0.25 * expected).backward()
    loss = linear_cross_entropy_sum(hidden, head, targets, chunk=chunk)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (0.25 * loss).backward()
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    for ours, reference in zip(gradients(head, hidden), gradients(exact, wide), strict=True):
        if reference is None:
            assert ours is None
        else:
            assert ours is not None
            assert ours.dtype == dtype
            error = (ours.double() - reference).norm() / reference.norm()
            assert error < tolerance


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_kernels_loss_under_autocast_is_stocks(kind: str) -> None:
    head, (hidden, targets) = head_of(kind, torch.float32), inputs(torch.float32)
    stock, same = copy.deepcopy(head), hidden.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(stock(same).float(), targets, reduction="sum")
        loss = linear_cross_entropy_sum(hidden, head, targets, chunk=16)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    expected.backward()
    loss.backward()
    for ours, reference in zip(gradients(head, hidden), gradients(stock, same), strict=True):
        if reference is not None:
            assert ours is not None
            assert ours.dtype == reference.dtype == torch.float32
            assert (ours - reference).norm() < 1e-2 * reference.norm()


def test_kernels_loss_never_holds_all_logits() -> None:
    head, (hidden, targets) = head_of("plain", torch.float32), inputs(torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                largest = max(largest, made.numel())
            return made

    with Watch():
        linear_cross_entropy_sum(hidden, head, targets, chunk=8).backward()
    assert largest < TOKENS * VOCABULARY / 2
    assert largest >= 8 * VOCABULARY


def test_kernels_loss_of_nothing() -> None:
    head, (hidden, targets) = head_of("plain", torch.float32), inputs(torch.float32)
    linear_cross_entropy_sum(hidden, head, targets.fill_(-100)).backward()
    assert not hidden.grad.any()
    for kind in ("plain", "lora"):
        empty = torch.empty(0, WIDTH, requires_grad=True)
        loss = linear_cross_entropy_sum(empty, head_of(kind, torch.float32), targets[:0])
        loss.backward()
        assert loss.item() == 0.0


def test_kernels_loss_twice_through_a_retained_graph() -> None:
    head, (hidden, targets) = head_of("plain", torch.float32), inputs(torch.float32)
    loss = linear_cross_entropy_sum(hidden, head, targets)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(hidden.grad, 3 * once)


def test_kernels_loss_of_wrong_shapes() -> None:
    head, (hidden, targets) = head_of("plain", torch.float32), inputs(torch.float32)
    with pytest.raises(ValueError, match=r"expected \(tokens, width\) and \(tokens,\)"):
        linear_cross_entropy_sum(hidden[None], head, targets)


def test_kernels_chunks_fit_the_vocabulary() -> None:
    small, large = nn.Linear(2, 100), nn.Linear(2, 300_000)
    assert chunk_size(small, torch.device("cpu")) > chunk_size(large, torch.device("cpu")) >= 64
    assert chunk_size(large, torch.device("cuda")) == 128


def deferred() -> tuple[DeferredLogits, torch.Tensor, list[int]]:
    head, hidden = head_of("plain", torch.float32), inputs(torch.float32)[0]
    computed: list[int] = []

    def compute(rows: torch.Tensor) -> torch.Tensor:
        computed.append(1)
        return head(rows)

    made = DeferredLogits.make(
        compute,
        hidden,
        parameters=head.parameters(),
        shape=(TOKENS, VOCABULARY),
        dtype=torch.float32,
        device=hidden.device,
        source="source",
    )
    return made, head(hidden), computed


def test_kernels_deferred_logits_are_not_computed_to_be_described_or_cast() -> None:
    logits, expected, computed = deferred()
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == expected.shape
    assert (logits.dtype, logits.device, logits.ndim) == (torch.float32, expected.device, 2)
    assert (logits.numel(), len(logits), logits.size(1)) == (expected.numel(), TOKENS, VOCABULARY)
    assert logits.requires_grad
    assert logits.grad_fn is not None
    half = logits.to(torch.bfloat16)
    assert isinstance(half, DeferredLogits)
    assert (half.dtype, half.source) == (torch.bfloat16, "source")
    assert isinstance(half.float(), DeferredLogits)
    assert logits.float() is logits
    assert not computed
    assert torch.equal(half.materialized(), expected.bfloat16())


def test_kernels_deferred_logits_hook_their_gradient_before_they_are_computed() -> None:
    logits, _, computed = deferred()
    seen: list[torch.Tensor] = []
    logits.register_hook(seen.append)
    removed = logits.register_hook(lambda gradient: 1 / 0)
    logits.register_hook(lambda gradient: 2 * gradient)
    removed.remove()
    assert not computed
    made = logits * 1.0
    made.register_hook(lambda gradient: torch.full_like(gradient, 3.0))
    made.sum().backward()
    assert torch.equal(seen[0], torch.full((TOKENS, VOCABULARY), 3.0))
    with torch.no_grad():
        assert deferred()[0].grad_fn is None


def test_kernels_deferred_logits_are_what_stock_gives_to_whoever_reads() -> None:
    logits, expected, computed = deferred()
    assert torch.equal(logits, expected)
    assert torch.equal(logits[..., :-1, :], expected[..., :-1, :])
    assert torch.equal(torch.cat([logits, logits]), torch.cat([expected, expected]))
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits.detach().clone(), expected.detach())
    assert torch.equal(F.softmax(logits, -1), F.softmax(expected, -1))
    assert torch.equal(pickle.loads(pickle.dumps(logits.detach())), expected.detach())
    assert repr(logits.detach()) == repr(expected.detach())
    assert len(computed) == 1


def test_kernels_deferred_logits_have_a_gradient_after_a_look_without() -> None:
    logits, _, computed = deferred()
    with torch.no_grad():
        logits.sum()
    assert logits.sum().requires_grad
    assert len(computed) == 1


def test_kernels_deferred_logits_keep_their_autocast() -> None:
    head, hidden = head_of("plain", torch.float32), inputs(torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = head(hidden)
        made = DeferredLogits.make(
            head,
            hidden,
            shape=expected.shape,
            dtype=torch.bfloat16,
            device=hidden.device,
        )
    assert torch.equal(made + 0, expected + 0)
