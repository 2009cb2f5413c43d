"""A model's output for a packed row, with the shapes that the padded batch would have had.

Padding it is put off until somebody reads a field: a training loop that takes the loss alone never
pays for [batch, width, vocabulary].
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from deepytorch.integrations.common.contract import IntegrationError
from deepytorch_core.data import Packing
from deepytorch_core.nn.deferred_logits import DeferredLogits, WatchedLogits, apart, refuse_hooks

from . import readers

_FLAT_FIELDS = ("router_logits",)  # [batch * width, ...] where others have [batch, width, ...]
_CACHE = "past_key_values"
# TRL's fused head gives [batch, width - 1], by the token that predicts, zero without a label.
_SHIFTED_FIELDS = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "is_top1",
    "label_mask",
)


def unpacked(output: Any, packing: Packing, row: int, *, lazily: bool) -> Any:
    """`output` with every tensor of [1, row, ...] as [batch, width, ...], zero at padding.

    Args:
        output: what a transformers model returned for a packed row: a ModelOutput or a tuple.
        row: tokens of the packed row, with what it was filled up with.
        lazily: whether a ModelOutput's fields may wait until they are read.

    Raises IntegrationError, when it is read, for a field of which nobody knows what belongs to
    which token.
    """
    if isinstance(output, tuple | list):
        places = enumerate(output)
        return type(output)(_padded(value, packing, row, f"[{place}]") for place, value in places)
    if not isinstance(output, OrderedDict):
        return _padded(output, packing, row, "all")
    result = _lazy(output, _Packed(packing, row, with_loss=lazily))
    if lazily:
        return result
    for name in list(output):
        output[name] = result[name]
    return output


def on_demand(output: Any, packing: Packing, row: int, stock: Stock, *, has_cache: bool) -> Any:
    """The same for who hasn't asked for it: an unknown reader gets what the padded batch gives.

    Args:
        output: a ModelOutput.
        packing: of the batch.
        row: tokens of the packed row.
        stock: computes the padded batch's output, or can't.
        has_cache: whether that has a cache, which a packed row has none of.
    """
    return _lazy(output, _OnDemand(packing, row, stock), more=[_CACHE] if has_cache else [])


def watched(output: Any, tell: Callable[[str, str], None]) -> Any:
    """`output` of a padded batch, whose unknown readers are told of: `tell(field, reader)`."""
    if not isinstance(output, OrderedDict):
        return output
    return _lazy(output, _Watched(tell))


def reads(reader: str, field: str) -> str:
    """Why a model keeps its padding whose output somebody reads."""
    return f"{reader} reads {field} of its output, which may hold padding"


class Stock:
    """Gives stock's output for a packed call, computed when an unknown reader comes.

    Args:
        run: computes it; None where a pass of one rank alone can't be.
        tell: gets the field and its reader, once.
    """

    def __init__(self, run: Callable[[], Any] | None, tell: Callable[[str, str], None]) -> None:
        self._run = run
        self._tell = tell
        self._output: Any = None

    def output_for(self, name: str) -> Any:
        """The padded batch's output, if it is an unknown reader that asks for field `name`."""
        if self._output is None and (reader := readers.unknown()) is not None:
            self._tell(name, reader)
            if self._run is not None:
                self._output = self._run()
                self._run = None
        return self._output


class _NoCache:
    """In the place of a cache, which a packed row has none of."""

    def __getattr__(self, name: str) -> Any:
        raise IntegrationError(
            f"padding_free: {name} of the past_key_values of the model's output was asked for, but "
            "a batch without padding has none: set padding_free=off"
        )


class _LaterCache:
    """In the place of the padded batch's cache, for who goes through all fields."""

    def __init__(self, stock: Stock) -> None:
        vars(self)["_stock"] = stock

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(self._stock.output_for(_CACHE), _CACHE, None), name)

    def __reduce__(self) -> Any:
        return getattr, (self._stock.output_for(_CACHE), _CACHE)


