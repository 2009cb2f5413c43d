"""The work of `deepytorch.compile` on one model, step by step of its training.

`auto`: the first steps run as they are. Then steps with and without compiled code take turns until
one is faster beyond the noise, with as many tokens. Every step is one of the training's own. Ranks
take the same way: they count their forward passes alike, and decide from the slowest rank's times.
None waits for that: steps go on until all have answered (`Ranks.ask`).

Replays of eager passes are tried first, if other processes compile (`ahead`). If they are faster,
compiled code is replayed in the turns, too.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.base import compiler_import, console, decisions
from deepytorch_core.compile import (
    ahead,
    capture,
    cost_model,
    graph_trial,
    late_cache,
    module_state,
    outcome,
    policies,
    reasons,
    regions,
    seam,
    timeouts,
    turns,
    undecided,
)
from deepytorch_core.compile.asking import Asking
from deepytorch_core.compile.graph_trial import GraphTrial
from deepytorch_core.compile.handover import Handover
from deepytorch_core.compile.helping import Helping
from deepytorch_core.compile.kept import Kept
from deepytorch_core.compile.phases import OpenTrial, Phases
from deepytorch_core.compile.policies import AUTO, EAGER
from deepytorch_core.compile.region import CodeReadiness, CompiledRegion, install

EAGER_STEPS = 3
# The first compiles, the next may compile for other sizes, the last is the first at its speed.
COMPILED_STEPS = 3
# Steps in which batches of a few sizes have had each of them, several times.
SIZES_STEPS = 36
# Steps after which it is asked again whether the time has come.
PATIENT_STEPS = 4
# Steps after which it is not waited any more for what is found out about the model.
MOST_WAITING = 2000
_RANKS_LIMIT_S = 120.0
_CODE = "compiled code"  # that wants few sizes


class Compilation:
    """One model's; made by `deepytorch.compile`.

    Args:
        model: the user's.
        policy: "auto", "eager" or a policy's name.
        budget_s: seconds of compiling for each region.
        steps: how many training steps the run has, if known.
        is_patient: whether, in a run of unknown length, nothing is tried before the run has lasted
            long enough for what that takes of it, and no step waits for a compiler.
        group: the ProcessGroup whose ranks train the model together; None: the default one's.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str,
        *,
        budget_s: float,
        steps: int | None,
        is_patient: bool = False,
        group: Any = None,
    ) -> None:
        self.policy = policy
        self.regions: list[CompiledRegion] = []
        self.phases = Phases()
        self._root_of = weakref.ref(regions.unwrapped(model))
        self._what = f"compile of {type(self._root).__name__}"
        self._kept = Kept(self._what, policy)
        self._budget_s = budget_s
        self._group = weakref.ref(group) if group is not None else lambda: None
        self._asking = Asking()
        self._steps = steps
        self._is_patient = is_patient and steps is None
        self._start_at, self._first = 0, EAGER_STEPS  # step that may be compiled
        self._on = self._was_helped = False
        self._helping: Helping | None = None
        self.run_length = cost_model.RunLength()
        self._outlook = cost_model.Outlook()
        self._early: GraphTrial | None = None  # of eager passes, while helpers compile
        self._number = -1  # of the training step
        self._began = time.perf_counter()
        self._is_whole, self._tokens, self._num_made = True, 1, 0
        self._num_settling = 0  # steps until all sizes have their code
        self._samples = turns.Samples()
        self._lower: Callable[[], None] = lambda: None
        self._graph_trial: GraphTrial | None = None
        # Why eager steps are to stay, and times, if replays may turn that round.
        self._open: tuple[str, Mapping[str, float]] | None = None
        self._seam = seam.opened(self._root)
        if self._seam is not None:
            # Before the hooks that pack batches: it decides how.
            self._seam.watcher = self
            late = late_cache.of(self._root, is_on=self._is_used, switch=self._set_on)
            self._seam.around = late

    @property
    def _root(self) -> Any:  # not kept: it is what calls this
        return self._root_of()

    def undo(self) -> None:
        """Give the model everything back; decisions stay in the report and the profile."""
        self._stop()
        for one in (self._graph_trial, self._early):
            if one is not None:
                one.undo()
        self._drop_regions()
        seam.close(self._root, is_around=False)

    def _drop_regions(self) -> None:
        self._on = False
        for region in self.regions:
            region.remove()
        self.regions.clear()

    def _is_used(self) -> bool:
        """Whether the call that begins is compiled, in part, too, or may be replayed."""
        return self._on or self.is_waiting or self._graph_trial is not None or self._is_tried

    def _set_on(self, is_on: bool) -> bool:
        before, self._on = self._on, is_on
        return before

    @property
    def is_settled(self) -> bool:
        """Whether nothing is measured any more."""
        return self._seam is None

    @property
    def trial(self) -> OpenTrial | None:
        """How far the measuring is; None before the first step and where it is settled."""
        if self.is_settled or self._number < 0:
            return None
        if self._graph_trial is not None:
            return OpenTrial(self._what, True, self._number, self._number + 2 * turns.MOST_STEPS)
        first = max(self._first, self._number) if self.is_waiting else self._first
        last = first + self._num_untimed + turns.MOST_STEPS
        return OpenTrial(self._what, bool(self.regions), self._number, last)

    @property
    def is_waiting(self) -> bool:
        """Whether steps run without compiled code while other processes compile."""
        return self._helping is not None

    @property
    def num_made(self) -> int:
        """How many pieces of code and graphs were made so far: new ones take their time."""
        captured = [one.num_captured for one in (self._graph_trial, self._early) if one is not None]
        return sum(one.told.num_compiles for one in self.regions) + sum(captured)

    def on_forward(self, args: Any, kwargs: Any) -> None:
        """Called before each forward pass of the model."""
        if not torch.is_grad_enabled() or (self._number < 0 and module_state.is_lazy(self._root)):
            self._is_whole = False
            return
        if self._graph_trial is not None:
            self._graph_trial.on_forward(self._is_whole)
            if self._graph_trial.is_settled:
                self._on_captured(self._graph_trial.is_replayed)
        else:
            self._on_step()
        self._tokens, self._is_whole = turns.tokens_in(args, kwargs), True
        self.phases.enter(None if self.is_settled else self._phase())

    def _phase(self) -> str:
        """Return the purpose of the step that begins."""
        if self._graph_trial is not None:
            return "trial of CUDA graphs"
        if self._number < self._first:
            return "compiling" if self._on else "eager steps"
        if self._helping is None:
            return "trial of compiled code" if self._measured >= 0 else "compiling"
        if self._on:
            return "giving graphs to helpers"
        if self._helping.is_loading:
            return "taking over what helpers have compiled"
        return "trial of CUDA graphs" if self._is_tried else "waiting for helpers"

    @property
    def _is_tried(self) -> bool:
        """Whether it is found out now if eager passes are faster replayed."""
        return self._early is not None and not self._early.is_settled

    @property
    def _num_untimed(self) -> int:
        """Steps that are compiled, or captured, before times are taken."""
        first = graph_trial.CAPTURING_STEPS if self._is_replaying else COMPILED_STEPS
        return max(first, self._num_settling)

    @property
    def _is_replaying(self) -> bool:
        """Whether eager passes are replayed, and so are the compiled ones in turns with them."""
        return self._early is not None and self._early.is_replayed

    def _ranks(self, what: str = "") -> guard.Ranks:
        """Those of now: a script may end its process group, or make another, meanwhile."""
        return guard.Ranks(what or self._what, limit_s=_RANKS_LIMIT_S, group=self._group())

    def _ask(self, what: str, value: Any, then: Callable[[list[Any]], None]) -> None:
        self._asking.ask(self._ranks().ask(what, value), then)

    def _on_step(self) -> None:
        try:
            if not self._asking.is_open:
                self._count_step()
                self._advance()
            self._asking.hear()
        except guard.RankMissing as error:
            self.give_up(str(error))
        finally:
            self._num_made = self.num_made
            self._began = time.perf_counter()
            self.run_length.note(self._began)

    def _count_step(self) -> None:
        is_waiting = EAGER_STEPS <= self._number < self._first or self._helping is not None
        if (self._on or self.policy == AUTO) and not is_waiting:
            self._sample()
        self._number += 1

    def _sample(self) -> None:
        guard.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        if not self._is_whole or self.num_made != self._num_made:
            seconds = math.inf
        if turns.is_counted(self._number - self._first - self._num_untimed):
            self._samples.add(self._on, seconds, self._trained_tokens())

    def _trained_tokens(self) -> int:
        """Return the number of tokens of the last step."""
        sizes = capture.sizes_of(self._root)
        return (sizes.num_tokens if sizes is not None else None) or self._tokens

    def _advance(self) -> None:
        number = self._number
        if number <= self._start_at:
            if number == self._start_at:
                self._begin()
        elif self.policy != AUTO:
            if number == 1:
                self._conclude(self.policy, reasons.ASKED_FOR, None)
            else:
                self._keep(self.policy, reasons.ASKED_FOR, {})
                self._capture_or_stop()
        elif number <= self._first:
            self._is_tried_early()
            if number == self._first:
                self._ask_pace()
        elif number > self._first and self._helping is not None:
            self._await(self._helping)
        elif number > self._first:
            if turns.is_look(self._measured):
                self._look()
            else:
                self._take_turn()

    @property
    def _measured(self) -> int:
        return self._number - self._first - self._num_untimed

    def _take_turn(self) -> None:
        self._on = self._measured < 0 or turns.is_candidates(self._measured)

    def _begin(self) -> None:
        """The first step: what is known already needs no measuring."""
        self._kept.look_at(self._root, self._device)
        if self.policy != AUTO:
            reason = policies.get(self.policy).why_not(self._device)
            if reason is not None:
                why = f"{self.policy} can't be used: {reason}"
                console.say_once(f"{self._what}: {why}: it runs eagerly", level="warning")
                self._finish(EAGER, why)
                return
            self._install({})
            self._on = True
            if not self.regions:
                self._finish(EAGER, reasons.NOTHING)
            return
        own = self._kept.find(self._ranks().size), self._is_unknown()
        self._ask(f"start {self._number}", own, self._start)

    def _start(self, answers: list[Any]) -> None:
        known = answers[0][0]
        reason = guard.why_not_measured()
        if known is not None and any(is_open for _, is_open in answers):
            # Code and graphs of passes that are about to change would be made in vain.
            self._start_at = self._number + PATIENT_STEPS
            self._first = self._start_at + EAGER_STEPS
        elif known is not None:
            if known["chosen"] != EAGER:
                self._install_known(known)
                if not self.regions:
                    self._finish(EAGER, reasons.NOTHING)
                    return
            self._finish(known["chosen"], reasons.FROM_PROFILE)
        elif reason is not None:
            self._finish(EAGER, f"not measured: {reason}")
        elif not policies.automatic(self._device):
            self._finish(EAGER, f"there is no policy for {self._device.type}")

    def _install_known(self, known: Mapping[str, Any]) -> None:
        """Compile what an earlier run has found to be faster."""
        was_helped = known.get("was_helped", False)
        is_helped = self._is_patient and self._may_help()
        self._install(known.get("regions", {}), is_made=was_helped and not is_helped)
        self._on = True
        if is_helped and self.regions:
            # Helpers find it in torch's caches, a second or two for each graph.
            self._are_sizes_open()
            helpers = ahead.begun(self, self._device, budget_s=self._budget_s)
            helpers.start(len(self.regions))
            for one in self.regions:
                one.send_later(helpers)

    def _may_help(self) -> bool:
        return ahead.may_help(self._root, self._device, num_ranks=self._ranks().size)

    def _ask_pace(self) -> None:
        """How long a step takes, and whether helpers can compile the model, on all ranks."""
        now = time.perf_counter()
        lasted_s = self.run_length.lasts_s(now)
        is_helped = self._outlook.is_helped(self._root, lasted_s, self._may_help)
        is_open = self._is_unknown()
        facts = is_open, capture.sizes_of(self._root) is not None, self._is_early_open
        own = (now - self._began, lasted_s, is_helped, *facts)
        self._ask(f"pace {self._number}", own, self._set_pace)

    def _is_unknown(self) -> bool:
        """Whether something is still found out that changes the model's passes."""
        is_open = self._is_patient and self._number < MOST_WAITING
        return is_open and (undecided.is_open(self._root) or self._are_sizes_open())

    def _are_sizes_open(self) -> bool:
        """Whether it is still to be known which few sizes batches will have."""
        capture.use_few_sizes(self._root, True, by=_CODE)
        sizes = capture.sizes_of(self._root)
        return sizes is not None and not sizes.are_few

    def _set_pace(self, answers: list[Any]) -> None:
        """Go on once the run has lasted long enough, and its passes are what they will be."""
        steps_s, lasted_s, are_helped, are_open, are_few, are_tried = zip(*answers, strict=True)
        is_helped = all(are_helped)
        least_s = self._outlook.least_run_s(self._root, is_helped=is_helped)
        self._num_settling = SIZES_STEPS if self._is_patient and any(are_few) else 0
        if any(are_open):
            self._first += PATIENT_STEPS
        elif self._is_patient and not is_helped:
            self._finish(EAGER, reasons.HELD_UP)
        elif self._is_patient and (min(lasted_s) < least_s or any(are_tried)):
            compiler_import.load_beside()
            self._first += PATIENT_STEPS
            self._new_early()  # which takes no compiler, so it comes first
        else:
            self._start_compiling(max(steps_s), is_helped)

    def _start_compiling(self, step_s: float, is_helped: bool) -> None:
        self._was_helped = is_helped
        helpers_s = self._budget_s  # whom nobody waits for
        if self._steps is not None:
            whole_s = step_s * self._steps
            cost_s = cost_model.cost_s(self._root, is_helped=is_helped)
            if whole_s < cost_model.least_run_s(cost_s):
                self._finish(EAGER, f"a run of {whole_s:.0f} s would not earn a compile back")
                return
            self._budget_s = min(self._budget_s, max(cost_s, cost_model.LARGEST_SHARE * whole_s))
        self._install({}, is_in_parts=is_helped and ahead.is_in_parts(self._root))
        if not self.regions:
            self._finish(EAGER, reasons.NOTHING)
            return
        if is_helped:
            order = Handover(self._ranks, step_s, num_seeing=max(1, self._num_settling))
            helpers = ahead.begun(self, self._device, budget_s=helpers_s)
            self._helping = Helping(helpers, order, self.regions, is_patient=self._is_patient)
        # Parts that helpers could not do are compiled here one in a step, all else in one step.
        num_in_step = 1 if is_helped else len(self.regions)
        self._lower = timeouts.hold_off(self._budget_s * num_in_step)
        # A trial may end, and its model go, before anything is decided.
        weakref.finalize(self, self._lower).atexit = False
        self._show_helpers(True)

    def _show_helpers(self, is_on: bool) -> None:
        """Whether the step that begins is for helpers."""
        self._on = is_on
        if self._early is not None:
            self._early.is_paused = is_on

    def _await(self, helping: Helping) -> None:
        """Train on until the helpers are done; then go on as if compiling began now."""
        if self._on:  # the last step was for helpers
            self._show_helpers(False)
            unseen = helping.unseen()
            self._ask("seen", bool(unseen), lambda answers: self._saw(helping, answers, unseen))
        else:
            self._take_over(helping)

    def _saw(self, helping: Helping, answers: list[Any], unseen: list[str]) -> None:
        """Give graphs to helpers in another step, or wait for their work."""
        if helping.are_seen(answers, unseen):
            self._take_over(helping)
        else:
            self._show_helpers(True)

    def _take_over(self, helping: Helping) -> None:
        helping.is_loading = False
        self._new_early()
        if self._is_tried_early():
            return
        is_open = helping.take_over()
        if self._early is not None:
            self._early.is_paused = helping.is_loading
        if not is_open:
            helping.end(self._what)
            self._helping = None
            self._first = self._number
            self._on = True

    def _is_tried_early(self) -> bool:
        """Find out whether eager passes are faster replayed; False once that is known."""
        if self._early is None or self._early.is_settled:
            return False
        self._early.on_forward(self._is_whole)
        return not self._early.is_settled

    @property
    def _is_early_open(self) -> bool:
        """Whether it is still to be found out if eager passes are faster replayed."""
        return self._is_tried if self._early is not None else self._may_capture()

    def _new_early(self) -> None:
        """Begin to find out whether eager passes are faster replayed."""
        if self._early is None and self._may_capture():
            self._early = self._new_graph_trial(variant=lambda: self._on, is_provisional=True)

    def _is_compiled(self, region: CompiledRegion) -> bool:
        if self._on or self._helping is None or region.is_prepared:
            return self._on
        # A pass that is captured meanwhile, for other sizes, has to be eager.
        return self._helping.is_loading or not self._is_replaying

    def _install(
        self, known: Mapping[str, list[str]], *, is_in_parts: bool = False, is_made: bool = False
    ) -> None:
        """Compile the regions from now on; with the policies known to be good, or all."""
        found = regions.find(self._root)
        if is_in_parts or (known and not any(one.name in known for one in found)):
            found = regions.parts(self._root)
        tried = [policies.tried(self.policy, known.get(one.name), self._device) for one in found]
        self.regions += install(
            list(zip(found, tried, strict=True)),
            budget_s=self._budget_s,
            is_on=self._is_compiled,
            is_made=is_made,
        )

    def _look(self) -> None:
        failed = {one.region.name: one.failure for one in self.regions if one.failure}
        self._ask(f"times {self._number}", (self._samples.rows(), failed), self._judge)

    def _judge(self, answers: list[Any]) -> None:
        eager, compiled = self._samples.merged([rows for rows, _ in answers])
        is_last = turns.is_last_look(self._measured)
        outcome.give_up_alike(self.regions, [failed for _, failed in answers])
        verdict = turns.verdict(eager, compiled, is_last=is_last)
        if all(one.failure for one in self.regions):
            self._finish(EAGER, reasons.FAILED)
        elif verdict is not None:
            chosen = outcome.chosen(self.regions, self.policy)
            times_ms = guard.in_ms({EAGER: eager, chosen: compiled})
            way = chosen if verdict == turns.FASTER else EAGER
            self._finish(way, reasons.OF_VERDICTS[verdict], times_ms)
        if self._graph_trial is None and not self.is_settled:
            self._take_turn()

    def give_up(self, reason: str) -> None:
        """A rank did not come, so it is not asked again; or something here has raised."""
        if self._early is not None:
            self._early.undo()
            self._early = None
        self._conclude(EAGER, reason, None)
        self._stop()

    def _finish(
        self, chosen: str, reason: str, times_ms: Mapping[str, float] | None = None
    ) -> None:
        early, self._early = self._early, None
        was_replaying = early is not None and early.is_replayed
        if early is not None and was_replaying and chosen == EAGER:
            self._graph_trial = early  # nothing is left to be found: eager passes stay replayed
            self._conclude(chosen, reason, times_ms)
            early.confirm()
            self._stop()
            return
        # Code that can't be replayed was launched in its turns, and may still have won.
        if early is not None and reason == reasons.FASTER and was_replaying and early.replays(True):
            self._open = reasons.ONLY_REPLAYED, times_ms or {}
            self._graph_trial = early
            early.start_anew()
            return
        if early is not None:
            early.undo()
            torch.cuda.empty_cache()  # what its graphs have left
        is_open = reason in (reasons.UNDECIDED, reasons.SLOWER) and not was_replaying
        if is_open and times_ms and self._may_capture():
            # If launches take the time, savings on the GPU show only when steps are replayed.
            self._open = reason, times_ms
        else:
            self._conclude(chosen, reason, times_ms)
        self._capture_or_stop()

    def _capture_or_stop(self) -> None:
        """Find out whether passes are faster as CUDA graphs; else nothing is left to be found."""
        if self._may_capture():
            self._graph_trial = self._new_graph_trial()
        else:
            self._stop()

    def _new_graph_trial(self, **more: Any) -> GraphTrial:
        more |= {"readiness": CodeReadiness(self.regions)} if self._is_patient else {}
        more |= {"tokens": self._trained_tokens, "switch": self._switch, "ranks": self._ranks}
        return GraphTrial(self._root, **more)

    def _switch(self, is_replayed: bool) -> None:
        if self._open is not None:
            self._on = is_replayed

    def _on_captured(self, is_replayed: bool) -> None:
        if self._open is not None:
            reason, times_ms = self._open
            chosen = outcome.chosen(self.regions, self.policy) if is_replayed else EAGER
            self._conclude(chosen, reasons.WHEN_REPLAYED if is_replayed else reason, times_ms)
            self._open = None
        self._stop()

    def _conclude(self, chosen: str, reason: str, times_ms: Mapping[str, float] | None) -> None:
        is_failed = reason == reasons.ASKED_FOR and all(one.failure for one in self.regions)
        told = (EAGER, reasons.FAILED) if is_failed else (chosen, reason)
        dropped = outcome.dropped(self.regions)
        decisions.record(self._what, *told, times_ms=times_ms, dropped=dropped)
        self._keep(chosen, reason, times_ms or {})
        if chosen == EAGER:
            self._drop_regions()
        else:
            for one in self.regions:
                if one.failure:
                    one.remove()
            self._on = True
        self._lower()

    def _keep(self, chosen: str, reason: str, times_ms: Mapping[str, float]) -> None:
        """For the next run; or for people, where that one is to find out by itself."""
        if reason == reasons.FROM_PROFILE or not self.regions:
            return
        entry = outcome.entry(
            self.regions, chosen, reason, times_ms, was_helped=self._was_helped, phases=self.phases
        )
        is_final = outcome.is_final(self.regions, reason, times_ms)
        self._kept.keep(entry, num_ranks=self._ranks().size, is_final=is_final)

    def _may_capture(self) -> bool:
        return graph_trial.is_wanted(self.policy, self._device, steps=self._steps)

    def _stop(self) -> None:
        if self._helping is not None:
            self._helping.close()
            self._helping = None
        if not self._on:  # not before: replays want the sizes that there are
            capture.use_few_sizes(self._root, False, by=_CODE)
        if self._seam is not None:
            self._seam.watcher = None
            self._seam = None
            is_replayed = self._graph_trial is not None and self._graph_trial.is_replayed
            seam.close(self._root, is_around=self._on or is_replayed)
        self._asking.drop()
        self._lower()

    @property
    def _device(self) -> torch.device:
        return next((one.device for one in self._root.parameters()), torch.device("cpu"))
