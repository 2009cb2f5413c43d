"""A module whose training passes are replayed as CUDA graphs, wherever that is the same.

Stands in for the module's `forward`, inside of its own hooks. Calls are told apart by everything
that Python code may go by: shapes and other arguments, autocast, every module's attributes, where
parameters lie. A kind of call that was met before is replayed, and a new one is captured. Whatever
can't be replayed runs as it is: evaluation, calls within other calls' graphs, hooks inside.
"""

from __future__ import annotations

import contextlib
import io
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepytorch_core import guard
from deepytorch_core.base import beside
from deepytorch_core.base.console import say
from deepytorch_core.compile import fixes, graphs, module_state, seam
from deepytorch_core.compile.replay import Call, Replay, Token, note_used
from deepytorch_core.guard.recorder import NotCapturedError, Recorder

# Kinds of calls that are captured when they are first met; later ones at their second time. Where
# sizes are few, all of them are.
CAPTURED_AT_ONCE = 8
MOST_KINDS = 24
# Calls in a row that could not be replayed, after which nothing is tried any more.
MOST_MISSES = 32
# Failed captures without a good one, after which it is taken to be impossible.
MOST_FAILURES = 3
# Calls that run as they are while their operations are watched, before anything is captured. What
# a call does that makes a state of the module says little of the next ones; so many may.
WATCHED_CALLS = 2
MOST_PREPARING = 4
# States of a module's attributes, after which it is taken to change them again and again, unless
# it keeps each for many passes: some make a mask anew in each epoch.
MOST_STATES = 8 * MOST_KINDS
LEAST_PASSES_OF_STATE = 64
# Copies of the gradients may take this part of the GPU's memory. Larger models keep a GPU busy
# anyway.
MOST_GRADIENTS = 0.05


class Sizes(Protocol):
    """Decides what sizes a module is called with, and can keep to a few of them."""

    def use_few(self, is_on: bool, by: str) -> None:
        """From now on fill batches up to a few sizes, or take them as they are."""

    @property
    def are_few(self) -> bool:
        """Whether the last batch has one of the few sizes: until they are chosen, none has."""

    @property
    def is_shared(self) -> bool:
        """Whether the module's trunk has the sizes: alone, or in passes that batches share."""

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the last batch, without those that fill it up."""

    @property
    def state(self) -> Hashable:
        """Everything that the pass goes by, beside the module's arguments and attributes."""


class Readiness(Protocol):
    """Knows whether a pass runs code that stays as it is."""

    @property
    def applies(self) -> bool:
        """Whether the pass that begins runs code that may be another the next time."""

    def is_reached(self) -> bool:
        """Tell whether the code of the pass that has ended stays as it is."""


_sizes: weakref.WeakKeyDictionary[nn.Module, Sizes] = weakref.WeakKeyDictionary()
# The names of those that want few. Sizes may be registered later, when a model trains packed.
_wishes: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def register_sizes(module: nn.Module, sizes: Sizes | None) -> None:
    """Have `sizes` asked for few sizes while the module's passes are replayed; None: no more."""
    if sizes is None:
        _sizes.pop(module, None)
    else:
        _sizes[module] = sizes
        for by in _wishes.get(module, ()):
            sizes.use_few(True, by)


def sizes_of(module: nn.Module) -> Sizes | None:
    """Return the sizes registered for the module."""
    return _sizes.get(module)


def use_few_sizes(module: nn.Module, is_on: bool, *, by: str) -> None:
    """Have batches filled up to a few sizes as long as somebody, `by` name, wants it."""
    wishes = _wishes.setdefault(module, set())
    (wishes.add if is_on else wishes.discard)(by)
    sizes = sizes_of(module)
    if sizes is not None:
        sizes.use_few(is_on, by)


