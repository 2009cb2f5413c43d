"""TRL's figures of a step are read while the next one is launched.

Between the forward and the backward pass its SFTTrainer adds up labels, their entropy and the
tokens that were likeliest, and waits for each sum. The GPU has done all its work by then, and waits
for the backward pass to be launched. Here the sums are copied once they are there, and the host
goes on. It knows two of them, from how the batch was packed.

The copies are read when the next optimizer step ends, or in `log` before that. Where somebody else
may look at them, they are read at the end of the step, or of each micro-batch. Micro-batches share
a pass of the trunk, which the first one launches. To read its figures is to wait for that pass, and
heads are short: the GPU would idle in them.

First some steps are watched: whether these are the sums, in this order, and what becomes of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepytorch.integrations.padding_free import fused_head
from deepytorch_core.base.patching import Patches

_WHY = "sums that are logged are read while the next step is launched"
_OPTION = "DEEPYTORCH_COMPILE=off"
# Sums of a step, in TRL's order.
_LABELS, _ENTROPY, _LIKELIEST, _TOKENS = range(4)
_NUM_SUMS = 4
_WATCHED_STEPS = 2
_MOST_STRANGE = 8  # packed steps with other sums, before it is given up
_TRLS = "trl.trainer.sft_trainer"
# Callbacks of these look at what is logged alone.
_UNINTERESTED = ("transformers", "trl", "deepytorch")
_WITHIN_STEP = ("on_substep_end",)
# All until the next step reads them; `on_log` is given the figures.
_AFTER_STEP = (
    *("on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_step_begin"),
    *("on_epoch_end", "on_epoch_begin", "on_evaluate", "on_prediction_step", "on_save"),
)
_NAMES = {_ENTROPY: "entropy", _LIKELIEST: "mean_token_accuracy"}


class _Running(threading.local):
    step: _Step | None = None


_running = _Running()


class _Known:
    """Knows how the steps of one trainer were.

    Attributes:
        fresh: the numbers of the optimizer step under way that are not read yet.
        was_last: whether the last micro-batch has ended an optimizer step.
    """

    def __init__(self) -> None:
        self.num_alike = 0
        self.num_strange = 0
        self.fresh: list[Awaited] = []
        self.was_last = False

    @property
    def is_over(self) -> bool:
        """Whether the trainer turned out to do something else."""
        return self.num_strange >= _MOST_STRANGE


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def of_accelerator(module: Any, patches: Patches) -> None:
    """Put it in place in `accelerate.accelerator`."""
    patches.replace(module.Accelerator, "gather_for_metrics", _gathering, why=_WHY, option=_OPTION)


@contextmanager
def stepping(trainer: Any) -> Iterator[None]:
    """While open, the trainer makes one training step, whose sums are read late."""
    if not _is_served(trainer):
        yield
        return
    fused_head.take_packing()  # not that of another step
    step = _running.step = _Step(trainer, _known.setdefault(trainer, _Known()))
    try:
        yield
    except BaseException:
        _running.step = None
        step.read_all()
        raise
    _running.step = None
    step.end()


def _is_served(trainer: Any) -> bool:
    """Whether it is TRL's own step, alone on a GPU."""
    compute = getattr(type(trainer), "compute_loss", None)
    is_trls = getattr(compute, "__module__", "") == _TRLS
    if not is_trls or "compute_loss" in vars(trainer) or not _is_waited_for(trainer):
        return False
    known = _known.get(trainer)
    if known is not None and known.is_over:
        return False
    alone = trainer.accelerator.num_processes == 1 and getattr(trainer, "_tp_size", 1) == 1
    return alone and isinstance(getattr(trainer, "_metrics", None), dict)


def _is_waited_for(trainer: Any) -> bool:
    return bool(trainer.args.device.type == "cuda")


def _is_looked_at(trainer: Any, events: tuple[str, ...]) -> bool:
    """Whether somebody but TRL may look at figures of a step at one of these events."""
    methods = ("training_step", "log")
    if any(name in vars(trainer) for name in methods) or any(
        getattr(type(trainer), name).__module__ != _TRLS for name in methods
    ):
        return True
    return any(
        event in vars(callback)
        or getattr(type(callback), event).__module__.partition(".")[0] not in _UNINTERESTED
        for callback in trainer.callback_handler.callbacks
        for event in events
    )


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather_for_metrics(*args: Any, **kwargs: Any) -> Any:
        found, step = original(*args, **kwargs), _running.step
        return found if step is None else step.gathered(found)

    return gather_for_metrics


