"""A model's output for a packed row, with the shapes that the padded batch would have had.

Padding it is put off until somebody reads a field: a training loop that takes the loss alone never
pays for [batch, width, vocabulary].
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from deepytorch_core.data import Packing
from deepytorch_core.nn.deferred_logits import DeferredLogits, apart, refuse_hooks

from ._contract import IntegrationError

_FLAT_FIELDS = ("router_logits",)  # [batch * width, ...] where others have [batch, width, ...]
_CACHE = "past_key_values"
# Of TRL's fused head: [batch, width - 1], by the token that predicts, and zero without a label.
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
    lazy: Any = _lazy_type(type(output))
    result = lazy.__new__(lazy)
    vars(result).update(vars(output))
    for name in output:
        OrderedDict.__setitem__(result, name, OrderedDict.__getitem__(output, name))
    vars(result)["_pending"] = {
        name: (packing, row) for name, value in output.items() if not _is_single(value)
    }
    vars(result)["_with_loss"] = lazily
    if lazily:
        return result
    for name in list(output):
        output[name] = result[name]
    return output


class _NoCache:
    """In the place of a cache, which a packed row has none of."""

    def __getattr__(self, name: str) -> Any:
        raise IntegrationError(
            f"padding_free: {name} of the past_key_values of the model's output was asked for, but "
            "a batch without padding has none: set padding_free=off"
        )


def as_tuple(output: Any, *, with_cache: bool) -> tuple[Any, ...]:
    """What `return_dict=False` gives, in the order of the output's fields."""
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
        return type(value)(_padded(one, packing, row, name) for one in value)
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if name in _FLAT_FIELDS and shape[:1] == (row,):
        return packing.unpack(value.unsqueeze(0)).flatten(0, 1)
    if name in _SHIFTED_FIELDS and shape == (1, row - 1):
        whole = torch.nn.functional.pad(value, (0, 1))
        return packing.unpack(whole)[:, :-1].contiguous()
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
        for one in value:
            _bypassed(one)
    elif type(value) is Tensor and value.requires_grad and value.dim():
        refuse_hooks(value, _BYPASSED)
    return value


def _watched(padded: Tensor, packing: Packing) -> Tensor:
    if not padded.requires_grad or packing.is_full:
        return padded
    check = functools.partial(_refuse_at_padding, packing.indices)
    padded.register_hook(unserializable_hook(check))  # type: ignore[no-untyped-call]
    return padded


class _Lazy(OrderedDict[str, Any]):
    """Mixed into a ModelOutput: fields in `_pending` are unpacked when they are first read."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not the base's, which would register a way through pytrees that forgets `_pending`.
        pytree.register_pytree_node(cls, _flatten, _unflatten)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Whoever makes another one from its fields, as FSDP1 does, gets a plain one."""
        if args or kwargs:
            return cls.__mro__[2](*args, **kwargs)
        return super().__new__(cls)

    def _settle(self, name: str) -> None:
        pending = vars(self).get("_pending", {})
        if name in pending:
            packing, row = pending[name]
            value = OrderedDict.__getitem__(self, name)
            if isinstance(value, DeferredLogits) or name in vars(self).get("_stand_ins", {}):
                value = self._stand_in(name)  # with the hooks that were put on it
            else:
                with apart():  # as it would have been made, whoever reads it first
                    value = _padded(value, packing, row, name)
                value = _bypassed(value) if vars(self)["_with_loss"] else value
            vars(self).get("_stand_ins", {}).pop(name, None)
            OrderedDict.__setitem__(self, name, value)
            vars(self)[name] = value
            del pending[name]  # not before: who reads on after an error gets it again

    def _seen(self, name: str) -> Any:
        """The field for whoever goes through all of them: it is padded when that one uses it."""
        value = OrderedDict.__getitem__(self, name)
        packing, row = vars(self).get("_pending", {}).get(name, (None, 0))
        is_packed = isinstance(value, Tensor) and tuple(value.shape[:2]) == (1, row)
        has_gradient = isinstance(value, DeferredLogits) or (is_packed and value.requires_grad)
        if packing is None or not is_packed or not has_gradient or name in _FLAT_FIELDS:
            return self[name]
        return self._stand_in(name)

    def _stand_in(self, name: str) -> DeferredLogits:
        """What is padded when it is used."""
        value = OrderedDict.__getitem__(self, name)
        packing, row = vars(self)["_pending"][name]
        stand_ins = vars(self).setdefault("_stand_ins", {})
        if name not in stand_ins:
            with apart():
                stand_ins[name] = DeferredLogits.make(
                    lambda packed: _padded(packed, packing, row, name),
                    value,
                    shape=(*packing.shape, *value.shape[2:]),
                    dtype=value.dtype,
                    device=value.device,
                )
            stand_ins[name].bypassed = getattr(value, "bypassed", None)
        made: DeferredLogits = stand_ins[name]
        return made

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
        vars(self).get("_pending", {}).pop(name, None)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        vars(self).get("_pending", {}).pop(key, None)
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
def _lazy_type(model_output: type) -> type:
    return type(model_output.__name__, (_Lazy, model_output), {"__module__": __name__})


def _flatten(output: Any) -> tuple[list[Any], Any]:
    names = list(output.keys())
    context = (type(output), names, dict(vars(output)["_pending"]), vars(output)["_with_loss"])
    return [OrderedDict.__getitem__(output, name) for name in names], context


def _unflatten(values: Any, context: Any) -> Any:
    lazy, names, pending, with_loss = context
    result = lazy.__new__(lazy)
    for field in lazy.__dataclass_fields__:
        vars(result)[field] = None
    for name, value in zip(names, values, strict=True):
        OrderedDict.__setitem__(result, name, value)
        vars(result)[name] = value
    vars(result).update(_pending=dict(pending), _with_loss=with_loss)
    return result
