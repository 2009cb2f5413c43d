"""collectives=auto on GPUs: native kernels where they were measured faster than NCCL, else NCCL.

What asks for native code alone runs on one GPU too, which the ranks share then.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import rank_gpu

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

KIB = 1 << 10
MIB = 1 << 20
BACKEND = "cuda:deepytorch,cpu:deepytorch"


def _exercise(rank: int, world_size: int, group: Any = None) -> None:
    """Every collective the tuner measures, over its sizes; results are checked."""
    device = rank_gpu(rank)
    for size in [4 * KIB, 64 * KIB, 300 * KIB, 4 * MIB, 64 * MIB]:
        count = size // 4
        for _ in range(2):
            value = torch.full((count,), float(rank + 1), device=device)
            dist.all_reduce(value, group=group)
            assert value.eq(world_size * (world_size + 1) / 2).all(), size

            whole = torch.empty(count * world_size, device=device)
            mine = torch.full((count,), float(rank), device=device)
            work = dist.all_gather_into_tensor(whole, mine, group=group, async_op=True)
            assert work is not None
            work.wait()
            for peer, part in enumerate(whole.chunk(world_size)):
                assert part.eq(peer).all(), size

            part = torch.empty(count, device=device)
            dist.reduce_scatter_tensor(part, whole, group=group)
            assert part.eq(rank * world_size).all(), size
    torch.cuda.synchronize()


def _plans() -> list[dict[str, Any]]:
    from deepytorch_core import _core

    return [dict(plan) for plan in _core.plans() if plan["device"]]


def _decides(rank: int, world_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the first group decided, and the second, which is like it."""
    from deepytorch_core import _core

    _exercise(rank, world_size)
    first = _plans()
    spent_s = _core.spent_on_tuning_s()
    assert 0 < spent_s < 3
    group = dist.new_group(list(range(world_size)))
    _exercise(rank, world_size, group)
    assert _core.spent_on_tuning_s() == spent_s
    rows = [dict(row) for row in _core.statistics()]
    small = [row for row in rows if row["algorithm"] == "low_latency"]
    assert small, rows  # 4 KiB is native whatever was measured
    second = _plans()
    before = {(plan["op"], plan["first_bytes"]): plan for plan in first}
    for plan in second:
        assert plan["source"] == "measured in this run"
        same = before[plan["op"], plan["first_bytes"]]
        assert (plan["algorithm"], plan["channels"]) == (same["algorithm"], same["channels"])
    return first, second