def why_not(root: nn.Module) -> str | None:
    """Why the module's passes can't be replayed, or None if they may be."""
    parameters = list(root.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        return "nothing of it is trained"
    if any(
        parameter.device.type != Recorder.kind or type(parameter) is not nn.Parameter
        for parameter in parameters
    ):
        return "its parameters are not all plain ones on one GPU"
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "ZeRO-3 moves its parameters about"
    trained = sum(
        parameter.numel() * parameter.element_size()
        for parameter in parameters
        if parameter.requires_grad
    )
    if trained > MOST_GRADIENTS * _memory(parameters[0].device):
        return f"copies of its gradients would take {trained / 2**30:.1f} GiB"
    if isinstance(root, nn.DataParallel):
        return "nn.DataParallel runs on several GPUs"
    sizes = sizes_of(root)
    if sizes is not None and sizes.is_shared:
        return "its trunk's passes have sizes of their own"
    hooked = module_state.hooked(root, is_replayed=True)
    return None if hooked is None else f"there are hooks on {hooked}"


def _memory(device: torch.device) -> float:
    """Bytes of a GPU's memory."""
    if device.type != "cuda":
        return math.inf
    return float(torch.cuda.get_device_properties(device).total_memory)


class Capture:
    """Stands for a module's `forward`.

    Args:
        root: the module.
        is_on: whether calls are to be replayed now.
        variant: which of several ways that compute the same its code now takes; each has graphs.
        is_quiet: whether nobody is to hear of it where its passes can't be replayed.
        whole: the model that it is a part of, which has its sizes; None: it is all of one.
        readiness: asked after a pass whether its code stays what it was then. Kinds of calls are
            captured when it does; None: all are when they come.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        is_on: Callable[[], bool],
        variant: Callable[[], Hashable] = lambda: None,
        is_quiet: bool = False,
        whole: nn.Module | None = None,
        readiness: Readiness | None = None,
    ) -> None:
        self.failure: str | None = None
        self.num_captured = 0
        self.was_replayed = False
        """Whether the last pass was."""
        self._root = root
        self._whole = root if whole is None else whole
        self._is_on = is_on
        self._variant = variant
        self._is_quiet = is_quiet
        self._readiness = readiness
        self._ready: set[Any] = set()
        self._seam = seam.opened(root)
        self._forward: Callable[..., Any] = self._seam.unreplayed if self._seam else root.forward
        self._replays: dict[Any, Replay | str] = {}  # or why there is none
        self._met: set[Any] = set()
        self._num_kinds: Counter[Hashable] = Counter()  # of each variant, those that are gone, too
        self._misses: dict[Hashable, int] = {}  # in a row, of each variant
        self._num_watched = 0
        self._num_preparing = 0
        self._num_passes = 0
        self._used: set[int] = set()  # outputs of watched passes that have had gradients
        self._formats: set[torch.dtype] = set()  # that watched passes compute in
        self._num_failures = 0
        self._last_miss = "its passes were not met"
        self._pending: weakref.ref[Token] | None = None
        self._was_repeated = False
        self._num_repeated = 0  # passes in a row
        self._states = module_state.States(root)
        self._recorder = Recorder(next(root.parameters()).device)
        self._buffers = list(root.buffers())

    @property
    def has_replays(self) -> bool:
        """Whether some kind of call is replayed."""
        return any(isinstance(replay, Replay) for replay in self._replays.values())

    def replays(self, variant: Hashable) -> bool:
        """Whether some kind of call is replayed where its code goes that way."""
        return self.failure is None and any(
            isinstance(replay, Replay) and key[0] == variant
            for key, replay in self._replays.items()
        )

    @property
    def problem(self) -> str | None:
        """Why no call is replayed, if none is."""
        if self.failure is None and not self.has_replays:
            return self._last_miss
        return self.failure

    def install(self) -> None:
        """Stand for the module's forward."""
        if self._seam is not None:
            self._seam.replay = self

    def remove(self) -> None:
        """Put back what was there."""
        if self._seam is not None:
            self._seam.replay = None
            seam.close(self._root)
        self._drop()

    def _drop(self) -> None:
        """Let go of all graphs; gradients in their memory get their own."""
        if self._replays:
            self._recorder.reclaim(self._root.parameters())
            self._replays.clear()
            self._recorder.let_go()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's pass: replayed, or as it is."""
        self.was_replayed = False
        if self.failure is not None and not self._is_pending():
            self._drop()
        self._count_repeated()
        sizes = sizes_of(self._whole)
        is_whole = self._root is self._whole
        is_early = sizes is not None and (not sizes.are_few or (is_whole and sizes.is_shared))
        if is_early or not self._is_used() or self._is_pending() or self._is_refused():
            return self._launched(args, kwargs)
        if self._num_watched < WATCHED_CALLS:
            return self._watched(args, kwargs)
        if not self._recorder.reclaim(self._root.parameters()):
            self._miss("somebody keeps the gradients of the last step")
            return self._launched(args, kwargs)
        try:
            call = Call.of(args, kwargs, self._recorder.kind)
            state = self._states.now()
            self._num_passes += 1
            if self._states.count > max(MOST_STATES, self._num_passes / LEAST_PASSES_OF_STATE):
                self._give_up("it changes attributes of its modules again and again")
                return self._launched(args, kwargs)
            key = (self._variant(), call.key(), state, None if sizes is None else sizes.state)
            readiness = self._readiness
            is_known = key in self._replays or key in self._ready
            if readiness is not None and readiness.applies and not is_known:
                return self._prepared(key, readiness, args, kwargs)
            replay = self._replay(key, call, are_few=sizes is not None)
        except NotCapturedError as error:
            replay = None
            self._miss(str(error))
        if replay is None:
            return self._launched(args, kwargs)
        self._misses.pop(key[0], None)
        self.was_replayed = True
        self._recorder.take_turn()
        token = Token(self._note_repeated)
        self._pending = weakref.ref(token)
        result = replay(call, token)
        beside.launched()
        return result

    def _launched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pass as it is. If memory is lacking for it, that of the graphs is given back."""
        is_timed = self._root.training and not self._is_on()
        is_plain = not self.has_replays or self._is_pending() or is_timed
        is_others = torch.compiler.is_compiling() or self._recorder.is_captured_now()
        if is_plain or is_others:
            return self._forward(*args, **kwargs)
        attempt = _Attempt(self._root, self._buffers, (args, kwargs))
        try:
            return self._forward(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not attempt.may_be_repeated():
                raise
        self._give_up("another pass needs their memory")
        self._drop()
        torch.cuda.empty_cache()
        graphs.rewind(attempt.numbers)
        return self._forward(*args, **kwargs)

    def _prepared(
        self, key: Any, readiness: Readiness, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The pass as it is; the next of its kind is captured if the code stays as it is."""
        result = self._launched(args, kwargs)
        if len(self._ready) >= 8 * MOST_KINDS:
            self._miss("it is called in ever new ways")
        elif readiness.is_reached():
            self._ready.add(key)
        return result

    def _count_repeated(self) -> None:
        """Give up where replays only come on top of the passes that the training needs."""
        self._num_repeated = self._num_repeated + 1 if self._was_repeated else 0
        self._was_repeated = False
        if self._num_repeated >= MOST_MISSES:
            self._give_up("its backward passes are made twice, or from other outputs than the loss")

    def _note_repeated(self) -> None:
        self._was_repeated = True

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pass as it is; and why it can't be replayed, from the operations in it.

        Extra passes of a module that communicates would leave other ranks waiting. Code that Dynamo
        meets under a dispatch mode is never compiled again, so all runs eagerly here.
        """
        before = self._states.now()
        with torch.compiler.set_stance("force_eager"), CaptureWatch() as watch:
            result = self._forward(*args, **kwargs)
        self._formats |= watch.formats
        # It may have made a mask on the host, which the next ones find on the GPU.
        is_preparing = watch.problem is not None and self._states.now() != before
        if is_preparing and self._num_preparing < MOST_PREPARING:
            self._num_preparing += 1
        else:
            self._num_watched += 1
            if watch.problem is not None:
                self._give_up(watch.problem)
        note_used(result, self._used)
        return result

    def _is_used(self) -> bool:
        return (
            self.failure is None
            and self._is_on()
            and self._root.training
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and not _is_watched()
        )

    def _is_pending(self) -> bool:
        """Whether the last replay's backward pass is still to come: its memory is in use."""
        token = self._pending() if self._pending is not None else None
        return token is not None and not token.is_done

    def _replay(self, key: Any, call: Call, *, are_few: bool) -> Replay | None:
        if key in self._replays:
            return self._known(self._replays[key])
        is_new = key not in self._met
        if is_new and not are_few and self._num_kinds[key[0]] >= CAPTURED_AT_ONCE:
            if len(self._met) < 8 * MOST_KINDS:
                self._met.add(key)
            self._miss("it is called in ever new ways")
            return None
        living = self._states.living()
        of_way = [known for known in self._replays if known[0] == key[0] and known[2] in living]
        if len(of_way) >= MOST_KINDS:
            self._miss(f"it is called in more than {MOST_KINDS} ways")
            return None
        self._num_kinds[key[0]] += 1
        try:
            self._replays[key] = self._captured(call)
            self._drop_dead(living)
        except NotCapturedError as error:
            self._replays[key] = str(error)
        return self._known(self._replays[key])

    def _drop_dead(self, living: set[int]) -> None:
        """Let go of graphs of states that can't come back; a new one keeps their memory."""
        for key in [key for key in self._replays if key[2] not in living]:
            replay = self._replays.pop(key)
            if isinstance(replay, Replay):
                self._recorder.drop(replay.graphs)
        for keys in (self._met, self._ready):
            keys -= {key for key in keys if key[2] not in living}

    def _known(self, replay: Replay | str) -> Replay | None:
        if isinstance(replay, Replay):
            return replay
        self._miss(replay)
        return None

    def _captured(self, call: Call) -> Replay:
        hooked = module_state.hooked(self._root, is_replayed=True)
        if hooked is not None:
            raise NotCapturedError(f"there are hooks on {hooked}")
        generator = module_state.own_generator(self._root)
        if generator is not None:
            raise NotCapturedError(f"{generator} is a generator of random numbers of its own")
        missing = self._recorder.lacks_memory()
        if missing is not None:
            raise NotCapturedError(missing)
        self.num_captured += 1
        before, attributes = (
            self._states.now(),
            module_state.attributes_of(self._root),
        )
        try:
            said = io.StringIO()
            with (
                guard.preserved(self._root),
                guard.no_saved_tensor_hooks(),
                contextlib.redirect_stdout(said),
                fixes.during(self._root),
            ):
                region = self._seam.region if self._seam is not None else None
                forward = fixes.applied(self._root, region or self._forward)
                facts: dict[str, Any] = {"used": self._used, "formats": self._formats}
                replay = Replay(forward, self._root, call, self._recorder, **facts)
                is_changed = self._states.now() != before
            if is_changed or said.getvalue():
                self._recorder.drop(replay.graphs)
                changed = "a pass changes attributes of its modules"
                raise NotCapturedError(changed if is_changed else "it prints")
            return replay
        except Exception as error:  # whatever a module may do that CUDA graphs can't
            module_state.put_back(attributes)
            why = str(error) if isinstance(error, NotCapturedError) else guard.first_line(error)
            self._num_failures += 1
            if self._num_failures >= MOST_FAILURES and not self.has_replays:
                self._give_up(why)
            if self._recorder.is_spoiled:
                self._give_up(why)
            raise NotCapturedError(why) from error

    def _is_refused(self) -> bool:
        """Whether passes could not be replayed this way, again and again, but are another way."""
        return self._misses.get(self._variant(), 0) >= MOST_MISSES

    def _miss(self, why: str) -> None:
        variant = self._variant()
        self._misses[variant] = self._misses.get(variant, 0) + 1
        self._last_miss = why
        is_another = any(
            isinstance(replay, Replay) and key[0] != variant
            for key, replay in self._replays.items()
        )
        if self._is_refused() and not is_another:
            self._give_up(why)
        elif self._is_refused():
            name = type(self._root).__name__
            say(f"CUDA graphs of {name}: passes of one way are launched: {why}", level="debug")

    def _give_up(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
            self._states.forget()
            name, level = type(self._root).__name__, "debug" if self._is_quiet else "warning"
            say(f"CUDA graphs of {name}: its passes are launched as before: {why}", level=level)


class _Attempt:
    """A pass that may fail halfway, and what it would then have done to others."""

    def __init__(self, root: nn.Module, buffers: list[torch.Tensor], given: Any) -> None:
        self._root = root
        self._buffers = buffers
        self._given = given
        self._before = self._now()
        # In evaluation none are drawn, and looking takes its time.
        self.numbers = guard.random_numbers() if root.training else ()

    def may_be_repeated(self) -> bool:
        """Whether it has written to nothing that it was given, a cache for one, or has counted."""
        things, versions = self._now()
        known = (torch.Tensor, *module_state.PLAIN)
        # Norms write to their statistics without a trace.
        norms = self._root.modules() if self._root.training else ()
        return (
            not any(
                isinstance(module, _NormBase) and module.track_running_stats for module in norms
            )
            and all(isinstance(thing, known) for thing in things)
            and None not in versions
            and [id(thing) for thing in things] == [id(thing) for thing in self._before[0]]
            and versions == self._before[1]
        )

    def _now(self) -> tuple[list[Any], list[int | None]]:
        """Return all it could write to, and how often tensors of it were; None if nobody counts."""
        # In evaluation they are hardly ever other ones, and to find them takes as long.
        things = list(self._root.buffers()) if self._root.training else list(self._buffers)
        things += tree_leaves(self._given)
        tensors = [thing for thing in things if isinstance(thing, torch.Tensor)]
        return things, [None if tensor.is_inference() else tensor._version for tensor in tensors]


class CaptureWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for operations that a graph would freeze, or do again where they must not be.

    It notes the floating-point formats of results, too: a wrapper of the forward may switch
    autocast on within, as Accelerate's does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem: str | None = None
        self.formats: set[torch.dtype] = set()
        self._assignments = _Assignments()

    def __enter__(self) -> CaptureWatch:
        self._assignments.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)  # type: ignore[no-untyped-call]
        self._assignments.__exit__(*why)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = (leaf for leaf in tree_leaves((result,)) if isinstance(leaf, torch.Tensor))
        self.formats.update(tensor.dtype for tensor in made if tensor.is_floating_point())
        if self.problem is None:
            if "c10d" in func.namespace:
                self.problem = "it communicates with other ranks"
            elif func is torch.ops.aten.fill_.Tensor and self._assignments.of_number:
                pass  # torch makes a tensor of the number
            elif _has_host_tensor(args) and _has_gpu_tensor((result,)):
                self.problem = f"it reads a tensor on the host ({func})"
        return result


class _Assignments(TorchFunctionMode):
    """Knows of `tensor[index] = number` while that is carried out."""

    of_number = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of_number = func is torch.Tensor.__setitem__ and isinstance(
            args[-1], bool | int | float | complex
        )
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.of_number = False


def _has_host_tensor(args: Any) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves(args)
    )


def _has_gpu_tensor(args: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in tree_leaves(args))


def _is_watched() -> bool:
    """Whether something looks at, or changes, each operation of a pass, beside `seam`'s cases."""
    from torch._C import _autograd as autograd

    return torch.is_anomaly_enabled() or autograd._top_saved_tensors_default_hooks(True) is not None
