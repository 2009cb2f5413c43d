"""Attention over sequences of different lengths, with sinks.

A sink is a learned logit of a head. It takes its share of each token's softmax, and has no value.
So attention with a sink s is attention without it, o, times a share:

    o' = o * exp(l - l')    with l the log-sum-exp of the scores, and l' = log(exp(l) + exp(s))

The weights that are left are exp(score - l'), and o' is their sum of values. Kernels' backward
passes go by the log-sum-exp and the output alone. Given l' and o' in place of l and o, they
compute the gradients of query, key and value. That of the sink is, summed over tokens,

    ds = -exp(s - l') * <do', o'>

Source of sinks: "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925), section 2.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepytorch_core.data import varlen_cpu
from deepytorch_core.data.varlen_cpu import UNLIMITED

_Sizes = tuple[Tensor, int, int, int, float | None]
"""cu_seq_lens, the longest sequence, tokens seen before and after, scale."""


@torch.library.custom_op("deepytorch::varlen_sinks", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    cu_seq_lens: Tensor,
    *,
    longest: int,
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention of [tokens, heads, head size] each, within the sequences of `cu_seq_lens`.

    Args:
        query: float16 or bfloat16 on a GPU, any floating-point format on the CPU.
        key, value: of its format, with as many heads, or fewer that are shared.
        sinks: [heads], of any floating-point format.
        cu_seq_lens: int32 [sequences + 1].
        longest: tokens of the longest sequence, at least.
        before, after: how many tokens each sees; -1 for all.
        scale: of the scores; None for head size ** -0.5.

    Returns it, and the log-sum-exp with the sinks: [tokens, heads] on the CPU, else the other way
    round, as kernels have it.
    """
    limits = (before, after, scale)
    if query.is_cuda:
        out, log_sums = _flash_forward(query, key, value, (cu_seq_lens, longest, *limits))
    else:
        out, log_sums = varlen_cpu.forward(
            query, key, value, cu_seq_lens, before=before, after=after, scale=scale
        )
    total = torch.logaddexp(log_sums, _beside(sinks, log_sums))
    share = _by_token(torch.exp(log_sums - total)).unsqueeze(-1)
    return (out * share).to(out.dtype), total


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    *,
    seen: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """The same by torch's own operations, for what no kernel has.

    Args:
        query, key, value: [batch, heads, tokens, head size], of one floating-point format.
        sinks: [heads].
        seen: bool [tokens, tokens], true where a token is seen; None: all are.
        scale: of the scores; None for head size ** -0.5.
        dropout: probability that a weight is zeroed.
    """
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return torch.nn.functional.dropout(weights, dropout) @ value


@attend.register_fake
def _(query: Tensor, *_: Tensor, **__: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    shape = query.shape[:2]
    total = query.new_empty(
        tuple(reversed(shape)) if query.is_cuda else shape, dtype=varlen_cpu.log_sum_dtype(query)
    )
    return out, total


@torch.library.custom_op("deepytorch::varlen_sinks_backward", mutates_args=())
def _gradients(
    grad_out: Tensor,
    saved: list[Tensor],
    *,
    longest: int,
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, sinks, out, total, cu_seq_lens = saved
    if query.is_cuda:
        grads = _flash_backward(
            grad_out, (query, key, value, out, total), (cu_seq_lens, longest, before, after, scale)
        )
    else:
        given = [query, key, value, out, total, cu_seq_lens]
        grads = varlen_cpu.backward(grad_out, given, before=before, after=after, scale=scale)
    of_sink = torch.exp(_beside(sinks, total) - total)
    taken = (grad_out.to(total.dtype) * out.to(total.dtype)).sum(-1)
    return (*grads, -(_by_token(of_sink) * taken).sum(0).to(sinks.dtype))


@_gradients.register_fake
def _(grad_out: Tensor, saved: list[Tensor], **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, sinks, *_rest = saved
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(query, memory_format=contiguous),
        torch.empty_like(key, memory_format=contiguous),
        torch.empty_like(value, memory_format=contiguous),
        torch.empty_like(sinks, memory_format=contiguous),
    )


def _beside(sinks: Tensor, sums: Tensor) -> Tensor:
    """The sinks as they stand beside log-sums."""
    return sinks.to(sums.dtype).view((-1, 1) if sums.is_cuda else (1, -1))


def _by_token(sums: Tensor) -> Tensor:
    """The same as [tokens, heads]."""
    return sums.t() if sums.is_cuda else sums


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, sizes: _Sizes
) -> tuple[Tensor, Tensor]:
    cu_seq_lens, longest, before, after, scale = sizes
    found = torch.ops.aten._flash_attention_forward(
        *(query.contiguous(), key.contiguous(), value.contiguous()),
        *(cu_seq_lens, cu_seq_lens, longest, longest),
        0.0,
        (before, after) == (UNLIMITED, 0),
        False,
        scale=scale,
        window_size_left=before,
        window_size_right=after,
    )
    return found[0], found[1]


def _flash_backward(
    grad_out: Tensor, saved: tuple[Tensor, ...], sizes: _Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    cu_seq_lens, longest, before, after, scale = sizes
    # Without dropout nothing reads the state of the random numbers.
    state, unused = torch.zeros((2, 2), dtype=torch.uint64, device=grad_out.device).unbind()
    grads = torch.ops.aten._flash_attention_backward(
        *(tensor.contiguous() for tensor in (grad_out, *saved)),
        *(cu_seq_lens, cu_seq_lens, longest, longest),
        0.0,
        (before, after) == (UNLIMITED, 0),
        state,
        unused,
        scale=scale,
        window_size_left=before,
        window_size_right=after,
    )
    query_grad, key_grad, value_grad = (grad.contiguous() for grad in grads)
    return query_grad, key_grad, value_grad


def _remember(
    ctx: Any,
    inputs: tuple[Tensor, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    *tensors, cu_seq_lens = inputs
    ctx.save_for_backward(*tensors, *output, cu_seq_lens)
    ctx.settings = keyword_only_inputs


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.deepytorch.varlen_sinks_backward(
        grad_out, list(ctx.saved_tensors), **ctx.settings
    )
    return (*grads, None)


attend.register_autograd(_backward, setup_context=_remember)
