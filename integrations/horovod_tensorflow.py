"""The API of horovod.tensorflow for the processes of one node, on deepytorch's native core.

    import deepytorch.integrations.horovod_tensorflow as hvd  # was: import horovod.tensorflow ...

The seam is the import; nothing of TensorFlow is replaced and torch is not imported. Tensors go
through numpy to the core's collectives in host memory. In a tf.function they do so by
tf.py_function, which XLA can't compile: give Keras jit_compile=False. Left alone: variables,
optimizers' arithmetic, devices. docs/horovod.md is the guide.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from deepytorch.integrations.common.contract import IntegrationError, require
from deepytorch.integrations.common.horovod_arrays import ArrayWorld
from deepytorch.integrations.common.horovod_common import (
    HorovodInternalError,
    ReduceOp,
    no_such_feature,
    reduce_op,
)

_VERSIONS, _TESTED = ">=2.16", "2.21.0"

try:
    import tensorflow as tf
except ModuleNotFoundError:
    raise IntegrationError(
        f"tensorflow is not installed: pip install 'tensorflow-cpu=={_TESTED}'"
    ) from None

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "IntegrationError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "gloo_built",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "nccl_built",
    "rank",
    "shutdown",
    "size",
]

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

_world: ArrayWorld | None = None


class _Same:
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _Half:
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The compressors; pass one of these classes as `compression=`."""

    none = _Same
    fp16 = _Half


def init(comm: None = None, **options: Any) -> None:
    """Connect the ranks of this node; every rank calls it. A second call does nothing.

    Who this process is comes from torchrun, horovodrun, mpirun or mpiexec; without one there is
    one rank.

    Args:
        comm: only None.
        **options: of deepytorch, see `deepytorch_core.base.config.Options`; the same on every rank.

    Raises IntegrationError, on every rank, for what can't be served: several nodes, a wrong option.
    """
    global _world
    if _world is not None:
        return
    require(_distribution(), _VERSIONS, tested=_TESTED)
    if comm is not None:
        raise no_such_feature("init(comm=...)", "start the ranks that shall take part, and no more")
    _world = ArrayWorld("tensorflow", options)


def shutdown() -> None:
    """Leave the group; `init` can be called again."""
    global _world
    ended, _world = _world, None
    if ended is not None:
        ended.close()


def is_initialized() -> bool:
    """Whether `init` is in force."""
    return _world is not None


def rank() -> int:
    """This process's rank, from 0 to `size() - 1`."""
    return _here().placement.rank


def size() -> int:
    """The number of ranks."""
    return _here().placement.size


def local_rank() -> int:
    """This process's rank on its node."""
    return _here().placement.local_rank


def local_size() -> int:
    """The number of ranks on this node."""
    return _here().placement.local_size


def cross_rank() -> int:
    """0: all ranks are on one node."""
    return _here().placement.cross_rank


def cross_size() -> int:
    """1: all ranks are on one node."""
    return _here().placement.cross_size


def is_homogeneous() -> bool:
    """True: all ranks are on one node."""
    return _here().placement.is_homogeneous


def mpi_built() -> bool:
    """False: the launcher may be mpirun, the collectives never use MPI."""
    return False


def gloo_built() -> bool:
    """False: the collectives are native."""
    return False


def nccl_built() -> int:
    """0: the collectives run in host memory."""
    return 0


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks; tf.IndexedSlices are summed or averaged by gathering.

    Args:
        tensor: the same shape and dtype on every rank. Slices may differ in number.
        average: deprecated, use `op`.
        name: ignored: ranks must make their calls in the same order.
        compression: a class of `Compression`.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor, postscale_factor: multiply what goes in, and what comes out.

    The gradient is reduced in the same way. Raises HorovodInternalError, on every rank, for shapes
    or dtypes that differ.
    """
    del name
    chosen = reduce_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, chosen)
    factors = (prescale_factor, postscale_factor)
    return _grouped([tf.convert_to_tensor(tensor)], chosen, factors, compression)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`allreduce` of several dense tensors at once, small ones in one buffer."""
    dense = [tf.convert_to_tensor(tensor) for tensor in tensors]
    factors = (prescale_factor, postscale_factor)
    return _grouped(dense, reduce_op(op, average), factors, compression)


