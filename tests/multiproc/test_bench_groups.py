"""`bench groups` on few groups: what it counts and writes, not how fast."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepytorch.cli import app
from deepytorch_core.base.provenance import read_records
from deepytorch_core.bench import groups
from deepytorch_core.bench.job import BenchError


def test_one_record_with_both_arms(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    arguments = ["bench", "groups", "--count", "3", "--world-size", "2", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "3 groups of 2 ranks" in result.output
    for arm in groups.ARMS:
        assert f"  {arm} " in result.output
    (record,) = read_records(path)
    assert (record["bench"], record["count"], record["world_size"]) == ("groups", 3, 2)
    for prefix in ("", "baseline_"):
        assert record[f"{prefix}first_group_s"] > 0
        assert record[f"{prefix}other_groups_s"] > 0
    assert record["machine"]["cores"] >= 1


@pytest.mark.parametrize(("count", "world_size"), [(0, 2), (1, 1)])
def test_numbers_that_make_no_sense_are_refused(count: int, world_size: int) -> None:
    with pytest.raises(BenchError, match="at least one group of two ranks"):
        groups.run(count, world_size)


def test_own_memory_is_measured() -> None:
    assert 1 << 20 < groups.memory_bytes() < 1 << 40
