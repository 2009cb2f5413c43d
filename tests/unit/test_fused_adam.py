"""The fused Adam kernel: its table, which calls it takes, and how it comes and goes."""

from __future__ import annotations

import copy
import ctypes
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepytorch_core import guard
from deepytorch_core.base import decisions, patching
from deepytorch_core.nn import fused_adam
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.nn.swaps import fused_adam as swap

CPU = torch.device("cpu")
SIZES = ((1,), (3,), (127,), (5, 80), (1031,))
NAMES = ("_fused_adam_", "_fused_adamw_")


class FakeKernel:
    """Computes in float64 what the table says, by addresses alone; float32 only."""

    def __init__(self) -> None:
        self.num_launches = 0
        self.tables: list[Tensor] = []

    def launch(
        self,
        places: Tensor,
        chunks: Tensor,
        dtype: torch.dtype,
        *,
        corrections: tuple[Tensor, Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float,
        is_decoupled: bool,
        is_maximized: bool,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        shape: Any,
    ) -> None:
        assert dtype == torch.float32
        self.num_launches += 1
        self.tables.append(places)
        for row, number in chunks.tolist():
            *addresses, size = places[row].tolist()
            steps = int(seen(addresses.pop(3), 1)[0])
            begin = number * shape.chunk
            p, m, v, g = (
                seen(address + 4 * begin, min(shape.chunk, size - begin)) for address in addresses
            )
            if found_inf is not None and found_inf.item() == 1:
                continue
            if grad_scale is not None:
                g /= grad_scale.item()
            ascent = -g.astype("f8") if is_maximized else g.astype("f8")
            if is_decoupled:
                p -= lr * weight_decay * p
            else:
                ascent += weight_decay * p
            m[:] = betas[0] * m + (1 - betas[0]) * ascent
            v[:] = betas[1] * v + (1 - betas[1]) * ascent**2
            first, second = (
                float(correction[min(steps, len(correction) - 1)]) for correction in corrections
            )
            p -= lr / first * m / (numpy.sqrt(v / second) + eps)


def seen(address: int, size: int) -> Any:
    return numpy.frombuffer((ctypes.c_float * size).from_address(address), dtype=numpy.float32)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    """The kernel for the CPU, and lists of few elements."""
    fake = FakeKernel()
    made: Any = types.ModuleType("adam_kernels")
    made.launch = fake.launch
    made.LaunchShape = functools.partial(types.SimpleNamespace, chunk=128)
    monkeypatch.setitem(sys.modules, "deepytorch_core.nn.adam_kernels", made)
    monkeypatch.setattr("deepytorch_core.nn.adam_kernels", made, raising=False)
    monkeypatch.setattr(swap, "_has_triton", lambda: True)
    monkeypatch.setattr(fused_adam, "_is_here", lambda device: device.type == "cpu")
    monkeypatch.setattr(fused_adam, "_stream", lambda device: 0)
    monkeypatch.setattr(fused_adam, "LEAST_ELEMENTS", 1000)
    monkeypatch.setattr(swap, "DEVICE", "cpu")
    stock = [getattr(torch, name) for name in NAMES]
    yield fake
    assert [getattr(torch, name) for name in NAMES] == stock


@pytest.fixture
def served(kernel: FakeKernel) -> Iterator[FakeKernel]:
    """The same, in force."""
    undo = swap.FusedAdam().apply(None, None)  # type: ignore[arg-type]
    yield kernel
    undo()


Make = Callable[[Any], torch.optim.Optimizer]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in SIZES]
    made.append(torch.randn((602,), generator=generator, dtype=torch.float32)[1:])  # not aligned
    made.append(torch.randn((40, 3), generator=generator, dtype=torch.float32).t())
    return [nn.Parameter(tensor) for tensor in made]


def step(optimizer: Any, seed: int, *, scale: float = 1.0) -> None:
    """One with new gradients, which lie elsewhere than the last ones."""
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.grad = torch.empty_like(parameter).copy_(scale * gradient)
    optimizer.step()


