"""Output that we print or write by the way never ends a training: it is tried once, then left."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepytorch_core.base import console
from deepytorch_core.c10d import activation
from deepytorch_core.report import summary
from deepytorch_core.testing import rank_store, spawn_ranks

SECONDS = 30


def train(rank: int, world_size: int, name: str) -> list[Any]:
    """Operations of all kinds, and what came of them."""
    found: list[Any] = []
    dist.init_process_group("gloo", store=rank_store(name), rank=rank, world_size=world_size)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    dist.all_reduce(ones, async_op=True).wait()
    found.append(ones.tolist())
    many = torch.arange(30000.0)
    dist.all_reduce(many, group=dist.new_group(list(range(world_size))))
    found.append(many.sum().item())
    received = torch.zeros(2)
    if rank == 0:
        dist.send(torch.full((2,), 7.0), 1)
    elif rank == 1:
        dist.recv(received, 0)
        found.append(received.tolist())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step + rank))).sum().backward()
        optimizer.step()
    found.append(model.module.weight.detach().sum().item())
    found.append(_text(str(summary.report())))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _text(said: str) -> bool:
    return "collectives" in said


def full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


def nobody_reads() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 2)


def nobody_reads_and_that_kills() -> None:
    nobody_reads()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def nobody_reads_and_that_is_handled() -> None:
    nobody_reads()
    signal.signal(signal.SIGPIPE, lambda *_: os._exit(77))


def closed() -> None:
    os.close(2)
    sys.stderr = sys.__stderr__ = None  # type: ignore[assignment,misc]


class Refuses:
    """A stream of the program's own."""

    def write(self, text: str) -> int:
        raise RuntimeError(text)

    def flush(self) -> None:
        raise RuntimeError("flush")


def refuses() -> None:
    sys.stderr = Refuses()  # type: ignore[assignment]


def no_proc() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    clone_new_ns, private_all, detach = 0x00020000, (1 << 18) | (1 << 14), 2
    if (
        libc.unshare(clone_new_ns)
        or libc.mount(None, b"/", None, private_all, None)
        or libc.umount2(b"/proc", detach)
    ):
        raise PermissionError(os.strerror(ctypes.get_errno()))
    assert not Path("/proc/self").exists()


def no_place_for_a_profile() -> None:
    os.environ["DEEPYTORCH_PROFILE"] = "/proc/none/profile.json"  # noqa: TID251


def no_place_for_files() -> None:
    nowhere = Path("/proc/none")
    for name in ("DEEPYTORCH_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
        os.environ[name] = str(nowhere / name)  # noqa: TID251


def no_file_may_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


ODDITIES: list[Callable[[], None]] = [
    *(full, nobody_reads, nobody_reads_and_that_kills, nobody_reads_and_that_is_handled),
    *(closed, refuses, no_proc, no_place_for_a_profile, no_place_for_files, no_file_may_grow),
]


def in_odd_surroundings(rank: int, world_size: int, number: int) -> Any:
    try:
        ODDITIES[number]()
    except PermissionError as error:
        return str(error)
    activation.activate()
    return [train(rank, world_size, f"round {again}") for again in range(2)]


def as_stock(rank: int, world_size: int) -> Any:
    return [train(rank, world_size, f"stock {again}") for again in range(2)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return spawn_ranks(as_stock, 2)


# The others are siblings of these.
IN_SHORT = {full, closed, refuses, no_place_for_a_profile}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, id=oddity.__name__, marks=[pytest.mark.extended] * (oddity not in IN_SHORT)
        )
        for number, oddity in enumerate(ODDITIES)
    ],
)
def test_a_training_goes_on(number: int, expected: list[Any]) -> None:
    found = spawn_ranks(in_odd_surroundings, 2, number, fresh=True)
    if isinstance(found[0], str):
        pytest.skip(f"this system does not let a test do that: {found[0]}")
    assert found == expected


def says(program: str, redirection: str) -> tuple[int, str]:
    """Exit status and output of a Python program that imports no torch."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout


SAY = "from deepytorch_core.base.console import say; say('one'); say('two'); print('done')"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2>&- <&-", "2>/dev/null"])
def test_the_exit_status_is_the_programs(redirection: str) -> None:
    # The interpreter writes the rest of stderr's buffer at its end: status 120 if it can't.
    assert says(SAY, redirection) == (0, "done\n")


def test_a_file_that_took_the_number_of_stderr_is_left_alone(tmp_path: Path) -> None:
    # Native code writes to the number.
    program = (
        f"file = open({str(tmp_path / 'own')!r}, 'w'); assert file.fileno() == 2\n"
        "import threading\n"
        "from deepytorch_core import _core\n"
        "class Store(dict):\n"
        "    def set(self, key, value): self[key] = value\n"
        "    def get(self, key, timeout_s): return super().get(key)\n"
        "store = Store()\n"
        "def rank(number):\n"
        "    made = _core.Communicator(store, number, 2, name='odd', tune='auto', profile=BAD)\n"
        "    data = bytearray(1 << 20)\n"
        "    made.all_reduce('float32', 'sum', data, data)\n"
        "    made.close()\n"
        "ranks = [threading.Thread(target=rank, args=(each,)) for each in range(2)]\n"
        "[each.start() for each in ranks]; [each.join() for each in ranks]\n"
        "file.write('mine'); print('done')\n"
    )
    bad = tmp_path / "profile.json"
    bad.write_text("{")
    found = says(f"BAD = {str(bad)!r}\n{program}", "2>&-")
    assert found == (0, "done\n")
    assert (tmp_path / "own").read_text() == "mine"


class Counting(Refuses):
    tries = 0

    def write(self, text: str) -> int:
        Counting.tries += 1
        raise OSError("full")


def test_one_try_and_then_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_given_up", None)
    monkeypatch.setattr(sys, "stderr", Counting())
    for _ in range(3):
        console.say("a line")
    assert Counting.tries == 1
    said: list[str] = []

    class Stream(Refuses):
        def write(self, text: str) -> int:
            said.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Stream())
    console.say("another stream")
    assert said == ["deepytorch: another stream\n"]
