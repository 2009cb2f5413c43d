"""Methods need more than a model and a loss here; each makes all of it anew."""

import copy
import gc
from dataclasses import dataclass

import torch
from torch import nn

STEPS = 6


def show(kind, step, *losses):
    print(f"{kind} step {step} loss", *(f"{loss.item():.6f}" for loss in losses))


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def gan():
    make = Generator(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    judge = Discriminator(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    for_make = torch.optim.Adam(make.parameters(), lr=0.01, betas=(0.5, 0.999))
    for_judge = torch.optim.Adam(judge.parameters(), lr=0.01, betas=(0.5, 0.999))
    real, made = torch.ones(4, 1), torch.zeros(4, 1)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(STEPS):
        judge.zero_grad()
        on_real = criterion(judge(torch.randn(4, 6)), real)
        on_real.backward()
        fake = make(torch.randn(4, 4))
        on_fake = criterion(judge(fake.detach()), made)
        on_fake.backward()
        for_judge.step()
        make.zero_grad()
        loss = criterion(judge(fake), real)
        loss.backward()
        for_make.step()
        show("gan", step, on_real, on_fake, loss)


class Query(nn.Sequential):
    pass


def momentum_contrast():
    model = Query(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    slow = copy.deepcopy(model).requires_grad_(False)
    queue = nn.functional.normalize(torch.randn(4, 16), dim=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        images = torch.randn(4, 6)
        query = nn.functional.normalize(model(images + 0.1 * torch.randn(4, 6)), dim=1)
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), slow.parameters(), strict=True):
                other.mul_(0.9).add_(parameter, alpha=0.1)
            key = nn.functional.normalize(slow(images), dim=1)
        right = torch.einsum("nc,nc->n", query, key).unsqueeze(-1)
        logits = torch.cat([right, query @ queue.clone()], dim=1) / 0.07
        loss = nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        update(optimizer, loss)
        start = step * 4 % 16
        queue[:, start : start + 4] = key.T
        show("momentum_contrast", step, loss)


class Teacher(nn.Sequential):
    pass


class Student(nn.Sequential):
    pass


def distil():
    teacher = Teacher(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    student = Student(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    for step in range(STEPS):
        inputs, labels = torch.randn(8, 6), torch.randint(3, (8,))
        with torch.no_grad():
            wanted = (teacher(inputs) / 2).softmax(-1)
        logits = student(inputs)
        soft = nn.functional.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")
        hard = nn.functional.cross_entropy(logits, labels)
        update(optimizer, 4 * soft + hard)
        show("distil", step, soft, hard)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.dropout, self.head = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.dropout(self.body(x)).relu()).softmax(-1)


def policy_gradient():
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    for episode in range(STEPS):
        state, kept, rewards = torch.randn(4), [], []
        for _ in range(3 + episode % 2):
            chances = torch.distributions.Categorical(policy(state.unsqueeze(0)))
            action = chances.sample()
            kept.append(chances.log_prob(action))
            state = state.roll(1) * 0.9 + 0.1 * action
            rewards.append(state.sum().item())
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.cat(kept) * returns).sum()
        update(optimizer, loss)
        show("policy_gradient", episode, loss)


class ManyHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({"kind": nn.Linear(8, 3), "size": nn.Linear(8, 1)})

    def forward(self, x, tasks):
        x = torch.relu(self.trunk(x))
        return {task: self.heads[task](x) for task in tasks}


def many_tasks():
    model = ManyHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS + 2):
        tasks = ("kind", "size") if step % 3 else ("kind",)
        found = model(torch.randn(5, 6), tasks)
        loss = nn.functional.cross_entropy(found["kind"], torch.randint(3, (5,)))
        if "size" in found:
            loss = loss + nn.functional.mse_loss(found["size"], torch.ones(5, 1))
        update(optimizer, loss)
        show("many_tasks", step, loss)


@dataclass
class Found:
    loss: torch.Tensor
    logits: torch.Tensor


class Dataclassed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs, labels):
        logits = self.head(torch.tanh(self.body(inputs)))
        return Found(nn.functional.cross_entropy(logits, labels), logits)


def returned_dataclass():
    model = Dataclassed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        found = model(inputs=torch.randn(4, 6), labels=torch.randint(3, (4,)))
        update(optimizer, found.loss)
        show("returned_dataclass", step, found.loss)
        print(type(found).__name__, tuple(found.logits.shape))


class BiEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 8)

    def forward(self, features):
        x = self.out(self.embed(features["input_ids"]))
        mask = features["attention_mask"].unsqueeze(-1).float()
        pooled = (x * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return {**features, "sentence_embedding": pooled}


class RankingLoss(nn.Module):
    def __init__(self, model, scale=20.0):
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, texts):
        found = [self.model(text)["sentence_embedding"] for text in texts]
        first, second = (nn.functional.normalize(embedding, dim=-1) for embedding in found)
        return nn.functional.cross_entropy(first @ second.T * self.scale, torch.arange(len(first)))


def in_batch_negatives():
    model = BiEncoder()
    loss_model = RankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def texts(width):
        mask = (torch.arange(width) < torch.randint(2, width + 1, (4, 1))).long()
        return {"input_ids": torch.randint(1, 30, (4, width)) * mask, "attention_mask": mask}

    for step in range(STEPS):
        loss = loss_model([texts(5), texts(6 + step % 2)])
        update(optimizer, loss)
        show("in_batch_negatives", step, loss)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(), nn.Linear(16, 8))
        self.token_embedding, self.text_projection = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def encode_text(self, ids):
        return self.text_projection(self.token_embedding(ids).mean(1))

    def forward(self, image, text):
        image = nn.functional.normalize(self.visual(image), dim=-1)
        text = nn.functional.normalize(self.encode_text(text), dim=-1)
        return image, text, self.logit_scale.exp()


def two_towers():
    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.98))
    for step in range(STEPS):
        image, text, scale = model(torch.randn(4, 3, 8, 8), torch.randint(20, (4, 5)))
        logits, labels = scale * image @ text.T, torch.arange(4)
        loss = nn.functional.cross_entropy(logits, labels)
        loss = (loss + nn.functional.cross_entropy(logits.T, labels)) / 2
        update(optimizer, loss)
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
        show("two_towers", step, loss, model.logit_scale)


class Candidate(nn.Sequential):
    pass


def search():
    found = {}
    for rate in (0.01, 0.1, 0.3):
        torch.manual_seed(1)
        model = Candidate(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(STEPS):
            loss = nn.functional.mse_loss(model(torch.randn(4, 6)), torch.ones(4, 1))
            update(optimizer, loss)
            show(f"search {rate}", step, loss)
        found[rate] = loss.item()
    print("best", min(found, key=found.get))


KINDS = (
    *(gan, momentum_contrast, distil, policy_gradient, many_tasks, returned_dataclass),
    *(in_batch_negatives, two_towers, search),
)
for train in KINDS:
    torch.manual_seed(0)
    train()
    gc.collect()
