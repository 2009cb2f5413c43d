# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run that was killed or told to end goes on as if it had never stopped."""

import json
import os
import random
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepytorch.recipes import bert_mlm
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, StepProgress
from deepytorch.recipes.runner import checkpoint
from deepytorch.recipes.runner.optimizers import make_schedule
from deepytorch.recipes.runner.trainer import Trainer
from deepytorch_core.testing import spawn_ranks

STEPS = 12
OTHER_DATA = "data        other examples than the checkpoint was trained on"
# The texts are this file's lines: to encode the usual ones takes longer than all else in a run.
TINY = [
    *(f"data={__file__}", "device=cpu", "hidden_size=32", "num_layers=1", "num_heads=2"),
    *(
        "dropout=0.1",
        "max_length=32",
        "batch_size=2",
        f"steps={STEPS}",
        "save_every=3",
        "held_out=2",
    ),
]


def train(output_dir, *words):
    return bert_mlm.main([*TINY, f"output_dir={output_dir}", *words])


def only_run_dir(output_dir):
    (run_dir,) = output_dir.iterdir()
    return run_dir


def losses(run_dir):
    """{step: loss}; what a resumed run repeats replaces what was there."""
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars("train/loss")}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The losses of a run that nobody disturbed, and its last checkpoint."""
    output_dir = tmp_path_factory.mktemp("unbroken")
    assert train(output_dir) == 0
    run_dir = only_run_dir(output_dir)
    found = losses(run_dir)
    assert len(found) == STEPS
    return found, checkpoint.checkpoints(run_dir / "checkpoints")[-1]


def train_until_killed(rank, world_size, output_dir, last):
    """A run that is killed as it shows a step."""

    def update(self, step, text):
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in [*os.environ]:  # noqa: TID251
        if name.startswith(("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_")):
            del os.environ[name]  # noqa: TID251  as if nothing had launched it
    StepProgress.update = update
    train(output_dir)


def test_killed_run_goes_on_with_the_same_losses(unbroken, tmp_path, deepspeeds_ranks):
    expected, _ = unbroken
    last = random.randint(4, STEPS)
    killed = {**deepspeeds_ranks, "expect_dead": {0}}  # they have imported most of it
    assert spawn_ranks(train_until_killed, 1, tmp_path, last, **killed) == [None]
    run_dir = only_run_dir(tmp_path)
    assert train(tmp_path, "resume=auto") == 0
    assert only_run_dir(tmp_path) == run_dir
    assert (run_dir / "checkpoint" / "model.safetensors").is_file()
    resumed = losses(run_dir)
    assert resumed.keys() >= set(range((last - 1) // 3 * 3 + 1, STEPS + 1))
    assert resumed == {step: expected[step] for step in resumed}, f"killed after step {last}"


@pytest.mark.parametrize(
    ("number", "status"),
    [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.extended), (signal.SIGINT, 130)],
)
def test_told_to_end_it_saves_and_goes_on(unbroken, tmp_path, monkeypatch, capfd, number, status):
    expected, _ = unbroken
    update = StepProgress.update

    def told(self, step, text):
        update(self, step, text)
        if step == 5:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(StepProgress, "update", told)
        assert train(tmp_path) == status
    assert signal.getsignal(number) == before
    run_dir = only_run_dir(tmp_path)
    said = capfd.readouterr()
    assert "ended       after step 6" in said.out
    promised = "bert_mlm: Ctrl-C: ends after this step, with a checkpoint; a second Ctrl-C ends"
    assert (promised in said.err) == (number == signal.SIGINT)
    assert not (run_dir / "checkpoint").exists()
    assert train(tmp_path, f"resume={run_dir}") == 0
    assert losses(run_dir) == expected


def test_a_resumed_run_follows_its_own_options(unbroken, tmp_path, monkeypatch, capfd):
    path = tmp_path / "step-00000012"  # out of its run, it begins a run of its own
    shutil.copytree(unbroken[1], path)
    rate, decay = 10 ** random.uniform(-4, -2), random.random()
    used = []
    train_step = Trainer.step

    def step(self, micro_batches):
        (group,) = self.engine.optimizer.param_groups
        before = group["lr"]
        result = train_step(self, micro_batches)
        used.append((before, result.learning_rate, group["weight_decay"]))
        return result

    monkeypatch.setattr(Trainer, "step", step)
    words = (f"steps={STEPS + 3}", f"learning_rate={rate}", f"weight_decay={decay}")
    assert train(tmp_path / "runs", f"resume={path}", "warmup_steps=2", *words) == 0
    assert OTHER_DATA not in capfd.readouterr().out
    options = bert_mlm.Config(steps=STEPS + 3, warmup_steps=2)
    (factor,) = make_schedule(torch.optim.SGD([torch.zeros(())], lr=1.0), options).lr_lambdas
    expected = [rate * factor(done) for done in range(STEPS, STEPS + 3)]
    assert used == [(planned, planned, decay) for planned in expected]


def test_other_data_than_the_checkpoints_is_said(unbroken, tmp_path, capfd):
    """Here those that another seed leaves when it holds some out."""
    path = tmp_path / "step-00000012"
    shutil.copytree(unbroken[1], path)
    words = (f"resume={path}", f"steps={STEPS + 1}", "seed=1")
    assert train(tmp_path / "runs", *words) == 0
    assert OTHER_DATA in capfd.readouterr().out


def process(world_size=1):
    return Process(0, world_size, torch.device("cpu"))


@pytest.fixture
def one_rank(monkeypatch):
    """No process group: what all ranks would say is what this one says."""
    monkeypatch.setattr(checkpoint, "everyones", lambda problem, process: problem)
    monkeypatch.setattr(checkpoint, "on_main", lambda action, process: action())
    monkeypatch.setattr(checkpoint.dist, "get_node_local_rank", lambda fallback_rank: 0)


class FakeEngine:
    """Saves what it is given; fails as a full disk does when there is nothing."""

    resizes = False

    def __init__(self, weights=None):
        self.weights = weights

    def save(self, folder, rank):
        (folder / "half.pt").write_bytes(b"half")
        if self.weights is None:
            raise OSError(28, "No space left on device")
        torch.save(self.weights, folder / "state.pt")

    def load(self, folder, rank, saved_by):
        self.weights = torch.load(folder / "state.pt", weights_only=True)


def save(engine, step, folder, keep=1, previous=None):
    return checkpoint.save(
        engine,
        {"step": step},
        folder,
        process(),
        keep=keep,
        facts={"recipe": "r"},
        written=checkpoint.Written(1, 2, 3),
        previous=previous,
    )


def test_full_disk_keeps_the_old_checkpoint(one_rank, tmp_path):
    assert save(FakeEngine(torch.ones(2)), 3, tmp_path) is None
    assert "No space left" in save(FakeEngine(), 6, tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.name == "step-00000003"
    engine = FakeEngine()
    state = checkpoint.load(engine, kept, process(), facts={"recipe": "r"})
    assert state == {"step": 3}
    assert torch.equal(engine.weights, torch.ones(2))


def test_only_the_newest_are_kept(one_rank, tmp_path):
    for step in range(1, 6):
        assert save(FakeEngine(torch.ones(2)), step, tmp_path, keep=2) is None
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "step-00000004",
        "step-00000005",
    ]


def test_what_came_after_the_resumed_step_is_set_aside(one_rank, tmp_path):
    steps = sorted(random.sample(range(2, 50), 4))
    resumed, keep = random.choice(steps), random.randint(1, 5)
    for step in steps:
        assert save(FakeEngine(torch.zeros(2)), step, tmp_path, keep=5) is None
    new = resumed + random.randint(1, 9)
    assert "No space left" in save(FakeEngine(), new, tmp_path, keep=keep, previous=resumed)
    assert [int(path.name[5:]) for path in checkpoint.checkpoints(tmp_path)] == steps
    assert save(FakeEngine(torch.ones(2)), new, tmp_path, keep=keep, previous=resumed) is None
    left = [int(path.name[5:]) for path in checkpoint.checkpoints(tmp_path)]
    assert left == [*(step for step in steps if step <= resumed), new][-keep:]
    weights = torch.load(checkpoint.checkpoints(tmp_path)[-1] / "state.pt", weights_only=True)
    assert torch.equal(weights, torch.ones(2))
    aside = {int(path.name[5:]) for path in tmp_path.glob("abandoned/*")}
    assert aside == {step for step in steps if step > resumed}


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", b"\x80\x02}q", random.randbytes(99)],
    ids=["empty", "a cut archive", "a cut pickle", "anything"],
)
def test_what_a_rank_cannot_read_is_an_error_of_all(one_rank, tmp_path, monkeypatch, content):
    assert save(FakeEngine(torch.ones(2)), 3, tmp_path) is None
    (path,) = checkpoint.checkpoints(tmp_path)
    (path / "state.pt").write_bytes(content)
    # Only the first rank of each node looks at all files.
    monkeypatch.setattr(checkpoint.dist, "get_node_local_rank", lambda fallback_rank: 1)
    with pytest.raises(RecipeError, match="cannot resume from"):
        checkpoint.load(FakeEngine(), path, process(), facts={})


def test_nothing_is_loaded_where_another_rank_finds_damage(one_rank, tmp_path, monkeypatch):
    assert save(FakeEngine(torch.ones(2)), 3, tmp_path) is None
    (path,) = checkpoint.checkpoints(tmp_path)
    monkeypatch.setattr(checkpoint, "everyones", lambda problem, process: "rank 1: damaged")
    engine = FakeEngine()
    with pytest.raises(RecipeError, match="rank 1: damaged"):
        checkpoint.load(engine, path, process(), facts={})
    assert engine.weights is None


def damage(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: damage(path / "state.pt"), "state.pt is not what was written"),
        (lambda path: (path / "rank-0.pt").unlink(), "rank-0.pt is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
    ],
)
def test_damaged_checkpoints_are_refused(one_rank, unbroken, tmp_path, harm, message):
    path = tmp_path / "step-00000009"
    shutil.copytree(unbroken[1], path)
    harm(path)
    with pytest.raises(RecipeError, match=message):
        checkpoint.load(FakeEngine(), path, process(), facts={})


def test_other_ranks_recipe_or_engine_is_an_error(one_rank, unbroken):
    facts = json.loads((unbroken[1] / "manifest.json").read_text())
    assert facts["world_size"] == 1
    with pytest.raises(RecipeError, match="1 processes wrote it and this run has 4"):
        checkpoint.load(FakeEngine(), unbroken[1], process(4), facts={})
    with pytest.raises(RecipeError, match="written with recipe=bert_mlm, this is llama_sft"):
        checkpoint.load(FakeEngine(), unbroken[1], process(), facts={"recipe": "llama_sft"})


def test_resume_without_a_checkpoint_says_what_to_give(tmp_path):
    assert checkpoint.find("auto", str(tmp_path), "bert_mlm") is None
    with pytest.raises(RecipeError, match="is no checkpoint and no run with one"):
        checkpoint.find(str(tmp_path), str(tmp_path), "bert_mlm")


def test_weights_and_biases_gets_the_same_scalars(tmp_path, monkeypatch, capsys):
    logged, runs = [], []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            runs.append("finished")

    def init(**words):
        runs.append(words)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert train(tmp_path, "steps=2", "trackers=tensorboard, wandb") == 0
    run_dir = only_run_dir(tmp_path)
    assert runs[0]["name"] == run_dir.name
    assert runs[0]["config"]["steps"] == 2
    assert runs[-1] == "finished"
    assert {step: values["train/loss"] for step, values in logged if "train/loss" in values} == (
        pytest.approx(losses(run_dir))
    )
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train(tmp_path, "steps=2", "trackers=wandb") == 2
    assert "pip install wandb" in capsys.readouterr().err
    torch.distributed.destroy_process_group()  # an error leaves that to the process's end
