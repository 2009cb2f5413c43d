"""Another user of the machine attacks a job's sockets: nothing counts, nobody waits."""

from __future__ import annotations

import json
import os
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import spawn_ranks, strangers
from soak import __main__ as soak

LIMIT_S = 8.0
ROUNDS = 20
PAUSE_S = 0.2  # between rounds: the stranger finds each group's sockets meanwhile
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def exchange(rank: int, world_size: int) -> tuple[float, bool]:
    """The longest round of a message each way in a new group, and whether all were right.

    The last rank is never in one: it has to be invited, while it waits for the next group.
    """
    longest, is_right = 0.0, True
    for number in range(ROUNDS):
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
        time.sleep(PAUSE_S)
        if rank == 2:
            continue
        began = time.monotonic()
        got = torch.zeros(3, dtype=torch.float32)
        sent = torch.full((3,), number * 10.0 + rank, dtype=torch.float32)
        works = [dist.isend(sent, 1 - rank, group=group), dist.irecv(got, 1 - rank, group=group)]
        for work in works:
            work.wait()
        longest = max(longest, time.monotonic() - began)
        is_right &= got.tolist() == [number * 10.0 + 1 - rank] * 3
    dist.barrier()
    return longest, is_right


def test_messages_come_through_whatever_a_stranger_sends() -> None:
    with strangers.attacked() as sent:
        found = spawn_ranks(exchange, 3, backend="deepytorch", timeout_s=100.0)
    assert all(is_right for _, is_right in found)
    assert all(longest < LIMIT_S for longest, _ in found)
    assert sent.datagrams > 1000, "nobody listened to the stranger"


# python -m soak --attack --minutes 10 does so for longer.
@pytest.mark.parametrize("nodes", ["", pytest.param("aab", marks=pytest.mark.extended)])
def test_random_collectives_are_right_under_attack(nodes: str, tmp_path: Path) -> None:
    record = tmp_path / "soak.jsonl"
    seed = str(random.randrange(1 << 30))
    arguments = ["--attack", "--ranks", "3", "--cycles", "0", "--seed", seed, "--nodes", nodes]
    assert soak.main([*arguments, "--minutes", "0.05", "--json", str(record)]) == 0, seed
    (told,) = map(json.loads, record.read_text().splitlines())
    assert told["failures"] == []
    assert told["by_gloo"] > 10
    assert told["attack"]["datagrams"] > 100
    assert told["attack"]["connections"] > 100
