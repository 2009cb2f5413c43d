# SPDX-License-Identifier: Apache-2.0
"""Nodes that share no storage: checkpoints lie on the first one's, and are resumed by all."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepytorch.recipes import _checkpoint, _travel
from deepytorch.recipes._checkpoint import Written
from deepytorch.recipes._config import RecipeError
from deepytorch.recipes._run import Process
from deepytorch_core.testing import spawn_ranks

# Rank 0 is a node, ranks 1 and 2 another one, and rank 3 sees what rank 0 sees.
NODE_OF = (0, 1, 1, 0)
RANKS = len(NODE_OF)


class Parts:
    """Saves a part of each rank, in a folder below, and reads everybody's."""

    resizes = True

    def __init__(self, rank: int) -> None:
        self.sizes = [(137 * one + 60) % 300 for one in range(RANKS)]
        self.found: list[bytes] = []
        self.rank = rank

    @staticmethod
    def part(rank: int, size: int) -> bytes:
        return bytes((rank + 7 * one) % 256 for one in range(size))

    def save(self, folder: Path, rank: int) -> None:
        (folder / "engine").mkdir(exist_ok=True)
        (folder / "engine" / f"part-{rank}").write_bytes(self.part(rank, self.sizes[rank]))

    def load(self, folder: Path, rank: int, saved_by: int) -> None:
        self.found = [(folder / "engine" / f"part-{one}").read_bytes() for one in range(saved_by)]

    def is_whole(self) -> bool:
        return self.found == [self.part(rank, size) for rank, size in enumerate(self.sizes)]


def save(rank: int, folder: Path, step: int) -> str | None:
    return _checkpoint.save(
        Parts(rank),  # type: ignore[arg-type]
        {"step": step, "own": torch.arange(rank + 1)},
        folder,
        Process(rank, RANKS, torch.device("cpu")),
        keep=2,
        facts={"recipe": "parts"},
        written=Written(RANKS),
    )


def load(rank: int, path: Path) -> bool:
    engine = Parts(rank)
    process = Process(rank, RANKS, torch.device("cpu"))
    state = _checkpoint.load(engine, path, process, facts={"recipe": "parts"})  # type: ignore[arg-type]
    return engine.is_whole() and torch.equal(state["own"], torch.arange(rank + 1))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _apart(rank: int, _: int, folder: str) -> None:
    mine = Path(folder) / f"node{NODE_OF[rank]}" / "checkpoints"
    stale = mine / "step-00000004.partial-1" / "engine" / "part-9"
    if rank == 1:
        stale.parent.mkdir(parents=True)
        stale.write_bytes(b"of a run that was killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_travel, "CHUNK_BYTES", 100)
        assert save(rank, mine, 4) is None
        assert load(rank, mine / "step-00000004")
    if rank == 1:
        assert not files(mine)
    if rank == 0:
        assert len(files(mine)) == 2 * RANKS + 1
        assert not [path for path in files(mine) if path.name == "part-9"]
        assert [path.name for path in mine.iterdir()] == ["step-00000004"]


def test_a_checkpoint_of_nodes_without_shared_storage_lies_on_the_first(tmp_path: Path) -> None:
    spawn_ranks(_apart, RANKS, str(tmp_path), backend="gloo")


def _failing(rank: int, _: int, folder: str, where: str) -> None:
    node = NODE_OF[rank]
    mine = Path(folder) / f"node{node}" / "checkpoints"
    receive = _travel._receive

    def refusing(place: Path, announced: Any, source: int, process: Process) -> str | None:
        (place / announced[0][0]).mkdir(parents=True)
        return receive(place, announced, source, process)

    with pytest.MonkeyPatch.context() as patch:
        if where == "sent":  # a file that can't be written to rank 0's disk
            patch.setattr(_travel, "_receive", refusing)
        elif rank == 2:
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text("no folder")
        problem = save(rank, mine, 4)
    assert problem is not None
    assert ("Is a directory" if where == "sent" else "rank ") in problem


@pytest.mark.parametrize("where", ["made", "sent"])
def test_what_cannot_be_written_somewhere_is_said_everywhere(tmp_path: Path, where: str) -> None:
    spawn_ranks(_failing, RANKS, str(tmp_path), where, backend="gloo")
    assert [path.name for path in files(tmp_path)] == ["checkpoints"] * (where == "made")


def _damaged(rank: int, _: int, folder: str) -> None:
    mine = Path(folder) / f"node{NODE_OF[rank]}" / "checkpoints"
    assert save(rank, mine, 4) is None
    if rank == 0:
        (mine / "step-00000004" / "engine" / "part-2").write_bytes(b"damaged")
    with pytest.raises(RecipeError, match="part-2 is not what was written"):
        load(rank, mine / "step-00000004")
    if rank == 1:
        assert not files(mine)


def test_a_damaged_checkpoint_is_one_on_every_node(tmp_path: Path) -> None:
    spawn_ranks(_damaged, RANKS, str(tmp_path), backend="gloo")


def _copied(rank: int, _: int, folder: str) -> None:
    """Somebody has copied the checkpoint to the other node."""
    mine, first = (Path(folder) / f"node{node}" / "checkpoints" for node in (NODE_OF[rank], 0))
    assert save(rank, mine, 4) is None
    name = "step-00000004"
    if rank == 1:
        shutil.copytree(first / name, mine / name)
    torch.distributed.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_travel, "spread", None)
        assert load(rank, mine / name)


def test_a_copied_checkpoint_is_read_where_it_lies(tmp_path: Path) -> None:
    spawn_ranks(_copied, RANKS, str(tmp_path), backend="gloo")
