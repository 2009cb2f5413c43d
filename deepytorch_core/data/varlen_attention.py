"""Attention within the sequences of one packed row; no token sees another sequence.

On CUDA `torch.nn.attention.varlen` serves float16 and bfloat16. The flash kernel beneath it is
called where that function has no argument for dropout or shared key heads. For float32 there is
aten's memory-efficient kernel. On the CPU, and any other device, torch's attention runs on one
sequence after the other. That costs no more than the longest rows do in a padded batch.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deepytorch_core.data import varlen_efficient

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_UNLIMITED = -1


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    *,
    causal: bool,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Scaled dot-product attention within each sequence of a packed row.

    Args:
        query: [tokens, heads, head size], float16, bfloat16, float32 or (CPU) float64.
        key, value: [tokens, key heads, head size], with `heads` a multiple of the key heads.
        cu_seq_lens: int32 [sequences + 1], where each sequence begins, then the number of tokens;
            sequences may be empty. On the device of `query`.
        max_length: at least the longest sequence's tokens.
        causal: whether a token sees only those up to itself.
        window: how many tokens each sees before and after itself; -1 for all. None for (-1, -1).
        scale: factor of the scores; None for head size ** -0.5.
        dropout: probability that a weight is zeroed.

    Returns [tokens, heads, head size], differentiable. Raises ValueError for shapes that don't fit.
    """
    if query.dim() != 3 or key.shape[:1] != query.shape[:1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"varlen_attention: query {tuple(query.shape)} and key {tuple(key.shape)} must be "
            "[tokens, heads, head size] with as many tokens, and heads a multiple of the key heads"
        )
    before, after = window or (_UNLIMITED, _UNLIMITED)
    if causal:
        after = 0
    limits = (before, after)
    if query.is_cuda:
        is_flash = query.dtype in _FLASH_DTYPES and _has_flash(query.device.index)
        attend = _cuda_flash if is_flash else _cuda_efficient
        sequences, weighting = (cu_seq_lens, max_length), (limits, scale, dropout)
        return attend(query, key, value, sequences, weighting)
    if dropout == 0.0 and torch.compiler.is_compiling():
        out, _ = torch.ops.deepytorch.varlen_attention_cpu(
            query, key, value, cu_seq_lens, before=before, after=after, scale=scale
        )
        result: Tensor = out
        return result
    one_by_one: Any = _one_by_one
    return cast(Tensor, one_by_one(query, key, value, cu_seq_lens, (limits, scale, dropout)))


_Sequences = tuple[Tensor, int]
"""cu_seq_lens and max_length."""
_Weighting = tuple[tuple[int, int], float | None, float]
"""Tokens seen before and after, scale, dropout."""


def _cuda_flash(
    query: Tensor, key: Tensor, value: Tensor, sequences: _Sequences, weighting: _Weighting
) -> Tensor:
    (cu_seq_lens, max_length), (limits, scale, dropout) = sequences, weighting
    bounds = (cu_seq_lens, cu_seq_lens, max_length, max_length)
    is_grouped = query.shape[1] != key.shape[1]
    # Compiled code takes the result's strides for those of a contiguous query.
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if dropout == 0.0 and (not is_grouped or _takes_groups()):
        from torch.nn.attention.varlen import varlen_attn

        attend: Any = varlen_attn
        more: dict[str, Any] = {"enable_gqa": True} if is_grouped else {}
        out: Tensor = attend(query, key, value, *bounds, scale=scale, window_size=limits, **more)
        return out
    # The public function has no dropout, and before torch 2.12 no shared key heads: its kernel has.
    before, after = limits
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *bounds,
        dropout,
        limits == (_UNLIMITED, 0),
        False,
        scale=scale,
        window_size_left=before,
        window_size_right=after,
    )[0]
    return attended


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_groups() -> bool:
    """Whether torch's function lets query heads share key heads: from torch 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_flash(index: int) -> bool:
    """Whether the GPU has torch's flash kernels: from Ampere on."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(index) >= (8, 0)


