"""Images per second with Horovod's API, in the form of its synthetic benchmark.

    torchrun --standalone --nproc-per-node 2 docs/examples/horovod_synthetic_benchmark.py \
        --model resnet18 --batch-size 4

One line differs from a script for Horovod: the import of hvd.
"""

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F
from torch import optim
from torchvision import models

import deepytorch.integrations.horovod as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser(
    description="PyTorch synthetic benchmark",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
parser.add_argument("--fp16-allreduce", action="store_true", help="compress gradients to fp16")
parser.add_argument("--model", type=str, default="resnet50", help="of torchvision.models")
parser.add_argument("--batch-size", type=int, default=32, help="on each rank")
parser.add_argument("--image-size", type=int, default=224, help="height and width in pixels")
parser.add_argument("--num-warmup-batches", type=int, default=10)
parser.add_argument("--num-batches-per-iter", type=int, default=10)
parser.add_argument("--num-iters", type=int, default=10)
parser.add_argument("--no-cuda", action="store_true")
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()

hvd.init()
if args.cuda:
    torch.cuda.set_device(hvd.local_rank())
    torch.backends.cudnn.benchmark = True
device = torch.device("cuda" if args.cuda else "cpu")

model = getattr(models, args.model)().to(device)
optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size())
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
target = torch.randint(1000, (args.batch_size,), device=device)


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


kind = "GPU" if args.cuda else "CPU"
log(f"Model: {args.model}")
log(f"Batch size: {args.batch_size}")
log(f"Number of {kind}s: {hvd.size()}")
log("Running warmup...")
timeit.timeit(benchmark_step, number=args.num_warmup_batches)

log("Running benchmark...")
img_secs = []
for iteration in range(args.num_iters):
    time = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    img_secs.append(args.batch_size * args.num_batches_per_iter / time)
    log(f"Iter #{iteration}: {img_secs[-1]:.1f} img/sec per {kind}")

mean, conf = np.mean(img_secs), 1.96 * np.std(img_secs)
log(f"Img/sec per {kind}: {mean:.1f} +-{conf:.1f}")
log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * conf:.1f}")
