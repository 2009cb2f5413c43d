# SPDX-License-Identifier: Apache-2.0
"""Tests of Ctrl-C with nothing to save, of a second one, and of the end of another rank."""

import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepytorch.recipes import bert_mlm
from deepytorch.recipes.base import run
from deepytorch.recipes.base.run import StepProgress
from deepytorch.recipes.runner import loop, signals
from deepytorch.recipes.runner.signals import Endings

# The texts are this file's lines: to encode the usual ones takes longer than all else in a run.
TINY = [
    *(f"data={__file__}", "device=cpu", "hidden_size=32", "num_layers=1", "num_heads=2"),
    *("max_length=32", "steps=9"),
]
GONE = (
    "all_reduce #57 (2 x float32, sum) of group 0 on rank 0: rank 1 has left the group "
    "(destroy_process_group, or its program's end) and will not come"
)


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def train(output_dir, *words):
    return bert_mlm.main([*TINY, f"output_dir={output_dir}", *words])


def test_ctrl_c_before_training_is_a_line(tmp_path, monkeypatch, capfd):
    def prepare(config, process):
        press()
        raise AssertionError("it went on")

    monkeypatch.setattr(bert_mlm, "prepare", prepare)
    before = signal.getsignal(signal.SIGINT)
    assert train(tmp_path) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == "bert_mlm: ended by Ctrl-C; there was nothing to save\n"
    assert not any(tmp_path.iterdir())
    dist.destroy_process_group()  # the process would end here


def test_ctrl_c_ends_a_comparison_with_a_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(StepProgress, "update", lambda self, step, text: press())
    words = ["save_every=1", "evaluate_every=2", "backend=stock", "trackers=wandb", "dropout=0"]
    assert train(tmp_path, "--compare", *words) == 130
    said = capfd.readouterr()
    assert "bert_mlm: ended by Ctrl-C; there was nothing to save\n" in said.err
    assert "Traceback" not in said.err
    given = "backend=stock, save_every=1, evaluate_every=2, trackers=wandb"
    assert f"left out    {given}: a comparison trains both backends" in said.out
    dist.destroy_process_group()


def test_only_settings_that_were_given_are_said_to_be_left_out(capsys):
    usual = bert_mlm.Config()
    loop._say_left_out(bert_mlm.Config(steps=3, rounding_arm=True), usual)
    assert capsys.readouterr().out == ""


@pytest.fixture
def ends(monkeypatch):
    """Record what `os._exit` is called with, in place of ending this process; and a wait for it."""
    statuses, came = [], threading.Event()
    own, really_end = os.getpid(), os._exit

    def end(status):
        if os.getpid() != own:
            really_end(status)
        statuses.append(status)
        came.set()

    monkeypatch.setattr(signals.os, "_exit", end)
    return SimpleNamespace(statuses=statuses, came=came)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_one_ends_at_once(monkeypatch, capfd, ends, second):
    monkeypatch.setattr(signals, "_ONE_PRESS_S", -1.0)
    endings = Endings("r")
    with endings.of_ctrl_c(), endings.noted():
        press()
        assert endings.asked
        assert endings.status == 130
        press(second)
        assert ends.came.wait(60)
    assert ends.statuses == [130]
    assert capfd.readouterr().err == (
        "r: Ctrl-C: ends after this step, with a checkpoint; a second Ctrl-C ends at once\n"
        "r: ended at once by a second Ctrl-C: what was not saved yet is lost\n"
    )


def test_one_that_the_launcher_repeats_and_sigterm_alone_end_nothing(monkeypatch, ends):
    monkeypatch.setattr(signals, "_ONE_PRESS_S", 3600.0)
    told = Endings("r")
    with told.of_ctrl_c(), told.noted():
        press(signal.SIGTERM)
        press(signal.SIGTERM)
        assert (told.asked, told.status) == (True, 0)
        press()
        press()
        press(signal.SIGTERM)
        assert told.status == 130
    assert ends.statuses == []


def test_before_training_the_second_one_ends_what_holds_up_the_first(monkeypatch, capfd, ends):
    monkeypatch.setattr(signals, "_ONE_PRESS_S", -1.0)
    with Endings("r").of_ctrl_c():
        with pytest.raises(KeyboardInterrupt):
            press()
        press()
        assert ends.came.wait(60)
    assert "r: ended at once by a second Ctrl-C" in capfd.readouterr().err


def test_workers_leave_it_to_their_rank(monkeypatch, ends):
    monkeypatch.setattr(signals, "_ONE_PRESS_S", -1.0)
    endings = Endings("r")
    with endings.of_ctrl_c(), endings.noted():
        worker = multiprocessing.get_context("fork").Process(target=lambda: [press(), press()])
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0
        assert not endings.asked
    assert ends.statuses == []


def test_where_it_is_ignored_it_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        endings = Endings("r")
        with endings.of_ctrl_c(), endings.noted():
            press()
        assert not endings.asked
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("error", "which"),
    [
        (dist.DistBackendError(GONE), "rank 1"),
        (dist.DistBackendError("barrier #3 of group 0 on rank 0: rank 12 (pid 7) died"), "rank 12"),
        (
            RuntimeError("[gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
            "another rank",
        ),
    ],
)
def test_another_ranks_end_is_a_line(tmp_path, monkeypatch, capsys, error, which):
    def fail(*_):
        raise error

    monkeypatch.setattr(loop, "train", fail)
    assert train(tmp_path) == 1
    said = capsys.readouterr().err
    assert said == (
        f"bert_mlm: rank 0 ends because {which} has ended: its message is above; if it has none, "
        "see the kernel's log\n"
    )
    dist.destroy_process_group()


def test_other_errors_of_a_backend_keep_their_traceback(monkeypatch):
    for error in (torch.OutOfMemoryError("out of memory"), dist.DistBackendError("timed out")):
        with pytest.raises(type(error)):
            run.say_gone("r", error)
    monkeypatch.setattr(run.config, "current", lambda: SimpleNamespace(debug=True))
    with pytest.raises(dist.DistBackendError):
        run.say_gone("r", dist.DistBackendError(GONE))
