"""Ray Train starts the ranks and makes their process group; deepytorch takes it over in place.

python docs/examples/platforms/ray_train.py --workers 2           # on CPUs
python docs/examples/platforms/ray_train.py --workers 16 --gpu    # a GPU for each
"""

import argparse
from typing import Any

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Run in each worker, where Ray has called `init_process_group` before."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import deepytorch  # the one new line

    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    ddp = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, config["steps"] + 1):
        x = torch.randn(32, 64, generator=data).to(device)
        loss = nn.functional.mse_loss(ddp(x), x[:, :8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step} on {dist.get_world_size()} ranks: loss {loss.item():.4f}")
    print(deepytorch.report().native_calls, "native collectives")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    scaling = ScalingConfig(num_workers=given.workers, use_gpu=given.gpu)
    trainer = TorchTrainer(train, train_loop_config={"steps": 60}, scaling_config=scaling)
    trainer.fit()


if __name__ == "__main__":
    main()
