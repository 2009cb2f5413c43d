"""DeepSpeed's JSON flag, noticed without importing DeepSpeed and without importing its adapter.

A section "deepytorch" in DeepSpeed's configuration has to work in a script that imports nothing of
ours. So `deepspeed.initialize` is wrapped as soon as deepspeed has been imported. Without the
section the wrapper passes the call on as it came, and leaves word for ranks that have it
(`deepytorch_core.c10d.non_participant`). With the section it finds the adapter by its entry point,
and hands the call over. That is the first time that more of deepytorch is loaded.

NOTE [while it is being imported] `import deepspeed` imports torch, and that may be where we are
called from: the module exists, but its functions are defined later, with no import after them that
could be noticed. Its class is replaced for that time by one that puts the wrapper in place when
`initialize` is first looked up.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from deepytorch_core.base import config
from deepytorch_core.base.import_hook import ImportHook
from deepytorch_core.base.patching import Patches
from deepytorch_core.c10d.non_participant import NonParticipant

SECTION = "deepytorch"
"""Name of our section in DeepSpeed's configuration."""

ENTRY_POINTS = "deepytorch.integrations"
"""Entry point group of adapters, by the name of their framework."""

_FRAMEWORK = "deepspeed"
_INITIALIZE = "initialize"
_CONNECT = "init_distributed"
_WHY = "a section of ours in the configuration is noticed; without one, compute is switched on"
_KEY = re.compile(rf"\b{SECTION}[\"']?\s*:")  # with Hjson's quotes, or none
# Why a rank does not come where others with the section wait for it: "rank 1 has ...".
NO_SECTION = f'no section "{SECTION}" in DeepSpeed\'s configuration'
IS_OFF = "deepytorch switched off (DEEPYTORCH_ENABLED=0)"
IN_ARGS = ("deepspeed_config", "deepscale_config")
"""Attributes of the argument `args` that may hold the configuration."""


