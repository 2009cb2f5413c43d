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

from deepytorch_core.data import varlen_cpu, varlen_efficient, varlen_sinks
from deepytorch_core.data.varlen_cpu import UNLIMITED

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


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
    sinks: Tensor | None = None,
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
        sinks: [heads], a logit of each head that takes its share of every softmax; see
            `varlen_sinks`.

    Returns [tokens, heads, head size], differentiable. Raises ValueError for shapes that don't fit.
    A GPU has no kernel for some of it, see `lacking`: there one sequence is computed after the
    other.
    """
    if query.dim() != 3 or key.shape[:1] != query.shape[:1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"varlen_attention: query {tuple(query.shape)} and key {tuple(key.shape)} must be "
            "[tokens, heads, head size] with as many tokens, and heads a multiple of the key heads"
        )
    before, after = limits = _limits(causal, window)
    why = lacking(query, causal=causal, window=window, dropout=dropout, sinks=sinks)
    if why is None and sinks is not None:
        attend_with: Any = varlen_sinks.attend
        out, _ = attend_with(
            *(query, key, value, sinks, cu_seq_lens),
            longest=max_length,
            before=before,
            after=after,
            scale=scale,
        )
        return cast(Tensor, out)
    if why is None and query.is_cuda:
        attend = _cuda_flash if _is_flash(query) else _cuda_efficient
        sequences, weighting = (cu_seq_lens, max_length), (limits, scale, dropout)
        return attend(query, key, value, sequences, weighting)
    if why is None and dropout == 0.0 and torch.compiler.is_compiling():
        out, _ = torch.ops.deepytorch.varlen_attention_cpu(
            query, key, value, cu_seq_lens, before=before, after=after, scale=scale
        )
        result: Tensor = out
        return result
    one_by_one: Any = _one_by_one
    weighting = (limits, scale, dropout)
    return cast(Tensor, one_by_one(query, key, value, cu_seq_lens, weighting, sinks=sinks))


def lacking(
    query: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] | None,
    dropout: float,
    sinks: Tensor | None,
) -> str | None:
    """Why there is no kernel for such attention on its device; None if there is one.

    Args:
        query: of its dtype and device.
        causal, window, dropout, sinks: see `varlen_attention`.
    """
    if sinks is not None and dropout:
        return "attention with sinks has no kernel with dropout"
    if not query.is_cuda or _is_flash(query):
        return None
    before, after = _limits(causal, window)
    if sinks is not None:
        what = "attention with sinks"
    elif (before != UNLIMITED and after != 0) or after > 0:
        what = "a window after the token"
    else:
        return None
    return f"{what} needs float16 or bfloat16, and a GPU of compute capability 8.0 or more"


def _limits(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """How many tokens each sees before and after itself."""
    before, after = window or (UNLIMITED, UNLIMITED)
    return before, 0 if causal else after


def _is_flash(query: Tensor) -> bool:
    """Whether torch's flash kernels take it."""
    return query.dtype in _FLASH_DTYPES and _has_flash(query.device.index)


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
        limits == (UNLIMITED, 0),
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
    key, value = (varlen_cpu.repeated(tensor, query.shape[1]) for tensor in (key, value))
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
        window_size=None if before == UNLIMITED else before + 1,
        scale=scale,
        dropout=dropout,
    )
    return cast(Tensor, out)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    weighting: _Weighting,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    limits, scale, dropout = weighting
    lengths = cu_seq_lens.diff().tolist()
    outputs = []
    for parts in zip(
        *(torch.split(tensor, lengths) for tensor in (query, key, value)), strict=True
    ):
        one_query, one_key, one_value = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        mask = varlen_cpu.seen(one_query.shape[2], limits, query.device)
        is_causal = mask is None and limits[1] == 0
        if sinks is None:
            output = F.scaled_dot_product_attention(
                one_query,
                one_key,
                one_value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            if is_causal:
                length = one_query.shape[2]
                mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
            one_key, one_value = (
                tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
                for tensor in (one_key, one_value)
            )
            output = varlen_sinks.attend_plainly(
                *(one_query, one_key, one_value, sinks), seen=mask, scale=scale, dropout=dropout
            )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)
