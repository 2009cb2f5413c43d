"""A training loop that pads its batches, and a model that never sees the padding.

python docs/examples/padding_free.py
"""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from deepytorch.integrations.transformers import pack_batches


def collate(texts):
    """Pad to the longest text, as any data collator does."""
    longest = max(map(len, texts))
    ids = torch.tensor([list(text) + [0] * (longest - len(text)) for text in texts])
    mask = (torch.arange(longest) < torch.tensor([[len(text)] for text in texts])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main():
    torch.manual_seed(0)
    texts = [name.encode() for name in dir(torch)]
    loader = DataLoader(texts[:320], batch_size=8, shuffle=True, collate_fn=collate)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    packed = pack_batches(model, "on", loaders=[loader])  # the one line
    print("trains without padding:", packed)

    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.2f}")

    model.eval()  # from here on the model is transformers' own again
    prompt = torch.tensor([list(b"cross_entr")])
    print(bytes(model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()))


main()