class _Step:
    """One training step of a trainer.

    Args:
        trainer: TRL's.
        known: what is known of it.
    """

    def __init__(self, trainer: Any, known: _Known) -> None:
        self._trainer = trainer
        self._known = known
        self._sums: list[Any] = []
        self._num_tokens = self._num_labels = 0
        self._before = trainer._total_train_tokens
        if known.was_last:
            known.fresh.clear()
        self._is_late = False

    def gathered(self, found: Any) -> Any:
        """A sum over all ranks: as it is, or one that is read late."""
        number = len(self._sums)
        self._sums.append(found)
        if number == _LABELS:
            packing = fused_head.take_packing()
            if packing is not None and packing.num_targets:
                self._num_tokens, self._num_labels = packing.num_tokens, packing.num_targets
                self._is_late = self._known.num_alike >= _WATCHED_STEPS
        if not self._is_late or not _is_number(found) or number >= _NUM_SUMS:
            return found
        return self.late(found, number)

    def late(self, value: Tensor, number: int | None) -> _Late:
        """A number that is read once the micro-batch ends."""
        made = value.as_subclass(_Late)
        made.step, made.number = self, number
        return made

    def read(self, value: Tensor, number: int | None) -> Any:
        """Return what `item` gives for such a number."""
        if number == _TOKENS:
            return self._num_tokens
        made = Awaited(value)
        self._known.fresh.append(made)
        return made

    def read_all(self, *, besides: Sequence[Awaited] = ()) -> None:
        """Put numbers where they are awaited."""
        kept = set(map(id, besides))
        for values in self._trainer._metrics["train"].values():
            for place, value in enumerate(values):
                if type(value) is Awaited and id(value) not in kept:
                    values[place] = value.number()

    def end(self) -> None:
        """Read what is awaited; or learn from a step that was watched.

        A batch that stayed padded tells nothing: training without padding may begin later.
        """
        is_last = self._known.was_last = self._trainer.accelerator.sync_gradients
        events = _AFTER_STEP if is_last else _WITHIN_STEP
        may_wait = self._is_late and not _is_looked_at(self._trainer, events)
        self.read_all(besides=self._known.fresh if may_wait else ())
        if self._is_late or not self._num_labels:
            return
        if self._is_alike():
            self._known.num_alike += 1
        else:
            self._known.num_alike, self._known.num_strange = 0, self._known.num_strange + 1

    def _is_alike(self) -> bool:
        """Whether the sums are what they are taken for, and the trainer has kept just that."""
        sums, trainer = self._sums, self._trainer
        if len(sums) != _NUM_SUMS or not all(map(_is_number, sums)):
            return False
        labels = sums[_LABELS]
        if int(labels) != self._num_labels or int(sums[_TOKENS]) != self._num_tokens:
            return False
        total = self._before + self._num_tokens
        metrics = trainer._metrics["train"]
        if trainer._total_train_tokens != total or metrics.get("num_tokens") != [total]:
            return False
        kept = [metrics.get(name, [None])[-1] for name in _NAMES.values()]
        return kept == [(sums[number] / labels).item() for number in _NAMES]


def _is_number(value: Any) -> bool:
    return type(value) is Tensor and not value.dim()


class _Late(Tensor):
    """A sum that nobody reads before its micro-batch ends."""

    step: _Step
    number: int | None
    """Its place among the sums; None for what was made of several."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            first = args[0]
            plain = [
                argument.as_subclass(Tensor) if type(argument) is _Late else argument
                for argument in args
            ]
            if type(first) is _Late and not kwargs:
                if func is Tensor.sum and len(args) == 1:
                    return first.step.late(func(*plain), first.number)
                if func is Tensor.item:
                    return first.step.read(plain[0], first.number)
                if func is Tensor.gt and first.number == _LABELS and args[1:] == (0,):
                    return True  # so many are known on the host
                if func is Tensor.div and type(args[1]) is _Late:
                    return first.step.late(func(*plain), None)
            return func(*plain, **(kwargs or {}))


class Awaited:
    """A number that is on its way from the GPU. Whoever computes with it waits for it."""

    def __init__(self, value: Tensor) -> None:
        self._event: Any = None
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True, device="cpu")
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._value = value.clone()

    def number(self) -> Any:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()


def _computed(name: str) -> Callable[..., Any]:
    def compute(awaited: Awaited, *others: Any) -> Any:
        return getattr(awaited.number(), name)(*others)

    return compute


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "pow"),
    *("neg", "abs", "round", "int", "float", "bool", "hash", "str", "repr", "format"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(Awaited, f"__{_name}__", _computed(f"__{_name}__"))
