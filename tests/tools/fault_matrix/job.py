"""Runs every rank of a case, which tells afterwards how it went."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepytorch_core.testing.leaks import holdings, left_over, names_mapped_of_shm
from deepytorch_core.testing.worker import UncaughtError, rank_store
from fault_matrix import cases, inject
from fault_matrix.cases import FAULTS, PATHS, Case

_WARM_ROUNDS = 3
_AGAIN = "again"  # the group that survivors make
_ROUNDS_AFTER = 5  # that must go well once it is over
_DELAY_S = 0.3  # from the beginning of the operations to a fault in the middle of them
_LOADER_WORKERS = 4
_ORPHANS_S = 15.0  # a DataLoader's worker looks for its parent every 5 s
_PATIENCE_S = 40.0  # for the others, longer than any time limit of a case


class WrongDataError(AssertionError):
    """An operation ended well with a wrong result."""


@dataclass(frozen=True)
class Settings:
    """How a case is run.

    Attributes:
        store: a store of the group's own; None: the workers'.
        stock: gloo or NCCL alone carries out everything.
    """

    case: Case
    folder: Path
    store: tuple[str, int] | None
    timeout_s: float
    stock: bool = False

    @property
    def from_outside(self) -> bool:
        return self.case.fault not in inject.INJECT

    def stderr_of(self, rank: int) -> Path:
        """Return the output of a rank that may end with its process; see `cases.Case.may_end`."""
        return self.folder / f"stderr-{rank}"

    def note_process(self, rank: int) -> None:
        """Tell the others how to see whether this one still lives, in cases in which it may end."""
        (self.folder / f"process-{rank}").write_text(str(os.getpid()))

    def has_ended(self, rank: int) -> bool:
        with contextlib.suppress(OSError):
            process = (self.folder / f"process-{rank}").read_text()
            return not os.path.exists(f"/proc/{process}/exe")  # nor has one that nobody reaped
        return False

    def note_loaders(self, workers: list[int]) -> None:
        """Processes that the victim started, and which must not outlive it."""
        (self.folder / "loaders").write_text(" ".join(map(str, workers)))

    def living_loaders(self) -> list[int]:
        with contextlib.suppress(OSError):
            noted = (self.folder / "loaders").read_text().split()
            return [int(process) for process in noted if os.path.exists(f"/proc/{process}/exe")]
        return []

    def note_shared_memory(self, rank: int) -> None:
        """Note all that this rank has mapped of /dev/shm now as its case's, gone names too."""
        with (self.folder / f"shm-{rank}").open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names_mapped_of_shm())

    def noted_shared_memory(self) -> set[str]:
        files = self.folder.glob("shm-*")
        return {name for file in files for name in file.read_text().splitlines()}

    def is_over(self) -> bool:
        return (self.folder / "over").exists()

    def fault_at(self) -> float | None:
        """When it happened, by the clock that all processes share and nothing moves."""
        with contextlib.suppress(OSError, ValueError):
            return float((self.folder / "fault").read_text())
        return None

    def note_fault(self) -> None:
        partial = self.folder / "fault.partial"
        partial.write_text(str(time.monotonic()))
        partial.rename(self.folder / "fault")


@dataclass
class Told:
    """The words of a survivor; times in seconds from the fault."""

    error: str = ""
    took_s: float = 0.0
    rounds: int = 0
    destroy_s: float = 0.0
    left: list[str] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)  # the victim's workers that outlive it
    again: str = ""  # why a new group could not be made, or did not work
    ended: bool = False  # its process did, and `error` is what it said
    device_mapped_mib: float = 0.0  # of a GPU's driver, pinned memory too: more than before


