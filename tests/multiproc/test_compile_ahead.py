"""Graphs that other processes compile while the training goes on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core import guard
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import (
    ahead,
    handover,
    outcome,
    policies,
    regions,
    switches,
    timeouts,
)
from deepytorch_core.compile.ahead import Ahead
from deepytorch_core.compile.region import CompiledRegion
from deepytorch_core.testing import spawn_ranks

pytestmark = pytest.mark.timeout(600)

CPU = torch.device("cpu")
PART = "down.0"
BUDGET_S = 1e4
SLOW_STEPS = 12  # that rank 1's helper is behind
# A helper that has done each job without looking at it: a real one takes seconds to start.
_ANSWERS_AT_ONCE = """
import struct, sys
jobs, answers = sys.stdin.buffer, sys.stdout.buffer
while len(size := jobs.read(8)) == 8:
    jobs.read(struct.unpack("!q", size)[0])
    answers.write(struct.pack("!q", 0))
    answers.flush()
"""


@pytest.fixture(autouse=True)
def helped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One helper, for any model."""
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 1)
    monkeypatch.setattr(ahead, "why_not", lambda device: None)
    monkeypatch.setattr(ahead, "MODEL_IN_PARTS", 1)
    monkeypatch.setattr(regions, "SMALLEST_SHARES", (4, 64))
    options = Options(
        profile=str(tmp_path / "p.json"),
        patience="off",
        log="error",
        compile_budget_s=BUDGET_S,
    )
    monkeypatch.setattr(config, "_current", options)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Part(nn.Module):
    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.mixes:
            heads = x.unflatten(-1, (2, 4)).transpose(0, 1)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            x = x + mixed.transpose(0, 1).flatten(1)
        return x + self.down(nn.functional.silu(self.up(x)))


class Whole(nn.Module):
    """Five parts; one is unlike all the others."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Part(mixes=True), Part(mixes=True)])
        self.middle = Part(mixes=False)
        self.up = nn.ModuleList([Part(mixes=True), Part(mixes=True)])

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.down, self.middle, *self.up):
            x = part(x)
        return x


class Short(nn.Module):
    """A part of which each pass is a kernel or two: a C++ compiler takes seconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.up(x))


class Small(nn.Module):
    """Equal parts, which are in no list: one compile is for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (Short() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(number)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(6, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture
def unusual_switches() -> Iterator[None]:
    before = switches.now()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    switches.resemble(before)


@pytest.fixture
def group() -> Iterator[None]:
    """Make a group of this process alone, as a launcher does where there is one GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def spawned() -> Iterator[None]:
    """As in a child of multiprocessing's, whose script imports torch before all else does."""
    script: Any = types.ModuleType("__mp_main__")
    script.torch = torch
    before = dict(sys.modules)
    others = {name: module for name, module in before.items() if name != "__mp_main__"}
    sys.modules.clear()
    sys.modules.update({"__mp_main__": script} | others)
    yield
    before.update((name, module) for name, module in sys.modules.items() if name != "__mp_main__")
    sys.modules.clear()
    sys.modules.update(before)


@pytest.mark.usefixtures("spawned")
def test_helpers_name_torch_as_a_pickle_of_this_process_does() -> None:
    name = ahead._namesake().encode()
    assert bytes([len(name)]) + name in pickle.dumps(torch.contiguous_format)


