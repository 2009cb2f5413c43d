"""deepytorch.compile: in place, guarded, decided by what steps take; with cheap back ends."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import compilation, cost_model, policies, reasons, regions
from deepytorch_core.compile import region as region_module
from deepytorch_core.compile.life import step_count
from deepytorch_core.compile.policies import Policy, register_policy

pytestmark = pytest.mark.usefixtures("own_profile")


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, depth: int = 6, **block: Any) -> None:
        super().__init__()
        self.inward = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Block(**block) for _ in range(depth))
        self.outward = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return self.outward(x)


def make(model: Callable[..., nn.Module] = Stack, **arguments: Any) -> Any:
    torch.manual_seed(4)
    return model(**arguments)


def train(
    model: nn.Module, steps: int = 3, batch: int = 4, dtype: torch.dtype | None = None
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(11)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(torch.randn(batch, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of(model: nn.Module) -> Any:
    found = engine.compilation_of(model)
    assert found is not None
    return found


class Counting(Policy):
    """Runs the captured graph, and counts."""

    name = "counting"
    num_compiled = 0

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        type(self).num_compiled += 1
        return graph.forward


class Broken(Policy):
    name = "broken"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for this\nand a long story")


class Wrong(Policy):
    name = "wrong"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(output * 1.01 for output in graph(*args))


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


class WrongGradient(Policy):
    name = "wrong-gradient"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(_HalfGradient.apply(output) for output in graph(*args))


class FailsLater(Policy):
    """Passes the check and fails when the training calls it again."""

    name = "fails-later"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        calls = 0

        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 9:
                raise RuntimeError("out of something")
            return graph(*args)

        return run


_seen: list[str] = []


def _after(*_: Any) -> None:
    _seen.append("after")


def _backward(*_: Any) -> None:
    _seen.append("backward")


def test_compile_leaves_the_model_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    model = make(dropout=0.3)
    twin = copy.deepcopy(model)
    _seen.clear()
    model.layers[1].register_forward_hook(_after)
    model.layers[1].register_full_backward_hook(_backward)
    hooks = [len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()]
    keys = list(model.state_dict())
    assert deepytorch.compile(model, "aot-eager") is model
    assert train(model) == pytest.approx(train(twin), rel=1e-6)
    assert [
        len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()
    ] == hooks
    assert _seen == ["after", "backward"] * 3
    assert isinstance(model, Stack)
    assert isinstance(model.layers[0], Block)
    assert list(model.state_dict()) == keys
    (region,) = of(model).regions
    assert region.failure is None
    assert region.told.chosen == {"aot-eager": region.told.num_compiles}
    # Copies and files hold the plain model.
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.layers[0].forward).__name__ == "method"
        assert other.layers[0].forward.__self__ is other.layers[0]
        assert not other._forward_pre_hooks
    torch.save(model.state_dict(), io.BytesIO())
    assert "aot-eager, asked for" in str(deepytorch.report())
    assert deepytorch_undo(model)
    assert all("_compiled_call_impl" not in vars(module) for module in model.modules())
    assert "_compiled_call_impl" not in vars(model)
    assert "runs eagerly" not in capsys.readouterr().err


def of_profile(model: nn.Module) -> Any:
    """Return what the next run will find decided."""
    found = compilation.Compilation(model, "auto", budget_s=1.0, steps=None)
    found.kept.look_at(found.subject.root, torch.device("cpu"))
    return found.kept.find(1)


def deepytorch_undo(model: nn.Module) -> bool:
    return engine.undo(model)


def test_compile_equal_blocks_share_one_compile() -> None:
    register_policy(Counting)
    Counting.num_compiled = 0
    model = make(depth=7)
    deepytorch.compile(model, "counting")
    train(model)
    assert Counting.num_compiled == 1
    (region,) = of(model).regions
    assert region.region.name == "layers.0"
    assert len(region.region.modules) == 7


def test_compile_finds_blocks_or_takes_the_whole() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(*(Block(8) for _ in range(6)))
            self.decoder = nn.ModuleList(Block(16) for _ in range(6))
            self.acts = nn.Sequential(nn.ReLU(), nn.ReLU())

    mixed = Mixed()  # regions keep nothing of it
    (narrow, wide) = sorted(regions.find(mixed), key=lambda region: region.name, reverse=True)
    assert (narrow.name, len(narrow.modules)) == ("encoder.0", 6)
    assert (wide.name, len(wide.modules)) == ("decoder.0", 6)
    # Too little is repeated.
    (whole,) = regions.find(Stack(depth=2))
    assert whole.name == "Stack"
    # Blocks that are trained differently don't share.
    stack = Stack(depth=9)
    for layer in stack.layers[:4]:
        layer.requires_grad_(False)
    assert sorted(len(region.modules) for region in regions.find(stack)) == [4, 5]


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (Broken, "broken: RuntimeError: no kernel for this"),
        (Wrong, "wrong: output: differs by 1.0e-02"),
        (WrongGradient, "wrong-gradient: gradient 0: differs by 5.0e-01"),
        (FailsLater, "RuntimeError: out of something"),
    ],
)
def test_compile_guard_falls_back(
    policy: type[Policy], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    register_policy(policy)
    model = make(dropout=0.5)
    expected = train(copy.deepcopy(model))
    deepytorch.compile(model, policy.name)
    found = of(model)
    assert train(model) == expected
    assert all(cause in str(region.failure) for region in found.regions)
    said = [
        line for line in capsys.readouterr().err.splitlines() if "layers.0 runs eagerly" in line
    ]
    assert len(said) == 1
    assert cause in said[0]


def test_compile_names_what_is_wrong() -> None:
    with pytest.raises(
        ValueError, match=r"'inductr' \(did you mean inductor\?\); known: auto, off"
    ):
        deepytorch.compile(nn.Linear(2, 2), "inductr")
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not function"):
        deepytorch.compile(lambda x: x)
    with pytest.raises(ValueError, match="can't name a policy"):
        register_policy(type("Nameless", (Counting,), {"name": "auto"}))
    with pytest.raises(ValueError, match="there is a policy 'inductor' already: Inductor"):
        register_policy(type("Mine", (Counting,), {"name": "inductor"}))


def test_compile_policy_that_is_not_for_this_device_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make()
    deepytorch.compile(model, "cuda-graphs")
    assert train(model) == train(make())
    assert decisions.made()[-1]["chosen"] == "eager"
    assert "CUDA graphs need a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["policy", "option", "disabled"])
def test_compile_off_does_nothing(way: str) -> None:
    model = make()
    if way != "policy":
        off = {"compile": "off"} if way == "option" else {"enabled": False}
        config.set_current(Options(**off))
    deepytorch.compile(model, "off" if way == "policy" else "auto")
    assert engine.compilation_of(model) is None
    assert "_compiled_call_impl" not in vars(model)


class Clock:
    """Steps take 1 s eagerly and `compiled_s` compiled, give or take some noise."""

    def __init__(self, compiled_s: float, noise: float) -> None:
        self.now = 0.0
        self.compiled_s = compiled_s
        self.noise = noise
        self.numbers = torch.Generator().manual_seed(1)

    def perf_counter(self) -> float:
        return self.now

    def step(self, compiled: bool) -> None:
        off = 1 + self.noise * torch.randn(1, generator=self.numbers).item()
        self.now += (self.compiled_s if compiled else 1.0) * off


def run_auto(
    monkeypatch: pytest.MonkeyPatch,
    compiled_s: float,
    *,
    steps: int = 70,
    noise: float = 0.01,
    run_steps: int | None = None,
    **more: Any,
) -> tuple[nn.Module, list[bool], list[float]]:
    """Trains with "auto", told of `run_steps`; the model, which way its steps went, and losses."""
    register_policy(Counting)
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("counting")])
    clock = Clock(compiled_s, noise)
    monkeypatch.setattr(step_count, "time", clock)
    model = make(dropout=0.2)
    engine.compile(model, steps=run_steps, **{"is_patient": False, **more})
    found = engine.compilation_of(model)
    assert found is not None
    ways = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(11)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ways.append(found.is_on)
        clock.step(found.is_on)
    return model, ways, losses


def test_compile_auto_keeps_what_is_faster(
    monkeypatch: pytest.MonkeyPatch, own_profile: Path
) -> None:
    model, ways, losses = run_auto(monkeypatch, 0.5)
    assert not any(ways[:3])
    assert all(ways[3:6])
    assert not all(ways[6:22])
    assert all(ways[22:])  # decided at the first look
    assert "_compiled_call_impl" not in vars(model)
    (decision,) = decisions.made()
    assert decision["chosen"] == "counting"
    assert decision["times_ms"]["eager"] == pytest.approx(1000, rel=0.05)
    assert decision["times_ms"]["counting"] == pytest.approx(500, rel=0.05)
    (entry,) = json.loads(own_profile.read_text())["decisions"]
    assert entry["regions"] == {"layers.0": ["counting"]}
    assert entry["blocks"] == {"layers.0": 6}
    # Every step was an ordinary one, so the losses are eager's.
    engine.undo(model)
    assert losses == pytest.approx(train(make(dropout=0.2), steps=70), rel=1e-5)
    # The next run knows, also where nothing may be measured.
    config.set_current(Options(profile=str(own_profile), deterministic=True))
    again, ways, _ = run_auto(monkeypatch, 0.5, steps=4)
    assert all(ways)
    assert decisions.made()[-1]["reason"] == "from the profile"
    assert len(of(again).regions) == 1


@pytest.mark.parametrize(
    ("compiled_s", "noise", "last", "reason"),
    [
        (1.5, 0.01, 22, "eager is faster"),
        (1.0, 0.03, 62, "not faster beyond the noise"),
        (1.0, 0.001, 22, "not faster beyond the noise"),
    ],
)
def test_compile_auto_goes_back_to_eager(
    monkeypatch: pytest.MonkeyPatch,
    own_profile: Path,
    compiled_s: float,
    noise: float,
    last: int,
    reason: str,
) -> None:
    model, ways, _ = run_auto(monkeypatch, compiled_s, noise=noise)
    assert any(ways[last - 16 : last])
    assert not any(ways[last:])
    assert decisions.made()[-1]["reason"] == reason
    assert all("_compiled_call_impl" not in vars(module) for module in model.modules())
    assert "_compiled_call_impl" not in vars(model)
    # The next run knows it: noise hides no gain that would be worth another trial.
    (entry,) = json.loads(own_profile.read_text())["decisions"]
    assert (entry["reason"], entry["regions"]) == (reason, {"layers.0": ["counting"]})
    assert of_profile(model) is not None


def test_compile_auto_looks_again_for_a_gain_that_noise_may_hide(
    monkeypatch: pytest.MonkeyPatch, own_profile: Path
) -> None:
    model, _, _ = run_auto(monkeypatch, 0.9, noise=0.4)
    assert decisions.made()[-1]["reason"] == reasons.UNDECIDED
    # A note is for people and decides nothing.
    (entry,) = json.loads(own_profile.read_text())["notes"]
    assert entry["times_ms"]["counting"] < 0.95 * entry["times_ms"]["eager"]
    assert of_profile(model) is None


def test_compile_auto_leaves_short_and_deterministic_runs_alone(
    monkeypatch: pytest.MonkeyPatch, own_profile: Path
) -> None:
    config.set_current(Options(profile=str(own_profile), deterministic=True))
    _, ways, _ = run_auto(monkeypatch, 0.5, steps=8)
    assert not any(ways)
    assert decisions.made()[-1]["reason"].startswith("not measured: deterministic")


def test_compile_recompile_storm_ends_eagerly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "MOST_COMPILES", 2)

    class Stormy(nn.Linear):
        mode = "a"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (self.mode == "b")

    class Storm(Stack):
        def __init__(self) -> None:
            super().__init__(depth=1)
            self.layers = nn.ModuleList(nn.Sequential(Stormy(8, 8)) for _ in range(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layers[0][0].mode = str(self.steps)
            self.steps += 1
            return super().forward(x)

        steps = 0

    model = make(Storm)
    register_policy(Counting)
    expected = train(copy.deepcopy(model), steps=7)
    deepytorch.compile(model, "counting")
    assert train(model, steps=7) == pytest.approx(expected, rel=1e-5)
    said = capsys.readouterr().err
    assert "Storm keeps changing" in said
    assert "Storm runs eagerly: it was compiled anew" in said


def test_compile_evaluation_runs_as_it_is() -> None:
    register_policy(Counting)
    Counting.num_compiled = 0
    model = make()
    deepytorch.compile(model, "counting")
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 5))
    assert Counting.num_compiled == 0
    model.train()
    train(model, steps=1)
    assert Counting.num_compiled == 1


def test_compile_under_activation_checkpointing_and_autocast() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inward(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.outward(x)

    for dtype in (None, torch.bfloat16):
        model = make(Checkpointed, dropout=0.2)
        twin = copy.deepcopy(model)
        deepytorch.compile(model, "aot-eager")
        ours, stock = train(model, dtype=dtype), train(twin, dtype=dtype)
        assert ours == pytest.approx(stock, rel=1e-6 if dtype is None else 2e-2)
        (region,) = of(model).regions
        assert region.failure is None
        assert region.told.chosen.get("aot-eager")


def test_compile_holds_up_no_step_where_nobody_knows_how_long_a_run_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ways, _ = run_auto(monkeypatch, 0.5, steps=740, is_patient=True)
    assert not any(ways)
    assert decisions.made()[-1]["reason"] == reasons.HELD_UP
    engine.undo(model)


def test_compile_large_models_cost_more_unless_they_are_repetitions() -> None:
    block = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(300)]
    unlike = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))  # taken as a whole
    assert cost_model.cost_s(nn.Sequential(*block), is_helped=False) == cost_model.LEAST_COST_S
    assert cost_model.cost_s(unlike, is_helped=False) == pytest.approx(
        300 * cost_model.COST_OF_MODULE_S
    )
    helped = cost_model.cost_s(unlike, is_helped=True)
    assert helped == pytest.approx(300 * cost_model.COST_OF_HELPED_MODULE_S)


@pytest.mark.parametrize(("cost_s", "is_compiled"), [(5.9, True), (6.1, False)])
def test_compile_leaves_a_run_alone_that_would_not_earn_it_back(
    cost_s: float, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_model, "cost_s", lambda root, *, is_helped: cost_s)
    model, ways, _ = run_auto(monkeypatch, 0.5, steps=200, run_steps=200)  # of a second each
    assert any(ways) == is_compiled
    (decision,) = decisions.made()
    told = "faster than eager" if is_compiled else "a run of 200 s would not earn a compile back"
    assert decision["reason"] == told
    engine.undo(model)


def test_compile_frees_the_model() -> None:
    model = make()
    deepytorch.compile(model, "aot-eager")
    train(model, steps=2)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_compile_is_undone_by_deactivate() -> None:
    model = make()
    deepytorch.compile(model, "aot-eager")
    train(model, steps=1)
    assert "_compiled_call_impl" in vars(model.layers[0])
    was_active = deepytorch.is_active()
    deepytorch.deactivate()
    assert "_compiled_call_impl" not in vars(model.layers[0])
    if was_active:
        deepytorch.activate()


def test_compile_reports_graph_breaks(own_profile: Path) -> None:
    class Breaking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x * 2

    class Breaks(Stack):
        def __init__(self) -> None:
            super().__init__(depth=1)
            self.layers = nn.ModuleList(Breaking() for _ in range(6))

    model = make(Breaks)
    deepytorch.compile(model, "aot-eager")
    train(model, steps=2)
    (region,) = of(model).regions
    (line,) = region.told.breaks
    assert line.startswith(f"{__file__}:")
    assert "graph_break" in line


@pytest.mark.parametrize(("policy", "phase"), [("aot-eager", "compiling"), ("auto", "eager steps")])
def test_phases_of_the_first_steps(policy: str, phase: str) -> None:
    model = make()
    deepytorch.compile(model, policy)
    for _ in range(3):
        model(torch.randn(4, 5))
    assert phase in of(model).phases.spent
    assert len(of(model).phases.spent) == 1


def test_compile_docs_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "compile.md").read_text()
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) == 2
    config.set_current(Options(tune="off"))  # Inductor has a test of its own
    scope: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        exec(block, scope)
    assert "0.down.bias" in capsys.readouterr().out
    model = make()
    deepytorch.compile(model, "plain")
    assert train(model) == train(make())
    assert of(model).regions[0].told.chosen == {"plain": 1}