def survive(rank: int, world_size: int, settings: Settings) -> Told:
    """One rank of a case; the victim's may not return."""
    import torch.distributed as dist

    from deepytorch_core.c10d import backend

    backend.register()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    case = settings.case
    path = PATHS[case.path]
    if case.may_end or _raises(case, rank):
        _write_errors_to(settings.stderr_of(rank))
    if case.may_end:
        settings.note_process(rank)
    told = Told()
    with contextlib.ExitStack() as stack:
        if path.device == "cuda":  # a process that uses a GPU is not to be forked
            stack.enter_context(_loaders(case))
        warm = Group(settings, rank, world_size, name="warm", own_store=False)
        for _ in range(_WARM_ROUNDS):
            warm.exchange()
        # On a full disk algorithms are measured, and the fastest is taken.
        if case.fault != "disk full" and not settings.stock:
            _check_algorithm(path)
        dist.destroy_process_group()
        before, mapped = holdings(), _device_mapped_bytes()
        if path.device == "cpu":
            stack.enter_context(_loaders(case))
        if rank == path.victim:
            settings.note_loaders([child.pid or 0 for child in multiprocessing.active_children()])
        _go_through(settings, rank, world_size, told)
    inject.back_to_plenty()
    settings.note_shared_memory(rank)
    started = time.monotonic()
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception as error:
            told.error = told.error or f"destroy_process_group: {type(error).__name__}: {error}"
    told.destroy_s = time.monotonic() - started
    # A connection to the store is given up after ten seconds without a network.
    told.left = left_over(before, settling_s=15.0 if FAULTS[case.fault].network else 4.0)
    told.device_mapped_mib = round((_device_mapped_bytes() - mapped) / 2**20, 1)
    if FAULTS[case.fault].ends:
        deadline = time.monotonic() + _ORPHANS_S
        _until(lambda: not settings.living_loaders() or time.monotonic() > deadline)
        told.orphans = settings.living_loaders()
    if FAULTS[case.fault].again:
        told.again = _again(settings, rank, world_size)
    return told


def _raises(case: Case, rank: int) -> bool:
    """Whether this rank's interpreter ends by an exception, and prints where it was raised."""
    return case.fault == "exception" and rank == PATHS[case.path].victim


def _go_through(settings: Settings, rank: int, world_size: int, told: Told) -> None:
    import torch.distributed as dist

    case = settings.case
    is_victim = rank == PATHS[case.path].victim
    group: Group | None = None
    try:
        group = Group(settings, rank, world_size, name="case")
        if case.phase != "init":
            for _ in range(_WARM_ROUNDS):
                group.exchange()
        (settings.folder / f"ready-{rank}").touch()
        if is_victim:
            _until(lambda: len(list(settings.folder.glob("ready-*"))) == world_size)
        if case.phase == "collective":
            if is_victim and not settings.from_outside:
                _break_in_between(settings, group)
            group.go_on(settings)
        else:
            if is_victim and not settings.from_outside:
                _break(settings)
            elif case.phase == "destroy" or settings.from_outside:
                _until(lambda: settings.fault_at() is not None)
            if case.phase == "destroy":
                dist.destroy_process_group()
            else:
                group.go_on(settings)
    except UncaughtError:
        raise
    except Exception as error:
        told.error = f"{type(error).__name__}: {error}"
    now = time.monotonic()
    told.took_s = now - (settings.fault_at() or now)
    told.rounds = group.rounds if group else 0


def _break(settings: Settings) -> None:
    fault = settings.case.fault
    settings.note_shared_memory(PATHS[settings.case.path].victim)
    settings.note_fault()
    if fault in inject.FOR_GOOD:
        (settings.folder / "over").touch()  # afterwards it may be unable to
    inject.INJECT[fault](settings.folder)
    if fault not in inject.FOR_GOOD:
        (settings.folder / "over").touch()


def _break_in_between(settings: Settings, group: Group) -> None:
    """In the middle of this rank's operations, or of the others' where a program ends itself."""
    if settings.case.fault == "exception":  # in the main thread, wherever that is
        signal.signal(signal.SIGALRM, lambda number, frame: _break(settings))
        signal.setitimer(signal.ITIMER_REAL, _DELAY_S)
        return
    if settings.case.fault == "exit(0)":
        deadline = time.monotonic() + _DELAY_S
        while time.monotonic() < deadline:
            group.exchange()
        _break(settings)
    threading.Timer(_DELAY_S, _break, [settings]).start()


def _until(condition: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


@contextlib.contextmanager
def _loaders(case: Case) -> Iterator[None]:
    """Live forked workers, which hold what this process left open in them."""
    if case.fault != "SIGKILL with DataLoaders":
        yield
        return
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(64.0))
    loader = iter(DataLoader(data, num_workers=_LOADER_WORKERS, persistent_workers=True))
    next(loader)
    yield
    del loader