def as_tuple(output: Any, *, with_cache: bool) -> tuple[Any, ...]:
    """Return what `return_dict=False` gives, in the order of the output's fields."""
    fields = {name: output[name] for name in output}
    if with_cache and _CACHE in output.__dataclass_fields__:
        fields[_CACHE] = _NoCache()
    return tuple(fields[name] for name in output.__dataclass_fields__ if name in fields)


def _is_single(value: Any) -> bool:
    """Whether it is one value for the whole batch."""
    if isinstance(value, Tensor):
        return not value.dim()
    return value is None or isinstance(value, bool | int | float | str)


def _padded(value: Any, packing: Packing, row: int, name: str) -> Any:
    if _is_single(value):
        return value
    if type(value) in (tuple, list):
        return type(value)(_padded(element, packing, row, name) for element in value)
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if name in _FLAT_FIELDS and shape[:1] == (row,):
        return packing.unpack(value.unsqueeze(0)).flatten(0, 1)
    if name in _SHIFTED_FIELDS and shape == (1, row - 1):
        return packing.unpack_shifted(value)
    if shape[:2] == (1, row):
        return _watched(packing.unpack(value), packing)
    what = f"of shape {shape}" if shape else f"a {type(value).__name__}"
    raise IntegrationError(
        f"padding_free: {name} of the model's output is {what} for a row of {row} tokens, which "
        "can't be given back for the padded batch: set padding_free=off"
    )


def _refuse_at_padding(places: Tensor, gradient: Tensor) -> None:
    """A loss that takes the output at padding got zeros where stock has other values."""
    used = (gradient != 0).reshape(gradient.shape[:2].numel(), -1).any(dim=1)
    torch._assert_async(  # without waiting for a device
        ~used.index_fill(0, places, False).any(),
        "padding_free: the loss takes what the model gives at padding, where it is zero now: "
        "leave padding out by attention_mask, or set padding_free=off",
    )


_BYPASSED = (
    "the loss of this step was computed from a row without padding, so its gradient for the padded "
    "batch's output would never come: set padding_free=off"
)


def _bypassed(value: Any) -> Any:
    """The same, to be refused to whoever waits for the loss's gradient."""
    if isinstance(value, tuple | list):
        for element in value:
            _bypassed(element)
    elif type(value) is Tensor and value.requires_grad and value.dim():
        refuse_hooks(value, _BYPASSED)
    return value


def _watched(padded: Tensor, packing: Packing) -> Tensor:
    if not padded.requires_grad or packing.is_full:
        return padded
    check = functools.partial(_refuse_at_padding, packing.indices)
    padded.register_hook(unserializable_hook(check))  # type: ignore[no-untyped-call]
    return padded


class _Packed:
    """Makes the fields of a packed row's output."""

    def __init__(self, packing: Packing, row: int, *, with_loss: bool) -> None:
        self.packing = packing
        self.row = row
        self.with_loss = with_loss

    def waits(self, name: str, value: Any) -> bool:
        """Whether a field is made when it is read."""
        return not _is_single(value)

    def settle(self, output: _Lazy, name: str) -> Any:
        """The field for who reads it."""
        value = OrderedDict.__getitem__(output, name)
        if isinstance(value, DeferredLogits) or name in output._stand_ins:
            return self._refused(self._stand_in(output, name, value))  # with the hooks on it
        with apart():  # as it would have been made, whoever reads it first
            value = _padded(value, self.packing, self.row, name)
        return self._refused(value)

    def seen(self, output: _Lazy, name: str) -> Any:
        """The field for whoever goes through all of them: it is padded when that one uses it."""
        value = OrderedDict.__getitem__(output, name)
        is_packed = isinstance(value, Tensor) and tuple(value.shape[:2]) == (1, self.row)
        has_gradient = isinstance(value, DeferredLogits) or (is_packed and value.requires_grad)
        if not is_packed or not has_gradient or name in _FLAT_FIELDS:
            return output[name]
        return self._stand_in(output, name, value)

    def _refused(self, value: Any) -> Any:
        return _bypassed(value) if self.with_loss else value

    def _stand_in(self, output: _Lazy, name: str, value: Tensor) -> DeferredLogits:
        """Make a tensor that is padded when it is used."""
        if name not in output._stand_ins:
            with apart():
                made = DeferredLogits.make(
                    lambda packed: _padded(packed, self.packing, self.row, name),
                    value,
                    shape=(*self.packing.shape, *value.shape[2:]),
                    dtype=value.dtype,
                    device=value.device,
                )
            made.bypassed = getattr(value, "bypassed", None)
            output._stand_ins[name] = made
        return output._stand_ins[name]


