"""Logits that are computed when somebody reads them: a loss that needs none never makes any.

In training a causal language model returns logits that hardly anybody looks at. `DeferredLogits`
stands in their place. It knows shape, dtype and device; any operation on it computes the logits
then, by the head's stock forward, so every reader gets what stock gives.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from deepytorch_core.nn.loss import IGNORED_LABEL

_DESCRIPTIONS = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "layout",
        "_base",
    )
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
}
_requires_grad: Any = torch.Tensor.requires_grad
_REQUIRES_GRAD = _requires_grad.__get__
# Frameworks that hook all outputs with gradients, to be told that the backward pass has begun.
_WRAPPERS = ("deepspeed", "torch.distributed")


BYPASSED = (
    "the loss of this step was computed without these logits, so their gradient would never come: "
    "switch kernels off (kernels=off, DEEPYTORCH_KERNELS=off)"
)


class _Refusal:
    """Stands in a tensor's method that waits for the loss's gradient."""

    def __init__(self, what: str, reason: str) -> None:
        self.what = what
        self.reason = reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and is_wrappers(args[0]):
            return RemovableHandle(OrderedDict())  # of hooks; a dict knows no weak reference
        raise RuntimeError(f"{self.what}: {self.reason}")


def refuse_hooks(tensor: torch.Tensor, reason: str) -> None:
    """Have whoever waits for the gradient of a tensor, which the loss went without, told so."""
    for what in ("register_hook", "retain_grad"):
        vars(tensor)[what] = _Refusal(what, reason)


def is_wrappers(hook: Any) -> bool:
    """Whether a hook is of a framework that shards or replicates models."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith(_WRAPPERS)


def _is_in_wrapper(frame: Any) -> bool:
    """Whether a framework's own function runs there: ZeRO-3 hands all outputs through one, to be
    told that the backward pass has begun."""
    is_function = frame.f_code.co_name == "forward"
    return is_function and str(frame.f_globals.get("__name__")).startswith(_WRAPPERS)


class WatchedLogits(torch.Tensor):
    """Logits that were computed as ever, and tell the first time that somebody reads them."""

    tell: Callable[[], None]

    @staticmethod
    def watch(logits: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        """Have the very tensor call `tell` when it is read; one of a class of its own can't."""
        if type(logits) is torch.Tensor:
            logits.__class__ = WatchedLogits
            vars(logits)["tell"] = tell
        return logits

    def unwatched(self) -> torch.Tensor:
        """Itself, a plain tensor again. Tells nothing."""
        vars(self).pop("tell", None)
        self.__class__ = torch.Tensor  # type: ignore[assignment]
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], WatchedLogits):
            hooks = func is torch.Tensor.register_hook and is_wrappers(args[1])
            if func in _DESCRIPTIONS or hooks:
                return _plain(*args[:1], func, *args[1:], **kwargs)
            clones = func is torch.Tensor.clone and len(args) == 1 and not kwargs
            if clones or _cast(func, args[1:], kwargs) is not None:
                changed = _plain(args[0], func, *args[1:])
                return changed if changed is args[0] else cls.watch(changed, args[0].tell)
        return func(*_each(read, args), **_each(read, kwargs))


def read(value: Any) -> Any:
    """The plain tensor of logits that are deferred or watched; anything else as it is."""
    if isinstance(value, DeferredLogits):
        return value.materialized()
    if isinstance(value, WatchedLogits):
        tell = value.tell
        value.unwatched()
        tell()
    return value


