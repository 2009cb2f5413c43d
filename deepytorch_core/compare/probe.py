"""Watches a training script from inside, and stops it after a number of optimizer steps.

Nothing waits for the device except at the ends of blocks of steps. A step is an optimizer's step
after a backward: optimizers that step once for each of their shards count as one, as do the
micro-batches of gradient accumulation.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from deepytorch_core import config, memory
from deepytorch_core.compare import workspace
from deepytorch_core.compare.plan import Plan
from deepytorch_core.compare.saves import Saves
from deepytorch_core.patching import Patches

PROGRESS = "progress.json"
"""In the plan's folder: rank 0's block times so far, in seconds."""

# How long ranks wait for each other at the end, and then for the interpreter to come down.
_FAREWELL_S = 10.0
_EXIT_S = 30.0
# A script that catches SystemExit goes on; it is told again at its next steps.
_MAX_REQUESTS = 3
# Who runs backward and steps of its own, to try something out on saved or made-up inputs.
_TRIALS = (
    *("deepytorch_core.guard", "deepytorch_core.nn", "deepytorch_core.compile"),
    *("deepytorch_core.data", "deepytorch.integrations._"),
)


class Finished(SystemExit):
    """The script has taken its steps."""

    def __init__(self) -> None:
        super().__init__(0)


class Probe:
    """Counts steps, keeps losses and the times of blocks; `install` before the script starts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = time.perf_counter()
        self._marks: dict[int, float] = {}
        self._losses: list[list[Any]] = []
        self._since_step: list[Any] = []
        self._steps = 0
        self._requests = 0
        self._backwards = 0
        self._backwards_at_step = 0
        self._unscaled: tuple[weakref.ref[Any], Any] | None = None
        self._wanted = {plan.warmup, *plan.block_ends}
        self._patches = Patches()
        self._saves = Saves(plan)
        self._is_written = False
        self.seams: list[str] = []

    def install(self) -> None:
        """Seed, and hook into torch."""
        random.seed(self._plan.seed)
        torch.manual_seed(self._plan.seed)
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.seed(self._plan.seed)
        self._patches.replace(torch.autograd, "backward", self._watched_backward)
        for scaler in {torch.amp.GradScaler, torch.cuda.amp.GradScaler}:
            if "scale" in vars(scaler):
                self._patches.replace(scaler, "scale", self._watched_scale)
        register_optimizer_step_post_hook(self._stepped)
        self._saves.install()

    def finish(self) -> None:
        """Write what was measured, for the process that compares; the script is over."""
        if self._is_written:
            return
        self._is_written = True
        _synchronize()
        losses = [_total(values) for values in self._losses]
        found = {
            "steps": self._steps,
            "is_complete": self._steps >= self._plan.steps,
            "setup_s": self._marks.get(self._plan.warmup, self._began) - self._began,
            "block_s": self._block_s(),
            "losses": losses,
            "peak_bytes": memory.peak_bytes(),
            "device": _device_name(),
            "redirected": sorted(self._saves.redirected),
            "made_folders": self._saves.made_folders,
            "seams": self.seams,
            "report": _report(),
            "undecided": _undecided(self._steps),
            **_tuned(self._plan),
        }
        folder = Path(self._plan.folder)
        draft = folder / f".rank{config.rank()}.json"
        draft.write_text(json.dumps(found), encoding="utf-8")
        draft.replace(folder / f"rank{config.rank()}.json")
        # Nobody takes the rendezvous store or a connection away from one that still needs it.
        until = time.monotonic() + _FAREWELL_S
        while len(list(folder.glob("rank*.json"))) < config.world_size():
            if time.monotonic() > until:
                break
            time.sleep(0.01)

    def _block_s(self) -> list[float]:
        ends = [self._plan.warmup, *self._plan.block_ends]
        pairs = zip(ends, ends[1:], strict=False)
        return [
            (self._marks[last] - self._marks[first]) / (last - first)
            for first, last in pairs
            if last in self._marks
        ]

    def _watched_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_trial():
                return original(tensors, *args, **kwargs)
            self._backwards += 1
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                known = self._unscaled
                value = known[1] if known is not None and known[0]() is tensors else None
                self._since_step.append(tensors.detach().clone() if value is None else value)
            return original(tensors, *args, **kwargs)

        return backward

    def _watched_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            scaled = original(scaler, outputs, *args, **kwargs)
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                self._unscaled = (weakref.ref(scaled), outputs.detach().clone())
            return scaled

        return scale

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._requests:
            self._leave()
            return
        if _is_trial():
            return
        if self._backwards and self._backwards == self._backwards_at_step:
            return  # another shard of the same step
        self._backwards_at_step = self._backwards
        self._steps += 1
        self._losses.append(self._since_step)
        self._since_step = []
        if self._steps in self._wanted:
            _synchronize()
            self._marks[self._steps] = time.perf_counter()
            if self._plan.settings is not None:
                self._tell_progress()
        if self._steps >= self._plan.steps:
            self._leave()

    def _tell_progress(self) -> None:
        """What rank 0 has measured so far, for who watches this run."""
        if config.rank() == 0:
            folder = Path(self._plan.folder)
            draft = folder / ".progress"
            draft.write_text(json.dumps(self._block_s()), encoding="utf-8")
            draft.replace(folder / PROGRESS)

    def _leave(self) -> None:
        self.finish()
        self._requests += 1
        if self._requests > _MAX_REQUESTS or (
            threading.current_thread() is not threading.main_thread()
        ):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        # What the script does on its way out must end, too.
        backstop = threading.Timer(_EXIT_S, os._exit, (0,))
        backstop.daemon = True
        backstop.start()
        raise Finished


