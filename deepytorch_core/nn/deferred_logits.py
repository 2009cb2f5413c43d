"""Logits that are computed when somebody reads them: a loss that needs none never makes any.

In training a causal language model returns logits that hardly anybody looks at. `DeferredLogits`
stands in their place. It knows shape, dtype and device; any operation on it computes the logits
then, by the head's stock forward, so every reader gets what stock gives.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle

from deepytorch_core.nn.loss import IGNORED_LABEL


class Steps:
    """Counts optimizer steps; a parameter's version does not: fused kernels leave it as it is.

    To be registered with `register_optimizer_step_post_hook`.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1


steps = Steps()
"""The process's: logits can't be computed any more after a step."""


def too_late() -> RuntimeError:
    """The error of who reads logits after the weights that they come from."""
    return RuntimeError(
        "the logits of this training step were left out, and can't be computed any more: the "
        "weights have changed since or are sharded. Read them before optimizer.step(), or switch "
        "kernels off (kernels=off, DEEPYTORCH_KERNELS=off)"
    )


_DESCRIPTIONS = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_leaf",
        "layout",
    )
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
}


# What says that a gradient may be hooked. `requires_grad` says no, as whoever goes by it, such as
# FSDP2, looks into the tensor next.
_grad_fn: Any = torch.Tensor.grad_fn
_GRAD_FN = _grad_fn.__get__


class _Later:
    """The `grad_fn` of what is not computed yet."""

    def name(self) -> str:
        return type(self).__name__


