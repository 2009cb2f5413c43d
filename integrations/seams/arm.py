"""Switches on what deepytorch computes, in scripts that know nothing of it.

`import deepytorch` and `deepytorch run` arm this. Nothing is imported for it: frameworks are met as
the script imports them.

* Accelerate, and transformers' Trainer, which builds an Accelerator: `Accelerator.__init__`.
* The host's work in each step of a Trainer: `late_figures`, `late_filter`, `known_parts`,
  `fast_rows`.
* DeepSpeed: `deepspeed.initialize`, where its configuration has no section of ours.
* All else that steps an optimizer of torch's: by torch's hook of steps (`plain`). Loops of one's
  own, DistributedDataParallel, FSDP, Lightning, Composer.

A model is taken care of once, by whoever is first (`claims`), and what a script asks for by name
wins (`deepytorch_core.base.by_name`). Stock does what can't be done here, and a line says so.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepytorch_core.base import config
from deepytorch_core.base.console import say_first
from deepytorch_core.base.errors import OFF_SWITCH
from deepytorch_core.base.import_hook import ImportHook
from deepytorch_core.base.patching import Patches
from deepytorch_core.c10d import deepspeed_flag

_Function = Callable[..., Any]

# Seconds that looking for models and trying kernels may take, and the part of a run that is for it.
_COST_S, _LARGEST_SHARE = 0.5, 0.03

_met: list[str] = []


class _Armed:
    """Holds what has been put in place, or waits for an import."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.began = time.monotonic()
        self._handle: Any = None
        self.hooks = [
            ImportHook(
                "accelerate.accelerator", _guarded("Accelerate's prepare", self._accelerate)
            ),
            ImportHook(
                "transformers.trainer_callback", _guarded("lengths of trainings", self._trainer)
            ),
            ImportHook("transformers.trainer", _guarded("micro-batches", self._micro_batches)),
            ImportHook("transformers.modeling_utils", _guarded("models", self._models)),
            ImportHook(
                "transformers.tokenization_utils_base", _guarded("tokenizers", self._tokenizers)
            ),
            ImportHook("transformers.data.data_collator", _guarded("batches", self._collates)),
            ImportHook("torch.optim.optimizer", _guarded("optimizers", self._optimizers)),
        ]

    def undo(self) -> None:
        for hook in self.hooks:
            hook.undo()
        self.patches.undo()
        deepspeed_flag.unasked = None
        if self._handle is not None:
            self._handle.remove()

    def _accelerate(self, module: ModuleType) -> None:
        self.patches.replace(
            module.Accelerator,
            "__init__",
            _constructing,
            why="kernels, padding-free training and compilation come in with `prepare`",
            option="DEEPYTORCH_COMPILE=off, DEEPYTORCH_KERNELS=off and DEEPYTORCH_PADDING_FREE=off",
        )
        from deepytorch.integrations.seams import late_figures

        late_figures.of_accelerator(module, self.patches)

    def _trainer(self, module: ModuleType) -> None:
        self.patches.replace(
            module.CallbackHandler,
            "on_train_begin",
            _beginning,
            why="a training of known length need not have lasted long before anything is tried",
            option="DEEPYTORCH_COMPILE=off",
        )

    def _micro_batches(self, module: ModuleType) -> None:
        self.patches.replace(
            module.Trainer,
            "get_batch_samples",
            _gathering,
            why="micro-batches of a step share passes of the model",
            option="DEEPYTORCH_TOKENS_PER_STEP=off",
        )
        self.patches.replace(
            module.Trainer,
            "training_step",
            _stepping,
            why="whether a loss is a number is decided on the GPU, so that nobody waits for it",
            option="DEEPYTORCH_COMPILE=off",
        )

        from deepytorch.integrations.seams import known_parts

        known_parts.of_trainer(module, self.patches)

    def _models(self, module: ModuleType) -> None:
        from torch.nn.modules import module as modules

        from deepytorch.integrations.seams import known_parts

        known_parts.of_models(module, self.patches)
        known_parts.of_modules(modules, self.patches)

    def _tokenizers(self, module: ModuleType) -> None:
        from deepytorch.integrations.seams import fast_rows

        fast_rows.of_tokenizers(module, self.patches)

    def _collates(self, module: ModuleType) -> None:
        from deepytorch.integrations.seams import fast_rows

        fast_rows.of_collates(module, self.patches)

    def _optimizers(self, module: ModuleType) -> None:
        self._handle = module.register_optimizer_step_post_hook(_stepped)


