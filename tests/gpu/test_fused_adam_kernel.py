"""The fused Adam kernel against torch's, step by step, and that it comes by measurement."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepytorch_core.base import decisions
from deepytorch_core.nn import fused_adam
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.nn.swaps import fused_adam as swap
from deepytorch_core.testing import needs_gpus

pytestmark = [
    pytest.mark.usefixtures("quiet_profile"),
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.timeout(300),
]

GPU = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((1,), (3,), (127,), (65537,), (300, 41), (1024, 64), (20_000,))
NUM_STEPS = 20
Make = Callable[..., torch.optim.Optimizer]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lists of few elements are served, too, and launches counted."""
    pytest.importorskip("triton")
    from deepytorch_core.nn import adam_kernels

    counted: list[int] = []
    launch = adam_kernels.launch

    @functools.wraps(launch)
    def counting(*args: Any, **kwargs: Any) -> None:
        counted.append(len(args[0]))
        launch(*args, **kwargs)

    monkeypatch.setattr(adam_kernels, "launch", counting)
    monkeypatch.setattr(fused_adam, "LEAST_ELEMENTS", 1)
    return counted


@pytest.fixture
def serving(launches: list[int]) -> Iterator[Callable[[bool], None]]:
    """Begins and ends it: `serving(True)`."""
    undos: list[Callable[[], None]] = []

    def switch(is_on: bool) -> None:
        while undos:
            undos.pop()()
        if is_on:
            undos.append(swap.FusedAdam().apply(None, None))  # type: ignore[arg-type]

    yield switch
    switch(False)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator(GPU).manual_seed(5)
    made = [
        torch.randn(shape, device=GPU, dtype=torch.float32, generator=generator) for shape in SIZES
    ]
    # One that begins between two addresses of 16 bytes, and one of other strides.
    made.append(torch.randn((7001,), device=GPU, dtype=torch.float32, generator=generator))
    rounded = [(0.05 * tensor).to(dtype) for tensor in made]
    rounded[-1] = rounded[-1][1:]
    rounded.append(rounded[4].clone().t())
    return [nn.Parameter(tensor) for tensor in rounded]


def give_gradients(own: list[nn.Parameter], number: int, scale: float = 1.0) -> None:
    generator = torch.Generator(GPU).manual_seed(number)
    for parameter in own:
        values = torch.randn(parameter.shape, device=GPU, dtype=torch.float32, generator=generator)
        values *= scale * 10.0 ** -(number % 5)  # of several sizes
        values.flatten()[::7] = 0.0
        parameter.grad = torch.empty_like(parameter).copy_(values)


