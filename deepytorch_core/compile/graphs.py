"""One captured graph: its eager form, compiled candidates, and the check of one against the other.

A captured graph is a function without side effects but for random numbers and inputs written in
place. So it can be run again and again on the inputs of its first call, while the user's module
runs once. There each candidate is compared with the graph's own eager form, outputs and gradients;
what differs is dropped, and of several that don't the fastest stays.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from deepytorch_core import guard
from deepytorch_core.compile import border, kernel_timing, passage
from deepytorch_core.compile.border import Border
from deepytorch_core.compile.graph_facts import GraphFacts
from deepytorch_core.compile.policies import EAGER, Policy, Runner

_TAG = "-repeatable-backward"
# float16 ends at 65504. A way may add up in another order, or go through larger numbers before it
# comes to the same gradients. It gets this much room below 65504 before it counts as wrong.
_LARGEST_IN_FLOAT16 = 65504 / 16
# Gradients are made smaller by this if even those of the graph's own form are no numbers.
_STEP_DOWN, _LEAST_SCALE = 2.0**-8, 2.0**-24


@dataclass
class Settled:
    """The outcome for a graph: the policy that runs it, median seconds, and why others don't."""

    chosen: str
    times_s: dict[str, float]
    dropped: dict[str, str]


@dataclass
class CompiledGraph:
    """The compiled code of a graph.

    Attributes:
        graph: what it stands for: the captured one, without gradients of outputs that get none.
        compiled: candidates by policy, in order of preference.
        dropped: policies that could not compile it, and why.
        used: the outputs that have gradients.
    """

    graph: GraphModule
    compiled: dict[str, Runner]
    dropped: dict[str, str]
    used: frozenset[int]


