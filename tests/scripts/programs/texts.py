"""Causal language models write in between steps, are tried at several rates, and earn rewards."""

import gc

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

STEPS = 6


def build(**changes):
    set_seed(0)
    settings = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "eos_token_id": 31,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**settings))


def show(kind, step, loss):
    print(f"{kind} step {step} loss {loss.item():.6f}")


def generate_between():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model.train()
        ids = torch.randint(1, 31, (2, 8))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show("generate_between", step, loss)
        model.eval()
        for sampled in (False, True):
            written = model.generate(ids[:, :3], max_new_tokens=4, do_sample=sampled)
            print("wrote", " ".join(map(chr, (written + 64).flatten().tolist())))


def search():
    best = None
    for rate, layers in ((1e-3, 1), (1e-2, 2)):
        model = build(num_hidden_layers=layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        model.train()
        for step in range(STEPS):
            ids = torch.randint(1, 31, (2, 8))
            optimizer.zero_grad()
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
            loss.backward()
            optimizer.step()
            show(f"search {rate} {layers}", step, loss)
        best = min(best or (9.0, 0), (loss.item(), layers))
    print("best with layers", "one" if best[1] == 1 else "two")


def rewarded():
    model = build(num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        ask = torch.randint(1, 31, (3, 2))
        with torch.no_grad():
            told = model.generate(ask, max_new_tokens=4, min_new_tokens=4, do_sample=True)
        rewards = (told[:, 2:] % 2).float().mean(1)
        logits = model(told).logits[:, 1:-1]
        chances = torch.distributions.Categorical(logits=logits).log_prob(told[:, 2:])
        loss = -((rewards - rewards.mean()).unsqueeze(1) * chances).sum() + 0.0 * rewards.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show("rewarded", step, loss)


for train in (generate_between, search, rewarded):
    torch.manual_seed(0)
    train()
    gc.collect()
