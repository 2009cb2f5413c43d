"""A frozen linear layer and its low-rank adapter as products of matrices, and nothing else.

With W the frozen weight, A and B the adapter's, and s its scale, a LoRA layer computes

    y = x W' + s (x A') B'

Written as two layers whose outputs are added, that reads and writes the wide output three times,
and keeps a second copy of the input for the adapter. Here the adapter's part is accumulated in the
product that writes it, in float32 before it is rounded. The backward pass does so, too:

    dx = g W + s (g B) A        dA = s (g B)' x        dB = s g' (x A')

It keeps x once, and (x A'), which has as many columns as the adapter's rank. W gets no gradient.

Source: "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), section 4.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_Pair = tuple[Tensor, Tensor]
_Wanted = Sequence[bool]
"""Whether gradients are wanted of the input, the dropped one, and the adapter's two weights."""


def lora_linear(
    x: Tensor,
    layer: tuple[Tensor, Tensor | None],
    adapter: _Pair,
    *,
    scale: float,
    dropped: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer with its adapter; differentiable but for the layer's own weights.

    Args:
        x: [..., inputs], of a floating-point format that all others have, too.
        layer: its weight, [outputs, inputs], and its bias, [outputs] or None.
        adapter: its weights, [rank, inputs] and [outputs, rank].
        scale: of the adapter's part.
        dropped: what the adapter takes in place of `x`, of its shape; None: it takes `x`.

    Returns [..., outputs].
    """
    rows, (weight, bias), (down, up) = _rows(x), layer, adapter
    other = None if dropped is None else _rows(dropped)
    out: Tensor
    if torch.compiler.is_compiling():
        frozen = [weight] if bias is None else [weight, bias]
        out, _ = _lora_linear(rows, other, frozen, [down, up], scale)
    else:
        out = _LoraLinear.apply(rows, other, weight, bias, down, up, scale)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.shape[0])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _forward(
    x: Tensor,
    dropped: Tensor | None,
    layer: tuple[Tensor, Tensor | None],
    adapter: _Pair,
    scale: float,
) -> _Pair:
    """Return the output, and (x A')."""
    down, up = adapter
    out = torch.nn.functional.linear(x, *layer)
    narrow = (x if dropped is None else dropped) @ down.t()
    return out.addmm_(narrow, up.t(), alpha=scale), narrow


def _backward(
    grad: Tensor, saved: Sequence[Tensor], scale: float, wanted: _Wanted, *, is_dropped: bool
) -> list[Tensor | None]:
    """Return the gradients of the input, the dropped one, and the adapter's two weights."""
    x, weight, down, up, narrow = saved
    of_x, of_dropped, of_down, of_up = wanted
    found: list[Tensor | None] = [None] * 4
    if of_x:
        found[0] = grad @ weight
    if of_down or of_dropped or (of_x and not is_dropped):
        of_narrow = grad @ up
        if of_dropped:
            found[1] = _scaled_product(of_narrow, down, scale)
        elif found[0] is not None and not is_dropped:
            found[0].addmm_(of_narrow, down, alpha=scale)
        if of_down:
            found[2] = _scaled_product(of_narrow.t(), x, scale)
    if of_up:
        found[3] = _scaled_product(grad.t(), narrow, scale)
    return found


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return the product, scaled before it is rounded."""
    unread = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(unread, left, right, beta=0, alpha=scale)


class _LoraLinear(torch.autograd.Function):
    """It for eager passes, where an operator of our own would take twice as long to be called."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, dropped, weight, bias, down, up, scale = inputs
        out, narrow = _forward(x, dropped, (weight, bias), (down, up), scale)
        ctx.save_for_backward(x if dropped is None else dropped, weight, down, up, narrow)
        ctx.scale, ctx.is_dropped = scale, dropped is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad
        wanted = *needed[:2], *needed[4:6]
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated once more: what (x A') is made of counts
            saved = (*saved[:-1], saved[0] @ saved[2].t())
        x, dropped, *adapter = _backward(
            grads[0], saved, ctx.scale, wanted, is_dropped=ctx.is_dropped
        )
        return (x, dropped, None, None, *adapter, None)


@torch.library.custom_op("deepytorch::lora_linear", mutates_args=())
def _lora_linear(
    x: Tensor, dropped: Tensor | None, layer: list[Tensor], adapter: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    weight, bias = layer if len(layer) > 1 else (layer[0], None)
    down, up = adapter
    return _forward(x, dropped, (weight, bias), (down, up), scale)


@_lora_linear.register_fake
def _(
    x: Tensor, dropped: Tensor | None, layer: list[Tensor], adapter: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    out, narrow = layer[0].shape[0], adapter[0].shape[0]
    return x.new_empty(x.shape[0], out), x.new_empty(x.shape[0], narrow)


@torch.library.custom_op("deepytorch::lora_linear_backward", mutates_args=())
def _lora_linear_backward(
    grad: Tensor, saved: list[Tensor], scale: float, wanted: list[bool], is_dropped: bool
) -> list[Tensor]:
    """Return the gradients that are wanted."""
    found = _backward(grad, saved, scale, wanted, is_dropped=is_dropped)
    return [each for each in found if each is not None]


@_lora_linear_backward.register_fake
def _(
    grad: Tensor, saved: list[Tensor], scale: float, wanted: list[bool], is_dropped: bool
) -> list[Tensor]:
    x, _, down, up, _ = saved
    likes = (x, x, down, up)
    return [grad.new_empty(like.shape) for like in itertools.compress(likes, wanted)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    x, dropped, (weight, *_), (down, up), scale = inputs
    ctx.save_for_backward(x if dropped is None else dropped, weight, down, up, output[1])
    ctx.scale, ctx.is_dropped, ctx.num_frozen = scale, dropped is not None, len(inputs[2])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    of_x, of_dropped, _, of_adapter, _ = ctx.needs_input_grad
    wanted = [of_x, of_dropped, *of_adapter]
    found = iter(
        _lora_linear_backward(grad, list(ctx.saved_tensors), ctx.scale, wanted, ctx.is_dropped)
    )
    x, dropped, *adapter = (next(found) if is_wanted else None for is_wanted in wanted)
    return x, dropped, [None] * ctx.num_frozen, adapter, None


_lora_linear.register_autograd(_differentiate, setup_context=_remember)
