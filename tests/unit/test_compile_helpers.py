"""When other processes compile a model, and when the training's own does."""

from __future__ import annotations

import copy
import os
import types
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from deepytorch_core.base import cgroup
from deepytorch_core.compile import (
    ahead,
    compilation,
    handover,
    outcome,
    policies,
    reasons,
    regions,
)
from deepytorch_core.compile.handover import Handover
from deepytorch_core.compile.policies import Policy, register_policy
from deepytorch_core.compile.region import CompiledRegion
from deepytorch_core.compile.regions import Region
from deepytorch_core.topology import model as topology

GPU = torch.device("cuda", 0)
GIB = 1 << 30


@register_policy
class Seeing(Policy):
    """Runs the captured graph, and notes what it takes: sizes that may change are numbers."""

    name = "seeing"
    seen: ClassVar[list[Any]] = []

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        self.seen.extend(inputs)
        return graph.forward


@pytest.mark.parametrize("is_nested", [False, True])
def test_parts_of_torchs_own_classes_are_not_taken_for_one_of_changing_sizes(
    is_nested: bool,
) -> None:
    convs = nn.Conv1d(2, 3, 3, stride=2), nn.Conv1d(3, 2, 1)
    parts = [nn.Sequential(conv, nn.ReLU()) if is_nested else conv for conv in convs]
    Seeing.seen.clear()
    for number, module in enumerate(parts):
        region = Region(str(number), (module,))
        CompiledRegion(region, [Seeing()], budget_s=100.0, is_on=lambda _: True).install()
    x = torch.randn(5, 2, 9)
    expected = convs[1](torch.relu(convs[0](x)) if is_nested else convs[0](x))
    found = parts[1](parts[0](x))
    torch.testing.assert_close(found, torch.relu(expected) if is_nested else expected)
    assert all(isinstance(value, torch.Tensor) for value in Seeing.seen)
    assert {tuple(tensor.shape) for tensor in Seeing.seen} >= {(5, 2, 9), (5, 3, 4)}


class Keeping:
    """Helpers that keep what they are given."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def submit(self, graph: Any, part: str, job: Any) -> None:
        self.graphs.append(graph)

    def expect(self, part: str, job: Any) -> Any:
        return lambda graph: self.submit(graph, part, job)

    def has_all(self, part: str) -> bool:
        return False


class Pair(nn.Module):
    """Two outputs, of which trainings use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def test_helpers_are_given_graphs_of_the_outputs_that_get_gradients() -> None:
    module = Pair()
    region = CompiledRegion(
        Region("0", (module,)), [Seeing()], budget_s=100.0, is_on=lambda _: True
    )
    region.install()
    helpers: Any = Keeping()
    region.prepare(helpers)
    first, _ = module(torch.randn(3, 4))
    assert not helpers.graphs
    first.sum().backward()
    (graph,) = helpers.graphs
    assert [node.target for node in graph.graph.nodes].count("detach") == 1
    region.restart()
    first, second = module(torch.randn(3, 4))
    assert region.told.chosen == {"seeing": 1}
    assert second.requires_grad
    first.sum().backward()
    assert module.b.weight.grad is None


def is_fixed(graph: Any) -> bool:
    values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    return all(isinstance(n, int) for tensor in values for n in (*tensor.shape, *tensor.stride()))


