"""How `import deepytorch` reaches torch's process groups.

NOTE [the seams] `init_process_group` and `new_group` themselves stay as they are. Everyone may
hold them by `from torch.distributed import init_process_group`, taken before we were imported.
Each looks up one inner function in its module when it is called. The caller's arguments are not yet
interpreted then, or only just so. The inner functions are the same in torch 2.11 to 2.15:

* `init_process_group` -> `_new_process_group_helper(..., backend, store, ..., group_desc=
  "default_pg")`. Some projects copy torch's code to make a group with processes outside of the job
  (a trainer and an inference server, say). They call this helper too, but without that description.
  Their groups are left alone, because what the other side runs is not ours to choose.
* `new_group` -> `_new_group_with_tag(ranks, timeout, backend, ...)`, which calls the same helper.

NOTE [Names] Programs branch on the name of a group's backend: `get_backend() in ("gloo", "nccl")`
decides whether a framework wraps the model in DDP. So torch keeps the name that was asked for, and
only `served` knows which devices of a group are ours. The name "deepytorch" is told where that was
asked for.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from deepytorch_core.base import agreement, config, stores
from deepytorch_core.base.console import joined_as, say_once
from deepytorch_core.base.errors import OFF_SWITCH, AdapterError
from deepytorch_core.base.patching import Patches
from deepytorch_core.c10d import adapter, backend, rewrite

# Backend by device, of groups for which torch tells what was asked for instead.
_served: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
_announced: set[str] = set()
_keep_asked: ContextVar[bool] = ContextVar("keep_asked", default=False)
_in_new_group: ContextVar[bool] = ContextVar("in_new_group", default=False)


def install(c10d: ModuleType, patches: Patches) -> None:
    """Rewrite the backend argument of groups that are made from now on.

    Args:
        c10d: the module torch.distributed.distributed_c10d.
        patches: receives what was replaced.
    """
    backend.register()
    patches.replace(
        c10d,
        "_new_process_group_helper",
        lambda original: _helper(c10d, original),
        why="groups that are made get the native collectives beside the backend asked for",
    )
    patches.replace(
        c10d,
        "_new_group_with_tag",
        _sub_group,
        why="sub-groups get the native collectives, too",
    )


def machine(c10d: Any) -> rewrite.Capabilities:
    """Return the facts of torch and the machine that `rewrite` has to know."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return rewrite.Capabilities(
        accelerator="cpu" if accelerator is None else accelerator.type,
        has_nccl=c10d.is_nccl_available(),
        has_gloo=c10d.is_gloo_available(),
    )


def served(c10d: Any, group: Any) -> dict[str, str]:
    """The backend that serves each device of this (initialised) group, whatever torch tells."""
    known = _served.get(group)
    return known or rewrite.parse(str(c10d._world.pg_backend_config.get(group, "")))


def is_ours(c10d: Any, group: Any) -> bool:
    """Whether some device of this (initialised) group is served by deepytorch."""
    return backend.NAME in served(c10d, group).values()


def serving_name(group: Any = None) -> str:
    """ "deepytorch" where that serves a device of the group, else what `get_backend` tells.

    Args:
        group: an initialised group; None is the default one.
    """
    from torch.distributed import distributed_c10d as c10d

    this = c10d._get_default_group() if group is None else group
    return backend.NAME if is_ours(c10d, this) else str(c10d.get_backend(this))


def has_own_name(c10d: Any, group: Any) -> bool:
    """Whether this (initialised) group was asked for as "deepytorch"."""
    return backend.NAME in str(c10d._world.pg_backend_config.get(group, ""))


def set_served(group: Any, pairs: dict[str, str] | None) -> None:
    """Note which backend serves each device of the group; None: what torch tells."""
    if pairs is None:
        _served.pop(group, None)
    else:
        _served[group] = pairs


@contextlib.contextmanager
def as_asked() -> Iterator[None]:
    """While open, `new_group` makes groups with the very backend it is asked for."""
    token = _keep_asked.set(True)
    try:
        yield
    finally:
        _keep_asked.reset(token)


def decide(store: Any, *, rank: int, size: int) -> str | None:
    """Let all ranks agree to use deepytorch; None, or the reason why none of them will."""
    from torch._C._distributed_c10d import PrefixStore

    stock = config.current().collectives == "stock"
    if size == 1:
        reason = None if stock else _why_not_ready()
    elif missing := stores.lacks(store):
        return missing
    else:
        own = agreement.numbered(store, "deepytorch/decision", rank)
        reason = agreement.agree(
            own,
            rank=rank,
            size=size,
            prepare=lambda: _other_options(own) or (None if stock else _why_not_ready()),
            here_limit_s=agreement.HERE_LIMIT_S,
        )
    if reason is None and not stock:
        from deepytorch_core.tune import start

        start.together(PrefixStore("deepytorch/tune", store), rank=rank, size=size)
    return reason


def announce(pairs: dict[str, str], size: int) -> None:
    """The one line at the start; not again when the same group is set up once more."""
    devices = [device for device, name in pairs.items() if name == backend.NAME]
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    line = f"collectives of {ranks} go through deepytorch for {' and '.join(devices)} tensors"
    if line not in _announced:
        _announced.add(line)
        say_once(f"{line}; {OFF_SWITCH}")


def _other_options(store: Any) -> str | None:
    """How this rank's options differ from those of the rank that came first."""
    mine = config.current().to_dict()
    shared = {name: value for name, value in mine.items() if name not in config.OF_A_RANK}
    first = json.loads(stores.first(store, "options", json.dumps(shared)))
    differing = [name for name, value in shared.items() if value != first.get(name)]
    if not differing:
        return None
    here = ", ".join(f"{name}={shared[name]}" for name in differing)
    there = ", ".join(f"{name}={first.get(name)}" for name in differing)
    return f"{here} here and {there} on another rank: give every rank the same options"


