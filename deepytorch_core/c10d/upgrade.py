"""Put deepytorch under groups that exist already, and take it away again.

A torch ProcessGroup holds one backend for each device type and hands every operation to it. In
place of the stock backend of a device we register ours, which has that stock backend as its
delegate: tensors, names and references to the group stay valid.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from deepytorch_core.base import config
from deepytorch_core.base.console import say_once
from deepytorch_core.c10d import adapter, rewrite
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.c10d.backend import (
    NAME,
    core_settings,
    describe,
    join,
    longest,
    note_group,
    tell_devices,
    timeout_of,
    watches,
)
from deepytorch_core.c10d.delegates import GroupSpec, own_client
from deepytorch_core.hang import live


@dataclass
class _Upgraded:
    """The state of a group before; `ours` is kept because torch has one slot for it, once."""

    config: str
    ours: Any
    active: bool = True


_upgraded: weakref.WeakKeyDictionary[Any, _Upgraded] = weakref.WeakKeyDictionary()


def upgrade_existing(c10d: Any) -> str | None:
    """Upgrade the default group and its sub-groups, on all ranks or none.

    Returns why not, after a line that says so; None when they are ours now, or shall not be.
    """
    default = c10d.GroupMember.WORLD
    if default is None or c10d_patches.is_ours(c10d, default):
        return None
    stock = config.current().collectives == "stock"
    name = str(c10d._world.pg_map[default][0])
    machine = c10d_patches.machine(c10d)
    new_config = _new_config(c10d, default, machine)
    if new_config is None:
        reason: str | None = None if stock else _why_not(c10d, default)
    else:
        store = c10d._world.pg_map[default][1]
        reason = c10d_patches.decide(store, rank=default.rank(), size=default.size())
    if stock and reason is None:
        return None
    if new_config is None or reason is not None:
        reason = f"the group made before keeps {name}: {reason}"
        say_once(reason, level="warning")
        return reason
    for group in list(c10d._world.pg_map):
        group_name = str(c10d._world.pg_map[group][0])
        # Sub-groups asked for otherwise than the default group: as for new ones (rewrite).
        if group is not default and group_name == "gloo" and name != "gloo":
            continue
        planned = _new_config(c10d, group, machine)
        if planned is not None:
            _upgrade(c10d, group, planned)
    c10d_patches.announce(c10d_patches.served(c10d, default), default.size())
    return None


def _why_not(c10d: Any, group: Any) -> str:
    if type(group) is not c10d.ProcessGroup:
        return "it is no plain torch process group"
    pairs = rewrite.parse(c10d._world.pg_backend_config[group])
    return rewrite.why_not_beside({**pairs, "deepytorch's": NAME}) or (
        "only gloo for cpu and nccl for cuda can be replaced"
    )


def downgrade_all(c10d: Any) -> None:
    """Give upgraded groups that still exist their stock backends back."""
    for group, record in list(_upgraded.items()):
        if not record.active or group not in c10d._world.pg_map:
            continue
        import torch

        for device, name in rewrite.parse(record.config).items():
            kind = c10d.Backend.backend_type_map[name]
            # torch still holds the old backend under its type and takes that.
            group._register_backend(torch.device(device), kind, record.ours)
        c10d_patches.set_served(group, None)
        record.ours.leave()
        record.active = False


def num_groups_made_as_ours(c10d: Any) -> int:
    """Groups that were created with our backend, so have no other to go back to."""
    return sum(c10d_patches.is_ours(c10d, group) for group in c10d._world.pg_map)


def _new_config(c10d: Any, group: Any, machine: rewrite.Capabilities) -> str | None:
    if type(group) is not c10d.ProcessGroup:
        return None
    if c10d_patches.is_ours(c10d, group):
        return None
    return rewrite.upgraded(c10d._world.pg_backend_config[group], machine)


def _upgrade(c10d: Any, group: Any, new_config: str) -> None:
    import torch

    told = c10d._world.pg_backend_config[group]
    pairs = rewrite.parse(new_config)
    devices = [device for device, kind in pairs.items() if kind == NAME]
    record = _upgraded.get(group)
    if record is None:
        stock = {device: group._get_backend(torch.device(device)) for device in devices}
        names = c10d_patches.stood_for(rewrite.parse(told), pairs)
        record = _Upgraded(told, _adapter_over(c10d, group, stock, name=max(names)))
        _upgraded[group] = record
    else:
        record.ours.rejoin()
        if group is c10d.GroupMember.WORLD:
            config.renew()
            live.rouse()
    # torch keeps these in the backends, and asks whichever comes first.
    group_name, description = group.group_name, group.group_desc
    for device in devices:
        group._register_backend(
            torch.device(device), c10d.ProcessGroup.BackendType.CUSTOM, record.ours
        )
    tell_devices(group, pairs)
    group._set_group_name(group_name)
    group._set_group_desc(description)
    describe(group)
    # Names stay: programs branch on them. So does the type of the default backend, by which torch
    # names the group; operations go by device.
    c10d_patches.set_served(group, pairs)
    record.active = True


def _adapter_over(c10d: Any, group: Any, stock: dict[str, Any], *, name: str) -> Any:
    module = adapter.load()
    store = c10d.PrefixStore("deepytorch/upgrade/", group.get_group_store())
    closed = None
    if group is c10d.GroupMember.WORLD:
        closed = join(store, rank=group.rank(), size=group.size())
    options = config.current()
    note_group(group.group_name, group.size())
    spec = GroupSpec(
        store=own_client(module, store),
        rank=group.rank(),
        size=group.size(),
        # The group's own, even if it is torch's default: whether it was given is not recorded.
        timeout=longest(timeout_of(backend) for backend in stock.values()),
        name=group.group_name,
        global_ranks=c10d.get_process_group_ranks(group),
    )
    return module.create_backend(
        spec.store,
        spec.rank,
        spec.size,
        timeout=spec.timeout,
        group_name=spec.name,
        global_ranks=spec.global_ranks,
        delegates=lambda device_type, limit_s=0.0: stock[device_type],  # there already
        closed=closed,
        native=True,
        name=name,
        **core_settings(options),
        **watches(spec, options=options),
    )
