"""LoRA's layers on a GPU: nearer to float64 than PEFT's, with less memory, compiled and not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.testing import needs_gpus

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.usefixtures("quiet_profile"),
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.timeout(300),
]

GPU = torch.device("cuda", 0)
WIDTH, WIDE = 1024, 3584


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, WIDE, bias=False)
        self.up_proj = nn.Linear(WIDTH, WIDE, bias=False)
        self.down_proj = nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def adapted() -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(FeedForward().to(GPU, torch.bfloat16), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def step(model: Any, x: Tensor) -> tuple[dict[str, Tensor], int]:
    """Return the output and all gradients, and the bytes that are kept for the backward pass."""
    rows = x.clone().requires_grad_()
    before = torch.cuda.memory_allocated(GPU)
    out = model(rows)
    kept = torch.cuda.memory_allocated(GPU) - before
    out.float().square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert rows.grad is not None
    return {"out": out.detach(), "x": rows.grad, **found}, kept


@pytest.mark.parametrize("tokens", [4096, 999])
def test_it_is_nearer_to_float64_and_keeps_less(tokens: int) -> None:
    model = adapted()
    own, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    setting = KernelSetting(model=own, device=GPU, autocast=torch.bfloat16)
    swapped = apply_kernels(setting, "on")
    assert set(swapped.names.values()) == {"accumulated"}
    x = torch.randn(1, tokens, WIDTH, device=GPU, dtype=torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        stock, kept_by_stock = step(model, x)
        ours, kept = step(own, x)
    wanted, _ = step(exact, x.double())
    copies_of_x = 2 * x.nbytes
    assert kept_by_stock - kept > 0.9 * copies_of_x
    for name, value in wanted.items():
        apart, of_stock = (
            float((found[name].double() - value).norm() / value.norm()) for found in (ours, stock)
        )
        assert apart < max(1.1 * of_stock, 4e-3), name


@pytest.mark.parametrize("dynamic", [False, True], ids=("fixed", "dynamic"))
def test_compiled_layers_compute_the_same(dynamic: bool) -> None:
    own = adapted()
    expected = copy.deepcopy(own)
    swapped = apply_kernels(KernelSetting(model=own, device=GPU, autocast=torch.bfloat16), "on")
    compiled = torch.compile(own, fullgraph=True, dynamic=dynamic)
    x = torch.randn(512, WIDTH, device=GPU, dtype=torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours, _ = step(compiled, x)
        stock, _ = step(expected, x)
    for name, value in stock.items():
        found = ours[name if name in ours else f"_orig_mod.{name}"]
        assert float((found - value).norm() / value.norm()) < 2e-2, name
    swapped.undo()
