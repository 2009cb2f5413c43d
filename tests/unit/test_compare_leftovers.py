"""A run leaves no checkpoint, nor half of one, in folders outside its view."""

from __future__ import annotations

import os
from pathlib import Path

from deepytorch.cli.compare import leftovers
from deepytorch_core.compare import made
from deepytorch_core.compare.result import Sample


def ran(redirected: list[Path], folders: list[Path]) -> Sample:
    return Sample(
        arm="stock",
        steps=4,
        is_complete=True,
        block_s=(1.0,),
        setup_s=1.0,
        losses=(1.0,) * 4,
        peak_bytes=1,
        device="cpu",
        redirected=tuple(map(str, redirected)),
        made_folders=tuple(map(str, folders)),
        seams=(),
        native_calls=0,
        decisions=(),
    )


def note(outside: Path, files: list[Path], folders: list[Path]) -> None:
    journal = made.MadeFiles(str(outside))
    for folder in folders:
        journal.add_folder(str(folder))
    for file in files:
        journal.add(str(file))


def test_a_checkpoint_goes_whole_and_other_files_stay(tmp_path: Path) -> None:
    began = tmp_path.stat().st_mtime
    out, logs, old = tmp_path / "out", tmp_path / "logs", tmp_path / "old"
    checkpoints = [out / f"checkpoint-{step}" for step in (5, 10)]
    for folder in (*checkpoints, logs, old):
        folder.mkdir(parents=True)
        (folder / "random_states_0.pkl").write_text("")
    weights = [
        checkpoint / name
        for checkpoint in (*checkpoints, old)
        for name in ("model.bin", "optimizer.pt")
    ]
    for file in weights:
        file.write_text("new")
    note(tmp_path, weights, [out, *checkpoints, logs])
    made.clear(tmp_path, began)
    assert not out.exists()
    assert [path.name for path in logs.iterdir()] == ["random_states_0.pkl"]
    # A folder that was there before.
    assert [path.name for path in old.iterdir()] == ["random_states_0.pkl"]
    assert leftovers.remarks(ran(weights, [out, *checkpoints, logs])) == [
        f"the script also made {logs}, and left files there",
        f"checkpoints not kept: in {old} (2 files), {checkpoints[1]} (2 files), "
        f"{checkpoints[0]} (2 files)",
    ]


def test_a_folder_with_something_older_than_the_run_stays(tmp_path: Path) -> None:
    began = tmp_path.stat().st_mtime  # before the journal is written there
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "moved").write_text("old")
    os.utime(folder / "moved", (1, 1))
    (folder / "model.bin").write_text("new")
    note(tmp_path, [folder / "model.bin"], [folder])
    made.clear(tmp_path, began)
    assert [path.name for path in folder.iterdir()] == ["moved"]


def test_an_old_file_that_a_rank_moves_to_where_another_made_one_stays(tmp_path: Path) -> None:
    began = tmp_path.stat().st_mtime
    made_there = tmp_path / "last.pt"
    made_there.write_text("old")
    os.utime(made_there, (1, 1))
    note(tmp_path, [made_there], [])
    made.clear(tmp_path, began)
    assert made_there.read_text() == "old"


def test_a_journal_that_a_full_disk_has_cut_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    weights = tmp_path / "last.pt"
    began = tmp_path.stat().st_mtime
    weights.write_text("new")
    note(tmp_path, [weights], [])
    (journal,) = tmp_path.glob(".made-*")
    with journal.open("a") as file:
        file.write('["file", "/some')
    made.clear(tmp_path, began)
    assert not weights.exists()


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    weights = [tmp_path / str(step) / "model.bin" for step in range(5)]
    (remark,) = leftovers.remarks(ran(weights, []))
    assert remark.endswith("(1 file) and 2 more")
