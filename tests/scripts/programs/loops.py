"""Loops of one's own take many forms here; each makes all that it uses anew."""

import gc
import io
import math

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

STEPS = 6


def show(kind, step, loss):
    print(f"{kind} step {step} loss {loss.item():.6f}")


class Accumulated(nn.Sequential):
    pass


def accumulate():
    model = Accumulated(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS * 2):
        loss = nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.randint(2, (4,)))
        (loss / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        show("accumulate", step, loss)


class Averaged(nn.Sequential):
    pass


def ema():
    model = Averaged(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        show("ema", step, loss)
    average.eval()
    with torch.no_grad():
        show("ema averaged", STEPS, average(torch.ones(2, 6)).sum())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids, state):
        x, state = self.lstm(self.embed(ids), state)
        return self.head(x), state


def carried_state():
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
    for step in range(STEPS):
        ids = torch.randint(9, (3, 6))
        state = tuple(part.detach() for part in state)
        logits, state = model(ids[:, :-1], state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show("carried_state", step, loss)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.dropout = nn.Dropout(0.2)

    def part(self, x):
        return self.dropout(torch.relu(self.first(x)))

    def forward(self, x):
        return self.second(checkpoint(self.part, x, use_reentrant=False))


def recompute():
    model = Recomputed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show("recompute", step, loss)


class Halved(nn.Sequential):
    pass


def mixed_precision():
    model = Halved(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(torch.randn(8, 6)).float(), torch.ones(8, 1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        show("mixed_precision", step, loss)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.body, self.head = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(self.norm(x))))


def groups_and_schedule():
    model = Grouped()
    groups = [
        {
            "params": [parameter for parameter in model.parameters() if parameter.ndim > 1],
            "weight_decay": 0.1,
        },
        {
            "params": [parameter for parameter in model.parameters() if parameter.ndim == 1],
            "lr": 0.02,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[2])
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(torch.randn(5, 6)), torch.randint(3, (5,)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        show("groups_and_schedule", step, loss)
        print("rates", " ".join(f"{rate:.6f}" for rate in schedule.get_last_lr()))


class Quasi(nn.Sequential):
    pass


def closure():
    model = Quasi(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)
    inputs = torch.randn(16, 3)
    targets = inputs.sum(1, keepdim=True)

    def evaluate():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for step in range(STEPS):
        show("closure", step, optimizer.step(evaluate))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(20, 6, sparse=True)
        self.head = nn.Linear(6, 1)

    def forward(self, ids):
        return self.head(self.embed(ids))


def sparse():
    model = Bag()
    for_rows = torch.optim.SparseAdam(model.embed.parameters(), lr=0.02)
    for_rest = torch.optim.Adam(model.head.parameters(), lr=0.02)
    for step in range(STEPS):
        loss = model(torch.randint(20, (4, 3))).square().mean()
        for_rows.zero_grad()
        for_rest.zero_grad()
        loss.backward()
        for_rows.step()
        for_rest.step()
        show("sparse", step, loss)


class Normed(nn.Sequential):
    pass


def parametrized():
    first = parametrizations.weight_norm(nn.Linear(6, 8))
    model = Normed(first, nn.ReLU(), parametrizations.orthogonal(nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        loss = nn.functional.smooth_l1_loss(model(torch.randn(4, 6)), torch.ones(4, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show("parametrized", step, loss)


class FakeQuantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def rounded(self, weight):
        scale = weight.detach().abs().max() / 7
        return weight + ((weight / scale).round().clamp(-8, 7) * scale - weight).detach()

    def forward(self, x):
        x = nn.functional.linear(x, self.rounded(self.first.weight), self.first.bias)
        return nn.functional.linear(x.relu(), self.rounded(self.second.weight), self.second.bias)


def quantization_aware():
    model = FakeQuantized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(torch.randn(6, 6)), torch.randint(2, (6,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show("quantization_aware", step, loss)


class Resumed(nn.Sequential):
    pass


def resume():
    kept = None
    for part in range(2):
        model = Resumed(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if kept is not None:
            kept.seek(0)
            read = torch.load(kept)
            print("keys", *read["model"])
            model.load_state_dict(read["model"])
            optimizer.load_state_dict(read["optimizer"])
        for step in range(part * 5, part * 5 + 5):
            loss = model(torch.randn(4, 6)).exp().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            show("resume", step, loss)
        kept = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    # Many scripts save the model itself.
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    again = torch.load(whole, weights_only=False)
    show("resume whole", step, again(torch.ones(1, 6)))


class Compiled(nn.Sequential):
    pass


def own_compile():
    model = torch.compile(
        Compiled(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), backend="aot_eager"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show("own_compile", step, loss)


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)

    def forward(self, ids):
        return self.head(self.embed(ids))


def summed_and_normalised():
    model = Summed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    total, num_tokens = 0.0, 0
    for step in range(STEPS * 2):
        ids = torch.randint(11, (2, 7))
        labels = torch.hstack([ids[:, 1:], torch.full((2, 1), -100)])
        labels[:, : step % 3] = -100
        valid = (labels != -100).sum()
        logits = model(ids).reshape(-1, 11)
        loss = nn.functional.cross_entropy(
            logits.float(), labels.reshape(-1), ignore_index=-100, reduction="sum"
        )
        loss.backward()
        total, num_tokens = total + loss.detach(), num_tokens + valid
        if step % 2:
            for parameter in model.parameters():
                parameter.grad.mul_(1 / num_tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            show("summed_and_normalised", step, total / num_tokens)
            total, num_tokens = 0.0, 0


class Validated(nn.Sequential):
    pass


def validate_between():
    model = Validated(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best = math.inf
    for step in range(STEPS):
        model.train()
        loss = nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.randint(2, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            found = nn.functional.cross_entropy(model(torch.ones(3, 6)), torch.ones(3).long())
        best = min(best, found.item())
        show("validate_between", step, loss)
        show("validate_between found", step, found)


KINDS = (
    *(accumulate, ema, carried_state, recompute, mixed_precision, groups_and_schedule, closure),
    *(sparse, parametrized, quantization_aware, resume, own_compile, summed_and_normalised),
    validate_between,
)
for train in KINDS:
    torch.manual_seed(0)
    train()
    gc.collect()
