"""The tests of replayed passes, without a GPU: a graph is a function that is called again."""

from __future__ import annotations

import copy
import gc
import importlib.util
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core import guard
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import (
    ahead,
    capture,
    compilation,
    graph_trial,
    policies,
    regions,
    replay,
    undecided,
)
from deepytorch_core.compile.life import step_count
from deepytorch_core.compile.policies import Policy, register_policy
from emulated_graphs import Emulated

# Tests that need a GPU: its random numbers, waiting for it, its streams.
GPU_ONLY = (
    *("test_replayed_steps_train_as_eager_ones", "test_replayed_steps_train_under_ddp"),
    *("test_a_loss_of_ones_own_gets_its_gradients", "test_what_cannot_be_replayed_runs_as_before"),
    *("test_changes_of_the_module_are_seen", "test_the_trial_keeps_what_is_faster"),
    *("test_why_a_module_is_left_alone", "test_a_recurrent_network_keeps_its_weights_elsewhere"),
    "test_a_captured_pass_goes_the_way_that_was_rehearsed",
    "test_a_capture_that_cuda_ends_leaves_the_training_where_it_was",
    "test_checkpointed_blocks_that_draw_numbers_stay_launched",
)
LENT = ["lent", "copied"]


def _load(name: str) -> Any:
    file = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"emulated_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE = "cpu"
    module.AUTOCAST = False  # many processors emulate bfloat16
    return module


CASES = ("", "_masked", "_causal", "_users", "_layerdrop", "_checkpointed", "_anew")
cases, masked, causal, users, *others = (_load(f"gpu/test_cuda_graphs{suffix}") for suffix in CASES)
for _module in (cases, masked, causal, users, *others):
    globals().update(
        {
            name: value
            for name, value in vars(_module).items()
            if name == "lending" or (name.startswith("test_") and name not in GPU_ONLY)
        }
    )


def seldom(test: Any, argument: str, value: object) -> None:
    """Leave a case of a test out of the short run: its other cases take the same ways."""
    (values,) = (mark.args[1] for mark in test.pytestmark if mark.args[:1] == (argument,))
    values[values.index(value)] = pytest.param(value, marks=pytest.mark.extended)


seldom(masked.test_a_masked_language_model_trains_replayed, "kernels", "off")
seldom(masked.test_full_batches_are_replayed_too, "with_mask", False)
seldom(causal.test_positions_that_a_model_counts_itself_are_not_waited_for, "family", "GPTNeoX")

# Tests that take long and do the same with gradients that are copied.
mostly_lent = pytest.mark.parametrize(
    "emulated", [1, pytest.param(1 << 30, marks=pytest.mark.extended)], ids=LENT, indirect=True
)
_SLOW = ("a_masked", "full_batches", "positions_that", "packed_rows", "a_cache", "models_of")
for _name in [
    name for name in globals() if name.startswith(tuple(f"test_{each}" for each in _SLOW))
]:
    globals()[_name] = mostly_lent(globals()[_name])


@pytest.fixture(autouse=True, params=[1, 1 << 30], ids=LENT)
def emulated(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replay, "LENT_BYTES", request.param)
    monkeypatch.setattr(capture, "Recorder", Emulated)
    options = Options(profile=str(tmp_path / "profile.json"), patience="off", log="error")
    monkeypatch.setattr(config, "_current", options)


@pytest.mark.parametrize("kind", ["Counts", "Keeps", "DrawsOnTheHost", "WritesToItsInput"])
def test_what_cannot_be_replayed_runs_as_before(kind: str) -> None:
    cases.test_what_cannot_be_replayed_runs_as_before(getattr(cases, kind))


hostile = _load("unit/test_compile_hostile")


