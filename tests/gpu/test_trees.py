"""An all_reduce along trees, on GPUs whose links are masked by DEEPYTORCH_EMULATE_LINKS.

With fewer GPUs than ranks the ranks share them, which NCCL does not do: so most of this asks for
native code alone.
"""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.c10d import registered
from deepytorch_core.testing import assert_same_on_all_ranks, needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import rank_gpu, rank_inputs, shifted

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)]

BACKEND = "cuda:deepytorch,cpu:deepytorch"
NATIVE = {
    "DEEPYTORCH_COLLECTIVES": "native",
    "DEEPYTORCH_TUNE": "off",
    "DEEPYTORCH_ERROR_HANDLING": "raise",
}
# Some ranks don't reach each other.
PARTIAL = {
    "line": "-4-,4-4,-4-",
    "star": "-444,4---,4---,4---",
    "ring": "-21-,2--1,1--2,-12-",
    "bridged pairs and one link": "-4--,4-1-,-1-4,--4-",
    # Eight V100 with six NVLinks each.
    "hybrid cube": "-1122---,1-21-2--,12-2--1-,212----1,2----112,-2--1-21,--1-12-2,---1212-",
}
# All reach each other, some better than others.
BRIDGED_PAIRS = "-4pp,4-pp,pp-4,pp4-"
APART = "-4--,4---,---4,--4-"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# In elements: one, odd ones, less than a chunk for each rank, several rounds with a remainder.
COUNTS = [1, 3, 127, 4099, 70_001, (1 << 20) + 3]
OPS = ["sum", "avg", "premul_sum"]
FACTOR = 0.5
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _num_ranks(links: str) -> int:
    return len(links.split(","))


def _neighbours(links: str, rank: int) -> int:
    return sum(letter != "-" for letter in links.split(",")[rank])


def _spawn(function: Any, links: str, *arguments: Any, **more: Any) -> list[Any]:
    env = {**more.pop("env", NATIVE), "DEEPYTORCH_EMULATE_LINKS": links}
    settings = {"env": env, "timeout_s": 240.0, "backend": BACKEND, **more}
    return spawn_ranks(function, _num_ranks(links), *arguments, **settings)


def _check(value: torch.Tensor, inputs: list[torch.Tensor], op: str, what: str) -> None:
    """Against float64. Every hop may round, to a unit of what was added up so far."""
    wide = torch.stack([each.double() for each in inputs])
    scale = {"sum": 1, "avg": 1 / len(inputs), "premul_sum": FACTOR}[op]
    expected = wide.sum(0) * scale
    error = (value.double() - expected).abs().max().item()
    most = ROUNDING[value.dtype] * len(inputs) * wide.abs().sum(0).max().item()
    assert error <= most, f"{what}: off by {error} of {most}"
    assert_same_on_all_ranks(value, what)


def _op(name: str) -> Any:
    if name == "premul_sum":
        return dist._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[name]


def _algorithms() -> set[str]:
    from deepytorch_core import _core

    return {str(row["algorithm"]) for row in _core.statistics() if row["calls"]}


def _results(rank: int, world_size: int, links: str) -> None:
    from deepytorch_core import _core

    device = rank_gpu(rank)
    before = _core.peer_mappings()
    dist.all_reduce(torch.ones(8, device=device))
    assert _core.peer_mappings() - before == _neighbours(links, rank)
    alone = torch.cuda.device_count() >= world_size
    counts = [*COUNTS, (20 << 20) + 7] if alone else COUNTS[: -1 if world_size > 4 else None]
    for dtype in DTYPES:
        for shift, count in enumerate(counts):
            for op in OPS:
                inputs = rank_inputs(count, world_size, dtype, device)
                value = shifted(inputs[rank], shift % 5)
                dist.all_reduce(value, op=_op(op))
                _check(value, inputs, op, f"{op} of {count} x {dtype}, {shift % 5} off")
    torch.cuda.synchronize()
    assert _algorithms() == {"tree"}


@pytest.mark.parametrize("name", PARTIAL)
def test_results(name: str) -> None:
    _spawn(_results, PARTIAL[name], PARTIAL[name], fresh=True)


