# SPDX-License-Identifier: Apache-2.0
"""Tests of runs whose files, data or processes fail: each says so, and little is lost."""

import contextlib
import glob
import multiprocessing
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from deepytorch.recipes import bert_mlm
from deepytorch.recipes.base.config import RankRecipeError, RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process, make_run_dir
from deepytorch.recipes.data.batches import EndlessBatches
from deepytorch.recipes.runner import checkpoint, loop
from deepytorch.recipes.runner.engines import Fsdp2Engine
from deepytorch.recipes.runner.log import RunLog
from deepytorch.recipes.runner.trainer import Trainer
from deepytorch_core.testing import spawn_ranks

# The texts are this file's lines: to encode the usual ones takes longer than all else in a run.
TINY = [
    *(f"data={__file__}", "device=cpu", "hidden_size=16", "num_layers=1", "num_heads=2"),
    "max_length=32",
    *("batch_size=2", "steps=2", "held_out=2"),
]


def train(output_dir, *words):
    return bert_mlm.main([*TINY, f"output_dir={output_dir}", *words])


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(28, "No space left on device"), marks=pytest.mark.extended),
        pytest.param(
            RuntimeError("[enforce fail] unexpected pos 64 vs 0"), marks=pytest.mark.extended
        ),
        SafetensorError("I/O error: No space left on device"),
    ],
)
def test_a_model_that_cannot_be_exported_is_kept(tmp_path, monkeypatch, capsys, error):
    def fail(model, tokenizer, path):
        raise error

    save_every = random.choice((0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(bert_mlm, "save_checkpoint", fail)
        assert train(tmp_path, f"save_every={save_every}") == 2
    torch.distributed.destroy_process_group()  # an error leaves that to the process's end
    (run_dir,) = tmp_path.iterdir()
    said = capsys.readouterr().err
    assert f"cannot write the trained model to {run_dir}: {error}. It is kept" in said
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000002"]

    # A copy is of no run, so it begins one; the path is relative to the working directory.
    copied = tmp_path / "copied"
    (run_dir / "checkpoints" / "step-00000002").rename(copied)
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "again", "resume=copied") == 0
    (run_dir,) = (tmp_path / "again").iterdir()
    assert (run_dir / "checkpoint" / "model.safetensors").is_file()


def test_a_run_that_has_taken_its_last_step_finishes(tmp_path, monkeypatch):
    told = []

    def tell_before(owner, name):
        original = getattr(owner, name)

        def telling(*arguments):
            told.append(name)
            os.kill(os.getpid(), signal.SIGTERM)
            return original(*arguments)

        monkeypatch.setattr(owner, name, telling)

    def end(number, frame):
        raise AssertionError("the training is lost")

    tell_before(Trainer, "evaluate")
    tell_before(bert_mlm, "save_checkpoint")
    before = signal.signal(signal.SIGTERM, end)
    try:
        assert train(tmp_path) == 0
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["evaluate", "save_checkpoint"]
    (run_dir,) = tmp_path.iterdir()
    assert (run_dir / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.parametrize("when", ["__init__", "add_scalar", "close"])
def test_a_full_disk_costs_the_scalars_alone(tmp_path, monkeypatch, capsys, when):
    def fail(self, *arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, when, fail)
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.write(step, loss=1.0, learning_rate=0.1)
    log.close()
    said = "scalars     no more of them: [Errno 28] No space left on device; training goes on\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("previous", "says"),
    [
        (0, "It is lost, since there is no checkpoint either (disk full): use save_every"),
        (4, "Mend that, then resume=run goes on after step 4"),
        (9, "It is kept as a checkpoint: mend that, then resume=run exports it"),
    ],
)
def test_what_is_left_on_a_full_disk_is_said(monkeypatch, previous, says):
    course = loop._Course("r", None, None, Path("run"), previous=previous)
    monkeypatch.setattr(course, "save", lambda step: "disk full")
    assert course.rescue(9) == says


def test_only_runs_of_the_very_name_are_continued(tmp_path):
    names = ["exp", "exp-big", "exp-20260101-000000", "e*p", "[exp]"]
    random.shuffle(names)
    made = {}
    for name in [name for name in names for _ in range(2)]:  # in one second they get numbers
        made[name] = make_run_dir(str(tmp_path), name) / "checkpoints" / "step-00000002"
        made[name].mkdir(parents=True)
    for name in names:
        found = checkpoint.find("auto", str(tmp_path), name)
        assert found == made[name], name


def test_a_file_is_no_folder_for_runs(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(RecipeError, match=r"^output_dir: .*/file is a file: name a folder"):
            make_run_dir(str(folder), "r")


def test_where_a_checkpoint_lies_says_whose_it_is(tmp_path, monkeypatch):
    path = tmp_path / "run" / "checkpoints" / "step-00000006"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(path.parent)
    for resume in (path.name, str(tmp_path / "link"), str(tmp_path / "run")):
        found = checkpoint.find(resume, "runs", "r")
        assert found == path
        assert checkpoint.run_of(found) == tmp_path / "run"
    assert checkpoint.run_of(path.parent / "abandoned" / path.name) is None


def batches_of(draw, num_workers):
    return EndlessBatches(
        64, draw, torch.stack, batch_size=2, rank=0, world_size=1, seed=1, num_workers=num_workers
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_the_rank_that_meets_a_bad_file_can_name_it(num_workers):
    def draw(index, epoch):
        raise RecipeError("a/05.png cannot be read as an image: it is cut off")

    with pytest.raises(RankRecipeError) as failure:
        next(batches_of(draw, num_workers))
    assert str(failure.value) == "a/05.png cannot be read as an image: it is cut off"


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of(pid):
    found = []
    for path in glob.iglob(f"/proc/{pid}/task/*/status"):
        with contextlib.suppress(OSError):  # the thread ended
            found.append(Path(path).read_text())
    return found


def lets_sigterm_in(thread):
    mask = int(re.search(r"SigBlk:\s*(\w+)", thread)[1], 16)
    return not mask & 1 << (signal.SIGTERM - 1)


def test_a_worker_lives_as_long_as_its_rank_needs_it(two_threads):
    batches = batches_of(lambda index, epoch: torch.tensor(index), 1)
    others = multiprocessing.active_children()
    next(batches)
    (worker,) = [child for child in multiprocessing.active_children() if child not in others]
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    for _ in range(40):
        next(batches)
    # torch has one of its own in there, and the one that waits for the signal lets it in.
    until = time.monotonic() + 60
    while sum(map(lets_sigterm_in, threads := threads_of(worker.pid))) != 1:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert len(threads) > 2
    worker.terminate()  # as Python does at its end
    worker.join(30)
    assert worker.exitcode == 0


class Net(nn.Module):
    """Blocks as a transformer has; no dimension is a multiple of two."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)]
        )


def load_what_one_rank_saved(rank, world_size, folder):
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    whole = {name: torch.randn_like(value) for name, value in Net().state_dict().items()}
    process = Process(rank, world_size, torch.device("cpu"))
    options = RunOptions(name="r", engine="fsdp2", backend="stock")
    engine = Fsdp2Engine(Net(), adamw, options, process)
    groups = engine.optimizer.state_dict()["param_groups"]
    moments = {
        number: {"step": torch.tensor(4.0), "exp_avg": 2 * value, "exp_avg_sq": value.square()}
        for number, value in enumerate(whole.values())
    }
    if rank == 0:
        state = {"model": whole, "optimizer": {"state": moments, "param_groups": groups}}
        torch.save(state, Path(folder) / "shard-0.pt")
    torch.distributed.barrier()
    engine.load(Path(folder), rank, 1)
    loaded = {name: value.full_tensor() for name, value in engine.model.state_dict().items()}
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    for number, parameter in enumerate(engine.model.parameters()):
        found = engine.optimizer.state[parameter]["exp_avg"].full_tensor()
        assert torch.equal(found, moments[number]["exp_avg"])
    return True


def test_more_ranks_go_on_with_what_one_has_sharded(tmp_path):
    assert spawn_ranks(load_what_one_rank_saved, 2, str(tmp_path)) == [True, True]
