"""Composer's Trainer has a callback that shows losses."""

import torch
from composer import Callback, Trainer
from composer.models import ComposerClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Show(Callback):
    def batch_end(self, state, logger):
        print(f"step {state.timestamp.batch.value} loss {state.loss.item():.6f}")


torch.manual_seed(0)
values = torch.randn(64, 8)
data = TensorDataset(values, (values.sum(1) > 0).long())
network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
model = ComposerClassifier(network, num_classes=2)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=8),
    max_duration="1ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    callbacks=[Show()],
    device="cpu",
    progress_bar=False,
    seed=1,
)
trainer.fit()
trainer.close()
