"""Whether a model's passes are replayed as CUDA graphs: found out in the training's own steps.

After compiling is settled, steps that launch and steps that replay take turns, as there. The way
that is faster beyond the noise, with as many tokens, stays. Ranks decide alike, from the slowest
one's times.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.base import config, console, decisions
from deepytorch_core.compile import capture, policies, regions, turns
from deepytorch_core.compile.asking import Asking
from deepytorch_core.compile.capture import Capture
from deepytorch_core.guard.recorder import Recorder

LAUNCHED = "launched"
REPLAYED = "replayed"
TRUNK = "trunk"  # of an earlier run, in the profile: the whole can't be replayed, its trunk may be
FROM_PROFILE = "from the profile"
_OF_ENTRIES = ("chosen", "reason", "times_ms")
REASONS = {
    turns.FASTER: "faster than launched",
    turns.SLOWER: "launched is faster",
    turns.UNDECIDED: turns.UNDECIDED,
}
# Steps in which kinds of calls are captured, before times are taken.
CAPTURING_STEPS = 14

# A run shorter than this ends soon after it is known whether graphs are worth it.
LEAST_STEPS = 100


def is_wanted(policy: str, device: torch.device, *, steps: int | None) -> bool:
    """Whether a model's passes are to be tried as CUDA graphs.

    Args:
        policy: the model's, or "auto".
        device: where it trains.
        steps: how many training steps the run has, if known.
    """
    is_long = steps is None or steps >= LEAST_STEPS
    is_on = config.current().cuda_graphs == policies.AUTO
    if not (is_on and is_long and device.type == Recorder.kind):
        return False
    return policy == policies.AUTO or policies.get(policy).is_replayed


class GraphTrial:
    """One model's trial.

    Args:
        root: the model inside its wrappers.
        tokens: what a step's time is divided by, asked after the step.
        switch: told before each step whether it may be replayed.
        variant: which way passes go; see `Capture`.
        readiness: whether the code of passes stays what it is; see `Capture`.
        is_provisional: whether it is only for now, and decided again later: nobody is told, but
            the next run knows from its first steps on.
        ranks: that decide together, by the name of the decision.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        tokens: Callable[[], int],
        switch: Callable[[bool], None] = lambda is_on: None,
        variant: Callable[[], Hashable] = lambda: None,
        is_provisional: bool = False,
        readiness: capture.Readiness | None = None,
        ranks: Callable[[str], guard.Ranks] = guard.Ranks,
    ) -> None:
        self.is_settled = False
        self.is_paused = False
        """Whether steps are launched for now, whatever was decided; see `pause`."""
        self._switch = switch
        self._variant = variant
        self._is_provisional = is_provisional
        self._readiness = readiness
        self._whole = root
        self._tokens = tokens
        self._take(root)
        self._trunk = regions.trunk(root)
        self._ranks = ranks
        self._asking = Asking()
        self._capture: Capture | None = None
        self._on = False
        self._number = -1
        self._began: float | None = None
        self._num_captured = 0
        self._samples = turns.Samples()
        self._entry: dict[str, Any] = {}  # what was decided, as the profile has it

    def _take(self, root: nn.Module) -> None:
        """Try it with that module's passes."""
        self._root = root
        self._what = _name(root)

    @property
    def is_replayed(self) -> bool:
        """Whether that is what was decided, and can still be done.

        One rank of several goes on by what all have decided.
        """
        return self.is_settled and self._on and self._failure() is None

    def _failure(self) -> str | None:
        """Why passes can't be replayed any more; None also where all ranks have to be asked."""
        failure = None if self._capture is None else self._capture.failure
        return failure if failure is not None and self._ranks(self._what).size == 1 else None

    @property
    def is_measured(self) -> bool:
        """Whether it is beyond the steps in which kinds of calls are captured."""
        return self._number >= CAPTURING_STEPS

    @property
    def num_captured(self) -> int:
        """How many kinds of calls were captured."""
        return 0 if self._capture is None else self._capture.num_captured

    def replays(self, variant: Hashable) -> bool:
        """Whether some kind of call is replayed that way; it need not be what was decided."""
        return self._capture is not None and self._capture.replays(variant)

    def confirm(self) -> None:
        """Let replays stay that were decided for a while, with the graphs that there are."""
        self._is_provisional = self.is_paused = False
        times_ms = self._entry["times_ms"]
        decisions.record(self._what, REPLAYED, self._entry["reason"], times_ms=times_ms)
        num_ranks = self._ranks(self._what).size
        if self._root is not self._whole:
            why = f"{type(self._root).__name__} in it is"
            self._keep(num_ranks, self._whole, {"chosen": TRUNK, "reason": why, "times_ms": {}})
        self._keep(num_ranks, self._root, self._entry)

    def start_anew(self) -> None:
        """Find out again, for good and with the graphs that there are."""
        self._is_provisional = self.is_paused = self.is_settled = False
        self._number, self._samples = CAPTURING_STEPS - 1, turns.Samples()

    def pause(self, is_paused: bool) -> None:
        """Have steps launched for now, whatever was decided, or go on.

        Steps between two calls of `on_forward` are of no turn, so their time tells nothing.
        """
        self.is_paused = is_paused
        self._began = None

    def undo(self) -> None:
        """Give the model everything back."""
        self._use(False)
        if self._capture is not None:
            self._capture.remove()
            self._capture = None
        self.is_settled = True

    def on_forward(self, is_whole: bool) -> None:
        """Called before each forward pass with gradients, until it is settled.

        `is_whole`: whether nothing else has run since the last one.
        """
        try:
            if not self._asking.is_open:
                if self._number >= 0:
                    self._sample(is_whole)
                self._number += 1
                self._ask()
            self._asking.hear()
        except guard.RankMissing as error:
            self._finish(LAUNCHED, str(error))
        if not (self.is_settled or self._asking.is_open):
            measured = self._number - CAPTURING_STEPS
            self._use(measured < 0 or turns.is_candidates(measured))
        self._began = time.perf_counter()

    def _ask(self) -> None:
        """Ask all ranks, where a step can't go on as planned without their answers."""
        measured = self._number - CAPTURING_STEPS
        if self._number == 0:
            self._begin()
        elif (failure := self._failure()) is not None:
            self._fail(failure)
        elif turns.is_look(measured):
            self._look(is_last=turns.is_last_look(measured))

    def _sample(self, is_whole: bool) -> None:
        device = next(self._root.parameters()).device
        guard.synchronize(device)
        seconds = math.inf if self._began is None else time.perf_counter() - self._began
        captured = self.num_captured
        was_replayed = self._capture is not None and self._capture.was_replayed
        # Nor does a step tell anything in which a pass was to be replayed that has no graph yet.
        if not is_whole or captured != self._num_captured or was_replayed != self._on:
            seconds = math.inf
        self._num_captured = captured
        if turns.is_counted(self._number - CAPTURING_STEPS):
            self._samples.add(self._on, seconds, max(1, self._tokens()))

    def _begin(self) -> None:
        ranks = self._ranks(self._what)
        known = None
        if config.current().tune != "force":
            known = guard.profile.find(self._key(ranks.size, self._root))
        self._entry = {name: known[name] for name in _OF_ENTRIES} if known else {}
        own = (known and known["chosen"], capture.why_not(self._root))
        self._asking.ask(ranks.ask("start", own), self._start)

    def _start(self, answers: list[Any]) -> None:
        chosen = answers[0][0]
        problem = guard.first_of([why for _, why in answers])
        if chosen == LAUNCHED:
            self._finish(LAUNCHED, FROM_PROFILE)
        elif problem is not None:
            self._fail(problem)
        elif chosen == TRUNK:
            self._fail(FROM_PROFILE)
        elif chosen is None and guard.why_not_measured() is not None:
            self._finish(LAUNCHED, f"not measured: {guard.why_not_measured()}")
        else:
            self._capture = Capture(
                self._root,
                is_on=lambda: self._on and not self.is_paused,
                variant=self._variant,
                is_quiet=self._is_provisional or self._trunk is not None,
                whole=self._whole,
                readiness=self._readiness,
            )
            self._capture.install()
            if chosen == REPLAYED:
                self._finish(REPLAYED, FROM_PROFILE)

    def _key(self, world_size: int, root: nn.Module) -> dict[str, Any]:
        facts = {"module": guard.fingerprint(root)}
        what = f"{_name(root)}, for a while" if self._is_provisional else _name(root)
        return guard.profile.key(what, facts, world_size=world_size)

    def _look(self, *, is_last: bool) -> None:
        assert self._capture is not None
        question = self._ranks(self._what).ask(
            f"times {self._number}", (self._samples.rows(), self._capture.problem)
        )
        self._asking.ask(question, functools.partial(self._judge, is_last=is_last))

    def _judge(self, answers: list[Any], *, is_last: bool) -> None:
        problem = guard.first_of([why for _, why in answers])
        if problem is not None:
            self._fail(problem)
            return
        launched, replayed = self._samples.merged([rows for rows, _ in answers], is_filtered=True)
        verdict = turns.verdict(launched, replayed, is_last=is_last)
        if verdict is None:
            return
        times_ms = guard.in_ms(
            {way: times for way, times in ((LAUNCHED, launched), (REPLAYED, replayed)) if times}
        )
        chosen = REPLAYED if verdict == turns.FASTER else LAUNCHED
        reason = REASONS[verdict]
        self._finish(chosen, reason, times_ms)
        rounded = {name: round(ms, 4) for name, ms in times_ms.items()}
        self._entry = {"chosen": chosen, "reason": reason, "times_ms": rounded}
        if verdict != turns.UNDECIDED:
            self._keep(len(answers), self._root, self._entry)

    def _keep(self, num_ranks: int, root: nn.Module, entry: dict[str, Any]) -> None:
        if console.global_rank() == 0:
            guard.profile.keep(self._key(num_ranks, root), entry)

    def _fail(self, problem: str) -> None:
        """Go on with the model's trunk, where that was not tried; else passes are launched."""
        trunk, self._trunk = self._trunk, None
        if trunk is None:
            self._finish(LAUNCHED, problem)
            return
        if self._capture is not None and problem == self._capture.failure:
            entry = {"chosen": TRUNK, "reason": problem, "times_ms": {}}
            self._keep(self._ranks(self._what).size, self._root, entry)
        console.say(
            f"{self._what}: {problem}; {type(trunk).__name__} in it is tried", level="debug"
        )
        self._use(False)
        if self._capture is not None:
            self._capture.remove()
            self._capture = None
        self._take(trunk)
        self._number, self._num_captured, self._samples = 0, 0, turns.Samples()
        self._begin()

    def _finish(self, chosen: str, reason: str, times_ms: dict[str, float] | None = None) -> None:
        if not self._is_provisional:
            decisions.record(self._what, chosen, reason, times_ms=times_ms)
        # Steps without graphs took memory before, or graphs and their rehearsals, on their stream.
        is_memory_left = bool(times_ms) or self.num_captured > 0
        if chosen == LAUNCHED:
            self.undo()
        else:
            self._use(True)
        self.is_settled = True
        if is_memory_left:
            torch.cuda.empty_cache()

    def _use(self, is_on: bool) -> None:
        self._on = is_on
        self._switch(is_on)
        capture.use_few_sizes(self._whole, is_on, by="replays")


def _name(root: nn.Module) -> str:
    return f"CUDA graphs of {type(root).__name__}"
