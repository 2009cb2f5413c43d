"""PyTorch's DDP tutorial's form, for torchrun: a toy model, one step, a checkpoint.

The line marked `# deepytorch` is the only one that plain PyTorch would not have.

torchrun --standalone --nproc-per-node 2 docs/examples/ddp_tutorial.py
"""

# ruff: noqa: T201, TID251
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

from deepytorch.integrations.ddp import prepare_ddp as DDP  # noqa: F811, N812  # deepytorch


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return hidden


def setup() -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local_rank)
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def demo_basic(device: torch.device) -> None:
    torch.manual_seed(dist.get_rank())
    model = ToyModel().to(device)
    ddp_model = DDP(model, device_ids=None if device.type == "cpu" else [device.index])

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10, device=device))
        labels = torch.randn(20, 5, device=device)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        print(f"basic: rank {dist.get_rank()} step {step} loss {loss.item():.6f}")


def demo_checkpoint(device: torch.device) -> None:
    torch.manual_seed(100 + dist.get_rank())
    ddp_model = DDP(ToyModel().to(device))
    path = os.path.join(tempfile.gettempdir(), f"toy-{os.environ['TORCHELASTIC_RUN_ID']}.pt")
    if dist.get_rank() == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()  # nobody reads before it is written
    ddp_model.load_state_dict(torch.load(path, map_location=device, weights_only=True))

    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)
    loss = nn.MSELoss()(ddp_model(torch.randn(20, 10, device=device)), torch.zeros(20, 5))
    loss.backward()
    optimizer.step()
    print(f"checkpoint: rank {dist.get_rank()} loss {loss.item():.6f}")
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(path)


if __name__ == "__main__":
    device = setup()
    demo_basic(device)
    demo_checkpoint(device)
    dist.destroy_process_group()
