"""The fused cross-entropy's kernels against float64, and where calls go on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch_core.nn.cross_entropy import cross_entropy
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.nn.swaps import cross_entropy as swap
from deepytorch_core.testing import needs_gpus

pytestmark = [
    pytest.mark.usefixtures("quiet_profile"),
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.timeout(300),
]


def made(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits that lie apart by more than their classes, some masked out, and targets."""
    generator = torch.Generator("cuda").manual_seed(rows * classes)
    logits = torch.randn(
        (rows, classes + 8), device="cuda", dtype=torch.float32, generator=generator
    )
    logits[1, : classes - 100] = -torch.inf
    logits = (4 * logits).to(dtype)[:, :classes].detach().requires_grad_()
    targets = torch.randint(
        classes - 90, classes, (rows,), device="cuda", dtype=torch.int64, generator=generator
    )
    targets[::7] = -100
    return logits, targets


@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize(
    ("rows", "classes", "dtype"),
    [
        (37, 4096, torch.float32),
        (64, 50257, torch.bfloat16),
        (33, 128256, torch.float16),
        (5, 32001, torch.float32),
    ],
)
def test_kernels_compute_what_float64_does(
    rows: int, classes: int, dtype: torch.dtype, is_mean: bool
) -> None:
    logits, targets = made(rows, classes, dtype)
    loss = cross_entropy(logits, targets, is_mean=is_mean, ignore_index=-100)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="mean" if is_mean else "sum")
    (exact_gradient,) = torch.autograd.grad(3 * expected, exact)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=tolerance, atol=1e-5)


def test_calls_under_autocast_go_there_and_others_do_not() -> None:
    logits, targets = made(64, 9000, torch.bfloat16)

    def kinds(**options: float) -> tuple[str, str]:
        with torch.autocast("cuda", torch.bfloat16):
            inside = F.cross_entropy(logits, targets, **options)  # type: ignore[arg-type]
        outside = F.cross_entropy(logits, targets)
        return type(inside.grad_fn).__name__, type(outside.grad_fn).__name__

    stock = kinds()
    undo = swap.FusedCrossEntropy().apply(None, None)  # type: ignore[arg-type]
    try:
        assert kinds() == ("_CrossEntropyBackward", stock[1])
        assert kinds(label_smoothing=0.1)[0] != kinds()[0]
    finally:
        undo()
    assert kinds() == stock


def test_it_is_chosen_by_measurement_and_replayed() -> None:
    model = nn.Linear(64, 50304, bias=False).cuda()
    setting = KernelSetting(model=model, device=torch.device("cuda"), autocast=torch.bfloat16)
    swapped = apply_kernels(setting)
    assert swapped.names.get("cross-entropy(50304)") == "fused"
    x = torch.randn((512, 64), device="cuda", dtype=torch.float32)
    targets = torch.randint(0, 50304, (512,), device="cuda", dtype=torch.int64)

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), targets)
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
        model.zero_grad()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    graph.replay()
    torch.testing.assert_close(replayed, expected)
    swapped.undo()
