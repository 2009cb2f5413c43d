"""When other processes compile a model, and when the training's own does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepytorch_core.compile import ahead

GPU = torch.device("cuda", 0)
GIB = 1 << 30


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(ahead.LARGE_MODEL)))


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight helpers could work, and have 32 GiB."""
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (32 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 40 * GIB)


@pytest.mark.usefixtures("roomy")
def test_large_models_have_helpers() -> None:
    assert ahead.why_not(large(), GPU) is None
    assert ahead.why_not(large()[1:], GPU) == "it is small"
    assert str(ahead.why_not(large(), torch.device("cpu"))).startswith("its device has no compiler")


@pytest.mark.usefixtures("roomy")
def test_helpers_need_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (25 * GIB, 80 * GIB))
    assert ahead.why_not(large(), GPU) == "there is too little memory left on the GPU"
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 3)
    assert ahead.why_not(large(), GPU) == "there are too few cores"


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("torch._inductor.config", "fx_graph_cache", False),
        ("torch._inductor.config", "force_disable_caches", True),
        ("torch._functorch.config", "enable_autograd_cache", False),
    ],
)
def test_what_helpers_compile_would_not_be_found_without_caches(
    module: str, name: str, value: bool
) -> None:
    config = pytest.importorskip(module)
    with config.patch({name: value}):
        assert ahead.why_not(large(), GPU) == "torch's caches are switched off"