@pytest.mark.parametrize("kind", hostile.HOSTILE, ids=lambda kind: kind.__name__)
def test_compile_hostile_model_trains_replayed(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model = kind()
    twin = copy.deepcopy(model)
    capture.Capture(model, is_on=lambda: True).install()
    hostile.trains_alike(model, twin)


def test_compile_hostile_replacement_of_a_part_replayed() -> None:
    def run(model: nn.Module) -> Any:
        return hostile.train(model, change=hostile.replace_after_first)[0]

    torch.manual_seed(1)
    model = hostile.Base()
    twin = copy.deepcopy(model)
    capture.Capture(model, is_on=lambda: True).install()
    torch.manual_seed(2)
    losses = run(model)
    torch.manual_seed(2)
    assert losses == pytest.approx(run(twin), rel=1e-4)


class Counting(Policy):
    name = "counting"
    num_compiles = num_runs = 0

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        Counting.num_compiles += 1

        def run(*args: Any) -> Any:
            Counting.num_runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    policies.names()
    monkeypatch.setattr(policies, "_table", dict(policies._table))
    register_policy(Counting)


@pytest.mark.usefixtures("counting")
def test_compile_is_what_replays_are_made_of() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    engine.compile(model, policy="counting")

    def step() -> int:
        before = Counting.num_runs
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        return Counting.num_runs - before

    for _ in range(3):
        step()
    num_compiles = Counting.num_compiles
    found = capture.Capture(model, is_on=lambda: True)
    found.install()
    for _ in range(capture.WATCHED_CALLS):
        step()
    assert min(step() for _ in range(6)) >= 4
    assert found.num_captured == 1
    assert Counting.num_compiles == num_compiles
    found.remove()
    engine.undo(model)
    torch._dynamo.reset()


class Clock:
    """Seconds of a step, by how it is run."""

    def __init__(self, launched_s: float, replayed_s: float) -> None:
        self.now = 0.0
        self.launched_s, self.replayed_s = launched_s, replayed_s
        self.model: Any = None

    def perf_counter(self) -> float:
        return self.now

    def step(self) -> None:
        found: Any = engine.compilation_of(self.model)
        trial = found.phase.graphs
        self.now += self.replayed_s if trial is not None and trial._on else self.launched_s


@mostly_lent
@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize(
    ("replayed_s", "chosen", "reason"),
    [(0.5, "replayed", "faster than launched"), (2.0, "launched", "launched is faster")],
)
def test_compile_tries_replayed_passes_after_compiling(
    replayed_s: float, chosen: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("counting")])
    monkeypatch.setattr(graph_trial, "Recorder", Emulated)
    options = Options(profile=str(tmp_path / "p.json"), patience="off", log="error", tune="auto")
    monkeypatch.setattr(config, "_current", options)
    for number in range(2):
        monkeypatch.setattr(decisions, "_made", [])
        clock = Clock(1.0, replayed_s)
        monkeypatch.setattr(step_count, "time", clock)
        monkeypatch.setattr(graph_trial, "time", clock)
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        stock = copy.deepcopy(model)
        clock.model = deepytorch.compile(model)
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, stock)]
        for _ in range(130):
            x = torch.randn(4, 8)
            for network, optimizer in zip((model, stock), optimizers, strict=True):
                network(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            clock.step()
        found: Any = engine.compilation_of(model)
        assert found.is_settled
        made = {decision["what"]: decision for decision in decisions.made()}
        graphs, compiled = (made[f"{what} of Sequential"] for what in ("CUDA graphs", "compile"))
        assert graphs["chosen"] == chosen
        assert graphs["reason"] == (reason if number == 0 else "from the profile")
        # Launched it makes no difference, so it is kept for what it is in replays.
        assert compiled["chosen"] == ("counting" if chosen == "replayed" else "eager")
        assert bool(found.regions) == (chosen == "replayed")
        assert ("_compiled_call_impl" in vars(model)) == (chosen == "replayed")
        for mine, other in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
        engine.undo(model)
        assert "_compiled_call_impl" not in vars(model)
        torch._dynamo.reset()


class Helpers:
    """Stands in for `ahead.Ahead`: they are done once `are_done`."""

    are_done = is_late = False

    def __init__(self, device: torch.device, policy: str, *, budget_s: float) -> None:
        self.failed: dict[str, str] = {}
        self.parts: list[str] = []

    def start(self, num_parts: int) -> None:
        Helpers.are_done = False

    def submit(self, graph: Any, part: str, job: Any) -> None:
        self.parts.append(part)

    def is_done(self, part: str) -> bool:
        assert part in self.parts
        return Helpers.are_done

    def has_all(self, part: str) -> bool:
        return True

    def close(self) -> None:
        """Also once its model is gone."""


class Ways:
    """A clock by which steps take as long as `seconds` says of (compiled, replayed)."""

    def __init__(self, seconds: dict[tuple[bool, bool], float]) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.gone: list[tuple[bool, bool]] = []

    def perf_counter(self) -> float:
        return self.now

    def step(self, found: Any, was_compiled: bool) -> None:
        trial = found.phase.graphs or found.early.trial
        is_replayed = trial is not None and trial._on and not trial.is_paused
        self.gone.append((was_compiled, is_replayed))
        self.now += self.seconds[self.gone[-1]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


LAUNCHED, GRAPHS = (False, False), (False, True)
COMPILED, BOTH = (True, False), (True, True)


@mostly_lent
@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize(
    ("seconds", "later", "chosen", "waits"),
    [
        pytest.param((1.0, 0.5, 0.9, 0.3), {}, BOTH, GRAPHS, id="compiled code wins replayed"),
        pytest.param((1.0, 0.5, 0.4, 0.7), {}, GRAPHS, GRAPHS, id="eager wins replayed"),
        pytest.param((1.0, 2.0, 0.5, 3.0), {}, COMPILED, LAUNCHED, id="launched it wins"),
        pytest.param((1.0, 2.0, 1.5, 3.0), {}, LAUNCHED, LAUNCHED, id="nothing wins"),
        pytest.param((1.0, 1.1, 1.2, 0.5), {}, BOTH, LAUNCHED, id="only together"),
        # A machine that was busy compiling when eager passes were tried.
        pytest.param(
            (1.0, 0.5, 0.9, 0.3), {GRAPHS: 1.5, BOTH: 1.2}, LAUNCHED, GRAPHS, id="not any more"
        ),
    ],
)
@pytest.mark.parametrize("is_in_parts", [False, True], ids=["whole", "parts"])
def test_compile_by_helpers_waits_in_what_is_faster_and_ends_in_the_fastest(
    seconds: tuple[float, ...],
    later: dict[tuple[bool, bool], float],
    chosen: tuple[bool, bool],
    waits: tuple[bool, bool],
    is_in_parts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("counting")])
    monkeypatch.setattr(graph_trial, "Recorder", Emulated)
    monkeypatch.setattr(ahead, "Ahead", Helpers)
    monkeypatch.setattr(ahead, "why_not", lambda device: None)
    monkeypatch.setattr(ahead, "MODEL_IN_PARTS", 1 if is_in_parts else 250)
    monkeypatch.setattr(regions, "SMALLEST_SHARES", (2, 4))
    monkeypatch.setattr(decisions, "_made", [])
    clock = Ways(dict(zip((LAUNCHED, GRAPHS, COMPILED, BOTH), seconds, strict=True)))
    monkeypatch.setattr(step_count, "time", clock)
    monkeypatch.setattr(graph_trial, "time", clock)
    torch.manual_seed(0)
    model = Net()
    stock = copy.deepcopy(model)
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, stock)]
    waited, settled = list[tuple[bool, bool]](), 0
    for number in range(400):
        if number == 100:  # it is known by now which way to wait
            Helpers.are_done = True
            clock.seconds.update(later)
        x, before = torch.randn(4, 8), Counting.num_runs
        for network, optimizer in zip((model, stock), optimizers, strict=True):
            network(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        clock.step(found, Counting.num_runs > before)
        if found.is_waiting and 90 <= number < 100:
            waited.append(clock.gone[-1])
        settled = settled + 1 if found.is_settled else 0
        if settled == 25:
            break
    assert set(waited) == {waits}
    assert len(waited) == 10
    assert found.is_settled
    assert found.early.trial is None
    assert set(clock.gone[-20:]) == {chosen}
    made = {decision["what"]: decision["chosen"] for decision in decisions.made()}
    assert len(decisions.made()) == 2  # what was only for the meantime is no decision
    assert made["compile of Net"] == ("counting" if chosen[0] else "eager")
    assert made["CUDA graphs of Net"] == ("replayed" if chosen[1] else "launched")
    assert bool(found.regions) == chosen[0]
    assert ("_compiled_call_impl" in vars(model)) == (chosen[1] or (chosen[0] and not is_in_parts))
    assert ("_compiled_call_impl" in vars(model.up)) == (chosen[0] and is_in_parts)
    phases = found.phases.spent
    assert phases["waiting for helpers"].steps >= 20
    assert phases["taking over what helpers have compiled"].steps == (2 if is_in_parts else 1)
    for mine, other in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    entry: Any = guard.profile.find(found.kept._key(1))
    assert not chosen[0] or entry["was_helped"]
    engine.undo(model)
    assert not [module for module in model.modules() if "_compiled_call_impl" in vars(module)]
    torch._dynamo.reset()


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("is_uniform", [True, False])
def test_passes_of_one_size_are_replayed_before_all_is_known_of_the_model(
    is_uniform: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("counting")])
    monkeypatch.setattr(graph_trial, "Recorder", Emulated)
    monkeypatch.setattr(ahead, "may_help", lambda root, device, num_ranks: True)
    clock = Ways({LAUNCHED: 1.0, GRAPHS: 0.5, COMPILED: 0.4, BOTH: 0.4})
    monkeypatch.setattr(step_count, "time", clock)
    monkeypatch.setattr(graph_trial, "time", clock)
    model = Net()
    undecided.register(model, lambda: True)
    found: Any = engine.compile(model, steps=None, is_patient=True) and engine.compilation_of(model)
    for number in range(100):
        rows = 4 if is_uniform else 4 + number % 3
        model(torch.randn(rows, 8)).square().mean().backward()
        clock.step(found, False)
        model.zero_grad()
    assert found.early.is_replayed == is_uniform
    assert not found.regions  # code would be made in vain
    assert not found.is_settled
    undecided.register(model, None)
    engine.undo(model)


