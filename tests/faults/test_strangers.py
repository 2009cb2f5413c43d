"""Another user of the machine writes to a job's local sockets: nothing counts, nobody waits."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import spawn_ranks

STRANGER = 12_346
LIMIT_S = 8.0
ROUNDS = 12
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def datagram_sockets() -> list[str]:
    """Names of all abstract ones, without their zero byte."""
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) == 8 and words[4] == "0002" and words[7].startswith("@"):
            found.append(words[7][1:])
    return found


def write_to_all(counted: Any) -> None:
    """Forge answers to questions, invitations and noise, until terminated."""
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    texts = [f"{number} +0 0".encode() for number in range(1, 30)]
    texts += [b"0 invite x y", b"", os.urandom(4000)]
    names: list[str] = []
    for number in itertools.count():
        if number % 20 == 0 or not names:
            names = datagram_sockets()
        for name in names:
            for text in texts:
                try:
                    own.sendto(text, socket.MSG_DONTWAIT, "\0" + name)
                except OSError:
                    continue
                counted.value += 1


def exchange(rank: int, world_size: int) -> tuple[float, bool]:
    """The longest round of a message each way in a new group, and whether all were right."""
    longest, is_right = 0.0, True
    for number in range(ROUNDS):
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
        began = time.monotonic()
        got = torch.zeros(3, dtype=torch.float32)
        sent = torch.full((3,), number * 10.0 + rank, dtype=torch.float32)
        works = [dist.isend(sent, 1 - rank, group=group), dist.irecv(got, 1 - rank, group=group)]
        for work in works:
            work.wait()
        longest = max(longest, time.monotonic() - began)
        is_right &= got.tolist() == [number * 10.0 + 1 - rank] * 3
    return longest, is_right


def test_messages_come_through_whatever_a_stranger_sends() -> None:
    context = multiprocessing.get_context("fork")
    counted = context.Value("q", 0, lock=False)
    stranger = context.Process(target=write_to_all, args=(counted,))
    stranger.start()
    try:
        found = spawn_ranks(exchange, 2, backend="deepytorch", timeout_s=100.0)
    finally:
        stranger.terminate()
        stranger.join()
    assert all(is_right for _, is_right in found)
    assert all(longest < LIMIT_S for longest, _ in found)
    assert counted.value > 1000, "nobody listened to the stranger"
