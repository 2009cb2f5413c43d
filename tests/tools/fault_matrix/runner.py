"""Runs one case and judges what its survivors tell."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepytorch_core.base import config
from deepytorch_core.testing.emulation import (
    EmulationError,
    Network,
    Placement,
    Seat,
    missing_privilege,
)
from deepytorch_core.testing.failures import RankError
from deepytorch_core.testing.pool import spawn_ranks
from deepytorch_core.testing.worker import UncaughtError
from fault_matrix import inject
from fault_matrix.cases import FAULTS, PATHS, Case, Fault
from fault_matrix.cases import Path as DataPath
from fault_matrix.job import Settings, Told, survive

_PROJECT = f"{Path(__file__).parents[3]}/"
_LIMIT_S = 100.0  # of a case; what runs longer hangs
_LONG_S = 60.0  # a group's time limit where it must not be what ends the case
_MOST_LETTERS = 500  # of what a process says at its end
_CRASHED = ("terminate called", "Fatal Python error")
_MOUNTS = ("disk full", "/dev/shm full")
_STORE = (
    "import sys, time; from torch._C._distributed_c10d import TCPStore; "
    "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); time.sleep(600)"
)


@dataclass
class Result:
    """The outcome of a case. `wrong` is why it isn't what the table promises; empty if it is."""

    case: Case
    outcome: str = ""
    took_s: list[float] = field(default_factory=list)
    message: str = ""
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""
    device_mapped_mib: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For records."""
        return {**dataclasses.asdict(self.case), **_without_case(self)}


def _without_case(result: Result) -> dict[str, Any]:
    fields = {entry.name: getattr(result, entry.name) for entry in dataclasses.fields(result)}
    fields.pop("case")
    # The project's place on this machine is nobody's business.
    return {**fields, "message": result.message.replace(_PROJECT, "")}


def run(case: Case, slot: int | None = None, *, stock: bool = False) -> Result:
    """Runs one case in ranks of its own. What this machine can't do is skipped, with the reason.

    Args:
        case: which one.
        slot: a number that no other case has which runs at the same time. None: the case runs
            alone, so that all that is new in /dev/shm afterwards is its own. Beside others only
            what its ranks had mapped is.
        stock: under gloo or NCCL alone, of which nothing is promised: to see what that leaves over.
    """
    missing = _why_not(case)
    if missing is not None:
        return Result(case, skipped=missing)
    fault, path = FAULTS[case.fault], PATHS[case.path]
    shared = names_in_shm()
    with tempfile.TemporaryDirectory(prefix="deepytorch-faults-") as name:
        folder = Path(name)
        (folder / inject.FULL).mkdir()
        with contextlib.ExitStack() as stack:
            store, address = _own_store(fault, stack)
            network = stack.enter_context(_network(fault, path))
            timeout_s = fault.timeout_s or path.timeout_s or _LONG_S
            settings = Settings(case, folder, address, timeout_s, stock)
            outside = threading.Thread(
                target=_from_outside, args=(settings, store, network), daemon=True
            )
            if settings.from_outside:
                outside.start()
            gone = {path.victim} if fault.ends else set()
            try:
                told = spawn_ranks(
                    survive,
                    path.ranks,
                    settings,
                    timeout_s=_LIMIT_S,
                    expect_exit=set(range(path.ranks)) if case.may_end else gone,
                    env=_environment(fault, path, folder, slot),
                    fresh=True,
                    placement=None if network is None else _placement(network, path),
                )
            except RankError as error:
                return Result(case, "none", message=str(error), wrong=["it hung or crashed"])
            finally:
                (folder / "over").touch()
            survivors = [
                _ended(settings, rank) if each is None else each
                for rank, each in enumerate(told)
                if rank not in gone
            ]
        left = names_in_shm() - shared
        if slot is not None:
            left &= settings.noted_shared_memory()
        result = judge(case, survivors, names=left)
        if fault.name == "exception":
            result.wrong += _unlike_an_exception(settings.stderr_of(path.victim))
    return result


def _unlike_an_exception(stderr: Path) -> list[str]:
    """Check that the victim wrote the interpreter's own last words, and no crash after them."""
    with contextlib.suppress(OSError):
        text = stderr.read_text(errors="replace")
        if UncaughtError.__name__ in text and not any(words in text for words in _CRASHED):
            return []
        return [f"its interpreter did not end by the exception: {text[-_MOST_LETTERS:]!r}"]
    return ["its interpreter never came to the exception"]


