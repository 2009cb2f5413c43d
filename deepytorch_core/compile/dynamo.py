"""Dynamo's settings while a region may be captured, and what it says meanwhile."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import re
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from deepytorch_core import guard
from deepytorch_core.base.patching import Patches
from deepytorch_core.guard import breaks

# Dynamo may capture a region's function so often where each size has a graph of its own.
MOST_CAPTURES = 64

_TORCH = f"{Path(torch.__file__).parent}/"
_numbers = itertools.count(1)

_CACHED = "lru_cache"
_COMPLAINING = (
    "torch._subclasses.fake_tensor",
    "torch._dynamo.symbolic_convert",
    "torch._dynamo.output_graph",
    "torch._dynamo.variables.builder",
    "torch.fx.experimental.symbolic_shapes",
)


class ToldRegion(Protocol):
    """A region."""

    is_cut_by_buckets: bool

    @property
    def is_fixed(self) -> bool:
        """Whether each size has a graph of its own."""

    @property
    def is_captured_once(self) -> bool:
        """Whether these graphs are made from one that is captured for any size."""

    def note_failure(self, place: str, why: str) -> None:
        """A part could not be captured."""

    def note_cached_call(self, place: str) -> None:
        """A function under lru_cache was called there, and captured."""


class _Capturing(threading.local):
    region: ToldRegion | None = None


_now = _Capturing()


@contextlib.contextmanager
def capturing(region: ToldRegion) -> Iterator[None]:
    """While open, what torch fails to capture runs eagerly, and `region` is told.

    So does what numpy computes: torch would put functions of its own in the place of numpy's, with
    other random numbers.
    """
    from torch._dynamo import config

    _watch()
    before = config.suppress_errors, config.optimize_ddp, config.trace_numpy
    outer, _now.region = _now.region, region
    config.suppress_errors, config.trace_numpy = True, False
    if not region.is_cut_by_buckets:
        config.optimize_ddp = False
    # Captured are sizes, strides, and with and without gradients of inputs.
    fixed = {
        "automatic_dynamic_shapes": region.is_captured_once,
        "automatic_dynamic_local_pgo": False,  # not by what another run of the script has met
        "recompile_limit": MOST_CAPTURES,
    }
    try:
        with _own_stance(), config.patch(fixed) if region.is_fixed else contextlib.nullcontext():
            yield
    finally:
        config.suppress_errors, config.optimize_ddp, config.trace_numpy = before
        _now.region = outer


def _own_stance() -> contextlib.AbstractContextManager[Any]:
    """A script's stance is about what it compiles itself; only to force eager code is for all."""
    from torch._dynamo import eval_frame

    stance = eval_frame._stance
    is_plain = stance.stance == "force_eager" or stance == eval_frame.DynamoStance()
    return contextlib.nullcontext() if is_plain else torch.compiler.set_stance("default")


@functools.cache
def _watch() -> None:
    import torch._dynamo.utils as utils
    from torch._dynamo.variables.misc import RandomVariable

    logging.getLogger("torch._dynamo.convert_frame").addFilter(_note_failure)
    for name in _COMPLAINING:
        logging.getLogger(name).addFilter(_is_asked_for)
    option = "DEEPYTORCH_COMPILE=off"
    why = "what can't be captured is told in a line of our own"
    Patches().replace(utils, "warn_once", _hearing, why=why, option=option)
    # Code that Dynamo makes of a generator of one's own draws the same numbers again and again.
    why = "a generator of Python's own is not captured"
    Patches().replace(
        RandomVariable, "is_supported_random_obj", _unless_captured, why=why, option=option
    )


def _note_failure(line: logging.LogRecord) -> bool:
    """In place of torch's page of traceback, one line; other people's compiles keep theirs."""
    region = _now.region
    error = line.exc_info[1] if line.exc_info else None
    if region is None or error is None:
        return True
    region.note_failure(breaks.place(error), guard.first_line(error))
    return False


def _is_asked_for(line: logging.LogRecord) -> bool:
    """Torch's complaints about code that then runs eagerly are of no use to the script."""
    return _now.region is None or line.levelno < logging.WARNING


def _unless_captured(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: _now.region is None and original(value)


def _hearing(original: Callable[..., None]) -> Callable[..., None]:
    """Warnings about a script's code are none that the script has asked for."""

    def warn_once(message: str, stacklevel: int = 1) -> None:
        region = _now.region
        if region is None:
            original(message, stacklevel + 2)
        elif _CACHED in message:
            for place in re.findall(r'File "[^"]*", line \d+', message):
                region.note_cached_call(place)

    return warn_once


def own_code(function: Any) -> Any:
    """Copy a function, so that its compiles are its own: torch keeps them by code object."""
    if inspect.getfile(function).startswith(_TORCH):
        # Code of torch's own shares one frame with all such code: a `Linear` of another size
        # would then be one whose sizes change.
        function = _calling(function)
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_numbers)}")
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
