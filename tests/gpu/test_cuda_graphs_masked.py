"""A masked language model, packed, on its targets alone and replayed: it trains as stock does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from deepytorch_core.compile import capture
from deepytorch_core.compile.capture import Capture
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)]

DEVICE = "cuda"
STEPS = 40
LENGTH = 96
AUTOCAST = True


def made(dropout: float) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    chance = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    torch.manual_seed(0)
    settings = BertConfig(**shape, **chance, num_attention_heads=2, vocab_size=301)
    return BertForMaskedLM(settings).to(DEVICE).train()


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(3, LENGTH, (6,), generator=generator)
    ids = torch.randint(4, 301, (6, int(lengths.max())), generator=generator)
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    share = 0.05 + 0.3 * float(torch.rand((), generator=generator))
    chosen = (torch.rand(ids.shape, generator=generator) < share) & (mask == 1)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(chosen, -100)}


def train(model: Any, loader: Any, reads: bool = False) -> list[float]:
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for inputs in loader:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=AUTOCAST):
            output = model(**{name: value.to(DEVICE) for name, value in inputs.items()})
        output.loss.backward()
        if reads:
            losses.append(output.logits.float().mean().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    return losses


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("kernels", ["off", "on"])
def test_a_masked_language_model_trains_replayed(kernels: str, reads: bool) -> None:
    from deepytorch.integrations.transformers import pack_batches

    model = made(0.0)
    stock = copy.deepcopy(model)
    numbers: Any = range(STEPS)
    loaders = [DataLoader(numbers, collate_fn=lambda samples: batch(samples[0])) for _ in range(2)]
    expected = train(stock, loaders[0], reads)
    apply_kernels(KernelSetting(model=model, device=torch.device(DEVICE)), kernels)
    assert pack_batches(model, "on", loaders=[loaders[1]])
    sizes: Any = capture.sizes_of(model)
    sizes.use_few(True, "test")
    found = Capture(model, is_on=lambda: True)
    found.install()
    losses = train(model, loaders[1], reads)
    assert found.failure is None
    assert found.num_captured > 2
    assert losses == pytest.approx(expected, rel=2e-2, abs=2e-2)


def causal() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    torch.manual_seed(0)
    settings = LlamaConfig(
        **shape, num_attention_heads=2, num_key_value_heads=2, vocab_size=301, use_cache=True
    )
    return LlamaForCausalLM(settings).to(DEVICE).train()


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("make", [lambda: made(0.0), causal], ids=["masked", "causal"])
def test_full_batches_are_replayed_too(make: Any, with_mask: bool) -> None:
    from deepytorch.integrations.transformers import pack_batches

    def some(number: int) -> dict[str, torch.Tensor]:
        if number < 14 and with_mask:  # from which it learns that lengths differ
            return batch(number)
        ids = torch.randint(4, 301, (6, LENGTH), generator=torch.Generator().manual_seed(number))
        mask = {"attention_mask": torch.ones_like(ids)} if with_mask else {}
        return {"input_ids": ids, "labels": ids.clone(), **mask}

    model = make()
    stock = copy.deepcopy(model)
    numbers: Any = range(STEPS)
    loaders = [DataLoader(numbers, collate_fn=lambda samples: some(samples[0])) for _ in range(2)]
    expected = train(stock, loaders[0])
    assert pack_batches(model, "on", loaders=[loaders[1]])
    sizes: Any = capture.sizes_of(model)
    sizes.use_few(True, "test")
    found = Capture(model, is_on=lambda: True)
    found.install()
    losses = train(model, loaders[1])
    assert found.failure is None
    assert found.has_replays
    assert not found._misses
    assert losses == pytest.approx(expected, rel=2e-2, abs=2e-2)
