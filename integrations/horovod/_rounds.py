"""Pairs what users begin by its name over the ranks, in whatever order each of them begins it.

NOTE [Rounds] torch.distributed pairs calls by their order, Horovod by their names. So operations
run on a group of their own, in an order that the ranks agree on. In a round every rank tells what
it has begun since its last one. Then all know the same, and run what each of them has begun, in the
order of the first rank. A rank goes through rounds while it has begun something that has not run;
the others' next round waits for it. A thread that waits for an operation goes through the rounds
itself. If nobody waits, a thread does that the first such operation starts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.integrations.common.horovod_common import HorovodInternalError

from . import _requests
from ._collectives import Where, all_gather_single
from ._handle import Handle
from ._requests import Facts, Request
from ._world import ProcessSet, default_device

_FRAME_BYTES = 512  # of a rank in a round; more takes a second all_gather
_LENGTH_BYTES = 4
# After a round in which nothing was new: all ranks have begun what another one has not.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005
_CLOSING_S = 2.0


class PendingOperation:
    """One rank's part of an operation: told to the others, then running, then done."""

    def __init__(self, rounds: Rounds, name: str, request: Request, *, asynchronous: bool) -> None:
        self.name, self.request, self.asynchronous = name, request, asynchronous
        self.is_decided = False
        self._rounds = rounds
        self._handle: Handle | None = None
        self._error: Exception | None = None
        # Its tensors are made on this stream, whichever thread begins it.
        on_host = request.device.type == "cpu"
        self._stream = None if on_host else torch.accelerator.current_stream(request.device)

    def start(self, group: dist.ProcessGroup, told: list[Any]) -> None:
        """Begin it, now that every rank has told its part."""
        try:
            with torch.no_grad(), self._stream or contextlib.nullcontext():
                self._handle = self.request.start(Where(group, self.asynchronous), told)
            self.is_decided = True
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Let it end with an error, begun or not."""
        self._error, self.is_decided = error, True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.is_decided and (self._handle is None or self._handle.is_completed())

    def wait(self) -> Any:
        """Its result, or its error."""
        self._rounds.await_decision(self)
        if self._error is not None:
            raise self._error
        assert self._handle is not None
        return self._handle.wait()


class Rounds:
    """The operations of a process set that this process is in.

    Args:
        process_set: the set, registered with its own group.
        group: for these operations only, of all ranks of the set.
        stuck_s: after so long of ranks that all wait for what others have not begun, an error.
    """

    def __init__(
        self, process_set: ProcessSet, group: dist.ProcessGroup, *, stuck_s: float
    ) -> None:
        self.group = group
        self._ranks = list(process_set.ranks or ())
        self._size = group.size()
        self._device, self._stuck_s = default_device(process_set), stuck_s
        self._changed = threading.Condition()
        # Guarded by it:
        self._begun: dict[str, PendingOperation] = {}
        self._untold: list[PendingOperation] = []
        self._running: dict[str, PendingOperation] = {}
        self._waited_for: list[PendingOperation] = []
        self._is_driven = self._is_closing = self._has_joined = False
        self._broken: Exception | None = None
        self._thread: threading.Thread | None = None
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next_number = itertools.count()
        self._num_joins = self._count = 0  # of what has no name, since the last join
        # The thread that drives has them:
        self._told: list[dict[str, Facts]] = [{} for _ in self._ranks]
        self._joined: list[int] = []
        self._quiet_since: float | None = None

    def begin(self, make: Callable[[], Request], name: str | None, *, asynchronous: bool) -> Handle:
        """Begin what `make` asks for; what has no name is numbered.

        Raises ValueError where an operation of that name is under way.
        """
        if asynchronous and self._size > 1:
            self._start_thread()
        with self._changed:
            if name is None:
                self._count += 1
                name = f"noname.{self._num_joins}.{self._count}"
            elif name in self._begun or self._is_running(name):
                # Horovod's words.
                raise ValueError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name "
                    "as another tensor that is currently being processed.  If you want to request "
                    f"another tensor, use a different tensor name. ({name!r} is under way)"
                )
            operation = PendingOperation(self, name, make(), asynchronous=asynchronous)
            if self._broken is not None:
                operation.fail(self._broken)
            elif self._size == 1:
                self._run(operation, [operation.request.facts])
            else:
                self._begun[name] = operation
                self._untold.append(operation)
                self._changed.notify_all()
        return Handle([operation], operation.wait)

    def number_of(self, optimizer: Any) -> int:
        """The same on every rank, for names: how many have begun something here before it.

        Those that a rank only makes don't count: it may make more of them than others.
        """
        with self._changed:
            if optimizer not in self._numbers:
                self._numbers[optimizer] = next(self._next_number)
            return self._numbers[optimizer]

    def await_decision(self, operation: PendingOperation) -> None:
        """Return when the operation runs, or has failed."""
        if operation.is_decided:
            return
        with self._changed:
            self._waited_for.append(operation)
        try:
            self._drive(lambda: operation.is_decided)
        finally:
            with self._changed:
                self._waited_for.remove(operation)
                self._changed.notify_all()

    def join(self) -> None:
        """From now on this rank takes part in what the others do, until all have joined."""
        if self._size > 1:
            self._start_thread()
            with self._changed:
                self._has_joined = True
                self._changed.notify_all()

    def end_join(self) -> None:
        """Return when all ranks have joined."""
        self._drive(lambda: not self._has_joined)

    def check(self) -> None:
        """Raise what has broken the group, if something has."""
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """End the thread, also one that waits for ranks that don't come."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(_CLOSING_S / 2)
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # gloo has no abort
                self.group.abort()
            self._thread.join(_CLOSING_S / 2)

    def _is_running(self, name: str) -> bool:
        return name in self._running and not self._running[name].is_completed()

    def _start_thread(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="deepytorch-horovod", daemon=True
                )
                self._thread.start()

    def _serve(self) -> None:
        while not self._is_closing:
            self._drive(lambda: self._is_closing or not self._is_left_alone())
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._is_left_alone())

    def _is_left_alone(self) -> bool:
        """Whether there is something to do and nobody who waits for it."""
        return self._has_joined or bool(self._begun and not self._waited_for)

    def _drive(self, is_done: Callable[[], bool]) -> None:
        """Go through rounds, or wait while another thread does."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: is_done() or not self._is_driven)
                if is_done():
                    return
                self._is_driven = True
            try:
                self._round()
            except Exception as error:
                self._break(error)
            finally:
                with self._changed:
                    self._is_driven = False
                    self._changed.notify_all()

    def _round(self) -> None:
        with self._changed:
            news = [(operation.name, operation.request.facts) for operation in self._untold]
            waits = [operation.name for operation in self._waited_for if not operation.is_decided]
            has_joined = self._has_joined
            self._untold.clear()
        quiet_s = 0.0 if self._quiet_since is None else time.monotonic() - self._quiet_since
        said = self._exchange([news, has_joined, waits, quiet_s])
        changed = False
        for member, (their_news, joined, _, _) in enumerate(said):
            self._told[member].update(their_news)
            if joined and member not in self._joined:
                self._joined.append(member)
                changed = True
            changed = changed or bool(their_news)
        for name in self._ready():
            changed = True
            self._run_everywhere(name)
        if len(self._joined) == self._size:
            self._joined.clear()
            with self._changed:
                self._has_joined = False
                self._num_joins, self._count = self._num_joins + 1, 0
        if changed or self._gave_up(said):
            self._quiet_since = None
            return
        self._quiet_since = self._quiet_since or time.monotonic()
        with self._changed:
            pause_s = min(max(quiet_s / 4, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._changed.wait_for(lambda: self._untold or self._is_closing, pause_s)

    def _ready(self) -> list[str]:
        """Return what all ranks that have not joined have begun, in the order of the first."""
        here = [told for member, told in enumerate(self._told) if member not in self._joined]
        return [name for name in here[0] if all(name in told for told in here)] if here else []

    def _run_everywhere(self, name: str) -> None:
        told = [facts.pop(name, None) for facts in self._told]
        present = [(self._ranks[m], facts) for m, facts in enumerate(told) if facts is not None]
        absent = [self._ranks[m] for m, facts in enumerate(told) if facts is None]
        problem = _requests.what_differs(present)
        some = present[0][1]
        if problem is None and absent and some["kind"] != "allreduce":
            # Horovod's words.
            kind = some["kind"].capitalize()
            problem = f"{kind} is not supported with Join at this time: ranks {absent} have joined"
        with self._changed:
            operation = self._begun.get(name)
        if operation is None:
            if problem is not None:
                return
            operation = PendingOperation(self, name, _requests.of_joined(some), asynchronous=False)
        self._run(operation, told, problem)

    def _run(
        self, operation: PendingOperation, told: list[Any], problem: str | None = None
    ) -> None:
        own = operation.request.problem
        if own is not None:
            operation.fail(ValueError(own))
        elif problem is not None:
            operation.fail(HorovodInternalError(f"{problem} ({operation.name})"))
        else:
            operation.start(self.group, told)
        with self._changed:
            self._running = {
                n: pending for n, pending in self._running.items() if not pending.is_completed()
            }
            self._running[operation.name] = operation
            self._begun.pop(operation.name, None)
            self._changed.notify_all()

    def _gave_up(self, said: list[Any]) -> bool:
        """Whether no rank can go on, in which case what they wait for has failed."""
        here = [report for member, report in enumerate(said) if member not in self._joined]
        stuck = here and all(waits for _, _, waits, _ in here)
        if not stuck or max(quiet_s for *_, quiet_s in here) < self._stuck_s:
            return False
        texts = []
        for rank, told, (_, _, waits, _) in zip(self._ranks, self._told, said, strict=True):
            for name in waits:
                texts.append(f"rank {rank} waits for {told.pop(name)['kind']} {name}")
        error = HorovodInternalError(
            f"{'; '.join(texts)}: none can go on, as another has not begun it: begin the same "
            "operations, under the same names, on every rank"
        )
        with self._changed:
            for name in said[self.group.rank()][2]:
                self._begun.pop(name).fail(error)
            self._changed.notify_all()
        return True

    def _break(self, error: Exception) -> None:
        """Let everything fail: the ranks are no longer in step."""
        with self._changed:
            names = ", ".join(self._begun)
            self._broken = HorovodInternalError(f"{names or 'hvd.join'}: {error}")
            for operation in self._begun.values():
                operation.fail(self._broken)
            self._begun.clear()
            self._untold.clear()
            self._has_joined = False

    def _exchange(self, message: Any) -> list[Any]:
        """Return what every rank says in this round, by rank of the group."""
        own = json.dumps(message).encode()
        rows = self._gather(len(own).to_bytes(_LENGTH_BYTES, "little") + own, _FRAME_BYTES)
        lengths = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
        texts = [row[_LENGTH_BYTES:] for row in rows]
        if max(lengths) > _FRAME_BYTES - _LENGTH_BYTES:
            texts = self._gather(own, max(lengths))
        return [json.loads(text[:length]) for text, length in zip(texts, lengths, strict=True)]

    def _gather(self, data: bytes, width: int) -> list[bytes]:
        """The first `width` bytes of each rank's."""
        padded = bytearray(data[:width].ljust(width, b"\0"))
        own = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        theirs = own.new_empty([self._size * width])
        all_gather_single(theirs, own, group=self.group)
        everything = theirs.cpu().numpy().tobytes()
        return [everything[start : start + width] for start in range(0, len(everything), width)]
