"""Train a small convolutional network as DeepSpeed's CIFAR-10 example does.

    torchrun --nproc-per-node 2 docs/examples/deepspeed_cifar.py --stage 2 --dtype bf16

The configuration is a dict, the engine makes optimizer, scheduler and data loader from it. One
line is deepytorch's: the section of its name. The pictures are made here: 32 x 32, ten classes,
each a pattern of its own under noise.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


class Pictures(torch.utils.data.Dataset):
    """Pictures of shape (3, 32, 32) in [-1, 1] and their classes, the same in every process."""

    def __init__(self, num_pictures: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.rand(10, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
        self.classes = torch.randint(0, 10, (num_pictures,), generator=generator)
        noise = torch.randn(num_pictures, 3, 32, 32, generator=generator)
        self.pictures = (patterns[self.classes] + 0.5 * noise).clamp(-1, 1)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pictures[index], self.classes[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CIFAR-like pictures with DeepSpeed")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=0)
    return deepspeed.add_config_arguments(parser).parse_args()


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_batch_size": 32,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.002, "betas": [0.8, 0.999], "eps": 1e-8, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.002, "warmup_num_steps": 5},
        },
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 15},
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": args.stage, "contiguous_gradients": True},
        "deepytorch": {"enabled": True},
    }


def test(model_engine: Any, target_dtype: torch.dtype | None) -> float:
    """The share of right answers on pictures that were not trained with."""
    loader = torch.utils.data.DataLoader(Pictures(200, seed=2), batch_size=50)
    model_engine.eval()
    num_right = 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(model_engine.device), labels.to(model_engine.device)
            outputs = model_engine(images.to(target_dtype) if target_dtype else images)
            num_right += int((outputs.argmax(1) == labels).sum())
    return num_right / 200


def main(args: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=Pictures(960, seed=1),
        config=ds_config(args),
    )
    target_dtype = {"bf16": torch.bfloat16, "fp16": torch.half}.get(args.dtype)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, (inputs, labels) in enumerate(trainloader):
            inputs, labels = inputs.to(model_engine.device), labels.to(model_engine.device)
            outputs = model_engine(inputs.to(target_dtype) if target_dtype else inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            running_loss += loss.item()
            if model_engine.global_rank == 0 and i % args.log_interval == args.log_interval - 1:
                mean = running_loss / args.log_interval
                print(f"[{epoch + 1:d}, {i + 1:5d}] loss: {mean:.3f}", flush=True)
                running_loss = 0.0
    accuracy = test(model_engine, target_dtype)
    if model_engine.global_rank == 0:
        print(f"Accuracy of the network on the test images: {100 * accuracy:.0f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_arguments())
