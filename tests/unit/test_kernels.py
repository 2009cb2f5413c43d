"""kernels: found, tried on copies, kept or not, and undone; the fused optimizer step by step."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.nn import kernels
from deepytorch_core.nn.kernels import (
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    Undo,
    apply_kernels,
)
from deepytorch_core.nn.swaps import fused_optimizer

pytestmark = pytest.mark.usefixtures("quiet_profile")

CPU = torch.device("cpu")


class OwnRMSNorm(nn.Module):
    """As language models write it."""

    def __init__(self, width: int, offset: float = 0.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.offset = offset
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * wide.to(x.dtype)


def model(offset: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), OwnRMSNorm(6, offset), nn.Linear(6, 6), OwnRMSNorm(6, offset)
    )


def made() -> dict[str, dict[str, Any]]:
    return {decision["what"]: decision for decision in decisions.made()}


def test_kernels_that_are_exact_stay_with_on_and_come_out_again() -> None:
    network = model()
    x = torch.randn(5, 6)
    expected = network(x)
    before = copy.deepcopy(network.state_dict())
    swapped = apply_kernels(KernelSetting(model=network, device=CPU), "on")
    assert swapped.names == {"OwnRMSNorm(6)": "torch"}
    assert all("forward" in vars(network[index]) for index in (1, 3))
    torch.testing.assert_close(network(x), expected)
    assert list(network.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    swapped.undo()
    swapped.undo()
    assert not any("forward" in vars(layer) for layer in network)
    assert torch.equal(network(x), expected)


def test_kernels_that_compute_something_else_are_dropped() -> None:
    for mode in ("on", "auto"):
        network = model(offset=0.5)
        assert not apply_kernels(KernelSetting(model=network, device=CPU), mode).names
        decision = made()["OwnRMSNorm(6)"]
        assert decision["chosen"] == "stock"
        assert all("differs by" in why for why in decision["dropped"].values())
        assert set(decision["dropped"]) == {"torch", "torch_offset"}
        assert not any("forward" in vars(layer) for layer in network)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "place",
    ["gemma3.modeling_gemma3.Gemma3RMSNorm", "qwen3_next.modeling_qwen3_next.Qwen3NextRMSNorm"],
)
def test_norms_that_add_one_to_their_weight_have_a_kernel(place: str, dtype: torch.dtype) -> None:
    module, _, name = place.rpartition(".")
    norm = getattr(importlib.import_module(f"transformers.models.{module}"), name)(48).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # small ones, of which a sum in bfloat16 would keep little
        norm.weight.copy_(0.02 * torch.randn(48, dtype=torch.float32, generator=generator))
    stock = copy.deepcopy(norm)
    network = nn.Sequential(norm)
    assert apply_kernels(KernelSetting(model=network, device=CPU), "on").names == {
        f"{name}(48)": "torch_offset"
    }
    x = torch.randn(3, 5, 48, dtype=torch.float32, generator=generator).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = network(ours), stock(theirs)
    assert found.dtype == dtype
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-2}
    torch.testing.assert_close(found, expected, **close)
    gradient = torch.randn(3, 5, 48, dtype=torch.float32, generator=generator).to(dtype)
    found.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, **close)
    torch.testing.assert_close(norm.weight.grad, stock.weight.grad, **close)
    if dtype == torch.bfloat16:  # as near to float64 as stock is
        wide = copy.deepcopy(stock).double()
        exact = (
            (1 + wide.weight)
            * x.double()
            * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        )
        assert (found - exact).abs().mean() <= 1.01 * (expected - exact).abs().mean()


def test_kernels_off_looks_at_nothing() -> None:
    assert not apply_kernels(KernelSetting(model=model(), device=CPU), "off").names
    assert not decisions.made()
    with pytest.raises(ValueError, match="kernels='fast': expected auto, on or off"):
        apply_kernels(KernelSetting(model=model(), device=CPU), "fast")


def test_kernels_auto_measures_and_a_second_run_asks_the_profile() -> None:
    apply_kernels(KernelSetting(model=model(), device=CPU))
    first = made()["OwnRMSNorm(6)"]
    assert set(first["times_ms"]) == {"stock", "torch"}
    apply_kernels(KernelSetting(model=model(), device=CPU))
    second = made()["OwnRMSNorm(6)"]
    assert (second["chosen"], second["reason"]) == (first["chosen"], "from the profile")


def test_kernels_auto_measures_nothing_with_tune_off_or_deterministic() -> None:
    for option in ({"tune": "off"}, {"deterministic": True}):
        config.set_current(Options(profile=None, log="error", **option))
        network = model()
        assert not apply_kernels(KernelSetting(model=network, device=CPU)).names
        assert made()["OwnRMSNorm(6)"]["reason"].startswith("not measured")


class Bench(nn.Module):
    """A place whose kernels take as long as they are told to."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units
        self.bias = nn.Parameter(torch.zeros(()))


