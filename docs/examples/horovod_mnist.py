"""Handwritten digits with Horovod's API, in the form of its example; the digits are made here.

    torchrun --standalone --nproc-per-node 2 docs/examples/horovod_mnist.py --epochs 2

One line differs from a script for Horovod: the import of hvd.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import deepytorch.integrations.horovod as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser(description="PyTorch digits with Horovod's API")
parser.add_argument("--batch-size", type=int, default=64, help="for training, on each rank")
parser.add_argument("--test-batch-size", type=int, default=500, help="for testing")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=4000, help="images for training, in all")
parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one rank")
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10, help="batches between two lines")
parser.add_argument("--fp16-allreduce", action="store_true", help="compress gradients to fp16")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--no-cuda", action="store_true")


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def make_digits(count, seed):
    """Ten blurred shapes, moved about and with noise: (images, labels)."""
    shapes = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(0)).gt(0.5).float()
    shapes = F.interpolate(shapes, size=(20, 20), mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.2 * torch.randn(count, 1, 28, 28, generator=generator)
    moves = torch.randint(3, 7, (count, 2), generator=generator)
    for image, label, (down, right) in zip(images, labels, moves.tolist(), strict=True):
        image[:, down : down + 20, right : right + 20] += 2 * shapes[label] - 0.5
    return TensorDataset(images, labels)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0 and hvd.rank() == 0:
            done, share = batch_idx * len(data), 100.0 * batch_idx / len(train_loader)
            print(
                f"Train Epoch: {epoch} [{done}/{len(train_sampler)} ({share:.0f}%)]\t"
                f"Loss: {loss.item():.6f}"
            )


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test():
    model.eval()
    test_loss, test_accuracy = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            test_accuracy += (output.argmax(dim=1) == target).sum().item()
    # The sampler gives every rank the same number of images.
    test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
    test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {100 * test_accuracy:.2f}%\n")


if __name__ == "__main__":
    args = parser.parse_args()
    use_cuda = not args.no_cuda and torch.cuda.is_available()

    hvd.init()
    torch.manual_seed(args.seed)
    if use_cuda:
        torch.cuda.set_device(hvd.local_rank())
        torch.cuda.manual_seed(args.seed)
    device = torch.device("cuda" if use_cuda else "cpu")
    torch.set_num_threads(1)

    train_dataset = make_digits(args.samples, seed=1)
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    test_dataset = make_digits(args.samples // 4, seed=2)
    test_sampler = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_dataset, batch_size=args.test_batch_size, sampler=test_sampler)

    model = Net().to(device)
    # Each step sees `size` batches, so it may be that much longer.
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()
