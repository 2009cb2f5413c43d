"""Plants faults in jobs of every framework, and sees whether each is named, and how soon.

    python tests/faults/frameworks.py --json docs/faults-frameworks.jsonl
    python tests/faults/frameworks.py --only "DDP | *" --only "* | killed"

Three ranks train on CPUs; at its fourth step the fault happens to one of them. Every survivor says
when it was told, and what. A fault of one rank is named if every survivor's error names that rank,
or the end of a survivor whose own error does. One that stops nobody has to leave the training as it
is, and to be told of.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from framework_jobs import FRAMEWORKS, RANKS, Reach  # noqa: E402

from deepytorch_core.base import provenance  # noqa: E402
from deepytorch_core.testing.ports import free_port  # noqa: E402

AT_STEP = 4
LIMIT_S = 6.0  # the groups' time limit: whoever waits for longer is told
PATIENCE_S = 90.0
_ENDING_S = 1.0  # what an interpreter that has all this imported takes to end, about
_MOST_LETTERS = 400
_PRELOADED = ["torch.distributed.fsdp", "transformers", "accelerate", "deepspeed"]


@dataclass(frozen=True)
class Fault:
    """A fault that happens to one rank.

    Attributes:
        act: done by the culprit at its place; None: it happens to the job before it begins.
        frameworks: where it is planted; empty: in all.
        says: a pattern that the errors of survivors, or else the ranks' output, must have; of
            which {culprit} is the rank.
        goes_on: training ends as if nothing had happened.
        before: done with the job's folder and environment before the ranks start.
        every: `act` happens at each step from there on.
    """

    name: str
    act: Callable[[], None] | None = None
    frameworks: tuple[str, ...] = ()
    says: str = r"\branks? ([\d, and]*\b)?{culprit}\b"
    goes_on: bool = False
    before: Callable[[Path, dict[str, str]], object] | None = None
    every: bool = False


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise ValueError("planted")


def sleep() -> None:
    time.sleep(100_000)


def loop() -> None:
    while True:
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def keep_gil() -> None:
    ctypes.PyDLL(None).sleep(100_000)


def take_lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def exhaust_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
    bytearray(1 << 31)


def one_more() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(7))


def other_type() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(16, dtype=torch.float64))


def other_operation() -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(16), 0)


def other_order() -> None:
    """The all_gather that is due behind the all_reduce comes first."""
    import torch
    import torch.distributed as dist

    dist.all_gather([torch.zeros(3) for _ in range(RANKS)], torch.zeros(3))


def leave_group() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(100_000)


def dawdle() -> None:
    time.sleep(0.1)


def spoil_profile(folder: Path, environment: dict[str, str]) -> None:
    profile = folder / "profile.json"
    profile.write_bytes(b'{"version": \x00\xff')
    environment["DEEPYTORCH_PROFILE"] = str(profile)
    environment["DEEPYTORCH_TUNE"] = "auto"


def deny_cache(folder: Path, environment: dict[str, str]) -> None:
    (folder / "file").touch()
    environment["DEEPYTORCH_CACHE_DIR"] = str(folder / "file" / "cache")
    environment["DEEPYTORCH_TUNE"] = "auto"


def squat_port(folder: Path, environment: dict[str, str]) -> socket.socket:
    taken = socket.create_server(("127.0.0.1", int(environment["MASTER_PORT"])))
    taken.listen()
    return taken


_COLLECTIVE = ("collectives", "DDP", "FSDP2", "ZeRO-2", "ZeRO-3", "Trainer", "Accelerate")
FAULTS = (
    Fault("killed", kill),
    Fault("exits", leave),
    Fault("raises", fail),
    Fault("sleeps", sleep),
    Fault("stopped by a signal", stop),
    Fault("keeps the GIL in C", keep_gil),
    Fault("no host memory", exhaust_memory),
    Fault("a collective more", one_more, _COLLECTIVE),
    Fault("crashes", crash, ("collectives", "DDP", "ZeRO-3")),
    Fault("endless loop", loop, ("collectives", "FSDP2", "Trainer")),
    Fault("lock that is never released", take_lock_twice, ("point to point", "DDP", "Accelerate")),
    Fault("another dtype", other_type, ("collectives", "DDP")),
    Fault("another operation", other_operation, ("collectives", "FSDP2")),
    Fault("collectives in another order", other_order, ("collectives",)),
    Fault("leaves the group early", leave_group, ("collectives", "point to point", "DDP")),
    Fault(
        "slow",
        dawdle,
        ("collectives", "DDP", "Accelerate"),
        says=r"slowest=\[?{culprit}\b",
        goes_on=True,
        every=True,
    ),
    Fault(
        "corrupted profile",
        frameworks=("collectives", "DDP"),
        says=r"profile\.json",
        goes_on=True,
        before=spoil_profile,
    ),
    Fault(
        "unusable cache folder",
        frameworks=("collectives", "Trainer"),
        says=r"file/cache",
        goes_on=True,
        before=deny_cache,
    ),
    Fault(
        "port taken by a stranger",
        frameworks=("collectives", "Accelerate"),
        says=r"(address already in use|EADDRINUSE)",
        before=squat_port,
    ),
)


def cases(patterns: list[str]) -> Iterator[tuple[str, Fault]]:
    """Framework and fault; those of which "framework | fault" fits a pattern."""
    for fault in FAULTS:
        for framework in fault.frameworks or FRAMEWORKS:
            name = f"{framework} | {fault.name}"
            if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                yield framework, fault


def work(rank: int, framework: str, planted: str, folder: Path, variables: dict[str, str]) -> None:
    """One rank: what it printed is in its log, and what came of it in its report."""
    os.environ.update(  # noqa: TID251  as a launcher would
        variables, RANK=str(rank), LOCAL_RANK=str(rank)
    )
    log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    told: dict[str, Any] = {}
    try:
        import deepytorch  # noqa: F401  behind the variables, which it reads

        told["loss"] = FRAMEWORKS[framework](_reach(rank, planted, folder), LIMIT_S, folder)
        told["slowest"] = _slowest()
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        raise
    finally:
        told["at"] = time.time()
        (folder / f"part{rank}").write_text(json.dumps(told))
        (folder / f"part{rank}").rename(folder / f"told{rank}")
        time.sleep(_ENDING_S)


def _reach(rank: int, planted: str, folder: Path) -> Reach:
    (fault,) = [each for each in FAULTS if each.name == planted]
    arrivals = 0

    def reach() -> None:
        nonlocal arrivals
        arrivals += 1
        if rank != _culprit(fault) or fault.act is None or arrivals < AT_STEP:
            return
        if arrivals == AT_STEP:
            (folder / "planted").write_text(repr(time.time()))
        if arrivals == AT_STEP or fault.every:
            fault.act()

    return reach


def _culprit(fault: Fault) -> int:
    return 0 if fault.act is None else RANKS - 1


def _slowest() -> list[int]:
    import deepytorch

    return [row.slowest for row in deepytorch.report().waiting]


def run(framework: str, fault: Fault) -> dict[str, Any]:
    """Plants one fault; what came of it, as a record."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="deepytorch-fault-") as name:
        folder = Path(name)
        variables = {
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "DEEPYTORCH_TUNE": "off",
            "DEEPYTORCH_TIMEOUT_S": str(LIMIT_S),  # of groups that a framework makes by itself
            "ACCELERATE_USE_CPU": "1",
            "DS_ACCELERATOR": "cpu",
        }
        kept = fault.before(folder, variables) if fault.before is not None else None
        began = time.time()
        ranks = [
            context.Process(target=work, args=(rank, framework, fault.name, folder, variables))
            for rank in range(RANKS)
        ]
        try:
            for each in ranks:
                each.start()
            _await(folder, ranks, _awaited(fault))
        finally:
            for each in ranks:
                each.kill()
                each.join()
            if isinstance(kept, socket.socket):
                kept.close()
        at = began
        if (folder / "planted").exists():
            at = float((folder / "planted").read_text())
        return _judge(framework, fault, folder, at)