@pytest.mark.usefixtures("counting")
def test_compiled_code_that_cannot_be_replayed_stays_where_it_is_faster_than_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("counting")])
    monkeypatch.setattr(graph_trial, "Recorder", Emulated)
    monkeypatch.setattr(ahead, "Ahead", Helpers)
    monkeypatch.setattr(ahead, "why_not", lambda device: None)
    monkeypatch.setattr(decisions, "_made", [])
    # A compiled pass that passes for a replayed one is launched as well.
    clock = Ways({LAUNCHED: 1.0, GRAPHS: 0.5, COMPILED: 0.4, BOTH: 0.4})
    monkeypatch.setattr(step_count, "time", clock)
    monkeypatch.setattr(graph_trial, "time", clock)
    model = Net()
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    captured = capture.Capture._captured

    def without_compiled(self: capture.Capture, call: Any) -> Any:
        if found.is_on:
            raise capture.NotCapturedError("there is no memory left")
        return captured(self, call)

    monkeypatch.setattr(capture.Capture, "_captured", without_compiled)
    for number in range(400):
        Helpers.are_done |= number == 100
        before = Counting.num_runs
        model(torch.randn(4, 8)).square().mean().backward()
        clock.step(found, Counting.num_runs > before)
    assert found.is_settled
    made = {
        decision["what"]: (decision["chosen"], decision["reason"]) for decision in decisions.made()
    }
    assert made["compile of Net"] == ("counting", "faster than eager")
    assert made["CUDA graphs of Net"] == ("launched", "there is no memory left")
    assert set(clock.gone[-20:]) == {COMPILED}
    engine.undo(model)
    torch._dynamo.reset()


