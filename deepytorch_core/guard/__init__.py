"""The guard: a candidate is kept only when it computes the same and is measured faster.

`choose` runs the stock way and each candidate on the same saved inputs. A candidate that fails,
differs from stock, or doesn't beat it beyond the noise is undone. The answer is printed in one
line, listed by `deepytorch.report()` and kept in the profile. It is each rank's own, for which none
waits for another, but where ranks that differ would not train one model (`together`).
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from deepytorch_core.base import config, decisions
from deepytorch_core.guard import profile
from deepytorch_core.guard.numerics import AMPLIFIED, difference, least_exact, norm, rounded
from deepytorch_core.guard.profile import fingerprint
from deepytorch_core.guard.ranks import Question, RankMissing, Ranks, first_of, slowest
from deepytorch_core.guard.state import (
    Contents,
    HostNumbers,
    dropout_off,
    is_looked_at,
    is_transformed,
    no_saved_tensor_hooks,
    preserved,
    random_numbers,
    same_random_numbers,
)
from deepytorch_core.guard.timing import (
    LEAST_GAIN,
    ROUNDS,
    Clock,
    in_ms,
    interleaved,
    is_faster,
    median,
    noise,
    synchronize,
)

__all__ = [
    "AMPLIFIED",
    "LEAST_GAIN",
    "Candidate",
    "Clock",
    "Contents",
    "Decision",
    "HostNumbers",
    "Question",
    "RankMissing",
    "Ranks",
    "Trial",
    "best",
    "choose",
    "difference",
    "dropout_off",
    "fingerprint",
    "first_line",
    "first_of",
    "in_ms",
    "interleaved",
    "is_faster",
    "is_looked_at",
    "median",
    "is_transformed",
    "least_exact",
    "no_saved_tensor_hooks",
    "noise",
    "norm",
    "preserved",
    "profile",
    "random_numbers",
    "rounded",
    "same_random_numbers",
    "slowest",
    "synchronize",
    "why_not_measured",
]

STOCK = "stock"
# If a trial has a clock of its own, its times have little of the machine's noise.
CLOCKED_ROUNDS = 3
# After so many samples of each way, a difference hidden by the noise stays hidden.
MOST_SAMPLES = 4 * ROUNDS
# An exception is cut to so many characters.
_MOST_SAID = 240


@dataclass(frozen=True)
class Candidate:
    """A way that may replace the stock one. `undo` must work also after `apply` has raised."""

    name: str
    apply: Callable[[], object]
    undo: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The computation that is run to judge candidates.

    Args:
        module: what the candidates change, and whose state must not change.
        run: computes once on saved inputs, and backward; returns what to compare, in any nest of
            tuples, lists and dicts. Gradients are read from the parameters' `grad`. It must contain
            no collectives: a candidate may fail on one rank alone.
        scaler: a GradScaler that `run` uses.
        dtype: in what `run` computes, if less exact than its tensors' own (autocast).
        budget_s: seconds for all candidates together; what doesn't fit is not tried.
        clock: makes what times `run`, all ranks at once, before the first timing; None: as it is.
    """

    module: nn.Module
    run: Callable[[], Any]
    scaler: Any = None
    dtype: torch.dtype | None = None
    budget_s: float = 120.0
    clock: Callable[[Callable[[], object], Ranks], Clock] | None = None


@dataclass(frozen=True)
class Decision:
    """The outcome of `choose`; times in milliseconds, the slowest rank's medians and noise."""

    what: str
    chosen: str
    reason: str
    times_ms: Mapping[str, float] = field(default_factory=dict)
    noise_ms: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


def choose(
    what: str,
    candidates: Sequence[Candidate],
    trial: Trial,
    *,
    facts: Mapping[str, Any] | None = None,
    prefer: str | None = None,
    together: bool = False,
) -> Decision:
    """Try `candidates` against what is there, and leave the best in place.

    The module's buffers, gradients and random numbers are put back after the trials.

    Args:
        what: what is decided, for the report: "kernels of LlamaForCausalLM".
        candidates: at most one of them stays.
        trial: what to run.
        facts: what the decision depends on beyond the module's structure, the machine and the
            versions, in JSON's types: shapes, dtypes, options.
        prefer: what speaks for a candidate that is just no slower ("takes less memory"); None: it
            has to be faster.
        together: whether all ranks of torch.distributed come to one answer; they must all call it,
            with the same candidates.

    Returns the decision; its `chosen` is "stock" when no candidate stays. Raises what the stock
    way raises.
    """
    ranks = Ranks(what, alone=not together)
    wanted = profile.key(
        what,
        {"module": fingerprint(trial.module), **(facts or {})},
        world_size=Ranks(what).size,
    )
    judge = _Judge(trial, ranks)
    known = _known(wanted, candidates, ranks)
    reason = why_not_measured()
    if known is not None:
        decision = judge.confirm(what, known)
    elif reason is not None:
        decision = Decision(what, STOCK, f"not measured: {reason}")
    else:
        decision = judge.measure(what, candidates, prefer)
        if config.local_rank() == 0:
            profile.keep(wanted, _to_json(decision))
    decisions.record(
        what,
        decision.chosen,
        decision.reason,
        times_ms=decision.times_ms,
        dropped=decision.dropped,
    )
    return decision