def test_helpers_are_given_graphs_of_fixed_sizes_and_strides_and_those_are_captured_again() -> None:
    modules = tuple(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    region = CompiledRegion(Region("0", modules), [Seeing()], budget_s=100.0, is_on=lambda _: True)
    region.install()
    helpers: Any = Keeping()
    region.prepare(helpers)
    x = torch.randn(3, 5, 4)
    other = x.transpose(0, 1).contiguous().transpose(0, 1)

    def step() -> None:
        for module, given in zip(modules, (x, other), strict=True):
            torch.testing.assert_close(module(given), torch.relu(module[0](x)))

    step()
    modules[0](x[:2])
    step()
    assert len(helpers.graphs) == 3
    assert all(map(is_fixed, helpers.graphs))
    region.restart()
    Seeing.seen.clear()
    step()
    modules[0](x[:2])
    assert region.told.num_compiles == 3
    assert all(isinstance(value, torch.Tensor) for value in Seeing.seen)
    Seeing.seen.clear()
    modules[0](x[:1, :2])
    modules[0](x[:1, :3])
    assert any(not isinstance(value, torch.Tensor) for value in Seeing.seen)  # now sizes may change


def test_a_size_that_helpers_have_runs_eagerly_until_its_code_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = tuple(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
    region = CompiledRegion(Region("0", modules), [Seeing()], budget_s=100.0, is_on=lambda _: True)
    region.install()
    helpers: Any = Keeping()
    region.prepare(helpers)
    region.send_later(helpers)
    called: list[nn.Module] = []
    call = region.call
    monkeypatch.setattr(
        region, "call", lambda module, *rest: called.append(module) or call(module, *rest)
    )

    def step(length: int) -> int:
        called.clear()
        x = torch.randn(length, 4)
        for module in modules:
            x = module(x)
        x.sum().backward()
        return len(called)

    assert [step(3), step(3), step(5), step(3)] == [3, 3, 3, 3]
    monkeypatch.setattr(helpers, "has_all", lambda part: True)
    assert [step(3), step(5), step(2), step(2)] == [0, 0, 3, 0]
    region.restart()
    assert [step(3), step(7)] == [3, 0]
    assert region.told.chosen == {"seeing": 2}


@pytest.mark.parametrize(
    ("are_few", "expected"), [(False, [0, 0, 2, 4, 4]), (True, [2, 4, 4, 4, 4])]
)
def test_a_later_size_is_captured_when_it_comes_again_or_at_once_where_sizes_are_few(
    are_few: bool, expected: list[int]
) -> None:
    modules = tuple(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    region = CompiledRegion(Region("0", modules), [Seeing()], budget_s=100.0, is_on=lambda _: True)
    region.install()
    helpers: Any = Keeping()
    region.send_later(helpers, are_few=are_few)
    captured = []
    for length in (3, 2, 3, 2, 3):
        x = torch.randn(length, 4)
        for module in modules:
            x = module(x)
        x.sum().backward()
        captured.append(len(helpers.graphs))
    assert captured == expected


def test_a_size_that_no_helper_can_compile_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    region = CompiledRegion(
        Region("0", (module,)), [Seeing()], budget_s=100.0, is_on=lambda _: True
    )
    region.install()
    helpers: Any = Keeping()
    jobs: list[Any] = []
    monkeypatch.setattr(helpers, "submit", lambda graph, part, job: jobs.append(job))
    region.send_later(helpers, are_few=True)
    said: list[str] = []
    monkeypatch.setattr(
        "deepytorch_core.compile.region.say_first", lambda text, **_: said.append(text)
    )
    module(torch.randn(3, 4))
    (job,) = jobs
    assert not said
    job.end("RuntimeError: there is no such kernel")
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(module(x), torch.relu(module[0](x)))
    assert said == ["compile: a graph of 0 runs eagerly: RuntimeError: there is no such kernel"]
    assert region.failure is None


def test_what_is_known_from_the_profile_is_captured_in_the_same_graphs() -> None:
    modules = tuple(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    region = CompiledRegion(Region("0", modules), [Seeing()], budget_s=100.0, is_on=lambda _: True)
    region.restart()
    region.install()
    Seeing.seen.clear()
    x = torch.randn(3, 5, 4)
    modules[0](x)
    modules[1](x.transpose(0, 1).contiguous().transpose(0, 1))
    assert region.told.num_compiles == 2
    assert all(isinstance(value, torch.Tensor) for value in Seeing.seen)


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(ahead.MODEL_IN_PARTS // 3)))


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight helpers could work, and have 32 GiB."""
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (32 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 40 * GIB)


@pytest.mark.usefixtures("roomy")
def test_models_on_a_gpu_have_helpers() -> None:
    assert ahead.why_not(GPU) is None
    assert str(ahead.why_not(torch.device("cpu"))).startswith("its device has no compiler")


def test_only_models_that_take_minutes_are_cut() -> None:
    assert not ahead.is_in_parts(large())
    assert ahead.is_in_parts(Unlike(ahead.MODEL_IN_PARTS))
    assert not ahead.is_in_parts(nn.Sequential(*(large() for _ in range(4))))  # of equal blocks


def test_parts_are_small_and_equal_ones_share_a_compile_where_they_stand_side_by_side() -> None:
    stage = [nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))) for _ in range(4)]
    model = nn.Sequential(*(nn.ModuleList(copy.deepcopy(stage)) for _ in range(4)))
    found = [(region.name, len(region.modules)) for region in regions.parts(model)]
    assert found == [(f"{number}.0", 4) for number in range(4)]


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Usable ones, of which this process is bound to none, and memory for more helpers."""
    machine = types.SimpleNamespace(
        cores=types.SimpleNamespace(usable=16),
        memory=topology.Memory(total_bytes=256 * GIB, available_bytes=200 * GIB),
    )
    monkeypatch.setattr(topology, "discover", lambda: machine)
    monkeypatch.setattr(cgroup, "read_file", {}.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 * GIB, 140 * GIB))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(("num_parts", "threads"), [(1, 14), (3, 4), (100, 2)])
def test_few_helpers_have_the_cores_for_themselves(
    num_parts: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead.Ahead, "_serve_by", lambda self, number: None)
    helpers = ahead.Ahead(GPU, "inductor", budget_s=100.0)
    helpers.start(num_parts)
    assert helpers._kernel_threads == threads


@pytest.mark.usefixtures("sixteen_cores")
def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ahead._num_helpers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ahead._num_helpers() == 2

    def affinity(process: int) -> set[int]:
        return set(range(64 if process else 16))

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert ahead._num_helpers() == 8  # what it is bound to is its own


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("cpus_of_the_job", "number"), [(16, 2), (63, 2), (64, 8)], ids=["shared", "nearly", "bound"]
)
def test_srun_tells_how_many_processes_share_a_nodes_cores(
    cpus_of_the_job: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "9")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1,4(x2)")
    monkeypatch.setenv("SLURM_NODEID", "2")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(cpus_of_the_job))
    # The process that started it is the node's own, outside of the job.
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64 if process else 16)))
    assert ahead._num_helpers() == number


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("version", "limit", "number"), [(2, "12", 4), (1, "16", 6), (2, "max", 8)]
)
def test_a_containers_memory_is_left_to_the_training(
    version: int, limit: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = "sys/fs/cgroup", ("memory.max", "memory.current")
    if version == 1:
        folder += "/memory"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    text = f"{int(limit) * GIB}" if limit.isdecimal() else limit
    files = dict(zip((f"{folder}/{name}" for name in names), (text, f"{4 * GIB}"), strict=True))
    files[f"{folder}/memory.stat"] = f"inactive_file {GIB}"
    monkeypatch.setattr(cgroup, "read_file", files.get)
    assert ahead._num_helpers() == number
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64 if process else 16)))
    assert ahead._num_helpers() == (8 if limit == "max" else 0)


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_a_group_above_this_process_counts(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm sets it for a job, whose tasks have groups of their own below."""
    top, line = "sys/fs/cgroup", "0::/job_7/step_0/task_1"
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        top, line = "sys/fs/cgroup/memory", "5:memory:/job_7/step_0/task_1"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    groups = {  # limit, used, of which a cache
        "/job_7/step_0/task_1": ("max", 2 * GIB, 0),
        "/job_7/step_0": (f"{20 * GIB}", 9 * GIB, GIB),
        "/job_7": (f"{40 * GIB}", 34 * GIB, 0),
        "": ("", 100 * GIB, 0),
    }
    files = {"proc/self/cgroup": f"3:cpu:/other\n{line}"}
    for path, (limit, used, cached) in groups.items():
        files[f"{top}{path}/{names[0]}"] = limit
        files[f"{top}{path}/{names[1]}"] = str(used)
        files[f"{top}{path}/memory.stat"] = f"inactive_file 0\n{names[2]} {cached}"
    monkeypatch.setattr(cgroup, "read_file", files.get)
    assert ahead._num_helpers() == 3  # the job has 6 GiB left, the step 12
    files[f"{top}/job_7/{names[0]}"] = "max"
    assert ahead._num_helpers() == 6


@pytest.mark.usefixtures("roomy")
def test_helpers_need_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (13 * GIB, 80 * GIB))
    assert ahead.why_not(GPU) == "there is too little memory left on the GPU"
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 1)
    assert ahead.why_not(GPU) == "there are too few cores, or too little main memory"


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
        assert ahead.why_not(GPU) == "torch's caches are switched off"


class Answered:
    """A question, and after how many looks the answers are there."""

    def __init__(self, answers: list[Any], num_looks: int) -> None:
        self._answers, self._num_looks = answers, num_looks

    def answers(self) -> list[Any] | None:
        self._num_looks -= 1
        return None if self._num_looks >= 0 else self._answers


class Several:
    """Ranks, of which each is asked in turn: what the others find is given."""

    def __init__(self, others: list[Any], *, size: int = 2, num_looks: int = 0) -> None:
        self._others, self._num_looks = others, num_looks
        self.size = size
        self.num_asked = 0

    def ask(self, what: str, value: Any) -> Any:
        self.num_asked += 1
        others = [self._others.pop(0)] if self.size > 1 else []
        return Answered([value, *others], self._num_looks)


class Unlike(nn.Module):
    """A model of layers that stand in no list."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        for number in range(num_layers):
            self.add_module(str(number), nn.Linear(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.usefixtures("roomy")
def test_helpers_of_several_ranks_are_given_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [Seeing()])
    whole, in_parts = Unlike(ahead.MODEL_IN_PARTS - 1), Unlike(ahead.MODEL_IN_PARTS)
    assert ahead.may_help(whole, GPU, num_ranks=1)
    assert not ahead.may_help(whole, GPU, num_ranks=2)
    assert ahead.may_help(in_parts, GPU, num_ranks=2)


def test_a_part_is_taken_over_by_all_ranks_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = Several([["a", "c"], ["c"], []])
    monkeypatch.setattr(handover, "ASK_S", 0.3)
    parts = Handover(lambda: ranks, 0.1)
    left, taken, done = ["a", "b", "c"], [], {"a", "b"}
    for number in range(8):
        if number == 5:
            done.add("c")
        part = parts.next_part(left, done.__contains__)
        taken.append(part)
        if part is not None:
            left.remove(part)
    assert taken == ["b", None, None, "a", None, None, "c", None]
    assert ranks.num_asked == 3


@pytest.mark.parametrize("why", [outcome.LATE, "it can't be compiled"])
def test_a_part_is_late_if_another_ranks_helpers_were(why: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    found = compilation.Compilation(module, "auto", budget_s=1.0, steps=None)
    region = Region("0", (module[0],))
    found.regions = [CompiledRegion(region, [Seeing()], budget_s=1.0, is_on=lambda _: True)]
    assert outcome.is_final(found.regions, reasons.FASTER, {})
    outcome.give_up_alike(found.regions, [{}, {"0": why}])
    assert outcome.is_final(found.regions, reasons.FASTER, {}) == (why != outcome.LATE)


def test_a_part_waits_for_no_answer() -> None:
    ranks: Any = Several([[]], num_looks=3)
    parts = Handover(lambda: ranks, 10.0)
    taken = [parts.next_part(["a"], lambda _: True) for _ in range(4)]
    assert taken == [None, None, None, "a"]
    assert ranks.num_asked == 1


def test_a_process_group_that_ends_leaves_each_rank_to_itself() -> None:
    now: list[Any] = [Several([["a"]])]
    parts = Handover(lambda: now[0], 10.0)
    assert parts.next_part(["a"], lambda _: True) is None
    now[0] = Several([], size=1)
    assert parts.next_part(["a"], lambda _: True) == "a"


def test_a_step_is_shown_to_helpers_until_all_ranks_have_called_all_parts() -> None:
    several: Any = Several([])
    parts = Handover(lambda: several, 10.0)
    assert not parts.are_seen([False, True])
    assert not parts.are_seen([True, False])
    assert parts.are_seen([True, True])  # the last one
    parts = Handover(lambda: several, 10.0)
    assert parts.are_seen([False, False])
