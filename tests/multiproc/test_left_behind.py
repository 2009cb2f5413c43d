"""Nothing is left of us once a program has destroyed its groups, or switched us off."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepytorch_core.base import config, unlisted
from deepytorch_core.c10d import activation
from deepytorch_core.report import summary
from deepytorch_core.testing import rank_store, spawn_ranks
from deepytorch_core.testing.leaks import holdings, left_over

# One file of the process's own stays: what its operations were, for reports after their end.
RECORD = "deepytorch-flight"


def caught() -> str:
    """The signals that this process handles, as the kernel tells."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"SigCgt:\s*(\w+)", status)
    assert found
    return found[1]


SETTLING_S = 4.0


def threads() -> set[str]:
    """Python's, with those of ours that it doesn't list, by name and number."""
    listed = {thread.ident: thread.name for thread in threading.enumerate()}
    return {f"{name} {ident}" for ident, name in (listed | unlisted.names()).items()}


class Before:
    """The process as it was before the first group."""

    def __init__(self) -> None:
        self.held = holdings()
        self.environment = dict(os.environ)  # noqa: TID251
        self.signals = caught()
        self.threads = threads()

    def left(self) -> list[str]:
        """At once what ends with the group, and within seconds what says farewell to others."""
        python = sorted(threads() - self.threads)
        found = [f"Python's thread {name}" for name in python]
        if caught() != self.signals:
            found.append(f"signals {caught()} instead of {self.signals}")
        changed = set(os.environ.items()) ^ set(self.environment.items())  # noqa: TID251
        found += [f"variable {name}" for name in sorted({name for name, _ in changed})]
        deadline = time.monotonic() + SETTLING_S
        while (held := self._more()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found + held

    def _more(self) -> list[str]:
        return [rest for rest in left_over(self.held, settling_s=0) if not is_record(rest)]


def is_record(what: str) -> bool:
    kind, _, rest = what.partition(": ")
    rest = re.sub(r" \(\d+\)$", "", rest)
    return kind in ("descriptors", "shared memory mapped") and all(
        RECORD in part for part in rest.split(", ")
    )


def use_all(rank: int, world_size: int) -> float:
    ones = torch.ones(3)
    dist.all_reduce(ones)
    dist.all_reduce(ones, async_op=True).wait()
    both = dist.new_group(list(range(world_size)))
    parts = [torch.zeros(2) for _ in range(world_size)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=both)
    if rank == 0:
        dist.isend(torch.ones(300000), 1).wait()
    elif rank == 1:
        dist.irecv(torch.zeros(300000), 0).wait()
    model = DistributedDataParallel(nn.Linear(4, 2))
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.BXOR)
    dist.barrier()
    return ones[0].item()


def rounds_of_groups(rank: int, world_size: int, variables: dict[str, str]) -> list[list[str]]:
    os.environ.update(variables)  # noqa: TID251
    warm_up()
    activation.activate()
    before, found = Before(), []
    for number in range(3):
        store = rank_store(f"round {number}")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        assert use_all(rank, world_size) == world_size**2
        assert summary.report().native_calls or variables
        dist.destroy_process_group()
        del store
        found.append(before.left())
    return found


def warm_up() -> None:
    """Make torch take what it keeps from its first use on."""
    dist.init_process_group("gloo", store=rank_store("alone"), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(4, 2))
    model(torch.ones(2, 4)).sum().backward()
    del model
    # Gloo's thread needs Python to let go of its last operation. A caller that ends the group
    # before that waits for the thread with Python locked, for ever.
    time.sleep(0.3)
    dist.destroy_process_group()


LAUNCHED: list[dict[str, str]] = [
    {},
    # The launcher told nothing of nodes, so that a thread listens for them.
    {"LOCAL_WORLD_SIZE": ""},
    # There are two nodes, whose sockets a thread of their own serves.
    {"DEEPYTORCH_NODE_ID": "a,b", "GLOO_SOCKET_IFNAME": "lo"},
]


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(variables, id=name, marks=[pytest.mark.extended] * (name == "unknown"))
        for variables, name in zip(LAUNCHED, ("a node", "unknown", "two nodes"), strict=True)
    ],
)
def test_nothing_is_left_after_the_groups(variables: dict[str, str]) -> None:
    for found in spawn_ranks(rounds_of_groups, 2, variables, fresh=True):
        assert found == [[], [], []]


def of_other_sizes(rank: int, world_size: int) -> list[Any]:
    activation.activate()
    found: list[Any] = []
    for size in (3, 2, 1, 3):
        if rank < size:
            name = f"of {size}, {len(found)}"
            dist.init_process_group("gloo", store=rank_store(name), rank=rank, world_size=size)
            ones = torch.ones(2)
            dist.all_reduce(ones)
            dist.destroy_process_group()
            found.append(ones[0].item())
        else:
            found.append(None)
    return found


def test_a_process_joins_one_job_after_the_other() -> None:
    assert spawn_ranks(of_other_sizes, 3) == [
        [3.0, 2.0, 1.0, 3.0],
        [3.0, 2.0, None, 3.0],
        [3.0, None, None, 3.0],
    ]


def switched_off(rank: int, world_size: int) -> list[Any]:
    warm_up()
    store = rank_store("stock")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(2))
    before, found = Before(), []
    for number in range(3):
        activation.activate()
        ones = torch.ones(3)
        dist.all_reduce(ones)
        dist.all_reduce(ones, async_op=True).wait()
        calls = summary.report().native_calls
        activation.deactivate()
        if number == 0:
            # Its client of the store stays with the group, which may be ours again.
            threads, before.held = before.held["threads"], holdings()
            assert len(before.held["threads"]) <= len(threads)
        found.append((ones.tolist(), before.left()))
        dist.all_reduce(ones)
        assert summary.report().native_calls == calls
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_deactivate_leaves_nothing_either() -> None:
    for found in spawn_ranks(switched_off, 2, fresh=True):
        assert found == [([4.0, 4.0, 4.0], [])] * 3


def a_group_that_is_kept(rank: int, world_size: int) -> list[str]:
    """A model or a list that has the group keeps no thread of ours."""
    warm_up()
    activation.activate()
    before = Before()
    dist.init_process_group("gloo", store=rank_store("kept"), rank=rank, world_size=world_size)
    kept = [dist.group.WORLD, DistributedDataParallel(nn.Linear(4, 2))]
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    python = sorted(threads() - before.threads)
    assert caught() == before.signals
    assert len(kept) == 2
    return python


def test_a_group_that_somebody_keeps_has_no_thread() -> None:
    assert spawn_ranks(a_group_that_is_kept, 2, fresh=True) == [[], []]


def set_for_others(rank: int, world_size: int) -> list[tuple[str | None, str | None]]:
    def seen() -> str | None:
        return os.environ.get("GLOO_SOCKET_IFNAME")  # noqa: TID251

    activation.activate(log="error")
    found = []
    for number in range(2):
        dist.init_process_group(
            "gloo", store=rank_store(f"set {number}"), rank=rank, world_size=world_size
        )
        if number == 0:  # as where this machine's name leads nowhere
            config.set_where_unset({"GLOO_SOCKET_IFNAME": "lo"})
        dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.BXOR)
        inside = seen()
        dist.destroy_process_group()
        found.append((inside, seen()))
    assert "DEEPYTORCH_LOG" not in os.environ  # noqa: TID251
    return found


def test_variables_come_back_with_the_next_group() -> None:
    assert spawn_ranks(set_for_others, 2, fresh=True) == [[("lo", None)] * 2] * 2