def assert_same(ours: Any, theirs: Any) -> None:
    for parameter, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.0, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), fused=True),
        lambda p: torch.optim.Adam(
            p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, fused=True
        ),
        lambda p: torch.optim.Adam(p, lr=0.01, maximize=True, eps=1e-6, fused=True),
    ],
)
def test_all_elements_are_updated_as_torch_does(make: Make, kernel: FakeKernel) -> None:
    results = []
    for is_on in (False, True):
        undo = swap.FusedAdam().apply(None, None) if is_on else lambda: None  # type: ignore[arg-type]
        own = parameters()
        optimizer = make(own)
        for number in range(4):
            step(optimizer, number)
        state = [optimizer.state[parameter] for parameter in own]
        results.append(
            [*own, *(moments[key] for moments in state for key in ("exp_avg", "exp_avg_sq"))]
        )
        undo()
    assert kernel.num_launches == 4
    assert_same(results[1], results[0])


def test_tables_stay_while_all_lies_where_it_was(served: FakeKernel) -> None:
    own, stock = parameters(), parameters()
    optimizer = torch.optim.AdamW(own, fused=True)
    reference = torch.optim.AdamW(stock, foreach=False)

    def both(number: int) -> None:
        for either in (optimizer, reference):
            step(either, number)

    both(0)
    for _ in range(2):
        optimizer.step()
        reference.step()
    assert served.tables[1] is served.tables[2]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    both(1)
    own[3].data = own[3].detach().clone()
    both(2)
    fresh = nn.Parameter(torch.ones(700, dtype=torch.float32))
    stock_fresh = nn.Parameter(torch.ones(700, dtype=torch.float32))
    optimizer.add_param_group({"params": [fresh]})
    reference.add_param_group({"params": [stock_fresh]})
    del optimizer.param_groups[0]["params"][0], reference.param_groups[0]["params"][0]
    both(3)
    assert served.num_launches == 6  # the new group is small
    assert_same([*own, fresh], [*stock, stock_fresh])


def test_tables_come_back_with_the_addresses(served: FakeKernel) -> None:
    lists = lists_of(40, 50)
    gradients = [torch.full((40, 50), value, dtype=torch.float32) for value in range(20)]
    expected = [[tensor.clone() for tensor in of] for of in lists]
    order = [0, 1, 0, 1, *range(20), 0]
    with torch.no_grad():
        for number in order:
            for of in (lists, expected):
                of[1][0] = gradients[number]
                of[4][0] += 1
            call(lists)
            patching.original_of(torch._fused_adamw_)(
                *expected[:4], [], expected[4], **SETTINGS, grad_scale=None, found_inf=None
            )
    tables = served.tables
    assert tables[0] is tables[2]
    assert tables[1] is tables[3]
    assert tables[0] is not tables[1]
    assert tables[-1] is not tables[0]  # only the last few are kept
    assert_same(
        [tensor for of in lists for tensor in of], [tensor for of in expected for tensor in of]
    )


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99998])
def test_corrections_end_where_they_are_one(beta: float, kernel: FakeKernel) -> None:
    known = fused_adam.Known(128)
    found = known.corrections(beta, CPU, 0)
    assert found is not None
    steps = numpy.arange(len(found), dtype="f8")
    expected = 1 - float(numpy.float32(beta)) ** steps
    assert found[0] == 0.0
    assert found[-1] == 1.0
    assert numpy.abs(found.numpy() - expected).max() < 2e-7
    assert numpy.float32(expected[-1]) == 1.0
    assert known.corrections(beta, CPU, 0) is found


def test_decays_that_need_too_many_corrections_are_torchs(served: FakeKernel) -> None:
    for beta in (0.999999, 1.0):
        lists = lists_of(40, 50)
        with torch.no_grad():
            call(lists, beta2=beta)
    assert not served.num_launches


def test_tables_keep_nothing_alive(served: FakeKernel) -> None:
    for number in range(3):
        own = parameters()
        optimizer = torch.optim.AdamW(own, fused=True)
        step(optimizer, number)
    known = swap._serving._known
    del own, optimizer
    assert served.num_launches == 3
    assert not any(entry.is_alive for entry in known._entries.values())


