"""A compiled region at work: what stands for `forward`, and the compile that equal blocks share.

It lies in each module's `seam`. So a module's hooks, class, `forward`, parameters' names and
everything outside stay as they are, and hooks run outside of what is compiled. Calls without
gradients (evaluation, `generate`) take the stock way.
"""

from __future__ import annotations

import contextlib
import time
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.exc import SkipFrame
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from deepytorch_core import guard
from deepytorch_core.base.console import say_first
from deepytorch_core.compile import (
    ahead,
    any_size,
    border,
    cached_draws,
    collecting,
    dynamo,
    graphs,
    held_up,
    seam,
    signals,
    usage,
)
from deepytorch_core.compile.ahead import Ahead, HelperJob, at_once
from deepytorch_core.compile.policies import EAGER, Policy, Runner
from deepytorch_core.compile.region_forward import Forward
from deepytorch_core.compile.regions import Region
from deepytorch_core.compile.sizes import CapturedGraph, RegionSizes
from deepytorch_core.compile.timeouts import Hold
from deepytorch_core.compile.usage import Usage
from deepytorch_core.guard import breaks

# Calls that compile something new, before all sizes are taken to change, and again before it ends.
MOST_COMPILES = 6
# Sizes that helpers compile for; packed rows have at most as many.
MOST_SIZES = 16
# A further policy may take as long as the compiles that sharing has saved, and this much longer
# than the first.
SLOWER_POLICY = 3.0
# After this share of the budget no further graph of the same call is compiled. Backward graphs,
# which are made later, take about as long as forward ones.
FORWARD_SHARE = 0.5


@dataclass
class RegionFacts:
    """Facts of a region for the report."""

    chosen: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    breaks: list[str] = field(default_factory=list)
    compile_s: float = 0.0
    num_compiles: int = 0