def _sums(rank: int, world_size: int) -> list[int]:
    device = rank_gpu(rank)
    found = []
    for count in [1000, 300_001, 300_001, 1_500_000]:
        value = rank_inputs(count, world_size, torch.bfloat16, device)[rank]
        dist.all_reduce(value)
        found.append(zlib.crc32(value.view(torch.int16).cpu().numpy().tobytes()))
    return found


def test_the_same_bits_in_every_run() -> None:
    links = PARTIAL["bridged pairs and one link"]
    runs = [_spawn(_sums, links, fresh=True) for _ in range(2)]
    assert runs[0] == runs[1]
    assert all(sums == runs[0][0] for sums in runs[0])
    assert runs[0][0][1] == runs[0][0][2]


def _graphs(rank: int, world_size: int, replays: int) -> None:
    device = rank_gpu(rank)
    small = torch.ones(1000, device=device)
    large = torch.ones(1 << 20, device=device)
    dist.all_reduce(small)  # what capture needs exists from here on
    graphs = []
    for value in [small, large]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(value, op=dist.ReduceOp.AVG)
            work = dist.all_reduce(value, op=dist.ReduceOp.AVG, async_op=True)
            assert work is not None
            work.wait()
        graphs.append(graph)
    eager = torch.ones(5000, device=device)
    for turn in range(replays):
        small.fill_(turn + rank)
        large.fill_(turn + rank)
        graphs[turn % 2].replay()
        graphs[1 - turn % 2].replay()
        dist.all_reduce(eager, op=dist.ReduceOp.AVG)
        if turn % 50 == 0 or turn + 1 == replays:
            mean = turn + (world_size - 1) / 2
            torch.testing.assert_close(small, torch.full_like(small, mean))
            torch.testing.assert_close(large, torch.full_like(large, mean))
    assert eager.eq(1).all()
    assert _algorithms() == {"tree"}


@pytest.mark.parametrize("name", ["line", "ring"])
def test_graphs_and_eager_calls_mix(name: str) -> None:
    alone = torch.cuda.device_count() >= _num_ranks(PARTIAL[name])
    _spawn(_graphs, PARTIAL[name], 500 if alone else 20)


def _groups(rank: int, world_size: int, links: str, rounds: int) -> None:
    """Groups of all ranks and of two neighbours, on streams of their own, beside each other."""
    device = rank_gpu(rank)
    everyone = [dist.new_group(list(range(world_size))) for _ in range(3)]
    pairs = [dist.new_group([first, first + 1]) for first in range(world_size - 1)]
    firsts = [first for first in (rank - 1, rank) if 0 <= first < world_size - 1]
    groups = [*everyone, *[pairs[first] for first in firsts]]
    # A pair's sizes are those of its first rank on both, whatever its place among their groups.
    counts = [4000, 8000, 12_000, *[16_000 + 4000 * first for first in firsts]]
    values = [torch.ones(count, device=device) for count in counts]
    for group, value in zip(groups, values, strict=True):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
    for turn in range(rounds):
        order = list(range(len(groups)))
        if (rank + turn) % 2:
            order.reverse()
        works = []
        for i in order:
            work = dist.all_reduce(values[i], op=dist.ReduceOp.AVG, group=groups[i], async_op=True)
            works.append(work)
        for work in works:
            assert work is not None
            work.wait()
    torch.cuda.synchronize()
    assert all(value.eq(1).all() for value in values)
    used = _algorithms()
    assert "tree" in used
    assert used <= {"tree", "low_latency", "packet"}  # pairs have all kernels


def test_groups_in_opposite_orders() -> None:
    links = PARTIAL["line"]
    alone = torch.cuda.device_count() >= _num_ranks(links)
    _spawn(_groups, links, links, 200 if alone else 5)


def _killed(rank: int, world_size: int, dies: int) -> tuple[str, float]:
    value = torch.ones(1 << 20, device=rank_gpu(rank))
    dist.all_reduce(value)
    torch.cuda.synchronize()
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(200):
            dist.all_reduce(value)
            torch.cuda.synchronize()
            time.sleep(0.05)
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


