"""Cross-entropy of a language model's head that never holds all logits.

The logits of a batch are its largest tensor by far (tokens times vocabulary, several times over in
stock training: in the model's dtype, in float32, and their gradient). Here the head and the loss
run on a chunk of tokens at a time. A chunk's gradient is computed at once, while its logits are
there. So there are as many matrix products as in stock training, and a small part of the memory.
Plain torch, for any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepytorch_core.nn.loss import IGNORED_LABEL

# Logits of a chunk: enough for full speed of the products on an accelerator (256 MiB in float32);
# on the CPU little enough to stay in its caches.
CHUNK_ELEMENTS = {"cpu": 1 << 21}
DEFAULT_CHUNK_ELEMENTS = 1 << 26
LEAST_CHUNK = 64


@dataclass(frozen=True)
class _Plan:
    head: nn.Module
    targets: torch.Tensor
    chunk: int
    ignore_index: int
    parameters: tuple[torch.Tensor, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the head is a matrix product and no more."""
        return is_linear(self.head)


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    head: nn.Module,
    targets: torch.Tensor,
    *,
    ignore_index: int = IGNORED_LABEL,
    chunk: int | None = None,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """`cross_entropy(head(hidden).float(), targets, reduction="sum")`, a chunk at a time.

    The gradients of `hidden` and of the head's parameters are computed with the loss; `backward`
    scales them. So it is for training: without gradients the plain expression serves as well. There
    is no second derivative.

    Args:
        hidden: (tokens, width), floating.
        head: maps (tokens, width) to (tokens, vocabulary), each token for itself: an nn.Linear, or
            one that is wrapped (LoRA). Its parameters are whole, not sharded, while this runs.
        targets: (tokens,), integers.
        ignore_index: the target that counts for nothing.
        chunk: tokens at a time; default: by the vocabulary.
        forward: what computes in the head's place; default: `head.forward`.

    Returns a float32 scalar (float64 for float64 logits). Raises ValueError for shapes that don't
    fit.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)}: expected (tokens, "
            "width) and (tokens,)"
        )
    parameters = tuple(parameter for parameter in head.parameters() if parameter.requires_grad)
    plan = _Plan(head, targets, chunk or chunk_size(head, hidden.device), ignore_index, parameters)
    if forward is None and plan.is_plain:
        weight, bias = head.weight, head.bias
        found: torch.Tensor = _PlainHead.apply(hidden, weight, bias, plan)  # type: ignore[no-untyped-call]
        return found
    call = forward or head.forward
    total: torch.Tensor = _AnyHead.apply(hidden, call, plan, *parameters)  # type: ignore[no-untyped-call]
    return total


def is_linear(head: nn.Module) -> bool:
    """Whether a head is nn.Linear's matrix product; sharding derives classes that still are."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def chunk_size(head: nn.Module, device: torch.device) -> int:
    """Tokens at a time for this head's vocabulary, a power of two."""
    vocabulary = max(
        (parameter.shape[0] for parameter in head.parameters() if parameter.dim() == 2), default=1
    )
    elements = CHUNK_ELEMENTS.get(device.type, DEFAULT_CHUNK_ELEMENTS)
    return max(LEAST_CHUNK, 1 << (max(1, elements // vocabulary).bit_length() - 1))


def _chunks(num_tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def _float(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _loss_and_logits_gradient(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss, and its gradient in place of the (float) logits."""
    counts = targets != ignore_index
    rows = targets.where(counts, 0)[:, None]
    normalizer = torch.logsumexp(logits, dim=1)
    losses = normalizer - logits.gather(1, rows).squeeze(1)
    loss = torch.where(counts, losses, 0.0).sum()
    gradient = logits.sub_(normalizer[:, None]).exp_()
    gradient.scatter_(1, rows, gradient.gather(1, rows) - 1)
    # Not a product: what is ignored may be infinite.
    return loss, gradient.masked_fill_(~counts[:, None], 0.0)


class _PlainHead(torch.autograd.Function):
    """An nn.Linear: products that add to the weight's gradient in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: _Plan,
    ) -> torch.Tensor:
        device = hidden.device.type
        inputs = [hidden, weight] + ([] if bias is None else [bias])
        if torch.is_autocast_enabled(device):
            inputs = [tensor.to(torch.get_autocast_dtype(device)) for tensor in inputs]
        sums = [
            torch.zeros_like(tensor, dtype=_sum_dtype(tensor)) if needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        with torch.autocast(device, enabled=False):
            loss = _run_plain(inputs, plan, sums)
        given = [hidden, weight] + ([] if bias is None else [bias])
        found = [
            None if total is None else total.to(like.dtype)
            for total, like in zip(sums, given, strict=True)
        ]
        _keep(ctx, [*found, None] if bias is None else found)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (*_scaled(ctx, gradient), None)


def _run_plain(
    inputs: list[torch.Tensor],
    plan: _Plan,
    sums: list[torch.Tensor | None],
) -> torch.Tensor:
    """The loss; the gradients of hidden, weight and bias are added to `sums` where wanted."""
    hidden, weight, *biases = inputs
    by_hidden, by_weight, *by_biases = sums
    loss = torch.zeros((), dtype=_sum_dtype(hidden), device=hidden.device)
    for part in _chunks(len(hidden), plan.chunk):
        logits = _float(F.linear(hidden[part], weight, *biases))
        part_loss, gradient = _loss_and_logits_gradient(
            logits, plan.targets[part], plan.ignore_index
        )
        loss += part_loss
        for by_bias in by_biases:
            if by_bias is not None:
                by_bias += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if by_hidden is not None:
            by_hidden[part] = gradient @ weight
        if by_weight is not None:
            if by_weight.dtype == gradient.dtype:
                by_weight.addmm_(gradient.t(), hidden[part])
            else:
                by_weight += gradient.t() @ hidden[part]
    return loss


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """In what chunks add up: half-precision sums would round once for each chunk."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


class _AnyHead(torch.autograd.Function):
    """Any computation of a head, differentiated chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        call: Callable[[torch.Tensor], torch.Tensor],
        plan: _Plan,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        loss: torch.Tensor | None = None
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for part in _chunks(len(hidden), plan.chunk):
            with torch.enable_grad():
                rows = hidden[part].detach().requires_grad_(by_hidden is not None)
                logits = call(rows)
                wanted = [*((rows,) if by_hidden is not None else ()), *plan.parameters]
                with torch.no_grad():
                    part_loss, by_logits = _loss_and_logits_gradient(
                        _float(logits).clone(), plan.targets[part], plan.ignore_index
                    )
                loss = part_loss if loss is None else loss + part_loss
                parts = _gradients(logits, wanted, by_logits.to(logits.dtype))
            if by_hidden is not None:
                first = parts.pop(0)
                by_hidden[part] = 0.0 if first is None else first
            for index, (total, piece) in enumerate(zip(sums, parts, strict=True)):
                if piece is not None:
                    wide = piece.to(_sum_dtype(piece))
                    sums[index] = wide if total is None else total.add_(wide)
        found = [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, parameters, strict=True)
        ]
        _keep(ctx, [by_hidden, *found])
        if loss is None:  # no tokens at all
            wide_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            loss = torch.zeros((), dtype=wide_dtype, device=hidden.device)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        by_hidden, *by_parameters = _scaled(ctx, gradient)
        return (by_hidden, None, None, *by_parameters)


def _gradients(
    logits: torch.Tensor, wanted: list[torch.Tensor], by_logits: torch.Tensor
) -> list[torch.Tensor | None]:
    if not wanted or not logits.requires_grad:
        return [None] * len(wanted)
    return list(torch.autograd.grad(logits, wanted, by_logits, allow_unused=True))


def _keep(ctx: Any, gradients: list[torch.Tensor | None]) -> None:
    ctx.has = [gradient is not None for gradient in gradients]
    ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))


def _scaled(ctx: Any, factor: torch.Tensor) -> list[torch.Tensor | None]:
    # Copies: what is saved may serve a second backward, where the graph is retained.
    saved = iter(ctx.saved_tensors)
    return [next(saved) * factor.to(torch.float32) if has else None for has in ctx.has]