class CompiledRegion:
    """The modules of a region, and what runs in place of their `forward`.

    Args:
        region: its modules must have no `forward` of their own.
        policies: candidates in order of preference.
        budget_s: seconds for compiling; when they are over nothing new is compiled. Of a call that
            is captured in many graphs the last ones may then run eagerly.
        is_on: whether the compiled way is to be taken now; asked with this object.
        hold: what collectives wait longer by while it compiles; its own unless given.
    """

    def __init__(
        self,
        region: Region,
        policies: Sequence[Policy],
        *,
        budget_s: float,
        is_on: Callable[[CompiledRegion], bool],
        hold: Hold | None = None,
    ) -> None:
        self.region = region
        self.told = RegionFacts()
        self.failure: str | None = None
        self._policies = policies
        self._budget_s = budget_s
        self._is_on = _Question(is_on)
        self._hold = Hold(budget_s) if hold is None else hold
        self._is_dynamic: bool | None = None
        self._is_each_captured = False
        self._num_compiling_calls = 0
        self._call = (0.0, 0)  # when the last one began, and the graphs before it
        self._graph_error: Exception | None = None
        self._ahead: Ahead | None = None
        self._later: Ahead | None = None
        self.num_unready = 0
        """Calls that ran without compiled code, as there was none yet for their sizes."""
        self._sent: set[Hashable] = set()
        # Graphs of later sizes, left to helpers.
        self._jobs: dict[Hashable, HelperJob] = {}
        self._left: list[CapturedGraph] = []
        self._sizes = RegionSizes(MOST_SIZES)
        self._is_eager_meanwhile = False  # in this pass
        self._least_calls = 0  # of a later size, before it is captured
        self._at_once = False
        self._num_to_load = (0, 0)  # of captured graphs, and of calls; as many are captured anew
        self._num_calls = 0
        self._cached_calls: set[str] = set()
        self._compiled = self._compile()
        self._usage = Usage(_weakly(self.give_up))
        # The gradients of blocks and parts come one by one as it is, and a single rank sends none.
        # What torch compiles for DDP's buckets is neither kept in its cache nor looked for there.
        self.is_cut_by_buckets = region.is_model and guard.Ranks(region.name).size > 1

    def prepare(self, helpers: Ahead) -> None:
        """Leave the next graphs to helpers, and run them eagerly, until `restart`."""
        self._ahead = helpers

    def send_later(self, helpers: Ahead, *, are_few: bool = False) -> None:
        """Leave also the graphs of later sizes to helpers: no call is held up by a compiler.

        Each size has a graph of its own then, is captured when it comes a second time, and up to
        `MOST_SIZES` are. The others run eagerly. Where it is known that sizes `are_few`, each is
        captured when it comes.
        """
        self._later = helpers
        self._least_calls = 0 if are_few else len(self.region.modules)

    def leave(self, why: str) -> None:
        """Run eagerly from now on, as helpers have not compiled it; nothing is said."""
        self._ahead = None
        self.failure = why
        self.told.dropped.setdefault(self.region.name, why)

    @property
    def is_prepared(self) -> bool:
        """Whether helpers have its graphs."""
        return self._ahead is not None

    @property
    def is_awaited(self) -> bool:
        """Whether helpers are to compile it, and nothing of that was taken over yet."""
        return self._later is not None and self.failure is None and not self._at_once

    @property
    def is_waiting(self) -> bool:
        """Whether helpers have graphs of later sizes."""
        return self._sizes.are_waiting

    @property
    def is_to_be_seen(self) -> bool:
        """Whether helpers are to have its graphs, and it was not called since."""
        return self.is_prepared and self._num_calls == 0 and self.failure is None

    def restart(self) -> None:
        """Capture all graphs anew, and take what was compiled for them `ahead.at_once`."""
        self._ahead = None
        self._at_once = True
        # Those of a run that knows from the profile what was prepared: a step's.
        self._num_to_load = self.told.num_compiles, self._num_calls + len(self.region.modules)
        self.told = RegionFacts()
        self._num_compiling_calls = 0
        self._compiled = self._compile()

    @property
    def is_fixed(self) -> bool:
        """Whether each size and each stride that is met has a graph of its own.

        Helpers are given such graphs only. Strides may differ between two equal modules, one behind
        an attention in other memory format. By itself torch would take these strides for some that
        change ever again.
        """
        is_loading = self._at_once and (
            self.told.num_compiles < self._num_to_load[0] or self._num_calls < self._num_to_load[1]
        )
        return self.is_prepared or is_loading or self._later is not None

    @property
    def is_captured_once(self) -> bool:
        """Whether graphs of later sizes are made from one that is captured for any size."""
        return self._later is not None and not self._is_each_captured

    def install(self) -> None:
        """Put a `Forward` before each module's own."""
        for module in self.region.modules:
            place = seam.opened(module)
            if place is not None:
                place.region = Forward(self, module, self._is_on.owner())

    def remove(self) -> None:
        """Have the modules call their own `forward` again."""
        for module in self.region.modules:
            place = seam.of(module)
            if place is not None:
                place.region = None
                seam.close(module)
        self._hold.end(self.region.name)

    def on_call(self) -> None:
        """Called before each call of one of the modules, whichever way that goes."""
        if self._hold.is_on and torch.is_grad_enabled():
            self._hold.on_call(self.region.name)

    @property
    def is_used(self) -> bool:
        """Whether a call now goes the compiled way."""
        return self.failure is None and torch.is_grad_enabled() and self._is_on(self)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiled `forward` of one of the modules; eager where that fails."""
        with signals.heard():
            return self._call_heard(module, args, kwargs)

    def is_prepared_for(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a call with these takes no compiler's time."""
        if self._later is None:
            return True
        if module is self.region.modules[0]:
            # As a pass begins: what checkpointing makes again has to go the way it went.
            self._at_once |= self._sizes.take_over()
            for why in self._sizes.lost():
                self._say_of_graph(why)
            has_some = self._sizes.have_awaited
            if self.is_prepared:
                has_some = self._sizes.have(args, kwargs)
            # Its graphs would run as they were captured, which takes longer than the module's code.
            self._is_eager_meanwhile = has_some and self._later.has_all(self.region.name)
        if self.is_prepared:
            is_sent = self._is_eager_meanwhile
            return not is_sent and self._sizes.are_known(args, kwargs, again=0)
        is_known = self._sizes.are_known(args, kwargs, again=self._least_calls)
        is_awaited = is_known and self._sizes.are_awaited(args, kwargs)
        self.num_unready += is_awaited or not is_known
        return is_known and not (is_awaited and self._is_eager_meanwhile)

    def _call_heard(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, left = self.told.num_compiles, len(self._left)
        began = time.perf_counter()
        self._call = began, before
        numbers: list[torch.Tensor] | None = None
        if before == 0:
            numbers = guard.random_numbers()
        compiles = collecting.rarely() if before == 0 else contextlib.nullcontext()
        try:
            with dynamo.capturing(self), compiles:
                self._num_calls += 1
                return self._compiled(module, *args, **kwargs)
        except Exception as error:
            if not self._is_compilers(error):
                raise  # the module's own
            problem = guard.first_line(error)
        finally:
            if len(self._left) > left:
                self.num_unready += 1
                self._sizes.await_code(args, kwargs, self._left[left:])
            if self.told.num_compiles > before:
                self._after_compile(time.perf_counter() - began)
        if numbers is not None:
            graphs.rewind(numbers)
        # If this is the module's own after all, it is raised again.
        result = module.forward(*args, **kwargs)
        self.give_up(problem)
        return result

    def give_up(self, why: str) -> None:
        """Run eagerly from now on; say so in one line."""
        if self.failure is None:
            self.failure = why
            self.told.dropped.setdefault(self.region.name, why)
            say_first(f"compile: {self.region.name} runs eagerly: {why}", level="warning")

    def note_cached_call(self, place: str) -> None:
        """Dynamo went into a function under lru_cache, called there: it takes no results of it."""
        self._cached_calls.add(place)

    def capture_each(self) -> None:
        """Capture each size anew from the next call on: none is made of another's graph."""
        self._is_each_captured = True
        self._compiled = self._compile()

    def note_failure(self, place: str, why: str) -> None:
        """A part could not be captured: torch runs it eagerly."""
        if self.is_captured_once and self.told.num_compiles:
            self.capture_each()  # for any size it can't be; for one it was
            return
        text = f"{place}: {why}"
        if text not in self.told.breaks:
            self.told.breaks.append(text)
            say_first(
                f"compile: a part of {self.region.name} runs eagerly: {text}", level="warning"
            )
        if len(self.told.breaks) > MOST_COMPILES:
            self.give_up(text)

    def backend(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        """Take a graph from Dynamo, which calls this with each one that it has captured."""
        if self.is_captured_once and any_size.is_for_any(graph):
            if any_size.why_not(graph) is None:
                return any_size.GraphForAnySize(
                    graph, _Backend(self), failed=_weakly(self._not_for_any)
                )
            self.capture_each()
            return graph.forward
        self.told.num_compiles += 1
        self._hold.begin(self.region.name, len(self.region.modules))
        place = breaks.of(graph)
        if place is not None and place not in self.told.breaks:
            self.told.breaks.append(place)
        if graphs.is_checkpointed(graph):
            # The captured graph can't stand for the module: its own code runs, now as well.
            self.give_up("activation checkpointing inside it; checkpoint whole blocks instead")
            raise SkipFrame
        if cached_draws.are_in(graph, self._cached_calls):
            self.give_up("a function under lru_cache draws random numbers inside it")
            raise SkipFrame
        key = (graph.code, ahead.inputs_of(graph))
        if self._ahead is not None:
            self._sent.add(key)
            return self._send(graph, self._ahead)
        if self._later is not None and key not in self._sent:
            return self._leave(graph, inputs, self._later)
        if self.told.compile_s > self._budget_s:
            self.give_up(f"its compile budget of {self._budget_s:g} s is spent")
            return graph.forward
        if self._is_call_too_long():
            problem = f"its compile budget of {self._budget_s:g} s is spent"
            self.told.dropped.setdefault("the rest of it", problem)
            return graph.forward
        return self._graph(graph, CapturedGraph(inputs, is_ready=True))

    def _send(self, graph: GraphModule, helpers: Ahead) -> Runner:
        """Have helpers compile the graph. It runs as it was captured, until it is captured anew."""
        note = self._submit(graph, helpers, HelperJob())
        if note is None:
            return graph.forward
        return self._graph(graph, CapturedGraph(()), note)

    def _leave(self, graph: GraphModule, inputs: Sequence[Any], helpers: Ahead) -> Runner:
        """Have helpers compile the graph. It runs as it was captured, until that is taken over."""
        key, note = (graph.code, ahead.inputs_of(graph)), None
        if key not in self._jobs:
            self._jobs[key] = HelperJob()
            note = self._submit(graph, helpers, self._jobs[key])
        captured = CapturedGraph(inputs, self._jobs[key])
        captured.is_ready = captured.is_compiled
        if captured.is_ready:
            self._at_once = True
        else:
            self._left.append(captured)
        return self._graph(graph, captured, note)

    def _submit(
        self, graph: GraphModule, helpers: Ahead, job: HelperJob
    ) -> Callable[[set[int]], None] | None:
        """Have helpers compile the graph for the outputs that get gradients.

        Returns what wants to know these, where backward passes have to show them first.
        """
        places = border.differentiable(graph) or []
        key, known, name = Usage.key(graph, places), self._usage, self.region.name
        used = known.of(key, places, is_dynamic=False)
        if used is not None:
            helpers.submit(border.restricted(graph, places, used), name, job)
            return None
        send = helpers.expect(name, job)

        def note(used: set[int]) -> None:
            known.note(key, used)
            send(border.restricted(graph, places, frozenset(used)))

        return note

    def _graph(
        self,
        graph: GraphModule,
        captured: CapturedGraph,
        note: Callable[[set[int]], None] | None = None,
    ) -> Runner:
        """Runs the graph; compiled once it is `captured.is_ready`, and known for which outputs."""
        places = border.differentiable(graph) or []
        key, is_dynamic = Usage.key(graph, places), usage.is_dynamic(captured.inputs)
        context, reference, known = TracingContext.try_get(), weakref.ref(self), self._usage

        def make() -> graphs.CompiledGraph | None:
            region, used = reference(), known.of(key, places, is_dynamic=is_dynamic)
            if region is None or used is None or not captured.is_ready:
                return None
            region.told.num_compiles += captured.is_compiled
            inputs, captured.inputs = captured.inputs, ()
            with tracing(context):
                return region._made(border.restricted(graph, places, used), inputs, used)

        return graphs.Graph(
            graph,
            make=make,
            note=note or (lambda used: known.note(key, used)),
            unusual=known.count,
            tell=_weakly(self._settled),
            failed=_weakly(self._failed),
        )

    def _made(
        self, graph: GraphModule, inputs: Sequence[Any], used: frozenset[int]
    ) -> graphs.CompiledGraph:
        waiting = held_up.said(self.region.name, self._budget_s)
        with waiting, at_once() if self._at_once else contextlib.nullcontext():
            compiled, dropped = graphs.compile_with(
                self._policies, graph, inputs, may_try=self._may_try
            )
        return graphs.CompiledGraph(graph, compiled, dropped, used)

    def _is_call_too_long(self) -> bool:
        """Whether the graphs of this call, such as DDP's buckets have cut, have taken too long."""
        began, graphs_before = self._call
        spent_s = self.told.compile_s + time.perf_counter() - began
        is_first = self.told.num_compiles == graphs_before + 1
        return not is_first and spent_s > FORWARD_SHARE * self._budget_s

    def _failed(self, error: Exception) -> None:
        self._graph_error = error

    def _not_for_any(self, error: Exception) -> None:
        say_first(f"compile: {self.region.name}: {guard.first_line(error)}", level="debug")
        self.capture_each()

    def _is_compilers(self, error: Exception) -> bool:
        """Whether `error` came out of compiled code or the compiler."""
        from torch._dynamo.exc import TorchDynamoException
        from torch.utils.checkpoint import _StopRecomputationError

        of_graph, self._graph_error = error is self._graph_error, None
        # Checkpointing ends a recomputation so, out of whatever is running.
        return not isinstance(error, _StopRecomputationError) and (
            of_graph or isinstance(error, TorchDynamoException)
        )

    def _may_try(self, number: int, seconds: float) -> bool:
        if number == 0:
            return True
        saved = seconds * (len(self.region.modules) - 1)
        expected = SLOWER_POLICY * seconds / number
        return expected <= saved and self.told.compile_s + seconds + expected <= self._budget_s

    def _settled(self, settled: graphs.Settled) -> None:
        self.told.chosen[settled.chosen] = self.told.chosen.get(settled.chosen, 0) + 1
        fresh = {n: why for n, why in settled.dropped.items() if n not in self.told.dropped}
        self.told.dropped.update(fresh)
        if settled.chosen != EAGER:
            return
        causes = "; ".join(f"{name}: {why}" for name, why in settled.dropped.items())
        if set(self.told.chosen) == {EAGER}:
            self.give_up(causes)
        elif fresh:
            self._say_of_graph(causes)

    def _say_of_graph(self, why: str) -> None:
        text = f"compile: a graph of {self.region.name} runs eagerly: {why}"
        say_first(text, level="warning")

    def _after_compile(self, seconds: float) -> None:
        self.told.compile_s += seconds
        self._num_compiling_calls += 1
        if self._num_compiling_calls <= MOST_COMPILES or self._later is not None:
            return
        if self._is_dynamic:
            self.give_up(f"it was compiled anew {self._num_compiling_calls} times, again and again")
            return
        say_first(f"compile: {self.region.name} keeps changing: compiled once more for any size")
        self._is_dynamic = True
        self._num_compiling_calls = 0
        self._compiled = self._compile()

    def _compile(self) -> Callable[..., Any]:
        function = type(self.region.modules[0]).forward
        own = dynamo.own_code(function)
        # torch keeps what it compiled for a code object until it is told.
        weakref.finalize(self, reset_code, own.__code__).atexit = False
        return torch.compile(own, backend=_Backend(self), dynamic=self._is_dynamic)


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """The method, without keeping its object: torch keeps compiled graphs in the module's file."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        own = reference()
        if own is not None:
            own(argument)

    return call


class _Question:
    """The question before each call. The object whose method it is has the region: not kept."""

    def __init__(self, is_on: Callable[[CompiledRegion], bool]) -> None:
        is_method = isinstance(is_on, types.MethodType)
        self._reference: Callable[[], Callable[[CompiledRegion], bool] | None]
        self._reference = weakref.WeakMethod(is_on) if is_method else lambda: is_on

    def __call__(self, region: CompiledRegion) -> bool:
        is_on = self._reference()
        return is_on is not None and is_on(region)

    def owner(self) -> object:
        """Return the object that answers."""
        return self._reference()


class _Backend:
    """The region's `backend`, for torch to hold: it keeps back ends for the process's life."""

    compiler_name = "deepytorch"

    def __init__(self, region: CompiledRegion) -> None:
        self._region = weakref.ref(region)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        region = self._region()
        return graph.forward if region is None else region.backend(graph, inputs)


def install(
    chosen: Sequence[tuple[Region, list[Policy]]],
    *,
    budget_s: float,
    is_on: Callable[[CompiledRegion], bool],
    is_made: bool,
) -> list[CompiledRegion]:
    """Put compiled regions in place, of those for which a policy is tried.

    Args:
        chosen: regions and their policies.
        budget_s: of each.
        is_on: see `CompiledRegion`.
        is_made: whether torch's caches have what is to be compiled.
    """
    hold = Hold(budget_s * len(chosen))
    installed = []
    for region, tried in chosen:
        if tried:
            compiled = CompiledRegion(region, tried, budget_s=budget_s, is_on=is_on, hold=hold)
            if is_made:
                compiled.restart()
            compiled.install()
            installed.append(compiled)
    return installed