def _ended(settings: Settings, rank: int) -> Told:
    """Return what is known of a survivor whose process has ended."""
    told = Told("it said nothing", _since_fault(settings, rank), ended=True)
    says = [text.format(victim=PATHS[settings.case.path].victim) for text in _says(settings.case)]
    with contextlib.suppress(OSError):
        lines = settings.stderr_of(rank).read_text(errors="replace").splitlines()
        telling = [line for line in lines if any(text in line for text in says)]
        ours = [line for line in telling if line.startswith("deepytorch: ")]  # not torch's log
        text = (ours or telling or [line for line in lines if line.strip()] or [""])[-1]
        told.error = text[:_MOST_LETTERS] or told.error
    return told


def _since_fault(settings: Settings, rank: int) -> float:
    """From the fault to the last words of a process that ended; the others may live on."""
    now = time.monotonic()
    said = now
    with contextlib.suppress(OSError):
        said -= time.time() - settings.stderr_of(rank).stat().st_mtime
    return said - (settings.fault_at() or said)


def _says(case: Case) -> tuple[str, ...]:
    return FAULTS[case.fault].says


def judge(case: Case, told: list[Told], *, names: Iterable[str] = ()) -> Result:
    """Compares what the survivors tell with what the table promises.

    Args:
        case: which one it was.
        told: what each survivor tells.
        names: what is left in /dev/shm.
    """
    fault, path = FAULTS[case.fault], PATHS[case.path]
    errors = [each.error for each in told if each.error]
    ended = any(each.ended for each in told)
    result = Result(
        case,
        "ends"
        if ended
        else "error"
        if errors
        else "leaves"
        if case.phase == "destroy"
        else "recovers",
        [round(each.took_s, 3) for each in told],
        min(errors, key=len, default=""),
        device_mapped_mib=max((each.device_mapped_mib for each in told), default=0.0),
    )
    wrong = result.wrong
    as_good = {result.outcome, "error"} if ended and case.may_end else {result.outcome}
    if case.outcome != "either" and case.outcome not in as_good:
        wrong.append(f"{case.outcome} was promised: {result.outcome} {errors}")
    if errors and len(errors) < len(told):
        wrong.append(f"{len(errors)} of {len(told)} ranks got an error: {errors}")
    says = [text.format(victim=path.victim) for text in fault.says]
    for error in errors:
        if error.startswith("WrongDataError"):
            wrong.append(error)
        elif not any(text in error for text in says):
            wrong.append(f"it says none of {says}: {error}")
    within_s = max(fault.within_in(case.phase), path.within_s)
    if max(result.took_s, default=0) > within_s:
        wrong.append(f"took {max(result.took_s)} s, the limit is {within_s} s")
    if max((each.destroy_s for each in told), default=0) > within_s + 6:
        wrong.append(f"destroy_process_group took {max(each.destroy_s for each in told):.1f} s")
    left = [text for each in told for text in each.left]
    if result.device_mapped_mib > 0:
        left.append(f"mapped by the GPU's driver: {result.device_mapped_mib} MiB")
    left += [f"in /dev/shm: {name}" for name in sorted(names)]
    wrong += [f"left over: {text}" for text in left if not fault.is_stocks(text, case.path)]
    orphans = sorted({process for each in told for process in each.orphans})
    if orphans:
        wrong.append(f"DataLoader workers of rank {path.victim} outlive it: {orphans}")
    wrong += [f"no group could be made again: {each.again}" for each in told if each.again]
    return result


