"""Attention over sequences of different lengths on the CPU, one after the other.

Compiled code can't look into `cu_seq_lens`, so there the loop is one opaque operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

UNLIMITED = -1
"""In place of a number of tokens that are seen: all."""


def seen(length: int, limits: tuple[int, int], device: torch.device) -> Tensor | None:
    """bool [length, length], true where a token is seen; None if only `is_causal` is needed.

    `limits`: how many tokens each sees before and after itself.
    """
    before, after = limits
    if before == UNLIMITED or before >= length - 1:
        if after in (UNLIMITED, 0) or after >= length - 1:
            return None
        before = length
    after = length if after == UNLIMITED else after
    places = torch.arange(length, dtype=torch.int64, device=device)
    distance = places[None, :] - places[:, None]
    return (distance >= -before) & (distance <= after)


def repeated(tensor: Tensor, num_heads: int) -> Tensor:
    """Key or value heads, each as often as query heads share it."""
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


def _parts(
    tensors: tuple[Tensor, ...], cu_seq_lens: Tensor, limits: tuple[int, int]
) -> list[tuple[tuple[Tensor, ...], Tensor | None]]:
    """For each sequence: the tensors as [1, heads, length, head size], and its mask."""
    lengths = cu_seq_lens.diff().tolist()
    split = zip(*(torch.split(tensor, lengths) for tensor in tensors), strict=True)
    dtype = tensors[0].dtype
    parts = []
    for parted in split:
        mask = seen(parted[0].shape[0], limits, tensors[0].device)
        if mask is not None:
            added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            mask = added.masked_fill_(~mask, float("-inf"))
        parts.append((tuple(part.transpose(0, 1).unsqueeze(0) for part in parted), mask))
    return parts


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    *,
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention of [tokens, heads, head size], and its log-sum-exp [tokens, heads]."""
    key, value = (repeated(tensor, query.shape[1]) for tensor in (key, value))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    log_sums = query.new_empty(query.shape[:2], dtype=log_sum_dtype(query))
    start = 0
    for (one_query, one_key, one_value), mask in _parts(
        (query, key, value), cu_seq_lens, (before, after)
    ):
        length = one_query.shape[2]
        if length:
            one_out, one_log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(one_query, one_key, one_value, 0.0, mask is None and after == 0),
                attn_mask=mask,
                scale=scale,
            )
            out[start : start + length] = one_out[0].transpose(0, 1)
            log_sums[start : start + length] = one_log_sum[0].transpose(0, 1)
        start += length
    return out, log_sums


def log_sum_dtype(query: Tensor) -> torch.dtype:
    """Return the format in which sums of exponentials are kept."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def backward(
    grad_out: Tensor,
    saved: list[Tensor],
    *,
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `saved` are they, `forward`'s results, `cu_seq_lens`."""
    query, key, value, out, log_sums, cu_seq_lens = saved
    num_key_heads = key.shape[1]
    key, value = (repeated(tensor, query.shape[1]) for tensor in (key, value))
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(query, memory_format=contiguous) for _ in range(3)]
    start = 0
    tensors = (grad_out, query, key, value, out)
    for parted, mask in _parts(tensors, cu_seq_lens, (before, after)):
        length = parted[0].shape[2]
        end = start + length
        if length:
            log_sum = log_sums[start:end].transpose(0, 1).unsqueeze(0)
            one_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(*parted, log_sum, 0.0, mask is None and after == 0),
                attn_mask=mask,
                scale=scale,
            )
            for grad, one_grad in zip(grads, one_grads, strict=True):
                grad[start:end] = one_grad[0].transpose(0, 1)
        start = end
    shared = (-1, num_key_heads, query.shape[1] // num_key_heads, query.shape[2])
    return grads[0], grads[1].view(shared).sum(2), grads[2].view(shared).sum(2)


_varlen_attention_cpu = torch.library.custom_op(
    "deepytorch::varlen_attention_cpu", forward, mutates_args=()
)


@_varlen_attention_cpu.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(query.shape[:2], dtype=log_sum_dtype(query))


_varlen_attention_cpu_backward = torch.library.custom_op(
    "deepytorch::varlen_attention_cpu_backward", backward, mutates_args=()
)


@_varlen_attention_cpu_backward.register_fake
def _(grad_out: Tensor, saved: list[Tensor], **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *_rest = saved
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(query, memory_format=contiguous),
        torch.empty_like(key, memory_format=contiguous),
        torch.empty_like(value, memory_format=contiguous),
    )


def _remember(
    ctx: Any,
    inputs: tuple[Tensor, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    query, key, value, cu_seq_lens = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seq_lens)
    ctx.seen = keyword_only_inputs


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.deepytorch.varlen_attention_cpu_backward(
        grad_out, list(ctx.saved_tensors), **ctx.seen
    )
    return (*grads, None)


_varlen_attention_cpu.register_autograd(_backward, setup_context=_remember)