def alone(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.usefixtures("unusual_switches", "group", "spawned")
@pytest.mark.parametrize(
    ("make", "wrap", "num_parts"),
    [
        (Small, DistributedDataParallel, 1),
        pytest.param(Whole, alone, 3, marks=pytest.mark.extended),
        pytest.param(Whole, DistributedDataParallel, 3, marks=pytest.mark.extended),
        pytest.param(Whole, DistributedDataParallel, 1, marks=pytest.mark.extended),
    ],
    ids=["small", "alone", "parts", "whole"],
)
def test_a_training_goes_on_while_helpers_compile_it(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    num_parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = make()
    if num_parts < len(regions.parts(model)):
        monkeypatch.setattr(ahead, "MODEL_IN_PARTS", 250)
    stock = copy.deepcopy(model)
    name = type(model).__name__
    assert [region.name for region in regions.find(model)] == [name]
    assert len(regions.parts(model)) == (3 if name == "Whole" else 1)
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-3) for network in (model, stock)]
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    wrapped = wrap(model)
    counters.clear()
    waited = number = 0
    taken_over = {num_parts}
    while not found.is_settled and number < 50_000:
        mine, other = (
            step(m, o, number) for m, o in zip((wrapped, stock), optimizers, strict=True)
        )
        assert mine == pytest.approx(other, rel=0.1, abs=5e-3)  # bf16 in another order
        waited += found.is_waiting
        if found.is_waiting:
            taken_over.add(sum(region.is_prepared for region in found.regions))
        number += 1
        time.sleep(0.05 if found.is_waiting else 0.0)  # steps would take the helper's time
    assert waited > 10
    assert taken_over == set(range(num_parts + 1))  # each kind as soon as it is done
    assert found.is_settled
    assert counters["aot_autograd"]["autograd_cache_hit"] >= num_parts
    assert not counters["aot_autograd"]["autograd_cache_miss"]
    (made,) = [
        decision for decision in decisions.made() if decision["what"] == f"compile of {name}"
    ][-1:]
    assert made["chosen"] in ("inductor", "eager"), made
    with torch.profiler.profile() as profile:
        step(wrapped, optimizers[0], number)
    assert not [event.key for event in profile.key_averages() if "flash_attention" in event.key]
    for mine_, other_ in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine_, other_, rtol=5e-2, atol=5e-3)
    engine.undo(model)


def test_code_of_later_sizes_is_found_in_the_caches_and_computes_the_same() -> None:
    torch.manual_seed(0)
    model = Small()
    stock = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-3) for network in (model, stock)]
    (found,) = regions.parts(model)
    policy = policies.get("inductor")
    region = CompiledRegion(found, [policy], budget_s=100.0, is_on=lambda _: True)
    region.install()
    helpers = Ahead(CPU, policy.name, budget_s=100.0)
    region.send_later(helpers)
    counters.clear()
    for number in range(2000):
        ours, expected = (
            step(network, optimizer, number)
            for network, optimizer in zip((model, stock), optimizers, strict=True)
        )
        assert ours == pytest.approx(expected, rel=1e-2)
        if len(region._jobs) == region.told.chosen.get(policy.name, 0) > 1:
            break
        time.sleep(0.05 if region.is_waiting else 0.0)
    assert region.failure is None
    assert not region.is_waiting
    assert region.told.chosen == {"inductor": len(region._jobs)}
    assert not counters["aot_autograd"]["autograd_cache_miss"]
    assert counters["aot_autograd"]["autograd_cache_hit"] >= len(region._jobs)
    helpers.close()
    region.remove()


def test_what_helpers_have_not_done_in_time_runs_eagerly_and_is_tried_by_the_next_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("aot-eager")])
    monkeypatch.setattr(ahead, "_HELPER", _ANSWERS_AT_ONCE)
    monkeypatch.setattr(config, "_current", dataclasses.replace(config.current(), log="warning"))
    is_done = Ahead.is_done
    monkeypatch.setattr(Ahead, "is_done", lambda self, part: part == PART and is_done(self, part))
    torch.manual_seed(0)
    model = Whole()
    stock = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-3) for network in (model, stock)]
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    failures: dict[str, str | None] = {}
    number = 0
    while not found.is_settled:
        mine, other = (step(m, o, number) for m, o in zip((model, stock), optimizers, strict=True))
        assert mine == pytest.approx(other, rel=0.1, abs=5e-3)
        if found.is_waiting:
            if number > 2 and not all(region.is_prepared for region in found.regions):
                monkeypatch.setattr(Ahead, "is_late", True)
            time.sleep(0.05)
        failures.update((region.region.name, region.failure) for region in found.regions)
        number += 1
    late, told = outcome.LATE, capfd.readouterr().err
    assert failures == {PART: None, "middle": late, "up.0": late}
    assert "2 of 3 parts run eagerly: helpers have not compiled them in time" in told
    assert not guard.profile.entries()
    assert len(guard.profile.notes()) == 1
    engine.undo(model)


def limit_s() -> float:
    """How long collectives wait for a rank."""
    (backend,) = timeouts._backends(dist.group.WORLD)
    return float(backend.options._timeout.total_seconds())


