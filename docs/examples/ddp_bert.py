"""Plain DDP, without a line of deepytorch: a small BERT learns masked tokens of random text.

deepytorch run --nproc-per-node 2 docs/examples/ddp_bert.py --steps 40
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch", type=int, default=4, help="sequences of each rank in a step")
arguments = parser.parse_args()
steps, batch = arguments.steps, arguments.batch

dist.init_process_group("gloo")
torch.manual_seed(0)
config = BertConfig(
    vocab_size=5000,  # as large a part of the weights as in BERT base
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=1024,
    max_position_embeddings=64,
)
MASK = config.vocab_size - 1
model = DistributedDataParallel(BertForMaskedLM(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(steps):
    # Some words come more often than others, as in a language.
    words = (MASK * torch.rand(batch, 64, generator=data) ** 4).long()
    hidden = torch.rand(batch, 64, generator=data) < 0.15
    output = model(
        input_ids=words.masked_fill(hidden, MASK), labels=words.masked_fill(~hidden, -100)
    )
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {output.loss.item():.4f}")
dist.destroy_process_group()
