"""Places in torch that ask for a backend by its name or class, taught about ours.

Only where the answer does harm; docs/backend-sites.md lists all of them, and those in frameworks.
Every replacement calls the original for groups that are not ours. What asks for a name alone gets
the right one, except in a group that was asked for as "deepytorch".
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from deepytorch_core.base.patching import Patches
from deepytorch_core.c10d import backend, delegates
from deepytorch_core.c10d import patches as c10d_patches

_BY_NAME = "it chooses by the name of a backend, and ours serves what another was asked for"


def install(c10d: Any, patches: Patches) -> None:
    """Replace functions of torch.distributed.distributed_c10d."""
    replacements: dict[str, Callable[[Any, Callable[..., Any]], Callable[..., Any]]] = {
        "monitored_barrier": _monitored_barrier,
        "split_group": _split_group,
        "batch_isend_irecv": _batch_isend_irecv,
        "_add_ephemeral_timeout_for_all_pgs": _add_ephemeral_timeout,
        "_abort_process_group": _abort_process_group,
    }
    if not hasattr(c10d, "set_timeout"):  # torch >= 2.14 asks every backend by itself
        replacements["_set_pg_timeout"] = _set_pg_timeout
    for name, make in replacements.items():
        patches.replace(c10d, name, functools.partial(make, c10d), why=_BY_NAME)


def _group(c10d: Any, group: Any) -> Any:
    return c10d._get_default_group() if group is None else group


def _ours(c10d: Any, group: Any) -> list[str]:
    """Device types of this group that we serve."""
    pairs = c10d_patches.served(c10d, group)
    return [device for device, name in pairs.items() if name == backend.NAME]


def _has_own_name(c10d: Any, group: Any) -> bool:
    """Whether the group was asked for as "deepytorch", and serves CPU tensors."""
    this = _group(c10d, group)
    return c10d_patches.has_own_name(c10d, this) and "cpu" in _ours(c10d, this)


def _monitored_barrier(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """torch allows it for the name "gloo" only; our backend hands it to gloo."""

    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        if c10d._rank_not_in_group(group) or not _has_own_name(c10d, group):
            return original(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = backend.default_timeout(c10d.default_pg_timeout)
        elif isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        timeout = min(timeout, backend.LONGEST)
        return _group(c10d, group).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def _set_pg_timeout(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """torch <= 2.13 sets it on gloo's and NCCL's classes only, and else warns."""

    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        import torch

        if c10d._rank_not_in_group(group):
            original(timeout, group)
            return
        this = _group(c10d, group)
        timeout = min(timeout, backend.LONGEST)
        devices = _ours(c10d, this)
        for device in devices:
            served_by = this._get_backend(torch.device(device))
            set_timeout = getattr(served_by, "set_timeout", None)
            (set_timeout or served_by._set_default_timeout)(timeout)
        if len(devices) < len(c10d_patches.served(c10d, this)):
            original(timeout, group)

    return set_pg_timeout


def _split_group(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Splitting NCCL's communicator is a faster new_group; for ours new_group is what there is.

    Without this a DeviceMesh over a default group with `device_id=` fails: it takes this road.
    """

    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **kwargs: Any,
    ) -> Any:
        parent = _group(c10d, parent_pg)
        if not split_ranks or not _ours(c10d, parent):
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **kwargs)
        globally = {rank: number for number, rank in c10d._world.pg_group_ranks[parent].items()}
        # Counted in the parent's store: there it outlives an install, and ranks that were in
        # different groups before still agree.
        number = c10d._world.pg_map[parent][1].add(f"deepytorch/splits/{parent.rank()}", 1)
        mine = next((ranks for ranks in split_ranks if parent.rank() in ranks), None)
        if mine is None:
            return None
        if len(set(mine)) != len(mine):
            raise ValueError("the split group cannot have duplicate ranks")
        name = f"{parent.group_name}:{number}:{sorted(mine)}"
        with _named(c10d, hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()):
            return c10d._new_group_with_tag(
                [globally[rank] for rank in sorted(mine)],
                timeout,
                kwargs.get("backend") or c10d._world.pg_map[parent][0],
                pg_options,
                None,
                # Only its members come here for a group.
                use_local_synchronization=True,
                group_desc=group_desc or f"{parent.group_desc}:split",
            )

    return split_group


