"""Ignite runs a step function of one's own, then its supervised trainer with metrics."""

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Stepped(nn.Sequential):
    pass


class Supervised(nn.Sequential):
    pass


def loader():
    values = torch.randn(32, 6)
    return DataLoader(TensorDataset(values, (values.sum(1) > 0).long()), batch_size=4)


def own_step():
    model = Stepped(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine, batch):
        model.train()
        inputs, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda output: output).attach(trainer, "average")

    @trainer.on(Events.ITERATION_COMPLETED)
    def show(engine):
        average = engine.state.metrics["average"]
        print(f"own step {engine.state.iteration} loss {engine.state.output:.6f} {average:.6f}")

    trainer.run(loader(), max_epochs=1)


def supervised():
    model = Supervised(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    criterion = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    metrics = {"accuracy": Accuracy(), "nll": Loss(criterion)}
    evaluator = create_supervised_evaluator(model, metrics=metrics)
    data = loader()

    @trainer.on(Events.ITERATION_COMPLETED)
    def show(engine):
        print(f"supervised step {engine.state.iteration} loss {engine.state.output:.6f}")

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        found = evaluator.run(data).metrics
        print(f"found step {engine.state.epoch} loss {found['nll']:.6f} {found['accuracy']:.6f}")

    stop = EarlyStopping(2, lambda engine: -engine.state.metrics["nll"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, stop)
    trainer.run(data, max_epochs=2)


torch.manual_seed(0)
own_step()
supervised()