def test_a_scaler_divides_gradients_and_skips_a_step(served: FakeKernel) -> None:
    results = []
    for fused in (True, False):
        own = parameters()
        optimizer = torch.optim.AdamW(own, lr=0.01, fused=fused, foreach=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(5):
            scaler.scale(torch.ones((), dtype=torch.float32, device=CPU))
            generator = torch.Generator().manual_seed(number)
            for parameter in own:
                gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.grad = torch.empty_like(parameter).copy_(scaler.get_scale() * gradient)
            if number == 2:
                own[0].grad = torch.full_like(own[0], math.inf)
            scaler.step(optimizer)
            scaler.update()
        results.append([*own, *(parameter.grad for parameter in own if parameter.grad is not None)])
    assert served.num_launches == 5
    assert_same(*results)


def strided(own: list[nn.Parameter], optimizer: Any) -> None:
    own[3].grad = torch.zeros((80, 5), dtype=torch.float32).t()


def changed_state(own: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[own[0]]["exp_avg"] = torch.zeros((), dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"amsgrad": True}, torch.float32),
        ({"eps": 0.0}, torch.float32),
        ({"decoupled_weight_decay": False, "weight_decay": 0.1}, torch.float32),
        ({}, torch.float64),
    ],
)
def test_what_the_kernel_does_not_take_is_torchs(
    options: dict[str, Any], dtype: torch.dtype, served: FakeKernel
) -> None:
    own = [nn.Parameter(parameter.detach().to(dtype)) for parameter in parameters()]
    theirs = copy.deepcopy(own)
    for of, fused in ((own, True), (theirs, False)):
        chosen = {"decoupled_weight_decay": True, "weight_decay": 0.01} | options
        optimizer = torch.optim.Adam(of, fused=fused, foreach=False, **chosen)
        for parameter in of:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert not served.num_launches
    assert_same(own, theirs)


class Own(Tensor):
    pass


SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.0,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}


def call(lists: list[list[Tensor]], **changed: Any) -> None:
    settings = {**SETTINGS, "grad_scale": None, "found_inf": None, **changed}
    torch._fused_adamw_(*lists[:4], [], lists[4], **settings)


def lists_of(*shape: int) -> list[list[Tensor]]:
    made = [[torch.ones(shape, dtype=torch.float32)] for _ in range(4)]
    return [*made, [torch.ones((), dtype=torch.float32)]]


def transposed(lists: list[list[Tensor]]) -> None:
    lists[1][0] = lists[1][0].t().contiguous().t()


def spread(lists: list[list[Tensor]]) -> None:
    for tensors in lists[:4]:
        tensors[0] = torch.ones((2 * len(tensors[0]), 50), dtype=torch.float32)[::2]


def of_a_class(lists: list[list[Tensor]]) -> None:
    lists[2][0] = lists[2][0].as_subclass(Own)  # type: ignore[type-var]


def of_another_type(lists: list[list[Tensor]]) -> None:
    lists[4][0] = lists[4][0].double()


def few(lists: list[list[Tensor]]) -> None:
    for tensors in lists[:4]:
        tensors[0] = torch.ones((9, 9), dtype=torch.float32)


@pytest.mark.parametrize("change", [transposed, spread, of_a_class, of_another_type, few])
def test_tensors_that_do_not_fit_are_torchs(change: Any, served: FakeKernel) -> None:
    lists = lists_of(40, 50)
    known = fused_adam.Known(128)

    def is_taken() -> bool:
        arguments = (*lists[:4], [], lists[4])
        launch = functools.partial(served.launch, shape=types.SimpleNamespace(chunk=128))
        return fused_adam.is_taken(known, launch, arguments, SETTINGS, is_decoupled=True)

    assert is_taken()
    change(lists)
    assert not is_taken()


def test_calls_that_are_looked_at_are_torchs(served: FakeKernel) -> None:
    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        with Looking():
            call(lists_of(40, 50))
        with torch.device("cpu"):
            call(lists_of(40, 50))
        assert not served.num_launches
        call(lists_of(40, 50))
        assert served.num_launches == 1
    call(lists_of(40, 50))
    assert served.num_launches == 1
    leaves = [[tensor.requires_grad_() for tensor in of] for of in lists_of(40, 50)]
    stock = patching.original_of(torch._fused_adamw_)
    assert stock is not torch._fused_adamw_
    with torch.no_grad():
        call(leaves)
    assert served.num_launches == 2


def test_it_stays_while_anybody_wants_it_and_is_listed(kernel: FakeKernel) -> None:
    stock = torch._fused_adamw_
    first = swap.FusedAdam().apply(None, None)  # type: ignore[arg-type]
    second = swap.FusedAdam().apply(None, None)  # type: ignore[arg-type]
    listed = {(patch.owner, patch.name): patch.option for patch in patching.replaced()}
    for name in NAMES:
        assert listed["torch", name] == "DEEPYTORCH_KERNELS=off"
    second()
    second()
    assert torch._fused_adamw_ is not stock
    first()
    assert torch._fused_adamw_ is stock
    assert not {("torch", name) for name in NAMES} & {
        (patch.owner, patch.name) for patch in patching.replaced()
    }