@pytest.mark.parametrize("dies", [1, 3])
def test_a_killed_rank_is_named_by_all(dies: int) -> None:
    links = PARTIAL["bridged pairs and one link"]
    outcomes = _spawn(_killed, links, dies, expect_dead={dies}, fresh=True)
    for rank, outcome in enumerate(outcomes):
        if rank == dies:
            continue
        said, seconds = outcome
        assert f"rank {dies} (pid" in said, said
        assert "died" in said, said
        assert seconds < 10


def _late(rank: int, world_size: int) -> str:
    device = rank_gpu(rank)
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=2))
    value = torch.ones(1 << 16, device=device)
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    if rank == 2:
        time.sleep(8)
        return "late"
    try:
        for _ in range(80):
            dist.all_reduce(value, group=group)
            torch.cuda.synchronize()
            time.sleep(0.1)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_a_timeout() -> None:
    outcomes = _spawn(_late, PARTIAL["line"], fresh=True)
    assert any("rank that it waits for, did not come in time" in said for said in outcomes[:2])
    assert "no error" not in outcomes, outcomes


def _mixed_sizes(rank: int, world_size: int) -> str:
    device = rank_gpu(rank)
    dist.all_reduce(torch.ones(8, device=device))
    value = torch.ones(8 + 8 * (rank == 1), device=device)
    try:
        for _ in range(50):
            dist.all_reduce(value)
            torch.cuda.synchronize()
            time.sleep(0.1)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_different_sizes_are_named() -> None:
    outcomes = _spawn(_mixed_sizes, PARTIAL["line"], fresh=True)
    assert any("another operation, or one of another size" in said for said in outcomes), outcomes


def _apart(rank: int, world_size: int) -> None:
    from deepytorch_core import _core

    value = torch.full((300_000,), float(rank + 1), device=rank_gpu(rank))
    dist.all_reduce(value)
    torch.cuda.synchronize()
    assert value.eq(world_size * (world_size + 1) / 2).all()
    assert _core.peer_mappings() == 0
    assert _algorithms() == {"cpu_reduce"}


def test_gpus_in_parts_without_a_way_between_them_go_through_the_host() -> None:
    _spawn(_apart, APART, fresh=True)


def _refused(rank: int, world_size: int) -> str:
    try:
        dist.all_reduce(torch.ones(8, device=rank_gpu(rank)))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("links", ["-4,3-", "-4,4z"])
def test_links_that_are_none_are_refused(links: str) -> None:
    for said in _spawn(_refused, links, fresh=True):
        assert "DEEPYTORCH_EMULATE_LINKS" in said, said


def _plans() -> list[dict[str, Any]]:
    from deepytorch_core import _core

    plans = [dict(plan) for plan in _core.plans() if plan["device"]]
    return [plan for plan in plans if plan["op"] == "all_reduce"]


def _sizes(world_size: int) -> int:
    """How many sizes are measured. Where ranks take turns on a GPU one of them takes the budget."""
    return 3 if torch.cuda.device_count() >= world_size else 1


def _measured(rank: int, world_size: int) -> list[dict[str, Any]]:
    device = rank_gpu(rank)
    for count in [1 << 16, 1 << 20, 4 << 20][: _sizes(world_size)]:
        value = torch.full((count,), float(rank + 1), device=device)
        dist.all_reduce(value)
        assert value.eq(world_size * (world_size + 1) / 2).all()
    torch.cuda.synchronize()
    return _plans()


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


