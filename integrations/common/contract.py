"""Rules for every adapter: versions, options that all ranks share, changes that can be undone.

An adapter checks its framework with `require`, and calls `join` once the ranks are connected. It
keeps what it changes in a `Changes`, marks the changed object with that, and offers `undo`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

from deepytorch_core.base import agreement, config, stores
from deepytorch_core.base.config import Options
from deepytorch_core.base.console import say
from deepytorch_core.base.errors import OFF_SWITCH
from deepytorch_core.base.errors import IntegrationError as IntegrationError
from deepytorch_core.base.patching import ENABLED, Patches
from deepytorch_core.c10d import activation, non_participant
from deepytorch_core.c10d.backend import limit_of

# So often it is looked whether a rank that has not come can't come any more.
_LOOK_S = 2.0
# A line has told of these in this process.
_left_alone: set[str] = set()


def require(distribution: str, versions: str, *, tested: str) -> None:
    """Check that a framework is installed in a version that its adapter knows.

    Args:
        distribution: its name for pip.
        versions: the range, as pip writes it: ">=0.17,<1".
        tested: the version that the tests run with.

    Raises IntegrationError naming the version found and the versions known.
    """
    install = f"pip install '{distribution}=={tested}'"
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise IntegrationError(f"{distribution} is not installed: {install}") from None
    # A local build of a release ("2.13.0+cpu") and a pre-release of the next are judged alike.
    if not SpecifierSet(versions).contains(found.partition("+")[0], prereleases=True):
        raise IntegrationError(
            f"{distribution} {found} is not known to this adapter, which is for {versions} "
            f"(tested with {tested}): {install}, or {OFF_SWITCH}"
        )


class Changes:
    """Changes of an adapter to objects that are not ours; `undo` puts all of them back.

    A copy of a changed object has nothing to undo. A pickled one can be read where there is no
    deepytorch: there an empty dict stands for a `Changes`, and the object's own method for each
    function that was set.

    Args:
        asked: whether somebody wants them by name. Else nothing of ours may raise into a program
            that knows nothing of it; see `attempt`.
    """

    def __init__(self, *, asked: bool = True) -> None:
        self.asked = asked
        self._patches = Patches()
        self._actions: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return dict, ()

    def attempt(self, what: str, do: Callable[[], object]) -> None:
        """Call `do`; where nobody asked for it, what it raises leaves `what` as it is, in a line.

        Raises what `do` raises where somebody asked.
        """
        try:
            do()
        except Exception as error:
            if self.asked:
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if what not in _left_alone:
                _left_alone.add(what)
                way_out = "" if OFF_SWITCH in reason else f"; {OFF_SWITCH}"
                say(f"{what} stays as it is: {reason}{way_out}", level="warning")

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of `owner`, which may have had none of this name in its own right."""
        own = vars(owner)
        if name in own:
            before = own[name]
            self.on_undo_of(owner, lambda changed: setattr(changed, name, before))
        else:
            self.on_undo_of(owner, lambda changed: delattr(changed, name))
        if inspect.isfunction(value) and inspect.isfunction(getattr(type(owner), name, None)):
            value = _Standin(owner, name, value)
        setattr(owner, name, value)

    def around(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Have calls of the method `owner.name` go through `function(original, owner, ...)`.

        `function` must not hold `owner`, which then lives no longer than it would without.
        """
        from . import around as _around

        if name in vars(owner):  # somebody has put another there
            self.set(owner, name, functools.partial(function, getattr(owner, name), owner))
        else:
            self.on_undo_of(owner, _around.put(owner, name, function))

    def replace(
        self,
        owner: Any,
        name: str,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        why: str = "",
        option: str = ENABLED,
    ) -> None:
        """Replace the function `owner.name` of a module or class by `make(original)`, once.

        `why` and `option` are told by `deepytorch explain patches`.
        """
        self._patches.replace(owner, name, make, why=why, option=option)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Have `action` called by `undo`, before what was changed earlier is undone."""
        self._actions.append(action)

    def on_undo_of(self, changed: Any, action: Callable[[Any], object]) -> None:
        """Have `undo` call `action(changed)`, unless that object is gone by then: it isn't kept.

        For what may be made and dropped many times before anybody undoes anything.
        """
        reference = weakref.ref(changed)

        def undo() -> None:
            living = reference()
            if living is not None:
                action(living)

        self._actions.append(undo)

    def undo(self) -> None:
        """Put everything back, the last change first. A second call does nothing."""
        while self._actions:
            self._actions.pop()()
        self._patches.undo()


class _Standin:
    """A function in place of a method on one object, whose copies have that method again.

    It doesn't keep the object, or that would outlive its last user until cycles are collected.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._owner, self._name, self._function = weakref.ref(owner), name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any, Any]]:
        # A copy of the owner has no attributes yet when this is called: it finds its class's.
        return getattr, (self._owner(), self._name)


def mark(changed: Any, adapter: str, changes: Changes) -> None:
    """Note on an object what `adapter` did to it."""
    object.__setattr__(changed, _attribute(adapter), changes)


def is_marked(changed: Any, adapter: str) -> bool:
    """Whether `adapter` has been applied to this very object."""
    return isinstance(_own(changed).get(_attribute(adapter)), Changes)


def take_back_unasked(changed: Any, adapter: str) -> None:
    """Undo what `adapter` did to the object without being asked: who asks by name comes now."""
    changes = _own(changed).get(_attribute(adapter))
    if isinstance(changes, Changes) and not changes.asked:
        undo(changed, adapter)


def undo(changed: Any, adapter: str) -> bool:
    """Undo what `adapter` did to the object; False when that was nothing."""
    changes = _own(changed).get(_attribute(adapter))
    if not isinstance(changes, Changes):
        return False
    changes.undo()
    object.__delattr__(changed, _attribute(adapter))
    return True


def _own(changed: Any) -> Mapping[str, Any]:
    # An adapter may be given anything by mistake: not everything has attributes of its own.
    attributes: Mapping[str, Any] = getattr(changed, "__dict__", {})
    return attributes


def _attribute(adapter: str) -> str:
    return f"__deepytorch_{adapter}__"


@dataclass(frozen=True)
class Joined:
    """The options that `join` put in force; `leave` puts the former state back."""

    options: Options
    _activated: bool

    def leave(self) -> None:
        """Deactivate deepytorch if it was `join` that had activated it."""
        if self._activated:
            activation.deactivate()


def arm(given: Mapping[str, Any]) -> bool:
    """Put options in force in this process, so that groups made from now on have them.

    For adapters that come before their framework makes the process groups; `join` must follow.
    Nothing happens when torch.distributed is initialised. Wrong options count as none here, as
    ranks have to meet before `join` can name them on each.

    Returns whether that activated deepytorch, so that undoing it deactivates.
    """
    from torch.distributed import distributed_c10d as c10d

    if c10d.is_initialized():
        return False
    was_active = activation.is_active()
    statement = _statement(given, None)
    activation.put_in_force(
        Options.from_mapping(_statement({}, None) if "error" in statement else statement)
    )
    return activation.is_active() and not was_active


def join(
    adapter: str,
    given: Mapping[str, Any] | None = None,
    *,
    own: Callable[[], Mapping[str, Any]] | None = None,
) -> Joined:
    """Put options in force on all ranks, and deepytorch under the groups that exist already.

    Collective over the default group of torch.distributed, which must be initialised. Groups that
    deepytorch serves already stay as they are, others are upgraded in place. With `enabled` false,
    here or in the environment, nothing is touched: see `Joined.options.enabled`.

    Args:
        adapter: its name, for messages.
        given: options by name (`deepytorch_core.base.config.Options`); what is not given comes from
            the environment, or from `deepytorch.activate`.
        own: checks what the adapter was given besides and returns what of it all ranks must
            share, in JSON's types by name. A ValueError or IntegrationError from it is raised on
            every rank.

    Raises IntegrationError, with the same reason on every rank, for an unknown option or a wrong
    value. Raises it also for options that differ between ranks, or groups that can't be upgraded.
    """
    store, rank, size = _connection(adapter)
    statements = _exchange(adapter, _statement(given or {}, own), (store, rank, size))
    for sender, statement in enumerate(statements):
        if "error" in statement:
            raise IntegrationError(f"{adapter} on rank {sender}: {statement['error']}")
    for sender, statement in enumerate(statements):
        for name, value in statement.items():
            if value != statements[0][name]:
                raise IntegrationError(
                    f"{adapter}: rank 0 was given {name}={statements[0][name]!r} and rank "
                    f"{sender} {name}={value!r}: give every rank the same options"
                )
    options = Options.from_mapping({name: statements[rank][name] for name in Options.names()})
    if not options.enabled:
        return Joined(options, False)
    activated = not activation.is_active()
    reason = activation.put_in_force(options)
    if reason is not None:
        if activated:
            activation.deactivate()
        raise IntegrationError(f"{adapter}: {reason}; {OFF_SWITCH}")
    return Joined(options, activated)


def alone(adapter: str, given: Mapping[str, Any]) -> Options:
    """The options that `join` would put in force, for a process that trains by itself.

    Raises IntegrationError for an unknown option or a wrong value.
    """
    statement = _statement(given, None)
    if "error" in statement:
        raise IntegrationError(f"{adapter}: {statement['error']}")
    return Options.from_mapping(statement)


def _connection(adapter: str) -> tuple[Any, int, int]:
    from torch.distributed import distributed_c10d as c10d

    if not c10d.is_initialized():
        raise IntegrationError(
            f"{adapter}: torch.distributed is not initialised: call init_process_group() first, "
            "in a process that torchrun or `deepytorch run` has started"
        )
    store, size = c10d._get_default_store(), c10d.get_world_size()
    if missing := stores.lacks(store):
        raise IntegrationError(f"{adapter}: {missing}: give init_process_group another store")
    return store, c10d.get_rank(), size


def _statement(
    given: Mapping[str, Any], own: Callable[[], Mapping[str, Any]] | None
) -> dict[str, Any]:
    """The options in full and the adapter's own settings, or {"error": why not}."""
    try:
        settings = own() if own else {}
        environment = Options.from_env()
        base = config.current() if activation.is_active() else environment
        options = Options.from_mapping(given, base=base)
    except (ValueError, IntegrationError) as error:
        return {"error": str(error)}
    # The off switch works whatever a file or a script says.
    enabled = options.enabled and environment.enabled
    return {**settings, **options.to_dict(), "enabled": enabled}


def _exchange(
    adapter: str, statement: Mapping[str, Any], connection: tuple[Any, int, int]
) -> list[dict[str, Any]]:
    """Every rank's statement, by rank."""
    store, rank, size = connection
    own = agreement.numbered(store, f"deepytorch/{adapter}", rank)
    own.set(non_participant.JOINS, "1")
    own.set(str(rank), json.dumps(statement))
    limit_s = here_limit_s()
    here, hopeless = _await(adapter, own, (rank, size), limit_s)
    statements = {sender: json.loads(stores.text(own, str(sender))) for sender in here}
    declining = {
        sender: message[non_participant.DECLINES]
        for sender, message in statements.items()
        if non_participant.DECLINES in message
    }
    if declining:
        with contextlib.suppress(RuntimeError):  # as one of them may have ended
            told = [non_participant.knows(sender) for sender in declining]
            stores.poll(lambda: bool(own.check(told)), agreement.PATIENCE_S)
        raise non_participant.disagreement(adapter, declining)
    absent = [other for other in range(size) if other not in statements]
    if absent:
        when = hopeless or f" within {limit_s:g} s{_doing(absent)}"
        raise IntegrationError(
            f"{adapter}: rank(s) {', '.join(map(str, absent))} did not call it{when}: use it on "
            f"every rank or on none; {OFF_SWITCH}"
        )
    return list(statements.values())


def here_limit_s() -> float:
    """How long the ranks of the default group wait for each other in an adapter, in seconds.

    As long as in the collective that would come next without it, in whatever group: one of them may
    prepare its data.
    """
    from torch.distributed import distributed_c10d as c10d

    own = limit_of(c10d._get_default_group())
    return max(own, c10d.default_pg_timeout).total_seconds()


def _await(adapter: str, own: Any, place: tuple[int, int], limit_s: float) -> tuple[list[int], str]:
    """Wait until all ranks have come, or one that declines, or they can't any more.

    Returns the ranks that are here by then, and what the others wait in for this one.
    """
    rank, size = place
    everyone = [str(other) for other in range(size)]

    def is_over() -> bool:
        return bool(own.check(everyone) or own.check([non_participant.DECLINES]))

    def here() -> list[int]:
        return [other for other in range(size) if own.check([str(other)])]

    started = time.monotonic()
    patience_s = min(agreement.PATIENCE_S, limit_s / 2)
    if stores.poll(is_over, patience_s):
        return here(), ""
    present = here()
    if rank == min(present):
        absent = [other for other in range(size) if other not in present]
        say(
            f"{adapter} waits for {agreement.named(absent)}, up to {limit_s:g} s: it is "
            f"for every rank or for none{_doing(absent)}",
            level="warning",
        )
    while (left_s := limit_s - (time.monotonic() - started)) > 0:
        if stores.poll(is_over, min(_LOOK_S, left_s)):
            break
        if hopeless := _awaited(patience_s):
            return here(), hopeless
    return here(), ""


def _awaited(least_s: float) -> str:
    """ ", and wait for this one in ...": what can't call anything before that ends."""
    hang = sys.modules.get("deepytorch_core.hang.live")
    operation = hang.awaited(least_s) if hang is not None else ""
    return f", and wait for this one in {operation}" if operation else ""


def _doing(absent: list[int]) -> str:
    """Return what one of them does instead, in parentheses; empty if nothing here can tell."""
    hang = sys.modules.get("deepytorch_core.hang.live")  # there where deepytorch serves a group
    seen = hang.whereabouts(absent) if hang is not None else ""
    return f" ({seen})" if seen else ""