class _Armed:
    """Everything put in place, now or by a hook that waits for the import."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.hook = ImportHook(_FRAMEWORK, self._found)
        self._pending: ModuleType | None = None

    def undo(self) -> None:
        self.hook.undo()
        self.patches.undo()
        if self._pending is not None:
            self._pending.__class__ = ModuleType

    def wrap(self, module: ModuleType) -> None:
        self._pending = None
        module.__class__ = ModuleType
        self.patches.replace(module, _INITIALIZE, _wrapper, why=_WHY)

    def _found(self, module: ModuleType) -> None:
        if _INITIALIZE in vars(module):
            self.patches.replace(module, _INITIALIZE, _wrapper, why=_WHY)
        elif type(module) is ModuleType:
            self._pending = module
            module.__class__ = _BeingImported


class _BeingImported(ModuleType):
    """See NOTE [while it is being imported]."""

    @property
    def initialize(self) -> Any:
        if _INITIALIZE not in vars(self):
            raise AttributeError(_INITIALIZE)
        if _armed is not None:
            _armed.wrap(self)
        return vars(self)[_INITIALIZE]

    @initialize.setter
    def initialize(self, value: Any) -> None:
        vars(self)[_INITIALIZE] = value


unasked: Callable[..., Any] | None = None
"""Called as (original, args, kwargs) in place of `deepspeed.initialize` without our section."""

_is_left: ContextVar[bool] = ContextVar("left_to_adapter", default=False)
_armed: _Armed | None = None
_wanted_by: set[str] = set()


def arm(owner: str) -> None:
    """Notice the flag from now on, whether deepspeed is imported already or not. Idempotent.

    Args:
        owner: who wants it; `disarm` by the last of them takes it away.
    """
    global _armed
    _wanted_by.add(owner)
    if _armed is None:
        _armed = _Armed()
        _armed.hook.install()


def disarm(owner: str | None = None) -> None:
    """Notice it no more on behalf of `owner`, or of nobody; deepspeed has its function back."""
    global _armed
    if owner is None:
        _wanted_by.clear()
    else:
        _wanted_by.discard(owner)
    if not _wanted_by and _armed is not None:
        _armed.undo()
        _armed = None


def switched_off() -> bool:
    """Whether the environment turns deepytorch off, so that a flag has no effect."""
    try:
        return not config.Options.from_env().enabled
    except ValueError:
        return False  # a wrong variable: the adapter says so on every rank


def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(*args: Any, **kwargs: Any) -> Any:
        is_flagged, is_off = _is_flagged(original, args, kwargs), switched_off()
        if is_flagged and not is_off:
            return _adapter()(original, args, kwargs)
        if is_off and not is_flagged:
            return original(*args, **kwargs)
        if not is_off and unasked is not None:
            return unasked(original, args, kwargs)
        return without_adapter(original, args, kwargs, IS_OFF if is_off else NO_SECTION)

    return initialize


def without_adapter(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> Any:
    """DeepSpeed's own `initialize`; an error on all ranks where others have the section.

    Args:
        original: `deepspeed.initialize`.
        args, kwargs: its arguments.
        reason: why this rank does without, `NO_SECTION` or `IS_OFF`.
    """
    waits = kwargs.get("mpu") is None  # else DeepSpeed's groups are the user's own
    with NonParticipant(_FRAMEWORK, reason) as non_participant, contextlib.ExitStack() as stack:

        def connecting(connect: Callable[..., Any]) -> Callable[..., Any]:
            def init_distributed(*args: Any, **kwargs: Any) -> Any:
                result = connect(*args, **kwargs)
                non_participant.meet(waits=waits)
                return result

            return init_distributed

        non_participant.meet(waits=waits)
        comm = sys.modules.get(f"{_FRAMEWORK}.comm")
        if hasattr(comm, _CONNECT):  # where the ranks may be connected only now
            patches = Patches()
            stack.callback(patches.undo)
            patches.replace(comm, _CONNECT, connecting, why="ranks without our section say so")
        return original(*args, **kwargs)


def _is_flagged(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    # DeepSpeed has the better words for whatever is wrong with the call.
    with contextlib.suppress(Exception):
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        in_args = [getattr(given.get("args"), name, None) for name in IN_ARGS]
        sources = [given.get("config"), given.get("config_params"), *in_args]
        return any(_mentions_us(source) for source in sources if source is not None)
    return False


def _mentions_us(source: Any) -> bool:
    """Whether this configuration may have our section: surely so for a mapping.

    The text of a file, or of the base64 that DeepSpeed takes as well, is only searched for such
    a key; the adapter reads it with DeepSpeed's own parser.
    """
    if isinstance(source, Mapping):
        return SECTION in source
    text = os.fspath(source)
    if os.path.exists(text):  # false for a text that is too long for a path, unlike Path's
        found = _KEY.search(Path(text).read_text())
    else:
        found = _KEY.search(base64.urlsafe_b64decode(text).decode())
    return found is not None


def is_left_to_adapter() -> bool:
    """Whether an adapter is being loaded that activates by itself; see `_left_to_adapter`."""
    return _is_left.get()


@contextlib.contextmanager
def _left_to_adapter() -> Iterator[None]:
    """While open, `import deepytorch` does not activate.

    For importing an adapter that nobody but a framework's configuration asked for. That adapter
    decides together with the other ranks what happens next, and with which options.
    """
    token = _is_left.set(True)
    try:
        yield
    finally:
        _is_left.reset(token)


def _adapter() -> Callable[..., Any]:
    """The adapter's function that takes over: (original, args, kwargs) -> what original returns."""
    for entry_point in metadata.entry_points(group=ENTRY_POINTS, name=_FRAMEWORK):
        with _left_to_adapter():
            found: Callable[..., Any] = entry_point.load()
        return found
    raise RuntimeError(
        f"DeepSpeed's configuration has a section {SECTION!r}, but no adapter for it is "
        "installed: pip install deepytorch-train again, or remove the section"
    )
