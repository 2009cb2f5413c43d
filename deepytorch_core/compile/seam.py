"""The place where calls of a module are taken over, so that the module itself stays stock's.

torch asks each module for `_compiled_call_impl` when it is called, and leaves that out of copies
and of what is saved. A `Seam` lies there. The module's class, its `forward` and its hooks stay as
they are for whoever inspects, scripts, traces or exports it. Such callers, and those that look at
each operation, get stock's way.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._dynamo import eval_frame
from torch.fx import _symbolic_trace as fx
from torch.jit import _recursive
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode
from torch.utils._device import DeviceContext

from deepytorch_core import guard
from deepytorch_core.base import console, data_parallel
from deepytorch_core.compile import signals

PLACE = "_compiled_call_impl"
# TorchScript reads the attributes of a module, and takes this one for data.
if PLACE not in _recursive.ignored_attributes:
    _recursive.ignored_attributes.append(PLACE)

_Call = Callable[..., Any]
_GLOBAL_HOOKS = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)


class Watcher(Protocol):
    """Hears of a module's calls."""

    def on_forward(self, args: Any, kwargs: Any) -> None:
        """Called before each."""

    def give_up(self, reason: str) -> None:
        """Called once, if the former has raised."""


class Seam:
    """Gets the calls of one module from torch.

    Attributes:
        watcher: told of each call with what is passed, before the module's hooks; and told why,
            if that has raised something.
        region: stands for the module's `forward`, inside of its hooks.
        replay: stands for that in turn.
        around: gets the call itself, to be made with other arguments or given another output.
        parts: what an adapter has found below the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module_of = weakref.ref(module)
        self.watcher: Watcher | None = None
        self.region: _Call | None = None
        self.replay: _Call | None = None
        self.around: Callable[[_Call, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.parts: object = None
        self.is_continued = False
        """Whether the next call is part of the pass before, so that the watcher isn't told."""

    @property
    def _module(self) -> Any:
        """Not kept: it has this."""
        return self._module_of()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and saved models are not taken over

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        if torch.compiler.is_compiling():
            return module._call_impl(*args, **kwargs)
        frame = sys._getframe(1)
        if frame.f_code in _codes_with_hooks:
            return self.forward(*args, **kwargs)
        called: Any = frame.f_locals.get("self") if frame.f_code is _CALL else None
        del frame
        if called is not module:
            return self._not_ours(called, args, kwargs)
        if is_looked_at():
            return module._call_impl(*args, **kwargs)
        # A pass that checkpointing makes again, within the backward pass, is no step.
        is_step = not self.is_continued and torch._C._current_graph_task_id() == -1
        if self.watcher is not None and is_step:
            self._tell(self.watcher, args, kwargs)
        if self.around is not None:
            return self.around(self._call, args, kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        if self.replay is None and self.region is None:
            return module._call_impl(*args, **kwargs)
        if not (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return self.forward(*args, **kwargs)
        return _with_hooks(type(module)._call_impl)(module, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's pass without its hooks."""
        return (self.replay or self.unreplayed)(*args, **kwargs)

    def unreplayed(self, *args: Any, **kwargs: Any) -> Any:
        """The module's pass as it would be without `replay`."""
        return (self.region or self._module.forward)(*args, **kwargs)

    def _tell(self, watcher: Watcher, args: Any, kwargs: Any) -> None:
        with signals.heard():
            try:
                watcher.on_forward(args, kwargs)
            except Exception as error:  # the script has asked for none of what is done there
                self.watcher = None
                why = guard.first_line(error)
                name = type(self._module).__name__
                console.say_first(f"compile: {name} is left alone: {why}", level="warning")
                watcher.give_up(why)

    def _not_ours(self, called: Any, args: Any, kwargs: Any) -> Any:
        """Another module has this object: a copy of the attributes, with weights of its own."""
        module: Any = called if isinstance(called, nn.Module) else self._module
        if data_parallel.is_one(module):  # several at once, each in a thread of its own
            console.say_once(
                f"{type(module).__name__}: copies that nn.DataParallel makes run eagerly; "
                "DistributedDataParallel, with a process for each GPU, is compiled",
                level="warning",
            )
        return module._call_impl(*args, **kwargs)


def of(module: nn.Module) -> Seam | None:
    """The module's seam, if it has one."""
    found = vars(module).get(PLACE)
    return found if isinstance(found, Seam) and found._module is module else None


def opened(module: nn.Module) -> Seam | None:
    """The module's seam, made where there is none; None where a script's own compile lies there."""
    found = of(module)
    if found is None and not isinstance(vars(module).get(PLACE), Seam | None):
        return None
    if found is None:
        # Past `__setattr__`, which a class may have of its own.
        found = vars(module)[PLACE] = Seam(module)
    return found


def close(module: nn.Module, *, is_around: bool = True) -> None:
    """Take the seam away once nothing goes by it; without `is_around`, nothing does around it."""
    found = of(module)
    if found is None:
        return
    if not is_around:
        found.around = None
    if not (found.watcher or found.region or found.replay or found.around):
        del vars(module)[PLACE]


def is_looked_at() -> bool:
    """Whether somebody traces, transforms or looks at operations and modules of this call.

    A script's own compiled function is such a case: it runs Dynamo's callback.
    """
    return bool(
        any(_GLOBAL_HOOKS)
        or eval_frame.get_eval_frame_callback() is not None
        or _len_torch_dispatch_stack()
        or (_len_torch_function_stack() and not _is_for_devices())
        or torch._C._get_tracing_state() is not None
        or fx._is_fx_tracing_flag
        or guard.is_transformed()
    )


def _is_for_devices() -> bool:
    """Whether the only mode is that of `torch.set_default_device`."""
    mode: Any = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return _len_torch_function_stack() == 1 and isinstance(mode, DeviceContext)


@functools.cache
def _with_hooks(call_impl: _Call) -> _Call:
    """torch's own code for calls with hooks, with the seam where it takes `forward`."""
    code = call_impl.__code__
    names = tuple(PLACE if name == "forward" else name for name in code.co_names)
    own = code.replace(co_names=names)
    if names == code.co_names:  # not torch's: its `forward` is what it calls
        return call_impl
    _codes_with_hooks.add(own)
    # The part of it that runs the hooks is a function inside.
    _codes_with_hooks.update(
        constant for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    return types.FunctionType(own, call_impl.__globals__, "_call_impl", None, None)


_CALL = nn.Module.__call__.__code__
_codes_with_hooks: set[types.CodeType] = set()
# Dynamo, where it runs the frames of a script's own compiled function, leaves this one alone.
_SKIPPED = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
)
for _function in (Seam.__call__, Seam._call, Seam._not_ours, is_looked_at, _is_for_devices):
    eval_frame.set_code_exec_strategy(_function.__code__, _SKIPPED)