def _batch_isend_irecv(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Start each message of host memory by itself, with a work of its own, as with gloo.

    torch opens one batch per group for a backend that coalesces. So two threads' batches get mixed
    up. A batch that fails stays open, so that the group's next collectives are only noted down.
    """

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        on_host = bool(p2p_op_list) and all(op.tensor.device.type == "cpu" for op in p2p_op_list)
        if not on_host or "cpu" not in _ours(c10d, _group(c10d, p2p_op_list[0].group)):
            works: list[Any] = original(p2p_op_list)
            return works
        c10d._check_p2p_op_list(p2p_op_list)
        started = []
        for op in p2p_op_list:
            peer = "group_dst" if op.op is c10d.isend else "group_src"
            started.append(op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer}))
        return [work for work in started if work is not None]

    return batch_isend_irecv


@contextlib.contextmanager
def _named(c10d: Any, name: str) -> Iterator[None]:
    """While open, a group that its members alone make gets this name.

    torch counts the groups of the process for it, and its members may have different numbers.
    """
    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


def _add_ephemeral_timeout(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """torch finds NCCL groups by class; NCCL behind ours needs the extension as much."""

    def add_ephemeral_timeout_for_all_pgs(timeout: timedelta) -> None:
        original(timeout)
        for stock in delegates.live("cuda"):
            if hasattr(stock, "_add_ephemeral_timeout"):
                stock._add_ephemeral_timeout(timeout)

    return add_ephemeral_timeout_for_all_pgs


def _abort_process_group(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """torch aborts all NCCL communicators in one NCCL group, or they may wait for each other."""

    def abort_process_group(group: Any = None) -> None:
        stock = delegates.live("cuda")
        whole_world = group is None or group == c10d.GroupMember.WORLD
        if not (whole_world and stock and hasattr(stock[0], "_group_start")):
            original(group)
            return
        stock[0]._group_start()
        try:
            original(group)
        finally:
            stock[0]._group_end()

    return abort_process_group


def install_dist_nn(functional: Any, patches: Patches) -> None:
    """Replace parts of torch.distributed.nn.functional that choose by the backend's name."""
    from torch.distributed import distributed_c10d as c10d

    def ours(group: Any) -> bool:
        return c10d_patches.has_own_name(c10d, _group(c10d, group))

    patches.replace(
        functional._AllGather,
        "backward",
        lambda original: _all_gather_backward(functional, original, ours),
        why=_BY_NAME,
    )
    patches.replace(
        functional._AllGatherBase,
        "backward",
        lambda original: _all_gather_base_backward(c10d, original, ours),
        why=_BY_NAME,
    )
    patches.replace(
        functional._AlltoAll,
        "forward",
        lambda original: _all_to_all_forward(c10d, original, ours),
        why=_BY_NAME,
    )


def install_zero_hooks(zero_hooks: Any, patches: Patches) -> None:
    """Replace what overlaps ZeroRedundancyOptimizer with DDP, which torch refuses to do on gloo."""
    from torch.distributed import distributed_c10d as c10d

    for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved"):
        patches.replace(
            zero_hooks,
            name,
            functools.partial(_with_zero_step, c10d),
            why="the optimizer's broadcasts come in the same order on all ranks",
        )


def _with_zero_step(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """The optimizer's broadcasts start when a bucket is done, in whatever thread finds out.

    On the host that is beside the backward pass, whose next bucket comes before them on some ranks
    and after them on others: training would end in ranks that entered different operations.
    """

    def with_zero_step(hook: Any, ddp: Any, zero: Any, *args: Any, **kwargs: Any) -> Any:
        on_host = any(parameter.device.type == "cpu" for parameter in ddp.parameters())
        ours = _has_own_name(c10d, ddp.process_group)
        if on_host and ours and zero._overlap_with_ddp:
            raise RuntimeError(
                "overlapping DDP with ZeRO is for GPUs, on CPUs it may hang (torch refuses it with "
                "gloo): make the ZeroRedundancyOptimizer with overlap_with_ddp=False"
            )
        return original(hook, ddp, zero, *args, **kwargs)

    return with_zero_step


def _all_gather_backward(
    functional: Any, original: Callable[..., Any], ours: Callable[[Any], bool]
) -> Callable[..., Any]:
    """By reduce_scatter, as for NCCL; torch's road for others needs what gloo hasn't."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        import torch

        if not ours(ctx.group):
            return original(ctx, *gradients)
        own = torch.empty_like(gradients[torch.distributed.get_rank(group=ctx.group)])
        reduce_op = torch.distributed.ReduceOp.SUM
        result = functional._Reduce_Scatter.apply(reduce_op, ctx.group, own, *gradients)
        return None, result

    return backward


def _all_gather_base_backward(
    c10d: Any, original: Callable[..., Any], ours: Callable[[Any], bool]
) -> Callable[..., Any]:
    """torch raises "Backend not supported!" for all but NCCL."""

    def backward(ctx: Any, gradient: Any) -> Any:
        import torch

        if not ours(ctx.group):
            return original(ctx, gradient)
        size = c10d.get_world_size(ctx.group)
        if gradient.size(0) % size:
            raise RuntimeError(
                f"all_gather's gradient has {gradient.size(0)} rows, which {size} ranks can't share"
            )
        shape = (gradient.size(0) // size, *gradient.shape[1:])
        own = torch.empty(shape, dtype=gradient.dtype, device=gradient.device)
        c10d.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return None, own, None

    return backward


def _all_to_all_forward(
    c10d: Any, original: Callable[..., Any], ours: Callable[[Any], bool]
) -> Callable[..., Any]:
    """CPU tensors go as one flat exchange: gloo has no all_to_all of lists."""

    def forward(ctx: Any, group: Any, outputs: list[Any], *tensors: Any) -> Any:
        import torch

        if not ours(group) or tensors[0].device.type != "cpu":
            return original(ctx, group, outputs, *tensors)
        ctx.group = group
        ctx.input_tensor_size_list = [tensor.size() for tensor in tensors]
        size = sum(output.numel() for output in outputs)
        received = torch.empty(size, dtype=tensors[0].dtype, device="cpu")
        c10d.all_to_all_single(
            received,
            torch.cat([tensor.reshape(-1) for tensor in tensors]),
            [output.numel() for output in outputs],
            [tensor.numel() for tensor in tensors],
            group=group,
        )
        parts = torch.split(received, [output.numel() for output in outputs])
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part.view(output.shape))
        return tuple(outputs)

    return forward
