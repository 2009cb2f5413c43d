"""How `import deepytorch` reaches torch's process groups.

NOTE [the seams] `init_process_group` and `new_group` themselves stay as they are. Everyone may
hold them by `from torch.distributed import init_process_group`, taken before we were imported.
Both look up one inner function each in their module when they are called, with the caller's
arguments not yet interpreted or only just so, and the same in torch 2.11 to 2.15:

* `init_process_group` -> `_new_process_group_helper(..., backend, store, ..., group_desc=
  "default_pg")`. Projects that copy torch's code to make a group with processes outside of the job
  (a trainer and an inference server, say) call this helper too, but without that description:
  what the other side runs is not ours to choose, so theirs is left alone.
* `new_group` -> `_new_group_with_tag(ranks, timeout, backend, ...)`.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from deepytorch_core import adapter, agreement, backend, config, rewrite, stores
from deepytorch_core.console import joined_as, say_once
from deepytorch_core.errors import OFF_SWITCH, AdapterError
from deepytorch_core.patching import Patches

# What the caller had asked for, for default groups that we changed.
_asked_for: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_announced: set[str] = set()
_keep_asked: ContextVar[bool] = ContextVar("keep_asked", default=False)


def install(c10d: ModuleType, patches: Patches) -> None:
    """Rewrite the backend argument of groups that are made from now on.

    Args:
        c10d: the module torch.distributed.distributed_c10d.
        patches: receives what was replaced.
    """
    backend.register()
    patches.replace(c10d, "_new_process_group_helper", lambda original: _helper(c10d, original))
    patches.replace(c10d, "_new_group_with_tag", lambda original: _sub_group(c10d, original))


def machine(c10d: Any) -> rewrite.Machine:
    """What `rewrite` has to know."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return rewrite.Machine(
        accelerator="cpu" if accelerator is None else accelerator.type,
        has_nccl=c10d.is_nccl_available(),
        has_gloo=c10d.is_gloo_available(),
    )


def is_ours(c10d: Any, group: Any) -> bool:
    """Whether some device of this (initialised) group is served by deepytorch."""
    return backend.NAME in str(c10d._world.pg_backend_config.get(group, ""))


def asked_for(group: Any) -> str | None:
    """What was given as backend where we put another one; None where we didn't."""
    return _asked_for.get(group)


def remember(group: Any, asked: str) -> None:
    _asked_for[group] = asked


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


def announce(group_config: str, size: int) -> None:
    """The one line at the start; not again when the same group is set up once more."""
    pairs = rewrite.parse(group_config)
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
        if not ranks and kwargs.get("group_desc") == "default_pg":
            joined_as(group_rank)
            chosen = _choose_default(c10d, asked, kwargs)
        if chosen is not None:
            reason = decide(store, rank=group_rank, size=group_size)
            if reason is not None:
                say_once(f"keeping torch's own collectives: {reason}", level="warning")
            if reason is not None or config.current().collectives == "stock":
                chosen = None
        made, group_store = _make(c10d, original, (*args[:3], chosen or asked, *args[4:]), kwargs)
        if chosen is not None and isinstance(made, c10d.ProcessGroup):
            remember(made, str(asked))
            announce(c10d._world.pg_backend_config[made], group_size)
        return made, group_store

    return new_process_group_helper


def _choose_default(c10d: Any, asked: Any, kwargs: dict[str, Any]) -> str | None:
    if _torchcomms(c10d):
        return None
    if kwargs.get("enable_reconfigure"):
        return None  # torch's elastic groups change their ranks; only stock backends can
    return rewrite.default_group(str(asked), machine(c10d))


def _torchcomms(c10d: Any) -> bool:
    enabled = getattr(c10d, "_use_torchcomms_enabled", None)
    return enabled is not None and bool(enabled())


def _make(
    c10d: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Call torch's helper; if the group is ours see to its timeout, name and default backend."""
    asked = str(args[3])
    if backend.NAME not in asked:
        result: tuple[Any, Any] = original(*args, **kwargs)
        return result
    # By identity: the same value given explicitly is another object, and wins.
    defaults = (c10d.default_pg_timeout, getattr(c10d, "default_pg_nccl_timeout", None))
    if any(kwargs.get("timeout") is default for default in defaults):
        kwargs = {**kwargs, "timeout": backend.default_timeout()}
    with backend.final_timeout():
        made, store = original(*args, **kwargs)
    if isinstance(made, c10d.ProcessGroup) and made in c10d._world.pg_map:
        _name(c10d, made)
        backend.describe(made)
        backend.tell_devices(made, rewrite.parse(c10d._world.pg_backend_config[made]))
    return made, store


def _name(c10d: Any, group: Any) -> None:
    """Make `get_backend()` say "deepytorch" and torch find the group's default backend.

    torch names a group by the argument, so it would say "cuda:deepytorch" where it says "nccl" for
    a group of "cuda:nccl". `get_backend_config()` still tells the devices.
    """
    name, store = c10d._world.pg_map[group]
    pairs = rewrite.parse(c10d._world.pg_backend_config[group])
    others = {backend_name for backend_name in pairs.values() if backend_name != backend.NAME}
    # Plain "gloo" became "cpu:deepytorch,cuda:gloo" where there are GPUs.
    if not others or (others == {"gloo"} and pairs.get("cuda") == "gloo"):
        name = c10d.Backend(backend.NAME)
    c10d._world.pg_map[group] = (name, store)
    if "nccl" not in others:
        group._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)


def _sub_group(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group_with_tag(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        default = c10d._get_default_group()
        # Only under a default group of ours have all ranks agreed.
        if is_ours(c10d, default) and not _torchcomms(c10d) and not _keep_asked.get():
            chosen = rewrite.sub_group(
                None if backend is None else str(backend),
                machine(c10d),
                default_config=c10d._world.pg_backend_config[default],
                default_asked=asked_for(default),
            )
            backend = chosen or backend
        return original(ranks, timeout, backend, *args, **kwargs)

    return new_group_with_tag
