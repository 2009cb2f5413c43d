"""The tuner with real processes and gloo: what is measured, kept, reported and explained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch_core import _core
from deepytorch_core.base import config
from deepytorch_core.report import explain, summary
from deepytorch_core.testing import spawn_ranks
from deepytorch_core.testing.forked import ForkedProgram

KIB = 1 << 10


def tuned(profile: Path, tune: str = "auto", **changes: str) -> dict[str, str]:
    return {"DEEPYTORCH_TUNE": tune, "DEEPYTORCH_PROFILE": str(profile), **changes}


def reduce_and_gather(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Results are checked; returns what was decided."""
    for _ in range(3):
        mine = torch.full((64 * KIB,), float(rank + 1))
        dist.all_reduce(mine)
        assert torch.equal(mine, torch.full_like(mine, world_size * (world_size + 1) / 2))
        whole = torch.empty(world_size * 64 * KIB)
        work = dist.all_gather_into_tensor(whole, mine + rank, async_op=True)
        assert work is not None
        work.wait()
        for peer, part in enumerate(whole.chunk(world_size)):
            assert torch.equal(part, torch.full_like(part, float(mine[0]) + peer))
    return [dict(plan) for plan in _core.plans()]


def test_all_ranks_decide_alike_and_the_profile_keeps_it(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    first = spawn_ranks(reduce_and_gather, 2, backend="deepytorch", env=tuned(profile))
    assert first[0] == first[1]
    assert {plan["op"] for plan in first[0]} == {"all_reduce", "all_gather"}
    for plan in first[0]:
        assert plan["source"] == "measured now"
        assert plan["candidates"][-1]["algorithm"] == "delegate"
    kept = json.loads(profile.read_text())
    assert [row["collective"] for row in kept["groups"][0]["measured"]] == [
        "all_reduce",
        "all_gather",
    ]
    # Other workers: other processes, which find the times there.
    again = tuned(profile, DEEPYTORCH_LOG="warning")
    for plan in spawn_ranks(reduce_and_gather, 2, backend="deepytorch", env=again)[0]:
        assert plan["source"] == f"profile {profile}"


def decide_only(rank: int, world_size: int) -> list[str]:
    reduce_and_gather(rank, world_size)
    return [plan["source"] for plan in _core.plans()]


def test_repeatable_runs_take_decisions_only_from_the_profile(tmp_path: Path) -> None:
    env = tuned(tmp_path / "profile.json", DEEPYTORCH_DETERMINISTIC="on")
    for sources in spawn_ranks(decide_only, 2, backend="deepytorch", env=env):
        assert set(sources) == {"rule of thumb"}
    assert not (tmp_path / "profile.json").exists()


def candidates_only(rank: int, world_size: int) -> set[str]:
    reduce_and_gather(rank, world_size)
    return {time["algorithm"] for plan in _core.plans() for time in plan["candidates"]}


def test_native_collectives_do_not_compete_with_gloo(tmp_path: Path) -> None:
    env = tuned(tmp_path / "profile.json", DEEPYTORCH_COLLECTIVES="native")
    for names in spawn_ranks(candidates_only, 2, backend="deepytorch", env=env):
        assert names == {"pipelined", "exchange"}


def test_a_folder_that_cannot_be_made_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    env = tuned(tmp_path / "file" / "profile.json")
    for sources in spawn_ranks(decide_only, 2, backend="deepytorch", env=env):
        assert set(sources) == {"measured now"}


def reported(rank: int, world_size: int) -> str:
    reduce_and_gather(rank, world_size)
    made = summary.report()
    assert json.dumps(made.to_dict())
    return str(made)


def test_the_report_lists_the_decisions(tmp_path: Path) -> None:
    env = tuned(tmp_path / "profile.json")
    text = spawn_ranks(reported, 2, backend="deepytorch", env=env)[0]
    assert "decision: all_reduce of 2 ranks, 131072 to 524287 bytes: " in text
    assert "delegate" in text.splitlines()[-1]


def explain_each(rank: int, world_size: int) -> list[tuple[str, Any]]:
    questions = [explain.PlanQuestion(op=op, bytes=512 * KIB) for op in explain.OPERATIONS]
    return [(question.op, explain.run_once(rank, world_size, question)) for question in questions]


def test_every_operation_can_be_explained(tmp_path: Path) -> None:
    env = tuned(tmp_path / "profile.json", tune="force")
    first, _ = spawn_ranks(explain_each, 2, backend="deepytorch", env=env)
    for op, (plans, calls, groups) in first:
        assert groups == [], "one node"
        found = explain.answer(explain.PlanQuestion(op=op, bytes=512 * KIB), plans, calls)
        if op == "all_to_all":
            assert found.source == "rule of thumb"
            continue
        assert found.source == "measured now"
        assert sum(candidate.chosen for candidate in found.candidates) == 1
        assert found.candidates[-1].algorithm == "delegate"


def test_explain_as_a_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = ForkedProgram(
        [sys.executable, "-m", "deepytorch.cli"]
        + ["explain", "all_reduce", "1M", "--world-size", "2", "--json"],
        log,
        config.child_environment(DEEPYTORCH_LOG="error", **tuned(tmp_path / "profile.json")),
    )
    assert program.wait(100) == 0, log.read_text()
    found = json.loads(log.read_text())
    assert found["source"] == "measured now"
    assert [row["chosen"] for row in found["candidates"]].count(True) == 1
    assert (tmp_path / "profile.json").exists()