def _cuda_efficient(
    query: Tensor, key: Tensor, value: Tensor, sequences: _Sequences, weighting: _Weighting
) -> Tensor:
    (cu_seq_lens, max_length), ((before, after), scale, dropout) = sequences, weighting
    if (before != _UNLIMITED and after != 0) or after > 0:
        raise ValueError(
            "varlen_attention: a window after the token needs float16 or bfloat16, and a GPU of "
            "compute capability 8.0 or more; train in mixed precision, or set padding_free=off"
        )
    key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    # Rounded up it may be more than there are tokens, which the kernel's backward refuses.
    longest = min(max_length, query.shape[0])
    operation: Any = varlen_efficient.attend
    if torch.compiler.is_compiling():
        operation = torch.ops.deepytorch.varlen_efficient
    out, *_ = operation(
        query,
        key,
        value,
        cu_seq_lens,
        longest=longest,
        causal=after == 0,  # masked from the upper left, or not at all
        window_size=None if before == _UNLIMITED else before + 1,
        scale=scale,
        dropout=dropout,
    )
    return cast(Tensor, out)


def _repeated(tensor: Tensor, num_heads: int) -> Tensor:
    """Key or value heads, each as often as query heads share it."""
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, weighting: _Weighting
) -> Tensor:
    limits, scale, dropout = weighting
    lengths = cu_seq_lens.diff().tolist()
    outputs = []
    for one_query, one_key, one_value in zip(
        *(torch.split(tensor, lengths) for tensor in (query, key, value)), strict=True
    ):
        mask = _mask(one_query.shape[0], limits, query.device)
        output = F.scaled_dot_product_attention(
            one_query.transpose(0, 1).unsqueeze(0),
            one_key.transpose(0, 1).unsqueeze(0),
            one_value.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and limits[1] == 0,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _mask(length: int, limits: tuple[int, int], device: torch.device) -> Tensor | None:
    """bool [length, length], true where a token is seen; None if only `is_causal` is needed."""
    before, after = limits
    if before == _UNLIMITED or before >= length - 1:
        if after in (_UNLIMITED, 0) or after >= length - 1:
            return None
        before = length
    after = length if after == _UNLIMITED else after
    places = torch.arange(length, dtype=torch.int64, device=device)
    distance = places[None, :] - places[:, None]
    return (distance >= -before) & (distance <= after)


# Compiled code can't look into `cu_seq_lens`, so there the loop is one opaque operation.


def _cpu_parts(
    tensors: tuple[Tensor, ...], cu_seq_lens: Tensor, limits: tuple[int, int]
) -> list[tuple[tuple[Tensor, ...], Tensor | None]]:
    """For each sequence: the tensors as [1, heads, length, head size], and its mask."""
    lengths = cu_seq_lens.diff().tolist()
    split = zip(*(torch.split(tensor, lengths) for tensor in tensors), strict=True)
    dtype = tensors[0].dtype
    parts = []
    for parted in split:
        mask = _mask(parted[0].shape[0], limits, tensors[0].device)
        if mask is not None:
            seen = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            mask = seen.masked_fill_(~mask, float("-inf"))
        parts.append((tuple(part.transpose(0, 1).unsqueeze(0) for part in parted), mask))
    return parts


@torch.library.custom_op("deepytorch::varlen_attention_cpu", mutates_args=())
def _varlen_attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    *,
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    log_sums = query.new_empty(query.shape[:2], dtype=_log_sum_dtype(query))
    start = 0
    for (one_query, one_key, one_value), mask in _cpu_parts(
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


def _log_sum_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@_varlen_attention_cpu.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    *,
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(query.shape[:2], dtype=_log_sum_dtype(query))


@torch.library.custom_op("deepytorch::varlen_attention_cpu_backward", mutates_args=())
def _varlen_attention_cpu_backward(
    grad_out: Tensor,
    saved: list[Tensor],
    *,
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, log_sums, cu_seq_lens = saved
    num_key_heads = key.shape[1]
    key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(query, memory_format=contiguous) for _ in range(3)]
    start = 0
    tensors = (grad_out, query, key, value, out)
    for parted, mask in _cpu_parts(tensors, cu_seq_lens, (before, after)):
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


@_varlen_attention_cpu_backward.register_fake
def _(
    grad_out: Tensor,
    saved: list[Tensor],
    *,
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *_ = saved
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
