"""CUDA graphs of modules that make a mask anew whenever the length of a batch changes."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from deepytorch_core.compile import capture
from deepytorch_core.compile.capture import Capture
from deepytorch_core.compile.replay import Replay
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)]

DEVICE = "cuda"
# The last batch of an epoch is shorter, as a language model's often is.
LENGTHS = (7, 7, 7, 7, 7, 5)


class Words(nn.Module):
    """A causal encoder that keeps its mask, as PyTorch's word language model does."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 11)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != x.shape[1]:
            self.mask = torch.log(torch.tril(torch.ones(x.shape[1], x.shape[1]))).to(x.device)
        found: Tensor = self.head(self.encoder(x, mask=self.mask))
        return found


def train(model: nn.Module, num_epochs: int) -> list[float]:
    generator = torch.Generator(DEVICE).manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for length in LENGTHS * num_epochs:
        x = torch.randn(3, length, 16, device=DEVICE, generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_masks_of_earlier_epochs_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MOST_KINDS", 9)
    monkeypatch.setattr(capture, "MOST_STATES", 9)
    monkeypatch.setattr(capture, "LEAST_PASSES_OF_STATE", 1)
    torch.manual_seed(0)
    model = Words().to(DEVICE).train()
    expected = train(copy.deepcopy(model), num_epochs=25)
    found = Capture(model, is_on=lambda: True)
    found.install()
    losses = train(model, num_epochs=25)
    assert found.failure is None
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-5)
    gc.collect()
    replays = [replay for replay in found._replays.values() if isinstance(replay, Replay)]
    assert 1 <= len(replays) <= 4
    assert len(found._recorder._borrowed._graphs) == 2 * len(replays)
    assert found.num_captured > 25  # one of each epoch at least


def test_a_mask_that_is_kept_is_captured_once() -> None:
    torch.manual_seed(0)
    model = Words().to(DEVICE).train()
    found = Capture(model, is_on=lambda: True)
    found.install()
    for _ in range(12):
        model(torch.randn(3, 7, 16, device=DEVICE)).square().mean().backward()
        model.zero_grad()
    assert found.was_replayed
    assert found.num_captured == 1
