"""Megatron-core: its process groups with deepytorch under those that are chosen.

Seam: every group of `parallel_state.initialize_model_parallel` is made by its function
`create_group`, with a description that says which group it is. `ProcessGroupFactory` replaces
`create_group`, to choose the backend of each group, and `initialize_model_parallel`, to check the
sizes. Ranks, order, time limits and NCCL options stay Megatron's, and so do the globals of
`parallel_state`: code that reads them and code that takes a `ProcessGroupCollection` see the same
groups. Groups that Megatron asks a backend for (its gloo groups, `ucc` for pipelines) are left
alone. So are models, schedules, optimizers, checkpoints, and `HyperCommGrid`, whose own argument
`backend="deepytorch"` does the same.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from deepytorch.integrations.common.contract import Changes, IntegrationError, Joined
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.c10d.backend import NAME

from .common import contract

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

__all__ = ["ProcessGroupFactory"]

_ADAPTER = "megatron"
_VERSIONS = ">=0.16,<0.20"
# 0.17 and later need Python 3.12.
_TESTED = "0.19.2" if sys.version_info >= (3, 12) else "0.16.1"

_STOCK = "stock"
_DEFAULT = "default"

# Megatron's description of a group -> its name: a field of ProcessGroupCollection.
_NAMES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "MODEL_PARALLEL_GROUP": "mp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp_ag",
    "DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp_cp_gtp_remat",
    "DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp_gtp_remat",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp_with_egtp_remat",
    "EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "EXPERT_DATA_PARALLEL_GROUP_AG": "expt_dp_ag",
    "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp_gtp_remat",
    "GTP_WEIGHT_REMAT_GROUP": "gtp_remat",
    "EXPERT_GTP_WEIGHT_REMAT_GROUP": "expt_gtp_remat",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": "intra_expt_dp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter_dist_opt",
}
# Those whose description ends with a number.
_PREFIXES = {"HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L": "hcp", "HYBRID_DP_CP_GROUP_": "dp_cp"}

# A group that was not chosen itself goes with this one: gradients of "dp" travel in all of these.
_FAMILY = {
    "dp_cp": "dp",
    "dp_cp_ag": "dp",
    "dp_cp_gtp_remat": "dp",
    "intra_dp_cp": "dp",
    "expt_dp_ag": "expt_dp",
    "expt_dp_gtp_remat": "expt_dp",
    "intra_expt_dp": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
}
# Made by a call of their own, after the others.
_MADE_LATER = {"dp_cp_ag", "expt_dp_ag"}

# Our name for a size -> the argument of initialize_model_parallel.
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}

# Default groups under which a factory is in force; of which there is one at a time.
_worlds: weakref.WeakSet[Any] = weakref.WeakSet()


class ProcessGroupFactory:
    """Makes Megatron-core's process groups, each with the backend chosen for it.

    Used in one of two ways, by all ranks, after `torch.distributed.init_process_group`:

    * `collection = ProcessGroupFactory(tensor=2, data=2).build()` in place of
      `parallel_state.initialize_model_parallel(2)`.
    * `ProcessGroupFactory(tensor=2, data=2).install()` where a framework calls
      `initialize_model_parallel` itself, with the same sizes.

    Args:
        tensor, pipeline, context, expert: ranks that share a layer's tensors, the layers, a
            sequence, the experts.
        data: replicas of the model. Default: the world size divided by the other sizes (of which
            `expert` is none: experts are spread over ranks of `data` and `context`).
        backend_for: backend by group name: "deepytorch", "stock" (NCCL on GPUs, gloo on CPUs), or
            the name of one that torch has. Group names are the fields of ProcessGroupCollection.
            The name "dp" stands also for the groups of data and context parallelism together, which
            carry the gradients. The name "default" stands for all that are not named; it is
            "deepytorch" unless given.
        **options: see `deepytorch_core.base.config.Options`.
    """

    def __init__(
        self,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        data: int | None = None,
        context: int = 1,
        expert: int = 1,
        backend_for: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._sizes = {
            "tensor": tensor,
            "pipeline": pipeline,
            "context": context,
            "expert": expert,
        }
        self._data = data
        self._backend_for = dict(backend_for or {})
        self._options = options
        self._joined: Joined | None = None
        self._made: set[str] = set()
        self._collection: ProcessGroupCollection | None = None

    def build(self, **arguments: Any) -> ProcessGroupCollection:
        """Make all groups; returns them, and `parallel_state` holds them too.

        A second call returns the first one's result.

        Args:
            **arguments: what `parallel_state.initialize_model_parallel` takes besides the sizes:
                order, distributed_timeout_minutes, nccl_communicator_config_path, ...

        Raises IntegrationError, on every rank, for sizes that don't make the world size, and for an
        unknown group, backend or argument. Raises it too for settings that differ between ranks,
        and when Megatron has groups already.
        """
        self.install()
        if self._collection is not None:
            return self._collection
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        try:
            if parallel_state.is_initialized():
                raise IntegrationError(
                    "megatron: parallel_state has groups already: call build() in place of "
                    "initialize_model_parallel(), or destroy_model_parallel() first"
                )
            _check_arguments(parallel_state.initialize_model_parallel, arguments)
            sizes = {_SIZES[name]: size for name, size in self._sizes.items()}
            with _undone_by(self._changes, parallel_state):
                parallel_state.initialize_model_parallel(**sizes, **arguments)
            self._check_all_made()
        except BaseException:
            self.undo()
            raise
        self._collection = ProcessGroupCollection.use_mpu_process_groups()
        return self._collection

    def install(self) -> None:
        """From now on `parallel_state.initialize_model_parallel` makes its groups as chosen.

        For frameworks that call it themselves. All ranks call this; a second call does nothing.
        Raises IntegrationError as `build` does; for wrong sizes `initialize_model_parallel` does.
        """
        _forget_other_worlds()
        if self._joined is not None:
            return
        contract.require("megatron-core", _VERSIONS, tested=_TESTED)
        joined = contract.join(_ADAPTER, self._options, own=self._settings)
        import torch.distributed as dist
        from megatron.core import parallel_state

        changes = Changes()
        changes.on_undo(joined.leave)
        changes.on_undo(self._forget)
        if joined.options.enabled and joined.options.collectives != "stock":
            changes.replace(parallel_state, "create_group", self._choosing)
        changes.replace(parallel_state, "initialize_model_parallel", self._checking)
        contract.mark(parallel_state, _ADAPTER, changes)
        _worlds.add(dist.GroupMember.WORLD)
        self._joined, self._changes = joined, changes

    def undo(self) -> None:
        """Destroy what `build` made, and leave `parallel_state` as it was found.

        All ranks call this, after the last use of the groups. Groups that a framework had made by
        itself after `install` stay. Does nothing the second time.
        """
        if self._joined is None:
            return
        from megatron.core import parallel_state

        contract.undo(parallel_state, _ADAPTER)

    def _forget(self) -> None:
        self._joined = self._collection = None
        self._made.clear()

    def _settings(self) -> dict[str, Any]:
        """Return what all ranks must agree on; ValueError for what is wrong by itself."""
        from megatron.core import parallel_state

        if contract.is_marked(parallel_state, _ADAPTER):
            raise ValueError(
                "another ProcessGroupFactory is in force: call its undo() first, or use its groups"
            )
        given = {**self._sizes, "data": self._data}
        for name, size in given.items():
            if size is None and name == "data":
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r}: expected a whole number of ranks above 0")
        valid = _valid_names()
        for name, backend in self._backend_for.items():
            if name not in valid:
                raise ValueError(
                    f"backend_for has no group {name!r}{_closest(name, valid)}; valid groups: "
                    f"{', '.join(valid)}"
                )
            _check_backend(name, backend)
        return {**given, "backend_for": self._backend_for}

    def _choosing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`create_group` with the backend chosen for the group."""
        signature = inspect.signature(original)

        def create_group(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            name = _name_of(call.get("group_desc"))
            if name is None or call.get("backend") is not None:
                return original(*args, **kwargs)
            self._made.add(name)
            backend = self._choice(name)
            if backend == NAME:
                # No backend means the default group's, which is ours since we joined.
                return original(*args, **kwargs)
            call["backend"] = _stock_backend() if backend == _STOCK else backend
            with c10d_patches.as_asked():
                return original(**call)

        return create_group

    def _choice(self, name: str) -> str:
        chosen = self._backend_for
        for candidate in (name, _FAMILY.get(name), _DEFAULT):
            if candidate in chosen:
                return chosen[candidate]
        return NAME

    def _checking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`initialize_model_parallel` that refuses other sizes than ours."""
        signature = inspect.signature(original)

        def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._check(bound.arguments)
            return original(*args, **kwargs)

        return initialize_model_parallel

    def _check(self, call: Mapping[str, Any]) -> None:
        """Compare a call of initialize_model_parallel with this factory and the world."""
        import torch.distributed as dist

        for name, argument in _SIZES.items():
            if call[argument] != self._sizes[name]:
                raise IntegrationError(
                    f"megatron: initialize_model_parallel got {argument}={call[argument]} and "
                    f"ProcessGroupFactory {name}={self._sizes[name]}: give both the same sizes"
                )
        if call["pipeline_model_parallel_comm_backend"] and "pp" in self._backend_for:
            raise IntegrationError(
                "megatron: both pipeline_model_parallel_comm_backend and backend_for['pp'] choose "
                "the pipeline's backend: give one of them"
            )
        # These two exist since 0.19, where a job may also hold other worlds beside this one.
        world = call.get("local_world_size") or dist.get_world_size()
        others = {"gtp_remat_size": call.get("gtp_remat_size", 1)}
        others = {name: size for name, size in others.items() if size != 1}
        parts = {name: self._sizes[name] for name in ("tensor", "pipeline", "context")} | others
        _check_product(world, parts, self._data)
        experts = {
            "tensor": call["expert_tensor_parallel_size"] or self._sizes["tensor"],
            "expert": self._sizes["expert"],
            "pipeline": self._sizes["pipeline"],
            "expert_gtp_remat_size": call.get("expert_gtp_remat_size", 1),
        }
        if self._sizes["expert"] > 1:
            _check_product(world, experts, None)

    def _check_all_made(self) -> None:
        """A choice for a group that this layout doesn't make would be lost in silence."""
        if self._joined is None or not self._made:  # switched off
            return
        lost = set(self._backend_for) - self._made - _MADE_LATER - {_DEFAULT}
        if lost:
            raise IntegrationError(
                f"megatron: backend_for names {', '.join(sorted(lost))}, which this layout doesn't "
                f"make: leave it out; groups that it makes: {', '.join(sorted(self._made))}"
            )


@contextlib.contextmanager
def _undone_by(changes: Changes, parallel_state: Any) -> Iterator[None]:
    """Have `changes` destroy the groups made inside, and put Megatron's globals back."""
    from torch.distributed import distributed_c10d as c10d

    found = {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(parallel_state).items()
        if _is_state(name, value)
    }
    older = set(c10d._world.pg_map)
    made: list[Any] = []

    def forget() -> None:
        # Sees to Megatron's buffers, and destroys some groups.
        parallel_state.destroy_model_parallel()
        for name, (value, content) in found.items():
            setattr(parallel_state, name, value)
            if content is not None:
                value.clear()
                value.update(content)
        for group in made:
            if group in c10d._world.pg_map:
                c10d.destroy_process_group(group)

    changes.on_undo(forget)
    try:
        yield
    finally:
        made += [group for group in c10d._world.pg_map if group not in older]


def _forget_other_worlds() -> None:
    """Undo a factory of a default group that was destroyed meanwhile: its groups are gone too."""
    import torch.distributed as dist

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and dist.GroupMember.WORLD not in _worlds:
        contract.undo(parallel_state, _ADAPTER)


def _is_state(name: str, value: Any) -> bool:
    """Whether a name of the module holds Megatron's state, as against its code."""
    return name.startswith("_") and not name.startswith("__") and not callable(value)


def _name_of(description: Any) -> str | None:
    """The name of the group that Megatron describes so; None for one that we don't know."""
    text = str(description)
    for prefix, name in _PREFIXES.items():
        if text.startswith(prefix) and text.removeprefix(prefix).isdigit():
            return name
    return _NAMES.get(text)


def _valid_names() -> list[str]:
    """Return the names that `backend_for` may have with the installed Megatron."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    known = {*_NAMES.values(), *_PREFIXES.values()}
    return [field.name for field in fields(ProcessGroupCollection) if field.name in known] + [
        _DEFAULT
    ]


def _check_backend(group: str, backend: Any) -> None:
    from torch.distributed import distributed_c10d as c10d

    valid = [NAME, _STOCK]
    valid += [name for name in c10d.Backend.backend_list if name not in ("undefined", NAME)]
    if backend not in valid:
        raise ValueError(
            f"backend_for[{group!r}]={backend!r}{_closest(str(backend), valid)}; valid backends: "
            f"{', '.join(valid)}"
        )
    present = getattr(c10d, f"is_{backend}_available", None)
    if present is not None and not present():
        raise ValueError(
            f"backend_for[{group!r}]={backend!r}: this torch was built without it; 'stock' is the "
            f"machine's own"
        )


def _stock_backend() -> str:
    import torch

    from deepytorch_core.c10d.delegates import STOCK_BACKENDS

    accelerator = torch.accelerator.current_accelerator()
    return STOCK_BACKENDS["cpu" if accelerator is None else accelerator.type]


def _check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    valid = [name for name in inspect.signature(function).parameters if name not in _SIZES.values()]
    for name in given:
        if name not in valid:
            remedy = "give sizes to ProcessGroupFactory" if name in _SIZES.values() else ""
            remedy = remedy or f"initialize_model_parallel takes: {', '.join(valid)}"
            raise IntegrationError(f"megatron: build() has no argument {name!r}; {remedy}")


def _check_product(world: int, parts: Mapping[str, int], data: int | None) -> None:
    """Raises IntegrationError unless the parts, and `data` if given, make up the world."""
    product = math.prod(parts.values())
    text = " x ".join(f"{name} {size}" for name, size in parts.items())
    if data is not None and product * data != world:
        raise IntegrationError(
            f"megatron: {text} x data {data} = {product * data} ranks, and the job has {world}: "
            "change the sizes, or leave data out"
        )
    if world % product:
        raise IntegrationError(
            f"megatron: {text} = {product} ranks, which does not divide the job's {world}: change "
            "the sizes"
        )


def _closest(word: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
