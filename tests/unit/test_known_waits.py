"""What is left out of a pass that is to be replayed: nobody looks, and the loss stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepytorch_core.compile import known_waits


class Looks(TorchFunctionMode):
    """Counts what would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += getattr(func, "__name__", "") in ("__bool__", "item")
        return func(*args, **(kwargs or {}))


def tiny_bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))
    }
    torch.manual_seed(0)
    config = BartConfig(vocab_size=19, d_model=8, max_position_embeddings=16, dropout=0.0, **sizes)
    return BartForConditionalGeneration(config).train()


def looked(forward: Any, **inputs: Tensor) -> tuple[int, float]:
    with Looks() as looks:
        loss = forward(**inputs).loss
    return looks.count, loss.item()


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_mask_of_ones_that_a_decoder_makes_is_not_looked_at(is_masked: bool) -> None:
    model = tiny_bart()
    ids = torch.randint(3, 19, (2, 7))
    inputs = {"input_ids": ids, "labels": ids}
    if is_masked:  # by the user, who may have left something out
        inputs["decoder_attention_mask"] = torch.ones_like(ids)
    found, loss = looked(known_waits.without(model, model.forward), **inputs)
    stock, expected = looked(model.forward, **inputs)
    assert (found, stock) == ((1, 1) if is_masked else (0, 1))
    assert loss == expected