def bench_kernel(label: str, units: int, problem: str | None = None) -> Kernel:
    class Sized(Kernel):
        kind = "bench"
        name = label

        def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
            return problem

        def apply(self, target: Any, setting: KernelSetting) -> Undo:
            before, target.units = target.units, units
            return lambda: setattr(target, "units", before)

    return Sized()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `apply_kernels` with one place, and kernels of given costs; times are pretended."""

    def measure(arms: Any, device: Any, *, prepare: Any, **_: Any) -> dict[str, list[float]]:
        times = {}
        for name, call in arms.items():
            prepare(name)
            seen.clear()
            call()
            times[name] = [float(seen[0])] * 5
        return times

    seen: list[int] = []
    monkeypatch.setattr(guard, "interleaved", measure)

    def run(found: list[Kernel], target: Bench, *, saves_memory: bool) -> dict[str, str]:
        def probe() -> KernelProbe:
            copied = copy.deepcopy(target)

            def compute() -> torch.Tensor:
                seen.append(copied.units)
                (copied.bias * 1.0).backward()
                return copied.bias.detach() + 3.0

            return KernelProbe(copied, copied, compute)

        place = KernelPlace(
            kind="bench", what="bench", targets=(target,), probe=probe, saves_memory=saves_memory
        )
        monkeypatch.setattr(kernels, "_finders", {"bench": lambda setting: [place]})
        monkeypatch.setattr(kernels, "_kernels", {kernel.name: kernel for kernel in found})
        return apply_kernels(KernelSetting(model=target, device=CPU)).names

    return run


def test_kernels_auto_keeps_the_fastest(bench: Any) -> None:
    target = Bench(100)
    found = [bench_kernel("slow", 120), bench_kernel("fast", 50), bench_kernel("fair", 70)]
    assert bench(found, target, saves_memory=False) == {"bench": "fast"}
    assert target.units == 50
    assert made()["bench"]["times_ms"] == {
        "stock": 100e3,
        "slow": 120e3,
        "fast": 50e3,
        "fair": 70e3,
    }


def test_kernels_that_lose_or_gain_too_little_are_rolled_back(bench: Any) -> None:
    for units in (150, 100, 99):
        target = Bench(100)
        assert not bench([bench_kernel(f"units {units}", units)], target, saves_memory=False)
        assert target.units == 100


def test_kernels_that_save_memory_need_not_be_faster_but_not_slower(bench: Any) -> None:
    for units, stays in ((150, False), (103, False), (101, True), (99, True)):
        target = Bench(100)
        found = bench([bench_kernel(f"units {units}", units)], target, saves_memory=True)
        assert bool(found) == stays
        assert target.units == (units if stays else 100)
        again = bench([bench_kernel(f"units {units}", units)], Bench(100), saves_memory=True)
        assert again == found, "the profile says the same"


def test_kernels_that_can_not_serve_say_why(bench: Any) -> None:
    assert not bench([bench_kernel("gpu", 1, "there is no GPU")], Bench(9), saves_memory=False)
    assert made()["bench"]["reason"] == "gpu: there is no GPU"


def test_kernels_of_a_copied_model_belong_to_the_copy() -> None:
    network = model()
    swapped = apply_kernels(KernelSetting(model=network, device=CPU), "on")
    copied = copy.deepcopy(network)
    with torch.no_grad():
        copied[1].weight.fill_(2.0)
    x = torch.randn(3, 6)
    torch.testing.assert_close(copied[1](x), 2 * network[1](x))
    swapped.undo()


def test_kernels_give_way_where_dtypes_are_mixed_and_under_a_compiler() -> None:
    network = model()
    apply_kernels(KernelSetting(model=network, device=CPU), "on")
    half = torch.randn(3, 6).bfloat16()
    assert network[1](half).dtype == torch.float32, "as the class's own promotes"
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        traced.append(graph)
        return graph.forward

    torch.compile(network[1], backend=backend, fullgraph=True)(torch.randn(3, 6))
    assert any("rsqrt" in str(node.target) for node in traced[0].graph.nodes)


def optimizers() -> list[Any]:
    return [
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=1e-2),
    ]


def step(network: nn.Module, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def fused_in_steps(optimizer: Any) -> list[list[Any]]:
    """Return what the groups say while each step from now on runs."""
    seen: list[list[Any]] = []

    def look(*_: Any) -> None:
        seen.append([group["fused"] for group in optimizer.param_groups])

    optimizer.register_step_pre_hook(look)
    return seen


@pytest.mark.parametrize("make", optimizers())
def test_kernels_fused_optimizer_goes_on_with_its_state_both_ways(make: Any) -> None:
    network, reference = model(), model()
    optimizer, stock = make(network.parameters()), make(reference.parameters())
    plain = vars(optimizer).keys() - {"state"}
    said = [{**group, "params": None} for group in optimizer.param_groups]
    switched = None
    seen = []
    for number in range(9):
        if number == 3:
            switched = apply_kernels(
                KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU), "on"
            )
            assert switched.names == {type(optimizer).__name__: "fused"}
            seen = fused_in_steps(optimizer)
        if number == 6:
            assert switched is not None
            switched.undo()
            assert vars(optimizer).keys() - {"state"} == plain
        step(network, optimizer, number)
        step(reference, stock, number)
        assert [{**group, "params": None} for group in optimizer.param_groups] == said
        for ours, theirs in zip(network.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert seen == 3 * [[True]] + 3 * [[None]]


@pytest.mark.parametrize("make", optimizers())
def test_kernels_fused_optimizer_skips_a_step_whose_gradients_overflow(make: Any) -> None:
    """torch's own fused ones are called all the same, which whoever counts steps takes for one."""
    losses, calls = [], []
    for mode in ("off", "on"):
        network = model()
        optimizer = make(network.parameters())
        apply_kernels(
            KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU), mode
        )
        calls.append(0)

        def count(*_: Any) -> None:
            calls[-1] += 1

        optimizer.register_step_post_hook(count)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            scaler.scale(torch.ones(()))  # as the loss is
            for parameter in network.parameters():
                junk = torch.full(parameter.shape, 1e30)
                gradient = scaler.get_scale() * torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient if number else torch.full_like(gradient, math.inf)
                del junk  # what memory that nobody fills may hold
            scaler.step(optimizer)
            scaler.update()
        losses.append([parameter.detach().clone() for parameter in network.parameters()])
    assert calls == [3, 3]
    for theirs, ours in zip(*losses, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_kernels_fused_optimizer_takes_a_gradient_that_comes_later() -> None:
    results = []
    for mode in ("off", "on"):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        apply_kernels(
            KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU), mode
        )
        step(network[0], optimizer, 0)
        step(network, optimizer, 1)
        results.append(network.state_dict())
    for name, theirs in results[0].items():
        torch.testing.assert_close(results[1][name], theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", optimizers())
def test_kernels_fused_optimizer_saves_what_stock_would(make: Any) -> None:
    network = model()
    optimizer = make(network.parameters())
    stock = [dict(group) for group in optimizer.state_dict()["param_groups"]]
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU)
    swapped = apply_kernels(setting, "on")
    step(network, optimizer, 0)
    saved = optimizer.state_dict()
    assert saved["param_groups"] == stock
    optimizer.load_state_dict(copy.deepcopy(saved))
    seen = fused_in_steps(optimizer)
    step(network, optimizer, 1)
    assert seen == [[True]]
    swapped.undo()
    assert not optimizer._optimizer_state_dict_post_hooks