class _OnDemand(_Packed):
    """The same, but for unknown readers."""

    def __init__(self, packing: Packing, row: int, stock: Stock) -> None:
        super().__init__(packing, row, with_loss=False)
        self.stock = stock

    def waits(self, name: str, value: Any) -> bool:
        return not _is_single(value) or name in ("loss", _CACHE)

    def settle(self, output: _Lazy, name: str) -> Any:
        if name != "loss" and (stock := self.stock.output_for(name)) is not None:
            output._take(stock)
            return stock.get(name)
        return super().settle(output, name)

    def seen(self, output: _Lazy, name: str) -> Any:
        if name == _CACHE:
            return _LaterCache(self.stock)
        value = OrderedDict.__getitem__(output, name)
        if type(value) in (tuple, list):
            return type(value)(
                self._later(output, name, value, place) for place in range(len(value))
            )
        return super().seen(output, name)

    def _stand_in(self, output: _Lazy, name: str, value: Tensor) -> DeferredLogits:
        made = super()._stand_in(output, name, value)
        made.elsewhere = lambda: getattr(self.stock.output_for(name), name, None)
        return made

    def _later(self, output: _Lazy, name: str, values: Any, place: int) -> Any:
        """One of the tensors of a field that has several."""
        value = values[place]
        if not isinstance(value, Tensor) or not value.dim():
            return value
        is_flat = name in _FLAT_FIELDS and value.shape[:1] == (self.row,)
        if not is_flat and tuple(value.shape[:2]) != (1, self.row):
            return output[name][place]
        of_tokens = (math.prod(self.packing.shape),) if is_flat else self.packing.shape
        with apart():
            made = DeferredLogits.make(
                lambda packed: _padded(packed, self.packing, self.row, name),
                value,
                shape=(*of_tokens, *value.shape[1 if is_flat else 2 :]),
                dtype=value.dtype,
                device=value.device,
            )

        def elsewhere() -> Any:
            stock = self.stock.output_for(name)
            return None if stock is None else stock[name][place]

        made.elsewhere = elsewhere
        return made


