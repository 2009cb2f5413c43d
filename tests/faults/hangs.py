"""Plants hangs in a script from outside and counts how often the verdict names the right rank.

    python tests/faults/hangs.py --count 100 --json build/hangs.jsonl

The verdict is what `deepytorch report --hang --json` prints, a command that is told nothing but to
look. What was planted, and where, is known here alone. A third of the hangs or more is in
operations that the stock backend carries out.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("planted_script.py")
RANKS = 3
_START_LIMIT_S = 90.0
_SETTLE_S = 2.5
_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17


@dataclass(frozen=True)
class Plant:
    """One way to hang: `lines` at a `place` of the script, for the culprit from step 40 on, or what
    `act` does to its process.

    `kinds` are the verdicts that are right, `blames` the ranks that may be blamed, and `named` must
    be in the sentence.
    """

    name: str
    kinds: tuple[str, ...]
    place: str = ""
    lines: str = ""
    act: Callable[[int], Callable[[], None]] | None = None
    culprits: tuple[int, ...] = tuple(range(RANKS))
    blames: Callable[[int], set[int]] = lambda culprit: {culprit}
    named: str = ""
    only: str = ""


class NotReadyError(RuntimeError):
    """The job did not start, so nothing was planted: its port was taken meanwhile, say."""


def stop(pid: int) -> Callable[[], None]:
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def attach(pid: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(_PTRACE_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)  # __WALL
    return lambda: libc.ptrace(_PTRACE_DETACH, pid, None, None)


ENTERED = ("never entered",)
PLANTS = (
    Plant("stopped by a signal", ("stopped",), act=stop, named="kill -CONT"),
    Plant("held by a debugger", ("stopped",), act=attach, named="debugger"),
    Plant("endless loop", ENTERED, "before", "while True: pass", named="while True"),
    Plant("loader sleeps", ENTERED, "loader", "time.sleep(100_000)", named="time.sleep"),
    Plant("lock is taken twice", ENTERED, "forward", "lock.acquire()", named="lock.acquire"),
    Plant("waits for a pipe", ENTERED, "after", "os.read(os.pipe()[0], 1)", named="os.read"),
    Plant(
        "a thread that never ends",
        ENTERED,
        "between",
        "waiter = threading.Thread(target=time.sleep, args=(100_000,), daemon=True); "
        "waiter.start(); waiter.join()",
        named="waiter",
    ),
    Plant("arithmetic that never ends", ENTERED, "forward", "10**10**9", named="10**10**9"),
    Plant(
        "never sends",
        ENTERED,
        "message",
        "time.sleep(100_000)",
        culprits=(0,),
        named="time.sleep",
    ),
    Plant(
        "holds up its pair",
        ENTERED,
        "pair",
        "time.sleep(100_000)",
        culprits=(RANKS - 2, RANKS - 1),
        named="time.sleep",
    ),
    Plant(
        "two groups in crossed order",
        ("crossed", "mismatch"),
        "between",
        "dist.barrier(); share(torch.zeros(16), pair)",
        culprits=(RANKS - 2, RANKS - 1),
        blames=lambda culprit: {0, *range(RANKS)},
        named="rank",
    ),
    Plant(
        "another operation",
        ("mismatch",),
        "before",
        "dist.broadcast(parameter.grad, 0, group=group)",
        only="delegated",
        named="broadcast",
    ),
)


def run_one(plant: Plant, how: str, culprit: int, delay_s: float) -> dict[str, Any]:
    """Starts a job, plants, asks, ends the job: what was planted and what was said."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start(edited(plant, culprit), how, Path(folder))
        undo: Callable[[], None] = lambda: None  # noqa: E731
        try:
            pids = await_ready(Path(folder), processes)
            time.sleep(delay_s)
            if plant.act is not None:
                undo = plant.act(pids[culprit])
            time.sleep(_SETTLE_S)
            asked = time.monotonic()
            found = ask(pids[0] if culprit else pids[1])
            took_s = time.monotonic() - asked
        finally:
            undo()
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
    verdict = found["verdict"]
    blamed = set(verdict["ranks"])
    right = (
        verdict["kind"] in plant.kinds
        and bool(blamed)
        and blamed <= plant.blames(culprit)
        and plant.named in verdict["sentence"]
    )
    return {
        "plant": plant.name,
        "how": how,
        "culprit": culprit,
        "right": right,
        "kind": verdict["kind"],
        "blamed": sorted(blamed),
        "sentence": verdict["sentence"],
        "asked_s": round(took_s, 2),
    }