def _along_trees(rank: int, world_size: int) -> None:
    """Go the way that the profile says is fastest, also in registered memory, which peers write."""
    from deepytorch_core import _core

    device = rank_gpu(rank)
    counts = [70_001, (1 << 20) + 3, (4 << 20) + 1]
    for dtype in DTYPES:
        # In the ranges of sizes that were measured, whatever the type.
        for shift, count in enumerate(counts[: _sizes(world_size)]):
            inputs = rank_inputs(count, world_size, dtype, device)
            value = shifted(inputs[rank], shift)
            dist.all_reduce(value)
            _check(value, inputs, "sum", f"{count} x {dtype}")

            placed = registered.empty(count, dtype=dtype, device=device)
            end = time.monotonic() + 20
            while not registered.is_registered(placed) and time.monotonic() < end:
                time.sleep(0.01)
            dist.all_reduce(torch.zeros(1))  # on the host: all ranks' are
            placed.copy_(inputs[rank])
            before = _core.landing_calls()
            dist.all_reduce(placed, op=dist.ReduceOp.AVG)
            assert _core.landing_calls() > before
            _check(placed, inputs, "avg", f"{count} x {dtype}, registered")
    torch.cuda.synchronize()
    rows = [row for row in _core.statistics() if row["op"] == "all_reduce" and row["calls"]]
    on_gpus = {row["algorithm"] for row in rows if row["bytes"] > 4 * row["calls"]}
    assert on_gpus == {"tree"}, rows


@pytest.mark.timeout(600)
def test_unequal_links_try_trees_beside_the_others(tmp_path: Path) -> None:
    from deepytorch_core import _core

    profile = tmp_path / "profile.json"
    env = {
        "DEEPYTORCH_COLLECTIVES": "native",
        "DEEPYTORCH_TUNE": "auto",
        "DEEPYTORCH_PROFILE": str(profile),
    }
    for plans in _spawn(_measured, BRIDGED_PAIRS, env=env, fresh=True):
        assert plans
        for plan in plans:
            tried = {candidate["algorithm"] for candidate in plan["candidates"]}
            assert {"tree", "two_shot"} <= tried, plan
    kept = _core.device_plans(str(profile))
    assert kept
    for plan in kept:
        assert str(plan["device"]).endswith("links -4pp 4-pp pp-4 pp4-, emulated"), plan
    _favour(profile, "tree")
    _spawn(_along_trees, BRIDGED_PAIRS, env={**env, "DEEPYTORCH_DETERMINISTIC": "on"}, fresh=True)


def _delegates_the_rest(rank: int, world_size: int) -> dict[str, str]:
    from deepytorch_core import _core

    device = rank_gpu(rank)
    value = torch.full((1000,), rank, dtype=torch.float64, device=device)
    dist.all_reduce(value)
    assert value.eq(world_size * (world_size - 1) / 2).all()
    whole = torch.empty(1000 * world_size, device=device)
    dist.all_gather_into_tensor(whole, torch.full((1000,), float(rank), device=device))
    for peer, part in enumerate(whole.chunk(world_size)):
        assert part.eq(peer).all()
    torch.cuda.synchronize()
    rows = [row for row in _core.statistics() if row["calls"]]
    assert {row["algorithm"] for row in rows} == {"delegate"}, rows
    return {str(row["op"]): str(row["reason"]) for row in rows}


@needs_gpus(3)
def test_what_has_no_kernel_along_trees_is_nccls() -> None:
    for reasons in _spawn(_delegates_the_rest, PARTIAL["line"], fresh=True):
        assert set(reasons) == {"all_reduce", "all_gather"}
        for reason in reasons.values():
            assert "not all GPUs reach each other's memory" in reason, reasons


@needs_gpus(3)
def test_trees_serve_where_they_beat_nccl(tmp_path: Path) -> None:
    env = {"DEEPYTORCH_TUNE": "auto", "DEEPYTORCH_PROFILE": str(tmp_path / "profile.json")}
    ranks = _spawn(_measured, PARTIAL["line"], env=env, fresh=True)
    assert all(plans == ranks[0] for plans in ranks)
    assert ranks[0]
    for plan in ranks[0]:
        tried = {candidate["algorithm"] for candidate in plan["candidates"]}
        assert tried == {"tree", "delegate"}, plan
        stock = plan["candidates"][-1]
        trees = [each for each in plan["candidates"] if each["algorithm"] == "tree"]
        if plan["algorithm"] == "tree":
            assert min(each["median_us"] for each in trees) * 1.03 <= stock["median_us"] + 0.01