class _Watched:
    """Gives the fields of a padded batch's output, which are there."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell

    def waits(self, name: str, value: Any) -> bool:
        return not _is_single(value)

    def settle(self, output: _Lazy, name: str) -> Any:
        self._note(name)
        return OrderedDict.__getitem__(output, name)

    def seen(self, output: _Lazy, name: str) -> Any:
        return self._with_note(OrderedDict.__getitem__(output, name), name)

    def _note(self, name: str) -> None:
        if (reader := readers.unknown()) is not None:
            self._tell(name, reader)

    def _with_note(self, value: Any, name: str) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._with_note(element, name) for element in value)
        if isinstance(value, WatchedLogits):
            value.tell = functools.partial(_both, value.tell, functools.partial(self._note, name))
        elif isinstance(value, Tensor):
            return WatchedLogits.watch(value, functools.partial(self._note, name))
        return value


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


class _Lazy(OrderedDict[str, Any]):
    """Mixed into a ModelOutput: fields in `_pending` are made when they are first read."""

    _pending: set[str]
    _source: Any
    _stand_ins: dict[str, DeferredLogits]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not the base's, which would register a way through pytrees that forgets `_pending`.
        pytree.register_pytree_node(cls, _flatten, _unflatten)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain one to whoever makes another from its fields, as FSDP1 does."""
        if args or kwargs:
            return cls.__mro__[2](*args, **kwargs)
        return super().__new__(cls)

    def _settle(self, name: str) -> None:
        pending = vars(self).get("_pending", ())
        if name in pending:
            value = self._source.settle(self, name)
            if name in pending:
                self._put(name, value)  # not before: who reads on after an error gets it again

    def _put(self, name: str, value: Any) -> None:
        self._stand_ins.pop(name, None)
        OrderedDict.__setitem__(self, name, value)
        vars(self)[name] = value
        self._pending.discard(name)

    def _take(self, stock: Any) -> None:
        """Give the fields that nobody has read what they are there."""
        for name in [*self._pending]:
            self._put(name, stock.get(name))

    def _seen(self, name: str) -> Any:
        """The field for whoever goes through all of them."""
        if name not in vars(self).get("_pending", ()):
            return OrderedDict.__getitem__(self, name)
        return self._source.seen(self, name)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._settle(name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self._settle(key)
            return OrderedDict.__getitem__(self, key)
        names = list(self.keys())[key]
        return tuple(self[name] for name in names) if isinstance(names, list) else self[names]

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).get("_pending", set()).discard(name)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        vars(self).get("_pending", set()).discard(key)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        self._settle(key)
        return OrderedDict.get(self, key, default)

    def copy(self) -> Any:
        make, fields = self.__reduce__()
        return make(*fields)

    def values(self) -> Any:
        return _Values(self)

    def items(self) -> Any:
        return _Items(self)

    def __reduce__(self) -> Any:
        return _plain, (type(self).__mro__[2], {name: self[name] for name in self})


class _Values(ValuesView[Any]):
    def __init__(self, output: _Lazy) -> None:
        super().__init__(output)
        self._output = output

    def __iter__(self) -> Iterator[Any]:
        return (self._output._seen(name) for name in self._output)


class _Items(ItemsView[str, Any]):
    def __init__(self, output: _Lazy) -> None:
        super().__init__(output)
        self._output = output

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, self._output._seen(name)) for name in self._output)


def _plain(model_output: type, fields: dict[str, Any]) -> Any:
    return model_output(**fields)


@functools.cache
def _lazy_type(model_output: type) -> Any:
    return type(model_output.__name__, (_Lazy, model_output), {"__module__": __name__})


def _lazy(output: Any, source: Any, *, more: Sequence[str] = ()) -> Any:
    """`output` as one whose fields `source` makes; `more` names fields that it lacks."""
    kind: Any = type(output)
    lazy = _lazy_type(kind)
    values = {name: OrderedDict.__getitem__(output, name) for name in output}
    names = [name for name in output.__dataclass_fields__ if name in values or name in more]
    result = lazy.__new__(lazy)
    vars(result).update(vars(output))
    for name in [*names, *(name for name in values if name not in names)]:
        OrderedDict.__setitem__(result, name, values.get(name))
    pending = {name for name in result if source.waits(name, values.get(name))}
    vars(result).update(_pending=pending, _source=source, _stand_ins={})
    return result


def _flatten(output: Any) -> tuple[list[Any], Any]:
    names = list(output.keys())
    context = (type(output), names, set(vars(output)["_pending"]), vars(output)["_source"])
    return [OrderedDict.__getitem__(output, name) for name in names], context


def _unflatten(values: Any, context: Any) -> Any:
    lazy, names, pending, source = context
    result = lazy.__new__(lazy)
    for field in lazy.__dataclass_fields__:
        vars(result)[field] = None
    for name, value in zip(names, values, strict=True):
        OrderedDict.__setitem__(result, name, value)
        vars(result)[name] = value
    vars(result).update(_pending=set(pending), _source=source, _stand_ins={})
    return result