def test_kernels_fused_optimizer_stays_fused_after_loading_a_stock_checkpoint() -> None:
    network, reference = model(), model()
    optimizer = torch.optim.AdamW(network.parameters())
    stock = torch.optim.AdamW(reference.parameters())
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU)
    swapped = apply_kernels(setting, "on")
    for number in range(3):
        step(reference, stock, number)
    network.load_state_dict(reference.state_dict())
    # Copied, since loading shares the tensors of the state.
    optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
    seen = fused_in_steps(optimizer)
    step(network, optimizer, 7)
    assert seen == [[True]]
    step(reference, stock, 7)
    for ours, theirs in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    swapped.undo()
    optimizer.load_state_dict(stock.state_dict())
    step(network, optimizer, 8)
    assert seen == [[True], [None]]


@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("foreach=True was asked for", lambda p: torch.optim.AdamW(p, foreach=True)),
        ("fused=False was asked for", lambda p: torch.optim.AdamW(p, fused=False)),
        ("differentiable=True", lambda p: torch.optim.AdamW(p, differentiable=True)),
    ],
)
def test_kernels_fused_optimizer_leaves_what_was_asked_for(reason: str, make: Any) -> None:
    optimizer = make(model().parameters())
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[optimizer], device=CPU)
    assert not apply_kernels(setting, "on").names
    assert reason in made()["AdamW"]["reason"]


def test_kernels_fused_optimizer_leaves_sparse_gradients_and_strangers() -> None:
    sparse = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    assert not apply_kernels(
        KernelSetting(model=sparse, optimizers=[optimizer], device=CPU), "on"
    ).names
    assert "sparse" in made()["SGD"]["reason"]

    class Rows(nn.Module):
        """Nothing of it says that its gradients are sparse."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(5, 2))
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(rows, self.weight, sparse=True) + self.bias

    results = []
    for mode in ("off", "on"):
        rows = Rows()
        optimizer = torch.optim.SGD(rows.parameters(), lr=0.1, momentum=0.5)
        apply_kernels(KernelSetting(model=rows, optimizers=[optimizer], device=CPU), mode)
        for _ in range(3):
            optimizer.zero_grad()
            rows(torch.tensor([0, 3])).square().sum().backward()
            optimizer.step()
        results.append(rows.state_dict())
    for name, theirs in results[0].items():
        torch.testing.assert_close(results[1][name], theirs)

    class Own(torch.optim.AdamW):
        pass

    strange = [Own(model().parameters()), torch.optim.Adagrad(model().parameters())]
    fused = torch.optim.AdamW(model().parameters(), fused=True)
    setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[*strange, fused], device=CPU)
    assert not list(fused_optimizer.find(setting))
