"""Tests of what can't be done: one line with the way out, on every rank; and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

import deepytorch
import deepytorch.integrations.horovod as hvd
from deepytorch_core.base import config
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import spawn_ranks


def init_with(rank: int, world_size: int, given: list[dict[str, Any]]) -> str:
    deepytorch.deactivate()
    dist.init_process_group("gloo")
    with pytest.raises(hvd.IntegrationError) as error:
        hvd.init(**given[rank])
    assert not hvd.is_initialized()
    assert serving_name() == "gloo"
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{}, {"tuning": "off"}], "horovod on rank 1: unknown option 'tuning'"),
        ([{"timeout_s": 0}, {}], "horovod on rank 0: timeout_s=0: expected a number above 0"),
        ([{"staging_mb": 8}, {"staging_mb": 9}], "horovod: rank 0 was given staging_mb=8 and rank"),
    ],
)
def test_wrong_or_mixed_options(given: list[dict[str, Any]], said: str) -> None:
    for message in spawn_ranks(init_with, 2, given, fresh=True):
        assert message.startswith(said)
        assert "\n" not in message


def attributes() -> dict[str, Any]:
    return {**vars(c10d), **{f"dist.{name}": value for name, value in vars(dist).items()}}


def come_and_go(rank: int, world_size: int) -> tuple[str, str, str]:
    deepytorch.deactivate()
    dist.init_process_group("gloo")
    before = attributes()
    hvd.init(collectives="native", compile="off")
    hvd.init()
    during = serving_name()
    module = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    hvd.shutdown()
    hvd.shutdown()
    after_it = attributes()
    changed = {name for name, value in before.items() if after_it[name] is not value}
    assert changed <= {"_group_count"}, changed  # of all groups that there ever were
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    module(torch.ones(2) * rank).sum().backward()
    optimizer.step()  # an ordinary one again
    optimizer.zero_grad()
    after = serving_name()
    hvd.init()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    again = serving_name()
    hvd.shutdown()
    return during, after, again


def test_shutdown_leaves_torch_as_init_found_it() -> None:
    found = spawn_ranks(come_and_go, 2, fresh=True)
    assert found == [("deepytorch", "gloo", "deepytorch")] * 2


def test_another_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.5.1")
    with pytest.raises(
        hvd.IntegrationError, match=r"torch 2\.5\.1 is not known.*>=2\.11.*2\.13\.0"
    ):
        hvd.init()


def test_before_init() -> None:
    for call in (hvd.rank, hvd.size, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match="Horovod has not been initialized; use hvd.init"):
            call()
    with pytest.raises(ValueError, match="not all different"):
        hvd.ProcessSet([1, 1])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hvd.init(comm=[0, 1]), "use hvd.init.process_sets="),
        (lambda: hvd.start_timeline("t.json"), "torch.profiler"),
        (lambda: hvd.stop_timeline(), "torch.profiler"),
        (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "use op=hvd.Average"),
    ],
)
def test_what_horovod_has_and_this_has_not(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(hvd.IntegrationError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="The op parameter supersedes average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="9 is not a valid ReduceOp"):
        hvd.allreduce(torch.ones(1), op=9)
    with pytest.raises(ValueError, match="invalid params of type: <class 'int'>"):
        hvd.broadcast_parameters(3, 0)  # type: ignore[arg-type]


def differ(rank: int, world_size: int) -> list[str]:
    hvd.init()
    model = nn.Linear(2, 2 + rank)
    names = {f"weight{rank}": torch.ones(2)}
    said = []
    for wrong in (
        lambda: hvd.allreduce(torch.ones(4 + rank)),
        lambda: hvd.allreduce(torch.ones(4, dtype=[torch.float32, torch.int32][rank])),
        lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(4 + rank), name="x")),
        lambda: hvd.allgather(torch.ones(4, 2 + rank)),
        lambda: hvd.broadcast(torch.ones(4 + rank), 0),
        lambda: hvd.alltoall(torch.ones(4, 2 + rank)),
        lambda: hvd.alltoall(torch.ones(4), splits=[2, 2 + rank]),
        lambda: hvd.reducescatter(torch.ones(4 + 2 * rank)),
        lambda: hvd.broadcast_parameters(model.state_dict(), 0),
        lambda: hvd.broadcast_parameters(names, 0),
        lambda: hvd.allreduce(torch.ones(1)) if rank else hvd.allgather(torch.ones(1)),
    ):
        with pytest.raises((hvd.HorovodInternalError, ValueError)) as error:
            wrong()
        said.append(str(error.value))
    # Nothing of that broke the group.
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    hvd.shutdown()
    return said


def test_ranks_that_differ_get_errors_and_go_on() -> None:
    first, second = spawn_ranks(differ, 2, backend="deepytorch")
    for messages in (first, second):
        assert len(messages) == 11
        assert messages[0].startswith("Mismatched tensor shapes: rank 0 has [4], rank 1 has [5]")
        assert messages[1].startswith("Mismatched data types: rank 0 has float32, rank 1 has int32")
        assert "beyond the first dimension: rank 0 has 2, rank 1 has 3" in messages[3]
        assert "Mismatched operations: rank 0 has allgather, rank 1 has allreduce" in messages[10]
        assert "parameters differ between ranks" in messages[8]
        assert "weight0" in messages[9]
        assert "weight1" in messages[9]
    assert "splits [2, 3] must be 2 numbers that add up to 4 rows (rank 1)" in first[6]
    assert "splits [2, 3] must be 2 numbers that add up to 4 rows" in second[6]


def other_names(rank: int, world_size: int) -> str:
    config.set_current(None)
    hvd.init(debug=True)
    assert hvd.allreduce(torch.ones(1), name="same").item() == 1.0
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(1), name=f"gradient.{rank}")
    if rank == 0:
        assert hvd.join() in (0, 1)
    else:
        hvd.allreduce(torch.ones(1), name="alone")
        hvd.join()
    hvd.shutdown()
    return str(error.value)


def test_with_debug_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    for message in spawn_ranks(other_names, 2, backend="deepytorch"):
        assert message.startswith(
            "rank 0 waits for allreduce gradient.0; rank 1 waits for allreduce gradient.1: none can"
        )
