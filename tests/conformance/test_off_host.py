"""Tensors that are not on the host go to the stock backend as they are, in one piece."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepytorch_core.c10d import adapter
from deepytorch_core.testing import spawn_ranks

RANKS = 4


def call_with_meta_tensors(rank: int, world_size: int, op: str) -> tuple[list[Any], bool]:
    """The sizes that come out, and whether a wrong size is refused; "meta" stands for a GPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    group = dist.distributed_c10d._get_default_group()
    asked: list[str] = []

    def stock(device: str, limit_s: float) -> Any:
        asked.append(device)
        return group._get_backend(torch.device("cpu"))

    ours = adapter.load().create_backend(
        dist.HashStore(),
        0,
        RANKS,
        timeout=timedelta(seconds=20),
        group_name="off host",
        global_ranks=list(range(RANKS)),
        delegates=stock,
        native=True,
    )
    part = torch.empty(3, 5, device="meta")
    # Not contiguous: on the host this needs a copy.
    whole = torch.empty(5, 3 * RANKS, device="meta").t()
    calls = {
        "all_gather": lambda large: ours._allgather_base(large, part, AllgatherOptions()),
        "reduce_scatter": lambda large: ours._reduce_scatter_base(
            part, large, ReduceScatterOptions()
        ),
    }
    calls[op](whole).wait()
    with pytest.raises(ValueError, match="the large tensor has 75 elements; 4 ranks of 15 need 60"):
        calls[op](torch.empty(75, device="meta"))
    return asked, whole.is_contiguous()


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_the_stock_backend_gets_the_tensors_of_the_caller(op: str) -> None:
    ((asked, contiguous),) = spawn_ranks(call_with_meta_tensors, 1, op, fresh=True)
    assert asked == ["meta"]
    assert not contiguous


class MemoryOnGpus:
    """Stands in for `deepytorch_core.c10d.device_memory.GroupMemory`."""

    there = True
    asked: list[Any] = []

    def is_there(self) -> bool:
        return self.there

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.asked.append((size, dtype, device))
        return torch.full((size,), 7, dtype=dtype)


def allocate_on_gpus(rank: int, world_size: int) -> None:
    memory = MemoryOnGpus()
    made = adapter.load().create_backend(
        dist.HashStore(),
        0,
        RANKS,
        timeout=timedelta(seconds=20),
        group_name="memory on GPUs",
        global_ranks=list(range(RANKS)),
        delegates=lambda device, limit_s: pytest.fail("NCCL was asked"),
        native=True,
        device_memory=memory,
    )
    device = torch.device("cuda", 3)
    given = made.allocate_tensor(5, dtype=torch.bfloat16, device=device)
    assert torch.equal(given, torch.full((5,), 7, dtype=torch.bfloat16))
    assert memory.asked == [(5, torch.bfloat16, device)]
    with pytest.raises(ValueError, match="size -1 is negative"):
        made.allocate_tensor(-1, dtype=torch.bfloat16, device=device)
    assert made.allocate_tensor(5, dtype=torch.float32, device=torch.device("cpu")).shape == (5,)
    assert len(memory.asked) == 1


def test_memory_on_gpus_comes_from_where_the_group_was_told() -> None:
    spawn_ranks(allocate_on_gpus, 1, fresh=True)
