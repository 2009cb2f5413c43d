# SPDX-License-Identifier: Apache-2.0
"""Nodes that share no storage: checkpoints lie on the first one's, and are resumed by all."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from deepytorch.recipes.base import file_transfer
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process, on_main, together
from deepytorch.recipes.data import class_images
from deepytorch.recipes.data.class_images import made_in
from deepytorch.recipes.runner import checkpoint
from deepytorch.recipes.runner.checkpoint import Written
from deepytorch_core.testing import spawn_ranks

# Rank 0 is a node, ranks 1 and 2 another one, and rank 3 sees what rank 0 sees.
NODE_OF = (0, 1, 1, 0)
RANKS = len(NODE_OF)


class Parts:
    """Saves a part of each rank, in a folder below, and reads everybody's."""

    resizes = True

    def __init__(self, rank: int) -> None:
        self.sizes = [(137 * member + 60) % 300 for member in range(RANKS)]
        self.found: list[bytes] = []
        self.rank = rank

    @staticmethod
    def part(rank: int, size: int) -> bytes:
        return bytes((rank + 7 * place) % 256 for place in range(size))

    def save(self, folder: Path, rank: int) -> None:
        (folder / "engine").mkdir(exist_ok=True)
        (folder / "engine" / f"part-{rank}").write_bytes(self.part(rank, self.sizes[rank]))

    def load(self, folder: Path, rank: int, saved_by: int) -> None:
        self.found = [
            (folder / "engine" / f"part-{saver}").read_bytes() for saver in range(saved_by)
        ]

    def is_whole(self) -> bool:
        return self.found == [self.part(rank, size) for rank, size in enumerate(self.sizes)]


def save(rank: int, folder: Path, step: int) -> str | None:
    return checkpoint.save(
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
    state = checkpoint.load(engine, path, process, facts={"recipe": "parts"})  # type: ignore[arg-type]
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
        patch.setattr(file_transfer, "CHUNK_BYTES", 100)
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
    write = file_transfer._write

    def refusing(path: Path, begin: int, data: torch.Tensor) -> str | None:
        path.mkdir(parents=True, exist_ok=True)
        return write(path, begin, data)

    with pytest.MonkeyPatch.context() as patch:
        if where == "sent":  # a file that can't be written to rank 0's disk
            patch.setattr(file_transfer, "_write", refusing)
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
        patch.setattr(file_transfer, "spread", None)
        assert load(rank, mine / name)


def test_a_copied_checkpoint_is_read_where_it_lies(tmp_path: Path) -> None:
    spawn_ranks(_copied, RANKS, str(tmp_path), backend="gloo")


def _resumed(rank: int, _: int, folder: str) -> None:
    process = Process(rank, RANKS, torch.device("cpu"))
    options = RunOptions(name="r", output_dir=f"{folder}/node{NODE_OF[rank]}")
    assert checkpoint.find_on_all("auto", options, process) is None
    run = "r-20260101-000000/checkpoints"
    torch.distributed.barrier()
    if rank in (0, 1):
        later = Path(options.output_dir) / run / f"step-{4 + rank:08d}"
        later.mkdir(parents=True)
        (later / "manifest.json").write_text("{}")
    torch.distributed.barrier()
    with pytest.raises(RecipeError, match="step-00000005 is on .*, with rank 1, and .* has none"):
        checkpoint.find_on_all("auto", options, process)
    torch.distributed.barrier()
    if rank == 0:
        (Path(options.output_dir) / run / "step-00000004").rename(
            Path(options.output_dir) / run / "step-00000006"
        )
    torch.distributed.barrier()
    found = checkpoint.find_on_all("auto", options, process)
    assert str(found) == f"{folder}/node0/{run}/step-00000006"
    with pytest.raises(RecipeError, match="resume=nowhere is no checkpoint"):
        checkpoint.find_on_all("nowhere", options, process)


def test_a_later_checkpoint_on_another_node_is_not_forgotten(tmp_path: Path) -> None:
    spawn_ranks(_resumed, RANKS, str(tmp_path), backend="gloo")


def _agreeing(rank: int, world_size: int) -> None:
    process = Process(rank, world_size, torch.device("cpu"))

    def read() -> int:
        if rank == 1:
            raise FileNotFoundError("no data.json")
        return rank

    def fail(error: Exception) -> None:
        raise error

    assert together(lambda: rank, process) == rank
    with pytest.raises(RecipeError, match="^rank 1: no data.json$"):
        together(read, process)
    with pytest.raises(RecipeError, match="^too few$"):
        together(lambda: fail(RecipeError("too few")), process)
    kind, text = (PermissionError, "^no$") if rank == 0 else (RecipeError, "^rank 0: Perm.*: no$")
    with pytest.raises(kind, match=text):
        on_main(lambda: fail(PermissionError("no")), process)


def test_what_one_rank_cannot_do_is_one_error_on_all() -> None:
    spawn_ranks(_agreeing, 3, backend="gloo")


def _class_images(rank: int, _: int, folder: str) -> None:
    process = Process(rank, RANKS, torch.device("cpu"))
    made: list[int] = []

    def make(number: int) -> Image.Image:
        made.append(number)
        return Image.new("RGB", (2, 2), (number, 0, 0))

    mine = Path(folder) / f"node{NODE_OF[rank]}" / "class"
    files = made_in(mine, 5, make, process)
    assert [Image.open(path).getpixel((0, 0))[0] for path in files] == [0, 1, 2, 3, 4]
    everything: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(everything, made)
    assert everything == [[0, 2, 4], [0, 2, 4], [1, 3], [1, 3]]
    with pytest.MonkeyPatch.context() as patch:  # others' folders, which nobody may write to
        patch.delattr(class_images, "first_beside")
        assert len(made_in(mine, 5, make, process)) == 5
    assert made == everything[rank]
    assert len(files) == len(list(mine.iterdir()))


def test_each_node_has_all_images_of_the_class(tmp_path: Path) -> None:
    spawn_ranks(_class_images, RANKS, str(tmp_path), backend="gloo")
