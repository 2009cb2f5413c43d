"""Option `token_balance` under a transformers Trainer: an optimizer step's samples, evenly spread.

The seam is `Trainer.get_train_dataloader` inside of `Trainer._inner_training_loop`, where all ranks
call it; who asks for a loader elsewhere, on one rank maybe, gets the stock one. While it runs, the
loader that it hands its Accelerator gets a `TokenBalancedBatchSampler` over its own batch sampler,
so the order stays the Trainer's. All ranks decide when the first epoch begins whether samples then
change places, as the model is prepared after its loader. They do under two conditions. The model's
batches are packed, as padded ones don't cost their tokens. And its loss turned out to be divided by
`num_items_in_batch` when `packing_probe` tried it.
"""

from __future__ import annotations

import array
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from deepytorch.integrations.common import contract
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch_core.base import agreement, decisions
from deepytorch_core.data import TokenBalancedBatchSampler
from deepytorch_core.data.balance import WHAT

_NAME = "token_balance"
_IDS, _MASK = "input_ids", "attention_mask"
# Losses of TRL's SFTTrainer that are the Trainer's mean over `num_items_in_batch`.
_SFT_LOSSES = ("nll", "chunked_nll")
# The Trainer draws samples with these: all of them, in the same order on every rank.
_ORDERS = (RandomSampler, SequentialSampler, LengthGroupedSampler)
_UNKNOWN = "the data set tells no lengths unless every sample is read, as token_balance=on does"
_LOADER_ARGUMENTS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order"),
)


def attach(trainer: Any, choice: str) -> None:
    """Have a Trainer's training loaders balance tokens as `choice` says: auto, on or off."""
    if choice == "off" or contract.is_marked(trainer, _NAME):
        return
    changes = contract.Changes()
    original = trainer._inner_training_loop

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        with _set(trainer, "get_train_dataloader", _loading(trainer, choice)):
            return original(*args, **kwargs)

    changes.set(trainer, "_inner_training_loop", train)
    contract.mark(trainer, _NAME, changes)


def detach(trainer: Any) -> None:
    """Undo `attach`, if it was called; a loader that exists keeps its sampler."""
    contract.undo(trainer, _NAME)


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    changes = contract.Changes()
    changes.set(owner, name, value)
    try:
        yield
    finally:
        changes.undo()


def _loading(trainer: Any, choice: str) -> Callable[..., Any]:
    original = trainer.get_train_dataloader

    @functools.wraps(original)
    def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
        reason = _why_not(trainer)
        if reason is not None:
            _decline(reason, choice)
            return original(*args, **kwargs)
        with _set(trainer.accelerator, "prepare", _preparing(trainer, choice)):
            return original(*args, **kwargs)

    return get_train_dataloader


def _decline(reason: str, choice: str) -> None:
    if choice == "on":
        raise contract.IntegrationError(
            f"transformers: token_balance=on: {reason}; set token_balance=auto or off"
        )
    decisions.record(WHAT, "off", reason)


def _why_not(trainer: Any) -> str | None:
    """Why the samples of a step may not change places under this Trainer, whatever its data."""
    args = trainer.args
    if trainer.accelerator.num_processes * args.gradient_accumulation_steps == 1:
        return "there is one rank and one micro-batch a step, so nothing to balance"
    if args.n_gpu > 1:
        return "the process cuts its batches up between several GPUs"
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if any(getattr(parallel, name, False) for name in ("tp_enabled", "cp_enabled", "sp_enabled")):
        return "several ranks compute the same samples"
    dispatches = (trainer.accelerator.dispatch_batches, trainer.accelerator.split_batches)
    if any(dispatches):
        return "Accelerate cuts batches up between ranks (dispatch_batches, split_batches)"
    if not args.average_tokens_across_devices and trainer.accelerator.num_processes > 1:
        return "average_tokens_across_devices is off, so each rank divides by its own tokens"
    if not _is_stock_loss(trainer):
        return f"{type(trainer).__name__} has a loss of its own, which may not count all tokens"
    if not trainer.model_accepts_loss_kwargs:
        return f"{type(trainer.model).__name__} takes no num_items_in_batch"
    return None


def _is_stock_loss(trainer: Any) -> bool:
    if trainer.compute_loss_func is not None or "compute_loss" in vars(trainer):
        return False
    compute = type(trainer).compute_loss
    if compute is Trainer.compute_loss:
        return True
    sft = compute.__module__ == "trl.trainer.sft_trainer"
    return sft and getattr(trainer.args, "loss_type", None) in (None, *_SFT_LOSSES)