def all_are(settled: bool) -> bool:
    flag = torch.tensor(float(settled))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def train_together(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float], Any]:
    """Losses, stock's, and alike: parts that helpers had, limits above the usual one, decision."""
    ahead._HELPER = _ANSWERS_AT_ONCE  # what is asked for has nothing in caches
    ahead._num_helpers = lambda: 1
    ahead.why_not = lambda device: None
    ahead.MODEL_IN_PARTS = 1
    regions.SMALLEST_SHARES = (4, 64)
    handover.ASK_S = 0.2
    policies.automatic = lambda device: [policies.get("aot-eager")]
    asked = ahead._asked
    prepared: list[int] = []

    def slowly(*args: Any) -> str:
        while rank == 1 and len(prepared) < SLOW_STEPS:
            time.sleep(0.01)
        return asked(*args)

    ahead._asked = slowly
    config._current = Options(
        profile=f"{folder}/p.json", patience="off", log="error", compile_budget_s=BUDGET_S
    )
    torch.manual_seed(0)
    model = Whole()
    stock = DistributedDataParallel(copy.deepcopy(model))
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    ours = DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-2) for network in (ours, stock)]
    losses: tuple[list[float], list[float]] = ([], [])
    usual_s, limits_s = limit_s(), []
    while not all_are(found.is_settled):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2 * len(prepared) + rank))
        for kept, network, optimizer in zip(losses, (ours, stock), optimizers, strict=True):
            loss = network(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss.item())
        if found.is_waiting:
            prepared.append(sum(region.is_prepared for region in found.regions))
            limits_s.append(limit_s() - usual_s)
            time.sleep(0.05)  # steps would take the helpers' time
    made = [decision for decision in decisions.made() if decision["what"] == "compile of Whole"]
    return *losses, (prepared, limits_s, made[-1]["chosen"])


@pytest.mark.extended
@pytest.mark.timeout(200)
def test_ranks_take_over_each_part_in_the_same_step(tmp_path: Path) -> None:
    first, second = spawn_ranks(train_together, 2, str(tmp_path), backend="gloo", timeout_s=180.0)
    for ours, stock, _ in (first, second):
        assert ours == pytest.approx(stock, rel=1e-4)
    assert first[2] == second[2]
    prepared, limits_s, chosen = first[2]
    # One part's budget beside the usual limit, once all have been captured.
    assert limits_s[0] == 3 * BUDGET_S
    assert limits_s[9:11] == [BUDGET_S, BUDGET_S]
    assert prepared[:SLOW_STEPS] == [3] * SLOW_STEPS
    assert {before - after for before, after in itertools.pairwise(prepared)} == {0, 1}
    assert chosen in ("aot-eager", "eager")


def submitted(graph_of: Any) -> Ahead:
    helpers = Ahead(CPU, "inductor", budget_s=100.0)

    def backend(graph: Any, inputs: Any) -> Any:
        helpers.submit(graph, PART)
        return graph.forward

    graph_of(backend)
    return helpers


def wait(helpers: Ahead) -> None:
    while not helpers.is_done(PART):
        time.sleep(0.05)


def test_what_a_helper_cannot_do_is_told() -> None:
    def run(backend: Any) -> None:
        function = torch.compile(lambda x: x * 2, backend=backend, dynamic=True)
        function(torch.randn(7))

    helpers = submitted(run)
    wait(helpers)
    helpers.close()
    assert helpers.failed == {PART: "TypeError: it is compiled for sizes that change"}


def test_a_helper_that_dies_is_replaced_and_none_outlives_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, ask = threading.Event(), ahead._asked
    monkeypatch.setattr(ahead, "_asked", lambda *args: (asked.set(), ask(*args))[1])

    def run(backend: Any) -> None:
        torch.compile(nn.Linear(3, 3), backend=backend)(torch.randn(7, 3))

    helpers = submitted(run)
    assert asked.wait(30.0)
    helpers._processes[0].kill()
    wait(helpers)
    assert helpers.failed == {PART: "a helper ended with status -9"}
    torch._dynamo.reset()
    torch.compile(
        nn.Linear(4, 3), backend=lambda graph, _: (helpers.submit(graph, PART), graph)[1]
    )(torch.randn(7, 4))
    assert not helpers.is_done(PART)
    helpers.close()
    assert len(helpers.failed) == 1
    assert all(helper.wait(30.0) is not None for helper in helpers._processes)


def linear(number: int) -> Any:
    def run(backend: Any) -> None:
        torch.compile(nn.Linear(number, 3), backend=backend)(torch.randn(7, number))

    return run


