"""How a padded batch becomes one row without padding, and how results find their way back.

A `Packing` holds where the tokens of a padded batch lie. It is made on the CPU, in the data loader
as a rule. So a step on an accelerator knows the lengths without waiting for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepytorch_core.base.transfers import to_device

IGNORED_LABEL = -100
"""The label that cross_entropy leaves out."""


class Packing:
    """The places of the tokens of a batch of shape [batch, width].

    Attributes:
        indices: int64 [tokens], the tokens' places in the flattened batch, ascending.
        lengths: tokens of each row that has any.
        shape: (batch, width).
        obstacle: why this batch must stay padded; None when packing it changes nothing.
        num_targets: labels that are trained when the batch is packed; None without labels.
    """

    __slots__ = ("_places", "indices", "lengths", "num_targets", "obstacle", "shape")

    def __init__(
        self,
        indices: Tensor,
        lengths: tuple[int, ...],
        shape: tuple[int, int],
        *,
        obstacle: str | None = None,
        num_targets: int | None = None,
    ) -> None:
        self.indices = indices
        self.lengths = lengths
        self.shape = shape
        self.obstacle = obstacle
        self.num_targets = num_targets
        self._places: tuple[int, Tensor] | None = None  # see `unpack_shifted`

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (
            self.indices,
            self.lengths,
            self.shape,
            self.obstacle,
            self.num_targets,
        )

    def __getitem__(self, part: Any) -> Packing:
        """For who slices all that a batch holds: a part of it is planned anew."""
        return _padded((0, 0), "a part of a batch")

    __iter__ = None  # or it would go by __getitem__, without an end

    def __repr__(self) -> str:
        why = f", stays padded: {self.obstacle}" if self.obstacle else ""
        return f"Packing({self.num_tokens} tokens of {self.shape}{why})"

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, without padding."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def is_full(self) -> bool:
        """Whether the batch has no padding at all."""
        return self.num_tokens == self.shape[0] * self.shape[1]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Packing:
        """The same, with `indices` on `device`."""
        place = torch.device(device)
        if non_blocking and self.indices.device.type == "cpu":
            return self._with(to_device(self.indices, place))
        return self._with(self.indices.to(place, non_blocking=non_blocking))

    def cuda(self, device: torch.device | int | None = None, non_blocking: bool = False) -> Packing:
        """The same, with `indices` on a GPU, as loops call it on all that a batch holds."""
        return self._with(self.indices.cuda(device, non_blocking=non_blocking))

    def cpu(self) -> Packing:
        """The same, with `indices` on the CPU."""
        return self.to("cpu")

    def pin_memory(self, device: Any = None) -> Packing:
        """The same, with `indices` in pinned memory, as a data loader asks for it."""
        return self._with(self.indices.pin_memory())

    def _with(self, indices: Tensor) -> Packing:
        return Packing(
            indices,
            self.lengths,
            self.shape,
            obstacle=self.obstacle,
            num_targets=self.num_targets,
        )

    def pack(self, padded: Tensor) -> Tensor:
        """[batch, width, ...] to [1, tokens, ...]; differentiable."""
        flat = padded.reshape(self.shape[0] * self.shape[1], *padded.shape[2:])
        return flat.index_select(0, self.indices).unsqueeze(0)

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, at least tokens, ...] to [batch, width, ...], zero at padding; differentiable."""
        batch, width = self.shape
        padded = packed.new_zeros(batch, width, *packed.shape[2:])
        tokens = packed[0, : self.num_tokens]
        # No view of it: FSDP2 warns of those that a model returns.
        return padded.index_put((self.indices // width, self.indices % width), tokens)

    def unpack_shifted(self, packed: Tensor) -> Tensor:
        """[1, at least tokens - 1] to [batch, width - 1], zero at padding; differentiable.

        That is one value for each token but the last, of a head that compares it with the next one.
        Each place of the batch gathers its value, so that several fields share the indices.
        """
        batch, width = self.shape
        row = torch.nn.functional.pad(packed[0], (0, 1))  # padding takes the zero at its end
        if self._places is None or self._places[0] != len(row):
            tokens = torch.arange(self.num_tokens, dtype=torch.int64, device=row.device)
            places = tokens.new_full((batch * width,), len(row) - 1)
            places = places.index_copy_(0, self.indices, tokens)
            self._places = len(row), places.view(batch, width)[:, :-1].flatten()
        return row.index_select(0, self._places[1]).view(batch, width - 1)

    def columns(self) -> Tensor:
        """int64 [1, tokens]: each token's column in the padded batch."""
        return (self.indices % self.shape[1]).unsqueeze(0)

    def ranks_in_row(self) -> Tensor:
        """int64 [1, tokens]: how many tokens of its row come before each."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
        starts = lengths.cumsum(0) - lengths
        places = torch.arange(self.num_tokens, dtype=torch.int64, device="cpu")
        counted = places - torch.repeat_interleave(starts, lengths)
        return to_device(counted.unsqueeze(0), self.indices.device)

    def pack_labels(self, labels: Tensor, *, shifted: bool) -> Tensor:
        """Labels [batch, width] to [1, tokens], each token keeping the target that it has padded.

        Args:
            labels: integers; -100 where nothing is trained.
            shifted: whether the loss compares a token with the label after it, as a causal model's
                does. The target of a sequence's last token is then never the next sequence's.
        """
        if not shifted:
            return self.pack(labels)
        targets = self.pack(_shifted(labels))
        return torch.cat([targets.new_full((1, 1), IGNORED_LABEL), targets[:, :-1]], dim=1)


def plan(attention_mask: Tensor, labels: Tensor | None = None, *, shifted: bool = True) -> Packing:
    """Find out how a padded batch packs. Waits for the device when it isn't the CPU's.

    Args:
        attention_mask: [batch, width] of any dtype, 0 at padding and 1 at tokens; padding may be
            on either side or between tokens.
        labels: [batch, width] or None.
        shifted: see `Packing.pack_labels`.

    The result's `obstacle` says why a batch can't be packed without changing its loss; never raises
    for what a model could be given.
    """
    shape = tuple(attention_mask.shape)
    if len(shape) != 2:
        return _padded((0, 0), f"attention_mask has {len(shape)} dimensions in place of 2")
    size = (shape[0], shape[1])
    mask = attention_mask.detach().to("cpu")
    tokens = mask != 0
    if not bool((tokens == (mask == 1)).all()):
        return _padded(size, "attention_mask holds other values than 0 and 1")
    lengths = tuple(length for length in tokens.sum(dim=1).tolist() if length)
    if not lengths:
        return _padded(size, "the batch has no tokens")
    packing = Packing(tokens.flatten().nonzero().flatten(), lengths, size)
    if labels is None:
        return packing
    if tuple(labels.shape) != size:
        return _padded(size, f"labels have the shape {tuple(labels.shape)}, the batch has {size}")
    labels = labels.detach().to("cpu")
    targets = _shifted(labels) if shifted else labels
    num_targets = int((targets != IGNORED_LABEL).sum())
    packed = packing.pack_labels(labels, shifted=shifted)
    packing.num_targets = int((packed != IGNORED_LABEL).sum())
    if packing.num_targets != num_targets:
        packing.obstacle = "labels train on padding: set them to -100 where attention_mask is 0"
    return packing


def full(ids: Tensor) -> Packing:
    """The packing of a batch [batch, width] that has no padding. Never waits for the device."""
    batch, width = ids.shape
    indices = torch.arange(ids.numel(), dtype=torch.int64, device=ids.device)
    return Packing(indices, (width,) * batch, (batch, width))


def _shifted(labels: Tensor) -> Tensor:
    """[batch, width]: each token's target, which is the label after it."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def _padded(shape: tuple[int, int], obstacle: str) -> Packing:
    return Packing(torch.empty(0, dtype=torch.int64, device="cpu"), (), shape, obstacle=obstacle)


def _unpickled(
    indices: Tensor,
    lengths: tuple[int, ...],
    shape: tuple[int, int],
    obstacle: str | None,
    num_targets: int | None,
) -> Packing:
    return Packing(indices, lengths, shape, obstacle=obstacle, num_targets=num_targets)
