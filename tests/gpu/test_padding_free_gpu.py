"""Without padding on a GPU: losses and gradients are the padded batch's, in every precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepytorch_core.base import decisions
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)]

LENGTHS = (33, 128, 1, 90, 57)
# The longest, rounded up to a power of two, is more than all tokens together.
ONE_LONG = (300, 5)
# Shares of a parameter's largest gradient that rounding leaves, with matrices in TF32.
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
# Scales the loss, so that gradients in float16 are no numbers below its normal range.
SCALE = 2.0**12


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=None, **shape, **heads))


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=512, num_attention_heads=4, **shape, **off))


def _batch(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 512, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    batch["labels"] = ids.masked_fill(mask == 0, -100)
    return {name: value.cuda() for name, value in batch.items()}


def _loss_and_gradients(
    model: Any, lengths: tuple[int, ...], autocast: torch.dtype | None
) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
        loss = model(**_batch(lengths)).loss
    (loss * SCALE).backward()
    return [loss.detach(), *(parameter.grad.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize("make", [_llama, _bert])
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, ONE_LONG])
def test_a_packed_row_trains_like_the_padded_batch(
    make: Any, dtype: torch.dtype, compiled: bool, lengths: tuple[int, ...]
) -> None:
    from deepytorch.integrations.transformers import pack_batches, undo

    torch.manual_seed(1)
    model = make().cuda().train()
    autocast = None
    if dtype == torch.bfloat16:
        model = model.to(dtype)
    elif dtype == torch.float16:
        autocast = dtype
    stock = _loss_and_gradients(model, lengths, autocast)
    assert pack_batches(model, "on")
    if compiled:
        import deepytorch

        deepytorch.compile(model, policy="inductor")
    for _ in range(3 if compiled else 1):
        ours = _loss_and_gradients(model, lengths, autocast)
    if compiled:  # all of it
        last = [
            decision for decision in decisions.made() if decision["what"].startswith("compile of")
        ][-1]
        assert "dropped" not in last, last
    assert undo(model)
    assert abs(float(ours[0]) - float(stock[0])) <= LIMITS[dtype] * float(stock[0])
    for theirs, mine in zip(stock[1:], ours[1:], strict=True):
        largest = max(float(theirs.abs().max()), 1e-4 * SCALE)
        assert float((mine - theirs).abs().max()) <= LIMITS[dtype] * largest


def test_dropout_is_kept_in_packed_attention() -> None:
    from deepytorch_core.data import varlen_attention

    generator = torch.Generator("cuda").manual_seed(1)
    shape = (300, 4, 64)
    query, key = (
        torch.randn(shape, device="cuda", dtype=torch.float16, generator=generator)
        for _ in range(2)
    )
    ones = torch.ones(shape, device="cuda", dtype=torch.float16)
    bounds = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    without = varlen_attention(query, key, ones, bounds, 256, causal=False)
    dropped = varlen_attention(query, key, ones, bounds, 256, causal=False, dropout=0.25)
    torch.testing.assert_close(without, ones, atol=1e-2, rtol=0)
    assert float((dropped - 1).abs().max()) > 0.02
    assert abs(float(dropped.float().mean()) - 1) < 0.02


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("window", [None, (64, 0)])
def test_sinks_take_their_share_of_every_softmax(
    key_heads: int, window: tuple[int, int] | None
) -> None:
    """The flash kernels' backward pass, given the sinks' sums, against float64 on the CPU."""
    from deepytorch_core.data import varlen_attention

    lengths = [200, 1, 77, 345]
    cu_seq_lens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(key_heads)
    shapes = [(sum(lengths), heads, 64) for heads in (8, key_heads, key_heads)]
    exact = [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in (*shapes, (8,))
    ]
    tensors = [tensor.detach().bfloat16().cuda().requires_grad_() for tensor in exact]
    settings: dict[str, Any] = {"causal": True, "window": window}
    found = varlen_attention(
        *tensors[:3], cu_seq_lens.cuda(), max(lengths), sinks=tensors[3], **settings
    )
    expected = varlen_attention(*exact[:3], cu_seq_lens, max(lengths), sinks=exact[3], **settings)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    grads = torch.autograd.grad((found * weights.bfloat16().cuda()).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for mine, theirs in zip((found, *grads), (expected, *wanted), strict=True):
        apart = torch.linalg.norm(mine.cpu().double() - theirs) / torch.linalg.norm(theirs)
        assert float(apart) < 1.5e-2
