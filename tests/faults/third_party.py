"""Plants hangs in scripts that others wrote: copies of what packages bring, edited for one rank.

The copy lies in a temporary folder. It differs from what was distributed in a few lines that make
it run on CPUs, again and again (`Script.changes`), and in what is planted. Chance decides where
that is. A call stands before some of the statements inside its functions, which its syntax tree
tells. The calls are counted, and the culprit hangs at the one whose number was drawn. It says at
which line.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import os
import random
import re
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planting import SETTLE_S, NotReadyError, ask, end, launch, logs

PLACES = 8  # statements that are edited, of which the culprit hangs at one
_MOST_ARRIVALS = 6
_TRIES = 4
_ASK_LIMIT_S = 30.0
_ENDING_LIMIT_S = 15.0
_PLANT_LIMIT_S = 120.0
_PLANTED, _PASSED = "planted", "passed"


@dataclass(frozen=True)
class Script:
    """A file of a package. `changes` are made in it, each within a line."""

    package: str
    path: str
    ranks: int
    changes: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return f"{self.package}/{self.path}"

    def source(self) -> str:
        """Its text with the changes; raises NotReadyError where the package is another version."""
        found = importlib.util.find_spec(self.package)
        if found is None or found.origin is None:
            raise NotReadyError(f"there is no package {self.package}")
        text = (Path(found.origin).parent / self.path).read_text()
        for old, new in self.changes:
            if old not in text:
                raise NotReadyError(f"{self.name} has no {old!r}")
            text = text.replace(old, new)
        return text


_AGAIN = ('if __name__ == "__main__":\n    main()', 'if __name__ == "__main__":\n    again(main)')
_SCRIPTS = "test_utils/scripts/"
SCRIPTS = (
    Script(
        "accelerate",
        _SCRIPTS + "test_ops.py",
        3,
        (
            _AGAIN,
            ("state.destroy_process_group()", "pass"),
            ("state = PartialState()", "state = PartialState(cpu=True)"),
        ),
    ),
    Script(
        "accelerate",
        _SCRIPTS + "test_sync.py",
        3,
        (_AGAIN, ("state.destroy_process_group()", "pass")),
    ),
    Script(
        "accelerate",
        _SCRIPTS + "test_script.py",
        2,
        (_AGAIN, ("state.destroy_process_group()", "pass")),
    ),
    Script(
        "deepspeed",
        "compile/profilers/comm_profile.py",
        3,
        (
            ("import deepspeed.comm as dist", "import torch.distributed as dist"),
            ("deepspeed.init_distributed(dist_backend='nccl')", "begin()"),
            ("get_accelerator().Event(enable_timing=True)", "Clock()"),
            ("dist.ReduceOp.AVG", "dist.ReduceOp.SUM"),
            ("get_accelerator().current_device()", '"cpu"'),
            ("torch.bfloat16, 31", "torch.bfloat16, 12"),
            ("if profile_results is None:", "if True:"),
            ("predictor = create_predictor()", "again(create_predictor)"),
            ("from scipy.interpolate import interp1d", "interp1d = dict"),
        ),
    ),
)

# The edited script imports this: it says whether the culprit is to hang where it is just now.
HELPER = """\
import fcntl, os, queue, re, select, signal, socket, subprocess, sys, threading, time
import asyncio, builtins
from concurrent.futures import ThreadPoolExecutor

import deepytorch
import torch
import torch.distributed as dist

folder = sys.argv[1]
lock = threading.Lock()
pair = socket.socketpair()
arrivals = 0


class Clock:
    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def begin():
    if not dist.is_initialized():
        dist.init_process_group({backend})


def due(line):
    global arrivals
    if os.environ["RANK"] != "{culprit}" or not dist.is_initialized():
        return False
    arrivals += 1
    if arrivals != {arrivals}:
        return False
    write("{planted}", f"{{line}} {{os.getpid()}}")
    return True


