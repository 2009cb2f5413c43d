"""Torch's profiler shows of a group's operations what it shows of gloo's."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from deepytorch_core.testing import spawn_ranks


def events(group: dist.ProcessGroup, rank: int, size: int) -> list[list[str]]:
    """Names without the backend's, and shapes, of what a profile shows of some operations."""
    vector, matrix, parts = torch.ones(3), torch.ones(2, 4), [torch.ones(3) for _ in range(size)]
    whole, lists = torch.ones(size, 3), [[torch.ones(3), torch.ones(2, 4)] for _ in range(size)]
    mine = rank == 0
    with torch.autograd.profiler.profile(record_shapes=True) as profile, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce(vector, group=group)
        dist.all_reduce_coalesced([vector, matrix], group=group)
        dist.all_gather_coalesced(lists, [vector, matrix], group=group)
        dist.all_gather(parts, vector, group=group)
        dist.broadcast(matrix, group=group, group_src=0)
        dist.reduce(matrix, group=group, group_dst=0)
        dist.gather(vector, parts if mine else None, group=group, group_dst=0)
        dist.scatter(vector, parts if mine else None, group=group, group_src=0)
        dist.all_to_all_single(torch.ones(size, 3), whole, group=group)
        dist.barrier(group=group)
        if mine:
            for _ in range(1, size):
                dist.recv(vector, group=group)
        else:
            dist.send(vector, group=group, group_dst=0)
    prefix = dist.get_backend(group) + ":"
    shown = [event for event in profile.function_events if event.name.startswith(prefix)]
    assert all(event.is_async for event in shown)
    return [[event.name.removeprefix(prefix), str(event.input_shapes)] for event in shown]


def compare(rank: int, world_size: int) -> None:
    ours = events(dist.group.WORLD, rank, world_size)
    assert ours == events(dist.new_group(backend="gloo"), rank, world_size)


def test_a_profile_shows_what_it_shows_of_gloo() -> None:
    spawn_ranks(compare, 3, backend="deepytorch")
