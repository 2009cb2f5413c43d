"""Ranks train together in many forms, one after the other in one process group."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def show(kind, step, loss):
    print(f"{kind} step {step} loss {loss.item():.6f}")


def batches(number=STEPS):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, 8, generator=generator) for _ in range(number)]


class Accumulated(nn.Sequential):
    pass


def accumulate():
    model = DistributedDataParallel(Accumulated(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, inputs in enumerate(batches()):
        with model.no_sync():
            (model(inputs).square().mean() / 2).backward()
        loss = model(inputs.flip(0) * 0.5).square().mean() / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show("accumulate", step, loss)


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def tensor_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(
        Parallel(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show("tensor_parallel", step, loss)


class Stage(nn.Sequential):
    pass


def pipeline():
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = [Stage(nn.Linear(8, 8), nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(step)
        inputs, targets, losses = torch.randn(4, 8), torch.zeros(4, 8), []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
            show("pipeline", step, torch.stack(losses).mean())
        optimizer.step()


class Local(nn.Sequential):
    pass


def local_sgd():
    model = DistributedDataParallel(Local(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    state = local_sgd_hook.PostLocalSGDState(
        process_group=None,
        subgroup=dist.new_group([dist.get_rank()], use_local_synchronization=True),
        start_localSGD_iter=2,
    )
    model.register_comm_hook(state, local_sgd_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        PeriodicModelAverager(period=2, warmup_steps=2),
    )
    for step, inputs in enumerate(batches(8)):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        show("local_sgd", step, loss)


class Uneven(nn.Sequential):
    pass


def uneven():
    model = DistributedDataParallel(Uneven(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for step, inputs in enumerate(batches(STEPS + 2 * dist.get_rank())):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            show("uneven", step, loss)


class Sharded(nn.Sequential):
    pass


def sharded_optimizer():
    model = DistributedDataParallel(Sharded(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step, inputs in enumerate(batches()):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        show("sharded_optimizer", step, loss)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, is_first):
        x = torch.relu(self.trunk(x))
        return self.one(x) if is_first else self.two(x)


def unused_head():
    model = DistributedDataParallel(Unused(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, inputs in enumerate(batches(8)):
        optimizer.zero_grad()
        loss = model(inputs, step % 2 == 0).square().mean()
        loss.backward()
        optimizer.step()
        show("unused_head", step, loss)


dist.init_process_group("gloo")
KINDS = (accumulate, tensor_parallel, pipeline, local_sgd, uneven, sharded_optimizer, unused_head)
for train in KINDS:
    torch.manual_seed(0)
    train()
    gc.collect()
dist.destroy_process_group()
