"""Ranks on other nodes, asked for from outside through a rank of this node.

Only the job's own processes reach its store. Each process that listens there (live.py) also waits
at a pipe for questions from its own node. It writes into a memfd what the other nodes answered.
Both are opened through /proc, which lets in the same user alone. A process that can't get to it,
because something holds its GIL, is passed over: any rank of the node will do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import select
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from deepytorch_core.hang import evidence, record
from deepytorch_core.hang.evidence import Rank

NAME = "deepytorch-nodes"

# How it is asked. AGAIN: without stacks, and as soon as those have answered who did the last time.
# GENTLY: of ranks that may well be in good health, see `stacks.ask`.
FIRST, AGAIN, GENTLY = "first", "again", "gently"

# How long other nodes have to answer. Their ranks look into the store once a second, and who holds
# the GIL there is found out in another.
ANSWER_LIMIT_S = 5.0
# All of it, with looking for a process that takes the question.
_LIMIT_S = 8.0
# A process that takes no question for so long may hold the GIL: the next is asked as well.
_TURN_S = 0.7
_POLL_S = 0.02
_CHECK_S = 0.2  # so often, whether who was asked is still there
_MOST_BYTES = 256 << 20
_TOKEN = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True)
class EvidenceRequest:
    """A question to a process, and how it is asked: FIRST, AGAIN or GENTLY.

    `until` is on the system's monotonic clock: later nobody waits for the answer.
    """

    token: str
    how: str
    until: float


class Desk:
    """A process's side: where questions come in. `wake` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            memory = os.memfd_create(f"{NAME}@{reading}", os.MFD_CLOEXEC)
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        # A process that asks empties the file first: each answer begins where the file then ends.
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
        self._descriptors: tuple[int, ...] = (reading, writing, memory)
        _desks.add(self)

    @property
    def is_open(self) -> bool:
        """Whether questions are taken."""
        return bool(self._descriptors)

    def wait(self, seconds: float) -> list[EvidenceRequest]:
        """The questions that came in, each noted as taken; sooner than `seconds` if there are."""
        if not self._descriptors:
            return []
        reading = self._descriptors[0]
        found: list[EvidenceRequest] = []
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        if not poll.poll(1e3 * seconds):
            return found
        for line in os.read(reading, select.PIPE_BUF).splitlines():
            question = _question(line)
            if question is not None and time.monotonic() < question.until:
                self._write({"token": question.token})
                found.append(question)
        return found

    def reply(self, question: EvidenceRequest, ranks: Sequence[Rank], *, problem: str = "") -> None:
        """Write what is known of other nodes' ranks, or why they could not be asked."""
        texts = [evidence.to_json(rank) for rank in ranks]
        self._write({"token": question.token, "ranks": texts, "problem": problem})

    def wake(self) -> None:
        """Have `wait` return at once."""
        with self._lock, contextlib.suppress(OSError):
            if self._descriptors:
                os.write(self._descriptors[1], b"\n")

    def close(self) -> None:
        """Take no more questions. Idempotent."""
        with self._lock:
            descriptors, self._descriptors = self._descriptors, ()
            for each in descriptors:
                os.close(each)

    def _write(self, answer: dict[str, object]) -> None:
        with self._lock:
            for memory in self._descriptors[2:]:
                data = json.dumps(answer, separators=(",", ":")).encode() + b"\n"
                while data:
                    data = data[os.write(memory, data) :]


# A forked child has no thread that would answer.
_desks: weakref.WeakSet[Desk] = weakref.WeakSet()


def _forget() -> None:
    for desk in _desks:
        desk._lock = threading.RLock()  # another thread of the parent may have held it
        desk.close()


os.register_at_fork(after_in_child=_forget)


def _question(line: bytes) -> EvidenceRequest | None:
    try:
        token, how, until = line.decode().split()
        found = EvidenceRequest(token, how, float(until))
    except ValueError:  # a call to wake up, or none of ours
        return None
    return found if _TOKEN.fullmatch(token) and how in (FIRST, AGAIN, GENTLY) else None


