"""A run leaves no half of a checkpoint in folders outside its view."""

from __future__ import annotations

import os
from pathlib import Path

from deepytorch.cli.compare import leftovers
from deepytorch_core.compare.result import Sample


def ran(redirected: list[Path], made: list[Path]) -> Sample:
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
        made_folders=tuple(map(str, made)),
        seams=(),
        native_calls=0,
        decisions=(),
    )


def test_a_checkpoint_without_its_weights_goes_and_other_files_stay(tmp_path: Path) -> None:
    began = tmp_path.stat().st_mtime
    out, logs, old = tmp_path / "out", tmp_path / "logs", tmp_path / "old"
    checkpoints = [out / f"checkpoint-{step}" for step in (5, 10)]
    for folder in (*checkpoints, logs, old):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    weights = [one / name for one in (*checkpoints, old) for name in ("model.bin", "optimizer.pt")]
    remarks = leftovers.clear(ran(weights, [out, *checkpoints, logs]), began)
    assert not out.exists()
    assert (logs / "config.json").exists()
    assert (old / "config.json").exists()  # a folder that was there before
    assert remarks == [
        f"the script also made {logs}, and left files there",
        f"checkpoints not written: in {old} (2 files), {checkpoints[1]} (2 files), "
        f"{checkpoints[0]} (2 files)",
    ]


def test_a_folder_with_something_older_than_the_run_stays(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "moved").write_text("old")
    os.utime(folder / "moved", (1, 1))
    leftovers.clear(ran([folder / "model.bin"], [folder]), tmp_path.stat().st_mtime)
    assert (folder / "moved").exists()


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    weights = [tmp_path / str(step) / "model.bin" for step in range(5)]
    (remark,) = leftovers.clear(ran(weights, []), 0.0)
    assert remark.endswith("(1 file) and 2 more")