_armed: _Armed | None = None


def arm() -> None:
    """Switch compute on wherever it is met from now on. Idempotent."""
    global _armed
    if _armed is None:
        _armed = _Armed()
        for hook in _armed.hooks:
            hook.install()
        deepspeed_flag.unasked = _initializing


def disarm() -> None:
    """Switch nothing on any more, and take back what was switched on unasked."""
    global _armed
    if _armed is None:
        return
    _armed.undo()
    _armed = None
    for name in ("plain", "deepspeed_engine", "accelerator"):
        module = sys.modules.get(f"{__package__}.{name}")
        if module is not None:
            module.undo_unasked()


def met() -> list[str]:
    """Return where something was switched on in this process; more may come."""
    return _met


def note(name: str) -> None:
    """Keep that something is switched on there."""
    if name not in _met:
        _met.append(name)


def _guarded(what: str, act: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """`act`, within a framework's import, which must not fail because of us."""

    def guarded(module: ModuleType) -> None:
        try:
            act(module)
        except Exception as error:
            say_first(
                f"{what} stays as it is: {type(error).__name__}: {error}; {OFF_SWITCH}",
                level="warning",
            )

    return guarded


def _constructing(original: _Function) -> _Function:
    def construct(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        original(accelerator, *args, **kwargs)
        from deepytorch.integrations.seams import accelerator as _accelerator

        if _accelerator.apply_unasked(accelerator):
            note("accelerate")

    return construct


def _beginning(original: _Function) -> _Function:
    def begin(handler: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        found = original(handler, args, state, control, **kwargs)
        engine = sys.modules.get("deepytorch_core.compile")
        with contextlib.suppress(AttributeError, TypeError):  # of a version that has others
            steps = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
            if engine is not None and handler.model is not None and steps > 0:
                engine.expect_steps(handler.model, steps)
        return found

    return begin


def _gathering(original: _Function) -> _Function:
    def get_batch_samples(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(trainer, *args, **kwargs)
        if config.current().tokens_per_step != "off" and len(found[0]) > 1:
            from deepytorch.integrations.padding_free import apply as padding_free
            from deepytorch.integrations.padding_free import merged_passes

            forward = padding_free.forward_of(trainer.model)
            merged_passes.expect(forward, found[0], lambda: merged_passes.why_not_of(trainer))
        return found

    return get_batch_samples


def _stepping(original: _Function) -> _Function:
    def training_step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if config.current().compile == "off":
            return original(trainer, *args, **kwargs)
        from deepytorch.integrations.seams import late_figures, late_filter

        with late_figures.stepping(trainer):
            loss = original(trainer, *args, **kwargs)
        return late_filter.late(trainer, loss)

    return training_step


def _initializing(original: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from deepytorch.integrations.seams import deepspeed_engine

    note("deepspeed")
    return deepspeed_engine.initialize_unasked(original, args, kwargs)


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    import torch

    if _armed is None or torch.compiler.is_compiling() or not _is_time(_armed):
        return
    from deepytorch.integrations.seams import plain

    plain.stepped(optimizer, note)


def _is_time(armed: _Armed) -> bool:
    """Whether the run has lasted so long that looking is a small part of it."""
    options = config.current()
    if "on" in (options.kernels, options.padding_free) or options.patience == "off":
        return True
    if options.compile not in ("auto", "off"):
        return True  # who names a policy waits for nothing
    return time.monotonic() - armed.began >= _COST_S / _LARGEST_SHARE
