"""A model's modules and parameters as they were found before, for who goes through all of them.

In each step a transformers Trainer tells all modules to train, though they do already. It counts
their parameters, and lists those whose gradients it clips and then drops. That takes some
milliseconds in which the GPU may have nothing to do. Here the parts of a model are kept, and used
as long as none was put in, taken out or replaced. What is returned or changed is the same.
"""

from __future__ import annotations

import collections
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepytorch_core.base import config
from deepytorch_core.base.patching import Patches, original_of

_Function = Callable[..., Any]

_WHY = "modules and parameters of a model are not looked for in each step"
_OPTION = "DEEPYTORCH_COMPILE=off"
# A model that changes more often is gone through as stock does it.
_MOST_CHANGES = 8
_MODELS = "transformers.modeling_utils"
_MEMBERS = operator.itemgetter("_modules", "_parameters")
# The model that deepytorch has taken, by those in it.
_outer_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]
_outer_of = weakref.WeakKeyDictionary()
_WALKS = (
    "parameters",
    "named_parameters",
    "_named_members",
    "modules",
    "named_modules",
    "children",
)


def of_modules(module: Any, patches: Patches) -> None:
    """Put it in place in `torch.nn.modules.module`."""
    patches.replace(module.Module, "zero_grad", _zero_grad, why=_WHY, option=_OPTION)


def of_models(module: Any, patches: Patches) -> None:
    """Put it in place in `transformers.modeling_utils`."""
    patches.replace(module.PreTrainedModel, "train", _train, why=_WHY, option=_OPTION)
    patches.replace(
        module.ModuleUtilsMixin, "num_parameters", _num_parameters, why=_WHY, option=_OPTION
    )


def of_trainer(module: Any, patches: Patches) -> None:
    """Put it in place in `transformers.trainer`."""
    patches.replace(module.Trainer, "_clip_grad_norm", _clip, why=_WHY, option=_OPTION)


def _zero_grad(original: _Function) -> _Function:
    def zero_grad(module: Any, set_to_none: bool = True) -> None:
        parts = None if set_to_none is not True else _of(module)
        if parts is None or getattr(module, "_is_replica", False):
            original(module, set_to_none)
            return
        for parameter in parts.parameters:
            if parameter.grad is not None:
                parameter.grad = None

    return zero_grad


def _train(original: _Function) -> _Function:
    def train(model: Any, mode: bool = True) -> Any:
        parts = _of(model)
        if parts is None or not parts.are_set_plainly or not parts.all_have(mode):
            return original(model, mode)
        return model

    return train


def _num_parameters(original: _Function) -> _Function:
    def num_parameters(
        model: Any, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> Any:
        parts = None if only_trainable is not False else _of(model)
        if parts is None or getattr(model, "is_loaded_in_4bit", False):
            return original(model, only_trainable, exclude_embeddings)
        sizes = list(map(torch.Tensor.numel, parts.parameters))
        if sizes != parts.sizes:
            parts.sizes = sizes
            parts.counted.clear()
        if exclude_embeddings not in parts.counted:
            parts.counted[exclude_embeddings] = original(model, False, exclude_embeddings)
        return parts.counted[exclude_embeddings]

    return num_parameters


def _clip(original: _Function) -> _Function:
    def _clip_grad_norm(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        parts = _of(model)
        given = model if parts is None else _Listed(model, parts.parameters)
        return original(trainer, given, *args, **kwargs)

    return _clip_grad_norm


class _Listed:
    """A model for who asks it for its parameters."""

    def __init__(self, model: Any, parameters: list[nn.Parameter]) -> None:
        self._model = model
        self._parameters = parameters

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Parts:
    """The modules and parameters of a model, itself included.

    Attributes:
        parameters: each once, in torch's order.
        models: transformers' among the modules below, such as the one that peft has in its own.
        are_set_plainly: whether a module's mode is no more than its attribute.
        sizes: elements of the parameters, when they were counted.
        counted: what was counted, by whether embeddings were left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model_of = weakref.ref(model)  # which has this
        modules = list(model.modules())
        self._attributes = list(map(vars, modules[1:]))
        self._dicts = self._dicts_now()
        self._lengths = list(map(len, self._dicts))
        self._filled = list(filter(None, self._dicts))
        self._held = list(self._held_now())
        self.models = list(filter(_is_model, modules[1:]))
        self.parameters = list(model.parameters())
        self.are_set_plainly = all(map(_is_set_plainly, modules))
        self.sizes: list[int] = []
        self.counted: dict[bool, int] = {}

    def _all_attributes(self) -> list[dict[str, Any]]:
        return [vars(self._model_of()), *self._attributes]

    def _dicts_now(self) -> list[dict[str, Any]]:
        return list(itertools.chain.from_iterable(map(_MEMBERS, self._all_attributes())))

    def _held_now(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._filled))

    def is_current(self) -> bool:
        """Whether nothing was put in, taken out or replaced."""
        dicts = self._dicts_now()
        return (
            all(map(operator.is_, dicts, self._dicts))
            and list(map(len, dicts)) == self._lengths
            and all(map(operator.is_, self._held_now(), self._held))
        )

    def is_of(self, model: nn.Module) -> bool:
        """Whether they are this model's."""
        return self._model_of() is model

    def all_have(self, mode: bool) -> bool:
        """Whether all modules are in that mode."""
        return all(own.get("training") is mode for own in self._all_attributes())


class _Kept:
    """The parts of the models that lie in one: itself and those that it wraps."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self.num_changes: collections.Counter[int] = collections.Counter()

    def of(self, model: Any) -> _Parts | None:
        """Those of a model, found anew where they have changed; None where they do too often."""
        parts = self._parts.get(id(model))
        if parts is not None and parts.is_of(model) and parts.is_current():
            return parts
        if self.num_changes[id(model)] >= _MOST_CHANGES or not _is_walked_plainly(model):
            return None
        parts = self._parts[id(model)] = _Parts(model)
        self.num_changes[id(model)] += 1
        if model not in _outer_of:
            _outer_of.update(dict.fromkeys(parts.models, weakref.ref(model)))
        return parts


def _is_set_plainly(module: nn.Module) -> bool:
    kind: Any = type(module)
    train = original_of(kind.train)
    is_known = train is nn.Module.train or getattr(train, "__module__", "") == _MODELS
    is_plain = kind.__setattr__ is nn.Module.__setattr__ and kind.children is nn.Module.children
    return is_known and is_plain and "train" not in vars(module)


def _of(model: Any) -> _Parts | None:
    """The parts of a model, as they are now; None: go through it.

    deepytorch has taken the model, or one that it is part of.
    """
    seam: Any = sys.modules.get("deepytorch_core.compile.seam")  # importing it takes seconds
    if seam is None or torch.compiler.is_compiling() or config.current().compile == "off":
        return None
    reference = _outer_of.get(model)
    outer = None if reference is None else reference()
    found = seam.of(model) or (None if outer is None else seam.of(outer))
    if found is None:
        return None
    kept: _Kept = found.parts or _Kept()
    found.parts = kept
    return kept.of(model)


def _is_model(module: nn.Module) -> bool:
    models = sys.modules.get(_MODELS)
    return models is not None and isinstance(module, models.PreTrainedModel)


def _is_walked_plainly(model: nn.Module) -> bool:
    """Whether the model's parts are found as torch finds them."""
    kind, own = type(model), vars(model)
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _WALKS) and not any(
        name in own for name in _WALKS
    )
