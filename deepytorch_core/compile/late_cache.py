"""transformers: a model returns a cache of keys and values unless told not to, in training as well.

Layers that fill one can't share compiled code, as each has its number, and such passes can't be
replayed. So where a model's code is compiled or replayed its passes go without. The cache in their
output is one that is made when somebody uses it, by a pass of stock's then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.compile.fixes._transformers import caches, is_transformers
from deepytorch_core.nn.deferred_logits import apart

_FIELD = "past_key_values"
_Run = Callable[..., Any]


class LateCache:
    """Takes the calls of one model.

    Args:
        root: the model, or a PeftModel of it.
        model: the transformers model.
        kind: of the cache that stock returns.
        is_on: whether the call that begins is compiled or replayed.
        switch: says whether calls are compiled from here on; returns whether they were.
    """

    def __init__(
        self,
        root: nn.Module,
        model: Any,
        kind: type,
        *,
        is_on: Callable[[], bool],
        switch: Callable[[bool], bool],
    ) -> None:
        self._root = weakref.ref(root)
        self._model = weakref.ref(model)
        self._kind = kind
        self._is_on = is_on
        self._switch = switch
        self._is_used = False
        self._returns: dict[frozenset[str], bool] = {}  # stock such a cache, for such a call

    def __call__(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of `run`, which is the model's call."""
        if not self._may_be_left_out(args, kwargs):
            return run(*args, **kwargs)
        names = frozenset(name for name, value in kwargs.items() if value is not None)
        if names not in self._returns:  # such a call has to show what stock returns
            with self._eagerly():
                output = run(*args, **kwargs)
            self._returns[names] = type(_cache_in(output)) is self._kind
            return output
        if not self._returns[names]:
            return run(*args, **kwargs)
        output = run(*args, **{**kwargs, "use_cache": False})
        if not isinstance(output, OrderedDict) or _cache_in(output) is not None:
            return output
        kind = torch.device(self._device).type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        autocast = torch.autocast(kind, dtype=dtype, enabled=enabled)
        made = _late(self._kind)(functools.partial(self._make, autocast, args, kwargs))
        _insert(output, made)
        return output

    @contextlib.contextmanager
    def _eagerly(self) -> Iterator[None]:
        was_on = self._switch(False)
        try:
            yield
        finally:
            self._switch(was_on)

    @property
    def _device(self) -> torch.device:
        model: Any = self._model()
        return next(model.parameters()).device  # type: ignore[no-any-return]

    def _may_be_left_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        model: Any = self._model()
        return (
            self._is_on()
            and not self._is_used
            and len(args) < 2  # the next ones may be anything
            and model.training
            and torch.is_grad_enabled()
            and bool(kwargs.get("return_dict", getattr(model.config, "return_dict", True)))
            and all(kwargs.get(name) is None for name in ("use_cache", _FIELD))
            and caches(model)
        )

    def _make(self, autocast: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_used = True
        root: Any = self._root()
        with self._eagerly(), guard.same_random_numbers(), apart(), autocast:
            return getattr(root.forward(*args, **kwargs), _FIELD)


def of(
    root: nn.Module,
    *,
    is_on: Callable[[], bool],
    switch: Callable[[bool], bool],
) -> LateCache | None:
    """Make one for `root`; None where that returns no cache that is known here."""
    base_of = getattr(root, "get_base_model", None)  # peft's
    model: Any = base_of() if callable(base_of) else root
    if not is_transformers(model) or _has_twins(model):
        return None
    takes = inspect.signature(type(model).forward).parameters
    name = "EncoderDecoderCache" if model.config.is_encoder_decoder else "DynamicCache"
    written_in = [vars(sys.modules[base.__module__]) for base in type(model).__mro__]
    kind = next((names[name] for names in written_in if name in names), None)
    if not {"use_cache", _FIELD} <= takes.keys() or kind is None:
        return None
    return LateCache(root, model, kind, is_on=is_on, switch=switch)


def _cache_in(output: Any) -> Any:
    """Past whatever tells of its readers."""
    return OrderedDict.get(output, _FIELD) if isinstance(output, OrderedDict) else None


def _has_twins(model: Any) -> bool:
    """Whether layers were copied with their numbers, or are used more than once.

    Layers of one number share a place in the cache, and then see more with it than without. A layer
    of a decoder has two, by their names.
    """
    filled = model.get_decoder() if model.config.is_encoder_decoder else model
    numbers = [
        (type(module), name.rpartition(".")[2], getattr(module, "layer_idx", None))
        for name, module in filled.named_modules(remove_duplicate=False)
    ]
    numbered = [number for number in numbers if number[2] is not None]
    return len(set(numbered)) < len(numbered)


def _insert(output: Any, cache: Any) -> None:
    """Put the cache where stock's output has it."""
    output[_FIELD] = cache
    names = list(output.__dataclass_fields__)
    for name in names[names.index(_FIELD) + 1 :]:
        if OrderedDict.__contains__(output, name):
            OrderedDict.move_to_end(output, name)


@functools.cache
def _late(kind: type) -> Any:
    """A class like `kind`, whose objects become stock's once somebody uses them."""

    def settle(self: Any) -> None:
        own = object.__getattribute__(self, "__dict__")
        make = own.pop("_make", None)
        if make is not None:
            made = make()
            self.__class__ = type(made)
            own.update(vars(made))

    def initialize(self: Any, make: Callable[[], Any]) -> None:
        object.__getattribute__(self, "__dict__")["_make"] = make

    def get(self: Any, name: str) -> Any:
        if not name.startswith("__"):
            settle(self)
        return object.__getattribute__(self, name)

    def settled(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            settle(self)
            return getattr(type(self), name)(self, *args, **kwargs)

        return method

    special = ("__len__", "__iter__", "__getitem__", "__repr__", "__reduce_ex__", "__bool__")
    methods: dict[str, Any] = {name: settled(name) for name in special if hasattr(kind, name)}
    methods |= {"__init__": initialize, "__getattribute__": get, "__module__": kind.__module__}
    methods["__qualname__"] = kind.__qualname__
    return type(kind.__name__, (kind,), methods)
