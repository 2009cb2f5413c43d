"""Loops do to their model what few do; each makes all of it anew."""

import copy
import gc
import io

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6


def show(kind, step, *losses):
    print(f"{kind} step {step} loss", *(f"{loss.item():.6f}" for loss in losses))


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Critic(nn.Sequential):
    pass


def gradient_penalty():
    critic = Critic(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.0, 0.9))
    for step in range(STEPS):
        real, fake = torch.randn(5, 4), torch.rand(5, 4)
        mixed = torch.lerp(real, fake, torch.rand(5, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        update(optimizer, loss)
        show("gradient_penalty", step, loss, penalty)


class Learner(nn.Sequential):
    pass


def learn_to_learn():
    model = Learner(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        total = 0.0
        for slope in (-1.0, 2.0):
            inputs = torch.randn(2, 4, 2)
            targets = slope * inputs.sum(-1, keepdim=True)
            fast = dict(model.named_parameters())
            loss = nn.functional.mse_loss(functional_call(model, fast, (inputs[0],)), targets[0])
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {
                name: fast[name] - 0.05 * gradient
                for name, gradient in zip(fast, slopes, strict=True)
            }
            found = functional_call(model, fast, (inputs[1],))
            total = total + nn.functional.mse_loss(found, targets[1])
        update(optimizer, total)
        show("learn_to_learn", step, total)


class Private(nn.Sequential):
    pass


def gradients_per_sample():
    model = Private(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(parameters, sample):
        return functional_call(model, parameters, (sample.unsqueeze(0),)).square().mean()

    for step in range(STEPS):
        inputs = torch.randn(5, 4)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        each = vmap(grad(loss_of), in_dims=(None, 0))(parameters, inputs)
        for name, parameter in model.named_parameters():
            lengths = each[name].flatten(1).norm(dim=1)
            scales = (1 / lengths.clamp(min=1e-6)).clamp(max=1)
            parameter.grad = torch.einsum("n,n...->...", scales, each[name]) / len(inputs)
        optimizer.step()
        show("gradients_per_sample", step, model(inputs).square().mean())


class Stepping(nn.Sequential):
    pass


def step_in_backward():
    model = Stepping(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    optimizers = {
        parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in model.parameters()
    }

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(hook)
    for step in range(STEPS):
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        show("step_in_backward", step, loss)


class Sharpness(nn.Sequential):
    pass


def sharpness_aware():
    model = Sharpness(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, labels = torch.randn(6, 4), torch.randint(2, (6,))
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        moved = []
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
            for parameter in model.parameters():
                moved.append(parameter.grad * (0.05 / (norm + 1e-12)))
                parameter.add_(moved[-1])
        optimizer.zero_grad()
        other = nn.functional.cross_entropy(model(inputs), labels)
        other.backward()
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
        show("sharpness_aware", step, loss, other)


class Thawed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())


def thaw_and_grow():
    model = Thawed()
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    for step in range(12):
        if step == 4:
            model.body.requires_grad_(True)
            optimizer.add_param_group({"params": model.body.parameters(), "lr": 0.02})
        if step == 8:
            model.head = nn.Linear(6, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = model(torch.randn(5, 4))
        loss = nn.functional.cross_entropy(outputs, torch.randint(outputs.shape[1], (5,)))
        update(optimizer, loss)
        show("thaw_and_grow", step, loss)


class Hooked(nn.Sequential):
    pass


def hooks_later():
    model = Hooked(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, handle = [], None
    for step in range(10):
        if step == 5:
            handle = model[1].register_forward_hook(lambda *call: kept.append(call[2].mean()))
        if step == 8:
            handle.remove()
        loss = model(torch.randn(3, 4)).square().mean()
        if kept:
            loss = loss + kept.pop()
        update(optimizer, loss)
        show("hooks_later", step, loss)


class Copied(nn.Sequential):
    pass


def copy_and_go_back():
    model = Copied(nn.Linear(4, 6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    best = None
    for step in range(10):
        loss = model(torch.randn(3, 4)).square().mean()
        update(optimizer, loss)
        if step == 5:
            best = copy.deepcopy(model)
        if step == 7:
            model.load_state_dict(best.state_dict())
        show("copy_and_go_back", step, loss)
    show("copy_and_go_back kept", 10, best.eval()(torch.ones(1, 4)))


class Fed(nn.Sequential):
    pass


def fed_by_workers():
    model = Fed(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(11, 4))
    step = 0
    for _ in range(3):
        for (inputs,) in DataLoader(data, batch_size=4, num_workers=1, shuffle=True):
            loss = model(inputs).square().mean()
            update(optimizer, loss)
            show("fed_by_workers", step, loss)
            step += 1


class Exported(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())


def export_at_the_end():
    model = Exported()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(torch.randn(3, 4)).square().mean()
        update(optimizer, loss)
        show("export_at_the_end", step, loss)
    model.eval()
    scripted, ones = io.BytesIO(), torch.ones(2, 4)
    torch.jit.save(torch.jit.trace(model, ones), scripted)
    scripted.seek(0)
    show("traced", 0, torch.jit.load(scripted)(ones).sum())
    show("scripted", 0, torch.jit.script(model)(ones).sum())
    show("exported", 0, torch.export.export(model, (ones,)).module()(ones).sum())


class Twice(nn.Sequential):
    pass


def two_passes_and_retained():
    model = Twice(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(STEPS):
        inputs = torch.randn(4, 4)
        first, second = model(inputs).log_softmax(-1), model(inputs).log_softmax(-1)
        optimizer.zero_grad()
        apart = nn.functional.kl_div(first, second, log_target=True, reduction="batchmean")
        apart.backward(retain_graph=True)
        loss = -(first[:, 0] + second[:, 0]).mean()
        loss.backward()
        optimizer.step()
        show("two_passes_and_retained", step, apart, loss)


class Skipped(nn.Sequential):
    pass


def skipped_and_watched():
    model = Skipped(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        inputs = torch.randn(4, 4)
        if step == 6:
            inputs[0, 0] = float("inf")
        with torch.autograd.set_detect_anomaly(step == 7):
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            if not loss.isfinite():
                print("skipped")
                continue
            loss.backward()
        optimizer.step()
        show("skipped_and_watched", step, loss)
    try:
        model(torch.randn(4, 5))
    except RuntimeError as error:
        print(type(error).__name__, error)


KINDS = (
    *(gradient_penalty, learn_to_learn, gradients_per_sample, step_in_backward, sharpness_aware),
    *(thaw_and_grow, hooks_later, copy_and_go_back, fed_by_workers, export_at_the_end),
    *(two_passes_and_retained, skipped_and_watched),
)
for train in KINDS:
    torch.manual_seed(0)
    train()
    gc.collect()