def allgather(tensor: Any, name: str | None = None) -> Any:
    """Concatenate the ranks' tensors along the first dimension, in which they may differ.

    The gradient is averaged over the ranks, and each takes its own rows of it.
    """
    del name

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(value: Any) -> Any:
        shape = tf.TensorShape([None]).concatenate(value.shape[1:])
        types = [value.dtype, tf.int64]
        output, rows = _carry_out(_gather_now, [value], types)
        output.set_shape(shape)

        def gradient(grad: Any) -> Any:
            averaged = allreduce(grad, op=Average)
            first = tf.reduce_sum(rows[: rank()])
            own = averaged[first : first + rows[rank()]]
            own.set_shape(value.shape)
            return own

        return output, gradient

    return gather(tf.convert_to_tensor(tensor))


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's tensor on every rank; its gradient is the average, the others' is zero."""
    del name

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def spread(value: Any) -> Any:
        def now(values: list[Any]) -> list[Any]:
            return list(_here().broadcast(values, root_rank))

        (output,) = _carry_out(now, [value], [value.dtype])
        output.set_shape(value.shape)

        def gradient(grad: Any) -> Any:
            averaged = allreduce(grad, op=Average)
            return averaged if rank() == root_rank else tf.zeros_like(averaged)

        return output, gradient

    return spread(tf.convert_to_tensor(tensor))


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Assign the root's values to the variables of every rank.

    Args:
        variables: tf.Variables or Keras variables, in the same order on every rank, of the same
            shapes and dtypes.
        root_rank: the rank whose values are taken.
    """
    several = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in several]

    def now(arrays: list[Any]) -> list[Any]:
        return list(_here().broadcast(arrays, root_rank))

    results = _carry_out(now, values, [value.dtype for value in values]) if values else []
    for variable, result in zip(several, results, strict=True):
        variable.assign(tf.reshape(result, variable.shape))


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object, on every rank; it must pickle."""
    return allgather_object(obj if rank() == root_rank else None, name)[root_rank]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank; they must pickle."""
    del name
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    output, rows = _here().all_gather(data)
    parts = np.split(output, np.cumsum(rows)[:-1])
    return [pickle.loads(part.tobytes()) for part in parts]


def barrier() -> None:
    """Wait until every rank has come here."""
    _here().barrier()


def join() -> int:
    """Not supported: raises IntegrationError."""
    raise no_such_feature("join with TensorFlow", "give every rank the same number of batches")


class _TapeMixin:
    """The part that DistributedGradientTape adds to the class of the tape that it was given."""

    _reduce: Callable[[list[Any]], list[Any]]

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **more: Any) -> Any:
        """The gradients, reduced over the ranks."""
        found = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, **more
        )
        flat = tf.nest.flatten(found)
        return tf.nest.pack_sequence_as(found, self._reduce(flat))


def DistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: Any,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = Average,
    *,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """A tape whose `gradient` reduces over the ranks.

    Args:
        gradtape: a tf.GradientTape that has recorded.
        compression: a class of `Compression`.
        sparse_as_dense: gradients that are tf.IndexedSlices are reduced as dense ones.
        op: Average, Sum, Min, Max or Product.
        gradient_predivide_factor: f: gradients are divided by f before the sum and by size/f after
            it; with Average only.

    Gradients that are None must be so on every rank.
    """
    settings = (compression, sparse_as_dense, gradient_predivide_factor)
    kind = type(gradtape)
    tape: Any = object.__new__(type(kind.__name__, (_TapeMixin, kind), {}))
    vars(tape).update(vars(gradtape))
    tape._reduce = _reducer(reduce_op(op), settings)
    return tape


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = Average,
    *,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """A Keras optimizer that reduces gradients over the ranks before it applies them.

    The object itself is changed and returned. With `model.fit`, compile the model with
    jit_compile=False. Arguments as of `DistributedGradientTape`.
    """
    if isinstance(optimizer, _OptimizerMixin):
        raise ValueError("this optimizer is a DistributedOptimizer already: wrap it once")
    kind = type(optimizer)
    settings = (compression, sparse_as_dense, gradient_predivide_factor)
    reducer = _reducer(reduce_op(op), settings)
    optimizer.__class__ = type(kind.__name__, (_OptimizerMixin, kind), {"_reduce": [reducer]})
    return optimizer


