"""The way from a verdict on compiled code to the phase that follows it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepytorch_core.compile import reasons
from deepytorch_core.compile.life.decided import Decided
from deepytorch_core.compile.life.phase import CompilationPhase
from deepytorch_core.compile.life.replay_trial import OpenVerdict, ReplayTrial
from deepytorch_core.compile.life.state import CompilationState
from deepytorch_core.compile.policies import EAGER


def finish(
    state: CompilationState, chosen: str, reason: str, times_ms: Mapping[str, float] | None = None
) -> CompilationPhase:
    """Go on in the `chosen` way, unless replays may turn that round; returns the next phase."""
    early, was_replaying = state.early.trial, state.early.is_replayed
    if early is not None and was_replaying and chosen == EAGER:
        # Nothing is left to be found: eager passes stay replayed.
        state.early.trial = None
        state.conclude(chosen, reason, times_ms)
        early.confirm()
        return Decided(early)
    # Code that can't be replayed was launched in its turns, and may still have won.
    if early is not None and reason == reasons.FASTER and was_replaying and early.replays(True):
        state.early.trial = None
        early.start_anew()
        return ReplayTrial(state, early, OpenVerdict(reasons.ONLY_REPLAYED, times_ms or {}))
    if early is not None:
        state.early.undo()
        torch.cuda.empty_cache()  # what its graphs have left
    is_open = reason in (reasons.UNDECIDED, reasons.SLOWER) and not was_replaying
    if is_open and times_ms and state.subject.may_capture():
        return ReplayTrial(state, state.new_graph_trial(), OpenVerdict(reason, times_ms))
    state.conclude(chosen, reason, times_ms)
    return try_replays(state)


def try_replays(state: CompilationState) -> CompilationPhase:
    """Find out whether passes are faster as CUDA graphs; else nothing is left to be found."""
    return ReplayTrial(state, state.new_graph_trial()) if state.subject.may_capture() else Decided()
