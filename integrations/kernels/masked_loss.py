"""The loss of transformers' masked language models from the masked tokens alone.

Masked language models train on a sixth of their tokens, and compute logits for all. Here the head
returns `DeferredLogits` in training with labels; the model's own cross-entropy of them runs the
head on the tokens that have a target. Whoever reads the logits gets stock's. The number of targets
is known where batches are planned on the CPU (option `padding_free`). Else the head would have to
wait for the GPU, and stays stock's.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepytorch_core.nn.deferred_logits import BYPASSED, DeferredLogits
from deepytorch_core.nn.kernels import (
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    Undo,
    register_kernel,
    register_place,
)
from deepytorch_core.nn.loss import IGNORED_LABEL
from deepytorch_core.nn.weight_changes import say_late, too_late

from .causal_loss import Moment, Weights, is_hooked, stand_in

KIND = "masked_loss"
# The heads of BERT and RoBERTa, and of their kin, have these names.
_HEADS = ("cls", "lm_head")
_TOKENS = {"cpu": 256}
_DEFAULT_TOKENS = 4096
_TRAINED = 6  # one token in so many, in the trial


class _Running(threading.local):
    """The known facts of the forward pass that this thread is running."""

    most_targets: int | None = None  # at least as many as the batch has; None: nobody knows


_running = _Running()


def most_targets(num_targets: int) -> int:
    """A bound of few values: code and graphs are made anew for each."""
    step = max(64, 1 << max(0, num_targets.bit_length() - 4))
    return -(-max(1, num_targets) // step) * step


def expect(bound: int | None) -> None:
    """From here on forward passes have at most so many targets; None: nobody knows."""
    _running.most_targets = bound


def is_used(model: nn.Module) -> bool:
    """Whether the model's head runs on its targets alone, where their number is known."""
    head = _head_of(model)
    return head is not None and isinstance(vars(head).get("forward"), MaskedHead)


@contextmanager
def _expecting(bound: int) -> Iterator[None]:
    before = _running.most_targets
    expect(bound)
    try:
        yield
    finally:
        expect(before)


@register_place(KIND)
def find(setting: KernelSetting) -> Iterable[KernelPlace]:
    """The masked language models in the model."""
    for module in setting.model.modules():
        head = _head_of(module)
        if head is not None:
            yield KernelPlace(
                kind=KIND,
                what=f"loss of {type(module).__name__}({_vocabulary(module)})",
                targets=(module,),
                probe=lambda owner=module: _probe(owner, setting),  # type: ignore[misc]
                saves_memory=True,
            )


def _head_of(model: Any) -> nn.Module | None:
    """Return what makes logits of hidden states; None if it is no masked language model."""
    if isinstance(model, _ProbeModel):
        return model.head
    if not type(model).__name__.endswith("ForMaskedLM"):
        return None
    last = getattr(model, "get_output_embeddings", lambda: None)()
    heads = (getattr(model, name, None) for name in _HEADS)
    found: nn.Module | None = next(
        (
            head
            for head in heads
            if isinstance(head, nn.Module) and any(module is last for module in head.modules())
        ),
        None,
    )
    return found


def _vocabulary(model: Any) -> int:
    return int(model.get_output_embeddings().out_features)