def why_not_measured() -> str | None:
    """Why the options in force forbid to try candidates; None if they don't."""
    options = config.current()
    if options.deterministic or torch.are_deterministic_algorithms_enabled():
        return "deterministic, and the profile has no decision"
    return "tune=off" if options.tune == "off" else None


def best(times: Mapping[str, Sequence[float]], stock: str = STOCK) -> str:
    """The name with the least median, if that beats `stock` beyond the noise, else `stock`."""
    fastest = min(times, key=lambda name: median(times[name]))
    return fastest if is_faster(times[fastest], times[stock]) else stock


def _known(
    wanted: Mapping[str, Any], candidates: Sequence[Candidate], ranks: Ranks
) -> Candidate | str | None:
    """Return the choice in rank 0's profile: a candidate, or "stock"."""
    entry = None if config.current().tune == "force" else profile.find(wanted)
    chosen = ranks.gather(entry and entry["chosen"])[0]
    if chosen == STOCK:
        return STOCK
    return next((candidate for candidate in candidates if candidate.name == chosen), None)


def _to_json(decision: Decision) -> dict[str, Any]:
    return {
        "chosen": decision.chosen,
        "reason": decision.reason,
        "times_ms": {name: round(ms, 4) for name, ms in decision.times_ms.items()},
        "noise_ms": {name: round(ms, 4) for name, ms in decision.noise_ms.items()},
        "dropped": dict(decision.dropped),
    }


