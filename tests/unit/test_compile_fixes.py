"""Tests of fixes for passes that are to be replayed: the loss stays the same, nobody looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepytorch_core.compile import Fix, fixes, register_fix


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
    found, loss = looked(fixes.applied(model, model.forward), **inputs)
    stock, expected = looked(model.forward, **inputs)
    assert (found, stock) == ((1, 1) if is_masked else (0, 1))
    assert loss == expected


def test_a_fix_of_ones_own_is_open_during_captured_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fixes.names()
    assert len(known) == 4
    monkeypatch.setattr(fixes, "_table", {})
    seen: list[Any] = []

    @contextlib.contextmanager
    def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        kwargs["bias"] = None
        seen.append(args)
        yield
        seen.append("closed")

    @register_fix
    class Own(Fix):
        name = "no bias"

        def around(self, model: torch.nn.Module) -> Any:
            return around if isinstance(model, torch.nn.Linear) else None

        @contextlib.contextmanager
        def during(self, model: torch.nn.Module) -> Iterator[None]:
            seen.append("capturing")
            yield
            seen.append("captured")

    other = torch.nn.ReLU()
    assert fixes.applied(other, other.forward) == other.forward
    x, weight = torch.ones(2), torch.ones(1, 2)
    found = fixes.applied(torch.nn.Linear(2, 1), torch.nn.functional.linear)(x, weight, bias=x)
    assert found.item() == 2
    assert seen == [(x, weight), "closed"]
    with fixes.during(other):
        assert seen[2:] == ["capturing"]
    assert seen[2:] == ["capturing", "captured"]
    with pytest.raises(ValueError, match="there is a fix 'no bias' already"):

        @register_fix
        class Another(Own):
            pass

    with pytest.raises(ValueError, match="can't name a fix"):
        register_fix(type("Nameless", (Own,), {"name": ""}))
