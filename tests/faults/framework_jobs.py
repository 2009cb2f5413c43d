"""Small trainings, one for each framework, in each of which a rank comes to the place of a fault.

They are as short as their frameworks let them be. The model has three layers, one of which calls
`reach` in its forward, so the fault happens where users' own code runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANKS = 3
STEPS = 16
WIDTH = 16
Reach = Callable[[], None]


class Place(nn.Module):
    """A layer that passes on what it gets; before that it calls `reach`."""

    def __init__(self, reach: Reach) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reach()
        return x


def model(reach: Reach) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), Place(reach), nn.Linear(WIDTH, 1, bias=False)
    )


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(4, WIDTH, generator=generator)
        yield x, x.sum(1, keepdim=True)


def join(limit_s: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))


def steps(net: nn.Module) -> float:
    """Plain training; returns the last loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x, y in batches():
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def collectives(reach: Reach, limit_s: float, folder: Path) -> float:
    join(limit_s)
    for step in range(STEPS):
        reach()
        total = torch.full((WIDTH,), float(step))
        dist.all_reduce(total)
        assert total.eq(RANKS * step).all()
        parts = [torch.zeros(3) for _ in range(RANKS)]
        dist.all_gather(parts, torch.full((3,), float(dist.get_rank())))
        assert torch.cat(parts).sum() == 9
    return float(total[0])


def point_to_point(reach: Reach, limit_s: float, folder: Path) -> float:
    """Every rank sends to the next one and receives from the one before."""
    join(limit_s)
    rank = dist.get_rank()
    for step in range(STEPS):
        reach()
        arriving = torch.zeros(5)
        sending = dist.isend(torch.full((5,), float(step)), (rank + 1) % RANKS)
        dist.recv(arriving, (rank - 1) % RANKS)
        sending.wait()
        assert arriving.eq(step).all()
    return float(arriving[0])


def pipeline(reach: Reach, limit_s: float, folder: Path) -> float:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    join(limit_s)
    rank = dist.get_rank()
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), Place(reach), nn.Tanh())
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    for x, _ in batches():
        if rank == 0:
            schedule.step(x)
        elif rank == RANKS - 1:
            schedule.step(target=torch.zeros(4, WIDTH), losses=losses)
        else:
            schedule.step()
    return float(losses[-1]) if losses else 0.0


def ddp(reach: Reach, limit_s: float, folder: Path) -> float:
    join(limit_s)
    return steps(nn.parallel.DistributedDataParallel(model(reach)))


def fsdp2(reach: Reach, limit_s: float, folder: Path) -> float:
    from torch.distributed.fsdp import fully_shard

    join(limit_s)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    net = model(reach)
    for layer in (net[0], net[-1]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return steps(net)


def zero(stage: int, reach: Reach, limit_s: float) -> float:
    import deepspeed

    join(limit_s)
    net = model(reach)
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        },
    )
    for x, y in batches():
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def zero2(reach: Reach, limit_s: float, folder: Path) -> float:
    return zero(2, reach, limit_s)


def zero3(reach: Reach, limit_s: float, folder: Path) -> float:
    return zero(3, reach, limit_s)


class WithLoss(nn.Module):
    """A model as Trainer wants it."""

    def __init__(self, reach: Reach) -> None:
        super().__init__()
        self.net = model(reach)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(WIDTH, generator=generator) for _ in range(2 * RANKS * STEPS)]
    return [{"x": x, "labels": x.sum(0, keepdim=True)} for x in made]


def trainer(reach: Reach, limit_s: float, folder: Path) -> float:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_timeout=int(limit_s),
    )
    made: Any = Trainer(model=WithLoss(reach), args=arguments, train_dataset=samples())
    return float(made.train().training_loss)


def accelerate(reach: Reach, limit_s: float, folder: Path) -> float:
    from accelerate import Accelerator, InitProcessGroupKwargs

    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=limit_s))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    net = model(reach)
    loader = torch.utils.data.DataLoader(samples(), batch_size=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in itertools.islice(itertools.cycle(loader), STEPS):
        loss = nn.functional.mse_loss(net(batch["x"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(loss.detach())
    return float(loss.detach())


FRAMEWORKS: dict[str, Callable[[Reach, float, Path], float]] = {
    "collectives": collectives,
    "point to point": point_to_point,
    "pipeline": pipeline,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "ZeRO-2": zero2,
    "ZeRO-3": zero3,
    "Trainer": trainer,
    "Accelerate": accelerate,
}