def _preparing(trainer: Any, choice: str) -> Callable[..., Any]:
    original = trainer.accelerator.prepare

    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        return original(
            *(
                _balanced(argument, trainer, choice)
                if isinstance(argument, DataLoader)
                else argument
                for argument in args
            ),
            **kwargs,
        )

    return prepare


def _balanced(loader: DataLoader[Any], trainer: Any, choice: str) -> DataLoader[Any]:
    """The same loader with batches of even tokens, or itself where that can't be."""
    if isinstance(loader.dataset, IterableDataset):
        _decline("the data set is read in its own order", choice)
        return loader
    if type(loader.batch_sampler) is not BatchSampler or not isinstance(loader.sampler, _ORDERS):
        _decline("the training loader has a sampler of its own, or none", choice)
        return loader
    lengths = _lengths(trainer, loader, reads=choice == "on")
    reason = _why_not_all(lengths)
    if lengths is None or reason is not None:
        _decline(reason or _UNKNOWN, choice)
        return loader

    def why_not_now() -> str | None:
        return _why_not_now(trainer)

    batches = TokenBalancedBatchSampler(
        lengths,
        sampler=loader.batch_sampler,
        normalization="global_tokens",
        accumulation=trainer.args.gradient_accumulation_steps,
        num_replicas=trainer.accelerator.num_processes,
        even_batches=trainer.accelerator.even_batches,
        decline=None if choice == "on" else lambda: padding_free.agreed(_NAME, why_not_now),
    )
    kept = {name: getattr(loader, name) for name in _LOADER_ARGUMENTS}
    return DataLoader(loader.dataset, batch_sampler=batches, **kept)


def _why_not_now(trainer: Any) -> str | None:
    """Why no samples change places, now that the model has been prepared."""
    conventions = padding_free.conventions(trainer.model_wrapped)
    if conventions is None:
        return "batches are padded, so their tokens are not what they cost"
    if not conventions.counts_items:
        name = type(trainer.model).__name__
        return f"the loss of {name} is not its tokens' divided by num_items_in_batch"
    return None


def _why_not_all(lengths: Sequence[int] | None) -> str | None:
    """Why not all ranks may deal the same samples out, on every rank; None if they may."""
    from torch.distributed import distributed_c10d as c10d

    told = _UNKNOWN
    if lengths is not None:
        told = hashlib.sha256(array.array("q", lengths).tobytes()).hexdigest()
    if not c10d.is_initialized():
        return _UNKNOWN if told == _UNKNOWN else None
    rank = c10d.get_rank()
    try:
        found = agreement.gather(
            agreement.numbered(c10d._get_default_store(), f"deepytorch/{_NAME}", rank),
            rank=rank,
            size=c10d.get_world_size(),
            value=told,
            here_limit_s=contract.here_limit_s(),
        )
    except RuntimeError as error:  # the same on all ranks
        return str(error)
    if _UNKNOWN in found:
        return _UNKNOWN
    return "the samples of the ranks' data sets differ in length" if len(set(found)) > 1 else None


def _lengths(trainer: Any, loader: Any, *, reads: bool) -> Sequence[int] | None:
    """Tokens of every sample, by index; None where that is not known without reading them."""
    dataset = trainer.train_dataset  # with the columns that the model doesn't get
    if not isinstance(dataset, type(loader.dataset)) or len(dataset) != len(loader.dataset):
        dataset = loader.dataset
    columns = getattr(dataset, "column_names", None)
    told = getattr(trainer.args, "length_column_name", "length")
    if isinstance(columns, list) and dataset.format["type"] != "custom":
        if told in columns:
            return [int(length) for length in dataset.with_format(None)[told]]
        name = next((name for name in (_MASK, _IDS) if name in columns), None)
        if name is not None:
            return _arrow_lengths(dataset.select_columns(name).with_format("arrow")[:], name)
    if not reads:
        return None
    return [_length(dataset[index]) for index in range(len(dataset))]


def _arrow_lengths(table: Any, name: str) -> list[int]:
    """Elements of each list of a column, or in a mask what is not masked."""
    import numpy as np

    lengths: list[int] = []
    for chunk in table.column(name).chunks:
        offsets = chunk.offsets.to_numpy()
        if name == _MASK:
            seen = chunk.values.to_numpy(zero_copy_only=False) != 0
            offsets = np.concatenate([[0], np.cumsum(seen)])[offsets]
        lengths += np.diff(offsets).tolist()
    return lengths


def _length(sample: Any) -> int:
    mask = sample.get(_MASK)
    if mask is not None:
        return int(torch.as_tensor(mask, device="cpu").count_nonzero())
    return len(sample[_IDS])