def _why_not(case: Case) -> str | None:
    if PATHS[case.path].device == "cuda":
        found = _num_gpus()
        if found < PATHS[case.path].ranks:
            return f"needs {PATHS[case.path].ranks} GPUs, found {found}"
    if FAULTS[case.fault].network or case.fault in _MOUNTS:
        return _missing_privilege()
    return None


@functools.cache
def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


_missing_privilege = functools.cache(missing_privilege)


def _environment(fault: Fault, path: DataPath, folder: Path, slot: int | None) -> dict[str, str]:
    # Measuring belongs to no fault, except where what it writes is the point.
    env = {"DEEPYTORCH_TUNE": "off", "DEEPYTORCH_LOG": "error", **path.env}
    if slot is not None:
        env["FAULTS_SLOT"] = str(slot)  # else they would share the process that starts ranks
    if path.spans_nodes and not fault.network:
        env["DEEPYTORCH_NODE_ID"] = ",".join(path.nodes)
    if fault.name == "disk full":
        env["DEEPYTORCH_TUNE"] = "force"
        env["DEEPYTORCH_PROFILE"] = str(folder / inject.FULL / "profile.json")
    if fault.name == "clock jump":
        env["LD_PRELOAD"] = str(_clock_library())
    return env


@functools.cache
def _clock_library() -> Path:
    compiler = config.compiler()
    if compiler is None:
        raise RuntimeError("a clock that jumps needs a C++ compiler: install g++ or set CXX")
    folder = Path(tempfile.mkdtemp(prefix="deepytorch-clock-"))
    library = folder / "clock_shift.so"
    source = Path(__file__).with_name("clock_shift.cpp")
    subprocess.run(
        [*compiler, "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)],
        check=True,
    )
    return library


@contextlib.contextmanager
def _network(fault: Fault, path: DataPath) -> Iterator[Network | None]:
    if not fault.network:
        yield None
        return
    with Network(len(set(path.nodes))) as network:
        yield network


def _placement(network: Network, path: DataPath) -> Placement:
    nodes = sorted(set(path.nodes))
    seats = [
        Seat(nodes.index(node), path.nodes[:rank].count(node), rank)
        for rank, node in enumerate(path.nodes)
    ]
    return Placement(network, seats)


def _own_store(
    fault: Fault, stack: contextlib.ExitStack
) -> tuple[subprocess.Popen[str] | None, tuple[str, int] | None]:
    if fault.name != "store death":
        return None, None
    process = subprocess.Popen([sys.executable, "-c", _STORE], stdout=subprocess.PIPE, text=True)

    def end() -> None:
        process.kill()
        process.communicate()

    stack.callback(end)
    assert process.stdout is not None
    return process, ("127.0.0.1", int(process.stdout.readline()))


def _from_outside(
    settings: Settings, store: subprocess.Popen[str] | None, network: Network | None
) -> None:
    path = PATHS[settings.case.path]
    deadline = time.monotonic() + _LIMIT_S
    while len(list(settings.folder.glob("ready-*"))) < path.ranks:
        if time.monotonic() > deadline or settings.is_over():
            return
        time.sleep(0.005)
    if settings.case.phase == "collective":
        time.sleep(0.3)
    settings.note_fault()
    _ACT[settings.case.fault](store, network)
    if FAULTS[settings.case.fault].outcome_in(settings.case.phase, settings.case.path) in (
        "either",
        "recovers",
    ):
        with contextlib.suppress(OSError):
            (settings.folder / "over").touch()


def _flap(store: Any, network: Network) -> None:
    network.set_link(1, up=False)
    time.sleep(1.0)
    with contextlib.suppress(EmulationError):  # the case may be over, and the network gone
        network.set_link(1, up=True)


_ACT: dict[str, Callable[[Any, Any], None]] = {
    "store death": lambda store, network: store.kill(),
    "link down 1 s": _flap,
    "link down": lambda store, network: network.set_link(1, up=False),
    "blackhole": lambda store, network: network.set_blackhole(1, True),
}


def names_in_shm() -> set[str]:
    """Those in /dev/shm that are ours, or NCCL's, which runs inside."""
    return {name for name in os.listdir("/dev/shm") if "deepytorch" in name or "nccl" in name}