class DeferredLogits(torch.Tensor):
    """A tensor whose elements come from `compute` at the first operation that needs them.

    That operation makes a plain tensor of it. So whatever is done to it from then on, in place too,
    is done as to stock's. Where somebody keeps it as it is, and for who takes it past Python, such
    as a `torch.autograd.Function`, it stays: operations read its elements, and its gradient goes to
    what they come from.

    Attributes:
        source: what the loss is computed from in place of the logits, for whoever made this.
        bypassed: why who waits for their gradient is refused, where the loss is computed without
            them; else None.
        cross_entropy: computes `torch.nn.functional.cross_entropy` of these logits as rows of
            [tokens, vocabulary], from targets [tokens] and the target to ignore, without making
            them; None if it needs them.
        elsewhere: gives what its first reader is to have in place of it, or None.
    """

    source: Any
    bypassed: str | None
    cross_entropy: Callable[[torch.Tensor, int], torch.Tensor] | None
    elsewhere: Callable[[], torch.Tensor | None]
    _origin: _Origin
    _rows_of: DeferredLogits | None

    @staticmethod
    def make(
        compute: Callable[..., torch.Tensor],
        *inputs: torch.Tensor,
        parameters: Iterable[torch.Tensor] = (),
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        source: Any = None,
    ) -> DeferredLogits:
        """Logits of a known shape and dtype, to be computed under the autocast in force now.

        Args:
            compute: gives them for `inputs`.
            inputs: get gradients, as far as they ask for them.
            parameters: all leaves that get gradients besides.
            shape: of the logits.
            dtype: of the logits.
            device: of the logits.
            source: see `source` above.
        """
        origin = _Origin(compute, inputs, dtype, device.type)
        origin.parameters = tuple(parameter for parameter in parameters if parameter.requires_grad)
        return _deferred(
            origin,
            origin.gradients,
            origin.wanted(inputs),
            shape=shape,
            device=device,
            source=source,
        )

    def materialized(self) -> torch.Tensor:
        """Itself, a plain tensor from now on if it can be, with the gradient that it had."""
        if type(self) is not DeferredLogits:  # any more
            return self
        made = self.elsewhere()
        if made is None:
            with apart():
                made = self._read()
        if self.bypassed is not None:
            refuse_hooks(made, self.bypassed)
        # Not where a graph or a weak reference has it.
        with contextlib.suppress(RuntimeError), torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(self, made)  # type: ignore[no-untyped-call]
        return self

    @property
    def is_read(self) -> bool:
        """Whether somebody has had its elements, and so may have changed them."""
        return self._origin.is_read or (
            self._rows_of is not None
            and (type(self._rows_of) is not DeferredLogits or self._rows_of.is_read)
        )

    def _read(self) -> torch.Tensor:
        rows_of = self._rows_of
        if rows_of is not None:
            return DeferredLogits.materialized(rows_of).view(_plain(self, torch.Tensor.size))
        read: torch.Tensor = _Read.apply(self, self._origin)  # type: ignore[no-untyped-call]
        return read

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
        if func is torch.autograd.grad:
            return _gradients(args, kwargs)
        if args and isinstance(args[0], DeferredLogits):
            if func in _DESCRIPTIONS:
                return _plain(args[0], func, *args[1:], **kwargs)
            if func is torch.Tensor.register_hook:
                if args[0].bypassed is not None and not is_wrappers(args[1]):
                    _Refusal("register_hook", args[0].bypassed)()
                return _plain(args[0], func, *args[1:])
            if func is torch.Tensor.retain_grad and args[0].bypassed is not None:
                _Refusal("retain_grad", args[0].bypassed)()
            if args[0].is_read:
                return _on_plain(func, args, kwargs)
            if func is torch.Tensor.detach and _is_in_wrapper(sys._getframe(1)):
                return _derived(args[0], torch.Tensor.detach)
            if func is torch.Tensor.clone and len(args) == 1 and not kwargs:
                # DDP clones all outputs where it looks for unused parameters.
                return _derived(args[0], torch.Tensor.clone)
            dtype = _cast(func, args[1:], kwargs)
            if dtype is not None:
                return _recast(args[0], dtype)
            if args[0].cross_entropy is not None:
                if _as_rows(func, args[0], args[1:]):
                    return _flattened(args[0])
                loss = _loss(func, args, kwargs)
                if loss is not None:
                    return loss
        return _on_plain(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Some operations bypass __torch_function__, such as those called from C++. They are
        # below autograd.
        return func(*_each(_values, args), **_each(_values, dict(kwargs or {})))


class _Origin:
    """The source of deferred logits. It doesn't know them: an autograd graph may keep it."""

    def __init__(
        self,
        compute: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor],
        dtype: torch.dtype,
        kind: str,
    ) -> None:
        self._compute = compute
        self._inputs = inputs
        self.parameters: tuple[torch.Tensor, ...] = ()
        self.dtype = dtype
        enabled = torch.is_autocast_enabled(kind)
        self._autocast = (kind, torch.get_autocast_dtype(kind) if enabled else None, enabled)
        self._made: tuple[Sequence[torch.Tensor], torch.Tensor, int] | None = None
        self._values: torch.Tensor | None = None

    def wanted(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Those of `inputs` and the parameters that get gradients."""
        return *(tensor for tensor in inputs if _plain(tensor, _REQUIRES_GRAD)), *self.parameters

    def made(self) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Stand-ins of the inputs, cut off from what they come from, and the logits of those.

        They are as they were before anybody changed them in place.
        """
        if self._made is None or self._made[1]._version != self._made[2]:
            kind, dtype, enabled = self._autocast
            with apart(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                leaves = [
                    _elements(tensor).requires_grad_(_plain(tensor, _REQUIRES_GRAD))
                    for tensor in self._inputs
                ]
                logits = read(self._compute(*leaves)).to(self.dtype)
            self._made = (leaves, logits, logits._version)
        return self._made[:2]

    def gradients(self, gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Those of what is `wanted`."""
        found: Sequence[torch.Tensor | None] = _Gradients.apply(
            self, gradient, *self.wanted(self._inputs)
        )  # type: ignore[no-untyped-call]
        return found

    @property
    def is_read(self) -> bool:
        """Whether `values` have been given away."""
        return self._values is not None

    def values(self) -> torch.Tensor:
        """The elements, which may have been changed in place."""
        if self._values is None:
            with apart():
                self._values = self.made()[1].detach()
        return self._values


class _Gradients(torch.autograd.Function):
    """Those of an origin's inputs and parameters; differentiable once more."""

    @staticmethod
    def forward(ctx: Any, origin: _Origin, gradient: torch.Tensor, *_: torch.Tensor) -> Any:
        ctx.origin, ctx.gradient = origin, gradient.detach()
        leaves, logits = origin.made()
        wanted = origin.wanted(leaves)
        return torch.autograd.grad(
            logits, wanted, gradient, retain_graph=True, materialize_grads=True
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *seeds: torch.Tensor) -> Any:
        leaves, logits = ctx.origin.made()
        wanted = ctx.origin.wanted(leaves)
        gradient = ctx.gradient.requires_grad_()
        with torch.enable_grad():
            found = torch.autograd.grad(
                logits, wanted, gradient, create_graph=True, materialize_grads=True
            )
            return None, *torch.autograd.grad(
                found, (gradient, *wanted), seeds, retain_graph=True, allow_unused=True
            )


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


class _Later(torch.autograd.Function):
    """Makes deferred logits: `gradients` says what those of `inputs` are."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Any], gradients: Any, *inputs: torch.Tensor) -> Any:
        ctx.gradients = gradients
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, *ctx.gradients(gradient)


class _Read(torch.autograd.Function):
    """The elements of deferred logits, and their gradient back."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits, origin: _Origin) -> Any:
        return origin.values().detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _deferred(
    origin: _Origin,
    gradients: Callable[[torch.Tensor], Sequence[torch.Tensor | None]],
    inputs: Sequence[torch.Tensor],
    *,
    shape: Sequence[int],
    device: torch.device,
    source: Any,
) -> DeferredLogits:
    def make() -> DeferredLogits:
        made: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, tuple(shape), dtype=origin.dtype, device=device, requires_grad=False
        )
        # A caller that asks C++ for its memory, like `torch.utils.dlpack.to_dlpack`, gets an error.
        with torch._C.DisableTorchFunctionSubclass():
            torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    deferred: DeferredLogits = _Later.apply(make, gradients, *inputs)  # type: ignore[no-untyped-call]
    deferred.source = source
    deferred.bypassed = None
    deferred.cross_entropy = None
    deferred.elsewhere = _nowhere
    deferred._origin = origin
    deferred._rows_of = None
    return deferred


def _nowhere() -> None:
    return None


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Compute with gradients, and apart from transforms and checkpoints that happen to be open."""
    with contextlib.ExitStack() as stack:
        enabled: Any = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
        if enabled():  # not within a transform
            hooks = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
            stack.enter_context(hooks)
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        yield


# A compiler would take what is read for an input of its own.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _on_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of `func` for the logits themselves."""
    args, kwargs = _each(read, args), _each(read, kwargs)
    with torch._C.DisableTorchFunctionSubclass():  # for those that stay as they are
        return func(*args, **kwargs)


def _gradients(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad`, which takes deferred logits as they are."""
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.autograd.grad(*args, **kwargs)
    wanted = kwargs.get("inputs", args[1] if len(args) > 1 else ())
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else wanted
    for tensor, gradient in zip(wanted, found, strict=False):
        if gradient is None and isinstance(tensor, DeferredLogits) and tensor.bypassed is not None:
            _Refusal("torch.autograd.grad", tensor.bypassed)()
    return found


def _plain(tensor: torch.Tensor, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(tensor, *args, **kwargs)


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
    return _derived(deferred, lambda logits: logits.to(dtype), dtype=dtype)


def _derived(
    deferred: DeferredLogits,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> DeferredLogits:
    """The same logits in another dtype or shape."""
    before, device = deferred._origin, _plain(deferred, torch.Tensor.device.__get__)
    own_shape, own_dtype = _plain(deferred, torch.Tensor.size), _dtype_of(deferred)
    made = _deferred(
        _Origin(lambda: change(before.made()[1].detach()), (), dtype or own_dtype, device.type),
        lambda gradient: (gradient.to(own_dtype).reshape(own_shape),),
        (deferred,),
        shape=shape or own_shape,
        device=device,
        source=deferred.source,
    )
    made.bypassed = deferred.bypassed
    return made


def _as_rows(func: Callable[..., Any], deferred: DeferredLogits, args: Sequence[Any]) -> bool:
    """Whether `func` lays the logits out as [tokens, vocabulary]."""
    if func not in (torch.Tensor.view, torch.Tensor.reshape):
        return False
    shape = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)
    return shape == (-1, _plain(deferred, torch.Tensor.size)[-1])


def _flattened(deferred: DeferredLogits) -> DeferredLogits:
    *tokens, vocabulary = _plain(deferred, torch.Tensor.size)
    shape = (math.prod(tokens), vocabulary)
    rows = _derived(deferred, lambda logits: logits.view(shape), shape=shape)
    rows.cross_entropy = deferred.cross_entropy
    rows._rows_of = deferred
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


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a tensor of its own."""
    if isinstance(tensor, DeferredLogits):
        return tensor._origin.values().detach()
    return tensor.detach()


def _values(value: Any) -> Any:
    if not isinstance(value, DeferredLogits):
        return value
    if value._rows_of is not None:
        return _values(value._rows_of).view(_plain(value, torch.Tensor.size))
    return value._origin.values()


def _each(change: Callable[[Any], Any], nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _each(change, value) for key, value in nest.items()}
    if type(nest) in (tuple, list):
        return type(nest)(_each(change, value) for value in nest)
    return change(nest)
