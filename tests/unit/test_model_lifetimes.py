"""Models, optimizers and Accelerators go with their last user: no cycle keeps them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from torch.utils.data import DataLoader

from deepytorch.integrations.common import contract
from deepytorch.integrations.kernels import apply as kernels
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.seams import accelerator as _accelerator
from deepytorch_core.base import config
from deepytorch_core.base.config import Options

pytestmark = pytest.mark.usefixtures("one_thread", "own_profile")

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(autouse=True)
def without_collecting() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).train()


def bert() -> Any:
    return hf.BertForMaskedLM(hf.BertConfig(**SHAPE)).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(4, 22).view(2, 9)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def with_kernels(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    options, changes = Options(kernels="on"), contract.Changes()
    kernels.apply([model, optimizer], options, changes, device=torch.device("cpu"))


def watched(model: Any) -> None:
    padding_free.watch(model)


def packed(model: Any) -> None:
    assert padding_free.attach(model, "on", adapter="test")


@pytest.mark.parametrize("how", [with_kernels, watched, packed])
@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("steps", [0, 2])
def test_models_go_with_their_last_user(
    how: Callable[[Any], None], make: Callable[[], Any], steps: int
) -> None:
    model = make()
    how(model)
    for _ in range(steps):
        model(**batch()).loss.backward()
    parts = [model, *model.children(), next(model.parameters())]
    references = [weakref.ref(part) for part in parts]
    del model, parts
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.parametrize("is_asked", [True, False])
def test_accelerators_and_what_they_prepared_go_with_their_last_user(is_asked: bool) -> None:
    config.set_current(Options(profile=config.current().profile, compile="off"))
    accelerator = Accelerator(cpu=True)
    if is_asked:
        _accelerator.apply(accelerator, {"compile": "off"}, adapter="test")
    else:
        _accelerator.apply_unasked(accelerator)
    assert _accelerator.is_applied(accelerator)
    model = llama()
    made = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader([1, 2]))
    accelerator.backward(made[0](**batch()).loss)
    made[1].step()
    references = [weakref.ref(thing) for thing in (accelerator, *made)]
    del accelerator, made, model
    assert [reference() for reference in references] == [None] * len(references)