def _check_algorithm(path: cases.Path) -> None:
    from deepytorch_core import _core

    used = {str(row["algorithm"]) for row in _core.statistics() if row["calls"]}
    if path.algorithms and not used <= set(path.algorithms):
        raise RuntimeError(f"this is no case of {path.name}: {sorted(used)} carried it out")


def _write_errors_to(file: Path) -> None:
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _device_mapped_bytes() -> int:
    """Return what the GPU's driver maps into this process, where its pinned memory shows."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/nvidia" in line or "/dev/zero" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


class Group:
    """The default group of a case, and one kind of operation in it."""

    def __init__(
        self, settings: Settings, rank: int, world_size: int, *, name: str, own_store: bool = True
    ) -> None:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        path = PATHS[settings.case.path]
        self.rank, self.world_size, self.rounds = rank, world_size, 0
        self._sparse = path.dtype == "sparse"
        self._device, self._count = "cpu", path.count
        if path.device == "cuda":
            # A survivor has another rank in a new group, and stays where it is.
            on = torch.cuda.current_device() if name == _AGAIN else rank
            torch.cuda.set_device(on)
            self._device = f"cuda:{on}"
        store: Any = rank_store(name)
        if own_store and settings.store is not None:
            store = TCPStore(
                *settings.store, is_master=False, timeout=timedelta(seconds=settings.timeout_s)
            )
        stock = "nccl" if path.device == "cuda" else "gloo"
        dist.init_process_group(
            stock if settings.stock else "deepytorch",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=settings.timeout_s),
        )
        # Allocated now: what the rank may still allocate later is the group's business alone.
        self._ones = torch.ones(self._count, device=self._device)
        self._data = torch.empty_like(self._ones)
        self._wrong = torch.empty(self._count, dtype=torch.bool, device=self._device)
        self._index = torch.arange(self._count).reshape(1, -1)

    def exchange(self, flag: float = 0.0) -> float:
        """One checked all_reduce; returns the sum of all ranks' flags.

        Raises WrongDataError, or what the operation raises.
        """
        import torch
        import torch.distributed as dist

        data = self._data.copy_(self._ones)
        data[-1] = flag
        if self._sparse:
            sparse = torch.sparse_coo_tensor(
                self._index, data, (self._count,), check_invariants=False
            )
            dist.all_reduce(sparse)
            data = sparse.values()  # of all indices, in order, and not copied
        else:
            dist.all_reduce(data)
        torch.ne(data, float(self.world_size), out=self._wrong)
        self._wrong[-1] = False
        if bool(self._wrong.any()):
            if data.is_cuda:
                # An operation that ended early shows at the next call: an error, if known by then.
                dist.all_reduce(self._data)
            wrong = data[self._wrong]
            raise WrongDataError(f"{wrong.numel()} elements, the first is {wrong[0].item()}")
        self.rounds += 1
        return float(data[-1].item())

    def go_on(self, settings: Settings) -> None:
        """Exchanges until rank 0 saw that the fault is over, and some more."""
        after = 0
        while after < _ROUNDS_AFTER:
            seen = self.exchange(float(self.rank == 0 and settings.is_over()))
            after += seen > 0


def _again(settings: Settings, rank: int, world_size: int) -> str:
    """Whether the survivors can make a group and use it; empty if so."""
    import torch.distributed as dist

    victim = PATHS[settings.case.path].victim
    gone = {victim} if FAULTS[settings.case.fault].ends else set()
    survivors = [peer for peer in range(world_size) if peer not in gone]
    # Together: one that heard of the fault at once would only wait for one that timed out.
    (settings.folder / f"done-{rank}").touch()
    _until(lambda: all(_is_done(settings, peer) for peer in survivors))
    survivors = [peer for peer in survivors if not settings.has_ended(peer)]
    try:
        group = Group(settings, survivors.index(rank), len(survivors), name=_AGAIN, own_store=False)
        for _ in range(_WARM_ROUNDS):
            group.exchange()
        dist.destroy_process_group()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _is_done(settings: Settings, rank: int) -> bool:
    return (settings.folder / f"done-{rank}").exists() or settings.has_ended(rank)