class _OptimizerMixin:
    """The part that DistributedOptimizer adds to the class of the optimizer that it was given."""

    _reduce: list[Callable[[list[Any]], list[Any]]]  # in a list: it is no method

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce the gradients, and apply them."""
        reduced = self._reduce[0](list(grads))
        return super().apply(reduced, trainable_variables)  # type: ignore[misc]


def _here() -> ArrayWorld:
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def _distribution() -> str:
    names = ("tensorflow", "tensorflow-cpu")
    found = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    return next(
        (name for name in names if name in found or name.replace("-", "_") in found), names[0]
    )


def _carry_out(
    now: Callable[[list[Any]], list[Any]], tensors: Sequence[Any], types: Sequence[Any]
) -> list[Any]:
    """`now` of the tensors' arrays: at once, or as an operation of the graph being made."""

    def run(*values: Any) -> list[Any]:
        return [tf.convert_to_tensor(array) for array in now([value.numpy() for value in values])]

    if tf.executing_eagerly():
        return run(*tensors)
    return list(tf.py_function(run, list(tensors), list(types)))


def _grouped(
    tensors: list[Any], op: ReduceOp, factors: tuple[float, float], compression: Any
) -> list[Any]:
    compressed = [compression.compress(tensor) for tensor in tensors]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(*values: Any) -> Any:
        def now(arrays: list[Any]) -> list[Any]:
            return list(_here().all_reduce(arrays, op, factors))

        results = _carry_out(now, values, [value.dtype for value in values])
        for value, result in zip(values, results, strict=True):
            result.set_shape(value.shape)

        def gradient(*grads: Any) -> Any:
            return _grouped(list(grads), op, factors, Compression.none)

        return results, gradient

    reduced = reduce(*(sent for sent, _ in compressed)) if tensors else []
    return [
        compression.decompress(result, ctx)
        for result, (_, ctx) in zip(reduced, compressed, strict=True)
    ]


def _gather_now(arrays: list[Any]) -> list[Any]:
    output, rows = _here().all_gather(arrays[0])
    return [output, np.array(rows, np.int64)]


def _allreduce_slices(slices: Any, op: ReduceOp) -> Any:
    if op not in (Average, Sum):
        raise ValueError(f"op={op.name} of tf.IndexedSlices is not supported: use Average or Sum")
    values, indices = allgather(slices.values), allgather(slices.indices)
    if op is Average:
        values /= tf.cast(size(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _reducer(op: ReduceOp, settings: tuple[Any, bool, float]) -> Callable[[list[Any]], list[Any]]:
    compression, sparse_as_dense, predivide = settings
    if predivide != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")

    def reduce(grads: list[Any]) -> list[Any]:
        if sparse_as_dense:
            grads = [
                tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads
            ]
        results = list(grads)
        dense = [i for i, g in enumerate(grads) if g is not None and not _is_sparse(g)]
        factors = (1.0 / predivide, predivide)
        reduced = _grouped([grads[i] for i in dense], op, factors, compression)
        for index, result in zip(dense, reduced, strict=True):
            results[index] = result
        for index, grad in enumerate(grads):
            if _is_sparse(grad):
                results[index] = _allreduce_slices(grad, op)
        return results

    return reduce


def _is_sparse(grad: Any) -> bool:
    return isinstance(grad, tf.IndexedSlices)
