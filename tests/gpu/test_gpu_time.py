"""Layouts are chosen by what the GPU computes: by replays, where a step can be captured."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch_core.base import decisions
from deepytorch_core.guard import gpu_time
from deepytorch_core.nn import channels_last
from deepytorch_core.testing import needs_gpus

pytestmark = [
    pytest.mark.usefixtures("quiet_profile"),
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.timeout(300),
]


class Net(nn.Sequential):
    def __init__(self, *, waits: bool = False) -> None:
        super().__init__(
            nn.Conv2d(16, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Conv2d(64, 64, 3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 5),
        )
        self.waits = waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        return found * (1.0 + 0.0 * found.max().item()) if self.waits else found


def train(model: nn.Module, steps: int = 4) -> list[float]:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(8, 16, 31, 27).cuda(), torch.randint(0, 5, (8,)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("waits", [False, True])
def test_a_layout_is_timed_on_the_gpu_and_the_training_goes_on(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Net(waits=waits).cuda()
    twin = copy.deepcopy(model)
    used: list[str] = []
    for name in ("_replayed", "_launched_ahead"):
        stock = getattr(gpu_time, name)

        def timed(*args: Any, stock: Any = stock, name: str = name) -> float:
            seconds: float = stock(*args)
            used.append(name)
            return seconds

        monkeypatch.setattr(gpu_time, name, timed)
    # As DDP keeps them: autograd's nodes of the weights, on the stream of the training.
    kept = [parameter.expand_as(parameter).grad_fn for parameter in model.parameters()]
    channels_last.choose(model)
    found = train(model)
    assert set(used) == {"_launched_ahead" if waits else "_replayed"}
    assert len(used) >= 4
    (decision,) = decisions.made()
    assert decision["times_ms"].keys() == {"stock", "channels_last"}
    if decision["chosen"] == "stock":  # else dropout falls on other elements
        assert found == pytest.approx(train(twin), rel=2e-2)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert model[1].num_batches_tracked == 4
    del kept


def test_nothing_of_the_timed_graphs_stays() -> None:
    model = Net().cuda()
    train(model, steps=1)
    gc.collect()
    before = torch.cuda.memory_allocated()
    handle: Any = channels_last.choose(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(torch.randn(8, 16, 512, 512, device="cuda"))
    handle()
    gc.collect()
    torch.clear_autocast_cache()
    # Libraries keep workspaces for each stream; what the pass alone takes is half a GiB.
    assert torch.cuda.memory_allocated() <= before + (128 << 20)
