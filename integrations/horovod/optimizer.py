"""DistributedOptimizer: gradients are reduced while backward still runs.

NOTE [Order] torch.distributed pairs collectives by their order, so every rank must begin the same
reductions in the same order whichever gradients it has first. Parameters are put into buckets, the
last of the optimizer's first, as backward comes to them. A bucket is begun when all its gradients
are there and all buckets before it have begun; `synchronize` begins those that are left, with zeros
for gradients that this rank does not have.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from deepytorch.integrations.common.horovod_common import ReduceOp, reduce_op
from deepytorch.integrations.horovod._collectives import (
    Reduction,
    Where,
    ordered_all_reduce,
)
from deepytorch.integrations.horovod._fusion import Fusion
from deepytorch.integrations.horovod._handle import Handle
from deepytorch.integrations.horovod._world import (
    ProcessSet,
    global_process_set,
    is_initialized,
    world,
)
from deepytorch.integrations.horovod.compression import Compression, Compressor
from deepytorch.integrations.horovod.mpi_ops import allreduce, sparse_allreduce_async

BUCKET_BYTES = 4 << 20

_Parameters = Sequence[torch.Tensor]


class _Bucket:
    """Parameters whose gradients are reduced together."""

    def __init__(self, parameters: _Parameters) -> None:
        self.parameters = list(parameters)
        self.missing = len(self.parameters)
        self.handle: Handle | None = None
        self._fusion: tuple[list[tuple[Any, ...]], Fusion] | None = None

    def fusion(self, tensors: _Parameters) -> Fusion:
        """How these tensors travel; the same from step to step unless gradients change kind."""
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        if self._fusion is None or self._fusion[0] != kinds:
            self._fusion = (kinds, Fusion(tensors))
        return self._fusion[1]


class Reducer:
    """Reduces the gradients of an optimizer's parameters, from hooks on them.

    Args:
        op: how gradients become one.
        compression: a class of `Compression`, or one of the user's.
        process_set: the ranks that train together.
        predivide: averages are divided by this before the sum, by the rest after it.
        sparse_as_dense: sparse gradients are reduced as dense ones.
        passes: backward passes whose gradients add up to one reduction.
    """

    def __init__(
        self,
        op: ReduceOp,
        compression: type[Compressor],
        process_set: ProcessSet,
        *,
        predivide: float,
        sparse_as_dense: bool,
        passes: int,
    ) -> None:
        self.compression, self.process_set = compression, process_set
        self.passes = passes
        self.reduction = Reduction(op, 1.0 / predivide, predivide)
        self.sparse_as_dense = sparse_as_dense
        self.buckets: list[_Bucket] = []
        self.bucket_of: dict[torch.Tensor, _Bucket] = {}
        self.passes_left: dict[torch.Tensor, int] = {}
        self.num_begun = 0
        self.in_backward = False
        self._hooks: list[Any] = []

    def watch(self, parameters: _Parameters, groups: int | Sequence[_Parameters] | None) -> None:
        """Reduce the gradients of these parameters from now on, of others no more."""
        self.stop()
        watched = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = [_Bucket(part) for part in _parts(watched, groups)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.reset()
        world().reducers.add(self)
        for parameter in watched:
            hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def stop(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def reset(self) -> None:
        """As before any backward pass."""
        for bucket in self.buckets:
            bucket.missing, bucket.handle = len(bucket.parameters), None
        self.passes_left = dict.fromkeys(self.bucket_of, self.passes)
        self.num_begun = 0
        self.in_backward = False

    def synchronize(self) -> None:
        """Begin what has not begun, and wait for all of it; then `grad` holds the result."""
        for bucket in self.buckets[self.num_begun :]:
            self._begin(bucket)
        try:
            for bucket in self.buckets:
                assert bucket.handle is not None
                bucket.handle.wait()
        finally:
            self.reset()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        left = self.passes_left[parameter]
        if left <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.in_backward = True
        self.passes_left[parameter] = left - 1
        if left > 1:
            return
        self.bucket_of[parameter].missing -= 1
        while self.num_begun < len(self.buckets) and not self.buckets[self.num_begun].missing:
            self._begin(self.buckets[self.num_begun])

    @torch.no_grad()
    def _begin(self, bucket: _Bucket) -> None:
        self.num_begun += 1
        dense: list[torch.Tensor] = []
        sparse: list[torch.Tensor] = []
        for parameter in bucket.parameters:
            if parameter.grad is None:
                # Another rank may have one: all take part, and all step alike.
                parameter.grad = torch.zeros_like(parameter)
            (sparse if parameter.grad.is_sparse else dense).append(parameter)
        handles = [self._reduce_sparse(parameter) for parameter in sparse]
        if dense:
            handles.append(
                self._reduce_dense(bucket, [p.grad for p in dense if p.grad is not None])
            )
        bucket.handle = Handle(handles, lambda: [handle.wait() for handle in handles])

    def _reduce_dense(self, bucket: _Bucket, grads: list[torch.Tensor]) -> Handle:
        compressed = [self.compression.compress(grad) for grad in grads]
        sent = [tensor for tensor, _ in compressed]
        op, process_set = self.reduction.op, self.process_set
        handle = bucket.fusion(sent).all_reduce(
            sent,
            self.reduction,
            Where(process_set.group, asynchronous=True),
            lambda tensor: ordered_all_reduce(tensor, op, process_set, asynchronous=True),
        )

        def finish(reduced: list[torch.Tensor]) -> None:
            for grad, result, (_, ctx) in zip(grads, reduced, compressed, strict=True):
                if result is not grad:
                    grad.copy_(self.compression.decompress(result, ctx))

        return handle.then(finish)

    def _reduce_sparse(self, parameter: torch.Tensor) -> Handle:
        grad = parameter.grad
        assert grad is not None
        if self.sparse_as_dense:
            handle = self._reduce_dense(_Bucket([parameter]), [dense := grad.to_dense()])
            return handle.then(lambda _: _set_grad(parameter, dense.to_sparse(grad.sparse_dim())))
        op, process_set = self.reduction.op, self.process_set
        index = next(i for i, watched in enumerate(self.bucket_of) if watched is parameter)
        name = f"gradient.{process_set.rounds.number_of(self)}.{index}"
        handle = sparse_allreduce_async(grad, name, op, process_set)
        return handle.then(lambda result: _set_grad(parameter, result))


class DistributedMixin:
    """The part that DistributedOptimizer adds to the class of the optimizer that it was given."""

    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]
    _reducer: Reducer
    _groups: int | Sequence[_Parameters] | None
    _parameter_names: dict[torch.Tensor, str]
    _unwatched: list[torch.Tensor]
    _synchronized: bool
    _should_synchronize: bool

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients add up to one step."""
        return self._reducer.passes

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; to clip them before `step`, for instance.

        Use `skip_synchronize` around the `step` that follows.
        """
        if self._is_distributed():
            self._reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` inside does not reduce: `synchronize` has done it."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Reduce what is not reduced yet, and make the optimizer's step.

        The gradients of a `closure` are reduced each time that it is evaluated. Its loss is the
        mean of the ranks' losses, so that all ranks decide alike (LBFGS).
        """
        self._warn_of_unwatched()
        if closure is not None and self._should_synchronize and self._is_distributed():
            if self._reducer.in_backward:
                self.synchronize()
            closure = self._reducing(closure)
        elif self._should_synchronize:
            if self._synchronized:
                # Horovod's words.
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            if not isinstance(loss, torch.Tensor):
                return loss
            return allreduce(loss.detach(), process_set=self._reducer.process_set)

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Raises AssertionError between backward and step."""
        if self._reducer.in_backward:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause a "
                "race condition."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank; their gradients are reduced too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._parameter_names = {**_made_names(self.param_groups), **self._parameter_names}
        self._watch()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; unfinished reductions are forgotten.

        Into the groups that there are: a scheduler may have been made for the optimizer within.
        """
        self._reducer.reset()
        self._synchronized, self._should_synchronize = False, True
        groups, entries = self.param_groups, self.state
        super().load_state_dict(state_dict)  # type: ignore[misc]
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        entries.clear()
        entries.update(self.state)
        self.param_groups, self.state = groups, entries

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes one step takes."""
        self._reducer.passes = _positive("backward_passes_per_step", passes)
        self._reducer.reset()

    def _is_distributed(self) -> bool:
        process_set = self._reducer.process_set
        return is_initialized() and bool(process_set.included()) and process_set.group.size() > 1

    def _watch(self) -> None:
        if self._is_distributed():
            parameters = parameters_of(self)
            self._reducer.watch(parameters, self._groups)
            self._unwatched = [
                parameter for parameter in parameters if parameter not in self._reducer.bucket_of
            ]

    def _warn_of_unwatched(self) -> None:
        """Name parameters that were frozen when `_watch` came by and have a gradient now, once.

        They are not watched from here on: another rank may have no gradient of theirs, and would
        not come to the reduction.
        """
        now = {
            parameter
            for parameter in self._unwatched
            if parameter.requires_grad and parameter.grad is not None
        }
        if now:
            self._unwatched = [parameter for parameter in self._unwatched if parameter not in now]
            names = [self._parameter_names[p] for p in now]
            warnings.warn(
                f"{', '.join(names)}: frozen when the optimizer was wrapped, so not reduced, and "
                "ranks drift apart: leave frozen parameters out of the optimizer, and call its "
                "add_param_group when they begin to train",
                stacklevel=3,
            )


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = ReduceOp.Average,
    *,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[_Parameters] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer that reduces gradients over the ranks before each step.

    Its class derives from the given optimizer's class; it shares its parameter groups and state.
    A parameter without a gradient on this rank gets zeros, as other ranks may have one.

    Args:
        optimizer: of any class of torch.optim, or derived from it.
        named_parameters: names of all its parameters; checked, and used in a warning.
        compression: a class of `Compression`, or derived from `Compressor`.
        backward_passes_per_step: backward passes whose gradients add up to one step.
        op: Average, Sum, Min, Max or Product.
        gradient_predivide_factor: f: gradients are divided by f before the sum and by size/f after
            it; with Average only.
        num_groups: deprecated, use `groups`.
        groups: into how many parts, or lists of parameters, the reductions are put together;
            default: by size.
        sparse_as_dense: sparse gradients are reduced as dense ones.
        process_set: the ranks that train together.

    Raises ValueError for wrong arguments, IntegrationError for Adasum.
    """
    chosen = reduce_op(op)
    if gradient_predivide_factor != 1.0 and chosen is not ReduceOp.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if isinstance(optimizer, DistributedMixin):
        raise ValueError("this optimizer is a DistributedOptimizer already: wrap it once")
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = groups or num_groups
    names = _checked_names(optimizer, named_parameters)
    _check_groups(groups)
    passes = _positive("backward_passes_per_step", backward_passes_per_step)
    _ = process_set.size() if process_set.process_set_id is not None else process_set.group
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (DistributedMixin, kind), {}))
    # A scheduler may have wrapped `step` on the object; that one would not reduce.
    state = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(wrapped).update(state)
    wrapped._reducer = Reducer(
        chosen,
        compression,
        process_set,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        passes=passes,
    )
    wrapped._groups = groups
    wrapped._parameter_names, wrapped._unwatched = names, []
    wrapped._synchronized, wrapped._should_synchronize = False, True
    wrapped._watch()
    return wrapped


