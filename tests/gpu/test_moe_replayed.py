"""Mixtures of experts whose products would wait for the GPU, replayed: as eager, batch by batch."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from deepytorch_core.compile.capture import Capture
from deepytorch_core.guard.recorder import NotCapturedError, Recorder
from deepytorch_core.nn.grouped_mm import grouped_mm
from deepytorch_core.testing import needs_gpus

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

pytestmark = [
    pytest.mark.usefixtures("quiet_profile"),
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.timeout(300),
]

DEVICE = torch.device("cuda", 0)
BATCHES = 40
EXACT, ROUNDED = 1e-5, 1e-2


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype)


def exact(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    bounds = itertools.pairwise([0, *ends.tolist(), len(left)])
    matrices = [*right, torch.zeros_like(right[0])]
    parts = [left[a:b] @ matrix for (a, b), matrix in zip(bounds, matrices, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "sizes"),
    [
        (4096, 512, 256, [0.5, 0.0, 0.3, 0.2]),
        (1000, 96, 130, [0.1] * 9),  # and rows behind the last group
        (70, 33, 17, [0.0, 1.0, 0.0]),
        (300, 64, 64, [1 / 150] * 150),
        (1, 16, 16, [1.0, 0.0]),
    ],
)
@pytest.mark.parametrize("is_transposed", [True, False])
def test_grouped_products_are_those_of_float64(
    rows: int, inner: int, columns: int, sizes: list[float], *, dtype: Any, is_transposed: bool
) -> None:
    torch.manual_seed(rows)
    ends = (torch.tensor(sizes, dtype=torch.float64).cumsum(0) * rows).round().int().to(DEVICE)
    left = randn(rows, inner, dtype=dtype)
    shape = (len(sizes), columns, inner) if is_transposed else (len(sizes), inner, columns)
    weight = randn(*shape, dtype=dtype)
    upstream = randn(rows, columns, dtype=dtype)
    results = []
    for multiply, kind in ((grouped_mm, dtype), (exact, torch.float64)):
        inputs = [tensor.to(kind).requires_grad_() for tensor in (left, weight)]
        right = inputs[1].mT if is_transposed else inputs[1]
        out = multiply(inputs[0], right, ends)
        results.append([out, *torch.autograd.grad(out, inputs, upstream.to(kind))])
    tolerance = EXACT if dtype == torch.float32 else ROUNDED
    for found, expected in zip(*results, strict=True):
        assert found.dtype == dtype
        scale = expected.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * scale)


def test_tf32_is_used_where_torch_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = randn(512, 256), randn(2, 256, 128)
    ends = torch.tensor([100, 512], dtype=torch.int32, device=DEVICE)
    expected = exact(left.double(), right.double(), ends)

    def error() -> float:
        return float((grouped_mm(left, right, ends) - expected).abs().max() / expected.abs().max())

    assert error() < EXACT
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert EXACT < error() < ROUNDED


def test_one_hot_of_a_known_number_of_classes_does_not_wait() -> None:
    """Models make one-hot rows of experts' numbers: stock's way needs no fix."""
    numbers = torch.randint(0, 8, (64, 2), device=DEVICE, dtype=torch.int64)
    recorder = Recorder(DEVICE)
    with recorder.rehearsing():
        found = torch.nn.functional.one_hot(numbers, 8)
    assert torch.equal(found.argmax(-1), numbers)
    place = r"in test_one_hot\S+ \(\S+test_moe_replayed.py:\d+"
    with pytest.raises(NotCapturedError, match=place), recorder.rehearsing():
        torch.nn.functional.one_hot(numbers)


def test_a_number_that_is_no_expert_ends_the_process() -> None:
    lines = (
        "import torch",
        "from deepytorch_core.compile.fixes.expert_counts import counted",
        "counted(torch.tensor([0, 6], dtype=torch.int64, device='cuda'), 6)",
        "torch.cuda.synchronize()",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert "device-side assert" in ended.stderr


def made(family: str, **own: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=301,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts_per_tok=2,
        output_router_logits=True,
        **own,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(DEVICE).train()


FAMILIES = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "use_cache": False},
    "Mixtral": {"num_local_experts": 4, "use_cache": False},
    "Olmoe": {"num_experts": 16, "use_cache": False},
}


def results(model: Any, ids: Tensor, is_cast: bool) -> tuple[list[Tensor], Tensor]:
    """Losses, and all gradients in one."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=is_cast):
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = [
        parameter.grad.flatten().float()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    return [output.loss.detach(), output.aux_loss.detach()], torch.cat(gradients)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "is_cast"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False), (torch.float16, True)],
    ids=["autocast", "float32", "bfloat16", "float16"],
)
def test_a_mixture_of_experts_is_replayed(family: str, dtype: torch.dtype, is_cast: bool) -> None:
    model = made(family, **FAMILIES[family]).to(dtype)
    stock = copy.deepcopy(model)
    found = Capture(model, is_on=lambda: True)
    found.install()
    tolerance = 1e-4 if (dtype, is_cast) == (torch.float32, False) else 3e-2
    for number in range(BATCHES):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(4, 301, (4, 96), generator=generator).to(DEVICE)
        losses, gradient = results(model, ids, is_cast)
        expected, exactly = results(stock, ids, is_cast)
        for mine, theirs in zip(losses, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        # A token whose experts are almost equally good may go to another by rounding.
        assert float((gradient - exactly).norm() / exactly.norm()) < tolerance
    assert found.failure is None, found.failure
    assert found.has_replays, found.problem
    assert not found._misses
    found.remove()


def test_an_experts_loop_is_named_as_what_waits() -> None:
    model = made("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    model.set_experts_implementation("eager")
    found = Capture(model, is_on=lambda: True)
    found.install()
    for number in range(3):
        ids = torch.randint(4, 301, (2, 32), generator=torch.Generator().manual_seed(number))
        results(model, ids.to(DEVICE), True)
    assert not found.has_replays
    assert "it waits for the GPU in Qwen3MoeExperts.forward (" in str(found.problem)
    found.remove()
