"""The bucket layout of a live DistributedDataParallel: read it and change it.

NOTE [Rebuilding the Reducer] DDP's gradient buckets belong to its Reducer. A Reducer takes their
sizes when it is made and has no way to change them. DDP itself makes a new one when it is unpickled
(`__setstate__`), and that is done here between two steps. The old Reducer's autograd hooks are
removed and the sizes set. `_ddp_init_helper` makes the new one, and what was registered with the
old one is registered again. The new Reducer goes through what every one does. Its first step has
preliminary buckets, and by the second it has learnt the order of the gradients. Parameters, their
gradients and DDP's own hooks on the forward pass stay; registered memory is placed by
deepytorch_core.c10d.registered as ever.

A Reducer reduces the parameters that required gradients when it was made. Others may require them
now: the new one is given the old one's (`reduced_parameters`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch import nn

# Not all that is used of it is exported for type checkers.
dist: Any = torch.distributed

MIB = 1 << 20


@dataclass(frozen=True)
class Layout:
    """Bucket sizes in bytes: of the one that is ready first, and of the others."""

    first: int
    others: int

    def __str__(self) -> str:
        return f"{self.first / MIB:.3g}+{self.others / MIB:.3g} MiB"


def layout_of(ddp: Any) -> Layout:
    """The bucket sizes of a module as it was made."""
    others = ddp.bucket_bytes_cap
    if hasattr(ddp, "_bucket_config"):
        return Layout(ddp._bucket_config.first_bucket_bytes_cap, others)
    return Layout(
        dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else others, others
    )


def why_fixed(ddp: Any) -> str | None:
    """The reason why this module's Reducer can't be made anew, or None."""
    if ddp._use_python_reducer:
        return "torch's python reducer has none"
    if ddp.mixed_precision is not None:
        return "DDP's mixed_precision has a hook and state of its own; autocast has not"
    if ddp._delay_all_reduce_params:
        return "it delays all_reduce of some parameters"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        return "its optimizer runs inside the backward pass"
    if not ddp._comm_hooks and ddp._get_ddp_logging_data().get("comm_hook"):
        return "it has a communication hook that can't be told from outside"
    present = set(ddp.parameters())
    if any(parameter not in present for parameter in reduced_parameters(ddp)):
        return "parameters were replaced since it was made: wrap the module again"
    return None


def reduced_parameters(ddp: Any) -> list[nn.Parameter]:
    """The parameters whose gradients the module's Reducer reduces, whatever was frozen since."""
    try:
        # Only in copies of its buckets does a Reducer tell what it was made with.
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # a bucket of sparse gradients, before the first step
        parameters: list[nn.Parameter] = ddp._build_params_for_reducer()[0]
        return parameters
    return [parameter for bucket in buckets for parameter in bucket.parameters()]


def num_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """How large their gradients are."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def rebuild(ddp: Any, parameters: Sequence[nn.Parameter], layout: Layout | None = None) -> None:
    """Make the module's Reducer anew, on every rank, between two steps.

    See NOTE [Rebuilding the Reducer].

    Args:
        ddp: a module that `why_fixed` says nothing about.
        parameters: its `reduced_parameters`.
        layout: its bucket sizes from now on; default: as they are.
    """
    ddp._remove_autograd_hooks()
    # The old buckets go before the new ones come.
    ddp.reducer = ddp.logger = None
    with requiring_gradients(ddp, parameters), _sizes(ddp, layout):
        ordered, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(ordered)
        ddp._ddp_init_helper(ordered, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        # In its first step it learns the graph and reduces at the end.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(ddp.reducer, state, hook)
    ddp._has_rebuilt_buckets = False


@contextlib.contextmanager
def requiring_gradients(ddp: Any, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Have these parameters of the module require gradients, and no others."""
    wanted = set(parameters)
    others = [
        parameter
        for parameter in ddp.parameters()
        if parameter.requires_grad != (parameter in wanted)
    ]
    for parameter in others:
        parameter.requires_grad_(parameter in wanted)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(parameter not in wanted)


@contextlib.contextmanager
def _sizes(ddp: Any, layout: Layout | None) -> Iterator[None]:
    """Have `_ddp_init_helper` use these sizes."""
    default_first = dist._DEFAULT_FIRST_BUCKET_BYTES
    if layout is not None:
        ddp.bucket_bytes_cap = layout.others
        ddp.bucket_bytes_cap_default = layout.first < layout.others
        if hasattr(ddp, "_bucket_config"):
            ddp._bucket_config = dataclasses.replace(
                ddp._bucket_config,
                bucket_bytes_cap=layout.others,
                first_bucket_bytes_cap=layout.first,
            )
        else:  # torch without that record has one first size for all modules
            dist._DEFAULT_FIRST_BUCKET_BYTES = layout.first
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = default_first
