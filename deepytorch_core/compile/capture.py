"""A module whose training passes are replayed as CUDA graphs, wherever that is the same.

Stands in for the module's `forward`, inside of its own hooks. Calls are told apart by everything
that Python code may go by: shapes and other arguments, autocast, every module's attributes, where
parameters lie. A kind of call that was met before is replayed, a new one is captured, and whatever
can't be replayed runs as it is: evaluation, calls within other calls' graphs, hooks inside.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from deepytorch_core import guard
from deepytorch_core.compile.replay import PLAIN, Call, NotCapturedError, Replay, Token
from deepytorch_core.console import say

# Kinds of calls that are captured when they are first met; later ones at their second time.
CAPTURED_AT_ONCE = 8
MOST_KINDS = 24
# Calls in a row that could not be replayed, after which nothing is tried any more.
MOST_MISSES = 32
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Sizes(Protocol):
    """Who decides what sizes a module is called with, and can keep to a few of them."""

    def use_few(self, is_on: bool) -> None:
        """From now on fill batches up to a few sizes, or take them as they are."""

    @property
    def num_tokens(self) -> int | None:
        """Of the last batch, without what it was filled up with."""


_sizes: weakref.WeakKeyDictionary[nn.Module, Sizes] = weakref.WeakKeyDictionary()


def register_sizes(module: nn.Module, sizes: Sizes | None) -> None:
    """Have `sizes` asked for few sizes while the module's passes are replayed; None: no more."""
    if sizes is None:
        _sizes.pop(module, None)
    else:
        _sizes[module] = sizes


def sizes_of(module: nn.Module) -> Sizes | None:
    """What was registered for the module."""
    return _sizes.get(module)


def why_not(root: nn.Module) -> str | None:
    """Why the module's passes can't be replayed, or None if they may be."""
    parameters = list(root.parameters())
    if not any(one.requires_grad for one in parameters):
        return "nothing of it is trained"
    if any(one.device.type != "cuda" or type(one) is not nn.Parameter for one in parameters):
        return "its parameters are not all plain ones on one GPU"
    if any(hasattr(one, "ds_id") for one in parameters):
        return "ZeRO-3 moves its parameters about"
    hooked = next(
        (name for name, one in root.named_modules() if one is not root and _hooked(one)), None
    )
    return None if hooked is None else f"there are hooks on {hooked}"


