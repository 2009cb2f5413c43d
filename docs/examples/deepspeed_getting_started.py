"""A training loop in the form DeepSpeed's getting-started guide teaches.

    deepspeed docs/examples/deepspeed_getting_started.py \
        --deepspeed --deepspeed_config docs/examples/deepspeed_config.json

What sends its collectives through deepytorch is the last line of that JSON; the script knows
nothing of it. On a machine without GPUs set DS_ACCELERATOR=cpu and give the launcher
`--num_gpus 2`, or start it with torchrun.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist


class Regression(torch.utils.data.Dataset):
    """Points of a function that the model can learn."""

    def __init__(self, num_points: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_points, 16, generator=generator)
        self.targets = torch.tanh(self.inputs @ torch.randn(16, 4, generator=generator))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DeepSpeed in a few lines")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--num_epochs", type=int, default=2)
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    model_engine, _, train_loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=Regression(320),
    )
    for epoch in range(args.num_epochs):
        for inputs, targets in train_loader:
            inputs, targets = inputs.to(model_engine.device), targets.to(model_engine.device)
            loss = torch.nn.functional.mse_loss(model_engine(inputs), targets)
            model_engine.backward(loss)
            model_engine.step()
        if model_engine.global_rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.6f}, backend {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
