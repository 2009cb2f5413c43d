"""For tests of collectives: inputs, exact results, and how far from them is too far."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Relative to the largest sum of a few ranks' inputs: a rounding of the type or two.
_ROUNDING = {"float64": 1e-14, "float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}


def rank_gpu(rank: int) -> torch.device:
    """This rank's GPU, made the current one; with fewer GPUs than ranks they share."""
    import torch

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def rank_inputs(
    count: int, ranks: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Every rank's input, `count` normal random numbers, the same list on every rank."""
    import torch

    generator = torch.Generator(device=device).manual_seed(count)
    return [torch.randn(count, generator=generator, device=device).to(dtype) for _ in range(ranks)]


def shifted(value: torch.Tensor, elements: int) -> torch.Tensor:
    """The same content, flat, `elements` behind an aligned address."""
    import torch

    room = torch.empty(value.numel() + elements, dtype=value.dtype, device=value.device)
    view = room[elements:]
    view.copy_(value.flatten())
    return view


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The inputs' "sum", "avg" or "max", in float64."""
    import torch

    wide = torch.stack([each.double() for each in inputs])
    return {"sum": wide.sum(0), "avg": wide.mean(0), "max": wide.amax(0)}[op]


def assert_close(found: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """Check a reduction's result against float64; AssertionError says `what` is off by how much."""
    error = (found.double() - exact).abs().max().item()
    scale = max(1.0, exact.abs().max().item())
    most = _ROUNDING[str(found.dtype).removeprefix("torch.")] * scale
    assert error <= most, f"{what}: off by {error} of {scale}"
