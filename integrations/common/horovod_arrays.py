"""Collectives of numpy arrays among the processes of one node, without torch.

What frameworks other than torch stand on: a `_core.Communicator` that meets over a `LocalStore`.
"""

from __future__ import annotations

import atexit
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepytorch.integrations.common.contract import IntegrationError
from deepytorch.integrations.common.horovod_common import (
    HorovodInternalError,
    RankPlacement,
    ReduceOp,
    no_such_feature,
)
from deepytorch.integrations.common.horovod_rendezvous import local_store, require_one_node
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.base.errors import OFF_SWITCH

Array = npt.NDArray[Any]

_CORE_OPS = {
    ReduceOp.Average: "avg",
    ReduceOp.Sum: "sum",
    ReduceOp.Min: "min",
    ReduceOp.Max: "max",
    ReduceOp.Product: "product",
}
# Smaller arrays are put together: a collective costs about as much as copying this.
_FUSED_BELOW_BYTES = 128 << 10


class ArrayWorld:
    """The ranks of one node, connected.

    Args:
        framework: whose ranks these are: a part of the rendezvous' name.
        given: options of deepytorch by name; the same on every rank.

    Raises IntegrationError when the job is not one that can be served, on every rank alike.
    """

    def __init__(self, framework: str, given: Mapping[str, Any]) -> None:
        from deepytorch_core import _core

        try:
            launched = config.launched()
        except ValueError as error:
            raise IntegrationError(f"horovod: {error}") from None
        rank, size = (0, 1) if launched is None else (launched.rank, launched.size)
        self.placement = RankPlacement.among(rank, [socket.gethostname()] * size)
        store: Any = _NoStore()
        if launched is not None and size > 1:
            require_one_node(
                launched,
                "groups over several nodes come later; use one node, or horovod.tensorflow",
            )
            store = local_store(launched, framework)
            if rank == 0:
                store.remove_at_exit()
        statement = _statement(given)
        options = statement if "error" not in statement else Options().to_dict()
        profile = config.profile_path()
        self._communicator = _core.Communicator(
            store,
            rank,
            size,
            name=framework,
            timeout_s=options["timeout_s"] or config.GLOO_TIMEOUT_S,
            tune="profile" if options["deterministic"] else options["tune"],
            profile="" if profile is None else str(profile),
            staging_bytes=(options["staging_mb"] or 0) << 20,
        )
        atexit.register(self.close)
        try:
            self._agree(statement)
        except IntegrationError:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group."""
        atexit.unregister(self.close)
        self._communicator.close()

    def all_reduce(
        self, arrays: Sequence[Array], op: ReduceOp, factors: tuple[float, float] = (1.0, 1.0)
    ) -> list[Array]:
        """Reduce arrays over the ranks into new ones, small ones together.

        Args:
            arrays: the same shapes and dtypes on every rank.
            op: the average of integers is cut off.
            factors: multiply what goes in, and what comes out.

        Raises HorovodInternalError, on every rank, when shapes or dtypes differ.
        """
        before, after = factors
        own = [_scaled(np.asarray(array), before) for array in arrays]
        results: list[Array] = [np.empty(0)] * len(own)
        together: dict[str, list[int]] = {}
        for index, array in enumerate(own):
            if array.nbytes < _FUSED_BELOW_BYTES:
                together.setdefault(array.dtype.name, []).append(index)
            else:
                results[index] = self._reduce(array, op)
        for indices in together.values():
            whole = np.concatenate([own[index].reshape(-1) for index in indices])
            ends = np.cumsum([own[index].size for index in indices])[:-1]
            for index, part in zip(indices, np.split(self._reduce(whole, op), ends), strict=True):
                results[index] = part.reshape(own[index].shape)
        return [_scaled(result, after) for result in results]

    def all_gather(self, array: Array) -> tuple[Array, list[int]]:
        """The ranks' arrays, one after the other along the first dimension; rows by rank.

        Raises ValueError for a scalar, HorovodInternalError, on every rank, for arrays that differ
        in dtype or beyond the first dimension.
        """
        if array.ndim == 0:
            raise ValueError("allgather of a scalar: give it a first dimension")
        kinds = self.all_gather_object([array.shape[0], [*array.shape[1:]], array.dtype.name])
        if any(kind[1:] != kinds[0][1:] for kind in kinds):
            shown = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise HorovodInternalError(
                f"allgather: arrays differ in dtype or beyond the first dimension: {shown}"
            )
        rows = [kind[0] for kind in kinds]
        output = np.empty((sum(rows), *array.shape[1:]), array.dtype)
        self._gather(np.ascontiguousarray(array), np.split(output, np.cumsum(rows)[:-1]))
        return output, rows

    def broadcast(self, arrays: Sequence[Array], root_rank: int) -> list[Array]:
        """The root's arrays, as new ones; the same shapes and dtypes on every rank."""
        results = [np.array(array, order="C", copy=True) for array in arrays]
        for result in results:
            _translated(
                self._communicator.broadcast, result.dtype.name, _bytes_of(result), root_rank
            )
        return results

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return what every rank gave, by rank, as JSON carries it."""
        data = np.frombuffer(json.dumps(obj).encode(), np.uint8)
        size = self.placement.size
        counts = [np.empty(1, np.int64) for _ in range(size)]
        self._gather(np.array([data.size], np.int64), counts)
        parts = [np.empty(int(count[0]), np.uint8) for count in counts]
        self._gather(data, parts)
        return [json.loads(part.tobytes()) for part in parts]

    def barrier(self) -> None:
        """Wait for all ranks."""
        _translated(self._communicator.barrier)

    def _agree(self, statement: dict[str, Any]) -> None:
        statements = self.all_gather_object(statement)
        for rank, other in enumerate(statements):
            if "error" in other:
                raise IntegrationError(f"horovod on rank {rank}: {other['error']}")
        for rank, other in enumerate(statements):
            for name, value in other.items():
                if value != statements[0][name]:
                    raise IntegrationError(
                        f"horovod: rank 0 was given {name}={statements[0][name]!r} and rank {rank} "
                        f"{name}={value!r}: give every rank the same options"
                    )
        if not statement["enabled"] and self.placement.size > 1:
            raise no_such_feature(
                "enabled=false with TensorFlow",
                "there is no other backend behind this adapter; use horovod.tensorflow",
            )

    def _reduce(self, array: Array, op: ReduceOp) -> Array:
        is_whole = op is ReduceOp.Average and array.dtype.kind in "iu"
        core_op = "sum" if is_whole else _CORE_OPS[op]
        result = np.empty(array.shape, array.dtype)
        source = np.ascontiguousarray(array)
        _translated(
            self._communicator.all_reduce,
            array.dtype.name,
            core_op,
            _bytes_of(source),
            _bytes_of(result),
        )
        # Cut off, as Horovod does.
        return np.sign(result) * (np.abs(result) // self.placement.size) if is_whole else result

    def _gather(self, array: Array, outputs: list[Array]) -> None:
        buffers = [_bytes_of(output) for output in outputs]
        _translated(self._communicator.all_gather, array.dtype.name, _bytes_of(array), buffers)


class _NoStore:
    """For a group of one rank, which meets nobody."""

    def set(self, key: str, value: bytes) -> None:
        raise AssertionError(key)

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        raise AssertionError(key)


def _statement(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return Options.from_mapping(given, base=config.current()).to_dict()
    except ValueError as error:
        return {"error": str(error)}


def _translated(function: Any, *args: Any) -> None:
    try:
        function(*args)
    except RuntimeError as error:
        raise HorovodInternalError(f"{error} ({OFF_SWITCH})") from error


def _scaled(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    scaled: Array = (array * factor).astype(array.dtype)
    return scaled


def _bytes_of(array: Array) -> Array:
    """The array's memory; types that numpy doesn't know, bfloat16 say, have no buffer of theirs."""
    return array.reshape(-1).view(np.uint8)