def _things_on(model: nn.Module) -> list[Any]:
    """Everything that modules hold, by who it is; of hooks, how many there are."""
    return [
        (name, key, len(value) if key.endswith("hooks") else id(value))
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
    ]


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x * torch.rand([]))
        return result


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("draws", [False, True], ids=["slower", "impossible"])
def test_compile_leaves_nothing_on_a_model_that_stays_as_it_is(
    draws: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("counting")])
    monkeypatch.setattr(graph_trial, "Recorder", Emulated)
    options = Options(profile=str(tmp_path / "p.json"), patience="off", log="error", tune="auto")
    monkeypatch.setattr(config, "_current", options)
    monkeypatch.setattr(decisions, "_made", [])
    clock = Clock(1.0, 2.0)
    monkeypatch.setattr(step_count, "time", clock)
    monkeypatch.setattr(graph_trial, "time", clock)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Draws() if draws else Draws().blocks
    before = _things_on(model)
    clock.model = deepytorch.compile(model)
    found: Any = weakref.ref(engine.compilation_of(model))
    for _ in range(130):
        model(torch.randn(4, 8)).square().mean().backward()
        model.zero_grad()
        if found().is_settled:
            break
        clock.step()
    else:
        pytest.fail("it is never settled")
    made = {decision["what"].split()[0]: decision["chosen"] for decision in decisions.made()}
    assert made == {"CUDA": "launched", "compile": "eager"}
    assert _things_on(model) == before
    gc.collect()
    assert found() is None, "nobody holds what was measured with"
    torch._dynamo.reset()


def test_compile_graphs_are_off_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_trial, "Recorder", Emulated)
    monkeypatch.setattr(config, "_current", Options(cuda_graphs="off", log="error"))
    model = nn.Linear(2, 2)
    found = compilation.Compilation(model, "auto", budget_s=1.0, steps=None)
    assert not found.subject.may_capture()
    monkeypatch.setattr(config, "_current", Options(log="error"))
    assert found.subject.may_capture()
    cpu, names = torch.device("cpu"), ("inductor", "cuda-graphs")
    named = {name: graph_trial.is_wanted(name, cpu, steps=None) for name in names}
    assert named == {"inductor": True, "cuda-graphs": False}  # which has graphs of its own
    short = compilation.Compilation(model, "auto", budget_s=1.0, steps=50)
    assert not short.subject.may_capture()


def test_compile_replays_nothing_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulated, "lacks_memory", lambda self: "1.0 GiB are missing for it")
    model = cases.made()
    expected = cases.train(copy.deepcopy(model))
    found = cases.captured(model)
    assert cases.train(model) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert not found.has_replays


def test_compile_gives_up_on_attributes_that_change_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "MOST_STATES", 5)
    model = cases.made()
    found = cases.captured(model)
    for number in range(20):
        model.step = number if number % 2 else -1
        cases.train(model, rows=(7,))
    assert found.failure == "it changes attributes of its modules again and again"