def edited(plant: Plant, culprit: int) -> str:
    """The script with the plant's lines in it."""
    source = SCRIPT.read_text()
    lines = []
    for line in source.splitlines():
        lines.append(line)
        if plant.place and line.strip() == f"# PLANT: {plant.place}":
            indent = line[: len(line) - len(line.lstrip())]
            condition = f"if dist.get_rank() == {culprit} and steps.reached(40):"
            lines += [
                indent + condition,
                *textwrap.indent(plant.lines, indent + "    ").split("\n"),
            ]
    text = "\n".join(lines) + "\n"
    return text.replace("lock = threading.Lock()", COUNTER + "lock = threading.Lock()", 1).replace(
        "        if step == 20:", "        steps.number = step\n        if step == 20:", 1
    )


COUNTER = """class steps:
    number = 0

    def reached(number):
        return steps.number >= number


"""


def start(script: str, how: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    path = folder / "train.py"
    if how == "delegated":
        script = script.replace("init_process_group(", 'init_process_group("deepytorch", ', 1)
    path.write_text("import deepytorch\n" + script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        environment = dict(
            os.environ,  # noqa: TID251
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(RANKS),
            LOCAL_WORLD_SIZE=str(RANKS),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            DEEPYTORCH_TUNE="off",
            DEEPYTORCH_LOG="error",
            DEEPYTORCH_COLLECTIVES="stock" if how == "delegated" else "native",
        )
        command = [sys.executable, str(path), str(folder)]
        log = open(folder / f"log{rank}", "wb")  # noqa: SIM115
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return processes


def await_ready(folder: Path, processes: list[subprocess.Popen[bytes]]) -> list[int]:
    deadline = time.monotonic() + _START_LIMIT_S
    files = [folder / f"ready{rank}" for rank in range(RANKS)]
    while not all(file.exists() and file.read_text() for file in files):
        if time.monotonic() > deadline or any(one.poll() is not None for one in processes):
            logs = "\n".join((folder / f"log{rank}").read_text() for rank in range(RANKS))
            raise NotReadyError(f"the script did not come to step 20:\n{logs}")
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def ask(pid: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "deepytorch.cli", "report", "--hang", "--json"]
    done = subprocess.run(
        [*command, "--pid", str(pid)], capture_output=True, text=True, timeout=120, check=True
    )
    (case,) = json.loads(done.stdout)
    found: dict[str, Any] = case
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("build/hangs.jsonl"))
    options = parser.parse_args()
    chance = random.Random(options.seed)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    cases = [
        (plant, how)
        for plant, how in itertools.product(PLANTS, ("native", "delegated"))
        if plant.only in ("", how)
    ]
    wrong = 0
    with open(options.json, "w") as file:
        for number in range(options.count):
            plant, how = cases[number % len(cases)]
            culprit = chance.choice(plant.culprits)
            delay_s = chance.uniform(0.2, 1.0)
            try:
                result = run_one(plant, how, culprit, delay_s)
            except NotReadyError as error:
                print(f"started once more: {str(error).splitlines()[-1]}")
                result = run_one(plant, how, culprit, delay_s)
            wrong += not result["right"]
            file.write(json.dumps(result) + "\n")
            file.flush()
            mark = "right" if result["right"] else "WRONG"
            print(f"{number + 1}/{options.count} {mark}: {plant.name}, {how}: {result['sentence']}")
    print(f"{options.count - wrong} of {options.count} verdicts are right: {options.json}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
