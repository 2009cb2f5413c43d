"""Train on sequences of very different lengths, with the same tokens for every rank.

    deepytorch run --nproc-per-node 2 docs/examples/token_balance.py

It prints how uneven the ranks' steps were and are, and the mean loss per token. `--stock` leaves
the samples where DistributedSampler puts them; the losses are the same.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from deepytorch_core.data import TokenBalancedBatchSampler
from deepytorch_core.nn.loss import (
    IGNORED_LABEL,
    global_token_mean,
    global_tokens,
    num_target_tokens,
    reported_mean,
    token_loss_sum,
)

VOCABULARY, MICRO_BATCHES = 64, 2


def sentences(count: int) -> list[torch.Tensor]:
    """Counting sequences, most of them short and some long."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(count).log_normal_(3.0, 0.9, generator=generator).clamp(4, 200).int()
    starts = torch.randint(0, VOCABULARY, (count,), generator=generator)
    return [(s + torch.arange(n)) % VOCABULARY for s, n in zip(starts, lengths, strict=True)]


def padded(batch: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(batch, batch_first=True, padding_value=IGNORED_LABEL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stock", action="store_true", help="don't move samples")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group()
    data = sentences(256)
    sampler = DistributedSampler(data, seed=1)
    batches = BatchSampler(sampler, batch_size=4, drop_last=True)
    if not options.stock:
        batches = TokenBalancedBatchSampler(
            [len(sample) for sample in data],
            sampler=batches,
            normalization="global_tokens",
            accumulation=MICRO_BATCHES,
        )
        if dist.get_rank() == 0:
            print(f"imbalance: {batches.imbalance()}")
    loader = DataLoader(data, batch_sampler=batches, collate_fn=padded)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.ReLU(), nn.Linear(32, VOCABULARY))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        arriving = iter(loader)
        for labels in arriving:
            step = [labels, *(next(arriving) for _ in range(MICRO_BATCHES - 1))]
            tokens = global_tokens(sum(num_target_tokens(micro_batch) for micro_batch in step))
            total = torch.zeros(())
            for number, labels in enumerate(step, 1):
                model.require_backward_grad_sync = number == len(step)
                logits = model(labels.clamp(min=0))
                loss = global_token_mean(token_loss_sum(logits, labels), tokens)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        mean = reported_mean(total, tokens)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
