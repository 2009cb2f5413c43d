"""torch's memory-efficient attention over sequences of different lengths, for compiled code.

torch (2.11 to 2.13 at least) describes this kernel's backward pass to its compilers without the
argument `out`. So tracing aten's operation ends with a TypeError. Here both passes are operations
of our own, opaque to compilers, which call aten's when they run. Eager code calls that directly:
`attend`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CAUSAL_FROM_UPPER_LEFT = 1
_LOG_SUMS_MULTIPLE = 32  # which the kernel rounds the longest sequence up to


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    *,
    longest: int,
    causal: bool,
    window_size: int | None,
    scale: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of [tokens, heads, head size] each, within the sequences that `cu_seq_lens` bounds.

    Returns that, and what its backward pass needs: the rows' log-sum-exp, seed and offset of the
    random numbers. `window_size` counts the token itself.
    """
    found = torch.ops.aten._efficient_attention_forward(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        None,
        cu_seq_lens,
        cu_seq_lens,
        longest,
        longest,
        dropout,
        _CAUSAL_FROM_UPPER_LEFT if causal else 0,
        True,
        scale=scale,
        window_size=window_size,
    )
    return found[0].squeeze(0), found[1], found[2], found[3]


_varlen_efficient = torch.library.custom_op(
    "deepytorch::varlen_efficient", attend, mutates_args=(), device_types="cuda"
)


@_varlen_efficient.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, *, longest: int, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rounded = (longest + _LOG_SUMS_MULTIPLE - 1) // _LOG_SUMS_MULTIPLE * _LOG_SUMS_MULTIPLE
    log_sums = query.new_empty(
        (cu_seq_lens.shape[0] - 1, query.shape[1], rounded), dtype=torch.float32
    )
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    # On the host, where no graph is being captured.
    seed, offset = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return out, log_sums, seed, offset


@torch.library.custom_op(
    "deepytorch::varlen_efficient_backward", mutates_args=(), device_types="cuda"
)
def _varlen_efficient_backward(
    grad_out: Tensor,
    saved: list[Tensor],
    *,
    longest: int,
    causal: bool,
    window_size: int | None,
    scale: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, log_sums, seed, offset, cu_seq_lens = saved
    grads = torch.ops.aten._efficient_attention_backward(
        grad_out.contiguous().unsqueeze(0),
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        None,
        out.unsqueeze(0),
        cu_seq_lens,
        cu_seq_lens,
        longest,
        longest,
        log_sums,
        dropout,
        seed,
        offset,
        _CAUSAL_FROM_UPPER_LEFT if causal else 0,
        False,
        scale=scale,
        window_size=window_size,
    )
    query_grad, key_grad, value_grad = (grad.squeeze(0).contiguous() for grad in grads[:3])
    return query_grad, key_grad, value_grad


@_varlen_efficient_backward.register_fake
def _(grad_out: Tensor, saved: list[Tensor], **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *_rest = saved
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(
    ctx: Any,
    inputs: tuple[Tensor, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    query, key, value, cu_seq_lens = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seq_lens)
    ctx.settings = keyword_only_inputs


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = torch.ops.deepytorch.varlen_efficient_backward(
        grad_out, list(ctx.saved_tensors), **ctx.settings
    )
    return (*grads, None)


_varlen_efficient.register_autograd(_backward, setup_context=_remember)
