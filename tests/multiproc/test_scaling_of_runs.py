"""The cost of more ranks, by the report of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import deepytorch
from deepytorch import cli
from deepytorch_core.report import scaling as report_scaling
from deepytorch_core.testing import spawn_ranks

STEPS, SMALL, LARGE = 12, 17, 4_000_001


def run(rank: int, world_size: int) -> dict[str, Any]:
    """Steps with two all_reduces of very different sizes, which is what a fit needs."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.0)
    pairs = dist.new_group(list(range(world_size)), group_desc="as large")
    for _ in range(STEPS):
        for count in (SMALL, LARGE):
            value = torch.full((count,), float(rank))
            dist.all_reduce(value)
            assert value[-1] == sum(range(world_size))
        optimizer.step()
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4,))
    for _ in range(3):
        dist.all_reduce(sparse.clone(), group=pairs)  # the stock backend's
    return deepytorch.report().to_dict()


def test_a_runs_report_says_how_it_would_scale(tmp_path: Path) -> None:
    # Without plans: those that a machine's profile has already would be other points.
    reports = spawn_ranks(run, 2, backend="deepytorch", fresh=True, env={"DEEPYTORCH_TUNE": "off"})
    for rank, report in enumerate(reports):
        assert set(report["groups"].values()) == {2}
        assert report["nodes"] == 1
        recent = {(row["native"], row["bytes"]): row for row in report["recent"]}
        assert {key for key in recent if key[0]} == {(True, 4 * SMALL), (True, 4 * LARGE)}
        assert any(not native for native, _ in recent)
        for count in (SMALL, LARGE):
            assert recent[True, 4 * count]["calls"] == STEPS
            assert recent[True, 4 * count]["op"] == "all_reduce"
        times_us = {count: recent[True, 4 * count]["median_us"] for count in (SMALL, LARGE)}
        assert 0 < times_us[SMALL] < times_us[LARGE]
        found = report_scaling.forecast(report)
        assert found["known"], found
        assert (found["unit"], found["today"]) == ("ranks", 2)
        whole = report["course"]
        expected_ms = 1e3 * (whole["seconds"] - whole["tuning_s"]) / whole["timed_steps"]
        assert found["step_ms"] == pytest.approx(expected_ms, abs=1e-3)
        steps = [row["step_ms"] for row in found["forecast"]]
        assert steps[0] == found["step_ms"]
        assert steps == sorted(steps)
        assert steps[-1] > steps[0], "nothing hides what is synchronous"
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps(report))
        result = CliRunner().invoke(cli.app, ["report", str(path)])
        assert result.exit_code == 0, result.output
        assert f"will it scale: step {found['step_ms']:.1f} ms today on 2 ranks" in result.output
