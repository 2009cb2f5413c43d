"""Plants hangs in scripts from outside and counts how often the verdict names the right rank.

    python tests/faults/hangs.py --count 100 --json build/hangs.jsonl
    python tests/faults/hangs.py --device cuda --how delegated --jobs 6 --count 36
    python tests/faults/hangs.py --scripts third-party --count 20

The verdict is what `deepytorch report --hang --json` prints, a command that is told nothing but to
look. What was planted, and where, is known here alone. A third of the hangs or more is in
operations that the stock backend carries out. On GPUs, one for each of two ranks, that is NCCL.
Every other hang is planted in a script of a package that others wrote (third_party.py); those run
on CPUs alone.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import third_party
from planting import SETTLE_S, NotReadyError, ask, await_files, end, launch

SCRIPT = Path(__file__).with_name("planted_script.py")
RANKS = {"cpu": 3, "cuda": 2}
_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17


@dataclass(frozen=True)
class Plant:
    """One way to hang: `lines` at a `place` of the script, for the culprit from step 40 on, or what
    `act` does to its process.

    `kinds` are the verdicts that are right, `named` must be in the sentence. The `culprits` count
    from the last rank if negative; any rank where there are none. Who is to be blamed is the
    culprit, or any rank where `blames_all`. It is `only` for operations carried out so, and not
    for GPUs unless `on_device`.
    """

    name: str
    kinds: tuple[str, ...]
    place: str = ""
    lines: str = ""
    act: Callable[[int], Callable[[], None]] | None = None
    culprits: tuple[int, ...] = ()
    blames_all: bool = False
    named: str = ""
    only: str = ""
    on_device: bool = True

    def chosen_culprit(self, ranks: int, chance: random.Random) -> int:
        return chance.choice(self.culprits or tuple(range(ranks))) % ranks


@dataclass(frozen=True)
class Job:
    """How the script is run: on what, and who carries its operations out."""

    device: str
    how: str

    @property
    def ranks(self) -> int:
        return RANKS[self.device]


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
        culprits=(-2, -1),
        named="time.sleep",
    ),
    Plant(
        "two groups in crossed order",
        ("crossed", "mismatch"),
        "between",
        "dist.barrier(); share(torch.zeros(16), pair)",
        culprits=(-2, -1),
        blames_all=True,
        named="rank",
        on_device=False,  # there the host does not wait for a broadcast: nothing is crossed
    ),
    Plant(
        "another operation",
        ("mismatch",),
        "before",
        "dist.broadcast(parameter.grad, 0, group=group)",
        only="delegated",
        named="broadcast",
        on_device=False,  # NCCL may go on, with wrong numbers: it need not hang
    ),
)


def run_one(plant: Plant, job: Job, culprit: int, delay_s: float) -> dict[str, Any]:
    """Starts a job, plants, asks, ends the job: what was planted and what was said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = start(edited(plant, culprit), job, folder)
        undo: Callable[[], None] = lambda: None  # noqa: E731
        try:
            ready = [folder / f"ready{rank}" for rank in range(job.ranks)]
            await_files(ready, folder, processes)
            pids = [int(file.read_text()) for file in ready]
            time.sleep(delay_s)
            if plant.act is not None:
                undo = plant.act(pids[culprit])
            else:
                await_files([folder / PLANTED], folder, processes)
            time.sleep(SETTLE_S)
            asked = time.monotonic()
            found = ask(pids[0] if culprit else pids[1])
            took_s = time.monotonic() - asked
        finally:
            undo()
            end(processes)
    verdict = found["verdict"]
    blamed = set(verdict["ranks"])
    right = (
        verdict["kind"] in plant.kinds
        and bool(blamed)
        and (plant.blames_all or blamed == {culprit})
        and plant.named in verdict["sentence"]
    )
    return {
        "plant": plant.name,
        "device": job.device,
        "how": job.how,
        "script": SCRIPT.name,
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
                f'{indent}    open(os.path.join(sys.argv[1], "{PLANTED}"), "w").write("1")',
                *textwrap.indent(plant.lines, indent + "    ").split("\n"),
            ]
    text = "\n".join(lines) + "\n"
    return text.replace("lock = threading.Lock()", COUNTER + "lock = threading.Lock()", 1).replace(
        "        if step == 20:", "        steps.number = step\n        if step == 20:", 1
    )


