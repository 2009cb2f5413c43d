"""DeepSpeed trains with ZeRO 0, 2 and 3, then a GAN that has an engine for each part."""

import gc

import deepspeed
import torch
from torch import nn

STEPS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Dense(Net):
    pass


class Divided(Net):
    pass


class Sharded(Net):
    pass


def engine_of(net, stage, **settings):
    return deepspeed.initialize(
        model=net,
        model_parameters=[parameter for parameter in net.parameters() if parameter.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            **settings,
        },
    )[0]


def stages():
    for stage, make in ((0, Dense), (2, Divided), (3, Sharded)):
        torch.manual_seed(0)
        engine = engine_of(make(), stage, gradient_accumulation_steps=2, gradient_clipping=1.0)
        generator = torch.Generator().manual_seed(engine.global_rank)
        for step in range(STEPS * 2):
            loss = engine(torch.randn(4, 8, generator=generator)).square().mean()
            engine.backward(loss)
            engine.step()
            print(f"zero {stage} step {step} loss {loss.item():.6f}")
        engine.destroy()
        del engine
        gc.collect()


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def gan():
    torch.manual_seed(0)
    make = engine_of(Generator(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), 1)
    judge = engine_of(Discriminator(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1)), 1)
    generator = torch.Generator().manual_seed(make.global_rank)
    for step in range(STEPS):
        real, noise = torch.randn(2, 4, 4, generator=generator)
        fake = make(noise)
        loss = nn.functional.softplus(-judge(real)).mean()
        loss = loss + nn.functional.softplus(judge(fake.detach())).mean()
        judge.backward(loss)
        judge.step()
        other = nn.functional.softplus(-judge(fake)).mean()
        make.backward(other)
        make.step()
        judge.zero_grad()
        print(f"gan step {step} loss {loss.item():.6f} {other.item():.6f}")


stages()
gan()
