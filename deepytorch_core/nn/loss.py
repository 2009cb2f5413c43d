"""The mean over all target tokens of an optimizer step, with its exact gradient.

Wrappers average gradients over the ranks (DDP, FSDP, ZeRO). If every rank divides its loss by its
own tokens, a token in a short batch has more weight than one in a long batch. Divided by the tokens
of all ranks and micro-batches every token weighs the same, however they are spread.

    tokens = global_tokens(sum(num_target_tokens(batch["labels"]) for batch in micro_batches))
    for batch in micro_batches:
        loss = global_token_mean(token_loss_sum(model(...).logits, batch["labels"]), tokens)
        loss.backward()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

IGNORED_LABEL = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out by default."""


@dataclass(frozen=True)
class GlobalTokens:
    """Target tokens of one optimizer step over all ranks; see `global_tokens`.

    Attributes:
        count: float32 scalar, on the device it is used on; not below 1.
        num_ranks: over how many ranks gradients are averaged.
    """

    count: torch.Tensor
    num_ranks: int


def global_tokens(
    num_tokens: int | torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> GlobalTokens:
    """Sum this rank's target tokens over the ranks. Call it once for each optimizer step.

    Collective over `group` where torch.distributed is initialised. Nothing waits for the device.

    Args:
        num_tokens: target tokens of all of this rank's micro-batches of the step, an integer or an
            integer scalar. 0 is fine: the rank has nothing to learn from in this step.
        group: the ranks whose gradients are averaged; default: all.
        device: where an integer goes, a device the group communicates on; default: the CPU.
    """
    if isinstance(num_tokens, torch.Tensor):
        # float64 would be exact, and is not on every device; 2**53 tokens are no step's.
        count = num_tokens.detach().to(torch.int64).reshape(())
    else:
        count = torch.tensor(num_tokens, dtype=torch.int64, device=device)
    num_ranks = 1
    if dist.is_available() and dist.is_initialized():
        num_ranks = dist.get_world_size(group)
        count = count.clone()
        dist.all_reduce(count, group=group)
    return GlobalTokens(count.clamp(min=1).to(torch.float32), num_ranks)


def global_token_mean(
    loss_sum: torch.Tensor,
    num_tokens: int | torch.Tensor | GlobalTokens,
    group: dist.ProcessGroup | None = None,
    *,
    divided_by: int = 1,
) -> torch.Tensor:
    """The loss to call `backward` on, so that averaged gradients are those of the global mean.

    Args:
        loss_sum: scalar, the sum of one micro-batch's token losses on this rank, not their mean.
        num_tokens: what `global_tokens` gave for the step; or, for a step of one micro-batch, this
            rank's target tokens, and then the call is collective over `group`.
        group: the ranks whose gradients are averaged; default: all. Unused with GlobalTokens.
        divided_by: what the framework divides each loss by afterwards: the number of micro-batches
            with Accelerate's `accelerator.backward` and DeepSpeed's `engine.backward`.

    Returns a scalar: the micro-batch's share of the global mean times the number of ranks (and
    `divided_by`). See `reported_mean` for what to log.
    """
    if not isinstance(num_tokens, GlobalTokens):
        num_tokens = global_tokens(num_tokens, group, device=loss_sum.device)
    scale = num_tokens.num_ranks * divided_by / num_tokens.count.to(loss_sum.device)
    return loss_sum * scale.to(loss_sum.dtype)


def reported_mean(
    loss: torch.Tensor,
    tokens: GlobalTokens,
    group: dist.ProcessGroup | None = None,
    *,
    divided_by: int = 1,
) -> torch.Tensor:
    """The global mean itself, for logs: from the sum of a step's `global_token_mean` losses.

    Collective over `group` where torch.distributed is initialised. The same on all ranks.
    """
    mean = loss.detach() / (tokens.num_ranks * divided_by)
    if tokens.num_ranks > 1:
        dist.all_reduce(mean, group=group)
    return mean


def num_target_tokens(
    labels: torch.Tensor, *, ignore_index: int = IGNORED_LABEL, shift: bool = True
) -> torch.Tensor:
    """How many labels count, int64 scalar on their device.

    Args:
        labels: (..., sequence), integers.
        shift: label i is the target of position i - 1, as in causal language models: the first of
            each sequence counts for nothing.
    """
    return (labels[..., 1:] if shift else labels).ne(ignore_index).sum()


def token_loss_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = IGNORED_LABEL,
    shift: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """Cross-entropy summed over the target tokens, float32 scalar.

    Args:
        logits: (..., sequence, vocabulary), floating.
        labels: (..., sequence), integers.
        shift: as in `num_target_tokens`.
        **kwargs: more of `torch.nn.functional.cross_entropy`: `label_smoothing`, `weight`.
    """
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    return F.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
        **kwargs,
    )