def _awaited(fault: Fault) -> list[int]:
    """The ranks that have to tell: all where training goes on, else those that can know."""
    if fault.goes_on:
        return list(range(RANKS))
    if fault.act is None:
        return [0]  # which serves the store
    return [rank for rank in range(RANKS) if rank != _culprit(fault)]


def _await(folder: Path, ranks: list[BaseProcess], awaited: list[int]) -> None:
    """Until these ranks have told what came of it, or ended."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not all(
        (folder / f"told{rank}").exists() or not ranks[rank].is_alive() for rank in awaited
    ):
        time.sleep(0.02)


def _judge(framework: str, fault: Fault, folder: Path, at: float) -> dict[str, Any]:
    told = {
        rank: json.loads(file.read_text())
        for rank in range(RANKS)
        if (file := folder / f"told{rank}").exists()
    }
    logs = {rank: (folder / f"log{rank}").read_text(errors="replace") for rank in range(RANKS)}
    culprit = _culprit(fault)
    says = re.compile(fault.says.format(culprit=culprit), re.IGNORECASE)
    over: list[int] = []
    if fault.goes_on:
        texts = [f"slowest={each.get('slowest')}\n{logs[rank]}" for rank, each in told.items()]
        right = len(told) == RANKS and not any("error" in each for each in told.values())
        named = right and any(says.search(text) for text in texts)
        found = next(
            (line for text in texts for line in text.splitlines() if says.search(line)), ""
        )
    else:
        errors = {rank: told.get(rank, {}).get("error") or logs[rank] for rank in _awaited(fault)}
        naming = [rank for rank, error in errors.items() if says.search(error)]
        # A rank that waits for one of these alone hears of its end, so its error has the culprit.
        over = [
            rank
            for rank, error in errors.items()
            if rank not in naming
            and any(re.search(rf"\brank {other}\b.* died", error) for other in naming)
        ]
        named = len(naming) + len(over) == len(errors)
        found = errors[naming[0] if naming else min(errors)]
    ended = [told[rank]["at"] for rank in _awaited(fault) if rank in told]
    return {
        "bench": "framework faults",
        "framework": framework,
        "planted": fault.name,
        "outcome": "goes on" if fault.goes_on else "error",
        "culprit": None if fault.act is None else culprit,
        "named": bool(named),
        "named_over_another": len(over),
        "took_s": None if fault.goes_on else round(max(ended, default=at + PATIENCE_S) - at, 2),
        "message": " ".join(found.replace(str(folder), "")[:_MOST_LETTERS].split()),
    }


def main() -> int:
    """0 if every fault was named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help='such as "DDP | *"')
    parser.add_argument("--json", type=Path, help="add a line for each fault to this file")
    options = parser.parse_args()
    chosen = list(cases(options.only))
    num_bad = 0
    for number, (framework, fault) in enumerate(chosen, 1):
        found = run(framework, fault)
        num_bad += not found["named"]
        if options.json:
            provenance.write_record(options.json, {**found, **provenance.provenance()})
        mark = "named" if found["named"] else "NOT NAMED"
        print(
            f"{number}/{len(chosen)} {mark}: {framework} | {fault.name}: {found['took_s']} s: "
            f"{found['message']}",
            flush=True,
        )
    print(f"{len(chosen) - num_bad} of {len(chosen)} faults are named")
    return int(num_bad > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
