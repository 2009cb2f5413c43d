"""A training script as anybody's: two groups, batches, collectives. hangs.py edits copies of it."""

import datetime
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

lock = threading.Lock()


def batches(rank):
    for step in range(1_000_000):
        time.sleep(0.002)
        # PLANT: loader
        yield torch.full((32,), float(rank + step))


def forward(model, batch):
    # PLANT: forward
    return model(batch).sum()


def synchronize(model, group):
    for parameter in model.parameters():
        # PLANT: before
        dist.all_reduce(parameter.grad, group=group)


def share(value, pair):
    # PLANT: pair
    dist.broadcast(value, dist.get_global_rank(pair, 0), group=pair)


def pass_on(value, rank, size):
    # PLANT: message
    if rank == 0:
        dist.send(value, dst=1)
    elif rank == 1:
        dist.recv(value, src=0)


def main():
    dist.init_process_group(timeout=datetime.timedelta(seconds=600))
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = dist.new_group(list(range(size)), group_desc="data parallel")
    pair = dist.new_group([size - 2, size - 1], group_desc="pair")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
    for step, batch in enumerate(batches(rank)):
        with lock:
            forward(model, batch).backward()
        synchronize(model, everyone)
        # PLANT: between
        if rank >= size - 2:
            share(torch.zeros(16), pair)
        pass_on(torch.zeros(4), rank, size)
        dist.barrier()
        # PLANT: after
        if step == 20:
            with open(os.path.join(sys.argv[1], f"ready{rank}"), "w") as file:
                file.write(str(os.getpid()))


main()
