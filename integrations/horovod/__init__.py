"""The API of horovod.torch over torch.distributed, so through deepytorch's collectives.

    import deepytorch.integrations.horovod as hvd  # was: import horovod.torch as hvd

The seam is the import: nothing of torch is replaced but what `import deepytorch` replaces, and
Horovod itself need not be installed. The reductions of `DistributedOptimizer` run from hooks on the
parameters' gradients. Left alone: the model, the optimizer's arithmetic, the data. What Horovod has
and this has not (Adasum, elastic jobs, the timeline, MPI communicators) is an IntegrationError that
names what to use. `shutdown` undoes `init`. docs/horovod.md is the guide.
"""

from __future__ import annotations

import deepytorch as _deepytorch  # noqa: F401 (activates)
from deepytorch.integrations.common.contract import IntegrationError
from deepytorch.integrations.common.horovod_common import HorovodInternalError, ReduceOp

from . import (
    _join,
    _rounds,
    _world,
    compression,
    elastic,
    functions,
    mpi_ops,
    optimizer,
    sync_batch_norm,
    util,
)
from ._built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ._collectives import barrier
from ._world import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    size_op,
)
from .compression import Compression, Compressor
from .functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from .mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
    synchronize,
)
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm
from .util import (
    check_extension,
    check_installed_version,
    gpu_available,
    num_rank_is_power_2,
)

# Other names by which scripts reach them.
ops = mpi_lib = mpi_ops

_world.make_of(_world.WorldParts(rounds=_rounds.Rounds, journal=_join.Journal))

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "HorovodInternalError",
    "IntegrationError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_lib",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "ops",
    "optimizer",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "sync_batch_norm",
    "synchronize",
    "util",
]