def _captures_first(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The group's first calls are in a graph; the same sizes are measured once they are not."""
    device = rank_gpu(rank)
    small = torch.ones(1000, device=device)
    large = torch.ones(MIB, device=device)
    dist.all_reduce(torch.ones(1, device=device))  # the stock backend and the kernels are loaded
    dist.broadcast(torch.ones(8 * MIB, device=device), 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(small, op=dist.ReduceOp.AVG)
        dist.all_reduce(large, op=dist.ReduceOp.AVG)
    assert not [plan for plan in _plans() if plan["op"] == "all_reduce"]
    small.fill_(rank)
    large.fill_(rank)
    graph.replay()
    mean = (world_size - 1) / 2
    assert small.eq(mean).all()
    assert large.eq(mean).all()
    dist.all_reduce(large, op=dist.ReduceOp.AVG)
    assert large.eq(mean).all()
    graph.replay()
    assert large.eq(mean).all()
    torch.cuda.synchronize()
    return [plan for plan in _plans() if plan["op"] == "all_reduce"]


def _first_call_is_captured(rank: int, world_size: int) -> None:
    device = rank_gpu(rank)
    value = torch.full((1000,), float(rank), device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(value)
    graph.replay()
    assert value.eq(world_size * (world_size - 1) / 2).all()


def _by_rule(rank: int, world_size: int) -> set[tuple[str, int, str]]:
    from deepytorch_core import _core

    device = rank_gpu(rank)
    _core.reset_statistics()
    for size in [4 * KIB, 128 * KIB, 4 * MIB]:
        value = torch.full((size // 2,), float(rank), dtype=torch.bfloat16, device=device)
        dist.all_reduce(value)
        assert value.eq(world_size * (world_size - 1) / 2).all()
    assert _plans() == []
    rows = [row for row in _core.statistics() if row["op"] == "all_reduce"]
    return {(str(row["op"]), int(row["bytes"]), str(row["algorithm"])) for row in rows}


def _any_alignment(rank: int, world_size: int) -> set[tuple[str, str]]:
    """Small whole numbers, whose sums are exact; returns which algorithm served what."""
    from deepytorch_core import _core

    device = rank_gpu(rank)
    _core.reset_statistics()
    for shift, count in enumerate([40_001, 262_144, 1_500_003, 8_388_611, 33_554_437]):
        numbers = torch.arange(count * world_size, device=device) % 31

        def mine(seed: int, length: int, shift: int = shift, all: Any = numbers) -> torch.Tensor:
            room = torch.empty(length + shift, dtype=torch.bfloat16, device=device)
            return room[shift:].copy_((all[:length] + seed) % 31)

        value = mine(rank, count)
        dist.all_reduce(value)
        total = sum(mine(seed, count, 0).float() for seed in range(world_size))
        assert torch.equal(value.float(), total), count

        part = mine(0, count)
        dist.reduce_scatter_tensor(part, mine(rank, count * world_size))
        whole = sum(mine(seed, count * world_size, 0).float() for seed in range(world_size))
        assert torch.equal(part.float(), whole.chunk(world_size)[rank]), count

        gathered = mine(0, count * world_size)
        dist.all_gather_into_tensor(gathered, mine(rank, count))
        for peer, part in enumerate(gathered.chunk(world_size)):
            assert torch.equal(part, mine(peer, count, 0)), (count, peer)

        value = mine(rank, count)
        dist.broadcast(value, count % world_size)
        assert torch.equal(value, mine(count % world_size, count, 0)), count
    rows = [row for row in _core.statistics() if row["calls"] and row["op"] != "barrier"]
    return {(str(row["op"]), str(row["algorithm"])) for row in rows}


def _gathers(rank: int, world_size: int) -> None:
    device = rank_gpu(rank)
    whole = torch.empty(4 * MIB * world_size, device=device)
    dist.all_gather_into_tensor(whole, torch.full((4 * MIB,), float(rank), device=device))
    for peer, part in enumerate(whole.chunk(world_size)):
        assert part.eq(peer).all()


def _gathers_in_graphs_and_without(rank: int, world_size: int) -> set[str]:
    """Copy engines serve eager calls alone, in one order with the kernels of replays.

    Gives the algorithms of the eager calls and of the one that was captured.
    """
    from deepytorch_core import _core

    device = rank_gpu(rank)
    _gathers(rank, world_size)
    mine = torch.zeros(4 * MIB, device=device)
    whole = torch.empty(4 * MIB * world_size, device=device)
    again = torch.empty_like(whole)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    _core.reset_statistics()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_gather_into_tensor(whole, mine)
    for turn in range(50):
        mine.fill_(turn + rank)
        dist.all_gather_into_tensor(again, mine)
        graph.replay()
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        if turn % 10 == 0:
            for peer in range(world_size):
                assert again.chunk(world_size)[peer].eq(turn + peer).all(), (turn, peer)
            assert torch.equal(again, whole), turn
    torch.cuda.synchronize()
    rows = [row for row in _core.statistics() if row["op"] == "all_gather" and row["calls"]]
    return {str(row["algorithm"]) for row in rows}


def _waits_for_a_rank(rank: int, world_size: int) -> str:
    """Rank 1 does not come to the last one of several."""
    from datetime import timedelta

    device = rank_gpu(rank)
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=4))
    whole = torch.empty(4 * MIB * world_size, device=device)
    mine = torch.full((4 * MIB,), float(rank), device=device)
    for _ in range(3):
        dist.all_gather_into_tensor(whole, mine, group=group)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(12)
        return "late"
    try:
        for _ in range(80):
            dist.all_gather_into_tensor(whole, mine, group=group)
            torch.cuda.synchronize()
            time.sleep(0.1)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def _favour(profile: Path, algorithm: str) -> None:
    """Lets the times kept in a profile say that one algorithm is by far the fastest."""
    kept = json.loads(profile.read_text())
    for group in kept["groups"]:
        for row in group["measured"]:
            for took in row["times"]:
                slower = 1 if took["algorithm"] == algorithm else 1000
                took["median_us"] *= slower
                took["spread_us"] = [slower * end for end in took["spread_us"]]
    profile.write_text(json.dumps(kept))


def _environment(profile: Path, **more: str) -> dict[str, str]:
    return {"DEEPYTORCH_PROFILE": str(profile), "DEEPYTORCH_TUNE": "auto", **more}


@needs_gpus(2)
@pytest.mark.timeout(300)
def test_decisions(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    environment = _environment(profile)
    ranks = spawn_ranks(_decides, 2, backend=BACKEND, env=environment, fresh=True)
    first, second = ranks[0]
    assert ranks[1] == ranks[0]
    assert first
    assert len(second) == len(first)
    measured = [plan for plan in first if plan["source"].startswith("measured now")]
    assert measured
    for plan in measured:
        assert plan["candidates"][-1]["algorithm"] == "delegate", plan
        assert len(plan["candidates"]) >= 2
        stock = plan["candidates"][-1]
        chosen = next(
            time
            for time in plan["candidates"]
            if all(time[name] == plan[name] for name in ("algorithm", "channels", "chunk_bytes"))
        )
        if chosen is not stock:
            assert chosen["median_us"] * 1.03 <= stock["median_us"] + 0.01
            assert chosen["spread_us"][1] < stock["spread_us"][0]
    kept = json.loads(profile.read_text())
    assert [group["on_device"] for group in kept["groups"] if "on_device" in group] == [True]
    # Other processes find the times there, and measure nothing.
    again = spawn_ranks(_decides_by_profile, 2, backend=BACKEND, env=environment, fresh=True)
    assert again[0] == {f"profile {profile}"}


def _decides_by_profile(rank: int, world_size: int) -> set[str]:
    _exercise(rank, world_size)
    return {plan["source"] for plan in _plans()}


@needs_gpus(2)
@pytest.mark.timeout(180)
def test_a_capture_takes_the_rule_of_thumb_and_leaves_the_size_open(tmp_path: Path) -> None:
    environment = _environment(tmp_path / "profile.json")
    plans = spawn_ranks(_captures_first, 2, backend=BACKEND, env=environment, fresh=True)
    assert [plan["source"] for plan in plans[0]] == ["measured now"]


@needs_gpus(2)
@pytest.mark.timeout(180)
def test_a_groups_first_call_may_be_captured(tmp_path: Path) -> None:
    environment = _environment(tmp_path / "profile.json")
    spawn_ranks(_first_call_is_captured, 2, backend=BACKEND, env=environment, fresh=True)


@needs_gpus(2)
def test_without_tuning_small_ones_are_native(tmp_path: Path) -> None:
    environment = _environment(tmp_path / "profile.json", DEEPYTORCH_TUNE="off")
    rows = spawn_ranks(_by_rule, 2, backend=BACKEND, env=environment, fresh=True)[0]
    assert rows == {
        ("all_reduce", 4 * KIB, "low_latency"),
        ("all_reduce", 128 * KIB, "packet"),
        ("all_reduce", 4 * MIB, "delegate"),
    }


SERVES = {
    "packet": {"all_reduce", "all_gather", "reduce_scatter"},
    "two_shot": {"all_reduce"},
    "push": {"all_gather", "reduce_scatter", "broadcast"},
    "copy_engine": {"all_gather", "broadcast"},
    "ring": {"all_gather", "broadcast"},
}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=needs_gpus(4))])
@pytest.mark.timeout(240)
def test_every_algorithm_is_right_at_every_size(tmp_path: Path, world_size: int) -> None:
    profile = tmp_path / "profile.json"
    native = _environment(profile, DEEPYTORCH_COLLECTIVES="native")
    spawn_ranks(_any_alignment, world_size, backend=BACKEND, env=native, fresh=True)
    times = profile.read_text()
    for algorithm, ops in SERVES.items():
        if algorithm == "ring" and world_size == 2:
            continue  # of two it would be what push is
        profile.write_text(times)
        _favour(profile, algorithm)
        chosen = {**native, "DEEPYTORCH_DETERMINISTIC": "on"}  # only what the profile says
        used = spawn_ranks(_any_alignment, world_size, backend=BACKEND, env=chosen, fresh=True)
        assert {op for op, name in used[0] if name == algorithm} == ops


@pytest.fixture
def copy_engines(tmp_path: Path) -> dict[str, str]:
    """Return variables of processes whose profile says that copy engines are fastest."""
    profile = tmp_path / "profile.json"
    native = _environment(profile, DEEPYTORCH_COLLECTIVES="native")
    spawn_ranks(_gathers, 2, backend=BACKEND, env=native, fresh=True)
    _favour(profile, "copy_engine")
    return {**native, "DEEPYTORCH_DETERMINISTIC": "on", "DEEPYTORCH_ERROR_HANDLING": "raise"}


@pytest.mark.timeout(180)
def test_copy_engines_and_graphs_mix(copy_engines: dict[str, str]) -> None:
    used = spawn_ranks(
        _gathers_in_graphs_and_without, 2, backend=BACKEND, env=copy_engines, fresh=True
    )[0]
    assert "copy_engine" in used
    assert len(used) == 2  # of the graph


@pytest.mark.timeout(180)
def test_copy_engines_name_a_rank_that_does_not_come(copy_engines: dict[str, str]) -> None:
    outcomes = spawn_ranks(_waits_for_a_rank, 2, backend=BACKEND, env=copy_engines, fresh=True)
    assert "rank 1 did not come in time" in outcomes[0], outcomes