@pytest.mark.extended
@pytest.mark.extended  # two helpers' starts
def test_helpers_without_work_end_and_others_take_their_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ahead, "_IDLE_S", 0.1)
    # Were the current folder looked into first, this would end every helper.
    (tmp_path / "tokenize.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    helpers = submitted(linear(3))
    while not helpers._processes:
        time.sleep(0.01)
    (process,) = helpers._processes
    assert process.stdin is not None
    forked = os.dup(process.stdin.fileno())  # as a loader's workers have it
    wait(helpers)
    ignored = Path(f"/proc/{process.pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    assert int(ignored, 16) >> (signal.SIGINT - 1) & 1  # Ctrl-C is the training's
    assert [helper.wait(30.0) for helper in helpers._processes] == [0]
    os.close(forked)
    torch._dynamo.reset()
    linear(4)(lambda graph, _: (helpers.submit(graph, PART), graph)[1])
    wait(helpers)
    assert [helper.wait(30.0) for helper in helpers._processes] == [0, 0]
    assert not helpers.failed


def test_a_helper_ends_whose_training_was_gone_before_it_looked() -> None:
    command = [sys.executable, "-c", ahead._HELPER, str(1 << 23), "cpu", *sys.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as helper:
        assert helper.wait(60.0) == 1


class Failing(Whole):
    """Fails in the middle of the step in which helpers are given the first graphs."""

    def __init__(self, given: list[str]) -> None:
        super().__init__()
        self.given = given
        self.has_failed = False

    def forward(self, x: Tensor) -> Tensor:
        for part in self.down:
            x = part(x)
        if self.given and not self.has_failed:
            self.has_failed = True
            raise ValueError("a bad batch")
        for part in (self.middle, *self.up):
            x = part(x)
        return x


def test_a_step_that_fails_keeps_no_part_from_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("aot-eager")])
    monkeypatch.setattr(ahead, "_HELPER", _ANSWERS_AT_ONCE)
    given: list[str] = []
    submit = Ahead.submit
    monkeypatch.setattr(
        Ahead,
        "submit",
        lambda self, graph, part, job: (given.append(part), submit(self, graph, part, job)),
    )
    model = Failing(given)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    for number in itertools.count():
        if found.is_settled:
            break
        with contextlib.suppress(ValueError):
            step(model, optimizer, number)
        if found.is_waiting:
            time.sleep(0.05)
    assert model.has_failed
    assert set(given) == {PART, "middle", "up.0"}
    engine.undo(model)


def test_helpers_do_not_outlive_a_model_that_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("aot-eager")])
    monkeypatch.setattr(ahead, "_HELPER", _ANSWERS_AT_ONCE)
    monkeypatch.setattr(Ahead, "is_done", lambda self, part: False)
    model = Whole()
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    number = 0
    while not (found.is_waiting and found.phase.helping._helpers._processes):
        step(model, optimizer, number)
        number += 1
    processes = found.phase.helping._helpers._processes
    del model, optimizer, found
    gc.collect()
    assert [process.wait(30.0) for process in processes] == [-signal.SIGKILL] * len(processes)


def test_a_helper_that_cannot_be_started_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    helpers = submitted(linear(3))
    wait(helpers)
    (failure,) = helpers.failed.values()
    assert "a helper could not be started: [Errno 2] No such file" in failure


def test_helpers_that_wait_for_the_first_graph_do_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "_HELPER", _ANSWERS_AT_ONCE)
    monkeypatch.setattr(ahead, "_IDLE_S", 0.0)
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 2)
    helpers = Ahead(CPU, "inductor", budget_s=100.0)
    helpers.start(1)
    helpers.start(5)
    while len(helpers._processes) < 2:
        time.sleep(0.01)
    time.sleep(3 * ahead._POLL_S)
    assert [helper.poll() for helper in helpers._processes] == [None, None]
    helpers.close()
    assert all(helper.wait(30.0) is not None for helper in helpers._processes)


def test_a_graph_does_not_wait_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_HELPER", _ANSWERS_AT_ONCE)
    monkeypatch.setattr(ahead, "_IDLE_S", 0.0)
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 2)
    first, ask = threading.Event(), ahead._asked
    jobs: list[bytes] = []

    def asked(process: Any, job: bytes) -> str:
        jobs.append(job)
        if len(jobs) == 1:
            assert first.wait(60.0)
        return ask(process, job)

    monkeypatch.setattr(ahead, "_asked", asked)
    helpers = submitted(linear(3))
    while not jobs:
        time.sleep(0.01)
    time.sleep(3 * ahead._POLL_S)  # one without work has ended by now
    torch._dynamo.reset()
    linear(4)(lambda graph, _: (helpers.submit(graph, "other"), graph)[1])
    while not helpers.is_done("other"):
        time.sleep(0.05)
    assert not helpers.is_done(PART)
    first.set()
    wait(helpers)
    assert not helpers.failed
    helpers.close()
