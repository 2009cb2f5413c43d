"""A group of one rank, as scripts for several GPUs run on one: it trains what NCCL trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.base import decisions
from deepytorch_core.testing import needs_gpus, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(400)]

STEPS = 80
MAX_LENGTH = 128


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=None, **shape, **heads))


def _batch(numbers: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(numbers[0])
    lengths = torch.randint(4, MAX_LENGTH + 1, (4,), generator=generator)
    ids = torch.randint(4, 512, (4, int(lengths.max())), generator=generator)
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def _train(rank: int, world_size: int, ours: bool) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    model = DistributedDataParallel(_model().to(device), device_ids=[device])
    numbers: Any = range(STEPS)
    loader: DataLoader[Any] = DataLoader(numbers, collate_fn=_batch)
    if ours:
        import deepytorch
        from deepytorch.integrations.transformers import pack_batches

        assert pack_batches(model, "on", loaders=[loader])
        deepytorch.compile(model, is_patient=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    compiles: list[dict[str, Any]] = []
    if ours:
        compiles = [
            decision for decision in decisions.made() if decision["what"].startswith("compile of")
        ]
    return {"losses": losses, "compiles": compiles, "backend": dist.get_backend()}


def test_ddp_packed_and_compiled_on_one_gpu() -> None:
    (stock,) = spawn_ranks(_train, 1, False, backend="nccl", env={"DEEPYTORCH_ENABLED": "0"})
    (ours,) = spawn_ranks(_train, 1, True, backend="deepytorch", fresh=True, timeout_s=300)
    assert ours["backend"] == "deepytorch"
    (compiled,) = ours["compiles"]
    assert "dropped" not in compiled
    assert ours["losses"] == pytest.approx(stock["losses"], rel=2e-2)


def _collectives(rank: int, world_size: int) -> list[list[float]]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    x = torch.arange(8.0, device=device)
    found = []
    for asynchronous in (False, True):
        reduced, gathered, scattered = x.clone(), torch.empty_like(x), torch.empty_like(x)
        works = [
            dist.all_reduce(reduced, async_op=asynchronous),
            dist.all_gather_into_tensor(gathered, x, async_op=asynchronous),
            dist.reduce_scatter_tensor(scattered, x.clone(), async_op=asynchronous),
            dist.broadcast(x, 0, async_op=asynchronous),
            dist.barrier(async_op=asynchronous),
        ]
        for work in works:
            if asynchronous:
                work.wait()
        found += [reduced.tolist(), gathered.tolist(), scattered.tolist()]
    return found


def test_every_collective_of_one_rank_ends() -> None:
    (found,) = spawn_ranks(_collectives, 1, backend="deepytorch")
    assert found == [[float(i) for i in range(8)]] * 6
