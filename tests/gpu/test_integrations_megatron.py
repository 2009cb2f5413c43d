"""Megatron-core on GPUs, tensor parallel 2, on four also data parallel 2: plain NCCL's losses."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import needs_gpus, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(2)]

DATA = 2 if torch.cuda.device_count() >= 4 else 1

GPT = Path(__file__).parents[1] / "integrations" / "megatron_gpt.py"
STEPS = 20
# Importing Megatron may build its helpers, and NCCL's first calls are slow.
TIMEOUT_S = 300


def _init(rank: int, world_size: int, address: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{address}", rank=rank, world_size=world_size
    )


def _train_stock(
    rank: int, world_size: int, address: str, distributed_optimizer: bool
) -> tuple[list[float], set[str]]:
    _init(rank, world_size, address)
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    gpt = runpy.run_path(str(GPT))
    losses = gpt["train"](collection, steps=STEPS, distributed_optimizer=distributed_optimizer)
    backends = set(gpt["backends_of"](collection).values())
    parallel_state.destroy_model_parallel()
    return losses, backends


def _train_ours(
    rank: int,
    world_size: int,
    address: str,
    distributed_optimizer: bool,
    backend_for: dict[str, str],
) -> tuple[list[float], dict[str, str], int]:
    import deepytorch
    from deepytorch.integrations.megatron import ProcessGroupFactory

    _init(rank, world_size, address)
    factory = ProcessGroupFactory(tensor=2, data=DATA, backend_for=backend_for)
    # With options for NCCL, which go to the delegate.
    collection = factory.build(
        create_gloo_process_groups=False, high_priority_stream_groups=["tp", "dp_cp"]
    )
    gpt = runpy.run_path(str(GPT))
    losses = gpt["train"](collection, steps=STEPS, distributed_optimizer=distributed_optimizer)
    backends = gpt["backends_of"](collection)
    report = deepytorch.report()
    calls = report.native_calls + report.delegated_calls
    factory.undo()
    return losses, backends, calls


def _stock(path: Path, distributed_optimizer: bool) -> list[list[float]]:
    results: list[Any] = spawn_ranks(
        _train_stock,
        2 * DATA,
        str(path / "stock"),
        distributed_optimizer,
        fresh=True,
        env={"DEEPYTORCH_ENABLED": "0"},
        timeout_s=TIMEOUT_S,
    )
    assert all(backends == {"nccl"} for _, backends in results)
    return [losses for losses, _ in results]


@pytest.mark.timeout(2 * TIMEOUT_S + 60)
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("backend_for", [{}, {"pp": "nccl", "dp": "stock"}], ids=["all", "tp only"])
def test_losses_are_nccls(
    distributed_optimizer: bool, backend_for: dict[str, str], tmp_path: Path
) -> None:
    expected = _stock(tmp_path, distributed_optimizer)
    ours = spawn_ranks(
        _train_ours,
        2 * DATA,
        str(tmp_path / "ours"),
        distributed_optimizer,
        backend_for,
        fresh=True,
        timeout_s=TIMEOUT_S,
    )
    for stock, (losses, backends, calls) in zip(expected, ours, strict=True):
        assert len(losses) == 2 * STEPS
        assert losses[-1] != losses[0]
        assert losses == pytest.approx(stock, rel=1e-5)
        assert calls > 0
        assert backends["tp"] == "deepytorch"
        assert backends["pp"] == backend_for.get("pp", "deepytorch")
        assert backends["dp_cp"] == ("nccl" if "dp" in backend_for else "deepytorch")
