"""Helpers for tests that need several ranks; used by this project's tests and open to yours.

def average(rank: int, world_size: int) -> float:
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return value.item()

def test_average() -> None:
    assert spawn_ranks(average, 2, backend="deepytorch") == [0.5, 0.5]
"""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any

from deepytorch_core.testing.failures import RankError, RankTimeoutError
from deepytorch_core.testing.pool import close_idle_workers, spawn_ranks
from deepytorch_core.testing.ports import free_port
from deepytorch_core.testing.program import run_program
from deepytorch_core.testing.script import run_script
from deepytorch_core.testing.worker import place, rank_store

if TYPE_CHECKING:
    import pytest

__all__ = [
    "RankError",
    "RankTimeoutError",
    "assert_same_on_all_ranks",
    "close_idle_workers",
    "free_port",
    "needs_gpus",
    "rank_store",
    "run_program",
    "run_script",
    "spawn_ranks",
]


def assert_same_on_all_ranks(value: Any, name: str) -> None:
    """Check, inside a rank of `spawn_ranks`, that every rank holds the same bits.

    All ranks must call it, each `name` once per call of `spawn_ranks`. The comparison goes over
    the rendezvous store, so it does not rely on the backend under test. `value` is a tensor of any
    dtype, shape and device, or anything that pickles. Raises AssertionError on every rank, naming
    the ranks that differ from rank 0 and what they hold.
    """
    rank, world_size = place()
    store = rank_store(f"same/{name}")
    digest, text = _digest(value)
    store.set(str(rank), f"{digest} {text}")
    seen = [store.get(str(peer)).decode() for peer in range(world_size)]
    different = [peer for peer in range(world_size) if seen[peer] != seen[0]]
    if different:
        held = "\n".join(f"  rank {peer}: {seen[peer]}" for peer in [0, *different])
        raise AssertionError(f"{name}: ranks {different} differ from rank 0\n{held}")


def _digest(value: Any) -> tuple[str, str]:
    import torch

    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(pickle.dumps(value)).hexdigest()[:16], repr(value)[:200]
    plain = value.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    first = plain.reshape(-1)[:4].tolist()
    text = f"{plain.dtype} {tuple(plain.shape)} starts {first}"
    return hashlib.sha256(data).hexdigest()[:16], text


def needs_gpus(num_gpus: int) -> pytest.MarkDecorator:
    """Return the marker of a test that runs only where torch sees at least `num_gpus` GPUs."""
    import pytest
    import torch

    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < num_gpus, reason=f"needs {num_gpus} GPUs, found {found}")