PLANTED = "planted"  # a file that says: the culprit is there

COUNTER = """class steps:
    number = 0

    def reached(number):
        return steps.number >= number


"""


# All tensors live on the rank's GPU then.
ON_GPU = """    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(f"cuda:{torch.cuda.current_device()}")
"""


def start(script: str, job: Job, folder: Path) -> list[subprocess.Popen[bytes]]:
    path = folder / "train.py"
    if job.device == "cuda":
        script = script.replace("def main():\n", "def main():\n" + ON_GPU, 1)
    if job.how == "delegated":
        # A group of GPUs alone: its barrier is NCCL's, too.
        backend = "cuda:deepytorch" if job.device == "cuda" else "deepytorch"
        script = script.replace("init_process_group(", f'init_process_group("{backend}", ', 1)
    path.write_text("import deepytorch\n" + script)
    collectives = "stock" if job.how == "delegated" else "native"
    return launch(path, folder, job.ranks, {"DEEPYTORCH_COLLECTIVES": collectives})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=sorted(RANKS), default="cpu")
    parser.add_argument("--scripts", choices=["ours", "third-party", "all"], default=None)
    parser.add_argument("--how", choices=["native", "delegated"], action="append")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--limit-s", type=float, default=None, help="begin none after so long")
    parser.add_argument("--json", type=Path, default=Path("build/hangs.jsonl"))
    options = parser.parse_args()
    if options.device == "cuda" and (found := num_gpus()) < RANKS["cuda"]:
        sys.exit(f"--device cuda needs {RANKS['cuda']} GPUs, found {found}")
    options.scripts = options.scripts or ("all" if options.device == "cpu" else "ours")
    if options.scripts != "ours" and options.device != "cpu":
        sys.exit("--scripts: what others wrote is edited to run on CPUs")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    wrong = done = 0
    with open(options.json, "w") as file:
        for result in results(options):
            done += 1
            wrong += not result["right"]
            file.write(json.dumps(result) + "\n")
            file.flush()
            mark = "right" if result["right"] else "WRONG"
            what = f"{result['plant']}, {result['how']}, {result['script']}"
            print(f"{done}/{options.count} {mark}: {what}: {result['sentence']}", flush=True)
    print(f"{done - wrong} of {done} verdicts are right: {options.json}")
    sys.exit(bool(wrong) or done == 0)


def results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was planted and said, as it comes."""
    chance = random.Random(options.seed)
    deadline = math.inf if options.limit_s is None else time.monotonic() + options.limit_s
    hows = options.how or ["native", "delegated"]
    sources = []
    if options.scripts != "third-party":
        sources.append(in_our_script(options.device, hows, chance))
    if options.scripts != "ours":
        sources.append(in_scripts_of_others(hows, chance))
    chosen = [next(sources[number % len(sources)]) for number in range(options.count)]

    def planted(case: tuple[str, Callable[[], dict[str, Any]]]) -> dict[str, Any] | None:
        name, plant = case
        if time.monotonic() > deadline:
            return None
        for _ in range(2):
            try:
                return plant()
            except NotReadyError as error:
                print(f"not started: {error}", flush=True)
            except PermissionError as error:
                print(f"not planted: {name}: {error}", flush=True)
                break
        return None

    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(planted, case) for case in chosen]):
            result = future.result()
            if result is not None:
                yield result


def in_our_script(
    device: str, hows: list[str], chance: random.Random
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The plants in turn, without end: how each is called, and what plants it."""
    cases = [
        (plant, Job(device, how))
        for plant, how in itertools.product(PLANTS, hows)
        if plant.only in ("", how) and (plant.on_device or device == "cpu")
    ]
    for plant, job in itertools.cycle(cases):
        culprit, delay_s = plant.chosen_culprit(job.ranks, chance), chance.uniform(0.2, 1)
        yield plant.name, partial(run_one, plant, job, culprit, delay_s)


def in_scripts_of_others(
    hows: list[str], chance: random.Random
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The same in scripts of third_party.py."""
    for case in third_party.cases(hows, chance):
        yield case.edit.name, partial(third_party.run_one, case)


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
