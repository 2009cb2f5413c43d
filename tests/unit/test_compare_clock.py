"""Test the clock of a run: the steady pace, from when on, and how busy a GPU is."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepytorch_core.compare import clock
from deepytorch_core.compare.clock import StepClock, busy, pace, quartiles, steady_from
from deepytorch_core.compare.plan import UNTIMED_STEPS, Plan
from deepytorch_core.compare.probe import Finished, Probe


def test_steps_are_steady_from_where_a_window_of_them_is() -> None:
    found = pace([5.0, 1.0, 3.0, *[0.1] * 60])
    assert found is not None
    assert found.step_s == (0.1, 0.1, 0.1)
    assert found.num_steps == 32  # half of all
    # The second step is the first that is timed, so the fifth is the first steady one.
    assert found.steady_from == 5
    assert found.to_steady_s == pytest.approx(9.0)
    assert found.longest_s == 5.0


def test_the_last_steps_make_the_steady_time() -> None:
    found = pace([1.0] * 100 + [0.5] * clock.TIMED_STEPS)
    assert found is not None
    assert found.step_s == (0.5, 0.5, 0.5)
    assert found.num_steps == clock.TIMED_STEPS
    assert found.to_steady_s == pytest.approx(97.0)  # most of a window is of fast steps by then


def test_one_slow_step_in_a_window_is_not_steady() -> None:
    times = [0.1] * 4 + [0.3] + [0.1] * 20
    assert steady_from(times, 0.1) == 5
    assert steady_from([0.1] * 4 + [0.24] + [0.1] * 20, 0.1) == 0


def test_steps_that_never_settle_have_no_steady_step() -> None:
    found = pace([float(2**number) for number in reversed(range(12))])
    assert found is not None
    assert found.steady_from is None
    assert found.to_steady_s is None


def test_few_steps_have_a_pace_all_the_same() -> None:
    assert pace([]) is None
    found = pace([0.2])
    assert found is not None
    assert found.step_s == (0.2, 0.2, 0.2)
    assert found.steady_from is None
    assert quartiles([1.0, 2.0, 3.0]) == (1.5, 2.0, 2.5)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0.0),
        ([(0.0, 1.0), (2.0, 3.0)], 2.0),
        ([(2.0, 3.0), (0.0, 2.5)], 3.0),  # out of order, one over the other
        ([(0.0, 4.0), (1.0, 2.0)], 4.0),  # one within the other
    ],
)
def test_kernels_that_overlap_are_busy_once(
    intervals: list[tuple[float, float]], length: float
) -> None:
    assert busy(intervals) == pytest.approx(length)


def test_a_clock_times_steps_and_leaves_the_last_few_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    watch = StepClock(seconds=None)
    total = 10 + UNTIMED_STEPS
    for number in range(total):
        watch.stepped(total - number - 1)
    assert watch.step_s() == [1.0] * 9
    record = watch.record()
    assert record["first_step_s"] == 1.0
    assert record["busy_share"] is None
    assert record["why_not"] == "nothing ran on a GPU"


def test_the_last_steps_are_profiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Profile:
        def __init__(self, **settings: Any) -> None:
            assert settings["activities"] == [torch.profiler.ProfilerActivity.CUDA]

        def start(self) -> None:
            done.append(f"start after {len(watch._ends)}")

        def step(self) -> None:
            done.append(f"record after {len(watch._ends)}")

        def stop(self) -> None:
            done.append(f"stop after {len(watch._ends)}")

        def events(self) -> list[Any]:
            # In microseconds: two kernels that overlap, a copy, and what ran on the CPU.
            found = [("gemm", 0.0, 1.5e6), ("add", 1e6, 2e6), ("Memcpy DtoH", 2e6, 9e6)]
            on_gpu = [_kernel(*fields, device="CUDA") for fields in found]
            return [*on_gpu, _kernel("aten::add", 0.0, 9e6, device="CPU")]

    class Event:
        def __init__(self, **_: Any) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = len(watch._ends)

        def elapsed_time(self, other: Any) -> float:
            return 250.0 * (other.at - self.at)

    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(clock.memory, "gpus", lambda: [0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    watch = StepClock(seconds=None)
    for left in reversed(range(4 + UNTIMED_STEPS)):
        watch.stepped(left)
    assert done == ["start after 4", "wait", "record after 5", "wait", "stop after 9"]
    record = watch.record()
    assert record["step_s"] == (0.25, 0.25, 0.25)
    # The clock went on by five from the beginning of the record to its end: four steps, one end.
    assert record["busy_share"] == pytest.approx(2.0 / 5.0)
    assert record["kernels_per_step"] == pytest.approx(2 / clock.PROFILED_STEPS)


def test_a_profiler_that_sees_no_kernel_tells_of_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StepClock(seconds=None)
    watch._profile = SimpleNamespace(stop=lambda: None, events=list)
    watch._end_profile()
    assert watch.record()["busy_share"] is None
    assert "no kernels" in watch.record()["why_not"]


def _kernel(name: str, start: float, end: float, *, device: str) -> Any:
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=times, device_type=SimpleNamespace(name=device))


def test_a_run_is_over_after_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = StepClock(seconds=5.0)
    now[0] = 100.0
    assert not watch.is_over()  # no step was taken yet
    watch.stepped(1000)
    now[0] = 104.0
    assert not watch.is_over()
    now[0] = 105.0
    assert watch.is_over()


@pytest.mark.parametrize("is_clocked", [True, False])
def test_a_probe_ends_a_run_by_time(
    is_clocked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path)
    plan = Plan(
        steps=1000,
        folder=folder,
        workspace=folder,
        outside=folder,
        began=0.0,
        seconds=1e-9,
        is_clocked=is_clocked,
    )
    Plan.write(plan, tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    probe = Probe(plan)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    monkeypatch.setattr(probe, "_leave", _leave)
    arguments: tuple[Any, ...] = (optimizer, (), {})

    def train() -> None:
        while True:
            probe._backwards += 1
            probe._stepped(*arguments)

    with pytest.raises(Finished):
        train()
    # The first step begins the time, the second is over it, and the profile comes after that.
    assert probe._steps == 2 + (UNTIMED_STEPS if is_clocked else 0)


@pytest.mark.parametrize("is_behind", [False, True])
def test_ranks_end_a_run_by_time_after_the_same_step(
    is_behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(
        steps=1000,
        folder=str(tmp_path),
        workspace=str(tmp_path),
        outside=str(tmp_path),
        began=0.0,
        seconds=1e-9,
        is_clocked=True,
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    probes = [Probe(plan), Probe(plan)]
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in probes]
    left: set[int] = set()

    def step(rank: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(probes[rank], "_leave", lambda: left.add(rank))
        if rank not in left:
            probes[rank]._backwards += 1
            probes[rank]._stepped(optimizers[rank], (), {})

    for number in range(100):
        step(0)
        if not is_behind or number:  # by a step
            step(1)
    assert left == {0, 1}
    assert probes[0]._steps == probes[1]._steps
    assert probes[0]._steps > 2 + UNTIMED_STEPS


def _leave() -> None:
    raise Finished
