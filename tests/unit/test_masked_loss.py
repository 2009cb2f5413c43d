"""Masked language models train on the tokens that have a target, and give what stock gives."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch.utils.data import DataLoader  # noqa: E402

from deepytorch.integrations.kernels import masked_loss  # noqa: E402
from deepytorch.integrations.transformers import pack_batches  # noqa: E402
from deepytorch_core.base import decisions  # noqa: E402
from deepytorch_core.nn.deferred_logits import DeferredLogits  # noqa: E402
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_profile")

VOCABULARY = 97
MAX_LENGTH = 40


def made(family: str) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    more = {"num_attention_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    chance = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**shape, **more, **chance)
    return getattr(transformers, f"{family}ForMaskedLM")(settings).train()


def batch(number: int, share: float = 0.2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(3, MAX_LENGTH, (5,), generator=generator)
    ids = torch.randint(4, VOCABULARY, (5, int(lengths.max())), generator=generator)
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    chosen = (torch.rand(ids.shape, generator=generator) < share) & (mask == 1)
    labels = ids.masked_fill(~chosen, -100)
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask, "labels": labels}


def train(model: Any, ours: bool, share: float = 0.2) -> list[Any]:
    numbers: Any = range(6)
    loader: DataLoader[Any] = DataLoader(
        numbers, collate_fn=lambda samples: batch(samples[0], share)
    )
    names: dict[str, str] = {}
    if ours:
        names = apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "on").names
        assert pack_batches(model, "on", loaders=[loader])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs in loader:
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, names]


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Camembert"])
def test_kernels_masked_loss_trains_as_stock_does(family: str) -> None:
    model = made(family)
    stock = copy.deepcopy(model)
    expected, _ = train(stock, ours=False)
    losses, names = train(model, ours=True)
    assert names[f"loss of {family}ForMaskedLM({VOCABULARY})"] == "masked tokens"
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, other in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_kernels_masked_loss_computes_the_head_for_targets_alone() -> None:
    model = made("Bert")
    rows = []
    decoder = model.get_output_embeddings()
    stock = decoder.forward
    apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "on")
    decoder.forward = lambda hidden: rows.append(hidden.shape[:-1].numel()) or stock(hidden)
    given = batch(3)
    num_targets = int((given["labels"] != -100).sum())
    with masked_loss._expecting(masked_loss.most_targets(num_targets)):
        output = model(**given)
    assert isinstance(output.logits, DeferredLogits)
    assert rows == [min(given["labels"].numel(), masked_loss.most_targets(num_targets))]
    # Nobody knows how many targets there are, or nobody trains: all of them.
    assert not isinstance(model(**given).logits, DeferredLogits)
    model.eval()
    with masked_loss._expecting(64):
        assert not isinstance(model(**given).logits, DeferredLogits)


def test_kernels_masked_loss_gives_logits_to_whoever_reads_them() -> None:
    model = made("Bert")
    given = batch(1)
    expected = model(**given)
    swapped = apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "on")
    with masked_loss._expecting(masked_loss.most_targets(given["labels"].numel())):
        output = model(**given)
    torch.testing.assert_close(output.loss, expected.loss)
    assert output.logits.shape == expected.logits.shape
    torch.testing.assert_close(output.logits + 0.0, expected.logits)
    assert (output.logits * 1.0).requires_grad
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with masked_loss._expecting(64):
        output = model(**given)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"Read them before optimizer.step\(\)"):
        output.logits.sum()
    swapped.undo()
    assert not isinstance(model(**given).logits, DeferredLogits)


def test_kernels_masked_loss_copies_and_pickles_a_head_alone() -> None:
    model = made("Bert")
    apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "on")
    hidden = torch.randn(2, 5, 32)
    for copied in (copy.deepcopy(model.cls), pickle.loads(pickle.dumps(model.cls))):
        assert copied.forward.head is copied
        torch.testing.assert_close(copied(hidden), model.cls(hidden))
        copied.forward.armed = True
        with masked_loss._expecting(64):
            assert isinstance(copied(hidden), DeferredLogits)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_kernels_masked_loss_with_no_target_and_with_nothing_but_targets(share: float) -> None:
    model = made("Bert")
    expected, _ = train(copy.deepcopy(model), ours=False, share=share)
    losses, _ = train(model, ours=True, share=share)
    assert losses == pytest.approx(expected, rel=1e-4, nan_ok=True)


def test_kernels_masked_loss_leaves_labels_on_padding_to_stock() -> None:
    model = made("Bert")
    given = batch(2)
    given["labels"] = given["input_ids"].clone()
    expected = copy.deepcopy(model)(**given).loss
    apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "on")
    assert pack_batches(model, "auto")
    assert model(**given).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_kernels_masked_loss_more_targets_than_expected_are_an_error() -> None:
    model = made("Bert")
    apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "on")
    given = batch(2, share=0.9)
    with masked_loss._expecting(8), pytest.raises(RuntimeError, match="labels were changed"):
        model(**given)


def test_kernels_masked_loss_is_measured_with_auto() -> None:
    model = made("Bert")
    apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "auto")
    what = f"loss of BertForMaskedLM({VOCABULARY})"
    (decision,) = (entry for entry in decisions.made() if entry["what"] == what)
    assert set(decision["times_ms"]) == {"stock", "masked tokens"}
    assert not decision.get("dropped")


def test_bounds_of_targets_are_few_and_close() -> None:
    bounds = [masked_loss.most_targets(number) for number in range(20_000)]
    assert all(bound >= number for number, bound in enumerate(bounds))
    assert all(bound <= 1.13 * number + 64 for number, bound in enumerate(bounds))
    assert len(set(bounds)) < 80
