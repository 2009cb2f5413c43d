"""DDP's bucket sizes, measured on the live job: every candidate trains a few of its steps.

A step is timed from the first forward pass after a reduction to the first one after the next. The
time has everything in it, so overlap counts as it is. Steps that validation came into don't count.
The best candidate is measured again, and the sizes that the job came with too; it stays only if it
beats both measurements of those beyond the noise. All ranks decide from the same numbers: the
slowest rank's.

Ranks keep in step by counting reductions, of which every rank has the same number, whatever forward
passes it has. Under DDP's join context the numbers may differ, and torch never says that the
context is over. So the context ends the measurement, on every rank where it is made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepytorch.integrations.common import groups
from deepytorch_core.base import decisions
from deepytorch_core.guard import timing

from . import buckets
from .buckets import MIB, Layout

# A new Reducer's first step has preliminary buckets, its second one new memory.
WARM_UP_STEPS = 2
MEASURED_STEPS = 6

WHAT = "DDP buckets"


def candidates(gradient_bytes: int, base: Layout) -> list[Layout]:
    """Layouts to try beside `base` for a module with so many bytes of gradients."""
    tried = {_effective(base, gradient_bytes)}
    found = []
    for others in (4 * MIB, 16 * MIB, 64 * MIB, gradient_bytes):
        for first in (1 * MIB, others):
            layout = _effective(Layout(min(first, others), others), gradient_bytes)
            if layout not in tried:
                tried.add(layout)
                found.append(layout)
    return found


def _effective(layout: Layout, gradient_bytes: int) -> Layout:
    """Sizes above what there is mean the same: everything in one bucket."""
    return Layout(min(layout.first, gradient_bytes), min(layout.others, gradient_bytes))


class BucketTuning:
    """A forward pre-hook of a DistributedDataParallel; takes itself away when it has decided.

    Args:
        ddp: a module that `buckets.why_fixed` says nothing about.
        layouts: the candidates.
    """

    def __init__(self, ddp: Any, layouts: list[Layout]) -> None:
        self._base = buckets.layout_of(ddp)
        self._parameters = buckets.reduced_parameters(ddp)
        # Blocks of steps: a layout, and its times in seconds.
        self._blocks: list[tuple[Layout, list[float]]] = [
            (layout, []) for layout in (self._base, *layouts)
        ]
        self._is_second_round = False
        self._block = 0
        self._step = 0
        self._began: float | None = None
        self._is_whole = True  # nothing but training since then
        self._is_training = True  # the module's mode then
        with buckets.requiring_gradients(ddp, self._parameters):  # as a hook wants it
            self._gradients = _Gradients(self._parameters)
        self._in_use = self._base
        self._handle = ddp.register_forward_pre_hook(self)
        ddp.join_hook = _JoinHook(self, ddp)

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()  # a copy of the module is not measured

    def undo(self, ddp: Any) -> None:
        """Stop measuring, and give the module its own sizes back."""
        self._stop(ddp, self._base)

    def join(self, ddp: Any) -> None:
        """The same, because ranks may have different numbers of steps from now on."""
        self._stop(ddp, self._base)
        decisions.record(WHAT, str(self._base), "measuring ended where a join context began")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, ddp: Any, inputs: Any) -> None:
        with_gradients = torch.is_grad_enabled()
        if with_gradients and ddp.require_backward_grad_sync:
            self._on_pass(ddp)
        # A module whose mode changes within a step is validated in it.
        if not with_gradients or ddp.training != self._is_training:
            self._is_whole = False

    def _on_pass(self, ddp: Any) -> None:
        if self._began is not None and not self._gradients.have_come:
            return
        self._gradients.have_come = False
        if ddp.device.type != "cpu":
            torch.accelerator.synchronize()
        if self._began is not None:
            taken = time.perf_counter() - self._began
            self._end_step(ddp, taken if self._is_whole else math.inf)
        self._began, self._is_whole = time.perf_counter(), True
        self._is_training = ddp.training

    def _end_step(self, ddp: Any, seconds: float) -> None:
        self._step += 1
        _, times = self._blocks[self._block]
        if self._step > WARM_UP_STEPS:
            times.append(seconds)
        if len(times) == MEASURED_STEPS:
            self._end_block(ddp)

    def _end_block(self, ddp: Any) -> None:
        self._step = 0
        self._block += 1
        if self._block < len(self._blocks):
            self._use(ddp, self._blocks[self._block][0])
            return
        rows = groups.slowest([row for _, row in self._blocks], [ddp.process_group], ddp.device)
        layout = self._best(rows)
        if layout == self._base or self._is_second_round:
            self._finish(ddp, layout, rows)
            return
        self._is_second_round = True
        self._blocks += [(layout, []), (self._base, [])]
        self._use(ddp, layout)

    def _best(self, rows: list[list[float]]) -> Layout:
        if self._is_second_round:
            wins = all(timing.is_faster(rows[-2], base) for base in (rows[0], rows[-1]))
            return self._blocks[-2][0] if wins else self._base
        best = min(range(len(rows)), key=lambda index: timing.median(rows[index]))
        wins = timing.is_faster(rows[best], rows[0])
        return self._blocks[best][0] if wins else self._base

    def _use(self, ddp: Any, layout: Layout) -> None:
        if layout != self._in_use:
            buckets.rebuild(ddp, self._parameters, layout)
            self._in_use = layout

    def _stop(self, ddp: Any, layout: Layout) -> None:
        self._handle.remove()
        self._gradients.stop()
        vars(ddp).pop("join_hook", None)
        self._use(ddp, layout)

    def _finish(self, ddp: Any, layout: Layout, rows: list[list[float]]) -> None:
        self._stop(ddp, layout)
        # The second time counts for a layout that was measured twice.
        times = {
            str(candidate): row for (candidate, _), row in zip(self._blocks, rows, strict=True)
        }
        reason = "nothing is faster" if layout == self._base else f"faster than {self._base}"
        decisions.record(WHAT, str(layout), reason, times_ms=timing.in_ms(times))


class _Gradients:
    """Whether one has come, of parameters that are reduced; a hook of each.

    DDP reduces all when the first comes after a forward pass that is not in `no_sync`. One of them
    alone would not tell: this rank may not use it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.have_come = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def __call__(self, parameter: torch.Tensor) -> None:
        self.have_come = True

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


class _JoinHook:
    """Stands before the module's own `join_hook` while it is measured."""

    def __init__(self, tuning: BucketTuning, ddp: Any) -> None:
        self._tuning = tuning
        self._ddp = ddp

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._ddp, "join_hook")  # the class's, in a copy of the module

    def __call__(self, **kwargs: Any) -> Any:
        self._tuning.join(self._ddp)
        return self._ddp.join_hook(**kwargs)


class _Inert:
    """Stands for the hook in a copy of the module, and does nothing."""

    def __call__(self, ddp: Any, inputs: Any) -> None:
        return None
