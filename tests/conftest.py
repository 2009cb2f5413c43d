"""All tests share this: a repeatable hypothesis, and workers that end with the session."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.c10d import activation
from deepytorch_core.testing import close_idle_workers
from deepytorch_core.testing.emulation import Network
from deepytorch_core.testing.forked import ForkedProgram

# Examples are the same in every run, so a failure is everybody's failure.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("repeatable")

# Measuring takes time and writes to the user's cache: what tests it turns it on, also in workers.
os.environ.setdefault("DEEPYTORCH_TUNE", "off")  # noqa: TID251

# Tests are of single parts: their stock twins, too, would be trained accelerated. Whole programs
# are in processes of their own.
activation.leave_models_alone()

# torch asks the name server who 127.0.0.1 is, at both ends of every connection to a store. A
# question that gets lost takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")  # noqa: TID251

# A shell starts what runs in the background with Ctrl-C ignored, which children inherit: tests of
# Ctrl-C would wait for their limits.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Cycles of garbage are searched for rarely: among what torch and transformers consist of, that took
# a tenth of the time of tests that compile. Who tests that something goes collects it.
gc.set_threshold(50_000, 20, 20)

_SHARED_MEMORY = Path("/dev/shm")


def _our_segments() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.glob("*deepytorch*")}


def _deepspeeds_buffers() -> set[Path]:
    return set(_SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*"))


def _is_used(file: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if str(file) in (process / "maps").read_text():
                return True
            # Not mapped as long as it is being filled.
            if any(os.readlink(open_file) == str(file) for open_file in (process / "fd").iterdir()):
                return True
    return False


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the modules and the tests: they stay


@pytest.fixture(scope="module", autouse=True)
def what_earlier_modules_keep_is_not_searched() -> None:
    """Leave out what earlier modules keep: many tests collect garbage, and would look there."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def decisions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a test's code decides out of other tests' reports."""
    monkeypatch.setattr(decisions, "_made", [])


@pytest.fixture
def quiet_profile(tmp_path: Path) -> Iterator[Path]:
    """Keep the test's decisions in a file of its own, and say nothing of them."""
    before = config._current
    config.set_current(Options(profile=str(tmp_path / "profile.json"), log="error"))
    yield tmp_path / "profile.json"
    config.set_current(before)


@pytest.fixture(scope="session")
def deepspeeds_ranks() -> dict[str, Any]:
    """For `spawn_ranks`: ranks for DeepSpeed and what it is used with, each started anew.

    To import that takes longer than most trainings: who asks for the same gets forks of one
    process, which has.
    """
    modules = (
        *("deepspeed", "transformers.trainer", "transformers.models.llama.modeling_llama"),
        "deepspeed.runtime.zero.muon.muon_optimizer",  # of each engine, and torch's compiler by it
    )
    return {"fresh": True, "env": {"DS_ACCELERATOR": "cpu"}, "preload": modules}


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's ranks have imported torch when they start: most of a small one's time."""
    from deepytorch_core.bench import launch

    def fork(
        command: list[str], log: Path, env: dict[str, str], network: Network | None, node: int
    ) -> ForkedProgram:
        if network is None:
            return ForkedProgram(command, log, env)
        env = {**env, **network.environment(node)}
        return ForkedProgram(command, log, env, network.descriptor(node))

    monkeypatch.setattr(launch, "_program", fork)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> object:
    """Workers end with the session, killed ranks included, and leave no shared memory."""
    before, deepspeeds = _our_segments(), _deepspeeds_buffers()
    yield
    close_idle_workers()
    gc.collect()
    for buffer in _deepspeeds_buffers() - deepspeeds:
        if not _is_used(buffer):  # by another session's processes
            buffer.unlink(missing_ok=True)  # every DeepSpeed process on CPUs leaves one
    left = _our_segments() - before
    assert not left, f"left in {_SHARED_MEMORY}: {sorted(left)}"
