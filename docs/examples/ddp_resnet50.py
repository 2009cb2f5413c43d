"""Plain DDP, without a line of deepytorch: ResNet-50 on small random pictures.

deepytorch run --nproc-per-node 2 docs/examples/ddp_resnet50.py --steps 40
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import ResNetConfig, ResNetForImageClassification

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch", type=int, default=4, help="pictures of each rank in a step")
arguments = parser.parse_args()
steps, batch = arguments.steps, arguments.batch

CLASSES = 1000
dist.init_process_group("gloo")
torch.manual_seed(0)
# transformers' default is ResNet-50.
model = DistributedDataParallel(ResNetForImageClassification(ResNetConfig(num_labels=CLASSES)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(steps):
    pictures = torch.randn(batch, 3, 64, 64, generator=data)
    labels = torch.randint(0, CLASSES, (batch,), generator=data)
    output = model(pixel_values=pictures, labels=labels)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {output.loss.item():.4f}")
dist.destroy_process_group()
