"""Kernels swapped in for a model's own: where they compute the same, and only while they pay.

A `KernelPlace` is where something may be swapped (all RMSNorms of a size, the loss, the optimizer),
a `Kernel` what may come there. Both are found in registries, one file each in
`deepytorch_core/nn/swaps`. A kernel is tried on a copy of the place, forward and backward, never on
the model itself: `deepytorch_core.guard` compares results and times on all ranks, and what it keeps
is applied to the model. Everything can be undone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.base import decisions
from deepytorch_core.guard import Candidate, Trial
from deepytorch_core.nn import swaps

STOCK = guard.STOCK
# Trials of one place.
BUDGET_S = 10.0

Undo = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class KernelSetting:
    """The conditions that a training runs with.

    Args:
        model: before it is wrapped, sharded or moved.
        optimizers: those of torch among them are considered.
        device: where the model will train.
        autocast: the dtype of mixed precision, if there is any.
        mode: see `apply_kernels`, which sets it.
    """

    model: nn.Module
    optimizers: Sequence[Any] = ()
    device: torch.device
    autocast: torch.dtype | None = None
    mode: str = "auto"

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """As the training computes: under its autocast."""
        kind = self.device.type
        with torch.autocast(kind, dtype=self.autocast, enabled=self.autocast is not None):
            yield


@dataclass(frozen=True)
class KernelProbe:
    """A copy to try kernels on.

    Args:
        module: its parameters' gradients are compared.
        target: what a kernel is applied to, as it is applied to a place's targets.
        run: forward and backward, the same each time; returns what else is compared.
        clock: as `guard.Trial` has it.
    """

    module: nn.Module
    target: Any
    run: Callable[[], Any]
    clock: Callable[[Callable[[], object], guard.Ranks], guard.Clock] | None = None


@dataclass(frozen=True, kw_only=True)
class KernelPlace:
    """A place where a kernel may come in.

    Args:
        kind: kernels of this kind are considered.
        what: its name in reports.
        targets: what a kernel is applied to.
        probe: makes a copy on the training's device; collective calls are not allowed in it.
        saves_memory: kernels here take so much less memory that equal speed is enough.
        facts: what a decision depends on beside the probe's structure, in JSON's types.
    """

    kind: str
    what: str
    targets: tuple[Any, ...]
    probe: Callable[[], KernelProbe]
    saves_memory: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


class Kernel(ABC):
    """One way to compute what a place does."""

    kind: str
    name: str

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        """Why it can't serve here, or None; asks nothing that takes time."""
        return None

    @abstractmethod
    def apply(self, target: Any, setting: KernelSetting) -> Undo:
        """Put it in; returns what takes it out again. May raise and leave nothing behind."""


Finder = Callable[[KernelSetting], Iterable[KernelPlace]]
_finders: dict[str, Finder] = {}
_kernels: dict[str, Kernel] = {}

_KernelClass = TypeVar("_KernelClass", bound=type[Kernel])


def register_place(kind: str) -> Callable[[Finder], Finder]:
    """A decorator: the function finds the places of this kind in a setting."""

    def keep(find: Finder) -> Finder:
        _finders[kind] = find
        return find

    return keep


def register_kernel(kernel: _KernelClass) -> _KernelClass:
    """A decorator of Kernel's subclasses; the first of a kind is preferred with kernels=on."""
    _kernels[f"{kernel.kind}/{kernel.name}"] = kernel()
    return kernel