class _Judge:
    def __init__(self, trial: Trial, ranks: Ranks) -> None:
        self._trial = trial
        self._ranks = ranks
        self._reference: Any = None
        self._rounded: Any = None
        self._in_place: Candidate | None = None
        self._clock: Clock | None = None
        parameter = next(trial.module.parameters(), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")

    def confirm(self, what: str, known: Candidate | str) -> Decision:
        """Put what the profile says in place, if it still computes the same."""
        if isinstance(known, str):
            return Decision(what, known, "from the profile")
        problem = self._apply(known)
        if problem is not None:
            return Decision(what, STOCK, f"the profile's {known.name} failed: {problem}")
        return Decision(what, known.name, "from the profile")

    def measure(self, what: str, candidates: Sequence[Candidate], prefer: str | None) -> Decision:
        began = time.perf_counter()
        dropped: dict[str, str] = {}
        good: list[Candidate] = []
        for candidate in candidates:
            spent = time.perf_counter() - began
            over = spent > self._trial.budget_s
            problem = self._ranks.first_problem(
                f"no time left of {self._trial.budget_s:g} s" if over else None
            )
            if problem is None:
                problem = self._apply(candidate)
                if problem is None:
                    candidate.undo()
            if problem is None:
                good.append(candidate)
            else:
                dropped[candidate.name] = problem
        times: dict[str, list[float]] = {}
        while good and (not times or self._asks_for_more(times, began)):
            more, failed = self._times(good)
            if failed is not None:
                dropped[failed[0].name] = failed[1]
                good.remove(failed[0])
                times = {name: row for name, row in times.items() if name != failed[0].name}
            for name, row in more.items():
                times.setdefault(name, []).extend(row)
        if not good:
            return Decision(what, STOCK, "no candidate is left", dropped=dropped)
        chosen, reason = best(times), "faster than stock"
        if chosen == STOCK:
            reason = "nothing is faster"
            fastest = min(
                (survivor.name for survivor in good), key=lambda name: median(times[name])
            )
            if prefer and median(times[fastest]) <= median(times[STOCK]) * (1 + LEAST_GAIN):
                chosen, reason = fastest, f"no slower than stock, and {prefer}"
        for candidate in good:
            if candidate.name == chosen:
                candidate.apply()
        noises = {name: 1e3 * noise(samples) for name, samples in times.items()}
        return Decision(
            what,
            chosen,
            reason,
            in_ms(times),
            noises,
            dropped,
        )

    def _asks_for_more(self, times: Mapping[str, Sequence[float]], began: float) -> bool:
        """Whether a candidate may be faster but for the noise, and there is time to find out."""
        fastest = min(times, key=lambda name: median(times[name]))
        gain = median(times[STOCK]) - median(times[fastest])
        is_open = gain > LEAST_GAIN * median(times[STOCK]) and best(times) == STOCK
        if not is_open or len(times[STOCK]) >= MOST_SAMPLES:
            return False
        is_late = time.perf_counter() - began > self._trial.budget_s / 2
        return self._ranks.first_problem("late" if is_late else None) is None

    def _apply(self, candidate: Candidate) -> str | None:
        """Put in place what computes the same as stock on every rank; returns why not."""
        try:
            own = self._applied(candidate)
        except torch.OutOfMemoryError as error:  # for what is kept to compare: a step has room
            candidate.undo()
            own = first_line(error)
        problem = self._ranks.first_problem(own)
        if problem is not None and own is None:
            candidate.undo()
        return problem

    def _applied(self, candidate: Candidate) -> str | None:
        if self._reference is None:
            self._reference = self._results()
        found = None
        try:
            candidate.apply()
            found = self._results()
            own = self._difference(found)
        except Exception as error:  # whatever a compiler or a kernel may raise
            own = first_line(error)
        if own is not None:
            candidate.undo()
            if found is not None:
                own = self._difference(found, self._limits())
                if own is None:
                    candidate.apply()
        return own

    def _difference(self, found: Any, limits: Any = None) -> str | None:
        for number, what in enumerate(("output", "gradient")):
            problem = difference(
                self._reference[number],
                found[number],
                dtype=self._trial.dtype,
                what=what,
                sensitivity=limits[number] if limits else None,
            )
            if problem is not None:
                return problem
        return None

    def _limits(self) -> Any:
        """Return stock's results with its weights rounded anew: deep modules amplify that."""
        if self._rounded is None:
            parameters = list(self._trial.module.parameters())
            kept = [parameter.detach().clone() for parameter in parameters]
            try:
                with torch.no_grad():
                    for number, parameter in enumerate(parameters):
                        parameter.copy_(rounded(parameter, self._trial.dtype, seed=number))
                self._rounded = self._results()
            finally:
                with torch.no_grad():
                    for parameter, values in zip(parameters, kept, strict=True):
                        parameter.copy_(values)
        return self._rounded

    def _results(self) -> tuple[Any, list[torch.Tensor | None]]:
        """Outputs and gradients of a run without dropout."""
        module = self._trial.module
        with preserved(module, scaler=self._trial.scaler), dropout_off(module):
            outputs = tree_map(_copied, self._trial.run())
            return outputs, [parameter.grad for parameter in module.parameters()]

    def _times(
        self, good: Sequence[Candidate]
    ) -> tuple[dict[str, list[float]], tuple[Candidate, str] | None]:
        """Every rank's slowest samples; or none, the candidate that failed on some rank and why."""
        candidates: dict[str, Candidate | None] = {
            STOCK: None,
            **{candidate.name: candidate for candidate in good},
        }
        samples, failed = {}, None
        with preserved(self._trial.module, scaler=self._trial.scaler):
            if self._clock is None and self._trial.clock is not None:
                self._clock = self._trial.clock(self._run, self._ranks)
            try:
                samples = interleaved(
                    dict.fromkeys(candidates, self._run),
                    self._device,
                    rounds=ROUNDS if self._clock is None else CLOCKED_ROUNDS,
                    budget_s=self._trial.budget_s,
                    prepare=lambda name: self._switch(candidates[name]),
                    clock=self._clock,
                )
            except Exception as error:
                # If stock's way failed, it may be due to its timing, or to memory beside a step's.
                is_trials = self._clock is not None or isinstance(error, torch.OutOfMemoryError)
                if self._in_place is None and not is_trials:
                    raise  # stock itself failed
                failed = [(self._in_place or good[0]).name, first_line(error)]
            finally:
                self._switch(None)
        first = next(
            (failure for failure in self._ranks.gather(failed) if failure is not None), None
        )
        if first is not None:
            return {}, next(
                (candidate, first[1]) for candidate in good if candidate.name == first[0]
            )
        return self._ranks.slowest(samples), None

    def _switch(self, candidate: Candidate | None) -> None:
        if self._in_place is not candidate:
            if self._in_place is not None:
                self._in_place.undo()
            self._in_place = candidate
            if candidate is not None:
                candidate.apply()

    def _run(self) -> None:
        self._trial.module.zero_grad(set_to_none=True)
        self._trial.run()


def first_line(error: BaseException) -> str:
    """Say an exception in one line, which ends early where torch lists its back ends."""
    text = textwrap.shorten(str(error).strip().partition("\n")[0], _MOST_SAID, placeholder=" ...")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
