"""One call of a module as two CUDA graphs: its forward and its backward pass, replayed.

Small models keep a GPU waiting for launches; a replay launches once. What a graph reads and writes
lies at fixed addresses in memory of its own, so inputs are copied in, and outputs and gradients are
copied out: nothing that a replay gives is written to later. Passes of different sizes share that
memory, as only one is under way at a time. A large model's gradients are not copied but lent, as
DDP and optimizers are done with them before the next pass; where they are not, that one is not
replayed before they have other memory (`borrowed_grads`).

Method: CUDA graphs as in `torch.cuda.make_graphed_callables`, whose results are overwritten by the
next call; tensors that don't own their memory as in torch's own CUDA graph trees.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from deepytorch_core import guard
from deepytorch_core.compile import graphs, host_draws
from deepytorch_core.compile.module_state import PLAIN
from deepytorch_core.guard.borrowed_grads import copies_of
from deepytorch_core.guard.recorder import NotCapturedError, RecordedGraph, Recorder
from deepytorch_core.nn.deferred_logits import DeferredLogits, WatchedLogits, read
from deepytorch_core.nn.weight_changes import steps, too_late

# Outputs that may be left out of a pass, and come when they are read.
_LATE = (DeferredLogits, WatchedLogits)
# Gradients of parameters that together are so large are not copied out.
LENT_BYTES = 1 << 28
# A gradient that two eager passes agree in but for this share of the norm of all gradients. Some
# cancel to nothing but rounding, as those of keys' biases in attention do; where sums have no fixed
# order that is different every time.
NOISE = 1e-4


@dataclass(frozen=True)
class Call:
    """A call's arguments, flat. `tensors` are those of `leaves`, each once."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Call:
        """The call; raises NotCapturedError for arguments that a graph could not be given anew.

        `kind`: of the device that tensors have to be on.
        """
        leaves, spec = tree_flatten((args, kwargs))
        tensors: dict[int, Tensor] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.device.type != kind:
                    what = f"{type(leaf).__name__} on {leaf.device}"
                    raise NotCapturedError(f"it is called with a {what}")
                tensors[id(leaf)] = leaf
            elif not isinstance(leaf, PLAIN):
                raise NotCapturedError(f"it is called with a {type(leaf).__name__}")
        return cls(tuple(leaves), spec, tuple(tensors.values()))

    def given(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Arguments with other tensors in place of these."""
        swapped = {id(mine): other for mine, other in zip(self.tensors, tensors, strict=True)}
        leaves = [swapped.get(id(leaf), leaf) for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def key(self) -> tuple[Any, ...]:
        """Return the common key of the calls that one graph serves."""
        places = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        plain = tuple(places.get(id(leaf), (type(leaf), leaf)) for leaf in self.leaves)
        shapes = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
            for tensor in self.tensors
        )
        return str(self.spec), plain, shapes


class Token:
    """Stands for one forward pass: alive until its results are gone, done after its backward pass.

    Args:
        repeated: called where the pass is made again, without graphs, for a backward pass.
    """

    def __init__(self, repeated: Callable[[], None] = lambda: None) -> None:
        self.is_done = False
        self.repeated = repeated


class Replay:
    """The graphs of one kind of call.

    Args:
        forward: what is captured.
        module: whose parameters get gradients, besides inputs that ask for them.
        call: the first such call.
        recorder: of all graphs of the module.
        used: outputs that have had gradients, see `note_used`; empty: it is the loss that gets one.
        formats: of numbers that it computes in. The least exact one says how alike two passes are.

    Raises NotCapturedError where the call waits for the GPU or goes by random numbers of the host.
    Raises it also where the call writes to its inputs, or computes something else when replayed.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        module: torch.nn.Module,
        call: Call,
        recorder: Recorder,
        *,
        used: Set[int] = frozenset(),
        formats: Set[torch.dtype] = frozenset(),
    ) -> None:
        self._forward = forward
        self._used = used
        self._format = guard.least_exact(formats)
        self._recorder = recorder
        self._kind = recorder.kind
        self._autocast = (
            torch.is_autocast_enabled(self._kind),
            torch.get_autocast_dtype(self._kind),
        )
        self._static = [
            torch.empty_like(tensor).requires_grad_(tensor.requires_grad) for tensor in call.tensors
        ]
        self._copy_in(call.tensors)
        self._weights = list(module.parameters())
        self._trained = [weight for weight in self._weights if weight.requires_grad]
        self._parameters = self._trained
        self._inputs = [tensor for tensor in self._static if tensor.requires_grad]
        self._buffers = list(module.buffers())
        # Each pass begins with the same, or those of a module that goes by them could not agree.
        self._before = guard.Contents(self._buffers)
        self._draws = False
        numbers = guard.random_numbers()
        given = call.given(self._static)
        expected = self._rehearse(given, numbers)
        with recorder.own_leaves(module) as leaf_of:
            leaves = [leaf_of[id(parameter)] for parameter in self._parameters]
            self._before.put_back()
            with recorder.rehearsing():
                tensors = _tensors(self._run(given)[0])
                found = self._gradients_of(tensors, leaves)
                if [gradient is None for gradient in found] != [
                    gradient is None for gradient in expected[1]
                ]:
                    raise NotCapturedError("it keeps parameters in places of its own")
                del tensors, found
            graphs.rewind(numbers)
            self._capture(given, leaves)
        # Each has a place among the gradients.
        self._wanted = [*self._parameters, *self._inputs]
        lent = self._lendable()
        self._lenders = self._lenders_of(lent)
        self._check(call, given, expected)
        del self._before
        self._let_go(lent)
        recorder.keep(self.graphs)

    def __call__(self, call: Call, token: Token) -> Any:
        """Replay on the call's inputs. Returns what the module would, connected to autograd."""
        wanted = [*self._parameters, *(tensor for tensor in call.tensors if tensor.requires_grad)]
        number = self._recorder.number() if self._draws else None
        host_draws.draw(self._num_host_draws)
        tensors = _Pass.apply(self, call, token, number, *wanted)  # type: ignore[no-untyped-call]
        return self._result(tensors, call, number)

    def run_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Outputs for these inputs, in memory of their own."""
        with torch.no_grad():
            self._copy_in(tensors)
            self._forward_graph.replay()
            return [output.clone() for output in self._outputs]

    def run_backward(self, seeds: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Gradients in memory of their own; None if these outputs' gradients were not foreseen."""
        given = [(static, seed) for static, seed in zip(self._seeds, seeds, strict=True)]
        if any(static is None and seed is not None for static, seed in given):
            return None
        with torch.no_grad():
            for static, seed in given:
                if static is not None:
                    static.zero_() if seed is None else static.copy_(seed)
            self._backward_graph.replay()
            gradients = self._given()
        # Tensors without a part in the outputs that were used have no gradient, rather than zeros.
        used = [under for under, seed in zip(self._under, seeds, strict=True) if seed is not None]
        reached = set[int]().union(*used)
        return [
            gradient if id(place) in reached else None
            for place, gradient in zip(self._wanted, gradients, strict=True)
        ]

    def _given(self) -> list[Tensor | None]:
        """Gradients for the engine: those of large models in the graph's memory, others copied."""
        may_lend = self._recorder.may_lend
        given: dict[int, Tensor] = {}
        left: dict[int, Tensor] = {}
        for parameter, gradient in zip(self._wanted, self._gradients, strict=True):
            if gradient is None:
                continue
            lend = self._lenders.get(id(gradient)) if may_lend else None
            # Hooks may hand gradients to other streams, which read them when others have let go.
            if lend is None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                left[id(gradient)] = gradient
            else:
                given[id(gradient)] = lend()
        given.update(zip(left, copies_of(list(left.values())), strict=True))
        return [None if gradient is None else given[id(gradient)] for gradient in self._gradients]

    def run_again(
        self, call: Call, number: Tensor | None, seeds: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients computed without graphs, for what a graph does not have or gives only once.

        `number`: where the random numbers were; None if it draws none.
        """
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in call.tensors]
        with torch.enable_grad():
            leaves = self._once_more(call, number, tensors)
        # Outside of the module's hooks, so that logits may come that hooks would have left out.
        outputs = [
            leaf for leaf, known in zip(leaves, self._leaves, strict=True) if known is Tensor
        ]
        wanted = [*self._parameters, *(tensor for tensor in tensors if tensor.requires_grad)]
        pairs = [
            (output, seed) for output, seed in zip(outputs, seeds, strict=True) if seed is not None
        ]
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            wanted,
            [seed for _, seed in pairs],
            allow_unused=True,
            create_graph=torch.is_grad_enabled(),
        )
        return list(found)

    def _once_more(self, call: Call, number: Tensor | None, tensors: Sequence[Tensor]) -> list[Any]:
        """Run the module without graphs; buffers and random numbers stay as they are."""
        enabled, dtype = self._autocast
        buffers = guard.Contents(self._buffers)
        args, kwargs = call.given(tensors)
        with guard.same_random_numbers(), torch.autocast(self._kind, dtype=dtype, enabled=enabled):
            if number is not None:
                self._recorder.rewind(number)
            leaves = tree_flatten(self._forward(*args, **kwargs))[0]
        buffers.put_back()  # the pass has been counted once already
        return leaves

    def _read_late(
        self, left_out: tuple[Call, Tensor | None, int, int], *tensors: Tensor
    ) -> Tensor:
        """Logits that the pass left out."""
        call, number, leaf, made_at = left_out
        if steps.may_have_changed(self._weights, since=made_at):
            raise too_late()
        found = self._once_more(call, number, tensors)[leaf]
        logits: Tensor = read(found)
        return logits

    @property
    def graphs(self) -> tuple[RecordedGraph, RecordedGraph]:
        """Those of the forward and the backward pass."""
        return self._forward_graph, self._backward_graph

    @property
    def is_differentiable(self) -> list[bool]:
        """Whether each output is differentiable."""
        return self._differentiable

    def _copy_in(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for static, given in zip(self._static, tensors, strict=True):
                static.copy_(given)

    def _run(self, given: tuple[Any, Any]) -> tuple[list[Any], TreeSpec]:
        args, kwargs = given
        with _own_casts():
            return tree_flatten(self._forward(*args, **kwargs))

    def _run_anew(self, given: tuple[Any, Any]) -> None:
        self._before.put_back()
        self._run(given)

    def _rehearse(
        self, given: tuple[Any, Any], numbers: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run it without graphs; compilers come to an end, and facts are noted."""
        host = guard.HostNumbers()
        inputs = [(tensor, tensor._version) for tensor in self._static]
        leaves, self._spec = self._run(given)
        tensors = _tensors(leaves)
        strange = [
            leaf
            for leaf in leaves
            if not isinstance(leaf, (*_LATE, *PLAIN))
            and (type(leaf) is not Tensor or leaf.device.type != self._kind)
        ]
        if strange:
            raise NotCapturedError(f"it returns a {type(strange[0]).__name__}, not on the GPU")
        if any(tensor._version != version for tensor, version in inputs):
            raise NotCapturedError("it writes to its inputs")
        self._leaves = [_kept(leaf) for leaf in leaves]
        self._differentiable = [tensor.requires_grad for tensor in tensors]
        if not any(self._differentiable):
            raise NotCapturedError("nothing that it returns has a gradient")
        # A loss is what gets a gradient where there is one; else whatever can have one.
        losses = [tensor.requires_grad and tensor.dim() == 0 for tensor in tensors]
        used = [
            number in self._used and tensor.requires_grad for number, tensor in enumerate(tensors)
        ]
        chosen = used if any(used) else losses if any(losses) else self._differentiable
        self._seeds = [
            graphs.seed(tensor, number) if chosen[number] else None
            for number, tensor in enumerate(tensors)
        ]
        # Tensors under no output have no gradient; those under another output than the loss may.
        self._under = [_leaves_under([tensor]) for tensor in tensors]
        reached = set[int]().union(*self._under)
        self._parameters = [parameter for parameter in self._parameters if id(parameter) in reached]
        gradients = self._gradients_of(tensors, self._parameters)
        now = guard.random_numbers()
        self._draws = not all(map(torch.equal, numbers[1:], now[1:]))
        self._num_host_draws = host_draws.count(lambda: self._run_anew(given), host, numbers)
        graphs.rewind(numbers)
        return [tensor.detach() for tensor in tensors], gradients

    def _gradients_of(
        self, outputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> list[Tensor | None]:
        pairs = [
            (o, seed) for o, seed in zip(outputs, self._seeds, strict=True) if seed is not None
        ]
        with torch.autocast(self._kind, enabled=False):
            return list(
                torch.autograd.grad(
                    [output for output, _ in pairs],
                    [*parameters, *self._inputs],
                    [seed for _, seed in pairs],
                    allow_unused=True,
                )
            )

    def _capture(self, given: tuple[Any, Any], parameters: Sequence[Tensor]) -> None:
        outputs: list[Tensor] = []  # with their autograd graph, which ends with the capture

        def forward() -> list[Tensor]:
            outputs[:] = _tensors(self._run(given)[0])
            return [output.detach() for output in outputs]

        record = self._recorder.record
        self._forward_graph, self._outputs = record(forward)
        self._backward_graph, self._gradients = record(
            lambda: self._gradients_of(outputs, parameters)
        )

    def _check(
        self, call: Call, given: tuple[Any, Any], expected: tuple[list[Tensor], list[Tensor | None]]
    ) -> None:
        numbers = guard.random_numbers()
        self._before.put_back()
        outputs = self.run_forward(call.tensors)
        gradients = self.run_backward(
            [None if seed is None else seed.clone() for seed in self._seeds]
        )
        graphs.rewind(numbers)
        found = (outputs, gradients)
        if self._differs(expected, found) is None:
            return
        # Sums in no fixed order differ from run to run.
        self._before.put_back()
        tensors = _tensors(self._run(given)[0])
        again = (
            [tensor.detach() for tensor in tensors],
            self._gradients_of(tensors, self._parameters),
        )
        graphs.rewind(numbers)
        noise = NOISE * guard.norm(*expected[1])
        unlike = self._differs(expected, again, looser=guard.AMPLIFIED, negligible=noise)
        if unlike is not None:
            raise NotCapturedError(f"given the same twice, its {unlike}")
        problem = self._differs(expected, found, again)
        if problem is not None:
            raise NotCapturedError(f"replayed, its {problem}")

    def _differs(
        self,
        expected: Any,
        found: Any,
        again: Any = (None, None),
        *,
        looser: float = 1.0,
        negligible: float = 0.0,
    ) -> str | None:
        for what, mine, theirs, other in zip(
            ("output", "gradient"), expected, found, again, strict=True
        ):
            problem = guard.difference(
                mine,
                theirs,
                dtype=self._format,
                what=what,
                sensitivity=other,
                looser=looser,
                negligible=negligible if what == "gradient" else 0.0,
            )
            if problem is not None:
                return problem
        return None

    def _lendable(self) -> set[int]:
        """The ids of gradients that parameters may have as they are: each in memory of its own.

        Not those that lie where the outputs' gradients do, or parameters: that is no graph's.
        """
        others = (*self._seeds, *self._static, *self._parameters, *self._buffers)
        taken = {tensor.untyped_storage().data_ptr() for tensor in others if tensor is not None}
        there = [gradient for gradient in self._gradients if gradient is not None]
        of_parameters = {id(gradient) for gradient in self._gradients[: len(self._parameters)]}
        places = Counter(gradient.untyped_storage().data_ptr() for gradient in there)
        alone = [
            gradient
            for gradient in there
            if id(gradient) in of_parameters
            and places[gradient.untyped_storage().data_ptr()] == 1
            and gradient.untyped_storage().data_ptr() not in taken
        ]
        is_large = (
            sum(gradient.numel() * gradient.element_size() for gradient in alone) >= LENT_BYTES
        )
        return {id(gradient) for gradient in alone} if is_large else set()

    def _lenders_of(self, lent: set[int]) -> dict[int, Callable[[], Tensor]]:
        """Map the ids of gradients to functions that lend them."""
        there = (
            gradient
            for gradient in self._gradients
            if gradient is not None and id(gradient) in lent
        )
        return {id(gradient): self._recorder.lender(gradient) for gradient in there}

    def _let_go(self, lent: set[int]) -> None:
        """Keep the addresses and leave the memory to the next capture: replays take turns."""
        self._outputs = [self._recorder.borrowed(output) for output in self._outputs]
        borrowed = {
            id(gradient): self._recorder.borrowed(gradient)
            for gradient in self._gradients
            if gradient is not None
        }
        self._gradients = [
            None if gradient is None else borrowed[id(gradient)] for gradient in self._gradients
        ]
        self._lenders = self._lenders_of({id(borrowed[key]) for key in lent})

    def _result(self, tensors: Sequence[Tensor], call: Call, number: Tensor | None) -> Any:
        found = iter(tensors)
        leaves: list[Any] = []
        for place, leaf in enumerate(self._leaves):
            if leaf is Tensor:
                leaves.append(next(found))
            elif isinstance(leaf, _LeftOut):
                left_out = (call, number, place, steps.count)
                compute = functools.partial(self._read_late, left_out)
                leaves.append(
                    DeferredLogits.make(
                        compute,
                        *call.tensors,
                        parameters=self._trained,
                        shape=leaf.shape,
                        dtype=leaf.dtype,
                        device=self._recorder.device,
                    )
                )
            else:
                leaves.append(leaf)
        return tree_unflatten(leaves, self._spec)


class _Pass(torch.autograd.Function):
    """Connects a replay to autograd."""

    @staticmethod
    def forward(
        ctx: Any, replay: Replay, call: Call, token: Token, number: Tensor | None, *_: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.call, ctx.token, ctx.number = replay, call, token, number
        outputs = replay.run_forward(call.tensors)
        fixed = [
            output for output, is_ in zip(outputs, replay.is_differentiable, strict=True) if not is_
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor | None) -> Any:
        replay, token = ctx.replay, ctx.token
        gradients = None
        if not token.is_done and not torch.is_grad_enabled():
            token.is_done = True
            gradients = replay.run_backward(seeds)
        if gradients is None:
            # A second backward pass, one that is to be differentiated, or of other outputs.
            token.repeated()
            gradients = replay.run_again(ctx.call, ctx.number, seeds)
            token.is_done = True
        return (None, None, None, None, *gradients)


@dataclass(frozen=True)
class _LeftOut:
    """The facts of an output that is computed when somebody reads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def note_used(result: Any, used: set[int]) -> None:
    """Add to `used` which of a pass's outputs get gradients, by their places among its tensors.

    A head may return a loss beside what the script makes its own loss of.
    """
    for number, output in enumerate(_tensors(tree_flatten(result)[0])):
        if output.grad_fn is not None:
            note = functools.partial(_note_gradient, used, number, output.output_nr)
            output.grad_fn.register_prehook(note)


def _note_gradient(
    used: set[int], number: int, place: int, gradients: Sequence[Tensor | None]
) -> None:
    if gradients[place] is not None:
        used.add(number)


def _kept(leaf: Any) -> Any:
    """Return the facts of an output before it is computed: itself, if it is no tensor."""
    if isinstance(leaf, _LATE):
        return _LeftOut(tuple(leaf.shape), leaf.dtype)
    return Tensor if isinstance(leaf, Tensor) else leaf


def _leaves_under(outputs: Sequence[Tensor]) -> set[int]:
    """The ids of the tensors that get gradients from these."""
    found: set[int] = set()
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return found


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """Outputs that a pass computes."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, _LATE)]


@contextlib.contextmanager
def _own_casts() -> Iterator[None]:
    """Autocast keeps cast weights for a step: a graph makes its own, and nobody else uses those.

    The cache is not switched off: compiled code would be compiled anew for that.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