class _ProbeModel(nn.Module):
    """A masked language model's end: a copy of the head, and the stock loss."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.head: nn.Module = copy.deepcopy(_head_of(owner))  # type: ignore[assignment]
        self.vocabulary = _vocabulary(owner)

    def forward(self, hidden: torch.Tensor, *, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return F.cross_entropy(logits.view(-1, self.vocabulary), labels.view(-1))


def _probe(owner: Any, setting: KernelSetting) -> KernelProbe:
    probed = _ProbeModel(owner).to(setting.device).train()
    tokens = _TOKENS.get(setting.device.type, _DEFAULT_TOKENS)
    generator = torch.Generator().manual_seed(tokens)
    dtype = next(probed.parameters()).dtype
    width = getattr(owner.config, "hidden_size", None) or owner.get_output_embeddings().in_features
    on_host: dict[str, Any] = {"generator": generator, "device": "cpu"}
    size = (2, tokens // 2)
    hidden = torch.randn(*size, width, dtype=torch.float32, **on_host).to(setting.device, dtype)
    labels = torch.randint(0, probed.vocabulary, size, dtype=torch.int64, **on_host)
    trained = torch.rand(size, dtype=torch.float32, **on_host) < 1 / _TRAINED
    labels = labels.masked_fill(~trained, IGNORED_LABEL).to(setting.device)
    bound = most_targets(int(trained.sum()))

    def run() -> list[torch.Tensor | None]:
        rows = hidden.clone().requires_grad_()
        with _expecting(bound):
            loss = probed(rows, labels=labels)
        torch.autograd.backward(loss)
        return [loss, rows.grad]

    return KernelProbe(probed, probed, run)


@register_kernel
class MaskedTokensLoss(Kernel):
    """The head on tokens that have a target."""

    kind = KIND
    name = "masked tokens"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        head: Any = _head_of(place.targets[0])
        if "forward" in vars(head):
            return "the head's forward is replaced already"
        for module in head.modules():
            if is_hooked(module):
                return "somebody has a hook on the head, to see its logits"
        for parameter in head.parameters():
            if (
                parameter.is_meta
                or hasattr(parameter, "ds_id")
                or hasattr(parameter, "device_mesh")
            ):
                return "the head's weights are sharded or not loaded yet"
        return None

    def apply(self, target: Any, setting: KernelSetting) -> Undo:
        head: Any = _head_of(target)
        vocabulary = target.vocabulary if isinstance(target, _ProbeModel) else _vocabulary(target)
        forward = MaskedHead(head, vocabulary, is_asked=setting.mode == "on")
        return stand_in(target, head, forward)


class MaskedHead:
    """Stands in the head's `forward`.

    Args:
        head: see above.
        vocabulary: entries of a row of logits.
        is_asked: whether it was asked for by name. Else the first reader of logits gets them, and
            the head is stock's from then on.
    """

    def __init__(self, head: nn.Module, vocabulary: int, *, is_asked: bool) -> None:
        self.head = head
        self.is_asked = is_asked
        self.is_read = False
        self.vocabulary = vocabulary
        self.weights = Weights(head)
        self.armed = False

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        bound = None if torch.compiler.is_compiling() or not self.armed else _running.most_targets
        refused = self.weights.are_others() or any(map(is_hooked, self.head.modules()))
        if bound is None or args or kwargs or refused or self.is_read:
            return self._stock(hidden, *args, **kwargs)
        kind = hidden.device.type
        enabled = torch.is_autocast_enabled(kind)
        deferred = DeferredLogits.make(
            functools.partial(self._logits, self.weights.moment()),
            hidden,
            parameters=self.head.parameters(),
            shape=(*hidden.shape[:-1], self.vocabulary),
            dtype=torch.get_autocast_dtype(kind) if enabled else hidden.dtype,
            device=hidden.device,
        )
        deferred.cross_entropy = functools.partial(self._loss, hidden, bound)
        deferred.bypassed = BYPASSED if self.is_asked else None
        return deferred

    @property
    def _stock(self) -> Callable[..., Any]:
        stock: Callable[..., Any] = type(self.head).forward.__get__(self.head)
        return stock

    def _loss(
        self, hidden: torch.Tensor, bound: int, targets: torch.Tensor, ignore_index: int
    ) -> torch.Tensor:
        has_target = targets != ignore_index
        torch._assert_async(
            has_target.sum() <= bound,
            "kernels: labels were changed after the data loader had made the batch: change them "
            "in the collate function, or set kernels=off",
        )
        bound = min(bound, len(targets))
        found = torch.nonzero_static(has_target, size=bound, fill_value=-1).squeeze(1)
        places = found.clamp(min=0)
        chosen = targets[places].masked_fill(found < 0, ignore_index)
        rows = hidden.flatten(0, -2).index_select(0, places)
        return F.cross_entropy(self._stock(rows), chosen, ignore_index=ignore_index)

    def _logits(self, made_at: Moment, hidden: torch.Tensor) -> torch.Tensor:
        if self.weights.changed_since(made_at):
            if self.is_asked:
                raise too_late()
            say_late()
        self.is_read = not self.is_asked
        found: torch.Tensor = self._stock(hidden)
        return found
