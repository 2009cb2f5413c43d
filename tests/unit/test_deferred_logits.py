"""Logits that come late: whoever takes them gets stock's values, and gives its gradient."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepytorch_core.nn.deferred_logits import BYPASSED, DeferredLogits, WatchedLogits

TOKENS, WIDTH, VOCABULARY = 7, 6, 11


class Square(torch.autograd.Function):
    """Somebody's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient * ctx.saved_tensors[0]


class Trebled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 3 * gradient


def changed_without_gradient(logits: Tensor) -> Tensor:
    with torch.no_grad():
        logits[0] = 2
    return logits.square().sum()


def changed_after_a_copy(logits: Tensor) -> Tensor:
    copied = logits.clone()
    with torch.no_grad():
        logits.mul_(2)
    return copied.square().sum() + logits.exp().sum()


def changed_in_a_view(logits: Tensor) -> Tensor:
    rows = logits.view(-1, VOCABULARY)
    rows[1:3].mul_(0.5)
    return rows.square().sum() + Square.apply(logits)


def differentiated_twice(logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(logits.pow(3).sum(), logits, create_graph=True)
    return gradient.square().sum()


def of_a_transform(logits: Tensor) -> Tensor:
    value, back = torch.func.vjp(lambda x: x.square().sum(), logits)
    return value + back(torch.ones(()))[0].sum()


def hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: 2 * gradient)
    return logits.square().sum() + Square.apply(logits)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "operation": lambda logits: logits.square().sum(),
    "function": Square.apply,
    "function of a cast": lambda logits: Square.apply(logits.double()).float(),
    "function of a clone": lambda logits: Square.apply(logits.clone()),
    "function, then operation": lambda logits: Square.apply(logits) + logits.exp().sum(),
    "operation, then function": lambda logits: logits.exp().sum() + Square.apply(logits),
    "function in place": lambda logits: Trebled.apply(logits).square().sum() + logits.exp().sum(),
    "in place": lambda logits: logits.mul_(2).square().sum() + Square.apply(logits),
    "in place without gradients": changed_without_gradient,
    "in place after a copy": changed_after_a_copy,
    "in place in a view": changed_in_a_view,
    "index": lambda logits: logits[1:3][logits[1:3] > 0].sum(),
    "checkpoint": lambda logits: checkpoint(torch.exp, logits, use_reentrant=False).sum(),
    "reentrant checkpoint": lambda logits: checkpoint(torch.exp, logits, use_reentrant=True).sum(),
    "transform": of_a_transform,
    "vmap": lambda logits: torch.func.vmap(lambda row: row.square().sum())(logits).sum(),
    "if it has a gradient": lambda logits: logits.sum() * (3.0 if logits.requires_grad else 0.0),
    "second derivative": differentiated_twice,
    "hook": hooked,
    "retained": lambda logits: (logits.retain_grad(), logits.square().sum())[1],
    "compiled": lambda logits: torch.compile(lambda x: x.exp().sum(), backend="eager")(logits),
}


def weights() -> tuple[Tensor, Tensor]:
    """A tied head's, which are an embedding too, and another layer's."""
    generator = torch.Generator().manual_seed(3)
    made = (torch.randn(*size, generator=generator) for size in ((VOCABULARY, WIDTH), (WIDTH,)))
    head, layer = (tensor.div(3).requires_grad_() for tensor in made)
    return head, layer


def late(hidden: Tensor, head: Tensor) -> DeferredLogits:
    return DeferredLogits.make(
        lambda rows: F.linear(rows, head),
        hidden,
        parameters=[head],
        shape=(TOKENS, VOCABULARY),
        dtype=torch.float32,
        device=hidden.device,
    )


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_kernels_deferred_logits_give_their_gradient_whoever_takes_them(reader: str) -> None:
    found = []
    for make in (late, F.linear):
        head, layer = weights()
        hidden = head[torch.arange(TOKENS)] * layer
        value = READERS[reader](make(hidden, head))
        (value + hidden.sum()).backward()
        found.append([value.detach(), head.grad, layer.grad])
    torch.testing.assert_close(*found)


def test_kernels_deferred_logits_of_nobody_are_not_kept() -> None:
    gc.disable()
    try:
        for reader in READERS.values():
            head, layer = weights()
            hidden = head[torch.arange(TOKENS)] * layer
            kept = weakref.ref(hidden)
            logits = late(hidden, head)
            reader(logits).backward()
            logits = hidden = None
            if reader is not READERS["compiled"]:
                assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("reads", [False, True])
def test_a_gradient_of_logits_that_the_loss_went_without_is_refused(reads: bool) -> None:
    head, layer = weights()
    hidden = head[torch.arange(TOKENS)] * layer
    logits = late(hidden, head)
    logits.bypassed = BYPASSED
    if reads:
        logits.argmax(-1)
    for wait in (lambda: logits.register_hook(print), logits.retain_grad):
        with pytest.raises(RuntimeError, match="the loss of this step was computed without these"):
            wait()
    with pytest.raises(RuntimeError, match="without these|not have been used in the graph"):
        torch.autograd.grad(hidden.sum(), logits, allow_unused=not reads)
    assert type(logits * 1.0) is Tensor


def test_kernels_watched_logits_are_stocks_and_tell_once() -> None:
    told: list[int] = []
    linear = nn.Linear(WIDTH, VOCABULARY)
    logits = WatchedLogits.watch(linear(torch.ones(2, WIDTH)), lambda: told.append(1))
    half = logits.to(torch.float64)
    assert isinstance(half, WatchedLogits)
    assert (logits.shape, logits.requires_grad, logits.dtype) == ((2, 11), True, torch.float32)
    assert not told
    logits.mul_(2)
    assert type(logits) is Tensor
    assert told == [1]
    logits.sum().backward()
    assert linear.bias.grad is not None
    assert bool((linear.bias.grad == 4).all())
    half.sum()
    assert told == [1, 1]


def test_kernels_deferred_logits_have_no_memory_for_who_goes_past_python() -> None:
    logits = late(torch.ones(TOKENS, WIDTH), torch.ones(VOCABULARY, WIDTH))
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(logits)
    assert bool((torch.from_dlpack(logits) == WIDTH).all())


def test_frameworks_may_hook_what_the_loss_went_without() -> None:
    """FSDP and DeepSpeed hook all outputs, and take their hooks off again."""
    from deepytorch_core.nn.deferred_logits import refuse_hooks

    def wrappers(gradient: torch.Tensor) -> None: ...

    wrappers.__module__ = "torch.distributed.fsdp"
    logits = torch.ones(3, requires_grad=True) * 2
    refuse_hooks(logits, "for the test")
    handle = logits.register_hook(wrappers)
    handle.remove()
    with pytest.raises(RuntimeError, match="register_hook: for the test"):
        logits.register_hook(lambda gradient: None)
