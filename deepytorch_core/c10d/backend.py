"""The name "deepytorch" in torch.distributed, and what torch calls to make a group's backend."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from deepytorch_core.base import config, finite, stores
from deepytorch_core.base.console import joined_as, say_once
from deepytorch_core.base.errors import OFF_SWITCH, AdapterError
from deepytorch_core.c10d import device_memory
from deepytorch_core.c10d.delegates import GroupSpec, StockFactory, own_client
from deepytorch_core.metering import counts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

NAME = "deepytorch"

_timeout_is_final: ContextVar[bool] = ContextVar("timeout_is_final", default=False)
_name: ContextVar[str] = ContextVar("name", default=NAME)
_had_groups: int | None = None  # the process that made the first group: this one, or one it is of


def register() -> None:
    """Make `init_process_group("deepytorch")` work. Idempotent and cheap; builds nothing."""
    from torch.distributed import distributed_c10d as c10d

    if NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, create, extended_api=True, devices=_devices())
        if not hasattr(c10d.Backend, "_ensure_backend_registered"):  # torch <= 2.13
            c10d.Backend._plugins = _Plugins(c10d.Backend._plugins)


class _Plugins(dict[str, Any]):
    """torch's table of backends that others add, without ours in most lists of its names.

    While that list has a name, torch gives a group of device:backend pairs without NCCL no default
    backend: `ProcessGroup.name()` says "undefined", and a warning comes at the end. Installing
    deepytorch must not do that to groups of gloo. A group that asks for ours in its pairs needs
    the name, and first: torch takes gloo for the default backend otherwise, which such a group
    lacks, and DistributedDataParallel refuses it.
    """

    def keys(self) -> Any:
        # torch's function that makes a group looks the name up among its pairs next.
        pairs = getattr(sys._getframe(1).f_locals.get("backend_config"), "device_backend_map", {})
        others = [name for name in self if name != NAME.upper()]
        is_asked = NAME in pairs.values() and _name.get() == NAME
        return dict.fromkeys([NAME, *others] if is_asked else others).keys()


def _devices() -> list[str]:
    """Device types of a plain "deepytorch" group.

    They lack "cuda" in a torch built without it. Torch takes a listed device other than "cpu" for
    one that it may ask about its state (ShardedTensor does), which then fails.
    """
    import torch

    has_cuda = torch.version.cuda is not None or torch.version.hip is not None
    return ["cpu", "cuda"] if has_cuda else ["cpu"]


@contextlib.contextmanager
def final_timeout() -> Iterator[None]:
    """While open, `create` takes the timeout it is given as it is.

    Without it `create` can't tell torch's default from the same value given explicitly.
    """
    token = _timeout_is_final.set(True)
    try:
        yield
    finally:
        _timeout_is_final.reset(token)


@contextlib.contextmanager
def named(stock: Iterable[str]) -> Iterator[None]:
    """While open, `create` makes backends that bear the name of the stock ones they stand for.

    One backend may serve both kinds of devices and has one name: that of the accelerator's.
    Nothing in `stock`: its own.
    """
    token = _name.set(max(stock, default=NAME))  # "nccl" comes behind "gloo"
    try:
        yield
    finally:
        _name.reset(token)


LONGEST = timedelta(days=36500)
"""No time limit is longer. C++ counts in nanoseconds, and what overflows would be over at once."""


def default_timeout(stocks: timedelta) -> timedelta:
    """The limit of a group for which the program gave none: option `timeout_s`, else torch's."""
    seconds = config.current().timeout_s
    if seconds is None:
        return stocks
    # As a float a century of seconds is exact.
    return LONGEST if seconds >= LONGEST.total_seconds() else timedelta(seconds=seconds)


def limit_of(group: Any) -> timedelta:
    """The longest time limit of a ProcessGroup's backends; torch's default where none tells."""
    import torch

    limits = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # it has none for this device
            limits.append(timeout_of(group._get_backend(torch.device(device))))
    return longest(limits)


def timeout_of(made: Any) -> timedelta | None:
    """A backend's own time limit, where it tells."""
    return getattr(getattr(made, "options", None), "_timeout", None)


