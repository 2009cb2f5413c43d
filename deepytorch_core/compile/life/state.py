"""The state that all phases of one model's compilation share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from deepytorch_core.base import compiler_import, decisions
from deepytorch_core.compile import (
    ahead,
    capture,
    outcome,
    policies,
    reasons,
    regions,
    timeouts,
)
from deepytorch_core.compile.asking import Asking
from deepytorch_core.compile.code_readiness import CodeReadiness
from deepytorch_core.compile.graph_trial import GraphTrial
from deepytorch_core.compile.kept import Kept
from deepytorch_core.compile.life.early_replays import EarlyReplays
from deepytorch_core.compile.life.phase import CompilationPhase
from deepytorch_core.compile.life.step_count import StepCount
from deepytorch_core.compile.life.subject import Subject
from deepytorch_core.compile.phases import Phases
from deepytorch_core.compile.policies import EAGER
from deepytorch_core.compile.region import CompiledRegion, install


class CompilationState:
    """The parts that outlive a phase, and what several phases do with them.

    Attributes:
        phase: the present one.
        subject: the model, and what was asked for it.
        steps: those of its training.
        regions: the parts of the model that are compiled, in place.
        is_on: whether the step that begins is compiled.
        early: replays of eager passes until it is decided.
        was_helped: whether helpers have compiled the regions.
        lower: ends the longer time limits of collectives, where `hold_off` has raised them.
        asking: the question that all ranks are asked now.
        kept: the profile's entry.
        phases: the time that each of them has taken.
    """

    phase: CompilationPhase

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.steps = StepCount()
        self.regions: list[CompiledRegion] = []
        self.is_on = False
        self.early = EarlyReplays()
        self.was_helped = False
        self.lower: Callable[[], None] = lambda: None
        self.asking = Asking()
        self.kept = Kept(subject.what, subject.policy)
        self._helpers: ahead.Ahead | None = None
        self.phases = Phases()

    @property
    def num_made(self) -> int:
        """How many pieces of code and graphs were made so far: new ones take their time."""
        trials = (self.phase.graphs, self.early.trial)
        captured = [trial.num_captured for trial in trials if trial is not None]
        return sum(region.told.num_compiles for region in self.regions) + sum(captured)

    def trained_tokens(self) -> int:
        """Return the number of tokens of the last step."""
        sizes = capture.sizes_of(self.subject.root)
        return (sizes.num_tokens if sizes is not None else None) or self.steps.tokens

    def install(
        self,
        known: Mapping[str, list[str]],
        *,
        budget_s: float,
        is_in_parts: bool = False,
        is_made: bool = False,
    ) -> None:
        """Compile the regions from now on; with the policies known to be good, or all."""
        found = regions.find(self.subject.root)
        if is_in_parts or (known and not any(region.name in known for region in found)):
            found = regions.parts(self.subject.root)
        policy, device = self.subject.policy, self.subject.device
        tried = [policies.tried(policy, known.get(region.name), device) for region in found]
        self.regions += install(
            list(zip(found, tried, strict=True)),
            budget_s=budget_s,
            is_on=self.is_compiled,
            is_made=is_made,
        )

    def is_compiled(self, region: CompiledRegion) -> bool:
        """Whether a call of `region` goes the compiled way now."""
        return self.is_on or self.phase.takes_code(region)

    @property
    def has_helpers(self) -> bool:
        """Whether helpers were begun."""
        return self._helpers is not None

    def helpers(self) -> ahead.Ahead:
        """Those of the model, at work or to be started."""
        if self._helpers is None:
            compiler_import.load_beside()  # before a step takes their work over
            budget_s = self.subject.budget_s  # nobody waits for helpers
            self._helpers = ahead.begun(self, self.subject.device, budget_s=budget_s)
        return self._helpers

    def close_helpers(self) -> None:
        """Stop helpers, whatever they do."""
        if self._helpers is not None:
            self._helpers.close()
            self._helpers = None

    def drop_regions(self) -> None:
        """Let the model run eagerly again."""
        self.is_on = False
        for region in self.regions:
            region.remove()
        self.regions.clear()

    def hold_off(self, seconds: float) -> None:
        """Have collectives wait so much longer, until the model is decided."""
        self.lower = timeouts.hold_off(seconds)
        # A trial may end, and its model go, before anything is decided.
        weakref.finalize(self, self.lower).atexit = False

    def begin_early(self) -> None:
        """Begin to find out whether eager passes are faster replayed."""
        if self.early.trial is None and self.subject.may_capture():
            self.early.trial = self.new_graph_trial(variant=lambda: self.is_on, is_provisional=True)

    def new_graph_trial(self, **more: Any) -> GraphTrial:
        """Begin to find out whether passes are faster as CUDA graphs; `more` for `GraphTrial`."""
        more |= {"readiness": CodeReadiness(self.regions)} if self.subject.is_patient else {}
        more |= {"tokens": self.trained_tokens, "switch": self._switch}
        return GraphTrial(self.subject.root, ranks=self.subject.ranks, **more)

    def _switch(self, is_replayed: bool) -> None:
        self.phase.switch(is_replayed)

    def conclude(self, chosen: str, reason: str, times_ms: Mapping[str, float] | None) -> None:
        """Have the model go on in the `chosen` way, and tell people and the next run of it."""
        is_failed = reason == reasons.ASKED_FOR and all(region.failure for region in self.regions)
        told = (EAGER, reasons.FAILED) if is_failed else (chosen, reason)
        dropped = outcome.dropped(self.regions)
        decisions.record(self.subject.what, *told, times_ms=times_ms, dropped=dropped)
        self.keep(chosen, reason, times_ms or {})
        if chosen == EAGER:
            self.close_helpers()
            self.drop_regions()
        else:
            for region in self.regions:
                if region.failure:
                    region.remove()
            self.is_on = True
        self.lower()

    def keep(self, chosen: str, reason: str, times_ms: Mapping[str, float]) -> None:
        """Keep it for the next run; or for people, where that one is to find out by itself."""
        if reason == reasons.FROM_PROFILE or not self.regions:
            return
        entry = outcome.entry(
            self.regions, chosen, reason, times_ms, was_helped=self.was_helped, phases=self.phases
        )
        is_final = outcome.is_final(self.regions, reason, times_ms)
        self.kept.keep(entry, num_ranks=self.subject.ranks().size, is_final=is_final)