def _why_not_ready() -> str | None:
    try:
        adapter.load()
    except (AdapterError, ImportError) as error:
        return str(error)
    return backend.why_not_here()


def _helper(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 5:
            return original(*args, **kwargs)  # not how torch's own two callers pass them
        group_size, group_rank, ranks, asked, store = args[:5]
        chosen = None
        if _in_new_group.get():
            chosen = _choose_sub_group(c10d, asked)
        elif not ranks and kwargs.get("group_desc") == "default_pg":
            joined_as(group_rank)
            chosen = _choose_default(c10d, asked, kwargs)
            if chosen is not None and not _agreed(store, rank=group_rank, size=group_size):
                chosen = None
        made, group_store = _make(c10d, original, args, kwargs, chosen=chosen)
        if chosen is not None and kwargs.get("group_desc") == "default_pg":
            announce(served(c10d, made), group_size)
        return made, group_store

    return new_process_group_helper


def _agreed(store: Any, *, rank: int, size: int) -> bool:
    """Whether all ranks' default group becomes ours."""
    reason = decide(store, rank=rank, size=size)
    if reason is not None:
        say_once(f"keeping torch's own collectives: {reason}", level="warning")
    return reason is None and config.current().collectives != "stock"


def _choose_default(c10d: Any, asked: Any, kwargs: dict[str, Any]) -> str | None:
    if _torchcomms(c10d):
        return None
    if kwargs.get("enable_reconfigure"):
        return None  # torch's elastic groups change their ranks; only stock backends can
    return rewrite.default_group(str(asked), machine(c10d))


def _choose_sub_group(c10d: Any, asked: Any) -> str | None:
    """The backend of a group under the default one, which torch fills in where none was given."""
    default = c10d._get_default_group()
    # Only under a default group of ours have all ranks agreed.
    if not is_ours(c10d, default) or _torchcomms(c10d) or _keep_asked.get():
        return None
    return rewrite.sub_group(
        str(asked),
        machine(c10d),
        default_config=rewrite.join(served(c10d, default)),
        default_asked=str(c10d._world.pg_map[default][0]),
    )


def _torchcomms(c10d: Any) -> bool:
    enabled = getattr(c10d, "_use_torchcomms_enabled", None)
    return enabled is not None and bool(enabled())


def _make(
    c10d: Any,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    chosen: str | None,
) -> tuple[Any, Any]:
    """Call torch's helper; if the group is ours see to its timeout, name and default backend.

    `chosen` is the backend that replaces what was asked for, if one does.
    """
    asked = args[3]
    if backend.NAME not in str(chosen or asked):
        result: tuple[Any, Any] = original(*args, **kwargs)
        return result
    timeout = kwargs.get("timeout")
    if timeout is not None:
        # By identity: the same value given explicitly is another object, and wins.
        defaults = (c10d.default_pg_timeout, getattr(c10d, "default_pg_nccl_timeout", None))
        if any(timeout is default for default in defaults):
            timeout = backend.default_timeout(timeout)
        kwargs = {**kwargs, "timeout": min(timeout, backend.LONGEST)}
    told = rewrite.parse(str(c10d.BackendConfig(c10d.Backend(asked))))
    stands_for = set() if chosen is None else stood_for(told, rewrite.parse(chosen))
    with backend.final_timeout(), backend.named(stands_for):
        made, store = original(*args[:3], chosen or asked, *args[4:], **kwargs)
    if not isinstance(made, c10d.ProcessGroup) or made not in c10d._world.pg_map:
        return made, store
    pairs = rewrite.parse(c10d._world.pg_backend_config[made])
    if chosen is not None:
        _name_as_asked(c10d, made, asked, told)
    elif "nccl" not in pairs.values():
        # torch finds a default backend for pairs by NCCL's name only.
        made._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)
    backend.describe(made)
    backend.tell_devices(made, pairs)
    return made, store


def stood_for(told: dict[str, str], pairs: dict[str, str]) -> set[str]:
    """The stock backends in whose place ours serves some device.

    Args:
        told: backend by device as torch tells it.
        pairs: backend by device that serves it; empty: ours serves all.
    """
    return {
        name for device, name in told.items() if pairs.get(device, backend.NAME) == backend.NAME
    }


def _name_as_asked(c10d: Any, group: Any, asked: Any, told: dict[str, str]) -> None:
    """Let torch tell the name and the devices of the stock backends that ours stands for.

    `ProcessGroup.name()` is the type of the default backend. So ours is registered under the type
    of each stock backend that it replaces, as long as no real one has that type.
    """
    import torch

    pairs = rewrite.parse(c10d._world.pg_backend_config[group])
    set_served(group, pairs)
    _, store = c10d._world.pg_map[group]
    c10d._world.pg_map[group] = (asked, store)
    c10d._world.pg_backend_config[group] = rewrite.join(told)
    ours = next(device for device, name in pairs.items() if name == backend.NAME)
    stock = {name for name in pairs.values() if name != backend.NAME}
    for device, name in told.items():
        # A device that this torch was built without is in stock's list too.
        if pairs.get(device, backend.NAME) == backend.NAME and name not in stock:
            group._register_backend(
                torch.device(device),
                c10d.Backend.backend_type_map[name],
                group._get_backend(torch.device(ours)),
            )
    first = "nccl" if "nccl" in told.values() else next(iter(told.values()))
    # For pairs without NCCL torch has chosen already, by other facts than ours.
    if first == "nccl" or ":" not in str(asked):
        group._set_default_backend(c10d.Backend.backend_type_map[first])


def _sub_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
        token = _in_new_group.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _in_new_group.reset(token)

    return new_group_with_tag