class DeferredLogits(torch.Tensor):
    """A tensor whose elements come from `compute` at the first operation that needs them.

    Attributes:
        source: what the loss is computed from in place of the logits, for whoever made this.
        hooks: what becomes of a hook on their gradient: it is put on them when they are computed
            ("later"), computes them ("now"), or is refused, as the loss was computed without them
            ("never").
        cross_entropy: computes `torch.nn.functional.cross_entropy` of these logits as rows of
            [tokens, vocabulary], from targets [tokens] and the target to ignore, without making
            them; None if it needs them.
    """

    source: Any
    hooks: Literal["later", "now", "never"]
    cross_entropy: Callable[[torch.Tensor, int], torch.Tensor] | None
    _hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]] | None
    _compute: Callable[[], torch.Tensor]
    _autocast: tuple[str, torch.dtype] | None
    _made: torch.Tensor | None

    @staticmethod
    def make(
        compute: Callable[[], torch.Tensor],
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        source: Any,
        cross_entropy: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    ) -> DeferredLogits:
        """Logits of a known shape and dtype, to be computed under the autocast in force now."""
        deferred: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, tuple(shape), dtype=dtype, device=device, requires_grad=False
        )
        deferred.source = source
        deferred.hooks = "later"
        deferred.cross_entropy = cross_entropy
        deferred._compute = compute
        deferred._made = None
        deferred._hooks = OrderedDict() if torch.is_grad_enabled() else None
        kind = device.type
        enabled = torch.is_autocast_enabled(kind)
        deferred._autocast = (kind, torch.get_autocast_dtype(kind)) if enabled else None
        return deferred

    def materialized(self) -> torch.Tensor:
        """The logits, with their gradient where gradients are on. Computed once."""
        if self._made is None or (torch.is_grad_enabled() and not self._made.requires_grad):
            kind, dtype = self._autocast or ("cpu", None)
            with torch.autocast(kind, dtype=dtype, enabled=self._autocast is not None):
                self._made = self._compute()
            if self._made.requires_grad:
                self._made.register_hook(self._run_hooks)  # type: ignore[no-untyped-call]
        return self._made.to(_dtype_of(self))

    def _run_hooks(self, gradient: torch.Tensor) -> torch.Tensor:
        """What `register_hook` was given before there was a gradient."""
        for hook in list((self._hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self.materialized())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialized().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DESCRIPTIONS and isinstance(args[0], DeferredLogits):
            return _plain(args[0], func, *args[1:], **kwargs)
        if args and isinstance(args[0], DeferredLogits):
            hooks = args[0]._hooks
            if func == _GRAD_FN:
                return None if hooks is None else _Later()
            if func is torch.Tensor.register_hook and hooks is not None:
                if args[0].hooks != "later" and not _is_deepspeeds(args[1]):
                    return _hooked(args[0], args[1])
                handle = RemovableHandle(hooks)
                hooks[handle.id] = args[1]
                return handle
            if func is torch.Tensor.clone and len(args) == 1 and not kwargs:
                return _copied(args[0])
            dtype = _cast(func, args[1:], kwargs)
            if dtype is not None:
                return _recast(args[0], dtype)
            if args[0].cross_entropy is not None:
                if _as_rows(func, args[0], args[1:]):
                    return _flattened(args[0])
                loss = _loss(func, args, kwargs)
                if loss is not None:
                    return loss
        return func(*_materialized(args), **_materialized(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Whatever came past __torch_function__, such as operations called from C++.
        return func(*_materialized(args), **_materialized(dict(kwargs or {})))


def _plain(deferred: DeferredLogits, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(deferred, *args, **kwargs)


def _dtype_of(deferred: DeferredLogits) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return deferred.dtype


def _cast(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.dtype | None:
    """The dtype, if `func` does no more than to change it, as mixed-precision wrappers do."""
    if func is torch.Tensor.float and not args and not kwargs:
        return torch.float32
    if func is torch.Tensor.to and not kwargs and len(args) == 1:
        return args[0] if isinstance(args[0], torch.dtype) else None
    return None


def _recast(deferred: DeferredLogits, dtype: torch.dtype) -> DeferredLogits:
    if dtype == _dtype_of(deferred):
        return deferred
    return _derived(deferred, deferred.materialized, dtype=dtype)


def _copied(deferred: DeferredLogits) -> DeferredLogits:
    """Another one: DDP clones all outputs where it looks for unused parameters."""
    with torch.enable_grad():
        return _derived(deferred, lambda: deferred.materialized().clone())


def _derived(
    deferred: DeferredLogits,
    compute: Callable[[], torch.Tensor],
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> DeferredLogits:
    """Other logits that are computed from these."""
    made = DeferredLogits.make(
        compute,
        shape=shape or _plain(deferred, torch.Tensor.size),
        dtype=dtype or _dtype_of(deferred),
        device=_plain(deferred, torch.Tensor.device.__get__),
        source=deferred.source,
    )
    made.hooks = deferred.hooks
    return made


def _is_deepspeeds(hook: Any) -> bool:
    """DeepSpeed hooks all outputs with gradients, to be told that the backward pass has begun."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith("deepspeed")


def _hooked(deferred: DeferredLogits, hook: Callable[..., Any]) -> Any:
    if deferred.hooks == "never":
        raise RuntimeError(
            "register_hook: the loss of this step was computed without these logits, so their "
            "gradient would never come: switch kernels off (kernels=off, DEEPYTORCH_KERNELS=off)"
        )
    return deferred.materialized().register_hook(hook)  # type: ignore[no-untyped-call]


def _as_rows(func: Callable[..., Any], deferred: DeferredLogits, args: Sequence[Any]) -> bool:
    """Whether `func` lays the logits out as [tokens, vocabulary]."""
    if func not in (torch.Tensor.view, torch.Tensor.reshape):
        return False
    shape = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)
    return shape == (-1, _plain(deferred, torch.Tensor.size)[-1])


def _flattened(deferred: DeferredLogits) -> DeferredLogits:
    *tokens, vocabulary = _plain(deferred, torch.Tensor.size)
    rows = _derived(
        deferred,
        lambda: deferred.materialized().view(-1, vocabulary),
        shape=(math.prod(tokens), vocabulary),
    )
    rows.cross_entropy = deferred.cross_entropy
    return rows


def _loss(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The mean cross-entropy, if that is what `func` computes of rows of logits."""
    if func is not F.cross_entropy or len(args) != 2 or isinstance(args[1], DeferredLogits):
        return None
    given = {name: value for name, value in kwargs.items() if value is not None}
    ignored = given.pop("ignore_index", IGNORED_LABEL)
    is_plain = given.pop("reduction", "mean") == "mean" and not given.pop("label_smoothing", 0.0)
    deferred, targets = args
    if not is_plain or given or targets.shape != _plain(deferred, torch.Tensor.size)[:1]:
        return None
    assert deferred.cross_entropy is not None
    loss: torch.Tensor = deferred.cross_entropy(targets, ignored)
    return loss


def _materialized(nest: Any) -> Any:
    if isinstance(nest, DeferredLogits):
        return nest.materialized()
    if isinstance(nest, dict):
        return {key: _materialized(value) for key, value in nest.items()}
    if isinstance(nest, tuple | list) and type(nest) in (tuple, list):
        return type(nest)(_materialized(value) for value in nest)
    return nest