def groups(own: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": own[::2], "weight_decay": 0.1}, {"params": own[1::2], "weight_decay": 0.0}]


def results(own: list[nn.Parameter], optimizer: Any) -> list[Tensor]:
    names = ("exp_avg", "exp_avg_sq", "step")
    return [
        *(parameter.detach() for parameter in own),
        *(parameter.grad for parameter in own if parameter.grad is not None),
        *(optimizer.state[parameter][name] for parameter in own for name in names),
    ]


def assert_torchs(found: list[Tensor], expected: list[Tensor]) -> None:
    """One element of ten thousand may be off, by little: nvcc may round once what it fuses."""
    num_off, num_all = 0, 0
    for tensor, other in zip(found, expected, strict=True):
        num_off += int((tensor != other).sum())
        num_all += tensor.numel()
        eps = torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(
            tensor.double(), other.double(), rtol=8 * eps, atol=8 * eps * float(other.abs().max())
        )
    assert num_off <= 1e-4 * num_all, f"{num_off} of {num_all} elements differ"


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p, **o: torch.optim.AdamW(groups(p), lr=2e-3, fused=True, **o),
    "adam": lambda p, **o: torch.optim.Adam(groups(p), lr=2e-3, fused=True, **o),
    "maximize": lambda p: torch.optim.AdamW(groups(p), maximize=True, fused=True),
    "betas": lambda p: torch.optim.AdamW(groups(p), betas=(0.0, 0.95), eps=1e-6, fused=True),
    "tensor": lambda p: torch.optim.AdamW(
        groups(p), lr=torch.tensor(2e-3, dtype=torch.float32, device=GPU), fused=True
    ),
    "host-tensor": lambda p: torch.optim.AdamW(
        groups(p), lr=torch.tensor(2e-3, dtype=torch.float32, device="cpu"), fused=True
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torchs(
    name: str, dtype: torch.dtype, serving: Callable[[bool], None], launches: list[int]
) -> None:
    both = []
    for is_on in (False, True):
        serving(is_on)
        own = parameters(dtype)
        optimizer = OPTIMIZERS[name](own)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        for number in range(NUM_STEPS):
            if number == NUM_STEPS // 2:  # what is loaded lies elsewhere
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            give_gradients(own, number)
            optimizer.step()
            schedule.step()
        both.append(results(own, optimizer))
        # The group whose decay goes into float32 gradients is torch's.
        num_served = 1 if name == "adam" and dtype == torch.float32 else 2
        assert len(launches) == (num_served * NUM_STEPS if is_on else 0)
    assert_torchs(both[1], both[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [65536.0, 3000.0])
def test_a_scaler_skips_the_same_steps(
    scale: float, dtype: torch.dtype, serving: Callable[[bool], None], launches: list[int]
) -> None:
    both, scales = [], []
    for is_on in (False, True):
        serving(is_on)
        own = parameters(dtype)
        optimizer = torch.optim.AdamW(groups(own), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=scale, growth_interval=3)
        for number in range(NUM_STEPS):
            scaler.scale(torch.ones((), dtype=torch.float32, device=GPU))
            give_gradients(own, number, scale=scaler.get_scale() / 1e3)
            if number in (4, 5, 11):
                assert own[3].grad is not None
                own[3].grad[number] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        both.append(results(own, optimizer))
        scales.append(scaler.get_scale())
        assert bool(launches) == is_on
    assert scales[0] == scales[1]
    for tensor, other in zip(*both, strict=True):
        assert torch.equal(tensor.isfinite(), other.isfinite())
    finite = [[tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in of] for of in both]
    assert_torchs(finite[1], finite[0])


def test_numbers_that_are_none_and_zeros_stay_what_they_are(
    serving: Callable[[bool], None],
) -> None:
    both = []
    for is_on in (False, True):
        serving(is_on)
        own = [nn.Parameter(torch.ones(64, dtype=torch.float32, device=GPU)) for _ in range(4)]
        optimizer = torch.optim.AdamW(own, lr=1e-2, fused=True)
        for number in range(3):
            for parameter, value in zip(own, (0.0, torch.nan, torch.inf, 1e-18), strict=True):
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad[number::3] = value
            optimizer.step()
        both.append(results(own, optimizer))
    for tensor, other in zip(*both, strict=True):
        torch.testing.assert_close(tensor, other, equal_nan=True, rtol=1e-6, atol=1e-9)


def test_models_train_alike(serving: Callable[[bool], None]) -> None:
    losses = []
    for is_on in (False, True):
        serving(is_on)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(
            GPU, torch.bfloat16
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        x = torch.randn((512, 64), device=GPU, dtype=torch.bfloat16)
        losses.append([])
        for _ in range(50):
            optimizer.zero_grad()
            loss = (model(x) - x.roll(1, 1)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=0.0)


def test_a_graph_captures_torchs(launches: list[int]) -> None:
    undo = swap.FusedAdam().apply(None, None)  # type: ignore[arg-type]
    own = parameters(torch.float32)
    optimizer = torch.optim.AdamW(own, lr=1e-3, capturable=True, fused=True)
    give_gradients(own, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    assert len(launches) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert len(launches) == 1
    undo()
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    reference = torch.optim.AdamW(theirs, lr=1e-3, capturable=True, fused=True)
    for parameter, other in zip(own, theirs, strict=True):
        assert parameter.grad is not None
        other.grad = parameter.grad.clone()
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    graph.replay()
    reference.step()
    for parameter, other in zip(own, theirs, strict=True):
        assert torch.equal(parameter, other)


def test_steps_wait_for_nothing(launches: list[int]) -> None:
    undo = swap.FusedAdam().apply(None, None)  # type: ignore[arg-type]
    own = parameters(torch.bfloat16)
    optimizer = torch.optim.AdamW(own, lr=1e-3, fused=True)
    for number in range(2):
        give_gradients(own, number)
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)  # elsewhere
        optimizer.step()
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        undo()
    assert len(launches) == 4


def test_steps_on_another_stream_find_their_table(launches: list[int]) -> None:
    undo = swap.FusedAdam().apply(None, None)  # type: ignore[arg-type]
    both = []
    for is_on in (True, False):
        own = parameters(torch.float32)
        optimizer = torch.optim.AdamW(own, lr=1e-3, fused=True)
        give_gradients(own, 0)
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                optimizer.step()
        torch.cuda.synchronize()
        both.append(results(own, optimizer))
        if is_on:
            undo()
    assert len(launches) == 3
    assert_torchs(both[0], both[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_chosen_by_measurement_and_goes_again(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    own = [
        nn.Parameter(torch.zeros((4096, 4096), dtype=dtype, device=GPU)),
        nn.Parameter(torch.zeros((65537,), dtype=dtype, device=GPU)),
    ]
    optimizer = torch.optim.AdamW(own, lr=1e-3, fused=True)
    stock = torch._fused_adamw_
    setting = KernelSetting(model=nn.Linear(1, 1).cuda(), optimizers=[optimizer], device=GPU)
    swapped = apply_kernels(setting)
    what = f"fused AdamW({str(dtype).removeprefix('torch.')})"
    made = [decision for decision in decisions.made() if decision["what"] == what][-1]
    assert not made.get("dropped"), made
    assert {"stock", "triton"} <= set(made["times_ms"])
    assert (torch._fused_adamw_ is not stock) == (made["chosen"] != "stock")
    give_gradients(own, 0)
    optimizer.step()
    swapped.undo()
    assert torch._fused_adamw_ is stock
    optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in own)