class Capture:
    """What stands in a module's `forward`.

    Args:
        root: the module.
        is_on: whether calls are to be replayed now.
    """

    def __init__(self, root: nn.Module, *, is_on: Callable[[], bool]) -> None:
        self.failure: str | None = None
        self.num_captured = 0
        self._root = root
        self._is_on = is_on
        self._forward: Callable[..., Any] = root.forward
        self._own = vars(root).get("forward")
        self._replays: dict[Any, Replay | None] = {}
        self._met: set[Any] = set()
        self._misses = 0
        self._pending: weakref.ref[Token] | None = None
        device = next(root.parameters()).device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def install(self) -> None:
        """Put a `Replayed` before the module's forward."""
        vars(self._root)["forward"] = Replayed(self, self._forward, self._root)

    def remove(self) -> None:
        """Put back what was there."""
        if isinstance(vars(self._root).get("forward"), Replayed):
            del vars(self._root)["forward"]
            if self._own is not None:
                vars(self._root)["forward"] = self._own
        self._replays.clear()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's pass: replayed, or as it is."""
        if not self._is_used() or self._is_pending():
            return self._forward(*args, **kwargs)
        try:
            call = Call.of(args, kwargs)
            key = (call.key(), self._state())
            replay = self._replay(key, call)
        except NotCapturedError as error:
            replay = None
            self._miss(str(error))
        if replay is None:
            return self._forward(*args, **kwargs)
        self._misses = 0
        token = Token()
        self._pending = weakref.ref(token)
        return replay(call, token)

    def _is_used(self) -> bool:
        return (
            self.failure is None
            and self._is_on()
            and self._root.training
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and not torch.compiler.is_compiling()
            and not _is_watched()
        )

    def _is_pending(self) -> bool:
        """Whether the last replay's backward pass is still to come: its memory is in use."""
        token = self._pending() if self._pending is not None else None
        return token is not None and not token.is_done

    def _replay(self, key: Any, call: Call) -> Replay | None:
        if key in self._replays:
            replay = self._replays[key]
            if replay is None:
                self._miss("its calls can't be replayed")
            return replay
        is_new = key not in self._met
        if is_new and len(self._replays) >= CAPTURED_AT_ONCE:
            if len(self._met) < 8 * MOST_KINDS:
                self._met.add(key)
            self._miss("it is called in ever new ways")
            return None
        if len(self._replays) >= MOST_KINDS:
            self._miss(f"it is called in more than {MOST_KINDS} ways")
            return None
        self._replays[key] = None
        self._replays[key] = self._captured(call)
        return self._replays[key]

    def _captured(self, call: Call) -> Replay:
        self.num_captured += 1
        before, attributes = self._state(), _attributes(self._root)
        try:
            with guard.preserved(self._root), guard.no_saved_tensor_hooks():
                replay = Replay(
                    self._forward,
                    self._root,
                    call,
                    pool=self._pool,
                    stream=self._stream,
                )
            if self._state() != before:
                raise NotCapturedError("a pass changes attributes of its modules")
            return replay
        except Exception as error:  # whatever a module may do that CUDA graphs can't
            _put_back(attributes)
            why = str(error) if isinstance(error, NotCapturedError) else guard.first_line(error)
            if not any(self._replays.values()):
                self._give_up(why)
            raise NotCapturedError(why) from error

    def _miss(self, why: str) -> None:
        self._misses += 1
        if self._misses >= MOST_MISSES:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
            name = type(self._root).__name__
            say(f"CUDA graphs of {name}: its passes are launched as before: {why}", level="warning")

    def _state(self) -> tuple[Any, ...]:
        """All that the module's Python code may go by, besides its arguments."""
        autocast = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        state: list[Any] = []
        for one in self._root.modules():
            if one is not self._root and _hooked(one):
                raise NotCapturedError(f"there are hooks on a {type(one).__name__} in it")
            for name, value in vars(one).items():
                if name.endswith("_hooks") or "_hooks_" in name:
                    continue  # the root's run outside of its pass
                if isinstance(value, PLAIN):
                    state.append((name, value))
                elif isinstance(value, list | dict | set):
                    state.append((id(value), len(value)))
                else:
                    state.append(id(value))
            for tensor in (*one._parameters.values(), *one._buffers.values()):
                if tensor is not None:
                    state.append((tensor.data_ptr(), tensor.requires_grad, tensor.dtype))
        settings = getattr(self._root, "config", None)
        if hasattr(settings, "__dict__"):
            state += [(name, v) for name, v in vars(settings).items() if isinstance(v, PLAIN)]
        return autocast, torch.are_deterministic_algorithms_enabled(), *state


class Replayed:
    """Stands in for the module's `forward`, on the module itself."""

    def __init__(self, capture: Capture, forward: Callable[..., Any], root: nn.Module) -> None:
        self._capture = capture
        self._root = root
        functools.update_wrapper(self, forward)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._root, "forward")  # a copy of the module is not replayed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._capture.call(args, kwargs)


def _attributes(root: nn.Module) -> list[tuple[nn.Module, dict[str, Any], dict[str, int]]]:
    """What modules' attributes are, and how long lists among them."""
    return [
        (one, dict(vars(one)), {n: len(v) for n, v in vars(one).items() if isinstance(v, list)})
        for one in root.modules()
    ]


def _put_back(attributes: list[tuple[nn.Module, dict[str, Any], dict[str, int]]]) -> None:
    for module, values, lengths in attributes:
        vars(module).clear()
        vars(module).update(values)
        for name, length in lengths.items():
            del values[name][length:]


def _hooked(module: nn.Module) -> bool:
    own = vars(module)
    return any(own.get(name) for name in _HOOKS)


def _is_watched() -> bool:
    """Whether something looks at, or changes, each operation of a pass."""
    from torch._C import _autograd as autograd
    from torch._C import _len_torch_dispatch_stack

    return (
        _len_torch_dispatch_stack() > 0
        or autograd._top_saved_tensors_default_hooks(True) is not None
        or bool(module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks)
        or bool(module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks)
    )