def decisions_made() -> dict[str, Any]:
    return {decision["what"]: decision for decision in decisions.made()}


@pytest.mark.usefixtures("quiet_profile")
@pytest.mark.parametrize("fused", [True, None])
def test_a_fused_optimizer_gets_it_by_kernels_on(fused: bool | None, kernel: FakeKernel) -> None:
    own, stock = parameters(), parameters()
    optimizer = torch.optim.AdamW(own, fused=fused)
    reference = torch.optim.AdamW(stock, foreach=False)
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU)
    swapped = apply_kernels(setting, "on")
    assert swapped.names["fused AdamW(float32)"] == "triton"
    kernel.num_launches = 0
    for number in range(3):
        for either in (optimizer, reference):
            step(either, number)
    assert kernel.num_launches == 3
    assert_same(own, stock)
    swapped.undo()
    step(optimizer, 3)
    assert kernel.num_launches == 3


@pytest.mark.usefixtures("quiet_profile")
@pytest.mark.parametrize("is_faster", [True, False])
def test_it_is_tried_on_tensors_of_its_own_and_kept_if_faster(
    is_faster: bool, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are pretended."""
    launches: dict[str, int] = {}

    def measure(arms: Any, device: Any, *, prepare: Any, **_: Any) -> dict[str, list[float]]:
        for name, run in arms.items():
            prepare(name)
            before = kernel.num_launches
            run()
            launches[name] = kernel.num_launches - before
        return {"stock": [2.0] * 5, "triton": [1.0 if is_faster else 3.0] * 5}

    monkeypatch.setattr(guard, "interleaved", measure)
    own = parameters()
    kept = copy.deepcopy(own)
    optimizer = torch.optim.AdamW(own, fused=True)
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU)
    swapped = apply_kernels(setting)
    decision = decisions_made()["fused AdamW(float32)"]
    assert decision["chosen"] == ("triton" if is_faster else "stock")
    assert set(decision["times_ms"]) == {"stock", "triton"}
    assert launches == {"stock": 0, "triton": swap._STEPS}
    assert not optimizer.state
    assert all(torch.equal(parameter, other) for parameter, other in zip(own, kept, strict=True))
    before = kernel.num_launches
    step(optimizer, 0)
    assert kernel.num_launches - before == is_faster
    swapped.undo()


@pytest.mark.usefixtures("quiet_profile")
@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("amsgrad=True was asked for", lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True)),
        ("capturable=True was asked", lambda p: torch.optim.Adam(p, capturable=True, fused=True)),
        ("parameters are few", lambda p: torch.optim.Adam(p[:3], fused=True)),
        ("torch's arithmetic", lambda p: torch.optim.Adam(p, weight_decay=0.1, fused=True)),
    ],
)
def test_optimizers_that_it_is_not_for_are_told(
    reason: str, make: Make, kernel: FakeKernel
) -> None:
    optimizer = make(parameters())
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU)
    assert not apply_kernels(setting, "on").names
    found = decisions_made()[f"fused {type(optimizer).__name__}(float32)"]
    assert found["chosen"] == "stock"
    assert reason in found["reason"]


def test_only_torchs_own_fused_optimizers_are_found(kernel: FakeKernel) -> None:
    class Sub(torch.optim.AdamW):
        pass

    optimizers = [
        Sub(parameters(), fused=True),
        torch.optim.SGD(parameters(), fused=True),
        torch.optim.AdamW(parameters()),
        torch.optim.AdamW(parameters(), fused=True),
    ]
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=optimizers, device=CPU)
    assert [place.targets for place in swap.find(setting)] == [(optimizers[3],)]
    setting = KernelSetting(
        model=nn.Linear(1, 1), optimizers=optimizers, device=torch.device("meta")
    )
    assert not list(swap.find(setting))


def test_replicas_are_compared_bit_by_bit(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [nn.Parameter(parameter.detach().bfloat16()) for parameter in parameters()]
    optimizer = torch.optim.AdamW(own, fused=True)
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU)
    (place,) = swap.find(setting)
    assert not any(output.dtype == torch.int16 for output in place.probe().run())
    monkeypatch.setattr(swap, "_are_replicas", lambda setting: True)
    assert swap.FusedAdam().why_not(place, setting) is None
    assert all(output.dtype == torch.int16 for output in place.probe().run())