def again(main):
    while True:
        main()
        if os.environ["RANK"] == "{culprit}" and not arrivals:
            write("{passed}", "1")


def write(name, text):
    with open(os.path.join(folder, name + str(os.getpid())), "w") as file:
        file.write(text)
    os.rename(file.name, os.path.join(folder, name))


if {begins}:
    begin()
"""
_IMPORT = "import plant; from plant import Clock, again, begin; "


@dataclass(frozen=True)
class Edit:
    """Edits what the culprit does at a place; `lines` refer to what the helper imports.

    `at` says at which statements: "any", "collective": before a call of one, "skipped": instead
    of one. `kinds` are the verdicts that are right; "raised" is that of the errors by which all
    other ranks end. The sentence must name the line of these at which the culprit stays,
    `stays_at`, where it stays.
    """

    name: str
    lines: str
    at: str = "any"
    kinds: tuple[str, ...] = ("never entered",)
    stays_at: int | None = 0


_DIFFER = ("mismatch", "raised")
_ENDS = ("gone", "raised")
EDITS = (
    Edit("sleeps", "plant.time.sleep(100_000)"),
    Edit("endless loop", "while True: pass"),
    Edit("lock that is never released", "plant.lock.acquire(); plant.lock.acquire()"),
    Edit("reads a pipe", "plant.os.read(plant.os.pipe()[0], 1)"),
    Edit("input()", "plant.builtins.input()"),
    Edit("empty queue", "plant.queue.Queue().get()"),
    Edit("another program", 'plant.subprocess.run(["sleep", "100000"])'),
    Edit("reads a socket", "plant.pair[0].recv(1)"),
    Edit("regular expression", 'plant.re.match(r"(a+)+$", "a" * 64 + "b")'),
    Edit("iterates in C", "plant.builtins.sum(iter(int, 1))"),
    Edit("event that nobody sets", "plant.threading.Event().wait()"),
    Edit("opens a pipe", 'open(plant.os.path.join(plant.folder, "fifo")).read()'),
    Edit("waits for a signal", "plant.signal.pause()"),
    Edit("coroutine", "plant.asyncio.run(plant.asyncio.sleep(100_000))"),
    Edit(
        "file that is locked",
        'plant.fcntl.flock(open(plant.os.path.join(plant.folder, "locked")), plant.fcntl.LOCK_EX)',
    ),
    Edit("another thread", "plant.ThreadPoolExecutor().submit(plant.time.sleep, 100_000).result()"),
    Edit("breakpoint", "breakpoint()\nplant.time.sleep(0)", stays_at=1),
    Edit("an operation more", "plant.dist.barrier()", kinds=_DIFFER, stays_at=None),
    Edit(
        "another operation",
        "plant.dist.broadcast(plant.torch.zeros(7), 0)",
        at="collective",
        kinds=_DIFFER,
        stays_at=None,
    ),
    Edit(
        "another shape",
        "plant.dist.all_reduce(plant.torch.zeros(1000))",
        at="collective",
        kinds=_DIFFER,
        stays_at=None,
    ),
    Edit("skips a collective", "", at="skipped", kinds=_DIFFER, stays_at=None),
    Edit("exits", "plant.os._exit(0)", kinds=_ENDS, stays_at=None),
    Edit("raises", 'raise RuntimeError("planted")', kinds=_ENDS, stays_at=None),
)

_COLLECTIVES = {
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "check_trigger",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "reduce",
    "sync_all",
    "wait_for_everyone",
}


def places(source: str, at: str) -> list[ast.stmt]:
    """Statements of functions before which a line can be put, in the order of the file.

    Functions that nothing in the script refers to are left out.
    """
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    lines = source.splitlines()
    found: dict[int, ast.stmt] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        if function.name not in used and not function.name.startswith("__"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.stmt) and node is not function and _fits(node, lines, at):
                found.setdefault(node.lineno, node)
    return [found[line] for line in sorted(found)]


def _fits(node: ast.stmt, lines: list[str], at: str) -> bool:
    line = lines[node.lineno - 1]
    begins = line[: node.col_offset].isspace() and not line.lstrip().startswith("elif ")
    if not begins or isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Global):
        return False
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return False  # a docstring, which is one only at the beginning
    if at == "any":
        return True
    if not isinstance(node, ast.Expr | ast.Assign) or not isinstance(node.value, ast.Call):
        return False
    called = node.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _COLLECTIVES and (at == "collective" or node.end_lineno == node.lineno)


def edited(source: str, edit: Edit, at: list[ast.stmt]) -> str:
    """The script with the edit at these places, and what it needs at its first statement."""
    where = {node.lineno: node for node in at}
    first = next(
        node.lineno
        for node in ast.parse(source).body
        if not (isinstance(node, ast.Expr) or getattr(node, "module", "") == "__future__")
    )
    lines: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        if number == first:
            line = _IMPORT + line
        node = where.get(number)
        if node is None:
            lines.append(line)
            continue
        indent = line[: node.col_offset]
        instead = _without(node) if edit.at == "skipped" else edit.lines
        lines += [
            f"{indent}if plant.due({len(lines) + 2}):",
            *textwrap.indent(instead, indent + "    ").split("\n"),
            f"{indent}else: {line.lstrip()}" if edit.at == "skipped" else line,
        ]
    text = "\n".join(lines) + "\n"
    compile(text, "edited", "exec")
    return text


def _without(node: ast.stmt) -> str:
    """Return what a statement does where the collective that it calls is left out."""
    assert isinstance(node, ast.Expr | ast.Assign)
    assert isinstance(node.value, ast.Call)
    if isinstance(node, ast.Expr):
        return "pass"
    value = ast.unparse(node.value.args[0]) if node.value.args else "None"
    return f"{ast.unparse(node.targets[0])} = {value}"


@dataclass(frozen=True)
class Case:
    """An edit of a script whose operations are carried out so; chance decides the rest."""

    edit: Edit
    script: Script
    how: str
    seed: int


def cases(hows: list[str], chance: random.Random) -> Iterator[Case]:
    """Without end: each edit in turn, in one script after the other, in turn native or not."""
    number = 0
    while True:
        for edit in EDITS:
            number += 1
            script = SCRIPTS[number % len(SCRIPTS)]
            how = hows[(number + number // len(SCRIPTS)) % len(hows)]
            if places(script.source(), edit.at):
                yield Case(edit, script, how, chance.randrange(1 << 30))


def run_one(case: Case) -> dict[str, Any]:
    """Plants, asks and ends the job: what was planted and what was said."""
    chance = random.Random(case.seed)
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory() as name:
            found = _plant(case, Path(name), chance)
        if found is not None:
            return found
    raise NotReadyError(f"{case.script.name} came to no edited line in {_TRIES} times")


def _plant(case: Case, folder: Path, chance: random.Random) -> dict[str, Any] | None:
    """One try; None where the script came to none of the edited lines."""
    edit, script = case.edit, case.script
    culprit = chance.randrange(script.ranks)
    possible = places(script.source(), edit.at)
    chosen = chance.sample(possible, min(PLACES, len(possible)))
    path = folder / f"copy_of_{Path(script.path).name}"
    path.write_text(edited(script.source(), edit, chosen))
    delegated = case.how == "delegated"
    helper = HELPER.format(
        backend='"deepytorch"' if delegated else "",
        begins=delegated,
        culprit=culprit,
        arrivals=chance.randint(1, _MOST_ARRIVALS),
        planted=_PLANTED,
        passed=_PASSED,
    )
    (folder / "plant.py").write_text(helper)
    os.mkfifo(folder / "fifo")
    with open(folder / "locked", "w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        processes = launch(
            path,
            folder,
            script.ranks,
            {
                "ACCELERATE_USE_CPU": "1",
                "DS_ACCELERATOR": "cpu",
                "DEEPYTORCH_COLLECTIVES": "stock" if delegated else "native",
            },
        )
        try:
            if not _await_plant(folder, processes):
                return None
            line, pid = (int(each) for each in (folder / _PLANTED).read_text().split())
            time.sleep(SETTLE_S)
            asked = time.monotonic()
            verdict = _verdict(folder, processes, culprit)
            took_s = time.monotonic() - asked
        finally:
            end(processes)
    place = f"{path.name}:{line + (edit.stays_at or 0)}"
    own = pid == processes[culprit].pid  # else it is what a DataLoader has started
    return {
        "plant": edit.name,
        "device": "cpu",
        "how": case.how,
        "script": script.name,
        "place": place,
        "culprit": culprit,
        "right": is_right(edit, verdict, culprit, f"{place} " if own else ""),
        "kind": verdict["kind"],
        "blamed": sorted(verdict["ranks"]),
        "sentence": verdict["sentence"],
        "asked_s": round(took_s, 2),
    }


def is_right(edit: Edit, verdict: dict[str, Any], culprit: int, place: str) -> bool:
    """Whether a verdict says who it was, and where that stays, at which line."""
    blamed = set(verdict["ranks"])
    # Nobody can say which of two ranks that differ is wrong.
    enough = culprit in blamed if verdict["kind"] in _DIFFER else blamed == {culprit}
    named = edit.stays_at is None or place in verdict["sentence"]
    return verdict["kind"] in edit.kinds and enough and named


def _await_plant(folder: Path, processes: list[subprocess.Popen[bytes]]) -> bool:
    """Whether the culprit is at an edited line; False where a pass came to none."""
    planted, passed = folder / _PLANTED, folder / _PASSED
    deadline = time.monotonic() + _PLANT_LIMIT_S
    while not planted.exists():
        if passed.exists():
            return False
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise NotReadyError(f"the script came to no edited line:\n{logs(folder)}")
        time.sleep(0.05)
    return True


def _verdict(
    folder: Path, processes: list[subprocess.Popen[bytes]], culprit: int
) -> dict[str, Any]:
    """Return what the command says, or what errors say if all ranks but the culprit end."""
    others = [rank for rank in range(len(processes)) if rank != culprit]
    deadline = time.monotonic() + _ASK_LIMIT_S
    while True:
        if any(processes[rank].poll() is not None for rank in range(len(processes))):
            # It is not a hang if the rest end by themselves.
            _await_ends([processes[rank] for rank in others])
        alive = [rank for rank in others if processes[rank].poll() is None]
        if not alive:
            return _raised(folder, others, culprit)
        try:
            verdict: dict[str, Any] = ask(processes[alive[0]].pid)["verdict"]
        except subprocess.CalledProcessError:  # it has ended meanwhile
            if processes[alive[0]].poll() is None and time.monotonic() > deadline:
                raise
            continue
        # The others may come to an operation later only.
        if verdict["kind"] != "no hang" or time.monotonic() > deadline:
            return verdict
        time.sleep(1)


def _await_ends(processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _ENDING_LIMIT_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _raised(folder: Path, others: list[int], culprit: int) -> dict[str, Any]:
    """The errors of the other ranks as a verdict: it blames the culprit if each of them does."""
    errors = [_errors((folder / f"log{rank}").read_text()) for rank in others]
    name = re.compile(rf"\branks? ([\d, and]*\b)?{culprit}\b")
    blames = all(any(name.search(error) for error in each) for each in errors)
    return {
        "kind": "raised",
        "ranks": [culprit] if blames else [],
        "sentence": " | ".join(each[0] for each in errors),
    }


def _errors(log: str) -> list[str]:
    """Return the exceptions of a log that ended the program, the first one first."""
    found = re.findall(r"^(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception): .*$", log, re.MULTILINE)
    return found or [log[-500:]]