def longest(limits: Iterable[timedelta | None]) -> timedelta:
    """Return the longest of the known limits, or torch's default if none is known."""
    known = [limit for limit in limits if limit is not None]
    return max(known, default=default_timeout(_torch_default_timeout()))


def _check_timeout(timeout: timedelta, group: str, size: int) -> None:
    """Refuse what gloo refuses when it is made: no time at all to meet other ranks in."""
    import torch.distributed as dist

    limit_ms = timeout / timedelta(milliseconds=1)
    if limit_ms < 0 or (limit_ms < 1 and size > 1):
        raise dist.DistBackendError(
            f"group {group}: a time limit of {timeout.total_seconds():g} s: give a timeout of at "
            f"least 1 ms, or none for torch's default; {OFF_SWITCH}"
        )


def note_group(name: str, size: int) -> None:
    """Call it where a group of ours is made."""
    global _had_groups
    counts.note_group(name, size)
    if _had_groups is None:
        _had_groups = os.getpid()


def join(store: Any, *, rank: int, size: int) -> Callable[[], None]:
    """Call it where a default group of ours is made; returns what to call when it has ended."""
    from deepytorch_core.c10d import store_keeping
    from deepytorch_core.hang import live

    leave = live.join(store, rank=rank, size=size)
    let_go = store_keeping.join(store)

    def closed() -> None:
        leave()
        let_go()
        config.withdraw()

    return closed


def why_not_here() -> str | None:
    """Why this process can have no group of ours, whatever the others can; None if it can."""
    if _had_groups in (None, os.getpid()):
        return None
    return (
        "this process was made by fork() from one that had made groups before, and lacks their "
        "threads and memory: start it by spawn, or make no group before"
    )


def create(dist_options: Any, pg_options: Any = None) -> Backend:
    """Make the backend of one group; torch calls this.

    Args:
        dist_options: torch's `_DistributedBackendOptions`: store, group_rank, group_size, timeout,
            group_id, global_ranks_in_group and, in newer versions, more.
        pg_options: options for any backend. `ProcessGroupNCCL.Options` go to the NCCL delegate;
            others are left alone, as frameworks pass theirs to every group.

    Raises AdapterError when the compiled adapter can't be had, or this process can't have a group.
    """
    if _is_default():
        joined_as(dist_options.group_rank)
        config.renew()
    timeout: timedelta = min(dist_options.timeout, LONGEST)
    if not _timeout_is_final.get() and timeout == _torch_default_timeout():
        timeout = default_timeout(timeout)
    _check_timeout(timeout, dist_options.group_id, dist_options.group_size)
    spec = GroupSpec.of(dist_options, pg_options, timeout=timeout)
    options = config.current()
    if not options.enabled and _accelerator() == "cpu":
        # Switched off: gloo itself, without a line of ours in between.
        return StockFactory(spec)("cpu")
    if (reason := why_not_here()) is not None:
        raise AdapterError(f"group {spec.name}: {reason}. {OFF_SWITCH}")
    from deepytorch_core.c10d import adapter  # here: importing torch registers the name, no more
    from deepytorch_core.hang import stacks, store_limit

    module = adapter.load()
    module.set_library_folders(list(stacks.library_folders()))
    theirs = spec.store
    missing = stores.lacks(theirs) if spec.size > 1 else ""
    spec = replace(spec, store=own_client(module, theirs))
    factory = StockFactory(spec)
    if spec.size > 1 and _accelerator() == "cpu" and config.spans_nodes():
        # All ranks are here, as stock gloo needs them. Later a message between two nodes, which is
        # gloo's, may need it on two ranks alone.
        factory("cpu")
    closed = None
    if missing:
        say_once(f"group {spec.name} is served by the stock backend: {missing}", level="warning")
    else:
        if _is_default():
            if options.enabled:
                _take_tuned(spec)
            store_limit.limit(theirs, timeout.total_seconds())
            closed = join(theirs, rank=spec.rank, size=spec.size)
        _measure_network(spec, options)

    note_group(spec.name, spec.size)
    made = module.create_backend(
        spec.store,
        spec.rank,
        spec.size,
        timeout=timeout,
        group_name=spec.name,
        global_ranks=spec.global_ranks or list(range(spec.size)),
        delegates=factory,
        closed=closed,
        native=options.enabled and options.collectives != "stock" and not missing,
        name=_name.get(),
        # By the rule for who asks for native code, else where the ranks measure that it is faster.
        by_nodes=options.collectives == "native"
        or (options.collectives == "auto" and _tune(options) in ("auto", "force")),
        **core_settings(options),
        **watches(spec, options=options),
    )
    factory.live_options = getattr(made, "options", None)
    backend: Backend = made
    return backend


