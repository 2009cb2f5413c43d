"""Updated weights of ZeRO-3 between host and GPU: which copies are ours, and to which bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepytorch.integrations.common.contract import Changes
from deepytorch.integrations.seams import offloaded_weights

SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 65520.0, 3.4e38)
TIES = (1.00390625, 1.01171875, 1.0 + 2**-11, 1.0 + 3 * 2**-11)  # half a last place of either type


@pytest.mark.parametrize("size", [12, 13, 1001])
def test_the_bits_are_those_of_torchs_own_copy(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ROUNDED", "_STAGED"):
        monkeypatch.setattr(offloaded_weights, name, 13)
    generator = torch.Generator().manual_seed(size)
    exact = torch.randn(size, generator=generator) * 100
    exact[:12] = torch.tensor(SPECIAL + TIES)
    copies = (offloaded_weights.copy_to_host, offloaded_weights.Staging().copy_to_device)
    for dtype in (torch.bfloat16, torch.float16):
        stock = torch.empty(size, dtype=dtype)
        stock.copy_(exact)
        for copy in copies:
            ours = torch.empty(size, dtype=dtype)
            copy(ours, exact)
            assert torch.equal(ours.view(torch.int16), stock.view(torch.int16))


class Flat(SimpleNamespace):
    """Flat weights, with only what is asked of them before they are copied."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(device=torch.device(device), dtype=dtype, data=None)


class Optimizer:
    """The part of DeepSpeed's optimizer that is used."""

    def __init__(self, rounded: list[Any], exact: list[Any]) -> None:
        self.fp16_partitioned_groups_flat = rounded
        self.fp32_partitioned_groups_flat = exact
        self.done: list[tuple[str, int]] = []

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group: int) -> None:
        self.done.append(("stock", sub_group))

    def _unflatten_partitioned_parameters(self, sub_group: int) -> None:
        self.done.append(("unflatten", sub_group))


def updates(optimizer: Optimizer) -> list[tuple[str, int]]:
    optimizer.done.clear()
    for sub_group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    return list(optimizer.done)


def test_only_conversions_between_host_and_gpu_are_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[str] = []
    monkeypatch.setattr(offloaded_weights, "copy_to_host", lambda *_: copied.append("down"))
    monkeypatch.setattr(offloaded_weights.Staging, "copy_to_device", lambda *_: copied.append("up"))
    half = torch.float16
    pairs = [
        (Flat("cpu", torch.bfloat16), Flat("cuda")),  # parameters on the host
        (Flat("cuda", half), Flat("cpu")),  # the optimizer
        (Flat("cuda", half), Flat("cuda")),
        (Flat("cpu", half), Flat("cpu")),
        (None, Flat("cuda")),  # in NVMe
        (Flat("cpu"), Flat("cuda")),  # under autocast
        (Flat("xpu", half), Flat("cpu")),
    ]
    optimizer = Optimizer(*map(list, zip(*pairs, strict=True)))
    changes = Changes()
    offloaded_weights.attach(optimizer, changes)
    ours = [("unflatten", number) for number in range(2)]
    assert updates(optimizer) == [*ours, *(("stock", number) for number in range(2, 7))]
    assert copied == ["down", "up"]
    changes.undo()
    assert updates(optimizer) == [("stock", number) for number in range(7)]


@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        SimpleNamespace(),
        Optimizer([torch.zeros(4, dtype=torch.bfloat16)], [torch.zeros(4)]),
        Optimizer([], []),
    ],
)
def test_others_stay_as_they_are(optimizer: Any) -> None:
    before = dict(vars(optimizer)) if optimizer is not None else None
    offloaded_weights.attach(optimizer, Changes())
    assert optimizer is None or vars(optimizer) == before


def test_deepspeed_has_what_is_replaced() -> None:
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    for name in (offloaded_weights._UPDATE, "_unflatten_partitioned_parameters"):
        assert callable(getattr(stage3.DeepSpeedZeroOptimizer_Stage3, name))
