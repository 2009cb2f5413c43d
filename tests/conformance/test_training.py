"""Training through torch's own wrappers gives gloo's losses, natively, on four ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepytorch_core.testing import assert_same_on_all_ranks, rank_store, spawn_ranks

BACKEND = "deepytorch"
NUM_STEPS = 4


@contextmanager
def world(backend: str, rank: int, world_size: int) -> Iterator[None]:
    from deepytorch_core import _core
    from deepytorch_core.c10d import backend as deepytorch_backend

    deepytorch_backend.register()
    store = rank_store(backend)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    _core.reset_statistics()
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_model() -> nn.Module:
    torch.manual_seed(7)
    # Odd sizes, so that shards are uneven and padded.
    return nn.Sequential(
        nn.Embedding(37, 29), nn.Linear(29, 61), nn.GELU(), nn.LayerNorm(61), nn.Linear(61, 37)
    )


def train(model: nn.Module, rank: int, *, clip: bool = True) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(37, (6, 11), generator=data)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), (tokens * 5 + 1).flatten() % 37)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(rank: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=1)


def ddp_static_with_hook(rank: int) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(
        make_model(), static_graph=True, gradient_as_bucket_view=True
    )
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def fsdp1(rank: int) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(
        make_model(), device_id=torch.device("cpu"), use_orig_params=True
    )


def fsdp2(rank: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_hybrid(rank: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(make_model(), mesh=mesh, mp_policy=policy)


def tensor_parallel(rank: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Embedding(37, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 37)
    )
    mesh = init_device_mesh("cpu", (4,))
    return parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})


WRAPPERS: dict[str, Callable[[int], nn.Module]] = {
    wrapper.__name__: wrapper
    for wrapper in (ddp, ddp_static_with_hook, fsdp1, fsdp2, fsdp2_hybrid, tensor_parallel)
}


def both_backends(rank: int, world_size: int, name: str) -> dict[str, Any]:
    from deepytorch_core import _core

    losses = {}
    algorithms: dict[str, set[str]] = {}
    warnings.simplefilter("ignore")
    for backend in ("gloo", BACKEND):
        with world(backend, rank, world_size):
            model = WRAPPERS[name](rank)
            if name == "tensor_parallel":  # the same data on all ranks; only some tensors sharded
                losses[backend] = train(model, 0, clip=False)
            else:
                losses[backend] = train(model, rank)
            for row in _core.statistics():
                algorithms.setdefault(row["op"], set()).add(row["algorithm"])
    return {"losses": losses, "algorithms": algorithms}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_losses_equal_gloos(wrapper: str) -> None:
    for result in spawn_ranks(both_backends, 4, wrapper, timeout_s=100):
        gloo, ours = result["losses"]["gloo"], result["losses"][BACKEND]
        tolerance = 2e-3 if wrapper == "ddp_static_with_hook" else 1e-5
        assert ours == pytest.approx(gloo, rel=tolerance)
        assert ours[-1] < ours[0]
        # Not only delegated: gradients and shards travel natively.
        native = {"fsdp1": "reduce_scatter", "fsdp2": "reduce_scatter"}.get(wrapper, "all_reduce")
        if wrapper == "fsdp2_hybrid":
            native = "all_gather"
        assert "delegate" not in result["algorithms"][native]


def distributed_tensors(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.arange(9 * 7, dtype=torch.float32).reshape(9, 7)
    tensor = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    assert torch.equal(tensor.full_tensor(), full)
    assert torch.equal(tensor.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), full)
    product = tensor @ tensor.t()
    torch.testing.assert_close(product.full_tensor(), full @ full.t())
    total = tensor.sum()
    assert any(isinstance(placement, Partial) for placement in total.placements)
    assert total.full_tensor() == full.sum()


def test_distributed_tensors() -> None:
    spawn_ranks(distributed_tensors, 4, backend=BACKEND, timeout_s=100)


def checkpoint(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = fsdp2(rank)
    train(model, rank)
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=f"{folder}/plain")
    warnings.simplefilter("ignore")
    # Written by a thread of its own, over a group of its own, while this one works on.
    later = dcp.async_save(
        {"model": state}, checkpoint_id=f"{folder}/async", process_group=dist.new_group()
    )
    expected = {name: value.full_tensor().clone() for name, value in state.items()}
    later.result()
    for kind in ("plain", "async"):
        restored = fsdp2(rank)
        empty = {"model": get_model_state_dict(restored)}
        dcp.load(empty, checkpoint_id=f"{folder}/{kind}")
        set_model_state_dict(restored, empty["model"])
        for name, value in get_model_state_dict(restored).items():
            full = value.full_tensor()
            assert torch.equal(full, expected[name]), (kind, name)
            assert_same_on_all_ranks(full, f"{kind}/{name}")


def test_distributed_checkpoint(tmp_path: Path) -> None:
    spawn_ranks(checkpoint, 4, str(tmp_path), backend=BACKEND, timeout_s=100)
