"""Registered or ordinary buffers for FSDP2: measured in the job's own first training steps.

Every step uses one kind throughout, the next step the other. A step's time is what its all_gather
and reduce_scatter calls take, from asking for the buffer to the end of the collective. So it
includes the copy into the buffer, and sizes are the job's real ones. The bits are the same either
way.

The reduce_scatter of the first unit ends a step. Every rank comes to it in the same order, so the
ranks decide there together. They need no message of their own beyond the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as stock

from deepytorch.integrations.common import groups as _groups
from deepytorch_core.guard import timing

# Buffers are new, and memory is mapped, in the first steps of each kind.
WARM_UP_STEPS = 4
MEASURED_STEPS = 16

REGISTERED, ORDINARY = "registered", "ordinary"
_KINDS = (REGISTERED, ORDINARY)

Decided = Callable[[bool, dict[str, float]], None]


class RegistrationTrial:
    """Measures on all `units` from `start` on, then calls `decided(registered, medians in ms)`.

    Args:
        units: FSDP2's parameter groups on the CPU, each sharded over several ranks.
        groups: the process groups whose ranks decide together.
        decided: told on every rank at the same point; replaces the units' communication.
    """

    def __init__(self, units: Sequence[Any], groups: Sequence[Any], decided: Decided) -> None:
        self._units = units
        self._groups = groups
        self._decided = decided
        self._times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        self._step = 0
        self._spent_s = 0.0

    @property
    def kind(self) -> str:
        """The kind of buffer that this step uses."""
        return _KINDS[self._step % len(_KINDS)]

    def start(self) -> None:
        for unit in self._units:
            unit._all_gather_comm = _AllGather(self, unit._all_gather_process_group)
            unit._reduce_scatter_comm = _ReduceScatter(
                self, unit._reduce_scatter_process_group, is_last=unit is self._units[0]
            )

    def add(self, seconds: float) -> None:
        self._spent_s += seconds

    def end_step(self, device: torch.device) -> None:
        if self._step >= WARM_UP_STEPS:
            self._times[self.kind].append(self._spent_s)
        self._spent_s = 0.0
        self._step += 1
        if self._step == WARM_UP_STEPS + MEASURED_STEPS:
            self._decide(device)

    def _decide(self, device: torch.device) -> None:
        rows = _groups.slowest([self._times[kind] for kind in _KINDS], self._groups, device)
        times = dict(zip(_KINDS, rows, strict=True))
        ordinary = timing.is_faster(times[ORDINARY], times[REGISTERED])
        self._decided(not ordinary, timing.in_ms(times))


class _Timed:
    """Allocates a step's kind of buffer; its time runs from the first one to `done`."""

    def __init__(self, trial: RegistrationTrial, kinds: dict[str, Any]) -> None:
        self._trial = trial
        self._kinds = kinds
        self._began: float | None = None

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._began is None:
            self._began = time.perf_counter()
        made: torch.Tensor = self._kinds[self._trial.kind].allocate(*args, **kwargs)
        return made

    def done(self) -> None:
        if self._began is not None:
            self._trial.add(time.perf_counter() - self._began)
            self._began = None


# It derives from the default class, so that torch lets either kind replace it at the end.
class _AllGather(_Timed, stock.DefaultAllGather):
    def __init__(self, trial: RegistrationTrial, group: Any) -> None:
        kinds = {
            REGISTERED: stock.ProcessGroupAllocAllGather(group),
            ORDINARY: stock.DefaultAllGather(),
        }
        super().__init__(trial, kinds)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> None:
        # Not asynchronous while it is timed.
        stock.DefaultAllGather.__call__(self, output_tensor, input_tensor, group)
        self.done()


class _ReduceScatter(_Timed, stock.DefaultReduceScatter):
    def __init__(self, trial: RegistrationTrial, group: Any, *, is_last: bool) -> None:
        kinds = {
            REGISTERED: stock.ProcessGroupAllocReduceScatter(group),
            ORDINARY: stock.DefaultReduceScatter(),
        }
        super().__init__(trial, kinds)
        self._is_last = is_last

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        stock.DefaultReduceScatter.__call__(self, output_tensor, input_tensor, group, op)
        self.done()  # FSDP2 has no use for a reduce_scatter's work
        if self._is_last:
            self._trial.end_step(output_tensor.device)