@dataclass(frozen=True)
class EvidenceReply:
    """The other nodes' words: evidence of their ranks, or `problem`: why there is none."""

    ranks: tuple[Rank, ...] = ()
    problem: str = ""

    def newer_than(self, earlier: EvidenceReply) -> EvidenceReply:
        """This one, with what an earlier one says of ranks of which this one knows nothing."""
        newer = {rank.rank: rank for rank in self.ranks if rank.process != evidence.MISSING}
        return EvidenceReply(
            tuple(newer.get(rank.rank, rank) for rank in earlier.ranks), self.problem
        )


def ask(pids: Sequence[int], *, how: str = FIRST, limit_s: float = _LIMIT_S) -> EvidenceReply:
    """Ask what ranks on other nodes do, by the first of these processes that takes the question.

    It takes at most `limit_s` seconds and raises nothing.
    """
    deadline = time.monotonic() + limit_s
    token = secrets.token_hex(8)
    question = f"{token} {how} {deadline}\n".encode()
    waiting, asked = list(pids), []
    next_turn = next_check = 0.0
    taken = False
    try:
        while (now := time.monotonic()) < deadline:
            if waiting and not taken and now >= next_turn:
                pid = waiting.pop(0)
                try:
                    process = _put(pid, question)
                except BlockingIOError:  # somebody else asks it just now
                    waiting.append(pid)
                    next_turn = now + _POLL_S
                else:
                    if process is None:
                        continue
                    asked.append(process)
                    next_turn = now + _TURN_S
            gone: list[_Asked] = []
            if now >= next_check:
                next_check = now + _CHECK_S
                gone = [process for process in asked if not process.is_there()]
            for process in asked:
                for answer in _read(process.descriptor, token):
                    taken = True
                    if "ranks" in answer:
                        return _answer(answer)
            for process in gone:
                # It has ended, or its group has, without a last word: another may know more.
                asked.remove(process)
                os.close(process.descriptor)
                taken, next_turn = False, 0.0
            if not asked and not waiting:
                return EvidenceReply(problem="no process of this node listens for other nodes")
            time.sleep(_POLL_S)
    finally:
        for process in asked:
            os.close(process.descriptor)
    if taken:
        return EvidenceReply(problem=f"the job's store did not answer within {limit_s:g} s")
    return EvidenceReply(
        problem=f"no rank of this node took the question within {limit_s:g} s: they are stopped, "
        "or something holds their GIL"
    )


@dataclass(frozen=True)
class _Asked:
    """A process that has a question: `pipe` is where it went, as /proc shows it, and what that is.

    Its answer will be in the file behind `descriptor`.
    """

    descriptor: int
    pipe: tuple[str, str]

    def is_there(self) -> bool:
        """Whether it may still answer."""
        with contextlib.suppress(OSError):
            return os.readlink(self.pipe[0]) == self.pipe[1]
        return False


def _put(pid: int, question: bytes) -> _Asked | None:
    """Lay the question before a process; None where it takes none.

    Raises BlockingIOError while somebody else asks it.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = record.open_memfd(pid, NAME, os.O_RDWR)
            if descriptor is None:
                return None
            stack.callback(os.close, descriptor)
            # Two that ask at once would empty the file under each other.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
            path = f"/proc/{pid}/fd/{int(name.rpartition('@')[2])}"
            link = os.readlink(path)
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, pipe)
            os.ftruncate(descriptor, 0)
            os.write(pipe, question)
            return _Asked(os.dup(descriptor), (path, link))
        except BlockingIOError:
            raise
        except (OSError, ValueError):
            return None


def _read(descriptor: int, token: str) -> list[dict[str, object]]:
    """Return what the file holds by now of the answer to this question."""
    size = min(os.fstat(descriptor).st_size, _MOST_BYTES)
    data = os.pread(descriptor, size, 0)
    found = []
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.get("token") == token:
                found.append(answer)
    return found


def _answer(answer: dict[str, object]) -> EvidenceReply:
    texts = answer["ranks"]
    ranks = []
    for text in texts if isinstance(texts, list) else []:
        with contextlib.suppress(ValueError):
            ranks.append(evidence.from_json(str(text)))
    return EvidenceReply(tuple(ranks), str(answer.get("problem", "")))