def _take_tuned(spec: GroupSpec) -> None:
    """Put in force what `deepytorch tune` found for this job, unless that has been done."""
    from torch.distributed import distributed_c10d as c10d

    from deepytorch_core.tune import start

    own = c10d.PrefixStore("deepytorch/tune", spec.store)
    start.together(own, rank=spec.rank, size=spec.size)


def _measure_network(spec: GroupSpec, options: config.Options) -> None:
    """Lets the ranks of a job of several nodes measure what is between them, before NCCL starts.

    When the default group is made, because there all ranks are, and once.
    """
    from torch.distributed import distributed_c10d as c10d

    tune = _tune(options)
    wanted = options.enabled and options.collectives != "stock" and tune != "off"
    if not wanted or not _is_default():
        return
    if _accelerator() == "cuda" and c10d.is_nccl_available():
        from deepytorch_core.network import prepare

        own = c10d.PrefixStore("deepytorch/network", spec.store)
        prepare.before_nccl(own, rank=spec.rank, size=spec.size, measure=tune != "profile")


def tell_devices(group: Any, group_config: dict[str, str]) -> None:
    """Tell a group's backend of ours which devices it serves; c10d doesn't.

    Args:
        group: the torch ProcessGroup.
        group_config: backend name by device type.
    """
    import torch

    ours = [device for device, name in group_config.items() if name == NAME]
    if ours and "cpu" not in ours:
        made = group._get_backend(torch.device(ours[0]))
        while (inner := getattr(made, "wrapped_pg", None)) is not None:
            made = inner  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        made.serve_accelerator_only(ours[0])


def describe(group: Any) -> None:
    """Tell the flight record what the maker of a torch ProcessGroup calls it."""
    from deepytorch_core import _core

    description = str(getattr(group, "group_desc", ""))
    if description not in ("", "undefined"):
        _core.describe_group(group.group_name, description)


def core_settings(options: config.Options) -> dict[str, Any]:
    """Return the options for the native core of a group: keywords of `create_backend`."""
    profile = config.profile_path(options)
    return {
        "tune": _tune(options),
        "profile": "" if profile is None else str(profile),
        "staging_bytes": (options.staging_mb or 0) << 20,
        "raise_errors": options.error_handling == "raise",
        "delegate_competes": options.collectives == "auto",
        "device_memory": device_memory.for_groups(options),
        "inspect": finite.fault_of if options.debug == "nan" else None,
    }


def watches(spec: GroupSpec, *, options: config.Options) -> dict[str, Any]:
    """Return what a group's backend asks, as keywords of `create_backend`.

    It asks when an operation fails, and with `debug` before each one.
    """
    from deepytorch_core.hang import live, mismatch

    compare = None
    if options.debug and spec.size > 1 and not stores.lacks(spec.store):
        limit_s = spec.timeout.total_seconds()
        compare = mismatch.comparer(spec.store, spec.name, spec.rank, spec.size, limit_s=limit_s)
    return {"explain": live.explainer(spec.name), "compare": compare}


def _is_default() -> bool:
    """Whether the group that is being made is the default one."""
    from torch.distributed import distributed_c10d as c10d

    return c10d.GroupMember.WORLD is None


def _tune(options: config.Options) -> str:
    """How the core finds plans: option `tune`, or what repeatable runs leave of it."""
    import torch

    repeatable = options.deterministic or torch.are_deterministic_algorithms_enabled()
    return "profile" if repeatable and options.tune != "off" else options.tune


def _torch_default_timeout() -> timedelta:
    from torch.distributed import distributed_c10d as c10d

    return c10d.default_pg_timeout


def _accelerator() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type
