"""Tests how `run --compare` reads what ranks of a run leave, and takes ranks that leave nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepytorch.cli import compare, launcher
from deepytorch_core.base.errors import CompareError
from deepytorch_core.compare import result
from deepytorch_core.compare.probe import OWN_RANKS, STEPPED


def rank_file(folder: Path, rank: int, **changes: Any) -> None:
    found: dict[str, Any] = {
        "steps": 2,
        "is_complete": True,
        "setup_s": 1.0 + rank,
        "block_s": [1.0 + rank, 2.0 - rank],
        "losses": [1.0 + rank, None],
        "peak_bytes": 10 + rank,
        "device": "cpu",
        "redirected": ["/a"],
        "made_folders": [],
        "seams": ["ddp"],
        "report": {"native_calls": 3, "delegated_calls": 0, "decisions": [], "kept": 0},
        "script": "/home/train.py",
        "asked": {},
        "undecided": [],
        "draws": [5, 7],
        "weights": 3.0,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps({**found, **changes}))


def test_ranks_are_put_together(tmp_path: Path) -> None:
    for rank in range(2):
        rank_file(tmp_path, rank)
    found = result.read("ours", tmp_path, 2)
    assert (found.block_s, found.setup_s, found.peak_bytes) == ((2.0, 2.0), 2.0, 11)
    assert (found.losses, found.native_calls, found.redirected) == ((1.5, None), 6, ("/a",))
    assert (found.loss_ranks, found.draws, found.is_replicated) == (2, (5, 7), True)


@pytest.mark.parametrize(
    ("weights", "alike"),
    [((3.0, 3.0), True), ((3.0, 3.1), False), ((3.0, None), None), ((3.0, math.nan), False)],
)
def test_ranks_that_end_with_other_weights_are_told(
    tmp_path: Path, weights: tuple[float | None, ...], alike: bool | None
) -> None:
    for rank, norm in enumerate(weights):
        rank_file(tmp_path, rank, weights=norm, losses=[None if rank else 1.0, None])
    found = result.read("ours", tmp_path, 2)
    assert (found.is_replicated, found.loss_ranks) == (alike, 1)


def test_a_rank_without_a_record_has_ended_without_pythons_exit(tmp_path: Path) -> None:
    rank_file(tmp_path, 0)
    with pytest.raises(CompareError) as caught:
        result.read("ours", tmp_path, 2)
    assert str(caught.value).startswith("ours: rank 1 of 2 left without a word: its process ended")
    assert "os._exit. Give fewer --steps" in str(caught.value)


def test_ranks_of_different_numbers_of_steps_are_read_over_the_smallest(tmp_path: Path) -> None:
    """As with DDP's join; what is compared is then a run of so many steps."""
    losses = [1.0, 2.0, 3.0]
    rank_file(tmp_path, 0, is_complete=False)
    rank_file(tmp_path, 1, steps=3, block_s=losses, losses=losses)
    found = result.read("ours", tmp_path, 2)
    assert (found.steps, found.is_complete, len(found.losses)) == (2, False, 2)


def test_ranks_that_never_step_are_named(tmp_path: Path) -> None:
    rank_file(tmp_path, 0)
    for rank in (1, 2):
        rank_file(tmp_path, rank, steps=0, is_complete=False, block_s=[], losses=[])
    with pytest.raises(CompareError, match="^ours: ranks 1, 2 of 3 took no optimizer step, where"):
        result.read("ours", tmp_path, 3)
    rank_file(tmp_path, 0, steps=0, is_complete=False, block_s=[], losses=[])
    rank_file(tmp_path, 1, steps=0, is_complete=False, block_s=[], losses=[])
    assert result.read("ours", tmp_path, 2).steps == 0  # of a script that does not train


def job() -> compare.Job:
    options = launcher.parse(("train.py",), command="run", default_processes="1")
    return compare.Job(
        arguments=("train.py",),
        options=options,
        default_processes="1",
        world_size=2,
        steps=30,
        rounds=2,
        arms=("stock", "deepytorch"),
        timeout_s=1.0,
    )


def failure_of(
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
    ranks: dict[int, dict[str, Any]],
    stepped: tuple[int, ...],
) -> list[str]:
    """The lines said of a run that ends with `status` and leaves the records of `ranks`."""

    def launch(asked: compare.Job, folder: Path, *rest: Any) -> int | None:
        for rank, changes in ranks.items():
            rank_file(folder / "ranks", rank, **changes)
        for rank in stepped:
            (folder / "ranks" / f"{STEPPED}{rank}").touch()
        (folder / "output").write_text("the end of it\n")
        return status

    monkeypatch.setattr(compare, "_launch", launch)
    with pytest.raises(CompareError) as caught:
        compare.run_once(job(), compare.ARMS["stock"], [])
    return str(caught.value).splitlines()


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("status", [134, 1, None])
def test_a_run_that_fails_after_it_has_measured_has_failed(
    monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    said = failure_of(monkeypatch, status, {0: {}, 1: {}}, (0, 1))
    assert said[0].startswith("the script ")
    assert said[1:] == ["the end of it"]


@pytest.mark.parametrize("status", [1, None])
def test_a_rank_that_waits_for_one_that_was_stopped_is_no_failure_of_the_script(
    monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    said = failure_of(monkeypatch, status, {0: {}}, (0,))
    assert said[0].startswith("stock: rank 1 of 2 took no optimizer step, where others took")
    assert said[1].startswith("the script ")
    said = failure_of(monkeypatch, status, {1: {}}, (0, 1))
    assert said[0].startswith("the script ")
    assert said[-1] == "rank 1 had its steps and was stopped before rank 0: maybe that is why"


def test_a_failure_before_any_rank_was_stopped_is_the_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = failure_of(monkeypatch, 1, {0: {"is_complete": False}}, (0,))
    assert said[-1] == "the end of it"
    assert failure_of(monkeypatch, 1, {}, (0,))[-1] == "the end of it"


def test_a_run_whose_script_starts_its_ranks_is_over_at_once(tmp_path: Path) -> None:
    launched: Any = SimpleNamespace(poll=lambda: None)
    assert compare._wait([launched], 0.01, tmp_path, None) is None
    (tmp_path / OWN_RANKS).touch()
    with pytest.raises(CompareError, match="the script starts its ranks itself"):
        compare._wait([launched], 100.0, tmp_path, None)