def _parts(
    parameters: list[torch.Tensor], groups: int | Sequence[_Parameters] | None
) -> list[list[torch.Tensor]]:
    """Return the parameters that are reduced together, in the order in which they are."""
    backwards = parameters[::-1]
    if isinstance(groups, int):
        each = -(-len(backwards) // groups)
        return [backwards[i : i + each] for i in range(0, len(backwards), each)]
    if groups is not None:
        ours = set(backwards)
        named = [[p for p in part if p in ours] for part in groups]
        grouped = {p for part in named for p in part}
        return [part for part in named if part] + [[p] for p in backwards if p not in grouped]
    parts: list[list[torch.Tensor]] = []
    room = 0
    for parameter in backwards:
        num_bytes = parameter.numel() * parameter.element_size()
        if not parts or num_bytes > room:
            parts.append([])
            room = BUCKET_BYTES
        parts[-1].append(parameter)
        room -= num_bytes
    return parts


def step_alone(optimizer: torch.optim.Optimizer) -> None:
    """The step of the optimizer's own class, without reductions and without those who count it."""
    if isinstance(optimizer, DistributedMixin):
        super(DistributedMixin, optimizer).step()
    else:
        type(optimizer).step(optimizer)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """All parameters of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _checked_names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    if named is None:
        return _made_names(optimizer.param_groups)
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(twice)}"
        )
    known = {id(parameter) for _, parameter in pairs}
    unnamed = [tuple(p.shape) for p in parameters_of(optimizer) if id(p) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"those of shapes {unnamed}"
        )
    return {parameter: name for name, parameter in pairs}


def _made_names(groups: Sequence[dict[str, Any]]) -> dict[torch.Tensor, str]:
    return {
        parameter: f"allreduce.noname.{number}.{index}"
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
    }


def _check_groups(groups: int | Sequence[_Parameters] | None) -> None:
    if groups is None:
        return
    if isinstance(groups, int):
        _positive("groups", groups)
        return
    if not all(isinstance(p, torch.Tensor) for part in groups for p in part):
        raise ValueError("groups must consist of torch.Tensor.")
    ids = [id(parameter) for part in groups for parameter in part]
    if len(set(ids)) != len(ids):
        raise ValueError("A parameter can only appear once in groups.")


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name}={value}: expected a whole number above 0")
    return value


def _set_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    parameter.grad = grad