def watch(probe: Probe, run: Callable[[], None]) -> None:
    """Run the script, from its start to its last step or its own end."""
    probe.install()
    try:
        run()
    except SystemExit as left:
        if left.code:
            raise
    probe.finish()


def _is_trial() -> bool:
    """Whether deepytorch itself, not the script, makes the call under way."""
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_TRIALS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _synchronize() -> None:
    for index in memory.gpus():
        torch.cuda.synchronize(index)


def _device_name() -> str:
    devices = memory.gpus()
    return torch.cuda.get_device_name(devices[0]) if devices else "cpu"


def _total(values: list[Any]) -> float | None:
    """The loss of a step: the sum of what backward was called on; None if it was not seen."""
    if not values:
        return None
    try:
        return float(sum(float(getattr(one, "to_local", lambda one=one: one)()) for one in values))
    except (RuntimeError, TypeError, ValueError):
        return None


def _tuned(plan: Plan) -> dict[str, Any]:
    """Which script this is, and what `deepytorch tune` could set in its frameworks."""
    from deepytorch_core.tune import in_force, start

    asked = {name: vars(one) for name, one in in_force.asked().items()}
    script = start.script()
    if script:
        script = workspace.original(script, plan.workspace)
    return {"script": script, "asked": asked}


def _undecided(steps: int) -> list[dict[str, Any]]:
    """The trials that the steps were too few for, and how many steps are enough."""
    engine = sys.modules.get("deepytorch_core.compile")
    if engine is None:  # nothing is compiled
        return []
    return [
        {
            "what": trial.what,
            "is_begun": trial.is_begun,
            # In optimizer steps; the trial counts each micro-batch of a step.
            "after_steps": math.ceil(trial.last_step * steps / max(trial.step, 1)),
        }
        for trial in engine.trials()
    ]


def _report() -> dict[str, Any]:
    from deepytorch_core.report import report

    found = report()
    return {
        "native_calls": found.native_calls,
        "delegated_calls": found.delegated_calls,
        "decisions": [str(line) for line in str(found).splitlines() if "decision:" in line],
    }