class Swapped:
    """The kernels in place; `undo` takes all of them out."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._undo = contextlib.ExitStack()

    def add(self, place: KernelPlace, kernel: Kernel, setting: KernelSetting) -> None:
        for target in place.targets:
            self._undo.callback(kernel.apply(target, setting))
        self.names[place.what] = kernel.name

    def undo(self) -> None:
        """Put everything back, the last change first. A second call does nothing."""
        self._undo.close()
        self.names.clear()


def apply_kernels(setting: KernelSetting, mode: str = "auto") -> Swapped:
    """Find the places of a setting, and swap in what is exact and pays.

    The choice is this rank's own. The model is not run and no random number of the training's is
    drawn.

    Args:
        setting: see there.
        mode: "auto" keeps what is measured faster than stock; "on" the first exact kernel,
            without measuring; "off" nothing.

    Returns what is in place now, with its `undo`.
    """
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"kernels={mode!r}: expected auto, on or off")
    swapped = Swapped()
    if mode == "off":
        return swapped
    swaps.load()
    setting = dataclasses.replace(setting, mode=mode)
    for find in _finders.values():
        for place in find(setting):
            kernels = _able(place, setting)
            if kernels:
                with guard.preserved(nn.Module()):
                    chosen = _chosen(place, kernels, setting, mode)
                if chosen is not None:
                    swapped.add(place, chosen, setting)
    return swapped


def _able(place: KernelPlace, setting: KernelSetting) -> list[Kernel]:
    """The kernels that can serve; the others are reported."""
    able: list[Kernel] = []
    dropped: dict[str, str] = {}
    for kernel in _kernels.values():
        if kernel.kind == place.kind:
            problem = kernel.why_not(place, setting)
            if problem is None:
                able.append(kernel)
            else:
                dropped[kernel.name] = problem
    if not able and dropped:
        reason = "; ".join(f"{name}: {problem}" for name, problem in dropped.items())
        decisions.record(place.what, STOCK, reason)
    return able


def _chosen(
    place: KernelPlace, kernels: list[Kernel], setting: KernelSetting, mode: str
) -> Kernel | None:
    problem, probe = None, None
    try:
        probe = place.probe()
    except Exception as error:  # out of memory, a model of another make
        problem = guard.first_line(error)
    if probe is None:
        decisions.record(place.what, STOCK, f"it can't be tried: {problem}")
        return None
    made = probe

    def run() -> Any:
        with setting.computing():
            return made.run()

    candidates = [_candidate(kernel, probe, setting) for kernel in kernels]
    trial = Trial(
        module=probe.module,
        run=run,
        dtype=setting.autocast,
        budget_s=BUDGET_S,
        clock=probe.clock,
    )
    try:
        if mode == "on":
            name = _first_exact(place, candidates, trial)
        else:
            name = _measured(place, candidates, trial, setting)
    finally:
        # The one that stays is still on the copy, which may mean: in the whole process.
        for candidate in candidates:
            candidate.undo()
    return next((kernel for kernel in kernels if kernel.name == name), None)


def _candidate(kernel: Kernel, probe: KernelProbe, setting: KernelSetting) -> Candidate:
    undos: list[Undo] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    return Candidate(kernel.name, lambda: undos.append(kernel.apply(probe.target, setting)), undo)


def _first_exact(place: KernelPlace, candidates: list[Candidate], trial: Trial) -> str:
    """The first candidate that computes the same; nothing is measured."""
    stock = _results(trial)
    dropped: dict[str, str] = {}
    for candidate in candidates:
        try:
            candidate.apply()
            found = _results(trial)
            problem = guard.difference(stock, found, dtype=trial.dtype, what="output or gradient")
        except Exception as error:  # whatever a kernel may raise
            problem = guard.first_line(error)
        finally:
            candidate.undo()
        if problem is None:
            decisions.record(place.what, candidate.name, "kernels=on", dropped=dropped)
            return candidate.name
        dropped[candidate.name] = problem
    decisions.record(place.what, STOCK, "no kernel computes the same", dropped=dropped)
    return STOCK


def _results(trial: Trial) -> tuple[Any, list[torch.Tensor | None]]:
    with guard.preserved(trial.module), guard.dropout_off(trial.module):
        outputs = trial.run()
        return outputs, [parameter.grad for parameter in trial.module.parameters()]


def _measured(
    place: KernelPlace, candidates: list[Candidate], trial: Trial, setting: KernelSetting
) -> str:
    facts = {
        "autocast": str(setting.autocast),
        "device": setting.device.type,
        "kernels": [candidate.name for candidate in candidates],
        **place.facts,
    }
    prefer = "takes less memory" if place.saves_memory else None
    return guard.choose(place.what, candidates, trial, facts=facts, prefer=prefer).chosen
