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
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from deepytorch_core.base import config, memory
from deepytorch_core.base.import_hook import ImportHook
from deepytorch_core.base.patching import Patches
from deepytorch_core.compare import workspace
from deepytorch_core.compare.clock import StepClock
from deepytorch_core.compare.nudge import Nudge, drawn, told_apart
from deepytorch_core.compare.plan import UNTIMED_STEPS, Plan
from deepytorch_core.compare.saves import Saves
from deepytorch_core.compare.tokens import TokenCounter

LAST_STEP = "last-step"
"""In the plan's folder: the number of the step after which all ranks end."""
PROGRESS = "progress.json"
"""In the plan's folder: rank 0's block times so far, in seconds."""
STEPPED = "stepped"
"""In the plan's folder, followed by a rank: that one has taken a step."""
OWN_RANKS = "own_ranks"
"""In the plan's folder: processes that the script has started form a process group."""

# How long ranks wait for each other at the end, and then for the interpreter to come down.
_FAREWELL_S = 10.0
# Steps that ranks are apart at most when one of them says which is the last. Each step has a
# collective, so they are one or two apart.
_MOST_APART = 4
_EXIT_S = 30.0
# A script that catches SystemExit goes on; it is told again at its next steps.
_MAX_REQUESTS = 3
# In the metadata of an autograd node: what a GradScaler has scaled there, and the scaler.
_SCALED = "deepytorch_scaled"
# How many nodes away from a backward's root a loss may have been scaled.
_FAR = 32
# These run backward and steps of their own, to try something out on saved or made-up inputs.
_TRIALS = (
    *("deepytorch_core.guard", "deepytorch_core.nn", "deepytorch_core.compile"),
    "deepytorch_core.data",
    *(f"deepytorch.integrations.{name}" for name in ("common", "kernels", "padding_free", "seams")),
    # Not the adapters themselves, whose functions users call.
    *(f"deepytorch.integrations.{name}." for name in ("ddp", "deepspeed", "fsdp", "transformers")),
)
# Its functions stand around the script's own calls, and try nothing out themselves.
_AROUND = "deepytorch.integrations.seams.arm"


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
        self._has_scaled = False
        self._wanted = {plan.warmup, *plan.block_ends}
        self._patches = Patches()
        self._saves = Saves(plan)
        self._is_written = False
        self._nudge = Nudge(is_redrawn=plan.is_redrawn) if plan.is_nudged else None
        self._draws: list[int] = []
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last = plan.steps
        has_clock = plan.is_clocked or plan.is_profiled or plan.seconds
        self._clock = StepClock(seconds=plan.seconds) if has_clock else None
        self._tokens = TokenCounter()
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
            self._watch_scaler(scaler)
        of_fsdp = "torch.distributed.fsdp.sharded_grad_scaler"
        ImportHook(of_fsdp, lambda found: self._watch_scaler(found.ShardedGradScaler)).install()
        register_optimizer_step_post_hook(self._stepped)
        if self._clock is not None:
            self._tokens.install(self._patches)
        self._saves.install()

    @property
    def own_ranks(self) -> str:
        """The file that ranks which the script starts itself leave as a mark."""
        return str(Path(self._plan.folder) / OWN_RANKS)

    @property
    def has_stepped(self) -> bool:
        """Whether this process trains, so that those which it starts from now on are no ranks."""
        return self._steps > 0

    def finish(self) -> None:
        """Write what was measured, for the process that compares; the script is over."""
        if self._is_written:
            return
        self._is_written = True
        _synchronize()
        losses = [_total(values) for values in self._losses]
        found = {
            "steps": self._steps,
            "is_complete": self._steps >= self._last,
            "setup_s": self._marks.get(self._plan.warmup, self._began) - self._began,
            "block_s": self._block_s(),
            "losses": losses,
            "draws": self._draws,
            "weights": told_apart(self._optimizers),
            "peak_bytes": memory.peak_bytes(),
            "device": _device_name(),
            "redirected": sorted(self._saves.redirected),
            "made_folders": self._saves.made_folders,
            "seams": self.seams,
            "report": _report(),
            "undecided": _undecided(self._steps),
            "clock": None if self._clock is None else self._clocked(self._clock),
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

    def _clocked(self, clock: StepClock) -> dict[str, Any]:
        """Return what the clock found, and the tokens of the steps that it timed."""
        micro_batches = round(self._backwards / max(1, self._steps))
        counted = self._tokens.of_steps(clock.timed_steps(), micro_batches)
        tokens = None if counted is None or not counted.tokens else vars(counted)
        return {**clock.record(), "tokens": tokens}

    def _block_s(self) -> list[float]:
        if self._clock is not None and not self._plan.is_profiled:
            return self._clock.timed_s()
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
            if self._nudge is not None:
                self._nudge.see(tensors)
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self._since_step.append(self._loss_of(tensors))
            return original(tensors, *args, **kwargs)

        return backward

    def _watch_scaler(self, scaler: type) -> None:
        if "scale" in vars(scaler):
            self._patches.replace(scaler, "scale", self._watched_scale)

    def _watched_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            scaled = original(scaler, outputs, *args, **kwargs)
            many = isinstance(outputs, list | tuple)
            for output, its in zip(outputs, scaled, strict=True) if many else [(outputs, scaled)]:
                node = getattr(its, "grad_fn", None)
                if node is not None and its is not output:  # a scaler may be off
                    value = output.detach().clone() if output.numel() == 1 else None
                    node.metadata[_SCALED] = (value, scaler)
                    self._has_scaled = True
            return scaled

        return scale

    def _loss_of(self, root: Any) -> tuple[Any, Any]:
        """Return what a backward begins at and by what it is to be divided, None for nothing."""
        found = _scaling_of(root) if self._has_scaled else None
        if found is None:
            return root.detach().clone(), None
        value, scaler, is_root = found
        if is_root and value is not None:
            return value, None
        # Something else was done to it since. The factor changes in place after the step.
        factor = getattr(scaler, "_scale", None)
        return root.detach().clone(), None if factor is None else factor.detach().clone()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._requests:
            self._leave()
            return
        if _is_trial():
            return
        self._optimizers.add(optimizer)
        if self._nudge is not None:
            self._nudge.after(optimizer)
        if self._backwards and self._backwards == self._backwards_at_step:
            return  # another shard of the same step
        self._backwards_at_step = self._backwards
        self._steps += 1
        if self._steps == 1:
            (Path(self._plan.folder) / f"{STEPPED}{config.rank()}").touch()
        self._has_scaled = False
        self._losses.append(self._since_step)
        self._since_step = []
        self._draws.append(drawn())
        if self._steps in self._wanted:
            _synchronize()
            self._marks[self._steps] = time.perf_counter()
            if self._plan.settings is not None:
                self._tell_progress()
        if self._clock is not None:
            self._note_end(self._clock)
        if self._steps >= self._last:
            self._leave()

    def _note_end(self, clock: StepClock) -> None:
        if self._last == self._plan.steps and self._plan.seconds is not None:
            self._last = min(self._plan.steps, self._last_step(clock) or self._plan.steps)
        clock.stepped(self._last - self._steps)

    def _last_step(self, clock: StepClock) -> int | None:
        """Return the last step of a run whose time is over, the same on all ranks; None before."""
        untimed = UNTIMED_STEPS if self._plan.is_clocked else 0
        if config.world_size() == 1:
            return self._steps + untimed if clock.is_over() else None
        told = Path(self._plan.folder) / LAST_STEP
        if config.rank() == 0 and clock.is_over():
            draft = told.with_suffix(".draft")
            draft.write_text(str(self._steps + _MOST_APART + untimed), encoding="utf-8")
            draft.replace(told)
        return int(told.read_text(encoding="utf-8")) if told.exists() else None

    def _tell_progress(self) -> None:
        """Write what rank 0 has measured so far, for who watches this run."""
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
        # The script's work on its way out must end, too.
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
        name = str(frame.f_globals.get("__name__"))
        if name != _AROUND and name.startswith(_TRIALS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _scaling_of(root: Any) -> tuple[Any, Any, bool] | None:
    """Return what was scaled, by whom, and whether `root` is that; None if nothing nearby was."""
    near = deque([root.grad_fn])
    for number in range(_FAR):
        if not near:
            break
        node = near.popleft()
        if node is None:
            continue
        found = node.metadata.get(_SCALED)
        if found is not None:
            return *found, number == 0
        near.extend(after for after, _ in node.next_functions)
    return None


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
        return sum(
            _number(loss) / (1.0 if factor is None else _number(factor)) for loss, factor in values
        )
    except (RuntimeError, TypeError, ValueError, ZeroDivisionError):
        return None


def _number(tensor: Any) -> float:
    return float(tensor.to_local() if hasattr(tensor, "to_local") else tensor)


def _tuned(plan: Plan) -> dict[str, Any]:
    """Return which script this is, and what `deepytorch tune` could set in its frameworks."""
    from deepytorch_core.tune import in_force, start

    asked = {name: vars(knob) for name, knob in in_force.asked().items()}
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
    from deepytorch_core.base.decisions import is_stock
    from deepytorch_core.report.summary import report

    found = report()
    return {
        "native_calls": found.native_calls,
        "delegated_calls": found.delegated_calls,
        "decisions": [str(line) for line in str(found).splitlines() if "decision:" in line],
        "kept": sum(not is_stock(decision) for decision in found.decisions),
    }
