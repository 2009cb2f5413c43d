"""Balance does nothing to the gradient under DDP, with the loss that it asks for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DistributedSampler

from deepytorch_core.data import TokenBalancedBatchSampler
from deepytorch_core.nn.loss import (
    IGNORED_LABEL,
    global_token_mean,
    global_tokens,
    num_target_tokens,
    reported_mean,
    token_loss_sum,
)
from deepytorch_core.testing import assert_same_on_all_ranks, spawn_ranks

VOCABULARY, NUM_SAMPLES, BATCH, ACCUMULATION = 13, 26, 3, 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)
    )


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 40, (NUM_SAMPLES,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=IGNORED_LABEL)
    return labels.clamp(min=0), labels


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def float64_gradient(indices: list[int]) -> tuple[float, torch.Tensor]:
    """Mean loss over all target tokens of the samples, one sample at a time, without padding."""
    reference = model().double()
    data = samples()
    losses = [
        F.cross_entropy(reference(data[index])[:-1], data[index][1:], reduction="none")
        for index in indices
    ]
    mean = torch.cat(losses).mean()
    mean.backward()
    return mean.item(), gradients(reference).detach()


def batches_of(rank: int, world_size: int, normalization: Any) -> list[list[int]]:
    sampler = DistributedSampler(range(NUM_SAMPLES), world_size, rank, seed=5)
    return list(
        TokenBalancedBatchSampler(
            [len(sample) for sample in samples()],
            sampler=BatchSampler(sampler, BATCH, False),
            normalization=normalization,
            accumulation=ACCUMULATION,
        )
    )


def train_balanced(rank: int, world_size: int) -> list[tuple[float, torch.Tensor, list[int]]]:
    """Each step's loss, gradient and this rank's samples."""
    data, ddp = samples(), DistributedDataParallel(model())
    batches = batches_of(rank, world_size, "global_tokens")
    found = []
    for start in range(0, len(batches), ACCUMULATION):
        step = batches[start : start + ACCUMULATION]
        ddp.zero_grad()
        pairs = [padded([data[index] for index in batch]) for batch in step]
        tokens = global_tokens(sum(num_target_tokens(labels) for _, labels in pairs))
        total = torch.zeros(())
        for index, (inputs, labels) in enumerate(pairs):
            ddp.require_backward_grad_sync = index == len(pairs) - 1
            loss = global_token_mean(token_loss_sum(ddp(inputs), labels), tokens)
            loss.backward()
            total += loss.detach()
        assert_same_on_all_ranks(gradients(ddp), f"gradients {start}")
        mean = reported_mean(total, tokens)
        found.append((mean.item(), gradients(ddp).clone(), [i for batch in step for i in batch]))
    return found


def train_unbalanced(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients with balance off and with the stock sampler, both with stock's rank means."""
    data = samples()
    sampler = DistributedSampler(range(NUM_SAMPLES), world_size, rank, seed=5)
    arms = [batches_of(rank, world_size, "other"), list(BatchSampler(sampler, BATCH, False))]
    found: list[list[torch.Tensor]] = []
    for batches in arms:
        ddp = DistributedDataParallel(model())
        steps = []
        for batch in batches:
            ddp.zero_grad()
            inputs, labels = padded([data[index] for index in batch])
            F.cross_entropy(ddp(inputs)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
            steps.append(gradients(ddp).clone())
        found.append(steps)
    return list(zip(*found, strict=True))


def no_targets_on_one_rank(rank: int, world_size: int) -> tuple[float, torch.Tensor]:
    ddp = DistributedDataParallel(model())
    labels = samples()[0][None].clone()
    inputs = labels.clone()
    if rank == 1:
        labels.fill_(IGNORED_LABEL)
    loss_sum = token_loss_sum(ddp(inputs), labels)
    loss = global_token_mean(loss_sum, num_target_tokens(labels), dist.group.WORLD)
    loss.backward()
    return loss.item(), gradients(ddp)


def test_balance_on_gives_the_float64_gradient_of_the_global_mean() -> None:
    ranks = spawn_ranks(train_balanced, 2, backend="gloo")
    seen: list[int] = []
    for (loss, gradient, mine), (other_loss, _, theirs) in zip(*ranks, strict=True):
        expected_loss, expected = float64_gradient(mine + theirs)
        assert loss == other_loss == pytest.approx(expected_loss, rel=1e-6)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-7)
        seen += mine + theirs
    assert sorted(seen) == list(range(NUM_SAMPLES))


def test_balance_off_gives_the_stock_gradient() -> None:
    for steps in spawn_ranks(train_unbalanced, 2, backend="gloo"):
        assert steps
        for ours, stock in steps:
            assert torch.equal(ours, stock)


def test_balance_loss_with_all_labels_ignored_on_one_rank() -> None:
    (loss, gradient), (empty, other) = spawn_ranks(no_targets_on_one_rank, 2, backend="gloo")
    expected_loss, expected = float64_gradient([0])
    assert loss == pytest.approx(2 * expected_loss, rel=1e-6)
    assert empty == 0.0
    assert torch.equal(gradient, other)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-7)


def test_balance_loss_in_one_process() -> None:
    module, data = model(), samples()
    inputs, labels = padded(data[:4])
    loss_sum = token_loss_sum(module(inputs), labels)
    expected_loss, expected = float64_gradient([0, 1, 2, 3])
    number = int(num_target_tokens(labels))
    loss = global_token_mean(loss_sum, number, divided_by=2) / 2
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert reported_mean(2 * loss, global_tokens(number), divided_by=2).item() == loss.item()
    loss.backward()
    torch.testing.assert_close(gradients(module).double(), expected, rtol=1e-5, atol=1e-7)
    nothing = copy.deepcopy(module)
    nothing.zero_grad()
    ignored = torch.full_like(labels, IGNORED_LABEL)
    zero = global_token_mean(token_loss_sum(nothing(inputs), ignored), num_target_tokens(ignored))
    zero.backward()
    assert zero.item() == 0.0
    assert not gradients(nothing).any()
