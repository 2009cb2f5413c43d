"""Another user of the machine who attacks a job's sockets: forged messages, floods and garbage.

The stranger attacks all that the processes below this one listen at: abstract datagram and stream
sockets and TCP ports. Their names are read as root, but all that is sent is another user's. None of
the other jobs of the machine gets any of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRANGER = 12_346
"""The user who attacks: a number that no account has."""
_LOOK_S = 0.1
_PAUSE_S = 0.002  # between two rounds over all sockets: the job needs the processors, too
_FLOOD = 6  # times each message of a round
_MOST_OPEN = 48  # connections that are held open and say nothing more
_LISTENS = "0A"  # of a socket in /proc/net/tcp
_KINDS = {"0001": "streams", "0002": "datagrams", "0005": "streams"}


@dataclass
class Targets:
    """Names of abstract sockets, without their zero byte, and TCP ports."""

    datagrams: list[str] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)


@dataclass
class Sent:
    """The counts of what was sent while the attack lasted."""

    datagrams: int = 0
    connections: int = 0


def missing_privilege() -> str | None:
    """Why this process can't be two users; None if it can."""
    return None if os.geteuid() == 0 else "only root can be another user"


@contextlib.contextmanager
def attacked() -> Iterator[Sent]:
    """While open, a stranger attacks all sockets of the processes that this one has started.

    Yields what was sent, complete at the end. Needs root.
    """
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    counts = context.Array("q", 2, lock=False)  # the stranger may be ended while it counts
    stranger = context.Process(target=_attack, args=(reading, counts), daemon=True)
    stranger.start()
    over = threading.Event()
    looking = threading.Thread(target=_look, args=(writing, over, stranger.pid), daemon=True)
    looking.start()
    sent = Sent()
    try:
        yield sent
    finally:
        over.set()
        looking.join()
        is_alive = stranger.is_alive()
        stranger.terminate()
        stranger.join()
        sent.datagrams, sent.connections = counts[:]
        assert is_alive, "the stranger gave up"


def _look(writing: Any, over: threading.Event, stranger: int | None) -> None:
    told: Targets | None = None
    while not over.wait(_LOOK_S):
        found = targets(_below(os.getpid()) - {stranger})
        if found != told:
            told = found
            writing.send(json.dumps(vars(found)))


def targets(pids: set[int]) -> Targets:
    """Return what these processes listen at."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = Targets()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) == 8 and words[7].startswith("@") and words[6] in inodes:
            names: list[str] = getattr(found, _KINDS[words[4]])
            names.append(words[7][1:])
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and words[9] in inodes:
                    found.ports.append(int(words[1].rpartition(":")[2], 16))
    return found


def _below(root: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError):  # it ended
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(stat[1])
    family = [root]
    for parent in family:  # grows while it is read
        family += [pid for pid, above in parents.items() if above == parent]
    return set(family)


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/{pid}/fd/{entry}")
                if name.startswith("socket:["):
                    yield name[len("socket:[") : -1]


def _attack(reading: Any, counts: Any) -> None:
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    os.nice(10)
    known = Targets()
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    held: deque[socket.socket] = deque()
    for number in itertools.count():
        while reading.poll():
            known = Targets(**json.loads(reading.recv()))
        for name in known.datagrams:
            for text in _forged(number) * _FLOOD:
                with contextlib.suppress(OSError):
                    own.sendto(text, socket.MSG_DONTWAIT, "\0" + name)
                    counts[0] += 1
        addresses: list[Any] = [("127.0.0.1", port) for port in known.ports]
        for address in ["\0" + name for name in known.streams] + addresses:
            with contextlib.suppress(OSError):
                held.append(_connection(address))
                counts[1] += 1
        while len(held) > _MOST_OPEN:
            held.popleft().close()
        time.sleep(_PAUSE_S)


def _forged(number: int) -> list[bytes]:
    """Answers to questions, an invitation and noise."""
    answers = [f"{number % 30 + more} +0 0".encode() for more in range(8)]
    return [*answers, b"0 invite x y", b"", random.randbytes(random.randrange(1, 4000))]


def _connection(address: Any) -> socket.socket:
    """One to a job's socket that has said something wrong, or nothing."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.connect(address)
    garbage = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, random.randbytes(200))
    with contextlib.suppress(OSError):
        connection.send(random.choice(garbage))
    return connection