class Graph:
    """Runs a captured graph; settles at the first call which way.

    Args:
        graph: as Dynamo captured it.
        make: compiles it, for the outputs that get gradients; asked until it has something. Calls
            run eagerly meanwhile, and backward passes show which outputs these are.
        note: told of outputs that get gradients.
        unusual: told of each backward pass whether it was another than the compiled one's.
        tell: told when the graph has settled.
        failed: told what a call raises, which then goes on its way.
    """

    def __init__(
        self,
        graph: GraphModule,
        *,
        make: Callable[[], CompiledGraph | None],
        note: Callable[[set[int]], None],
        unusual: Callable[[bool], None],
        tell: Callable[[Settled], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._graph = graph
        self._made = make()
        # Holds what the graph was captured with, parameters among that. Not in an attribute: torch
        # copies those to a function that it keeps.
        self._makers = [make] if self._made is None else []
        self._note = note
        self._unusual = unusual
        self._tell = tell
        self._failed = failed
        self._run: Runner | None = None
        self._facts: GraphFacts | None = None
        self._border: Border | None = None

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            if any(isinstance(arg, FakeTensor) for arg in args):
                return self._shapes(args)
            if not self._is_ready(args):
                return self._over_border(self._graph.forward, args)
        assert self._run is not None
        try:
            return self._over_border(self._run, args)
        except Exception as error:
            self._failed(error)
            raise

    def _over_border(self, run: Any, args: Sequence[Any]) -> Any:
        own = self._border
        if own is None or not own.is_needed_for(args):
            return run(*args)
        return own(run, args) if own.is_open_for(args) else passage.through(own, run, args)

    def _is_ready(self, args: Sequence[Any]) -> bool:
        """Settle, if it is compiled; else have a border find out for what."""
        if self._facts is None:
            problem = self._look(args)
            if problem is not None:
                names = self._made.compiled if self._made is not None else ["border"]
                self._end(EAGER, {}, dict.fromkeys(names, problem))
                return True
        if border.is_made_again():
            return False
        if self._makers:
            self._made = self._makers[0]()
        if self._made is None:
            return False
        self._makers.clear()
        self._settle(self._made, args)
        return True

    def _look(self, args: Sequence[Any]) -> str | None:
        """Make the border; returns why the graph can't be compiled for all that."""
        try:
            self._facts = facts = GraphFacts.of(self._graph.forward, args, _copies)
        except Exception as error:  # tensors of a kind that can't be copied or compared, say
            return f"it can't be checked: {guard.first_line(error)}"
        if facts.problem is not None:
            return facts.problem if len(facts.differentiable) > 1 else None
        if facts.differentiable:
            used = None if self._made is None else self._made.used
            self._border = Border(
                self._graph, facts, used=used, note=self._note, unusual=self._unusual
            )
        return None

    def _shapes(self, args: Sequence[Any]) -> Any:
        """Answer what torch asks, as it compiles, of each part that DDP's buckets cut a graph into.

        AOTAutograd makes the first call of what it compiled such a call, so each candidate gets
        its own. Nothing may be measured yet: a backward pass would wait for the compiler's lock.
        """
        shapes, made = None, self._made
        if made is not None:
            for name, run in list(made.compiled.items()):
                try:
                    shapes = run(*args)
                except Exception as error:  # whatever compiled code may raise
                    made.dropped[name] = guard.first_line(error)
                    del made.compiled[name]
        return self._graph.forward(*args) if shapes is None else shapes

    def _settle(self, made: CompiledGraph, args: Sequence[Any]) -> None:
        times: dict[str, float] = {}
        chosen = EAGER
        if made.compiled:
            with (
                guard.no_saved_tensor_hooks(),
                _disable_current_modes(),
                guard.same_random_numbers(),
                kernel_timing.in_few_rounds(),
                _repeatable_backward(),  # torch leaves backward passes to their first call
            ):
                try:
                    good = _checked(made, args)
                    if len(good) > 1:
                        times = _times(good, args)
                        chosen = min(times, key=lambda name: times[name])
                    elif good:
                        (chosen,) = good
                except Exception as error:  # memory is lacking beside the training, for one
                    made.dropped.update(dict.fromkeys(made.compiled, guard.first_line(error)))
            torch.clear_autocast_cache()
        if self._border is not None:
            self._border.used = made.used
        self._end(chosen, times, made.dropped)

    def _end(self, chosen: str, times: dict[str, float], dropped: dict[str, str]) -> None:
        self._makers.clear()
        made = self._made
        if chosen == EAGER or made is None:
            self._run, self._border = self._graph.forward, None
        else:
            self._run = made.compiled[chosen]
        if made is not None:
            made.compiled.clear()
        self._tell(Settled(chosen, times, dropped))


def _checked(made: CompiledGraph, args: Sequence[Any]) -> dict[str, Runner]:
    """The candidates that compute what the eager graph computes."""
    eager: Runner = made.graph.forward
    state = guard.random_numbers()
    reference = _Results.of(eager, args)
    while (scale := reference.scale_to_fit()) != reference.scale:
        rewind(state)
        reference = _Results.of(eager, args, scale)
    limits: _Results | None = None
    good = {}
    for name, run in made.compiled.items():
        rewind(state)
        try:
            found = _Results.of(run, args, scale)
            problem = reference.against(found)
            if problem is not None and limits is None:
                # How far rounding of the inputs alone carries: some graphs amplify it.
                rewind(state)
                off = [_rounded(arg) for arg in args]
                limits = _Results.of(eager, off, scale)
            if problem is not None:
                problem = reference.against(found, limits)
        except Exception as error:  # whatever compiled code may raise
            problem = guard.first_line(error)
        if problem is None:
            good[name] = run
        else:
            made.dropped[name] = problem
    rewind(state)
    return good


def compile_with(
    policies: Sequence[Policy],
    graph: GraphModule,
    inputs: Sequence[Any],
    *,
    may_try: Callable[[int, float], bool],
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Compile `graph` by each policy; returns what could be compiled, and why the rest couldn't.

    `may_try(number, seconds so far)` is asked before each policy.
    """
    compiled: dict[str, Runner] = {}
    dropped: dict[str, str] = {}
    began = time.perf_counter()
    for number, policy in enumerate(policies):
        if not may_try(number, time.perf_counter() - began):
            dropped[policy.name] = "no time left for it"
            continue
        # A policy may change the graph: each has its own, over the same attributes.
        own = GraphModule(graph, copy.deepcopy(graph.graph))
        own.meta = dict(graph.meta)
        try:
            with _repeatable_backward():
                compiled[policy.name] = policy.compile_graph(own, inputs)
        except RestartAnalysis:
            raise  # to Dynamo, which captures the graph anew: a float that must be a constant, say
        except Exception as error:  # a back end may raise anything
            dropped[policy.name] = guard.first_line(error)
    return compiled, dropped


def is_checkpointed(graph: GraphModule) -> bool:
    """Whether activation checkpointing is part of the graph.

    Outside of a compiler such a graph draws other random numbers when it computes anew.
    """
    return any(
        isinstance(node.target, HigherOrderOperator)
        and str(node.target).endswith("activation_checkpoint")
        for module in graph.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
    )


@contextlib.contextmanager
def _repeatable_backward() -> Iterator[None]:
    """While open, backward passes are compiled that overwrite nothing they have saved.

    Else `retain_graph=True` would raise. The caches of kernels don't go by it, so they get a tag.
    """
    import torch._functorch.config as functorch

    caches: Any = importlib.import_module("torch.compiler.config")
    tag = caches.cache_key_tag.removesuffix(_TAG) + _TAG
    with functorch.patch(donated_buffer=False), caches.patch(cache_key_tag=tag):
        yield


def _allow_repeats(outputs: Sequence[Any]) -> None:
    """Tell what torch has compiled so, as it asks the setting again at each backward pass."""
    nodes = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor)]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        facts: Any = getattr(getattr(node, "_forward_cls", None), "metadata", None)
        if getattr(facts, "bw_donated_idxs", ()) is None:
            facts.bw_donated_idxs = []
        nodes.extend(following for following, _ in node.next_functions)


@dataclass
class _Results:
    outputs: list[Any]
    gradients: list[Any]
    inputs: list[Any]
    dtype: torch.dtype | None
    scale: float

    @classmethod
    def of(cls, run: Runner, args: Sequence[Any], scale: float = 1.0) -> _Results:
        """Run `run` on copies of `args`; return outputs, gradients, and inputs it wrote to.

        `scale` is of the gradients that the outputs get.
        """
        leaves, passed = _copies(args)
        device = _device_type(passed)
        outputs = run(*passed)
        outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        _allow_repeats(outputs)
        gradients = _gradients(outputs, leaves, device, scale)
        written = [
            value.detach()
            for value, leaf in zip(passed, leaves, strict=True)
            if isinstance(value, torch.Tensor) and leaf is None
        ]
        lower = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kept = [
            output.detach() if isinstance(output, torch.Tensor) else output for output in outputs
        ]
        return cls(kept, gradients, written, lower, scale)

    def scale_to_fit(self) -> float:
        """A scale with which what computes in float16 stays clear of its largest number.

        As a GradScaler finds it: a power of two, so that it rounds nothing.
        """
        gradients = [
            gradient for gradient in self.gradients if gradient is not None and gradient.numel()
        ]
        tensors = [
            value for value in (*gradients, *self.outputs) if isinstance(value, torch.Tensor)
        ]
        formats = {self.dtype, *(tensor.dtype for tensor in tensors)}
        if torch.float16 not in formats or self.scale <= _LEAST_SCALE:
            return self.scale
        sizes = [float(gradient.detach().abs().max()) for gradient in gradients]
        if not all(map(math.isfinite, sizes)):
            return self.scale * _STEP_DOWN
        largest = max(sizes, default=0.0)
        if largest <= _LARGEST_IN_FLOAT16:
            return self.scale
        return self.scale * 2.0 ** -math.ceil(math.log2(largest / _LARGEST_IN_FLOAT16))

    def against(self, found: _Results, limits: _Results | None = None) -> str | None:
        """Say what differs by more than `limits`, from rounded inputs, differ from these."""
        for what in ("outputs", "gradients", "inputs"):
            mine, theirs = getattr(self, what), getattr(found, what)
            rounded = getattr(limits, what) if limits else None
            name = {"outputs": "output", "gradients": "gradient", "inputs": "input"}[what]
            unit = self.scale if what == "gradients" else 1.0
            problem = guard.difference(
                mine, theirs, dtype=self.dtype, what=name, sensitivity=rounded, unit=unit
            )
            if problem is not None:
                return problem
        return None


def _gradients(
    outputs: Sequence[Any], leaves: Sequence[torch.Tensor | None], device: str, scale: float = 1.0
) -> list[Any]:
    wanted = [leaf for leaf in leaves if leaf is not None]
    sources = [
        output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    if not wanted or not sources or not torch.is_grad_enabled():
        return []
    seeds = [scale * seed(source, number) for number, source in enumerate(sources)]
    with torch.autocast(device, enabled=False):  # as backward() runs outside of it
        return list(torch.autograd.grad(sources, wanted, seeds, allow_unused=True))


def seed(output: torch.Tensor, number: int) -> torch.Tensor:
    """A gradient of no special form, without touching the generators in use."""
    generator = torch.Generator(output.device).manual_seed(number)
    return torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=generator)


def _copies(args: Sequence[Any]) -> tuple[list[torch.Tensor | None], list[Any]]:
    """For each argument the leaf to ask for its gradient, or None, and what to pass."""
    leaves: list[torch.Tensor | None] = []
    passed: list[Any] = []
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            leaves.append(None)
            passed.append(arg)
            continue
        own = _copy(arg)
        if not (arg.requires_grad and torch.is_grad_enabled()):
            leaves.append(None)
            passed.append(own)
            continue
        own.requires_grad_()
        leaves.append(own)
        # Compiled code relies on which inputs are leaves, and on their strides.
        passed.append(own if arg.is_leaf else own.clone() if _is_dense(own) else own.view_as(own))
    return leaves, passed


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own with the same strides."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return tensor.detach().clone()
    if any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return tensor.detach()  # expanded: nothing may write to it
    last = sum((size - 1) * s for size, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(last + 1, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a clone has the same strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _rounded(arg: Any) -> Any:
    """The argument, off by a rounding error in each element."""
    if not isinstance(arg, torch.Tensor) or not arg.is_floating_point():
        return arg
    copy_ = _copy(arg).copy_(guard.rounded(arg)) if arg.numel() else arg
    return (
        copy_.requires_grad_(arg.requires_grad)
        if arg.is_leaf or not arg.requires_grad
        else (copy_.requires_grad_().clone())
    )


def _times(good: Mapping[str, Runner], args: Sequence[Any]) -> dict[str, float]:
    leaves, passed = _copies(args)
    device = next((arg.device for arg in passed if isinstance(arg, torch.Tensor)), None)

    def arm(run: Runner) -> Callable[[], object]:
        def call() -> None:
            again, own = _copies(args)
            outputs = run(*own)
            outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
            _gradients(outputs, again, _device_type(own))

        return call

    arms = {name: arm(run) for name, run in good.items()}
    samples = guard.interleaved(arms, device or torch.device("cpu"), rounds=5)
    return {name: guard.median(row) for name, row in samples.items()}


def _device_type(args: Sequence[Any]) -> str:
    return next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")


def rewind(state: Sequence[torch.Tensor]) -> None:
    """Put the generators to where `guard.random_numbers` has seen them; nowhere if it has none."""
    if not state:
        return
    host, *devices = state
    torch.set_rng_state(host)
    if devices:
        torch.cuda.set_rng_state_all(list(devices))
