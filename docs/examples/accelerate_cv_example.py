"""Accelerate's computer vision example in its usual form: an image classifier, partly frozen.

A small convolutional network tells discs, squares and stripes apart. The pictures are drawn here,
so nothing is downloaded. One line makes it run on deepytorch; it is marked.

    deepytorch run --nproc-per-node 2 docs/examples/accelerate_cv_example.py --cpu
"""

import argparse

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

# The one line; before it was: from accelerate import Accelerator
from deepytorch.integrations.accelerate import DeepytorchAccelerator as Accelerator

LABELS = ["disc", "square", "stripes"]


class ShapesDataset(Dataset):
    """Pictures of 3 x image_size x image_size in [0, 1], each with the number of its label."""

    def __init__(self, count: int, image_size: int, seed: int) -> None:
        self.count, self.image_size, self.seed = count, image_size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * self.count + index)
        label = index % len(LABELS)
        size = self.image_size
        x, y, radius = torch.rand(3, generator=generator).tolist()
        x, y, radius = size * (0.3 + 0.4 * x), size * (0.3 + 0.4 * y), size * (0.1 + 0.15 * radius)
        rows = torch.arange(size).view(-1, 1).expand(size, size) - y
        columns = torch.arange(size).view(1, -1).expand(size, size) - x
        if LABELS[label] == "disc":
            inside = rows**2 + columns**2 < radius**2
        elif LABELS[label] == "square":
            inside = (rows.abs() < radius) & (columns.abs() < radius)
        else:
            inside = torch.remainder(rows + columns, 8) < 3
        color = torch.rand(3, 1, 1, generator=generator)
        noise = 0.2 * torch.rand(3, size, size, generator=generator)
        return {"image": 0.8 * inside * color + noise, "label": torch.tensor(label)}


class SmallNet(nn.Module):
    """Convolutions, and a classifier over their averages."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
            layers.append(nn.ReLU())
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).mean(dim=(2, 3)))


def training_function(config: dict[str, float], args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs, seed = config["lr"], int(config["num_epochs"]), int(config["seed"])
    batch_size, image_size = int(config["batch_size"]), int(config["image_size"])

    set_seed(seed)
    train_dataset = ShapesDataset(384, image_size, seed=1)
    eval_dataset = ShapesDataset(93, image_size, seed=2)
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=batch_size, num_workers=1)
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, batch_size=batch_size)

    model = SmallNet(num_classes=len(LABELS)).to(accelerator.device)
    # The first layer stays as it is, the others are trained.
    for param in model.features[0].parameters():
        param.requires_grad = False

    mean = torch.tensor([0.3, 0.3, 0.3])[None, :, None, None].to(accelerator.device)
    std = torch.tensor([0.2, 0.2, 0.2])[None, :, None, None].to(accelerator.device)

    optimizer = torch.optim.Adam(params=model.parameters(), lr=lr / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer,
        max_lr=lr,
        epochs=num_epochs,
        steps_per_epoch=len(train_dataloader),
    )

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            inputs = (batch["image"] - mean) / std
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        accurate = num_elems = 0
        for batch in eval_dataloader:
            inputs = (batch["image"] - mean) / std
            with torch.no_grad():
                outputs = model(inputs)
            predictions = outputs.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            num_elems += predictions.shape[0]
            accurate += (predictions == references).sum().item()
        accelerator.print(f"epoch {epoch}: {100 * accurate / num_elems:.2f}% of {num_elems}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description="Simple example of a training script.")
    parser.add_argument(
        "--mixed_precision",
        type=str,
        default=None,
        choices=["no", "fp16", "bf16", "fp8"],
        help="Whether to use mixed precision; bf16 needs a device that has it.",
    )
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    args = parser.parse_args()
    config = {"lr": 1e-2, "num_epochs": 3, "seed": 42, "batch_size": 16, "image_size": 32}
    training_function(config, args)


if __name__ == "__main__":
    main()
